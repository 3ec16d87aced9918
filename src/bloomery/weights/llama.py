"""Llama and its kin: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.model.config import ModelConfig
from bloomery.weights.architecture import Architecture, Piece, is_uniform, renamed

PATTERNS = (
    (r"embed\.weight", "model.embed_tokens.weight"),
    (r"blocks\.(\d+)\.attention\.(q|k|v)\.(weight|bias)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"blocks\.(\d+)\.attention\.out\.(weight|bias)", r"model.layers.\1.self_attn.o_proj.\2"),
    (r"blocks\.(\d+)\.attention\.(q|k)_norm\.weight", r"model.layers.\1.self_attn.\2_norm.weight"),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.(weight|bias)", r"model.layers.\1.mlp.\2_proj.\3"),
    (r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"head\.weight", "lm_head.weight"),
)
"""Our name of a weight, and transformers' name of it."""

GATES = {"swiglu": "silu", "geglu": "gelu"}
"""Our feed-forward, and what transformers calls the function of its gate."""

Allowed = dict[str, Callable[[ModelConfig], bool]]


def pieces(names: Sequence[str]) -> list[Piece]:
    """One tensor of theirs for each of ours. Raises ValueError for a weight that Llama does not have."""
    return [Piece(theirs(name), (name,)) for name in names]


def theirs(name: str) -> str:
    """Transformers' name of one of our weights. Raises ValueError for one that it does not have."""
    return renamed(name, PATTERNS, "LlamaForCausalLM")


def describe(config: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": GATES[config.feed_forward[0]],
        "attention_bias": config.biases == "all",
        "mlp_bias": config.biases == "all",
    }
    if (scaling := config.rope_scaling) is not None:
        said = {"rope_type": scaling.kind} | scaling.model_dump(exclude={"kind"}, exclude_none=True)
        if "original_context" in said:
            said["original_max_position_embeddings"] = said.pop("original_context")
        facts["rope_scaling"] = said
    return facts


