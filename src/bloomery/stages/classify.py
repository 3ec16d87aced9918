"""Stage classify: classifiers of documents, learned from labels or from damaged copies, measured on held-out texts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.core import files
from bloomery.core.log import progress
from bloomery.data import classifier, examples, rows
from bloomery.data.classifier import Learned
from bloomery.data.examples import Example, Labels
from bloomery.data.ngrams import Grams
from bloomery.stages.config import Classify, Contrast, Labeled


def digest(config: Classify) -> str:
    """A hash of the labeled files, for the stage's fingerprint; "" without one."""
    hashes = [_hash(one.path) for one in config.named if isinstance(one, Labeled)]
    return hashes[0] if len(hashes) == 1 else files.sha256_bytes(files.canonical(hashes)) if hashes else ""


def run(config: Classify, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write NAME/classifier.safetensors and NAME/classifier.json for each. `inputs["fetch"]` is a folder with documents/.

    Raises DataError for broken labels, and where there are too few examples to learn, calibrate and measure.
    """
    told: list[dict[str, Any]] = []
    with progress("classify", "classifiers", float(len(config.named))) as meter:
        for number, one in enumerate(config.named, 1):
            learned = _learned(one, _examples(one, inputs["fetch"] / "documents"))
            facts = {"name": one.name, "kind": one.kind, "keep": one.keep}
            classifier.save(learned, facts | {"place": number}, out / one.name)
            told.append(facts | _told(learned))
            meter.at(float(number))
    return {"classifiers": told}


def _hash(path: Path) -> str:
    try:
        return files.sha256_file(path)
    except OSError as error:
        raise rows.unreadable(path, error) from None


def _examples(one: Contrast | Labeled, folder: Path) -> Sequence[Example]:
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


def _learned(one: Contrast | Labeled, found: Sequence[Example]) -> Learned:
    return classifier.train(
        found,
        Grams(one.features, one.ngrams, one.character_ngrams),
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
