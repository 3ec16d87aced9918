"""
Build optimizers from a recipe: AdamW, Muon, AdEMAMix, 8-bit AdamW, Lion.

Muon orthogonalizes matrices of one shape together: on a CPU, a small matrix does not fill the execution units.

AdEMAMix, AdamW with moments of 8 bits, and Lion do not exist in torch. Each is a plain torch optimizer here.

Weights may be kept in bfloat16. An update is then computed in float32 and rounded stochastically (`round_into`). So an
update far below the distance of two bfloat16 numbers still moves the weight on average, where the nearest number would
lose it (Gupta et al. 2015, https://arxiv.org/abs/1502.02551). What an optimizer remembers is the same as for float32.

Letters: g gradient, p weight, t steps so far, λ weight decay (decoupled: p ← p − lr·λ·p comes first).

Learning rates are pure functions of the step. The formulas are those of llm.c's schedulers.h and of 1386.ai's
scheduler.py. Their warm-up makes its first step at 1 / W of the peak. Their decay makes its first step at the peak,
and its last step just above the final rate.

All optimizers share one file because the recipe chooses among them by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError
from bloomery.core.io import stable_hash
from bloomery.hw.distributed import World
from bloomery.model.kernels.cpu import call
from bloomery.train.collectives import (
    LIBRARY,
    MeshAxes,
    computed_on,
    like,
    local,
    part_like,
    part_number,
    takes_compiled,
    whole,
)
from bloomery.train.config import AdamW8bit, AdEMAMix, ConstantSchedule, Lion, Muon, Optimizer, Schedule, WSDSchedule
from bloomery.train.loss import on_processor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

BATCH_NUMBERS, WIDE_BATCH_NUMBERS = 2**21, 2**25
"""Numbers of the matrices that are orthogonalized together: so many stay in a CPU's cache, and so many fill a GPU."""
COPIES_AT_ONCE = 8
"""
Copies of a model of which each orthogonalizes as many numbers as fill its GPUs. More copies do less each at a time,
because all of them get all results.
"""


SeedOf = Callable[[Tensor], int]
"""Of a weight: the seed of the random bits that round its update."""


def round_into(weight: Tensor, numbers: Tensor, seed: int) -> None:
    """
    Fill a bfloat16 tensor with float32 numbers, each rounded up or down at random, so that the mean is the number.

        P(up) = (x − below) / (above − below)

    bfloat16 is the upper half of the bits of float32. A random number is added to the lower half, and a carry rounds
    up. Infinite numbers and NaN stay what they are.
    """
    generator = torch.Generator(weight.device).manual_seed(seed)
    pieces = (torch.split(tensor.view(-1), NUMBERS_ROUNDED) for tensor in (weight, numbers))
    for piece, flat in zip(*pieces, strict=True):
        bits = flat.view(torch.int32)
        noise = torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        piece.copy_((bits + noise).bitwise_and_(-(2**16)).view(torch.float32))


NUMBERS_ROUNDED = 2**22
"""At a time."""


@contextmanager
def updatable(weight: Tensor, seed_of: SeedOf) -> Iterator[Tensor]:
    """
    A weight to change in-place: itself, or the float32 numbers of one in bfloat16, which are rounded at the end. Of a
    weight that is spread over ranks, each part has random bits of its own, the same for all copies of a part.
    """
    if weight.dtype != torch.bfloat16:
        yield weight
        return
    numbers = weight.float()
    yield numbers
    own = local(weight)
    if own.numel():
        round_into(own, local(numbers), (seed_of(weight) + part_number(weight)) % 2**64)


def _seed_zero(weight: Tensor) -> int:
    return 0


