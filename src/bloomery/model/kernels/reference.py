"""
Reference implementations of the fused operations in plain PyTorch.

The formulas run in the format of their inputs, and say what is right. Where callers have no lines of their own,
there is also the version that training computes without kernels.
"""

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401

import torch
from torch import Tensor


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"] | None, eps: float) -> Float[Tensor, "*B D"]:
    """x / √(mean(x²) + ε) · weight"""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotate(
    x: Float[Tensor, "B N T E"],
    cosine: Float[Tensor, "#B 1 T E"],
    sine: Float[Tensor, "#B 1 T E"],
    weight: Float[Tensor, " E"] | None = None,
    eps: float | None = None,
) -> Float[Tensor, "B N T E"]:
    """(first · cos − second · sin, second · cos + first · sin) of each head's halves, after its norm."""
    x = x if eps is None else rms_norm(x, weight, eps)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def cross_entropy(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float = 0.0
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, "C V"]]:
    """z = log Σ exp(logits), the targets' logits `reached`, and the gradients of Σ (z − reached + z_loss · z²)."""
    counts, labels = targets >= 0, targets.clamp_min(0)[:, None]
    z, reached = torch.logsumexp(logits, 1), logits.gather(1, labels)[:, 0]
    grads = torch.softmax(logits, 1) * (1 + 2 * z_loss * z)[:, None]
    grads = grads.scatter_add(1, labels, -torch.ones_like(labels, dtype=logits.dtype)) * counts[:, None]
    return z * counts, reached * counts, grads


def cross_entropy_(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], z_loss: float, with_grads: bool, share: float = 1.0
) -> tuple[Float[Tensor, "C 1"], Float[Tensor, "C V"] | None]:
    """
    z, and `share` times the gradients, in few passes over memory. Training uses it where there is no kernel.

    z is in float32, the gradients in the dtype of the logits, which may be overwritten. Every target counts.
    """
    if not with_grads:
        return torch.logsumexp(logits.float(), 1, keepdim=True), None
    labels = targets[:, None]
    largest, index = logits.max(1, keepdim=True)
    shares = torch.softmax(logits, 1, dtype=torch.float32)
    z = largest.float() - shares.gather(1, index).log_()  # the largest share is at least 1 / V
    if z_loss:
        shares.mul_(1 + 2 * z_loss * z)
    shares.scatter_add_(1, labels, shares.new_full(labels.shape, -1.0))
    return z, torch.mul(shares, share, out=shares if logits.dtype == torch.float32 else logits)
