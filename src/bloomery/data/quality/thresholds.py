"""
Score thresholds by classifier and domain, mixed with the heuristic score.

A threshold is the score that a document needs. It holds for a classifier, for some domains, and for a weight of the
heuristic.

    score = (1 - heuristic_weight) · classifier + heuristic_weight · heuristic

The preset "seed-1386" has the thresholds of 1386.ai's corpus (Plasma 1.1). It first drops toxic text (0.5 and more on
the first 1,000 characters). Then it applies a threshold for each domain. The score there is 0.6 of the classifier and
0.4 of the heuristic, on the first 2,000 characters. It needs a classifier `quality` and a classifier `toxicity`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, model_validator
from typing_extensions import TypedDict

from bloomery.core.config import Config, PositiveLength, Share
from bloomery.core.errors import DataError
from bloomery.core.records import read_record
from bloomery.data.quality import scorer
from bloomery.data.quality.scorer import Classifier, Scores

LEFT_OUT = "left-out.json"
"""Next to the folders of classifiers: each classifier that was not trained, with its name and the reason."""
NUM_SAMPLES = 20
SAMPLE_CHARACTERS = 300
NUM_BINS = 20
HEURISTIC = "heuristic"

RowIndices = NDArray[np.int64]
View = tuple[str, int | None]
"""A classifier's name (or HEURISTIC) and how many of the first characters it is given; None: all."""


class NamedFacts(scorer.SavedClassifier):
    """What a classifier of the stage is, and which of the recipe's."""

    name: str
    keep: Literal["high", "low"]
    place: int


class NotLearned(TypedDict):
    """A classifier that a recipe can do without, and was not learned."""

    name: str
    why: str


class Threshold(Config):
    """A document of these domains is dropped (reason `limit.CLASSIFIER`) where it misses the threshold."""

    classifier: str = "quality"
    """Name of the classifier, from `[classify]`."""
    domains: tuple[str, ...] | None = None
    """Domains that the limit applies to. None: all."""
    min_score: Share | None = None
    """Keep documents with at least this score. For a classifier with high scores for good text."""
    max_score: Share | None = None
    """Drop documents with at least this score. For a classifier with high scores for bad text."""
    heuristic_weight: Share = 0.0
    """Weight of the heuristic score (`data/quality/scorer.py`). The classifier's score has the rest of the weight."""
    max_chars: PositiveLength | None = None
    """How many of a document's first characters the classifier scores. None: as in the classifier."""

    @model_validator(mode="after")
    def _one_threshold(self) -> "Threshold":
        if (self.min_score is None) == (self.max_score is None):
            raise ValueError("a threshold needs exactly one of min_score and max_score")
        if self.max_score is not None and self.heuristic_weight:
            raise ValueError("the heuristic is high for good text: use heuristic_weight with min_score")
        return self

    @property
    def threshold(self) -> float:
        return self.min_score if self.min_score is not None else self.max_score or 0.0


def _seed() -> tuple[Threshold, ...]:
    toxic = Threshold(classifier="toxicity", max_score=0.5, max_chars=1000)
    thresholds = {("web", "fineweb"): 0.55, ("wiki",): 0.45, ("qa", "stackexchange"): 0.55, ("code",): 0.4}
    thresholds[("arxiv",)] = 0.45
    mixed = {"heuristic_weight": 0.4, "max_chars": 2000}
    return (toxic, *(Threshold(domains=names, min_score=least, **mixed) for names, least in thresholds.items()))


PRESETS: Mapping[str, tuple[Threshold, ...]] = {"seed-1386": _seed()}


def spelled_out(limits: tuple[Threshold, ...] | str) -> tuple[Threshold, ...]:
    """The limits of a preset for its name; others as they are. Raises ValueError for a name that is none."""
    if not isinstance(limits, str):
        return limits
    if limits not in PRESETS:
        raise ValueError(f"there is no threshold preset {limits!r}; use {', '.join(map(repr, PRESETS))}")
    return PRESETS[limits]


ThresholdTable = Annotated[tuple[Threshold, ...] | str, AfterValidator(spelled_out)]
"""Limits one by one, or the name of a preset: the resolved recipe has them spelled out."""


