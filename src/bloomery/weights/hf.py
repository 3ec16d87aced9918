"""
Read and write models as folders that `transformers` loads, with the lineage of each model.

    config.json             LlamaForCausalLM, or another of architectures.py
    model.safetensors       its weights, under transformers' names; float32 where nothing else is asked for
    tokenizer.json, tokenizer_config.json (with the chat template), generation_config.json
    bloomery.json           lineage: hashes of tokenizer, chat template and shards
    SHA256SUMS              sha256 of each of these files, compared whenever the folder is read (safetensors.py)

Folders that others saved have no bloomery.json. They are read too, as are GGUF files. Such a model keeps its own
words: its tokenizer, its chat template in Jinja, its special tokens, and how its answers are sampled (`ModelLanguage`).
Saved again, it keeps them in the same files, and bloomery.json says so: its template has the name "own".

A recipe may ask for special tokens that the tokenizer of another model lacks. They get the token IDs after its own,
and the model gets rows for them. A new row is what the model has for the closest thing it knows. In the embedding, the
token that opens a document copies the row of the token that begins a text. In the head, the token that ends a document
or a message copies the row of the token that ends a text. Others get the mean of all rows. In the embedding, noise is
added to it, so that a model tells them apart.

Weights go tensor by tensor from their file to where they compute, in the format that was asked for.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from bloomery.core import cache
from bloomery.core.chat import TEMPERATURE, sampling_of
from bloomery.core.config import Context
from bloomery.core.errors import CheckpointError, shorten
from bloomery.core.io import canonical, make_folder, read_regular, sha256_bytes, write_json
from bloomery.core.records import Count, RecordPath
from bloomery.model.config import Base, Lora, ModelConfig, RopeScaling
from bloomery.model.transformer import Changes, Transformer, on_meta
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import (
    OWN,
    TEMPLATES,
    ChatRenderer,
    Renderer,
    Template,
    renderer_named,
    special_tokens,
)
from bloomery.tokenizer.jinja_sandbox import MAX_TEMPLATE
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.tokenizer.tokenizer import DOCUMENT, PAD, SPECIAL, Tokenizer
from bloomery.weights import architectures as weights_architectures
from bloomery.weights import locate, safetensors
from bloomery.weights.architectures import TABLES, Architecture, WeightMapping, gathered
from bloomery.weights.opened import (
    ADAPTER_CONFIG,
    GGUF_SUFFIX,
    NumberFormat,
    OpenedModel,
    StoredWeights,
    TakeWeight,
    WeightChange,
    add_rows,
    again,
    converted,
    filled,
    is_adapter,
    is_model,
    kept_as_in,
    opened_model,
    own_weights,
    read_file,
    understood,
)
from bloomery.weights.opened import CONFIG as CONFIG
from bloomery.weights.opened import LoadFormat as LoadFormat
from bloomery.weights.safetensors import SHARD_BYTES, Tensors, rounded, save_sharded
from bloomery.weights.safetensors import WEIGHTS as WEIGHTS
from bloomery.weights.safetensors import WEIGHTS_SUFFIX as WEIGHTS_SUFFIX

import torch
from torch import Tensor

IMPORTED = "imported"
"""Stands for the hash of the shards in the lineage of a model that others trained."""


def tokenizer_of(folder: Path, rows: int, special: Sequence[str] = SPECIAL) -> tuple[Tokenizer, dict[str, int]]:
    """
    The tokenizer of a model folder or of a file, and the special tokens that were added to it, with their ids. Raises
    CheckpointError where it has more ids than the model has rows, DataError where there is none that can be read.
    """
    if is_model(folder):
        tokenizer, added = importers.extended(language(folder).tokenizer, str(folder), special)
    else:
        tokenizer, added = importers.load_with_added(folder, special=special)
    ids = {name: tokenizer.special_id(name) for name in special}
    added |= {name: id for name, id in ids.items() if id is not None and id >= rows}
    _check_rows(tokenizer, rows, added, folder)
    return tokenizer, added


def _check_rows(tokenizer: Tokenizer, rows: int, added: Mapping[str, int], where: Path) -> None:
    """Raises CheckpointError where a tokenizer has more ids than these rows, not counting added special tokens."""
    if more := set(range(rows, tokenizer.vocab_size)) - set(added.values()):
        what = f"the tokenizer has {rows + len(more)} token IDs, but the model has {rows}"
        raise CheckpointError(what, where=str(where), hint="Use the tokenizer of this model.")


LINEAGE = "bloomery.json"
TOKENIZER_CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATE, SPECIAL_TOKENS = "chat_template.jinja", "special_tokens_map.json"
DRAWN = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
"""What transformers and vLLM do unless told otherwise: as ours. Their own top_k is 50."""
TEMPLATE_NAME = "template_name"
"""Key next to the lineage: the name in TEMPLATES of the template whose hash the lineage holds."""
BASE = "adapts"
"""Key next to the lineage, for adapters: the path of their base, its digest, and how it was kept."""
FOREIGN = "foreign"
"""Key next to the lineage: whether the tokenizer is that of a model which others trained."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What a model was made from, as hashes. A tokenizer, template or shard that does not match is refused."""

    tokenizer: str
    template: str | None
    """None for a model that never saw a conversation."""
    shards: str
    """The content hash of the shards that it was trained on; "imported" for a model that others trained."""
    base: str | None = None
    """The content hash of the stage whose model it started from."""
    step: int = 0


