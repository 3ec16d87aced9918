"""Adapters through the one loop: what is trained, saved, taken up again and left."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.io import read_json
from bloomery.model import lora
from bloomery.model.lora_config import Lora
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.checkpointing import AdapterSaver
from bloomery.train.config import AdamW, Finetune, Muon
from bloomery.train.trainer import TrainingRun
from bloomery.weights import checkpoint, hf
from bloomery.weights.hf import BaseModel, Lineage
from tests.tokenizer.made import small
from tests.train.made import SHAPE, session

import torch

LORA = {"rank": 2, "dropout": 0.1, "base": "nf4"}


def finetuning(shards: Path, out: Path, **settings: Any) -> TrainingRun:
    """A run on adapters of rank 2 beside a base in NF4, which lies in out/../base."""
    renderer, folder = Renderer(small()), out.parent / "base"
    lineage = Lineage(tokenizer=small().hash, template=None, shards="5" * 64)
    model = Transformer(SHAPE, small().vocab_size)
    model.initialize(5)
    if not folder.is_dir():
        hf.save(folder, model, renderer, lineage)
    made = session(shards, out, optimizer={"kind": "adamw", "learning_rate": 0.05, "weight_decay": 0.0}, **settings)
    how = build(Lora, LORA)
    lora.attach(model, how, seed=1)
    made.model = model
    made.lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    made.kept = AdapterSaver(model, renderer, how, BaseModel(folder, hf.digest(folder)))
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
    merged = lora.merged(made.model)
    for folder in (tmp_path / "run" / "model", tmp_path / "run" / "checkpoints" / "000000009"):
        loaded = hf.load(folder)
        for name, weight in merged.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], weight), name


def test_adapters_that_are_taken_up_again_end_in_the_same_bits(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetuning(shards, tmp_path / "whole").run()
    whole = TrainingRun._hooks

    def dying(self: TrainingRun, *given: Any) -> Any:
        from bloomery.train.state import Hook

        def die(state: Any) -> None:
            raise KeyboardInterrupt

        return [*whole(self, *given), Hook(lambda state: state.step == 4, die, "death")]

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_hooks", dying)
        with pytest.raises(KeyboardInterrupt):
            finetuning(shards, tmp_path / "killed").run()
    finetuning(shards, tmp_path / "killed").run()
    for name in ("adapter_model.safetensors", "adapter_config.json", "bloomery.json"):
        one, other = ((tmp_path / run / "model" / name).read_bytes() for run in ("whole", "killed"))
        assert one == other, name


def test_adapters_are_trained_by_adam_unless_the_recipe_names_another() -> None:
    steps = {"steps": 1, "tokens_per_step": 1}
    assert isinstance(build(Finetune, steps).optimizer, Muon)
    assert isinstance(build(Finetune, steps | {"lora": {}}).optimizer, AdamW)
    given = build(Finetune, steps | {"lora": {"rank": 4}, "optimizer": {"kind": "muon"}})
    assert isinstance(given.optimizer, Muon)
