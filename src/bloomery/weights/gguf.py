"""
Read GGUF files: the shape, tokenizer, chat template and weights of a model, as `transformers` has them.

A GGUF file is one file of llama.cpp. It holds metadata, a list of tensors, and the data of the tensors:

    magic, version, number of tensors, number of metadata entries
    each entry      its key, the type of its value, its value
    each tensor     its name, its dimensions (the last one of the shape first), its type, its offset in the data

The header is read here and not by the reader of the package `gguf`. Every count, length and offset is compared with
the size of the file before anything is allocated. The package dequantizes the blocks of quantized tensors.

llama.cpp turns neighboring numbers of a head by RoPE, and `transformers` turns number i and i + E/2. So files of the
architecture llama hold the rows of queries and keys in another order. Reading restores the order of `transformers`.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError, DataError, shorten
from bloomery.tokenizer import importers
from bloomery.tokenizer.tokenizer import parsed
from bloomery.weights.gguf_layouts import (
    CHANGING,
    FACTORS,
    LAYOUTS,
    OPTIONAL,
    PRE_TOKENIZERS,
    ROLES,
    SAMPLING,
    TRANSPOSED,
    GGUFLayout,
    dequantize,
    int4_blocks,
    interleaved,
    llama3_scaling,
    split_halves,
)
from bloomery.weights.safetensors import finite

import torch
from torch import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DAMAGED = "The file is damaged. Download or create it again."
MAX_DIMS = 4
MAX_NAME_BYTES = 2**16
MIN_TENSOR_BYTES = 24
"""Of the header, for a tensor: lengths of name and dimensions, type, offset."""
MIN_ENTRY_BYTES = 13
"""Of the header, for an entry of the metadata: length of the key, type, one byte of a value."""
MAX_ITEMS = 2**24
"""Of an array in the metadata: about four times the merges of the largest tokenizers."""
CHUNK = 2**20
"""Numbers that are dequantized at a time."""
STRING, ARRAY = 8, 9
NUMBER_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values in the metadata, and the same for `struct` and numpy."""
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as in SentencePiece."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """Rows first, as in torch."""
    kind: gguf.GGMLQuantizationType
    start: int
    """In bytes from the start of the file."""
    size_bytes: int


@dataclass(frozen=True)
class GGUFModel:
    """What a GGUF file holds."""

    file: Path
    facts: dict[str, Any]
    """As in a config.json of transformers."""
    tokenizer_spec: dict[str, Any] | str
    """A tokenizer.json, as data or text, whose token IDs are those of llama.cpp."""
    roles: dict[str, str | None]
    """Contents of the special tokens, by bos_token, eos_token, pad_token and unk_token."""
    add_bos: bool
    """Whether llama.cpp begins every text with bos_token."""
    chat_template: str | None
    generation: dict[str, Any]
    """As in a generation_config.json."""
    license: str | None
    tensors: "GGUFTensors"

    @property
    def tokenizer_json(self) -> str:
        spec = self.tokenizer_spec
        return spec if isinstance(spec, str) else json.dumps(spec, ensure_ascii=False)


def read(file: Path) -> GGUFModel:
    """
    The model of a GGUF file. No weights are read yet. Raises CheckpointError where the file is damaged, where a
    tensor is missing, unknown or of another shape, and for an unknown architecture, tokenizer or number format.
    """
    header = _Header(file)
    meta = Metadata(header.entries, file)
    if (count := meta.integer("split.count", 1)) > 1:
        hint = "Merge the files first: llama-gguf-split --merge FIRST_FILE OUT.gguf"
        raise CheckpointError(f"is one of {count} files of a model", where=str(file), hint=hint)
    name = meta.text("general.architecture")
    if name not in LAYOUTS:
        hint = f"Use a model of one of {', '.join(LAYOUTS)}."
        raise CheckpointError(f"has the unknown architecture {shorten(name)!r}", where=str(file), hint=hint)
    layout = LAYOUTS[name]
    sizes = Sizes.of(meta, name, header.tensors)
    _check_tensors(header.tensors, layout, sizes, file)
    tensors = GGUFTensors(header, layout, sizes)
    facts = facts_of(meta, name, layout, sizes, tensors)
    tokens = meta.texts("tokenizer.ggml.tokens")
    if len(tokens) != sizes.vocab:
        what = f"its tokenizer has {len(tokens):,} tokens, but token_embd.weight has {sizes.vocab:,} rows"
        raise CheckpointError(what, where=str(file), hint=DAMAGED)
    ids = {role: meta.integer(f"tokenizer.ggml.{key}_token_id", -1) for role, key in ROLES.items()}
    if wrong := next((role for role, id in ids.items() if id >= len(tokens)), None):
        what = f"its {wrong} is {ids[wrong]:,}, but the last token ID is {len(tokens) - 1:,}"
        raise CheckpointError(what, where=str(file), hint=DAMAGED)
    roles = {role: tokens[id] if id >= 0 else None for role, id in ids.items()}
    model = meta.text("tokenizer.ggml.model")
    spec: dict[str, Any] | str
    if whole := meta.text("tokenizer.huggingface.json", ""):
        _check_same(whole, tokens, file)
        spec, whole_words = whole, False
    elif model == "gpt2":
        spec, whole_words = _byte_level(meta, tokens, roles["unk_token"])
    elif model == "llama":
        spec, whole_words = _sentencepiece(meta, tokens), True
    else:
        hint = "Use a model with byte-level BPE (gpt2) or SentencePiece's BPE (llama)."
        raise CheckpointError(f"its tokenizer is of the kind {shorten(model)!r}", where=str(file), hint=hint)
    known = {f"{role}_id": ids[role] if ids[role] >= 0 else None for role in ROLES if role != "unk_token"}
    others = (meta.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eot", "eom"))
    candidates = (ids["eos_token"], *others)
    ends = sorted({id for id in candidates if id >= 0})
    generation = {theirs: meta.entries[key] for key, theirs in SAMPLING.items() if key in meta.entries}
    return GGUFModel(
        file=file,
        facts=facts | known,
        tokenizer_spec=spec,
        roles=roles,
        add_bos=meta.flag("tokenizer.ggml.add_bos_token", whole_words),
        chat_template=meta.text("tokenizer.chat_template", "") or None,
        generation=generation | known | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None},
        license=meta.text("general.license", "") or None,
        tensors=tensors,
    )


# --- the header ----------------------------------------------------------------------------------------------------


class _Header:
    """Metadata and list of tensors of a file, each length of which was compared with the size of the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with core_io.open_regular(file) as opened:
            self.size = opened.seek(0, 2)
            if self.size < MIN_TENSOR_BYTES:
                raise CheckpointError(f"has {self.size} bytes, less than a header", where=str(file), hint=DAMAGED)
            self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._offset = 0
        if (magic := self._take(4)) != MAGIC:
            what = f"begins with {magic!r}, but a GGUF file begins with {MAGIC!r}"
            raise CheckpointError(
                what, where=str(file), hint="The file is damaged or of another kind. Download it again."
            )
        if (version := self._number("I")) not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            what = "is big-endian" if swapped else f"has version {version}"
            hint = f"Use a little-endian file of version {' or '.join(map(str, VERSIONS))}."
            raise CheckpointError(what, where=str(file), hint=hint)
        num_tensors = self._count("tensors", MIN_TENSOR_BYTES)
        num_entries = self._count("entries of metadata", MIN_ENTRY_BYTES)
        self.entries: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            if key in self.entries:
                raise self._torn(f"has the key {shorten(key)!r} twice")
            self.entries[key] = self._value(self._number("I"), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = self._placed(infos)

    def _torn(self, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(self.file), hint=DAMAGED)

    def _take(self, size: int) -> bytes:
        if size > self.size - self._offset:
            raise self._torn(f"is torn: {size:,} bytes from byte {self._offset:,} on, and it has {self.size:,}")
        self._offset += size
        return self.data[self._offset - size : self._offset]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _count(self, what: str, least: int) -> int:
        """How many of something follow, each of which takes `least` bytes."""
        number: int = self._number("Q")
        if number > (self.size - self._offset) // least:
            raise self._torn(f"says that it has {number:,} {what}, and it has {self.size:,} bytes")
        return number

    def _text(self, most: int = MAX_NAME_BYTES) -> str:
        if (length := self._number("Q")) > most:
            raise self._torn(f"has a name of {length:,} bytes at byte {self._offset:,}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._torn(f"has a text that is not UTF-8 before byte {self._offset:,}: {error}") from None

    def _texts(self, count: int) -> list[str]:
        """As many texts. A tokenizer has 100,000, so each takes one step while nothing is wrong with it."""
        texts: list[str] = []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = self._offset + 8
            end = begin + length_of(self.data, self._offset)[0] if begin <= self.size else self.size + 1
            try:
                texts.append(self.data[begin:end].decode() if end <= self.size else self._text(most=self.size))
            except UnicodeDecodeError:
                self._text(most=self.size)  # raises, and says where
            self._offset = end
        return texts

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text(most=self.size)
        if kind in NUMBER_FORMS:
            return _shortest(self._number(NUMBER_FORMS[kind])) if kind == 6 else self._number(NUMBER_FORMS[kind])
        if kind != ARRAY:
            raise self._torn(f"{shorten(key)} has a value of the unknown type {kind}")
        inner = self._number("I")
        if inner != STRING and inner not in NUMBER_FORMS:
            raise self._torn(f"{shorten(key)} is a list of values of the type {inner}")
        width = 8 if inner == STRING else struct.calcsize(f"<{NUMBER_FORMS[inner]}")
        if (count := self._count(f"items in {shorten(key)}", width)) > MAX_ITEMS:
            raise self._torn(f"{shorten(key)} has {count:,} items, and {MAX_ITEMS:,} is the limit")
        if inner == STRING:
            return self._texts(count)
        return np.frombuffer(self._take(count * width), dtype=f"<{NUMBER_FORMS[inner]}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with rows first, type and offset of a tensor."""
        name, num_dims = self._text(), self._number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._torn(f"{shorten(name)} has {num_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, StoredTensor]:
        alignment = self.entries.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._torn(f"general.alignment is {shorten(alignment)}, and no power of two")
        begin = -(-self._offset // alignment) * alignment
        placed: dict[str, StoredTensor] = {}
        for name, shape, number, offset in infos:
            if name in placed:
                raise self._torn(f"has the tensor {shorten(name)!r} twice")
            kind, block, width = _kind(number)
            if kind is None or not _is_read(kind):
                label = number if kind is None else kind.name
                known = ", ".join(one.name for one in gguf.GGMLQuantizationType if _is_read(one))
                hint = f"Use the same model in another number format. Bloomery reads {known}."
                what = f"{name} has the number format {label}, which Bloomery does not read"
                raise CheckpointError(what, where=str(self.file), hint=hint)
            if 0 in shape or shape[-1] % block:
                raise self._torn(f"{name} has the shape {shape}, and {kind.name} has blocks of {block} numbers")
            size = math.prod(shape) // block * width
            if offset % alignment or begin + offset + size > self.size:
                what = f"{name} lies at bytes {begin + offset:,} to {begin + offset + size:,}"
                raise self._torn(f"{what}, and the file has {self.size:,}")
            placed[name] = StoredTensor(shape, kind, begin + offset, size)
        end, last = 0, ""
        for name, stored in sorted(placed.items(), key=lambda item: item[1].start):
            if stored.start < end:
                raise self._torn(f"{name} and {last} share bytes of the file")
            end, last = stored.start + stored.size_bytes, name
        return placed


def _shortest(number: float) -> float:
    """The float32 of a file as the shortest decimal number that rounds to it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(number)))


def numbers_of(tensor: Tensor) -> list[float]:
    return [_shortest(number) for number in tensor.tolist()]


def _kind(number: int) -> tuple[gguf.GGMLQuantizationType | None, int, int]:
    """A type of tensors, with numbers and bytes of a block."""
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None, 1, 1
    return kind, *gguf.GGML_QUANT_SIZES[kind]


def _is_read(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether tensors of this type can be read: asks the package, which has no list."""
    if kind.name in PLAIN:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True)
class Metadata:
    """The entries of a file, by key and type. Raises CheckpointError where one is missing or of another type."""

    entries: Mapping[str, Any]
    file: Path

    def text(self, key: str, default: str | None = None) -> str:
        value = self.entries.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A number from 0 on; of a list with one for each layer, the one that all have."""
        if isinstance(value := self.entries.get(key), np.ndarray) and len(set(value.tolist())) == 1:
            value = value.tolist()[0]
        elif isinstance(value, np.ndarray):
            hint = "Use a model whose layers all have the same shape."
            raise CheckpointError(f"{key} differs between layers", where=str(self.file), hint=hint)
        value = default if value is None else value
        if type(value) is not int or not (0 <= value < 2**31 or value == default):
            raise self._wrong(key, "a number from 0 to 2^31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.entries.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def texts(self, key: str) -> list[str]:
        value = self.entries.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str, count: int, default: float | None = None) -> list[float]:
        """A list of as many numbers, or `default` for each."""
        value = self.entries.get(key)
        if value is None and default is not None:
            return [default] * count
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self._wrong(key, f"a list of {count:,} numbers")
        numbers: list[float] = value.tolist()
        return numbers

    def _wrong(self, key: str, title: str) -> CheckpointError:
        what = f"{key} is {shorten(self.entries[key])}, not {title}" if key in self.entries else f"lacks {key}"
        return CheckpointError(what, where=str(self.file), hint=DAMAGED)


# --- the shape -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocab: int
    context: int

    @classmethod
    def of(cls, meta: Metadata, name: str, tensors: Mapping[str, StoredTensor]) -> "Sizes":
        if "token_embd.weight" not in tensors:
            raise CheckpointError("token_embd.weight is missing", where=str(meta.file), hint=DAMAGED)
        hidden, heads = meta.integer(f"{name}.embedding_length"), meta.integer(f"{name}.attention.head_count")
        layers = meta.integer(f"{name}.block_count")
        if not heads or not hidden or not layers:
            what = f"has {layers} layers and {heads} heads for a hidden size of {hidden}"
            raise CheckpointError(what, where=str(meta.file), hint=DAMAGED)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=meta.integer(f"{name}.attention.head_count_kv", heads),
            head=meta.integer(f"{name}.attention.key_length", hidden // heads),
            feed_forward=meta.integer(f"{name}.feed_forward_length"),
            vocab=tensors["token_embd.weight"].shape[0],
            context=meta.integer(f"{name}.context_length"),
        )

    def shape(self, letters: str) -> tuple[int, ...]:
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        widths = {"D": self.hidden, "Q": queries, "K": keys, "E": self.head, "F": self.feed_forward, "V": self.vocab}
        widths |= {"C": self.context, "P": queries + 2 * keys, "G": 2 * self.feed_forward}
        return tuple(widths[letter] for letter in letters)


def _check_tensors(tensors: Mapping[str, StoredTensor], layout: GGUFLayout, sizes: Sizes, file: Path) -> None:
    """Raises CheckpointError where a tensor is missing, unknown or of another shape."""
    if sizes.layers > len(tensors):
        what = f"has {len(tensors):,} tensors, but its metadata gives {sizes.layers:,} layers"
        raise CheckpointError(what, where=str(file), hint=DAMAGED)
    optional = {f"blk.{{}}.{name}" for name in layout.optional}
    used = set(FACTORS)
    for pattern, _, letters in layout.theirs():
        names = [pattern.format(number) for number in range(sizes.layers)] if "{}" in pattern else [pattern]
        may_lack = pattern in OPTIONAL or (pattern in optional and names[0] not in tensors)
        for name in names:
            if name not in tensors:
                if may_lack:
                    continue
                raise CheckpointError(f"{name} is missing", where=str(file), hint=DAMAGED)
            if (shape := tensors[name].shape) != (expected := sizes.shape(letters)):
                raise CheckpointError(f"{name} has shape {shape}, not {expected}", where=str(file), hint=DAMAGED)
            used.add(name)
    if more := sorted(tensors.keys() - used):
        what = f"holds tensors that a {layout.name} does not have: {', '.join(more[:3])}"
        raise CheckpointError(what, where=str(file), hint="Use a model without them: they change the results.")


def facts_of(meta: Metadata, name: str, layout: GGUFLayout, sizes: Sizes, tensors: "GGUFTensors") -> dict[str, Any]:
    facts: dict[str, Any] = {
        "architectures": [layout.name],
        "model_type": layout.model_type,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": "output.weight" not in tensors.stored,
        "torch_dtype": tensors.number_format(layout.outer["token_embd.weight"][0]),
    }
    if name == "gpt2":
        return facts | {
            "n_embd": sizes.hidden,
            "n_layer": sizes.layers,
            "n_head": sizes.heads,
            "n_inner": sizes.feed_forward,
            "n_positions": sizes.context,
            "n_ctx": sizes.context,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": meta.number("gpt2.attention.layer_norm_epsilon"),
        }
    facts |= {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "intermediate_size": sizes.feed_forward,
        "max_position_embeddings": sizes.context,
        "rope_theta": meta.number(f"{name}.rope.freq_base", 10_000.0),
    }
    turned = meta.integer(f"{name}.rope.dimension_count", sizes.head)
    if name == "gptneox":
        parallel = meta.flag("gptneox.use_parallel_residual", True)
        return facts | {
            "hidden_act": "gelu",
            "rotary_pct": turned / sizes.head,
            "use_parallel_residual": parallel,
            "layer_norm_eps": meta.number("gptneox.attention.layer_norm_epsilon"),
        }
    facts |= {"hidden_act": "silu", "rms_norm_eps": meta.number(f"{name}.attention.layer_norm_rms_epsilon")}
    facts |= {theirs: value for key, theirs in CHANGING.items() if (value := meta.number(f"{name}.{key}", 0.0))}
    if turned != sizes.head:
        facts["partial_rotary_factor"] = turned / sizes.head
    if scaling := _rope_scaling(meta, name, facts, tensors):
        facts["rope_scaling"] = scaling
    window = meta.integer(f"{name}.attention.sliding_window", 0)
    more = _OF_ONE.get(name)
    return facts | more(facts, window, tensors) if more else facts


def _of_llama(facts: Mapping[str, Any], window: int, tensors: "GGUFTensors") -> dict[str, Any]:
    attention = "blk.0.attn_q.bias" in tensors.stored
    return {"attention_bias": attention, "mlp_bias": "blk.0.ffn_up.bias" in tensors.stored}


def _of_smollm3(facts: Mapping[str, Any], window: int, tensors: "GGUFTensors") -> dict[str, Any]:
    """llama.cpp leaves every fourth layer without positions, whatever the file says."""
    layers = range(1, facts["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(number % 4 != 0) for number in layers], "no_rope_layer_interval": 4}


def _of_gemma3(facts: Mapping[str, Any], window: int, tensors: "GGUFTensors") -> dict[str, Any]:
    """llama.cpp lets every sixth layer see everything, and knows the 27B by its layers, whatever the file says."""
    layers = range(1, facts["num_hidden_layers"] + 1)
    scalar = facts["hidden_size"] // facts["num_attention_heads"] if len(layers) == 62 else facts["head_dim"]
    kinds = ["full_attention" if number % 6 == 0 else "sliding_attention" for number in layers]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": kinds,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": scalar,
    }


def _with_window(facts: Mapping[str, Any], window: int, tensors: "GGUFTensors") -> dict[str, Any]:
    return {"sliding_window": window or None}


_OF_ONE: dict[str, Callable[[Mapping[str, Any], int, "GGUFTensors"], dict[str, Any]]] = {
    "llama": _of_llama,
    "smollm3": _of_smollm3,
    "gemma3": _of_gemma3,
    "phi3": _with_window,
    "olmo2": _with_window,  # OLMo 3 has one, and is refused by it
}
"""What one architecture has in addition, by its name in GGUF."""


def _rope_scaling(meta: Metadata, name: str, facts: Mapping[str, Any], tensors: "GGUFTensors") -> dict[str, Any] | None:
    factors = {one: tensors.factors(one) for one in FACTORS if one in tensors.stored}
    if "rope_freqs.weight" in factors:
        theta = facts["rope_theta"]  # one that cannot be is refused with all other settings
        return llama3_scaling(factors["rope_freqs.weight"], theta, meta.file) if theta > 0 else None
    original = meta.integer(f"{name}.rope.scaling.original_context_length", facts["max_position_embeddings"])
    if factors:
        if name != "phi3" or len(factors) != 2:
            hint = "Use another model."
            raise CheckpointError("has RoPE factors, which are not supported", where=str(meta.file), hint=hint)
        lists = {f"{length}_factor": factors[f"rope_factors_{length}.weight"] for length in ("long", "short")}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **lists}
    kind = meta.text(f"{name}.rope.scaling.type", "linear")
    factor = meta.number(f"{name}.rope.scaling.factor", meta.number(f"{name}.rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or meta.number(f"{name}.rope.scaling.attn_factor", 1.0) != 1.0:
        what = f"its RoPE is scaled by {shorten(kind)!r} with attn_factor, which is not supported"
        raise CheckpointError(what, where=str(meta.file), hint="Use a model with linear, YaRN or Llama 3 scaling.")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{name}.rope.scaling.{theirs}" in meta.entries:
            scaling[ours] = meta.number(f"{name}.rope.scaling.{theirs}")
    return scaling


# --- the tokenizer -------------------------------------------------------------------------------------------------


def _check_same(tokenizer_json: str, tokens: list[str], file: Path) -> None:
    """Raises CheckpointError where a tokenizer.json in a file gives a token another ID than the file's own list."""
    try:
        vocabulary = parsed(tokenizer_json, str(file)).get_vocab(with_added_tokens=True)
    except DataError as error:
        raise CheckpointError(error.what, where=str(file), hint=DAMAGED) from None
    if any(id >= len(tokens) or tokens[id] != token for token, id in vocabulary.items()):
        what = "its tokenizer.huggingface.json and its tokenizer.ggml.tokens differ"
        raise CheckpointError(what, where=str(file), hint=DAMAGED)


def _types(meta: Metadata, tokens: list[str]) -> list[int]:
    return [int(kind) for kind in meta.numbers("tokenizer.ggml.token_type", len(tokens), NORMAL)]


def _byte_level(meta: Metadata, tokens: list[str], unknown: str | None) -> tuple[dict[str, Any], bool]:
    """A tokenizer.json of byte-level BPE as data, and whether its `pre` begins texts with bos_token by default."""
    where = str(meta.file)
    pre = meta.text("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        hint = f"Use the same model from its Hugging Face folder. Known rules: {', '.join(PRE_TOKENIZERS)}."
        raise CheckpointError(
            f"splits text by the unknown rule {shorten(pre)!r} (tokenizer.ggml.pre)", where=where, hint=hint
        )
    if len(set(tokens)) < len(tokens):
        raise CheckpointError("has one token twice in its tokenizer", where=where, hint=DAMAGED)
    kinds = _types(meta, tokens)
    last = max((id for id, kind in enumerate(kinds) if kind not in (CONTROL, USER, UNUSED)), default=-1)
    vocabulary = {token: id for id, token in enumerate(tokens[: last + 1])}
    merges = [merge.split(" ") for merge in meta.texts("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not (merge[0] in vocabulary and merge[1] in vocabulary and "".join(merge) in vocabulary):
            what = f"has the merge {shorten(' '.join(merge))!r}, but not its tokens"
            raise CheckpointError(what, where=where, hint=DAMAGED)
    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER)
    ]
    how = PRE_TOKENIZERS[pre]
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": how.regex is None}
    first: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if how.digits else []
    if how.regex is not None:
        first.append({"type": "Split", "pattern": {"Regex": how.regex}, "behavior": "Isolated", "invert": False})
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if how.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, letters]} if first else letters,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown if unknown in vocabulary else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": how.whole_words,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return spec, how.whole_words


def _sentencepiece(meta: Metadata, tokens: list[str]) -> str:
    """A tokenizer.json of a SentencePiece model. Raises CheckpointError where its token IDs would be others."""
    scores, kinds = meta.numbers("tokenizer.ggml.scores", len(tokens)), _types(meta, tokens)
    pieces = [importers.SentencePieceToken(*piece) for piece in zip(tokens, scores, kinds, strict=True)]
    while pieces and pieces[-1].type == UNUSED:  # rows of the table that no token has
        pieces.pop()
    model = importers.SentencePieceModel(
        pieces,
        kind=importers.BPE_KIND,
        charsmap=b"",
        puts_space_first=meta.flag("tokenizer.ggml.add_space_prefix", True),
        squeezes_space=False,
        byte_fallback=BYTE in kinds,
        spaces_every_part=True,
    )
    try:
        return importers.of_pieces(model, str(meta.file)).to_str()
    except DataError as error:
        raise CheckpointError(error.what, where=str(meta.file), hint=error.hint) from None


# --- the weights ---------------------------------------------------------------------------------------------------


class GGUFTensors:
    """The tensors of a GGUF file under transformers' names and shapes, read one at a time."""

    def __init__(self, header: _Header, layout: GGUFLayout, sizes: Sizes) -> None:
        self.file = header.file
        self.stored = header.tensors
        """By their names in the file."""
        self.dequantized = torch.bfloat16
        """The number format that quantized blocks become."""
        self._data, self._layout, self._sizes = header.data, layout, sizes
        numbers = range(sizes.layers)
        self._names = {
            theirs.format(number): pattern.format(number)
            for pattern, theirs, _ in layout.theirs()
            for number in (numbers if "{}" in pattern else (0,))
            if pattern.format(number) in self.stored
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def number_format(self, name: str) -> str | None:
        """The number format that `get` gives a tensor in by default; None where there is none of this name."""
        if name not in self._names:
            return None
        kind = self.stored[self._names[name]].kind.name
        return str(PLAIN.get(kind, self.dequantized)).removeprefix("torch.")

    def stored_name(self, name: str) -> str | None:
        """The same name, or None where there is no such tensor."""
        return name if name in self._names else None

    def num_numbers(self) -> int:
        """How many numbers all of them hold."""
        return sum(math.prod(self.stored[name].shape) for name in self._names.values())

    def factors(self, name: str) -> list[float]:
        """The numbers of a tensor of FACTORS."""
        return numbers_of(self._read(self.stored[name], torch.float32))

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """
        A tensor, on the CPU; None where there is none of this name. `dtype` is by default that of the file, and
        `dequantized` for quantized blocks. Raises CheckpointError where a number is NaN or infinite.
        """
        if name not in self._names:
            return None
        ours = self._names[name]
        stored = self.stored[ours]
        own = PLAIN.get(stored.kind.name, self.dequantized)
        tensor = finite(ours, self._read(stored, dtype or own), str(self.file), DAMAGED)
        if self._layout.shifted and ours.endswith("norm.weight"):
            tensor = (tensor.float() - 1.0).to(tensor.dtype)
        return reordered(tensor, ours, self._layout, self._sizes, inward=True)

    def int4_blocks(self, name: str) -> tuple[Tensor, Tensor] | None:
        """As `gguf_layouts.int4_blocks`, of a matrix with its rows in the order of transformers."""
        stored = self.stored[self._names[name]]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=stored.size_bytes, offset=stored.start)
        rows = torch.from_numpy(raw.copy()).view(stored.shape[0], -1)
        return int4_blocks(reordered(rows, self._names[name], self._layout, self._sizes, inward=True), stored.kind)

    def _read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        raw = np.frombuffer(self._data, dtype=np.uint8, count=stored.size_bytes, offset=stored.start)
        if plain := PLAIN.get(stored.kind.name):
            return torch.from_numpy(raw.copy()).view(plain).view(stored.shape).to(dtype)
        block, width = gguf.GGML_QUANT_SIZES[stored.kind]
        out = torch.empty(math.prod(stored.shape), dtype=dtype)
        step = CHUNK // block
        for first in range(0, len(raw) // width, step):
            some = raw[first * width : (first + step) * width].reshape(-1, width)
            numbers = dequantize(some, stored.kind).flatten()
            out[first * block : first * block + len(numbers)] = numbers
        return out.view(stored.shape)


def reordered(tensor: Tensor, name: str, layout: GGUFLayout, sizes: Sizes, *, inward: bool) -> Tensor:
    """
    A tensor of this name in GGUF, in the order of `transformers` where `inward`, else from there in that of llama.cpp.
    """
    matrix, kind = name.split(".")[-2], name.split(".")[-1]
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    if layout.interleaved and matrix in heads:
        return split_halves(tensor, heads[matrix]) if inward else interleaved(tensor, heads[matrix])
    if layout.model_type == "gpt_neox" and matrix == "attn_qkv":
        first, second = (3, sizes.heads) if inward else (sizes.heads, 3)
        return tensor.reshape(first, second, sizes.head, -1).transpose(0, 1).reshape(tensor.shape)
    turned = layout.model_type == "gpt2" and kind == "weight" and matrix in TRANSPOSED
    return tensor.t() if turned else tensor