class ScaledAdamW(torch.optim.AdamW):
    """
    torch.optim.AdamW with its own state, fused, which can take gradients times `scale` without writing them back: so
    that clipping costs nothing.
    """

    scale: float = 1.0
    """Of the gradients of the next step alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        scale, self.scale = self.scale, 1.0
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not takes_compiled([one for weight in weights for one in (weight, weight.grad)]):
            if scale != 1.0:
                torch._foreach_mul_([weight.grad for weight in weights], scale)
            super().step(closure)
            return
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._change(weight, weight.grad, group, scale)

    def _change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], scale: float) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] += 1
        (beta1, beta2), t, rate = group["betas"], float(state["step"]), group["lr"]
        call(
            LIBRARY,
            "adamw",
            *(weight, gradient, state["exp_avg"], state["exp_avg_sq"], weight.numel()),
            *(1 - rate * group["weight_decay"], beta1, beta2, rate / (1 - beta1**t)),
            *(1 / math.sqrt(1 - beta2**t), float(group["eps"]), float(scale)),
        )
        torch.autograd.graph.increment_version(weight)


class BatchedMuon(torch.optim.Muon):
    """
    torch.optim.Muon, faster and, in bfloat16, with the same bits.

        b ← μ·b + (1 − μ)·g      o = orthogonalize(μ·b + (1 − μ)·g)
        p ← p − lr·λ·p − lr·s·o      s = √max(1, rows / columns), or 0.2·√max(rows, columns)

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the second s is that of Liu et al. 2025,
    https://arxiv.org/abs/2502.16982. Matmuls are in `dtype`: where a device has no units for bfloat16, float32 is
    faster there. On a CPU, of weights that are spread over ranks, each rank puts the matrices together and keeps its
    part. On GPUs, batches are larger, and ranks divide their matrices. On any mesh, one rank orthogonalizes a matrix:
    it gets the parts of one copy, and each rank gets its part of the result. Parts on the host are treated as on a CPU.

    Copies of a model share the work too, even if they are on several hosts. A rank then receives its part of the other
    copies' results: in bfloat16, a quarter of the bytes that it receives for one sum of its gradients. To repeat the
    work would take longer from square matrices of 550 columns on, and 8 times as long at 4,096. It takes 30 · columns
    FLOPs per number, at 400 TFLOP/s, where 2 bytes travel at 50 GB/s.
    """

    def __init__(
        self, weights: Any, *, dtype: torch.dtype = torch.bfloat16, world: World | None = None, **settings: Any
    ) -> None:
        """`world`: the ranks that share the work on GPUs."""
        super().__init__(weights, **settings)
        self._dtype, self.seed_of, self._world = dtype, _seed_zero, world or World.alone()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                weights = [weight for weight in group["params"] if weight.grad is not None]
                wide = bool(weights) and not on_processor(weights[0])
                for alike in _alike(weights):
                    if wide:
                        axes = MeshAxes.of(alike[0], self._world)
                        share = WIDE_BATCH_NUMBERS * COPIES_AT_ONCE // max(COPIES_AT_ONCE, axes.copies)
                        for batch in _batches(alike, share, axes.ranks):
                            self._change_together(batch, group, axes)
                    else:
                        for batch in _batches(alike, BATCH_NUMBERS):
                            self._change(batch, group)

    def _change_together(self, weights: list[Tensor], group: dict[str, Any], axes: MeshAxes) -> None:
        """
        As `_change`, in few large operations. Of n matrices, rank r orthogonalizes n / ranks, from number r · n / ranks
        on, in the order of `axes`. What ranks send each other is in the format of matmuls.
        """
        rows, columns = weights[0].shape
        own, grads = [local(weight) for weight in weights], [local(_gradient(one)) for one in weights]
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
        means = [local(self.state[weight]["momentum_buffer"]) for weight in weights]
        if grads[0].dtype == torch.float32:
            torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        else:  # one after another: in float32, gradients in bfloat16 take twice their memory
            for mean, gradient in zip(means, grads, strict=True):
                mean.lerp_(gradient.float(), 1 - group["momentum"])
        share = -(-len(weights) // axes.ranks)
        slots = slice(axes.copy * share * axes.parts, (axes.copy + 1) * share * axes.parts)
        grads, means = [one.float() for one in grads[slots]], means[slots]  # other copies orthogonalize theirs
        ahead = list(torch._foreach_lerp(grads, means, group["momentum"])) if group["nesterov"] and means else means
        del grads
        shape = (share * axes.parts, *axes.part_shape((rows, columns)))
        parts = (torch.zeros if axes.ranks > 1 else torch.empty)(shape, dtype=self._dtype, device=own[0].device)
        for slot, shard in zip(parts, ahead, strict=False):
            slot[: shard.shape[0], : shard.shape[1]].copy_(shard)
        del ahead
        matrices = axes.gather_share(parts, (rows, columns))
        del parts
        number = min(share, max(0, len(weights) - axes.rank * share))
        wide = matrices[:number] if rows <= columns else matrices[:number].mT
        directions = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], group["eps"])
        del wide
        if axes.ranks > 1:
            matrices[:number] = directions if rows <= columns else directions.mT
            directions = axes.spread_shares(matrices)
        elif rows > columns:
            directions = directions.mT
        del matrices
        rate = group["lr"] * _scale(rows, columns, group["adjust_lr_fn"])
        for weight, shard, direction in zip(weights, own, directions, strict=False):
            with updatable(shard, partial(self._seed_of_part, weight)) as numbers:
                numbers.mul_(1 - group["lr"] * group["weight_decay"])
                numbers.add_(direction[: shard.shape[0], : shard.shape[1]], alpha=-rate)

    def _seed_of_part(self, weight: Tensor, shard: Tensor) -> int:
        return self.seed_of(weight) + part_number(weight)

    def _change(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        rows, columns = weights[0].shape
        shape = (len(weights), min(rows, columns), max(rows, columns))
        wide = torch.empty(shape, dtype=self._dtype, device=computed_on(weights[0]))
        for weight, slot in zip(weights, wide, strict=True):
            state, gradient = self.state[weight], weight.grad
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
            assert gradient is not None
            gradient = gradient.float()
            mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            ahead = whole(gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean)
            slot.copy_(ahead if rows <= columns else ahead.T)
        directions = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = group["lr"] * _scale(rows, columns, group["adjust_lr_fn"])
        for weight, direction in zip(weights, directions, strict=True):
            with updatable(weight, self.seed_of) as numbers:
                numbers.mul_(1 - group["lr"] * group["weight_decay"])
                numbers.add_(like(weight, direction if rows <= columns else direction.T), alpha=-rate)


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """
    About U·Vᵀ of each U·S·Vᵀ in (matrices, rows, columns) with rows ≤ columns, by the Newton–Schulz iteration

        x ← x / ‖x‖      then `steps` times      x ← a·x + (b·A + c·A²)·x,   A = x·xᵀ
    """
    a, b, c = coefficients
    x: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _scale(rows: int, columns: int, kind: str | None) -> float:
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _alike(weights: list[Tensor]) -> list[list[Tensor]]:
    """Weights of one shape and device, which a mesh cuts alike, in an order that does not change."""
    alike: dict[Any, list[Tensor]] = {}
    for weight in weights:
        cuts = weight.placements if isinstance(weight, DTensor) else ()
        alike.setdefault((weight.shape, weight.device, cuts), []).append(weight)
    return list(alike.values())


def _batches(alike: list[Tensor], numbers: int, ranks: int = 1) -> Iterator[list[Tensor]]:
    """Weights of one shape: for each of `ranks` so many numbers at a time, and at least one weight."""
    size = ranks * max(1, numbers // alike[0].numel())
    return (alike[first : first + size] for first in range(0, len(alike), size))


CHUNK_NUMBERS = 2**20
"""Of a weight's moments at a time that exist in float32, where they are kept in 8 bits."""


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose weights do not depend on each other: `change` moves one of them."""

    def __init__(self, groups: Any, settings: dict[str, Any]) -> None:
        super().__init__(groups, settings)
        self.seed_of: SeedOf = _seed_zero

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        with updatable(weight, self.seed_of) as numbers:
                            numbers.mul_(1 - group["lr"] * group["weight_decay"])
                            self.change(numbers, weight.grad, self.state[weight], group)

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class RoundedAdamW(ElementwiseOptimizer):
    """AdamW of torch, for weights in bfloat16: its moments are in float32, which theirs would not be."""

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] += 1
        (t, (beta1, beta2)), grad = (_number(state["step"]), group["betas"]), gradient.to(weight.dtype)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**t))


class AdEMAMixOptimizer(ElementwiseOptimizer):
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
        gradient = gradient.to(weight.dtype)
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


class LionOptimizer(ElementwiseOptimizer):
    """
        p ← p − lr · sign(β₁·m + (1 − β₁)·g)     m ← β₂·m + (1 − β₂)·g

    Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        (beta1, beta2), gradient = group["betas"], gradient.to(weight.dtype)
        weight.add_(state["exp_avg"].lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        state["exp_avg"].lerp_(gradient, 1 - beta2)


class AdamW8bitOptimizer(ElementwiseOptimizer):
    """
    AdamW, with both moments kept as codes of 8 bits and a float32 scale for each block of numbers.

        x ≈ scale · table[code]      scale = the x of the block with the largest |x|

    That x is kept exactly, so numbers that were decoded get the same codes and scale again. The table is finer near
    zero, where most numbers are (`code_table`). The second moment is never rounded to zero, which would divide by ε
    (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, §2).

    Of a weight that is spread over ranks, each codes its own part, and blocks end with it. `decoded` gives its moments
    as numbers, which fit any parts, and `take` codes them again, with the same bits for the same parts.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float, block: int) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "block": block})
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight, gradient = local(weight), local(gradient)
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.float32)} | self._no_moments(weight, group["block"])
        signed, unsigned = self._tables_on(weight.device)
        state["step"] += 1
        t, (beta1, beta2) = _number(state["step"]), group["betas"]
        flat, grad = weight.view(-1), gradient.reshape(-1)
        for numbers, blocks in _chunks(weight.numel(), group["block"]):
            kept = [
                (state[f"{n}_codes"].view(-1)[numbers], state[f"{n}_scales"][blocks]) for n in ("exp_avg", "exp_avg_sq")
            ]
            g = grad[numbers].float()
            mean = decode(*kept[0], signed, group["block"]).lerp_(g, 1 - beta1)
            square = decode(*kept[1], unsigned, group["block"]).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = square.sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
            flat[numbers].addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**t))
            encode(mean, signed, True, group["block"], *kept[0])
            encode(square, unsigned, False, group["block"], *kept[1])

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            self._tables[device] = code_table(True).to(device), code_table(False).to(device)
        return self._tables[device]

    def _no_moments(self, weight: Tensor, block: int) -> dict[str, Tensor]:
        blocks, none = -(-weight.numel() // block), dict[str, Tensor]()
        for name in MOMENTS:
            none[f"{name}_codes"] = torch.zeros_like(weight, dtype=torch.uint8)
            none[f"{name}_scales"] = torch.zeros(blocks, dtype=torch.float32, device=weight.device)
        return none

    def decoded(self, weight: Tensor, as_part: "AsPart") -> dict[str, Tensor]:
        """What is kept of a weight, with its moments as float32 in CPU memory. Empty before the first step."""
        if not (state := self.state[weight]):
            return {}
        block, kept = self.defaults["block"], {"step": state["step"]}
        for name, table in zip(MOMENTS, self._tables_on(local(weight).device), strict=True):
            codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
            moment = torch.empty(codes.shape, dtype=torch.float32)
            for numbers, blocks in _chunks(codes.numel(), block):
                moment.view(-1)[numbers].copy_(decode(codes.view(-1)[numbers], scales[blocks], table, block))
            kept[f"{name}_decoded"] = as_part(moment, weight)
        return kept

    def take(self, weight: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Take up moments of a weight: numbers, or codes of the whole weight with their scales."""
        own, block = local(weight), self.defaults["block"]
        state = {"step": kept["step"].clone()} | self._no_moments(own, block)
        for name, signed in zip(MOMENTS, (True, False), strict=True):
            table = self._tables_on(own.device)[0 if signed else 1]
            if (moment := kept.get(f"{name}_decoded")) is None:
                scales = kept[f"{name}_scales"].repeat_interleave(block)[: weight.numel()].view(weight.shape)
                scales = part_like(weight, scales) if isinstance(weight, DTensor) else scales
                codes = local(kept[f"{name}_codes"]).reshape(-1)
                moment = decode(codes, scales.reshape(-1), table.to(codes.device), 1)
            flat = local(moment).reshape(-1)
            for numbers, blocks in _chunks(own.numel(), block):
                to = state[f"{name}_codes"].view(-1)[numbers], state[f"{name}_scales"][blocks]
                encode(flat[numbers].to(own.device, torch.float32), table, signed, block, *to)
        self.state[weight] = state


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, the first with a sign."""
AsPart = Callable[[Tensor, Tensor], Tensor]
"""Of what is in CPU memory for this rank's part of a tensor, and that tensor: a part of a whole."""


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
    least, most = rows.aminmax(dim=1)
    largest = torch.where(most >= -least, most, least)
    scales.copy_(torch.where(largest.abs() < torch.finfo(torch.float32).tiny, 0.0, largest))  # they lose bits below
    shares = (rows / torch.where(scales == 0, torch.inf, scales)[:, None]).view(-1)[: len(numbers)]
    nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
    if not signed:
        nearest = torch.maximum(nearest, (numbers > 0).int())
    codes.copy_(nearest)


REMEMBERED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    ScaledAdamW: ("step", "exp_avg", "exp_avg_sq"),
    RoundedAdamW: ("step", "exp_avg", "exp_avg_sq"),
    BatchedMuon: ("momentum_buffer",),
    AdEMAMixOptimizer: ("step", "exp_avg", "exp_avg_slow", "exp_avg_sq"),
    AdamW8bitOptimizer: ("step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"),
    LionOptimizer: ("exp_avg",),
}
"""What each optimizer keeps of a weight from step to step."""


