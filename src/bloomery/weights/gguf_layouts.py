"""
What GGUF files hold, as tables: names of tensors, special tokens and settings next to transformers', and blocks.

Reading and writing use the same tables. An architecture that is not in LAYOUTS is neither read nor written.

Llama 3 scales its RoPE frequencies, and a file holds the factor of each frequency. The parameters of the scaling
are computed from the factors. A file whose factors follow from no such parameters is refused.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import CheckpointError
from bloomery.tokenizer.tokenizer import PATTERNS

import torch
from torch import Tensor

LLAMA_BLOCK = {
    "attn_norm.weight": ("input_layernorm.weight", "D"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QD"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KD"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KD"),
    "attn_output.weight": ("self_attn.o_proj.weight", "DQ"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "D"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FD"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FD"),
    "ffn_down.weight": ("mlp.down_proj.weight", "DF"),
}
"""
Name of a tensor of a layer in GGUF, its name in transformers, and its shape. Widths: Q of queries, K of keys, P of
queries, keys and values together, E of a head, F of the feed-forward, G = 2F. D hidden size, V vocabulary, C context.
"""
LLAMA_OUTER = {
    "token_embd.weight": ("model.embed_tokens.weight", "VD"),
    "output_norm.weight": ("model.norm.weight", "D"),
    "output.weight": ("lm_head.weight", "VD"),
}
QKV_BIASES = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
OTHER_BIASES = {
    "attn_output.bias": ("self_attn.o_proj.bias", "D"),
    "ffn_gate.bias": ("mlp.gate_proj.bias", "F"),
    "ffn_up.bias": ("mlp.up_proj.bias", "F"),
    "ffn_down.bias": ("mlp.down_proj.bias", "D"),
}
HEAD_NORMS = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "E"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "E"),
}
POST_NORMS = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "D"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "D"),
}
OLMO2_BLOCK = {name: LLAMA_BLOCK[name] for name in LLAMA_BLOCK if "norm" not in name} | {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "Q"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "K"),
    **POST_NORMS,
}
GEMMA3_BLOCK = {**LLAMA_BLOCK, **HEAD_NORMS, **POST_NORMS, "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "D")}
PHI3_BLOCK = {
    **{name: LLAMA_BLOCK[name] for name in ("attn_norm.weight", "attn_output.weight", "ffn_norm.weight")},
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", "PD"),
    "ffn_up.weight": ("mlp.gate_up_proj.weight", "GD"),
    "ffn_down.weight": ("mlp.down_proj.weight", "DF"),
}
GPT2_OUTER = {
    "token_embd.weight": ("transformer.wte.weight", "VD"),
    "position_embd.weight": ("transformer.wpe.weight", "CD"),
    "output_norm.weight": ("transformer.ln_f.weight", "D"),
    "output_norm.bias": ("transformer.ln_f.bias", "D"),
    "output.weight": ("lm_head.weight", "VD"),
}
GPT2_BLOCK = {
    "attn_norm.weight": ("ln_1.weight", "D"),
    "attn_norm.bias": ("ln_1.bias", "D"),
    "attn_qkv.weight": ("attn.c_attn.weight", "PD"),
    "attn_qkv.bias": ("attn.c_attn.bias", "P"),
    "attn_output.weight": ("attn.c_proj.weight", "DD"),
    "attn_output.bias": ("attn.c_proj.bias", "D"),
    "ffn_norm.weight": ("ln_2.weight", "D"),
    "ffn_norm.bias": ("ln_2.bias", "D"),
    "ffn_up.weight": ("mlp.c_fc.weight", "FD"),
    "ffn_up.bias": ("mlp.c_fc.bias", "F"),
    "ffn_down.weight": ("mlp.c_proj.weight", "DF"),
    "ffn_down.bias": ("mlp.c_proj.bias", "D"),
}
NEOX_OUTER = {
    "token_embd.weight": ("gpt_neox.embed_in.weight", "VD"),
    "output_norm.weight": ("gpt_neox.final_layer_norm.weight", "D"),
    "output_norm.bias": ("gpt_neox.final_layer_norm.bias", "D"),
    "output.weight": ("embed_out.weight", "VD"),
}
NEOX_BLOCK = {
    f"{name}.{suffix}": (f"{theirs}.{suffix}", shape if suffix == "weight" else shape[0])
    for name, theirs, shape in (
        ("attn_norm", "input_layernorm", "D"),
        ("attn_qkv", "attention.query_key_value", "PD"),
        ("attn_output", "attention.dense", "DQ"),
        ("ffn_norm", "post_attention_layernorm", "D"),
        ("ffn_up", "mlp.dense_h_to_4h", "FD"),
        ("ffn_down", "mlp.dense_4h_to_h", "DF"),
    )
    for suffix in ("weight", "bias")
}
TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
"""Matrices that GPT-2 of transformers keeps as inputs × outputs."""
OPTIONAL = {"output.weight"}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from the RoPE scaling."""


