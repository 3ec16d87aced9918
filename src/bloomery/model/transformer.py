"""
The model: embedding, blocks, norm, head. It knows nothing of ranks, devices, optimizers or files.

Letters used for shapes are those of layers.py; V is the vocabulary.
"""

import math

from jaxtyping import Float, Int

from bloomery.model.attention import Attention, Cache, Mask, causal_mask
from bloomery.model.config import ModelConfig
from bloomery.model.layers import GatedMLP, RMSNorm, Rotation, rotation

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """
    x = x + attention(norm(x))
    x = x + mlp(norm(x))
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config.width, config.mlp_width)

    def forward(
        self, x: Float[Tensor, "B T D"], turn: Rotation, mask: Mask, cache: Cache | None
    ) -> Float[Tensor, "B T D"]:
        x = x + self.attention(self.attention_norm(x), turn, mask, cache)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embed = nn.Embedding(vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def initialize(self, seed: int) -> None:
        """
        Fill the weights from a seed: N(0, 0.02²), and what writes to the residual stream N(0, 0.02² / 2L).

        The scale by depth is GPT-2's (Radford et al. 2019, §2.3). The draw is made on the CPU, so that every device
        starts from the same numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_stream else 0.02
            with torch.no_grad():
                weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """
        The normed residual stream after the last block; `logits` makes scores of it.

        Tokens see only earlier tokens of the same segment. Positions count from 0 in each row unless given.
        """
        B, T = ids.shape
        if segments is None:
            segments = torch.zeros_like(ids)
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand(B, T)
        return self._run(ids, positions, causal_mask(segments), None)

    def extend(
        self, ids: Int[Tensor, "B T"], positions: Int[Tensor, "B T"], mask: Mask, cache: Cache
    ) -> Float[Tensor, "B T D"]:
        """As forward, for T more tokens after those in the cache, which grows by them. `mask` covers both."""
        hidden = self._run(ids, positions, mask, cache)
        cache.length += ids.shape[1]
        return hidden

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        scores: Tensor = self.head(hidden)
        return scores.float()

    def _run(self, ids: Tensor, positions: Tensor, mask: Mask, cache: Cache | None) -> Tensor:
        turn = rotation(positions, self.config.head_size, self.config.rope_theta)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, turn, mask, cache)
        normed: Tensor = self.norm(x)
        return normed
