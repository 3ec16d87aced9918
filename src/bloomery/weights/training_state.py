"""
What optimizers remember, as files: torch.distributed.checkpoint, kept in safetensors.

The format that torch.distributed.checkpoint writes by itself holds a pickle (.metadata), and no pickle is read here.
Its storage for safetensors keeps the same facts as JSON in the header of each file: which part of which tensor it
holds. So what some ranks have written in parts can be read by any other number of them.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import files
from bloomery.core.errors import CheckpointError, shorten
from bloomery.hw.dist import World

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

FILE_BYTES = 256 * 2**20
"""Of one file at most, if no tensor is larger: a file is put together in memory before it is written."""

UNREADABLE = (OSError, SafetensorError, CheckpointException, ValueError, KeyError, TypeError, RuntimeError)
"""What torch.distributed.checkpoint raises for files that are not of its kind, and torch where memory is too small."""
Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Of the name, whole shape and number format of a tensor: where it, or this rank's part of it, is to be read to."""


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in memory of the processor, so that training may go on; of a sharded one, this rank's part."""
    return {name: _copied(tensor.detach()) for name, tensor in tensors.items()}


def _copied(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True).contiguous()
    mesh = init_device_mesh("cpu", tuple(tensor.device_mesh.shape))
    part = tensor.to_local().to("cpu", copy=True).contiguous()
    return DTensor.from_local(part, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors; of sharded ones, all parts together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether ranks hold parts of them, and so all of them have to write."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """
    Write tensors of the processor's memory as files below a folder, flushed. Every rank of `world` takes part, each
    with its parts. Raises OSError where a disk is full, on all ranks where it is for one of them.
    """
    _quiet()
    with world.alike(), files.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(sorted(tensors.items()))  # so that equal states are equal files
    index, filled = {}, 0
    for name, tensor in tensors.items():
        index[name] = filled // FILE_BYTES + 1
        filled += tensor.numel() * tensor.element_size()
    numbers = {number: place for place, number in enumerate(sorted(set(index.values())), 1)}
    index = {name: numbers[number] for name, number in index.items()}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=index or None, save_distributed=True)
    try:
        save(tensors, storage_writer=writer, process_group=world.group, no_dist=world.size == 1)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, OSError):
                raise cause from error
        raise
    files.sync_folder(folder)


def read(folder: Path, place: Place | None = None) -> dict[str, Tensor]:
    """
    The tensors that `write` left, whole, or in the parts that `place` makes room for. Raises CheckpointError for files
    that it has not written, or whose tensors `place` has no room for.
    """
    _quiet()
    room: dict[str, Tensor] = {}
    try:
        for name, facts in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
            if not isinstance(facts, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            kind = facts.properties.dtype
            room[name] = torch.empty(facts.size, dtype=kind) if place is None else place(name, facts.size, kind)
        if room:
            load(room, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except UNREADABLE as error:
        what = f"cannot be read: {type(error).__name__}: {shorten(str(error))}"
        cure = f"Remove {folder.parent}, and the same command goes on from the checkpoint before it."
        raise CheckpointError(what, where=str(folder), cure=cure) from None
    return room


def _quiet() -> None:
    """torch.distributed.checkpoint warns whenever one process saves alone, as is meant here, and logs every tensor."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


_quiet()  # before another thread opens a `catch_warnings`, whose end takes back what was said meanwhile
