"""Stage classify: classifiers of documents, learned from labels or from damaged copies, measured on held-out texts."""

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


def digest(config: Classify) -> str:
    """A hash of the labeled files, for the stage's fingerprint; "" without one."""
    hashes = [_hash(one.path) for one in config.named if isinstance(one, Labeled)]
    return hashes[0] if len(hashes) == 1 else core_io.sha256_bytes(core_io.canonical(hashes)) if hashes else ""


def run(config: Classify, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write NAME/classifier.safetensors and NAME/classifier.json for each. `inputs["fetch"]` is a folder with documents/.

    One that has too few examples to learn, calibrate and measure is told in LEFT_OUT where the recipe can do without.

    Raises DataError for broken labels, and for too few examples where the recipe cannot.
    """
    told: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    with progress("classify", "classifiers", float(len(config.named))) as meter:
        for number, one in enumerate(config.named, 1):
            facts = {"name": one.name, "kind": one.kind, "keep": one.keep}
            try:
                learned = _learned(one, _examples(one, inputs["fetch"] / "documents"))
            except TooFewExamplesError as error:
                left_out.append({"name": one.name, "why": _done_without(config, one, error)})
            else:
                classifier.save(learned, facts | {"place": number}, out / one.name)
                told.append(facts | _told(learned))
            meter.at(float(number))
    if not left_out:
        return {"classifiers": told}
    core_io.write_json(out / LEFT_OUT, left_out)
    return {"classifiers": told, "left_out": left_out}


def lacking(config: Classify, folder: Path) -> bool:
    """Whether a classifier was left out for a recipe that could do without, and this one cannot."""
    return config.required is not False and (folder / LEFT_OUT).is_file()


def _done_without(config: Classify, one: Contrast | Labeled, error: TooFewExamplesError) -> str:
    """Say that a recipe goes on without a classifier, and why. Raises DataError, with the place, where it must not."""
    texts = "documents" if isinstance(one, Contrast) else "different texts of either label"
    needs = f"about {classifier.enough(one.held_out)} {texts} are enough, with held_out={one.held_out:g}"
    if config.required is not False:
        hint = f"Give more: {needs}. Where no limit asks for scores, classify.required=false goes on without."
        raise DataError(error.what, where=f"classify, classifier {one.name!r}", hint=hint) from None
    info(f"classify: goes on without {one.name!r}, which nothing asks for: {error.what}; {needs}", "yellow")
    return f"{error.what}; {needs}"


def _hash(path: Path) -> str:
    try:
        return core_io.sha256_file(path)
    except OSError as error:
        raise rows.unreadable(path, error) from None


def _examples(one: Contrast | Labeled, folder: Path) -> Sequence[TextExample]:
    if isinstance(one, Contrast):
        found = examples.contrast(folder, samples=one.samples, characters=one.characters, seed=one.seed)
        return list(found)
    return examples.labeled(
        one.path,
        Labels(one.positive, one.negative, one.positive_from, one.negative_below),
        text_field=one.text_field,
        label_field=one.label_field,
        group_field=one.group_field,
        samples=one.samples,
        characters=one.characters,
        seed=one.seed,
    )


def _learned(one: Contrast | Labeled, found: Sequence[TextExample]) -> Learned:
    return classifier.train(
        found,
        NgramSizes(one.features, one.ngrams, one.character_ngrams),
        characters=one.characters,
        held_out=one.held_out,
        seed=one.seed,
        strength=one.strength,
        threshold=one.threshold,
    )


def _told(learned: Learned) -> dict[str, Any]:
    """The statistics of one classifier, for the report."""
    telling = {"telling_positive": learned.telling_positive, "telling_negative": learned.telling_negative}
    return asdict(learned.quality) | {"strength": learned.strength} | telling
