"""The stage `finetune`: a language model and packed conversations -> a model that answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.stage import content_hash
from bloomery.hw import device as devices
from bloomery.hw.dist import World
from bloomery.shards.loader import Samples
from bloomery.stages.config import Finetune
from bloomery.stages.sampling import answering
from bloomery.train import launch
from bloomery.train.session import Session
from bloomery.weights import huggingface
from bloomery.weights.huggingface import Lineage


def run(config: Finetune, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return launch.stage("bloomery.stages.finetune:train", config, inputs, out)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Finetune, task)
    devices.keep_freed_memory()
    base = huggingface.load(inputs["pretrain"] / "model")
    folder, length = inputs["instruct"], base.model.config.context
    return Session(
        name="finetune",
        config=config,
        model=base.model,
        renderer=base.renderer,
        samples=Samples(folder, "train", length, base.tokenizer.hash),
        validation=Samples(folder, "val", length, base.tokenizer.hash),
        lineage=Lineage(
            tokenizer=base.tokenizer.hash,
            template=base.renderer.template.hash,
            shards=content_hash(folder),
            base=content_hash(inputs["pretrain"]),
        ),
        out=out,
        world=world,
        sampler=answering(base.renderer),
    ).run()
