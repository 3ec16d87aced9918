"""
Atomic file writes, safe reads of files and JSON, and hashes of content.

Every file is either complete or absent. Everything that a run leaves behind goes through `whole_file`. It writes
bytes to NAME.partial, flushes them to the disk, and only then renames the file. A process that dies in between
leaves a .partial file, which nothing reads.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, TypeVar

from bloomery.core.errors import DataError, RunError

SPECIAL = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)
KERNEL_FOLDERS = ("/proc", "/sys", "/dev")
"""What lies in them is made while it is read, and need not end."""
SHARED_MEMORY = "/dev/shm"
"""The folder of /dev that holds plain files."""
MAX_ENTRIES = 5_000_000
"""Files and folders that a walk looks at: more is a disk, and no data set."""

PARTIAL = ".partial"
MANIFEST = "manifest.json"
"""Written last into a folder; it lists the other files as `listing` does."""

MAX_JSON_BYTES = 64 * 2**20
"""Of a JSON file that is read at once: an index of the weights of the largest open models has a sixth of it."""
MAX_JSON_DEPTH = 100
"""Of lists and objects in each other. Python itself gives up at 1,000, wherever that happens to be noticed."""
MAX_INTEGER_DIGITS = 20
"""Enough for any integer of 64 bits."""
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_INTEGER_DIGITS + 1}}}")

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""What Linux takes: NAME_MAX, and PATH_MAX without the NUL behind it."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


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
            hint = "Change its permissions, or choose another folder."
            raise RunError(os.strerror(error.errno), where=str(error.filename or path), hint=hint) from None
        if error.errno not in NO_ROOM:
            raise
        folder = nearest_folder(path.parent)
        free = shutil.disk_usage(folder).free / 2**20
        what = f"cannot be written: {os.strerror(error.errno)}. Its file system has {free:,.1f} MiB free"
        hint = "Free some space and run the same command again. Finished parts are kept."
        if error.errno == errno.EFBIG:
            hint = f"A limit on file size applies (`ulimit -f`, or FAT32): raise it, or use another disk. {hint}"
        if error.errno == errno.ENOSPC and _inodes_are_used_up(folder):
            what = f"cannot be written: its file system has no inodes left for new files, and {free:,.1f} MiB free"
            hint = "Remove files of any size there and run the same command again. Finished parts are kept."
        raise RunError(what, where=str(path), hint=hint) from None


def _inodes_are_used_up(folder: Path) -> bool:
    """Whether a file system counts inodes, and has none for this user. Always false on Windows."""
    if not hasattr(os, "statvfs"):
        return False
    facts = os.statvfs(folder)
    return facts.f_files > 0 and facts.f_favail == 0


@contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """
    Open a file for writing that appears at `path` only when the block ends without an error.

    Raises RunError where it cannot be written.
    """
    with whole_path(path) as partial:
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
        with open(partial, mode, encoding=encoding, newline=newline, opener=open_own) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """As `whole_file`, for a library that opens the file itself: yields the path to write to until the block ends."""
    with disk_errors(path):
        make_folder(path.parent)
        partial = path.with_name(path.name + PARTIAL)
        try:
            if not _is_own(partial):
                remove_path(partial)
            yield partial
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)
        sync_folder(path.parent)


def open_own(path: str, flags: int) -> int:
    """Opens a file of ours, as `opener` of `open`. Raises OSError for a link, whose target may be anybody's."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _is_own(partial: Path) -> bool:
    """Whether writing there changes no file of another name; absent is fine."""
    try:
        facts = partial.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in. Raises RunError where the system does not let it."""
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # as in /proc, where nobody makes folders
            raise RunError("cannot be created", where=str(path), hint="Choose another folder.") from None


def check_new_folder(path: Path) -> None:
    """Raises RunError where no folder can be made at `path`, or the one there has files in it. Makes nothing."""
    whole = path.absolute()
    nearest = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise RunError(f"{nearest} is not a folder", where=str(path), hint="Choose another folder.")
    if nearest == whole and any(whole.iterdir()):
        raise RunError(
            "is not empty", where=str(path), hint="Choose an empty or new folder. Nothing in this folder was changed."
        )


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """
    Leave a new or empty folder as it was, where the block that fills it is interrupted or fails, so that the same
    command works again. Raises RunError as `check_new_folder`.
    """
    check_new_folder(path)
    was_there = path.is_dir()
    try:
        yield
    except BaseException:
        for entry in path.iterdir() if path.is_dir() else ():
            remove_path(entry)
        if path.is_dir() and not was_there:
            path.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can (POSIX)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_folder(path: Path) -> Path:
    """The folder at `path`, or the nearest above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with all below it. Of a link, only the link: nothing is followed. Absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON as a whole file, its keys in the order given; see `named_where_not_finite`."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(named_where_not_finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    with whole_file(path, "w") as file:
        file.write(text + "\n")


