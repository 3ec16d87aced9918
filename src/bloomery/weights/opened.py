"""
A model of a folder or a GGUF file: its configuration first, then its weights, tensor by tensor.

A weight goes from its file to the device, in the number format that was asked for, before the next one is read. The
model is built without memory for its weights, so that the peak is one tensor more than the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.config import explained
from bloomery.core.errors import CheckpointError, shorten
from bloomery.core.io import MANIFEST, stable_hash
from bloomery.core.records import Count, read_record
from bloomery.hw.device import return_freed_memory
from bloomery.model import quantize
from bloomery.model.config import Base, ModelConfig, cost
from bloomery.model.transformer import Transformer, on_meta
from bloomery.tokenizer.chat_template import TEMPLATES
from bloomery.tokenizer.tokenizer import DOCUMENT, END, MAX_IDS
from bloomery.weights import architectures as weights_architectures
from bloomery.weights.architectures import BUFFERS, TABLES, Architecture, WeightMapping, spread
from bloomery.weights.safetensors import INDEX, UNROUNDED, WEIGHTS, TensorReader, Tensors, is_pickled, rounded

import torch
from torch import Tensor, nn

T = TypeVar("T")
OPENINGS = frozenset({DOCUMENT, *(one.opening for one in TEMPLATES.values())})
ENDINGS = frozenset({END, *(one.end for one in TEMPLATES.values())})
"""Special tokens that begin a text, and that end a message, in the templates that come with Bloomery."""
END_NOISE = 0.3
"""How far the head tells the end of a message from the end of a text, as a share of the spread of its rows."""
CONFIG, GGUF_SUFFIX = "config.json", ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
LoadFormat = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "nf4"]
"""
How weights are kept in memory. auto: as in their file; blocks of a quantized GGUF file become bfloat16. int4 keeps the
blocks Q4_0 and Q4_1 as they are.
"""


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
class OpenedModel:
    """A model folder or a GGUF file, of which nothing but its configuration has been read."""

    path: Path
    facts: Mapping[str, Any]
    """As in config.json."""
    kind: Architecture
    config: ModelConfig
    rows: int
    gguf: Any
    """Of a file, its GGUFModel; None of a folder."""

    def tensors(self, dtype: LoadFormat = "auto") -> TensorReader:
        """The weights. Quantized blocks of GGUF become bfloat16 where that is how they are kept, and else float32."""
        if self.gguf is None:
            return Tensors(self.path, again(self.path))
        self.gguf.tensors.dequantized = torch.bfloat16 if dtype in ("auto", "bfloat16") else torch.float32
        tensors: TensorReader = self.gguf.tensors
        return tensors


def opened_model(path: Path) -> OpenedModel:
    if path.is_file():
        from bloomery.weights import gguf

        model = gguf.read(path)
        kind, config, rows = _interpreted(model.facts, path)
        return OpenedModel(path, model.facts, kind, config, rows, model)
    if not (path / CONFIG).is_file():
        hint = "Give a run, stage, checkpoint or model folder, a GGUF file, or hub:OWNER/NAME."
        raise CheckpointError(f"there is no {CONFIG}", where=str(path), hint=hint)
    facts, kind, config, rows = understood(path / CONFIG)
    return OpenedModel(path, facts, kind, config, rows, None)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds LoRA adapters, as PEFT writes them."""
    return (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file()


def is_model(folder: Path) -> bool:
    """
    Whether a folder holds a model, or adapters for one, be it one that is refused when it is read; or whether a file
    is a GGUF file.
    """
    if folder.is_file():
        return folder.suffix == GGUF_SUFFIX
    weights = (folder / WEIGHTS).is_file() or (folder / INDEX).is_file() or is_pickled(folder) != ""
    return ((folder / CONFIG).is_file() and weights) or is_adapter(folder)


def again(folder: Path) -> str:
    """The hint where a file of a model folder is damaged."""
    if (folder.parent / MANIFEST).is_file():
        return "The file is damaged. Remove its stage's manifest.json and run the recipe again."
    return "The file is damaged. Make the folder or fetch it again."


def read_file(file: Path, kind: Callable[..., T]) -> T:
    return read_record(file, kind, error=CheckpointError, fix=again(file.parent))


def understood(file: Path) -> tuple[dict[str, Any], Architecture, ModelConfig, int]:
    """What a config.json says, its architecture, its model, and how many ids that has."""
    facts: dict[str, Any] = {**read_file(file, ConfigFile)}
    if said := facts.get("quantization_config"):
        method = said.get("quant_method", "a method without a name") if isinstance(said, dict) else said
        what = (
            f"its weights are quantized (quantization_config: {method}); only float32, bfloat16 and float16 can be read"
        )
        raise CheckpointError(what, where=str(file), hint=UNROUNDED)
    return facts, *_interpreted(facts, file)


def _interpreted(facts: Mapping[str, Any], file: Path) -> tuple[Architecture, ModelConfig, int]:
    """The architecture and the model that a configuration is of, and how many ids that has. Raises CheckpointError."""
    try:
        kind = weights_architectures.of_file(facts)
        _check_rope(facts)
        config, rows = kind.understand(facts), facts["vocab_size"]
        if type(rows) is not int or not 1 <= rows <= MAX_IDS:
            raise ValueError(f"vocab_size is {shorten(repr(rows))}, not a number from 1 to {MAX_IDS:,}")
        for name in ("bos_token_id", "eos_token_id"):
            ids = facts[name] if isinstance(facts.get(name), list) else [facts.get(name)]
            if beyond := [id for id in ids if isinstance(id, int) and id >= rows]:
                raise ValueError(f"{name} is {shorten(repr(beyond[0]))}, but the last token ID is {rows - 1:,}")
        return kind, config, rows
    except KeyError as error:
        what, hint = f"lacks {error}", "Fetch the folder again, or write into it what it lacks."
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        why = _explained(facts, error) if isinstance(error, ValidationError) else str(error)
        what = f"describes a model that is not supported: {why}"
        hint = "Use a model of another kind: docs/understand/model-folders.md lists them."
    raise CheckpointError(what, where=str(file), hint=hint)


def _check_rope(facts: Mapping[str, Any]) -> None:
    """Raises ValueError where a configuration scales RoPE in two ways: transformers 5 reads the older key first."""
    old, new = facts.get("rope_scaling"), facts.get("rope_parameters")
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        renamed = {("rope_type" if key == "type" else key): value for key, value in old.items()}
        if any(new.get(key) != value for key, value in renamed.items()):
            raise ValueError("rope_scaling differs from rope_parameters. Write all of its keys into rope_parameters")


def _explained(facts: Mapping[str, Any], error: ValidationError) -> str:
    """What is wrong with the shape of a config.json, with the names and values that stand there."""
    fields = [str(problem["loc"][0]) for problem in error.errors() if problem["loc"]]
    keys = [key for field in fields for key in THEIRS.get(field, ()) if key in facts]
    return "; ".join(
        [f"{key} is {weights_architectures.shown(facts[key])}" for key in keys] + [explained(ModelConfig, error)[0]]
    )


def own_weights(model: Transformer) -> dict[str, Tensor]:
    """The weights of a model by name, without a tied head, which is the embedding."""
    weights: dict[str, Tensor] = model.state_dict()
    return {name: weights[name] for name in weights if not (model.config.tie_embeddings and name == "head.weight")}


WeightChange = Callable[[str, Tensor], Tensor]
"""Of the name and the numbers of a weight: what becomes of it before it takes its format."""


class StoredWeights(Mapping[str, Tensor]):
    """
    The weights of a model that stay in its files, by our names: each is read when it is asked for, and changed. What
    the model itself holds comes from there: tables that got more rows. Errors are those of `converted`.
    """

    def __init__(self, opened: OpenedModel, model: Transformer, dtype: LoadFormat, change: WeightChange | None) -> None:
        self._tensors, self._own, self._change = opened.tensors(dtype), own_weights(model), change
        self._pieces = {name: piece for piece in opened.kind.pieces(list(self._own)) for name in piece.ours}

    def __getitem__(self, name: str) -> Tensor:
        if not (held := self._own[name]).is_meta:
            return held
        weight = dict(_read(self._pieces[name], self._tensors, self._own))[name]
        return weight if self._change is None else self._change(name, weight)

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def matrix_formats(self) -> set[torch.dtype]:
        """Number formats of the matrices in their files; quantized blocks count as bfloat16."""
        matrices = {self._pieces[name].theirs for name, weight in self._own.items() if weight.dim() > 1}
        stored = {self._tensors.number_format(name) or "" for name in matrices}
        return {_PLAIN.get(name, torch.bfloat16) for name in stored}

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


TakeWeight = Callable[[Transformer, str, Tensor, str, Base], None]
"""Takes a weight that was read in place of `put_weight`, and leaves the model its shape."""


def filled(
    opened: OpenedModel,
    num_ids: int,
    dtype: LoadFormat,
    device: torch.device | str,
    base: Base = "float32",
    change: WeightChange | None = None,
    take: TakeWeight | None = None,
) -> Transformer:
    """
    A model with rows for `num_ids` ids. The first rows of the tables and everything else are the weights of the files,
    each converted, and moved to the device, before the next is read. A `base` other than float32 is the format of the
    matrices of blocks alone. With `take`, only tables that get more rows are in the model, for it to be filled.
    """
    tensors = opened.tensors(dtype)
    _of_one_size(opened.config, opened.rows, tensors)
    model = on_meta(opened.config, num_ids)
    kept_as = kept_as_in(dtype, opened)
    stored = _matrices_in_file(model, opened) if kept_as == "int4" and change is None else {}
    for name, weight in converted(model, tensors, opened.kind, opened.rows):
        blocks = opened.gguf.tensors.int4_blocks(stored[name]) if opened.gguf is not None and name in stored else None
        if blocks is not None:
            _put_frozen(model, name, quantize.Int4.of(*blocks).to(device))
            continue
        changed = weight if change is None else change(name, weight)
        if take is None or (name in TABLES and num_ids > opened.rows):
            put_weight(model, name, changed, kept_as, device, base)
        else:
            take(model, name, changed, kept_as, base)
        if weight.numel() >= quantize.NUMBERS_AT_ONCE:
            return_freed_memory()  # quantizing leaves gaps, as large as the model
    if opened.config.tie_embeddings:
        model.head.weight = model.embed.weight
    return_freed_memory()
    return model


def _matrices_in_file(model: Transformer, opened: OpenedModel) -> dict[str, str]:
    """The matrices of blocks that a GGUF file has as one, and their names there."""
    if opened.gguf is None:
        return {}
    pieces = opened.kind.pieces(list(own_weights(model)))
    single = (piece for piece in pieces if len(piece.ours) == 1 and not piece.transposed)
    return {piece.ours[0]: piece.theirs for piece in single if _is_in_block(model, piece.ours[0])}


def _is_in_block(model: Transformer, name: str) -> bool:
    """Whether a weight is a matrix that may be quantized."""
    path, _, leaf = name.rpartition(".")
    return isinstance(model.get_submodule(path), nn.Linear) and leaf == "weight" and path != "head"


def _put_frozen(model: Transformer, name: str, frozen: quantize.QuantizedLinear) -> None:
    """Put a frozen matrix where a model has a linear layer, whose bias stays."""
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    assert isinstance(module, nn.Linear)
    frozen.bias = None if module.bias is None else module.bias.detach()
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, frozen)


