"""
Attention three times: the formula, PyTorch's own, and the one that is used. Equal by test, with their gradients.

Letters used for shapes are those of layers.py. Query head h reads key head h div (H / K).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from jaxtyping import Float

from bloomery.hw import device as devices
from bloomery.model.sight import Sight

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

CHUNK_QUERIES = 256
"""On processors. A chunk is multiplied with keys that it may see: half of a long causal square is never made."""
FLEX_TOKENS = 1024
"""From this length on, a kernel made for the mask is worth its compilation."""

Queries = Float[Tensor, "B H T E"]
Keys = Float[Tensor, "B K S E"]
Values = Float[Tensor, "B K S F"]
Attended = Float[Tensor, "B H T F"]


def softmax_attention(q: Queries, k: Keys, v: Values, sight: Sight) -> Attended:
    """
        y = softmax(q kᵀ / √E − slope · distance, where it may look) v

    (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)
    """
    group = q.shape[1] // k.shape[1]
    k, v = (one.to(q.dtype).repeat_interleave(group, dim=1) for one in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5  # (B, H, T, S)
    if sight.slopes is not None:
        scores = scores - sight.slopes.to(q.dtype)[:, None, None] * sight.distance(q.dtype)
    scores = scores.masked_fill(~sight.mask()[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=3)
    return weights @ v


def sdpa_attention(q: Queries, k: Keys, v: Values, sight: Sight) -> Attended:
    """PyTorch's, which has kernels of its own for a plainly causal square and takes a mask for everything else."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if sight.is_causal and sight.num_queries in (1, sight.num_keys):
        return F.scaled_dot_product_attention(q, k, v, is_causal=sight.num_queries > 1, enable_gqa=True)
    mask = sight.mask()[:, None]
    if sight.slopes is not None:
        bias = -sight.slopes.to(q.dtype)[:, None, None] * sight.distance(q.dtype)
        mask = bias.masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def fused_attention(q: Queries, k: Keys, v: Values, sight: Sight) -> Attended:
    """
    The one that is used: matrix products on processors; on GPUs the causal kernel, or for long rows of several
    documents, windows and ALiBi a kernel made for them, so that no T × S mask lies in memory.
    """
    if q.device.type == "cpu":
        return processor_attention(q, k, v, sight)
    plain = sight.is_causal and sight.num_queries in (1, sight.num_keys)
    long = sight.allowed is None and sight.num_queries == sight.num_keys >= FLEX_TOKENS
    if long and not plain and _has_flex_kernel(q, k, v):
        return flexible_attention(q, k, v, sight, _compiled_flex())
    return sdpa_attention(q, k, v, sight)


def processor_attention(q: Queries, k: Keys, v: Values, sight: Sight) -> Attended:
    """
    The formula as two batched matrix products; queries that share a key head lie below each other.

    On CPUs in bfloat16 it trains several times faster than PyTorch's, whose backward is slow there.
    """
    B, H, T, E = q.shape
    K, group = k.shape[1], H // k.shape[1]
    q, k, v = q * E**-0.5, k.to(q.dtype), v.to(q.dtype)
    alone = T == 1 and sight.segments is None and sight.allowed is None  # it sees all that it is multiplied with
    bias = None if alone else sight.bias(q.dtype)
    slopes = None if sight.slopes is None else -sight.slopes.to(q.dtype)[:, None, None]
    size = T if T < 2 * CHUNK_QUERIES else CHUNK_QUERIES
    found = []
    for begin in range(0, T, size):
        end = min(begin + size, T)
        last = sight.offset + end
        first = max(0, last - (end - begin) - sight.window + 1) if sight.window else 0
        seen, width = slice(first, last), last - first
        rows = q[:, :, begin:end].reshape(B * K, group * (end - begin), E)
        scores = torch.bmm(rows, k[:, :, seen].reshape(B * K, width, E).transpose(1, 2)).view(B, H, end - begin, width)
        if slopes is not None:
            scores.addcmul_(slopes, sight.distance(q.dtype)[begin:end, seen])
        if bias is not None:
            scores.add_(bias[:, :, begin:end, seen])
        weights = torch.softmax(scores, dim=-1).view(B * K, group * (end - begin), width)
        y = torch.bmm(weights, v[:, :, seen].reshape(B * K, width, -1))
        found.append(y.view(B, H, end - begin, -1))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def flexible_attention(q: Queries, k: Keys, v: Values, sight: Sight, flex: Any = flex_attention) -> Attended:
    """
    A kernel that asks functions of the places instead of a mask, and leaves out blocks where nobody sees anything
    (Dong et al. 2024, https://arxiv.org/abs/2412.05496). Processors have no backward pass of it.
    """
    slopes, offset = sight.slopes, sight.offset
    falling = None if slopes is None else (lambda score, b, h, t, s: score - slopes[h] * (t + offset - s))
    y: Tensor = flex(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        score_mod=falling,
        block_mask=_blocks(sight),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y


def _blocks(sight: Sight) -> BlockMask:
    """Which blocks of the T × S square have something to see."""
    segments, offset, window = sight.segments, sight.offset, sight.window
    limits: list[Callable[..., Tensor]] = [lambda b, h, t, s: s <= t + offset]
    if window is not None:
        limits.append(lambda b, h, t, s: s > t + offset - window)
    if segments is not None:
        limits.append(lambda b, h, t, s: segments[b, t + offset] == segments[b, s])
    sees = and_masks(*limits)
    B, T, S = None if segments is None else len(segments), sight.num_queries, sight.num_keys
    return sight.made("blocks", lambda: create_block_mask(sees, B, None, T, S, device=sight.device))


def _has_flex_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    group = q.shape[1] // k.shape[1]
    sizes = (q.shape[3], v.shape[3], group)
    return devices.compiles_kernels(q.device) and all(n & (n - 1) == 0 for n in sizes) and q.shape[3] >= 16


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)
