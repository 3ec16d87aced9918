"""
Write GGUF files for llama.cpp, Ollama and others, one tensor at a time, with tokenizer and chat template.

As the converter of llama.cpp does, norms, biases and learned positions stay in float32. A matrix whose rows do not
divide into the blocks of the number format becomes float16. With Q4_0, embedding and head are kept in Q8_0.

llama.cpp knows how a byte-level tokenizer cuts text by a name alone (`tokenizer.ggml.pre`). A tokenizer that cuts
text in another way is refused. The file also holds the whole tokenizer.json, under the key that the specification of
GGUF has for it.
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gguf as package
import numpy as np
from tokenizers import models

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core.chat import sampling_of
from bloomery.core.errors import CheckpointError
from bloomery.core.log import info
from bloomery.model.config import LongRopeScaling, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.tokenizer import SPACE, Tokenizer, steps
from bloomery.weights import architectures
from bloomery.weights.architectures import Architecture, gathered
from bloomery.weights.gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER,
    GGUFTensors,
    Metadata,
    Sizes,
    StoredTensor,
    facts_of,
    numbers_of,
    reordered,
)
from bloomery.weights.gguf_layouts import FACTORS, LAYOUTS, PRE_TOKENIZERS, SAMPLING, GGUFLayout, llama3_factors
from bloomery.weights.opened import own_weights
from bloomery.weights.safetensors import rounded

import torch
from torch import Tensor

GGUFFormat = Literal["float32", "float16", "bfloat16", "q8_0", "q4_0"]
Kind = package.GGMLQuantizationType
KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32, "q8_0": 7, "q4_0": 2}
"""Number of each format in `general.file_type`."""
TABLES = ("token_embd.weight", "output.weight")
MAX_HALF = 65504.0
"""The largest float16, which the scales of blocks are."""


@dataclass(frozen=True)
class GGUFWords:
    """What a file says about text, in addition to the tokenizer itself."""

    roles: Mapping[str, str | None]
    """Contents of the special tokens, by bos_token, eos_token, pad_token and unk_token."""
    chat_template: str | None = None
    """In Jinja."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """As in a generation_config.json."""
    add_bos: bool = False
    license: str | None = None


@dataclass(frozen=True)
class _Planned:
    """A tensor that is to be written."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    size_bytes: int
    make: Callable[[], Tensor]


def size_bytes(model: Transformer, number_format: GGUFFormat) -> int:
    """How many bytes the tensors of a file have. Raises CheckpointError for a model that GGUF does not have."""
    return sum(tensor.size_bytes for tensor in _planned(model, number_format, "the model", {}))


def write(
    file: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    words: GGUFWords,
    number_format: GGUFFormat,
    name: str,
    weights: Mapping[str, Tensor] | None = None,
) -> str:
    """
    Write a model as a GGUF file that is whole or absent. `weights` stand in for those of the model, as in `hf.save`.
    Returns the architecture, as GGUF calls it. Raises
    CheckpointError for a model or a tokenizer that llama.cpp does not have, and for numbers that the format does not.
    """
    where = str(file)
    arch, _, kind = _layout(model, where)
    planned = _planned(model, number_format, where, own_weights(model) if weights is None else weights)
    for tensor in planned:
        _check_range(tensor, where)
    writer = package.GGUFWriter(None, arch)
    writer.add_name(name)
    if words.license:
        writer.add_license(words.license)
    writer.add_file_type(FILE_TYPES[number_format])
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    _add_shape(writer, arch, kind.describe(model.config), model)
    _add_tokenizer(writer, tokenizer, model.vocab_size, where)
    _add_words(writer, tokenizer, words)
    for tensor in planned:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.size_bytes, raw_dtype=tensor.kind
        )
    with core_io.whole_path(file) as unfinished:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            for tensor in planned:
                _write_tensor(writer, tensor)
        finally:
            writer.close()
    return arch


def _write_tensor(writer: package.GGUFWriter, tensor: _Planned) -> None:
    numbers = tensor.make().detach().to("cpu", torch.float32).contiguous().numpy()
    with np.errstate(all="ignore"):
        quantized = np.ascontiguousarray(package.quants.quantize(numbers, tensor.kind))
    try:
        writer.write_tensor_data(quantized)
    except OSError as error:  # NumPy says how many numbers it has written, and no errno
        raise error if error.errno else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


# --- the shape -----------------------------------------------------------------------------------------------------


