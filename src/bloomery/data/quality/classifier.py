"""
Trains and calibrates a document classifier: hashed n-grams, logistic regression.

    p(positive | d) = σ(a · (w · x(d)) + b)        x(d) = sum over families of present / sqrt(number of n-grams)

A family is the n-grams of words or the n-grams of characters. `present` is 1 in each bucket that an n-gram of d is
hashed to, however often. Text that repeats itself therefore has a shorter x. Against damaged copies the area under
the ROC curve was 0.903. It was 0.853 with counts, and 0.873 with counts scaled to a norm of 1.

w comes from scikit-learn's LogisticRegression (liblinear's dual coordinate descent). Its penalty is chosen on the
calibration examples; a and b come from Platt scaling on the same examples. Quality is measured on a third set of
examples. The square root removes most of the effect of a document's length, but not all of it. Examples of both
classes should therefore be about equally long.

Quality is reported by the area under the ROC curve, precision and recall, and reliability bins. The expected
calibration error is the mean over bins of |mean score - share of positives|. Each bin is weighted by how many texts
it has.

Sources: Joulin et al. 2017, Bag of Tricks (arXiv 1607.01759) for hashed n-grams; Fan et al. 2008, LIBLINEAR. For
probabilities: Platt 1999, Probabilistic Outputs for Support Vector Machines. For the calibration error: Naeini et al.
2015.

`data/quality/scorer.py` stores a trained classifier and applies it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import linear_model, metrics, sparse
from bloomery.core.io import stable_hash
from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import CHARACTERS_AT_ONCE, NgramSizes
from bloomery.data.documents import batched_by_size
from bloomery.data.quality import scorer
from bloomery.data.quality.examples import TextExample, excerpt
from bloomery.data.quality.scorer import ARRAYS, FACTS, FORMAT, Classifier, Scores, logits_of

NUM_BINS = 10
GRID = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Thresholds at which precision and recall are reported."""

Truth = NDArray[np.bool_]


@dataclass(frozen=True)
class Bin:
    """Texts whose scores lie in [low, high): how many, their mean score, and the share that is positive."""

    low: float
    high: float
    texts: int
    score: float | None
    positive: float | None


@dataclass(frozen=True)
class Cut:
    """Precision and recall of "positive" for scores from `threshold` on, and the share of texts that reach it."""

    threshold: float
    precision: float | None
    recall: float
    reached: float


@dataclass(frozen=True)
class Quality:
    """How good a classifier is on texts that neither taught nor calibrated it."""

    examples: int
    positives: int
    held_out: int
    auc: float
    threshold: float
    precision: float | None
    """Of "positive" from `threshold` on; None where no text reaches it."""
    recall: float
    brier: float
    """Mean squared difference of score and truth: 0 is perfect, 0.25 is a coin."""
    calibration_error: float
    bins: list[Bin]
    cuts: list[Cut]
    caught: dict[str, float]
    """Share of validation negatives of each kind that score below `threshold`."""


def platt(logits: Scores, truth: Truth) -> tuple[float, float]:
    """Slope and offset that make logits calibrated. Targets are Platt's (n + 1) / (n + 2), so that they stay finite."""
    positive = (truth.sum() + 1) / (truth.sum() + 2)
    negative = 1 / ((~truth).sum() + 2)
    target = np.where(truth, positive, negative)
    both = np.concatenate([logits, logits])[:, None]
    labels = np.repeat([True, False], len(logits))
    fitted = linear_model.LogisticRegression(C=1e6, max_iter=1000).fit(
        both, labels, np.concatenate([target, 1 - target])
    )
    return float(fitted.coef_[0, 0]), float(fitted.intercept_[0])


def measure(scores: Scores, truth: Truth, kinds: Sequence[str], *, examples: Truth, threshold: float) -> Quality:
    """`kinds` says how each text came to be; `examples` is the truth of all examples, those that taught included."""
    bins = _bins(scores, truth)
    at = _cut(scores, truth, threshold)
    filled = [one for one in bins if one.score is not None and one.positive is not None]
    error = sum(one.texts * abs((one.score or 0.0) - (one.positive or 0.0)) for one in filled) / len(truth)
    return Quality(
        examples=len(examples),
        positives=int(examples.sum()),
        held_out=len(truth),
        auc=area(scores, truth),
        threshold=threshold,
        precision=at.precision,
        recall=at.recall,
        brier=float(np.mean((scores - truth) ** 2)),
        calibration_error=error,
        bins=bins,
        cuts=[_cut(scores, truth, value) for value in GRID],
        caught=_caught(scores < threshold, truth, kinds),
    )


