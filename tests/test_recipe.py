import inspect
import re
from pathlib import Path

import pytest

from bloomery import recipe
from bloomery.core import config
from bloomery.core.errors import ConfigError
from bloomery.core.stage import Stage, resolve
from bloomery.recipe import STAGES, Recipe
from bloomery.tokenizer.config import ByteBpe, Imported, SentencePiece

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo.toml"
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def test_every_stage_is_a_section_of_the_recipe_and_in_its_order() -> None:
    assert [stage.name for stage in STAGES] == [name for name in Recipe.model_fields if name not in ("name", "engine")]
    assert [stage.name for stage in STAGES] == re.findall(r"^    (\w+) +\S", recipe.__doc__ or "", re.MULTILINE)


def test_a_stage_follows_only_stages_before_it() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.after) <= seen, stage.name
        seen.add(stage.name)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage.name))
def test_every_path_of_a_stage_leads_to_a_function_that_takes_its_section(stage: Stage) -> None:
    section = Recipe.model_fields[stage.name].annotation
    run = inspect.signature(stage.runner())
    assert list(run.parameters) == ["config", "inputs", "out"]
    assert run.parameters["config"].annotation is section
    if stage.digest:
        digest = inspect.signature(resolve(stage.digest))
        assert [parameter.annotation for parameter in digest.parameters.values()] == [section]


def test_one_rate_on_the_command_line_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'name = "a"\nfetch = {}\npretrain = {steps = 1, tokens_per_step = 512}\n'
        "finetune = {steps = 1, tokens_per_step = 512}\n"
    )
    before, after = (
        config.plain(config.load(Recipe, tmp_path / "a.toml", settings))
        for settings in ([], ["pretrain.optimizer.learning_rate=0.5", "finetune.schedule.warmup_steps=7"])
    )
    before["pretrain"]["optimizer"]["learning_rate"] = 0.5
    before["finetune"]["schedule"]["warmup_steps"] = 7
    assert after == before


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.name))
def test_every_recipe_loads_and_survives_being_written(path: Path, tmp_path: Path) -> None:
    loaded = config.load(Recipe, path)
    assert loaded.name == path.stem
    copy = tmp_path / "recipe.toml"
    copy.write_text(config.to_toml(config.plain(loaded)), encoding="utf-8")
    assert config.load(Recipe, copy) == loaded
    assert not loaded.synthesize.enabled


def test_the_engine_of_a_recipe_is_that_of_its_stages_but_for_those_that_say_otherwise(tmp_path: Path) -> None:
    text = 'name = "a"\npretrain = {steps = 1, tokens_per_step = 512}\nfinetune = {steps = 1, tokens_per_step = 512}\n'
    (tmp_path / "a.toml").write_text(text + "[fetch]\n[dedup.engine]\nworkers = 5\n")
    loaded = config.load(Recipe, tmp_path / "a.toml", ["engine.workers=3"])
    found = {name: getattr(loaded, name).engine.workers for name in recipe.PARALLEL}
    assert found == {**dict.fromkeys(recipe.PARALLEL, 3), "dedup": 5}
    assert config.build(Recipe, config.plain(loaded)) == loaded


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((), ByteBpe),
        (("tokenizer.vocab_size=999", "tokenizer.pattern=gpt2"), ByteBpe),
        (("tokenizer.kind=sentencepiece", "tokenizer.vocab_size=999"), SentencePiece),
        (('tokenizer={kind="import", path="somewhere"}',), Imported),
    ],
)
def test_a_tokenizer_without_a_kind_is_a_byte_level_bpe(settings: tuple[str, ...], kind: type[config.Config]) -> None:
    made = config.load(Recipe, DEMO, settings).tokenizer
    assert type(made) is kind
    if len(settings) == 2:
        assert isinstance(made, ByteBpe | SentencePiece)
        assert (made.vocab_size, made.sample_bytes) == (999, 6_000_000)


def test_an_unknown_kind_or_key_of_a_tokenizer_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"(?s)tokenizer\.kind.*'byte_bp' is not one of.*mean 'byte_bpe'"):
        config.load(Recipe, DEMO, ["tokenizer.kind=byte_bp"])
    with pytest.raises(ConfigError, match=r"tokenizer\.patern: unknown key(?s:.*)mean 'pattern'"):
        config.load(Recipe, DEMO, ["tokenizer.patern=gpt2"])
