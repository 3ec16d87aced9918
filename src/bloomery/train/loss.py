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
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        table = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK_TOKENS):
            piece = slice(start, start + CHUNK_TOKENS)
            scores = (hidden[piece] @ table.t()).float()
            wanted = targets[piece, None]
            right = scores.gather(1, wanted)
            normal = torch.logsumexp(scores, dim=1, keepdim=True)
            total += (normal - right).sum()
            slope = scores.sub_(normal).exp_()
            slope.scatter_add_(1, wanted, torch.full_like(right, -1.0))
            slope = slope.to(hidden.dtype)
            grad_hidden[piece] = slope @ table
            grad_weight += slope.t() @ hidden[piece]
        context.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = context.saved_tensors
        return grad_hidden * upstream[0].to(grad_hidden.dtype), grad_weight * upstream[0], None


def token_loss(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]
) -> Float[Tensor, ""]:
    """Sum over all N tokens of the cross entropy of their targets, in nats. Zero for N = 0."""
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return loss
