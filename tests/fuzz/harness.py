"""
Inputs are tried in a process that may hang, abort or start others, and this is who watches it.

A worker has a namespace of its own for processes, where the system allows it, and else a session: it ends whole, also
where whoever watches is killed. What one input does to it is a find, and the next worker goes on.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.fuzz.outcome import Outcome

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases"
MOST_CASE_BYTES = 4096
SECONDS_TO_START, SECONDS_FOR_AN_INPUT, SECONDS_BETWEEN_COUNTS = 120.0, 10.0, 0.1
MOST_PROCESSES = 60
"""Of a worker and all that its input has started."""
EXAMPLES_AT_ONCE = 200
FINDS_OF_A_TARGET = 40
"""So many different ones, and a target is left: it is broken, and not just here and there."""
SECONDS_TO_REDUCE = 10.0
"""For one find, besides the last try."""


@dataclass(frozen=True)
class Find:
    target: str
    data: bytes
    outcome: Outcome

    def keep(self) -> Path:
        """Write the input where tests take it from."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.outcome.where)[:60].strip("-").lower()
        file = CASES / self.target / f"{self.outcome.kind}-{words}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self.data)
        return file


@dataclass
class Tally:
    """What became of the inputs of a target."""

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    finds: dict[tuple[str, str], Find] = field(default_factory=dict)
    """The smallest input of each kind and place."""
    seconds: float = 0.0
    peak_bytes: int = 0

    def add(self, data: bytes, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        known = self.finds.get(outcome.signature)
        if outcome.is_find and (known is None or len(data) < len(known.data)):
            self.finds[outcome.signature] = Find(self.target, data, outcome)

    @property
    def inputs(self) -> int:
        return sum(self.counts.values())


@cache
def isolation() -> tuple[str, ...]:
    """What a worker is started with: a namespace for processes that dies with this one; nothing where none may be."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    words = ("setpriv", "--pdeathsig", "KILL", "unshare", *user, "--pid", "--mount-proc", "--fork", "--kill-child")
    try:
        works = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    return words if works else ()


class Worker:
    """A process that tries inputs, and another one after one that it did not survive."""

    def __init__(self, seconds_for_an_input: float = SECONDS_FOR_AN_INPUT) -> None:
        self._seconds = seconds_for_an_input
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._held = b""
        self.peak_bytes = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def one(self, target: str, data: bytes) -> Outcome:
        """What becomes of one input."""
        job = {"target": target, "input": base64.b64encode(data).decode()}
        return [outcome for _, outcome in self._work(job)][-1]

    def several(self, target: str, seed: int, examples: int) -> Iterator[tuple[bytes, Outcome]]:
        """What becomes of inputs, up to one that ends the process; with the bytes of those that are finds."""
        return self._work({"target": target, "seed": seed, "examples": examples})

    def end(self) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        everyone = [self._process.pid, *descendants(self._process.pid)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in [] if isolation() else everyone:  # those in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._answers, theirs = os.pipe()
        self._held = b""
        command = [*isolation(), sys.executable, "-m", "tests.fuzz.worker", str(self._folder), str(theirs)]
        words = {"TMPDIR": str(self._folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        words |= {"BLOOMERY_CACHE": str(self._folder / "cache"), "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        with (self._folder / "printed").open("wb") as printed:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                pass_fds=[theirs],
                cwd=ROOT,
                env={**os.environ, **words},
                start_new_session=True,
            )
        os.close(theirs)
        return self._process

    def _work(self, job: Mapping[str, object]) -> Iterator[tuple[bytes, Outcome]]:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        began = False
        while True:
            found = self._answer(self._seconds if began else SECONDS_TO_START)
            if isinstance(found, Outcome):
                self.end()
                if not began:
                    raise RuntimeError(f"the worker broke before its first input: {found.what}")
                yield (self._folder / "input").read_bytes(), found
                return
            if "end" in found:
                return
            began = "begin" in found
            if not began:
                data = base64.b64decode(found.pop("data", ""))
                outcome = Outcome(**found)
                yield data, outcome
                if outcome.kind == "memory":
                    self.end()  # the next input begins with little
                    return

    def _answer(self, seconds: float) -> dict[str, str] | Outcome:
        """The next line of the worker, or what happened instead."""
        assert self._process is not None
        end = time.monotonic() + seconds
        counted = 0.0
        while b"\n" not in self._held:
            ready, _, _ = select.select([self._answers], [], [], SECONDS_BETWEEN_COUNTS)
            if ready:
                piece = os.read(self._answers, 2**16)
                if not piece:
                    return self._aborted()
                self._held += piece
            if (now := time.monotonic()) - counted > SECONDS_BETWEEN_COUNTS:
                counted, running = now, descendants(self._process.pid)
                self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, running)))
                if len(running) > MOST_PROCESSES:
                    return Outcome("processes", f"more than {MOST_PROCESSES} processes", "many processes")
            if now > end:
                return Outcome("hang", f"no end after {seconds:.0f} s", "hang")
        line, _, self._held = self._held.partition(b"\n")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _aborted(self) -> Outcome:
        assert self._process is not None
        code = self._process.wait()
        printed = (self._folder / "printed").read_bytes().decode(errors="replace").strip()
        last = printed.splitlines()[-1][:300] if printed else ""
        return Outcome("abort", f"the process ended with {code}: {printed[-1500:]}", f"abort {last[:60]}")


def descendants(pid: int) -> list[int]:
    """Living processes below one, as the system lists them. Threads may end while they are looked at."""
    found: list[int] = []
    for file in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


def resident_bytes(pid: int) -> int:
    try:
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def fuzz(target: str, seed: int, *, inputs: int | None = None, seconds: float | None = None) -> Tally:
    """Try so many inputs of a target, or for so long. Inputs follow from the seed."""
    tally, began = Tally(target), time.monotonic()
    with Worker() as worker:
        batch = 0
        while len(tally.finds) < FINDS_OF_A_TARGET:
            left = EXAMPLES_AT_ONCE if inputs is None else min(EXAMPLES_AT_ONCE, inputs - tally.inputs)
            if left <= 0 or (seconds is not None and time.monotonic() - began >= seconds):
                break
            for data, outcome in worker.several(target, 1_000_003 * seed + batch, left):
                tally.add(data, outcome)
                if seconds is not None and time.monotonic() - began >= seconds:
                    worker.end()
                    break
            batch += 1
        tally.peak_bytes = worker.peak_bytes
    tally.seconds = time.monotonic() - began
    return tally


def smaller(find: Find) -> Find:
    """The same fault of fewer bytes: pieces are left out while it stays."""
    with Worker() as worker:

        def same(data: bytes) -> bool:
            return worker.one(find.target, data).signature == find.outcome.signature

        return Find(find.target, reduced(find.data, same, SECONDS_TO_REDUCE), find.outcome)


def reduced(data: bytes, same: Callable[[bytes], bool], seconds: float) -> bytes:
    """Data without the pieces that `same` does not need, first half of it and then less."""
    size, end = len(data) // 2, time.monotonic() + seconds
    while size:
        at = 0
        while at < len(data):
            if time.monotonic() > end:
                return data
            without = data[:at] + data[at + size :]
            if same(without):
                data = without
            else:
                at += size
        size //= 2
    return data
