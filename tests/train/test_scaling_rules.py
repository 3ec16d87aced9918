import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery import cli
from bloomery.core import config
from bloomery.core.errors import ConfigError
from bloomery.model.config import cost
from bloomery.recipe import Recipe
from bloomery.stages.config import Pretrain
from bloomery.train import config as train_config
from bloomery.train.config import AdamW, Muon
from bloomery.train.plan.memory import rows_per_step

VOCAB_SIZE = 32_768
RECIPE = 'name = "a"\n[fetch]\n[pretrain]\ndepth = {depth}\n'


def made(layers: int, **given: Any) -> Pretrain:
    return config.build(Pretrain, train_config.by_scaling_rules({"depth": layers, **given}, VOCAB_SIZE))


def recipe(folder: Path, *settings: str, layers: int = 6) -> Recipe:
    (folder / "a.toml").write_text(RECIPE.format(depth=layers), encoding="utf-8")
    return config.load(Recipe, folder / "a.toml", settings)


def test_depth_12_has_the_width_of_gpt2_and_its_batch() -> None:
    section = made(12)
    assert (section.model.hidden_size, section.model.num_heads, section.model.intermediate_size) == (768, 12, 2048)
    assert section.global_batch_tokens == 524_288
    assert section.optimizer == Muon(muon_lr=0.02, learning_rate=3e-3)


@given(st.integers(1, 120))
def test_every_head_has_the_same_width_and_all_splits_are_even(layers: int) -> None:
    section = made(layers)
    model = section.model
    assert model.num_layers == layers
    assert model.head_size == train_config.HEAD_WIDTH
    assert model.hidden_size == model.num_heads * train_config.HEAD_WIDTH
    assert model.intermediate_size % 64 == 0
    assert 8 * model.hidden_size <= 3 * model.intermediate_size < 8 * model.hidden_size + 192
    assert section.global_batch_tokens % model.context_length == 0
    assert section.global_batch_tokens & (section.global_batch_tokens - 1) == 0


def test_a_deeper_model_is_never_smaller_in_anything_nor_trained_on_less() -> None:
    sections = [made(layers) for layers in range(1, 65)]
    for below, above in pairwise(sections):
        for name in ("hidden_size", "num_heads", "intermediate_size"):
            assert getattr(below.model, name) <= getattr(above.model, name)
        small, large = (cost(one.model, VOCAB_SIZE) for one in (below, above))
        assert small.parameters < large.parameters
        assert below.global_batch_tokens <= above.global_batch_tokens
        assert below.steps * below.global_batch_tokens < above.steps * above.global_batch_tokens


@pytest.mark.parametrize("layers", [4, 12, 30])
@pytest.mark.parametrize("ratio", [5.0, 20.0])
def test_tokens_are_the_asked_multiple_of_the_multiplied_weights(layers: int, ratio: float) -> None:
    section = made(layers, tokens_per_parameter=ratio)
    tokens = section.steps * section.global_batch_tokens
    wanted = ratio * cost(section.model, VOCAB_SIZE).matmul_parameters
    assert abs(tokens - wanted) <= section.global_batch_tokens / 2


@pytest.mark.parametrize("given", [{}, {"global_batch_tokens": 1000}, {"global_batch_tokens": 10}])
@pytest.mark.parametrize("context", [256, 300])
def test_steps_and_rates_are_those_of_the_tokens_that_are_trained(given: dict[str, int], context: int) -> None:
    section = made(4, model={"context_length": context}, tokens_per_parameter=0.01, **given)
    whole = rows_per_step(section, context) * context
    assert abs(section.steps * whole - 0.01 * cost(section.model, VOCAB_SIZE).matmul_parameters) <= whole / 2
    assert section.optimizer == made(4, model={"context_length": context}, global_batch_tokens=whole).optimizer
    assert section.global_batch_tokens == given.get("global_batch_tokens", whole)


