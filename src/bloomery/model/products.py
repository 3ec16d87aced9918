"""
The three matrix products of a linear layer in training, where the processor multiplies bfloat16 by tiles (AMX) or by
pairs (AVX512-BF16).

    y = x Wᵀ + b      ∂x = ∂y W      ∂W = ∂yᵀ x

Weights are read in float32 and rounded on the way, so that no copies of them are written each step, and their gradients
are never rounded: what autocast does with a copy before and after each product. About twice as fast as PyTorch's
products by tiles, 1.2 times by pairs, and equal to them but for the order of sums. Callers ask `ready`.
"""

from contextvars import ContextVar
from functools import cache
from typing import Any

from jaxtyping import Float

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import native
from bloomery.model import kernels
from bloomery.model.kernels import call

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LIBRARY = "products"
FEWEST_ROWS = 64
"""With fewer, it is the reading of weights that takes the time."""
PANEL, PAIRS_UNIT = 32, 16
TILES_INNER, TILES_BLOCK, PAIRS_INNER, PAIRS_BLOCK = 1536, 320 * 1024, 1024, 256 * 1024
"""Of native/products.hpp, products_tiles.hpp and products_pairs.hpp."""
ROOM: ContextVar[list[int] | None] = ContextVar("room", default=None)
"""Set while a step is traced: the most of `room_bytes` so far."""
NONE, PAIRS, TILES = 0, 1, 2
UNITS = ("none", "pairs", "tiles")
"""What a processor multiplies bfloat16 with, the better the later; and their names."""
ROUNDED, SET, ADD = 0, 1, 2
"""What becomes of sums: bfloat16, float32, float32 added to what is there."""


def ready(x: Tensor, weight: Tensor) -> bool:
    """Whether the processor and the library take a product of x in bfloat16 with float32 weights."""
    return (
        x.dtype == torch.bfloat16
        and weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in kernels.PLAIN
        and type(weight) in kernels.PLAIN
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and weight.stride(-1) == 1
        and not torch.compiler.is_compiling()
        and not kernels.ELSEWHERE.get()
        and units() != NONE
    )


def units() -> int:
    """What the library, where it is there and wanted, multiplies with on this processor: NONE, PAIRS or TILES."""
    return NONE if native.library(LIBRARY) is None else _units_here()


@cache
def _units_here() -> int:
    library = native.library(LIBRARY)
    return NONE if library is None else int(library.bloomery_units())


def product(
    left: Float[Tensor, "M K"],
    right: Float[Tensor, "K N"],
    into: Float[Tensor, "M N"],
    bias: Tensor | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """left · right, rounded to bfloat16 where that is the format of `into`, whose rows are contiguous."""
    output = ROUNDED if into.dtype == torch.bfloat16 else ADD if add else SET
    if (taken := ROOM.get()) is not None:
        turned = right.dtype == torch.float32 and left.dtype != torch.float32
        taken[:] = map(max, taken, room_bytes(len(into), into.shape[1], left.shape[1], output, turned=turned))
    sides = *_side(left), *_side(right.t())
    shape = *into.shape, left.shape[1]
    added = 0 if bias is None else bias.float().contiguous()
    call(LIBRARY, "product", *sides, *shape, output, into, into.stride(0), added, units())
    return into


def aligned_rows(rows: int, width: int) -> Float[Tensor, "rows width"]:
    """Room for a result in bfloat16 whose rows begin on lines of the cache: columns of it are read 3 times as fast."""
    return torch.empty(rows, aligned(width), dtype=torch.bfloat16)[:, :width]


def aligned(width: int) -> int:
    """How far apart rows of that width begin."""
    return -(-width // PANEL) * PANEL


def _side(matrix: Tensor) -> tuple[Tensor, int, int, int]:
    """Numbers, stride, whether they are float32, whether the second dimension is contiguous; a copy where none is."""
    matrix = matrix if 1 in matrix.stride() else matrix.contiguous()
    along = matrix.stride(1) == 1
    return matrix, matrix.stride(0 if along else 1), int(matrix.dtype == torch.float32), int(along)


def room_bytes(rows: int, columns: int, inner: int, output: int, *, turned: bool) -> list[int]:
    """
    Of the memory that the library keeps to rearrange both sides and to sum up in, of all threads: it grows to what the
    largest product needs. As in native/products_tiles.hpp and products_pairs.hpp. `turned`: the right side alone is in
    float32.
    """
    by_pairs, threads = units() == PAIRS, torch.get_num_threads()
    most, block = (PAIRS_INNER, PAIRS_BLOCK) if by_pairs else (TILES_INNER, TILES_BLOCK)
    pieces = -(-inner // most)
    piece = -(-inner // (pieces * PANEL)) * PANEL
    high, wide = _rectangle(-(-rows // PANEL), -(-columns // PANEL), threads)
    kept, flowing = (high, wide) if by_pairs and turned and rows < columns else (wide, high)
    fits = max(1, block // (piece * PANEL))
    blocks = -(-kept // fits)
    each = -(-kept // blocks)
    moving = 2 * PAIRS_UNIT if by_pairs else PANEL * (flowing if blocks > 1 else 1)
    sums = flowing * (each if by_pairs else kept + 1) if pieces > 1 and output == ROUNDED else 0
    return [size * threads for size in (2 * piece * PANEL * each, 2 * piece * moving, 4 * PANEL**2 * sums)]


def _rectangle(high: int, wide: int, threads: int) -> tuple[int, int]:
    """Of a result, in panels: the largest that one thread takes."""
    ways = ((-(-high // down), -(-wide * down // threads)) for down in range(1, threads + 1) if threads % down == 0)
    return min(ways, key=sum)


def forward_operation() -> Any:
    """y = x Wᵀ + b as an operation of torch, so that recomputation can be told to keep what it gives."""
    _operations()
    return torch.ops.bloomery.linear.default


@cache
def _operations() -> torch.library.Library:
    """Which takes its operations along when it goes."""
    library = torch.library.Library("bloomery", "DEF")  # type: ignore[no-untyped-call]
    library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("linear", _forward, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("bloomery::linear", _forward, lib=library)
    return library


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight.t(), x.new_empty(len(x), len(weight)), bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        context.save_for_backward(rows, weight)
        context.biased = bias is not None
        y: Tensor = forward_operation()(rows, weight, bias)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = context.saved_tensors
        slope = upstream[0].reshape(-1, len(weight))
        dx = dweight = dbias = None
        if context.needs_input_grad[0]:
            dx = product(slope, weight, rows.new_empty(rows.shape)).view(*upstream[0].shape[:-1], -1)
        if context.needs_input_grad[1]:
            dweight = product(slope.t(), rows, weight.new_empty(weight.shape))
        if context.biased and context.needs_input_grad[2]:
            dbias = kernels.column_sums(slope) if kernels.ready(slope) else slope.sum(0, dtype=torch.float32)
        return dx, dweight, dbias


def linear(
    x: Float[Tensor, "*B K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "*B N"]:
    """x Wᵀ + b in bfloat16."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y
