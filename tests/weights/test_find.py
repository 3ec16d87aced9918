import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import files
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.files import MANIFEST
from bloomery.weights import huggingface
from bloomery.weights.find import Found, model_folder, models
from tests.tokenizer.made import small
from tests.weights.made import FOLDERS, model, run


def test_a_run_stands_for_its_finetuned_model_or_for_its_pretrained_one(tmp_path: Path) -> None:
    both = run(tmp_path / "both", "fetch", "pretrain", "finetune")
    assert model_folder(both) == both / FOLDERS["finetune"] / "model"
    one = run(tmp_path / "one", "fetch", "pretrain")
    assert model_folder(one) == one / FOLDERS["pretrain"] / "model"


def test_a_stage_a_checkpoint_and_a_model_folder_stand_for_themselves(tmp_path: Path) -> None:
    stage = run(tmp_path / "run", "pretrain") / FOLDERS["pretrain"]
    assert model_folder(stage) == stage / "model"
    assert model_folder(stage / "model") == stage / "model"
    checkpoint = model(stage / "checkpoints" / "000000010")
    assert model_folder(checkpoint) == checkpoint
    assert huggingface.load(model_folder(checkpoint)).tokenizer.hash == small().hash


CASES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("nothing", lambda root: None, "does not exist\nName a run folder"),
    ("an empty folder", lambda root: root.mkdir(), "holds no model\nName a run folder, a stage folder"),
    ("a file", lambda root: root.touch(), "holds no model\n"),
    ("a new run", lambda root: run(root, "fetch"), "no model is finished with its current settings\nFinish it: "),
]


@pytest.mark.parametrize(("make", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_holds_no_model_is_an_error_that_says_what_to_name(
    tmp_path: Path, make: Callable[[Path], Any], told: str
) -> None:
    make(tmp_path / "it")
    with pytest.raises(CheckpointError) as caught:
        model_folder(tmp_path / "it")
    assert caught.value.where == str(tmp_path / "it")
    assert told in str(caught.value)


def test_a_model_that_is_still_trained_is_not_the_one_of_its_run_which_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", begun=("finetune",))
    assert model_folder(root) == root / FOLDERS["pretrain"] / "model"
    assert "finetune is not done, so this model only continues text\nFinish it: " in capsys.readouterr().err
    model_folder(run(tmp_path / "whole", "pretrain", "finetune"))
    assert capsys.readouterr().err == ""


def other_settings(root: Path, *changed: str) -> dict[str, str]:
    """As a run with other settings leaves current.json, when nothing of what changed was made."""
    names = FOLDERS | {stage: FOLDERS[stage][:-8] + "dddddddd" for stage in changed}
    files.write_json(root / "current.json", names)
    return names


def test_a_model_of_other_settings_is_named_and_never_taken_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", "finetune")
    older = model(root / "10-finetune-00000000" / "model").parent
    files.write_json(older / MANIFEST, {"outputs": {}})
    os.utime(older / MANIFEST, (1, 1))
    told = f"Or name what was finished with other settings: {root / FOLDERS['finetune']}"

    other_settings(root, "finetune")
    assert model_folder(root) == root / FOLDERS["pretrain"] / "model"
    assert capsys.readouterr().err.endswith(f"{told}\n")
    assert [one.name for one in models(tmp_path)] == ["run/10-finetune-cccccccc", "run/pretrain"]

    names = other_settings(root, "pretrain", "finetune")
    with pytest.raises(CheckpointError, match="no model is finished with its current settings") as caught:
        model_folder(root)
    assert str(caught.value).endswith(told)
    assert model_folder(Path(told.split()[-1])) == root / FOLDERS["finetune"] / "model"
    assert list(models(tmp_path)) == [
        Found(f"run/{FOLDERS[stage]}", root / FOLDERS[stage] / "model") for stage in ("finetune", "pretrain")
    ]

    model(root / names["finetune"] / "model")  # begun: no manifest yet
    assert next(models(tmp_path)).name == "run/10-finetune-cccccccc"
    files.write_json(root / names["finetune"] / MANIFEST, {"outputs": {}})
    assert [one.name for one in models(tmp_path)] == ["run", "run/07-pretrain-bbbbbbbb"]


def test_the_finished_models_of_all_runs_are_listed_those_that_answer_first(tmp_path: Path) -> None:
    run(tmp_path / "b", "fetch", "pretrain", "finetune")
    run(tmp_path / "a", "pretrain", begun=("finetune",))
    run(tmp_path / "c", "fetch")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert list(models(tmp_path)) == [
        Found("a/pretrain", tmp_path / "a" / FOLDERS["pretrain"] / "model"),
        Found("b", tmp_path / "b" / FOLDERS["finetune"] / "model"),
        Found("b/pretrain", tmp_path / "b" / FOLDERS["pretrain"] / "model"),
    ]
    assert list(models(tmp_path / "none")) == []


def test_a_run_whose_list_of_stages_is_damaged_is_an_error_that_names_it(tmp_path: Path) -> None:
    root = run(tmp_path / "run", "pretrain")
    (root / "current.json").write_text("{")
    with pytest.raises(RunError, match=r"(?s)current\.json: cannot be read.*run its recipe again"):
        model_folder(root)
    assert list(models(tmp_path)) == []


def test_a_run_stands_for_the_model_of_what_is_preferred_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path / "run", "pretrain", "finetune")
    preferred = root / "11-prefer-dddddddd"
    model(preferred / "model")
    files.write_json(root / "current.json", FOLDERS | {"prefer": preferred.name})
    assert model_folder(root) == root / FOLDERS["finetune"] / "model"
    assert "prefer is not done, so this is the finetuned model" in capsys.readouterr().err
    assert [one.name for one in models(tmp_path)] == ["run", "run/pretrain"]
    files.write_json(preferred / MANIFEST, {"outputs": {}})
    assert model_folder(root) == preferred / "model"
    assert [one.name for one in models(tmp_path)] == ["run", "run/finetune", "run/pretrain"]
