"""
Checkpoints of a training run: whole or absent, and checked before they are believed.

    checkpoints/000001000/    a model as `huggingface.py` writes it, and beside it
        training.safetensors  what the optimizers remember
        state.json            step, samples, tokens, and the metrics of the last step
        manifest.json         size and sha256 of every other file; written last

All files go to 000001000.partial, are flushed, and the folder takes its name by one rename. The newest checkpoint that
is as its manifest says is used; one that is not is passed over, and said.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import files
from bloomery.core.files import MANIFEST
from bloomery.core.log import say

import safetensors.torch
from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]
    training: dict[str, Tensor]


def save(
    root: Path,
    step: int,
    write_model: Callable[[Path], None],
    training: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """
    Save a checkpoint for `step` under `root`, and then remove all but the newest `keep`.

    Whatever else lies there of this step or of later ones is damaged: an attempt that died left it, or it was passed
    over. Raises RunError where the disk is full.
    """
    folder = root / f"{step:09d}"
    partial = folder.with_name(folder.name + files.PARTIAL)
    with files.disk_errors(folder):
        for stale in [*root.glob(f"*{files.PARTIAL}"), *(one for one in _folders(root) if one >= folder)]:
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
        write_model(partial)
        save_tensors(partial / "training.safetensors", training)
        files.write_json(partial / "state.json", dict(state))
        files.write_json(partial / MANIFEST, {"step": step, "outputs": files.listing(partial)})
        files.sync_folder(partial)
        partial.rename(folder)
        files.sync_folder(root)
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a whole safetensors file."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with files.whole_file(path) as file:
        file.write(safetensors.torch.save(ready, metadata={"format": "pt"}))


def newest(root: Path, before: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, of those of a step before `before` where that is given, or None."""
    for folder in reversed(_folders(root)):
        if before is not None and int(folder.name) >= before:
            continue
        if trouble := damage(folder):
            say(f"checkpoint {folder} is passed over: {trouble}", style="yellow")
            continue
        training = safetensors.torch.load_file(folder / "training.safetensors")
        return Checkpoint(folder, files.read_json(folder / "state.json"), training)
    return None


def damage(folder: Path) -> str:
    """Why a checkpoint is not as its manifest says, or ""."""
    if not (folder / MANIFEST).is_file():
        return "it has no manifest"
    try:
        return files.damage(folder, files.read_json(folder / MANIFEST)["outputs"], thorough=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its manifest cannot be read"


def _folders(root: Path) -> list[Path]:
    """Finished checkpoint folders by step; their names have nine digits, so that they sort as numbers do."""
    return sorted(folder for folder in root.glob("[0-9]" * 9) if folder.is_dir())
