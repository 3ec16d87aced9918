"""Longer runs that go on from shorter ones."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import native
from bloomery.core.config import build
from bloomery.core.errors import CheckpointError
from bloomery.core.io import read_json
from bloomery.model import lora
from bloomery.model.config import Lora
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import AnnealedDataset, PackedDataset
from bloomery.stages import pretrain
from bloomery.stages.config import Pretrain
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import checkpointing
from bloomery.train.checkpointing import AdapterSaver
from bloomery.train.config import AdamW, Finetune, Muon, Training
from bloomery.train.trainer import TrainingRun
from bloomery.weights import checkpoint, hf
from bloomery.weights.hf import BaseModel
from tests.model.made import assert_merged
from tests.tokenizer.made import small
from tests.train.made import LINEAGE, SHAPE, T, result, session
from tests.train.test_trainer import die_after

import torch

LEVEL = {"kind": "wsd", "warmup_steps": 4, "decay_fraction": 0.0}
DECAY = {"kind": "wsd", "warmup_steps": 4, "decay_steps": 20}
FREE: dict[str, Any] = {"save_every_seconds": 1e9, "eval_every": 20, "log_every": 4, "spike_window": 8}


def run(shards: Path, out: Path, steps: int, schedule: Any, given: Path | None = None, **settings: Any) -> Any:
    """A session as the stage runs it."""
    made = session(shards, out, steps=steps, schedule=schedule, **FREE, **settings)
    checkpointing.remember_settings(made.config, out)
    if given is not None:
        checkpointing.bring_checkpoint(given, made.config, out, LINEAGE, samples_alike=lambda steps: math.inf)
    return made.run()


@pytest.mark.slow
def test_a_level_run_that_is_extended_is_one_that_was_longer_from_the_start_bit_for_bit(
    shards: Path, tmp_path: Path
) -> None:
    run(shards, tmp_path / "level", 40, LEVEL)
    stats = run(shards, tmp_path / "longer", 60, DECAY, given=tmp_path / "level")
    run(shards, tmp_path / "whole", 60, DECAY)
    assert result(tmp_path / "longer") == result(tmp_path / "whole")
    assert (stats["continued"]["from"], stats["continued"]["step"]) == (str(tmp_path / "level"), 40)
    assert stats["tokens"] == 60 * 4 * T


@pytest.mark.slow
def test_a_run_that_has_decayed_is_extended_from_the_end_of_its_level_part(shards: Path, tmp_path: Path) -> None:
    """Which it keeps, though only the newest two stay otherwise."""
    schedule = {"kind": "wsd", "decay_steps": 4}
    run(shards, tmp_path / "short", 12, schedule)
    stats = run(shards, tmp_path / "longer", 16, schedule, given=tmp_path / "short")
    run(shards, tmp_path / "whole", 16, schedule)
    assert stats["continued"]["step"] == 8
    longer, whole = result(tmp_path / "longer"), result(tmp_path / "whole")
    for finished in (longer, whole):
        finished["metrics"] = [line for line in finished["metrics"] if "loss" in line]
    assert longer == whole


def test_what_a_run_has_done_itself_comes_before_what_another_has(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    run(shards, tmp_path / "own", 12, LEVEL)
    made = session(shards, tmp_path / "own", steps=12, schedule=LEVEL, **FREE)
    checkpointing.bring_checkpoint(
        tmp_path / "level", made.config, tmp_path / "own", LINEAGE, samples_alike=lambda s: math.inf
    )
    assert checkpointing.continued_from(tmp_path / "own") is None


@pytest.mark.parametrize(
    ("settings", "schedule", "told"),
    [
        ({"seed": 3}, LEVEL, "was trained with other settings: seed was 0 and is 3\nUse the same"),
        ({"optimizer": {"kind": "lion"}}, LEVEL, "optimizer.*was.*and is"),
        (
            {},
            {"kind": "cosine", "warmup_steps": 4},
            "until step 5, but no checkpoint of that part .only: 8.\nA run keeps",
        ),
    ],
)
def test_a_run_that_differs_in_more_than_its_length_is_refused_by_name(
    shards: Path, tmp_path: Path, settings: dict[str, Any], schedule: Any, told: str
) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    with pytest.raises(CheckpointError, match=told):
        run(shards, tmp_path / "other", 60, schedule, given=tmp_path / "level", **settings)
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_a_run_on_other_shards_is_refused_without_a_word_of_removing_it(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    made = session(shards, tmp_path / "other", steps=12, schedule=LEVEL, **FREE)
    with pytest.raises(CheckpointError, match=r"was made with shards 5.*\nContinue a run on the same data"):
        checkpointing.bring_checkpoint(
            tmp_path / "level",
            made.config,
            tmp_path / "other",
            replace(LINEAGE, shards="6" * 64),
            samples_alike=lambda steps: math.inf,
        )


def test_two_runs_have_the_learning_rates_of_their_warm_up_and_level_part_in_common() -> None:
    def training(steps: int, schedule: Any) -> Training:
        return build(Training, {"steps": steps, "global_batch_tokens": 1, "schedule": schedule})

    def common(one: Training, other: Training) -> int:
        return checkpointing.common_steps(one, other.model_dump(mode="json"))

    half = {"kind": "wsd", "warmup_steps": 10, "decay_fraction": 0.5}
    assert common(training(200, half), training(100, half)) == 51  # the first step of the decay is still at the peak
    assert common(training(200, half), training(100, {"kind": "constant", "warmup_steps": 10})) == 100
    assert common(training(200, half), training(100, {"kind": "constant", "warmup_steps": 9})) == 0
    assert common(training(200, half), training(200, half)) == 200


def test_the_anneal_mix_is_in_no_common_part(shards: Path, tmp_path: Path) -> None:
    """It comes at the end, so that the order of samples depends on the number of steps from there."""
    main, last = (PackedDataset(shards, split, T, small().hash) for split in ("train", "val"))
    given: list[Any] = []

    def bring(*args: Any, samples_alike: Any) -> None:
        given.extend([samples_alike(3), samples_alike(4)])

    config = Pretrain(steps=4, global_batch_tokens=4 * T, continue_from=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "bring_checkpoint", bring)
        pretrain.go_on(config, AnnealedDataset(main, last, 16), tmp_path, LINEAGE)
    assert given == [AnnealedDataset(main, last, 12).switch, AnnealedDataset(main, last, 16).switch]


def test_a_run_folder_stands_for_its_stage_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "07-pretrain-aaaaaaaa" / "checkpoints").mkdir(parents=True)
    own = tmp_path / "run" / "07-pretrain-cccccccc"
    assert checkpointing._stage_folder(tmp_path / "run", own) == tmp_path / "run" / "07-pretrain-aaaaaaaa"
    (tmp_path / "run" / "07-pretrain-bbbbbbbb" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has 2 folders of the stage pretrain"):
        checkpointing._stage_folder(tmp_path / "run", own)


# --- what bits depend on ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpointing.LIBRARIES)
def test_another_compiled_library_is_said_on_resume(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    session(shards, tmp_path).run()
    environment = json.loads((tmp_path / "checkpoints" / "000000009" / "environment.json").read_text())
    recorded = environment[f"library {name}"]
    assert recorded == native.identity(name)
    assert "library" not in (tmp_path / "log.txt").read_text()
    monkeypatch.setenv(native.SWITCH, "1" if recorded.startswith("off") else "0")
    session(shards, tmp_path).run()
    assert f"library {name} was {recorded} and is {native.identity(name)}" in (tmp_path / "log.txt").read_text()


def test_what_bits_depend_on_is_compared() -> None:
    before = {"threads": 2, "torch": "2.11.0", "gone": 1}
    now = {"threads": 1, "torch": "2.11.0", "new": "x"}
    assert checkpointing.differences(before, now) == ["threads was 2 and is 1", "new was None and is x"]
    assert checkpointing.differences({}, now) == []
    assert checkpointing.differences(now, now) == []


def test_a_clock_begins_no_save_before_fifty_times_of_what_the_last_one_cost(shards: Path, tmp_path: Path) -> None:
    made = session(shards, tmp_path)
    made.run()
    checkpoints = made._checkpoints
    assert checkpoints._cost == 0.0, "on a CPU, the recipe alone decides"
    checkpoints._saved = (time.monotonic() - 10.0, 3)
    assert checkpoints.late(5.0)
    assert not checkpoints.late(500.0)
    checkpoints._cost = 0.1
    assert checkpoints.late(5.0)
    checkpoints._cost = 10.0
    assert not checkpoints.late(5.0)


# --- Adapters through the one loop: what is trained, saved, taken up again and left -----------------------------------


LORA = {"rank": 2, "dropout": 0.1, "base_dtype": "nf4"}


def finetuning(shards: Path, out: Path, **settings: Any) -> TrainingRun:
    """A run on adapters of rank 2 beside a base in NF4, which lies in out/../base."""
    renderer, folder = Renderer(small()), out.parent / "base"
    model = Transformer(SHAPE, small().vocab_size)
    model.initialize(5)
    if not folder.is_dir():
        hf.save(folder, model, renderer, LINEAGE)
    made = session(shards, out, optimizer={"kind": "adamw", "learning_rate": 0.05, "weight_decay": 0.0}, **settings)
    how = build(Lora, LORA)
    lora.attach(model, how, seed=1)
    made.model = model
    chats = replace(LINEAGE, template=renderer.template.hash)
    made.model_saver = AdapterSaver(model, renderer, how, BaseModel(folder, hf.digest(folder)), chats)
    return made


def test_only_adapters_are_trained_remembered_and_saved(shards: Path, tmp_path: Path) -> None:
    made = finetuning(shards, tmp_path / "run")
    before = {name: one.clone() for name, one in made.model.state_dict().items()}
    made.run()
    names = set(lora.weights(made.model))
    changed = {name for name, one in made.model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == names
    newest = tmp_path / "run" / "checkpoints" / "000000009"
    remembered = {name.rpartition("/")[0] for name in checkpoint.read(newest / "training")}
    assert remembered == names
    small_enough = sum(weight.numel() for weight in lora.weights(made.model).values()) * 4 + 8192
    assert (newest / "adapter_model.safetensors").stat().st_size < small_enough
    assert not (newest / "model.safetensors").exists()
    assert read_json(newest / "bloomery.json")["adapts"]["kept_as"] == "nf4"


def test_what_is_left_is_what_was_trained(shards: Path, tmp_path: Path) -> None:
    made = finetuning(shards, tmp_path / "run")
    made.run()
    for folder in (tmp_path / "run" / "model", tmp_path / "run" / "checkpoints" / "000000009"):
        assert_merged(hf.load(folder).model, made.model)


@pytest.mark.slow
def test_adapters_that_are_taken_up_again_end_in_the_same_bits(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetuning(shards, tmp_path / "whole").run()
    with monkeypatch.context() as patch:
        die_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            finetuning(shards, tmp_path / "killed").run()
    finetuning(shards, tmp_path / "killed").run()
    for name in ("adapter_model.safetensors", "adapter_config.json", "bloomery.json"):
        one, other = ((tmp_path / run / "model" / name).read_bytes() for run in ("whole", "killed"))
        assert one == other, name


def test_adapters_are_trained_by_adam_unless_the_recipe_names_another() -> None:
    steps = {"steps": 1, "global_batch_tokens": 1}
    assert isinstance(build(Finetune, steps).optimizer, Muon)
    assert isinstance(build(Finetune, steps | {"lora": {}}).optimizer, AdamW)
    given = build(Finetune, steps | {"lora": {"rank": 4}, "optimizer": {"kind": "muon"}})
    assert isinstance(given.optimizer, Muon)