def _layout(model: Transformer, where: str) -> tuple[str, GGUFLayout, Architecture]:
    """
    The first way to write a model as one of llama.cpp, as the architecture of transformers that has its tensors. Raises
    CheckpointError where llama.cpp would compute another model from what a file can say of this one.
    """
    config, why = model.config, list[str]()
    kinds = [kind.bound(config.num_heads) for kind in architectures.WRITTEN if not kind.obstacles(config)]
    for kind in kinds:
        name = "LlamaForCausalLM" if kind.name == "MistralForCausalLM" else kind.name
        for arch, layout in ((arch, layout) for arch, layout in LAYOUTS.items() if layout.name == name):
            try:
                ours, read = kind.describe(config), kind.describe(_read_back(model, arch, layout, kind))
            except (CheckpointError, ValueError) as error:
                why.append(str(error).partition("\n")[0])
                continue
            if _rope_factors(model):  # they are written as they are
                ours, read = ({**facts, "rope_scaling": None} for facts in (ours, read))
            others = [key for key in ours if ours[key] != read.get(key)]
            if not others:
                return arch, layout, kind
            why += [f"{key}={ours[key]!r} would be {read.get(key)!r} there" for key in others]
    why = why or [f"its architecture is {kinds[0].name if kinds else 'none of transformers'}"]
    hint = f"Use --format hf. GGUF export supports {', '.join(layout.name for layout in LAYOUTS.values())}."
    raise CheckpointError("llama.cpp has no such model: " + "; ".join(dict.fromkeys(why)), where=where, hint=hint)


class _Named(GGUFTensors):
    """What the reader asks of the tensors of a file, before they are written."""

    def __init__(self, names: Iterable[str], factors: Mapping[str, Tensor]) -> None:
        self.stored = dict.fromkeys((*names, *factors), _UNREAD)
        self._factors = factors

    def number_format(self, name: str) -> str:
        return "float32"

    def factors(self, name: str) -> list[float]:
        return numbers_of(self._factors[name])


_UNREAD = StoredTensor((), Kind.F32, 0, 0)


def _read_back(model: Transformer, arch: str, layout: GGUFLayout, kind: Architecture) -> ModelConfig:
    """The model that the reader makes of what is written of its shape. Raises ValueError where it is none."""
    writer = package.GGUFWriter(None, arch)
    _add_shape(writer, arch, kind.describe(model.config), model)
    meta = Metadata({key: one.value for key, one in writer.kv_data[0].items()}, Path(arch))
    sizes = replace(_sizes(model), context=meta.integer(f"{arch}.context_length"))
    theirs = {piece.theirs for piece in kind.pieces(list(own_weights(model)))}
    names = (name.format(0) for name, full, _ in layout.theirs() if full.format(0) in theirs)
    facts = facts_of(meta, arch, layout, sizes, _Named(names, _rope_factors(model)))
    return architectures.of_file(facts).understand(facts)


def _sizes(model: Transformer) -> Sizes:
    config = model.config
    return Sizes(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head=config.head_size,
        feed_forward=config.intermediate_size,
        vocab=model.vocab_size,
        context=config.context_length,
    )


