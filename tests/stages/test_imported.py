"""A recipe that trains on token files of others, without a document."""

import json
from pathlib import Path

import numpy as np
import pytest

from bloomery.core import config, pipeline, records
from bloomery.core.errors import CheckpointError, ConfigError, DataError, RunError
from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.recipe import STAGES, Recipe
from bloomery.shards import format
from bloomery.stages import pretrain
from bloomery.stages.config import start_digest
from bloomery.tokenizer.chat_template import Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.tokenizer.train import train_byte_level
from bloomery.weights import hf
from bloomery.weights.hf import Lineage
from tests.calling import Call
from tests.model.made import lively
from tests.shards.test_foreign import by_hand, rows
from tests.tokenizer.made import small
from tests.train.made import lines

import torch

RECIPE = """
name = "theirs"
[tokenizer]
kind = "import"
path = "{root}"
measure = false
[shard.imported]
folder = "{root}"
[pretrain]
steps = 2
global_batch_tokens = 64
{optimizer}
model.hidden_size = 16
model.num_layers = 1
model.num_heads = 2
model.num_kv_heads = 1
model.intermediate_size = 16
model.context_length = 16
"""


GENTLE = "optimizer = { kind = 'adamw', learning_rate = 1e-3, weight_decay = 0.0 }"
"""Two steps of it lower the loss of random weights by more than rounding, and move no weight by more than 0.002."""


def written(root: Path, highest: int = 20) -> Path:
    """Token files of few different ids, which two steps learn, their tokenizer, and a recipe for both."""
    root.mkdir()
    small().save(root)
    rng = np.random.default_rng(0)
    for name in ("some_train_000001", "some_train_000002", "some_val_000000"):
        ids = rng.integers(0, highest, 400)
        ids[::40] = small().document_id
        (root / f"{name}.bin").write_bytes(by_hand(ids.tolist()))
    (root / "theirs.toml").write_text(RECIPE.format(root=root, optimizer=GENTLE))
    return root / "theirs.toml"


def test_token_files_of_others_are_trained_on_without_any_other_stage(tmp_path: Path) -> None:
    recipe = config.load(Recipe, written(tmp_path / "theirs"))
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    assert [plan.stage.name for plan in plans] == ["tokenizer", "shard", "pretrain", "synthesize", "instruct"]
    assert pipeline.execute(plans, until="pretrain") == dict.fromkeys(("tokenizer", "shard", "pretrain"), "ran")
    folders = {plan.stage.name: plan.folder for plan in plans}
    assert Tokenizer.load(folders["tokenizer"]).hash == small().hash
    assert len(format.names(folders["shard"], "train")) == 2
    assert records.read_manifest(folders["pretrain"])["stats"]["steps"] == 2


def test_other_token_files_make_another_stage_folder(tmp_path: Path) -> None:
    recipe = config.load(Recipe, written(tmp_path / "theirs"))
    before = [plan.folder for plan in pipeline.plan_stages(STAGES, recipe, tmp_path / "run")]
    (tmp_path / "theirs" / "some_val_000000.bin").write_bytes(by_hand([small().document_id, 5, 6]))
    after = [plan.folder for plan in pipeline.plan_stages(STAGES, recipe, tmp_path / "run")]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_token_files_of_another_tokenizer_end_the_stage_by_name(tmp_path: Path) -> None:
    recipe = config.load(Recipe, written(tmp_path / "theirs", highest=50_000))
    with pytest.raises(DataError, match=r"some_train_000001.bin: token \d+ is \d+, outside the vocabulary of"):
        pipeline.execute(pipeline.plan_stages(STAGES, recipe, tmp_path / "run"), until="shard")


def test_rows_of_a_tokenizer_of_another_name_end_the_stage(tmp_path: Path) -> None:
    recipe, tokens = written(tmp_path / "theirs"), rows(tmp_path / "rows", tokenizer="some.json")
    (tmp_path / "theirs" / "tokenizer.json").rename(tmp_path / "other.json")
    words = [f"tokenizer.path={tmp_path}/other.json", f"shard.imported.folder={tokens}"]
    plans = pipeline.plan_stages(STAGES, config.load(Recipe, recipe, words), tmp_path / "run")
    with pytest.raises(DataError, match=r"made with the tokenizer 'some.json', but this run has 'other.json'"):
        pipeline.execute(plans, until="shard")


