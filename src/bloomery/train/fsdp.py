"""
Train one model on several ranks: sum gradients, shard with FSDP2, and gather full copies.

Each rank computes its sequences of the global batch. Their losses are already divided by the count of the whole
batch. So gradients are added over ranks and not averaged. This happens in float32, in buckets, once a step and
after all its micro-batches.

A sharded model (FSDP2, torch.distributed.fsdp.fully_shard) lies in pieces. Each rank holds its part of every
weight, gradient and optimizer number. A group of weights is gathered when its module is needed. After every
micro-batch, its gradients are added up by the ranks that keep them. RULES says what belongs together. The model
itself knows nothing of it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.fused_adamw import total_norm

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

RULES = (
    (r"(blocks\.\d+)\..+", 0),
    (r"()(embed|positions|norm|head)\..+", 0),
)
"""
Name of a weight -> in brackets the module that puts it together with its others, "" for the model itself; and the axis
along which ranks share it. Every weight is of exactly one rule. The head is the model's own, because the loss reads it.
"""

BUCKET_NUMBERS = 2**23
"""Numbers that go to the other ranks at once, if no weight has more: 32 MiB."""


def peak(device: Device, world: World) -> float:
    """FLOP/s of the matmuls of all ranks together. All ranks measure at the same time: some may share a machine."""
    world.barrier()
    return float(world.sum(torch.tensor(measured_peak(device), dtype=torch.float64)))


def sum_gradients(model: nn.Module, world: World) -> None:
    """
    Give every weight the sum of its gradients on all ranks, the same bits on each.

    A rank without rows has no gradients, and adds nothing. What no rank has a gradient of stays without.
    """
    if world.size == 1 or is_sharded(model):
        return
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grad_counts = world.sum(torch.tensor([float(weight.grad is not None) for weight in weights]))
    with_grad = [weight for weight, count in zip(weights, grad_counts.tolist(), strict=True) if count]
    for bucket in _buckets(with_grad):
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flat = world.sum(torch.cat([part.flatten().float() for part in parts]))
        sizes = [part.numel() for part in parts]
        for weight, grad in zip(bucket, torch.split(flat, sizes), strict=True):
            weight.grad = grad.view_as(weight).to(weight.dtype)


def _buckets(weights: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    filled = 0
    for weight in weights:
        if bucket and filled + weight.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(weight)
        filled += weight.numel()
    if bucket:
        yield bucket


def copy_of(model: Transformer, world: World | None = None) -> Transformer:
    """
    A copy of the model in the CPU's memory, to be written while training continues. All ranks of a sharded model take
    part, and only the first rank gets the weights. If its memory does not hold them, all ranks raise the error.
    """
    weights: dict[str, Tensor] = model.state_dict()
    company = world if world is not None and is_sharded(model) else World.alone()
    copied: dict[str, Tensor] = {}
    lacking: Exception | None = None
    for name, weight in weights.items():
        full_weight = whole(weight)
        try:
            copied[name] = _copied(full_weight) if company.is_first and lacking is None else full_weight.to("meta")
        except (MemoryError, RuntimeError) as error:
            lacking = error
    with company.alike():
        if lacking is not None:
            raise lacking
    twin = on_meta(model.config, model.vocab_size)
    twin.load_state_dict(copied, assign=True)
    return twin


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", copy=True)


@contextmanager
def desk(out: Path, world: World) -> Iterator[Path]:
    """Where a rank writes what it tells of itself: `out` for the first; for others a folder that is thrown away."""
    if world.is_first:
        yield out
        return
    with TemporaryDirectory(prefix="bloomery-rank-") as name:
        yield Path(name)


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the weights of a model take in a file."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


# --- sharded models ------------------------------------------------------------------------------------------------


def groups(model: nn.Module) -> dict[str, list[str]]:
    """Module -> the weights that it puts together, by name. Raises ValueError for one that RULES leave open."""
    by_module: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        fitting = [match[1] for pattern, _ in RULES if (match := re.fullmatch(pattern, name))]
        if len(fitting) != 1:
            raise ValueError(f"{name} is of {len(fitting)} rules of train/fsdp.py, not of one")
        by_module.setdefault(fitting[0], []).append(name)
    return by_module


def shard(model: Transformer, world: World, device: Device, mesh: DeviceMesh | None = None) -> None:
    """
    Leave on each rank its part of every weight, where it computes. All ranks begin with the same whole weights. `mesh`
    is one of so many ranks, where there is one already.
    """
    mesh = mesh or init_device_mesh(device.torch_device.type, (world.size,))
    names = {weight: name for name, weight in model.named_parameters()}

    def placed(weight: nn.Parameter) -> Shard:
        return Shard(next(axis for pattern, axis in RULES if re.fullmatch(pattern, names[weight])))

    for name in sorted(groups(model), reverse=True):  # the model itself comes last, and takes what is left
        module: Any = fully_shard(model.get_submodule(name), mesh=mesh, shard_placement_fn=placed)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for method in ("extend", "logits"):
        register_fsdp_forward_method(model, method)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def settle(model: nn.Module) -> None:
    """Leave no weight together that a forward pass without a backward pass has put together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Of one that is spread over ranks, all of them have to ask."""
    full_tensor: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full_tensor.detach()


def like(tensor: Tensor, full_tensor: Tensor) -> Tensor:
    """Of a whole tensor that every rank has, the part that each has of another."""
    if not isinstance(tensor, DTensor):
        return full_tensor
    return distribute_tensor(full_tensor, tensor.device_mesh, tensor.placements, src_data_rank=None)


@torch.no_grad()
def take(model: Transformer, full_model: Transformer) -> None:
    """Give a sharded model the weights of a whole one that every rank has."""
    weights: dict[str, Tensor] = full_model.state_dict()
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        local_shard = like(weight, weights[name].to(weight.device))
        assert isinstance(local_shard, DTensor)
        weight.to_local().copy_(local_shard.to_local())


def micro_batches(batch: Batch, size: int, world: World, model: nn.Module) -> list[Batch]:
    """
    The micro-batches of this rank. Of a sharded model all ranks have the same number of them, because each waits for
    the parts of the others. Micro-batches that fill up the number have no supervised token, and add exactly zero.
    """
    own = batch.of_rank(world.rank, world.size).split(size)
    if not is_sharded(model):
        return own
    rows = -(-len(batch.ids) // world.size)
    blank = replace(batch.split(1)[0], targets=np.full_like(batch.targets[:1], IGNORE))
    return own + [blank] * (-(-rows // size) - len(own))


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, the same bits on every rank."""
    return whole(total_norm(list(gradients)))


def is_finite(model: nn.Module, world: World) -> bool:
    """Whether all weights are, on all ranks."""
    own = all(bool(torch.isfinite(local(weight)).all()) for weight in model.parameters())
    return not world.any(not own) if is_sharded(model) else own


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; all of one that is not spread."""
    local_tensor: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.detach()
