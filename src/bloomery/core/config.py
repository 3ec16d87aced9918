"""
Recipes: one TOML file, plus `key.path=value` from the command line, becomes one frozen pydantic model.

The model is the schema. An unknown key, a missing key or a wrong type is an error that names the key; nothing is
coerced except int -> float, str -> Path and array -> tuple. What a recipe chooses between is a union of models told
apart by `kind`. TOML rather than YAML, because YAML 1.1 reads `3e-4` as a string and `no` as False.

Types of settings bound numbers and paths:

    ranks: Annotated[int, Between(1, 1024, "each rank is a process with a device of its own")] = 1

A number outside its range would start something absurd, or mean nothing. The error names the bound and the reason.
Bounds never depend on the machine: a recipe that loads here loads everywhere.
"""

import difflib
import json
import tomllib
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from bloomery.core import io as core_io
from bloomery.core.errors import MAX_SEED, MAX_TEMPERATURE, MAX_TOKENS, MAX_VALUE_CHARS, ConfigError, shorten
from bloomery.core.io import path_problem

OUT_OF_RANGE = "out_of_range"
"""The type of its problem, as pydantic calls it; the message already holds the value."""


@dataclass(frozen=True)
class Between:
    """Metadata of a number: its lowest and highest value, and why they are where they are."""

    low: int | float
    high: int | float
    why: str
    """Of both ends; of the highest alone where `why_low` is set."""
    why_low: str = ""
    or_zero: bool = False
    """Whether 0 is fine too, although `low` is above it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        """The value itself. Raises PydanticCustomError outside of the range."""
        if not isinstance(value, int | float) or self.low <= value <= self.high or (self.or_zero and value == 0):
            return value
        end, bound = ("most", self.high) if value > self.high else ("least", self.low)
        least = f"{'0 or ' if self.or_zero and end == 'least' else ''}at {end} {written(bound)}"
        reason = self.why_low or ("" if self.low in (0, 1) else self.why) if end == "least" else self.why
        why = f": {reason}" if reason else ""
        what = f"must be {least}, got {shorten(value, 40)}{why}"
        raise PydanticCustomError(OUT_OF_RANGE, "{what}", {"what": what})


def written(number: int | float) -> str:
    """A number as a message shows it: in full, never rounded to another one."""
    if isinstance(number, int):
        return f"{number:,}"
    return short if float(short := f"{number:g}") == number else repr(number)


def _path(path: Path) -> Path:
    if problem := path_problem(path):
        raise ValueError(problem)
    return path


HUB = "hub:"
"""What a path begins with that names a model of a hub."""


def is_of_hub(path: Path) -> bool:
    return str(path).startswith(HUB)


DiskPath = Annotated[Path, AfterValidator(_path)]
"""A path as a file system could hold it; whether something is there is seen when it is opened."""

_TEXT = "no document is longer"
_ROWS = "no data set has more"

Share = Annotated[float, Between(0, 1, "it is a share")]
InnerShare = Annotated[float, Between(1e-9, 0.99, "it is a share, and something has to be left on both sides")]
Seed = Annotated[int, Between(0, MAX_SEED, "random generators take 63 bits")]
TextLength = Annotated[int, Between(0, 10**12, _TEXT)]
"""Characters, words or lines of a text, or how often something is in it."""
PositiveLength = Annotated[int, Between(1, 10**12, _TEXT)]
Ratio = Annotated[float, Between(0, 1e9, "it is a mean or a ratio of counts in a text")]
DocumentCount = Annotated[int, Between(1, 10**12, _ROWS)]
FieldNumber = Annotated[float, Between(-1e30, 1e30, "numbers of fields are compared as 64-bit floats")]
Bytes = Annotated[int, Between(1, 2**60, "no file system holds more")]
RowBytes = Annotated[int, Between(1, 2**31, "a row is read into memory whole, and Arrow's texts end at 2 GiB")]
MemoryBytes = Annotated[int, Between(2**26, 2**50, "less holds no batch, and no machine has more")]
Weight = Annotated[float, Between(1e-9, 1e9, "weights are relative to one another")]
Attempts = Annotated[int, Between(1, 1000, "waits grow with each attempt")]
TokenCount = Annotated[int, Between(1, 10**15, "that is 25 times what the largest models were trained on")]
Context = Annotated[int, Between(1, MAX_TOKENS, "attention over more tokens fits no machine")]
Steps = Annotated[int, Between(1, 10**12, "no run takes more steps")]
StepsOrNone = Annotated[int, Between(0, 10**12, "no run takes more steps")]
Temperature = Annotated[
    float, Between(1e-3, MAX_TEMPERATURE, "logits are divided by it; 0 takes the likeliest token", or_zero=True)
]


VOLATILE: dict[str, Any] = {"volatile": True}
"""`field: int = Field(1, json_schema_extra=VOLATILE)`: it cannot change the output, so it is not in the fingerprint."""

MAX_RECIPE_BYTES = 2**19
"""Of tables alone, as many take 2 seconds to read."""
MAX_DEPTH = 32
"""Arrays and tables within one another."""
TOO_DEEP = f"nested more than {MAX_DEPTH} deep"
LESS_DEEP = "Remove levels: no section of a recipe is nested so deeply."


RENAMED = {
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "head_width": "head_dim",
    "context": "context_length",
    "feed_forward": "mlp",
    "positions": "position_embedding",
    "norm_weights": "norm_affine",
    "original_context": "original_context_length",
    "tokens_per_step": "global_batch_tokens",
    "max_norm": "max_grad_norm",
    "recompute": "activation_checkpointing",
    "ranks": "num_processes",
    "shard": "parallelism",
    "skip_sigma": "spike_sigma",
    "skip_window": "spike_window",
    "max_skips": "max_skipped_steps",
    "keep_checkpoints": "keep_last",
    "keep_every_steps": "keep_every",
    "evaluate_every": "eval_every",
    "norms_every": "grad_stats_every",
    "matrix_learning_rate": "muon_lr",
    "final": "min_lr_ratio",
    "decay": "decay_fraction",
    "base": "base_dtype",
    "targets": "target_modules",
    "hold_out": "val_fraction",
    "share": "fraction",
    "row_tokens": "sequence_length",
    "template": "chat_template",
    "copies": "repeat",
    "max_answers": "max_turns",
    "part": "subset",
    "strength": "c",
    "held_out": "test_fraction",
    "characters": "max_chars",
    "limits": "thresholds",
    "keep_from": "min_score",
    "drop_from": "max_score",
    "max_found": "max_hits",
    "permutations": "num_perm",
    "bands": "num_bands",
    "bandings": "num_rotations",
    "min_jaccard": "threshold",
    "answers": "group_size",
    "answer_tokens": "max_new_tokens",
    "kl_weight": "kl_coef",
    "questions": "toy_questions",
    "answer_temperature": "chat_temperature",
    "shots": "num_fewshot",
    "heldout_bytes": "val_bytes",
    "weaker_sandbox": "allow_partial_sandbox",
}
"""Keys of earlier recipes: old name -> new name."""


class Config(BaseModel):
    """Base of every section of a recipe: frozen, and strict about what it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """TOML data of the whole model with what follows from it, before it is checked. As it is, by default."""
        return tree

    def resolved(self) -> Self:
        """
        A new object with the defaults that depend on other sections, checked as a whole. Itself, by default. Raises
        ValueError.
        """
        return self

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        """As the section of a stage: of the stages that it can build on, those that it does. All, by default."""
        return after

    def is_idle(self) -> bool:
        """As the section of a stage: whether it asks for no work. False, by default."""
        return False

    def skipped(self) -> frozenset[str]:
        """As a recipe: the stages that it does without, although it may have sections for them. None, by default."""
        return frozenset()

    def packages(self) -> tuple[str, ...]:
        """The packages of extras that it needs, without those that the configs in it name. None, by default."""
        return ()