def test_a_recipe_needs_documents_or_token_files(tmp_path: Path) -> None:
    recipe = written(tmp_path / "theirs")
    text = recipe.read_text()
    recipe.write_text(text[: text.index("[shard")] + text[text.index("[pretrain") :])
    with pytest.raises(ConfigError, match=r"\[fetch\] is missing"):
        config.load(Recipe, recipe)
    recipe.write_text(text.replace("[shard.imported]", "[shard]\ntokens = 5\n[shard.imported]"))
    with pytest.raises(ConfigError, match="imported uses token files as they are"):
        config.load(Recipe, recipe)


# --- weights of others ---------------------------------------------------------------------------------------------


def starting_from(root: Path, padding: int = 0, **changes: object) -> tuple[Path, Transformer]:
    """As `written`, and a model folder of others that training starts from."""
    recipe = written(root)
    shape = ModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, context_length=16
    )
    model = lively(shape.model_copy(update=changes), 0, small().vocab_size + padding)
    hf.save(root / "base", model, Renderer(small()), Lineage(tokenizer="", template=None, shards=""))
    (root / "base" / "bloomery.json").unlink()
    text = recipe.read_text().replace("[pretrain]", f'[pretrain]\nstart_from = "{root}/base"')
    recipe.write_text(text)
    return recipe, model


def test_training_starts_from_the_weights_of_a_folder(tmp_path: Path) -> None:
    recipe, model = starting_from(tmp_path / "theirs")
    plans = pipeline.plan_stages(STAGES, config.load(Recipe, recipe), tmp_path / "run")
    pipeline.execute(plans, until="pretrain")
    trained = hf.load(plans[2].folder / "model")
    assert trained.lineage.base == hf.digest(tmp_path / "theirs" / "base")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], weight, atol=0.003, rtol=0)
    other, _ = starting_from(tmp_path / "other", norm_eps=1e-3)
    assert pipeline.plan_stages(STAGES, config.load(Recipe, other), tmp_path / "run")[2].folder != plans[2].folder