class Stretched(TypedDict):
    """How adapters of ours read positions, where that differs from their base."""

    context_length: Context
    rope_scaling: RopeScaling | None


class SavedBase(TypedDict):
    """What adapters of ours adapt."""

    folder: RecordPath
    digest: str
    kept_as: Base
    stretched: NotRequired[Stretched]


class SavedLineage(TypedDict):
    """The content of LINEAGE: a `Lineage`, and next to it TEMPLATE_NAME, BASE and FOREIGN."""

    tokenizer: str
    template: str | None
    shards: str
    base: NotRequired[str | None]
    step: NotRequired[Count]
    template_name: NotRequired[str]
    adapts: NotRequired[SavedBase]
    foreign: NotRequired[bool]


@dataclass(frozen=True)
class BaseModel:
    """The model that adapters adapt."""

    folder: Path
    digest: str
    stretched: bool = False
    """Whether its positions were stretched before the adapters were trained."""

    @cached_property
    def kind(self) -> Architecture:
        """How its files name its weights; under these names PEFT looks for what adapters change."""
        folder = self.folder
        while is_adapter(folder):
            folder = base_of(folder)
        return opened_model(folder).kind


@dataclass(frozen=True)
class ModelLanguage:
    """The words of a model: its tokenizer, how it writes conversations, and how its answers are sampled."""

    tokenizer: Tokenizer
    chat: ChatRenderer | None
    """None for a downloaded model without a chat template: it continues text."""
    generation: Mapping[str, Any]
    """What generation_config.json says."""
    roles: Mapping[str, str | None] = field(default_factory=dict)
    """bos_token, eos_token, pad_token, unk_token -> its text. Empty for models that Bloomery has trained."""
    end_ids: frozenset[int] = frozenset()
    """More token IDs that end a text, next to the one that opens a document and those that end an answer."""
    is_ours: bool = True
    """Whether its template is one of TEMPLATES, and documents open with its token."""
    source: Path | None = None
    """Of a model that others trained: the model folder or GGUF file that `generation` comes from."""

    @classmethod
    def ours(cls, renderer: Renderer) -> "ModelLanguage":
        """The words of a model that Bloomery trains."""
        return cls(renderer.tokenizer, renderer, DRAWN)

    def roles_with(self, *, chats: bool) -> dict[str, str | None]:
        """`roles` as files hold them. `chats`: whether a model of Bloomery ends a message, or a document."""
        if not self.is_ours:
            return {**self.roles, **({"eos_token": self.chat.template.end} if isinstance(self.chat, Renderer) else {})}
        assert isinstance(self.chat, Renderer), "a language of ours has a renderer of ours"
        template = self.chat.template
        opening, end = (template.opening or DOCUMENT, template.end) if chats else (DOCUMENT, DOCUMENT)
        return {"bos_token": opening, "eos_token": end, "pad_token": PAD}

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a SamplingConfig that the model's makers recommend. Raises DataError for a value that is none."""
        if self.source is None or self.source.suffix != GGUF_SUFFIX:
            return sampling_of(self.generation, str(self.source / GENERATION if self.source else GENERATION))
        from bloomery.weights.gguf_layouts import SAMPLING

        keys = {theirs: key for key, theirs in SAMPLING.items()}
        hint = "Correct it, for example with gguf-set-metadata, or use another file."
        return sampling_of(self.generation, str(self.source), keys=keys, hint=hint)

    @property
    def opening_ids(self) -> list[int]:
        """What stands before a plain text: the token that opens a document, or what the model's tokenizer adds."""
        return [self.tokenizer.document_id] if self.is_ours else list(self.tokenizer.opening_ids)

    def text_ids(self, text: str) -> list[int]:
        """Token IDs of a text that the model is to continue. A text without tokens is the token before any text."""
        return [*self.opening_ids, *self.tokenizer.encode(text)] or [self.tokenizer.document_id]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token IDs that end a continuation."""
        opening, chat = self.tokenizer.boundary_id, self.chat.end_ids if self.chat else frozenset()
        return self.end_ids | chat | (frozenset() if opening is None else {opening})


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    language: ModelLanguage
    made_from: Lineage | Callable[[], Lineage]
    """Its lineage, or what hashes the words of a model that others trained, which takes as long as reading them."""
    folder: Path
    stored: Mapping[str, Tensor] | None = None
    """The weights, where they stay in their files and the model has none (`streamed`)."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by name, without a tied head, which is the embedding. Those in files are read when asked for."""
        return own_weights(self.model) if self.stored is None else self.stored

    @property
    def lineage(self) -> Lineage:
        return self.made_from if isinstance(self.made_from, Lineage) else self.made_from()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.language.tokenizer

    @property
    def renderer(self) -> ChatRenderer:
        """How it writes conversations. Raises CheckpointError for a model that only continues text."""
        if self.language.chat is None:
            hint = (
                "Continue a text: bloomery chat MODEL --complete --prompt TEXT\n"
                f"Or use a template: --template NAME, one of {', '.join(TEMPLATES)}."
            )
            raise CheckpointError("has no chat template: it continues text", where=str(self.folder), hint=hint)
        return self.language.chat


