"""Small models of many shapes, for every test that needs some model."""

from typing import Any

import numpy as np

from bloomery.model.config import LinearScaling, Llama3Scaling, LongRopeScaling, ModelConfig, YarnScaling
from bloomery.model.lora import LoRALinear
from bloomery.model.quantize import QuantizedLinear
from bloomery.model.transformer import Transformer

import torch

VOCAB_SIZE = 61

SHAPES = (
    ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, context_length=40),
    ModelConfig(
        hidden_size=24,
        num_layers=1,
        num_heads=3,
        num_kv_heads=1,
        intermediate_size=16,
        context_length=40,
        tie_embeddings=False,
    ),
    ModelConfig(
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        intermediate_size=40,
        context_length=40,
        rope_theta=500.0,
    ),
)
"""Grouped heads and a tied head; one key head and a head of its own; as many key heads as query heads."""


def random_config(seed: int) -> ModelConfig:
    """Some shape; nothing that can be set is as by default."""
    rng = np.random.default_rng(seed)
    num_kv_heads, group, head_dim = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(1, 9)))
    return ModelConfig(
        hidden_size=num_kv_heads * group * head_dim,
        num_layers=int(rng.integers(1, 4)),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        intermediate_size=int(rng.integers(1, 70)),
        context_length=int(rng.integers(12, 60)),
        rope_theta=float(rng.choice([123.0, 50_000.0, 1e6])),
        norm_eps=float(rng.choice([1e-6, 3e-4])),
        tie_embeddings=bool(rng.integers(2)),
    )


def _small(**changed: Any) -> ModelConfig:
    shape = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 48,
        "context_length": 40,
    }
    return ModelConfig(**(shape | changed))


CHOICES = {
    "differential": _small(attention=("differential",)),
    "differential in turn, many groups": _small(
        attention=("standard", "differential"), num_layers=3, num_heads=8, hidden_size=48, qk_norm=True
    ),
    "one wide key head": _small(num_kv_heads=1, head_dim=20),
    "windows in turn": _small(sliding_window=(5, "full"), num_layers=3),
    "differential in a window": _small(attention=("differential",), sliding_window=(3,), position_embedding="alibi"),
    "ALiBi with six heads": _small(position_embedding="alibi", num_heads=6, num_kv_heads=3, hidden_size=36),
    "ALiBi in a window": _small(position_embedding="alibi", sliding_window=(7,)),
    "absolute positions": _small(position_embedding="learned", norm="layernorm", biases="all", mlp=("gelu_tanh",)),
    "no positions": _small(position_embedding="none", mlp=("relu2", "gelu")),
    "GeGLU and bare norms": _small(mlp=("geglu",), norm_affine=False, qk_norm=True),
    "bare LayerNorm": _small(norm="layernorm", norm_affine=False, biases="all"),
    "Qwen2": _small(biases="qkv"),
    "biases of attention": _small(biases="attention"),
    "biases of the MLP": _small(biases="mlp"),
    "Qwen3": _small(qk_norm=True, head_dim=12),
    "Llama 3": _small(rope_scaling=Llama3Scaling(original_context_length=16)),
    "YaRN": _small(rope_scaling=YarnScaling(factor=4.0, original_context_length=10), rope_theta=100.0),
    "SmolLM3": _small(rope_layers=(True, False)),
    "OLMo 2": _small(norm_order="after", qk_norm=True, qk_norm_over="width"),
    "Gemma 3": _small(
        norm_order="both",
        norm_plus_one=True,
        scale_embeddings=True,
        qk_norm=True,
        mlp=("geglu_tanh",),
        sliding_window=(5, "full"),
        rope_local_theta=100.0,
        query_pre_attn_scalar=3.0,
        head_dim=12,
    ),
    "Phi-3": _small(
        partial_rotary_factor=0.5,
        rope_scaling=LongRopeScaling(
            factor=4.0, original_context_length=40, short_factor=(1.0, 1.5), long_factor=(2.0, 3.0)
        ),
    ),
    "GPT-NeoX": _small(
        parallel_residual=True, partial_rotary_factor=0.25, norm="layernorm", biases="all", mlp=("gelu",)
    ),
    "NormHead": _small(normalize_head=True, tie_embeddings=False),
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
    positions = one("rope", "learned", "alibi", "none")
    scaling = one(
        None,
        LinearScaling(factor=3.0),
        Llama3Scaling(original_context_length=20),
        YarnScaling(factor=2.0, original_context_length=20),
    )
    attention = cycle("standard", "differential") if shape.num_kv_heads % 2 == 0 else ("standard",)
    choices = {
        "head_dim": one(None, 6, 10),
        "attention": attention,
        "sliding_window": cycle("full", 3, 9),
        "mlp": cycle("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"),
        "position_embedding": positions,
        "rope_scaling": scaling if positions == "rope" else None,
        "norm": one("rmsnorm", "layernorm"),
        "norm_affine": one(True, False),
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
            start = float(name.endswith("norm.weight") and not config.norm_plus_one)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + start)
    return model.eval()


def random_ids(rows: int, tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def scores(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(ids))


def assert_merged(plain: Transformer, trained: Transformer) -> None:
    """The weights of a plain model are, bit for bit, W + s · B A of one with adapters, as it keeps W."""
    for name, weight in plain.state_dict().items():
        path, _, kind = name.rpartition(".")
        module = trained.get_submodule(path)
        base = module.base if isinstance(module, LoRALinear) else module
        expected = trained.state_dict().get(name)
        if isinstance(base, QuantizedLinear):
            expected = base.dense(torch.float32) if kind == "weight" else base.bias
        if isinstance(module, LoRALinear) and kind == "weight":
            assert expected is not None
            expected = expected + module.scale * (module.lora_b.detach() @ module.lora_a.detach())
        assert expected is not None, name
        assert torch.equal(weight, expected), name
