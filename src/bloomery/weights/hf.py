"""
Read and write models as folders that `transformers` loads, with the lineage of each model.

    config.json             LlamaForCausalLM, or another of architectures.py
    model.safetensors       its weights, under transformers' names; float32 where nothing else is asked for
    tokenizer.json, tokenizer_config.json (with the chat template), generation_config.json
    bloomery.json           lineage: hashes of tokenizer, chat template and shards
    SHA256SUMS              sha256 of each of these files, compared whenever the folder is read (integrity.py)

Folders that others saved have no bloomery.json. They are read too. Their tokenizer becomes ours: it gets the
special tokens that conversations need, and the model gets rows for those tokens.

A new row is what the model has for the closest thing it knows. In the embedding, the token that opens a document
copies the row of the token that begins a text. In the head, the token that ends a document or a message copies the
row of the token that ends a text. The rest is the mean of all rows.

Importing is in this file because it needs the same folder reader.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from bloomery.core import cache
from bloomery.core.chat import TEMPERATURE
from bloomery.core.config import explained
from bloomery.core.errors import CheckpointError, shorten
from bloomery.core.io import MANIFEST, canonical, make_folder, sha256_bytes, write_json
from bloomery.core.records import Count, RecordPath, read_record
from bloomery.model.config import Base, Lora, ModelConfig, cost
from bloomery.model.transformer import Transformer
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer, Template
from bloomery.tokenizer.tokenizer import DOCUMENT, END, MAX_IDS, PAD, SPECIAL, Tokenizer
from bloomery.weights import architectures as weights_architectures
from bloomery.weights import integrity, peft
from bloomery.weights.architectures import BUFFERS, TABLES, Architecture, WeightMapping, gathered, spread
from bloomery.weights.safetensors import INDEX, SHARD_BYTES, UNROUNDED, Tensors, is_pickled, rounded, save_sharded
from bloomery.weights.safetensors import WEIGHTS as WEIGHTS

import torch
from torch import Tensor

IMPORTED = "imported"
"""Stands for the hash of the shards in the lineage of a model that others trained."""


def tokenizer_of(folder: Path, rows: int, special: Sequence[str] = SPECIAL) -> tuple[Tokenizer, dict[str, int]]:
    """
    The tokenizer of a model folder or of a file, and the special tokens that were added to it, with their ids. Raises
    CheckpointError where it has more ids than the model has rows, DataError where there is none that can be read.
    """
    tokenizer, added = importers.load_with_added(folder, special=special)
    ids = {name: tokenizer.special_id(name) for name in special}
    added |= {name: id for name, id in ids.items() if id is not None and id >= rows}
    if more := set(range(rows, tokenizer.vocab_size)) - set(added.values()):
        what = f"the tokenizer has {rows + len(more)} ids, and the model {rows}"
        raise CheckpointError(what, where=str(folder), hint="It is the tokenizer of another model.")
    return tokenizer, added


def add_rows(model: Transformer, rows: int, added: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """
    Fill the rows of the special tokens that were added to a model of `rows` ids, and any that nothing uses. `facts`
    may say which ids begin and end a text (bos_token_id, eos_token_id).
    """
    begin, end = (_first(facts.get(name)) for name in ("bos_token_id", "eos_token_id"))
    begin, end = (begin if begin is not None else end), (end if end is not None else begin)
    embed, head = model.embed.weight, model.head.weight
    with torch.no_grad():
        for table, opens in ((embed, begin), (head, end)):
            mean = table[:rows].float().mean(0)
            table[rows:] = mean.to(table.dtype)
            for name, id in added.items():
                like = opens if name == DOCUMENT else end if name == END else None
                table[id] = mean.to(table.dtype) if like is None else _row(table, like, rows, mean)
            if head is embed:
                break


def _row(table: Tensor, id: int, rows: int, mean: Tensor) -> Tensor:
    return table[id].clone() if id < rows else mean.to(table.dtype)


def _first(value: Any) -> int | None:
    """Of one id or several, the first; None for what is no id."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if type(value) is int and value >= 0 else None