def save(
    folder: Path,
    model: Transformer,
    words: ModelLanguage | Renderer,
    lineage: Lineage,
    *,
    number_format: NumberFormat | None = "float32",
    weights: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """
    Write a model folder. The tied head is not written twice. A model that never saw a conversation ends with the token
    that opens the next document, as it has learned, and has no chat template.

    Without a number format, each tensor keeps its own. `weights`, by our names, stand in for those of the model:
    copies, such as were gathered from ranks, or such as stay in their files until they are written. Raises
    CheckpointError where one of them holds what the number format does not.
    """
    kind, own = weights_architectures.architecture(model.config), own_weights(model)
    tensors = own if weights is None else weights
    form: torch.dtype | None = None if number_format is None else getattr(torch, number_format)
    where, pieces = str(folder), kind.pieces(list(own))
    makers = {one.theirs: partial(_made, one, tensors, form, where) for one in pieces}
    shapes, forms = dict[str, list[int]](), dict[str, torch.dtype]()
    for theirs, make in makers.items():  # raises before anything is written
        shapes[theirs], forms[theirs] = list((tensor := make()).shape), tensor.dtype
    make_folder(folder)
    save_sharded(folder, makers, shapes, forms, shard_bytes)
    facts = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "vocab_size": model.vocab_size,
        **kind.describe(model.config),
        "torch_dtype": number_format or str(own["embed.weight"].dtype).removeprefix("torch."),
    }
    words = ModelLanguage.ours(words) if isinstance(words, Renderer) else words
    ids, name = write_words(folder, words, model.config.context_length, chats=lineage.template is not None)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # or transformers has defaults for them
    write_json(folder / CONFIG, facts | no_ids | ids)
    write_json(folder / GENERATION, {**words.generation} | ids)
    write_json(folder / LINEAGE, asdict(lineage) | name)
    safetensors.write_sums(folder)


def _made(piece: WeightMapping, tensors: Mapping[str, Tensor], form: torch.dtype | None, where: str) -> Tensor:
    """A tensor of transformers, in a number format. Raises CheckpointError where that does not hold its numbers."""
    tensor = gathered(piece, tensors)
    return tensor if form is None else rounded(piece.theirs, tensor, form, where)


