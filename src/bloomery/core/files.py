"""
Files that are either whole or absent, and the hashes that name their content.

Everything that a run leaves behind goes through `whole_file`: bytes go to NAME.partial, are flushed to the
disk, and only then take their name. A process that dies in between leaves a .partial file, which nothing reads.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bloomery.core.errors import RunError

PARTIAL = ".partial"
MANIFEST = "manifest.json"
"""Written last into a folder; it lists the other files as `listing` does."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """
    Raises RunError where the block cannot write `path`: the disk, a quota or a limit on files is full, or the system
    does not let it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_RIGHT:
            cure = "Give yourself the right to it, or name another folder."
            raise RunError(os.strerror(error.errno), where=str(error.filename or path), cure=cure) from None
        if error.errno not in NO_ROOM:
            raise
        folder = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(folder).free / 2**20
        what = f"cannot be written: {os.strerror(error.errno)}. Its file system has {free:,.1f} MiB free"
        cure = "Free some space and run the same command again: finished parts are kept."
        if error.errno == errno.EFBIG:
            cure = f"A limit on the size of files stands in the way (`ulimit -f`, FAT32). {cure}"
        raise RunError(what, where=str(path), cure=cure) from None


@contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """
    Open a file for writing that appears at `path` only when the block ends without an error.

    Raises RunError where it cannot be written.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        try:
            encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
            with partial.open(mode, encoding=encoding, newline=newline) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can (POSIX)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write JSON as a whole file, its keys in the order given."""
    with whole_file(path, "w") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def canonical(value: Any) -> bytes:
    """The one byte string that stands for a JSON value, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256 of every finished file below a folder, but for its manifest."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if name != MANIFEST and not any(part.endswith(PARTIAL) for part in name.split("/")):
            found[name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    return found


def damage(folder: Path, listed: Mapping[str, Mapping[str, Any]], *, thorough: bool = False) -> str:
    """Which file below a folder is not as it was listed, and how, or "". `thorough` also compares sha256."""
    for name, facts in listed.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is gone"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if thorough and sha256_file(file) != facts["sha256"]:
            return f"{name} has another sha256"
    return ""


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder of what can be had again and is kept for all runs: $BLOOMERY_CACHE or ~/.cache/bloomery."""
    return Path(env.get("BLOOMERY_CACHE") or "~/.cache/bloomery").expanduser()
