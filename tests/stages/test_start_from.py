"""Finetuning of any model: its shape, tokenizer and template are its own, and no stage before it runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from bloomery.core import config, pipeline, records
from bloomery.core.config import Override
from bloomery.core.errors import CheckpointError, ConfigError, DataError
from bloomery.model.config import ModelConfig
from bloomery.recipe import STAGES, Recipe
from bloomery.shards import format
from bloomery.stages import plan
from bloomery.stages.plan import Wish
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer
from bloomery.weights import architectures, export, hf, locate
from bloomery.weights.hf import Lineage
from tests.model.made import lively
from tests.tokenizer.made import small

import torch

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=16, context_length=96)
TINY: tuple[Override, ...] = (
    "instruct.val_fraction=0.3",
    "finetune.global_batch_tokens=128",
    "finetune.dry_run=false",
    "finetune.device=cpu",
    "finetune.optimizer.learning_rate=0.01",
    "evaluate.conversations=0",
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    lineage = Lineage(tokenizer=small().hash, template=TEMPLATES["bloomery"].hash, shards="5" * 64)
    hf.save(tmp_path / "base", lively(SHAPE, 0, small().vocab_size), Renderer(small()), lineage)
    return tmp_path / "base"


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    rows = [{"instruction": f"Say {n}", "input": "please", "output": f"It is {n}."} for n in range(40)]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "my.jsonl"


def recipe(base: Path, talks: Path, *more: Override) -> Recipe:
    asked = (f"finetune.start_from={base}", f"instruct.sources.0.path={talks}", *TINY, *more)
    return config.load(Recipe, Path(__file__).parents[2] / "recipes" / "finetune.toml", asked)


def ran(made: Recipe, root: Path, until: str = "finetune") -> dict[str, Path]:
    plans = pipeline.plan_stages(STAGES, made, root)
    pipeline.remember(root, made, plans)
    pipeline.execute(plans, until=until)
    return {one.stage.name: one.folder for one in plans}


def stats(folder: Path) -> dict[str, Any]:
    return records.read_manifest(folder)["stats"]


def test_one_command_finetunes_a_model_and_the_result_again(base: Path, talks: Path, tmp_path: Path) -> None:
    first = ran(recipe(base, talks), tmp_path / "first", "evaluate")
    assert list(first) == ["synthesize", "instruct", "finetune", "evaluate"]
    facts = format.read(format.names(first["instruct"], "train")[0]).index
    assert (facts["row_tokens"], facts["template"]) == (97, TEMPLATES["bloomery"].hash)
    assert facts["template_text"] == TEMPLATES["bloomery"].jinja()
    rows = stats(first["instruct"])["train"]["rows"]
    assert stats(first["finetune"])["steps"] == 3 * rows
    assert stats(first["finetune"])["best_step"] > 0
    again = ran(recipe(tmp_path / "first", talks), tmp_path / "second")
    assert stats(again["finetune"])["validation_loss"] < stats(first["finetune"])["validation_loss"]
    loaded = hf.load(locate.locate_model(again["finetune"]))
    assert loaded.model.config == SHAPE
    assert loaded.lineage.base == hf.digest(first["finetune"] / "model")


@pytest.mark.slow
def test_rows_are_as_long_as_the_recipe_says_and_longer_ones_need_a_stretching(
    base: Path, talks: Path, tmp_path: Path
) -> None:
    done = ran(recipe(base, talks, "instruct.sequence_length=49"), tmp_path / "short")
    assert hf.load(locate.locate_model(done["finetune"])).model.config.context_length == 96
    with pytest.raises(ConfigError, match="sequence_length=193 is more than the model's context of 96") as caught:
        recipe(base, talks, "instruct.sequence_length=193")
    assert 'finetune.rope_scaling={kind="yarn", factor=2, original_context_length=96}' in str(caught.value)
    whole = ran(recipe(base, talks, "instruct.sequence_length=193", ("finetune.lora", None), STRETCHED), tmp_path / "a")
    shape = hf.load(locate.locate_model(whole["finetune"])).model.config
    assert shape.context_length == 192
    assert shape.rope_scaling is not None


STRETCHED = ("finetune.rope_scaling", {"kind": "linear", "factor": 2.0})


@pytest.mark.slow
def test_adapters_keep_the_positions_that_they_were_trained_with(base: Path, talks: Path, tmp_path: Path) -> None:
    done = ran(recipe(base, talks, "instruct.sequence_length=193", STRETCHED), tmp_path / "long")
    folder = locate.locate_model(done["finetune"])
    loaded = hf.load(folder)
    assert loaded.model.config.context_length == hf.config_of(folder)[0].context_length == 192
    assert hf.config_of(hf.base_of(folder))[0] == SHAPE
    export.write(loaded, tmp_path / "merged", "hf", "float32")
    ids = torch.arange(180)[None] % 50
    with torch.inference_mode():
        merged = hf.load(tmp_path / "merged").model
        assert torch.equal(merged(ids), loaded.model(ids))
        short = merged.config.model_copy(update={"rope_scaling": None})
        merged.config = short
        assert not torch.allclose(merged(ids), loaded.model(ids))
    with pytest.raises(CheckpointError, match="positions stretched to a context of 192"):
        export.write_adapters(folder, tmp_path / "adapter")
    again = ran(recipe(tmp_path / "long", talks, "instruct.sequence_length=97"), tmp_path / "again")
    assert hf.config_of(locate.locate_model(again["finetune"]))[0] == loaded.model.config


@pytest.mark.parametrize(
    ("stored", "kept"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_a_frozen_base_is_kept_as_in_its_files_where_that_is_asked_for(
    base: Path, talks: Path, tmp_path: Path, stored: export.ExportNumbers, kept: str
) -> None:
    export.write(hf.load(base), tmp_path / "theirs", "hf", stored)
    settings = ("finetune.lora.base_dtype", "auto"), ("finetune.epochs", None), ("finetune.steps", 1)
    asked = recipe(tmp_path / "theirs", talks, *settings)
    _, reports = plan.report(STAGES, asked, tmp_path / "run", Wish(memory_bytes=2**30))
    adapters = reports["finetune"].ask.what.lora
    assert adapters is not None
    assert adapters.base_dtype == kept
    done = ran(asked, tmp_path / "run")
    saved = json.loads((locate.locate_model(done["finetune"]) / hf.LINEAGE).read_text())
    assert saved["adapts"]["kept_as"] == kept


def test_what_a_run_refuses_is_refused_before(base: Path, talks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replaces \\[pretrain\\]"):
        recipe(base, talks, ("pretrain", {"steps": 1, "global_batch_tokens": 96}))
    with pytest.raises(ConfigError, match="replaces \\[shard\\]"):
        recipe(base, talks, ("shard.val_fraction", 0.1))
    with pytest.raises(ConfigError, match="name two models"):
        recipe(base, talks, ("instruct.start_from", str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="matches no matrix of this model"):
        recipe(base, talks, ("finetune.lora.target_modules", ["W_unknown"]))
    facts, reports = plan.report(STAGES, recipe(base, talks), tmp_path / "run", Wish(memory_bytes=2**30))
    assert [one["stage"] for one in facts["stages"]] == ["synthesize", "instruct", "finetune", "evaluate"]
    assert reports["finetune"].ask.what.model.context_length == 96
    assert facts["missing_sections"] == {}


def test_another_model_is_another_fingerprint(base: Path, talks: Path, tmp_path: Path) -> None:
    before = pipeline.plan_stages(STAGES, recipe(base, talks), tmp_path / "run")
    hf.save(base, lively(SHAPE, 1, small().vocab_size), Renderer(small()), hf.lineage_of(base))
    after = pipeline.plan_stages(STAGES, recipe(base, talks), tmp_path / "run")
    changed = [one.stage.name for one, other in zip(before, after, strict=True) if one.fingerprint != other.fingerprint]
    assert changed == ["instruct", "finetune", "evaluate"]


@pytest.mark.slow
def test_a_small_baichuan2_with_pickled_weights_trains_by_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder as its makers publish it: W_pack, NormHead, a pickle, SentencePiece, code that is never run."""
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    theirs = baichuan2(tmp_path / "theirs")
    rows = [{"instruction": f"Say {n}", "input": "please", "output": f"It is {n}."} for n in range(200)]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = (f"finetune.start_from={theirs}/pytorch_model.bin", f"instruct.sources.0.path={tmp_path}/my.jsonl")
    small_steps: tuple[Override, ...] = (
        "finetune.global_batch_tokens=1024",
        "finetune.dry_run=false",
        "finetune.device=cpu",
        "finetune.epochs=2",
    )
    small_steps = (*small_steps, "finetune.optimizer.learning_rate=0.01")
    file = Path(__file__).parents[2] / "recipes" / "baichuan2-7b-lora.toml"
    made = config.load(Recipe, file, (*asked, *small_steps, "instruct.val_fraction=0.3", "evaluate.conversations=2"))
    done = ran(made, tmp_path / "run", "evaluate")
    found = stats(done["finetune"])
    assert 0 < found["best_step"] <= found["steps"]
    loaded = hf.load(locate.locate_model(done["finetune"]))
    assert loaded.model.config.normalize_head
    assert (
        loaded.tokenizer.vocab_size
        == hf.language(locate.locate_model(theirs / "pytorch_model.bin")).tokenizer.vocab_size
    )