def write_words(
    folder: Path, words: ModelLanguage, context: int, *, chats: bool
) -> tuple[dict[str, Any], dict[str, str | bool]]:
    """
    Write the tokenizer and its configuration with the chat template. Returns the special token IDs of config.json, and
    what the lineage says of the template.
    """
    words.tokenizer.save(folder)
    roles = {role: text for role, text in words.roles_with(chats=chats).items() if text}
    ids: dict[str, Any] = {
        f"{role}_id": words.tokenizer.special_id(text) for role, text in roles.items() if role != "unk_token"
    }
    if isinstance(words.chat, JinjaRenderer) and words.generation.get("eos_token_id") is not None:
        ids["eos_token_id"] = words.generation["eos_token_id"]
    elif not words.is_ours and not isinstance(words.chat, Renderer) and len(words.end_ids) > 1:
        ids["eos_token_id"] = sorted(words.end_ids)
    if not words.is_ours and not ids.keys() & {"bos_token_id", "eos_token_id"}:  # only config.json names them
        ids |= {"bos_token_id": id} if (id := words.tokenizer.boundary_id) is not None else {}
        ids |= {"eos_token_id": sorted(words.end_ids)} if words.end_ids else {}
    name: dict[str, str | bool] = {} if words.is_ours else {TEMPLATE_NAME: OWN, FOREIGN: True}
    chat = {}
    if words.chat is not None and (chats or not words.is_ours):
        chat, name = {"chat_template": words.chat.source}, {**name, TEMPLATE_NAME: words.chat.name}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **roles}
    write_json(folder / TOKENIZER_CONFIG, config | {"clean_up_tokenization_spaces": False} | chat)
    return ids, name


def load(
    path: Path,
    device: torch.device | str = "cpu",
    *,
    dtype: LoadFormat = "float32",
    base: Base = "float32",
    special: Sequence[str] = (),
    template: str | None = None,
    take: TakeWeight | None = None,
) -> Loaded:
    """
    Read a model folder written by `save`, or by transformers, or a GGUF file. Raises CheckpointError if a file is
    missing, torn or differs from its hash. The same if weights are not finite, have another shape, or are more than
    the model has. The same for a pickle, an unknown quantization and an unknown architecture. The same if the
    tokenizer or the template is not the model's; the error says which differ.

    `dtype` is the number format that the weights are kept in, `base` that of the matrices of blocks where they are to
    be frozen. No more than one weight exists in another format at a time. A downloaded model gets the tokens of
    `special` that it lacks, with rows for them. `template`, a name of TEMPLATES, replaces the model's own. `take` gets
    the weights one by one; the model then has shapes without numbers.
    """
    loaded = _loaded(path, _Kept(device, dtype, base, take=take), special)
    if path.is_dir():
        safetensors.verify(path)  # last: what cannot be read says more of itself than its hash
    if template is None:
        return loaded
    chat = renderer_named(loaded.tokenizer, template)
    return replace(loaded, language=replace(loaded.language, tokenizer=chat.tokenizer, chat=chat))


def streamed(path: Path, dtype: LoadFormat = "float32") -> Loaded:
    """
    As `load`, but the weights are read, checked, and left in their files: `Loaded.weights` reads each again when it is
    asked for. `dtype` is the number format of quantized GGUF blocks, of those alone.
    """
    loaded = _loaded(path, _Kept("cpu", dtype, "float32", streams=True), ())
    if path.is_dir():
        safetensors.verify(path)
    return loaded


def language(path: Path) -> ModelLanguage:
    """The words of a model, without its weights: of a model folder, a GGUF file, or adapters. Raises as `load` does."""
    if is_adapter(path):
        base = base_of(path)
        return _adapted_language(path, base, language(base))
    return _language(opened_model(path))


def config_of(path: Path) -> tuple[ModelConfig, int]:
    """The shape of a model and how many rows its tables have, without its weights. Raises CheckpointError."""
    if is_adapter(path):
        from bloomery.weights import peft

        _, own, below = _base(path, peft.read(path))
        shape, rows = config_of(below)
        return stretched(shape, own), rows
    opened = opened_model(path)
    return opened.config, opened.rows


def stretched(shape: ModelConfig, own: Mapping[str, Any]) -> ModelConfig:
    """The shape of a base with the positions that its adapters were trained with."""
    return ModelConfig.model_validate(shape.model_dump() | own["stretched"]) if "stretched" in own else shape


