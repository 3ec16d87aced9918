"""
Where downloaded files are kept: one folder for all runs, each file under the name of its content, whole or begun.

    $BLOOMERY_CACHE or ~/.cache/bloomery
      blobs/ab/sha256-ab12….parquet            a file, whole and checked
      blobs/ab/sha256-ab12….parquet.partial    one that is begun, and beside it .from.json: where its bytes came from
      hub/OWNER--NAME/                         which commit a revision was, and the files of that commit
      addresses/                               what a plain address last said about its file
      hashes/                                  sha256 of large files of this machine, as they were (core/cache.py)

Nothing in it is needed: what is missing is downloaded again. Nothing is removed from it by a run.
"""

from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from bloomery.core import files
from bloomery.core.cache import known as known
from bloomery.core.cache import locked as locked
from bloomery.core.cache import note as note
from bloomery.core.cache import root as root

LONGEST_SUFFIXES = 24


class Content(NamedTuple):
    """
    What a file's content is called before it is downloaded.

    `sha256` and `git` (the name of a blob in git: sha1 over a header and the bytes) can be checked afterwards; `etag`
    is a hash of an address and of the version that its server names, and is only as good as that server.
    """

    kind: Literal["sha256", "git", "etag"]
    value: str


def place(content: Content, name: str) -> Path:
    """Where a file of this content is, or will be. It keeps the suffixes of `name`, which say its format."""
    suffixes = "".join(PurePosixPath(name).suffixes)[-LONGEST_SUFFIXES:]
    return root() / "blobs" / content.value[:2] / f"{content.kind}-{content.value}{suffixes}"


def dataset_folder(dataset: str) -> Path:
    return root() / "hub" / dataset.replace("/", "--")


def append(file: FileIO, data: bytes) -> None:
    """
    Write all of the bytes at once, so that a process that is killed has left what it was given.

    Raises RunError where the disk is full.
    """
    rest = memoryview(data)
    with files.disk_errors(Path(str(file.name))):
        while rest:
            rest = rest[file.write(rest) :]  # a disk that gets full takes a part, and then raises
