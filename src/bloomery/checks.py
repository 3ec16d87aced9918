"""
Checks across the sections of a recipe, and defaults that follow from other sections.

`fill` completes the TOML data before it is checked. `resolve` fills in the defaults of a recipe that was read. Then
each of CHECKS looks at it. A check raises ValueError, and `core.config.build` makes a ConfigError of it.
"""

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from bloomery.core.config import Config, build, is_of_hub, with_defaults
from bloomery.core.errors import DataError
from bloomery.core.pipeline import resolve as resolve_name
from bloomery.data.executor import Parallel
from bloomery.model.config import ModelConfig, matrices, targets
from bloomery.tokenizer import chat_template
from bloomery.tokenizer.config import AnyKind, ByteBpe, Imported
from bloomery.train.config import USUAL_CONTEXT, by_scaling_rules
from bloomery.train.preference.config import Grpo

if TYPE_CHECKING:
    from bloomery.recipe import Recipe


def fill(tree: dict[str, Any]) -> dict[str, Any]:
    """
    TOML data of a recipe with what its checks need. A [tokenizer] without kind is a byte-level BPE and has the special
    tokens of `instruct.chat_template`. `pretrain.depth` decides shape and training settings.
    """
    if isinstance(tokenizer := tree.get("tokenizer"), dict):
        tree = tree | {"tokenizer": {"kind": "byte_bpe"} | tokenizer}
    return _with_depth(_with_template(_with_own_tokenizer(tree)))


def _with_own_tokenizer(tree: dict[str, Any]) -> dict[str, Any]:
    """A model that pretraining starts from has its tokenizer, unless [tokenizer] says another."""
    pretrain = tree.get("pretrain")
    if not isinstance(pretrain, dict) or not isinstance(pretrain.get("start_from"), str) or "tokenizer" in tree:
        return tree
    return tree | {"tokenizer": {"kind": "import", "path": pretrain["start_from"], "measure": False}}


