"""
Scores documents: the probability from a trained classifier, or a heuristic without a model.

`data/quality/classifier.py` holds the formula and the training. It stands apart, because scikit-learn takes a second
to import. Recipes and workers that only score need none of it.

The heuristic score says how much a text looks like edited prose: ten weighted shares, without a model.
It is meant for a mix with a classifier's score.

Source: the weights and steps of `quality.py` of 1386.ai's corpus (Plasma 1.1). Its own score of "buy cheap pills
now" forty times, 0.511, is reproduced here to the digit. For some shares only the steps are known and not the
words. These are boilerplate phrases, template marks, bounds of capital letters, and paragraphs outside 30 to 200
words. There the choice is ours, and comments in the code say so.

Its defects are kept. Spam passes a threshold of 0.5, short texts lose by their length, and code and scripts without
spaces score low. Use it as a tie-breaker next to a classifier, not as a judge.

All texts of a batch are processed at once, in numpy.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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
from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import CHARACTERS_AT_ONCE, Laid, NgramSizes, TokenArrays
from bloomery.data.documents import batched_by_size
from bloomery.data.quality.examples import excerpt

ARRAYS, FACTS = "classifier.safetensors", "classifier.json"
FORMAT = 2

AGAIN = "Remove the manifest.json of stage classify and run the recipe again."
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=100)]], Field(min_length=2, max_length=2)] | None
"""The shortest and the longest n-gram."""


class SavedGrams(TypedDict):
    buckets: Annotated[int, Field(ge=1, lt=2**40)]
    words: Lengths
    characters: Lengths


class SavedClassifier(TypedDict):
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
    grams: NgramSizes
    characters: int


def probabilities(logits: Scores) -> Scores:
    """The logistic function, without overflow."""
    values: Scores = 0.5 * (1 + np.tanh(0.5 * logits))
    return values


def score(classifier: Classifier, texts: Iterable[str]) -> Iterator[float]:
    """The probability that each text is positive, in order. A text's score depends on nothing else."""
    excerpts = (excerpt(text, classifier.characters) for text in texts)
    for batch in batched_by_size(excerpts, CHARACTERS_AT_ONCE):
        yield from probabilities(logits_of(classifier, batch)).tolist()


def load(folder: Path) -> Classifier:
    """Read what `save` wrote. Raises DataError where it is missing, torn or of another format."""
    facts, hint = read_facts(folder), AGAIN
    try:
        arrays = safetensors.load((folder / ARRAYS).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"holds no readable classifier: {error}", where=str(folder), hint=hint) from None
    if facts["format"] != FORMAT or facts["tokens"] != hashing.TOKENS:
        raise DataError(f"its format is {facts['format']}, not {FORMAT}", where=str(folder / FACTS), hint=hint)
    gram_sizes = facts["grams"]
    words, characters = (
        None if pair is None else (pair[0], pair[1]) for pair in (gram_sizes["words"], gram_sizes["characters"])
    )
    grams = NgramSizes(gram_sizes["buckets"], words, characters)
    if arrays.keys() < {"weights", "bias"} or arrays["weights"].shape != (grams.buckets,) or not arrays["bias"].size:
        what = f"its arrays are not weights of {grams.buckets} buckets"
        raise DataError(what, where=str(folder / ARRAYS), hint=AGAIN)
    return Classifier(arrays["weights"], float(arrays["bias"][0]), grams, facts["characters"])


def read_facts(folder: Path) -> SavedClassifier:
    """What a classifier is. Raises DataError."""
    return read_record(folder / FACTS, SavedClassifier, error=DataError, fix=AGAIN)


def logits_of(classifier: Classifier, batch: Sequence[str]) -> Scores:
    logits = np.full(len(batch), classifier.bias)
    for matches in hashing.hashed(batch, classifier.grams):
        buckets, numbers = hashing.present(matches, classifier.grams.buckets)
        # bincount adds one after the other: a text's sum is the same in every batch
        sums = np.bincount(numbers, classifier.weights[buckets], minlength=len(batch))
        logits += sums / np.sqrt(np.maximum(matches.counts, 1))
    return logits


WordCounts = NDArray[np.int64]

