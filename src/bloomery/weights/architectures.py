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
    Baichuan2            BaichuanForCausalLM: 7B is a Llama with rotary positions, 13B has ALiBi

In Baichuan2, queries, keys and values are one matrix (W_pack). The head of the second generation is used with rows
of length 1 (NormHead). The head stays as it is while it trains; export normalizes its rows. The first generation,
with a vocabulary of 64,000, has no NormHead.

A config.json may have fields that no reader here knows. A field that is not null, and not known to leave the
computation as it is (IGNORED), is refused by name.

This module also finds which transformers architecture a model is. If a model is none, it says why not. Such a model
is saved in the same kind of folder under a name of our own, which transformers refuses plainly.

To add a family:

1. Write an `Architecture`: which models it allows, how its config.json is written and read, and its tensor names.
2. Put it into WRITTEN, behind families that more programs know. Put a family that is only read into READ.
3. Add a shape to FAMILIES in tests/weights/test_architectures.py. Transformers has to compute and learn the same.
4. Add it to the list above, to "Families" in docs/do/finetune-a-model.md, which a test compares with READ, and to
   "Which architecture a model becomes" in docs/understand/model-folders.md.
5. GGUF is optional: a row in LAYOUTS of gguf_layouts.py, and a case in CASES of tests/weights/test_gguf.py.

All architectures are in one file because finding the architecture of a model compares them all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bloomery.core.config import plain
from bloomery.model.config import LongRopeScaling, ModelConfig
from bloomery.weights.llama import BUFFERS as BUFFERS
from bloomery.weights.llama import (
    LLAMA,
    LLAMA_FIELDS,
    LLAMA_PATTERNS,
    MISTRAL,
    PLAIN,
    QWEN2,
    QWEN3,
    SHARED,
    WINDOW_FIELDS,
    changed,
    describe_llama,
    describe_windows,
    has_one_window,
    is_uniform,
    llama_tree,
    mappings,
    one_size,
    read_llama,
    rotary_share,
    size_or_full,
    windows,
)
from bloomery.weights.llama import TABLES as TABLES
from bloomery.weights.llama import Architecture as Architecture
from bloomery.weights.llama import WeightMapping as WeightMapping
from bloomery.weights.llama import gathered as gathered
from bloomery.weights.llama import joined as joined
from bloomery.weights.llama import parted as parted
from bloomery.weights.llama import shown as shown
from bloomery.weights.llama import spread as spread


def _is_unbiased(facts: Mapping[str, Any], name: str) -> None:
    if facts.get("attention_bias"):
        raise ValueError(f"attention_bias: a {name} with biases is not supported")


def _smollm3(facts: Mapping[str, Any]) -> ModelConfig:
    config = read_llama(facts)
    if facts.get("use_sliding_window") and facts.get("sliding_window") is not None:
        raise ValueError("use_sliding_window: a SmolLM3 with windows is not supported")
    layers, every = config.num_layers, facts.get("no_rope_layer_interval", 4)
    rotates = facts.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotates) < layers or any(flag not in (0, 1) for flag in rotates):
        raise ValueError(f"no_rope_layers is {shown(rotates)}; it must have a 0 or 1 for each of {layers} layers")
    return changed(config, rope_layers=tuple(bool(flag) for flag in rotates[:layers]))


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
    mappings,
    LLAMA_FIELDS | WINDOW_FIELDS | {"mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4}
    | {"max_position_embeddings": 32_768},
)

# --- norms after, and on both sides --------------------------------------------------------------------------------

OLMO2_PATTERNS = (
    (r"blocks\.(\d+)\.attention_post_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_post_norm\.weight", r"model.layers.\1.post_feedforward_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.pre_feedforward_layernorm.weight"),
    *LLAMA_PATTERNS,
)
"""Names of norms after attention and MLP, for OLMo 2 and Gemma 3. OLMo 2 has no norm before them."""


olmo2_mappings = partial(mappings, patterns=OLMO2_PATTERNS, architecture="Olmo2ForCausalLM or Gemma3ForCausalLM")


def _olmo2(facts: Mapping[str, Any]) -> ModelConfig:
    _is_unbiased(facts, "Olmo2ForCausalLM")
    return changed(read_llama(facts), norm_order="after", qk_norm=True, qk_norm_over="width")


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
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)


