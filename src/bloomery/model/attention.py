"""
Causal self-attention with grouped heads, plain and differential, for training and decoding.

The same implementation serves training and decoding. Attention itself exists three times: the formula, PyTorch's
own implementation, and the fast implementation that is used. Tests check that all three are equal, with their
gradients. `AttentionMask` says which tokens may attend to which; a dense mask exists only where a kernel needs it.

Letters used for shapes are those of layers.py. Query head h reads key head h div (H / K).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices
from bloomery.model.config import ModelConfig
from bloomery.model.kernels import cpu, triton
from bloomery.model.kernels.cpu import causal_attention
from bloomery.model.layers import Linear, RMSNorm, Rotation, rms_norm, rotate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

M = TypeVar("M")
ALL = slice(None)
Mask = Bool[Tensor, "B T S"]  # True where a token may look


@dataclass(frozen=True)
class AttentionMask:
    """
    Tokens look back, within their own segment, and no further than the window.

    The T queries are the last T of the S keys: all of them in training, the new ones after those in a cache. Distances
    count tokens in the row.
    """

    num_queries: int
    num_keys: int
    device: torch.device
    window: int | None = None
    """How many tokens a token sees, including itself. None: all."""
    segments: Int[Tensor, "B S"] | None = None
    """Which document each token belongs to. None: a row is one document."""
    allowed: Mask | None = None
    """What may be seen at all, where that is less."""
    slopes: Float[Tensor, " H"] | None = None
    """Of ALiBi: how much a score falls with each token of distance."""
    positions: Int[Tensor, "B T"] | None = None
    """Of the queries among the keys, where rows differ. None: the queries are the last of the keys."""
    bounds: Int[Tensor, " N"] | None = None
    """Where the segments of all rows, one row after another, begin and the last ends: see `segment_bounds`."""
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def offset(self) -> int:
        """The place of the first query among the keys."""
        return self.num_keys - self.num_queries

    @property
    def is_windowed(self) -> bool:
        """Whether some query cannot see the first key because it is too far."""
        return self.window is not None and self.window < self.num_keys

    @property
    def is_causal(self) -> bool:
        """Whether the only limit is that nobody looks ahead."""
        limits = (self.segments, self.allowed, self.slopes, self.positions)
        return all(limit is None for limit in limits) and not self.is_windowed

    def mask(self) -> Bool[Tensor, "b T S"]:
        """True where a token may look; b is 1 where all rows are alike."""
        return self.cached("mask", self._mask)

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "b 1 T S"]:
        """The mask as a bias to add to attention scores, without ALiBi."""
        return self.cached(("bias", dtype), lambda: self._bias(dtype))

    def distance(self, dtype: torch.dtype, rows: slice = ALL, keys: slice = ALL) -> Float[Tensor, "*b t s"]:
        """How many tokens a key lies before a query."""
        if (rows, keys) != (ALL, ALL):
            return (self._places()[rows] - self._keys()[:, keys]).to(dtype)
        return self.cached(("distance", dtype), lambda: (self._places() - self._keys()).to(dtype))

    def first(self, batch: int) -> Int[Tensor, "B T"] | None:
        """
        The first key that each query sees in training. None where a query does not see all keys from there to itself,
        or where a window is so short that leaving out whole blocks of keys is better.
        """
        if self.allowed is not None or self.slopes is not None or self.is_windowed or self.offset:
            return None
        return self.cached(("first", batch), lambda: self._first(batch))

    def _first(self, batch: int) -> Tensor | None:
        if self.segments is None:
            return torch.zeros((batch, self.num_keys), dtype=torch.long, device=self.device)
        together = bool((self.segments[:, 1:] >= self.segments[:, :-1]).all())
        return cpu.first_seen(self.segments.expand(batch, -1)) if together else None

    def cached(self, name: Any, make: Callable[[], M]) -> M:
        """What `make` gives, made once: layers share it."""
        if name not in self._made:
            self._made[name] = make()
        value: M = self._made[name]
        return value

    def _places(self) -> Int[Tensor, "*b T 1"]:
        if self.positions is not None:
            return self.positions[:, :, None]
        return torch.arange(self.offset, self.num_keys, device=self.device)[:, None]

    def _keys(self) -> Int[Tensor, "1 S"]:
        return torch.arange(self.num_keys, device=self.device)[None, :]

    def chunk(self, rows: slice, keys: slice) -> Bool[Tensor, "b t s"]:
        """The mask of some queries and keys, not cached: the whole mask of a long sequence is never in memory."""
        return self._mask(rows, keys)

    def _mask(self, rows: slice = ALL, keys: slice = ALL) -> Tensor:
        query, key = self._places()[..., rows, :], self._keys()[:, keys]
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        seen = seen if self.positions is not None else seen[None]
        if self.segments is not None:
            seen = seen & (self.segments[:, self.offset :][:, rows, None] == self.segments[:, None, keys])
        return seen if self.allowed is None else seen & self.allowed[:, rows, keys]

    def _bias(self, dtype: torch.dtype) -> Tensor:
        mask = self.mask()[:, None]
        return torch.zeros(mask.shape, device=self.device, dtype=dtype).masked_fill(~mask, -torch.inf)


TOKENS_OF_A_BOUND = 64
"""Bounds are as many as if all segments had this length: compiled code takes one size, and its memory has a limit."""


def segment_bounds(segments: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """
    Where the segments of rows (B, T) begin, one row after another, and the end of all, in int32. The end repeats, up to
    a number that B and T decide. None where segments of a row do not rise, for then one may come twice, and where they
    have fewer than TOKENS_OF_A_BOUND tokens on average.
    """
    if (segments[:, 1:] < segments[:, :-1]).any():
        return None
    begins = np.ones(segments.shape, dtype=bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = np.flatnonzero(begins)
    most = max(len(segments), -(-segments.size // TOKENS_OF_A_BOUND))
    if len(starts) > most:
        return None
    bounds = np.full(most + 1, segments.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds


CHUNK_QUERIES = 128
"""On CPUs. A chunk is multiplied only with keys that it may attend to, so half of a long causal square is skipped."""
FLEX_TOKENS = 1024
"""From this length on, a kernel made for the mask is worth its compilation."""
FLEX_BLOCK = 128
"""Queries, and keys, of a block that this kernel computes or skips as a whole."""
NARROWEST_FLEX_HEAD = 16
WIDEST_HEAD = {"flash": 256, "cudnn": 128}
"""Of torch's implementations that read grouped key heads as they are."""
HALF = (torch.float16, torch.bfloat16)