T = TypeVar("T")
CONFIG, LINEAGE = "config.json", "bloomery.json"
DRAWN = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
"""What transformers and vLLM do unless told otherwise: as ours. Their own top_k is 50."""
TEMPLATE_NAME = "template_name"
"""Key next to the lineage: the name in TEMPLATES of the template whose hash the lineage holds."""
BASE = "adapts"
"""Key next to the lineage, for adapters: the path of their base, its digest, and how it was kept."""
THEIRS = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "tie_embeddings": ("tie_word_embeddings",),
}
"""Fields of a ModelConfig, and the keys of config.json that they come from under another name."""
Size = Annotated[int, Field(ge=0, lt=2**63)]
"""Whether it can be is for ModelConfig to say."""
NumberFormat = Literal["float32", "bfloat16", "float16"]


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


class SavedBase(TypedDict):
    """What adapters of ours adapt."""

    folder: RecordPath
    digest: str
    kept_as: Base


class SavedLineage(TypedDict):
    """The content of LINEAGE: a `Lineage`, and next to it TEMPLATE_NAME and BASE."""

    tokenizer: str
    template: str | None
    shards: str
    base: NotRequired[str | None]
    step: NotRequired[Count]
    template_name: NotRequired[str]
    adapts: NotRequired[SavedBase]


class ConfigFile(TypedDict, total=False):
    """
    What is read of a config.json before its numbers are checked as those of a ModelConfig: whose it is, and the values
    that are no plain numbers.
    """

    architectures: object
    model_type: str | None
    vocab_size: int
    bloomery: dict[str, Any]
    hidden_act: str
    activation_function: str
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    rope_theta: float | None
    layer_types: list[str] | None
    num_hidden_layers: Annotated[int, Field(lt=10**6)]
    num_attention_heads: Size
    n_embd: Size
    head_dim: Size | None
    sliding_window: Size | None
    max_window_layers: Count


@dataclass(frozen=True)
class BaseModel:
    """The model that adapters adapt."""

    folder: Path
    digest: str


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    tokenizer: Tokenizer
    renderer: Renderer
    lineage: Lineage
    folder: Path


def save(
    folder: Path,
    model: Transformer,
    renderer: Renderer,
    lineage: Lineage,
    *,
    number_format: NumberFormat = "float32",
    weights: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """
    Write a model folder. The tied head is not written twice. A model that never saw a conversation ends with the token
    that opens the next document, as it has learned, and has no chat template.

    `weights`, by our names, stand in for those of the model: copies, or such as were gathered from ranks. Raises
    CheckpointError where one of them holds what the number format does not.
    """
    tokenizer, template = renderer.tokenizer, renderer.template
    chats = lineage.template is not None
    opening, end = (template.opening or DOCUMENT, template.end) if chats else (DOCUMENT, DOCUMENT)
    ids = {
        "bos_token_id": tokenizer.special_id(opening),
        "eos_token_id": tokenizer.special_id(end),
        "pad_token_id": tokenizer.pad_id,
    }
    kind, own = weights_architectures.architecture(model.config), _own(model)
    tensors = own if weights is None else {name: weights[name] for name in own}
    form: torch.dtype = getattr(torch, number_format)
    where, pieces = str(folder), kind.pieces(list(own))
    makers = {one.theirs: partial(_made, one, tensors, form, where) for one in pieces}
    for make in makers.values():
        make()  # raises before anything is written
    make_folder(folder)
    save_sharded(folder, makers, form, shard_bytes)
    facts = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "vocab_size": model.vocab_size,
        **kind.describe(model.config),
        "torch_dtype": number_format,
    }
    write_json(folder / CONFIG, facts | ids)
    write_json(folder / "generation_config.json", DRAWN | ids)
    tokenizer.save(folder)
    chat = {"chat_template": template.jinja()} if chats else {}
    write_json(folder / "tokenizer_config.json", _tokenizer_config(opening, end, model.config.context_length) | chat)
    write_json(folder / LINEAGE, asdict(lineage) | ({TEMPLATE_NAME: template.name} if chats else {}))
    integrity.write_sums(folder)


