"""
Matmuls of numbers in 8 bits (float8), for GPUs that compute them faster than bfloat16.

    y = x Wᵀ  ≈  s(x) s(W) · x₈ W₈ᵀ         x₈ = round(x / s(x))         s(x) = max |x| / largest number of the format

Each tensor has one scale, from its own numbers of this moment. Weights and inputs have four bits of exponent, gradients
of results five (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). Sums are in float32. A number that is not
finite makes the whole result not finite, so that the guard of a run sees it.

GPUs want a left side with rows that are contiguous, a right side with columns that are, and sides that are multiples of
FLOAT8_SIDE. So the backward pass transposes some sides, and rows of zeros are added to tokens.

Letters used for shapes: N tokens, D inputs, M outputs, V vocabulary, P the vocabulary with its padding.
"""

from typing import Any, Literal

from jaxtyping import Float

from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw import require_torch as require_torch
from bloomery.hw.device import Device
from bloomery.hw.device import float8_formats as formats_on
from bloomery.model.config import FLOAT8_SIDE, without_float8

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Float8 = Literal["off", "head", "all"]
Formats = tuple[torch.dtype, torch.dtype]
"""Of weights and inputs, and of gradients of results."""
LARGEST_ERROR = 0.06
"""Relative, of a matmul whose two sides are rounded to three bits after the first. Random numbers give 0.04."""
ROWS_AT_ONCE = 4096
"""Of the head, while it is rounded."""
TINY = 1e-30
"""The scale of a tensor of zeros is not zero."""


def scaled(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Float[Tensor, ""]]:
    """
    x in a float8 format with contiguous rows, and the number to multiply it with. `largest` replaces the maximum of
    |x|, of which no number may be more than some percent above it: those would not be finite.
    """
    scale = scale_of(x, dtype) if largest is None else largest.clamp(min=TINY) / torch.finfo(dtype).max
    # The inverse is no 0-dimensional tensor, so that the result is in float32 without a copy of x in it.
    return (x * scale.reciprocal()[None]).to(dtype).contiguous(), scale


def scale_of(x: Tensor, dtype: torch.dtype) -> Float[Tensor, ""]:
    """What a float8 format has to be multiplied with, so that its largest number is the maximum of |x|."""
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return largest.clamp(min=TINY) / torch.finfo(dtype).max


def multiplied(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
) -> Float[Tensor, "N M"]:
    """
    left · rightᵀ of tensors with their scales; both have contiguous rows. `fast` lets NVIDIA's GPUs add up in fewer
    bits, which is enough for the forward pass.
    """
    (a, scale_a), (b, scale_b) = left, right
    y: Tensor = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    return y


def turned(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transposed tensor, with contiguous rows, and its scale."""
    return pair[0].t().contiguous(), pair[1]


def padded(x: Float[Tensor, "N D"]) -> Float[Tensor, "_ D"]:
    """With rows of zeros, up to a multiple of FLOAT8_SIDE."""
    return F.pad(x, (0, 0, 0, -len(x) % FLOAT8_SIDE)) if len(x) % FLOAT8_SIDE else x


class _RoundedLinear(torch.autograd.Function):
    """Keeps the input in 8 bits for the backward pass, and rounds the weight again there."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, formats: Formats, dtype: torch.dtype) -> Tensor:
        x8, scale = scaled(x, formats[0])
        context.save_for_backward(x8, scale, weight)
        context.formats, context.input_dtype = formats, x.dtype
        return multiplied((x8, scale), scaled(weight, formats[0]), dtype, fast=True)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8, scale, weight = context.saved_tensors
        short, wide = context.formats
        grad = scaled(upstream[0], wide)
        grad_x = multiplied(grad, turned(scaled(weight, short)), context.input_dtype, fast=False)
        grad_weight = multiplied(turned(grad), turned((x8, scale)), weight.dtype, fast=False)
        return grad_x, grad_weight, None, None


def linear(
    x: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "M D"],
    bias: Float[Tensor, " M"] | None,
    formats: Formats,
    dtype: torch.dtype,
) -> Float[Tensor, "*lead M"]:
    """x Wᵀ + b, with both sides of the matmul in 8 bits; the result has the format `dtype`."""
    rows = x.flatten(0, -2)
    y: Tensor = _RoundedLinear.apply(padded(rows), weight, formats, dtype)  # type: ignore[no-untyped-call]
    y = y[: len(rows)].view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


class HeadInFloat8:
    """
    The head's matrix in 8 bits, for a loss that computes gradients with the logits. Rows of zeros are added up to a
    multiple of `multiple`. The matrix is rounded some rows at a time, so that it never exists twice in a longer format.
    """

    def __init__(self, weight: Float[Tensor, "V D"], formats: Formats, multiple: int) -> None:
        self.short, self.wide = formats
        self.num_rows = len(weight) + -len(weight) % multiple
        codes, scale = (
            weight.new_empty((self.num_rows, weight.shape[1]), dtype=self.short),
            scale_of(weight, self.short),
        )
        for start in range(0, len(weight), ROWS_AT_ONCE):
            some = weight[start : start + ROWS_AT_ONCE]
            codes[start : start + len(some)] = (some * scale.reciprocal()[None]).to(self.short)
        codes[len(weight) :].view(torch.uint8).zero_()
        self.rows = codes, scale
        self._columns: tuple[Tensor, Tensor] | None = None
        self._hidden: tuple[Tensor, Tensor] | None = None

    def logits(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        self._hidden = scaled(padded(hidden), self.short)
        return multiplied(self._hidden, self.rows, hidden.dtype, fast=True)[: len(hidden)]

    def gradients(
        self, grad: tuple[Tensor, Tensor], dtype: torch.dtype, *, learns: bool
    ) -> tuple[Float[Tensor, "_ D"], Float[Tensor, "P D"] | None]:
        """
        Of the tokens whose logits were computed last, with their padding, and of the matrix if it `learns`. `grad` is
        the gradient of the logits in 8 bits, with its scale.
        """
        assert self._hidden is not None
        self._columns = self._columns or turned(self.rows)
        grad_hidden = multiplied(grad, self._columns, dtype, fast=False)
        if not learns:
            return grad_hidden, None
        return grad_hidden, multiplied(turned(grad), turned(self._hidden), dtype, fast=False)


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
    formats = formats_on(device)
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
    formats = formats_on(device.torch_device)
    inputs = x.to(device.torch_device, torch.bfloat16).requires_grad_()
    weight = w.clone().to(device.torch_device).requires_grad_()
    try:
        y = linear(inputs, weight, None, formats, torch.bfloat16)
        grads = torch.autograd.grad(y, (inputs, weight), g.to(y))
        pairs = list(zip((y, *grads), (x @ w.t(), g @ w, g.t() @ x), strict=True))
        errors = [float((one.detach().cpu().float() - right).norm() / right.norm()) for one, right in pairs]
    except (RuntimeError, ValueError) as error:
        what = f"{device.name} does not multiply numbers of 8 bits: {str(error).partition(chr(10))[0]}"
        raise HardwareError(what, hint=hint) from error
    if not max(errors) <= 2 * LARGEST_ERROR:
        raise HardwareError(f"{device.name} multiplies numbers of 8 bits wrongly (error {max(errors):.2g})", hint=hint)
