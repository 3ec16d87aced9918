"""
Map weights and configs to transformers' architectures: Llama, Qwen, OLMo 2, Gemma 3, Phi-3, GPT-2 and others.

An architecture has a name, a configuration, and a position for each of our weights in its files. A mapping covers
one tensor of theirs. It corresponds to one tensor of ours, or to several of ours stacked one below the other.

    Llama and its kin    LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM
    OLMo 2               Olmo2ForCausalLM: norms after attention and MLP, norms of queries and keys over the width
    Gemma 3              Gemma3ForCausalLM (text): norms on both sides, times 1 + weight, and two RoPE bases
    Phi-3, Phi-4-mini    Phi3ForCausalLM: queries, keys and values in one matrix, gate and up in another
    GPT-NeoX             GPTNeoXForCausalLM (Pythia): queries, keys and values in one matrix, head by head
    GPT-2                GPT2LMHeadModel: queries, keys and values in one matrix, and matrices that are written
                         inputs × outputs
    Baichuan2            read and not written: 7B is a Llama with rotary positions, 13B has ALiBi

In Baichuan2, queries, keys and values are one matrix (W_pack). The head of the second generation is used with rows
of length 1 (NormHead). The head stays as it is while it trains; export normalizes its rows. The first generation,
with a vocabulary of 64,000, has no NormHead.

A config.json may have fields that no reader here knows. A field that is not null, and not known to leave the
computation as it is (IGNORED), is refused by name.

This module also finds which transformers architecture a model is. If a model is none, it says why not. Such a model
is saved in the same kind of folder under a name of our own, which transformers refuses plainly.

All architectures are in one file because finding the architecture of a model compares them all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.config import plain
from bloomery.model.config import LongRopeScaling, ModelConfig

import torch
from torch import Tensor

CYCLES = ("attention", "sliding_window", "mlp", "rope_layers")
"""Fields of a ModelConfig that layers take in turns; of a cycle that is longer than the model, its end says nothing."""
TABLES = ("embed.weight", "head.weight")
"""Weights with a row for each token ID."""

BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
"""Tensors in some files that are no weights but follow from the configuration: frequencies, causal masks."""


@dataclass(frozen=True)
class WeightMapping:
    """A tensor of theirs."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Theirs has inputs × outputs, ours outputs × inputs."""
    interleaved: int = 0
    """Number of heads, where theirs has the rows of ours head by head. 0: one below the other."""


@dataclass(frozen=True)
class Architecture:
    name: str
    """As transformers calls it in config.json."""
    model_type: str
    allowed: Mapping[str, Callable[[ModelConfig], bool]]
    """Field of a ModelConfig -> whether it is such as the architecture has it."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """The entries of config.json for a model, except architecture, vocabulary and special tokens."""
    reader: Callable[[Mapping[str, Any]], ModelConfig]
    """The model of a config.json. Raises ValueError for what ours cannot be, KeyError for what it lacks."""
    pieces: Callable[[Sequence[str]], list[WeightMapping]]
    """The tensors of a model whose weights, without a tied head, have these names of ours."""
    fields: frozenset[str] = frozenset()
    """Keys of config.json that the reader looks at."""
    bind: Callable[[int], Callable[[Sequence[str]], list[WeightMapping]]] | None = None
    """`pieces` for a number of heads, where tensors depend on it."""

    def understand(self, facts: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises ValueError for what ours cannot be, KeyError for what it lacks."""
        for name, value in facts.items():
            if value is None or not self.fields or name in self.fields or IGNORED.fullmatch(name):
                continue
            if name not in NEUTRAL:
                raise ValueError(
                    f"{name} = {shown(value)} is not known of a {self.name}; remove the field if it changes no logits"
                )
            if value not in NEUTRAL[name]:
                raise ValueError(f"{name} = {shown(value)} changes what a {self.name} computes, and is not done here")
        return self.reader(facts)

    def bound(self, num_heads: int) -> "Architecture":
        """The same for a model with this number of heads."""
        return self if self.bind is None else replace(self, pieces=self.bind(num_heads))

    def obstacles(self, config: ModelConfig) -> list[str]:
        """The fields of a model that this architecture does not have so."""
        used = {name: getattr(config, name)[: config.num_layers] for name in CYCLES}
        config = config.model_copy(update=used)
        return [field for field, holds in self.allowed.items() if not holds(config)]


