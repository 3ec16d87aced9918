"""
The small parts: normalization, feed-forward and positions (RoPE angles, with or without scaling, and ALiBi slopes);
and matmuls in float8.

Letters used for shapes: B batch, T tokens, D width, H query heads, K key/value heads, E width of one head.
F is the width of one head's values: E, or 2E in differential attention. S are the tokens that are attended to: T, or
those in the cache. M is the width of the feed-forward. N are heads, of queries or of keys.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int

from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw.device import Device, constant, float8_formats
from bloomery.model.config import (
    FLOAT8_SIDE,
    GATED,
    FeedForwardKind,
    Float8,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
    without_float8,
)
from bloomery.model.kernels import cpu, triton

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Formats = tuple[torch.dtype, torch.dtype]
"""Of weights and inputs, and of gradients of results."""


class Linear(nn.Linear):
    """y = x Wᵀ + b"""

    float8: Formats | None = None
    """Number formats of 8 bits for both sides of the matmul in training mode."""

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead N"]:
        if self.float8 is not None and self.training:
            return float8_linear(x, self.weight, self.bias, self.float8, _computed(x))
        if _computed(x) == torch.bfloat16 and cpu.matmul_ready(x.to(torch.bfloat16), self.weight):
            return cpu.linear(x.to(torch.bfloat16), self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """
        y = x / √(mean(x²) + ε) · g

    computed in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467). Under autocast the result has the
    dtype of the matmuls that read it, so it is converted once and not by each matmul. g is the weight, or 1 + weight.
    """

    def __init__(self, width: int, eps: float, weights: bool = True, plus_one: bool = False) -> None:
        super().__init__()
        self.width, self.eps, self.plus_one = width, eps, plus_one
        self.weight = nn.Parameter(torch.full((width,), 0.0 if plus_one else 1.0)) if weights else None

    def gain(self) -> Float[Tensor, " D"] | None:
        """g, in float32; None for 1."""
        if self.weight is None:
            return None
        weight = self.weight.float()  # ranks may have gathered it in a short format
        return 1.0 + weight if self.plus_one else weight

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead D"]:
        gain = self.gain()
        dtype, weights = _computed(x), () if gain is None else (gain,)
        if triton.ready("rms-norm", x, *weights) and self.width <= triton.LARGEST_ROW:
            return triton.rms_norm(x, gain, self.eps, dtype)
        full = x.float()
        if dtype in cpu.KINDS and cpu.ready(full, *weights):
            return cpu.rms_norm(full, gain, self.eps, dtype)
        return _as_computed(F.rms_norm(full, (self.width,), gain, self.eps))


class LayerNorm(nn.Module):
    """
        y = (x − mean(x)) / √(var(x) + ε) · g + b

    (Ba et al. 2016, https://arxiv.org/abs/1607.06450), in the formats of RMSNorm.
    """

    def __init__(self, width: int, eps: float, weights: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width)) if weights else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead D"]:
        full, dtype = x.float(), _computed(x)
        weight, bias = (None if one is None else one.float() for one in (self.weight, self.bias))
        if dtype in cpu.KINDS and cpu.ready(full, *(one for one in (weight, bias) if one is not None)):
            return cpu.layer_norm(full, weight, bias, self.eps, dtype)
        return _as_computed(F.layer_norm(full, (self.width,), weight, bias, self.eps))


def _computed(x: Tensor) -> torch.dtype:
    """The dtype of matmuls: autocast's where it is on, else float32."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


def _as_computed(y: Tensor) -> Tensor:
    return y.to(_computed(y))


def rms_norm(config: ModelConfig, width: int) -> RMSNorm:
    """An RMSNorm of a model, of any width."""
    return RMSNorm(width, config.norm_eps, config.norm_affine, config.norm_plus_one)


def norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm of the residual stream that a config asks for."""
    if config.norm == "rmsnorm":
        return rms_norm(config, config.hidden_size)
    biased = config.norm_affine and config.biases == "all"
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_affine, biased)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))"""
    return cpu.gelu_tanh(x) if cpu.ready(x) else F.gelu(x, approximate="tanh")


ROWS_AT_ONCE = 4096
"""Of a head whose rows are normalized."""


class NormalizedHead(nn.Linear):
    """
        logits = h (W / |W|)ᵀ        each row of W with length 1

    The head of Baichuan2 (Yang et al. 2023, https://arxiv.org/abs/2309.10305).
    """

    def rows(self, dtype: torch.dtype | None = None) -> Float[Tensor, "V D"]:
        """In another number format, those of a frozen head never exist in its own all at once."""
        if dtype in (None, self.weight.dtype) or self.weight.requires_grad:
            return F.normalize(self.weight)
        rows = torch.empty_like(self.weight, dtype=dtype)
        for some, source in zip(*(torch.split(one, ROWS_AT_ONCE) for one in (rows, self.weight)), strict=True):
            some.copy_(F.normalize(source))
        return rows

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead V"]:
        return F.linear(x, self.rows())


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


# A kind is also named in model/config.py (FeedForwardKind, GATED), for decoding on CPUs in generate/decoder.py
# (ACTIVATIONS, with the numbers of `activated` in native/decode.cpp), and for third-party files in weights/llama.py
# (GATES) and weights/architectures.py (NEOX_ACTIVATIONS, GPT2_ACTIVATIONS).
ACTIVATIONS: dict[FeedForwardKind, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu_squared,
}


class GatedMLP(nn.Module):
    """
        y = (act(x Wg) ⊙ x Wu) Wd

    SwiGLU and GeGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(
        self, width: int, intermediate_size: int, kind: FeedForwardKind = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.act = ACTIVATIONS[kind]
        self.gate = Linear(width, intermediate_size, bias=bias)
        self.up = Linear(width, intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, width, bias=bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate, up = self.gate(x), self.up(x)
        compiled = self.act is F.silu and cpu.ready(gate, up)
        y: Tensor = self.down(cpu.swiglu(gate, up) if compiled else self.act(gate) * up)
        return y


class MLP(nn.Module):
    """
        y = act(x Wu) Wd

    GELU (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415), its approximation by tanh as in GPT-2, and the
    square of ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668).
    """

    def __init__(self, width: int, intermediate_size: int, kind: FeedForwardKind, bias: bool = False) -> None:
        super().__init__()
        self.act = ACTIVATIONS[kind]
        self.up = Linear(width, intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, width, bias=bias)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def build_mlp(config: ModelConfig, layer: int) -> GatedMLP | MLP:
    """The feed-forward that a config asks for in a layer."""
    kind = config.layer(layer)[2]
    mlp_class = GatedMLP if kind in GATED else MLP
    return mlp_class(config.hidden_size, config.intermediate_size, kind, config.biased("mlp"))


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


# Matmuls of numbers in 8 bits (float8), for GPUs that compute them faster than bfloat16:
#
#     y = x Wᵀ  ≈  s(x) s(W) · x₈ W₈ᵀ         x₈ = round(x / s(x))         s(x) = max |x| / largest number of the format
#
# Each tensor has one scale, from its own numbers of this moment. Weights and inputs have four bits of exponent, and
# gradients of results five (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). Sums are in float32. A number
# that is not finite makes the whole result not finite, so that the guard of a run sees it.
#
# GPUs want a left side with contiguous rows, a right side with contiguous columns, and sides that are multiples of
# FLOAT8_SIDE. So the backward pass transposes some sides, and rows of zeros are added to tokens. P is the vocabulary
# with its padding.

LARGEST_ERROR = 0.06
"""Relative, of a matmul whose two sides are rounded to three bits after the first. Random numbers give 0.04."""
TINY = 1e-30
"""The scale of a tensor of zeros is not zero."""


def to_float8(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Float[Tensor, ""]]:
    """
    x in a float8 format with contiguous rows, and the number to multiply it with. `largest` replaces the maximum of
    |x|, of which no number may be more than some percent above it: those would not be finite.
    """
    scale = float8_scale(x, dtype) if largest is None else largest.clamp(min=TINY) / torch.finfo(dtype).max
    return _divided(x, scale, dtype).contiguous(), scale


def _divided(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # The inverse is no 0-dimensional tensor, so that the result is in float32 without a copy of x in it.
    return (x * scale.reciprocal()[None]).to(dtype)


def float8_scale(x: Tensor, dtype: torch.dtype) -> Float[Tensor, ""]:
    """What a float8 format has to be multiplied with, so that its largest number is the maximum of |x|."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return largest.clamp(min=TINY) / torch.finfo(dtype).max


