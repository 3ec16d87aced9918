"""
What of a folder, or which file, was copied here from another machine: see hw/copies.py.

The record lies next to the folder, so that nothing in the folder differs from the original:

    runs/demo/10-finetune-12ad09c8/              copies
    runs/demo/.10-finetune-12ad09c8.copied.json  their record
"""

from pathlib import Path

from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.records import read_record


class CopyRecord(TypedDict):
    """What is recorded of the copies at or below a path."""

    host: str
    """Where the originals are."""
    files: dict[str, list[int]]
    """
    Name below the folder ("" for a file itself) -> bytes, and modification times of the original and of the copy. While
    a copy is being replaced, bytes and time of the one before follow.
    """


def record_of(path: Path) -> Path:
    """Where the record of copies at or below a path is."""
    return path.with_name(f".{path.name}.copied.json")


def read(path: Path) -> CopyRecord:
    """The record, with no files where nothing was copied. Raises RunError for a damaged one."""
    file = record_of(path)
    return read_record(file, CopyRecord) if file.is_file() else {"host": "", "files": {}}


def is_unchanged(path: Path, name: str, record: CopyRecord) -> bool:
    """Whether a file is still what was copied."""
    known, file = record["files"].get(name), path / name
    return known is not None and file.is_file() and facts(file) in ([known[0], known[2]], known[3:])


def facts(file: Path) -> list[int]:
    """Bytes and modification time of a file, in nanoseconds."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def check_original(folder: Path) -> None:
    """Raises RunError for a folder of copies: the newest checkpoints are then on another machine."""
    record = read(folder)
    host, names = record["host"], record["files"]
    if host and folder.exists() and (not names or any(is_unchanged(folder, name, record) for name in names)):
        what = f"holds copies of files on {host}, where the newest checkpoints are"
        hint = f"Run it on {host}, or list {host} first. To continue from these copies, remove {record_of(folder)}."
        raise RunError(what, where=str(folder), hint=hint)


def write(path: Path, record: CopyRecord) -> None:
    """Keep a record. One without files marks a folder whose originals are still to be made."""
    core_io.write_json(record_of(path), record)
