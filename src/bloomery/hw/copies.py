"""
Copy the files that training reads to machines with disks of their own, and collect what they write.

    all machines see the run folder      nothing is copied
    a machine has its own disk           `bring` copies to it what its ranks read, under the same path;
                                         `collect` moves what they wrote to the machine of the first rank

Whether a machine sees the folder of the first rank is asked once, with a file that the first rank makes. One rank of
each other disk receives the copies (`World.receivers`).

A copy has the modification time of its original. A file of the same size and time is not copied again. One of the same
size alone is compared by sha256. A record says what copies were when they were made: core/copied.py. So `bring`
replaces only copies that have not changed since. Any other file that differs is an error, and stays as it is.
"""

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bloomery.core import cache, copied
from bloomery.core import io as core_io
from bloomery.core.copied import CopyRecord
from bloomery.core.errors import RunError
from bloomery.core.log import doing, info
from bloomery.hw import distributed, launcher
from bloomery.hw.distributed import World

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_OF_CACHES = 65.0
"""How long NFS may say that a new file is not there, with its usual settings."""
LOCAL_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs"})
"""File systems of one machine's disks: what another machine has made is not late there, but elsewhere."""
CHUNK_BYTES = 16 * 2**20
BYTES_BETWEEN_CHECKS = 2**30
"""After so many, all ranks hear whether one of them has failed. Until then no copy has its name."""
LEFT_OUT = ("checkpoints",)
"""Folders of a stage that are not copied with it. A checkpoint is copied when it is read."""

FileFacts = Mapping[str, Sequence[int]]
"""Name below a folder ("" for the path itself) -> bytes, and modification time in nanoseconds."""


def _every(name: str) -> bool:
    return True


# --- who has a disk of its own -------------------------------------------------------------------------------------


def with_receivers(world: World, folder: Path) -> World:
    """The world, with one rank of each disk on which the first rank's `folder` is not. All ranks call it."""
    if world.size == distributed.ranks_here(world):
        return world
    token = world.broadcast(secrets.token_hex(8))
    marks = [folder / f".{token}.{rank}{core_io.PARTIAL}" for rank in range(world.size)]
    process = launcher.launched()
    is_leader = process is not None and process.local_rank == 0
    try:
        with world.alike():
            if world.is_first:
                marks[0].touch()
        with world.alike():
            sees = _sees(marks[:1]) if is_leader and not world.is_first else True
        without = [rank for rank, seen in enumerate(world.gather(sees)) if not seen]
        with world.alike():
            if not sees:
                core_io.make_folder(folder)
                marks[world.rank].touch()
        with world.alike():  # machines may share a disk with each other, though not with the first
            others = [marks[rank] for rank in without if rank < world.rank]
            receives = not sees and not (others and _sees(others))
        receiving = world.gather([receives, socket.gethostname()])
    finally:
        marks[world.rank].unlink(missing_ok=True)
    receivers = [rank for rank, (receives, _) in enumerate(receiving) if receives]
    if receivers:
        hosts = ", ".join(receiving[rank][1] for rank in receivers)
        info(f"  files are copied to {hosts}, where {folder} is on another disk")
    return world.with_receivers(receivers)


def _sees(marks: Sequence[Path]) -> bool:
    """Whether one of the files of other ranks is there, or comes when caches of a network file system end."""
    nearest = core_io.nearest_folder(marks[0].parent)
    is_late = not (_is_local(nearest) or copied.record_of(marks[0].parent).exists())
    deadline = time.monotonic() + is_late * SECONDS_OF_CACHES
    while not (sees := any(mark.exists() for mark in marks)) and time.monotonic() < deadline:
        os.listdir(nearest)  # makes NFS ask its server again
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return sees


def _is_local(folder: Path) -> bool:
    """Whether a folder is known to be on a disk of this machine. Only Linux says: man 5 proc_pid_mountinfo."""
    if sys.platform != "linux":
        return False
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kinds[Path(before.split()[4].replace(r"\040", " "))] = after.split()[0]  # a later mount hides one before it
    real = Path(os.path.realpath(folder))
    return next((kinds[above] for above in (real, *real.parents) if above in kinds), "") in LOCAL_KINDS


# --- to machines with a disk of their own ---------------------------------------------------------------------------