@dataclass(frozen=True)
class GGUFLayout:
    """How GGUF stores the models of one architecture."""

    name: str
    """As transformers calls it in config.json."""
    model_type: str
    outer: Mapping[str, tuple[str, str]]
    block: Mapping[str, tuple[str, str]]
    layers: str = "model.layers"
    """What the names of transformers have before the number of a layer."""
    optional: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tensors of a layer that every layer has, or none."""
    interleaved: bool = False
    """Whether the rows of queries and keys are stored in llama.cpp's order."""
    shifted: bool = False
    """Whether a norm is stored as 1 + its weight."""

    def theirs(self) -> Iterable[tuple[str, str, str]]:
        """Name in GGUF, in transformers, and shape of each tensor, with {} for the number of a layer."""
        for name, (theirs, shape) in self.outer.items():
            yield name, theirs, shape
        for name, (theirs, shape) in (*self.block.items(), *self.optional.items()):
            yield f"blk.{{}}.{name}", f"{self.layers}.{{}}.{theirs}", shape


_LLAMA = GGUFLayout(
    "LlamaForCausalLM", "llama", LLAMA_OUTER, LLAMA_BLOCK, optional=QKV_BIASES | OTHER_BIASES, interleaved=True
)
LAYOUTS = {
    "llama": _LLAMA,
    "smollm3": GGUFLayout("SmolLM3ForCausalLM", "smollm3", LLAMA_OUTER, LLAMA_BLOCK, interleaved=True),
    "qwen2": GGUFLayout("Qwen2ForCausalLM", "qwen2", LLAMA_OUTER, LLAMA_BLOCK | QKV_BIASES),
    "qwen3": GGUFLayout("Qwen3ForCausalLM", "qwen3", LLAMA_OUTER, LLAMA_BLOCK | HEAD_NORMS),
    "olmo2": GGUFLayout("Olmo2ForCausalLM", "olmo2", LLAMA_OUTER, OLMO2_BLOCK),
    "gemma3": GGUFLayout("Gemma3ForCausalLM", "gemma3_text", LLAMA_OUTER, GEMMA3_BLOCK, shifted=True),
    "phi3": GGUFLayout("Phi3ForCausalLM", "phi3", LLAMA_OUTER, PHI3_BLOCK),
    "gpt2": GGUFLayout("GPT2LMHeadModel", "gpt2", GPT2_OUTER, GPT2_BLOCK, layers="transformer.h"),
    "gptneox": GGUFLayout("GPTNeoXForCausalLM", "gpt_neox", NEOX_OUTER, NEOX_BLOCK, layers="gpt_neox.layers"),
}
"""By `general.architecture`."""

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Key of the metadata, and the same in a generation_config.json."""
CHANGING = {
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
}
"""Keys of the metadata that change the results unless they are 0, and the same in a config.json: it is refused."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
"""As in a tokenizer_config.json, and in `tokenizer.ggml.…_token_id`."""


class PreTokenizer(NamedTuple):
    """How a byte-level tokenizer cuts text, by the name in `tokenizer.ggml.pre`."""

    regex: str | None
    """None for the pattern of GPT-2, which the library has."""
    digits: bool = False
    """Whether every digit is first made a word."""
    whole_words: bool = False
    """Whether a word that is a token is taken as it is, without merges (`ignore_merges`)."""
    composed: bool = False
    """Whether the published tokenizer composes characters first (NFC)."""


_LEADING, _CAPITAL = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"{_LEADING}{_CAPITAL}*{_SMALL}+|{_LEADING}{_CAPITAL}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "olmo", "mpt"), PreTokenizer(None)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), PreTokenizer(None, digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), PreTokenizer(PATTERNS["llama3"].regex, whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(PATTERNS["llama3"].regex)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), PreTokenizer(PATTERNS["qwen2"].regex, composed=True)),
    "gpt-4o": PreTokenizer(PATTERNS["gpt4o"].regex),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True),
}