C = TypeVar("C", bound=Config)


Override = str | tuple[str, Any]
"""A setting that replaces a value of a recipe: `key.path=value` in TOML's syntax, or a key path and a Python value."""


def load(cls: type[C], path: Path, overrides: Sequence[Override] = ()) -> C:
    """Read a recipe. Raises ConfigError, which names the file, the key and the hint."""
    try:
        tree = read_tree(path)
    except FileNotFoundError:
        near = ", ".join(p.name for p in sorted(path.parent.glob("*.toml")) if _may_be(cls, p)) or "none"
        raise ConfigError("no such recipe", where=str(path), hint=f"Recipes in that folder: {near}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), hint="A recipe is a UTF-8 TOML file.") from None
    return from_tree(cls, tree, overrides, where=path.name)


def from_tree(cls: type[C], tree: dict[str, Any], overrides: Sequence[Override] = (), where: str = "") -> C:
    """As `load`, for TOML data, into which the overrides are written."""
    for override in overrides:
        apply_override(tree, override)
    check_tree(tree, where)
    return build(cls, _filled(tree, cls), where)


def read_tree(path: Path) -> dict[str, Any]:
    """The TOML data of a regular file. Raises ConfigError, and what `Path.read_text` does."""
    if what := path_problem(path):
        raise ConfigError(what, where=shorten(repr(str(path))), hint="A recipe is a UTF-8 TOML file.")
    if what := core_io.special(path):
        raise ConfigError(f"cannot be read: it {what}", where=str(path), hint="A recipe is a UTF-8 TOML file.")
    if (size := path.stat().st_size) > MAX_RECIPE_BYTES:
        what = f"has {size:,} bytes; a recipe has at most {MAX_RECIPE_BYTES:,}"
        raise ConfigError(
            what, where=str(path), hint="Refer to data files by path instead of writing the data into the recipe."
        )
    text = path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or that of Python for an integer of 4,300 digits
        raise ConfigError(str(error), where=str(path), hint="A recipe must be valid TOML (https://toml.io).") from None
    except RecursionError:
        raise ConfigError(f"arrays or tables are {TOO_DEEP}", where=str(path), hint=LESS_DEEP) from None


packaged = cache(read_tree)
"""The TOML data of a file of this package, such as presets: read once, and never changed."""


def _may_be(cls: type[Config], path: Path) -> bool:
    """Whether a TOML file has the keys that a recipe cannot do without: pyproject.toml, say, has not."""
    try:
        tree = read_tree(path)
    except (OSError, ValueError, ConfigError):
        return False
    return all(name in tree for name, field in cls.model_fields.items() if field.is_required())


def check_tree(tree: dict[str, Any], where: str) -> None:
    """Raises ConfigError for what is no TOML, or no section holds: data nested too deep, integers above 64 bits."""
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for path, node in level:
            for name, value in node.items() if isinstance(node, dict) else enumerate(node):
                if isinstance(value, dict | list):
                    inner.append((f"{path}{name}.", value))
                elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                    what = f"{shorten(path)}{name}: {shorten(value, 40)} does not fit 64 bits"
                    raise ConfigError(what, where=where, hint="Use an integer from -2^63 to 2^63 - 1.")
                elif isinstance(value, str) and not _is_unicode(value):
                    what = f"{shorten(path)}{name}: {shorten(ascii(value))} is not text: it holds half a surrogate pair"
                    raise ConfigError(what, where=where, hint="A recipe must be valid UTF-8.")
        if not inner:
            return
        level = inner
    raise ConfigError(f"{shorten(level[0][0])}: is {TOO_DEEP}", where=where, hint=LESS_DEEP)


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def build(cls: type[C], tree: dict[str, Any], where: str = "") -> C:
    """Turn plain TOML data into `cls`, or raise one ConfigError that names every wrong key."""
    check_tree(tree, where)
    try:
        # JSON mode is the strict mode that still takes an array for a tuple and a string for a path.
        return cls.model_validate_json(json.dumps(cls.completed(tree), default=str), strict=True).resolved()
    except ValueError as failure:
        what, hint = explained(cls, failure) if isinstance(failure, ValidationError) else (_sentence(str(failure)), "")
        long = {text: shorten(text) for text in _texts(tree) if len(text) > MAX_VALUE_CHARS}
        for text, short in long.items():  # messages of validators show values too
            what, hint = (said.replace(repr(text), repr(short)).replace(text, short) for said in (what, hint))
        raise ConfigError(what, where=where, hint=hint) from None


def with_defaults(config: C, **values: Any) -> C:
    """A copy of a config with other values of some fields, which do not count as set."""
    construct: Any = type(config).model_construct
    copy: C = construct(set(config.model_fields_set), **{**dict(config), **values})
    return copy


def _sentence(message: str) -> str:
    """The message of a validator, as it is shown behind a key."""
    return message[:1].lower() + message[1:]


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | tuple | Mapping):
        for item in (*node, *(node.values() if isinstance(node, Mapping) else ())):
            yield from _texts(item)


