"""
A recipe, read top to bottom, is the path that the data takes. Each field is one stage. Read this first.

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

import re
from collections.abc import Callable
from typing import Any

from pydantic import Field, field_validator, model_serializer, model_validator

from bloomery.core.config import VOLATILE, Config, build
from bloomery.core.errors import DataError
from bloomery.core.io import path_problem
from bloomery.core.pipeline import resolve
from bloomery.data.executor import ExecutorConfig, Parallel
from bloomery.model.lora_config import matrices, targets
from bloomery.stages import config as sections
from bloomery.stages.table import STAGES as STAGES
from bloomery.tokenizer import chat_template
from bloomery.tokenizer.config import AnyKind, ByteBpe, Imported
from bloomery.train import scaling_rules
from bloomery.train.preference.config import Grpo

WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class Recipe(Config):
    name: str = Field(pattern=r"^\w[\w.-]*$")
    """Of the run folder."""
    engine: ExecutorConfig = Field(ExecutorConfig(), json_schema_extra=VOLATILE)
    """Where the stages that work on parts do so, unless their sections say otherwise."""
    fetch: sections.Fetch | None = None
    """Left out where token files of others are trained on: `[shard.imported]`."""
    classify: sections.Classify = sections.Classify()
    filter: sections.Filter = sections.Filter()
    dedup: sections.Dedup = sections.Dedup()
    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")
    shard: sections.Shard = sections.Shard()
    pretrain: sections.Pretrain | None = None
    """Without it, and without [finetune], a recipe ends with the stages that need neither: `--until shard`, say."""
    synthesize: sections.Synthesize = sections.Synthesize()
    instruct: sections.Instruct = sections.Instruct()
    finetune: sections.Finetune | None = None
    prefer: sections.Prefer | None = None
    """Left out where nothing is learned from judged or checked answers."""
    evaluate: sections.Evaluate = sections.Evaluate()

    @classmethod
    def completed(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """
        [engine] goes to the sections that have none of their own; a [tokenizer] without kind is a byte-level BPE, and
        has the special tokens of `instruct.template`; what `pretrain.depth` decides is filled in.
        """
        if isinstance(tokenizer := tree.get("tokenizer"), dict):
            tree = tree | {"tokenizer": {"kind": "byte_bpe"} | tokenizer}
        tree = _with_depth(_with_template(tree))
        if "engine" not in tree:
            return tree
        given = {name: tree.get(name, {}) for name in PARALLEL}
        return tree | {name: {"engine": tree["engine"]} | one for name, one in given.items() if isinstance(one, dict)}

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, name: str) -> str:
        if problem := path_problem(name):
            raise ValueError(problem)
        if name.endswith(".") or WINDOWS_DEVICE.fullmatch(name):
            raise ValueError(f"Windows has no folder {name!r}, and a run folder may move there: take another name")
        return name

    @model_validator(mode="after")
    def _text_comes_from_somewhere(self) -> "Recipe":
        if self.fetch is None and self.shard.imported is None:
            raise ValueError("[fetch] is required: it says where documents come from; or [shard.imported], token files")
        return self

    @model_validator(mode="after")
    def _rows_fit_the_model(self) -> "Recipe":
        if self.pretrain is None:
            return self
        wanted = self.pretrain.model.context + 1
        if "row_tokens" not in self.instruct.model_fields_set:
            self.__dict__["instruct"] = self.instruct.model_copy(update={"row_tokens": wanted})
        if self.finetune is not None and self.instruct.row_tokens != wanted:
            raise ValueError(
                f"a row holds the model's context and one token more: with pretrain.model.context={wanted - 1} "
                f"say instruct.row_tokens={wanted}, not {self.instruct.row_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _answers_fit_the_model(self) -> "Recipe":
        if self.pretrain is None:
            return self
        context, longest = self.pretrain.model.context, dict[str, int]()
        if self.evaluate.conversations:
            longest["evaluate.max_tokens"] = self.evaluate.max_tokens
        if self.prefer is not None and isinstance(self.prefer.loss, Grpo):
            longest["prefer.loss.answer_tokens"] = self.prefer.loss.answer_tokens
        for name, tokens in longest.items():
            if tokens >= context:
                raise ValueError(
                    f"{name}={tokens} leaves no room for a question: with pretrain.model.context={context} say less, "
                    f"such as {context // 2}"
                )
        return self

    @model_validator(mode="after")
    def _domains_are_of_a_source(self) -> "Recipe":
        sources = self.fetch.sources if self.fetch else ()
        if self.shard.imported is not None or any(getattr(source, "domain_field", None) for source in sources):
            return self  # only the documents tell
        known = sorted({source.domain for source in sources})
        anneal = self.shard.anneal.weights if self.shard.anneal else ()
        named = {
            "evaluate.domains": self.evaluate.domains,
            "shard.weights": [weight.domain for weight in self.shard.weights],
            "shard.anneal.weights": [weight.domain for weight in anneal],
            "tokenizer.weights": [weight.domain for weight in self.tokenizer.weights],
        }
        for key, domains in named.items():
            if missing := [domain for domain in domains if known and domain not in known]:
                raise ValueError(
                    f"{key} names {', '.join(map(repr, missing))}, and no source has documents of it; "
                    f"domains of fetch.sources: {', '.join(known)}"
                )
        return self

    @model_validator(mode="after")
    def _conversations_are_there(self) -> "Recipe":
        if self.finetune is None:
            return self
        if not self.instruct.sources and not self.synthesize.enabled:
            raise ValueError(
                "nothing to finetune on: instruct.sources is empty, and [synthesize] is not enabled. Name sources, or "
                "leave out [finetune]"
            )
        kept, needed = (chat_template.wanted(name) for name in (self.tokenizer.template, self.instruct.template))
        missing = [name for name in needed if name not in kept]
        if missing and not isinstance(self.tokenizer, Imported):  # which may have had them before
            raise ValueError(
                f"instruct.template={self.instruct.template!r} marks turns by {', '.join(missing)}, which a tokenizer "
                f"with tokenizer.template={self.tokenizer.template!r} does not have: leave out tokenizer.template"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_their_matrices(self) -> "Recipe":
        for name, section in (("finetune", self.finetune), ("prefer", self.prefer)):
            if section is None or section.lora is None or self.pretrain is None:
                continue
            try:
                targets([*matrices(self.pretrain.model)], section.lora.targets)
            except DataError as error:
                raise ValueError(f"{name}.{error.where}: {error.what}. {error.hint}") from None
        return self

    @model_validator(mode="after")
    def _classifiers_are_there_where_they_are_asked_for(self) -> "Recipe":
        required = self.classify.required
        if required is None:
            required = "classify" in self.model_fields_set or self.filter.needs_scores
            reckoned = self.classify.model_copy()
            reckoned.__dict__["required"] = required  # and not among its fields that are set: nobody said it
            self.__dict__["classify"] = reckoned
        if not required and self.filter.needs_scores:
            raise ValueError("[filter] sets limits on scores, which needs classify.required=true, or no word of it")
        return self

    @model_serializer(mode="wrap")
    def _classifiers_as_they_were_asked_for(self, dump: Callable[["Recipe"], dict[str, Any]]) -> dict[str, Any]:
        """Without what was reckoned: a recipe that is written and read again asks for what this one asked for."""
        data = dump(self)
        if "classify" not in self.model_fields_set:
            data.pop("classify", None)
        elif "required" not in self.classify.model_fields_set and "classify" in data:
            del data["classify"]["required"]
        return data

    @model_validator(mode="after")
    def _limits_have_their_classifiers(self) -> "Recipe":
        names = [one.name for one in self.classify.named]
        for limit in self.filter.spelled_limits:
            if limit.classifier not in names:
                raise ValueError(
                    f"filter.limits asks for the classifier {limit.classifier!r}; [[classify.classifiers]] has "
                    f"{', '.join(map(repr, names))}"
                )
        return self


def _with_template(tree: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer is made before the first conversation is written, and a model has no row for what it lacks."""
    instruct, tokenizer = tree.get("instruct"), tree.get("tokenizer", {})
    if not isinstance(instruct, dict) or "template" not in instruct or not isinstance(tokenizer, dict):
        return tree
    return tree | {"tokenizer": {"kind": "byte_bpe", "template": instruct["template"]} | tokenizer}


class _Vocabulary(Config):
    """[tokenizer], which the depth of a model needs to know before the recipe is read."""

    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")


def _with_depth(tree: dict[str, Any]) -> dict[str, Any]:
    pretrain = tree.get("pretrain")
    if not isinstance(pretrain, dict) or type(pretrain.get("depth")) is not int or pretrain["depth"] < 1:
        return tree  # what is wrong with it is told when the recipe is checked
    words = build(_Vocabulary, {"tokenizer": tree["tokenizer"]} if "tokenizer" in tree else {})
    vocab_size: Callable[[AnyKind], int] = resolve("bloomery.stages.tokenizer:vocab_size")
    return tree | {"pretrain": scaling_rules.filled(pretrain, vocab_size(words.tokenizer))}


PARALLEL = tuple(
    name
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Parallel)
)
"""Sections of the stages that work on parts."""
