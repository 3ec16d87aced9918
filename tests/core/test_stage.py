import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.errors import RunError
from bloomery.core.io import MANIFEST
from bloomery.core.pipeline import BEGUN, Stage, StagePlan, brief, execute, locked, plan_stages
from bloomery.core.records import content_hash, damage, read_manifest
from tests.core.made import HERE, RUNS, STAGES, Recipe, Section, stage, work


@pytest.fixture(autouse=True)
def nothing_ran_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    RUNS.clear()
    monkeypatch.setattr(f"{HERE}.FAIL", "")


@pytest.fixture
def plans(tmp_path: Path) -> list[StagePlan]:
    return plan_stages(STAGES, Recipe(), tmp_path)


def fingerprints(recipe: Recipe, stages: Sequence[Stage] = STAGES, root: Path = Path("r")) -> dict[str, str]:
    plans = plan_stages(stages, recipe, root)
    for number, plan in enumerate(plans, 1):
        assert plan.folder == root / f"{number:02d}-{plan.stage.name}-{plan.fingerprint}"
    return {plan.stage.name: plan.fingerprint for plan in plans}


def changed(recipe: Recipe, stages: Sequence[Stage] = STAGES) -> set[str]:
    before, after = fingerprints(Recipe()), fingerprints(recipe, stages)
    return {name for name in after if after[name] != before[name]}


def test_a_fingerprint_changes_with_the_config_of_a_stage_or_of_one_above_it() -> None:
    other = Section(number=2)
    assert changed(Recipe()) == set()
    assert changed(Recipe(make=other)) == {"make", "double", "join"}
    assert changed(Recipe(double=other)) == {"double", "join"}
    assert changed(Recipe(side=other)) == {"side", "join"}
    assert changed(Recipe(join=other)) == {"join"}


def test_a_fingerprint_does_not_change_with_what_cannot_change_the_output() -> None:
    many = Section(workers=8)
    assert changed(Recipe(make=many, double=many, join=many)) == set()
    assert changed(Recipe(make=Section(number=1))) == set()  # a default that is written out
    assert fingerprints(Recipe(), root=Path("/else/where")) == fingerprints(Recipe())
    moved = tuple(replace(stage, run_by="another.module:function") for stage in STAGES)
    assert changed(Recipe(), moved) == set()


def test_a_fingerprint_changes_with_version_name_and_inputs() -> None:
    make, double, side, join = STAGES
    assert changed(Recipe(), (make, stage("double", "make", VERSION=2), side, join)) == {"double", "join"}
    assert changed(Recipe(), (make, double, replace(side, after=("make",)), join)) == {"side", "join"}
    assert len(set(fingerprints(Recipe()).values())) == len(STAGES)  # equal configs, other names