WEIGHTS = {
    **{"length": 0.05, "diversity": 0.15, "sentences": 0.15, "paragraphs": 0.05, "naturalness": 0.15},
    **{"capitals": 0.05, "repetition": 0.15, "boilerplate": 0.10, "no_template": 0.05, "clean": 0.10},
}
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "the be to of and a in that have i it for not on with he as you do at this but his by from they we say her she "
        "or an will my one all would there their what so up out if about who get which go me when make can like no "
        "just him is are was were been has had its than then also these those such",
    )
)
BOILERPLATE = (
    *("click here", "read more", "subscribe to", "sign up for", "all rights reserved", "privacy policy"),
    *("terms of service", "terms of use", "cookie policy", "share this", "follow us on", "powered by"),
    "leave a comment",
)
"""Of our own choice, as many as the source has."""
TEMPLATES = ("lorem ipsum", "[insert ", "{{")
MAIL = re.compile(r"[\w.+-]+@[\w-]+\.\w")
ENDS, AFTER_ENDS = ".!?。！？", " \t\n\r\0\"')"


def heuristic_score(texts: Iterable[str]) -> Iterator[float]:
    """The weighted sum of the ten shares of each text, in [0, 1]. A text's score depends on nothing else."""
    for batch in batched_by_size(texts, CHARACTERS_AT_ONCE):
        parts = shares(batch)
        yield from sum(weight * parts[name] for name, weight in WEIGHTS.items()).tolist()  # type: ignore[union-attr]


def shares(texts: Sequence[str]) -> dict[str, Scores]:
    """Each of the ten shares of every text, by name."""
    lowered = [text.lower() for text in texts]
    laid = hashing.lay(lowered)
    everything = hashing.tokens(laid)
    runs = everything.runs
    words = TokenArrays(everything.hashes[runs], everything.texts[runs], runs[runs], everything.first[runs])
    counts = np.bincount(words.texts, minlength=len(texts)).astype(np.int64)
    return {
        "length": _length(counts),
        "diversity": _diversity(words, counts),
        "sentences": _sentences(laid, words, counts),
        "paragraphs": _paragraphs(laid, words, counts),
        "naturalness": _naturalness(words, counts),
        "capitals": _capitals(texts),
        "repetition": _repetition(words, counts),
        "boilerplate": _steps(_hits(lowered, BOILERPLATE), ((0, 1.0), (2, 0.7), (4, 0.4)), 0.1),
        "no_template": np.maximum(0.0, 1 - 0.3 * _hits(lowered, TEMPLATES)),
        "clean": _clean(lowered, counts),
    }


def _length(words: WordCounts) -> Scores:
    """Fewer than 50 words 0.2; 0.5 to 0.8 up to 200; 1 up to 5,000; down to 0.7 at 20,000; 0.5 beyond."""
    risen = 0.5 + 0.3 * (words - 50) / 150
    fallen = 1 - 0.3 * (words - 5000) / 15_000
    return np.select([words < 50, words < 200, words <= 5000, words <= 20_000], [0.2, risen, 1.0, fallen], 0.5)


def _diversity(words: TokenArrays, counts: WordCounts) -> Scores:
    """By different words over the root of all words: below 2 0.1; 0.3 to 0.7 up to 4; 0.8 to 1 up to 20; else 0.9."""
    different = np.bincount(_once(words.hashes, words.texts)[0], minlength=len(counts))
    root = different / np.sqrt(np.maximum(counts, 1))
    low, high = 0.3 + 0.4 * (root - 2) / 2, 0.8 + 0.2 * (root - 4) / 16
    return np.select([root < 2, root < 4, root <= 20], [0.1, low, high], 0.9)


def _sentences(laid: Laid, words: TokenArrays, counts: WordCounts) -> Scores:
    """Fewer than 2 sentences 0.3; else 0.6 of a step by their mean length and 0.4 of how much their lengths differ."""
    points = laid.points
    spots = np.flatnonzero(_among(ENDS)[points])
    after = points[np.minimum(spots + 1, len(points) - 1)]
    spots = spots[_among(AFTER_ENDS)[after] | (points[spots] > 0x7F) | (spots == len(points) - 1)]
    ends = np.zeros(len(points), np.bool_)
    ends[spots] = True
    number, mean, deviation = _pieces(ends, words, counts)
    by_length = np.select([mean < 5, mean < 10, mean > 50], [0.3, 0.6, 0.5], 1.0)
    return np.where(number < 2, 0.3, 0.6 * by_length + 0.4 * np.minimum(1.0, deviation / 8))


def _paragraphs(laid: Laid, words: TokenArrays, counts: WordCounts) -> Scores:
    """Paragraphs, parted by blank lines, of 30 to 200 words in the mean 1; others 0.5, of our own choice."""
    breaks = laid.points == ord("\n")
    breaks[1:] &= breaks[:-1]
    _, mean, _ = _pieces(breaks, words, counts)
    return np.where((mean >= 30) & (mean <= 200), 1.0, 0.5)