Queries = Float[Tensor, "B H T E"]
Keys = Float[Tensor, "B K S E"]
Values = Float[Tensor, "B K S F"]
Attended = Float[Tensor, "B H T F"]


def softmax_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
        y = softmax(q kᵀ / √E − m · distance, masked) v

    (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), where m is the ALiBi slope of the head, or 0.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (one.to(q.dtype).repeat_interleave(group, dim=1) for one in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5  # (B, H, T, S)
    if mask.slopes is not None:
        scores = scores - mask.slopes.to(q.dtype)[:, None, None] * mask.distance(q.dtype).unsqueeze(-3)
    scores = scores.masked_fill(~mask.mask()[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=3)
    return weights @ v


def sdpa_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
    PyTorch's, which has kernels of its own for a plainly causal square and takes a mask for everything else.

    On GPUs its memory-efficient kernel is the only one that takes a mask everywhere, and it takes no grouped heads. So
    there each key head is repeated for its queries, and the mask is a bias in the number format of the queries.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    plain = mask.is_causal and mask.num_queries in (1, mask.num_keys)
    if devices.is_gpu(q.device) and not (plain and _takes_groups(q.dtype, q.shape[3], v.shape[3])):
        k, v = _ungrouped(q, k, v)
    if plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask.num_queries > 1, enable_gqa=True)
    visible = _full_bias(mask, q.dtype) if devices.is_gpu(q.device) or mask.slopes is not None else mask.mask()[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def _ungrouped(q: Queries, k: Keys, v: Values) -> tuple[Float[Tensor, "B H S E"], Float[Tensor, "B H S F"]]:
    """Each key and value head once for each of its query heads."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def stacked_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
    PyTorch's, for one query of each row over the first S keys of a cache. Query heads that share a key head are stacked
    as its queries, so that no key is copied. Shapes do not depend on the positions, which a GPU alone reads.
    """
    (B, H, _, E), (K, S) = q.shape, k.shape[1:3]
    bias = mask.cached(
        ("stacked", q.dtype, K), lambda: _full_bias(mask, q.dtype).expand(-1, H, -1, -1).reshape(B, K, H // K, S)
    )
    stacked = q.reshape(B, K, H // K, E)
    y = F.scaled_dot_product_attention(stacked, k.to(q.dtype), v.to(q.dtype), attn_mask=bias)
    return y.reshape(B, H, 1, -1)  # a copy where a kernel leaves it in another order


def _full_bias(mask: AttentionMask, dtype: torch.dtype) -> Float[Tensor, "b h T S"]:
    """The mask and ALiBi as one bias, made once: layers share it."""
    slopes = mask.slopes
    if slopes is None:
        return mask.bias(dtype)

    def falling() -> Tensor:
        bias = -slopes.to(dtype)[:, None, None] * mask.distance(dtype).unsqueeze(-3)
        return bias.masked_fill(~mask.mask()[:, None], -torch.inf)

    return mask.cached(("falling", dtype), falling)


def fused_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
    The fastest attention for this device: on CPUs, compiled operations or plain matmuls; on GPUs, the causal kernel.
    Long packed sequences, windows and ALiBi have their own GPU kernel, which keeps no T × S mask in memory. So have
    long rows that no causal kernel takes, whose attention weights PyTorch would write out.
    """
    if not torch.compiler.is_compiling() and (elsewhere := cpu.ATTENTION_ELSEWHERE.get()) is not None:
        return elsewhere(q, k, v, mask)
    if mask.positions is not None:
        return stacked_attention(q, k, v, mask)
    if q.device.type == "cpu" and (torch.compiler.is_compiling() or not cpu.ELSEWHERE.get()):
        if cpu.ready(q, k, v) and (first := mask.first(len(q))) is not None:  # it looks at numbers of segments
            return causal_attention(q, k, v, first)
        return processor_attention(q, k, v, mask)
    if _takes_segments(mask, q.device, q.dtype, q.shape[3], v.shape[3]):
        return segment_attention(q, k, v, mask)
    if _takes_flex(mask, q.device, q.dtype, q.shape[3], v.shape[3]):
        return flexible_attention(q, k, v, mask, flex_attention if torch.compiler.is_compiling() else compiled_flex())
    return sdpa_attention(q, k, v, mask)


def segment_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
    Torch's flash attention over segments of any length, which lie one after another (Dao 2023,
    https://arxiv.org/abs/2307.08691). It reads grouped key heads as they are, and takes half formats on GPUs.
    """
    B, H, T, E = q.shape
    assert mask.bounds is not None
    rows = [one.to(q.dtype).transpose(1, 2).reshape(B * T, one.shape[1], E) for one in (q, k, v)]
    flash = torch.ops.aten._flash_attention_forward
    y: Tensor = flash(*rows, mask.bounds, mask.bounds, T, T, 0.0, True, False)[0]
    return y.view(B, T, H, E).transpose(1, 2)


def _takes_segments(
    mask: AttentionMask, device: torch.device, dtype: torch.dtype, head_width: int, value_width: int
) -> bool:
    """Whether `segment_attention` computes this. Its own limits are that of grouped rows, and whole 16 bytes."""

    def decide() -> bool:
        if mask.bounds is None or mask.allowed is not None or mask.slopes is not None or mask.is_windowed:
            return False
        fits = dtype in HALF and head_width == value_width <= WIDEST_HEAD["flash"] and head_width % 8 == 0
        return fits and devices.is_gpu(device) and devices.may_attend("varlen")

    return mask.cached(("segments", dtype, head_width, value_width), decide)


def _takes_flex(
    mask: AttentionMask, device: torch.device, dtype: torch.dtype, head_width: int, value_width: int
) -> bool:
    """
    Whether the kernel that is compiled for a mask computes this. The mask keeps the answer, so that compiled code finds
    it there, and stays in one piece.
    """

    def decide() -> bool:
        if mask.allowed is not None or not mask.num_queries == mask.num_keys >= FLEX_TOKENS:
            return False
        if mask.is_causal and _takes_rows(dtype, head_width, value_width):
            return False
        passed = devices.may_attend("flex") and devices.compiles_kernels(device)
        return passed and min(head_width, value_width) >= NARROWEST_FLEX_HEAD

    return mask.cached(("flex", dtype, head_width, value_width), decide)


def _takes_groups(dtype: torch.dtype, head_width: int, value_width: int) -> bool:
    """Whether a kernel of torch's that passed its trial takes causal rows whose query heads share key heads."""
    return (
        dtype in HALF
        and head_width == value_width
        and any(devices.may_attend(name) and head_width <= most for name, most in WIDEST_HEAD.items())
    )


def _takes_rows(dtype: torch.dtype, head_width: int, value_width: int) -> bool:
    """The same of causal rows whose key heads may be repeated. Values wider than keys are left out: not all GPUs do."""
    efficient = head_width == value_width and devices.may_attend("efficient")
    return efficient or _takes_groups(dtype, head_width, value_width)


def processor_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask) -> Attended:
    """
    The formula as two batched matmuls; queries that share a key head are stacked.

    On CPUs in bfloat16 it trains several times faster than PyTorch's attention, whose backward is slow there.
    """
    B, H, T, E = q.shape
    K, S, wide = k.shape[1], k.shape[2], v.shape[3]
    rows = (q * E**-0.5).reshape(B * K, H // K, T, E)
    keys, values = k.to(q.dtype).reshape(B * K, S, E), v.to(q.dtype).reshape(B * K, S, wide)
    if T >= 2 * CHUNK_QUERIES or (mask.window or S) < S:
        y: Tensor = _Chunks.apply(rows, keys, values, mask, B)  # type: ignore[no-untyped-call]
        return y.view(B, H, T, wide)
    scores = torch.bmm(rows.reshape(B * K, -1, E), keys.transpose(1, 2)).view(B, H, T, S)
    weights = torch.softmax(_limited(scores, mask, ALL, ALL), dim=-1)
    return torch.bmm(weights.view(B * K, -1, S), values).view(B, H, T, wide)


def _limited(
    scores: Float[Tensor, "B H t s"], mask: AttentionMask, rows: slice, seen: slice
) -> Float[Tensor, "B H t s"]:
    """Change attention scores of some queries and keys in-place: subtract the ALiBi bias, and set −∞ where masked."""
    if mask.slopes is not None:
        scores.addcmul_(-mask.slopes.to(scores.dtype)[:, None, None], mask.distance(scores.dtype, rows, seen))
    if mask.num_queries > 1 or mask.segments is not None or mask.allowed is not None:  # else it sees all of them
        if (rows, seen) == (ALL, ALL):
            scores.add_(mask.bias(scores.dtype))
        else:
            scores.masked_fill_(~mask.chunk(rows, seen)[:, None], -torch.inf)
    return scores


class _Chunks(torch.autograd.Function):
    """
    The same for a chunk of queries at a time, with those keys that some of the chunk may see.

    G = B·K, n = H / K. Written with its gradients, because those of slices would fill whole tensors with zeros.
    """

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, num_rows: int) -> Tensor:
        G, n, T, E = q.shape
        y, kept = q.new_empty(G, n, T, v.shape[2]), []
        for rows, seen in _chunks(mask):
            scores = torch.bmm(q[:, :, rows].reshape(G, -1, E), k[:, seen].transpose(1, 2))
            limited = _limited(scores.view(num_rows, -1, rows.stop - rows.start, scores.shape[2]), mask, rows, seen)
            weights = torch.softmax(limited, dim=-1).view(scores.shape)
            y[:, :, rows] = torch.bmm(weights, v[:, seen]).view(G, n, -1, v.shape[2])
            if any(context.needs_input_grad):
                kept.append(weights)
        context.save_for_backward(q, k, v, *kept)
        context.mask = mask
        return y

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *kept = context.saved_tensors
        G, n, _, E = q.shape
        grad_q, (grad_k, grad_v) = torch.empty_like(q), (torch.zeros(x.shape, device=x.device) for x in (k, v))
        for (rows, seen), weights in zip(_chunks(context.mask), kept, strict=True):
            grad = upstream[0][:, :, rows].reshape(G, -1, v.shape[2])
            grad_v[:, seen] += torch.bmm(weights.transpose(1, 2), grad)
            grad = torch.bmm(grad, v[:, seen].transpose(1, 2))
            grad = torch._softmax_backward_data(grad, weights, -1, weights.dtype)
            grad_q[:, :, rows] = torch.bmm(grad, k[:, seen]).view(G, n, -1, E)
            grad_k[:, seen] += torch.bmm(grad.transpose(1, 2), q[:, :, rows].reshape(G, -1, E))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _chunks(mask: AttentionMask) -> list[tuple[slice, slice]]:
    """Places of queries, and of the keys between the first and the last that one of them may see."""
    chunks = []
    for begin in range(0, mask.num_queries, CHUNK_QUERIES):
        end = min(begin + CHUNK_QUERIES, mask.num_queries)
        first = 0 if mask.window is None else max(0, mask.offset + begin - mask.window + 1)
        chunks.append((slice(begin, end), slice(first, mask.offset + end)))
    return chunks


def flexible_attention(q: Queries, k: Keys, v: Values, mask: AttentionMask, flex: Any = flex_attention) -> Attended:
    """
    A kernel that computes the mask from positions and skips fully masked blocks
    (Dong et al. 2024, https://arxiv.org/abs/2412.05496). It has no backward pass on CPUs.
    """
    slopes, offset = mask.slopes, mask.offset
    falling = None if slopes is None else (lambda score, b, h, t, s: score - slopes[h] * (t + offset - s))
    y: Tensor = flex(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        score_mod=falling,
        block_mask=_blocks(mask),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y


def _blocks(mask: AttentionMask) -> BlockMask:
    """Which blocks of the T × S square have something to see, and which see all of it."""
    segments, offset, window = mask.segments, mask.offset, mask.window
    limits: list[Callable[..., Tensor]] = [lambda b, h, t, s: s <= t + offset]
    if window is not None:
        limits.append(lambda b, h, t, s: s > t + offset - window)
    if segments is not None:
        limits.append(lambda b, h, t, s: segments[b, t + offset] == segments[b, s])
    sees = and_masks(*limits)

    def build() -> BlockMask:
        some, full = _seen_blocks(mask)
        listed = (*_listed(some & ~full), *_listed(full))
        sizes = (mask.num_queries, mask.num_keys)
        return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=sizes)

    return mask.cached("blocks", build)


def _seen_blocks(mask: AttentionMask) -> tuple[Bool[Tensor, "b t s"], Bool[Tensor, "b t s"]]:
    """
    For each block of queries and of keys: whether some query may see some key, and whether all see all. Letters: t
    and s blocks of 128 queries and keys.

    It follows from the first and last position of a block, and from its lowest and highest segment, so that no T × S
    mask is made, and the device is not asked. Where the segments of a row do not rise, it may say "some" for a block
    with nothing to see; the kernel masks each number of such a block.
    """
    T, S, size = mask.num_queries, mask.num_keys, FLEX_BLOCK
    first, last = (one + mask.offset for one in _bounds(T, mask.device))
    first_key, last_key = _bounds(S, mask.device)
    some = (first_key[None] <= last[:, None])[None]
    full = (last_key[None] <= first[:, None])[None]
    if mask.window is not None:
        some = some & (last_key[None] > first[:, None] - mask.window)
        full = full & (first_key[None] > last[:, None] - mask.window)
    if mask.segments is not None:
        low, high = _segment_bounds(mask.segments, size)
        low_query, high_query = _segment_bounds(mask.segments[:, mask.offset :], size)
        some = some & (low_query[:, :, None] <= high[:, None]) & (low[:, None] <= high_query[:, :, None])
        alike = (low_query == high_query)[:, :, None] & (low == high)[:, None] & (low_query[:, :, None] == low[:, None])
        full = full & alike
    whole = (torch.arange(-(-T // size), device=mask.device) < T // size)[:, None]
    return some, full & whole & (torch.arange(-(-S // size), device=mask.device) < S // size)


def _bounds(length: int, device: torch.device) -> tuple[Int[Tensor, " s"], Int[Tensor, " s"]]:
    """The first and the last position of each block."""
    first = torch.arange(0, length, FLEX_BLOCK, device=device)
    return first, (first + FLEX_BLOCK - 1).clamp_max(length - 1)


def _segment_bounds(segments: Int[Tensor, "B S"], size: int) -> tuple[Int[Tensor, "B s"], Int[Tensor, "B s"]]:
    """The lowest and the highest segment of each block."""
    rest = -segments.shape[1] % size
    if rest:
        segments = torch.cat([segments, segments[:, -1:].expand(-1, rest)], 1)
    blocks = segments.view(len(segments), -1, size)
    return blocks.amin(2), blocks.amax(2)


def _listed(blocks: Bool[Tensor, "b t s"]) -> tuple[Int[Tensor, "b 1 t"], Int[Tensor, "b 1 t s"]]:
    """How many blocks of keys are set for each block of queries, and their numbers, before those that are not."""
    counts = blocks.sum(2, dtype=torch.int32)
    numbers = torch.argsort(blocks.int(), dim=2, descending=True, stable=True).int()
    return counts[:, None], numbers[:, None]


@cache
def compiled_flex() -> Any:
    """The kernel that torch compiles for a mask."""
    return torch.compile(flex_attention)


@dataclass
class Cache:
    """
    Keys and values of the tokens seen so far, for all layers, and how many there are.

    Rows are as long as `capacity`; `length` of them are filled, the same number in every row of the batch.

    With `positions`, rows differ: the next token of a row goes to its position, and sees what is before it, as far as
    `length`. What a step needs and no position changes is then kept, because a GPU that replays the step makes nothing.
    """

    keys: Float[Tensor, "L B K C E"]
    values: Float[Tensor, "L B K C E"]
    length: int = 0
    positions: Int[Tensor, "B 1"] | None = None
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int, like: Tensor) -> "Cache":
        """A cache of zeros on the device and in the number format of `like`."""
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_size)
        keys, values = (torch.zeros(shape, device=like.device, dtype=like.dtype) for _ in range(2))
        return cls(keys, values)

    def kept(self, name: Any, make: Callable[[], M]) -> M:
        """What `make` gives; made once where rows have positions of their own."""
        if self.positions is None:
            return make()
        if name not in self._kept:
            self._kept[name] = make()
        value: M = self._kept[name]
        return value

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's new keys and values behind the old ones, and give all of them."""
        until = self.length + k.shape[2]
        for rows, new in ((self.keys[layer], k), (self.values[layer], v)):
            if self.positions is None:
                rows[:, :, self.length : until] = new
            else:
                rows.scatter_(2, self.positions[:, None, :, None].expand(new.shape), new.to(rows.dtype))
        return self.keys[layer, :, :, :until], self.values[layer, :, :, :until]


class Attention(nn.Module):
    """
    Multi-head attention whose key/value heads are shared by groups of query heads (GQA).

        q, k, v = x Wq, x Wk, x Wv          per head; q and k with optional norm, and RoPE
        y = softmax(q kᵀ / √E, masked) v Wo

    K = H is multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), K = 1 is multi-query
    (Shazeer 2019, https://arxiv.org/abs/1911.02150), between them GQA (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).
    Norms of queries and keys: Henry et al. 2020, https://arxiv.org/abs/2010.04245, with RMSNorm as in Qwen3.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_size
        query_width, key_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = Linear(config.hidden_size, query_width, bias=config.biased("qkv"))
        self.k = Linear(config.hidden_size, key_width, bias=config.biased("qkv"))
        self.v = Linear(config.hidden_size, key_width, bias=config.biased("qkv"))
        self.out = Linear(query_width, config.hidden_size, bias=config.biased("out"))
        self.norm_width = config.qk_norm_over == "width"
        widths = (query_width, key_width) if self.norm_width else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (rms_norm(config, width) if config.qk_norm else None for width in widths)
        scalar = config.query_pre_attn_scalar
        self.query_scale = 1.0 if scalar is None else (self.head_dim / scalar) ** 0.5

    def forward(
        self, x: Float[Tensor, "B T D"], rope: Rotation | None, mask: AttentionMask, cache: Cache | None = None
    ) -> Float[Tensor, "B T D"]:
        B, T, _ = x.shape
        q, k = self.q(x), self.k(x)
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm_width and q_norm is not None and k_norm is not None:
            q, k, q_norm, k_norm = q_norm(q), k_norm(k), None, None
        q = q.view(B, T, self.num_heads, self.head_dim)
        k = k.view(B, T, self.num_kv_heads, self.head_dim)
        v = self.v(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)  # (B, K, T, E)
        q, k = _placed(q, q_norm, rope), _placed(k, k_norm, rope)  # (B, H, T, E), (B, K, T, E)
        if self.query_scale != 1.0:  # what attends divides by √E
            q = q * self.query_scale
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        y = self.attend(q, k, v, mask)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)
        return merged

    @property
    def value_width(self) -> int:
        """Numbers of a value head as attention sees it."""
        return self.head_dim

    def prepare(self, mask: AttentionMask, x: Float[Tensor, "B T D"]) -> None:
        """Make what `forward` will need of the mask: inside of compiled code it could not be kept for other layers."""
        dtype, (T, S) = computed_in(x), (mask.num_queries, mask.num_keys)
        if x.device.type == "cpu":
            if not mask.is_windowed and T < 2 * CHUNK_QUERIES:
                mask.bias(dtype)
                if mask.slopes is not None:
                    mask.distance(dtype)
        elif _takes_segments(mask, x.device, dtype, self.head_dim, self.value_width):
            pass
        elif _takes_flex(mask, x.device, dtype, self.head_dim, self.value_width):
            _blocks(mask)
        elif devices.is_gpu(x.device) and not (mask.is_causal and T in (1, S)):
            _full_bias(mask, dtype)

    def attend(
        self, q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], mask: AttentionMask
    ) -> Float[Tensor, "B N T F"]:
        """What each head, or pair of heads, found: N·F = H·E numbers a token."""
        return fused_attention(q, k, v, mask)


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a matmul of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _placed(x: Float[Tensor, "B T N E"], norm: RMSNorm | None, rope: Rotation | None) -> Float[Tensor, "B N T E"]:
    """Queries or keys, with optional norm and RoPE."""
    if norm is not None and rope is not None and rope[0].shape[-1] == x.shape[-1]:
        gain = norm.gain()
        weights = () if gain is None else (gain,)
        if triton.ready("rotary-norm", x, *rope, *weights):
            return triton.rotate(x.transpose(1, 2), *rope, gain, norm.eps)
    if norm is not None:
        x = norm(x)
    return x.transpose(1, 2) if rope is None else rotate(x.transpose(1, 2), rope)


class DifferentialAttention(Attention):
    """
    Pairs of heads, of which the second takes away what both look at without reason.

        y = norm((softmax(q₁ k₁ᵀ / √E) − λ softmax(q₂ k₂ᵀ / √E)) v) · (1 − λ₀)     v twice as wide, shared by the pair
        λ = exp(λq₁ · λk₁) − exp(λq₂ · λk₂) + λ₀,     λ₀ = 0.8 − 0.6 exp(−0.3 layer)

    H heads are H / 2 pairs, so that all matrices have the shapes of the plain kind; the norm is an RMSNorm of each pair
    (Ye et al. 2024, https://arxiv.org/abs/2410.05258). Key heads 2j and 2j + 1 are a pair, and so are the query heads
    that read them.
    """

    lambda_start: Tensor
    pair_scale: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        # Tensors, because code is compiled again for each other number; on the CPU, also while weights have none.
        self.register_buffer("lambda_start", torch.tensor(start, device="cpu"), persistent=False)
        self.register_buffer("pair_scale", torch.tensor(1.0 - start, device="cpu"), persistent=False)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(self.head_dim)) for _ in range(4)
        )
        self.pair_norm = rms_norm(config, 2 * self.head_dim)

    @property
    def value_width(self) -> int:
        return 2 * self.head_dim

    def attend(
        self, q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], mask: AttentionMask
    ) -> Float[Tensor, "B N T F"]:
        shared = v.reshape(len(v), -1, 2, *v.shape[2:]).transpose(2, 3).flatten(3)  # (B, K/2, S, 2E)
        y = fused_attention(q, k, shared.repeat_interleave(2, dim=1), mask)  # (B, H, T, 2E)
        first, second = y.reshape(len(y), self.num_kv_heads // 2, 2, -1, *y.shape[2:]).unbind(
            2
        )  # (B, K/2, H/K, T, 2E) each
        pairs = (first - self._lambda() * second).flatten(1, 2)  # (B, H/2, T, 2E)
        normed: Tensor = self.pair_norm(pairs) * self.pair_scale
        return normed

    def _lambda(self) -> Float[Tensor, ""]:
        pairs = ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        first, second = ((q.float() * k.float()).sum() for q, k in pairs)
        return torch.exp(first) - torch.exp(second) + self.lambda_start


def attention(config: ModelConfig, layer: int) -> Attention:
    """The attention that a config asks for in a layer."""
    return {"standard": Attention, "differential": DifferentialAttention}[config.layer(layer)[0]](config, layer)