def repeated(names: Iterable[str]) -> list[str]:
    """The names that come more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def explained(cls: type[BaseModel], failure: ValidationError) -> tuple[str, str]:
    """What is wrong with the data of a `cls`, key by key, and the first hint; "" where none is known."""
    problems = [_explain(cls, problem) for problem in failure.errors()[:5]]
    shown = [f"{key}: {what}" if key else what for key, what, _ in problems]
    more = [f"… and {failure.error_count() - 5} more"] if failure.error_count() > 5 else []
    return "\n".join(shown + more), next((hint for *_, hint in problems if hint), "")


class _Opened(dict[str, Any]):
    """A table that stands in no recipe: only overrides have written into it."""


def split_override(override: Override) -> tuple[str, Any]:
    """The key path and the value of an override; a bare word after the equals sign is a string."""
    if not isinstance(override, str):
        return override
    path, equals, raw = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"expected key=value, got {shorten(override)!r}", hint="For example: pretrain.steps=100")
    return path.strip(), _value(raw)


def apply_override(tree: dict[str, Any], override: Override) -> None:
    """Set a value in TOML data; `list.0.key` reaches into an array."""
    path, value = split_override(override)
    *parents, leaf = path.split(".")
    node: Any = tree
    for depth, name in enumerate(parents):
        node = _descend(node, name, where=".".join(parents[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, leaf, path)] = value
    else:
        node[leaf] = value


def _descend(node: Any, name: str, where: str) -> Any:
    child = node[_index(node, name, where)] if isinstance(node, list) else node.setdefault(name, _Opened())
    if not isinstance(child, dict | list):
        raise ConfigError(f"is {shorten(repr(child))}, which has no keys of its own", where=shorten(where))
    return child


def _filled(node: Any, hint: Any, default: Any = None) -> Any:
    """TOML data in which opened tables hold what the default was given, but for what overrides have changed."""
    if isinstance(node, list):
        return [_filled(item, _step(hint, place)) for place, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kind = getattr(default, "kind", None)
    base: dict[str, Any] = {}
    defaults = _defaults(hint, node)
    if isinstance(node, _Opened) and isinstance(default, BaseModel) and node.get("kind", kind) == kind:
        own = default.model_fields_set
        base, defaults = {name: value for name, value in plain(default).items() if name in own}, dict(default)
        base |= {} if kind is None else {"kind": kind}
    return base | {name: _filled(value, _step(hint, name), defaults.get(name)) for name, value in node.items()}


def _defaults(hint: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields of the model that a table is written for; of all that it could be, where the table does not say."""
    models = _models(hint)
    meant = [model for model in models if node.get("kind") in _tags(model)] or models
    return {name: field.default for model in reversed(meant) for name, field in model.model_fields.items()}


