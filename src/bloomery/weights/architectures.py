"""
Map weights and configs to transformers' architectures: Llama, Mistral, Qwen, GPT-2, Baichuan2.

An architecture has a name, a configuration, and a position for each of our weights in its files. A mapping covers
one tensor of theirs. It corresponds to one tensor of ours, or to several of ours stacked one below the other.

    Llama and its kin    LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
    GPT-2                GPT2LMHeadModel: queries, keys and values in one matrix, and matrices that are written
                         inputs × outputs
    Baichuan2            read and not written: 7B is a Llama with rotary positions, 13B has ALiBi

In Baichuan2, queries, keys and values are one matrix (W_pack). The head of the second generation is used with rows
of length 1 (NormHead). Its rows are normalized once, as they are read, so that no other code has to know. The first
generation, with a vocabulary of 64,000, has no NormHead.

This module also finds which transformers architecture a model is. If a model is none, it says why not. Such a model
is saved in the same kind of folder under a name of our own, which transformers refuses plainly.

All architectures are in one file because finding the architecture of a model compares them all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.config import plain
from bloomery.model.config import ModelConfig

import torch
import torch.nn.functional as F
from torch import Tensor

CYCLES = ("attention", "sliding_window", "mlp")
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
    normalized: bool = False
    """Theirs is used with rows of length 1, and ours has them so."""


@dataclass(frozen=True)
class Architecture:
    name: str
    """As transformers calls it in config.json."""
    model_type: str
    allowed: Mapping[str, Callable[[ModelConfig], bool]]
    """Field of a ModelConfig -> whether it is such as the architecture has it."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """The entries of config.json for a model, except architecture, vocabulary and special tokens."""
    understand: Callable[[Mapping[str, Any]], ModelConfig]
    """The model of a config.json. Raises ValueError for what ours cannot be, KeyError for what it lacks."""
    pieces: Callable[[Sequence[str]], list[WeightMapping]]
    """The tensors of a model whose weights, without a tied head, have these names of ours."""

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
    parts = [weights[name] for name in piece.ours]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if piece.transposed else whole


def spread(piece: WeightMapping, tensor: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Copy their tensor into ours. Raises ValueError for another shape."""
    parts = [weights[name] for name in piece.ours]
    if piece.transposed and tensor.dim() == 2:
        tensor = tensor.t()
    expected = (sum(len(part) for part in parts), *parts[0].shape[1:])
    if tensor.shape != expected:
        turned = tuple(reversed(expected)) if piece.transposed else expected
        raise ValueError(f"{piece.theirs} has shape {tuple(tensor.shape)}, not {turned}")
    if piece.normalized:
        tensor = F.normalize(tensor.float())
    with torch.no_grad():
        for target, some in zip(parts, torch.split(tensor, [len(part) for part in parts]), strict=True):
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

GATES = {"swiglu": "silu", "geglu": "gelu"}
"""Our feed-forward, and what transformers calls the function of its gate."""

Allowed = dict[str, Callable[[ModelConfig], bool]]


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


SHARED: Allowed = {
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
    {
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
)


FIRST_VOCABULARY = 64_000


def baichuan2_mappings(names: Sequence[str], *, normalized: bool = True) -> list[WeightMapping]:
    mappings = []
    for piece in llama_mappings(names):
        if piece.theirs.endswith("self_attn.q_proj.weight"):
            ours = tuple(piece.ours[0].replace(".q.", f".{which}.") for which in "qkv")
            mappings.append(WeightMapping(piece.theirs.replace("q_proj", "W_pack"), ours))
        elif piece.theirs == "lm_head.weight":
            mappings.append(replace(piece, normalized=normalized))
        elif not piece.theirs.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight")):
            mappings.append(piece)
    return mappings


def read_baichuan2(facts: Mapping[str, Any]) -> ModelConfig:
    """Tells 13B from 7B: 13B gives the length that it was trained at, but no number of positions."""
    positions = "rope" if "max_position_embeddings" in facts else "alibi"
    context = facts["max_position_embeddings"] if positions == "rope" else facts["model_max_length"]
    known = read_llama(dict(facts) | {"max_position_embeddings": context})
    return ModelConfig(**(known.model_dump() | {"position_embedding": positions}))


BAICHUAN2 = Architecture("BaichuanForCausalLM", "baichuan", {}, describe_llama, read_baichuan2, baichuan2_mappings)
BAICHUAN1 = replace(BAICHUAN2, pieces=lambda names: baichuan2_mappings(names, normalized=False))


MAX_SHOWN = 100
WRITTEN = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
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
    return next((one for one in WRITTEN if not one.obstacles(config)), None)


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
    return BAICHUAN1 if known is BAICHUAN2 and facts.get("vocab_size") == FIRST_VOCABULARY else known


def shown(value: Any) -> str:
    """A value of a config.json, for a message."""
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def exported(config: ModelConfig) -> ModelConfig:
    """The same computation where another architecture can say it: norms without weights have weights of 1."""
    return config if config.norm_affine else ModelConfig(**(config.model_dump() | {"norm_affine": True}))


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