def renamed(name: str, patterns: Sequence[tuple[str, str]], architecture: str) -> str:
    """
    Their name of one of our weights, by the first pattern that is all of it. Raises ValueError for a weight that none
    fits.
    """
    for pattern, replacement in patterns:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise ValueError(f"{name!r} has no counterpart in a {architecture}")


def gathered(piece: WeightMapping, weights: Mapping[str, Tensor]) -> Tensor:
    """Their tensor, made of ours."""
    whole = joined(piece, [weights[name] for name in piece.ours])
    return whole.t() if piece.transposed else whole


def joined(piece: WeightMapping, parts: Sequence[Tensor]) -> Tensor:
    """Rows of ours as theirs has them."""
    if len(parts) == 1:
        return parts[0]
    if not piece.interleaved:
        return torch.cat(list(parts))
    return torch.cat([part.reshape(piece.interleaved, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def parted(piece: WeightMapping, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows of theirs as ours has them, so many in each of ours."""
    if not piece.interleaved:
        return list(torch.split(whole, list(sizes)))
    heads = whole.reshape(piece.interleaved, -1, *whole.shape[1:])
    return [part.flatten(0, 1) for part in torch.split(heads, [size // piece.interleaved for size in sizes], dim=1)]


def spread(piece: WeightMapping, tensor: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Copy their tensor into ours. Raises ValueError for another shape."""
    parts = [weights[name] for name in piece.ours]
    if piece.transposed and tensor.dim() == 2:
        tensor = tensor.t()
    expected = (sum(len(part) for part in parts), *parts[0].shape[1:])
    if tensor.shape != expected:
        turned = tuple(reversed(expected)) if piece.transposed else expected
        raise ValueError(f"{piece.theirs} has shape {tuple(tensor.shape)}, not {turned}")
    with torch.no_grad():
        for target, some in zip(parts, parted(piece, tensor, [len(part) for part in parts]), strict=True):
            target.copy_(some)


def is_uniform(cycle: Sequence[Any], *values: Any) -> bool:
    """Whether every layer has the same, and that one of these values."""
    return len(set(cycle)) == 1 and cycle[0] in values


LLAMA_PATTERNS = (
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

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
"""Our feed-forward, and what transformers calls the function of its gate."""

Allowed = dict[str, Callable[[ModelConfig], bool]]

LLAMA_FIELDS = frozenset(
    {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"}
    | {"max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps"}
    | {"tie_word_embeddings", "hidden_act", "attention_bias", "partial_rotary_factor"}
)
WINDOW_FIELDS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
IGNORED = re.compile(
    r"_name_or_path|architectures|model_type|vocab_size|(bos|eos|pad|unk|sep|decoder_start)_token_id|(torch_)?dtype"
    r"|transformers(_version|\.js_config|_weights)|use_cache|cache_implementation|initializer_range|pretraining_tp"
    r"|auto_map|\w*(dropout|_pdrop)|_?attn_implementation|_?output_attentions|output_hidden_states|return_dict"
    r"|use_return_dict|torchscript|gradient_checkpointing|use_bfloat16|task_specific_params|id2label|label2id"
    r"|num_labels|problem_type|summary_\w+|reorder_and_upcast_attn|unsloth_\w+|_experts_implementation|tokenizer_class"
    r"|finetuning_task|prefix|license|chunk_size_feed_forward|model_max_length|n_ctx"
)
"""Keys of config.json that leave the logits of a model in evaluation as they are."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "max_window_layers": (),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "clip_qkv": (),
    "use_mrope": (False,),
    "embd_layer_norm": (False,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "lm_head_bias": (False,),
    "use_cache_quantization": (False,),
    "scale_attn_weights": (True,),
    "z_loss_weight": (0, 0.0),
}
"""Keys that some models have, and the values with which they change nothing."""


def llama_mappings(names: Sequence[str]) -> list[WeightMapping]:
    """One tensor of theirs for each of ours. Raises ValueError for a weight that Llama does not have."""
    return [WeightMapping(llama_name(name), (name,)) for name in names]


def llama_name(name: str) -> str:
    """Transformers' name of one of our weights. Raises ValueError for one that it does not have."""
    return renamed(name, LLAMA_PATTERNS, "LlamaForCausalLM")


def describe_llama(config: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": GATES[config.mlp[0]],
        "attention_bias": config.biases == "all",
        "mlp_bias": config.biases == "all",
    }
    if (scaling := config.rope_scaling) is not None:
        said = {"rope_type": scaling.kind} | scaling.model_dump(exclude={"kind"}, exclude_none=True)
        if "original_context_length" in said:
            said["original_max_position_embeddings"] = said.pop("original_context_length")
        facts["rope_scaling"] = said
    return facts


def read_llama(facts: Mapping[str, Any]) -> ModelConfig:
    """The part of a config.json that all of them have."""
    if (share := _rotary_share(facts)) != 1.0:
        raise ValueError(f"partial_rotary_factor {share}: only whole heads are turned")
    return ModelConfig(**_tree(facts))


def _rotary_share(facts: Mapping[str, Any], name: str = "partial_rotary_factor", usual: float = 1.0) -> float:
    said = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    values = (said.get("partial_rotary_factor"), facts.get(name), usual)
    return float(next(value for value in values if value is not None))


def _tree(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ModelConfig that a config.json of Llama's kind says."""
    acts = {act: kind for kind, act in GATES.items()}
    if (act := facts.get("hidden_act", "silu")) not in acts:
        raise ValueError(f"hidden_act {act!r} is not one of {', '.join(acts)}")
    heads = facts["num_attention_heads"]
    if bool(facts.get("attention_bias")) != bool(facts.get("mlp_bias")):
        raise ValueError("attention_bias and mlp_bias differ; both have biases, or none")
    theta, scaling = _rope(facts)
    tree = {
        "hidden_size": facts["hidden_size"],
        "num_layers": facts["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": facts.get("num_key_value_heads") or heads,
        "intermediate_size": facts["intermediate_size"],
        "context_length": facts["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": facts.get("rms_norm_eps", 1e-6),
        "tie_embeddings": facts.get("tie_word_embeddings", False),
        "mlp": acts[act],
        "biases": "all" if facts.get("attention_bias") else "none",
    }
    head_dim = facts.get("head_dim")
    if head_dim and head_dim * heads != tree["hidden_size"]:
        tree["head_dim"] = head_dim
    return tree


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
    said.pop("partial_rotary_factor", None)  # its reader is _rotary_share
    if kind not in ("linear", "llama3", "yarn") or said.keys() & {"mscale", "mscale_all_dim"}:
        raise ValueError(f"rope_scaling of the type {kind!r} ({', '.join(said)}) is not one of linear, llama3, yarn")
    if said.pop("truncate", True) is not True:
        raise ValueError("yarn without truncation is not there")
    if kind != "linear":
        said["original_context_length"] = original or facts["max_position_embeddings"]
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
    return _changed(read_llama(facts), sliding_window=tuple(_windows(facts)), **changes)


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


PLAIN: Allowed = {
    "rope_layers": lambda config: all(config.rope_layers),
    "rope_local_theta": lambda config: config.rope_local_theta is None,
    "partial_rotary_factor": lambda config: config.partial_rotary_factor == 1.0,
    "query_pre_attn_scalar": lambda config: config.query_pre_attn_scalar in (None, config.head_size),
    "scale_embeddings": lambda config: not config.scale_embeddings,
    "norm_plus_one": lambda config: not config.norm_plus_one,
    "norm_order": lambda config: config.norm_order == "before",
    "parallel_residual": lambda config: not config.parallel_residual,
    "qk_norm_over": lambda config: not config.qk_norm or config.qk_norm_over == "head",
    "normalize_head": lambda config: not config.normalize_head,
    "rope_scaling": lambda config: config.rope_scaling is None or config.rope_scaling.kind != "longrope",
}
"""What only some of them have otherwise."""
SHARED: Allowed = PLAIN | {
    "attention": lambda config: is_uniform(config.attention, "standard"),
    "mlp": lambda config: is_uniform(config.mlp, *GATES),
    "position_embedding": lambda config: config.position_embedding == "rope",
    "norm": lambda config: config.norm == "rmsnorm",
    "norm_affine": lambda config: config.norm_affine,
}
"""What all of them have."""

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    SHARED
    | {
        "hidden_size": lambda config: config.hidden_size % config.num_heads == 0,
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases in ("none", "all"),
    },
    describe_llama,
    read_llama,
    llama_mappings,
    LLAMA_FIELDS | {"mlp_bias"},
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
    lambda config: describe_llama(config) | {"sliding_window": _one_size(config)},
    lambda facts: _changed(read_llama(facts), sliding_window=(_size_or_full(facts),)),
    llama_mappings,
    LLAMA_FIELDS | {"mlp_bias", "sliding_window"},
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
    lambda config: describe_llama(config) | _windowed(config),
    lambda facts: _qwen(facts, biases="qkv"),
    llama_mappings,
    LLAMA_FIELDS | WINDOW_FIELDS,
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
    lambda config: describe_llama(config) | _windowed(config),
    lambda facts: _qwen(facts, qk_norm=True),
    llama_mappings,
    LLAMA_FIELDS | WINDOW_FIELDS,
)


def _is_unbiased(facts: Mapping[str, Any], name: str) -> None:
    if facts.get("attention_bias"):
        raise ValueError(f"attention_bias: a {name} with biases is not there")


def _smollm3(facts: Mapping[str, Any]) -> ModelConfig:
    config = read_llama({"rope_theta": 2e6, "tie_word_embeddings": True, **facts})
    if facts.get("use_sliding_window") and facts.get("sliding_window") is not None:
        raise ValueError("use_sliding_window: a SmolLM3 with windows is not there")
    layers, every = config.num_layers, facts.get("no_rope_layer_interval", 4)
    rotates = facts.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotates) < layers or any(flag not in (0, 1) for flag in rotates):
        raise ValueError(f"no_rope_layers is {shown(rotates)}, and it must have a 0 or 1 for each of {layers} layers")
    return _changed(config, rope_layers=tuple(bool(flag) for flag in rotates[:layers]))


SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    {name: holds for name, holds in LLAMA.allowed.items() if name != "rope_layers"},
    lambda config: (
        describe_llama(config)
        | {
            "no_rope_layers": [int(config.rotates(layer)) for layer in range(config.num_layers)],
            "use_sliding_window": False,
            "pad_token_id": None,
        }
    ),
    _smollm3,
    llama_mappings,
    LLAMA_FIELDS | WINDOW_FIELDS | {"mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
)

# --- norms after, and on both sides --------------------------------------------------------------------------------

OLMO2_PATTERNS = (
    (r"blocks\.(\d+)\.attention_post_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_post_norm\.weight", r"model.layers.\1.post_feedforward_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.pre_feedforward_layernorm.weight"),
    *LLAMA_PATTERNS,
)
"""Names of norms after attention and MLP, for OLMo 2 and Gemma 3. OLMo 2 has no norm before them."""


def olmo2_mappings(names: Sequence[str]) -> list[WeightMapping]:
    """One tensor of theirs for each of ours. Raises ValueError for a weight that OLMo 2 and Gemma 3 do not have."""
    return [
        WeightMapping(renamed(name, OLMO2_PATTERNS, "Olmo2ForCausalLM or Gemma3ForCausalLM"), (name,)) for name in names
    ]


def _olmo2(facts: Mapping[str, Any]) -> ModelConfig:
    _is_unbiased(facts, "Olmo2ForCausalLM")
    config = read_llama({"rms_norm_eps": 1e-5, **facts})
    return _changed(config, norm_order="after", qk_norm=True, qk_norm_over="width")


OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    "olmo2",
    SHARED
    | {
        "hidden_size": lambda config: config.head_size * config.num_heads == config.hidden_size,
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "qk_norm": lambda config: config.qk_norm,
        "qk_norm_over": lambda config: config.qk_norm_over == "width",
        "norm_order": lambda config: config.norm_order == "after",
        "biases": lambda config: config.biases == "none",
    },
    describe_llama,
    _olmo2,
    olmo2_mappings,
    LLAMA_FIELDS,
)


def _describe_gemma3(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(config)
    windows = _windowed(config)
    scaling = facts.pop("rope_scaling", None) or {"rope_type": "default"}
    local = config.rope_local_theta or config.rope_theta
    return facts | {
        "hidden_activation": facts.pop("hidden_act"),
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_size),
        "sliding_window": windows["sliding_window"] or config.context_length,
        "layer_types": windows["layer_types"],
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": facts.pop("rope_theta")},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


GEMMA3_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, "rope_theta": 1e6}


def _gemma3(facts: Mapping[str, Any]) -> ModelConfig:
    _is_unbiased(facts, "Gemma3ForCausalLM")
    facts = GEMMA3_DEFAULTS | {name: value for name, value in facts.items() if value is not None}
    rope = facts.get("rope_parameters") or {}
    local = dict(rope.get("sliding_attention") or {})
    if (kind := local.get("rope_type", "default")) != "default":
        raise ValueError(f"rope_parameters of sliding_attention have the rope_type {kind!r}, not 'default'")
    every = facts.get("sliding_window_pattern", 6)
    layers = facts["num_hidden_layers"]
    kinds = facts.get("layer_types") or [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    flat = facts | {
        "hidden_act": facts.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": rope.get("full_attention"),
        "use_sliding_window": True,
        "layer_types": kinds,
    }
    return _changed(
        read_llama(flat),
        sliding_window=tuple(_windows(flat)),
        rope_local_theta=local.get("rope_theta") or facts.get("rope_local_base_freq") or 1e4,
        query_pre_attn_scalar=facts.get("query_pre_attn_scalar", 256),
        norm_order="both",
        norm_plus_one=True,
        scale_embeddings=True,
        qk_norm=True,
    )


GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    SHARED
    | {
        "hidden_size": lambda config: config.hidden_size % config.num_heads == 0,
        "sliding_window": _one_window,
        "rope_local_theta": lambda config: True,
        "query_pre_attn_scalar": lambda config: float(config.query_pre_attn_scalar or 1).is_integer(),
        "scale_embeddings": lambda config: config.scale_embeddings,
        "norm_plus_one": lambda config: config.norm_plus_one,
        "norm_order": lambda config: config.norm_order == "both",
        "qk_norm": lambda config: config.qk_norm,
        "biases": lambda config: config.biases == "none",
        "rope_scaling": lambda config: (
            SHARED["rope_scaling"](config)
            and (config.rope_scaling is None or config.rope_local_theta is not None or _has_no_window(config))
        ),
    },
    _describe_gemma3,
    _gemma3,
    olmo2_mappings,
    (LLAMA_FIELDS | WINDOW_FIELDS | {"hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq"})
    | {"sliding_window_pattern", "_sliding_window_pattern"},
)


def _has_no_window(config: ModelConfig) -> bool:
    return set(config.sliding_window) == {"full"}


# --- fused matrices ------------------------------------------------------------------------------------------------


def phi3_mappings(names: Sequence[str]) -> list[WeightMapping]:
    """Their tensors. Raises ValueError for a weight that Phi-3 does not have."""
    return _fused(
        names,
        {"self_attn.q_proj": ("self_attn.qkv_proj", "qkv"), "mlp.gate_proj": ("mlp.gate_up_proj", ("gate", "up"))},
    )


def _fused(names: Sequence[str], groups: Mapping[str, tuple[str, Sequence[str]]]) -> list[WeightMapping]:
    """Llama's tensors with some made one: Llama's name of the first -> their name, and the last parts of ours."""
    mappings, taken = [], set[str]()
    for piece in llama_mappings(names):
        (name,) = piece.ours
        if name in taken:
            continue
        theirs = piece.theirs
        ours: tuple[str, ...] = (name,)
        for first, (fused, parts) in groups.items():
            if theirs.endswith(f"{first}.weight"):
                path = name.split(".")
                ours = tuple(".".join((*path[:-2], part, path[-1])) for part in parts)
                theirs = theirs.replace(first, fused)
        taken.update(ours)
        mappings.append(WeightMapping(theirs, ours))
    return mappings


def _describe_phi3(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(config)
    for name in ("attention_bias", "mlp_bias", "head_dim"):
        del facts[name]
    facts |= {"sliding_window": _one_size(config), "partial_rotary_factor": config.partial_rotary_factor}
    if isinstance(scaling := config.rope_scaling, LongRopeScaling):
        original = scaling.original_context_length
        said: dict[str, Any] = {
            "type": "longrope",
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
        if scaling.attention_factor is not None:
            said["attention_factor"] = scaling.attention_factor
        facts["rope_scaling"] = said
        facts["max_position_embeddings"] = round(scaling.factor * original)
        facts["original_max_position_embeddings"] = original
    return facts


def _phi3(facts: Mapping[str, Any]) -> ModelConfig:
    """Of a longrope, only the contexts up to the first one: longer ones have other frequencies."""
    said = dict(facts.get("rope_parameters") or facts.get("rope_scaling") or {})
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in ("default", "longrope", "su", "yarn"):  # transformers takes the last two for longrope
        raise ValueError(f"rope_scaling of the type {kind!r} is not one of longrope")
    plain = dict(facts) | {"rope_parameters": {"rope_theta": said.get("rope_theta")}, "rope_scaling": None}
    tree = _tree({"rms_norm_eps": 1e-5} | plain)
    tree |= {"sliding_window": (_size_or_full(facts),), "partial_rotary_factor": _rotary_share(facts)}
    if kind != "default":
        longest = facts["max_position_embeddings"]
        original = facts.get("original_max_position_embeddings") or said["original_max_position_embeddings"]
        tree["context_length"] = min(longest, original)
        tree["rope_scaling"] = {
            "kind": "longrope",
            "factor": said.get("factor") or max(1.0, longest / original),
            "original_context_length": original,
            "short_factor": said["short_factor"],
            "long_factor": said["long_factor"],
            "attention_factor": said.get("attention_factor"),
        }
    return ModelConfig(**tree)


PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    SHARED
    | {
        "hidden_size": lambda config: config.head_size * config.num_heads == config.hidden_size,
        "sliding_window": lambda config: len(set(config.sliding_window)) == 1,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "none",
        "partial_rotary_factor": lambda config: True,
        "rope_scaling": lambda config: (
            config.rope_scaling is None
            or (
                isinstance(config.rope_scaling, LongRopeScaling)
                and config.context_length == config.rope_scaling.original_context_length
                and float(config.rope_scaling.factor * config.context_length).is_integer()
            )
        ),
    },
    _describe_phi3,
    _phi3,
    phi3_mappings,
    LLAMA_FIELDS | {"mlp_bias", "sliding_window", "partial_rotary_factor", "original_max_position_embeddings"},
)


NEOX_PATTERNS = (
    (r"embed\.weight", "gpt_neox.embed_in.weight"),
    (r"blocks\.(\d+)\.attention\.q\.(weight|bias)", r"gpt_neox.layers.\1.attention.query_key_value.\2"),
    (r"blocks\.(\d+)\.attention\.out\.(weight|bias)", r"gpt_neox.layers.\1.attention.dense.\2"),
    (r"blocks\.(\d+)\.mlp\.up\.(weight|bias)", r"gpt_neox.layers.\1.mlp.dense_h_to_4h.\2"),
    (r"blocks\.(\d+)\.mlp\.down\.(weight|bias)", r"gpt_neox.layers.\1.mlp.dense_4h_to_h.\2"),
    (r"blocks\.(\d+)\.attention_norm\.(weight|bias)", r"gpt_neox.layers.\1.input_layernorm.\2"),
    (r"blocks\.(\d+)\.mlp_norm\.(weight|bias)", r"gpt_neox.layers.\1.post_attention_layernorm.\2"),
    (r"norm\.(weight|bias)", r"gpt_neox.final_layer_norm.\1"),
    (r"head\.weight", "embed_out.weight"),
)
"""Our name of a weight, and transformers' name of it; queries, keys and values alternate by head."""
NEOX_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}


def neox_mappings(num_heads: int) -> Callable[[Sequence[str]], list[WeightMapping]]:
    """Their tensors, for a number of heads. Raises ValueError for a weight that GPT-NeoX does not have."""

    def mappings(names: Sequence[str]) -> list[WeightMapping]:
        pieces = []
        for name in names:
            query = re.fullmatch(r"(blocks\.\d+\.attention\.)([qkv])(\.\w+)", name)
            if query and query[2] != "q":
                continue
            ours = tuple(f"{query[1]}{which}{query[3]}" for which in "qkv") if query else (name,)
            theirs = renamed(name, NEOX_PATTERNS, "GPTNeoXForCausalLM")
            pieces.append(WeightMapping(theirs, ours, interleaved=num_heads if query else 0))
        return pieces

    return mappings


def _describe_neox(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(_changed(config, mlp=("swiglu",)))
    share = config.partial_rotary_factor
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    return {name: facts[name] for name in (*kept, "tie_word_embeddings")} | {
        "hidden_act": NEOX_ACTIVATIONS[config.mlp[0]],
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "rotary_pct": share,
        "rotary_emb_base": config.rope_theta,
        "rope_parameters": (facts.get("rope_scaling") or {"rope_type": "default"})
        | {"rope_theta": config.rope_theta, "partial_rotary_factor": share},
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _neox(facts: Mapping[str, Any]) -> ModelConfig:
    kinds = {act: kind for kind, act in NEOX_ACTIVATIONS.items()}
    kinds |= {"gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    if (act := facts.get("hidden_act", "gelu")) not in kinds:
        raise ValueError(f"hidden_act {act!r} is not one of {', '.join(kinds)}")
    if facts.get("attention_bias", True) is not True:
        raise ValueError("attention_bias: a GPTNeoXForCausalLM without biases is not there")
    theta = facts.get("rotary_emb_base") or facts.get("rope_theta")
    left = ("hidden_act", "attention_bias", "rope_theta")
    flat = {name: value for name, value in facts.items() if name not in left}
    tree = _tree(flat | ({} if theta is None else {"rope_theta": theta}))
    return ModelConfig(
        **tree
        | {
            "mlp": kinds[act],
            "norm": "layernorm",
            "norm_eps": facts.get("layer_norm_eps", 1e-5),
            "biases": "all",
            "parallel_residual": facts.get("use_parallel_residual", True),
            "partial_rotary_factor": _rotary_share(facts, "rotary_pct", 0.25),
        }
    )


NEOX = Architecture(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    SHARED
    | {
        "mlp": lambda config: is_uniform(config.mlp, *NEOX_ACTIVATIONS),
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "norm": lambda config: config.norm == "layernorm",
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "all",
        "num_kv_heads": lambda config: config.num_kv_heads == config.num_heads,
        "head_dim": lambda config: config.head_size * config.num_heads == config.hidden_size,
        "partial_rotary_factor": lambda config: True,
        "parallel_residual": lambda config: True,
    },
    _describe_neox,
    _neox,
    neox_mappings(1),
    (LLAMA_FIELDS | {"layer_norm_eps", "use_parallel_residual", "rotary_pct", "rotary_emb_base"}),
    neox_mappings,
)


GPT2_PATTERNS = (
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

GPT2_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}
CONV = re.compile(r"blocks\.\d+\.(attention|mlp)\.\w+\.weight")
"""What transformers keeps as Conv1D: inputs × outputs."""


def gpt2_mappings(names: Sequence[str]) -> list[WeightMapping]:
    """Their tensors. Raises ValueError for a weight that GPT-2 does not have."""
    mappings = []
    for name in names:
        if re.fullmatch(r"blocks\.\d+\.attention\.[kv]\.(weight|bias)", name):
            continue
        query = re.fullmatch(r"(blocks\.\d+\.attention\.)q(\.\w+)", name)
        ours = tuple(f"{query[1]}{which}{query[2]}" for which in "qkv") if query else (name,)
        mappings.append(WeightMapping(gpt2_name(name), ours, transposed=bool(CONV.fullmatch(name))))
    return mappings


def gpt2_name(name: str) -> str:
    """Transformers' name of one of our weights. Raises ValueError for one that it does not have."""
    return renamed(name, GPT2_PATTERNS, "GPT2LMHeadModel")


def describe_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "activation_function": GPT2_ACTIVATIONS[config.mlp[0]],
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def read_gpt2(facts: Mapping[str, Any]) -> ModelConfig:
    activations = {act: kind for kind, act in GPT2_ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    if (act := facts.get("activation_function", "gelu_new")) not in activations:
        raise ValueError(f"activation_function {act!r} is not one of {', '.join(activations)}")
    for name, usual in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        if facts.get(name, usual) != usual:
            raise ValueError(f"{name} = {facts[name]!r} is not there")
    return ModelConfig(
        hidden_size=facts["n_embd"],
        num_layers=facts["n_layer"],
        num_heads=facts["n_head"],
        num_kv_heads=facts["n_head"],
        intermediate_size=facts.get("n_inner") or 4 * facts["n_embd"],
        context_length=facts.get("n_positions") or facts["n_ctx"],
        norm_eps=facts.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=facts.get("tie_word_embeddings", True),
        mlp=(activations[act],),
        position_embedding="learned",
        norm="layernorm",
        biases="all",
    )


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    PLAIN
    | {
        "attention": lambda config: is_uniform(config.attention, "standard"),
        "mlp": lambda config: is_uniform(config.mlp, *GPT2_ACTIVATIONS),
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "position_embedding": lambda config: config.position_embedding == "learned",
        "norm": lambda config: config.norm == "layernorm",
        "norm_affine": lambda config: config.norm_affine,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "all",
        "num_kv_heads": lambda config: config.num_kv_heads == config.num_heads,
        "head_dim": lambda config: config.head_size * config.num_heads == config.hidden_size,
    },
    describe_gpt2,
    read_gpt2,
    gpt2_mappings,
    frozenset(
        {"n_embd", "n_layer", "n_head", "n_inner", "n_positions", "n_ctx", "activation_function", "layer_norm_epsilon"}
        | {"tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"}
    ),
)


FIRST_VOCABULARY = 64_000


def baichuan2_mappings(names: Sequence[str]) -> list[WeightMapping]:
    """Their tensors. Raises ValueError for a weight that Baichuan does not have."""
    return _fused(names, {"self_attn.q_proj": ("self_attn.W_pack", "qkv")})


def read_baichuan2(facts: Mapping[str, Any], *, normalized: bool = True) -> ModelConfig:
    """Tells 13B from 7B: 13B gives the length that it was trained at, but no number of positions."""
    positions = "rope" if "max_position_embeddings" in facts else "alibi"
    context = facts["max_position_embeddings"] if positions == "rope" else facts["model_max_length"]
    known = read_llama(dict(facts) | {"max_position_embeddings": context})
    return _changed(known, position_embedding=positions, normalize_head=normalized and not known.tie_embeddings)


BAICHUAN2 = Architecture(
    "BaichuanForCausalLM",
    "baichuan",
    {},
    describe_llama,
    read_baichuan2,
    baichuan2_mappings,
    LLAMA_FIELDS | {"mlp_bias", "model_max_length"},
)
BAICHUAN1 = replace(BAICHUAN2, reader=partial(read_baichuan2, normalized=False))


MAX_SHOWN = 100
WRITTEN = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, SMOLLM3, OLMO2, GEMMA3, PHI3, NEOX)
"""What transformers loads as it is, those first that most programs know."""


def _ours(names: Sequence[str]) -> list[WeightMapping]:
    return [WeightMapping(name, (name,)) for name in names]


OWN = Architecture(
    "BloomeryForCausalLM",
    "bloomery",
    {},
    lambda config: {"bloomery": plain(config)},
    lambda facts: ModelConfig.model_validate(facts["bloomery"]),
    _ours,
)
READ = {one.name: one for one in (*WRITTEN, BAICHUAN2, OWN)} | {"GPT2Model": GPT2, "BaiChuanForCausalLM": BAICHUAN1}


def family(config: ModelConfig) -> Architecture | None:
    """The architecture of transformers that a model is exactly, or None."""
    return next((one.bound(config.num_heads) for one in WRITTEN if not one.obstacles(config)), None)


def architecture(config: ModelConfig) -> Architecture:
    """What a model is saved as."""
    return family(config) or OWN


def of_file(facts: Mapping[str, Any]) -> Architecture:
    """
    The architecture that a config.json names. Raises ValueError for one that is not known, for none, and where
    `model_type` is of another.
    """
    names, kind = facts.get("architectures"), facts.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        meant = next((f", as in {[one.name]}" for one in READ.values() if one.model_type == kind), "")
        raise ValueError(f"architectures is {shown(names)}, and it must name one of {', '.join(READ)}{meant}")
    known = next((READ[name] for name in names if name in READ), None)
    if known is None:
        raise ValueError(f"its architecture is {shown(', '.join(names))}; known are {', '.join(READ)}")
    if kind not in (None, known.model_type):
        raise ValueError(f"architectures names {known.name}, and model_type is {shown(kind)}, not {known.model_type!r}")
    if known is BAICHUAN2 and facts.get("vocab_size") == FIRST_VOCABULARY:
        return BAICHUAN1
    return known if known.bind is None else known.bound(facts["num_attention_heads"])


def shown(value: Any) -> str:
    """A value of a config.json, for a message."""
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def exported(config: ModelConfig) -> ModelConfig:
    """
    The same computation where another architecture can say it: norms without weights have weights of 1, and a head
    that is normalized has rows of length 1.
    """
    return _changed(config, norm_affine=True, normalize_head=False)


def reasons(config: ModelConfig) -> list[str]:
    """Which choices keep a model from being what it is closest to of transformers' models; none if it is one."""
    nearest = min(WRITTEN, key=lambda candidate: len(candidate.obstacles(exported(config))))
    return [
        f"hidden_size={config.hidden_size} is no multiple of num_heads={config.num_heads}, as {nearest.name} needs it"
        if field == "hidden_size"
        else f"{field}={_shown(config, field)} is nothing that {nearest.name} has"
        for field in nearest.obstacles(exported(config))
    ]


def _shown(config: ModelConfig, field: str) -> str:
    value = getattr(config, field)
    return repr(
        value[0] if isinstance(value, tuple) and len(value) == 1 else list(value) if isinstance(value, tuple) else value
    )