def _made(piece: WeightMapping, tensors: Mapping[str, Tensor], form: torch.dtype, where: str) -> Tensor:
    """A tensor of transformers, in a number format. Raises CheckpointError where that does not hold its numbers."""
    return rounded(piece.theirs, gathered(piece, tensors), form, where)


def load(folder: Path, device: torch.device | str = "cpu", special: Sequence[str] = SPECIAL) -> Loaded:
    """
    Read a model folder written by `save`, or by transformers. Raises CheckpointError if a file is missing, torn or
    differs from its hash. The same if weights are not finite, have another shape, are quantized, are more than the
    model has or are a pickle, or if the architecture is unknown. The same if the tokenizer or the template is not the
    model's; the error says which differ. An imported model gets the tokens of `special` that it lacks.
    """
    loaded = _loaded(folder, device, special)
    integrity.verify(folder)  # last: what cannot be read says more of itself than its hash
    return loaded


def _loaded(folder: Path, device: torch.device | str, special: Sequence[str]) -> Loaded:
    """As `load`, whatever the hashes of the files are."""
    if peft.is_adapter(folder):
        return _with_adapters(folder, device, special)
    if not (folder / CONFIG).is_file():
        hint = "Name a run folder, a stage folder, or a checkpoint folder."
        raise CheckpointError(f"there is no {CONFIG}", where=str(folder), hint=hint)
    facts, kind, config, rows = _understood(folder / CONFIG)
    if not (folder / LINEAGE).is_file():
        tokenizer, added = tokenizer_of(folder, rows, special)
        model = _filled(folder, kind, config, rows, max(rows, tokenizer.vocab_size))
        add_rows(model, rows, added, facts)
        lineage = Lineage(tokenizer=tokenizer.hash, template=None, shards=IMPORTED)
        return Loaded(model.to(device).eval(), tokenizer, Renderer(tokenizer), lineage, folder)
    lineage = lineage_of(folder)
    tokenizer = Tokenizer.load(folder)
    _same("tokenizer", lineage.tokenizer, tokenizer.hash, folder)
    renderer = Renderer(tokenizer, template_of(folder))
    model = _filled(folder, kind, config, rows, rows)
    return Loaded(model.to(device).eval(), tokenizer, renderer, lineage, folder)