def _planned(
    model: Transformer, number_format: GGUFFormat, where: str, weights: Mapping[str, Tensor]
) -> list[_Planned]:
    """The tensors of a file, in order, none of which is made yet."""
    _, layout, kind = _layout(model, where)
    sizes = _sizes(model)
    names = {
        theirs.format(number): pattern.format(number)
        for pattern, theirs, _ in layout.theirs()
        for number in (range(sizes.layers) if "{}" in pattern else (0,))
    }
    shapes = {name: weight.to("meta") for name, weight in own_weights(model).items()}
    planned = []

    def making(piece: architectures.WeightMapping, name: str, weights: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        def make() -> Tensor:
            tensor = reordered(gathered(piece, weights), name, layout, sizes, inward=False)
            return tensor.float() + 1.0 if layout.shifted and name.endswith("norm.weight") else tensor

        return make

    for piece in kind.pieces(list(shapes)):
        if (name := names.get(piece.theirs)) is None:
            raise CheckpointError(f"llama.cpp has no {piece.theirs}", where=where, hint="Use --format hf.")
        shape = tuple(making(piece, name, shapes)().shape)
        planned.append(_one(name, _kind(name, shape, number_format), shape, making(piece, name, weights)))
    for name, factors in _rope_factors(model).items():
        planned.append(_one(name, Kind.F32, tuple(factors.shape), partial(factors.clone)))
    return planned


def _one(name: str, kind: Kind, shape: tuple[int, ...], make: Callable[[], Tensor]) -> _Planned:
    block, width = package.GGML_QUANT_SIZES[kind]
    return _Planned(name, kind, shape, math.prod(shape) // block * width, make)


def _kind(name: str, shape: tuple[int, ...], number_format: GGUFFormat) -> Kind:
    kind = KINDS[number_format]
    if len(shape) == 1 or "norm" in name or name.startswith("position_embd"):
        return Kind.F32
    if kind == Kind.Q4_0 and name in TABLES:
        kind = Kind.Q8_0
    return Kind.F16 if shape[-1] % package.GGML_QUANT_SIZES[kind][0] else kind


def _check_range(tensor: _Planned, where: str) -> None:
    """Raises CheckpointError where numbers, or the scales of their blocks, become infinite in their number format."""
    if tensor.kind in (Kind.F16, Kind.BF16):
        rounded(tensor.name, tensor.make(), torch.float16 if tensor.kind == Kind.F16 else torch.bfloat16, where)
    elif tensor.kind != Kind.F32:
        largest = float(tensor.make().abs().max())
        steps_of_block = 127 if tensor.kind == Kind.Q8_0 else 8
        if not largest / steps_of_block <= MAX_HALF:
            what = f"{tensor.name} holds numbers up to {largest:g}, too many for the scales of {tensor.kind.name}"
            raise CheckpointError(what, where=where, hint="Use --dtype float32.")


def _rope_factors(model: Transformer) -> dict[str, Tensor]:
    """Tensors with the factor of each frequency, where the scaling of Llama 3 or a longrope divides them."""
    scaling = model.config.rope_scaling
    if isinstance(scaling, LongRopeScaling) and scaling.attention_factor is None:
        lists = {"long": scaling.long_factor, "short": scaling.short_factor}
        return {f"rope_factors_{name}.weight": torch.tensor(factors) for name, factors in lists.items()}
    if scaling is None or scaling.kind != "llama3":
        return {}
    said = scaling.model_dump(exclude={"kind"})
    said["original_max_position_embeddings"] = said["original_context_length"]
    count = model.config.head_size // 2
    return {FACTORS[0]: torch.tensor(llama3_factors(model.config.rope_theta, count, said))}


def _add_shape(writer: package.GGUFWriter, arch: str, facts: Mapping[str, Any], model: Transformer) -> None:
    config = model.config
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(facts.get("max_position_embeddings", config.context_length))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if arch == "gpt2":
        return
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    share = facts.get("partial_rotary_factor", facts.get("rotary_pct", 1.0))
    writer.add_rope_dimension_count(int(config.head_size * share))
    writer.add_rope_freq_base(config.rope_theta)
    if arch == "gptneox":
        writer.add_parallel_residual(bool(facts["use_parallel_residual"]))
    if arch in ("gemma3", "phi3") and (window := facts.get("sliding_window")):
        writer.add_sliding_window(window)
        if arch == "phi3" and window < config.context_length:
            info(
                f"llama.cpp ignores the sliding window of Phi-3: after {window:,} tokens, it computes otherwise",
                "yellow",
            )
    scaling = config.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context_length)
        attention = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context_length))
        writer.add_rope_scaling_attn_factors(attention)
    elif scaling is not None and scaling.kind != "llama3":
        writer.add_rope_scaling_type(package.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling.original_context_length)
            writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)


# --- the tokenizer -------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: package.GGUFWriter, tokenizer: Tokenizer, rows: int, where: str) -> None:
    spec = tokenizer.spec
    model = spec["model"]
    tokens, kinds = [f"[PAD{id}]" for id in range(rows)], [UNUSED] * rows
    for token, id in model["vocab"].items():
        is_byte = model["byte_fallback"] and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[id], kinds[id] = token, BYTE if is_byte else NORMAL
    if model["byte_fallback"] and model["unk_token"] is not None:
        kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
    for added in spec["added_tokens"]:
        if kinds[added["id"]] != UNKNOWN:
            tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_puts_space_first(spec, where))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_of(spec, where))
        writer.add_token_merges(merges)
        writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_string("tokenizer.huggingface.json", tokenizer.to_json())