def test_a_fingerprint_changes_with_the_content_that_a_stage_reads_from_outside(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("one")
    recipe = Recipe(make=Section(outside=source))
    first = fingerprints(recipe)
    source.write_text("two")
    second = fingerprints(recipe)
    assert {name for name in first if first[name] != second[name]} == {"make", "double", "join"}
    source.write_text("one")
    assert fingerprints(recipe) == first


def test_everything_runs_once_in_order_and_then_is_fresh(plans: list[StagePlan], tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []  # planning writes nothing
    assert not any(plan.fresh for plan in plans)
    assert execute(plans) == dict.fromkeys(("make", "double", "side", "join"), "ran")
    assert (plans[-1].folder / "out.txt").read_text() == "11+side"
    assert execute(plans) == dict.fromkeys(("make", "double", "side", "join"), "fresh")
    assert RUNS == ["make", "double", "side", "join"]


def test_a_changed_setting_runs_what_stands_below_it_and_reuses_the_rest(
    plans: list[StagePlan], tmp_path: Path
) -> None:
    execute(plans)
    other = plan_stages(STAGES, Recipe(double=Section(number=5)), tmp_path)
    assert execute(other) == {"make": "fresh", "double": "ran", "side": "fresh", "join": "ran"}
    assert execute(plans) == dict.fromkeys(("make", "double", "side", "join"), "fresh")  # the old ones are still there


def test_until_runs_a_stage_and_its_ancestors_and_nothing_else(plans: list[StagePlan]) -> None:
    assert execute(plans, until="double") == {"make": "ran", "double": "ran"}
    assert execute(plans, until="side") == {"side": "ran"}
    assert execute(plans, until="join") == {"make": "fresh", "double": "fresh", "side": "fresh", "join": "ran"}


def test_only_runs_one_stage_and_refuses_where_an_input_is_not_done(plans: list[StagePlan]) -> None:
    with pytest.raises(RunError) as caught:
        execute(plans, only="double")
    assert caught.value.where == "double"
    assert caught.value.what == "its input make is not ready (not done)"
    assert "--until make" in caught.value.hint
    assert not plans[1].folder.exists()
    assert execute(plans, only="make") == {"make": "ran"}
    assert execute(plans, only="double") == {"double": "ran"}
    assert execute(plans, only="double") == {"double": "fresh"}
    assert RUNS == ["make", "double"]


@pytest.mark.parametrize("option", ["until", "only"])
@pytest.mark.parametrize("name", ["dubble", ""])
def test_an_unknown_stage_is_an_error_that_names_the_known_ones(plans: list[StagePlan], option: str, name: str) -> None:
    with pytest.raises(RunError, match=rf"(?s)no stage '{name}'.*Stages: make, double, side, join\."):
        execute(plans, until=name if option == "until" else None, only=name if option == "only" else None)
    assert RUNS == []


def test_a_folder_without_a_manifest_is_not_done(plans: list[StagePlan]) -> None:
    execute(plans)
    (plans[0].folder / MANIFEST).unlink()
    assert not plans[0].fresh
    assert damage(plans[0].folder) == "not done"
    with pytest.raises(RunError, match=r"(?s)has no manifest, so the stage is not complete.*Run the recipe again"):
        read_manifest(plans[0].folder)
    assert execute(plans)["make"] == "ran"


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda file: file.write_bytes(b""), "out.txt has 0 bytes instead of 1"),
    (lambda file: file.write_bytes(b"11"), "out.txt has 2 bytes instead of 1"),
    (lambda file: file.unlink(), "out.txt is gone"),
]


@pytest.mark.parametrize(("do", "told"), DAMAGE, ids=["truncated", "longer", "missing"])
def test_a_stage_whose_output_is_not_as_its_manifest_says_runs_again(
    plans: list[StagePlan], do: Callable[[Path], Any], told: str
) -> None:
    execute(plans)
    before = content_hash(plans[0].folder)
    do(plans[0].folder / "out.txt")
    assert damage(plans[0].folder) == told
    shutil.rmtree(plans[1].folder)
    with pytest.raises(RunError, match=f"its input make is not ready \\({told}\\)"):
        execute(plans, only="double")
    assert execute(plans, until="double") == {"make": "ran", "double": "ran"}
    assert content_hash(plans[0].folder) == before
    assert not read_manifest(plans[0].folder)["resumed"]


def test_a_flipped_byte_is_found_when_looked_for(plans: list[StagePlan]) -> None:
    execute(plans)
    assert all(damage(plan.folder, thorough=True) == "" for plan in plans)
    (plans[0].folder / "out.txt").write_bytes(b"7")
    assert damage(plans[0].folder) == ""
    assert damage(plans[0].folder, thorough=True) == "out.txt has another sha256"


def test_an_input_that_was_damaged_is_not_used_and_the_error_says_what_makes_it_again(plans: list[StagePlan]) -> None:
    execute(plans, until="make")
    file = plans[0].folder / "out.txt"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert plans[0].fresh  # its size is as before
    with pytest.raises(RunError, match=rf"its input make is damaged: {file} has another sha256") as caught:
        execute(plans, until="double")
    assert f"Remove {plans[0].folder / MANIFEST} and run the same command again" in caught.value.hint
    (plans[0].folder / MANIFEST).unlink()
    assert execute(plans, until="double") == {"make": "ran", "double": "ran"}
    assert file.read_bytes() == whole


