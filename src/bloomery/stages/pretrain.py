"""The stage `pretrain`: token files -> a language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.stage import content_hash
from bloomery.hw import device as devices
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.encode import ANNEAL, TRAIN
from bloomery.shards.loader import Course, Samples
from bloomery.stages.config import Pretrain
from bloomery.stages.sampling import continuing
from bloomery.tokenizer.chat import Renderer
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import launch
from bloomery.train.plan import rows_per_step
from bloomery.train.session import Session
from bloomery.weights.huggingface import Lineage


def run(config: Pretrain, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    return launch.stage("bloomery.stages.pretrain:train", config, inputs, out)


def train(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does for `run`."""
    config, inputs, out = launch.unpacked(Pretrain, task)
    devices.keep_freed_memory()
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    model = Transformer(config.model, tokenizer.vocab_size)
    model.initialize(config.seed)
    renderer, folder, length = Renderer(tokenizer), inputs["shard"], config.model.context
    samples = course(config, folder, tokenizer.hash)
    stats = Session(
        name="pretrain",
        config=config,
        model=model,
        renderer=renderer,
        samples=samples,
        validation=Samples(folder, "val", length, tokenizer.hash),
        lineage=Lineage(tokenizer=tokenizer.hash, template=None, shards=content_hash(folder)),
        out=out,
        world=world,
        sampler=continuing(renderer),
    ).run()
    if isinstance(samples, Course):
        stats["anneal_from_step"] = samples.switch // rows_per_step(config, length) + 1
    return stats


def course(config: Pretrain, folder: Path, tokenizer_hash: str) -> Samples | Course:
    """What is trained on: the mix, and at the end the anneal mix where there is one."""
    length = config.model.context
    main = Samples(folder, TRAIN, length, tokenizer_hash)
    if not format.names(folder, ANNEAL):
        return main
    last = Samples(folder, ANNEAL, length, tokenizer_hash)
    return Course(main, last, config.steps * rows_per_step(config, length))
