"""Recipes: TOML texts that are damaged, and every key with every odd value."""

import math
import os
import types
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from bloomery.core import config
from bloomery.recipe import Recipe
from tests.fuzz.mutation import DEEP, DIGITS, ODD_VALUES, bytes_like
from tests.fuzz.outcome import Target, WrongError, command

ROOT = Path(__file__).parents[2]
BASE = """\
name = "fuzz"

[[fetch.sources]]
kind = "jsonl"
name = "docs"
domain = "text"
path = "docs.jsonl"

[pretrain]
steps = 10
global_batch_tokens = 128
model.hidden_size = 32
model.num_layers = 2
model.num_heads = 2
model.num_kv_heads = 1
model.intermediate_size = 48
model.context_length = 64
optimizer = { kind = "adamw", learning_rate = 0.003 }

[[instruct.sources]]
kind = "worlds"
count = 100

[finetune]
steps = 10
global_batch_tokens = 128
optimizer = { kind = "adamw", learning_rate = 0.003 }

[evaluate]
toy_questions = 10
max_tokens = 16
"""
ONE_IN = 12
"""Of the recipes that load, so many are planned."""
REQUIRED: dict[str, Any] = {
    "path": "docs.jsonl",
    "count": 10,
    "steps": 10,
    "global_batch_tokens": 128,
    "dataset": "a/b",
    "subset": "code",
    "learning_rate": 0.003,
    "url": "https://localhost/a",
    "model": "m",
    "questions": 3,
}


@dataclass(frozen=True)
class Table:
    """A table that an override writes anew."""

    model: type[BaseModel]

    def needed(self) -> dict[str, Any]:
        fields = self.model.model_fields
        kind = {"kind": get_args(fields["kind"].annotation)[0]} if "kind" in fields else {}
        required = [name for name, field in fields.items() if field.is_required() and name != "kind"]
        return kind | {name: REQUIRED.get(name, "x") for name in required}


Step = str | int | Table
"""A field, a place in a list, or a table."""


def recipes(folder: Path) -> Target:
    examples = [file.read_bytes() for file in sorted((ROOT / "recipes").glob("*.toml"))]
    inputs = bytes_like([BASE.encode(), BASE.encode(), *examples])

    _warm(folder)

    def attempt(data: bytes, work: Path) -> None:
        (work / "recipe.toml").write_bytes(data)
        _load(work, [], "--device", "mi300x")  # a plan for this machine times steps, and of 124 million parameters

    return Target(inputs, attempt)


def overrides(folder: Path) -> Target:
    """Lines of key=value over a small recipe."""
    _warm(folder)

    def attempt(data: bytes, work: Path) -> None:
        (work / "recipe.toml").write_text(BASE)
        _load(work, data.decode(errors="replace").split("\n"))

    paths = list(_paths(Recipe, ()))
    one = st.builds(_planted, st.sampled_from(paths), st.sampled_from(ODD_VALUES))
    lines = ["pretrain.steps=100", "fetch.sources.0.path=x", "filter.rules=[]", "name=tiny", "engine.workers=2"]
    return Target(st.one_of(one, one, one, bytes_like([line.encode() for line in lines])), attempt)


def _warm(folder: Path) -> None:
    """A first plan loads torch, whose seconds are no input's."""
    (folder / "docs.jsonl").write_text('{"text": "a document"}\n')
    (folder / "recipe.toml").write_text(BASE)
    os.chdir(folder)
    command("plan", "recipe.toml")


def _load(work: Path, settings: Sequence[str], *options: str) -> None:
    (work / "docs.jsonl").write_text('{"text": "a document"}\n')
    os.chdir(work)
    loaded = config.load(Recipe, Path("recipe.toml"), settings)
    for key, number, low, high in numbers(loaded, Recipe, (), "recipe"):
        if not low <= number <= high or math.inf in (high, -low):
            raise WrongError("absurd", f"{key} = {number!r} is accepted; its range: {low} to {high}", key)
    if zlib.crc32("\n".join([(work / "recipe.toml").read_text(), *settings]).encode(errors="replace")) % ONE_IN == 0:
        command("plan", "recipe.toml", *settings, *options)


def numbers(value: Any, hint: Any, facts: Sequence[Any], key: str) -> Iterator[tuple[str, float, float, float]]:
    """Every number in a config, by the model and field that holds it, with the ends of its type."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            yield from numbers(getattr(value, name), field.annotation, field.metadata, f"{type(value).__name__}.{name}")
    elif isinstance(value, tuple):
        inner = [argument for argument in get_args(hint) if argument is not Ellipsis] or [hint]
        for item in value:
            yield from numbers(item, Union[tuple(inner)], (), key)  # noqa: UP007
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value == 0 and any(getattr(fact, "or_zero", False) for fact in facts):
            return  # 0 means something else there, and lies outside of the range
        ends = list(_ends(hint, facts))
        low = max((end for end, is_low in ends if is_low), default=-math.inf)
        high = min((end for end, is_low in ends if not is_low), default=math.inf)
        yield key, value, low, high


def _ends(hint: Any, facts: Sequence[Any]) -> Iterator[tuple[float, bool]]:
    """The ends that a type states, and whether each is the lower one."""
    for fact in facts:
        for name in ("ge", "gt", "low", "le", "lt", "high"):
            if (end := getattr(fact, name, None)) is not None:
                yield end, name in ("ge", "gt", "low")
        yield from _ends(None, getattr(fact, "metadata", ()))
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        yield from _ends(inner, more)
    elif get_origin(hint) in (Union, types.UnionType, tuple):
        for argument in get_args(hint):
            yield from _ends(argument, ())


def _paths(hint: Any, path: tuple[Step, ...], optional: bool = False) -> Iterator[tuple[Step, ...]]:
    """The way to every field that a recipe can have, through tables, lists and kinds."""
    if get_origin(hint) is Annotated:
        yield from _paths(get_args(hint)[0], path, optional)
    elif get_origin(hint) in (Union, types.UnionType):
        for argument in get_args(hint):
            yield from _paths(argument, path, type(None) in get_args(hint))
    elif get_origin(hint) is tuple:
        yield from _paths(get_args(hint)[0], (*path, 0), True)
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        tagged = "kind" in hint.model_fields
        here = (*path, Table(hint)) if tagged or optional else path
        for name, field in hint.model_fields.items():
            if name != "kind":
                yield (*here, name)
                yield from _paths(field.annotation, (*here, name))


def _planted(path: Sequence[Step], value: Any) -> bytes:
    """An override that sets a key to a value, together with what its tables cannot do without."""
    names = next((at for at, step in enumerate(path) if not isinstance(step, str)), len(path))
    tree: Any = value
    for step in reversed(path[names:]):
        tree = step.needed() | tree if isinstance(step, Table) else {step: tree} if isinstance(step, str) else [tree]
    return f"{'.'.join(map(str, path[:names]))}={_toml(tree)}".encode(errors="replace")


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "none"
        case dict():
            return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str() if value in (DIGITS, DEEP):
            return "9" * 5000 if value == DIGITS else "[" * 3000
        case str():
            return '"' + "".join(f"\\U{ord(one):08x}" if one < " " or one in '"\\' else one for one in value) + '"'
    return repr(value)
