"""
Opens third-party Parquet files in a child process first: Arrow aborts on some damaged files, uncatchable in Python.

One child serves all files of this process, with bounded memory and time for each file. An error names the file that
ends the child, and the next file gets a new child. The cache records files that passed until they change. Workers and
later runs need no child for them.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import IO

from bloomery.core import child, extras
from bloomery.core import io as core_io
from bloomery.core.cache import SETTLED_NANOSECONDS, root
from bloomery.core.extras import pa, pq

if sys.platform != "win32":
    import resource

MAX_SECONDS = 20.0
"""For one file, whose footer is read in a millisecond."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Of addresses, of which Arrow reserves more than it uses. Linux alone enforces it."""
MAX_NOTES, MAX_SHOWN = 100_000, 200


def problem(path: Path) -> str:
    """Why a parquet file must not be opened in this process, or "". What Arrow itself refuses is no such reason."""
    return problems([path]).get(path, "")


def problems(paths: Iterable[Path]) -> dict[Path, str]:
    """The same of many files; those without a problem are left out."""
    reasons: dict[Path, str] = {}
    with _lock:
        survived = []
        for path in paths:
            state = _state(path)
            if not state or state in _noted():
                continue
            if reason := _opener.reason(path):
                reasons[path] = reason
            elif state == _state(path):
                survived.append(state)
        _note(survived)
    return reasons


_lock = threading.Lock()
"""Of the child, whose answers come in the order of what it is asked."""


def _state(path: Path) -> str:
    """What changes when a file does; "" for one that is not there, which its reader reports."""
    try:
        facts = path.stat()
    except OSError:
        return ""
    named = core_io.sha256_bytes(os.fsencode(path.absolute()))[:16]
    times = f"{facts.st_mtime_ns} {facts.st_ctime_ns}"
    return f"{named} {facts.st_size} {facts.st_dev}:{facts.st_ino} {times} {pa.__version__}"


def _notes() -> Path:
    return root() / "parquet-survived.txt"


@lru_cache(maxsize=1)
def _noted() -> set[str]:
    """The states of files that some process has opened. A torn line is the state of no file."""
    try:
        lines = _notes().read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) > MAX_NOTES:
            lines = lines[-MAX_NOTES // 2 :]
            with core_io.whole_file(_notes(), "w") as file:
                file.writelines(f"{line}\n" for line in lines)
    except OSError:
        return set()
    return set(lines)


def _note(survived: list[str]) -> None:
    """Note states for other processes too, but for files that have just changed and may do so within the same time."""
    _noted().update(survived)
    settled = time.time_ns() - SETTLED_NANOSECONDS
    lines = [f"{state}\n" for state in survived if max(map(int, state.split()[3:5])) < settled]
    if not lines:
        return
    try:
        _notes().parent.mkdir(parents=True, exist_ok=True)
        with _notes().open("ab") as file:
            file.write("".join(lines).encode())
    except OSError:  # a cache that cannot be written costs a child in the next process, and nothing else
        return


class _Child:
    """A process that opens files."""

    def __init__(self) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        code = "from bloomery.data.isolated import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)},
        )
        self._late = False
        self._answer(MAX_SECONDS + 60)  # a busy machine may need long to start it

    def reason(self, path: Path) -> str:
        """Why a file cannot be opened, or ""; how this child ended where it did."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(os.fspath(path.absolute())).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answer(MAX_SECONDS)
        except BrokenPipeError:
            line = b""
        return str(json.loads(line)) if line else self._death()

    def _answer(self, seconds: float) -> bytes:
        """The next line that the child writes; b"" where it ends before, or is ended after so many seconds."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._end_late)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()

    def _death(self) -> str:
        code = self._process.wait()
        if self._late:
            return f"keeps Arrow busy for more than {MAX_SECONDS:g} s"
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
        why = f": {lines[-1].removeprefix('what():').strip()[:MAX_SHOWN]}" if lines else ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"makes Arrow abort ({how}){why}"

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


class _Opener:
    """Asks one child after the other."""

    child: _Child | None = None

    def reason(self, path: Path) -> str:
        """Why a file cannot be opened, or "". A child that ended is not held against a file before a new one does."""
        for _ in range(2):
            fresh = self.child is None or not self.child.lives
            if fresh:
                self.end()
                self.child = _Child()
            assert self.child is not None
            if not (reason := self.child.reason(path)) or fresh:
                break
        return reason

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
        self.child = None


_opener = _Opener()
atexit.register(_opener.end)


def serve() -> None:
    """What the child does: open each file that it is asked about, and answer why it cannot be."""
    child.die_with(int(sys.argv[1]))
    extras.load("pyarrow.parquet")  # before the limit: only what a file asks for counts
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print('""', flush=True)
    for line in sys.stdin:
        print(json.dumps(_open(Path(json.loads(line)))), flush=True)


def _open(path: Path) -> str:
    """Touch all that a reader asks of a footer. What Arrow refuses with an error is refused there once more."""
    try:
        with pq.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    names.append(f"{column.path_in_schema} {column.total_compressed_size}")
    except MemoryError:
        return f"asks for more memory than {MAX_MEMORY_BYTES / 2**30:g} GiB before a row is read"
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError):
        return ""
    return ""