def scaled_matmul(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
) -> Float[Tensor, "N M"]:
    """
    left · rightᵀ of tensors with their scales; both have contiguous rows. `fast` lets NVIDIA's GPUs add up in fewer
    bits, which is enough for the forward pass.
    """
    (a, scale_a), (b, scale_b) = left, right
    y: Tensor = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    return y


def transposed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transposed tensor, with contiguous rows, and its scale."""
    return pair[0].t().contiguous(), pair[1]


def padded_rows(x: Float[Tensor, "N D"]) -> Float[Tensor, "_ D"]:
    """With rows of zeros, up to a multiple of FLOAT8_SIDE."""
    return F.pad(x, (0, 0, 0, -len(x) % FLOAT8_SIDE)) if len(x) % FLOAT8_SIDE else x


class _RoundedLinear(torch.autograd.Function):
    """Keeps the input in 8 bits for the backward pass, and rounds the weight again there."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, formats: Formats, dtype: torch.dtype) -> Tensor:
        x8, scale = to_float8(x, formats[0])
        context.save_for_backward(x8, scale, weight)
        context.formats, context.input_dtype = formats, x.dtype
        return scaled_matmul((x8, scale), to_float8(weight, formats[0]), dtype, fast=True)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8, scale, weight = context.saved_tensors
        short, wide = context.formats
        grad = to_float8(upstream[0], wide)
        grad_x = scaled_matmul(grad, transposed(to_float8(weight, short)), context.input_dtype, fast=False)
        grad_weight = scaled_matmul(transposed(grad), transposed((x8, scale)), weight.dtype, fast=False)
        return grad_x, grad_weight, None, None