@dataclass(frozen=True)
class Kinds:
    """The weights of a model that are trained, each in one list."""

    matrices: list[nn.Parameter]
    """Of the blocks, two or more dimensions: they decay, and are what Muon is for."""
    tables: list[nn.Parameter]
    """Outside of the blocks, two or more dimensions: embedding, positions, head. They decay where the recipe says."""
    vectors: list[nn.Parameter]
    """One dimension or none: norms and biases. They never decay."""

    @classmethod
    def of(cls, model: nn.Module) -> "Kinds":
        kinds = cls([], [], [])
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                hidden = name.startswith("blocks.")
                (kinds.vectors if weight.dim() < 2 else kinds.matrices if hidden else kinds.tables).append(weight)
        return kinds


_OF_ANOTHER = "It is of another model or kind of optimizer: resume with the recipe that made it, or start again."


class Optimizers:
    """One or two torch optimizers that together own every weight of a model that is trained, each weight once."""

    def __init__(
        self,
        model: nn.Module,
        config: Optimizer,
        dtype: torch.dtype = torch.bfloat16,
        *,
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        """
        `dtype` is the format of Muon's matmuls, and `seed` that of the rounding of weights in bfloat16. The ranks of
        `world` share Muon's work on GPUs.
        """
        self._seed = seed
        self._names = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
        self.parts = _parts(Kinds.of(model), config, dtype, world or World.alone())
        self._recoded = {
            self._names[weight]: optimizer
            for optimizer, weight in self._owned()
            if isinstance(optimizer, AdamW8bitOptimizer) and isinstance(weight, DTensor)
        }
        self._peaks = [[float(group["lr"]) for group in part.param_groups] for part in self.parts]

    def set_share(self, value: float) -> float:
        """Set every learning rate to this share of its peak. Returns that of the first group."""
        for optimizer, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * value
        return self._peaks[0][0] * value

    def step(self, scale: float = 1.0, number: int = 0) -> None:
        """
        Update the weights with their gradients times `scale`, which may or may not be written back to them. `number`
        is that of the step: with the seed and the name of a weight it decides how bfloat16 is rounded.
        """

        def seed_of(weight: Tensor) -> int:
            return stable_hash(f"{self._seed} {number} {self._names[weight]}")  # type: ignore[index]

        for optimizer in self.parts:
            if isinstance(optimizer, BatchedMuon | ElementwiseOptimizer):
                optimizer.seed_of = seed_of
            if isinstance(optimizer, ScaledAdamW):
                optimizer.scale = scale
            elif scale != 1.0:
                torch._foreach_mul_(
                    [w.grad for group in optimizer.param_groups for w in group["params"] if w.grad is not None], scale
                )
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.parts:
            optimizer.zero_grad(set_to_none=True)

    def state(self, as_part: AsPart | None = None) -> dict[str, Tensor]:
        """
        All that the optimizers remember, by name of the weight and of the quantity. Empty before the first step. Codes
        of a weight that is spread over ranks are decoded if `as_part` is given, so that they fit other ranks too.
        """
        kept = dict[str, Tensor]()
        for optimizer, weight in self._owned():
            of_weight, coded = optimizer.state[weight], self._recoded.get(self._names[weight])
            if coded is not None and as_part is not None:
                of_weight = coded.decoded(weight, as_part)
            kept |= {f"{self._names[weight]}/{key}": value for key, value in of_weight.items()}
        return kept

    def is_recoded(self, name: str) -> bool:
        """Whether moments of a weight are in 8 bits here, and in a checkpoint float32."""
        return name in self._recoded

    def restore(self, saved: Mapping[str, Tensor], *, take_over: bool = False) -> None:
        """
        Take up a state made by `state`; an empty one is that of before the first step. With `take_over`, tensors that
        are where they are needed are not copied: they belong to the optimizers then.

        Raises CheckpointError, and changes nothing, for one that misses a weight or is of another model or optimizer.
        """
        expected = {
            f"{self._names[weight]}/{key}": (optimizer, weight, key)
            for optimizer, weight in self._owned()
            for key in _remembered(optimizer, self._names[weight], saved)
        }
        if saved:
            self._refuse(sorted(expected.keys() - saved.keys()), "misses")
            self._refuse(sorted(saved.keys() - expected.keys()), "holds an unknown")
        for path, value in saved.items():
            optimizer, weight, key = expected[path]
            shape: tuple[int, ...] = () if key == "step" else tuple(weight.shape)
            if key.endswith("_scales"):
                shape = (-(-weight.numel() // optimizer.defaults["block"]),)
            fits = value.dtype == torch.uint8 if key.endswith("_codes") else value.is_floating_point()
            if tuple(value.shape) != shape or not fits:
                what = f"holds {key!r} of {path.rpartition('/')[0]!r} as {value.dtype} of shape {tuple(value.shape)}"
                raise CheckpointError(f"the state of the optimizer {what}, not {shape}", hint=_OF_ANOTHER)
        for optimizer in self.parts:
            optimizer.state.clear()
        coded = dict[nn.Parameter, tuple[AdamW8bitOptimizer, dict[str, Tensor]]]()
        for path, value in saved.items():
            optimizer, weight, key = expected[path]
            recoded = isinstance(weight, DTensor) or _is_decoded(self._names[weight], saved)
            if isinstance(optimizer, AdamW8bitOptimizer) and recoded:
                coded.setdefault(weight, (optimizer, {}))[1][key] = value
                continue
            # Counts of steps stay where the optimizer made them: AdamW's fused one with the weight, others on the host.
            here = weight.device if key != "step" or isinstance(optimizer, torch.optim.AdamW) else torch.device("cpu")
            kept: dict[str, Any] = optimizer.state[weight]
            kept[key] = value.to(device=here, copy=not take_over)
        for weight, (eight, moments) in coded.items():
            eight.take(weight, moments)

    def _refuse(self, paths: list[str], what: str) -> None:
        if paths:
            name, _, key = paths[0].rpartition("/")
            more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
            raise CheckpointError(
                f"the state of the optimizer {what} {key!r} of {name!r}{more}",
                hint=_OF_ANOTHER,
            )

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    yield optimizer, weight


def _remembered(optimizer: torch.optim.Optimizer, name: str, saved: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What a saved state has of a weight. Moments in 8 bits may be there as numbers: ranks have decoded them."""
    if isinstance(optimizer, AdamW8bitOptimizer) and _is_decoded(name, saved):
        return ("step", *(f"{moment}_decoded" for moment in MOMENTS))
    return REMEMBERED[type(optimizer)]


def _is_decoded(name: str, saved: Mapping[str, Tensor]) -> bool:
    return f"{name}/{MOMENTS[0]}_decoded" in saved


def _of_format(group: Mapping[str, Any], *, rounded: bool) -> list[dict[str, Any]]:
    """The group with its weights in bfloat16 alone, or with all others; none where there are none."""
    weights = [weight for weight in group["params"] if (weight.dtype == torch.bfloat16) == rounded]
    return [{**group, "params": weights}] if weights else []


def _parts(kinds: Kinds, config: Optimizer, dtype: torch.dtype, world: World) -> list[torch.optim.Optimizer]:
    lr, betas = config.learning_rate, (config.beta1, config.beta2)
    matrices = _group(kinds.matrices, config.weight_decay)
    tables = _group(kinds.tables, config.weight_decay if config.decay_embeddings else 0.0)
    vectors = _group(kinds.vectors, 0.0)
    if isinstance(config, Lion):
        return [LionOptimizer(matrices + tables + vectors, lr=lr, betas=betas)]

    def adamw(groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        rounded = [part for group in groups for part in _of_format(group, rounded=True)]
        exact = [part for group in groups for part in _of_format(group, rounded=False)]
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": config.epsilon}
        return [
            *([RoundedAdamW(rounded, **settings)] if rounded else []),
            *([ScaledAdamW(exact, **settings, fused=True)] if exact else []),
        ]

    if isinstance(config, Muon):
        return [*_muon(matrices, config, dtype, world), *adamw(tables + vectors)]
    if isinstance(config, AdEMAMix):
        return [
            AdEMAMixOptimizer(
                matrices + tables + vectors,
                lr=lr,
                betas=(*betas, config.beta3),
                alpha=config.alpha,
                eps=config.epsilon,
                ramp=config.ramp_steps,
            )
        ]
    if isinstance(config, AdamW8bit):
        coded = AdamW8bitOptimizer(matrices + tables, lr=lr, betas=betas, eps=config.epsilon, block=config.block)
        return [coded, *adamw(vectors)]
    return adamw(matrices + tables + vectors)


def _group(weights: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [{"params": weights, "weight_decay": weight_decay}] if weights else []


def _muon(groups: list[dict[str, Any]], config: Muon, dtype: torch.dtype, world: World) -> list[torch.optim.Optimizer]:
    if not groups:
        return []
    return [
        BatchedMuon(
            groups,
            lr=config.muon_lr,
            momentum=config.momentum,
            ns_steps=config.newton_schulz_steps,
            adjust_lr_fn=config.scaling,
            dtype=dtype,
            world=world,
        )
    ]


def learning_rate_share(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of step 1 … steps as a share of its peak. See the kinds of `Schedule` for the formulas."""
    t, warmup = step - 1, schedule.warmup_steps
    if t < warmup:
        return (t + 1) / warmup
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    start = decay_start(schedule, steps)
    if t < start:
        return 1.0
    x = (t - start) / (steps - start) if t < steps else 1.0
    shape = schedule.shape if isinstance(schedule, WSDSchedule) else schedule.kind
    fall = {"linear": x, "cosine": (1 - math.cos(math.pi * x)) / 2, "1-sqrt": math.sqrt(x)}[shape]
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * (1.0 - fall)


def decay_start(schedule: Schedule, steps: int) -> int:
    """How many steps come before the decay: until there, how many follow makes no difference to the learning rate."""
    if isinstance(schedule, ConstantSchedule):
        return steps
    if not isinstance(schedule, WSDSchedule):
        return schedule.warmup_steps
    if schedule.decay_steps is not None:
        length = schedule.decay_steps
    else:
        written = Fraction(str(schedule.decay_fraction))  # 0.29 · 100 is below 29 in binary
        length = max(1, int(written * steps)) if schedule.decay_fraction else 0
    return max(schedule.warmup_steps, steps - length)
