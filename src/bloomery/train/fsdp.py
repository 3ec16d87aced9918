"""
Train one model on several ranks: sum gradients, shard with FSDP2, and gather full copies.

Each rank computes its sequences of the global batch. Their losses are already divided by the count of the whole
batch. So gradients are added over ranks and not averaged. This happens in float32, in buckets, once a step. On a CPU
it comes after all micro-batches. On GPUs, buckets are summed while the backward pass of the last micro-batch computes.

A sharded model (FSDP2, torch.distributed.fsdp.fully_shard) lies in pieces. Each rank holds its part of every
weight, gradient and optimizer number. A group of weights is gathered when its module is needed: norms in float32, and
all others on GPUs in the format of matmuls. After every micro-batch, its gradients are added up in float32 by the ranks
that keep them. RULES of train/sharding_rules.py say what belongs together and along which dims it is cut, over the axes
of a mesh. The model itself knows nothing of it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.model import quantize
from bloomery.model.config import Base
from bloomery.model.quantize import NF4, QuantizedLinear
from bloomery.model.transformer import Transformer, on_meta
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.config import Mesh
from bloomery.train.fused_adamw import total_norm
from bloomery.train.mesh import check_model, cut
from bloomery.train.sharding_rules import Placement, placement, rule_of
from bloomery.weights.opened import put_weight
from bloomery.weights.safetensors import rounded

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

BUCKET_NUMBERS = 2**23
"""Numbers that go to the other ranks at once, if no weight has more: 32 MiB."""


def peak(device: Device, world: World) -> float:
    """FLOP/s of the matmuls of all ranks together. All ranks measure at the same time: some may share a machine."""
    world.barrier()
    return float(world.sum(torch.tensor(measured_peak(device), dtype=torch.float64)))


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


def copy_of(model: Transformer, world: World | None = None) -> Transformer:
    """
    A copy of the model in the CPU's memory, to be written while training continues. All ranks of a sharded model take
    part, and only the first rank gets the weights. If its memory does not hold them, all ranks raise the error.
    """
    weights: dict[str, Tensor] = model.state_dict()
    company = world if world is not None and is_sharded(model) else World.alone()
    copied: dict[str, Tensor] = {}
    lacking: Exception | None = None
    at_once = [*weights.items()] if company.size == 1 else []  # else one after another, as each is put together
    try:
        copied |= zip(weights, devices.copied_to_host(weight for _, weight in at_once), strict=False)
    except (MemoryError, RuntimeError) as error:
        lacking = error
    for name, weight in [] if at_once else weights.items():
        full_weight = whole(weight)
        try:
            keeps = company.is_first and lacking is None
            copied[name] = devices.copied_to_host([full_weight])[0] if keeps else full_weight.to("meta")
        except (MemoryError, RuntimeError) as error:
            lacking = error
    with company.alike():
        if lacking is not None:
            raise lacking
    twin = on_meta(model.config, model.vocab_size)
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


# --- sharded models ------------------------------------------------------------------------------------------------


def gathered_dtype(device: Device) -> torch.dtype:
    """The format in which weights are gathered: that of matmuls on GPUs, which halves what ranks send each other."""
    return device.compute_dtype if device.is_gpu else torch.float32


def device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """The ranks along the axes of a mesh that have several; `kind` is that of their devices. All ranks call it."""
    sizes = {axis: count for axis, count in mesh.sizes.items() if count > 1 or axis == "dp_shard"}
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard(
    model: Transformer,
    world: World,
    device: Device,
    mesh: Mesh | None = None,
    devices: DeviceMesh | None = None,
    *,
    dtype: torch.dtype | None = None,
    spread: bool = False,
    own: "OwnParts | None" = None,
) -> None:
    """
    Leave on each rank its part of every weight, where it computes, by RULES of train/sharding_rules.py. All ranks begin
    with the same whole weights. With `spread`, only the first rank has weights, and hands them out one by one; those of
    other ranks may be on the meta device. `own` has the weights that this rank has read. `mesh` is by default one of
    dp_shard alone; `devices` are its ranks, where they have met already. `dtype` is that of gathered weights, by
    default `gathered_dtype`. Codes and their scales are gathered as they are.

    Raises ConfigError for a model that the mesh cannot cut, and ValueError for a weight that fits no rule.
    """
    mesh, kind = mesh or Mesh(dp_shard=world.size), device.torch_device
    devices = devices or device_mesh(mesh, kind.type)
    _keep_as_parameters(model)
    check_model(model, mesh)
    full = {name: weight.detach() for name, weight in model.named_parameters()} if spread else {}
    where = {name: placement(name, weight.shape, mesh) for name, weight in model.named_parameters()}
    if spread:
        _without_numbers(model)
    if mesh.tp > 1:
        cut(model, mesh, devices["tp"])
    data = tuple(name for name in devices.mesh_dim_names or () if name != "tp")
    dtype = dtype or gathered_dtype(device)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    dims = {weight: where[name].dp_shard for name, weight in model.named_parameters()}
    of_units = units(model, mesh)
    norms = {} if dtype == torch.float32 else _unrounded(model, where)
    groups: list[tuple[str, list[nn.Module]]] = [(f"norms of {unit}", modules) for unit, modules in norms.items()]
    for unit, modules in of_units.items():
        groups.append((unit, [module for module in modules if module not in norms.get(unit, [])]))
    groups.append(("", [model]))  # what is left
    model.embed_scale_dtype = model.embed.weight.dtype
    for unit, modules in groups:
        has_scales = any(name.startswith(f"{unit}.") and name.endswith(".scales") for name in where)
        as_it_is = dtype == torch.float32 or has_scales or unit.startswith("norms of ")
        policy: dict[str, Any] = {} if as_it_is else {"mp_policy": mixed}
        if unit == "head" or mesh.zero_stage < 3:  # the loss reads the head after the forward pass
            policy["reshard_after_forward"] = False
        sharded: Any = fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=devices[data] if len(devices.mesh_dim_names or ()) > 1 else devices,
            shard_placement_fn=lambda weight: Shard(dims[weight]),
            **policy,
        )
        for module in sharded if isinstance(sharded, list) else [sharded]:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root: Any = model
    root.zero_stage = mesh.zero_stage
    if not model.embed.weight.requires_grad:  # the last block of a backward pass has nothing to gather ahead
        starts: list[Any] = [model.blocks[0], *norms.get("blocks.0", [])[:1]]
        for first in starts:
            first.set_modules_to_backward_prefetch([first])
    for method in ("extend", "logits"):
        register_fsdp_forward_method(model, method)
    if "head" in norms and not model.config.tie_embeddings:  # the loss reads the head, which is then gathered with none
        head: Any = model.head
        head.entered = _unchanged
        register_fsdp_forward_method(head, "entered")
        model.norm.register_forward_hook(lambda norm, x, hidden: head.entered(hidden))
    if spread:
        tables = [module for module in model.modules() if isinstance(module, NF4)]
        buffers = {name: buffer.to(kind) for name, buffer in model.named_buffers() if not name.endswith(".pairs")}
        model.to_empty(device=kind)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        for module in tables:
            module.pairs = quantize.pairs(kind)
        if own is None:
            take(model, full if world.is_first else None)
        else:
            own.fill(model, full)


class OwnParts:
    """
    Of weights that are read one by one, the parts of this rank: beyond them it holds one whole tensor. A matrix that
    is to be frozen takes its format after its rows are cut, so that each rank quantizes only its own.
    """

    def __init__(self, mesh: Mesh, rank: int, *, dora: bool = False) -> None:
        self._mesh, self._dora = mesh, dora
        self._numbers = {"tp": rank % mesh.tp, "dp_shard": rank // mesh.tp % mesh.dp_shard}
        self._parts: dict[str, Tensor] = {}

    def take(self, model: Transformer, name: str, weight: Tensor, kept_as: str, base: Base) -> None:
        """Keep the part of a weight, and leave its shape in the model. See `TakeWeight`."""
        put_weight(model, name, weight.to("meta"), kept_as, "meta", base)
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf != "weight" or not isinstance(module, QuantizedLinear):
            form = module.bias if isinstance(module, QuantizedLinear) else model.get_parameter(name)
            assert form is not None
            own_copy = self._cut(name, weight, ("tp", "dp_shard")).clone()  # the file is mapped into memory
            self._parts[name] = rounded(name, own_copy, form.dtype, name)
            if self._dora and rule_of(name).adapted:  # a frozen matrix in float32
                lengths = torch.linalg.vector_norm(weight.float(), dim=1)
                self._parts[f"{path}.magnitude"] = self._cut(f"{path}.magnitude", lengths, ("tp", "dp_shard")).clone()
            return
        where = placement(name, weight.shape, self._mesh)
        by_rows = tuple(axis for axis, dim in (("tp", where.tp), ("dp_shard", where.dp_shard)) if dim == 0)
        frozen = quantize.frozen_weight(self._cut(name, weight, by_rows), base)
        kept = {leaf: tensor for leaf, tensor in frozen.state_dict().items() if tensor is not None}
        if self._dora:
            kept["magnitude"] = torch.linalg.vector_norm(frozen.dense(torch.float32), dim=1)
        for leaf, tensor in kept.items():
            rest = tuple(axis for axis in ("tp", "dp_shard") if axis not in by_rows)
            self._parts[f"{path}.{leaf}"] = self._cut(f"{path}.{leaf}", tensor, rest).clone()

    def _cut(self, name: str, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        where = placement(name, tensor.shape, self._mesh)
        for axis, dim in (("tp", where.tp), ("dp_shard", where.dp_shard)):
            if axis in axes and dim is not None:
                tensor = _piece(tensor, dim, self._mesh.sizes[axis], self._numbers[axis])
        return tensor

    @torch.no_grad()
    def fill(self, model: Transformer, others: Mapping[str, Tensor]) -> None:
        """Give a sharded model its parts, and those of `others`, which are whole: adapters, tables with more rows."""
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            known = self._parts.pop(name.replace(".base.", "."), None)
            weight.to_local().copy_(part_like(weight, others[name]) if known is None else known)
            if weight.numel() >= quantize.NUMBERS_AT_ONCE:
                known = None
                devices.return_freed_memory()  # small parts leave gaps, as large as all of them


def _piece(tensor: Tensor, dim: int, count: int, number: int) -> Tensor:
    """A view of one of `count` pieces along a dim, as torch.chunk cuts it; the last pieces may be empty."""
    size = tensor.shape[dim]
    height = -(-size // count)
    first = min(number * height, size)
    return tensor.narrow(dim, first, min(height, size - first))


def units(model: Transformer, mesh: Mesh) -> dict[str, list[nn.Module]]:
    """
    Unit -> the modules whose weights are gathered together. A tied table is of two units, so that the model itself
    gathers both. Raises ValueError for a weight that fits no rule.
    """
    by_unit: dict[str, list[nn.Module]] = {}
    for name, weight in model.named_parameters():
        unit = placement(name, weight.shape, mesh).unit
        if unit.startswith("blocks."):
            by_unit[unit] = [model.get_submodule(unit)]
        elif not model.config.tie_embeddings:
            ends = [model.embed, model.positions] if unit == "embed" else [model.norm, model.head]
            by_unit[unit] = [module for module in ends if module is not None]
    return by_unit


def _unchanged(x: Tensor) -> Tensor:
    return x.clone()  # FSDP2 wants no view of what a unit puts out


def _unrounded(model: Transformer, where: Mapping[str, Placement]) -> dict[str, list[nn.Module]]:
    """
    Unit -> its norms, and learned positions. Their weights stay in float32, as on one device: they are multiplied in
    no matmul.
    """
    norms: dict[str, list[nn.Module]] = {}
    for name, placed in where.items():
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        if path.endswith(("norm", "positions")) and module not in norms.setdefault(placed.unit, []):
            norms[placed.unit].append(module)
    return {unit: modules for unit, modules in norms.items() if modules}


def _keep_as_parameters(model: nn.Module) -> None:
    """Frozen matrices, codes and scales are buffers, which FSDP2 does not cut. The look-up table of NF4 stays one."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            for name, tensor in list(module.state_dict(keep_vars=True).items()):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _without_numbers(model: nn.Module) -> None:
    """Put weights on the meta device, where a weight of two modules stays one weight."""
    on_meta_device: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                empty = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
                module._parameters[name] = on_meta_device.setdefault(weight, empty)


