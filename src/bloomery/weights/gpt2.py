"""GPT2LMHeadModel: queries, keys and values in one matrix, and matrices that are written inputs × outputs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.model.config import ModelConfig
from bloomery.weights.architecture import Architecture, Piece, is_uniform, renamed

PATTERNS = (
    (r"embed\.weight", "transformer.wte.weight"),
    (r"positions\.weight", "transformer.wpe.weight"),
    (r"blocks\.(\d+)\.attention\.q\.(weight|bias)", r"transformer.h.\1.attn.c_attn.\2"),
    (r"blocks\.(\d+)\.attention\.out\.(weight|bias)", r"transformer.h.\1.attn.c_proj.\2"),
    (r"blocks\.(\d+)\.mlp\.up\.(weight|bias)", r"transformer.h.\1.mlp.c_fc.\2"),
    (r"blocks\.(\d+)\.mlp\.down\.(weight|bias)", r"transformer.h.\1.mlp.c_proj.\2"),
    (r"blocks\.(\d+)\.attention_norm\.(weight|bias)", r"transformer.h.\1.ln_1.\2"),
    (r"blocks\.(\d+)\.mlp_norm\.(weight|bias)", r"transformer.h.\1.ln_2.\2"),
    (r"norm\.(weight|bias)", r"transformer.ln_f.\1"),
    (r"head\.weight", "lm_head.weight"),
)
"""Our name of a weight, and transformers' name of it; keys and values lie below the queries."""

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}
CONV = re.compile(r"blocks\.\d+\.(attention|mlp)\.\w+\.weight")
"""What transformers keeps as Conv1D: inputs × outputs."""


def pieces(names: Sequence[str]) -> list[Piece]:
    """Their tensors. Raises ValueError for a weight that GPT-2 does not have."""
    found = []
    for name in names:
        if re.fullmatch(r"blocks\.\d+\.attention\.[kv]\.(weight|bias)", name):
            continue
        query = re.fullmatch(r"(blocks\.\d+\.attention\.)q(\.\w+)", name)
        ours = tuple(f"{query[1]}{which}{query[2]}" for which in "qkv") if query else (name,)
        found.append(Piece(theirs(name), ours, transposed=bool(CONV.fullmatch(name))))
    return found


def theirs(name: str) -> str:
    """Transformers' name of one of our weights. Raises ValueError for one that it does not have."""
    return renamed(name, PATTERNS, "GPT2LMHeadModel")


def describe(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "n_positions": config.context,
        "n_ctx": config.context,
        "activation_function": ACTIVATIONS[config.feed_forward[0]],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def understand(facts: Mapping[str, Any]) -> ModelConfig:
    activations = {act: kind for kind, act in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    if (act := facts.get("activation_function", "gelu_new")) not in activations:
        raise ValueError(f"activation_function {act!r} is not one of {', '.join(activations)}")
    for name, usual in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        if facts.get(name, usual) != usual:
            raise ValueError(f"{name} = {facts[name]!r} is not there")
    return ModelConfig(
        width=facts["n_embd"],
        num_layers=facts["n_layer"],
        num_heads=facts["n_head"],
        num_kv_heads=facts["n_head"],
        mlp_width=facts.get("n_inner") or 4 * facts["n_embd"],
        context=facts.get("n_positions") or facts["n_ctx"],
        norm_eps=facts.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=facts.get("tie_word_embeddings", True),
        feed_forward=(activations[act],),
        positions="absolute",
        norm="layernorm",
        biases="all",
    )


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    {
        "attention": lambda config: is_uniform(config.attention, "standard"),
        "feed_forward": lambda config: is_uniform(config.feed_forward, *ACTIVATIONS),
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "positions": lambda config: config.positions == "absolute",
        "norm": lambda config: config.norm == "layernorm",
        "norm_weights": lambda config: config.norm_weights,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "all",
        "num_kv_heads": lambda config: config.num_kv_heads == config.num_heads,
        "head_width": lambda config: config.head_size * config.num_heads == config.width,
    },
    describe,
    understand,
    pieces,
)
