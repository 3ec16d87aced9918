"""
Recompute activations in the backward pass instead of keeping them from the forward pass.

    none         nothing
    full         each block: only its input is kept
    selective    the cheap operations of each block. Its input stays, and so do the results of matmuls with weights
                 and of fused attention. Recomputed are norms, positions, activations, and attention weights
                 that were written out

The gradients are the same bits, because the same operations make them (Chen et al. 2016,
https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.train.config import Level

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
]
"""Batched matmuls are not among these: on a CPU their results are the attention weights, T × T for each head."""


def checkpoint_activations(model: Transformer, level: Level) -> None:
    """Have the blocks of a model compute again in the backward pass what `level` says. Names of weights stay."""
    for block in model.blocks:
        plain: Callable[..., Tensor] = block.__dict__.pop("forward", block.forward)
        plain = getattr(plain, "plain", plain)
        if level != "none":
            block.__dict__["forward"] = RecomputedForward(plain, level)


class RecomputedForward:
    """A block's forward pass that keeps less, where anything has to be kept."""

    def __init__(self, plain: Callable[..., Tensor], level: Level) -> None:
        self.plain, self.level = plain, level
        self._how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if level == "selective":
            self._how["context_fn"] = partial(create_selective_checkpoint_contexts, [*KEPT, cpu.forward_operation()])

    def __call__(self, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.plain(*inputs)
        output: Tensor = checkpoint(self.plain, *inputs, **self._how)
        return output
