"""
CPU operations of training from the compiled library, with gradients, and bfloat16 matmuls.

Each operation computes what a line or two of PyTorch do, in one pass over its numbers. It computes in float32,
whatever the format of its tensors. So in bfloat16 it rounds once where PyTorch rounds at every step. Callers ask
`ready(tensor)`, and keep the lines of PyTorch for when it says no. Letters used for shapes are those of layers.py.

The three matmuls of a linear layer in training need a CPU that multiplies bfloat16 by tiles (AMX) or by pairs
(AVX512-BF16).

    y = x Wᵀ + b      ∂x = ∂y W      ∂W = ∂yᵀ x

The matmuls read weights in float32 and round them on the fly, so no copies are written each step. The gradients of
weights are never rounded. Autocast does the same with a copy before and after each matmul. The tile version is
about twice as fast as PyTorch's matmuls, the pair version 1.2 times. Results equal PyTorch's but for the order of
sums. Callers ask `ready` here too.

Both groups share one file because they serve the layers of a model through the same compiled library.

Causal attention has two ways. By pairs: the CPU multiplies bfloat16 by pairs, and heads are as wide as whole panels.
Then logits exist for a few queries at a time, and the backward pass computes them again. Otherwise: batched matmuls
of PyTorch with softmax between them, whose weights are kept. Query head h reads key head h div (H / K).
"""

import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

LIBRARY, NORMS = "training", "norms"
KINDS = {torch.float32: 0, torch.bfloat16: 1}
ELSEWHERE: ContextVar[bool] = ContextVar("elsewhere", default=False)
"""Set while a step for another kind of device is traced with fake tensors: CPU kernels do not run then."""
ATTENTION_ELSEWHERE: ContextVar[Callable[..., Tensor] | None] = ContextVar("attention_elsewhere", default=None)
"""What stands for attention on that device, in the terms of `attention.fused_attention`."""


PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of tensors that lie whole in the memory of this process, or would."""


def ready(*tensors: Tensor) -> bool:
    """Whether the library is available and accepts these tensors: on the CPU, all float32 or all bfloat16."""
    first = tensors[0]
    return (
        all(one.device.type == "cpu" and one.dtype == first.dtype for one in tensors)
        and all(type(one) in PLAIN for one in tensors)
        and first.dtype in KINDS
        and not torch.compiler.is_compiling()
        and not ELSEWHERE.get()
        and native.library(LIBRARY) is not None
        and native.library(NORMS) is not None
    )


def call(library: str, name: str, *arguments: Tensor | int | float) -> None:
    """Tensors are handed over as addresses, and have to be contiguous unless strides are given with them."""
    if any(isinstance(one, FakeTensor) for one in arguments):
        return  # what is written into tensors without numbers is of no interest
    function = getattr(native.library(library), f"bloomery_{name}")
    function.restype = None
    function(*map(_native, (*arguments, torch.get_num_threads())))


def _call(name: str, *arguments: Tensor | int | float) -> None:
    call(LIBRARY, name, *arguments)


def _native(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centered: bool,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
        y, inverses = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1])
        means = torch.empty_like(inverses) if centered else None
        learned = (0 if one is None else one for one in (weight, bias))
        sizes = inverses.numel(), x.shape[-1], float(eps)
        call(NORMS, "norm", KINDS[dtype], x, *learned, y, 0 if means is None else means, inverses, *sizes)
        context.save_for_backward(x, weight, means, inverses)
        context.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, weight, means, inverses = context.saved_tensors
        dy, dx = upstream[0].contiguous(), torch.empty_like(x)
        sums = x.new_zeros(torch.get_num_threads(), 2, x.shape[-1])
        optional = (0 if one is None else one for one in (weight, means))
        call(NORMS, "norm_grads", KINDS[dy.dtype], x, *optional, inverses, dy, dx, sums, inverses.numel(), x.shape[-1])
        dweight, dbias = sums.sum(0)
        return dx, None if weight is None else dweight, dbias if context.biased else None, None, None, None


def rms_norm(x: Float[Tensor, "*B D"], weight: Float[Tensor, " D"] | None, eps: float, dtype: torch.dtype) -> Tensor:
    """x / √(mean(x²) + ε) · weight, from float32 to a number format."""
    y: Tensor = _Norm.apply(x, weight, None, False, eps, dtype)  # type: ignore[no-untyped-call]
    return y


def layer_norm(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, " D"] | None,
    bias: Float[Tensor, " D"] | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """(x − mean(x)) / √(var(x) + ε) · weight + bias, from float32 to a number format."""
    y: Tensor = _Norm.apply(x, weight, bias, True, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        context.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        _call("swiglu", KINDS[gate.dtype], gate, up, y, y.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = context.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        _call("swiglu_grads", KINDS[gate.dtype], gate, up, upstream[0].contiguous(), dgate, dup, gate.numel())
        return dgate, dup


def swiglu(gate: Float[Tensor, "*B M"], up: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """silu(gate) ⊙ up."""
    y: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        context.save_for_backward(x)
        y = torch.empty_like(x)
        _call("gelu", KINDS[x.dtype], x, y, y.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        dx = torch.empty_like(x)
        _call("gelu_grads", KINDS[x.dtype], x, upstream[0].contiguous(), dx, x.numel())
        return dx


def gelu_tanh(x: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """GELU approximated by tanh, as in GPT-2. The exact one is fast in PyTorch as it is."""
    y: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _turned(x, torch.empty(x.shape, dtype=x.dtype), cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        dy = upstream[0]
        B, N, T, E = dy.shape
        dx = torch.empty((B, T, N, E), dtype=dy.dtype).transpose(1, 2)  # as what the projection gave lies in memory
        cosine, sine = context.saved_tensors
        return _turned(dy, dx, cosine, sine, -1.0), None, None


def _turned(x: Tensor, y: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    B, N, T, E = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    angles = (cosine.stride(0) if cosine.shape[0] == B else 0, cosine.stride(2))
    strides = torch.tensor([*x.stride()[:3], *y.stride()[:3], *angles])
    _call("rotate", KINDS[x.dtype], x, y, cosine, sine, B, N, T, E, strides, sign)
    return y


def rotate(
    x: Float[Tensor, "B N T E"], cosine: Float[Tensor, "#B 1 T E"], sine: Float[Tensor, "#B 1 T E"]
) -> Float[Tensor, "B N T E"]:
    """Each pair of numbers (e, e + E/2) rotated by its angle; the second half of the angles repeats the first."""
    y: Tensor = _Rotate.apply(x, cosine.contiguous(), sine.contiguous())  # type: ignore[no-untyped-call]
    return y


def first_seen(segments: Int[Tensor, "B T"], window: int | None = None) -> Int[Tensor, "B T"]:
    """The first key that each query sees: of its segment, whose tokens stand together, and of its window."""
    T = segments.shape[1]
    places = torch.arange(T).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return first if window is None else torch.maximum(first, places - (window - 1))


def column_sums(x: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Σ x[n] over rows n, in float32."""
    sums, x = torch.empty(x.shape[1], dtype=torch.float32), x.contiguous()
    _call("columns", KINDS[x.dtype], x, sums, *x.shape)
    return sums


def cross_entropy_(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    *,
    z_loss: float = 0.0,
    share: float = 1.0,
    with_grads: bool = True,
) -> Float[Tensor, " N"]:
    """
    z = log Σ exp(s) of each row s of logits, in float32; the cross entropy is z − s[target].

    With `with_grads` the logits are overwritten with the gradient of share · Σ (z − s[target] + z_loss · z²).
    """
    z = torch.empty(len(logits), dtype=torch.float32)
    _call(
        "entropy",
        KINDS[logits.dtype],
        logits,
        logits.stride(0),
        targets.contiguous(),
        z,
        *logits.shape,
        float(z_loss),
        float(share),
        int(with_grads),
    )
    return z


MATMUL_LIBRARY = "products"
FEWEST_ROWS = 64
"""With fewer, it is the reading of weights that takes the time."""
PANEL, PAIRS_UNIT = 32, 16
TILES_INNER, TILES_BLOCK, PAIRS_INNER, PAIRS_BLOCK = 1536, 320 * 1024, 1024, 256 * 1024
"""Of native/products.hpp, products_tiles.hpp and products_pairs.hpp."""
ROOM: ContextVar[list[int] | None] = ContextVar("room", default=None)
"""Set while a step is traced: the most of `room_bytes` so far."""
NONE, PAIRS, TILES = 0, 1, 2
UNITS = ("none", "pairs", "tiles")
"""The units of a CPU that multiply bfloat16, the fastest last, and their names."""
ROUNDED, SET, ADD = 0, 1, 2
"""What becomes of sums: bfloat16, float32, float32 added to what is there."""


