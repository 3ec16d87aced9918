"""The stage `finetune`: a language model and packed conversations -> a model that answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.pipeline import content_hash
from bloomery.hw import device as devices
from bloomery.hw import launcher
from bloomery.hw.distributed import World
from bloomery.model import lora, quantize
from bloomery.shards import format
from bloomery.shards.loader import PackedDataset
from bloomery.stages.config import Finetune
from bloomery.stages.rollouts import answering
from bloomery.tokenizer.chat_template import TEMPLATES, Renderer, Template
from bloomery.train import launch
from bloomery.train.checkpointing import ModelSaver
from bloomery.train.savers import AdapterSaver, FullModelSaver
from bloomery.train.trainer import TrainingRun
from bloomery.weights import hf
from bloomery.weights.hf import BaseModel, Lineage


def run(config: Finetune, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if launcher.num_processes(config.num_processes) == 1:
        return train(config, inputs, out, World.alone())
    return launch.stage("bloomery.stages.finetune:train", config, inputs, out)


def train(config: Finetune, inputs: Mapping[str, Path], out: Path, world: World) -> dict[str, Any]:
    """What each rank does."""
    devices.keep_freed_memory()
    base = hf.load(inputs["pretrain"] / "model")
    folder, length = inputs["instruct"], base.model.config.context_length
    renderer = Renderer(base.tokenizer, template_of(folder))
    lineage = Lineage(
        tokenizer=base.tokenizer.hash,
        template=renderer.template.hash,
        shards=content_hash(folder),
        base=content_hash(inputs["pretrain"]),
    )
    model_saver: ModelSaver = FullModelSaver(base.model, renderer, lineage)
    if config.lora is not None:
        below = BaseModel(inputs["pretrain"] / "model", hf.digest(inputs["pretrain"] / "model"))
        lora.attach(base.model, config.lora, config.seed)
        model_saver = AdapterSaver(base.model, renderer, config.lora, below, lineage)
    stats = TrainingRun(
        name="finetune",
        config=config,
        model=base.model,
        model_saver=model_saver,
        tokenizer=base.tokenizer,
        samples=PackedDataset(folder, "train", length, base.tokenizer.hash, verify=True),
        validation=PackedDataset(folder, "val", length, base.tokenizer.hash, verify=True),
        out=out,
        world=world,
        sampler=answering(renderer),
    ).run()
    if config.lora is not None:
        trained = sum(weight.numel() for weight in lora.weights(base.model).values())
        stats |= {"trained_parameters": trained, "model_bytes": quantize.kept_bytes(base.model)}
    return stats


def template_of(folder: Path) -> Template:
    """The template that packed rows were written in. Raises DataError where ours of that name is another by now."""
    path = format.names(folder, "train")[0]
    facts = format.read(path).index
    name, written = facts.get("template_name", "bloomery"), facts["template"]
    if name not in TEMPLATES or TEMPLATES[name].hash != written:
        known = ", ".join(f"{one.name} {one.hash[:8]}" for one in TEMPLATES.values())
        what = f"its conversations are written in the template {name} {written[:8]}, and known are {known}"
        raise DataError(what, where=str(path), hint="Run the stage instruct again.")
    return TEMPLATES[name]