def _describe_gemma3(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(config)
    layers = describe_windows(config)
    scaling = facts.pop("rope_scaling", None) or {"rope_type": "default"}
    local = config.rope_local_theta or config.rope_theta
    return facts | {
        "hidden_activation": facts.pop("hidden_act"),
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_size),
        "sliding_window": layers["sliding_window"] or config.context_length,
        "layer_types": layers["layer_types"],
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": facts.pop("rope_theta")},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


GEMMA3_DEFAULTS: dict[str, Any] = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True}
GEMMA3_DEFAULTS |= {"sliding_window": 4096, "rope_theta": 1e6, "max_position_embeddings": 131_072}


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
    return changed(
        read_llama(flat),
        sliding_window=tuple(windows(flat)),
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
        "sliding_window": has_one_window,
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


QKV = ("q", "k", "v")
PHI3_PATTERNS = (
    (r"blocks\.(\d+)\.attention\.q\.(weight)", r"model.layers.\1.self_attn.qkv_proj.\2"),
    (r"blocks\.(\d+)\.mlp\.gate\.(weight)", r"model.layers.\1.mlp.gate_up_proj.\2"),
    *LLAMA_PATTERNS,
)


def _describe_phi3(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(config)
    for name in ("attention_bias", "mlp_bias", "head_dim"):
        del facts[name]
    facts |= {"sliding_window": one_size(config), "partial_rotary_factor": config.partial_rotary_factor}
    facts["pad_token_id"] = None  # transformers takes 32000 for it, which a small vocabulary does not have
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
    tree = llama_tree(plain)
    tree |= {"sliding_window": (size_or_full(facts),), "partial_rotary_factor": rotary_share(facts)}
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
    partial(mappings, patterns=PHI3_PATTERNS, architecture="Phi3ForCausalLM", groups=(QKV, ("gate", "up"))),
    LLAMA_FIELDS | {"mlp_bias", "sliding_window", "partial_rotary_factor", "original_max_position_embeddings"},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
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
    """Their tensors, for a number of heads."""
    return partial(mappings, patterns=NEOX_PATTERNS, architecture="GPTNeoXForCausalLM", groups=(QKV,), heads=num_heads)


def _describe_neox(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(changed(config, mlp=("swiglu",)))
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
        raise ValueError("attention_bias: a GPTNeoXForCausalLM without biases is not supported")
    theta = facts.get("rotary_emb_base") or facts.get("rope_theta")
    left = ("hidden_act", "attention_bias", "rope_theta")
    flat = {name: value for name, value in facts.items() if name not in left}
    tree = llama_tree(flat | ({} if theta is None else {"rope_theta": theta}))
    return ModelConfig(
        **tree
        | {
            "mlp": kinds[act],
            "norm": "layernorm",
            "norm_eps": facts.get("layer_norm_eps", 1e-5),
            "biases": "all",
            "parallel_residual": facts.get("use_parallel_residual", True),
            "partial_rotary_factor": rotary_share(facts, "rotary_pct", 0.25),
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
    {"max_position_embeddings": 2048},
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
CONV = r"blocks\.\d+\.(attention|mlp)\.\w+\.weight"
"""What transformers keeps as Conv1D: inputs × outputs."""


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
            raise ValueError(f"{name} = {facts[name]!r} is not supported")
    return ModelConfig(
        hidden_size=facts["n_embd"],
        num_layers=facts["n_layer"],
        num_heads=facts["n_head"],
        num_kv_heads=facts["n_head"],
        intermediate_size=facts.get("n_inner") or 4 * facts["n_embd"],
        context_length=facts.get("n_positions") or facts.get("n_ctx") or 1024,
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
    partial(mappings, patterns=GPT2_PATTERNS, architecture="GPT2LMHeadModel", groups=(QKV,), transposed=CONV),
    frozenset(
        {"n_embd", "n_layer", "n_head", "n_inner", "n_positions", "n_ctx", "activation_function", "layer_norm_epsilon"}
        | {"tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"}
    ),
)


FIRST_VOCABULARY = 64_000


BAICHUAN_PATTERNS = (
    (r"blocks\.(\d+)\.attention\.q\.(weight)", r"model.layers.\1.self_attn.W_pack.\2"),
    *LLAMA_PATTERNS,
)


def read_baichuan2(facts: Mapping[str, Any], *, normalized: bool = True) -> ModelConfig:
    """Tells 13B from 7B: 13B gives the length that it was trained at, but no number of positions."""
    positions = "rope" if "max_position_embeddings" in facts else "alibi"
    context = facts["max_position_embeddings"] if positions == "rope" else facts["model_max_length"]
    known = read_llama(dict(facts) | {"max_position_embeddings": context})
    return changed(known, position_embedding=positions, normalize_head=normalized and not known.tie_embeddings)


def _describe_baichuan2(config: ModelConfig) -> dict[str, Any]:
    facts = describe_llama(config)
    context = facts.pop("max_position_embeddings")
    for name in ("attention_bias", "mlp_bias", "head_dim", "num_key_value_heads", "rope_theta"):
        del facts[name]
    with_rope = {"max_position_embeddings": context} if config.position_embedding == "rope" else {}
    return facts | {"model_max_length": context} | with_rope


BAICHUAN2 = Architecture(
    "BaichuanForCausalLM",
    "baichuan",
    SHARED
    | {
        "hidden_size": lambda config: config.head_size * config.num_heads == config.hidden_size,
        "num_kv_heads": lambda config: config.num_kv_heads == config.num_heads,
        "sliding_window": lambda config: is_uniform(config.sliding_window, "full"),
        "position_embedding": lambda config: config.position_embedding in ("rope", "alibi"),
        "rope_theta": lambda config: config.position_embedding == "alibi" or config.rope_theta == 1e4,
        "rope_scaling": lambda config: config.rope_scaling is None,
        "qk_norm": lambda config: not config.qk_norm,
        "biases": lambda config: config.biases == "none",
        "tie_embeddings": lambda config: not config.tie_embeddings,
        "normalize_head": lambda config: config.normalize_head,
    },
    _describe_baichuan2,
    read_baichuan2,
    partial(mappings, patterns=BAICHUAN_PATTERNS, architecture="BaichuanForCausalLM", groups=(QKV,)),
    LLAMA_FIELDS | {"mlp_bias", "model_max_length"},
)
BAICHUAN1 = replace(BAICHUAN2, reader=partial(read_baichuan2, normalized=False))


WRITTEN = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, SMOLLM3, OLMO2, GEMMA3, PHI3, NEOX, BAICHUAN2)
"""What is written, those first that most programs know. Transformers loads all but the last as they are."""


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
READ = {one.name: one for one in (*WRITTEN, OWN)} | {"GPT2Model": GPT2, "BaiChuanForCausalLM": BAICHUAN1}


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
        raise ValueError(f"architectures is {shown(names)}; it must be one of {', '.join(READ)}{meant}")
    known = next((READ[name] for name in names if name in READ), None)
    if known is None:
        raise ValueError(f"its architecture is {shown(', '.join(names))}; supported: {', '.join(READ)}")
    if kind not in (None, known.model_type):
        raise ValueError(f"architectures is {known.name}, but model_type is {shown(kind)}, not {known.model_type!r}")
    if known is BAICHUAN2 and facts.get("vocab_size") == FIRST_VOCABULARY:
        return BAICHUAN1
    return known if known.bind is None else known.bound(facts["num_attention_heads"])


def exported(config: ModelConfig) -> ModelConfig:
    """
    The same computation where another architecture can say it: norms without weights have weights of 1, and a head
    that is normalized has rows of length 1. With ALiBi, Baichuan alone can say it, and normalizes them once more.
    """
    return changed(config, norm_affine=True, normalize_head=config.normalize_head and _has_alibi(config))


def _has_alibi(config: ModelConfig) -> bool:
    return config.position_embedding == "alibi"


def reasons(config: ModelConfig) -> list[str]:
    """Which choices keep a model from being what it is closest to of transformers' models; none if it is one."""
    nearest = min(WRITTEN, key=lambda candidate: len(candidate.obstacles(exported(config))))
    return [
        f"hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}, as in {nearest.name}"
        if field == "hidden_size"
        else f"{field}={_shown(config, field)} is nothing that {nearest.name} has"
        for field in nearest.obstacles(exported(config))
    ]


def _shown(config: ModelConfig, field: str) -> str:
    value = getattr(config, field)
    return repr(
        value[0] if isinstance(value, tuple) and len(value) == 1 else list(value) if isinstance(value, tuple) else value
    )
