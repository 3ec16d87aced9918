"""
Causal attention on the CPU with the compiled libraries and its gradients, in two ways.

By pairs: the CPU multiplies bfloat16 by pairs, and heads are as wide as whole panels. Then logits exist for a few
queries at a time, and the backward pass computes them again. Otherwise: batched matmuls of PyTorch with softmax
between them, whose weights are kept. Letters used for shapes are those of layers.py. Query head h reads key head h
div (H / K).
"""

import ctypes
from typing import Any

from jaxtyping import Float, Int

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import native
from bloomery.model.kernels import cpu
from bloomery.model.kernels.cpu import KINDS, LIBRARY, call

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    whole = all(one.shape[3] % cpu.PANEL == 0 for one in (q, v))
    return whole and q.dtype == torch.bfloat16 and cpu.units() == cpu.PAIRS


class _ByPairs(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        q, k, v = map(_along, (q, k, v))
        y, totals = _in_order_of_tokens(q, v.shape[3]), torch.empty((*q.shape[:3], 2), dtype=torch.float32)
        rest = _in_order_of_tokens(q, v.shape[3]) if any(context.needs_input_grad) else None
        arguments = q, k, v, y, 0 if rest is None else rest, _strides(q, k, v, y), first, totals
        call(cpu.MATMUL_LIBRARY, "attention", *arguments, *_sizes(q, k, v, False))
        context.save_for_backward(q, k, v, y, rest, totals, first)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, rest, totals, first = context.saved_tensors
        dy, slopes = _along(upstream[0]), [_in_order_of_tokens(one, one.shape[3]) for one in (q, k, v)]
        strides, sizes = _strides(q, k, v, y, dy, *slopes), _sizes(q, k, v, True)
        call(cpu.MATMUL_LIBRARY, "attention_slopes", q, k, v, y, rest, dy, *slopes, strides, first, totals, *sizes)
        dq, dk, dv = slopes
        return dq, dk, dv, None


def _along(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _in_order_of_tokens(like: Tensor, width: int) -> Float[Tensor, "B N T E"]:
    """Room for what a projection takes as it is, or for the gradient of what one gave."""
    B, N, T, _ = like.shape
    return torch.empty((B, T, N, width), dtype=torch.bfloat16).transpose(1, 2)


def _strides(*tensors: Tensor) -> Tensor:
    return torch.tensor([stride for one in tensors for stride in one.stride()[:3]])


def _sizes(q: Tensor, k: Tensor, v: Tensor, slopes: bool) -> tuple[Any, ...]:
    """Of all, the scale, and the memory that threads need meanwhile."""
    (B, H, T, E), K, F = q.shape, k.shape[1], v.shape[3]
    library = native.library(cpu.MATMUL_LIBRARY)
    assert library is not None
    room = library.bloomery_attention_room
    room.restype = ctypes.c_int64
    each = room(*map(ctypes.c_int64, (T, E, F, slopes)))
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
            slope = dy[:, :, :, start:stop].reshape(matrices, -1, v.shape[2])
            block = q[:, :, start:stop].reshape(matrices, -1, E)
            inner = torch.bmm(slope, v[:, :stop].transpose(1, 2))
            shape = matrices, matrices // B, T, start, stop - start, scores.shape[1], stop
            call(LIBRARY, "softmax_slopes", KINDS[q.dtype], scores, inner, first, *shape, E**-0.5)
            dq[:, :, start:stop] = torch.bmm(inner, k[:, :stop]).view(matrices, group, stop - start, E)
            if stop == T:  # the last block has every key, and comes first
                dk, dv = torch.bmm(inner.transpose(1, 2), block), torch.bmm(scores.transpose(1, 2), slope)
            else:
                dk[:, :stop] += torch.bmm(inner.transpose(1, 2), block)
                dv[:, :stop] += torch.bmm(scores.transpose(1, 2), slope)
        return dq.view(B, H, T, E), dk.view(B, -1, T, E), dv.view(B, -1, T, v.shape[2]), None


def _blocks(tokens: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    size = QUERIES_PER_BLOCK[dtype]
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