def _pieces(ends: NDArray[np.bool_], words: TokenArrays, counts: WordCounts) -> tuple[WordCounts, Scores, Scores]:
    """The pieces of each text between ends that hold a word: how many, and mean and deviation of their words."""
    spots = np.cumsum(ends)[words.first]
    first = np.ones(len(spots), np.bool_)
    first[1:] = (spots[1:] != spots[:-1]) | (words.texts[1:] != words.texts[:-1])
    begins = np.flatnonzero(first)
    sizes = np.diff(np.append(begins, len(spots)))
    number = np.bincount(words.texts[begins], minlength=len(counts))
    mean = counts / np.maximum(number, 1)
    squares = np.bincount(words.texts[begins], sizes.astype(np.float64) ** 2, minlength=len(counts))
    return number, mean, np.sqrt(np.maximum(0.0, squares / np.maximum(number, 1) - mean**2))


def _naturalness(words: TokenArrays, counts: WordCounts) -> Scores:
    """By the share of stop words: 0.30 to 0.60 1; up to 0.70 0.7; from 0.20 0.6; else 0.3."""
    known = np.sort(hashing.tokens(hashing.lay(sorted(STOP_WORDS))).hashes)
    places = np.minimum(np.searchsorted(known, words.hashes), len(known) - 1)
    stops = np.bincount(words.texts, known[places] == words.hashes, minlength=len(counts))
    share = stops / np.maximum(counts, 1)
    return np.select([share < 0.2, share < 0.3, share <= 0.6, share <= 0.7], [0.3, 0.6, 1.0, 0.7], 0.3)


def _capitals(texts: Sequence[str]) -> Scores:
    """By the share of capitals among ASCII letters: below 0.01 0.8; up to 0.15 1; else 0.3 (bounds of our choice)."""
    laid = hashing.lay(texts)
    numbers = np.repeat(np.arange(len(texts)), laid.lengths + laid.pad)
    upper = (laid.points >= 65) & (laid.points <= 90)
    lower = (laid.points >= 97) & (laid.points <= 122)
    capitals, others = (np.bincount(numbers, kind, minlength=len(texts)) for kind in (upper, lower))
    share = capitals / np.maximum(capitals + others, 1)
    return np.select([share < 0.01, share <= 0.15], [0.8, 1.0], 0.3)


def _repetition(words: TokenArrays, counts: WordCounts) -> Scores:
    """From 50 words on: most frequent three words more than 5 % of all 0.2; more than 2 % 0.6; else 1."""
    texts, times = _once(*hashing.joined(words, 3))
    most = np.zeros(len(counts), np.int64)
    begins = np.flatnonzero(np.diff(texts, prepend=-1))
    if len(begins):
        most[texts[begins]] = np.maximum.reduceat(times, begins)
    share = most / np.maximum(counts - 2, 1)
    return np.select([counts < 50, share > 0.05, share > 0.02], [1.0, 0.2, 0.6], 1.0)


def _clean(lowered: Sequence[str], counts: WordCounts) -> Scores:
    """By addresses of pages and mail for 100 words: below 0.5 1; below 2 0.7; below 5 0.4; else 0.1."""
    address_counts = [
        text.count("://") + text.count(" www.") + (sum(1 for _ in MAIL.finditer(text)) if "@" in text else 0)
        for text in lowered
    ]
    share = 100 * np.array(address_counts) / np.maximum(counts, 1)
    return np.select([share < 0.5, share < 2, share < 5], [1.0, 0.7, 0.4], 0.1)


@cache
def _among(marks: str) -> NDArray[np.bool_]:
    """For every code point whether it is one of some marks."""
    flags = np.zeros(0x110000, np.bool_)
    flags[[ord(mark) for mark in marks]] = True
    return flags


def _once(hashes: hashing.Hashes, texts: hashing.Places) -> tuple[hashing.Places, hashing.Places]:
    """The text of each different hash in each text, and how often it stands there."""
    keys = (texts.astype(np.uint64) << np.uint64(44)) | (hashes >> np.uint64(20))
    keys.sort()
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    return (keys[begins] >> np.uint64(44)).astype(np.int64), np.diff(np.append(begins, len(keys)))


def _hits(lowered: Sequence[str], phrases: Sequence[str]) -> WordCounts:
    return np.array([sum(text.count(phrase) for phrase in phrases) for text in lowered], np.int64)


def _steps(values: WordCounts, steps: Sequence[tuple[int, float]], beyond: float) -> Scores:
    return np.select([values <= most for most, _ in steps], [share for _, share in steps], beyond)