def data_rank(model: nn.Module, world: World) -> tuple[int, int]:
    """Of the data: the part that is this rank's, and how many parts there are. Ranks of one matmul share a part."""
    weight = next(model.parameters())
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    tp = weight.device_mesh["tp"].size() if "tp" in names else 1  # type: ignore[attr-defined]
    return world.rank // tp, max(1, world.size // tp)


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


def row_lengths(module: nn.Module, shape: nn.Module) -> Tensor:
    """
    Lengths of the rows of a frozen matrix that is spread over ranks, on all of them. `shape` is the same matrix without
    numbers, in one piece; it is filled.
    """
    for name, tensor in module.named_parameters():
        shape._buffers.pop(name, None)
        setattr(shape, name, nn.Parameter(whole(tensor), requires_grad=False))
    if isinstance(shape, NF4):
        shape.pairs = quantize.pairs(shape.weight.device)
    rows = shape.dense(torch.float32) if isinstance(shape, QuantizedLinear) else shape.get_parameter("weight").float()
    lengths: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return lengths


def like(tensor: Tensor, full_tensor: Tensor) -> Tensor:
    """Of a whole tensor that every rank has, the part that each has of another."""
    if not isinstance(tensor, DTensor):
        return full_tensor
    own, mesh = part_like(tensor, full_tensor).contiguous(), tensor.device_mesh
    return DTensor.from_local(own, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def part_like(tensor: DTensor, full_tensor: Tensor) -> Tensor:
    """Of a whole tensor, a view of what this rank has of another: tp cuts first, then dp_shard, as torch.chunk does."""
    mesh = tensor.device_mesh
    for axis in range(mesh.ndim - 1, -1, -1):
        placed, count, number = tensor.placements[axis], mesh.size(axis), mesh.get_local_rank(axis)
        if isinstance(placed, Shard | _StridedShard):
            full_tensor = _piece(full_tensor, placed.dim, count, number)
    return full_tensor


@torch.no_grad()
def take(model: Transformer, full_weights: Mapping[str, Tensor] | None, names: Collection[str] | None = None) -> None:
    """
    Give a sharded model weights that the first rank has, and the others have not: they give None. Weight by weight, so
    that beyond its part no rank holds more than one whole weight. All ranks call it. `names` are by default all.
    """
    for name, weight in model.named_parameters():
        if names is not None and name not in names:
            continue
        assert isinstance(weight, DTensor)
        own = weight.to_local()
        if full_weights is None:
            full_weight = torch.empty(weight.shape, dtype=weight.dtype, device=own.device)
        else:
            full_weight = full_weights[name].to(own.device, weight.dtype).contiguous()
        torch.distributed.broadcast(full_weight, src=0)
        own.copy_(part_like(weight, full_weight))


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


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, the same bits on every rank."""
    tensors = list(gradients)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return square_sums([tensors]).sqrt()[0]
    return total_norm(tensors)


def is_finite(model: nn.Module, world: World) -> bool:
    """Whether all weights are, on all ranks."""
    own = bool(torch.stack([torch.isfinite(local(weight)).all() for weight in model.parameters()]).all())
    return not world.any(not own) if is_sharded(model) else own


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; all of one that is not spread."""
    local_tensor: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.detach()
