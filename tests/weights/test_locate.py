import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery import cli
from bloomery.core import config, pipeline
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.io import MANIFEST
from bloomery.recipe import STAGES, Recipe
from bloomery.weights import hf
from bloomery.weights.locate import LocatedModel, locate_model, models
from tests.core.made import manifest
from tests.tokenizer.made import small
from tests.weights.made import FOLDERS, model, run


def test_a_run_stands_for_its_finetuned_model_or_for_its_pretrained_one(tmp_path: Path) -> None:
    both = run(tmp_path / "both", "fetch", "pretrain", "finetune")
    assert locate_model(both) == both / FOLDERS["finetune"] / "model"
    one = run(tmp_path / "one", "fetch", "pretrain")
    assert locate_model(one) == one / FOLDERS["pretrain"] / "model"


def test_a_stage_a_checkpoint_and_a_model_folder_stand_for_themselves(tmp_path: Path) -> None:
    stage = run(tmp_path / "run", "pretrain") / FOLDERS["pretrain"]
    assert locate_model(stage) == stage / "model"
    assert locate_model(stage / "model") == stage / "model"
    checkpoint = model(stage / "checkpoints" / "000000010")
    assert locate_model(checkpoint) == checkpoint
    assert hf.load(locate_model(checkpoint)).tokenizer.hash == small().hash


CASES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("nothing", lambda root: None, "does not exist\nUse a run folder"),
    ("an empty folder", lambda root: root.mkdir(), "holds no model\nGive a run, stage, checkpoint"),
    ("a file", lambda root: root.touch(), "holds no model\n"),
    (
        "a new run",
        lambda root: run(root, "fetch"),
        "no model with its current settings is complete\nFinish it: ",
    ),
    (
        "a run that has not trained yet",
        lambda root: run(root, "fetch", begun=("pretrain",)),
        "no model with its current settings is complete\nFinish it: bloomery run ",
    ),
]