def _index(node: list[Any], name: str, where: str) -> int:
    if not name.isdecimal() or len(name) > 9 or int(name) >= len(node):
        what = f"{shorten(name)!r} is not an index of an array of {len(node)}"
        raise ConfigError(what, where=shorten(where), hint="Indexes start at 0.")
    return int(name)


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw.strip()  # `name=tiny` needs no quotes
    except ValueError as error:  # an integer of 4,300 digits
        raise ConfigError(str(error), where=shorten(raw)) from None
    except RecursionError:
        raise ConfigError(f"arrays or tables are {TOO_DEEP}", where=shorten(raw), hint=LESS_DEEP) from None


def _explain(cls: type[BaseModel], problem: Any) -> tuple[str, str, str]:
    """(key, what is wrong, hint) of one pydantic problem."""
    spot: tuple[int | str, ...] = problem["loc"]
    key = ".".join(str(part) for part in _follow(cls, spot)[0])
    if problem["type"] == "extra_forbidden":
        _, owner = _follow(cls, spot[:-1])
        names = sorted({name for model in _models(owner) for name in model.model_fields})
        if (new := RENAMED.get(str(spot[-1]))) in names:
            return key, f"this key is now {new!r}", "CHANGELOG.md lists every renamed key."
        near = difflib.get_close_matches(str(spot[-1]), names, n=1)
        return key, "unknown key", f"Did you mean {near[0]!r}?" if near else f"Known keys here: {', '.join(names)}."
    if problem["type"] == "missing":
        return key, "is required", ""
    if problem["type"] == "union_tag_not_found":
        kinds = ", ".join(repr(tag) for model in _models(_follow(cls, spot)[1]) for tag in _tags(model))
        return f"{key}.kind".lstrip("."), "is required: it says which one is meant", f"Kinds: {kinds}."
    if problem["type"] == "union_tag_invalid":
        tag, expected = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
        near = difflib.get_close_matches(tag, [name.strip("'") for name in expected.split(", ")], n=1)
        return f"{key}.kind", f"{tag!r} is not one of {expected}", f"Did you mean {near[0]!r}?" if near else ""
    message = _sentence(problem["msg"].removeprefix("Value error, "))
    value = problem["input"]
    shown = f", got {shorten(repr(value))}" if isinstance(value, str | int | float | bool | None) else ""
    is_shown = problem["type"] == OUT_OF_RANGE or (isinstance(value, str) and repr(value) in message)
    return key, message + ("" if is_shown else shown), ""


