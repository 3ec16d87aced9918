"""
Cross entropy without the logits: the largest tensor of a small model with a large vocabulary never exists whole.

Letters used for shapes: N supervised tokens, C tokens of a chunk, D width, V vocabulary.
"""

from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.model import kernels
from bloomery.model.fused import operations, plain

import torch
from torch import Tensor

CHUNK_BYTES = 2**27
"""Of the float32 scores that exist at once. Smaller chunks read the head's weights more often."""


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens' scores exist at once."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """
        loss = Σ (z − s[target] + c·z²)      s = h Wᵀ,  z = log Σ exp(s), in nats

    in chunks of tokens. The gradients are computed with each chunk's scores still at hand, so that nothing is computed
    twice: ∂loss/∂s = softmax(s) · (1 + 2·c·z) − onehot(target).
    """

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, slopes: bool
    ) -> tuple[Tensor, Tensor]:
        totals = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        table = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if slopes else None
        grad_weight: Tensor | None = None
        size = chunk_tokens(len(weight))
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            sums, slope = chunk(hidden[piece] @ table.t(), targets[piece], z_loss, slopes)
            totals += sums
            if slope is None or grad_hidden is None:
                continue
            grad_hidden[piece] = slope @ table
            if not context.needs_input_grad[1]:
                continue  # the head is frozen
            share = slope.t() @ hidden[piece]
            grad_weight = share.to(weight.dtype) if grad_weight is None else grad_weight.add_(share)
        if slopes:
            if grad_weight is None and context.needs_input_grad[1]:
                grad_weight = torch.zeros_like(weight)
            context.save_for_backward(grad_hidden, grad_weight)
        entropy = totals[0].clone()
        context.mark_non_differentiable(entropy)
        return totals.sum(), entropy

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """In place: a second backward pass through the same loss is refused by torch."""
        grad_hidden, grad_weight = context.saved_tensors
        frozen = grad_weight is None
        return grad_hidden.mul_(upstream[0]), None if frozen else grad_weight.mul_(upstream[0]), None, None, None


def chunk(
    scores: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float, slopes: bool
) -> tuple[Float[Tensor, "2"], Float[Tensor, "C V"] | None]:
    """
    Sum of the cross entropies and of the penalties of a chunk, and the gradient of both together with respect to the
    scores, in their format. It may overwrite the scores.
    """
    if operations.ready("cross-entropy", scores):
        z, reached = operations.cross_entropy_(scores, targets, z_loss=z_loss, slopes=slopes)
        return torch.stack(((z - reached).sum(), z_loss * z.square().sum())), scores if slopes else None
    reached = scores.gather(1, targets[:, None]).float()
    if kernels.ready(scores):
        z, slope = kernels.cross_entropy_(scores, targets, z_loss=z_loss, slopes=slopes), scores if slopes else None
    else:
        z, slope = plain.cross_entropy_(scores, targets, z_loss, slopes)
    return torch.stack((z.sum() - reached.sum(), z_loss * z.square().sum())), slope


def token_losses(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"], z_loss: float = 0.0
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """
    What is minimized, and the cross entropy alone, which has no gradient: sums over all N tokens, in nats.

    They differ by z_loss · (log Σ exp scores)², which keeps the scores of a long run near zero (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, §5). Zeros for N = 0.
    """
    losses: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, z_loss, torch.is_grad_enabled()
    )
    return losses


def token_loss(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"], z_loss: float = 0.0
) -> Float[Tensor, ""]:
    """What is minimized, as the first of `token_losses`."""
    return token_losses(hidden, weight, targets, z_loss)[0]
