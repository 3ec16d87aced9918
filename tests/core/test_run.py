from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import config
from bloomery.core import io as core_io
from bloomery.core.config import Config
from bloomery.core.errors import RunError
from bloomery.core.io import MANIFEST
from bloomery.core.pipeline import Stage, StagePlan, execute, plan_stages, remember
from bloomery.core.records import CURRENT, RECIPE, stage_folders
from bloomery.core.run_dir import delete, size_of, states, waste


class Section(Config):
    number: int = 1


class Recipe(Config):
    name: str = "demo"
    make: Section = Section()
    double: Section = Section()


def run(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    (out / "out.txt").write_text("x" * config.number)
    (out / "deep").mkdir()
    (out / "deep" / "more.bin").write_bytes(bytes(10))
    return {"characters": config.number}


HERE = "tests.core.test_run"
STAGES = (Stage("make", HERE), Stage("double", HERE, after=("make",)))


def lay(root: Path, number: int = 1) -> list[StagePlan]:
    recipe = Recipe(make=Section(number=number))
    root.mkdir(exist_ok=True)
    plans = plan_stages(STAGES, recipe, root)
    remember(root, recipe, plans)
    return plans


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def test_a_run_remembers_the_recipe_that_makes_the_same_folders_again(root: Path) -> None:
    plans = lay(root, 7)
    again = config.load(Recipe, root / RECIPE)
    assert again == Recipe(make=Section(number=7))
    assert [plan.folder for plan in plan_stages(STAGES, again, root)] == [plan.folder for plan in plans]
    assert stage_folders(root) == {plan.stage.name: plan.folder for plan in plans}


def test_the_folders_of_the_last_recipe_are_the_current_ones(root: Path) -> None:
    first, second = lay(root, 1), lay(root, 2)
    assert list(stage_folders(root).values()) == [plan.folder for plan in second]
    assert first[0].folder not in stage_folders(root).values()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "is not a run folder (it has no current.json)\nRun folders are in runs/"),
        ("{", "current.json: cannot be read: "),
        ("3", "current.json: cannot be read: "),
    ],
)
def test_a_folder_that_is_no_run_is_an_error_that_says_what_is_one(root: Path, text: str | None, told: str) -> None:
    root.mkdir()
    if text is not None:
        (root / CURRENT).write_text(text)
    with pytest.raises(RunError) as caught:
        stage_folders(root)
    assert told in str(caught.value)
    assert caught.value.hint


def test_what_does_not_exist_and_what_is_a_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none: does not exist"):
        stage_folders(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file: is not a run folder"):
        stage_folders(tmp_path / "file")


def test_a_stage_is_waiting_then_begun_then_done_and_may_be_damaged(root: Path) -> None:
    plans = lay(root)
    assert [(one.stage, one.state) for one in states(root)] == [("make", "waiting"), ("double", "waiting")]
    plans[0].folder.mkdir()
    assert states(root)[0].state == "waiting"
    (plans[0].folder / "half").touch()
    assert states(root)[0].state == "begun"
    (plans[0].folder / "half").unlink()
    execute(plans)
    done = states(root)
    assert [one.state for one in done] == ["done", "done"]
    assert done[0].stats == {"characters": 1}
    assert done[0].seconds is not None
    (plans[1].folder / "out.txt").write_text("y")
    assert states(root)[1].state == "done"
    assert states(root, thorough=True)[1].damage == "out.txt has another sha256"
    (plans[1].folder / "out.txt").unlink()
    assert [(one.state, one.damage) for one in states(root)] == [("done", ""), ("damaged", "out.txt is gone")]


def test_a_run_that_is_whole_has_no_waste(root: Path) -> None:
    execute(lay(root))
    assert waste(root) == []


def test_waste_is_what_other_settings_made_and_what_is_torn_and_nothing_else(root: Path) -> None:
    old = lay(root, 1)
    execute(old)
    new = lay(root, 2)
    execute(new)
    torn = new[0].folder / "checkpoints" / f"000000005{core_io.PARTIAL}"
    torn.mkdir(parents=True)
    (torn / f"model.safetensors{core_io.PARTIAL}").write_bytes(bytes(40))
    (new[1].folder / f"out.txt{core_io.PARTIAL}").write_bytes(bytes(3))
    for name in ("notes", "01-make-mine", ".git"):  # a person's own
        (root / name).mkdir()
        (root / name / "file.txt").touch()
    found = waste(root)
    assert {(one.path, one.why.split(":")[0]) for one in found} == {
        (old[0].folder, "made with other settings"),
        (old[1].folder, "made with other settings"),
        (torn, "torn"),
        (new[1].folder / f"out.txt{core_io.PARTIAL}", "torn"),
    }
    sizes = {one.path: one.size for one in found}
    assert (sizes[torn], sizes[new[1].folder / f"out.txt{core_io.PARTIAL}"]) == (40, 3)
    kept = {path for path in root.rglob("*") if not any(path.is_relative_to(one.path) for one in found)}
    freed = sum(file.stat().st_size for one in found for file in [one.path, *one.path.rglob("*")] if file.is_file())
    assert delete(found) == freed == sum(one.size for one in found)
    assert set(root.rglob("*")) == kept
    assert waste(root) == []
    assert [one.state for one in states(root)] == ["done", "done"]


def test_the_size_of_a_folder_is_that_of_all_its_files(root: Path) -> None:
    plans = lay(root)
    execute(plans)
    folder = plans[0].folder
    assert size_of(folder) == 1 + 10 + size_of(folder / MANIFEST)
    assert size_of(folder / "out.txt") == 1
