"""
Causal self-attention with grouped heads, one implementation for training and for decoding.

Letters used for shapes are those of layers.py.
"""

import math
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int

from bloomery.model.config import ModelConfig
from bloomery.model.layers import Rotation, rotate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mask = Bool[Tensor, "B T S"]  # True where a token may look


@dataclass
class Cache:
    """
    Keys and values of the tokens seen so far, for all layers, and how many there are.

    Rows are as long as `capacity`; `length` of them are filled, the same number in every row of the batch.
    """

    keys: Float[Tensor, "L B K C E"]
    values: Float[Tensor, "L B K C E"]
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int, like: Tensor) -> "Cache":
        """A cache of zeros on the device and in the number format of `like`."""
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_size)
        return cls(torch.zeros(shape, device=like.device, dtype=like.dtype), like.new_zeros(shape))


class Attention(nn.Module):
    """
    Multi-head attention whose key/value heads are shared by groups of query heads (GQA).

        q, k, v = x Wq, x Wk, x Wv          per head; q and k turned by position
        y = softmax(q kᵀ / √E, masked) v Wo

    K = H is multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), K = 1 is multi-query
    (Shazeer 2019, https://arxiv.org/abs/1911.02150), between them GQA (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_size
        self.q = nn.Linear(config.width, config.num_heads * config.head_size, bias=False)
        self.k = nn.Linear(config.width, config.num_kv_heads * config.head_size, bias=False)
        self.v = nn.Linear(config.width, config.num_kv_heads * config.head_size, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_size, config.width, bias=False)

    def forward(
        self, x: Float[Tensor, "B T D"], turn: Rotation, mask: Mask, cache: Cache | None = None
    ) -> Float[Tensor, "B T D"]:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.num_heads, self.head_width).transpose(1, 2)  # (B, H, T, E)
        k = self.k(x).view(B, T, self.num_kv_heads, self.head_width).transpose(1, 2)  # (B, K, T, E)
        v = self.v(x).view(B, T, self.num_kv_heads, self.head_width).transpose(1, 2)  # (B, K, T, E)
        q, k = rotate(q, turn), rotate(k, turn)
        if cache is not None:
            until = cache.length + T
            cache.keys[self.layer, :, :, cache.length : until] = k
            cache.values[self.layer, :, :, cache.length : until] = v
            k, v = cache.keys[self.layer, :, :, :until], cache.values[self.layer, :, :, :until]
        attend = softmax_attention if x.device.type == "cpu" else sdpa_attention
        y = attend(q, k, v, mask)  # (B, H, T, E)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)
        return merged


def sdpa_attention(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], mask: Mask
) -> Float[Tensor, "B H T E"]:
    """The reference: PyTorch's fused attention."""
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask[:, None], enable_gqa=True)


def softmax_attention(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], mask: Mask
) -> Float[Tensor, "B H T E"]:
    """
    The formula, as two batched matrix products. Equal to the reference by test.

    On CPUs in bfloat16 it trains several times faster than the fused one, whose backward is slow there.
    """
    B, H, T, E = q.shape
    K, S = k.shape[1], k.shape[2]
    grouped = (q * E**-0.5).reshape(B * K, (H // K) * T, E)  # queries of one key head side by side
    scores = torch.bmm(grouped, k.to(q.dtype).reshape(B * K, S, E).transpose(1, 2)).view(B, H, T, S)
    bias = torch.zeros(B, 1, T, S, device=q.device, dtype=q.dtype).masked_fill(~mask[:, None], -math.inf)
    weights = torch.softmax(scores + bias, dim=-1)
    y = torch.bmm(weights.view(B * K, (H // K) * T, S), v.to(q.dtype).reshape(B * K, S, E))
    return y.view(B, H, T, E)


def causal_mask(segments: Int[Tensor, "B T"]) -> Mask:
    """Who may look at whom in training: only back, and only within the same document."""
    T = segments.shape[1]
    back = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return back & same
