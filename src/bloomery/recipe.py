"""
The recipe: from top to bottom, the path of the data. Each field is one stage. Read this first.

    fetch       sources                      -> documents
    classify    documents                    -> a classifier of text worth keeping
    filter      documents, classifier        -> kept and dropped documents, each dropped one with its reason
    dedup       kept documents               -> documents without copies
    tokenizer   documents                    -> a tokenizer
    shard       documents, tokenizer         -> token files to train on, documents to validate on
    pretrain    token files                  -> a language model
    synthesize  a model that is served       -> conversations written by it, where asked for
    instruct    conversations, tokenizer     -> packed rows of ids and loss masks
    finetune    model, rows                  -> a model that answers
    prefer      model, judged answers        -> a model that answers better, where asked for
    evaluate    everything                   -> scores, and a report
"""

from collections.abc import Callable
from typing import Any

from pydantic import Field, model_serializer

from bloomery import checks
from bloomery.core.config import VOLATILE, Config
from bloomery.data.executor import ExecutorConfig
from bloomery.stages import config as sections
from bloomery.stages.config import STAGES as STAGES
from bloomery.tokenizer.config import AnyKind, ByteBpe


class Recipe(Config):
    name: sections.RunName
    """Name of the run folder, below `runs/`."""
    engine: ExecutorConfig = Field(ExecutorConfig(), json_schema_extra=VOLATILE)
    """Where the stages that work on parts do so, unless their sections say otherwise."""
    fetch: sections.Fetch | None = None
    """Leave it out to train on third-party token files: `[shard.imported]`."""
    classify: sections.Classify = sections.Classify()
    """Classifiers of text quality."""
    filter: sections.Filter = sections.Filter()
    """Rules and score limits for documents."""
    dedup: sections.Dedup = sections.Dedup()
    """Removal of duplicates."""
    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")
    """The tokenizer to train or import."""
    shard: sections.Shard = sections.Shard()
    """The mix of domains and the token files."""
    pretrain: sections.Pretrain | None = None
    """Without it, and without [finetune], a recipe ends with the stages that need neither: `--until shard`, say."""
    synthesize: sections.Synthesize = sections.Synthesize()
    """Conversations that another model writes."""
    instruct: sections.Instruct = sections.Instruct()
    """Conversations and their packing."""
    finetune: sections.Finetune | None = None
    """Training on conversations. Leave it out to end with a base model."""
    prefer: sections.Prefer | None = None
    """Leave it out to train without judged or checked answers."""
    evaluate: sections.Evaluate = sections.Evaluate()
    """Questions, tasks and the report."""

    @classmethod
    def completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return checks.fill(tree)

    def skipped(self) -> frozenset[str]:
        return checks.skipped(self)

    def resolved(self) -> "Recipe":
        recipe = checks.resolve(self)
        for check in checks.CHECKS:
            check(recipe)
        return recipe

    @model_serializer(mode="wrap")
    def _without_resolved_classifiers(self, dump: Callable[["Recipe"], dict[str, Any]]) -> dict[str, Any]:
        """Without what `resolve` decided: a recipe that is written and read again asks for what this one asks for."""
        data = dump(self)
        for name in checks.skipped(self) - self.model_fields_set:
            data.pop(name, None)
        if "classify" not in self.model_fields_set:
            data.pop("classify", None)
        elif "required" not in self.classify.model_fields_set and "classify" in data:
            del data["classify"]["required"]
        return data