def kept_as_in(dtype: LoadFormat, opened: OpenedModel) -> Base | Literal["float16", "int4"]:
    """The format that weights are kept in: that of the embedding in the files where it is to be theirs."""
    if dtype != "auto":
        return dtype
    table = opened.kind.pieces([TABLES[0]])[0].theirs
    stored = opened.tensors().number_format(table)
    return {"float16": "float16", "float32": "float32"}.get(stored or "", "bfloat16")  # type: ignore[return-value]


_PLAIN = {"float32": torch.float32, "float16": torch.float16}


def put_weight(
    model: Transformer, name: str, weight: Tensor, kept_as: str, device: torch.device | str, base: Base = "float32"
) -> None:
    """Put a weight into a model that has none of that name yet: vectors of norms stay in float32."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    is_matrix = isinstance(module, nn.Linear | nn.Embedding | quantize.QuantizedLinear)
    plain = _PLAIN.get(kept_as, torch.bfloat16)
    form = plain if is_matrix else torch.float32
    if _is_in_block(model, name) and (kept_as in ("int8", "int4", "nf4") or base != "float32"):
        frozen = quantize.frozen_weight(weight.to(device), base if base != "float32" else kept_as)  # type: ignore[arg-type]
        _put_frozen(model, name, frozen)
        return
    ready = rounded(name, weight, form, name).to(device)
    if isinstance(module, quantize.QuantizedLinear):
        module.bias = ready
    else:
        setattr(module, leaf, nn.Parameter(ready, requires_grad=kept_as == "float32"))


def add_rows(model: Transformer, rows: int, added: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """
    Fill the rows of the special tokens that were added to a model of `rows` ids, and any that nothing uses. `facts`
    may say which ids begin and end a text (bos_token_id, eos_token_id).

    LoRA trains none of these rows. So in the head, each token that ends a message has nearly the row of the token that
    ends a text. In the embedding, any other new token gets a row of its own, so that a model tells them apart. It is as
    far from the mean as the rows of a table usually are.
    """
    begin, end = (_first(facts.get(name)) for name in ("bos_token_id", "eos_token_id"))
    begin, end = (begin if begin is not None else end), (end if end is not None else begin)
    embed, head = model.embed.weight, model.head.weight
    with torch.no_grad():
        for table, opens in ((embed, begin), (head, end)):
            mean = table[:rows].float().mean(0)
            table[rows:] = mean.to(table.dtype)
            deviation = table[:rows].float().std(0)
            for name, id in added.items():
                begins = name == DOCUMENT or (table is embed and name in OPENINGS)
                like = opens if begins else end if name in ENDINGS else None
                row = mean if like is None else _row(table, like, rows, mean).float()
                if (like is None and table is embed) or (name in ENDINGS and table is head):
                    share = 1.0 if like is None else END_NOISE
                    row = row + share * deviation * _noise(name, len(mean)).to(mean.device)
                table[id] = row.to(table.dtype)
            if head is embed:
                break


def _noise(name: str, width: int) -> Tensor:
    """Normal numbers, the same for a token on every machine."""
    return torch.randn(width, generator=torch.Generator().manual_seed(stable_hash(name) >> 1))


def _row(table: Tensor, id: int, rows: int, mean: Tensor) -> Tensor:
    return table[id].clone() if id < rows else mean.to(table.dtype)


def _first(value: Any) -> int | None:
    """Of one id or several, the first; None for what is no id."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if type(value) is int and value >= 0 else None


