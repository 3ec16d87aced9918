"""Stage classify: train classifiers of documents on labels or on damaged copies, and measure them on test texts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.log import info, progress
from bloomery.data.dedup.hashing import NgramSizes
from bloomery.data.quality import classifier, examples
from bloomery.data.quality.classifier import Learned, TooFewExamplesError
from bloomery.data.quality.examples import Labels, TextExample
from bloomery.data.quality.thresholds import LEFT_OUT
from bloomery.data.readers import rows
from bloomery.stages.config import Classify, Contrast, Labeled

VERSION = 2


def external_inputs(config: Classify) -> str:
    """A hash of the labeled files, for the stage's fingerprint; "" without one."""
    hashes = [_hash(one.path) for one in config.named if isinstance(one, Labeled)]
    return hashes[0] if len(hashes) == 1 else core_io.sha256_bytes(core_io.canonical(hashes)) if hashes else ""


def run(config: Classify, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write NAME/classifier.safetensors and NAME/classifier.json for each. `inputs["fetch"]` is a folder with documents/.

    LEFT_OUT lists each optional classifier with too few examples to train, calibrate and measure.

    Raises DataError for broken labels, and for too few examples of a classifier that the recipe requires.
    """
    stats: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    with progress("classify", "classifiers", float(len(config.named))) as meter:
        for number, settings in enumerate(config.named, 1):
            facts = {"name": settings.name, "kind": settings.kind, "keep": settings.keep}
            try:
                learned = _learned(settings, _examples(settings, inputs["fetch"] / "documents"))
            except TooFewExamplesError as error:
                left_out.append({"name": settings.name, "why": _done_without(config, settings, error)})
            else:
                classifier.save(learned, facts | {"place": number}, out / settings.name)
                stats.append(facts | _told(learned))
            meter.at(float(number))
    if not left_out:
        return {"classifiers": stats}
    core_io.write_json(out / LEFT_OUT, left_out)
    return {"classifiers": stats, "left_out": left_out}


def is_incomplete(config: Classify, folder: Path) -> bool:
    """Whether a classifier was left out for a recipe that could do without, and this one cannot."""
    return config.required is not False and (folder / LEFT_OUT).is_file()


def _done_without(config: Classify, settings: Contrast | Labeled, error: TooFewExamplesError) -> str:
    """Log that a classifier is skipped, and return why. Raises DataError where the recipe requires the classifier."""
    texts = "documents" if isinstance(settings, Contrast) else "different texts of either label"
    fraction = settings.test_fraction
    needs = f"about {classifier.enough(fraction)} {texts} are enough, with test_fraction={fraction:g}"
    if config.required is not False:
        hint = f"Add more: {needs}. If no threshold uses its scores, classify.required=false skips it."
        raise DataError(error.what, where=f"classify, classifier {settings.name!r}", hint=hint) from None
    info(f"classify: skipped {settings.name!r}, which no threshold uses: {error.what}; {needs}", "yellow")
    return f"{error.what}; {needs}"


def _hash(path: Path) -> str:
    try:
        return core_io.sha256_file(path)
    except OSError as error:
        raise rows.unreadable(path, error) from None


def _examples(settings: Contrast | Labeled, folder: Path) -> Sequence[TextExample]:
    if isinstance(settings, Contrast):
        text_examples = examples.contrast(
            folder, samples=settings.samples, characters=settings.max_chars, seed=settings.seed
        )
        return list(text_examples)
    return examples.labeled(
        settings.path,
        Labels(settings.positive, settings.negative, settings.positive_from, settings.negative_below),
        text_field=settings.text_field,
        label_field=settings.label_field,
        group_field=settings.group_field,
        samples=settings.samples,
        characters=settings.max_chars,
        seed=settings.seed,
    )


def _learned(settings: Contrast | Labeled, text_examples: Sequence[TextExample]) -> Learned:
    return classifier.train(
        text_examples,
        NgramSizes(settings.features, settings.ngrams, settings.character_ngrams),
        characters=settings.max_chars,
        held_out=settings.test_fraction,
        seed=settings.seed,
        strength=settings.c,
        threshold=settings.threshold,
    )


def _told(learned: Learned) -> dict[str, Any]:
    """The statistics of one classifier, for the report."""
    telling = {"telling_positive": learned.telling_positive, "telling_negative": learned.telling_negative}
    return asdict(learned.quality) | {"strength": learned.strength} | telling
