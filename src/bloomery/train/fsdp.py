"""
Cut a model into the parts of its ranks with FSDP2, and gather full copies. A step needs only train/collectives.py.

A sharded model (FSDP2, torch.distributed.fsdp.fully_shard) lies in pieces. Each rank holds its part of every
weight, gradient and optimizer number. A group of weights is gathered when its module is needed: norms in float32, and
all others on GPUs in the format of matmuls. After every micro-batch, its gradients are added up in float32 by the ranks
that keep them. RULES of train/sharding_rules.py say what belongs together and along which dims it is cut, over the axes
of a mesh. The model itself knows nothing of it.
"""

import importlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.model import quantize
from bloomery.model.config import Base
from bloomery.model.quantize import NF4, QuantizedLinear
from bloomery.model.transformer import Transformer, on_meta
from bloomery.train.collectives import is_sharded, part_like, piece, whole
from bloomery.train.config import Mesh
from bloomery.train.mesh import check_model, cut
from bloomery.train.sharding_rules import Placement, placement, rule_of, stays_float32
from bloomery.weights.opened import put_weight
from bloomery.weights.safetensors import rounded

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard


def peak(device: Device, world: World) -> float:
    """FLOP/s of the matmuls of all ranks together. All ranks measure at the same time: some may share a machine."""
    world.barrier()
    return float(world.sum(torch.tensor(measured_peak(device), dtype=torch.float64)))


def copy_of(model: Transformer, world: World | None = None) -> Transformer:
    """
    A copy of the model in the CPU's memory, to be written while training continues. All ranks of a sharded model take
    part, and only the first rank gets the weights. If its memory does not hold them, all ranks raise the error.
    """
    weights: dict[str, Tensor] = model.state_dict()
    company = world if world is not None and is_sharded(model) else World.alone()
    copied: dict[str, Tensor] = {}
    lacking: Exception | None = None
    at_once = [] if is_sharded(model) else [*weights.items()]  # else one after another, as each is put together
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


def keep_weights(model: nn.Module, weight_dtype: str, *, sharded: bool = False) -> None:
    """
    Bring the weights that are trained into the format of a recipe, one after another: vectors stay in float32. Before a
    model is `sharded`, only norms and learned positions do, because weights that are gathered together need one format.
    """
    if weight_dtype != "bfloat16":
        return
    for name, weight in model.named_parameters():
        stays = stays_float32(name) if sharded else weight.dim() <= 1
        weight.requires_grad_(True).data = weight.data.to(torch.float32 if stays else torch.bfloat16)


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
    offload: bool = False,
) -> None:
    """
    Leave on each rank its part of every weight, where it computes, by RULES of train/sharding_rules.py. All ranks begin
    with the same whole weights. With `spread`, only the first rank has weights, and hands them out one by one; those of
    other ranks may be on the meta device. `own` has the weights that this rank has read. `mesh` is by default one of
    dp_shard alone; `devices` are its ranks, where they have met already. `dtype` is that of gathered weights, by
    default `gathered_dtype`. Codes and their scales are gathered as they are. With `offload`, parts, their gradients
    and what an optimizer keeps of them stay in the host's memory.

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
    plain, mixed = _formats(model, dtype)
    kept = CPUOffloadPolicy(pin_memory=device.is_gpu) if offload else OffloadPolicy()
    dims = {weight: where[name].dp_shard for name, weight in model.named_parameters()}
    of_units = units(model, mesh)
    norms = {} if plain else _unrounded(model, where)
    groups: list[tuple[str, list[nn.Module]]] = [(f"norms of {unit}", modules) for unit, modules in norms.items()]
    rest = {unit: [one for one in modules if one not in norms.get(unit, [])] for unit, modules in of_units.items()}
    groups += [*rest.items(), ("", [model])]  # the model: what is left
    model.embed_scale_dtype = model.embed.weight.dtype
    for unit, modules in groups:
        has_scales = any(name.startswith(f"{unit}.") and name.endswith(".scales") for name in where)
        as_it_is = plain or has_scales or unit.startswith("norms of ")
        policy: dict[str, Any] = {} if as_it_is else {"mp_policy": mixed}
        if unit == "head" or mesh.zero_stage < 3:  # the loss reads the head after the forward pass
            policy["reshard_after_forward"] = False
        with _codes_without_gradients():
            sharded: Any = fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=devices[data] if len(devices.mesh_dim_names or ()) > 1 else devices,
                shard_placement_fn=lambda weight: Shard(dims[weight]),
                offload_policy=kept,
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
        _make_room(model, "cpu" if offload else kind, kind)
        if own is None:
            take(model, full if world.is_first else None)
        else:
            own.fill(model, full)


@contextmanager
def _codes_without_gradients() -> Iterator[None]:
    """
    Within the block, FSDP2 may cut parameters of integers. torch 2.11 makes each part as a parameter with gradients at
    first, which integers cannot have; from 2.12 on nothing is changed.
    """
    if torch.__version__ >= "2.12":  # compared as versions
        yield
        return

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    module.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)
    try:
        yield
    finally:
        module.nn = nn


def _make_room(model: Transformer, parts: torch.device | str, kind: torch.device) -> None:
    """Give weights that have shapes alone memory at `parts`, and leave buffers with their numbers on a device."""
    tables = [module for module in model.modules() if isinstance(module, NF4)]
    buffers = {name: buffer.to(kind) for name, buffer in model.named_buffers() if not name.endswith(".pairs")}
    model.to_empty(device=parts)
    for name, buffer in buffers.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = buffer
    for module in tables:
        module.pairs = quantize.pairs(kind)


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
                tensor = piece(tensor, dim, self._mesh.sizes[axis], self._numbers[axis])
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


def _formats(model: nn.Module, dtype: torch.dtype) -> tuple[bool, MixedPrecisionPolicy]:
    """Whether all weights are gathered in float32, and the formats of gathered weights and of sums where not."""
    halved = any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in model.parameters())
    gathered = None if halved else dtype  # weights in bfloat16 are gathered as they are
    mixed = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return dtype == torch.float32 and not halved, mixed


def _unchanged(x: Tensor) -> Tensor:
    return x.clone()  # FSDP2 wants no view of what a unit puts out


def _unrounded(model: Transformer, where: Mapping[str, Placement]) -> dict[str, list[nn.Module]]:
    """Unit -> its modules whose weights stay in float32, as on one device."""
    norms: dict[str, list[nn.Module]] = {}
    for name, placed in where.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if stays_float32(name) and module not in norms.setdefault(placed.unit, []):
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
