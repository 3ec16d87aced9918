"""
Cross entropy without the logits: the largest tensor of a small model with a large vocabulary never exists whole.

Letters used for shapes: N supervised tokens, C tokens of a chunk, D width, V vocabulary.
"""

from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.model.kernels import cpu, reference, triton

import torch
from torch import Tensor

CHUNK_BYTES = 2**27
"""Bytes of float32 logits that exist at once. Smaller chunks read the head's weights more often."""

PIECE, FEWEST_ROWS = 512, 16
"""Of a vocabulary, that is summed up by itself; and of a matrix that is multiplied as a matrix, with room to spare."""


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens have their logits in memory at once."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """
        loss = Σ (z − s[target] + c·z²)      s = h Wᵀ,  z = log Σ exp(s), in nats

    in chunks of tokens. The gradients of a chunk are computed while its logits s are in memory, so that nothing is
    computed twice: ∂loss/∂s = softmax(s) · (1 + 2·c·z) − onehot(target).
    """

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, share: float, slopes: bool
    ) -> tuple[Tensor, Tensor]:
        totals = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        tiles = cpu.matmul_ready(hidden, weight)
        learns = context.needs_input_grad[1]
        table = weight if tiles else weight.to(hidden.dtype)
        grad_hidden = hidden.new_empty(hidden.shape) if slopes else None
        grad_weight: Tensor | None = None
        size = chunk_tokens(len(weight))
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            sums, slope = chunk(_scores(hidden[piece], table, tiles), targets[piece], z_loss, share, slopes)
            totals += sums
            if slope is None or grad_hidden is None:
                continue
            if tiles:
                cpu.product(slope, table, grad_hidden[piece])
                if not learns:
                    continue
                into = weight.new_empty(weight.shape) if grad_weight is None else grad_weight
                grad_weight = cpu.product(slope.t(), hidden[piece], into, add=grad_weight is not None)
                continue
            grad_hidden[piece] = over_the_vocabulary(slope, table)
            if not learns:
                continue  # the head is frozen
            chunk_grad = slope.t() @ hidden[piece]
            grad_weight = chunk_grad.to(weight.dtype) if grad_weight is None else grad_weight.add_(chunk_grad)
        if slopes:
            if grad_weight is None and learns:
                grad_weight = torch.zeros_like(weight)
            context.grads = grad_hidden, grad_weight
        entropy = totals[0].clone()
        context.mark_non_differentiable(entropy)
        return totals.sum() * share, entropy

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """The gradients are given away, not copied: there is no second backward pass."""
        if context.grads is None:
            raise RuntimeError(
                "the gradients of this loss were given to a backward pass before; compute the loss again"
            )
        (grad_hidden, grad_weight), context.grads = context.grads, None
        known = upstream[0].device.type == "cpu" and type(upstream[0]) is Tensor
        if not known or float(upstream[0]) != 1.0:  # a pass over the largest weight
            grad_hidden = grad_hidden.mul_(upstream[0])
            grad_weight = None if grad_weight is None else grad_weight.mul_(upstream[0])
        return grad_hidden, grad_weight, None, None, None, None


def _scores(hidden: Tensor, table: Tensor, tiles: bool) -> Tensor:
    if tiles:
        return cpu.product(hidden, table.t(), cpu.aligned_rows(len(hidden), len(table)))
    return hidden @ table.t()


def over_the_vocabulary(slope: Float[Tensor, "C V"], table: Float[Tensor, "V D"]) -> Float[Tensor, "C D"]:
    """
    Gradient of the logits · table. For few rows, libraries sum over all of V in sequence: in float32 the error is ten
    times that of their code for many rows. A sum over pieces of V takes the same time without that error.
    """
    whole = len(table) // PIECE * PIECE
    if len(slope) >= FEWEST_ROWS or slope.dtype != torch.float32 or not whole:
        return slope @ table
    left = slope[:, :whole].reshape(len(slope), -1, PIECE).transpose(0, 1)
    pieces = left @ table[:whole].reshape(-1, PIECE, table.shape[1])
    return pieces.sum(0).addmm_(slope[:, whole:], table[whole:])


def chunk(
    scores: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float, share: float, slopes: bool
) -> tuple[Float[Tensor, "2"], Float[Tensor, "C V"] | None]:
    """
    Sum of the cross entropies and of the penalties of a chunk, and `share` times the gradient of both together with
    respect to the logits, in their format. It may overwrite the logits.
    """
    if triton.ready("cross-entropy", scores):
        z, reached = triton.cross_entropy_(scores, targets, z_loss=z_loss, share=share, slopes=slopes)
        return torch.stack(((z - reached).sum(), z_loss * z.square().sum())), scores if slopes else None
    reached = scores.gather(1, targets[:, None]).float()
    if cpu.ready(scores):
        z = cpu.cross_entropy_(scores, targets, z_loss=z_loss, share=share, slopes=slopes)
        slope = scores if slopes else None
    else:
        z, slope = reference.cross_entropy_(scores, targets, z_loss, slopes, share)
    return torch.stack(((z.flatten() - reached.flatten()).sum(), z_loss * z.square().sum())), slope


def token_losses(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    z_loss: float = 0.0,
    share: float = 1.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """
    What is minimized, times `share`, and the cross entropy alone, without gradient: sums over all N tokens, in nats.

    They differ by z_loss · (log Σ exp logits)², which keeps the logits of a long run near zero (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, §5). Zeros for N = 0.
    """
    losses: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, z_loss, share, torch.is_grad_enabled()
    )
    return losses
