"""
Low-rank adapters for frozen matrices: attach them, and train only them.

Letters used for shapes: R outputs, D inputs, r rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jaxtyping import Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.model import quantize
from bloomery.model.config import Lora, targets
from bloomery.model.quantize import QuantizedLinear
from bloomery.model.transformer import Transformer

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """
    y = W x + b + s · B A x, where only A and B are trained. B is 0 at first: nothing has changed yet.

    With DoRA each row of V = W + s · B A has a trained length m, that of W at first:

        y = (m / ‖V‖) · V x + b      ‖V‖ by row, and constant in the gradient (Liu et al. 2024, §4.3)
    """

    magnitude: nn.Parameter | None

    def __init__(self, base: QuantizedLinear, settings: Lora) -> None:
        super().__init__()
        self.base, self.scale, self.share = base, settings.scale, settings.dropout
        numbers = not base.weight.is_meta  # a frozen matrix may have a shape alone, and is filled later
        device = base.weight.device if numbers else "cpu"
        self.lora_a = nn.Parameter(torch.zeros(settings.rank, base.width, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.num_rows, settings.rank, device=device))
        lengths = _lengths(base.dense(torch.float32)) if numbers and settings.dora else torch.zeros(base.num_rows)
        self.register_parameter("magnitude", nn.Parameter(lengths) if settings.dora else None)
        self.is_on = True
        """Whether the adapter counts, or the frozen matrix alone."""
        self.whole_rows: Callable[[Tensor], Tensor] | None = None
        """Where a device has some of the inputs: makes the squared lengths of whole rows of those of their parts."""

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead R"]:
        if not self.is_on:
            plain: Tensor = self.base(x)
            return plain
        heard = self._dropped(x) if self.training and self.share else x
        change = F.linear(F.linear(heard, self.lora_a), self.lora_b) * self.scale
        y: Tensor = self.base(x)
        if self.magnitude is None:
            return y + change
        bias = 0.0 if self.base.bias is None else self.base.bias
        return (y - bias + change) * self.stretch().to(change.dtype) + bias

    def stretch(self) -> Float[Tensor, " R"]:
        """m / ‖V‖ of DoRA."""
        with torch.no_grad():
            lengths = _lengths(
                self.base.dense(torch.float32) + self.scale * (self.lora_b.float() @ self.lora_a.float())
            )
            if self.whole_rows is not None:
                lengths = self.whole_rows(lengths.square()).sqrt()
        assert self.magnitude is not None
        share: Tensor = self.magnitude / lengths
        return share

    def _dropped(self, x: Tensor) -> Tensor:
        threshold = int(self.share * 2**32)
        if x.device.type == "cpu":
            keep = _coins(x.detach(), self.lora_b.detach()) >= threshold
        else:
            keep = _short_coins(x.detach(), self.lora_b.detach()) >= threshold - 2**31
        return x * keep / (1 - self.share)


def _lengths(rows: Float[Tensor, "R D"]) -> Float[Tensor, " R"]:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths


TURN = 0x9E3779B1
"""Of hashes: 2³² divided by the golden ratio, and odd."""


def _coins(x: Tensor, salt: Tensor) -> Tensor:
    """
    A number from 0 to 2³² − 1 for each element of x: a hash of its position, its bits and the adapter's weights.

    There is no generator state, so resumed runs, recomputation and all ranks get the same numbers.
    """
    mask = 2**32 - 1
    salted = salt.float().view(torch.int32).sum(dtype=torch.int64) * TURN
    positions = torch.arange(x.numel(), device=x.device).view(x.shape) * TURN
    mixed = (x.float().view(torch.int32).to(torch.int64) + positions + salted) & mask
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & mask
    return mixed ^ (mixed >> 16)


def _short_coins(x: Tensor, salt: Tensor) -> Tensor:
    """
    The same less 2³¹, in 32 bits that wrap around and in-place: GPUs take a third of the time, as memory limits them.
    Compiled blocks make one kernel of it.
    """
    salted = (salt.float().view(torch.int32).sum(dtype=torch.int64) * TURN).to(torch.int32)
    positions = torch.arange(x.numel(), device=x.device).to(torch.int32).mul_(TURN - 2**32).view(x.shape)
    mixed = positions.add_(x.float().view(torch.int32)).add_(salted)
    for _ in range(2):
        mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(0x45D9F3B)
    return mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).bitwise_xor_(-(2**31))


def attach(model: Transformer, settings: Lora, seed: int) -> None:
    """
    Freeze a model, and add adapters to the matrices that `settings.target_modules` names. Matrices may have been
    loaded in the format of `settings.base_dtype`. Raises DataError where a name matches no matrix.

    A starts as in PEFT, uniform within ±1/√D, sampled on the CPU.
    """
    chosen = targets([name for name, _ in _linears(model)], settings.target_modules)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in list(_linears(model)):
        if name not in chosen and settings.frozen_dtype == "float32":
            continue
        frozen = linear if isinstance(linear, QuantizedLinear) else quantize.frozen(linear, settings.frozen_dtype)
        if name not in chosen:
            _put(model, name, frozen)
            continue
        adapted = LoRALinear(frozen, settings)
        bound = 1 / math.sqrt(frozen.width)
        start = torch.empty(adapted.lora_a.shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            adapted.lora_a.copy_(start)
        _put(model, name, adapted)


@contextmanager
def switched_off(model: Transformer) -> Iterator[None]:
    """While the block runs, the model computes what it did before it had adapters."""
    adapted = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


Weights = Mapping[str, Tensor]
"""A and B by name: PATH.lora_a and PATH.lora_b. Of DoRA also PATH.magnitude."""


def weights(model: Transformer) -> dict[str, Tensor]:
    """All that is trained."""
    return {
        name: weight for name, weight in model.named_parameters() if name.endswith((".lora_a", ".lora_b", ".magnitude"))
    }


def _linears(model: Transformer) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """The matrices of the blocks, by path."""
    for name, module in list(model.named_modules()):
        if name.startswith("blocks.") and isinstance(module, nn.Linear | QuantizedLinear):
            yield name, module


def _put(model: Transformer, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
