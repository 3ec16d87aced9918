"""
Cut the matmuls of a model over the axis `tp` of a mesh, by RULES of train/sharding_rules.py.

Between modules, tensors are plain. Weights are DTensors, which FSDP2 cuts further (train/fsdp.py). While a module
computes, it has the plain parts of its weights, so the code of the model, its kernels and its quantized matrices are
those of one device:

    column     y = x Wᵀ of some outputs    x is gathered for all of a layer, and its gradient summed over tp
    row        y = Σ x Wᵀ over tp          each device has some of the inputs, the first adds the bias
    heads      of some heads               the gradient of a vector that heads share is summed over tp
    sequence   of some tokens              norms, positions and the residual stream; so are their gradients

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, §3; sequence: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, §4.2). Where tp does not divide the tokens of a row, each device has all of them.
Embedding and head are DTensors while they compute, and the head has all tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import ConfigError
from bloomery.model.attention import Attention
from bloomery.model.lora import LoRALinear
from bloomery.model.quantize import BLOCK, NF4, QuantizedLinear
from bloomery.model.transformer import Transformer
from bloomery.train.config import Mesh
from bloomery.train.sharding_rules import ShardingKind, check_mesh, local_shape, placement

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def check_model(model: Transformer, mesh: Mesh) -> None:
    """Raises ConfigError for a shape or a base that a mesh cannot cut, by name."""
    is_double = any(isinstance(module, NF4) and module.coarse is not None for module in model.modules())
    check_mesh(model.config, mesh, "nf4_double" if is_double else None)
    for name, weight in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_code = isinstance(owner, NF4) and name.endswith(".weight")
        local_shape(name, weight.shape, mesh, BLOCK // 2 if is_code else 1)
        if is_code and placement(name, weight.shape, mesh).tp == 1 and owner.width % BLOCK:  # type: ignore[operator]
            what = f"{name} has rows of {owner.width:,} numbers, but tp cuts NF4 only into blocks of {BLOCK}"
            raise ConfigError(what, where="mesh.tp", hint="Set mesh.tp=1.")


def cut(model: Transformer, mesh: Mesh, devices: DeviceMesh) -> None:
    """Leave on each device of tp its part of every weight. `devices` has this axis alone."""
    cuts: dict[nn.Parameter, nn.Parameter] = {}  # a weight of two modules stays one weight
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if weight not in cuts:
                dim = placement(f"{path}.{name}", weight.shape, mesh).tp
                layout = Replicate() if dim is None else Shard(dim)
                tensor = distribute_tensor(weight.detach(), devices, [layout], src_data_rank=None)
                cuts[weight] = nn.Parameter(tensor, requires_grad=weight.requires_grad)
            module._parameters[name] = cuts[weight]
    inside, layers, tokens = set[nn.Module](), set[str](), SequenceSplit(devices)
    for path, module in model.named_modules():
        whole = isinstance(module, LoRALinear)  # it reads the weights of its base
        owned = [] if module in inside else list(module.named_parameters(recurse=whole))
        inside |= set(module.modules()) if whole else set()
        if owned:
            kinds = {name: placement(f"{path}.{name}", weight.shape, mesh).kind for name, weight in owned}
            matrix = next((kinds[name] for name, weight in owned if weight.dim() == 2), next(iter(kinds.values())))
            held = [_Held.of(module, name, kinds[name], matrix, devices) for name in kinds]
            module.__dict__["forward"] = partial(_computed, module.forward, matrix, held, tokens)
            layers |= {path.rpartition(".")[0]} if matrix == "column" else set()
        if isinstance(module, Attention):
            module.num_heads, module.num_kv_heads = module.num_heads // mesh.tp, module.num_kv_heads // mesh.tp
        if isinstance(module, QuantizedLinear):
            column = placement(f"{path}.weight", (1, 1), mesh).kind == "column"
            module.num_rows //= mesh.tp if column else 1
            module.width //= 1 if column else mesh.tp
            own = [_Held(module, name, Replicate(), 1.0, False) for name, _ in module.named_parameters()]
            module.__dict__["times_back"] = partial(_times_back, module.times_back, own)
        if isinstance(module, LoRALinear) and matrix == "row":
            module.whole_rows = tokens.summed
    for path in sorted(layers):
        layer = model.get_submodule(path)
        layer.__dict__["forward"] = partial(_entered, layer.forward, tokens)
    model.norm.__dict__["forward"] = partial(_left, model.norm.forward, tokens)


class SequenceSplit:
    """Which tokens of a row a device of tp has between the matmuls, in the pass that the embedding has begun."""

    def __init__(self, devices: DeviceMesh) -> None:
        self.devices, self.are_cut = devices, False

    def begin(self, ids: Tensor) -> None:
        """A pass begins with these token IDs (B, T)."""
        self.are_cut = ids.shape[-1] % self.devices.size() == 0

    def own(self, ids: Tensor) -> Tensor:
        """Of what is known of all tokens (…, T), that of this device's."""
        if not self.are_cut:
            return ids
        size = ids.shape[-1] // self.devices.size()
        return ids.narrow(-1, self.devices.get_local_rank() * size, size)

    def layout(self, x: Tensor) -> Shard | Replicate:
        """Of the residual stream (…, T, D)."""
        return Shard(x.dim() - 2) if self.are_cut else Replicate()

    def all_of(self, x: Tensor, gradient: Replicate | Partial) -> Tensor:
        """All tokens of a stream (…, T, D), whose `gradient` is whole on each device, or has a summand on each."""
        cut = DTensor.from_local(x, self.devices, [self.layout(x)], run_check=False)
        gathered: Tensor = cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])
        return gathered

    def summed(self, summand: Tensor, *, cut: bool = False) -> Tensor:
        """The sum over tp: all of it on each device, or of its own tokens."""
        partial_sum = DTensor.from_local(summand, self.devices, [Partial()], run_check=False)
        whole: Tensor = partial_sum.redistribute(placements=[self.layout(summand) if cut else Replicate()]).to_local()
        return whole


