"""
An architecture of transformers, how its tensors are made of ours, and those closest to Llama.

A mapping covers one tensor of theirs. It corresponds to one tensor of ours, or to several of ours: stacked one below
the other, or alternating head by head. Llama, Mistral, Qwen2 and Qwen3 differ in biases, windows and norms of queries
and keys only. Other architectures (architectures.py) read and write what they share with Llama by the functions here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.model.config import ModelConfig

import torch
from torch import Tensor

CYCLES = ("attention", "sliding_window", "mlp", "rope_layers")
"""Fields of a ModelConfig that layers take in turns; of a cycle that is longer than the model, its end says nothing."""
TABLES = ("embed.weight", "head.weight")
"""Weights with a row for each token ID."""

BUFFERS = re.compile(
    r"(.*\.)?rotary_emb\.inv_freq"
    r"|(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias"
)
"""Tensors in some files that are no weights but follow from the configuration: frequencies, causal masks."""


MAX_SHOWN = 100


def shown(value: Any) -> str:
    """A value of a config.json, for a message."""
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for keys that a config.json lacks, where it differs from Llama."""

    def understand(self, facts: Mapping[str, Any]) -> ModelConfig:
        """The model of a config.json. Raises ValueError for what ours cannot be, KeyError for what it lacks."""
        for name, value in facts.items():
            if value is None or not self.fields or name in self.fields or IGNORED.fullmatch(name):
                continue
            if name not in NEUTRAL:
                raise ValueError(
                    f"{name} = {shown(value)} is not known for {self.name}; remove the field if it changes no logits"
                )
            if value not in NEUTRAL[name]:
                raise ValueError(f"{name} = {shown(value)} changes what {self.name} computes and is not supported")
        return self.reader({**self.defaults, **facts})

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
BIASES = {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"}
"""`biases` of ours, by attention_bias and mlp_bias."""

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
    r"|auto_map|\w*dropout\w*|\w*_pdrop|_?attn_implementation(_autoset)?|_?(use_)?flash_att\w+|_?output_attentions"
    r"|output_(hidden_states|scores|past)|return_dict\w*|use_return_dict|torchscript|gradient_checkpointing"
    r"|use_bfloat16|task_specific_params|id2label|label2id|_?num_labels|problem_type|summary_\w+|n_special"
    r"|predict_special_tokens|reorder_and_upcast_attn|unsloth_\w+|_experts_implementation|tokenizer_class"
    r"|finetuning_task|prefix|license|chunk_size_feed_forward|model_max_length|n_ctx|_from_model_config"
    r"|(max|min)_length|max_sequence_length|do_sample|temperature|top_[kp]|typical_p|num_beams|\w+_penalty"
    r"|no_repeat_ngram_size|neftune_noise_alpha|_commit_hash|base_model_name_or_path"
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
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
}
"""Keys that some models have, and the values with which they change nothing."""


def mappings(
    names: Sequence[str],
    patterns: Sequence[tuple[str, str]] = LLAMA_PATTERNS,
    architecture: str = "LlamaForCausalLM",
    groups: Sequence[Sequence[str]] = (),
    *,
    heads: int = 0,
    transposed: str = "",
) -> list[WeightMapping]:
    """
    Tensors of an architecture, made of our weights of these names. Of a group, such as q, k and v, the first weight is
    renamed, and the others lie below it, or alternate with it by head. Raises ValueError for a weight that it lacks.
    """
    tensors = []
    for name in names:
        *path, leaf, kind = name.split(".")
        group = next((group for group in groups if leaf in group), (leaf,))
        if leaf == group[0]:
            ours = tuple(".".join((*path, each, kind)) for each in group)
            turned, interleaved = bool(re.fullmatch(transposed, name)), heads if len(group) > 1 else 0
            tensors.append(WeightMapping(renamed(name, patterns, architecture), ours, turned, interleaved))
    return tensors


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
        "attention_bias": config.biased("out"),
        "mlp_bias": config.biased("mlp"),
    }
    if (scaling := config.rope_scaling) is not None:
        said = {"rope_type": scaling.kind} | scaling.model_dump(exclude={"kind"}, exclude_none=True)
        if "original_context_length" in said:
            said["original_max_position_embeddings"] = said.pop("original_context_length")
        facts["rope_scaling"] = said
    return facts


