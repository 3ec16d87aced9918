"""
Copy the files that training reads to machines with disks of their own, and collect what they write.

    all machines see the run folder      nothing is copied
    a machine has its own disk           `bring` copies to it what its ranks read, under the same path;
                                         `collect` moves what they wrote to the machine of the first rank

Whether a machine sees the folder of the first rank is asked once, with a file that the first rank makes. One rank of
each machine with its own disk receives the copies (`World.receivers`).

A copy has the modification time of its original. A file of the same size and time is not copied again. One of the same
size alone is compared by sha256. COPIED, in each folder of copies, lists what they were when they were made. So `bring`
replaces only copies that have not changed since. Any other file that differs is an error, and stays as it is.
"""

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.log import doing, info
from bloomery.core.records import read_record
from bloomery.hw import distributed, launcher
from bloomery.hw.distributed import World

import torch

COPIED = ".copied.json"
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_OF_CACHES = 65.0
"""How long NFS may say that a new file is not there, with its usual settings."""
LOCAL_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs"})
"""File systems of one machine's disks: what another machine has made is not late there, but elsewhere."""
CHUNK_BYTES = 16 * 2**20
BYTES_BETWEEN_CHECKS = 2**30
"""After so many, all ranks hear whether one of them has failed."""

LEFT_OUT = ("checkpoints",)
"""Folders of a stage that are not copied with it. A checkpoint is copied when it is read."""

Files = Mapping[str, Sequence[int]]
"""Name below a folder ("" for the path itself) -> bytes, and modification time in nanoseconds."""


class CopyRecord(TypedDict):
    """What COPIED holds."""

    host: str
    """Where the originals are."""
    files: dict[str, list[int]]


# --- who has a disk of its own -------------------------------------------------------------------------------------


def with_receivers(world: World, folder: Path) -> World:
    """
    The world, with one rank of each machine that does not see the first rank's `folder`. Raises RunError where that
    folder holds copies itself: the newest checkpoints are then on another machine.
    """
    if world.size == distributed.ranks_here(world):
        return world
    mark = folder / f".{world.broadcast(secrets.token_hex(8))}{core_io.PARTIAL}"
    with world.alike():
        if world.is_first:
            check_original(folder)
            mark.touch()
    try:
        process = launcher.launched()
        is_leader = process is not None and process.local_rank == 0 and not world.is_first
        with world.alike():
            sees = _sees(mark) if is_leader else True
        seen = world.gather([sees, socket.gethostname()])
    finally:
        if world.is_first:
            mark.unlink(missing_ok=True)
    receivers = [rank for rank, (sees, _) in enumerate(seen) if not sees]
    if receivers:
        hosts = ", ".join(seen[rank][1] for rank in receivers)
        info(f"  files are copied to {hosts}, where {folder} is on another disk")
    return world.with_receivers(receivers)


def check_original(folder: Path) -> None:
    """Raises RunError for a folder of copies."""
    if (folder / COPIED).exists():
        host = read_record(folder / COPIED, CopyRecord)["host"]
        what = f"holds copies of files on {host}, where the newest checkpoints are"
        hint = f"Make {host} the first machine. To train on from the copies instead, remove {folder / COPIED}."
        raise RunError(what, where=str(folder), hint=hint)


def _sees(mark: Path) -> bool:
    """Whether a file that the first rank has made is there, or comes when caches of a network file system end."""
    nearest = _nearest(mark.parent)
    is_late = not (_is_local(nearest) or (mark.parent / COPIED).exists())
    deadline = time.monotonic() + is_late * SECONDS_OF_CACHES
    while not (sees := mark.exists()) and time.monotonic() < deadline:
        os.listdir(nearest)  # makes NFS ask its server again
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return sees


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(above for above in (folder.absolute(), *folder.absolute().parents) if above.is_dir())


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


def bring(world: World, path: Path) -> None:
    """
    Copy a file or folder of the first rank to each machine that has its own disk, but for folders in LEFT_OUT. Every
    rank of `world` calls it. Raises RunError on all ranks where a machine has another file there, or no room.
    """
    if not world.receivers:
        return
    host, receives = socket.gethostname(), world.rank in world.receivers
    with world.alike():
        listed = _listed(path) if world.is_first else {}
    files: Files = world.broadcast(listed)
    first_host: str = world.broadcast(host)
    with world.alike():
        before = _copied(path) if receives else {}
        missing, doubtful = _compared(path, files, before) if receives else ([], [])
    doubts = sorted({name for names in world.gather(doubtful) for name in names})
    with world.alike():
        hashes = {name: core_io.sha256_file(path / name) for name in doubts} if world.is_first else {}
    originals = world.broadcast(hashes)
    with world.alike():
        for name in doubtful:
            if core_io.sha256_file(path / name) != originals[name]:
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
    _transfer(world, 0, path, {name: files[name] for name in to_copy}, frozenset(missing))
    with world.alike():
        if receives and "" not in files:
            for name in before.keys() - files.keys():
                if _facts(path / name) == before[name]:
                    (path / name).unlink()
            now = {name: list(files[name]) for name in files if name in missing or name in before}
            core_io.write_json(path / COPIED, {"host": first_host, "files": now})
    world.barrier()