@pytest.mark.parametrize(("make", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_holds_no_model_is_an_error_that_says_what_to_name(
    tmp_path: Path, make: Callable[[Path], Any], told: str
) -> None:
    make(tmp_path / "it")
    with pytest.raises(CheckpointError) as caught:
        locate_model(tmp_path / "it")
    assert caught.value.where == str(tmp_path / "it")
    assert told in str(caught.value)


def test_a_model_that_is_still_trained_is_not_the_one_of_its_run_which_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", begun=("finetune",))
    assert locate_model(root) == root / FOLDERS["pretrain"] / "model"
    assert "finetune is not done, so this model only continues text\nFinish it: " in capsys.readouterr().err
    locate_model(run(tmp_path / "whole", "pretrain", "finetune"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("begun", [(), ("pretrain",), ("pretrain", "finetune"), ("finetune",)])
def test_the_command_that_finishes_a_run_is_one_that_its_recipe_can_be_run_with(
    tmp_path: Path, begun: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without [finetune] a run ends before it, and `bloomery run` without --until is an error."""
    done = [stage for stage in ("fetch", "pretrain") if stage not in begun]
    root = run(tmp_path / "runs of mine" / "a", *done, begun=begun)
    sections = {"pretrain", "finetune"} & {*done, *begun}
    core_io.write_json(root / "current.json", {name: FOLDERS[name] for name in ("fetch", *sections)})
    (root / "recipe.toml").write_text(
        'name = "a"\nfetch = {}\n'
        + "".join(f"[{name}]\nsteps = 1\nglobal_batch_tokens = 512\n" for name in sections)
        + '[instruct]\nsources = [{kind = "worlds", count = 9}]\n'
    )
    try:
        locate_model(root)
        said = capsys.readouterr().err
    except CheckpointError as error:
        said = str(error)
    proposed = re.findall(r"bloomery run .*", said)
    assert bool(proposed) == bool(begun), said
    for command in proposed:
        options = cli.parse(shlex.split(command)[1:])
        recipe = config.load(Recipe, options.recipe, options.settings)
        pipeline.check_sections(STAGES, recipe, until=options.until, only=options.only)
        assert options.runs / recipe.name == root


def other_settings(root: Path, *changed: str) -> dict[str, str]:
    """As a run with other settings leaves current.json, when nothing of what changed was made."""
    names = FOLDERS | {stage: FOLDERS[stage][:-8] + "dddddddd" for stage in changed}
    core_io.write_json(root / "current.json", names)
    return names


def test_a_model_of_other_settings_is_named_and_never_taken_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", "finetune")
    older = model(root / "10-finetune-00000000" / "model").parent
    core_io.write_json(older / MANIFEST, manifest())
    os.utime(older / MANIFEST, (1, 1))
    told = f"Or name what was finished with other settings: {root / FOLDERS['finetune']}"

    other_settings(root, "finetune")
    assert locate_model(root) == root / FOLDERS["pretrain"] / "model"
    assert capsys.readouterr().err.endswith(f"{told}\n")
    assert [one.name for one in models(tmp_path)] == ["run/10-finetune-cccccccc", "run/pretrain"]

    names = other_settings(root, "pretrain", "finetune")
    with pytest.raises(CheckpointError, match="no model with its current settings is complete") as caught:
        locate_model(root)
    assert str(caught.value).endswith(told)
    assert locate_model(Path(told.split()[-1])) == root / FOLDERS["finetune"] / "model"
    assert list(models(tmp_path)) == [
        LocatedModel(f"run/{FOLDERS[stage]}", root / FOLDERS[stage] / "model") for stage in ("finetune", "pretrain")
    ]

    model(root / names["finetune"] / "model")  # begun: no manifest yet
    assert next(models(tmp_path)).name == "run/10-finetune-cccccccc"
    core_io.write_json(root / names["finetune"] / MANIFEST, manifest())
    assert [one.name for one in models(tmp_path)] == ["run", "run/07-pretrain-bbbbbbbb"]


def test_the_finished_models_of_all_runs_are_listed_those_that_answer_first(tmp_path: Path) -> None:
    run(tmp_path / "b", "fetch", "pretrain", "finetune")
    run(tmp_path / "a", "pretrain", begun=("finetune",))
    run(tmp_path / "c", "fetch")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert list(models(tmp_path)) == [
        LocatedModel("a/pretrain", tmp_path / "a" / FOLDERS["pretrain"] / "model"),
        LocatedModel("b", tmp_path / "b" / FOLDERS["finetune"] / "model"),
        LocatedModel("b/pretrain", tmp_path / "b" / FOLDERS["pretrain"] / "model"),
    ]
    assert list(models(tmp_path / "none")) == []


def test_a_run_whose_list_of_stages_is_damaged_is_an_error_that_names_it(tmp_path: Path) -> None:
    root = run(tmp_path / "run", "pretrain")
    (root / "current.json").write_text("{")
    with pytest.raises(RunError, match=r"(?s)current\.json: cannot be read.*run its recipe again"):
        locate_model(root)
    assert list(models(tmp_path)) == []


def test_a_run_stands_for_the_model_of_what_is_preferred_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", "finetune")
    preferred = root / "11-prefer-dddddddd"
    model(preferred / "model")
    core_io.write_json(root / "current.json", FOLDERS | {"prefer": preferred.name})
    assert locate_model(root) == root / FOLDERS["finetune"] / "model"
    assert "prefer is not done, so this is the finetuned model" in capsys.readouterr().err
    assert [one.name for one in models(tmp_path)] == ["run", "run/pretrain"]
    core_io.write_json(preferred / MANIFEST, manifest())
    assert locate_model(root) == preferred / "model"
    assert [one.name for one in models(tmp_path)] == ["run", "run/finetune", "run/pretrain"]


def gone(file: Path) -> None:
    file.unlink()


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def finished(root: Path, *stages: str) -> Path:
    """A run whose manifests list the files of its stages."""
    run(root, *stages)
    for name in stages:
        folder = root / FOLDERS[name]
        (folder / MANIFEST).unlink()
        core_io.write_json(folder / MANIFEST, manifest(core_io.listing(folder), hands_on="model/"))
    return root


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize(("harm", "told"), [(gone, "is gone"), (longer, "instead of"), (fifo, "is a FIFO")])
def test_no_other_model_stands_in_for_a_finished_one_that_is_damaged(
    tmp_path: Path, name: str, harm: Callable[[Path], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = finished(tmp_path / "run", "pretrain", "finetune")
    stage = root / FOLDERS["finetune"]
    harm(stage / MANIFEST if name == MANIFEST else stage / "model" / name)
    if name == MANIFEST and harm is not fifo:
        locate_model(root)  # gone: it is not done; a blank more is no damage
        return
    with pytest.raises(CheckpointError) as caught:
        locate_model(root)
    assert caught.value.where == str(stage)
    assert name in caught.value.what
    assert told in caught.value.what or name == MANIFEST
    assert f"Remove {stage / MANIFEST}, and run: bloomery run {root / 'recipe.toml'}" in caught.value.hint
    assert [(one.name, bool(one.damage)) for one in models(tmp_path)] == [("run", True), ("run/pretrain", False)]
    assert capsys.readouterr().err == ""


def test_a_finished_model_is_used_where_another_file_of_its_stage_is_gone(tmp_path: Path) -> None:
    root = finished(tmp_path / "run", "pretrain", "finetune")
    stage = root / FOLDERS["finetune"]
    (stage / "metrics.jsonl").touch()
    core_io.write_json(stage / MANIFEST, manifest(core_io.listing(stage), hands_on="model/"))
    (stage / "metrics.jsonl").unlink()
    assert locate_model(root) == stage / "model"