def bring(world: World, path: Path, keeps: Callable[[str], bool] = _every) -> None:
    """
    Copy a file or folder of the first rank to each other disk, but for folders in LEFT_OUT and files whose names below
    the folder `keeps` refuses. Every rank of `world` calls it. Raises RunError on all ranks where a machine has another
    file there, or no room.
    """
    if not world.receivers:
        return
    receives = world.rank in world.receivers
    with world.alike():
        listed = _listed(path, keeps) if world.is_first else {}
    first_host, files = world.broadcast([socket.gethostname(), listed])
    with world.alike():
        record = copied.read(path) if receives else CopyRecord(host="", files={})
        missing, doubtful = _compared(path, files, record) if receives else ([], [])
    doubts = sorted({name for names in world.gather(doubtful) for name in names})
    with world.alike():
        hashes = {name: cache.sha256_of(path / name) for name in doubts} if world.is_first else {}
    originals = world.broadcast(hashes)
    with world.alike():
        for name in doubtful:
            if cache.sha256_of(path / name) != originals[name]:
                raise _other_file(path / name)
    to_copy = sorted({name for names in world.gather(missing) for name in names})
    with world.alike():
        if missing:
            core_io.make_folder(path.parent if "" in files else path)
            _check_room(path, sum(files[name][0] for name in missing))
    if to_copy:
        size = sum(files[name][0] for name in to_copy)
        info(f"  copying {path}: {len(to_copy):,} files, {size / 1e6:,.1f} MB")
        doing(f"copying {size / 1e6:,.1f} MB to other machines")
    with world.alike():
        if receives:
            gone = [name for name in record["files"] if name not in files and keeps(name)]
            for name in gone:
                if copied.is_unchanged(path, name, record):
                    (path / name).unlink()
                del record["files"][name]
            if gone:
                copied.write(path, record)

    def note(named: Mapping[str, list[int]], done: bool) -> None:
        record["host"] = first_host
        for name, numbers in named.items():
            replaced = copied.is_unchanged(path, name, record) and not done
            record["files"][name] = [*numbers, *(copied.facts(path / name) if replaced else [])]
        copied.write(path, record)

    _transfer(world, 0, path, {name: files[name] for name in to_copy}, frozenset(missing), note)


def mark(world: World, folder: Path) -> None:
    """Let a folder of each receiver be known as one of copies, though there may be nothing to copy yet."""
    first_host: str = world.broadcast(socket.gethostname())
    with world.alike():
        if world.rank in world.receivers and not copied.record_of(folder).exists():
            core_io.make_folder(folder)
            copied.write(folder, {"host": first_host, "files": {}})


def drop_others(world: World, folder: Path) -> None:
    """Remove the other folders of copies in the parent of one: earlier checkpoints."""
    if not world.receivers:
        return
    with world.alike():
        if world.rank in world.receivers:
            for other in folder.parent.iterdir():
                if other != folder and other.is_dir() and copied.record_of(other).is_file():
                    core_io.remove_path(other)
                    copied.record_of(other).unlink()


def _listed(path: Path, keeps: Callable[[str], bool] = _every) -> dict[str, list[int]]:
    """The files at or below a path of the first rank. Raises DataError as `core_io.below`."""
    if path.is_file():
        return {"": copied.facts(path)}
    there = (file for file in core_io.below(path, follow=True) if not core_io.dangling(file))
    names = sorted(file.relative_to(path).as_posix() for file in there)
    kept = (name for name in names if keeps(name) and not any(_stays(one) for one in name.split("/")))
    return {name: copied.facts(path / name) for name in kept}


def _stays(name: str) -> bool:
    return name in LEFT_OUT or name.endswith((core_io.PARTIAL, ".copied.json"))


def _compared(path: Path, files: FileFacts, record: CopyRecord) -> tuple[list[str], list[str]]:
    """The names of files that are to be copied, and of those whose contents have to be compared."""
    missing, doubtful = list[str](), list[str]()
    for name, (size, modified) in files.items():
        file = path / name
        if not file.exists():
            missing.append(name)
            continue
        there, was_copied = copied.facts(file), copied.is_unchanged(path, name, record)
        if there == [size, modified] or (was_copied and record["files"][name][:2] == [size, modified]):
            continue
        if was_copied:
            missing.append(name)
        elif there[0] == size:
            doubtful.append(name)
        else:
            raise _other_file(file)
    return missing, doubtful


def _other_file(file: Path) -> RunError:
    what = f"{socket.gethostname()} has another file of this name than the machine of the first rank"
    hint = "Move it away, choose another folder with --runs, or use a file system that all machines share."
    return RunError(what, where=str(file), hint=hint)


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(core_io.nearest_folder(path)).free
    if needed > free:
        what = f"{socket.gethostname()} needs {needed:,} bytes for copies, and {free:,} are free; nothing was copied"
        raise RunError(what, where=str(path), hint="Free some space, or use a file system that all machines share.")


# --- to the machine of the first rank -------------------------------------------------------------------------------


def collect(world: World, folder: Path) -> None:
    """
    Move what ranks have written into a folder of their machine to that of the first rank. Every rank of `world` calls
    it, when all have written. Raises RunError on all ranks where a name exists there, or the disk is full.
    """
    for receiver in world.receivers:
        with world.alike():
            listed = _listed(folder) if world.rank == receiver else {}
        files: FileFacts = world.gather(listed)[receiver]
        with world.alike():
            if world.is_first and (twice := next((name for name in files if (folder / name).exists()), None)):
                raise RunError("two machines have written this file", where=str(folder / twice))
        _transfer(world, receiver, folder, files, frozenset(files if world.is_first else ()))
        with world.alike():
            if world.rank == receiver:
                core_io.remove_path(folder)


