"""The stages of a recipe, in order: where the code of each is, and what it builds on."""

from bloomery.core.pipeline import Stage

STAGES = (
    Stage("fetch", "bloomery.stages.fetch"),
    Stage("classify", "bloomery.stages.classify", after=("fetch",)),
    Stage("filter", "bloomery.stages.filter", after=("fetch", "classify")),
    Stage("dedup", "bloomery.stages.dedup", after=("filter",)),
    Stage("tokenizer", "bloomery.stages.tokenizer", after=("dedup",)),
    Stage("shard", "bloomery.stages.shard", after=("dedup", "tokenizer")),
    Stage("pretrain", "bloomery.stages.pretrain", after=("tokenizer", "shard")),
    Stage("synthesize", "bloomery.stages.synthesize", after=("dedup",)),
    Stage("instruct", "bloomery.stages.instruct", after=("tokenizer", "synthesize")),
    Stage("finetune", "bloomery.stages.finetune", after=("pretrain", "instruct")),
    Stage("prefer", "bloomery.stages.prefer", after=("finetune",), optional=True),
    Stage(
        "evaluate",
        "bloomery.stages.evaluate",
        after=(
            *("fetch", "classify", "filter", "dedup", "tokenizer", "shard"),
            *("pretrain", "instruct", "finetune", "prefer"),
        ),
    ),
)
"""
A stage's version, what it reads from outside the run, and what it needs before it starts stand in its own file, and
are read by name when it is planned or run (`core/pipeline.py`: Stage).
"""
