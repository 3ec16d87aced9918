"""The stage `pretrain`: token files -> a language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.stage import content_hash
from bloomery.hw import device as devices
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Samples
from bloomery.stages.config import Pretrain
from bloomery.tokenizer.chat import Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.session import Session
from bloomery.weights.huggingface import Lineage


def run(config: Pretrain, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    devices.keep_freed_memory()
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    model = Transformer(config.model, tokenizer.vocab_size)
    model.initialize(config.seed)
    folder, length = inputs["shard"], config.model.context
    return Session(
        name="pretrain",
        config=config,
        model=model,
        renderer=Renderer(tokenizer),
        samples=Samples(folder, "train", length, tokenizer.hash),
        validation=Samples(folder, "val", length, tokenizer.hash),
        lineage=Lineage(tokenizer=tokenizer.hash, template=None, shards=content_hash(folder)),
        out=out,
    ).run()
