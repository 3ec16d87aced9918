"""AdamW and the gradient norm from the compiled library, for float32 weights on the CPU."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native
from bloomery.model.kernels.cpu import call

import torch
from torch import Tensor, nn

LIBRARY = "optimizer"
CHUNK = 2**14
"""Numbers of which the library gives one sum of squares."""


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
        if not _ready([one for weight in weights for one in (weight, weight.grad)]):
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


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """√ Σ g² over all numbers of all gradients: 0 for none."""
    if any(gradient.dtype != torch.float32 for gradient in gradients):  # a norm in bfloat16 has three digits
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    if not _ready(gradients):
        return nn.utils.get_total_norm(gradients)
    sums = [torch.empty(-(-gradient.numel() // CHUNK), dtype=torch.float64) for gradient in gradients]
    for gradient, into in zip(gradients, sums, strict=True):
        call(LIBRARY, "squares", gradient, gradient.numel(), into)
    return torch.cat(sums).sum().sqrt().float() if sums else torch.zeros(())


def _ready(tensors: Sequence[Tensor]) -> bool:
    return native.library(LIBRARY) is not None and all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        for tensor in tensors
    )
