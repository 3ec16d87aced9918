"""Tensors as safetensors files: written whole, and read one at a time, from one file or from several with an index."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import files
from bloomery.core.errors import CheckpointError

import safetensors.torch
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file that is whole or absent."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with files.whole_file(path) as file:
        file.write(safetensors.torch.save(ready, metadata={"format": "pt"}))


class Tensors:
    """The tensors of a model folder, by name. Raises CheckpointError where there are none, or a file is torn."""

    def __init__(self, folder: Path, cure: str) -> None:
        """`cure` is what helps where a file is damaged."""
        self._folder, self._cure = folder, cure
        self._open: dict[str, Any] = {}
        if (folder / WEIGHTS).is_file():
            self.file = folder / WEIGHTS
            self._files = dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)
        elif (folder / INDEX).is_file():
            self.file = folder / INDEX
            self._files = self._index()
        else:
            raise self._missing()

    def get(self, name: str) -> Tensor | None:
        """
        A tensor, on the CPU, in the number format that it has there; None where there is none of this name. Files of
        the bare network, without a head, lack the first part of each name.
        """
        found = next((one for one in (name, name.partition(".")[2]) if one in self._files), None)
        if found is None or (found != name and name.startswith("lm_head")):
            return None
        try:
            tensor: Tensor = self._handle(self._files[found]).get_tensor(found)
        except SafetensorError as error:
            where = str(self._folder / self._files[found])
            raise CheckpointError(f"{found}: {error}", where=where, cure=self._cure) from None
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            file = self._folder / name
            if not file.is_file():
                raise CheckpointError(
                    f"there is no {name}, which the index names", where=str(self.file), cure=self._cure
                )
            try:
                self._open[name] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"is torn: {error}", where=str(file), cure=self._cure) from None
        return self._open[name]

    def _index(self) -> dict[str, str]:
        try:
            names: dict[str, str] = dict(files.read_json(self.file)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"is no index of weights: {type(error).__name__}: {error}"
            raise CheckpointError(what, where=str(self.file), cure=self._cure) from None
        if wrong := next((name for name in names.values() if Path(name).name != name), None):
            raise CheckpointError(
                f"names the file {wrong!r}, which is not beside it", where=str(self.file), cure=self._cure
            )
        return names

    def _missing(self) -> CheckpointError:
        if found := is_pickled(self._folder):
            what = f"its weights are a pickle ({found}), which could run any code while it is read"
            cure = (
                "Take the same model as safetensors; where you trust the file, transformers makes one of it:\n"
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
            )
            return CheckpointError(what, where=str(self._folder), cure=cure)
        cure = "Name a run folder, a stage folder, a checkpoint folder, or a model folder."
        return CheckpointError(f"there is no {WEIGHTS}", where=str(self._folder), cure=cure)


def is_pickled(folder: Path) -> str:
    """The name of a file with weights that is never read, or ""."""
    return next((file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))), "")
