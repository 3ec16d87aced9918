"""
Causal self-attention with grouped heads, plain and differential, one implementation for training and for decoding.

Letters used for shapes are those of layers.py.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float

from bloomery.model.attend import fused_attention
from bloomery.model.config import ModelConfig
from bloomery.model.fused import operations
from bloomery.model.layers import Linear, RMSNorm
from bloomery.model.positions import Rotation, rotate
from bloomery.model.sight import Sight

import torch
from torch import Tensor, nn


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
        keys, values = (torch.zeros(shape, device=like.device, dtype=like.dtype) for _ in range(2))
        return cls(keys, values)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's new keys and values behind the old ones, and give all of them."""
        until = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : until] = k
        self.values[layer, :, :, self.length : until] = v
        return self.keys[layer, :, :, :until], self.values[layer, :, :, :until]


class Attention(nn.Module):
    """
    Multi-head attention whose key/value heads are shared by groups of query heads (GQA).

        q, k, v = x Wq, x Wk, x Wv          per head; q and k normed where asked for, and turned by position
        y = softmax(q kᵀ / √E, where it may look) v Wo

    K = H is multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), K = 1 is multi-query
    (Shazeer 2019, https://arxiv.org/abs/1911.02150), between them GQA (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).
    Norms of queries and keys: Henry et al. 2020, https://arxiv.org/abs/2010.04245, with RMSNorm as in Qwen3.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_size
        query_width, key_width = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        self.q = Linear(config.width, query_width, bias=config.biases != "none")
        self.k = Linear(config.width, key_width, bias=config.biases != "none")
        self.v = Linear(config.width, key_width, bias=config.biases != "none")
        self.out = Linear(query_width, config.width, bias=config.biases == "all")
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_width, config.norm_eps, config.norm_weights) if config.qk_norm else None for _ in "qk"
        )

    def forward(
        self, x: Float[Tensor, "B T D"], turn: Rotation | None, sight: Sight, cache: Cache | None = None
    ) -> Float[Tensor, "B T D"]:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.num_heads, self.head_width)
        k = self.k(x).view(B, T, self.num_kv_heads, self.head_width)
        v = self.v(x).view(B, T, self.num_kv_heads, self.head_width).transpose(1, 2)  # (B, K, T, E)
        q, k = _placed(q, self.q_norm, turn), _placed(k, self.k_norm, turn)  # (B, H, T, E), (B, K, T, E)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        y = self.attend(q, k, v, sight)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)
        return merged

    def attend(
        self, q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], sight: Sight
    ) -> Float[Tensor, "B N T F"]:
        """What each head, or pair of heads, found: N·F = H·E numbers a token."""
        return fused_attention(q, k, v, sight)


def _placed(x: Float[Tensor, "B T N E"], norm: RMSNorm | None, turn: Rotation | None) -> Float[Tensor, "B N T E"]:
    """Queries or keys, normed where asked for and turned by position."""
    if norm is not None and turn is not None:
        weights = () if norm.weight is None else (norm.weight,)
        if operations.ready("rotary-norm", x, *turn, *weights):
            return operations.turn(x.transpose(1, 2), *turn, norm.weight, norm.eps)
    if norm is not None:
        x = norm(x)
    return x.transpose(1, 2) if turn is None else rotate(x.transpose(1, 2), turn)


class DifferentialAttention(Attention):
    """
    Pairs of heads, of which the second takes away what both look at without reason.

        y = norm((softmax(q₁ k₁ᵀ / √E) − λ softmax(q₂ k₂ᵀ / √E)) v) · (1 − λ₀)     v twice as wide, shared by the pair
        λ = exp(λq₁ · λk₁) − exp(λq₂ · λk₂) + λ₀,     λ₀ = 0.8 − 0.6 exp(−0.3 layer)

    H heads are H / 2 pairs, so that all matrices have the shapes of the plain kind; the norm is an RMSNorm of each pair
    (Ye et al. 2024, https://arxiv.org/abs/2410.05258). Key heads 2j and 2j + 1 are a pair, and so are the query heads
    that read them.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(self.head_width)) for _ in range(4)
        )
        self.pair_norm = RMSNorm(2 * self.head_width, config.norm_eps, config.norm_weights)

    def attend(
        self, q: Float[Tensor, "B H T E"], k: Float[Tensor, "B K S E"], v: Float[Tensor, "B K S E"], sight: Sight
    ) -> Float[Tensor, "B N T F"]:
        shared = v.reshape(len(v), -1, 2, *v.shape[2:]).transpose(2, 3).flatten(3)  # (B, K/2, S, 2E)
        y = fused_attention(q, k, shared.repeat_interleave(2, dim=1), sight)  # (B, H, T, 2E)
        first, second = y.reshape(len(y), self.num_kv_heads // 2, 2, -1, *y.shape[2:]).unbind(
            2
        )  # (B, K/2, H/K, T, 2E) each
        pairs = (first - self._lambda() * second).flatten(1, 2)  # (B, H/2, T, 2E)
        normed: Tensor = self.pair_norm(pairs) * (1.0 - self.lambda_start)
        return normed

    def _lambda(self) -> Float[Tensor, ""]:
        first, second = (self.lambda_q1 * self.lambda_k1).sum(), (self.lambda_q2 * self.lambda_k2).sum()
        return torch.exp(first) - torch.exp(second) + self.lambda_start


def attention(config: ModelConfig, layer: int) -> Attention:
    """The attention that a config asks for in a layer."""
    return {"standard": Attention, "differential": DifferentialAttention}[config.layer(layer)[0]](config, layer)
