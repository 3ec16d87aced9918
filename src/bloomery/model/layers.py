"""
The small parts: normalization, positions, feed-forward.

Letters used for shapes: B batch, T tokens, D width, H query heads, K key/value heads, E width of one head,
S tokens that are attended to (T, or those in the cache), M width of the feed-forward.
"""

from jaxtyping import Float, Int

import bloomery.hw.needs_torch  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Float[Tensor, "B 1 T E"], Float[Tensor, "B 1 T E"]]


class RMSNorm(nn.Module):
    """
        y = x / √(mean(x²) + ε) · g

    computed in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467). Under autocast the result has the
    number format of the matrix products that read it, so that it is converted once and not by each of them.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        y = F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)
        kind = x.device.type
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


class GatedMLP(nn.Module):
    """
        y = (silu(x Wg) ⊙ x Wu) Wd

    SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def rotation(positions: Int[Tensor, "B T"], head_width: int, theta: float) -> Rotation:
    """
    Cosine and sine of every position's angles, for `rotate`.

        angle(p, j) = p · θ^(−2j/E)     j = 0 … E/2 − 1, repeated for the second half

    Halves are paired (j with j + E/2), as in transformers' Llama, not neighbours as in the paper
    (Su et al. 2021, https://arxiv.org/abs/2104.09864). Computed in float32.
    """
    j = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None, :, None].float() * (theta ** (-j / head_width))  # (B, 1, T, E/2)
    angle = torch.cat((angle, angle), dim=-1)  # (B, 1, T, E)
    return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "B N T E"], turn: Rotation) -> Float[Tensor, "B N T E"]:
    """Turn each pair of numbers of every head by its position's angle."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)
