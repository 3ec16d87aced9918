"""Find the folder with the weights of a run, stage, checkpoint or model that a person names."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core import run_dir
from bloomery.core.config import is_of_hub
from bloomery.core.errors import CheckpointError, DataError, RunError
from bloomery.core.io import MANIFEST
from bloomery.core.log import info
from bloomery.core.pipeline import CURRENT, RECIPE, read_manifest
from bloomery.weights import hub, pickled
from bloomery.weights.hf import is_model

TRAINED = ("prefer", "finetune", "pretrain")
"""Stages that leave a model, the one to talk to first."""
MODEL = "model/"
ANSWERING = TRAINED[:2]
"""Those whose models have learned conversations."""


@dataclass(frozen=True)
class LocatedModel:
    name: str
    """As in a picker: run, run/stage, or run/folder of a stage for one of other settings."""
    folder: Path
    damage: str = ""
    """Why the model cannot be used: which of its files is gone, or of another size or kind."""


def locate_model(path: Path) -> Path:
    """
    The folder with config.json and weights, or the GGUF file, that `path` stands for. Raises CheckpointError.

    hub:OWNER/NAME[@REVISION] stands for a model of a hub, which is fetched to the cache. A run folder stands for a
    model that its current settings have finished: that of `prefer`, else the finetuned model, else the pretrained
    model, which is logged. A finished model that is damaged is an error: no other model replaces it. A stage folder
    stands for the model it left. Weights that PyTorch pickled, named as a file, stand for their folder.
    """
    if is_of_hub(path):
        return hub.fetched(str(path))
    if not path.exists():
        raise CheckpointError("does not exist", where=str(path), hint="Name a run folder, for example runs/demo.")
    kernel = core_io.kernel(path)
    if what := (f"lies in {kernel}" if kernel else "") if path.is_dir() else core_io.special(path):
        raise DataError(what, where=str(path), hint="Name the file or the folder of a model.")
    if (path / CURRENT).is_file():
        return _of_run(path)
    if path.is_file() and pickled.is_named(path):
        return pickled.converted(path)
    for folder in (path, path / "model"):
        if is_model(folder):
            return folder
    hint = "Name a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME."
    raise CheckpointError("holds no model", where=str(path), hint=hint)


def models(root: Path) -> Iterator[LocatedModel]:
    """
    The finished models of every run folder under `root`, those that answer first. Where the current settings of a run
    have not finished a stage, the newest one of other settings stands in, under the name of its folder. Folders whose
    path is not UTF-8 are left out (`unnamable`).
    """
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not _is_utf8(folder):
            continue
        try:
            finished = _finished(folder)
        except RunError:
            continue  # something else that lies in the folder of runs
        answers = next((stage for stage in ANSWERING if stage in finished), "")
        for stage in TRAINED:
            if stage in finished:
                name = folder.name if stage == answers else f"{folder.name}/{stage}"
                yield LocatedModel(name, finished[stage] / "model", _damage(finished[stage]))
            elif older := _older(folder, stage):
                yield LocatedModel(f"{folder.name}/{older.name}", older / "model")


def unnamable(root: Path) -> list[Path]:
    """The folders under `root` whose path is not UTF-8: neither JSON nor safetensors can name their files."""
    return [folder for folder in sorted(root.iterdir()) if not _is_utf8(folder)] if root.is_dir() else []


def _is_utf8(path: Path) -> bool:
    return str(path).encode("utf-8", "replace").decode() == str(path)


def check(run: Path, stage: Path, damage: str) -> None:
    """Raises CheckpointError for a finished stage whose model is damaged."""
    if damage:
        hint = f"Remove {stage / MANIFEST}, and run: {_command(run, stage.name.split('-')[1])}"
        raise CheckpointError(f"its model is damaged: {damage}", where=str(stage), hint=hint)


def _of_run(run: Path) -> Path:
    finished = _finished(run)
    if (answers := next((stage for stage in ANSWERING if stage in finished), None)) is not None:
        check(run, finished[answers], _damage(finished[answers]))
        if answers != ANSWERING[0] and ANSWERING[0] in run_dir.current(run):
            info(f"{run}: prefer is not done, so this is the finetuned model", "yellow")
        return finished[answers] / "model"
    asked = [stage for stage in TRAINED if stage in run_dir.current(run)]
    hint = f"Finish it: {_command(run, asked[0])}" if asked else "Its recipe trains none: write [pretrain] into it."
    why = "finetune is not done"
    if asked[:1] == ["pretrain"] and finished:
        why, hint = "its recipe has no [finetune]", "Write [instruct] and [finetune] into the recipe, and run it."
    if older := next(filter(None, (_older(run, stage) for stage in TRAINED if stage not in finished)), None):
        hint += f"\nOr name what was finished with other settings: {older}"
    if not finished:
        raise CheckpointError("no model is finished with its current settings", where=str(run), hint=hint)
    check(run, finished["pretrain"], _damage(finished["pretrain"]))
    info(f"{run}: {why}, so this model only continues text\n{hint}", "yellow")
    return finished["pretrain"] / "model"


def _command(run: Path, last: str) -> str:
    """The command that finishes a run: up to the last stage that trains, where its recipe has no section for others."""
    words = ["bloomery", "run", str(run / RECIPE), "--runs", str(run.parent)]
    return shlex.join(words if last in ANSWERING else [*words, "--until", last])


def _finished(run: Path) -> dict[str, Path]:
    """Stage -> folder of what the current settings of a run have trained to the end, be it damaged since."""
    return {stage: folder for stage, folder in run_dir.current(run).items() if stage in TRAINED and _is_done(folder)}


def _older(run: Path, stage: str) -> Path | None:
    """The folder of a stage that was finished last, with whatever settings, and is not damaged."""
    folders = (folder for folder in run.glob(f"[0-9][0-9]-{stage}-*") if _is_utf8(folder))
    done = [folder for folder in folders if _is_done(folder) and not _damage(folder)]
    return max(done, key=lambda folder: (folder / MANIFEST).stat().st_mtime, default=None)


def _is_done(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _damage(stage: Path) -> str:
    """Which file of the model of a finished stage is gone, or of another size or kind than its manifest says, or ""."""
    try:
        listed = _listed(stage / MANIFEST, (stage / MANIFEST).stat().st_mtime_ns)
    except RunError as error:
        return f"{MANIFEST} {error.what}"
    return core_io.find_corruption(stage, listed) or ("" if is_model(stage / "model") else "model/ holds no model")


@lru_cache(maxsize=1024)
def _listed(manifest: Path, changed: int) -> dict[str, Any]:
    """What a manifest that was changed at some time lists of the model: a server asks at every request."""
    return {name: facts for name, facts in read_manifest(manifest.parent)["outputs"].items() if name.startswith(MODEL)}
