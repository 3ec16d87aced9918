"""
A trained classifier: its arrays, and the probability that it gives. What trains it, and its formula, is `classifier`.

Apart from it, because scikit-learn takes a second to import, and recipes and workers that only score need none of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.data import ngrams
from bloomery.data.examples import excerpt
from bloomery.data.ngrams import Grams

ARRAYS, FACTS = "classifier.safetensors", "classifier.json"
FORMAT = 2

Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Classifier:
    """What scoring needs. `weights` has one float32 for each bucket; calibration is already in them."""

    weights: NDArray[np.float32]
    bias: float
    grams: Grams
    characters: int


def probabilities(logits: Scores) -> Scores:
    """The logistic function, without overflow."""
    found: Scores = 0.5 * (1 + np.tanh(0.5 * logits))
    return found


def score(classifier: Classifier, texts: Iterable[str]) -> Iterator[float]:
    """The probability that each text is positive, in order. A text's score depends on nothing else."""
    for batch in ngrams.batches(excerpt(text, classifier.characters) for text in texts):
        yield from probabilities(logits_of(classifier, batch)).tolist()


def load(folder: Path) -> Classifier:
    """Read what `save` wrote. Raises DataError where it is missing, torn or of another format."""
    cure = "Remove the manifest.json of stage classify and run the recipe again."
    try:
        facts = files.read_json(folder / FACTS)
        arrays = safetensors.load((folder / ARRAYS).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"holds no classifier that can be read: {error}", where=str(folder), cure=cure) from None
    if facts.get("format") != FORMAT or facts.get("tokens") != ngrams.TOKENS:
        raise DataError(f"its format is {facts.get('format')}, not {FORMAT}", where=str(folder / FACTS), cure=cure)
    words, characters = facts["grams"]["words"], facts["grams"]["characters"]
    grams = Grams(facts["grams"]["buckets"], words and tuple(words), characters and tuple(characters))
    return Classifier(arrays["weights"], float(arrays["bias"][0]), grams, facts["characters"])


def logits_of(classifier: Classifier, batch: Sequence[str]) -> Scores:
    logits = np.full(len(batch), classifier.bias)
    for found in ngrams.hashed(batch, classifier.grams):
        buckets, numbers = ngrams.present(found, classifier.grams.buckets)
        # bincount adds one after the other: a text's sum is the same in every batch
        sums = np.bincount(numbers, classifier.weights[buckets], minlength=len(batch))
        logits += sums / np.sqrt(np.maximum(found.counts, 1))
    return logits
