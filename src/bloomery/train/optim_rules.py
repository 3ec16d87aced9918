"""
Optimizers that torch does not have, each a plain torch one: AdEMAMix, AdamW with moments of 8 bits, Lion.

Letters: g gradient, p weight, t steps so far, λ weight decay (decoupled: p ← p − lr·λ·p comes first).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CHUNK_NUMBERS = 2**20
"""Of a weight's moments at a time that exist in float32, where they are kept in 8 bits."""


class Rule(torch.optim.Optimizer):
    """An optimizer whose weights do not depend on each other: `change` moves one of them."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.mul_(1 - group["lr"] * group["weight_decay"])
                        self.change(weight, weight.grad, self.state[weight], group)

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class AdEMAMix(Rule):
    """
        m ← β₁·m + (1 − β₁)·g     n ← β₃(t)·n + (1 − β₃(t))·g     v ← β₂·v + (1 − β₂)·g²
        p ← p − lr · (m / (1 − β₁ᵗ) + α(t)·n) / (√(v / (1 − β₂ᵗ)) + ε)

        α(t) = α · min(1, t / R)      β₃(t) = min(β₃, exp(ln β₁ · ln β₃ / ((1 − t/R)·ln β₃ + t/R · ln β₁)))

    over a ramp of R steps (Pagliardini, Ablin and Grangier 2024, https://arxiv.org/abs/2409.03137, algorithm 1 and §3).
    """

    def __init__(
        self, groups: Any, *, lr: float, betas: tuple[float, float, float], alpha: float, eps: float, ramp: int
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "alpha": alpha, "eps": eps, "ramp": ramp})

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")}
        state["step"] += 1
        t, (beta1, beta2, _) = _number(state["step"]), group["betas"]
        alpha, beta3 = slow_mean(t, group["alpha"], group["betas"], group["ramp"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_slow"].lerp_(gradient, 1 - beta3)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
        both = torch.add(state["exp_avg"] / (1 - beta1**t), state["exp_avg_slow"], alpha=alpha)
        weight.addcdiv_(both, root, value=-group["lr"])


def _number(step: Tensor) -> int:
    """Which step it is: the first of those that are traced with tensors without numbers."""
    return 1 if isinstance(step, FakeTensor) else int(step)


def slow_mean(t: int, alpha: float, betas: tuple[float, float, float], ramp: int) -> tuple[float, float]:
    """α(t) and β₃(t) of AdEMAMix at step t = 1, 2, …"""
    beta1, _, beta3 = betas
    if t >= ramp:
        return alpha, beta3
    x = t / ramp
    if not 0 < beta1 < 1 or not 0 < beta3 < 1:
        return alpha * x, beta3
    slow, fast = math.log(beta3), math.log(beta1)
    return alpha * x, min(beta3, math.exp(fast * slow / ((1 - x) * slow + x * fast)))


class Lion(Rule):
    """
        p ← p − lr · sign(β₁·m + (1 − β₁)·g)     m ← β₂·m + (1 − β₂)·g

    Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        beta1, beta2 = group["betas"]
        weight.add_(state["exp_avg"].lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        state["exp_avg"].lerp_(gradient, 1 - beta2)


class AdamW8bit(Rule):
    """
    AdamW, with both moments kept as codes of 8 bits and a float32 scale for each block of numbers.

        x ≈ scale · table[code]      scale = the largest |x| of the block

    The table is finer near zero, where most numbers are (`code_table`). The second moment is never rounded to zero,
    which would divide by ε (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, §2).
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float, block: int) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "block": block})
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            blocks = -(-weight.numel() // group["block"])
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[f"{name}_codes"] = torch.zeros_like(weight, dtype=torch.uint8)
                state[f"{name}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=weight.device)
        if weight.device not in self._tables:
            self._tables[weight.device] = code_table(True).to(weight.device), code_table(False).to(weight.device)
        signed, unsigned = self._tables[weight.device]
        state["step"] += 1
        t, (beta1, beta2) = _number(state["step"]), group["betas"]
        flat, slope = weight.view(-1), gradient.reshape(-1)
        for numbers, blocks in _chunks(weight.numel(), group["block"]):
            kept = [
                (state[f"{n}_codes"].view(-1)[numbers], state[f"{n}_scales"][blocks]) for n in ("exp_avg", "exp_avg_sq")
            ]
            g = slope[numbers].float()
            mean = decode(*kept[0], signed, group["block"]).lerp_(g, 1 - beta1)
            square = decode(*kept[1], unsigned, group["block"]).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = square.sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
            flat[numbers].addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**t))
            encode(mean, signed, True, group["block"], *kept[0])
            encode(square, unsigned, False, group["block"], *kept[1])


def _chunks(numbers: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Slices of a weight's numbers, and of the blocks that they are in."""
    blocks = max(1, CHUNK_NUMBERS // block)
    for first in range(0, -(-numbers // block), blocks):
        yield slice(first * block, min(numbers, (first + blocks) * block)), slice(first, first + blocks)


def code_table(signed: bool) -> Tensor:
    """
    The 256 numbers that codes stand for, in their order, from −1 or 0 to 1.

    Each decade from 10⁻⁷ to 1 is cut into equal pieces, twice as many as in the decade below, whose middles are the
    numbers; with 0 and 1. Without a sign there are twice as many pieces.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        pieces = 2**decade * (1 if signed else 2)
        middles = [0.1 + 0.9 * (place + 0.5) / pieces for place in range(pieces)]
        numbers += [
            10.0 ** (decade - 6) * middle * sign for middle in middles for sign in ((1, -1) if signed else (1,))
        ]
    return torch.tensor(sorted(numbers), dtype=torch.float32)


def decode(codes: Tensor, scales: Tensor, table: Tensor, block: int) -> Tensor:
    """Float32 numbers of codes: a scale for every `block` of them, the last block may be shorter."""
    return table[codes.int()].mul_(scales.repeat_interleave(block)[: len(codes)])


def encode(numbers: Tensor, table: Tensor, signed: bool, block: int, codes: Tensor, scales: Tensor) -> None:
    """Fill `codes` and `scales` with the nearest in the table; without signs, only 0 itself gets the code of 0."""
    rows = F.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    scales.copy_(rows.abs().amax(1))
    shares = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(numbers)]
    nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
    if not signed:
        nearest = torch.maximum(nearest, (numbers > 0).int())
    codes.copy_(nearest)