def template_of(folder: Path) -> Template | None:
    """The chat template that a model was trained with; None for none. Raises CheckpointError where ours is another."""
    name = _read(folder / LINEAGE, SavedLineage).get(TEMPLATE_NAME, "bloomery")
    trained = lineage_of(folder).template
    if trained is None:
        return None
    if name not in TEMPLATES:
        what = f"the model was trained with the chat template {name} {trained[:8]}; here are {', '.join(TEMPLATES)}"
        raise CheckpointError(what, where=str(folder), hint="Use the version that trained it.")
    _same("chat template", trained, TEMPLATES[name].hash, folder, name)
    return TEMPLATES[name]


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model, or adapters for one, be it one that is refused when it is read."""
    weights = (folder / WEIGHTS).is_file() or (folder / INDEX).is_file() or is_pickled(folder) != ""
    return ((folder / CONFIG).is_file() and weights) or peft.is_adapter(folder)


def fill(model: Transformer, folder: Path, lineage: Lineage) -> None:
    """
    Read the weights of a model folder into a model, where it is. Raises CheckpointError where they were not made from
    what `lineage` says (at whatever step), have another shape, are not finite, or are damaged.
    """
    _same_lineage(folder, lineage)
    kind = _understood(folder / CONFIG)[1]  # as it was saved, by whichever version
    _fill(model, Tensors(folder, _again(folder)), kind)
    integrity.verify(folder)


def _same_lineage(folder: Path, lineage: Lineage) -> None:
    saved, expected = (asdict(replace(one, step=0)) for one in (lineage_of(folder), lineage))
    for name in saved:
        if saved[name] != expected[name]:
            was, is_now = (one[name][:8] if one[name] else "none" for one in (saved, expected))
            hint = f"To train from the start, remove {folder.parent}."
            raise CheckpointError(f"was made with {name} {was}, and this one is {is_now}", where=str(folder), hint=hint)


def save_adapters(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: Transformer,
    renderer: Renderer,
    lineage: Lineage,
    settings: Lora,
    base: BaseModel,
) -> None:
    """Write the adapters of a model without it, in PEFT's files, with the tokenizer, the template and the lineage."""
    make_folder(folder)
    base_path = os.path.relpath(base.folder.resolve(), folder.resolve())
    peft.save(folder, weights, model, settings, base_path)
    renderer.tokenizer.save(folder)
    opening, end = renderer.template.opening or DOCUMENT, renderer.template.end
    chat = {"chat_template": renderer.template.jinja()}
    write_json(folder / "tokenizer_config.json", _tokenizer_config(opening, end, model.config.context_length) | chat)
    own = {"folder": base_path, "digest": base.digest, "kept_as": settings.base_dtype}
    write_json(folder / LINEAGE, asdict(lineage) | {TEMPLATE_NAME: renderer.template.name, BASE: own})
    integrity.write_sums(folder)


def fill_adapters(model: Transformer, folder: Path, lineage: Lineage) -> None:
    """As `fill`, for the adapters of a model."""
    _same_lineage(folder, lineage)
    peft.fill(model, folder)
    integrity.verify(folder)


def _with_adapters(folder: Path, device: torch.device | str, special: Sequence[str]) -> Loaded:
    """A base with the adapters of a folder merged into it. Those of PEFT have the tokenizer and lineage of the base."""
    adapter = peft.read(folder)
    facts, own, base_folder = _base(folder, adapter)
    if facts:
        _same("base", own["digest"], digest(base_folder), folder)
    loaded = load(base_folder, special=special)
    peft.merge(loaded.model, adapter, own["kept_as"], folder)
    loaded.model.to(device)
    if not facts:
        return replace(loaded, folder=folder)
    lineage = lineage_of(folder)
    _same("tokenizer", lineage.tokenizer, loaded.tokenizer.hash, folder)
    return replace(loaded, renderer=Renderer(loaded.tokenizer, template_of(folder)), lineage=lineage, folder=folder)


def num_rows(folder: Path) -> int:
    """How many rows the tables of a model folder have. Raises CheckpointError where its configuration is none."""
    if peft.is_adapter(folder):
        return num_rows(_base(folder, peft.read(folder))[2])
    return _understood(folder / CONFIG)[3]


def context(folder: Path) -> int:
    """How many tokens the model of a folder takes. Raises CheckpointError where its configuration is none."""
    if peft.is_adapter(folder):
        return context(_base(folder, peft.read(folder))[2])
    return _understood(folder / CONFIG)[2].context_length


def _base(folder: Path, adapter: peft.Adapter) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """What adapters were made from where they are ours, what they adapt, and where that lies."""
    facts: dict[str, Any] = {}
    if (folder / LINEAGE).exists():
        facts = {**_read(folder / LINEAGE, SavedLineage)}
        if BASE not in facts:
            hint = "Export the adapters again, or remove this file: the base is then the one that PEFT's file names."
            raise CheckpointError(
                f"has no key {BASE!r}, which names the model that the adapters adapt",
                where=str(folder / LINEAGE),
                hint=hint,
            )
    own = facts.get(BASE, {"folder": adapter.base, "kept_as": "float32"})
    base_folder = (folder / Path(own["folder"]).expanduser()).resolve()
    if not is_model(base_folder):
        hint = f"Put it there, or name its folder in {peft.CONFIG if not facts else LINEAGE}."
        raise CheckpointError(f"adapts a model that is not at {base_folder}", where=str(folder), hint=hint)
    return facts, own, base_folder


