"""
Cut a model over a mesh of devices by RULES of train/sharding_rules.py, with PyTorch's FSDP2 and DTensor.

Between modules, tensors are plain and whole on each device of tp, but for the outputs of column matrices. Inside a
module that tp cuts, its weights are DTensors. So the code of the model stays that of one device. FSDP2 then cuts
every tensor over dp_shard, gathers a unit at a time, and adds gradients over dp_shard and dp_replicate.

No stage trains over a mesh yet. Plans and this module share one table, and a test compares it with one device.
"""

from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import ConfigError
from bloomery.model.attention import Attention
from bloomery.model.layers import LayerNorm, RMSNorm
from bloomery.model.lora import LoRALinear
from bloomery.model.quantize import NF4, QuantizedLinear
from bloomery.model.transformer import Transformer
from bloomery.train.config import Mesh
from bloomery.train.sharding_rules import ShardingKind, check_mesh, local_shape, placement

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

AXES = ("dp_replicate", "dp_shard", "tp")
CUT_MODULES = (LoRALinear, QuantizedLinear, nn.Linear, nn.Embedding, RMSNorm, LayerNorm)


def parallelize(model: Transformer, mesh: Mesh, devices: DeviceMesh) -> None:
    """
    Leave on each device its part of every weight. `devices` has the axes of AXES, in their sizes. All begin with the
    same whole weights. Losses are those of a device's sequences, divided by the tokens of all: gradients are added.

    Raises ConfigError for a shape that the mesh cannot cut, and what `check_model` does.
    """
    check_model(model, mesh)
    _keep_as_parameters(model)
    names = {weight: name for name, weight in model.named_parameters()}
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    placements = {name: placement(name, shape, mesh) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        local_shape(name, shape, mesh)
    if mesh.tp > 1:
        for path, module in list(model.named_modules()):
            is_inner = any(isinstance(model.get_submodule(above), LoRALinear) for above in _above(path))
            if isinstance(module, CUT_MODULES) and not is_inner and any(True for _ in module.parameters()):
                _cut(module, path, mesh, devices["tp"])
        for module in model.modules():
            if isinstance(module, Attention):
                module.num_heads, module.num_kv_heads = module.num_heads // mesh.tp, module.num_kv_heads // mesh.tp
        names = {weight: name for name, weight in model.named_parameters()}

    def placed(weight: nn.Parameter) -> Shard:
        return Shard(dims[weight])

    dims = {weight: placements[name].dp_shard for weight, name in names.items()}
    blocks: list[Any] = list(model.blocks)
    root: Any = model
    for unit in ([model.embed], *([block] for block in blocks), [model.norm, model.head], [root]):
        if not any(True for module in unit for _ in module.parameters()):
            continue
        sharded: Any = fully_shard(
            unit[0] if len(unit) == 1 else unit, mesh=devices["dp_replicate", "dp_shard"], shard_placement_fn=placed
        )
        for module in sharded if isinstance(sharded, list) else [sharded]:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "logits")


def check_model(model: Transformer, mesh: Mesh) -> None:
    """Raises ConfigError for a tied head, and with tp for ALiBi, NF4, DoRA and vectors that heads share."""
    config = model.config
    check_mesh(config, mesh)
    whole = any(
        isinstance(module, NF4) or (isinstance(module, LoRALinear) and module.magnitude is not None)
        for module in model.modules()
    )
    for reason, hint in (
        ("a tied head is in two units" if config.tie_embeddings else "", "Set tie_embeddings=false."),
        ("NF4 and DoRA are not cut by tp yet" if mesh.tp > 1 and whole else "", "Set mesh.tp=1."),
        ("ALiBi counts all heads" if mesh.tp > 1 and config.position_embedding == "alibi" else "", "Set mesh.tp=1."),
        (
            "vectors that heads share are not added up over tp yet"
            if mesh.tp > 1 and (config.qk_norm or "differential" in config.attention)
            else "",
            "Set mesh.tp=1.",
        ),
    ):
        if reason:
            raise ConfigError(f"this model is not trained over a mesh: {reason}", where="finetune.mesh", hint=hint)


def _keep_as_parameters(model: nn.Module) -> None:
    """Frozen matrices, codes and scales are buffers, which FSDP2 does not cut. The look-up table of NF4 stays one."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            for name, tensor in list(module.state_dict(keep_vars=True).items()):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _above(path: str) -> list[str]:
    """The paths of the modules that hold one."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _cut(module: nn.Module, path: str, mesh: Mesh, devices: DeviceMesh) -> None:
    """Make DTensors of the weights of a module and of its inputs, and a plain tensor of its output."""
    kind: ShardingKind = "sequence"
    for inner, owner in list(module.named_modules()):
        for name, weight in list(owner.named_parameters(recurse=False)):
            where = placement(".".join(filter(None, (path, inner, name))), weight.shape, mesh)
            layout = Replicate() if where.tp is None else Shard(where.tp)
            kind = where.kind if weight.dim() == 2 else kind
            cut = distribute_tensor(weight.detach(), devices, [layout], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
    takes = Shard(-1) if kind == "row" else Replicate()
    gives = Shard(-1) if kind == "column" else Replicate()

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (DTensor.from_local(inputs[0], devices, [takes], run_check=False), *inputs[1:])

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        plain: Tensor = output.redistribute(placements=[gives]).to_local()
        return plain

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def gradient_norm(model: nn.Module) -> float:
    """Of all weights that are trained, as one device would have it. All devices of the mesh take part."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