def frozen_format(path: Path) -> Base:
    """The format of a model's matrices in its files, in which a frozen base is kept: float16 becomes bfloat16."""
    if is_adapter(path):
        return frozen_format(base_of(path))
    return "float32" if kept_as_in("auto", opened_model(path)) == "float32" else "bfloat16"


@dataclass(frozen=True)
class _Kept:
    """How and where weights are kept."""

    device: torch.device | str
    dtype: LoadFormat
    base: Base
    change: WeightChange | None = None
    take: TakeWeight | None = None
    streams: bool = False
    """Whether weights are left in their files."""

    def filled(self, opened: OpenedModel, num_ids: int) -> Transformer:
        change, take = (self._tables_changed, _left) if self.streams else (self.change, self.take)
        return filled(opened, num_ids, self.dtype, self.device, self.base, change, take)

    def stored(self, opened: OpenedModel, model: Transformer) -> Mapping[str, Tensor] | None:
        return StoredWeights(opened, model, self.dtype, self.change) if self.streams else None

    def _tables_changed(self, name: str, weight: Tensor) -> Tensor:
        return weight if self.change is None or name not in TABLES else self.change(name, weight)


def _left(model: Transformer, name: str, weight: Tensor, kept_as: str, base: Base) -> None:
    """A weight that was read and checked, and stays in its file."""


def _loaded(path: Path, kept: _Kept, special: Sequence[str]) -> Loaded:
    """As `load`, whatever the hashes of the files are."""
    if is_adapter(path):
        return _with_adapters(path, kept, special)
    opened = opened_model(path)
    words = _language(opened)
    lineage: Lineage | Callable[[], Lineage]
    if opened.gguf is None and (path / LINEAGE).is_file():
        lineage = lineage_of(path)
        model = kept.filled(opened, opened.rows)
    elif any(words.tokenizer.special_id(name) is None for name in special):
        tokenizer, added = tokenizer_of(path, opened.rows, special)
        words = ModelLanguage.ours(Renderer(tokenizer))
        model = kept.filled(opened, max(opened.rows, tokenizer.vocab_size))
        add_rows(model, opened.rows, added, opened.facts)
        lineage = Lineage(tokenizer=tokenizer.hash, template=None, shards=IMPORTED)
    else:
        model = kept.filled(opened, opened.rows)
        lineage = partial(_imported_lineage, words)
    return Loaded(model.eval(), words, lineage, path, kept.stored(opened, model))


def _imported_lineage(words: ModelLanguage) -> Lineage:
    template = None if words.chat is None else words.chat.hash
    return Lineage(tokenizer=words.tokenizer.hash, template=template, shards=IMPORTED)


def _language(opened: OpenedModel) -> ModelLanguage:
    path = opened.path
    if opened.gguf is not None:
        model = opened.gguf
        tokenizer = importers.from_json(model.tokenizer_spec, str(path), model.roles, opens=model.add_bos)
        return _foreign(tokenizer, model.chat_template, model.roles, dict(model.generation), opened)
    if not (path / LINEAGE).is_file():
        return _language_of_folder(opened)
    saved, lineage = read_file(path / LINEAGE, SavedLineage), lineage_of(path)
    if saved.get(FOREIGN):
        words = _language_of_folder(opened)
        _same("tokenizer", lineage.tokenizer, words.tokenizer.hash, path)
        if saved.get(TEMPLATE_NAME) != OWN:
            return replace(words, chat=Renderer(words.tokenizer, template_of(path)))
        _same("chat template", lineage.template or "", words.chat.hash if words.chat else "", path)
        return words
    tokenizer = Tokenizer.load(path)
    _same("tokenizer", lineage.tokenizer, tokenizer.hash, path)
    return ModelLanguage.ours(Renderer(tokenizer, template_of(path)))


