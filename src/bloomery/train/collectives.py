"""
What a training step needs to know of ranks: its part of the batch, sums of gradients, and tensors that lie in parts.

Each rank computes its sequences of the global batch. Their losses are already divided by the count of the whole
batch. So gradients are added over ranks and not averaged. This happens in float32, in buckets, once a step. On a CPU
it comes after all micro-batches. On GPUs, buckets are summed while the backward pass of the last micro-batch computes.

train/fsdp.py cuts models. Here, a tensor in one piece is the simple case of each function.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw.distributed import World
from bloomery.shards.loader import IGNORE, Batch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

BUCKET_NUMBERS = 2**23
"""Numbers that go to the other ranks at once, if no weight has more: 32 MiB."""


def sum_gradients(model: nn.Module, world: World) -> None:
    """Give every weight the sum of its gradients on all ranks: see `GradientSums`."""
    with GradientSums(model, world) as sums:
        sums.finish()


class GradientSums:
    """
    Give every weight the sum of its gradients on all ranks, the same bits on each.

    A rank without rows has no gradients, and adds nothing. What no rank has a gradient of stays without. Overlapped
    sums begin within a backward pass, for each bucket as soon as its gradients are there, from the last layer on. All
    ranks begin them in the same order.
    """

    def __init__(self, model: nn.Module, world: World, *, overlapped: bool = False) -> None:
        """A context. With one rank, or a sharded model, it does nothing."""
        self._world, self._idle = world, world.size == 1 or is_sharded(model)
        self._weights = [] if self._idle else [weight for weight in model.parameters() if weight.requires_grad]
        self._overlapped = overlapped and not self._idle
        self._buckets = list(_buckets(self._weights[::-1])) if self._overlapped else []
        self._begun: list[tuple[Tensor, Any]] = []
        """Of each bucket in transfer: its numbers and flags, and what waits for them."""
        self._open: list[set[nn.Parameter]] = []
        self._hooks: list[Any] = []
        self._model: Any = model

    def __enter__(self) -> "GradientSums":
        self._divide(last=False)
        return self

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """The next backward pass is the last one: its gradients are final."""
        self._divide(last=True)
        if not self._overlapped:
            return
        self._open = [set(bucket) for bucket in self._buckets]
        bucket_of = {weight: number for number, bucket in enumerate(self._buckets) for weight in bucket}

        def done(weight: nn.Parameter) -> None:
            self._open[bucket_of[weight]].discard(weight)
            while len(self._begun) < len(self._buckets) and not self._open[len(self._begun)]:
                self._send(failed=False)

        self._hooks = [weight.register_post_accumulate_grad_hook(done) for weight in self._weights]  # type: ignore[no-untyped-call]

    def _divide(self, *, last: bool) -> None:
        """Of stages 1 and 2: weights stay together until the `last` backward pass, and with 1 so do gradients."""
        stage = getattr(self._model, "zero_stage", 3)
        if stage < 3:
            self._model.set_reshard_after_backward(last)
            self._model.set_requires_gradient_sync(last or stage == 2)

    def finish(self, failed: bool = False) -> bool:
        """Wait for the sums. Returns, the same on all ranks, whether one has `failed`: then gradients are of no use."""
        if self._idle:
            return failed
        if self._overlapped:
            return self._finish_overlapped(failed)
        flags = [float(weight.grad is not None) for weight in self._weights]
        *grad_counts, failures = self._world.sum(torch.tensor([*flags, float(failed)])).tolist()
        if failures:
            return True
        with_grad = [weight for weight, count in zip(self._weights, grad_counts, strict=True) if count]
        for bucket in _buckets(with_grad):
            parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
            flat = self._world.sum(torch.cat([part.flatten().float() for part in parts]))
            _hand_back(bucket, flat)
        return False

    def _send(self, failed: bool) -> None:
        """Begin the sum of the next bucket: its gradients, whether each is there, and whether this rank failed."""
        bucket = self._buckets[len(self._begun)]
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flags = torch.ones(len(bucket) + 1, device=parts[0].device)  # made there, so that the host does not wait
        flags[-1:].fill_(float(failed))
        for number, weight in enumerate(bucket):
            if weight.grad is None:
                flags[number : number + 1].zero_()
        flat = torch.cat([*(part.flatten().float() for part in parts), flags])
        del parts
        for weight in bucket:
            weight.grad = None  # the sum replaces it; until then it would be held twice
        self._begun.append((flat, self._world.begin_sum(flat)))

    def _finish_overlapped(self, failed: bool) -> bool:
        while len(self._begun) < len(self._buckets):
            self._send(failed)
        flags = list[Tensor]()
        for bucket, (flat, wait) in zip(self._buckets, self._begun, strict=True):
            wait()
            flags.append(flat[-len(bucket) - 1 :])
        counts = torch.cat(flags).tolist()  # the device is asked once
        failures = False
        for bucket, (flat, _) in zip(self._buckets, self._begun, strict=True):
            of_bucket, counts = counts[: len(bucket) + 1], counts[len(bucket) + 1 :]
            failures = failures or of_bucket[-1] > 0
            _hand_back(bucket, flat[: -len(bucket) - 1], of_bucket)
        self._begun = []
        return failures


def _hand_back(bucket: list[nn.Parameter], flat: Tensor, counts: list[float] | None = None) -> None:
    sizes = [weight.numel() for weight in bucket]
    for number, (weight, grad) in enumerate(zip(bucket, torch.split(flat, sizes), strict=True)):
        has_grad = counts is None or counts[number] > 0
        weight.grad = grad.view_as(weight).to(weight.dtype) if has_grad else None


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


def data_rank(model: nn.Module, world: World) -> tuple[int, int]:
    """Of the data: the part that is this rank's, and how many parts there are. Ranks of one matmul share a part."""
    tp = ranks_of_a_matmul(model)
    return world.rank // tp, max(1, world.size // tp)


