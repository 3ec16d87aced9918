"""
A classifier of documents: hashed n-grams of words and characters, logistic regression, a calibrated probability.

    p(positive | d) = σ(a · (w · x(d)) + b)        x(d) = sum over families of present / sqrt(number of n-grams)

A family is the n-grams of words or those of characters; `present` is 1 in each bucket that one of d's n-grams is hashed
to, however often, so that text which repeats itself has a shorter x: against damaged copies the area under the ROC
curve was 0.903, with counts 0.853, with counts scaled to a norm of 1 0.873. w comes from scikit-learn's
LogisticRegression (liblinear's dual coordinate descent), its penalty from the examples that calibrate, a and b from
Platt scaling on the same; quality is measured on others still. The root takes out most of a document's length, but not
all of it: examples of both classes should be about equally long.

Sources: Joulin et al. 2017, Bag of Tricks (arXiv 1607.01759) for hashed n-grams; Fan et al. 2008, LIBLINEAR.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors
from scipy.sparse import csr_matrix, vstack
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.data import ngrams, scorer
from bloomery.data.calibration import Quality, Truth, area, measure, platt
from bloomery.data.examples import Example, excerpt
from bloomery.data.ngrams import Grams
from bloomery.data.scorer import ARRAYS, FACTS, FORMAT, Classifier, Scores, logits_of

STRENGTHS = (1.0, 3.0, 10.0)
"""Inverses of the l2 penalty that are tried. Past the last, dual coordinate descent takes hundreds of rounds."""
TOLERANCE = 0.01
"""Of the gradient: at a hundredth of it the area under the curve was the same in four digits, in twice the time."""
NUM_TELLING = 20
TELLING_DOCUMENTS = 3000
RAREST_TELLING = 0.002
"""Share of those documents that an n-gram stands in at least, to be told."""


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
    examples: Sequence[Example],
    grams: Grams,
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
    # One thread: the last digits of BLAS follow the number of threads, and beside other work two took 7 times as long.
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
    for name, part in zip(("measures", "calibrates", "teaches"), parts, strict=True):
        if len(set(truth[part].tolist())) < 2:
            positive, negative = int(truth[part].sum()), int((~truth[part]).sum())
            lacks = f"the part of the examples that {name} has {positive} positive and {negative} negative texts"
            what = f"{lacks}, of {len(groups)} examples in {len(set(groups))} groups"
            cure = f"Give more of both: with held_out={held_out:g}, {enough(held_out)} groups with both are enough."
            raise TooFewExamplesError(what, where="classify", cure=cure)
    return parts


def enough(held_out: float) -> int:
    """With so many groups, 99 of 100 splits leave neither of the two small parts empty."""
    return math.ceil(math.log(0.01 / 2) / math.log1p(-held_out))


def save(learned: Learned, facts: dict[str, Any], folder: Path) -> None:
    """Write classifier.safetensors and classifier.json, each whole or absent. `facts` are the caller's own."""
    classifier = learned.classifier
    with files.whole_file(folder / ARRAYS) as file:
        file.write(safetensors.save({"weights": classifier.weights, "bias": np.array([classifier.bias])}))
    known = {
        "format": FORMAT,
        "tokens": ngrams.TOKENS,
        "grams": asdict(classifier.grams),
        "characters": classifier.characters,
        "strength": learned.strength,
        "quality": asdict(learned.quality),
        "telling_positive": learned.telling_positive,
        "telling_negative": learned.telling_negative,
    }
    files.write_json(folder / FACTS, facts | known)


def _spot(group: str, seed: int) -> float:
    """Where a group lies in [0, 1), by hash."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}".encode("utf-8", "replace")).digest()[:6]) / 2**48


def _vectors(texts: Sequence[str], grams: Grams) -> Any:
    """x(d) of all texts: a sparse matrix, [texts, buckets] float32."""
    rows = []
    for batch in ngrams.batches(texts):
        shape, x = (len(batch), grams.buckets), None
        for found in ngrams.hashed(batch, grams):
            buckets, numbers = ngrams.present(found, grams.buckets)
            values = (1 / np.sqrt(found.counts[numbers])).astype(np.float32)
            part = csr_matrix((values, (numbers, buckets)), shape=shape)
            x = part if x is None else x + part
        rows.append(x)
    return vstack(rows, format="csr")


def _fitted(x: Any, truth: Truth, strength: float, seed: int) -> tuple[Scores, float]:
    regression = LogisticRegression(
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
        frequency.update(set(ngrams.spelled(excerpt(text, classifier.characters), words)))
    least = max(3, RAREST_TELLING * len(texts))
    grams = sorted(gram for gram, count in frequency.items() if count >= least)
    if not grams:
        return [], []
    logits = np.concatenate([logits_of(classifier, batch) for batch in ngrams.batches(grams)]) - classifier.bias
    known = dict(zip(grams, logits.tolist(), strict=True))
    order = [grams[place] for place in np.argsort(-logits, kind="stable")]
    high = [gram for gram in order if known[gram] > 0 and _says_more(gram, known)]
    low = [gram for gram in reversed(order) if known[gram] < 0 and _says_more(gram, known)]
    return high[:NUM_TELLING], low[:NUM_TELLING]


def _says_more(gram: str, known: Mapping[str, float]) -> bool:
    """Whether none of the tokens of an n-gram says half as much by itself: else the token is told instead."""
    tokens = gram.split(" ")
    return len(tokens) == 1 or all(2 * known.get(token, 0.0) / known[gram] < 1 for token in tokens)