class _Held(NamedTuple):
    """A weight of a module, and what its gradient on one device is of the whole one."""

    owner: nn.Module
    name: str
    gradient: Shard | Replicate | Partial
    share: float
    """1, or 0 where another device adds it."""
    of_tokens: bool
    """Whether its gradient has a summand on each device if these have some of the tokens each."""

    @classmethod
    def of(cls, module: nn.Module, path: str, kind: ShardingKind, matrix: ShardingKind, devices: DeviceMesh) -> "_Held":
        inner, _, name = path.rpartition(".")
        owner = module.get_submodule(inner)
        weight = owner._parameters[name]
        assert isinstance(weight, DTensor)
        (layout,) = weight.placements
        once = matrix == "row" and kind == "sequence"
        if isinstance(layout, Replicate) and (once or kind != "sequence"):
            layout = Partial()
        share = float(not once or devices.get_local_rank() == 0)
        return cls(owner, name, layout, share, isinstance(layout, Replicate))


def _computed(
    plain: Any, kind: ShardingKind, held: list[_Held], tokens: SequenceSplit, x: Tensor, *rest: Any
) -> Tensor:
    """What a module computes of its parts of the weights: of a matrix in a block, some outputs, or a summand of all."""
    is_ids = not x.is_floating_point()
    if kind == "vocabulary":
        if is_ids:
            tokens.begin(x)
        output = plain(DTensor.from_local(x, tokens.devices, [Replicate()], run_check=False))
        layout = tokens.layout(output) if is_ids else Replicate()
        own: Tensor = output.redistribute(placements=[layout]).to_local()
        return own.clone() if is_ids else own  # no view, as below
    with _as_parts(held, tokens.are_cut):
        y: Tensor = plain(tokens.own(x) if is_ids else x, *rest)  # IDs of positions
    return y


def _entered(plain: Any, tokens: SequenceSplit, x: Tensor, *rest: Any) -> Tensor:
    """What a layer computes of all tokens: it gets this device's, and gives them the sum over tp."""
    return tokens.summed(plain(tokens.all_of(x, Partial()), *rest), cut=True)


def _left(plain: Any, tokens: SequenceSplit, x: Tensor) -> Tensor:
    """What the last norm computes of this device's tokens, and then of all."""
    return tokens.all_of(plain(x), Replicate()).clone()  # FSDP2 wants no view of what a unit puts out


def _times_back(plain: Any, held: list[_Held], grad: Tensor) -> Tensor:
    """The gradient of what enters a frozen matrix, which is read again in the backward pass."""
    with _as_parts(held):
        entered: Tensor = plain(grad)
        return entered


@contextmanager
def _as_parts(held: list[_Held], of_tokens: bool = False) -> Iterator[None]:
    """While the block runs, modules have plain parts of their weights."""
    weights = [entry.owner._parameters[entry.name] for entry in held]
    try:
        for entry, weight in zip(held, weights, strict=True):
            assert isinstance(weight, DTensor)
            gradient = Partial() if of_tokens and entry.of_tokens else entry.gradient
            plain = weight.to_local(grad_placements=[gradient])
            entry.owner._parameters[entry.name] = plain if entry.share else plain * 0
        yield
    finally:
        for entry, weight in zip(held, weights, strict=True):
            entry.owner._parameters[entry.name] = weight