def _language_of_folder(opened: OpenedModel, below: Mapping[str, Any] | None = None) -> ModelLanguage:
    """The words of a model that others trained, from its folder. It overrides the generation settings of `below`."""
    folder = opened.path
    settings: dict[str, Any] = _settings(folder / TOKENIZER_CONFIG)
    roles = importers.roles_of(folder)
    text: Any = settings.get("chat_template")
    if (folder / CHAT_TEMPLATE).is_file():
        try:
            text = read_regular(folder / CHAT_TEMPLATE, 4 * MAX_TEMPLATE).decode()
        except (OSError, ValueError) as error:
            what = f"cannot be read as a chat template: {error}"
            raise CheckpointError(what, where=str(folder / CHAT_TEMPLATE), hint=again(folder)) from None
    if isinstance(text, list):
        named = {str(entry.get("name")): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if text is not None and not isinstance(text, str):
        what = f"its chat_template is {shorten(repr(text))}, not a text"
        raise CheckpointError(what, where=str(folder / TOKENIZER_CONFIG), hint=again(folder))
    tokenizer = importers.load_foreign(folder, roles, _boundaries(opened))
    return _foreign(tokenizer, text, roles, {**(below or {}), **_settings(folder / GENERATION)}, opened)


def _ids(*values: Any) -> list[int]:
    """The token IDs among values of a configuration, each one ID, several, or none."""
    return [id for value in values for id in (value if isinstance(value, list) else [value]) if type(id) is int]


def _boundaries(opened: OpenedModel) -> list[int]:
    """The token IDs that begin or end a text, by config.json."""
    return _ids(opened.facts.get("bos_token_id"), opened.facts.get("eos_token_id"))


def _settings(file: Path) -> dict[str, Any]:
    """A file of settings that a model folder may lack."""
    return dict(read_file(file, dict[str, Any])) if file.is_file() else {}


def _foreign(
    tokenizer: Tokenizer,
    template: str | None,
    roles: Mapping[str, str | None],
    generation: dict[str, Any],
    opened: OpenedModel,
) -> ModelLanguage:
    """
    The words of a model that others trained, without special tokens that its tables have no row for: Gemma 3 has one
    for images. Raises CheckpointError where other tokens have no row.
    """
    beyond = {token["id"] for token in tokenizer.outline["added_tokens"] if token["special"]}
    beyond -= set(range(opened.rows))
    _check_rows(tokenizer, opened.rows, {str(id): id for id in beyond}, opened.path)
    if beyond:
        spec = tokenizer.spec
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] not in beyond]
        tokenizer = importers.from_json(spec, str(opened.path), roles, _boundaries(opened))
    ends = set(_ids(generation.get("eos_token_id"), opened.facts.get("eos_token_id")))
    if (end := roles.get("eos_token")) and (id := tokenizer.special_id(end)) is not None:
        ends.add(id)
    ends = {id for id in ends if 0 <= id < opened.rows}
    chat = None if template is None else JinjaRenderer(tokenizer, template, roles, ends)
    return ModelLanguage(tokenizer, chat, generation, roles, frozenset(ends), is_ours=False, source=opened.path)


def template_of(folder: Path) -> Template | None:
    """The chat template that a model was trained with; None for none. Raises CheckpointError where ours is another."""
    name = read_file(folder / LINEAGE, SavedLineage).get(TEMPLATE_NAME, "bloomery")
    trained = lineage_of(folder).template
    if trained is None:
        return None
    if name not in TEMPLATES:
        what = f"the model was trained with the chat template {name} {trained[:8]}; known: {', '.join(TEMPLATES)}"
        raise CheckpointError(what, where=str(folder), hint="Use the version of Bloomery that trained it.")
    _same("chat template", trained, TEMPLATES[name].hash, folder, name)
    return TEMPLATES[name]


def fill(model: Transformer, folder: Path, lineage: Lineage) -> None:
    """
    Read the weights of a model folder into a model, where it is. Raises CheckpointError where they were not made from
    what `lineage` says (at whatever step), have another shape, are not finite, or are damaged.
    """
    _same_lineage(folder, lineage)
    kind = understood(folder / CONFIG)[1]  # as it was saved, by whichever version
    tensors = Tensors(folder, again(folder))
    for name, weight in converted(model, tensors, kind):
        with torch.no_grad():
            model.get_parameter(name).copy_(weight)
    safetensors.verify(folder)


def _same_lineage(folder: Path, lineage: Lineage) -> None:
    saved, expected = (asdict(replace(one, step=0)) for one in (lineage_of(folder), lineage))
    for name in saved:
        if saved[name] != expected[name]:
            was, is_now = (one[name][:8] if one[name] else "none" for one in (saved, expected))
            hint = f"To train from the start, remove {folder.parent}."
            raise CheckpointError(f"was made with {name} {was}, but this one is {is_now}", where=str(folder), hint=hint)


