"""
A trained classifier: its arrays, and the probability that it gives. What trains it, and its formula, is `classifier`.

Apart from it, because scikit-learn takes a second to import, and recipes and workers that only score need none of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors import numpy as safetensors
from typing_extensions import TypedDict

from bloomery.core.errors import DataError
from bloomery.core.records import read_record
from bloomery.data import ngrams
from bloomery.data.examples import excerpt
from bloomery.data.ngrams import Grams

ARRAYS, FACTS = "classifier.safetensors", "classifier.json"
FORMAT = 2

AGAIN = "Remove the manifest.json of stage classify and run the recipe again."
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=100)]], Field(min_length=2, max_length=2)] | None
"""The shortest and the longest n-gram."""


class SavedGrams(TypedDict):
    buckets: Annotated[int, Field(ge=1, lt=2**40)]
    words: Lengths
    characters: Lengths


class Facts(TypedDict):
    """What FACTS holds, as far as scoring reads it."""

    format: int
    tokens: str
    grams: SavedGrams
    characters: Annotated[int, Field(ge=1)]


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
    facts, cure = read_facts(folder), AGAIN
    try:
        arrays = safetensors.load((folder / ARRAYS).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"holds no classifier that can be read: {error}", where=str(folder), cure=cure) from None
    if facts["format"] != FORMAT or facts["tokens"] != ngrams.TOKENS:
        raise DataError(f"its format is {facts['format']}, not {FORMAT}", where=str(folder / FACTS), cure=cure)
    given = facts["grams"]
    words, characters = (None if pair is None else (pair[0], pair[1]) for pair in (given["words"], given["characters"]))
    grams = Grams(given["buckets"], words, characters)
    if arrays.keys() < {"weights", "bias"} or arrays["weights"].shape != (grams.buckets,) or not arrays["bias"].size:
        what = f"its arrays are no weights of {grams.buckets} buckets"
        raise DataError(what, where=str(folder / ARRAYS), cure=AGAIN)
    return Classifier(arrays["weights"], float(arrays["bias"][0]), grams, facts["characters"])


def read_facts(folder: Path) -> Facts:
    """What a classifier is. Raises DataError."""
    return read_record(folder / FACTS, Facts, error=DataError, fix=AGAIN)


def logits_of(classifier: Classifier, batch: Sequence[str]) -> Scores:
    logits = np.full(len(batch), classifier.bias)
    for found in ngrams.hashed(batch, classifier.grams):
        buckets, numbers = ngrams.present(found, classifier.grams.buckets)
        # bincount adds one after the other: a text's sum is the same in every batch
        sums = np.bincount(numbers, classifier.weights[buckets], minlength=len(batch))
        logits += sums / np.sqrt(np.maximum(found.counts, 1))
    return logits