def _follow(cls: type[BaseModel], spot: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """A key path as a person writes it, and its type. Pydantic adds the tag of a union, which no recipe contains."""
    kept: list[int | str] = []
    hint: Any = cls
    for step in spot:
        members = {tag: member for member in _models(hint) for tag in _tags(member)}
        if len(_models(hint)) > 1 and step in members:
            hint = members[str(step)]
        elif isinstance(step, str) and hint is not Any and not _models(hint):
            continue  # what pydantic calls a member of a union of other types
        else:
            kept.append(step)
            hint = _step(hint, step)
    return kept, hint


def _step(hint: Any, step: int | str) -> Any:
    if isinstance(step, int):
        inner = [inside for option in _options(hint) for inside in get_args(option) if inside is not Ellipsis]
        return inner[min(step, len(inner) - 1)] if inner else Any
    for model in _models(hint):
        if step in model.model_fields:
            return model.model_fields[step].annotation
    return Any


def _models(hint: Any) -> list[type[BaseModel]]:
    return [option for option in _options(hint) if isinstance(option, type) and issubclass(option, BaseModel)]


def _options(hint: Any) -> list[Any]:
    """The types that a union chooses between, without what annotates them; a list of one for any other type."""
    if get_origin(hint) is Annotated:
        return _options(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [option for argument in get_args(hint) for option in _options(argument)]
    return [hint]


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()


def plain(config: BaseModel, *, stable_only: bool = False) -> dict[str, Any]:
    """A config as JSON data. With `stable_only`, without the fields that cannot change the output."""
    data: dict[str, Any] = config.model_dump(mode="json")
    if stable_only:
        for owner, twin in _walk(config, data):
            for name, field in type(owner).model_fields.items():
                if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("volatile"):
                    twin.pop(name, None)
    return data


def _walk(value: Any, twin: Any) -> Iterator[tuple[BaseModel, dict[str, Any]]]:
    """Pairs of each model inside a config and the JSON value of that model."""
    if isinstance(value, BaseModel):
        yield value, twin
        for name in type(value).model_fields:
            if name in twin:
                yield from _walk(getattr(value, name), twin[name])
    elif isinstance(value, tuple):
        for item, other in zip(value, twin, strict=True):
            yield from _walk(item, other)


def _values(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    yield key, value
    if isinstance(value, BaseModel):
        for name, inner in value:
            yield from _values(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _values(inner, f"{key}.{index}")


def paths(config: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    return ((name, value) for name, value in _values(config, key) if isinstance(value, Path))


def nested(config: Any) -> Iterator["Config"]:
    return (value for _, value in _values(config, "") if isinstance(value, Config))


def packages(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The key of every config that needs a package of an extra, with that package."""
    configs = ((name, value) for name, value in _values(config, key) if isinstance(value, Config))
    return ((name, package) for name, value in configs for package in value.packages())


def to_toml(data: dict[str, Any]) -> str:
    """JSON data of a config as TOML. None is left out: it is what a missing key means."""
    lines: list[str] = []
    _write_table(data, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
    inner = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if isinstance(v, list) and v and all(isinstance(i, dict) for i in v)}
    for name, value in table.items():
        if name not in inner and name not in arrays and value is not None:
            lines.append(f"{name} = {_toml_value(value)}")
    for name, value in inner.items():
        lines += ["", f"[{prefix}{name}]"]
        _write_table(value, f"{prefix}{name}.", lines)
    for name, items in arrays.items():
        for item in items:
            lines += ["", f"[[{prefix}{name}]]"]
            _write_table(item, f"{prefix}{name}.", lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