def test_rates_rise_with_the_root_of_the_batch_and_fall_with_the_width() -> None:
    small, large = (made(8, global_batch_tokens=tokens).optimizer for tokens in (2**15, 2**17))
    assert isinstance(small, Muon)
    assert isinstance(large, Muon)
    assert large.muon_lr == pytest.approx(2 * small.muon_lr, rel=1e-2)
    narrow, wide = (
        made(layers, global_batch_tokens=2**17, optimizer={"kind": "adamw"}).optimizer for layers in (6, 24)
    )
    assert isinstance(narrow, AdamW)
    assert narrow.learning_rate == pytest.approx(4 * wide.learning_rate, rel=1e-2)


def test_what_is_given_stays_and_what_follows_from_it_follows() -> None:
    section = made(
        6, steps=7, global_batch_tokens=4096, model={"hidden_size": 256, "context_length": 128, "num_kv_heads": 2}
    )
    assert (section.steps, section.global_batch_tokens) == (7, 4096)
    assert (section.model.hidden_size, section.model.num_heads, section.model.num_kv_heads) == (256, 4, 2)
    assert section.model.intermediate_size == 704
    assert isinstance(made(6, optimizer={"kind": "muon", "learning_rate": 0.5}).optimizer, Muon)
    assert made(6, optimizer={"kind": "muon", "learning_rate": 0.5}).optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("model", "hint"), [({"num_layers": 5}, "one of them"), ({"preset": "gpt2-124m"}, "one of them")]
)
def test_two_numbers_of_layers_are_refused(model: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        made(6, model=model)


def test_a_recipe_needs_nothing_but_the_depth_and_stays_the_same_when_it_is_written(tmp_path: Path) -> None:
    read = recipe(tmp_path)
    assert read.pretrain is not None
    assert read.pretrain.model.hidden_size == 384
    (tmp_path / "b.toml").write_text(config.to_toml(config.plain(read)), encoding="utf-8")
    assert config.load(Recipe, tmp_path / "b.toml") == read
    bigger = recipe(tmp_path, "pretrain.depth=7", "tokenizer.vocab_size=50000")
    assert bigger.pretrain is not None
    assert bigger.pretrain.model.num_layers == 7


@pytest.mark.parametrize("wrong", ["0", '"deep"', "2.5", "true", "100000000"])
def test_a_depth_that_is_no_number_of_layers_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"pretrain\.depth"):
        recipe(tmp_path, f"pretrain.depth={wrong}")


@pytest.mark.parametrize(
    "wrong",
    [
        "global_batch_tokens=0",
        "tokens_per_parameter=0",
        "tokens_per_parameter=-1",
        "tokens_per_parameter=1e308",
        "model=5",
        "model.hidden_size='x'",
        "model.hidden_size=0",
        "model.num_heads=0",
        "model.num_heads=true",
        "model.context_lengthh=5",
        "optimizer='adamw'",
        "optimizer.kind='sgd'",
        "steps=0",
    ],
)
def test_what_is_wrong_beside_a_depth_is_told_as_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    (tmp_path / "plain.toml").write_text('name = "a"\n[fetch]\n[pretrain]\nsteps = 1\nglobal_batch_tokens = 64\n')
    with pytest.raises(ConfigError) as plain:
        config.load(Recipe, tmp_path / "plain.toml", [f"pretrain.{wrong}"])
    with pytest.raises(ConfigError) as deep:
        recipe(tmp_path, f"pretrain.{wrong}")
    assert (deep.value.what, deep.value.hint) == (plain.value.what, plain.value.hint)
    assert "pretrain." in plain.value.what
    assert cli.main(["plan", str(tmp_path / "a.toml"), f"pretrain.{wrong}"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
def test_a_plan_says_what_the_depth_came_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    words = ["plan", str(tmp_path / "a.toml"), "--runs", str(tmp_path / "runs"), "--device", "7900xtx"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "pretrain: depth 6: hidden_size 384, 6 heads" in shown
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["depth"]
    assert told["depth"] == 6
    assert told["model"]["hidden_size"] == 384
    assert told["steps"] > 100
    assert told["rates"].keys() == {"muon_lr", "learning_rate"}
    assert cli.main([*words, "pretrain.global_batch_tokens=1000"]) == 0
    assert " steps of 768 tokens" in capsys.readouterr().out