def digest(folder: Path) -> str:
    """
    A hash of the configuration, tokenizer and weights of a model folder. Raises CheckpointError where it is none, or
    damaged.
    """
    if not is_model(folder):
        hint = "Name a model folder: config.json, safetensors and a tokenizer."
        raise CheckpointError("holds no model", where=str(folder), hint=hint)
    integrity.verify(folder)
    names = sorted(file for pattern in ("*.json", "*.safetensors", "*.model", "*.txt") for file in folder.glob(pattern))
    return sha256_bytes(canonical([[file.name, cache.sha256_of(file)] for file in names]))


def _again(folder: Path) -> str:
    """The hint where a file of a model folder is damaged."""
    if (folder.parent / MANIFEST).is_file():
        return "The file is damaged. Remove its stage's manifest.json and run the recipe again."
    return "The file is damaged. Make the folder or fetch it again."


def _read(file: Path, kind: Callable[..., T]) -> T:
    return read_record(file, kind, error=CheckpointError, fix=_again(file.parent))


def _understood(file: Path) -> tuple[dict[str, Any], Architecture, ModelConfig, int]:
    """What a config.json says, its architecture, its model, and how many ids that has."""
    facts: dict[str, Any] = {**_read(file, ConfigFile)}
    if said := facts.get("quantization_config"):
        method = said.get("quant_method", "a method without a name") if isinstance(said, dict) else said
        what = f"its weights are quantized (quantization_config: {method}); float32, bfloat16 and float16 are read"
        raise CheckpointError(what, where=str(file), hint=UNROUNDED)
    try:
        kind = weights_architectures.of_file(facts)
        config, rows = kind.understand(facts), facts["vocab_size"]
        if type(rows) is not int or not 1 <= rows <= MAX_IDS:
            raise ValueError(f"vocab_size is {shorten(repr(rows))}, and no number of ids from 1 to {MAX_IDS:,}")
        for name in ("bos_token_id", "eos_token_id"):
            ids = facts[name] if isinstance(facts.get(name), list) else [facts.get(name)]
            if beyond := [id for id in ids if isinstance(id, int) and id >= rows]:
                raise ValueError(f"{name} is {shorten(repr(beyond[0]))}, and the last of its ids is {rows - 1:,}")
        return facts, kind, config, rows
    except KeyError as error:
        what, hint = f"lacks {error}", "Fetch the folder again, or write into it what it lacks."
    except (ValueError, TypeError) as error:
        why = _explained(facts, error) if isinstance(error, ValidationError) else str(error)
        what = f"is of a model that is not known here: {why}"
        hint = "Take a model of another kind: docs/understand/model-folders.md says which can be read."
    raise CheckpointError(what, where=str(file), hint=hint)


def _explained(facts: Mapping[str, Any], error: ValidationError) -> str:
    """What is wrong with the shape of a config.json, with the names and values that stand there."""
    fields = [str(problem["loc"][0]) for problem in error.errors() if problem["loc"]]
    keys = [key for field in fields for key in THEIRS.get(field, ()) if key in facts]
    return "; ".join(
        [f"{key} is {weights_architectures.shown(facts[key])}" for key in keys] + [explained(ModelConfig, error)[0]]
    )


def _same(what: str, trained: str, current: str, folder: Path, name: str = "") -> None:
    if trained != current:
        raise CheckpointError(
            f"the model was trained with the {what} {f'{name} {trained[:8]}'.strip()}, and this one is {current[:8]}",
            where=str(folder),
            hint=f"Use the {what} that lies next to the weights, or train again.",
        )