def dequantize(blocks: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> Tensor:
    """
    The numbers of blocks (N, bytes of one) as float32 (N, numbers of one), as the package `gguf` computes them. Those
    of Q4_0, Q4_1 and Q8_0 take torch a fifth of the time that they take the package.

        Q8_0    d (float16), 32 signed bytes q                       x = d q
        Q4_0    d, 16 bytes: low halves q_0..15, high q_16..31       x = d (q - 8)
        Q4_1    d, m, 16 bytes                                       x = d q + m
    """
    if kind.name not in ("Q4_0", "Q4_1", "Q8_0"):
        with np.errstate(all="ignore"):
            return torch.from_numpy(gguf.quants.dequantize(blocks.reshape(1, -1), kind)).view(len(blocks), -1)
    raw = torch.from_numpy(blocks.copy())
    scale = raw[:, :2].contiguous().view(torch.float16).float()
    if kind.name == "Q8_0":
        return raw[:, 2:].view(torch.int8).float() * scale
    packed = raw[:, -16:]
    quants = torch.cat([packed & 15, packed >> 4], dim=1)
    if kind.name == "Q4_0":
        return (quants.to(torch.int8) - 8).float() * scale
    return quants.float().mul_(scale).add_(raw[:, 2:4].contiguous().view(torch.float16).float())


def int4_blocks(rows: Tensor, kind: gguf.GGMLQuantizationType) -> tuple[Tensor, Tensor] | None:
    """
    Codes (R, G, 16) and scales (R, G, 2) for quantize.Int4, from the bytes of rows in Q4_0 or Q4_1; None for others.
    Factor and offset are d and -8 d of Q4_0, and d and m of Q4_1. No number is rounded.
    """
    if kind.name not in ("Q4_0", "Q4_1"):
        return None
    blocks = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[kind][1])
    scales = blocks[..., :-16].contiguous().view(torch.float16)
    return blocks[..., -16:].contiguous(), scales if kind.name == "Q4_1" else torch.cat((scales, -8 * scales), 2)


def split_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys from llama.cpp's order, where RoPE turns neighbors, to transformers', of two halves."""
    return rows.view(heads, rows.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `split_halves`."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def llama3_factors(theta: float, count: int, scaling: Mapping[str, float]) -> list[float]:
    """By how much Llama 3's scaling divides each of `count` frequencies (Dubey et al. 2024)."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    factors = []
    for number in range(count):
        wavelength = 2 * math.pi * theta ** (number / count)
        turns = scaling["original_max_position_embeddings"] / wavelength
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return factors


def llama3_scaling(factors: list[float], theta: float, file: Path) -> dict[str, Any] | None:
    """
    The parameters of Llama 3's scaling from the factors of all frequencies.

    Between the two bounds, the share of the unscaled frequency is a line over 1 / wavelength. The line gives
    original / (high - low) and low / (high - low), and `low` is 1 in every published model. Where fewer than two
    frequencies lie on the line, any parameters with the same factors will do: `high` is 4, as in published models.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    largest = max(factors)
    middle = [number for number, factor in enumerate(factors) if 1.0 < factor < largest * (1 - 1e-5)]
    inverse = [1 / (2 * math.pi * theta ** (number / len(factors))) for number in range(len(factors))]
    share_of = {number: (1 / factors[number] - 1 / largest) / (1 - 1 / largest) for number in middle}
    whole = [number for number, factor in enumerate(factors) if factor == 1.0]
    guesses = [(4.0, 8192.0)]
    if len(middle) > 1 and math.isfinite(largest):
        first, last = middle[0], middle[-1]
        slope = (share_of[last] - share_of[first]) / (inverse[last] - inverse[first])
        offset = share_of[first] - slope * inverse[first]
        width = -1 / offset if offset else 1.0
        guesses.append((round(1.0 + width, 3), slope * width))
    elif middle:
        guesses.append((4.0, (3 * share_of[middle[0]] + 1) / inverse[middle[0]]))
    else:
        guesses.append((4.0, math.ceil(4 / inverse[whole[-1]]) if whole else math.floor(1 / inverse[0])))
    for high, original in guesses:
        scaling = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": high}
        scaling["original_max_position_embeddings"] = round(original) if math.isfinite(original) else 0
        if high > 1.0 and scaling["original_max_position_embeddings"] >= 1:
            computed = llama3_factors(theta, len(factors), scaling)
            if all(math.isclose(left, right, rel_tol=1e-4) for left, right in zip(computed, factors, strict=True)):
                return {"rope_type": "llama3", **scaling}
    what = "its RoPE factors (rope_freqs.weight) do not match Llama 3 scaling"
    raise CheckpointError(what, where=str(file), hint="Use the same model from its Hugging Face folder.")
