"""Small models of many shapes, for every test that needs some model."""

import numpy as np

from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer

import torch

VOCAB_SIZE = 61

SHAPES = (
    ModelConfig(width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=48, context=40),
    ModelConfig(width=24, num_layers=1, num_heads=3, num_kv_heads=1, mlp_width=16, context=40, tie_embeddings=False),
    ModelConfig(width=16, num_layers=3, num_heads=2, num_kv_heads=2, mlp_width=40, context=40, rope_theta=500.0),
)
"""Grouped heads and a tied head; one key head and a head of its own; as many key heads as query heads."""


def random_config(seed: int) -> ModelConfig:
    """Some shape; nothing that can be set is as by default."""
    rng = np.random.default_rng(seed)
    num_kv_heads, group, head_width = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(1, 9)))
    return ModelConfig(
        width=num_kv_heads * group * head_width,
        num_layers=int(rng.integers(1, 4)),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        mlp_width=int(rng.integers(1, 70)),
        context=int(rng.integers(12, 60)),
        rope_theta=float(rng.choice([123.0, 50_000.0, 1e6])),
        norm_eps=float(rng.choice([1e-6, 3e-4])),
        tie_embeddings=bool(rng.integers(2)),
    )


def lively(config: ModelConfig, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Transformer:
    """A model whose scores differ, as after training: large weights, and norms that are not 1."""
    model = Transformer(config, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + float(weight.dim() == 1))
    return model.eval()


def random_ids(rows: int, tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