def save_adapters(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: Transformer,
    words: ModelLanguage | Renderer,
    lineage: Lineage,
    settings: Lora,
    base: BaseModel,
) -> None:
    """Write the adapters of a model without it, in PEFT's files, with the tokenizer, the template and the lineage."""
    from bloomery.weights import peft

    make_folder(folder)
    base_path = os.path.relpath(base.folder.resolve(), folder.resolve())
    peft.save(folder, weights, model, settings, base_path, base.kind)
    words = ModelLanguage.ours(words) if isinstance(words, Renderer) else words
    _, name = write_words(folder, words, model.config.context_length, chats=True)
    own: dict[str, Any] = {"folder": base_path, "digest": base.digest, "kept_as": settings.frozen_dtype}
    if base.stretched:
        own["stretched"] = model.config.model_dump(mode="json", include={"context_length", "rope_scaling"})
    write_json(folder / LINEAGE, asdict(lineage) | name | {BASE: own})
    safetensors.write_sums(folder)


def fill_adapters(model: Transformer, folder: Path, lineage: Lineage) -> None:
    """As `fill`, for the adapters of a model."""
    from bloomery.weights import peft

    _same_lineage(folder, lineage)
    peft.fill(model, folder)
    safetensors.verify(folder)


def _with_adapters(folder: Path, kept: _Kept, special: Sequence[str]) -> Loaded:
    """
    A base with the adapters of a folder merged into it, weight by weight: each in float32 before it takes the format
    that was asked for. Those of PEFT have the tokenizer and lineage of the base.
    """
    from bloomery.weights import peft

    adapter, facts, own, base_folder, below = _adapter_and_base(folder)
    words = _adapted_language(folder, base_folder, below)
    if facts and words.chat is not None and words.chat.name != OWN:
        names = special_tokens(words.chat.name)
        if any(words.tokenizer.holds(name) and not below.tokenizer.holds(name) for name in names):
            special = names
    merged = peft.merging(on_meta(*config_of(base_folder)), adapter, own["kept_as"], folder)
    more = kept.change  # of adapters that adapt these
    change = merged if more is None else lambda name, weight: more(name, merged(name, weight))
    loaded = _loaded(base_folder, replace(kept, change=change), special)
    loaded.model.config = stretched(loaded.model.config, own)
    if base_folder.is_dir():
        safetensors.verify(base_folder)
    if not facts:
        return replace(loaded, language=words, folder=folder)
    return replace(loaded, language=words, made_from=lineage_of(folder), folder=folder)


@dataclass(frozen=True)
class SeparateAdapter:
    """Adapters that are not merged into their base."""

    base: Path
    language: ModelLanguage
    changes: Changes


def separate_adapter(folder: Path, dtype: LoadFormat) -> SeparateAdapter | None:
    """
    The adapters of a folder for a base whose weights are kept in `dtype`. None where only the merged model is the one
    that was trained: of DoRA, adapters of adapters, more tokens, longer positions, and a base in another format.
    Raises CheckpointError as `load` does.
    """
    from bloomery.weights import peft

    adapter, _, own, base_folder, below = _adapter_and_base(folder)
    if adapter.magnitudes or is_adapter(base_folder) or "stretched" in own:
        return None
    words = _adapted_language(folder, base_folder, below)
    if own["kept_as"] not in ("float32", dtype, kept_as_in("auto", opened_model(base_folder))):
        return None
    shape, rows = config_of(base_folder)
    if words.tokenizer.vocab_size != below.tokenizer.vocab_size or words.tokenizer.vocab_size > rows:
        return None
    if (folder / LINEAGE).is_file():
        safetensors.verify(folder)
    return SeparateAdapter(base_folder, words, peft.changes(on_meta(shape, rows), adapter, folder))


def _adapter_and_base(folder: Path) -> tuple[Any, dict[str, Any], dict[str, Any], Path, ModelLanguage]:
    """Adapters, as `_base` what they adapt, and its words. Raises CheckpointError for another base."""
    from bloomery.weights import peft

    adapter = peft.read(folder)
    facts, own, base_folder = _base(folder, adapter)
    if facts:
        _same("base", own["digest"], digest(base_folder), folder)
    return adapter, facts, own, base_folder, language(base_folder)