def read_llama(facts: Mapping[str, Any]) -> ModelConfig:
    """The part of a config.json that all of them have."""
    if (share := rotary_share(facts)) != 1.0:
        raise ValueError(f"partial_rotary_factor {share} is not supported: it must be 1")
    return ModelConfig(**llama_tree(facts))


def rotary_share(facts: Mapping[str, Any], name: str = "partial_rotary_factor", usual: float = 1.0) -> float:
    said = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    values = (said.get("partial_rotary_factor"), facts.get(name), usual)
    return float(next(value for value in values if value is not None))


def llama_tree(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ModelConfig that a config.json of Llama's kind says."""
    acts = {act: kind for kind, act in GATES.items()}
    if (act := facts.get("hidden_act", "silu")) not in acts:
        raise ValueError(f"hidden_act {act!r} is not one of {', '.join(acts)}")
    heads = facts["num_attention_heads"]
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
        "biases": BIASES[bool(facts.get("attention_bias")), bool(facts.get("mlp_bias"))],
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
    said.pop("partial_rotary_factor", None)  # its reader is rotary_share
    if kind == "dynamic" and said.keys() <= {"factor"}:
        return theta, None  # θ changes only beyond max_position_embeddings, which is the context here
    if kind not in ("linear", "llama3", "yarn"):
        known = "linear, llama3, yarn, dynamic with a factor alone"
        raise ValueError(f"rope_scaling of the type {kind!r} ({', '.join(said)}) is not one of {known}")
    scales = [said.pop(name, None) for name in ("mscale", "mscale_all_dim")] if kind == "yarn" else []
    if all(scales) and scales and said.get("attention_factor") is None:  # as DeepSeek says the attention factor
        above, below = (0.1 * scale * math.log(max(1.0, said["factor"])) + 1 for scale in scales)
        said["attention_factor"] = above / below
    if said.pop("truncate", True) is not True:
        raise ValueError("yarn without truncation is not supported")
    if kind != "linear":
        said["original_context_length"] = original or facts["max_position_embeddings"]
    return theta, {"kind": kind, **said}


# --- the kin -------------------------------------------------------------------------------------------------------


def describe_windows(config: ModelConfig) -> dict[str, Any]:
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


def windows(facts: Mapping[str, Any]) -> list[Any]:
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
        raise ValueError("attention_bias: a Qwen with a bias on the attention output is not supported")
    return changed(read_llama(facts), sliding_window=tuple(windows(facts)), **changes)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A ModelConfig with other values, checked."""
    return ModelConfig(**(config.model_dump() | changes))


def has_one_window(config: ModelConfig) -> bool:
    """Whether all layers that do not see everything see equally much."""
    return len({size for size in config.sliding_window if size != "full"}) <= 1


def size_or_full(facts: Mapping[str, Any]) -> Any:
    """How much every layer sees, as config.json says it: null stands for everything, and 0 is checked as a size."""
    size = facts.get("sliding_window")
    return "full" if size is None else size


def one_size(config: ModelConfig) -> int | None:
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
        "biases": lambda config: config.biases != "qkv",
    },
    describe_llama,
    read_llama,
    mappings,
    LLAMA_FIELDS | {"mlp_bias"},
    defaults={"max_position_embeddings": 2048},
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
    lambda config: describe_llama(config) | {"sliding_window": one_size(config)},
    lambda facts: changed(read_llama(facts), sliding_window=(size_or_full(facts),)),
    mappings,
    LLAMA_FIELDS | {"mlp_bias", "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
)
QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32_768}
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    SHARED
    | {
        "sliding_window": has_one_window,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "qkv",
    },
    lambda config: describe_llama(config) | describe_windows(config),
    lambda facts: _qwen(facts, biases="qkv"),
    mappings,
    LLAMA_FIELDS | WINDOW_FIELDS,
    defaults=QWEN_DEFAULTS,
)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    SHARED
    | {
        "sliding_window": has_one_window,
        "qk_norm": lambda config: config.qk_norm,
        "biases": lambda config: config.biases == "none",
    },
    lambda config: describe_llama(config) | describe_windows(config),
    lambda facts: _qwen(facts, qk_norm=True),
    mappings,
    LLAMA_FIELDS | WINDOW_FIELDS,
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
)
