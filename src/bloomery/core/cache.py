"""
The cache of this machine for all runs: records, and hashes of files until they change.

Nothing in the cache is needed: a note that is missing, or cannot be read, is made again.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.log import info
from bloomery.core.records import read_record

if sys.platform != "win32":
    import fcntl

QUICKLY_HASHED = 2**20
"""Bytes of a file whose hash is not worth a note."""
SLOWLY_HASHED = 2**30
"""Bytes of a file whose hashing takes long enough for a log line."""
MOST_WATCHED = 20_000
"""Files and folders whose state is compared in place of their content: so many take a tenth of a second."""
SETTLED_NANOSECONDS = 2 * 10**9
"""After a change: until then another one may leave the same times, as file systems count them in steps."""


T = TypeVar("T")


class NotedHash(TypedDict):
    """The hash of a file, and its size, inode and times when it had that."""

    state: list[int]
    sha256: str


def root() -> Path:
    return core_io.cache_root(os.environ)


def load_note(path: Path, kind: Callable[..., T]) -> T | None:
    """The record that was noted in the cache, or None where none of its kind can be read: it is made again."""
    try:
        return read_record(path, kind)
    except RunError:
        return None


def save_note(path: Path, value: Any) -> None:
    """Note a JSON value in the cache, for other processes too."""
    with locked(path):
        core_io.write_json(path, value)


def sha256_of(path: Path) -> str:
    """
    The sha256 of all of a file. That of a large one is noted, and holds until anything touches the file: content,
    owner, rights or number of links. No program can set the time of that back. A note that cannot be read is none.
    """
    began, before = time.time_ns(), _state(path)
    if before[0] < QUICKLY_HASHED:
        return core_io.sha256_file(path)
    note_path = root() / "hashes" / f"{core_io.sha256_bytes(os.fsencode(path.resolve()))}.json"
    note = load_note(note_path, NotedHash)
    if note is not None and note["state"] == before:
        return note["sha256"]
    if before[0] >= SLOWLY_HASHED:
        info(f"{path} is hashed: {before[0] / 2**30:,.1f} GiB, of which the cache has no note", style="dim")
    hashed = core_io.sha256_file(path)
    if _state(path) == before and max(before[2:]) + SETTLED_NANOSECONDS < began:
        try:
            save_note(note_path, {"state": before, "sha256": hashed})
        except (RunError, OSError) as error:
            info(f"every start hashes {path} again, because its hash cannot be saved: {error}", style="yellow")
    return hashed


def watchable(paths: Sequence[Path], exact: Sequence[Path] = ()) -> list[str] | None:
    """
    Every file and folder at and below these paths, which may hold wildcards, and the `exact` ones. None where they are
    too many, or a link leads to a folder: then their state is not known soon.
    """
    names = dict.fromkeys(map(str, exact))
    for path in map(_without_wildcards, paths):
        names[str(path)] = None
        for folder, folders, files in os.walk(path):
            if any(os.path.islink(os.path.join(folder, name)) for name in folders):
                return None
            names |= dict.fromkeys(os.path.join(folder, name) for name in (*folders, *files))
            if len(names) > MOST_WATCHED:
                return None
    return list(names)


def _without_wildcards(path: Path) -> Path:
    """The innermost folder on the way to a path that is not chosen by a pattern."""
    path = path.expanduser().absolute()
    patterns = [part for part in (path, *path.parents) if any(letter in part.name for letter in "*?[")]
    return patterns[-1].parent if patterns else path


def state_of(names: Sequence[str]) -> tuple[str, int]:
    """
    A hash over size, inode and times of files and folders, which changes with anything in them; and the time of the
    newest change, in nanoseconds.
    """
    states = [_state(Path(name)) if os.path.exists(name) else [] for name in names]
    newest = max((time_ns for state in states for time_ns in state[2:]), default=0)
    return core_io.sha256_bytes(core_io.canonical([*zip(names, states, strict=True)])), newest


def _state(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]


def changed(folder: Path, hashes: Mapping[str, str]) -> str:
    """
    Which file below a folder is gone or has another sha256 than these, as "NAME is gone", or "". A noted hash that
    differs is not believed: the file is read again.
    """
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} {core_io.missing(file)}"
        if sha256_of(file) != expected and core_io.sha256_file(file) != expected:
            return f"{name} has another sha256"
    return ""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    Lock a path of the cache for this process; other processes wait. The lock ends with its process.

    On Windows nothing is locked.
    """
    lock = path.with_name(path.name + ".lock")
    with core_io.disk_errors(lock):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("ab")
    with handle:
        if sys.platform != "win32":
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                info(f"waiting for another process that writes {path.name}", style="dim")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