def _puts_space_first(spec: Mapping[str, Any], where: str) -> bool:
    """
    Whether llama.cpp is to put a space before each text, for a SentencePiece tokenizer. Raises CheckpointError for one
    that changes text in other ways.
    """
    before = steps(spec["normalizer"], "normalizer") + steps(spec["pre_tokenizer"], "pre_tokenizer")
    schemes = {step["prepend_scheme"] for step in before if step["type"] == "Metaspace"}
    spaces = ({"String": " "}, {"String": SPACE})
    for step in before:
        is_space = step["type"] in ("Replace", "Split") and step["pattern"] in spaces
        if step["type"] not in ("Prepend", "Metaspace") and not is_space:
            what = f"its tokenizer changes text by the step {step['type']}, which llama.cpp does not have"
            raise CheckpointError(what, where=where, hint="Use --format hf.")
    if "first" in schemes:
        info(
            "llama.cpp reads a text without a chat template as if no space were before it; this model had one", "yellow"
        )
    return "always" in schemes or any(step["type"] == "Prepend" for step in before)


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores of SentencePiece pieces that order them as merges do: what is merged first has the highest."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", ""), len(ranks))
    return [float(-ranks.get(token, len(ranks))) for token in tokens]


def pre_of(spec: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name of how a byte-level tokenizer cuts text. Raises CheckpointError where it has none."""
    cuts, digits, regex, plain = steps(spec["pre_tokenizer"], "pre_tokenizer"), False, None, True
    for step in cuts[:-1]:
        if step == {"type": "Digits", "individual_digits": True}:
            digits = True
        elif step["type"] == "Split" and (step["behavior"], step["invert"]) == ("Isolated", False):
            regex = step["pattern"].get("Regex")
        else:
            plain = False
    last = cuts[-1] if cuts else {}
    plain &= last.get("type") == "ByteLevel" and not last["add_prefix_space"] and last["use_regex"] == (regex is None)
    plain &= spec["normalizer"] in (None, {"type": "NFC"})
    same = [pre for pre, how in PRE_TOKENIZERS.items() if plain and (how.regex, how.digits) == (regex, digits)]
    whole_words = bool(spec["model"].get("ignore_merges"))
    exact = next((pre for pre in same if PRE_TOKENIZERS[pre].whole_words == whole_words), None)
    if exact is None and same and _merged_to_whole(spec["model"]):
        exact = same[0]  # merges make every token, so that taking words whole changes nothing
    if exact is None:
        what = "its tokenizer splits text by a rule that llama.cpp does not have"
        hint = f"Use --format hf. llama.cpp has the rules {', '.join(sorted(set(PRE_TOKENIZERS)))}."
        raise CheckpointError(what, where=where, hint=hint)
    return exact


def _merged_to_whole(model: Mapping[str, Any]) -> bool:
    """Whether the merges of a BPE make each of its tokens from its letters."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [(left, right) for left, right in pairs]
    bpe = models.BPE(vocab=dict(model["vocab"]), merges=merges)
    joined = {"".join(merge) for merge in merges}
    return all(len(bpe.tokenize(token)) == 1 for token in joined)


def _add_words(writer: package.GGUFWriter, tokenizer: Tokenizer, words: GGUFWords) -> None:
    ids = {role: tokenizer.special_id(text) for role, text in words.roles.items() if text}
    said = words.generation.get("eos_token_id")
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not ids.keys() & {"bos_token", "eos_token"}:  # only config.json names them
        ids["bos_token"] = tokenizer.boundary_id
    if ids.get("eos_token") is None:
        ids["eos_token"] = next((id for id in ends if id in tokenizer.special_ids), None)
    if ids["eos_token"] is None:
        what = "the model names no token that ends a text, and llama.cpp then takes one of its own"
        info(f"{what}: 11 of byte-level BPE, 2 of SentencePiece", "yellow")
    for role, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
        ("unk_token", writer.add_unk_token_id),
    ):
        if (id := ids.get(role)) is not None:
            add(id)
    writer.add_add_bos_token(words.add_bos)
    if words.chat_template:
        writer.add_chat_template(words.chat_template)
    others = [id for id in ends if id != ids.get("eos_token")]
    for id, add in zip(others, (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
        add(id)
    if len(others) > 2:
        lost = ", ".join(map(str, others[2:]))
        info(f"GGUF has room for three tokens that end an answer: those with the IDs {lost} are left out", "yellow")
    sampling = sampling_of(words.generation)
    for key, theirs in SAMPLING.items():
        if (value := sampling.get(theirs)) is not None:
            writer.add_uint32(key, int(value)) if theirs == "top_k" else writer.add_float32(key, float(value))