def named_where_not_finite(value: Any) -> Any:
    """JSON data in which "nan", "inf" and "-inf" stand for the numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: named_where_not_finite(item) for name, item in value.items()}
    return [named_where_not_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """
    The JSON value in a file, of no shape in particular: `records.read_record` checks that too.

    Raises OSError where it cannot be read, and ValueError for what is no regular file, has more than `max_bytes`, or
    is no JSON as `parse_json` takes it.
    """
    return parse_json(read_regular(path, max_bytes))


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All of a regular file. Raises OSError, and ValueError for a folder, a device, a FIFO or more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"it has {size:,} bytes; the limit is {max_bytes:,}")
        return file.read(size)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, and ValueError for what has no end, or blocks when opened."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    return path.open("rb")


def parse_json(data: bytes) -> Any:
    """
    A JSON value in UTF-8. Raises ValueError for anything else: NaN and infinite numbers, integers of more than 20
    digits, more than 100 levels of lists and objects.
    """
    text = data.decode("utf-8")
    try:
        parse_int = _integer if _LONG_NUMBER.search(text) else None
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=parse_int)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for inner in level for item in _items(inner) if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer has {len(text):,} digits; the limit is {MAX_INTEGER_DIGITS}")
    return int(text)


def canonical(value: Any) -> bytes:
    """The one byte string that stands for a JSON value, to be hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def special(path: Path) -> str:
    """
    Why what exists at `path` is no regular file, which can be read to its end; "" where it is one.

    Raises OSError where nothing is there, or a folder on the way cannot be entered.
    """
    mode = path.stat().st_mode
    for is_kind, name in SPECIAL:
        if is_kind(mode):
            return f"is {name}, and no regular file"
    return f"is a view into the kernel, and no regular file: it lies in {folder}" if (folder := kernel(path)) else ""


def kernel(path: Path | str) -> str:
    """The one of KERNEL_FOLDERS that a file or folder is in, links followed; "" for any other."""
    real = os.path.realpath(path)
    inside = [folder for folder in KERNEL_FOLDERS if (real + "/").startswith(folder + "/")]
    if inside and not (real + "/").startswith(SHARED_MEMORY + "/"):
        return inside[0]
    return ""


def check_regular(path: Path) -> None:
    """Raises DataError for what exists at `path` and is no regular file, and OSError where nothing is there."""
    if what := special(path):
        raise DataError(what, where=str(path), hint="Use a regular file.")


def below(folder: Path, *, follow: bool = False) -> Iterator[Path]:
    """
    Every regular file below a folder, and every link to one or to nothing; never into KERNEL_FOLDERS.

    Links to folders only with `follow`, and no folder twice. Raises DataError for the root of the file system, for a
    folder that cannot be read, and behind MAX_ENTRIES files and folders: that is a disk, and no data set.
    """
    hint = "Give the folder that holds the data."
    if (real := Path(os.path.realpath(folder))).parent == real:
        raise DataError("is the root of the file system", where=str(folder), hint=hint)

    def fail(error: OSError) -> NoReturn:
        closed = "Make it readable, or move it out of the folder that is read."
        raise DataError(f"cannot be read: {error.strerror}", where=str(error.filename), hint=closed) from None

    entries, seen = 0, set[tuple[int, int]]()
    for subfolder, folders, names in os.walk(folder, followlinks=follow, onerror=fail):
        facts = os.stat(subfolder)
        entries += len(folders) + len(names)
        if entries > MAX_ENTRIES:
            what = f"more than {MAX_ENTRIES:,} files and folders are below it"
            raise DataError(what, where=str(folder), hint=hint)
        if (facts.st_dev, facts.st_ino) in seen or kernel(subfolder):
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        paths = (Path(subfolder, name) for name in names)
        yield from (path for path in paths if path.is_file() or dangling(path))


def dangling(path: Path) -> bool:
    """Whether a path is a link to something that does not exist."""
    return path.is_symlink() and not path.exists()


def sha256_file(path: Path) -> str:
    """Raises DataError for what is no regular file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256 of every finished file below a folder, but for its manifest."""
    names = (file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file())
    finished = (name for name in names if not any(part.endswith(PARTIAL) for part in name.split("/")))
    return listed(folder, [name for name in finished if name != MANIFEST])


def listed(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256 of files below a folder."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names}


def find_corruption(folder: Path, listed: Mapping[str, Mapping[str, Any]], *, thorough: bool = False) -> str:
    """Which file below a folder is not as it was listed, and how, or "". `thorough` also compares sha256."""
    for name, facts in listed.items():
        file = folder / name
        if not file.is_file():
            return f"{name} {missing(file)}"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if thorough and sha256_file(file) != facts["sha256"]:
            return f"{name} has another sha256"
    return ""


def path_problem(path: Path | str) -> str:
    """Why no file system takes a path; "" where one could."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return "a path holds no half of a surrogate pair"
    if b"\0" in name:
        return "a path holds no NUL"
    longest = max(map(len, name.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"a name in a path has at most {MAX_NAME_BYTES} bytes, and one here has {longest:,}"
    if len(name) > MAX_PATH_BYTES:
        return f"a path has at most {MAX_PATH_BYTES:,} bytes, and this one has {len(name):,}"
    return ""


def missing(path: Path) -> str:
    """What is wrong where a regular file should be and is not."""
    return special(path) if path.exists() else "is gone"


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder of what can be had again and is kept for all runs: $BLOOMERY_CACHE or ~/.cache/bloomery."""
    return Path(env.get("BLOOMERY_CACHE") or "~/.cache/bloomery").expanduser()


Numbers = TypeVar("Numbers")
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, and odd: the step of splitmix64."""


def splitmix64(values: Numbers) -> Numbers:
    """
    A bijection of 64-bit numbers in which every bit of the input changes every bit of the output.

    Takes and returns an array of uint64. The finalizer of splitmix64 (Steele et al. 2014, Fast splittable pseudorandom
    number generators).
    """
    import numpy as np  # which a command imports after its first line

    numbers: Any = values
    numbers = numbers ^ (numbers >> np.uint64(30))
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    mixed: Numbers = numbers
    return mixed


def stable_hash(text: str | bytes) -> int:
    """64 bits of a text, which may hold anything that UTF-8 can encode."""
    return int.from_bytes(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()[:8])
