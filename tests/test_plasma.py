"""recipes/plasma-500m.toml up to its shards, with text of this machine in the place of its sources."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from bloomery import cli
from bloomery.core import config
from bloomery.core.records import read_manifest
from bloomery.recipe import Recipe
from bloomery.tokenizer.config import ByteBpe
from tests.shared import SHARED, needs

ROOT = Path(__file__).parents[1]
PLASMA = ROOT / "recipes" / "plasma-500m.toml"
STAND_IN: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "stand_in.py"))
SETTINGS = ["tokenizer.vocab_size=4000", "tokenizer.sample_bytes=1000000", "shard.tokens=600000"]


def test_the_model_has_the_parameters_of_the_one_that_it_reproduces() -> None:
    recipe = config.load(Recipe, PLASMA)
    assert isinstance(recipe.tokenizer, ByteBpe)
    assert recipe.pretrain is not None
    model, vocabulary = recipe.pretrain.model, recipe.tokenizer.vocab_size
    head = model.hidden_size // model.num_heads
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size * head * model.num_kv_heads
    block = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    assert vocabulary * model.hidden_size + model.num_layers * block + model.hidden_size == 521_570_560
    assert recipe.fetch is not None
    assert {weight.domain for weight in recipe.shard.weights} == {source.domain for source in recipe.fetch.sources}


def test_with_its_mixture_it_is_finetuned_on_eleven_sets_of_conversations_with_their_caps_and_copies() -> None:
    instruct = config.load(Recipe, PLASMA, ['instruct.sources=[{kind="mixture", name="plasma-v4"}]']).instruct
    in_rows = {source.name: (source.max_conversations or 0) * source.repeat for source in instruct.read}
    assert len(in_rows) == 11
    assert sum(in_rows.values()) == 328_000
    kinds = [one.kind for one in instruct.filters]
    assert kinds[-1] == "duplicates", "a copy must not stand in for one that another filter drops"


@pytest.mark.slow
@needs(SHARED / "data" / "dev")
def test_all_five_domains_reach_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = STAND_IN["toml"]([one | {"max_bytes": 1_000_000} for one in STAND_IN["sources"](SHARED)])
    words = ["run", str(PLASMA), "--runs", str(tmp_path), "--until", "shard", f"fetch.sources={sources}"]
    assert cli.main([*words, *STAND_IN["toxicity"](SHARED), *SETTINGS]) == 0
    root = tmp_path / "plasma-500m"
    folders = {name: root / folder for name, folder in json.loads((root / "current.json").read_text()).items()}
    stats = {name: read_manifest(folders[name])["stats"] for name in ("fetch", "filter", "dedup", "tokenizer", "shard")}
    domains = set(STAND_IN["DOMAINS"])
    assert set(stats["fetch"]["by_domain"]) == set(stats["shard"]["mix"]) == domains
    fetched, filtered, unique = (stats[name]["documents"] for name in ("fetch", "filter", "dedup"))
    assert fetched == filtered == stats["filter"]["kept"] + stats["filter"]["dropped"]
    assert stats["filter"]["kept"] == unique == stats["dedup"]["kept"] + stats["dedup"]["removed"]
    assert all(one["tokens"] > 0 for one in stats["shard"]["mix"].values())
    card = json.loads((root / "data_card.json").read_text())
    assert {source["domain"] for source in card["sources"]} == domains
    assert (root / "report.html").is_file()
