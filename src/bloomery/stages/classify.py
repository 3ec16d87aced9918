"""Stage classify: a classifier of documents, learned from labels or from damaged copies, measured on held-out ones."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.core.log import progress
from bloomery.data import classifier, damage, document, rows
from bloomery.data.classifier import Example
from bloomery.stages.config import Classify

SHORTEST = 100
"""Characters of the shortest excerpts that are learned from; lengths are even on a logarithmic scale."""


def digest(config: Classify) -> str:
    """A hash of the labeled file, for the stage's fingerprint; "" without one."""
    if config.labeled is None:
        return ""
    try:
        return files.sha256_file(config.labeled)
    except OSError as error:
        raise rows.unreadable(config.labeled, error) from None


def run(config: Classify, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write classifier.safetensors and classifier.json. `inputs["fetch"]` is a folder with documents/.

    Raises DataError for broken labels, and where there are too few examples to learn, calibrate and measure.
    """
    folder = inputs["fetch"] / "documents"
    examples = []
    with progress("classify", "examples") as meter:
        for example in _labeled(config) if config.labeled is not None else _contrast(config, folder):
            examples.append(example)
            meter.at(float(len(examples)))
        learned, quality = classifier.train(
            examples,
            features=config.features,
            ngrams=config.ngrams,
            characters=config.characters,
            held_out=config.held_out,
            seed=config.seed,
        )
    classifier.save(learned, quality, out)
    return asdict(quality)


def _contrast(config: Classify, folder: Path) -> Iterator[Example]:
    """
    Documents and a damaged copy of each, both as an excerpt of one length, which hash chooses for each document.

    With excerpts as long as they can be, 300 characters of good text scored below 0.5 in 55 of 100 cases: text that
    repeats itself and text that is short have the same lack of different words.
    """
    chosen = _chosen(config, folder)
    for row in document.read(folder, ["id", "text"]):
        if (name := row["id"]) in chosen:
            share = int(_hash(f"length:{name}", config.seed)[:8], 16) / 2**32
            length = round(SHORTEST * (config.characters / SHORTEST) ** share)
            text, kind = classifier.excerpt(row["text"], length), damage.choose(name, config.seed)
            yield Example(text, True, name)
            yield Example(damage.damage(text, kind, config.seed), False, name, kind)


def _chosen(config: Classify, folder: Path) -> set[str]:
    """Ids of the documents to learn from: of each domain those with the smallest hashes, evenly over domains."""
    names = [(row["domain"], row["id"]) for row in document.read(folder, ["domain", "id"])]
    ranked, taken = [], Counter[str]()
    for spot, domain, name in sorted((_hash(name, config.seed), domain, name) for domain, name in names):
        ranked.append((taken[domain], spot, name))
        taken[domain] += 1
    return {name for *_, name in sorted(ranked)[: config.samples]}


def _labeled(config: Classify) -> Iterator[Example]:
    assert config.labeled is not None
    cure = 'A line is {"text": "…", "label": 1} with 1 for text to keep and 0 for text to drop.'
    found = []
    for number, row in rows.jsonl(config.labeled):
        where = f"{config.labeled}:{number}"
        if isinstance(row, rows.Problem):
            raise DataError(row.what, where=where, cure=cure)
        text, label = row.get("text"), row.get("label")
        if not isinstance(text, str) or label not in (0, 1):
            raise DataError(f"has text {str(text)[:40]!r} and label {label!r}", where=where, cure=cure)
        group = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        found.append((_hash(group, config.seed), Example(text, bool(label), group)))
    found.sort(key=lambda pair: pair[0])
    yield from (example for _, example in found[: config.samples])


def _hash(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:sample:{name}".encode()).hexdigest()