def baichuan2(folder: Path) -> Path:
    """A Baichuan2 of two layers: what its makers publish, scaled down."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("\n".join(f"the lamp number {n} is on, and it is {n} o'clock" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=["<reserved_106>", "<reserved_107>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    shape = ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=48,
        context_length=1024,
        tie_embeddings=False,
        normalize_head=True,
    )
    kind = architectures.of_file({"architectures": ["BaichuanForCausalLM"], "num_attention_heads": 4})
    model = lively(shape, 0, 400)
    weights = model.state_dict()
    theirs = {piece.theirs: architectures.gathered(piece, weights).contiguous() for piece in kind.pieces([*weights])}
    assert "model.layers.0.self_attn.W_pack.weight" in theirs
    torch.save({name: weight.bfloat16() for name, weight in theirs.items()}, folder / "pytorch_model.bin")
    facts = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
        "model_type": "baichuan",
        "vocab_size": 400,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 1024,
        "model_max_length": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "modeling_baichuan.py").write_text("raise SystemExit('code of others was run')\n")
    return folder


@pytest.mark.slow
def test_a_template_that_is_asked_for_replaces_that_of_the_model(base: Path, talks: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (theirs / name).write_bytes((base / name).read_bytes())
    for number, more in enumerate(((), (("finetune.lora", None),))):
        done = ran(recipe(theirs, talks, "instruct.chat_template=chatml", *more), tmp_path / f"run{number}")
        loaded = hf.load(locate.locate_model(done["finetune"]))
        assert loaded.renderer.hash == TEMPLATES["chatml"].hash
        assert loaded.tokenizer.special_id("<|im_start|>") == small().vocab_size
    with pytest.raises(DataError, match=r"lacks <\|im_start\|>, <\|im_end\|> of the chat template 'chatml'"):
        ran(recipe(base, talks, "instruct.chat_template=chatml"), tmp_path / "ours", "instruct")
