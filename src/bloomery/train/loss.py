"""
Cross entropy without the logits: the largest tensor of a small model with a large vocabulary never exists whole.

Letters used for shapes: N supervised tokens, D width, V vocabulary.
"""

from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.needs_torch  # noqa: F401

import torch
from torch import Tensor

CHUNK_TOKENS = 2048


class _ChunkedCrossEntropy(torch.autograd.Function):
    """
        loss = Σ (log Σ exp(h W ᵀ) − (h Wᵀ)[target])        in nats

    in chunks of tokens. The gradients are computed with each chunk's scores still at hand, so that nothing is computed
    twice: ∂loss/∂scores = softmax(scores) − onehot(target).
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        table = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if slopes else None
        grad_weight: Tensor | None = None
        for start in range(0, len(hidden), CHUNK_TOKENS):
            piece = slice(start, start + CHUNK_TOKENS)
            wanted = targets[piece, None]
            log_p = torch.log_softmax(hidden[piece] @ table.t(), dim=1, dtype=torch.float32)
            total -= log_p.gather(1, wanted).sum()
            if grad_hidden is None:
                continue
            slope = log_p.exp_()
            slope.scatter_add_(1, wanted, slope.new_full(wanted.shape, -1.0))
            slope = slope.to(hidden.dtype)
            grad_hidden[piece] = slope @ table
            part = slope.t() @ hidden[piece]
            grad_weight = part.to(weight.dtype) if grad_weight is None else grad_weight.add_(part)
        if grad_hidden is not None:
            context.save_for_backward(grad_hidden, torch.zeros_like(weight) if grad_weight is None else grad_weight)
        return total

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = context.saved_tensors
        # In place: a copy of the table's gradient costs as much as its matrix product. A second backward pass fails.
        return grad_hidden.mul_(upstream[0]), grad_weight.mul_(upstream[0]), None, None


def token_loss(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]
) -> Float[Tensor, ""]:
    """Sum over all N tokens of the cross entropy of their targets, in nats. Zero for N = 0."""
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss
