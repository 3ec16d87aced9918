"""Small models of many shapes, for every test that needs some model."""

from typing import Any

import numpy as np

from bloomery.model.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
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


def _small(**changed: Any) -> ModelConfig:
    shape = {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48, "context": 40}
    return ModelConfig(**(shape | changed))


CHOICES = {
    "differential": _small(attention=("differential",)),
    "differential in turn, many groups": _small(
        attention=("standard", "differential"), num_layers=3, num_heads=8, width=48, qk_norm=True
    ),
    "one wide key head": _small(num_kv_heads=1, head_width=20),
    "windows in turn": _small(sliding_window=(5, "full"), num_layers=3),
    "differential in a window": _small(attention=("differential",), sliding_window=(3,), positions="alibi"),
    "ALiBi with six heads": _small(positions="alibi", num_heads=6, num_kv_heads=3, width=36),
    "ALiBi in a window": _small(positions="alibi", sliding_window=(7,)),
    "absolute positions": _small(positions="absolute", norm="layernorm", biases="all", feed_forward=("gelu_tanh",)),
    "no positions": _small(positions="none", feed_forward=("relu2", "gelu")),
    "GeGLU and bare norms": _small(feed_forward=("geglu",), norm_weights=False, qk_norm=True),
    "bare LayerNorm": _small(norm="layernorm", norm_weights=False, biases="all"),
    "Qwen2": _small(biases="qkv"),
    "Qwen3": _small(qk_norm=True, head_width=12),
    "Llama 3": _small(rope_scaling=Llama3Scaling(original_context=16)),
    "YaRN": _small(rope_scaling=YarnScaling(factor=4.0, original_context=10), rope_theta=100.0),
    "stretched": _small(rope_scaling=LinearScaling(factor=2.5)),
}
"""One shape for every choice that is not the default."""


def any_config(seed: int) -> ModelConfig:
    """Any choice with any other."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def cycle(*values: Any) -> tuple[Any, ...]:
        return tuple(one(*values) for _ in range(int(rng.integers(1, 4))))

    shape = random_config(seed)
    positions = one("rotary", "absolute", "alibi", "none")
    scaling = one(
        None,
        LinearScaling(factor=3.0),
        Llama3Scaling(original_context=20),
        YarnScaling(factor=2.0, original_context=20),
    )
    attention = cycle("standard", "differential") if shape.num_kv_heads % 2 == 0 else ("standard",)
    choices = {
        "head_width": one(None, 6, 10),
        "attention": attention,
        "sliding_window": cycle("full", 3, 9),
        "feed_forward": cycle("swiglu", "geglu", "gelu", "gelu_tanh", "relu2"),
        "positions": positions,
        "rope_scaling": scaling if positions == "rotary" else None,
        "norm": one("rmsnorm", "layernorm"),
        "norm_weights": one(True, False),
        "qk_norm": one(True, False),
        "biases": one("none", "qkv", "all"),
    }
    return ModelConfig(**(dict(shape) | choices))


def lively(config: ModelConfig, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Transformer:
    """A model whose scores differ, as after training: large weights, and norms that are not 1."""
    model = Transformer(config, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            start = float(name.endswith("norm.weight"))
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + start)
    return model.eval()


def random_ids(rows: int, tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
