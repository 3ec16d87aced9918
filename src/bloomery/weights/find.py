"""From what a person names (a run, a stage, a checkpoint, a model folder) to the folder that holds the weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.core import run as runs
from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.stage import MANIFEST
from bloomery.weights.huggingface import CONFIG, WEIGHTS

TRAINED = ("finetune", "pretrain")
"""Stages that leave a model, the one to talk to first."""


@dataclass(frozen=True)
class Found:
    name: str
    """As in a picker: run, or run/stage."""
    folder: Path


def model_folder(path: Path) -> Path:
    """
    The folder with config.json and model.safetensors that `path` stands for. Raises CheckpointError.

    A run folder stands for its finetuned model, or for its pretrained one where there is no other; a stage folder for
    the model it left.
    """
    if not path.exists():
        raise CheckpointError("does not exist", where=str(path), cure="Name a run folder, for example runs/demo.")
    if (path / runs.CURRENT).is_file():
        if finished := _finished(path):
            return finished[0][1]
        cure = f"Finish it first: bloomery run {path / runs.RECIPE}"
        raise CheckpointError("this run has no finished model yet", where=str(path), cure=cure)
    for folder in (path, path / "model"):
        if _is_model(folder):
            return folder
    cure = "Name a run folder, a stage folder that trained something, a checkpoint folder, or a model folder."
    raise CheckpointError("holds no model", where=str(path), cure=cure)


def models(root: Path) -> Iterator[Found]:
    """Every finished model of every run folder under `root`, those that answer first."""
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            finished = _finished(folder)
        except RunError:
            continue  # something else that lies in the folder of runs
        for stage, model in finished:
            yield Found(folder.name if stage == "finetune" else f"{folder.name}/{stage}", model)


def run_of(folder: Path) -> Path | None:
    """The run folder that a model folder lies in, if it lies in one."""
    return next((parent for parent in folder.parents if (parent / runs.CURRENT).is_file()), None)


def _finished(run: Path) -> list[tuple[str, Path]]:
    """Stage and model folder of what a run has trained to the end."""
    folders = runs.current(run)
    done = [(stage, folders[stage]) for stage in TRAINED if stage in folders and (folders[stage] / MANIFEST).is_file()]
    return [(stage, folder / "model") for stage, folder in done if _is_model(folder / "model")]


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()