def _adapted_language(folder: Path, base_folder: Path, words: ModelLanguage) -> ModelLanguage:
    """The words of adapters: those of their base, in the template that they were trained with."""
    if not (folder / LINEAGE).is_file():
        return _language_of_peft(folder, base_folder, words)
    saved, lineage = read_file(folder / LINEAGE, SavedLineage), lineage_of(folder)
    if saved.get(TEMPLATE_NAME) == OWN:
        _same("tokenizer", lineage.tokenizer, words.tokenizer.hash, folder)
        _same("chat template", lineage.template or "", words.chat.hash if words.chat else "", folder)
        return words
    tokenizer = importers.load_foreign(folder) if saved.get(FOREIGN) else Tokenizer.load(folder)
    _same("tokenizer", lineage.tokenizer, tokenizer.hash, folder)
    chat = Renderer(tokenizer, template_of(folder))
    if saved.get(FOREIGN):
        return replace(words, tokenizer=tokenizer, chat=chat)
    return replace(ModelLanguage.ours(chat), generation=words.generation)


def _language_of_peft(folder: Path, base_folder: Path, words: ModelLanguage) -> ModelLanguage:
    """The words of PEFT's adapters: their folder's if it has a tokenizer and a template, or else those of the base."""
    if not any((folder / name).is_file() for name in importers.IN_FOLDERS):
        return words
    while is_adapter(base_folder):
        base_folder = base_of(base_folder)
    own = _language_of_folder(replace(opened_model(base_folder), path=folder), words.generation)
    importers.check_ids(own.tokenizer, words.tokenizer, str(folder))
    return words if own.chat is None else own


def base_of(folder: Path) -> Path:
    """The model that the adapters of a folder adapt. Raises CheckpointError where it is not there."""
    from bloomery.weights import peft

    return _base(folder, peft.read(folder))[2]


def _base(
    folder: Path, adapter: Any, above: frozenset[Path] = frozenset()
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """
    What adapters were made from where they are ours, what they adapt, and where that lies. `above` are folders of
    adapters of these. Raises CheckpointError where adapters end at no model.
    """
    from bloomery.weights import peft

    facts: dict[str, Any] = {}
    if (folder / LINEAGE).exists():
        facts = {**read_file(folder / LINEAGE, SavedLineage)}
        if BASE not in facts:
            hint = "Export the adapters again, or remove this file to use the base model that PEFT's file names."
            raise CheckpointError(
                f"has no key {BASE!r}, which names the base model of the adapters",
                where=str(folder / LINEAGE),
                hint=hint,
            )
    own = facts.get(BASE, {"kept_as": "float32"})
    if facts:
        base_folder = locate.named_model(folder / LINEAGE, own["folder"])
    else:
        base_folder = locate.named_model(folder / ADAPTER_CONFIG, adapter.base, adapter.revision)
    if is_adapter(base_folder) and base_folder in (above := above | {folder.resolve()}):
        hint = f"Set the folder of the base model in {ADAPTER_CONFIG if not facts else LINEAGE}."
        raise CheckpointError("is its own base model, directly or through other adapters", where=str(folder), hint=hint)
    if is_adapter(base_folder):
        _base(base_folder, peft.read(base_folder), above)
    return facts, own, base_folder


def digest(folder: Path) -> str:
    """
    A hash of the configuration, tokenizer and weights of a model folder. Raises CheckpointError where it is none, or
    damaged.
    """
    if not is_model(folder):
        hint = "Give a model folder with config.json, safetensors and a tokenizer."
        raise CheckpointError("holds no model", where=str(folder), hint=hint)
    if folder.is_file():
        return cache.sha256_of(folder)
    safetensors.verify(folder)
    endings = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
    names = sorted(file for pattern in endings for file in folder.glob(pattern))
    return sha256_bytes(canonical([[file.name, cache.sha256_of(file)] for file in names]))


def _same(what: str, trained: str, current: str, folder: Path, name: str = "") -> None:
    if trained != current:
        raise CheckpointError(
            f"the model was trained with the {what} {f'{name} {trained[:8]}'.strip()}, but this one is {current[:8]}",
            where=str(folder),
            hint=f"Use the {what} next to the weights, or train again.",
        )


def lineage_of(folder: Path) -> Lineage:
    """What the model of a folder says it was made from. Raises CheckpointError where that cannot be read."""

    saved: dict[str, Any] = {**read_file(folder / LINEAGE, SavedLineage)}
    return Lineage(**{one.name: saved[one.name] for one in fields(Lineage) if one.name in saved})