def lineage_of(folder: Path) -> Lineage:
    """What the model of a folder says it was made from. Raises CheckpointError where that cannot be read."""

    saved: dict[str, Any] = {**_read(folder / LINEAGE, SavedLineage)}
    return Lineage(**{one.name: saved[one.name] for one in fields(Lineage) if one.name in saved})


def _own(model: Transformer) -> dict[str, Tensor]:
    """The weights of a model by name, without a tied head, which is the embedding."""
    weights: dict[str, Tensor] = model.state_dict()
    return {name: weights[name] for name in weights if not (model.config.tie_embeddings and name == "head.weight")}


def _filled(folder: Path, kind: Architecture, config: ModelConfig, rows: int, num_ids: int) -> Transformer:
    """A model with rows for `num_ids` ids, and in the first `rows` of them and elsewhere the weights of a folder."""
    tensors = Tensors(folder, _again(folder))
    _of_one_size(config, rows, tensors)
    model = Transformer(config, num_ids)
    _fill(model, tensors, kind, rows)
    return model


def _of_one_size(config: ModelConfig, rows: int, tensors: Tensors) -> None:
    """
    Raises CheckpointError where a configuration is of a model that its files cannot be, before it is built: a damaged
    one can ask for any memory. What is nearly of one size is built, and told by the name of its tensor.
    """
    held = tensors.num_numbers()
    layers, numbers = config.num_layers, 0
    if layers <= len(tensors.names) and (numbers := cost(config, rows).parameters) <= 2 * held:
        return
    there = f"{layers:,} layers" if not numbers else f"{numbers:,} parameters"
    what = f"holds {len(tensors.names):,} tensors of {held:,} numbers, and {CONFIG} is of a model of {there}"
    raise CheckpointError(what, where=str(tensors.file), hint="One of the two is damaged, or of another model.")


def _fill(model: Transformer, tensors: Tensors, kind: Architecture, rows: int | None = None) -> None:
    """Read the weights of files into a model. Of tables, only the first `rows` are filled, where that is given."""
    own = _own(model)
    places = {name: weight[:rows] if name in TABLES else weight for name, weight in own.items()}
    pieces = kind.pieces(list(own))
    _nothing_else(
        tensors, {tensors.stored_name(piece.theirs) for piece in pieces}, kind, tied=model.config.tie_embeddings
    )
    for piece in pieces:
        tensor = tensors.get(piece.theirs)
        if tensor is None:
            what = f"{piece.theirs} is missing"
            raise CheckpointError(what, where=str(tensors.file), hint="It belongs to another model.")
        try:
            spread(piece, tensor, places)
        except ValueError as error:
            raise CheckpointError(str(error), where=str(tensors.file), hint="It belongs to another model.") from None


def _nothing_else(tensors: Tensors, used: set[str | None], kind: Architecture, *, tied: bool) -> None:
    """Raises CheckpointError where files hold more than these tensors and what follows from the configuration."""
    embedding, head = (kind.pieces([name])[0].theirs for name in TABLES)
    if tied and (head_tensor := tensors.get(head)) is not None:
        other = tensors.get(embedding)
        if other is None or head_tensor.shape != other.shape or not torch.equal(head_tensor.float(), other.float()):
            what = f"{head} is not {embedding}, and {CONFIG} says that it is (tie_word_embeddings)"
            hint = f"Where the head is its own, write tie_word_embeddings: false into {CONFIG}."
            raise CheckpointError(what, where=str(tensors.file), hint=hint)
        used = used | {tensors.stored_name(head)}
    if left := sorted(name for name in tensors.names - used if not BUFFERS.fullmatch(name)):
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        what = f"holds what a {kind.name} of this {CONFIG} does not have: {shown}"
        raise CheckpointError(what, where=str(tensors.file), hint="One of the two belongs to another model.")


def _tokenizer_config(opening: str, end: str, context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": opening,
        "eos_token": end,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