def float8_linear(
    x: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "M D"],
    bias: Float[Tensor, " M"] | None,
    formats: Formats,
    dtype: torch.dtype,
) -> Float[Tensor, "*lead M"]:
    """x Wᵀ + b, with both sides of the matmul in 8 bits; the result has the format `dtype`."""
    rows = x.flatten(0, -2)
    y: Tensor = _RoundedLinear.apply(padded_rows(rows), weight, formats, dtype)  # type: ignore[no-untyped-call]
    y = y[: len(rows)].view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


class HeadInFloat8:
    """
    The head's matrix in 8 bits, for a loss that computes gradients with the logits. Rows of zeros are added up to a
    multiple of `multiple`. The matrix is rounded some rows at a time, so that it never exists twice in a longer format.
    """

    def __init__(self, weight: Float[Tensor, "V D"], formats: Formats, multiple: int) -> None:
        self.short, self.wide = formats
        num_rows = len(weight) + -len(weight) % multiple
        codes, scale = (
            weight.new_empty((num_rows, weight.shape[1]), dtype=self.short),
            float8_scale(weight, self.short),
        )
        for start in range(0, len(weight), ROWS_AT_ONCE):
            some = weight[start : start + ROWS_AT_ONCE]
            codes[start : start + len(some)] = _divided(some, scale, self.short)
        codes[len(weight) :].view(torch.uint8).zero_()
        self.rows = codes, scale
        self._columns: tuple[Tensor, Tensor] | None = None
        self._hidden: tuple[Tensor, Tensor] | None = None

    def logits(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        self._hidden = to_float8(padded_rows(hidden), self.short)
        return scaled_matmul(self._hidden, self.rows, hidden.dtype, fast=True)[: len(hidden)]

    def gradients(
        self, grad: tuple[Tensor, Tensor], dtype: torch.dtype, *, learns: bool
    ) -> tuple[Float[Tensor, "_ D"], Float[Tensor, "P D"] | None]:
        """
        Of the tokens whose logits were computed last, with their padding, and of the matrix if it `learns`. `grad` is
        the gradient of the logits in 8 bits, with its scale.
        """
        assert self._hidden is not None
        self._columns = self._columns or transposed(self.rows)
        grad_hidden = scaled_matmul(grad, self._columns, dtype, fast=False)
        if not learns:
            return grad_hidden, None
        return grad_hidden, scaled_matmul(transposed(grad), transposed(self._hidden), dtype, fast=False)


def multiply_in_float8(model: nn.Module, kind: Float8, device: torch.device) -> None:
    """
    From now on, multiply the head of a Transformer, or its head and its blocks, in the 8-bit formats of a device. This
    holds for training mode alone.

    Raises ConfigError for a matrix whose sides are not multiples of FLOAT8_SIDE.
    """
    if kind == "off":
        return
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    names = [name for name in linears if name == "head" or (kind == "all" and name.startswith("blocks."))]
    for name in names:
        rows, columns = linears[name].weight.shape
        if columns % FLOAT8_SIDE or (rows % FLOAT8_SIDE and name != "head"):
            what = f'float8="{kind}" needs matrices with sides that are multiples of {FLOAT8_SIDE}'
            raise ConfigError(f"{what}, but {name} has {rows:,} x {columns:,}", hint=without_float8(columns, name))
    formats = float8_formats(device)
    for name in names:
        if name == "head":
            model.head_float8 = formats  # type: ignore[assignment]
        else:
            linears[name].float8 = formats  # type: ignore[assignment]


def check_device(device: Device) -> None:
    """Raises HardwareError for a CPU, and for a GPU that does not multiply numbers of 8 bits, or multiplies wrongly."""
    hint = 'Set float8="off".'
    if not device.is_gpu:
        raise HardwareError(f"float8 needs a GPU that multiplies numbers of 8 bits, not {device.name}", hint=hint)
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((64, 96), (112, 96), (64, 112)))
    formats = float8_formats(device.torch_device)
    inputs = x.to(device.torch_device, torch.bfloat16).requires_grad_()
    weight = w.clone().to(device.torch_device).requires_grad_()
    try:
        y = float8_linear(inputs, weight, None, formats, torch.bfloat16)
        grads = torch.autograd.grad(y, (inputs, weight), g.to(y))
        pairs = list(zip((y, *grads), (x @ w.t(), g @ w, g.t() @ x), strict=True))
        errors = [float((one.detach().cpu().float() - right).norm() / right.norm()) for one, right in pairs]
    except (RuntimeError, ValueError) as error:
        what = f"{device.name} does not multiply numbers of 8 bits: {str(error).partition(chr(10))[0]}"
        raise HardwareError(what, hint=hint) from error
    if not max(errors) <= 2 * LARGEST_ERROR:
        raise HardwareError(f"{device.name} multiplies numbers of 8 bits wrongly (error {max(errors):.2g})", hint=hint)