@dataclass(frozen=True)
class Bound:
    """One threshold for some domains, with the reason that it gives."""

    reason: str
    limit: Threshold
    but: frozenset[str] = frozenset()
    """Domains that have another bound instead."""

    def holds_for(self, domain: str) -> bool:
        return domain not in self.but and (self.limit.domains is None or domain in self.limit.domains)


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Classifiers by name, in the order of the recipe, with which side each keeps, and the bounds to apply in turn."""

    classifiers: Mapping[str, Classifier]
    keep: Mapping[str, str]
    bounds: tuple[Bound, ...]

    @property
    def columns(self) -> dict[str, View]:
        """Columns of scored documents: `score` (first classifier), `score_NAME` (other classifiers) and `heuristic`."""
        views: dict[str, View] = {}
        for index, name in enumerate(self.classifiers):
            own = [bound.limit.max_chars for bound in self.bounds if bound.limit.classifier == name]
            views["score" if index == 0 else f"score_{name}"] = (name, own[0] if own else None)
        if mixed := [bound.limit.max_chars for bound in self.bounds if bound.limit.heuristic_weight]:
            views[HEURISTIC] = (HEURISTIC, mixed[0])
        return views

    def score(self, texts: Sequence[str]) -> dict[View, Scores]:
        """Every view of the texts that a column or a bound asks for."""
        views = list(self.columns.values())
        for bound in self.bounds:
            views.append((bound.limit.classifier, bound.limit.max_chars))
            if bound.limit.heuristic_weight:
                views.append((HEURISTIC, bound.limit.max_chars))
        return {view: self._viewed(texts, *view) for view in dict.fromkeys(views)}

    def _viewed(self, texts: Sequence[str], name: str, characters: int | None) -> Scores:
        looked = texts if characters is None else [text[:characters] for text in texts]
        scores = scorer.heuristic_score(looked) if name == HEURISTIC else scorer.score(self.classifiers[name], looked)
        return np.fromiter(scores, np.float64, len(texts))

    def mixed(self, limit: Threshold, views: Mapping[View, Scores]) -> Scores:
        """The score that a limit looks at."""
        scores = views[limit.classifier, limit.max_chars]
        if limit.heuristic_weight:
            share = limit.heuristic_weight
            scores = (1 - share) * scores + share * views[HEURISTIC, limit.max_chars]
        return scores


def load(folder: Path, limits: Sequence[Threshold], *, min_score: float, min_scores: Mapping[str, float]) -> Thresholds:
    """
    The classifiers below `folder`, and all bounds: those of `min_score` (of the first classifier, reason `classifier`)
    before the limits.

    Without limits there may be no classifier, where LEFT_OUT says why. Raises DataError for a limit whose classifier is
    not there, or whose threshold is for the other side.
    """
    files = folder.glob(f"*/{scorer.FACTS}")
    records = [read_record(file, NamedFacts, error=DataError, fix=scorer.AGAIN) for file in files]
    facts = sorted(records, key=lambda record: record["place"])
    left_out: list[NotLearned] = []
    if (folder / LEFT_OUT).exists():
        left_out = read_record(folder / LEFT_OUT, list[NotLearned], error=DataError, fix=scorer.AGAIN)
    if left_out and (limits or min_score or min_scores):
        what = f"a threshold needs scores, but {left_out[0]['name']!r} was not trained: {left_out[0]['why']}"
        raise DataError(what, where="filter", hint="Fetch more documents, or remove the thresholds.")
    if not facts and not left_out:
        raise DataError("holds no classifier", where=str(folder), hint="Run the stage classify again.")
    keep = {one["name"]: one["keep"] for one in facts}
    first = facts[0]["name"] if facts else ""
    bounds = [Bound(f"limit.{limit.classifier}", limit) for limit in limits]
    plain = [Threshold(classifier=first, domains=(name,), min_score=least) for name, least in min_scores.items()]
    elsewhere = [Threshold(classifier=first, min_score=min_score)] if min_score else []
    rest = [Bound("classifier", limit, frozenset(min_scores)) for limit in elsewhere]
    bounds = [*(Bound("classifier", limit) for limit in plain), *rest, *bounds]
    for bound in bounds:
        _check(bound, keep)
    return Thresholds({name: scorer.load(folder / name) for name in keep}, keep, tuple(bounds))


def _check(bound: Bound, keep: Mapping[str, str]) -> None:
    name = bound.limit.classifier
    if name not in keep:
        hint = f"Use {', '.join(map(repr, keep))}, or add it to [[classify.classifiers]]."
        raise DataError(f"no classifier is named {name!r}", where="filter.thresholds", hint=hint)
    if keep[name] == "low" and bound.limit.min_score is not None:
        where = "filter.min_score" if bound.reason == "classifier" else "filter.thresholds"
        hint = "Use max_score instead, in [[filter.thresholds]]."
        raise DataError(f"high scores of {name!r} mark text to drop", where=where, hint=hint)
    if keep[name] == "high" and bound.limit.max_score is not None:
        hint = "Use min_score instead, in [[filter.thresholds]]."
        raise DataError(f"high scores of {name!r} mark text to keep", where="filter.thresholds", hint=hint)


@dataclass
class ThresholdStats:
    """Effect of the limits: for each classifier, what passed in each domain, and samples near the threshold."""

    by_domain: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    def apply(
        self,
        thresholds: Thresholds,
        views: Mapping[View, Scores],
        domains: Sequence[str],
        ids: Sequence[str],
        texts: Sequence[str],
    ) -> tuple[list[str | None], list[float | None]]:
        """Reason and value for each document that a bound drops, None for the others; and all of it counted."""
        reasons: list[str | None] = [None] * len(texts)
        values: list[float | None] = [None] * len(texts)
        passes = {name: np.ones(len(texts), np.bool_) for name in thresholds.classifiers}
        for bound in thresholds.bounds:
            name, threshold = bound.limit.classifier, bound.limit.threshold
            here = np.flatnonzero([bound.holds_for(domain) for domain in domains])
            scores = thresholds.mixed(bound.limit, views)
            low = scores < threshold
            broken = low if bound.limit.min_score is not None else ~low
            passes[name][here] &= ~broken[here]
            for index in here[broken[here]].tolist():
                if reasons[index] is None:
                    reasons[index], values[index] = bound.reason, float(scores[index])
            if threshold > 0:
                self._near(name, threshold, scores, here, broken, (domains, ids, texts))
        for column, (name, characters) in thresholds.columns.items():
            if column != HEURISTIC:
                self._count(name, domains, passes[name], views[name, characters])
        return reasons, values

    def _count(self, name: str, domains: Sequence[str], passes: NDArray[np.bool_], scores: Scores) -> None:
        bins = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1).tolist()
        known = self.by_domain.setdefault(name, {})
        for domain, passed, spot in zip(domains, passes.tolist(), bins, strict=True):
            tally = known.setdefault(domain, {"documents": 0, "passed": 0, "bins": [0] * NUM_BINS})
            tally["documents"] += 1
            tally["passed"] += passed
            tally["bins"][spot] += 1

    def _near(
        self,
        name: str,
        threshold: float,
        scores: Scores,
        here: RowIndices,
        broken: NDArray[np.bool_],
        columns: tuple[Sequence[str], Sequence[str], Sequence[str]],
    ) -> None:
        """Keep the documents nearest the threshold on both sides, with the start of their text."""
        domains, ids, texts = columns
        for side, chosen in (("kept", here[~broken[here]]), ("dropped", here[broken[here]])):
            nearest = chosen[np.argsort(np.abs(scores[chosen] - threshold), kind="stable")[: 2 * NUM_SAMPLES]]
            samples = [
                {
                    **{"id": ids[index], "domain": domains[index], "value": float(scores[index]), "cut": threshold},
                    "text": texts[index][:SAMPLE_CHARACTERS],
                }
                for index in nearest.tolist()
            ]
            sides = self.samples.setdefault(name, {"kept": [], "dropped": []})
            sides[side] = _nearest([*sides[side], *samples])

    def add(self, record: Mapping[str, Any]) -> None:
        """Add what `record` gave for another part."""
        for name, facts in record.items():
            for domain, counts in facts["by_domain"].items():
                known = self.by_domain.setdefault(name, {})
                tally = known.setdefault(domain, {"documents": 0, "passed": 0, "bins": [0] * NUM_BINS})
                tally["documents"] += counts["documents"]
                tally["passed"] += counts["passed"]
                tally["bins"] = [one + other for one, other in zip(tally["bins"], counts["bins"], strict=True)]
            sides = self.samples.setdefault(name, {"kept": [], "dropped": []})
            for side, samples in facts["samples"].items():
                sides[side] = _nearest([*sides[side], *samples])

    def record(self) -> dict[str, Any]:
        """JSON data by classifier: `by_domain` (documents, passed, bins of scores) and `samples` (kept, dropped)."""
        return {
            name: {
                "by_domain": dict(sorted(self.by_domain[name].items())),
                "samples": self.samples.get(name, {"kept": [], "dropped": []}),
            }
            for name in sorted(self.by_domain)
        }


def _nearest(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The NUM_SAMPLES samples nearest their threshold, ties by id. A document near two thresholds occurs once."""
    ranked = sorted(samples, key=lambda sample: (abs(sample["value"] - sample["cut"]), sample["id"]))
    once: dict[str, dict[str, Any]] = {}
    for sample in ranked:
        once.setdefault(sample["id"], sample)
    return list(once.values())[:NUM_SAMPLES]