# --- pieces ---------------------------------------------------------------------------------------------------------

Note = Callable[[Mapping[str, list[int]], bool], None]
"""Hears of files that get their names, with what a record keeps of each, and of whether they have them now."""


def _transfer(
    world: World,
    source: int,
    path: Path,
    files: FileFacts,
    names: Collection[str],
    note: Note | None = None,
) -> None:
    """
    Send files at or below `path` from the rank `source` to each rank, which keeps those in `names`. A rank that fails
    continues to exchange until all ranks hear of it. Files get their names when all ranks have done well. `note` hears
    of them before and after.
    """
    giving, taking = _Giving(path), _Taking(path, world.rank)
    buffer = bytearray(max(1, min(CHUNK_BYTES, max((size for size, _ in files.values()), default=0))))
    trouble: Exception | None = None
    unchecked = 0

    def check() -> None:
        with world.alike(), core_io.disk_errors(path):
            if trouble is not None:
                raise trouble
        with world.alike(), core_io.disk_errors(path):
            if whole := taking.whole():
                if note is not None:
                    note(whole, False)
                taking.name()
                if note is not None:
                    note(whole, True)

    try:
        for name, facts, count, is_last in _pieces(files):
            piece = memoryview(buffer)[:count]
            try:
                if world.rank == source and trouble is None:
                    giving.fill(name, piece)
            except (OSError, RunError) as error:
                trouble = error
            if count:
                world.hand_over(piece, source)
            try:
                if name in names and trouble is None:
                    taking.write(name, piece, facts if is_last else None)
            except (OSError, RunError) as error:
                trouble = error
            unchecked += count
            if unchecked >= BYTES_BETWEEN_CHECKS:
                unchecked = 0
                check()
        check()
    finally:
        giving.close()
        taking.close()


def _pieces(files: FileFacts) -> Iterator[tuple[str, Sequence[int], int, bool]]:
    """Each piece of each file: name, facts of the file, bytes of the piece, and whether it is the last."""
    for name, facts in files.items():
        for start in range(0, max(facts[0], 1), CHUNK_BYTES):
            count = min(CHUNK_BYTES, facts[0] - start)
            yield name, facts, count, start + count == facts[0]


@dataclass
class _Giving:
    """Reads files piece by piece."""

    folder: Path
    _name: str | None = None
    _file: BinaryIO | None = None

    def fill(self, name: str, piece: memoryview) -> None:
        file, path = self._file, self.folder / name
        try:
            if file is None or name != self._name:
                self.close()
                self._name, self._file = name, (file := core_io.open_regular(path))
            count = file.readinto(piece)  # type: ignore[attr-defined]
        except (OSError, ValueError) as error:
            raise RunError(f"cannot be read: {error}", where=str(path)) from None
        if count < len(piece):
            raise RunError("became shorter while it was copied", where=str(path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class _Taking:
    """Writes files piece by piece, under other names until `name`."""

    folder: Path
    rank: int
    _partial: Path | None = None
    _file: BinaryIO | None = None
    _done: dict[str, tuple[Path, Sequence[int]]] = field(default_factory=dict)

    def write(self, name: str, piece: memoryview, last: Sequence[int] | None) -> None:
        """Add a piece; of the `last` one, the facts of the whole file."""
        path = self.folder / name
        if self._file is None:
            core_io.make_folder(path.parent)
            self._partial = path.with_name(f"{path.name}.{self.rank}{core_io.PARTIAL}")
            core_io.remove_path(self._partial)
            self._file = open(self._partial, "wb", opener=core_io.open_own)  # noqa: SIM115 - `close` ends it
        self._file.write(piece)
        if last is not None:
            assert self._partial is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._done[name] = self._partial, last
            self._partial = self._file = None

    def whole(self) -> dict[str, list[int]]:
        """Of the files that are whole: bytes, and modification times of the original and of the copy."""
        for partial, last in self._done.values():
            os.utime(partial, ns=(last[1], last[1]))
        return {name: [*last, copied.facts(partial)[1]] for name, (partial, last) in self._done.items()}

    def name(self) -> None:
        """Give these their names."""
        for name, (partial, _) in self._done.items():
            partial.replace(self.folder / name)
        self._done = {}

    def close(self) -> None:
        """Leave nothing of files without a name."""
        if self._file is not None:
            with suppress(OSError):  # a full disk, of which the error is known
                self._file.close()
        for partial in [self._partial, *(partial for partial, _ in self._done.values())]:
            if partial is not None:
                core_io.remove_path(partial)
