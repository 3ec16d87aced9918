"""
Position information: RoPE angles, with or without scaling, and ALiBi slopes.

Letters used for shapes are those of layers.py; N heads, of queries or of keys.
"""

import math

from jaxtyping import Float, Int

from bloomery.hw.device import constant
from bloomery.model.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from bloomery.model.kernels import cpu, triton

import torch
from torch import Tensor

Rotation = tuple[Float[Tensor, "b 1 T R"], Float[Tensor, "b 1 T R"]]  # b is 1 where all rows have the same positions


def rotation(
    positions: Int[Tensor, "b T"], config: ModelConfig, dtype: torch.dtype = torch.float32, *, local: bool = False
) -> Rotation:
    """
    Cosine and sine of every position's angles, for `rotate`, in the dtype of the queries and keys.

        angle(p, j) = p · ω(j)     j = 0 … R/2 − 1, repeated for the second half

    R is the number of a head's numbers that rotate, usually all E. `local` takes rope_local_theta, without scaling.

    Halves are paired (j with j + E/2), as in transformers' Llama, not neighbours as in the paper
    (Su et al. 2021, https://arxiv.org/abs/2104.09864). Computed in float32.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.rope_local_theta is not None:
        theta, scaling = config.rope_local_theta, None
    speeds, size = frequencies(config.rotary_size, theta, scaling, positions.device)
    angle = positions[:, None, :, None].float() * speeds  # (b, 1, T, R/2)
    angle = torch.cat((angle, angle), dim=-1)  # (b, 1, T, R)
    cos, sin = angle.cos(), angle.sin()
    if size != 1.0:
        cos, sin = cos * size, sin * size
    return cos.to(dtype), sin.to(dtype)


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str = "cpu"
) -> tuple[Float[Tensor, " half"], float]:
    """
    How fast each pair of numbers rotates, in radians per token, and the factor on rotated queries and keys.

        ω(j) = 1 / θ^(2j/E)

    In float32 and in this order of operations, so that angles at far positions have the bits of transformers'.
    """
    j = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    speeds = 1.0 / (theta ** (j / head_dim))
    match scaling:
        case LinearScaling():
            return speeds / scaling.factor, 1.0
        case Llama3Scaling():
            return _llama3(speeds, scaling), 1.0
        case YarnScaling():
            grown = scaling.attention_factor or (0.1 * math.log(scaling.factor) + 1.0)
            return _yarn(speeds, head_dim, theta, scaling), grown
        case LongRopeScaling():
            short = constant(scaling.short_factor, device)
            root = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context_length))
            return 1.0 / (short * theta ** (j / head_dim)), scaling.attention_factor or root
        case None:
            return speeds, 1.0


def _llama3(speeds: Tensor, scaling: Llama3Scaling) -> Tensor:
    turn_tokens = 2 * math.pi / speeds
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((scaling.original_context_length / turn_tokens - low) / (high - low)).clamp(0, 1)  # 1: as it is
    return (1 - share) * speeds / scaling.factor + share * speeds


def _yarn(speeds: Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    def dim(turns: float) -> float:
        """The index j of the pair with so many rotations over the original context."""
        return head_dim * math.log(scaling.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(dim(scaling.beta_fast)), 0), min(math.ceil(dim(scaling.beta_slow)), head_dim - 1)
    width = last - first or 0.001
    j = torch.arange(head_dim // 2, device=speeds.device, dtype=torch.float32)
    share = ((j - first) / width).clamp(0, 1)  # 1: slowed by the whole factor
    return speeds / scaling.factor * share + speeds * (1 - share)


def rotate(x: Float[Tensor, "B N T E"], rope: Rotation) -> Float[Tensor, "B N T E"]:
    """Turn each pair of numbers of every head by its position's angle. Numbers beyond the angles stay."""
    cos, sin = rope
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :width].contiguous(), rope), x[..., width:]), dim=-1)
    if triton.ready("rotary", x, cos, sin):
        return triton.rotate(x, cos, sin)
    if cpu.ready(x) and cpu.ready(cos, sin):
        return cpu.rotate(x, cos.float(), sin.float())
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """
    How much a score falls with each token of distance, for every head.

        2^(−8/H), 2^(−16/H), … 2^(−8)

    for powers of two; for other numbers of heads those of the power below, and then every second one of the power above
    (Press et al. 2021, https://arxiv.org/abs/2108.12409).
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    above = [2.0 ** (-4.0 * i / below) for i in range(1, 2 * below + 1, 2)]
    return slopes + above[: num_heads - below]
