"""
How good a classifier's probabilities are: Platt scaling, the ROC's area, precision and recall, reliability bins.

Sources: Platt 1999, Probabilistic Outputs for Support Vector Machines; Naeini et al. 2015 for the expected calibration
error (the mean over bins of |mean score - share of positives|, weighted by how many texts a bin has).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from bloomery.data.scorer import Scores

NUM_BINS = 10
GRID = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Cuts at which precision and recall are told."""

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
    """Share of held-out negatives of each kind that score below `threshold`."""


def platt(logits: Scores, truth: Truth) -> tuple[float, float]:
    """Slope and offset that make logits calibrated. Targets are Platt's (n + 1) / (n + 2), so that they stay finite."""
    positive = (truth.sum() + 1) / (truth.sum() + 2)
    negative = 1 / ((~truth).sum() + 2)
    target = np.where(truth, positive, negative)
    both = np.concatenate([logits, logits])[:, None]
    labels = np.repeat([True, False], len(logits))
    fitted = LogisticRegression(C=1e6, max_iter=1000).fit(both, labels, np.concatenate([target, 1 - target]))
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
    """The area under the ROC curve."""
    return float(roc_auc_score(truth, scores))


def _bins(scores: Scores, truth: Truth) -> list[Bin]:
    places = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    found = []
    for place in range(NUM_BINS):
        here = places == place
        some = bool(here.any())
        score, positive = (float(scores[here].mean()), float(truth[here].mean())) if some else (None, None)
        found.append(Bin(place / NUM_BINS, (place + 1) / NUM_BINS, int(here.sum()), score, positive))
    return found


def _cut(scores: Scores, truth: Truth, threshold: float) -> Cut:
    reached = scores >= threshold
    precision = float(truth[reached].mean()) if reached.any() else None
    return Cut(threshold, precision, float(reached[truth].mean()), float(reached.mean()))


def _caught(low: Truth, truth: Truth, kinds: Sequence[str]) -> dict[str, float]:
    found = {}
    for kind in sorted(set(kinds) - {""}):
        rows = ~truth & np.array([other == kind for other in kinds])
        if rows.any():
            found[kind] = float(low[rows].mean())
    return found