def understand(facts: Mapping[str, Any]) -> ModelConfig:
    """The part of a config.json that all of them have."""
    acts = {act: kind for kind, act in GATES.items()}
    if (act := facts.get("hidden_act", "silu")) not in acts:
        raise ValueError(f"hidden_act {act!r} is not one of {', '.join(acts)}")
    if facts.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {facts['partial_rotary_factor']}: only whole heads are turned")
    heads = facts["num_attention_heads"]
    if bool(facts.get("attention_bias")) != bool(facts.get("mlp_bias")):
        raise ValueError("attention_bias and mlp_bias differ; both have biases, or none")
    theta, scaling = _rope(facts)
    tree = {
        "width": facts["hidden_size"],
        "num_layers": facts["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": facts.get("num_key_value_heads") or heads,
        "mlp_width": facts["intermediate_size"],
        "context": facts["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": facts.get("rms_norm_eps", 1e-6),
        "tie_embeddings": facts.get("tie_word_embeddings", False),
        "feed_forward": acts[act],
        "biases": "all" if facts.get("attention_bias") else "none",
    }
    given = facts.get("head_dim")
    if given and given * heads != tree["width"]:
        tree["head_width"] = given
    return ModelConfig(**tree)


def _rope(facts: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """θ and the scaling, as transformers 5 says them (rope_parameters) or those before it."""
    said = dict(facts.get("rope_parameters") or facts.get("rope_scaling") or {})
    named = (said.pop("rope_theta", None), facts.get("rope_theta"), 10_000.0)
    theta = float(next(value for value in named if value is not None))
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    if kind == "default":
        return theta, None
    original = said.pop("original_max_position_embeddings", None)
    if kind not in ("linear", "llama3", "yarn") or said.keys() & {"mscale", "mscale_all_dim"}:
        raise ValueError(f"rope_scaling of the type {kind!r} ({', '.join(said)}) is not one of linear, llama3, yarn")
    if said.pop("truncate", True) is not True:
        raise ValueError("yarn without truncation is not there")
    if kind != "linear":
        said["original_context"] = original or facts["max_position_embeddings"]
    return theta, {"kind": kind, **said}


# --- the kin -------------------------------------------------------------------------------------------------------


def _windowed(config: ModelConfig) -> dict[str, Any]:
    """What Qwen's config.json says of sliding windows, layer by layer."""
    windows = [config.layer(number)[1] for number in range(config.num_layers)]
    sizes = sorted({size for size in windows if size != "full"})
    kinds = ["full_attention" if size == "full" else "sliding_attention" for size in windows]
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": sizes[0] if sizes else None,
        "max_window_layers": next((place for place, size in enumerate(windows) if size != "full"), len(windows)),
        "layer_types": kinds,
    }


def _windows(facts: Mapping[str, Any]) -> list[Any]:
    """The sliding window of each layer of a Qwen."""
    layers, size = facts["num_hidden_layers"], facts.get("sliding_window")
    if not facts.get("use_sliding_window", False) or size is None:
        return ["full"]
    if kinds := facts.get("layer_types"):
        seen = {"full_attention": "full", "sliding_attention": size}
        if len(kinds) != layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
        if strange := [kind for kind in kinds if kind not in seen]:
            raise ValueError(f"layer_types names {strange[0]!r}, which is not one of {', '.join(seen)}")
        return [seen[kind] for kind in kinds]
    first = facts.get("max_window_layers", 28)
    return [size if number >= first else "full" for number in range(layers)]


def _qwen(facts: Mapping[str, Any], **changes: Any) -> ModelConfig:
    if facts.get("attention_bias"):
        raise ValueError("attention_bias: a Qwen with a bias on what attention puts out is not there")
    return _changed(understand(facts), sliding_window=tuple(_windows(facts)), **changes)


def _changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A ModelConfig with other values, checked."""
    return ModelConfig(**(config.model_dump() | changes))


def _one_window(config: ModelConfig) -> bool:
    """Whether all layers that do not see everything see equally much."""
    return len({size for size in config.sliding_window if size != "full"}) <= 1


def _size_or_full(facts: Mapping[str, Any]) -> Any:
    """How much every layer sees, as config.json says it: null stands for everything, and 0 is checked as a size."""
    size = facts.get("sliding_window")
    return "full" if size is None else size


def _one_size(config: ModelConfig) -> int | None:
    """How much every layer sees; None for everything, which a Llama without a window is too."""
    size = config.sliding_window[0]
    return None if size == "full" else size


SHARED: Allowed = {
    "attention": lambda config: is_uniform(config.attention, "standard"),
    "feed_forward": lambda config: is_uniform(config.feed_forward, *GATES),
    "positions": lambda config: config.positions == "rotary",
    "norm": lambda config: config.norm == "rmsnorm",
    "norm_weights": lambda config: config.norm_weights,
}
"""What all of them have."""

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    SHARED
    | {
        "width": lambda config: config.width % config.num_heads == 0,
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases in ("none", "all"),
    },
    describe,
    understand,
    pieces,
)
MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    SHARED
    | {
        "sliding_window": lambda config: len(set(config.sliding_window)) == 1,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "none",
    },
    lambda config: describe(config) | {"sliding_window": _one_size(config)},
    lambda facts: _changed(understand(facts), sliding_window=(_size_or_full(facts),)),
    pieces,
)
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    SHARED
    | {
        "sliding_window": _one_window,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "qkv",
    },
    lambda config: describe(config) | _windowed(config),
    lambda facts: _qwen(facts, biases="qkv"),
    pieces,
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    SHARED
    | {
        "sliding_window": _one_window,
        "qk_norm": lambda config: config.qk_norm,
        "biases": lambda config: config.biases == "none",
    },
    lambda config: describe(config) | _windowed(config),
    lambda facts: _qwen(facts, qk_norm=True),
    pieces,
)