def _of_one_size(config: ModelConfig, rows: int, tensors: TensorReader) -> None:
    """
    Raises CheckpointError where a configuration is of a model that its files cannot be, before it is built: a damaged
    one can ask for any memory. What is nearly of one size is built, and told by the name of its tensor.
    """
    held = tensors.num_numbers()
    layers, numbers = config.num_layers, 0
    if layers <= len(tensors.names) and (numbers := cost(config, rows).parameters) <= 2 * held:
        return
    there = f"{layers:,} layers" if not numbers else f"{numbers:,} parameters"
    what = f"holds {len(tensors.names):,} tensors of {held:,} numbers, but {CONFIG} describes a model of {there}"
    raise CheckpointError(
        what, where=str(tensors.file), hint="One of the two files is damaged or of another model. Download both again."
    )


def converted(
    model: Transformer, tensors: TensorReader, kind: Architecture, rows: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """
    The weights of a model from files, by our names, in the number format of the files. Of tables, only the first `rows`
    are filled, where that is given.
    """
    own = own_weights(model)
    pieces = kind.pieces(list(own))
    _nothing_else(
        tensors, {tensors.stored_name(piece.theirs) for piece in pieces}, kind, tied=model.config.tie_embeddings
    )
    for piece in pieces:
        yield from _read(piece, tensors, own, rows)


def _read(
    piece: WeightMapping, tensors: TensorReader, own: Mapping[str, Tensor], rows: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Our weights of one tensor of the files, in the shapes of `own`."""
    tensor = tensors.get(piece.theirs)
    if tensor is None:
        what = f"{piece.theirs} is missing"
        raise CheckpointError(
            what, where=str(tensors.file), hint="The file belongs to another model. Use the weights of this one."
        )
    if len(piece.ours) == 1 and not piece.transposed and tensor.shape == own[piece.ours[0]].shape:
        yield piece.ours[0], tensor
        return
    weights = {name: torch.empty(own[name].shape, dtype=tensor.dtype) for name in piece.ours}
    places = {name: weight[:rows] if name in TABLES else weight for name, weight in weights.items()}
    try:
        spread(piece, tensor, places)
    except ValueError as error:
        raise CheckpointError(
            str(error), where=str(tensors.file), hint="The file belongs to another model. Use the weights of this one."
        ) from None
    yield from weights.items()


def _nothing_else(tensors: TensorReader, used: set[str | None], kind: Architecture, *, tied: bool) -> None:
    """Raises CheckpointError where files hold more than these tensors and what follows from the configuration."""
    embedding, head = (kind.pieces([name])[0].theirs for name in TABLES)
    if tied and (head_tensor := tensors.get(head)) is not None:
        other = tensors.get(embedding)
        if other is None or head_tensor.shape != other.shape or not torch.equal(head_tensor.float(), other.float()):
            what = f"{head} differs from {embedding}, but {CONFIG} ties them (tie_word_embeddings)"
            hint = f"If the output matrix is separate, set tie_word_embeddings: false in {CONFIG}."
            raise CheckpointError(what, where=str(tensors.file), hint=hint)
        used = used | {tensors.stored_name(head)}
    if left := sorted(name for name in tensors.names - used if not BUFFERS.fullmatch(name)):
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        what = f"holds tensors that a {kind.name} of this {CONFIG} does not have: {shown}"
        raise CheckpointError(
            what, where=str(tensors.file), hint="One of the two files belongs to another model. Download both again."
        )
