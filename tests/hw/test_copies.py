"""Copies of files on other machines. Here each rank has a folder that stands for the disk of its machine."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.core import copied
from bloomery.core.errors import BloomeryError, RunError
from bloomery.hw import copies
from bloomery.hw.distributed import World
from bloomery.train import launch

FILES = {"a.bin": b"abc" * 1000, "deep/b.json": b"{}", "empty": b""}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".copied.json"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


FILL = copies._Giving.fill


def failing(giving: Any, name: str, piece: memoryview) -> None:
    if name == "a.bin":
        raise RunError("cannot be read: Input/output error", where=name)
    FILL(giving, name, piece)


def steps(task: dict[str, Any], world: World) -> dict[str, Any]:
    """Do what the task lists, one after another, on ranks of which the later two have disks of their own."""
    copies.CHUNK_BYTES, copies.BYTES_BETWEEN_CHECKS = 700, 1500
    world = world.with_receivers([1, 2])
    own = Path(task["disks"]) / str(world.rank) / "run"
    errors: list[str] = []
    monkey = pytest.MonkeyPatch()
    for function, name in task["do"]:
        try:
            if function == "change" and world.is_first:
                (own / name).write_bytes(b"new")
            elif function == "remove" and world.is_first:
                (own / name).unlink()
            elif function == "fail":
                monkey.setattr(copies._Giving, "fill", failing if world.is_first else FILL)
            elif function == "mend":
                monkey.undo()
            elif function == "spoil" and world.rank == 2:
                (own / name).write_bytes(b"mine")
            elif function == "write":
                fill(own / name, {f"of-{world.rank}": b"x" * 2000 * (world.rank + 1)})
            elif function == "bring":
                copies.bring(world, own / name)
            elif function == "drop":
                copies.drop_others(world, own / name)
            elif function == "collect":
                copies.collect(world.apart(), own / name)
        except BloomeryError as error:
            errors.append(str(error))
        world.barrier()
    return {"errors": world.gather(errors)}


def done(disks: Path, do: list[tuple[str, str]]) -> list[list[str]]:
    task = {"disks": str(disks), "do": do}
    errors: list[list[str]] = launch.run("tests.hw.test_copies:steps", task, 3)["errors"]
    return errors


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    fill(tmp_path / "0" / "run", FILES)
    return tmp_path


def test_copies_follow_their_originals_and_leave_checkpoints_out(disks: Path) -> None:
    fill(disks / "0" / "run", {"checkpoints/000000001/state.json": b"1", "torn.partial": b"t"})
    do = [("bring", ""), ("change", "deep/b.json"), ("remove", "empty"), ("bring", "")]
    assert done(disks, do) == [[], [], []]
    for rank in "12":
        assert contents(disks / rank / "run") == {"a.bin": FILES["a.bin"], "deep/b.json": b"new"}
        copy, original = (disks / one / "run" / "a.bin" for one in (rank, "0"))
        assert copy.stat().st_mtime_ns == original.stat().st_mtime_ns


@pytest.mark.slow
def test_what_is_there_already_is_not_copied_and_what_differs_stays_and_is_named(disks: Path) -> None:
    shutil.copytree(disks / "0", disks / "1")  # with its times
    fill(disks / "2" / "run", FILES)  # the same bytes of another time
    inode = (disks / "1" / "run" / "a.bin").stat().st_ino
    assert done(disks, [("bring", "")]) == [[], [], []]
    assert (disks / "1" / "run" / "a.bin").stat().st_ino == inode
    for bad in (b"xyz" * 1000, b"short"):
        (disks / "2" / "run" / "a.bin").write_bytes(bad)
        errors = done(disks, [("bring", "")])
        assert all("a.bin: " in told and "another file of this name" in told for (told,) in errors)
        assert contents(disks / "2" / "run") == FILES | {"a.bin": bad}


def test_no_file_gets_its_name_where_reading_the_originals_failed(disks: Path) -> None:
    """Also not those that were read well: the next attempt copies them."""
    do = [("fail", ""), ("bring", ""), ("mend", ""), ("bring", "")]
    errors = done(disks, do)
    assert all("Input/output error" in told for (told,) in errors)
    assert [contents(disks / rank / "run") for rank in "12"] == [FILES, FILES]


@pytest.mark.slow
def test_what_was_copied_before_an_interrupt_may_change_on_the_first_machine(disks: Path) -> None:
    do = [("bring", ""), ("change", "a.bin"), ("bring", ""), ("change", "deep/b.json"), ("bring", "")]
    assert done(disks, do) == [[], [], []]
    assert [contents(disks / rank / "run") for rank in "12"] == [contents(disks / "0" / "run")] * 2


@pytest.mark.slow
def test_dead_links_and_copies_that_somebody_removed_do_no_harm(disks: Path) -> None:
    (disks / "0" / "run" / "dead.json").symlink_to("nowhere")
    assert done(disks, [("bring", "")]) == [[], [], []]
    (disks / "1" / "run" / "a.bin").unlink()
    (disks / "0" / "run" / "empty").unlink()
    (disks / "2" / "run" / "empty").unlink()
    assert done(disks, [("bring", "")]) == [[], [], []]
    assert [contents(disks / rank / "run") for rank in "12"] == [contents(disks / "0" / "run")] * 2


@pytest.mark.slow
def test_times_that_a_disk_keeps_in_seconds_are_no_change(disks: Path) -> None:
    assert done(disks, [("bring", "")]) == [[], [], []]
    own, original = disks / "1" / "run", disks / "0" / "run" / "a.bin"
    record = copied.read(own)
    os.utime(own / "a.bin", ns=(0, record["files"]["a.bin"][2] // 10**9 * 10**9))
    record["files"]["a.bin"][2] = (own / "a.bin").stat().st_mtime_ns
    copied.write(own, record)
    inode = (own / "a.bin").stat().st_ino
    assert done(disks, [("bring", "")]) == [[], [], []]
    assert (own / "a.bin").stat().st_ino == inode
    original.write_bytes(b"new")
    assert done(disks, [("bring", "")]) == [[], [], []]
    assert (own / "a.bin").read_bytes() == b"new"


def test_a_copy_that_was_changed_is_not_replaced(disks: Path) -> None:
    errors = done(disks, [("bring", ""), ("spoil", "deep/b.json"), ("change", "deep/b.json"), ("bring", "")])
    assert all("deep/b.json" in told for (told,) in errors)
    assert (disks / "2" / "run" / "deep" / "b.json").read_bytes() == b"mine"


@pytest.mark.slow
def test_a_single_file_is_copied_too(disks: Path) -> None:
    assert done(disks, [("bring", "a.bin")]) == [[], [], []]
    assert [contents(disks / rank / "run") for rank in "12"] == [{"a.bin": FILES["a.bin"]}] * 2
    (disks / "0" / "run" / "a.bin").write_bytes(b"new")
    assert done(disks, [("bring", "a.bin")]) == [[], [], []]
    assert [contents(disks / rank / "run") for rank in "12"] == [{"a.bin": b"new"}] * 2


@pytest.mark.slow
def test_earlier_checkpoints_go_when_a_newer_one_was_copied(disks: Path) -> None:
    fill(disks / "0" / "run" / "checkpoints", {"000000001/state.json": b"1", "000000002/state.json": b"2"})
    fill(disks / "2" / "run" / "checkpoints", {"000000009/state.json": b"9"})  # of nobody's making
    do = [("bring", "checkpoints/000000001"), ("bring", "checkpoints/000000002"), ("drop", "checkpoints/000000002")]
    assert done(disks, do) == [[], [], []]
    roots = {rank: disks / rank / "run" / "checkpoints" for rank in "012"}
    there = {rank: sorted(one.name for one in root.iterdir() if one.is_dir()) for rank, root in roots.items()}
    assert there == {"0": ["000000001", "000000002"], "1": ["000000002"], "2": ["000000002", "000000009"]}


@pytest.mark.slow
def test_what_ranks_have_written_is_collected_on_the_first_machine(disks: Path) -> None:
    assert done(disks, [("write", "parts"), ("collect", "parts")]) == [[], [], []]
    assert contents(disks / "0" / "run" / "parts") == {f"of-{rank}": b"x" * 2000 * (rank + 1) for rank in range(3)}
    assert not any((disks / rank / "run" / "parts").exists() for rank in "12")
    fill(disks / "0" / "run" / "parts", {"of-1": b"before"})
    assert all(
        "parts/of-1" in told for (told,) in done(disks, [("write", "parts"), ("spoil", "a.bin"), ("collect", "parts")])
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(disks: Path) -> None:
    (disks / "2").mkdir(mode=0o555)
    assert all("Permission denied" in told for (told,) in done(disks, [("bring", "")]))


def test_too_little_room_is_named_with_both_numbers(disks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    with pytest.raises(RunError, match=r"needs 3,000 bytes for copies, and 1 are free; nothing was copied"):
        copies._check_room(disks, 3000)


def test_a_folder_of_copies_is_refused_until_no_copy_is_left_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fill(folder, {"a.bin": b"abc"})
    size, modified = copied.facts(folder / "a.bin")
    copied.check_original(folder)
    copied.write(folder, {"host": "gpu07", "files": {"a.bin": [size, 5, modified]}})
    with pytest.raises(RunError, match=r"copies of files on gpu07.*\n.*list gpu07 first"):
        copied.check_original(folder)
    (folder / "a.bin").unlink()
    copied.check_original(folder)


@pytest.mark.parametrize(
    ("kind", "is_local"), [("ext4", True), ("nfs4", False), ("fuse.sshfs", False), ("overlay", True)]
)
def test_a_network_file_system_may_be_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_local: bool
) -> None:
    mounts = f"21 1 0:20 / / rw - ext4 /dev/a rw\n22 21 0:30 / {tmp_path} rw,noatime shared:2 - {kind} host:/x rw\n"
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: mounts if str(path) == "/proc/self/mountinfo" else read(path, **how)
    )
    assert copies._is_local(tmp_path) is is_local
