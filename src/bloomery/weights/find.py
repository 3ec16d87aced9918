"""From what a person names (a run, a stage, a checkpoint, a model folder) to the folder that holds the weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.core import run as runs
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.files import MANIFEST
from bloomery.core.log import say
from bloomery.weights.huggingface import is_model

TRAINED = ("prefer", "finetune", "pretrain")
"""Stages that leave a model, the one to talk to first."""
ANSWERING = TRAINED[:2]
"""Those whose models have learned conversations."""


@dataclass(frozen=True)
class Found:
    name: str
    """As in a picker: run, run/stage, or run/folder of a stage for one of other settings."""
    folder: Path


def model_folder(path: Path) -> Path:
    """
    The folder with config.json and model.safetensors that `path` stands for. Raises CheckpointError.

    A run folder stands for what its current settings have finished: the model of `prefer`, or the finetuned one, or
    else the pretrained one, which is said. A stage folder stands for the model it left.
    """
    if not path.exists():
        raise CheckpointError("does not exist", where=str(path), cure="Name a run folder, for example runs/demo.")
    if (path / runs.CURRENT).is_file():
        return _of_run(path)
    for folder in (path, path / "model"):
        if is_model(folder):
            return folder
    cure = "Name a run folder, a stage folder that trained something, a checkpoint folder, or a model folder."
    raise CheckpointError("holds no model", where=str(path), cure=cure)


def models(root: Path) -> Iterator[Found]:
    """
    The finished models of every run folder under `root`, those that answer first. Where the current settings of a run
    have not finished a stage, the newest one of other settings stands in, under the name of its folder.
    """
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            finished = _finished(folder)
        except RunError:
            continue  # something else that lies in the folder of runs
        answers = next((stage for stage in ANSWERING if stage in finished), "")
        for stage in TRAINED:
            if stage in finished:
                yield Found(folder.name if stage == answers else f"{folder.name}/{stage}", finished[stage] / "model")
            elif older := _older(folder, stage):
                yield Found(f"{folder.name}/{older.name}", older / "model")


def _of_run(run: Path) -> Path:
    finished = _finished(run)
    if (answers := next((stage for stage in ANSWERING if stage in finished), None)) is not None:
        if answers != ANSWERING[0] and ANSWERING[0] in runs.current(run):
            say(f"{run}: prefer is not done, so this is the finetuned model", "yellow")
        return finished[answers] / "model"
    cure = f"Finish it: bloomery run {run / runs.RECIPE}"
    if older := next(filter(None, (_older(run, stage) for stage in TRAINED if stage not in finished)), None):
        cure += f"\nOr name what was finished with other settings: {older}"
    if not finished:
        raise CheckpointError("no model is finished with its current settings", where=str(run), cure=cure)
    say(f"{run}: finetune is not done, so this model only continues text\n{cure}", "yellow")
    return finished["pretrain"] / "model"


def _finished(run: Path) -> dict[str, Path]:
    """Stage -> folder of what the current settings of a run have trained to the end."""
    return {stage: folder for stage, folder in runs.current(run).items() if stage in TRAINED and _is_done(folder)}


def _older(run: Path, stage: str) -> Path | None:
    """The folder of a stage that was finished last, with whatever settings."""
    done = [folder for folder in run.glob(f"[0-9][0-9]-{stage}-*") if _is_done(folder)]
    return max(done, key=lambda folder: (folder / MANIFEST).stat().st_mtime, default=None)


def _is_done(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and is_model(folder / "model")