def matmul_ready(x: Tensor, weight: Tensor) -> bool:
    """Whether the CPU and the library support a matmul of x in bfloat16 with float32 weights."""
    return (
        x.dtype == torch.bfloat16
        and weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and weight.stride(-1) == 1
        and not torch.compiler.is_compiling()
        and not ELSEWHERE.get()
        and units() != NONE
    )


def units() -> int:
    """The unit of this CPU that the library uses: NONE, PAIRS or TILES. NONE if it is missing or switched off."""
    return NONE if native.library(MATMUL_LIBRARY) is None else _units_here()


@cache
def _units_here() -> int:
    library = native.library(MATMUL_LIBRARY)
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
    if (room := ROOM.get()) is not None:
        turned = right.dtype == torch.float32 and left.dtype != torch.float32
        room[:] = map(max, room, room_bytes(len(into), into.shape[1], left.shape[1], output, turned=turned))
    sides = *_side(left), *_side(right.t())
    shape = *into.shape, left.shape[1]
    added = 0 if bias is None else bias.float().contiguous()
    call(MATMUL_LIBRARY, "product", *sides, *shape, output, into, into.stride(0), added, units())
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
    Sizes of the library's buffers for rearranging the left and right side and for sums, over all threads. They grow to
    the needs of the largest matmul. As in native/products_tiles.hpp and products_pairs.hpp. `turned`: only the right
    side is in float32.
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
    """y = x Wᵀ + b as an operation of torch, so that activation checkpointing can keep its output."""
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
        grad = upstream[0].reshape(-1, len(weight))
        dx = dweight = dbias = None
        if context.needs_input_grad[0]:
            dx = product(grad, weight, rows.new_empty(rows.shape)).view(*upstream[0].shape[:-1], -1)
        if context.needs_input_grad[1]:
            dweight = product(grad.t(), rows, weight.new_empty(weight.shape))
        if context.biased and context.needs_input_grad[2]:
            dbias = column_sums(grad) if ready(grad) else grad.sum(0, dtype=torch.float32)
        return dx, dweight, dbias