def drop_others(world: World, folder: Path) -> None:
    """Remove the other folders of copies in the parent of one: earlier checkpoints."""
    if world.rank in world.receivers:
        for other in folder.parent.iterdir():
            if other != folder and (other / COPIED).is_file():
                core_io.remove_path(other)


def _listed(path: Path) -> dict[str, list[int]]:
    """The files at or below a path of the first rank. Raises DataError as `core_io.below`."""
    if path.is_file():
        return {"": _facts(path)}
    names = sorted(file.relative_to(path).as_posix() for file in core_io.below(path, follow=True))
    kept = (name for name in names if not any(_stays(one) for one in name.split("/")))
    return {name: _facts(path / name) for name in kept}


def _stays(name: str) -> bool:
    return name in LEFT_OUT or name == COPIED or name.endswith(core_io.PARTIAL)


def _facts(file: Path) -> list[int]:
    facts = file.stat()
    return [facts.st_size, facts.st_mtime_ns]


def _copied(folder: Path) -> dict[str, list[int]]:
    return read_record(folder / COPIED, CopyRecord)["files"] if (folder / COPIED).is_file() else {}


def _compared(path: Path, files: Files, before: Files) -> tuple[list[str], list[str]]:
    """The names of files that are to be copied, and of those whose contents have to be compared."""
    missing, doubtful = list[str](), list[str]()
    for name, (size, modified) in files.items():
        file = path / name
        if not file.exists():
            missing.append(name)
            continue
        there = _facts(file)
        if there == [size, modified]:
            continue
        if there == before.get(name):
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
    free = shutil.disk_usage(_nearest(path)).free
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
        files: Files = world.gather(listed)[receiver]
        with world.alike():
            if world.is_first and (twice := next((name for name in files if (folder / name).exists()), None)):
                raise RunError("two machines have written this file", where=str(folder / twice))
        _transfer(world, receiver, folder, files, frozenset(files if world.is_first else ()))
        with world.alike():
            if world.rank == receiver:
                core_io.remove_path(folder)


# --- pieces ---------------------------------------------------------------------------------------------------------


def _transfer(world: World, source: int, path: Path, files: Files, names: Collection[str]) -> None:
    """
    Send files at or below `path` from the rank `source` to each rank, which keeps those in `names`. A rank that fails
    continues to exchange until all ranks hear of it.
    """
    giving, taking = _Giving(path), _Taking(path, world.rank)
    buffer = bytearray(max(1, min(CHUNK_BYTES, max((size for size, _ in files.values()), default=0))))
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    trouble: Exception | None = None
    unchecked = 0
    try:
        for name, facts, count, is_last in _pieces(files):
            piece = memoryview(buffer)[:count]
            try:
                if world.rank == source and trouble is None:
                    giving.fill(name, piece)
            except (OSError, RunError) as error:
                trouble = error
            if count:
                world.hand_over(tensor[:count], source)
            try:
                if name in names and trouble is None:
                    taking.write(name, piece, facts if is_last else None)
            except (OSError, RunError) as error:
                trouble = error
            unchecked += count
            if unchecked >= BYTES_BETWEEN_CHECKS:
                unchecked = 0
                _raise_alike(world, path, trouble)
        _raise_alike(world, path, trouble)
    finally:
        giving.close()
        taking.close()


def _raise_alike(world: World, folder: Path, trouble: Exception | None) -> None:
    with world.alike(), core_io.disk_errors(folder):
        if trouble is not None:
            raise trouble


def _pieces(files: Files) -> Iterator[tuple[str, Sequence[int], int, bool]]:
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
        except OSError as error:
            raise RunError(f"cannot be read: {error.strerror}", where=str(path)) from None
        if count < len(piece):
            raise RunError("became shorter while it was copied", where=str(path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class _Taking:
    """Writes files piece by piece. Each has its name only when it is whole."""

    folder: Path
    rank: int
    _partial: Path | None = None
    _file: BinaryIO | None = None

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
            os.utime(self._partial, ns=(last[1], last[1]))
            self._partial.replace(path)
            self._partial = self._file = None

    def close(self) -> None:
        """Leave nothing of a file that is not whole."""
        if self._file is not None:
            self._file.close()
        if self._partial is not None:
            core_io.remove_path(self._partial)