@pytest.mark.parametrize("text", ["", "{", '{"stage": "make"}', "[]", "3", '{"outputs": 5}', "[" * 100_000])
def test_a_stage_whose_manifest_cannot_be_read_is_damaged_and_runs_again(plans: list[StagePlan], text: str) -> None:
    execute(plans)
    whole = (plans[0].folder / MANIFEST).read_text()
    (plans[0].folder / MANIFEST).write_text(text)
    assert damage(plans[0].folder).startswith("manifest.json cannot be read: ")
    assert damage(plans[1].folder) == ""  # what an input holds that cannot be read tells nothing
    with pytest.raises(RunError, match=rf"(?s){plans[0].folder.name}/manifest\.json: cannot be read.*Remove that file"):
        read_manifest(plans[0].folder)
    assert execute(plans)["make"] == "ran"
    assert read_manifest(plans[0].folder)["outputs"] == json.loads(whole)["outputs"]


def test_a_folder_in_the_place_of_a_manifest_is_damage_too(plans: list[StagePlan]) -> None:
    execute(plans)
    (plans[0].folder / MANIFEST).unlink()
    (plans[0].folder / MANIFEST).mkdir()
    assert damage(plans[0].folder) == "manifest.json cannot be read: it is not a regular file"
    assert execute(plans)["make"] == "ran"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", "x" * 300, "a\0b"])
def test_a_manifest_that_names_files_outside_of_its_folder_is_damaged(plans: list[StagePlan], name: str) -> None:
    execute(plans)
    written = read_manifest(plans[0].folder)
    core_io.write_json(plans[0].folder / MANIFEST, {**written, "outputs": {name: {"bytes": 0, "sha256": "0"}}})
    assert damage(plans[0].folder).startswith("manifest.json cannot be read: outputs")


def test_leftovers_of_unknown_content_are_neither_used_nor_removed(plans: list[StagePlan]) -> None:
    execute(plans)
    (plans[1].folder / MANIFEST).unlink()
    (plans[1].folder / BEGUN).write_text("[1]")
    with pytest.raises(RunError, match=rf"(?s)begun\.json: cannot be read.*Remove {plans[1].folder}"):
        execute(plans)
    assert (plans[1].folder / "out.txt").exists()