def _with_template(tree: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer is trained before the first conversation is written, and a model has no row for what it lacks."""
    instruct, tokenizer = tree.get("instruct"), tree.get("tokenizer", {})
    if not isinstance(instruct, dict) or "chat_template" not in instruct or not isinstance(tokenizer, dict):
        return tree
    if any(isinstance(tree.get(name), dict) and "start_from" in tree[name] for name in ("finetune", "prefer")):
        return tree  # the tokenizer is that of the model
    return tree | {"tokenizer": {"kind": "byte_bpe", "chat_template": instruct["chat_template"]} | tokenizer}


class _Vocabulary(Config):
    """[tokenizer], which the depth of a model needs to know before the recipe is read."""

    tokenizer: AnyKind = Field(ByteBpe(), discriminator="kind")


def _with_depth(tree: dict[str, Any]) -> dict[str, Any]:
    pretrain = tree.get("pretrain")
    if not isinstance(pretrain, dict) or type(pretrain.get("depth")) is not int or pretrain["depth"] < 1:
        return tree  # the check of the section reports what is wrong with it
    words = build(_Vocabulary, {"tokenizer": tree["tokenizer"]} if "tokenizer" in tree else {})
    vocab_size: Callable[[AnyKind], int] = resolve_name("bloomery.stages.tokenizer:vocab_size")
    return tree | {"pretrain": by_scaling_rules(pretrain, vocab_size(words.tokenizer))}


def resolve(recipe: "Recipe") -> "Recipe":
    """
    A new recipe with the defaults that depend on other sections. They do not count as set: what is written of it and
    read again asks for what this recipe asks for.

    [engine] goes to the sections that have none of their own. A packed sequence is as long as the model's context and
    its last target. Classifiers are required where the recipe has [classify], or [filter] a limit on scores.
    """
    sections: dict[str, Config] = {
        name: with_defaults(section, engine=recipe.engine)
        for name, section in recipe
        if isinstance(section, Parallel) and "engine" not in section.model_fields_set
    }
    _shape_at.cache_clear()
    shape = start_shape(recipe)
    continued = recipe.pretrain is not None and recipe.pretrain.start_from is not None
    if recipe.pretrain is not None and continued and shape is not None:
        named = recipe.pretrain.model.model_fields_set if "model" in recipe.pretrain.model_fields_set else set[str]()
        if named <= {"context_length"}:
            length = recipe.pretrain.model.context_length if named else shape.context_length
            model = shape.model_copy(update={"context_length": length})
            sections["pretrain"] = with_defaults(recipe.pretrain, model=model)
    words: dict[str, Any] = {}
    if recipe.finetune is not None and recipe.finetune.start_from is not None:
        words["start_from"] = recipe.instruct.start_from or recipe.finetune.start_from
        context = None if shape is None else min(shape.context_length, USUAL_CONTEXT)
    else:
        pretrain = sections.get("pretrain", recipe.pretrain)
        context = None if pretrain is None else pretrain.model.context_length  # type: ignore[attr-defined]
        words["chat_template"] = recipe.instruct.chat_template or "bloomery"
    if context is not None and "sequence_length" not in recipe.instruct.model_fields_set:
        words["sequence_length"] = context + 1
    sections["instruct"] = with_defaults(recipe.instruct, **words)
    if recipe.classify.required is None:
        required = "classify" in recipe.model_fields_set or recipe.filter.needs_scores
        sections["classify"] = with_defaults(recipe.classify, required=required)
    return with_defaults(recipe, **sections)


DOCUMENTS = ("fetch", "classify", "filter", "dedup")
BASE = ("tokenizer", "shard", "pretrain")


def skipped(recipe: "Recipe") -> frozenset[str]:
    """The stages before the model that finetuning or preference tuning starts from."""
    augments = recipe.synthesize.enabled and recipe.synthesize.augment is not None
    if recipe.prefer is not None and recipe.prefer.start_from is not None:
        return frozenset({*DOCUMENTS, *BASE, "synthesize", "instruct", "finetune"})
    if recipe.finetune is not None and recipe.finetune.start_from is not None:
        return frozenset({*BASE, *(() if augments else DOCUMENTS)})
    return frozenset()


def start_shape(recipe: "Recipe") -> ModelConfig | None:
    """
    The shape of the model that training starts from; None where a recipe names none, or where it is not there yet.
    Raises CheckpointError for a path that holds no model.
    """
    sections = (recipe.prefer, recipe.finetune, recipe.pretrain)
    path = next((one.start_from for one in sections if one is not None and one.start_from is not None), None)
    return None if path is None else _shape_at(path)


@lru_cache(maxsize=1)
def _shape_at(path: Path) -> ModelConfig | None:
    """As `start_shape`, read once for all checks of a recipe: `resolve` forgets it. A hub is asked."""
    is_there = is_of_hub(path) or path.expanduser().exists()
    if importlib.util.find_spec("torch") is None or not is_there:
        return None
    folder = resolve_name("bloomery.weights.locate:locate_model")(path.expanduser())
    shape: ModelConfig = resolve_name("bloomery.weights.hf:config_of")(folder)[0]
    return shape


def one_model_to_start_from(recipe: "Recipe") -> None:
    for name, section in (("finetune", recipe.finetune), ("prefer", recipe.prefer)):
        if section is None or section.start_from is None:
            continue
        without = sorted(skipped(recipe) & recipe.model_fields_set, key=list(type(recipe).model_fields).index)
        if sections := [other for other in without if getattr(recipe, other)]:
            raise ValueError(
                f"{name}.start_from={str(section.start_from)!r} replaces [{sections[0]}]: remove one of them"
            )
    own, model = recipe.instruct.start_from, None if recipe.finetune is None else recipe.finetune.start_from
    if own is not None and model is not None and own != model:
        raise ValueError(
            f"instruct.start_from={str(own)!r} and finetune.start_from={str(model)!r} name two models: remove the first"
        )


def text_has_a_source(recipe: "Recipe") -> None:
    if "fetch" in skipped(recipe):
        return
    if recipe.fetch is None and recipe.shard.imported is None:
        raise ValueError(
            "[fetch] is missing: add it to name the sources of documents, or add [shard.imported] to use token files"
        )


def packed_sequences_fit_the_model(recipe: "Recipe") -> None:
    if recipe.finetune is not None and recipe.finetune.start_from is not None:
        _rows_fit_the_start(recipe)
        return
    if recipe.pretrain is None or recipe.finetune is None:
        return
    context, sequence_length = recipe.pretrain.model.context_length, recipe.instruct.sequence_length
    if sequence_length > context + 1 and recipe.finetune.rope_scaling is None:
        raise ValueError(
            f"packed sequences are at most one token longer than the context: with pretrain.model.context_length="
            f"{context}, set instruct.sequence_length={context + 1}, not {sequence_length}"
        )


def _rows_fit_the_start(recipe: "Recipe") -> None:
    shape, sequence_length = start_shape(recipe), recipe.instruct.sequence_length
    if shape is None or recipe.finetune is None or sequence_length <= shape.context_length + 1:
        return
    context = shape.context_length
    if shape.position_embedding == "learned":
        raise ValueError(
            f"instruct.sequence_length={sequence_length} is more than the model's context of {context}. It cannot be "
            f"extended: set at most {context + 1}"
        )
    if shape.position_embedding == "rope" and recipe.finetune.rope_scaling is None:
        factor = -(-(sequence_length - 1) // context)
        raise ValueError(
            f"instruct.sequence_length={sequence_length} is more than the model's context of {context}: set at most "
            f'{context + 1}, or extend it: finetune.rope_scaling={{kind="yarn", factor={factor}, '
            f"original_context_length={context}}}"
        )


def answers_fit_the_model(recipe: "Recipe") -> None:
    shape = start_shape(recipe) or (None if recipe.pretrain is None else recipe.pretrain.model)
    if shape is None:
        return
    context, longest = shape.context_length, dict[str, int]()
    if recipe.evaluate.conversations:
        longest["evaluate.max_tokens"] = recipe.evaluate.max_tokens
    if recipe.prefer is not None and isinstance(recipe.prefer.loss, Grpo):
        longest["prefer.loss.max_new_tokens"] = recipe.prefer.loss.max_new_tokens
    for name, tokens in longest.items():
        if tokens >= context:
            raise ValueError(
                f"{name}={tokens} leaves no room for a question in the model's context of {context} tokens: set "
                f"fewer, such as {context // 2}"
            )


def domains_belong_to_a_source(recipe: "Recipe") -> None:
    sources = recipe.fetch.sources if recipe.fetch else ()
    if recipe.shard.imported is not None or any(getattr(source, "domain_field", None) for source in sources):
        return  # only the documents tell
    known = sorted({source.domain for source in sources})
    anneal = recipe.shard.anneal.weights if recipe.shard.anneal else ()
    named = {
        "evaluate.domains": recipe.evaluate.domains,
        "shard.weights": [weight.domain for weight in recipe.shard.weights],
        "shard.anneal.weights": [weight.domain for weight in anneal],
        "tokenizer.weights": [weight.domain for weight in recipe.tokenizer.weights],
    }
    for key, domains in named.items():
        if missing := [domain for domain in domains if known and domain not in known]:
            raise ValueError(
                f"{key} names {', '.join(map(repr, missing))}, but no source has such documents; "
                f"domains of fetch.sources: {', '.join(known)}"
            )


def conversations_exist_and_can_be_written(recipe: "Recipe") -> None:
    """A stage of conversations needs some, and a tokenizer with the special tokens of their template."""
    if recipe.finetune is None:
        return
    if not recipe.instruct.sources and not recipe.synthesize.enabled:
        raise ValueError(
            "nothing to finetune on: instruct.sources is empty, and [synthesize] is not enabled. Add sources, or "
            "remove [finetune]"
        )
    if recipe.finetune.start_from is not None:
        return  # its tokenizer is not known here
    kept, needed = (
        chat_template.special_tokens(name)
        for name in (recipe.tokenizer.chat_template, recipe.instruct.chat_template or "bloomery")
    )
    missing = [name for name in needed if name not in kept]
    if missing and not isinstance(recipe.tokenizer, Imported):  # which may have had them before
        raise ValueError(
            f"instruct.chat_template={recipe.instruct.chat_template!r} marks turns by {', '.join(missing)}, which a "
            f"tokenizer with tokenizer.chat_template={recipe.tokenizer.chat_template!r} does not have: remove "
            "tokenizer.chat_template"
        )


def adapters_have_their_matrices(recipe: "Recipe") -> None:
    for name, section in (("finetune", recipe.finetune), ("prefer", recipe.prefer)):
        shape = start_shape(recipe) or (None if recipe.pretrain is None else recipe.pretrain.model)
        if section is None or section.lora is None or shape is None:
            continue
        try:
            targets([*matrices(shape)], section.lora.target_modules)
        except DataError as error:
            raise ValueError(f"{name}.{error.where}: {error.what}. {error.hint}") from None


def limits_on_scores_have_classifiers(recipe: "Recipe") -> None:
    if not recipe.classify.required and recipe.filter.needs_scores:
        raise ValueError("[filter] sets thresholds on scores: remove classify.required=false")


def limits_name_known_classifiers(recipe: "Recipe") -> None:
    names = [classifier.name for classifier in recipe.classify.named]
    for limit in recipe.filter.spelled_thresholds:
        if limit.classifier not in names:
            raise ValueError(
                f"filter.thresholds asks for the classifier {limit.classifier!r}; [[classify.classifiers]] has "
                f"{', '.join(map(repr, names))}"
            )


CHECKS: tuple[Callable[["Recipe"], None], ...] = (
    one_model_to_start_from,
    text_has_a_source,
    packed_sequences_fit_the_model,
    answers_fit_the_model,
    domains_belong_to_a_source,
    conversations_exist_and_can_be_written,
    adapters_have_their_matrices,
    limits_on_scores_have_classifiers,
    limits_name_known_classifiers,
)
"""In this order; the first that fails is reported."""
