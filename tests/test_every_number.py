"""Every number that a recipe or another config can set has two ends: the class of defect, not its cases."""

import argparse
import math
import re
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from bloomery import cli
from bloomery.core import config
from bloomery.core.config import Between, DiskPath
from bloomery.core.errors import ConfigError
from bloomery.recipe import Recipe
from bloomery.shards import build
from bloomery.stages import data_tools
from bloomery.train import config as train_config

ROOT = Path(__file__).parents[1]
BASE = {
    "name": "a",
    "fetch": {"sources": [{"kind": "worlds", "name": "w", "domain": "w", "count": 10}]},
    "pretrain": {"steps": 1, "global_batch_tokens": 256},
    "finetune": {"steps": 1, "global_batch_tokens": 256},
}


def leaves(hint: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every type inside an annotation, with what annotates it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from leaves(arguments[0], (*metadata, *arguments[1:]))
    elif origin in (Union, types.UnionType):
        for one in arguments:
            yield from leaves(one, metadata)
    elif origin in (tuple, list, dict):
        for one in arguments:
            yield from leaves(one)
    else:
        yield hint, metadata


def reachable(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for hint, _ in leaves(field.annotation):
                if isinstance(hint, type) and issubclass(hint, BaseModel):
                    reachable(hint, seen)
    return seen


MODELS: set[type[BaseModel]] = set()
for root in (Recipe, data_tools.ToolSections, train_config.ScaledKeys, build.Encoding):
    reachable(root, MODELS)
FIELDS = [
    (f"{model.__module__}.{model.__name__}.{name}", hint, metadata)
    for model in sorted(MODELS, key=lambda one: f"{one.__module__}.{one.__name__}")
    for name, field in model.model_fields.items()
    for hint, metadata in leaves(field.annotation, tuple(field.metadata))
]
NUMBERS = [(name, hint, metadata) for name, hint, metadata in FIELDS if hint in (int, float)]


LARGE, SMALL = {"larger", "longer", "more", "years"}, {"smaller", "shorter", "less", "fewer"}


def fits_both_ends(reason: str) -> bool:
    """Whether a reason speaks of numbers that are too large and of those that are too small, or of neither alone."""
    words = set(re.findall(r"\w+", reason))
    return bool(words & LARGE) == bool(words & SMALL)


@pytest.mark.parametrize("text", ["١٢", "１２", "1_2", " 12", "٠.٥", "1_0.5", "nan", "inf", "१MB"])
def test_numbers_of_the_command_line_have_ascii_digits_alone(text: str) -> None:
    readers = (cli._whole(0, 1000), cli._number(0.0, 1000.0), cli._bytes(0, 2**50))
    for read in readers:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
    assert readers[0]("12") == readers[1]("1.2e1") == readers[2]("12") == 12
    assert readers[2]("12 KiB") == readers[2]("12kiB") == 12_288


def test_the_walk_comes_to_every_section() -> None:
    assert len(MODELS) > 80
    assert len(NUMBERS) > 200


def test_every_number_has_two_finite_ends_and_a_reason() -> None:
    for name, hint, metadata in NUMBERS:
        ends = next((one for one in metadata if isinstance(one, Between)), None)
        assert ends is not None, f"{name} has no ends"
        assert -math.inf < ends.low < ends.high < math.inf, name
        assert ends.why, name
        assert ends.low in (0, 1) or ends.why_low or fits_both_ends(ends.why), f"{name}: {ends.why}"
        assert hint is float or -(2**63) <= ends.low < ends.high < 2**63, name
        assert not 0 < abs(ends.low) < 1e-30, f"{name} takes numbers that float32 has not"


def test_numbers_beyond_either_end_are_refused_with_that_end_and_the_ends_are_taken() -> None:
    for name, hint, metadata in NUMBERS:
        (ends,) = (one for one in metadata if isinstance(one, Between))
        annotated: Any = Annotated[hint, ends]
        adapter: TypeAdapter[Any] = TypeAdapter(annotated)
        for value in (ends.low, ends.high):
            assert adapter.validate_python(hint(value)) == value, name
        step = 1 if hint is int else max(1e-3, abs(ends.high))
        for value in (ends.low - step, ends.high + step, 2**63 if hint is int else 1e308):
            with pytest.raises(ValidationError, match=r"must be (0 or )?at (most|least)"):
                adapter.validate_python(hint(value))


def test_every_path_of_a_recipe_is_one_that_a_file_system_could_hold() -> None:
    checks = set(get_args(DiskPath)[1:])
    for name, hint, metadata in FIELDS:
        if isinstance(hint, type) and issubclass(hint, Path):
            assert checks <= set(metadata), f"{name} takes any path"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads(path: Path) -> None:
    config.load(Recipe, path)


ABSURD = [
    "pretrain.num_processes=1000000",
    "pretrain.num_processes=1025",
    "engine.workers=9223372036854775807",
    "dedup.num_bands=2147483648",
    "dedup.num_rotations=2147483648",
    "dedup.num_perm=1000000000",
    "dedup.shingle_size=1000000000000",
    "shard.shard_tokens=1",
    "classify.features=1099511627776",
    "classify.ngrams=[1, 1000000000]",
    "classify.test_fraction=1e-320",
    "classify.c=1e308",
    "tokenizer.vocab_size=2147483648",
    "tokenizer.vocab_size=1",
    "tokenizer.vocab_size=262",
    "evaluate.max_tokens=1000000000000000000",
    "evaluate.toy_questions=1000000000000000000",
    "evaluate.temperature=1e-320",
    "evaluate.chat_temperature=1e-308",
    "pretrain.global_batch_tokens=1000000000000",
    "pretrain.model.num_layers=9223372036854775807",
    "pretrain.model.norm_eps=1e308",
    "pretrain.model.context_length=2147483648",
    "pretrain.optimizer.newton_schulz_steps=2147483648",
    "pretrain.optimizer.learning_rate=1e30",
    "pretrain.optimizer.muon_lr=1e30",
    "pretrain.optimizer.weight_decay=1e308",
    "pretrain.optimizer.epsilon=1e308",
    "pretrain.max_grad_norm=1e-320",
    "pretrain.z_loss=1e308",
    "pretrain.seed=9223372036854775808",
    "pretrain.seed=" + "9" * 5000,
    "pretrain.seed=0x" + "f" * 5000,
    "instruct.sources=[{kind='worlds', repeat=1000000000000}]",
    "pretrain.model={hidden_size=1048576, intermediate_size=4194304, num_layers=1000}",
    "name=CON",
    "name=nul.txt",
    "name=a.",
    "name=" + "x" * 300,
    "shard.weights=[{domain='elsewhere', weight=1}]",
    "shard.anneal={fraction=0.1, weights=[{domain='elsewhere', weight=1}]}",
    "tokenizer.weights=[{domain='elsewhere', weight=1}]",
    "a=" + "[" * 900,
    "a=" + "[" * 100 + "]" * 100,
    ".".join(["a"] * 3000) + "=1",
    "a=" + "[" * 3000,
    "a" * 100_000 + "=1",
    "pretrain.device=" + "word " * 20_000,
    "evaluate.tasks=['" + "x" * 100_000 + "']",
    "fetch.sources.0.path=" + "a" * 300,
    'pretrain.hellaswag="a\\u0000b"',
    "pretrain.start_from=" + "a/" * 5000,
    "\udcff=1",
    "name=\ud800",
    "fetch.sources." + "9" * 5000 + "=1",
]


@pytest.mark.parametrize("override", ABSURD, ids=lambda text: ascii(text[:50]))
def test_an_absurd_setting_is_refused_quickly_and_briefly(override: str, tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(config.to_toml(BASE))
    config.load(Recipe, recipe)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        config.load(Recipe, recipe, [override])
    assert time.monotonic() - began < 2
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 900 + "]" * 900,
        "a = " + "[" * 50_000,
        ".".join(["a"] * 3000) + " = 1",
        "a = " + "9" * 5000,
        "a = 0x" + "f" * 5000,
        "a = '" + "x" * 3_000_000 + "'",
        "a = '" + "word " * 100_000 + "'",
        "name = 3\n" + "\n".join(f"key{number} = {number}" for number in range(20_000)),
    ],
    ids=lambda text: text[:12],
)
def test_a_recipe_that_no_section_could_hold_is_refused_quickly_and_briefly(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        config.load(Recipe, tmp_path / "a.toml")
    assert time.monotonic() - began < 5
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/kmsg", "/proc/self/mem", "a\0b.toml", "a" * 300, "a/" * 3000])
def test_what_is_no_file_is_no_recipe(path: str) -> None:
    with pytest.raises(ConfigError):
        config.load(Recipe, Path(path))


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--port", "70000"],
        ["serve", "--port", "-1"],
        ["chat", "m", "--max-tokens", "99999999999"],
        ["chat", "m", "--seed", str(2**63)],
        ["chat", "m", "--seed", "9" * 5000],
        ["chat", "m", "--temperature", "1e-320"],
        ["chat", "m", "--temperature", "1e308"],
        ["eval", "m", "--toy-questions", "99999999999999999999"],
        ["eval", "m", "--limit", "9" * 5000],
        ["eval", "m", "--samples", "1000000"],
        ["eval", "m", "--num-fewshot", "1000000"],
        ["plan", "a.toml", "--devices", "1000000000"],
        ["plan", "a.toml", "--memory", "9" * 400 + "TB"],
        ["plan", "a.toml", "--power-watts", "1e300"],
        ["plan", "a.toml", "--price", "1e300"],
        ["data", "filter", "a", "--out", "o", "--workers", "1000000"],
        ["data", "dedup", "a", "--out", "o", "--memory", "1"],
    ],
)
def test_an_option_beyond_its_ends_exits_2_and_says_the_end(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(command)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.search(r"at least|at most|(from|between) .*\d.* (to|and) ", said)
    assert len(said) < 3000
