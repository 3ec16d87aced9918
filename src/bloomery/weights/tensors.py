"""Tensors as a whole safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import files

import safetensors.torch
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file that is whole or absent."""
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with files.whole_file(path) as file:
        file.write(safetensors.torch.save(ready, metadata={"format": "pt"}))
