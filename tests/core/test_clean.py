"""What `clean` may move, what it never touches, and what is left where it is killed."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import main
from bloomery.core import io as core_io
from bloomery.core import run_dir
from bloomery.core.errors import RunError
from bloomery.core.io import MANIFEST
from bloomery.core.pipeline import StagePlan, execute
from bloomery.core.records import CURRENT, damage, stage_folders
from bloomery.core.run_dir import delete, expired, remove, states, waste
from tests.core.test_run import lay

Two = tuple[list[StagePlan], list[StagePlan]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "demo"


@pytest.fixture
def two(root: Path) -> Two:
    """A run with stages of other settings, and of the current ones, all done."""
    old = lay(root, 1)
    execute(old)
    new = lay(root, 2)
    execute(new)
    return old, new


def content(root: Path) -> dict[str, bytes | None]:
    """All files of a run but its trash, and its folders."""
    paths = [path for path in sorted(root.rglob("*")) if run_dir.TRASH not in path.relative_to(root).parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


NAMES_NOTHING = ["{}", '{"fetch": "x"}', "[]", "null", '{"make": 5}', '{"make": "../other"}', '{"make": "/etc"}', "{"]
NAMES_NOTHING += [
    '{"make": "02-double-00000000"}',
    '{"make": ""}',
    "[" * 100_000,
    "1" * 5000,
    '{"make": NaN}',
    "\ud800",
]


@pytest.mark.parametrize("text", NAMES_NOTHING, ids=lambda text: ascii(text[:20]))
def test_nothing_is_waste_on_the_word_of_a_file_that_names_no_stage(root: Path, two: Two, text: str) -> None:
    (root / CURRENT).write_bytes(text.encode("utf-8", "surrogatepass"))
    before = content(root)
    for ask in (waste, states, stage_folders):
        with pytest.raises(RunError, match=r"current\.json: (cannot be read|names no stage|make: )") as caught:
            ask(root)
        assert len(str(caught.value)) < 1000
        assert caught.value.hint == "Remove that file and run its recipe again: what is done stays done."
    assert content(root) == before


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def not_done(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def torn_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"outputs": {}}')


def output_gone(folder: Path) -> None:
    (folder / "out.txt").unlink()


def output_flipped(folder: Path) -> None:
    data = bytearray((folder / "out.txt").read_bytes())
    data[0] ^= 1
    (folder / "out.txt").write_bytes(data)


@pytest.mark.parametrize("harm", [gone, not_done, torn_manifest, output_gone, output_flipped])
def test_a_stage_that_is_not_done_with_the_current_settings_keeps_all_its_folders(
    root: Path, two: Two, harm: Callable[[Path], None]
) -> None:
    old, new = two
    harm(new[0].folder)
    assert old[0].folder not in [one.path for one in waste(root)]
    harm(new[1].folder)
    assert waste(root) == []


def test_a_stage_that_the_recipe_no_longer_has_keeps_its_folders(root: Path, two: Two) -> None:
    old, new = two
    core_io.write_json(root / CURRENT, {"make": new[0].folder.name})
    assert [one.path for one in waste(root)] == [old[0].folder]


def test_a_link_is_unlinked_and_what_lies_behind_it_is_neither_counted_nor_touched(
    root: Path, two: Two, tmp_path: Path
) -> None:
    (old, _), far, more = two, tmp_path / "far", tmp_path / "more"
    old[0].folder.rename(far)
    old[0].folder.symlink_to(far)
    more.mkdir()
    (more / "mine.bin").write_bytes(bytes(100_000))
    (old[1].folder / "link").symlink_to(more)
    behind = {path: path.read_bytes() for folder in (far, more) for path in folder.rglob("*") if path.is_file()}
    sizes = {one.path: one.size for one in waste(root)}
    assert sizes[old[0].folder] == 0
    assert 0 < sizes[old[1].folder] < 100_000
    remove(root, waste(root))
    assert not old[0].folder.is_symlink()
    assert {path: path.read_bytes() for path in behind} == behind
    delete(expired(root, now=True))
    assert list((root / run_dir.TRASH).iterdir()) == []
    assert {path: path.read_bytes() for path in behind} == behind


def test_a_current_stage_that_is_a_link_stays_whole(root: Path, tmp_path: Path) -> None:
    plans = lay(root)
    execute(plans)
    plans[0].folder.rename(tmp_path / "far")
    plans[0].folder.symlink_to(tmp_path / "far")
    (tmp_path / "far" / f"mine{core_io.PARTIAL}").touch()
    assert waste(root) == []
    assert states(root)[0].state == "done"


def test_what_was_moved_to_the_trash_comes_back_by_the_commands_that_are_said(root: Path, two: Two) -> None:
    old, new = two
    (old[1].folder / "requests.jsonl").write_text("paid for\n")
    (old[1].folder / "other.txt").write_text("x")
    (new[0].folder / "deep" / f"it's torn{core_io.PARTIAL}").write_text("half")
    before = content(root)
    moved = remove(root, waste(root))
    assert [path.name for path in old[1].folder.iterdir()] == ["requests.jsonl"]
    assert not old[0].folder.exists()
    assert waste(root) == []
    for command in moved.restore():
        subprocess.run(["sh", "-c", command], check=True)
    assert content(root) == before


def test_a_restored_folder_takes_the_place_of_no_other(root: Path, two: Two) -> None:
    old, _ = two
    moved = remove(root, waste(root))
    old[0].folder.mkdir()
    (old[0].folder / "out.txt").write_text("made since")
    for command in moved.restore():
        subprocess.run(["sh", "-c", command], check=False, capture_output=True)
    assert (old[0].folder / "out.txt").read_text() == "made since"


def test_trash_is_no_stage_and_is_deleted_after_a_day(root: Path, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = two
    remove(root, waste(root))
    assert expired(root) == []
    assert [one.folder for one in states(root)] == [one.folder for one in new]
    assert [path.name for path in sorted(root.glob("[0-9]*"))] == [one.folder.name for one in new]
    (root / run_dir.TRASH / "a person's own").mkdir()
    (root / run_dir.TRASH / f"20260101T000000Z{core_io.PARTIAL}").mkdir()  # of a deletion that was killed
    assert [one.path.name for one in expired(root)] == [f"20260101T000000Z{core_io.PARTIAL}"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + run_dir.SECONDS_IN_TRASH + 2)
    assert len(expired(root)) == 2
    assert delete(expired(root)) > 0
    assert [path.name for path in (root / run_dir.TRASH).iterdir()] == ["a person's own"]


@pytest.mark.parametrize(
    "name", ["mine", "20260101", "20260101T000000Z.bak", "99999999T999999Z", f"mine{core_io.PARTIAL}"]
)
def test_what_clean_did_not_put_into_the_trash_is_never_deleted(
    root: Path, two: Two, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(root, waste(root))
    mine = root / run_dir.TRASH / name
    mine.mkdir()
    (mine / "thesis.txt").write_text("the only copy")
    (root / run_dir.TRASH / "20260101T000000Z").write_text("a file")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + run_dir.SECONDS_IN_TRASH + 2)
    assert mine not in [one.path for one in expired(root)]
    assert main(["clean", str(root), "--now"]) == 0
    assert [path.name for path in sorted((root / run_dir.TRASH).iterdir())] == sorted([name, "20260101T000000Z"])
    assert (mine / "thesis.txt").read_text() == "the only copy"
    assert f"left: {mine} (clean did not put it there)" in capsys.readouterr().out


def linked(folder: Path, target: Path) -> None:
    """What a link of the current stage leads to is a folder of the run that looks like one of other settings."""
    folder.rename(target)
    folder.symlink_to(target.name)


def linked_twice(folder: Path, target: Path) -> None:
    linked(folder, target)
    (between := folder.with_name(f"{folder.name[:-8]}eeeeeeee")).symlink_to(target)
    folder.unlink()
    folder.symlink_to(between)


def linked_into(folder: Path, target: Path) -> None:
    target.mkdir()
    folder.rename(target / "inner")
    folder.symlink_to(f"../{folder.parent.name}/{target.name}/inner")


def linked_through(folder: Path, target: Path) -> None:
    linked_into(folder, target)
    (between := folder.with_name(f"{folder.name[:-8]}eeeeeeee")).symlink_to(target)
    folder.unlink()
    folder.symlink_to(between / "inner")


@pytest.mark.parametrize("link", [linked, linked_twice, linked_into, linked_through])
def test_what_a_link_of_a_current_stage_leads_to_is_no_waste(
    root: Path, two: Two, link: Callable[[Path, Path], None]
) -> None:
    old, new = two
    folder = new[0].folder
    link(folder, folder.with_name(f"{folder.name[:-8]}00000000"))
    assert [one.path for one in waste(root)] == [plan.folder for plan in old]
    remove(root, waste(root))
    assert damage(folder, thorough=True) == ""


def test_links_that_lead_in_a_circle_end(root: Path, two: Two) -> None:
    folder = two[1][0].folder
    shutil.rmtree(folder)
    folder.symlink_to(folder.name)
    assert folder not in [one.path for one in waste(root)]


def test_two_cleans_of_one_second_do_not_share_a_folder(root: Path, two: Two) -> None:
    first = remove(root, waste(root)[:1])
    second = remove(root, waste(root))
    assert first.moves[0][1].parent != second.moves[0][1].parent


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_trash_that_is_a_link_or_a_file_is_refused(root: Path, two: Two, tmp_path: Path, kind: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").touch()
    if kind == "file":
        (root / run_dir.TRASH).touch()
    else:
        (root / run_dir.TRASH).symlink_to(tmp_path / "home")
    before = content(root)
    with pytest.raises(RunError, match=r"\.trash: is not a folder"):
        remove(root, waste(root))
    with pytest.raises(RunError, match=r"\.trash: is not a folder"):
        expired(root, now=True)
    assert (tmp_path / "home" / "mine").exists()
    assert content(root) == before


class KilledError(BaseException):
    """As kill -9: nothing that follows is done."""


def until_killed(monkeypatch: pytest.MonkeyPatch, calls: int, act: Callable[[], Any]) -> bool:
    """Do something of which only so many calls that change names are made; returns whether it came to its end."""
    left = calls

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*words: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return call(*words, **more)

        return maybe

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (Path, "unlink"), (os, "unlink"), (os, "rmdir")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            act()
        except KilledError:
            return False
    return True


def kept(root: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_clean_that_is_killed_anywhere_leaves_nothing_half_done_and_loses_nothing(
    root: Path, two: Two, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = two
    (old[1].folder / "requests.jsonl").write_text("paid for\n")
    shutil.copytree(root, tmp_path / "template")
    before, ended, calls = kept(root), False, 0
    while not ended:
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "template", root)
        act: Callable[[], Any] = (
            (lambda: remove(root, waste(root))) if how == "moved" else (lambda: delete(waste(root)))
        )
        ended, calls = until_killed(monkeypatch, calls, act), calls + 1
        assert all(damage(plan.folder) in ("", "not done") for plan in (*old, *new))
        assert [one.state for one in states(root)] == ["done", "done"]
        assert (old[1].folder / "requests.jsonl").exists()
        if how == "moved":
            assert kept(root) == before
        delete(waste(root))
        assert [path.name for path in sorted(root.glob("[0-9]*"))] == sorted(
            plan.folder.name for plan in (*new, old[1])
        )
    assert calls > 3


def test_a_mount_point_is_named_and_not_copied(root: Path, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(path: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(RunError, match=rf"{two[0][0].folder.name}: cannot be moved into \.trash.*\n.*mount point"):
        remove(root, waste(root))
    assert damage(two[0][0].folder) == ""


def test_status_goes_on_where_a_manifest_is_damaged(root: Path) -> None:
    plans = lay(root)
    execute(plans)
    (plans[0].folder / MANIFEST).write_text('{"outputs": 5}')
    found = states(root)
    assert [one.state for one in found] == ["damaged", "done"]
    assert found[0].damage.startswith("manifest.json cannot be read: ")