def test_a_stage_that_died_finds_what_it_left(plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.FAIL", "double")
    with pytest.raises(RuntimeError, match="died"):
        execute(plans)
    assert not plans[1].fresh
    assert (plans[1].folder / "leftover.txt").exists()
    assert not plans[2].folder.exists()  # nothing ran after it
    monkeypatch.setattr(f"{HERE}.FAIL", "")
    assert execute(plans) == {"make": "fresh", "double": "ran", "side": "ran", "join": "ran"}
    found = {plan.stage.name: read_manifest(plan.folder) for plan in plans}
    assert {name: manifest["resumed"] for name, manifest in found.items()} == {
        "make": False,
        "double": True,
        "side": False,
        "join": False,
    }
    assert found["double"]["stats"]["found"]


def test_a_stage_that_cannot_go_on_begins_in_an_empty_folder(
    plans: list[StagePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.txt").touch()
    monkeypatch.setattr(f"{HERE}.FAIL", "make")
    with pytest.raises(RuntimeError, match="died"):
        execute(plans)
    (plans[0].folder / "deep").mkdir()
    (plans[0].folder / "deep" / "part-00009").touch()
    (plans[0].folder / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(f"{HERE}.FAIL", "")
    execute(plans, only="make")
    made = read_manifest(plans[0].folder)
    assert made["outputs"].keys() == {"out.txt", "leftover.txt", "deep/more.json"}
    assert not made["resumed"]
    assert not made["stats"]["found"]
    assert (tmp_path / "elsewhere" / "mine.txt").exists()


def test_a_stage_folder_that_is_a_link_is_an_error_and_nothing_behind_it_is_changed(
    plans: list[StagePlan], tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "mine.txt").touch()
    plans[0].folder.parent.mkdir(parents=True, exist_ok=True)
    plans[0].folder.symlink_to(target)
    with pytest.raises(RunError, match=f"is a link to {target}"):
        execute(plans)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    plans[0].folder.unlink()
    assert execute(plans)["make"] == "ran"


def test_what_was_made_from_an_input_that_was_made_again_with_other_content_runs_again(
    plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another version of a library: the settings, and so the fingerprint, are the same."""
    execute(plans)
    (plans[0].folder / MANIFEST).unlink()
    execute(plans, only="make")
    assert all(plan.fresh for plan in plans)  # the same content: nothing below is made again
    (plans[0].folder / MANIFEST).unlink()
    assert plans[1].fresh  # nothing is known of what will be in it
    with monkeypatch.context() as patch:
        patch.setattr(f"{HERE}.make", lambda config, inputs, out: work("make", "other", out))
        execute(plans, only="make")
    assert damage(plans[1].folder) == "its input make was made again, with other content"
    (plans[3].folder / MANIFEST).unlink()
    with pytest.raises(RunError, match=r"its input double is not ready \(its input make was made again"):
        execute(plans, only="join")
    assert execute(plans) == {"make": "fresh", "double": "ran", "side": "fresh", "join": "ran"}
    assert (plans[3].folder / "out.txt").read_text() == "otherother+side"
    assert all(plan.fresh for plan in plans)


def test_only_what_a_stage_hands_on_decides_about_those_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (stage("make", OUTPUT_PREFIX="out"), *STAGES[1:])
    plans = plan_stages(stages, Recipe(), tmp_path)
    execute(plans)

    def again(log: str, text: str) -> dict[str, Any]:
        def make(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
            (out / "log.txt").write_text(log)
            return work("make", text, out)

        monkeypatch.setattr(f"{HERE}.make", make)
        (plans[0].folder / MANIFEST).unlink()
        return execute(plans)

    assert set(again("another log", "1").values()) == {"ran", "fresh"}
    assert RUNS[4:] == ["make"]
    again("another log", "2")
    assert RUNS[5:] == ["make", "double", "join"]


@pytest.mark.parametrize("while_it_runs", [False, True])
def test_what_is_edited_after_a_run_began_is_not_taken_for_what_the_fingerprint_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it_runs: bool
) -> None:
    (source := tmp_path / "source.txt").write_text("one")
    plans = plan_stages(STAGES, Recipe(make=Section(outside=source)), tmp_path)

    def editing(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
        source.write_text("two")
        return work("make", "1", out)

    if while_it_runs:
        monkeypatch.setattr(f"{HERE}.make", editing)
    else:
        source.write_text("two")
    with pytest.raises(RunError, match=r"make: an input outside the run folder changed.*\nRun the same command"):
        execute(plans)
    assert not plans[0].fresh
    assert len(RUNS) == while_it_runs


def test_a_stage_that_dies_while_it_runs_again_is_not_done(
    plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest tells of the outputs that were damaged, and must not vouch for half of the new ones."""
    execute(plans, until="make")
    whole = (plans[0].folder / "out.txt").read_bytes()
    (plans[0].folder / "out.txt").unlink()
    monkeypatch.setattr(f"{HERE}.FAIL", "make")
    with pytest.raises(RuntimeError, match="died"):
        execute(plans)
    (plans[0].folder / "out.txt").write_bytes(whole)
    assert not plans[0].fresh


def test_a_manifest_says_what_was_made_from_what_and_how(plans: list[StagePlan], tmp_path: Path) -> None:
    execute(plans)
    plan = plans[3]
    manifest = json.loads((plan.folder / MANIFEST).read_text())
    assert manifest["stage"] == "join"
    assert manifest["version"] == 1
    assert manifest["fingerprint"] == plan.fingerprint == plan.folder.name[-8:]
    assert manifest["inputs"] == {"double": plans[1].folder.name, "side": plans[2].folder.name}
    assert manifest["input_hashes"] == {"double": content_hash(plans[1].folder), "side": content_hash(plans[2].folder)}
    assert manifest["hands_on"] == ""
    assert manifest["config"] == {"number": 1, "outside": None, "workers": 1}
    assert manifest["stats"] == {"characters": 7, "share": 0.5, "found": False}
    on_disk = {"out.txt": b"11+side", "leftover.txt": b"half", "deep/more.json": b'[\n "11+side"\n]\n'}
    assert manifest["outputs"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in on_disk.items()
    }
    assert 0 <= manifest["seconds"] < 60
    assert time.strptime(manifest["finished"], "%Y-%m-%dT%H:%M:%SZ")
    assert manifest["versions"]["python"] == sys.version.split()[0]
    assert {"bloomery", "numpy", "tokenizers"} <= manifest["versions"].keys()
    assert manifest["machine"]["cores"] >= 1


def test_what_was_never_finished_is_no_output(plans: list[StagePlan]) -> None:
    torn = plans[0].folder / "checkpoints" / f"000000500{core_io.PARTIAL}"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"half")
    (plans[0].folder / f"out.bin{core_io.PARTIAL}").write_bytes(b"half")
    execute(plans, until="make")
    assert set(read_manifest(plans[0].folder)["outputs"]) == {"out.txt", "leftover.txt", "deep/more.json"}


def test_equal_content_has_an_equal_hash_at_any_time_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for number, moment in enumerate((10.0, 2e9)):
        plans = plan_stages(STAGES, Recipe(make=Section(workers=number + 1)), tmp_path / str(number))
        with monkeypatch.context() as patch:
            patch.setattr("bloomery.core.pipeline.time.time", lambda moment=moment: moment)
            execute(plans)
        hashes.append([content_hash(plan.folder) for plan in plans])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == len(STAGES)
    other = plan_stages(STAGES, Recipe(make=Section(number=2)), tmp_path / "other")
    execute(other)
    assert content_hash(other[0].folder) != hashes[0][0]
    assert content_hash(other[2].folder) == hashes[0][2]


HOLD = """
import sys
from pathlib import Path
from bloomery.core.pipeline import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_cannot_hold_one_run_folder(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "demo"
    command = [sys.executable, "-c", HOLD, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"process {holder.pid} is running in it"), locked(root):
            pass
        with locked(tmp_path / "runs" / "other"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked(root):  # a killed process holds nothing
            again = subprocess.run(command, input="", capture_output=True, text=True, check=False)
            assert again.returncode == 1
            assert "RunError" in again.stderr
    with locked(root):
        pass


@pytest.mark.parametrize("kind", ["link", "text"])
def test_a_lock_that_another_program_has_made_is_an_error_and_stays(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine.txt").write_text("12 pages of mine")
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / ".lock"
    lock.symlink_to(tmp_path / "mine.txt") if kind == "link" else lock.write_text("12 pages of mine")
    with pytest.raises(RunError, match="would be overwritten"), locked(tmp_path / "run"):
        pytest.fail("it was held")
    assert lock.read_text() == (tmp_path / "mine.txt").read_text() == "12 pages of mine"


def test_the_lock_is_no_output_of_a_stage_and_is_free_after_an_error(plans: list[StagePlan], tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        execute(plans, until="make")
    assert ".lock" not in read_manifest(plans[0].folder)["outputs"]


def test_the_numbers_of_a_stage_fit_on_a_line() -> None:
    stats = {"documents": 12345, "share": 1 / 3, "mix": {"web": 1}, "ok": True, "hash": "ab", "none": None}
    assert brief(stats) == "documents=12,345  share=0.3333"


def test_leftovers_of_other_content_are_not_gone_on_from(
    plans: list[StagePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, double = plans[0], plans[1]
    monkeypatch.setattr(f"{HERE}.FAIL", "double")
    with pytest.raises(RuntimeError, match="died"):
        execute(plans, until="double")
    assert (double.folder / "leftover.txt").exists()
    monkeypatch.setattr(f"{HERE}.FAIL", "")
    (make.folder / "out.txt").write_text("2")  # made again, with other content, under the same fingerprint
    manifest = read_manifest(make.folder)
    core_io.write_json(make.folder / MANIFEST, manifest | {"outputs": core_io.listing(make.folder)})
    execute(plans, until="double")
    assert not read_manifest(double.folder)["stats"]["found"]
    assert (double.folder / "out.txt").read_text() == "22"
