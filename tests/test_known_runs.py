"""The recipes that reproduce what is known: shapes, lengths and settings, and that a plan can be made of each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery import cli
from bloomery.core import config, pipeline
from bloomery.core.errors import DataError
from bloomery.model.config import ModelConfig, cost
from bloomery.recipe import STAGES, Recipe
from bloomery.shards.config import ImportedShards
from bloomery.stages import plan as stages_plan
from bloomery.stages.config import Shard
from bloomery.stages.tokenizer import vocab_size
from bloomery.tokenizer.chat_template import Renderer
from bloomery.tokenizer.config import Imported
from bloomery.train.config import AdamW, ConstantSchedule, CosineSchedule, Muon
from bloomery.weights import architectures, hf
from bloomery.weights.hf import Lineage
from tests.model.made import lively
from tests.shards.test_foreign import by_hand
from tests.shared import SHARED
from tests.tokenizer.made import small

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes"
GPT2_IDS = SHARED / "data" / "tokenizer"
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-124m-finetune": 124_439_808,
    "harness-220m": 221_380_608,
    "plasma-235m": 235_705_344,
    "plasma-500m": 521_570_560,
    "tinyshakespeare": 2_164_800,
    "tinystories": 24_388_992,
}
OF_ANY_MODEL = ("finetune", "baichuan2-7b-lora", "llama-3.1-405b-lora-8x192gb")
"""Recipes whose model is what a path of them names."""
VOCABULARY = {"gpt2-124m": 50_257, "gpt2-124m-finetune": 50_257}
"""Where the tokenizer is one that exists; the others train theirs."""


OPENAI = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_ctx": 1024,
    "n_positions": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "vocab_size": 50_257,
}
"""What the config.json of OpenAI's GPT-2 says of its shape."""


def settings(name: str, folder: Path) -> list[str]:
    """
    Text that needs no network, GPT-2's tokenizer from where this machine has it, or one of its size, and for a run that
    starts from weights a folder that looks like one of them.
    """
    found = ['fetch.sources=[{kind="worlds", name="worlds", domain="worlds", count=10}]', "shard.weights=[]"]
    if name == "gpt2-124m-finetune":
        (folder / "config.json").write_text(json.dumps(OPENAI))
        (folder / "model.safetensors").write_bytes(b"")
        found.append(f"pretrain.start_from={folder}")
    if name not in VOCABULARY:
        return found
    if GPT2_IDS.is_dir() and name == "gpt2-124m":
        return [*found, f"tokenizer.path={GPT2_IDS}"]
    return [*found, f'tokenizer={{kind="byte_bpe", vocab_size={VOCABULARY[name]}}}']


def read(name: str) -> Recipe:
    return config.load(Recipe, FOLDER / f"{name}.toml")


def model(recipe: Recipe) -> ModelConfig:
    assert recipe.pretrain is not None
    return recipe.pretrain.model


