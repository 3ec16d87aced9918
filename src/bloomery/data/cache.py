"""
Where downloaded files are kept: one folder for all runs, each file under the name of its content, whole or begun.

    $BLOOMERY_CACHE or ~/.cache/bloomery
      blobs/ab/sha256-ab12….parquet            a file, whole and checked
      blobs/ab/sha256-ab12….parquet.partial    one that is begun, and beside it .from.json: where its bytes came from
      hub/OWNER--NAME/                         which commit a revision was, and the files of that commit
      addresses/                               what a plain address last said about its file
      hashes/                                  sha256 of large files that lie elsewhere on this machine, as they were

Nothing in it is needed: what is missing is downloaded again. Nothing is removed from it by a run.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from bloomery.core import files
from bloomery.core.errors import RunError
from bloomery.core.log import say

if sys.platform != "win32":
    import fcntl

LONGEST_SUFFIXES = 24
QUICKLY_HASHED = 2**20
"""Bytes of a file whose hash is not worth a note."""
SLOWLY_HASHED = 2**30
"""Bytes of a file that takes long enough to be told of."""
SETTLED_NANOSECONDS = 2 * 10**9
"""After a change: until then another one may leave the same times, as file systems count them in steps."""


class Content(NamedTuple):
    """
    What a file's content is called before it is downloaded.

    `sha256` and `git` (the name of a blob in git: sha1 over a header and the bytes) can be checked afterwards; `etag`
    is a hash of an address and of the version that its server names, and is only as good as that server.
    """

    kind: Literal["sha256", "git", "etag"]
    value: str


def root() -> Path:
    """The cache folder."""
    return files.cache_root(os.environ)


def place(content: Content, name: str) -> Path:
    """Where a file of this content is, or will be. It keeps the suffixes of `name`, which say its format."""
    suffixes = "".join(PurePosixPath(name).suffixes)[-LONGEST_SUFFIXES:]
    return root() / "blobs" / content.value[:2] / f"{content.kind}-{content.value}{suffixes}"


def dataset_folder(dataset: str) -> Path:
    return root() / "hub" / dataset.replace("/", "--")


def known(path: Path) -> Any:
    """The JSON value that was noted in the cache, or None where nothing whole is there."""
    try:
        return files.read_json(path)
    except (FileNotFoundError, ValueError):
        return None


def note(path: Path, value: Any) -> None:
    """Note a JSON value in the cache, for other processes too."""
    with locked(path):
        files.write_json(path, value)


def sha256_of(path: Path) -> str:
    """
    The sha256 of all of a file. That of a large one is noted, and holds until anything touches the file: content,
    owner, rights or number of links. No program can set the time of that back. A note that cannot be read is none.
    """
    began, before = time.time_ns(), _state(path)
    if before[0] < QUICKLY_HASHED:
        return files.sha256_file(path)
    place = root() / "hashes" / f"{files.sha256_bytes(os.fsencode(path.resolve()))}.json"
    try:
        found = known(place)
    except (OSError, RecursionError):
        found = None
    if isinstance(found, dict) and found.get("state") == before and isinstance(found.get("sha256"), str):
        return str(found["sha256"])
    if before[0] >= SLOWLY_HASHED:
        say(f"{path} is hashed: {before[0] / 2**30:,.1f} GiB, of which the cache has no note", style="dim")
    hashed = files.sha256_file(path)
    if _state(path) == before and max(before[2:]) + SETTLED_NANOSECONDS < began:
        try:
            note(place, {"state": before, "sha256": hashed})
        except (RunError, OSError) as error:
            say(f"{path} is hashed at every start, as its hash cannot be noted: {error}", style="yellow")
    return hashed


def _state(path: Path) -> list[int]:
    facts = path.stat()
    return [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]


def append(file: FileIO, data: bytes) -> None:
    """
    Write all of the bytes at once, so that a process that is killed has left what it was given.

    Raises RunError where the disk is full.
    """
    rest = memoryview(data)
    with files.disk_errors(Path(str(file.name))):
        while rest:
            rest = rest[file.write(rest) :]  # a disk that gets full takes a part, and then raises


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """
    Hold a place in the cache for this process; another one waits. The lock goes with its process.

    On Windows nothing is held.
    """
    lock = path.with_name(path.name + ".lock")
    with files.disk_errors(lock):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("ab")
    with handle:
        if sys.platform != "win32":
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that writes {path.name}", style="dim")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
