"""
What a training step needs to know of ranks: its part of the batch, sums of gradients, tensors that lie in parts, and
their norms.

Each rank computes its sequences of the global batch. Their losses are already divided by the count of the whole
batch. So gradients are added over ranks and not averaged. This happens in float32, in buckets, once a step. On a CPU
it comes after all micro-batches. On GPUs, buckets are summed while the backward pass of the last micro-batch computes.

train/fsdp.py cuts models. Here, a tensor in one piece is the simple case of each function.

`Norms` measures by layer, at a fixed interval of steps:

    gradient flow    norm of the gradient of each layer, before clipping
    weight norm      norm of all weights that are trained
    update norm      norm of what one step of the optimizers changed them by

Of a weight with many numbers, the update is looked at in about SAMPLED of them at even distances, and scaled up. A
copy of all weights would need their memory once more. So the update norm is exact for small weights, and an
estimate for large weights. Ranks that hold parts of weights each measure their parts, and send each other only sums.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native
from bloomery.hw.distributed import World
from bloomery.model.kernels.cpu import call
from bloomery.shards.loader import IGNORE, Batch

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class MeshAxes:
    """
    The ranks that hold copies of a matrix (R, C), each in parts (r, c), and how they divide work on many matrices.

    A rank has the number copy · parts + part, whatever the order of the axes of its mesh. Ranks exchange tensors along
    one axis after the other.
    """

    copy_axes: tuple[World, ...]
    cut_axes: tuple[tuple[World, int], ...]
    """Ranks, and the dim that they cut. A later axis cuts first."""

    @classmethod
    def of(cls, tensor: Tensor, world: World) -> "MeshAxes":
        """Of a tensor that is spread over a mesh, or that all ranks of `world` have in one piece."""
        if not isinstance(tensor, DTensor):
            return cls((world,), ())
        mesh = tensor.device_mesh
        several = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        axes = [
            (World(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis)), tensor.placements[axis])
            for axis in several
        ]
        cuts = tuple((ranks, placed.dim) for ranks, placed in axes if isinstance(placed, Shard | _StridedShard))
        return cls(tuple(ranks for ranks, placed in axes if placed.is_replicate()), cuts)

    @property
    def parts(self) -> int:
        """Ranks that hold one copy."""
        return math.prod(ranks.size for ranks, _ in self.cut_axes)

    @property
    def copies(self) -> int:
        return math.prod(ranks.size for ranks in self.copy_axes)

    @property
    def ranks(self) -> int:
        return self.copies * self.parts

    @property
    def copy(self) -> int:
        """Number of this rank's copy."""
        return _number(self.copy_axes)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.copy * self.parts + _number([ranks for ranks, _ in self.cut_axes])

    def _cuts(self, shape: Sequence[int]) -> list[tuple[World, int, int]]:
        """Ranks, dim and its size before they cut it, from the first cut on."""
        sizes, cuts = list(shape), list[tuple[World, int, int]]()
        for ranks, dim in reversed(self.cut_axes):
            cuts.append((ranks, dim, sizes[dim]))
            sizes[dim] = -(-sizes[dim] // ranks.size)
        return cuts

    def part_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of a part of a matrix of this shape, with padding at its end."""
        sizes = list(shape)
        for ranks, dim, size in self._cuts(shape):
            sizes[dim] = -(-size // ranks.size)
        return sizes

    def gather_share(self, parts: Tensor, shape: Sequence[int]) -> Tensor:
        """
        From (parts · n, r, c), this rank's part of n matrices of each rank of its copy, to (n, R, C): all of the n
        matrices of this rank. All ranks call it. Along each axis, a rank receives about R · C · n numbers, and padding.
        """
        for ranks, dim, size in reversed(self._cuts(shape)):
            received = ranks.all_to_all(parts.reshape(ranks.size, -1, *parts.shape[1:]))
            parts = torch.cat(received.unbind(), dim + 1).narrow(dim + 1, 0, size)
        return parts

    def spread_shares(self, matrices: Tensor) -> Tensor:
        """
        From (n, R, C) of each rank to (ranks · n, r, c): this rank's part of the matrices of all ranks, by their
        numbers. All ranks call it.
        """
        for ranks, dim, size in self._cuts(matrices.shape[1:]):
            extra = -size % ranks.size
            padded = F.pad(matrices, (0, extra) if dim else (0, 0, 0, extra))
            matrices = ranks.all_to_all(torch.stack(padded.chunk(ranks.size, dim + 1))).flatten(0, 1)
        for ranks in reversed(self.copy_axes):
            matrices = ranks.all_gather(matrices).flatten(0, 1)
        return matrices


def _number(axes: Iterable[World]) -> int:
    number = 0
    for ranks in axes:
        number = number * ranks.size + ranks.rank
    return number


def over_ranks(numbers: Tensor, of: Tensor) -> Tensor:
    """The sum of what the ranks say that hold the parts of a tensor; `numbers` itself for a tensor without parts."""
    if not isinstance(of, DTensor):
        return numbers
    numbers = numbers.clone()
    torch.distributed.all_reduce(numbers)
    return numbers


def micro_batches(
    batch: Batch, size: int, world: World, model: nn.Module, split: Callable[[Batch, int], list[Batch]] = Batch.split
) -> list[Batch]:
    """
    The micro-batches of this rank. `split` makes them of its rows and a size, unless the model is sharded. Of a sharded
    model all ranks have the same number of them, because each waits for the parts of the others. Micro-batches that
    fill up the number have no supervised token, and add exactly zero.
    """
    number, count = data_rank(model, world)
    share = batch.of_rank(number, count)
    if not is_sharded(model):
        return split(share, size)
    own = share.split(size)
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


LIBRARY = "optimizer"
CHUNK = 2**14
"""Numbers of which the compiled library gives one sum of squares."""
SAMPLED = 2**15


class Norms:
    def __init__(self, model: nn.Module, *, every: int) -> None:
        """Measured after each `every` steps; never for 0."""
        self._model, self._every = model, every
        self._before: list[Tensor] = []
        self._flow: dict[str, float] = {}
        self.latest: dict[str, float | dict[str, float]] = {}
        """Of the last measured step: weight_norm, update_norm, and gradient_flow by layer."""

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        self._before = []
        if self.due(step):
            self._flow = by_layer(self._model)
            self._before = [seen.clone() for seen, _ in self._seen()]

    @torch.no_grad()
    def after_update(self) -> None:
        if not self._before:
            return
        pairs = zip(self._seen(), self._before, strict=True)
        changed = torch.stack([scale * (seen - before).float().square().sum() for (seen, scale), before in pairs])
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._before = []
        self.latest = {
            "weight_norm": norms_of([weights])[0],
            "update_norm": float(over_ranks(changed.sum(), weights[0]).sqrt()),
            "gradient_flow": self._flow,
        }

    def _seen(self) -> Iterator[tuple[Tensor, float]]:
        """Some numbers of each weight that is trained, or of its part, and for how many each of them stands."""
        for weight in self._model.parameters():
            if weight.requires_grad:
                flat = local(weight).flatten()
                seen = flat[:: max(1, weight.numel() // SAMPLED)]
                yield seen, len(flat) / max(1, len(seen)) / copies(weight)


def by_layer(model: nn.Module) -> dict[str, float]:
    """The gradient norm of each layer: of `blocks.3.mlp.up.weight` that of blocks.3."""
    layers: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            parts = name.split(".")
            layers.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(weight.grad)
    return dict(zip(layers, norms_of(list(layers.values())), strict=True))


def norms_of(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """The norm of all numbers of each group of tensors. Ranks that hold parts hear the sums of the others."""
    if any(isinstance(tensor, DTensor) for group in groups for tensor in group):
        norms: list[float] = square_sums(groups).sqrt().tolist()
        return norms
    return [float(torch.stack(torch._foreach_norm([one.detach() for one in group])).norm()) for group in groups]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """√ Σ g² over all numbers of all gradients: 0 for none."""
    if any(gradient.dtype != torch.float32 for gradient in gradients):  # a norm in bfloat16 has three digits
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    if not takes_compiled(gradients):
        return nn.utils.get_total_norm(gradients)
    sums = [torch.empty(-(-gradient.numel() // CHUNK), dtype=torch.float64) for gradient in gradients]
    for gradient, into in zip(gradients, sums, strict=True):
        call(LIBRARY, "squares", gradient, gradient.numel(), into)
    return torch.cat(sums).sum().sqrt().float() if sums else torch.zeros(())


@torch.no_grad()
def square_sums(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """
    The sum of squares of each group of tensors, in float32. Of tensors in parts, each rank adds up its own numbers, and
    the sums of all groups go to the others at once. No tensor is put together.
    """
    own = [
        [torch.linalg.vector_norm(local(one), dtype=torch.float32).square() / copies(one) for one in group]
        for group in groups
    ]
    sums = torch.stack([torch.stack(squares).sum() for squares in own])
    tensors = [tensor for group in groups for tensor in group if isinstance(tensor, DTensor)]
    return over_ranks(sums, tensors[0]) if tensors else sums


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, the same bits on every rank."""
    tensors = list(gradients)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return square_sums([tensors]).sqrt()[0]
    return total_norm(tensors)


def takes_compiled(tensors: Sequence[Tensor]) -> bool:
    """Whether the compiled library can take them: float32 on the CPU."""
    return native.library(LIBRARY) is not None and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        for tensor in tensors
    )
