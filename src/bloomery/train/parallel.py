"""
One model on several ranks: gradients are added up, and copies are whole.

Each rank computes its rows of the global batch, whose losses are already divided by the count of the whole of it. So
gradients are added over ranks and not averaged, in float32, in buckets, once a step and after all its micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.hw.peak import measured_peak
from bloomery.model.transformer import Transformer

import torch
from torch import Tensor, nn

BUCKET_NUMBERS = 2**23
"""Numbers that go to the other ranks at once, if no weight has more: 32 MiB."""


def peak(device: Device, world: World) -> float:
    """FLOP/s of the matrix products of all ranks together. They measure at the same time: some may share a machine."""
    world.barrier()
    return float(world.sum(torch.tensor(measured_peak(device), dtype=torch.float64)))


def sum_gradients(model: nn.Module, world: World) -> None:
    """
    Give every weight the sum of its gradients on all ranks, the same bits on each.

    A rank without rows has no gradients, and adds nothing. What no rank has a gradient of stays without.
    """
    if world.size == 1:
        return
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    given = world.sum(torch.tensor([float(weight.grad is not None) for weight in weights]))
    wanted = [weight for weight, count in zip(weights, given.tolist(), strict=True) if count]
    for bucket in _buckets(wanted):
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flat = world.sum(torch.cat([part.flatten().float() for part in parts]))
        sizes = [part.numel() for part in parts]
        for weight, part in zip(bucket, torch.split(flat, sizes), strict=True):
            weight.grad = part.view_as(weight).to(weight.dtype)


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


def copy_of(model: Transformer) -> Transformer:
    """A model with the same weights in memory of the processor, to be written while training goes on."""
    weights: dict[str, Tensor] = model.state_dict()
    copied = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
    with torch.device("meta"):
        twin = Transformer(model.config, model.vocab_size)
    twin.load_state_dict(copied, assign=True)
    return twin


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