def test_every_recipe_but_the_demo_is_counted_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} - {"demo", *OF_ANY_MODEL} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_the_parameters_of_the_model_that_it_reproduces(name: str) -> None:
    recipe = read(name)
    vocabulary = VOCABULARY.get(name) or config.plain(recipe.tokenizer)["vocab_size"]
    assert cost(model(recipe), vocabulary).parameters == PARAMETERS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_plan_can_be_made_of_a_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a trace of the smallest, which takes seconds; by the arithmetic that others compare with it for the rest."""
    monkeypatch.setattr(stages_plan, "is_traced", lambda model: name == "tinyshakespeare")
    words = ["plan", str(FOLDER / f"{name}.toml"), "--device", "7900xtx", "--runs", str(tmp_path), "--json"]
    words += settings(name, tmp_path)
    assert cli.main(words) == 0
    needs: dict[str, Any] = json.loads(capsys.readouterr().out)["pretrain"]
    recipe = read(name)
    assert recipe.pretrain is not None
    assert (
        abs(needs["parameters"] - PARAMETERS[name]) <= 6 * recipe.pretrain.model.hidden_size
    )  # marks of conversations
    rows = recipe.pretrain.global_batch_tokens // recipe.pretrain.model.context_length
    assert needs["tokens"] == recipe.pretrain.steps * rows * recipe.pretrain.model.context_length
    assert needs["peak_bytes"] > 16 * needs["parameters"] * 0.7


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2-124m-finetune", "plasma-500m"])
def test_a_plan_can_be_made_before_anything_is_there(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    assert cli.main(["plan", str(FOLDER / f"{name}.toml"), "--device", "7900xtx", "--price", "0.4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["pretrain"]["parameters"] - PARAMETERS[name]) <= 6 * 1280
    assert found["pretrain"]["fits"]
    assert None in [one["fresh"] for one in found["stages"]]


def test_weights_that_are_not_there_end_a_run_with_the_command_that_fetches_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*settings("gpt2-124m", tmp_path)[:1], 'tokenizer={kind="byte_bpe", vocab_size=600}']
    words += ["--runs", str(tmp_path / "runs"), "--until", "pretrain"]
    assert cli.main(["run", str(FOLDER / "gpt2-124m-finetune.toml"), *words]) == 2
    said = capsys.readouterr().err
    assert "models/gpt2: there is no such model" in said
    assert "hf download OWNER/NAME --include '*.json' '*.safetensors' --local-dir models/gpt2" in said


def test_an_imported_tokenizer_has_as_many_ids_as_the_recipe_says(tmp_path: Path) -> None:
    small().save(tmp_path)
    section = Imported(path=tmp_path, vocab_size=small().vocab_size + 1)
    with pytest.raises(DataError, match=f"it has {small().vocab_size:,} token IDs, but vocab_size is"):
        vocab_size(section)
    assert vocab_size(section.model_copy(update={"path": tmp_path / "none"})) == small().vocab_size + 1
    with pytest.raises(DataError, match="there is no tokenizer"):
        vocab_size(Imported(path=tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "steps", "rate", "warmup"),
    [("plasma-235m", 100_000, 1.5e-4, 2000), ("plasma-500m", 318_000, 1.2e-4, 3000)],
)
def test_plasma_is_trained_as_1386_trains_it(name: str, steps: int, rate: float, warmup: int) -> None:
    section = read(name).pretrain
    assert section is not None
    assert (section.steps, section.global_batch_tokens, section.model.context_length) == (steps, 32_768, 1024)
    assert isinstance(section.optimizer, AdamW)
    assert (section.optimizer.learning_rate, section.optimizer.weight_decay) == (rate, 0.1)
    assert not section.optimizer.decay_embeddings
    assert section.schedule == CosineSchedule(warmup_steps=warmup, min_lr_ratio=0.1)


def test_gpt2_is_trained_as_llm_c_trains_it() -> None:
    section = read("gpt2-124m").pretrain
    assert section is not None
    assert (section.steps, section.global_batch_tokens, section.model.context_length) == (18_865, 524_288, 1024)
    assert isinstance(section.optimizer, AdamW)
    rates = section.optimizer
    assert (rates.learning_rate, rates.weight_decay, rates.beta1, rates.beta2) == (6e-4, 0.1, 0.9, 0.95)
    assert rates.decay_embeddings
    assert section.schedule == CosineSchedule(warmup_steps=700, min_lr_ratio=0.0)
    assert section.max_grad_norm == 1.0
    assert section.steps * section.global_batch_tokens == pytest.approx(10e9, rel=0.02)


def test_gpt2_is_trained_on_as_llm_c_does_by_default() -> None:
    section = read("gpt2-124m-finetune").pretrain
    assert section is not None
    assert (section.steps, section.global_batch_tokens, section.model.context_length) == (74, 4 * 1024, 1024)
    assert section.optimizer == AdamW(learning_rate=3e-4, weight_decay=0.0)
    assert (section.schedule, section.max_grad_norm) == (ConstantSchedule(), 1.0)
    assert section.model == architectures.read_gpt2(OPENAI)


SMALL = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "intermediate_size": 64,
    "context_length": 16,
}


@pytest.mark.slow
def test_weights_of_others_are_imported_and_trained_on_by_the_recipe(tmp_path: Path) -> None:
    theirs, ours, tokens = tmp_path / "theirs", tmp_path / "ours", tmp_path / "tokens"
    model = lively(ModelConfig.model_validate({"preset": "gpt2-124m", **SMALL}), 0, small().vocab_size)
    hf.save(theirs, model, Renderer(small()), Lineage(tokenizer="", template=None, shards=""))
    (theirs / "bloomery.json").unlink()
    assert cli.main(["import", str(theirs), str(ours)]) == 0
    tokens.mkdir()
    ids = np.random.default_rng(0).integers(0, 100, 4000)
    for name in ("some_train_000001", "some_val_000000"):
        (tokens / f"{name}.bin").write_bytes(by_hand(ids.tolist()))

    words = [f"pretrain.start_from={ours}", f"tokenizer.path={ours}", "tokenizer.measure=false"]
    words += [f"tokenizer.vocab_size={small().vocab_size}", "pretrain.global_batch_tokens=64"]
    words += [*(f"pretrain.model.{key}={value}" for key, value in SMALL.items())]
    recipe = config.load(Recipe, FOLDER / "gpt2-124m-finetune.toml", words)
    recipe = recipe.model_copy(update={"fetch": None, "shard": Shard(imported=ImportedShards(folder=tokens))})
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    pipeline.execute(plans, until="pretrain")

    trained = plans[2].folder
    assert hf.load(trained / "model").lineage.base == hf.digest(ours)
    told = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in told if "validation_loss" in line]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert {line["learning_rate"] for line in told if "learning_rate" in line} == {3e-4}


def test_the_harness_is_trained_for_a_day_on_half_a_million_tokens_a_step() -> None:
    section = read("harness-220m").pretrain
    assert section is not None
    assert (section.steps, section.global_batch_tokens) == (10_000, 16 * 30 * 1024)
    assert isinstance(section.optimizer, Muon)
    assert section.optimizer.muon_lr * 0.2 == pytest.approx(0.1 * section.optimizer.learning_rate)