def ranks_of_a_matmul(model: nn.Module) -> int:
    """How many there are: those of the axis tp of a mesh."""
    weight = next(model.parameters())
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    return int(weight.device_mesh["tp"].size()) if "tp" in names else 1  # type: ignore[attr-defined]


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
    """Of a whole tensor that every rank has, the part that each has of another, and where that lies."""
    if not isinstance(tensor, DTensor):
        return full_tensor
    own = torch.empty_like(tensor, dtype=full_tensor.dtype)  # `from_local` would leave the host's memory
    local(own).copy_(part_like(tensor, full_tensor))
    return own


def part_like(tensor: DTensor, full_tensor: Tensor) -> Tensor:
    """Of a whole tensor, a view of what this rank has of another: tp cuts first, then dp_shard, as torch.chunk does."""
    mesh = tensor.device_mesh
    for axis in range(mesh.ndim - 1, -1, -1):
        placed, count, number = tensor.placements[axis], mesh.size(axis), mesh.get_local_rank(axis)
        if isinstance(placed, Shard | _StridedShard):
            full_tensor = piece(full_tensor, placed.dim, count, number)
    return full_tensor


def part_number(tensor: Tensor) -> int:
    """Which of the parts of a tensor this rank holds, from 0 on; ranks with the same part have the same number."""
    number = 0
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placed in enumerate(tensor.placements):
            if isinstance(placed, Shard | _StridedShard):
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def piece(tensor: Tensor, dim: int, count: int, number: int) -> Tensor:
    """A view of one of `count` pieces along a dim, as torch.chunk cuts it; the last pieces may be empty."""
    size = tensor.shape[dim]
    height = -(-size // count)
    first = min(number * height, size)
    return tensor.narrow(dim, first, min(height, size - first))


def computed_on(tensor: Tensor) -> torch.device:
    """Where matmuls with a tensor run. The tensor itself may stay in the host's memory."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def copies(tensor: Tensor) -> int:
    """How many ranks have the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, placed in enumerate(tensor.placements) if placed.is_replicate())


def over_ranks(numbers: Tensor, of: Tensor) -> Tensor:
    """The sum of what the ranks say that hold the parts of a tensor; `numbers` itself for a tensor without parts."""
    if not isinstance(of, DTensor):
        return numbers
    numbers = numbers.clone()
    torch.distributed.all_reduce(numbers)
    return numbers


def micro_batches(batch: Batch, size: int, world: World, model: nn.Module) -> list[Batch]:
    """
    The micro-batches of this rank. Of a sharded model all ranks have the same number of them, because each waits for
    the parts of the others. Micro-batches that fill up the number have no supervised token, and add exactly zero.
    """
    number, count = data_rank(model, world)
    own = batch.of_rank(number, count).split(size)
    if not is_sharded(model):
        return own
    rows = -(-len(batch.ids) // count)
    blank = replace(batch.split(1)[0], targets=np.full_like(batch.targets[:1], IGNORE))
    return own + [blank] * (-(-rows // size) - len(own))


def is_finite(model: nn.Module, world: World) -> bool:
    """Whether all weights are, on all ranks."""
    own = bool(torch.stack([torch.isfinite(local(weight)).all() for weight in model.parameters()]).all())
    return not world.any(not own) if is_sharded(model) else own


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; all of one that is not spread."""
    local_tensor: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.detach()
