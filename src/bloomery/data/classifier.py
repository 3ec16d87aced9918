"""
A classifier of documents: hashed n-grams of words and punctuation, logistic regression, a calibrated probability.

    p(keep | d) = σ(a · (w · x(d)) + b)        x(d): counts of n-grams in 2**k buckets, divided by their l2 norm

w and b come from logistic regression, a and b again from Platt scaling on documents that the regression did not see;
quality is measured on others still. The norm hides most of a document's length, but not all of it (the number of
different n-grams grows with it): examples of both classes should be about equally long. Sources: Joulin et al. 2017,
Bag of Tricks (arXiv 1607.01759) for hashed n-grams; Platt 1999 for a and b.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import files
from bloomery.core.errors import DataError

ARRAYS, FACTS = "classifier.safetensors", "classifier.json"
FORMAT = 1
TOKENS = r"\w+|[^\w\s]|\n"
STRENGTH = 30.0
"""Inverse of the l2 penalty. x has norm 1, so that scikit-learn's 1.0 would keep all weights near 0."""

BATCH = 256
NUM_TELLING = 20
TELLING_DOCUMENTS = 600

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """One text to learn from. Texts with the same `group` (a document and its damaged copy) are never split up."""

    text: str
    keep: bool
    group: str
    kind: str = ""
    """How it came to be, for the report: "" as found, else the kind of damage."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """What scoring needs. `weights` has one float32 for each bucket; calibration is already in them."""

    weights: NDArray[np.float32]
    bias: float
    ngrams: tuple[int, int]
    characters: int


@dataclass(frozen=True)
class Quality:
    """How good a classifier is on held-out documents; precision and recall are those of "keep" at 0.5."""

    examples: int
    held_out: int
    auc: float
    precision: float
    recall: float
    brier: float
    """Mean squared difference of score and truth: 0 is perfect, 0.25 is a coin."""
    caught: dict[str, float]
    """Share of held-out texts of each kind to drop that score below 0.5."""
    telling_keep: list[str]
    telling_drop: list[str]


def excerpt(text: str, characters: int) -> str:
    """What is looked at: a text that is not longer, or the first half of that many characters and as many mid-way."""
    if len(text) <= characters:
        return text
    half = characters // 2
    middle = half + (len(text) - half - (characters - half)) // 2
    return text[:half] + "\n" + text[middle : middle + characters - half]


def train(
    examples: Sequence[Example],
    *,
    features: int,
    ngrams: tuple[int, int],
    characters: int,
    held_out: float,
    seed: int,
) -> tuple[Classifier, Quality]:
    """
    Learn from examples. Groups go by hash: a share `held_out` measures, as many calibrate, the rest teaches.

    Raises DataError where a part would lack one of the two classes.
    """
    spots = np.array([_spot(example.group, seed) for example in examples])
    parts = [spots < held_out, (spots >= held_out) & (spots < 2 * held_out), spots >= 2 * held_out]
    truth = np.array([example.keep for example in examples], np.bool_)
    for name, part in zip(("measures", "calibrates", "teaches"), parts, strict=True):
        if len(set(truth[part].tolist())) < 2:
            keep, drop = int(truth[part].sum()), int((~truth[part]).sum())
            what = f"the part of the examples that {name} has {keep} texts to keep and {drop} to drop"
            raise DataError(what, cure="Give it more documents, or change classify.held_out (0.1 is usual).")
    measured, calibrating, teaching = parts
    x = _vectors([example.text for example in examples], features, ngrams, characters)
    # One thread: the last digits of BLAS follow the number of threads, and beside other work two took 7 times as long.
    with threadpool_limits(limits=1, user_api="blas"):
        regression = LogisticRegression(C=STRENGTH, max_iter=1000).fit(x[teaching], truth[teaching])
        weights, bias = regression.coef_[0].astype(np.float64), float(regression.intercept_[0])
        slope, offset = _platt(x[calibrating] @ weights + bias, truth[calibrating])
    classifier = Classifier((weights * slope).astype(np.float32), bias * slope + offset, ngrams, characters)
    taught = [example.text for example, part in zip(examples, teaching, strict=True) if part]
    telling = _telling(classifier, taught[:: max(1, len(taught) // TELLING_DOCUMENTS)])
    kinds = [example.kind for example, part in zip(examples, measured, strict=True) if part]
    return classifier, _quality(_probabilities(classifier, x[measured]), truth[measured], kinds, len(examples), telling)


def score(classifier: Classifier, texts: Iterable[str]) -> Iterator[float]:
    """The probability that each text is worth keeping, in order. A text's score depends on nothing else."""
    remaining = iter(texts)
    while batch := list(islice(remaining, BATCH)):
        x = _vectors(batch, len(classifier.weights), classifier.ngrams, classifier.characters)
        yield from _probabilities(classifier, x).tolist()


