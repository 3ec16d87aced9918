"""A recipe that finetunes adapters in ChatML on the weights of others: from their tokenizer to what is exported."""

from pathlib import Path
from typing import Literal

import pytest

from bloomery.core import config, pipeline, records
from bloomery.core.chat import Message
from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig
from bloomery.recipe import STAGES, Recipe
from bloomery.stages import finetune
from bloomery.tokenizer.chat_template import Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.config import Mesh
from bloomery.weights import checkpoint, export, hf, locate
from bloomery.weights.hf import Lineage
from tests.model.made import lively
from tests.stages.test_imported import written
from tests.tokenizer.made import small
from tests.train.made import lines

import torch

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=16, context_length=96)
MORE = """
[instruct]
chat_template = "chatml"
sequence_length = 97
val_fraction = 0.2
sources = [{ kind = "worlds", count = 60 }]
[finetune]
steps = 3
global_batch_tokens = 192
eval_every = 2
lora = { rank = 2, target_modules = ["attention.*"], base_dtype = "nf4" }
"""


def recipe_of(root: Path) -> Path:
    path = written(root)
    model = lively(SHAPE, 0, small().vocab_size)
    hf.save(root / "base", model, Renderer(small()), Lineage(tokenizer="", template=None, shards=""))
    (root / "base" / "bloomery.json").unlink()
    text = (
        path.read_text()
        .replace("context_length = 16", "context_length = 96")
        .replace("num_layers = 1", "num_layers = 2")
    )
    text = text.replace("[pretrain]", f'[pretrain]\nstart_from = "{root}/base"').replace("= 64", "= 192")
    path.write_text(text + MORE)
    return path


def test_adapters_in_chatml_on_the_weights_of_others_from_recipe_to_export(tmp_path: Path) -> None:
    recipe = config.load(Recipe, recipe_of(tmp_path / "theirs"))
    assert recipe.tokenizer.chat_template == "chatml"
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    done = pipeline.execute(plans, until="finetune")
    assert done["finetune"] == "ran"
    folders = {plan.stage.name: plan.folder for plan in plans}
    tokenizer = Tokenizer.load(folders["tokenizer"])
    assert tokenizer.special_id("<|im_start|>") == small().vocab_size  # after all that was there
    facts = records.read_manifest(folders["finetune"])["stats"]
    assert facts["trained_parameters"] == 2 * 2 * ((16 + 16) + (16 + 8) + (16 + 8) + (16 + 16))
    assert facts["model_bytes"] < 4 * facts["parameters"]
    folder = locate.locate_model(folders["finetune"])
    assert not (folder / "model.safetensors").exists()
    loaded = hf.load(folder)
    assert loaded.renderer.name == "chatml"
    assert loaded.lineage.base == records.content_hash(folders["pretrain"])
    export.write(loaded, tmp_path / "out", "hf", "float32")
    again = hf.load(tmp_path / "out")
    ids = torch.tensor([again.renderer.prompt([Message(role="user", content="Who?")])])
    with torch.no_grad():
        assert torch.equal(again.model(ids), loaded.model(ids))
    assert not torch.equal(again.model(ids), hf.load(folders["pretrain"] / "model").model(ids))


@pytest.mark.slow
def test_adapters_on_an_nf4_base_over_a_mesh_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Each rank keeps only its part of what it reads."""
    settings = [
        "finetune.dry_run=false",
        "finetune.log_every=1",
        'finetune.device="cpu"',
        'finetune.precision="float32"',
    ]
    recipe = config.load(Recipe, recipe_of(tmp_path / "theirs"), settings)
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    pipeline.execute(plans, until="finetune")
    folders = {plan.stage.name: plan.folder for plan in plans}
    assert recipe.finetune is not None
    over = recipe.finetune.model_copy(update={"mesh": Mesh(dp_shard=2), "num_processes": 2})
    told = finetune.run(over, {name: folders[name] for name in ("instruct", "pretrain")}, tmp_path / "mesh")
    alone = records.read_manifest(folders["finetune"])["stats"]
    for name in ("trained_parameters", "model_bytes", "supervised_tokens", "steps"):
        assert told[name] == alone[name], name
    assert told["validation_loss"] == pytest.approx(alone["validation_loss"], abs=2e-5)
    losses = [[line["loss"] for line in lines(out, "loss")] for out in (folders["finetune"], tmp_path / "mesh")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["host", "auto"])
def test_adapters_on_an_nf4_base_on_the_host_learn_the_same_in_a_process_of_their_own(
    tmp_path: Path, offload: Literal["host", "auto"]
) -> None:
    """`auto` trains on a CPU as without: nothing would be gained there."""
    settings = ["finetune.dry_run=false", "finetune.log_every=1", 'finetune.device="cpu"']
    recipe = config.load(Recipe, recipe_of(tmp_path / "theirs"), [*settings, 'finetune.precision="float32"'])
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    pipeline.execute(plans, until="finetune")
    folders = {plan.stage.name: plan.folder for plan in plans}
    assert recipe.finetune is not None
    over = recipe.finetune.model_copy(update={"offload": offload})
    inputs = {name: folders[name] for name in ("instruct", "pretrain")}
    told, alone = finetune.run(over, inputs, tmp_path / "host"), records.read_manifest(folders["finetune"])["stats"]
    for name in ("trained_parameters", "model_bytes", "supervised_tokens", "steps"):
        assert told[name] == alone[name], name
    assert told["validation_loss"] == pytest.approx(alone["validation_loss"], abs=2e-5)
    losses = [[line["loss"] for line in lines(out, "loss")] for out in (folders["finetune"], tmp_path / "host")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    state = checkpoint.newest(tmp_path / "host" / "checkpoints")
    assert state is not None
    hf.load(tmp_path / "host" / "model")


def test_a_recipe_gives_its_tokenizer_the_tokens_of_its_template_unless_it_names_others(tmp_path: Path) -> None:
    path = recipe_of(tmp_path / "theirs")
    text = path.read_text()
    path.write_text(text.replace("[tokenizer]", '[tokenizer]\nchat_template = "llama3"'))
    assert config.load(Recipe, path).tokenizer.chat_template == "llama3"
    path.write_text(text.replace('chat_template = "chatml"', ""))
    assert config.load(Recipe, path).tokenizer.chat_template == "bloomery"
    path.write_text(text.replace('chat_template = "chatml"', 'chat_template = "chatlm"'))
    with pytest.raises(ConfigError, match="chat_template"):
        config.load(Recipe, path)
