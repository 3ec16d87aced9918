import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.dedup.hashing import NgramSizes
from bloomery.data.quality import classifier, scorer, thresholds
from bloomery.data.quality.examples import TextExample
from bloomery.data.quality.thresholds import NUM_SAMPLES, PRESETS, Threshold, Thresholds, ThresholdStats
from bloomery.stages.config import Filter

GOOD, BAD = "river hill boat green walk sing bread stone light", "buy cheap win money offer free click deal now"


def text(number: int, good: bool) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(((GOOD if good else BAD) + " the of and").split(), 30))


TEXTS = [text(number, number % 2 == 0) for number in range(400)]
DOMAINS = [("web", "code", "wiki")[number % 3] for number in range(400)]
IDS = [f"d{number}" for number in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers: `quality`, that keeps high scores, and `toxicity`, whose high scores are bad."""
    root = tmp_path_factory.mktemp("classify")
    for place, (name, keep) in enumerate((("quality", "high"), ("toxicity", "low"))):
        examples = [TextExample(one, (n % 2 == 0) == (keep == "high"), str(n)) for n, one in enumerate(TEXTS[:200])]
        learned = classifier.train(examples, NgramSizes(2**12), characters=1000, held_out=0.2, seed=place)
        classifier.save(learned, {"name": name, "keep": keep, "place": place}, root / name)
    return root


def judge(folder: Path, *given: Threshold, min_score: float = 0.0, **min_scores: float) -> Thresholds:
    return thresholds.load(folder, given, min_score=min_score, min_scores=min_scores)


def test_the_combined_score_is_the_weighted_sum_of_classifier_and_heuristic(folder: Path) -> None:
    limit = Threshold(min_score=0.55, heuristic_weight=0.4, max_chars=50)
    learned = judge(folder, limit)
    looked = [one[:50] for one in TEXTS]
    plain = np.array(list(scorer.score(learned.classifiers["quality"], looked)))
    expected = 0.6 * plain + 0.4 * np.array(list(scorer.heuristic_score(looked)))
    assert learned.mixed(limit, learned.score(TEXTS)) == pytest.approx(expected)
    assert list(learned.columns) == ["score", "score_toxicity", "heuristic"]


def test_a_document_goes_for_the_first_limit_that_it_misses(folder: Path) -> None:
    given = (Threshold(classifier="toxicity", max_score=0.8), Threshold(domains=("web",), min_score=0.99))
    learned = judge(folder, *given, code=0.4)
    views = learned.score(TEXTS)
    reasons, values = ThresholdStats().apply(learned, views, DOMAINS, IDS, TEXTS)
    quality, toxic = views["quality", None], views["toxicity", None]
    for place, reason in enumerate(reasons):
        expected: tuple[str | None, float | None] = (None, None)
        if DOMAINS[place] == "web" and quality[place] < 0.99:
            expected = ("limit.quality", quality[place])
        if toxic[place] >= 0.8:
            expected = ("limit.toxicity", toxic[place])
        if DOMAINS[place] == "code" and quality[place] < 0.4:
            expected = ("classifier", quality[place])
        assert (reason, values[place]) == expected
    assert set(reasons) == {None, "limit.quality", "limit.toxicity", "classifier"}


def test_min_scores_take_the_place_of_min_score(folder: Path) -> None:
    learned = judge(folder, min_score=0.5, web=0.0)
    reasons, _ = ThresholdStats().apply(learned, learned.score(TEXTS), DOMAINS, IDS, TEXTS)
    dropped = {domain for domain, reason in zip(DOMAINS, reasons, strict=True) if reason}
    assert dropped == {"code", "wiki"}


def test_the_preset_has_the_thresholds_of_its_source() -> None:
    found = build(Filter, {"thresholds": "seed-1386"}).spelled_thresholds
    assert found == PRESETS["seed-1386"]
    least = {domain: limit.min_score for limit in found for domain in limit.domains or ()}
    assert least == {"web": 0.55, "fineweb": 0.55, "wiki": 0.45, "qa": 0.55, "stackexchange": 0.55} | {
        **{"code": 0.4, "arxiv": 0.45}
    }
    assert (found[0].classifier, found[0].max_score, found[0].max_chars) == ("toxicity", 0.5, 1000)
    assert {(limit.heuristic_weight, limit.max_chars) for limit in found[1:]} == {(0.4, 2000)}
    resolved = build(Filter, {"thresholds": "seed-1386"}).model_dump(mode="json")
    assert [limit["min_score"] for limit in resolved["thresholds"]][1:] == [0.55, 0.45, 0.55, 0.4, 0.45]
    assert build(Filter, json.loads(json.dumps(resolved))).thresholds == found


def test_what_is_recorded_does_not_depend_on_the_parts(folder: Path) -> None:
    learned = judge(
        folder, Threshold(min_score=0.6, heuristic_weight=0.2), Threshold(classifier="toxicity", max_score=0.4)
    )
    whole, together = ThresholdStats(), ThresholdStats()
    whole.apply(learned, learned.score(TEXTS), DOMAINS, IDS, TEXTS)
    for begin in range(0, 400, 37):
        part, span = ThresholdStats(), slice(begin, begin + 37)
        part.apply(learned, learned.score(TEXTS[span]), DOMAINS[span], IDS[span], TEXTS[span])
        together.add(json.loads(json.dumps(part.record())))
    assert together.record() == whole.record()


def test_samples_are_the_nearest_the_cut_of_either_side(folder: Path) -> None:
    limit = Threshold(min_score=0.6)
    learned = judge(folder, limit)
    views = learned.score(TEXTS)
    cuts = ThresholdStats()
    reasons, _ = cuts.apply(learned, views, DOMAINS, IDS, TEXTS)
    facts = cuts.record()["quality"]
    for side, dropped in (("kept", False), ("dropped", True)):
        quality = views["quality", None]
        ranked = sorted((abs(quality[n] - 0.6), IDS[n]) for n in range(400) if bool(reasons[n]) == dropped)
        assert [one["id"] for one in facts["samples"][side]] == [name for _, name in ranked[:NUM_SAMPLES]]
    for domain, tally in facts["by_domain"].items():
        here = [place for place in range(400) if DOMAINS[place] == domain]
        assert (tally["documents"], sum(tally["bins"])) == (len(here), len(here))
        assert tally["passed"] == sum(reasons[place] is None for place in here)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            Threshold(classifier="taste", min_score=0.5),
            "no classifier is named 'taste'.*Use 'quality', 'toxicity'",
        ),
        (Threshold(classifier="toxicity", min_score=0.5), "high scores of 'toxicity' mark text to drop.*max_score"),
        (Threshold(classifier="quality", max_score=0.5), "high scores of 'quality' mark text to keep.*min_score"),
    ],
)
def test_a_limit_that_no_classifier_fits_is_an_error(given: Threshold, what: str, folder: Path) -> None:
    with pytest.raises(DataError, match=f"(?s){what}"):
        judge(folder, given)


def test_a_folder_without_classifiers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no classifier"):
        judge(tmp_path)


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ({}, "exactly one of min_score and max_score"),
        ({"min_score": 0.5, "max_score": 0.5}, "exactly one of min_score and max_score"),
        ({"max_score": 0.5, "heuristic_weight": 0.4}, "use heuristic_weight with min_score"),
        ("seed", "there is no threshold preset 'seed'; use 'seed-1386'"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limit: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build(Filter, {"thresholds": limit if isinstance(limit, str) else [limit]})