def area(scores: Scores, truth: Truth) -> float:
    return float(metrics.roc_auc_score(truth, scores))


def _bins(scores: Scores, truth: Truth) -> list[Bin]:
    places = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = []
    for index in range(NUM_BINS):
        here = places == index
        some = bool(here.any())
        score, positive = (float(scores[here].mean()), float(truth[here].mean())) if some else (None, None)
        bins.append(Bin(index / NUM_BINS, (index + 1) / NUM_BINS, int(here.sum()), score, positive))
    return bins


def _cut(scores: Scores, truth: Truth, threshold: float) -> Cut:
    reached = scores >= threshold
    precision = float(truth[reached].mean()) if reached.any() else None
    return Cut(threshold, precision, float(reached[truth].mean()), float(reached.mean()))


def _caught(low: Truth, truth: Truth, kinds: Sequence[str]) -> dict[str, float]:
    rates = {}
    for kind in sorted(set(kinds) - {""}):
        rows = ~truth & np.array([other == kind for other in kinds])
        if rows.any():
            rates[kind] = float(low[rows].mean())
    return rates


STRENGTHS = (1.0, 3.0, 10.0)
"""Inverses of the l2 penalty that are tried. Past the last, dual coordinate descent takes hundreds of rounds."""
TOLERANCE = 0.01
"""Of the gradient: at a hundredth of it the area under the curve was the same in four digits, in twice the time."""
NUM_TELLING = 20
TELLING_DOCUMENTS = 3000
RAREST_TELLING = 0.002
"""An n-gram is reported if at least this share of those documents contains it."""


class TooFewExamplesError(DataError):
    """A part of the examples lacks one of the two classes."""


@dataclass(frozen=True)
class Learned:
    """A classifier, how good it is, the penalty that was chosen, and the n-grams that say most for either side."""

    classifier: Classifier
    quality: Quality
    strength: float
    telling_positive: list[str]
    telling_negative: list[str]