def linear(
    x: Float[Tensor, "*B K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "*B N"]:
    """x Wᵀ + b in bfloat16."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


QUERIES_PER_BLOCK = {torch.float32: 128, torch.bfloat16: 256}
"""Queries per batched matmul, which computes attention scores only for keys up to the last of these queries."""


def causal_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K T E"],
    v: Float[Tensor, "B K T F"],
    first: Int[Tensor, "B T"],
) -> Float[Tensor, "B H T F"]:
    """softmax(q kᵀ / √E) v, where query t sees the keys first[b, t] to t, among them itself."""
    way = _ByPairs if by_pairs(q, v) else _ByProducts
    y: Tensor = way.apply(q, k, v, first.contiguous())  # type: ignore[no-untyped-call]
    return y


def by_pairs(q: Tensor, v: Tensor) -> bool:
    """Whether attention of these queries and values is computed by pairs."""
    whole = all(one.shape[3] % PANEL == 0 for one in (q, v))
    return whole and q.dtype == torch.bfloat16 and units() == PAIRS


class _ByPairs(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        q, k, v = map(_along, (q, k, v))
        y, totals = _in_order_of_tokens(q, v.shape[3]), torch.empty((*q.shape[:3], 2), dtype=torch.float32)
        rest = _in_order_of_tokens(q, v.shape[3]) if any(context.needs_input_grad) else None
        arguments = q, k, v, y, 0 if rest is None else rest, _strides(q, k, v, y), first, totals
        call(MATMUL_LIBRARY, "attention", *arguments, *_sizes(q, k, v, False))
        context.save_for_backward(q, k, v, y, rest, totals, first)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, rest, totals, first = context.saved_tensors
        dy, grads = _along(upstream[0]), [_in_order_of_tokens(one, one.shape[3]) for one in (q, k, v)]
        strides, sizes = _strides(q, k, v, y, dy, *grads), _sizes(q, k, v, True)
        call(MATMUL_LIBRARY, "attention_grads", q, k, v, y, rest, dy, *grads, strides, first, totals, *sizes)
        dq, dk, dv = grads
        return dq, dk, dv, None


def _along(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _in_order_of_tokens(like: Tensor, width: int) -> Float[Tensor, "B N T E"]:
    """Room for what a projection takes as it is, or for the gradient of what one gave."""
    B, N, T, _ = like.shape
    return torch.empty((B, T, N, width), dtype=torch.bfloat16).transpose(1, 2)


def _strides(*tensors: Tensor) -> Tensor:
    return torch.tensor([stride for one in tensors for stride in one.stride()[:3]])


def _sizes(q: Tensor, k: Tensor, v: Tensor, with_grads: bool) -> tuple[Any, ...]:
    """Of all, the scale, and the memory that threads need meanwhile."""
    (B, H, T, E), K, F = q.shape, k.shape[1], v.shape[3]
    library = native.library(MATMUL_LIBRARY)
    assert library is not None
    room = library.bloomery_attention_room
    room.restype = ctypes.c_int64
    each = room(*map(ctypes.c_int64, (T, E, F, with_grads)))
    at_once = min(torch.get_num_threads(), B * K)
    return B, H, K, T, E, F, E**-0.5, torch.empty(each * at_once, dtype=torch.uint8), each


class _ByProducts(torch.autograd.Function):
    """Batched matmuls, a block of queries at a time, which skips most of the masked future keys."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        (B, H, T, E), K, W = q.shape, k.shape[1], v.shape[3]
        q, k, v = q.reshape(B * K, H // K, T, E), k.reshape(B * K, T, E), v.reshape(B * K, T, W)
        y = torch.empty((B, T, K, H // K, W), dtype=q.dtype)
        weights = []
        with torch.autocast("cpu", enabled=False):
            for start, stop in _blocks(T, q.dtype):
                scores = torch.bmm(q[:, :, start:stop].reshape(B * K, -1, E), k[:, :stop].transpose(1, 2))
                shape = B * K, K, T, start, stop - start, scores.shape[1], stop
                call(LIBRARY, "softmax", KINDS[q.dtype], scores, first, *shape, E**-0.5)
                block = torch.bmm(scores, v[:, :stop]).view(B, K, H // K, stop - start, W)
                y[:, start:stop] = block.permute(0, 3, 1, 2, 4)
                weights.append(scores)
        context.save_for_backward(q, k, v, first, *weights)
        return y.view(B, T, H, W).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, first, *weights = context.saved_tensors
        (B, H, _, _), (matrices, group, T, E) = upstream[0].shape, q.shape
        dy = upstream[0].reshape(B, H // group, group, T, -1)
        dq, dk, dv = torch.empty_like(q), k, v
        for (start, stop), scores in reversed(list(zip(_blocks(T, q.dtype), weights, strict=True))):
            grad = dy[:, :, :, start:stop].reshape(matrices, -1, v.shape[2])
            block = q[:, :, start:stop].reshape(matrices, -1, E)
            inner = torch.bmm(grad, v[:, :stop].transpose(1, 2))
            shape = matrices, matrices // B, T, start, stop - start, scores.shape[1], stop
            call(LIBRARY, "softmax_grads", KINDS[q.dtype], scores, inner, first, *shape, E**-0.5)
            dq[:, :, start:stop] = torch.bmm(inner, k[:, :stop]).view(matrices, group, stop - start, E)
            if stop == T:  # the last block has every key, and comes first
                dk, dv = torch.bmm(inner.transpose(1, 2), block), torch.bmm(scores.transpose(1, 2), grad)
            else:
                dk[:, :stop] += torch.bmm(inner.transpose(1, 2), block)
                dv[:, :stop] += torch.bmm(scores.transpose(1, 2), grad)
        return dq.view(B, H, T, E), dk.view(B, -1, T, E), dv.view(B, -1, T, v.shape[2]), None


def _blocks(tokens: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    size = QUERIES_PER_BLOCK[dtype]
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
