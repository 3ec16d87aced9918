"""The stage `finetune`: a language model and packed conversations -> a model that answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.stage import content_hash
from bloomery.hw import device as devices
from bloomery.shards.loader import Samples
from bloomery.stages.config import Finetune
from bloomery.stages.sampling import answering
from bloomery.train.session import Session
from bloomery.weights import huggingface
from bloomery.weights.huggingface import Lineage


def run(config: Finetune, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
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
        sampler=answering(base.renderer),
    ).run()
