"""
Frozen matrices in fewer bytes, in plain tensor operations: bfloat16, int8 by rows, int4 by groups, and 4-bit
NormalFloat by blocks.

Each matmul dequantises the matrix again, forward and backward, so the dense matrix is never kept. Gradients equal those
of a dense layer with the same numbers, bit for bit. For a few rows, as in decoding, Bloomery's own kernel may read the
codes instead; its sums are in another order.

Letters used for shapes: R rows (outputs), D width (inputs), K blocks of 64 in a row, G groups of 32 in a row.
"""

from functools import cache
from statistics import NormalDist
from typing import Any, Literal

from jaxtyping import Float, UInt8

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import ConfigError
from bloomery.model.config import Base
from bloomery.model.kernels import triton

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Weights that share a scale. Blocks do not reach over rows, so that a matrix can be cut by rows."""
GROUP = 32
"""Weights that share a factor and an offset in int4."""
LARGEST = 65504.0
"""Of float16."""
NUMBERS_AT_ONCE = 2**22
"""Of a matrix, while it is quantized."""
SCALES = 256
"""Scales of blocks that share a scale, where those are quantised too."""


@cache
def normal_float() -> tuple[float, ...]:
    """
    The 16 numbers of NF4: quantiles of the normal distribution, scaled to [-1, 1], with 0 among them.

    From Φ⁻¹ at even distances between 1 − (1/32 + 1/30)/2 and 1/2: 8 of them positive, and 7 negative (Dettmers et al.
    2023, https://arxiv.org/abs/2305.14314, appendix E).
    """
    last = 1 - (1 / 32 + 1 / 30) / 2
    above = [NormalDist().inv_cdf(last + (0.5 - last) * place / 8) for place in range(8)]
    below = [-NormalDist().inv_cdf(last + (0.5 - last) * place / 7) for place in range(7)]
    return tuple(sorted(value / max(above) for value in (*above, *below, 0.0)))


@cache
def numbers(device: torch.device) -> Float[Tensor, "16"]:
    """Those of NF4, as a tensor."""
    return torch.tensor(normal_float(), device=device)


@cache
def pairs(device: torch.device) -> Float[Tensor, "256 2"]:
    """The two numbers of each byte."""
    return torch.stack([numbers(device).repeat_interleave(16), numbers(device).repeat(16)], 1)


def forget() -> None:
    """Clear the cached tensors above. Call it before and after work with fake tensors."""
    numbers.cache_clear()
    pairs.cache_clear()


class QuantizedLinear(nn.Module):
    """A linear layer whose weights never change, kept in some format. `dense` gives them back."""

    layout = ""
    """Of codes, for the kernel that reads them."""
    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.num_rows, self.width = linear.weight.shape
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "R D"]:
        """The weights in a number format that is computed with."""
        raise NotImplementedError

    def times(self, x: Float[Tensor, "*lead D"], bias: Tensor | None) -> Float[Tensor, "*lead R"]:
        """x Wᵀ + b, in the number format of x."""
        few = self.layout and x.numel() <= triton.GEMV_ROWS * self.width
        if few and triton.ready(f"gemv-{self.layout}", x) and type(self.weight) is Tensor:
            return self.few(x.reshape(-1, self.width), bias).view(*x.shape[:-1], self.num_rows)
        return F.linear(x, self.dense(x.dtype), bias)

    def few(self, x: Float[Tensor, "M D"], bias: Tensor | None) -> Float[Tensor, "M R"]:
        """The same for few rows, by a kernel that reads the codes and makes no matrix."""
        sixteen, coarse = (numbers(x.device), getattr(self, "coarse", None)) if self.layout == "nf4" else (None, None)
        return triton.gemv(x, self.weight, self.scales, self.layout, numbers=sixteen, coarse=coarse, bias=bias)

    def times_back(self, grad: Float[Tensor, "*lead R"]) -> Float[Tensor, "*lead D"]:
        """The gradient of x: dy W, in the dtype of dy, the gradient of the output."""
        return grad @ self.dense(grad.dtype)

    def forward(self, x: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead R"]:
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b, where W is made twice instead of being kept between the passes."""

    @staticmethod
    def forward(context: Any, x: Tensor, frozen: QuantizedLinear) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        context.frozen, context.dtype = frozen, x.dtype
        bias = None if frozen.bias is None else frozen.bias.to(dtype)
        return frozen.times(x.to(dtype), bias)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return context.frozen.times_back(upstream[0]).to(context.dtype), None


class UnquantizedLinear(QuantizedLinear):
    """The weights as they are, or rounded to bfloat16."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self.register_buffer("weight", linear.weight.detach().to(dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class Int8(QuantizedLinear):
    """w = scale of the row · code, codes from −127 to 127."""

    layout = "int8"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(weight / scales.clamp_min(1e-30)).to(torch.int8))
        self.register_buffer("scales", scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.weight * self.scales).to(dtype)


class Int4(QuantizedLinear):
    """
    w = factor · code + offset of the group of 32, with codes from 0 to 15. Factors and offsets are in float16.

    A byte has the codes of k in its low bits and of k + 16 in its high ones, as in the blocks Q4_0 and Q4_1 of GGUF.
    """

    layout = "int4"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight, at_once = linear.weight.detach(), max(1, NUMBERS_AT_ONCE // self.width)
        parts = [int4_groups(rows) for rows in torch.split(weight, at_once)]
        self.register_buffer("weight", torch.cat([codes for codes, _ in parts]))
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]))

    @classmethod
    def of(cls, codes: UInt8[Tensor, "R G 16"], scales: Float[Tensor, "R G 2"]) -> "Int4":
        """Codes and scales that are there already, of whole groups."""
        layer = cls.__new__(cls)
        QuantizedLinear.__init__(layer, nn.Linear(codes.shape[1] * GROUP, len(codes), bias=False, device="meta"))
        layer.register_buffer("weight", codes)
        layer.register_buffer("scales", scales)
        return layer

    def dense(self, dtype: torch.dtype) -> Tensor:
        codes = torch.cat((self.weight & 15, self.weight >> 4), 2).float()
        factor, offset = self.scales.float()[..., None, :].unbind(-1)
        return (codes * factor + offset).flatten(1)[:, : self.width].to(dtype)


def int4_groups(weight: Float[Tensor, "R D"]) -> tuple[UInt8[Tensor, "R G 16"], Float[Tensor, "R G 2"]]:
    """
    Codes and scales of Int4, from the smallest and the largest number of each group. Raises ConfigError for numbers
    that float16 cannot hold.
    """
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    if (largest := float(torch.maximum(high, -low).max())) > LARGEST:
        what = f"the largest weight is {largest:.3g}, but int4 holds at most {LARGEST:,.0f}"
        raise ConfigError(what, hint="Load the model with --dtype bfloat16.")
    # Factors are rounded up, so that the largest number of a group keeps the last code.
    low = low.half().float()
    factor = ((high - low) / 15).half()
    factor = torch.where(
        factor.float() < (high - low) / 15, torch.nextafter(factor, factor.new_tensor(torch.inf)), factor
    )
    codes = (
        torch.round((groups - low[..., None]) / factor.float().clamp_min(1e-30)[..., None]).clamp(0, 15).to(torch.uint8)
    )
    first, second = codes.chunk(2, dim=2)
    return first | second << 4, torch.stack((factor, low.half()), 2)


class NF4(QuantizedLinear):
    """w = scale of the block · one of 16 numbers; two codes a byte, and a byte becomes two numbers by one look-up."""

    layout = "nf4"
    coarse: Tensor | None
    pairs: Float[Tensor, "256 2"]

    def __init__(self, linear: nn.Linear, double: bool = False) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        scales = torch.cat([self._blocks(rows).abs().amax(2) for rows in torch.split(weight, self._rows_at_once)])
        self.register_buffer("coarse", None)
        if double:
            self._code_scales(scales)
        else:
            self.register_buffer("scales", scales.to(torch.bfloat16))
        sixteen = numbers(weight.device)
        middles, at_once = (sixteen[1:] + sixteen[:-1]) / 2, self._rows_at_once
        used = self._scales().clamp_min(1e-30)
        packed = []
        for rows, some in zip(torch.split(weight, at_once), torch.split(used, at_once), strict=True):
            codes = torch.bucketize(self._blocks(rows) / some[..., None], middles, out_int32=True).to(torch.uint8)
            packed.append((codes[..., 0::2] << 4 | codes[..., 1::2]).flatten(1))
        self.register_buffer("weight", torch.cat(packed))
        # All layers have the same tensor. Compiled code reads a buffer, and would make another table in each call.
        self.register_buffer("pairs", pairs(weight.device), persistent=False)

    @property
    def _rows_at_once(self) -> int:
        """Few enough that what is computed at once is small next to the weights."""
        return max(1, NUMBERS_AT_ONCE // self.width)

    def _blocks(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R K B"]:
        return F.pad(rows.float(), (0, -self.width % BLOCK)).view(len(rows), -1, BLOCK)

    def dense(self, dtype: torch.dtype) -> Tensor:
        values = F.embedding(self.weight.int(), self.pairs).view(self.num_rows, -1, BLOCK)
        return (values * self._scales()[..., None]).flatten(1)[:, : self.width].to(dtype)

    def _code_scales(self, scales: Float[Tensor, "R K"]) -> None:
        """Scales in 8 bits around their mean, with a scale for each 256 of them, and the mean."""
        flat = F.pad(scales.flatten(), (0, -scales.numel() % SCALES)).view(-1, SCALES)
        mean = scales.mean()
        far = (flat - mean).abs().amax(1, keepdim=True) / 127
        self.register_buffer("coarse", torch.cat([far.flatten(), mean[None]]))
        codes = torch.round((flat - mean) / far.clamp_min(1e-30)).clamp(-127, 127)
        self.register_buffer("scales", codes.to(torch.int8).flatten()[: scales.numel()].view(scales.shape))

    def _scales(self) -> Float[Tensor, "R K"]:
        if self.coarse is None:
            return self.scales.float()
        far = self.coarse[:-1].repeat_interleave(SCALES)[: self.scales.numel()].view(self.scales.shape)
        return self.scales * far + self.coarse[-1]


def frozen(linear: nn.Linear, base: Base | Literal["int4"]) -> QuantizedLinear:
    """A linear layer that never changes, in the format that a recipe or --dtype names."""
    match base:
        case "float32":
            return UnquantizedLinear(linear, torch.float32)
        case "bfloat16":
            return UnquantizedLinear(linear, torch.bfloat16)
        case "int8":
            return Int8(linear)
        case "int4":
            return Int4(linear)
        case "nf4" | "nf4_double":
            return NF4(linear, double=base == "nf4_double")


def frozen_weight(weight: Float[Tensor, "R D"], base: Base | Literal["int4"]) -> QuantizedLinear:
    """As `frozen`, of a matrix alone."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return frozen(linear, base)


def kept_bytes(module: nn.Module) -> int:
    """Bytes of all that a module keeps: weights, codes, scales. A tied weight counts once."""
    seen = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(module)}
    return sum(seen.values())


def _tensors(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict(keep_vars=True).values())  # without the table that all layers share