def test_over_a_mesh_each_process_reads_its_slices_of_the_folder_alone(tmp_path: Path) -> None:
    recipe, model = starting_from(tmp_path / "theirs", padding=3)
    section = config.load(Recipe, recipe, ["pretrain.mesh.dp_shard=2", "pretrain.num_processes=2"]).pretrain
    assert section is not None
    parts = []
    for rank in range(2):
        started, own = pretrain.start(section, small(), World(rank, 2))
        assert all(weight.is_meta for weight in started.parameters())
        assert own is not None
        parts.append(own._parts)
    for name, weight in model.named_parameters():
        slices = [of_rank[name] for of_rank in parts]
        assert slices[0].shape[0] == -(-weight.shape[0] // 2)
        assert torch.equal(torch.cat(slices), weight), name
        assert all(slice.untyped_storage().nbytes() == slice.nbytes for slice in slices), name


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_two_processes_that_read_their_slices_learn_what_one_process_learns(tmp_path: Path) -> None:
    recipe, _ = starting_from(tmp_path / "theirs")
    words = ['pretrain.device="cpu"', "pretrain.log_every=1", 'pretrain.precision="float32"']
    plans = pipeline.plan_stages(STAGES, config.load(Recipe, recipe, words), tmp_path / "run")
    pipeline.execute(plans, until="pretrain")
    folders = {plan.stage.name: plan.folder for plan in plans}
    over = config.load(Recipe, recipe, [*words, "pretrain.mesh.dp_shard=2", "pretrain.num_processes=2"]).pretrain
    assert over is not None
    pretrain.run(over, {name: folders[name] for name in ("tokenizer", "shard")}, tmp_path / "mesh")
    losses = [[line["loss"] for line in lines(out, "loss")] for out in (folders["pretrain"], tmp_path / "mesh")]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


def test_weights_of_another_shape_or_tokenizer_are_not_started_from(tmp_path: Path) -> None:
    recipe, _ = starting_from(tmp_path / "theirs", norm_eps=1e-3)
    section = config.load(Recipe, recipe).pretrain
    assert section is not None
    with pytest.raises(CheckpointError, match=r"has norm_eps = 0\.001, not 1e-05"):
        pretrain.start(section, small(), World.alone())
    with pytest.raises(CheckpointError, match=r"has the tokenizer .*, but the shards were made with"):
        pretrain.start(section, train_byte_level(["some other text"] * 3, 400), World.alone())
    (tmp_path / "theirs" / "base" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no model"):
        start_digest(section)


def test_a_cycle_of_layers_may_be_said_in_full(tmp_path: Path) -> None:
    recipe, model = starting_from(tmp_path / "theirs")
    section = config.load(Recipe, recipe).pretrain
    assert section is not None
    for windows, fits in ((("full", "full", "full"), True), (("full", 8), True), ((8, "full"), False)):
        said = section.model.model_copy(update={"sliding_window": windows})
        if fits:
            started, _ = pretrain.start(section.model_copy(update={"model": said}), small(), World.alone())
            assert started.state_dict().keys() == model.state_dict().keys()
        else:
            with pytest.raises(CheckpointError, match=r"has sliding_window = \('full',\), not \(8, 'full'\)"):
                pretrain.start(section.model_copy(update={"model": said}), small(), World.alone())


def test_a_plan_counts_rows_that_no_id_has(tmp_path: Path, call: Call) -> None:
    recipe, model = starting_from(tmp_path / "theirs", padding=90)
    code, out, _ = call("plan", recipe, "--runs", tmp_path, "--json", "--device", "rtx-4090")
    assert code == 0
    assert json.loads(out)["pretrain"]["parameters"] == sum(weight.numel() for weight in model.parameters())


@pytest.mark.usefixtures("untraced")
def test_a_plan_is_made_before_token_files_and_weights_are_there(tmp_path: Path, call: Call) -> None:
    recipe, _ = starting_from(tmp_path / "theirs")
    words = ["plan", recipe, "--runs", tmp_path, "--device", "rtx-4090"]
    words += [f"shard.imported.folder={tmp_path}/none", f"pretrain.start_from={tmp_path}/none"]
    code, out, _ = call(*words)
    assert code == 0
    assert f"unknown shard: {tmp_path}/none: there is no such folder" in " ".join(out.split())


@pytest.mark.usefixtures("untraced")
def test_a_choice_that_no_other_program_has_is_said_before_anything_is_done(tmp_path: Path, call: Call) -> None:
    words = str(written(tmp_path / "theirs")), "pretrain.model.position_embedding=none", "--runs", str(tmp_path)
    why = "only Bloomery can load this model: position_embedding='none' is nothing that LlamaForCausalLM has"
    code, out, _ = call("plan", *words, "--memory", "16GiB")
    assert (code, why in " ".join(out.split())) == (0, True)
    code, _, said = call("run", *words, "--until", "tokenizer")
    assert (code, why in " ".join(said.split())) == (0, True)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_was_damaged_in_its_midst_is_not_trained_on(
    tmp_path: Path, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "EDGE_BYTES", 64)
    recipe = config.load(Recipe, written(tmp_path / "theirs"))
    plans = pipeline.plan_stages(STAGES, recipe, tmp_path / "run")
    pipeline.execute(plans, until="shard")
    file = plans[1].folder / f"{split}-00000.bin"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2 // 2 * 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(RunError, match=rf"its input shard is damaged: .*{split}-00000\.bin has another sha256"):
        pipeline.execute(plans, until="pretrain")
    with pytest.raises(DataError, match=rf"{split}-00000\.bin: has a sha256 that differs from its index"):
        format.read(plans[1].folder / f"{split}-00000", verify=True)