def train(
    examples: Sequence[TextExample],
    grams: NgramSizes,
    *,
    characters: int,
    held_out: float,
    seed: int,
    strength: float | None = None,
    threshold: float = 0.5,
) -> Learned:
    """
    Learn from examples. Groups go by hash: a share `held_out` measures, as many calibrate, the rest teaches.

    Without `strength` the one of STRENGTHS is taken whose scores order the calibrating texts best. Raises
    TooFewExamplesError where a part would lack one of the two classes.
    """
    truth = np.array([example.positive for example in examples], np.bool_)
    measured, calibrating, teaching = split([example.group for example in examples], truth, held_out, seed)
    x = _vectors([excerpt(example.text, characters) for example in examples], grams)
    # One thread: the last digits of BLAS depend on the number of threads, and two took 7 times as long under load.
    with threadpool_limits(limits=1, user_api="blas"):
        fits = [_fitted(x[teaching], truth[teaching], one, seed) for one in ([strength] if strength else STRENGTHS)]
        areas = [area(x[calibrating] @ weights + bias, truth[calibrating]) for weights, bias in fits]
        best = int(np.argmax(areas))
        weights, bias = fits[best]
        slope, offset = platt(x[calibrating] @ weights + bias, truth[calibrating])
    classifier = Classifier((weights * slope).astype(np.float32), bias * slope + offset, grams, characters)
    scores = np.fromiter(
        scorer.score(classifier, (e.text for e, m in zip(examples, measured, strict=True) if m)), np.float64
    )
    kinds = [example.kind for example, part in zip(examples, measured, strict=True) if part]
    quality = measure(scores, truth[measured], kinds, examples=truth, threshold=threshold)
    taught = [example.text for example, part in zip(examples, teaching, strict=True) if part]
    telling = _telling(classifier, taught[:: max(1, len(taught) // TELLING_DOCUMENTS)])
    return Learned(classifier, quality, strength or STRENGTHS[best], *telling)


def split(groups: Sequence[str], truth: Truth, held_out: float, seed: int) -> tuple[Truth, Truth, Truth]:
    """Which examples measure, which calibrate, which teach. Raises TooFewExamplesError where a part lacks a class."""
    spots = np.array([_spot(group, seed) for group in groups])
    parts = (spots < held_out, (spots >= held_out) & (spots < 2 * held_out), spots >= 2 * held_out)
    for name, mask in zip(("measures", "calibrates", "teaches"), parts, strict=True):
        if len(set(truth[mask].tolist())) < 2:
            positive, negative = int(truth[mask].sum()), int((~truth[mask]).sum())
            lacks = f"the part of the examples that {name} has {positive} positive and {negative} negative texts"
            what = f"{lacks}, of {len(groups)} examples in {len(set(groups))} groups"
            hint = f"Add examples of both: with held_out={held_out:g}, {enough(held_out)} groups with both are enough."
            raise TooFewExamplesError(what, where="classify", hint=hint)
    return parts


def enough(held_out: float) -> int:
    """With so many groups, 99 of 100 splits leave neither of the two small parts empty."""
    return math.ceil(math.log(0.01 / 2) / math.log1p(-held_out))


def save(learned: Learned, facts: dict[str, Any], folder: Path) -> None:
    """Write classifier.safetensors and classifier.json, each whole or absent. `facts` are the caller's own."""
    classifier = learned.classifier
    with core_io.whole_file(folder / ARRAYS) as file:
        file.write(safetensors.save({"weights": classifier.weights, "bias": np.array([classifier.bias])}))
    known = {
        "format": FORMAT,
        "tokens": hashing.TOKENS,
        "grams": asdict(classifier.grams),
        "characters": classifier.characters,
        "strength": learned.strength,
        "quality": asdict(learned.quality),
        "telling_positive": learned.telling_positive,
        "telling_negative": learned.telling_negative,
    }
    core_io.write_json(folder / FACTS, facts | known)


def _spot(group: str, seed: int) -> float:
    """Where a group lies in [0, 1), by hash."""
    return (stable_hash(f"{seed}:{group}".encode("utf-8", "replace")) >> 16) / 2**48


def _vectors(texts: Sequence[str], grams: NgramSizes) -> Any:
    """x(d) of all texts: a sparse matrix, [texts, buckets] float32."""
    rows = []
    for batch in batched_by_size(texts, CHARACTERS_AT_ONCE):
        shape, x = (len(batch), grams.buckets), None
        for matches in hashing.hashed(batch, grams):
            buckets, numbers = hashing.present(matches, grams.buckets)
            values = (1 / np.sqrt(matches.counts[numbers])).astype(np.float32)
            matrix = sparse.csr_matrix((values, (numbers, buckets)), shape=shape)
            x = matrix if x is None else x + matrix
        rows.append(x)
    return sparse.vstack(rows, format="csr")


def _fitted(x: Any, truth: Truth, strength: float, seed: int) -> tuple[Scores, float]:
    regression = linear_model.LogisticRegression(
        C=strength, solver="liblinear", dual=True, tol=TOLERANCE, max_iter=1000, random_state=seed
    ).fit(x, truth)
    return regression.coef_[0].astype(np.float64), float(regression.intercept_[0])


def _telling(classifier: Classifier, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    The n-grams of words that, each read as a text of its own, score highest and lowest.

    So the weights of a word's characters count too. Only n-grams that stand in several texts are asked.
    """
    words = classifier.grams.words or (1, 2)
    frequency: Counter[str] = Counter()
    for text in texts:
        frequency.update(set(hashing.spelled(excerpt(text, classifier.characters), words)))
    least = max(3, RAREST_TELLING * len(texts))
    grams = sorted(gram for gram, count in frequency.items() if count >= least)
    if not grams:
        return [], []
    batches = batched_by_size(grams, CHARACTERS_AT_ONCE)
    logits = np.concatenate([logits_of(classifier, batch) for batch in batches]) - classifier.bias
    known = dict(zip(grams, logits.tolist(), strict=True))
    order = [grams[place] for place in np.argsort(-logits, kind="stable")]
    high = [gram for gram in order if known[gram] > 0 and _says_more(gram, known)]
    low = [gram for gram in reversed(order) if known[gram] < 0 and _says_more(gram, known)]
    return high[:NUM_TELLING], low[:NUM_TELLING]


def _says_more(gram: str, known: Mapping[str, float]) -> bool:
    """Whether no token of an n-gram alone says half as much; otherwise the token is reported instead."""
    tokens = gram.split(" ")
    return len(tokens) == 1 or all(2 * known.get(token, 0.0) / known[gram] < 1 for token in tokens)
