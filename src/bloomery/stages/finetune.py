"""The stage `finetune`: a language model and packed conversations -> a model that answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.stage import content_hash
from bloomery.hw import device as devices
from bloomery.hw.dist import World
from bloomery.model import lora, quantize
from bloomery.shards import format
from bloomery.shards.loader import Samples
from bloomery.stages.config import Finetune
from bloomery.stages.sampling import answering
from bloomery.tokenizer.chat import Renderer
from bloomery.tokenizer.templates import TEMPLATES, Template
from bloomery.train import launch
from bloomery.train.keeping import Adapters
from bloomery.train.session import Session
from bloomery.weights import huggingface
from bloomery.weights.huggingface import BaseModel, Lineage


def run(config: Finetune, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return launch.stage("bloomery.stages.finetune:train", config, inputs, out)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Finetune, task)
    devices.keep_freed_memory()
    base = huggingface.load(inputs["pretrain"] / "model")
    folder, length = inputs["instruct"], base.model.config.context
    renderer = Renderer(base.tokenizer, template_of(folder))
    kept = None
    if config.lora is not None:
        below = BaseModel(inputs["pretrain"] / "model", huggingface.digest(inputs["pretrain"] / "model"))
        lora.attach(base.model, config.lora, config.seed)
        kept = Adapters(base.model, renderer, config.lora, below)
    stats = Session(
        name="finetune",
        config=config,
        model=base.model,
        renderer=renderer,
        samples=Samples(folder, "train", length, base.tokenizer.hash, verify=True),
        validation=Samples(folder, "val", length, base.tokenizer.hash, verify=True),
        lineage=Lineage(
            tokenizer=base.tokenizer.hash,
            template=renderer.template.hash,
            shards=content_hash(folder),
            base=content_hash(inputs["pretrain"]),
        ),
        out=out,
        world=world,
        sampler=answering(renderer),
        kept=kept,
    ).run()
    if kept is not None:
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
        raise DataError(what, where=str(path), cure="Run the stage instruct again.")
    return TEMPLATES[name]