def save(classifier: Classifier, quality: Quality, folder: Path) -> None:
    """Write classifier.safetensors and classifier.json, each whole or absent."""
    with files.whole_file(folder / ARRAYS) as file:
        file.write(safetensors.save({"weights": classifier.weights, "bias": np.array([classifier.bias])}))
    facts = {
        "format": FORMAT,
        "tokens": TOKENS,
        "ngrams": list(classifier.ngrams),
        "characters": classifier.characters,
        "quality": asdict(quality),
    }
    files.write_json(folder / FACTS, facts)


def load(folder: Path) -> Classifier:
    """Read what `save` wrote. Raises DataError where it is missing, torn or of another format."""
    cure = "Remove the manifest.json of stage classify and run the recipe again."
    try:
        facts = files.read_json(folder / FACTS)
        arrays = safetensors.load((folder / ARRAYS).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"holds no classifier that can be read: {error}", where=str(folder), cure=cure) from None
    if facts.get("format") != FORMAT or facts.get("tokens") != TOKENS:
        raise DataError(f"its format is {facts.get('format')}, not {FORMAT}", where=str(folder / FACTS), cure=cure)
    least, most = facts["ngrams"]
    return Classifier(arrays["weights"], float(arrays["bias"][0]), (least, most), facts["characters"])


def _spot(group: str, seed: int) -> float:
    """Where a group lies in [0, 1), by hash."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}".encode()).digest()[:6]) / 2**48


def _vectorizer(features: int, ngrams: tuple[int, int]) -> Any:
    return HashingVectorizer(
        n_features=features,
        ngram_range=ngrams,
        token_pattern=TOKENS,
        alternate_sign=False,
        norm="l2",
        dtype=np.float32,
    )


def _vectors(texts: Iterable[str], features: int, ngrams: tuple[int, int], characters: int) -> Any:
    """A sparse matrix, [texts, features] float32."""
    return _vectorizer(features, ngrams).transform(excerpt(text, characters) for text in texts)


def _platt(logits: Scores, truth: NDArray[np.bool_]) -> tuple[float, float]:
    """Slope and offset that make logits calibrated. Targets are Platt's (n + 1) / (n + 2), so that they stay finite."""
    positive = (truth.sum() + 1) / (truth.sum() + 2)
    negative = 1 / ((~truth).sum() + 2)
    target = np.where(truth, positive, negative)
    both = np.concatenate([logits, logits])[:, None]
    labels = np.repeat([True, False], len(logits))
    fitted = LogisticRegression(C=1e6, max_iter=1000).fit(both, labels, np.concatenate([target, 1 - target]))
    return float(fitted.coef_[0, 0]), float(fitted.intercept_[0])


def _probabilities(classifier: Classifier, x: Any) -> Scores:
    logits = x @ classifier.weights.astype(np.float64) + classifier.bias
    probabilities: Scores = 0.5 * (1 + np.tanh(0.5 * logits))  # the logistic function, without overflow
    return probabilities


def _quality(
    scores: Scores, truth: NDArray[np.bool_], kinds: Sequence[str], examples: int, telling: tuple[list[str], list[str]]
) -> Quality:
    kept = scores >= 0.5
    caught = {}
    for kind in sorted(set(kinds)):
        rows = ~truth & np.array([other == kind for other in kinds])
        if rows.any():
            caught[kind or "labeled"] = float(1 - kept[rows].mean())
    return Quality(
        examples=examples,
        held_out=len(truth),
        auc=float(roc_auc_score(truth, scores)),
        precision=float(truth[kept].mean()) if kept.any() else 0.0,
        recall=float(kept[truth].mean()),
        brier=float(np.mean((scores - truth) ** 2)),
        caught=caught,
        telling_keep=telling[0],
        telling_drop=telling[1],
    )


def _telling(classifier: Classifier, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    The n-grams with the largest and the smallest weights, of those in one text of a hundred and more.

    A bucket stands for many n-grams; the most frequent one in these texts speaks for it.
    """
    features = len(classifier.weights)
    split = _vectorizer(features, classifier.ngrams).build_analyzer()
    frequency: dict[str, int] = {}
    for text in texts:
        for gram in set(split(excerpt(text, classifier.characters))):
            frequency[gram] = frequency.get(gram, 0) + 1
    least = max(2, len(texts) // 100)
    grams = sorted((gram for gram, count in frequency.items() if count >= least), key=lambda g: (-frequency[g], g))
    if not grams:
        return [], []
    hashed = FeatureHasher(features, input_type="string", alternate_sign=False).transform([gram] for gram in grams)
    speakers: dict[int, str] = {}
    for bucket, gram in zip(hashed.indices.tolist(), grams, strict=True):
        speakers.setdefault(bucket, gram)
    ranked = sorted(speakers, key=lambda bucket: (-float(classifier.weights[bucket]), speakers[bucket]))
    keep = [speakers[bucket] for bucket in ranked[:NUM_TELLING] if classifier.weights[bucket] > 0]
    drop = [speakers[bucket] for bucket in ranked[::-1][:NUM_TELLING] if classifier.weights[bucket] < 0]
    return keep, drop
