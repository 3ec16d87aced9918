"""The part of a report about classifiers: how well each tells good text from bad, and what it does to every domain."""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Bar, Curve, Html, count, decimal, number, percent, tag
from bloomery.evaluation.pieces import NOTHING, Fact, Report, at, counted, facts, folded, listed, named, note, sequence
from bloomery.evaluation.pieces import text as shown

SIDES = ("high", "low")


def classifiers(report: Report) -> list[object]:
    """Every classifier of the run in turn, those that were left out first; nothing where there is none."""
    missing = listed(report, "corpus", "classify", "left_out")
    parts: list[object] = [note(f"{shown(one.get('name'))} was left out: {shown(one.get('why'))}.") for one in missing]
    for one in listed(report, "corpus", "classify", "classifiers"):
        cut = named(report, "corpus", "filter", "scores", shown(one.get("name")))
        parts += [tag("h3", title(one)), *quality(one), *telling(one), *passing(cut), *samples(one, cut)]
    return parts


def title(one: Mapping[str, Any]) -> str:
    learned = {"contrast": "from damaged copies", "labeled": "from labels"}.get(shown(one.get("kind")), "")
    side = {"high": "high scores are kept", "low": "low scores are kept"}.get(shown(one.get("keep")), "")
    return f"{shown(one.get('name'))}: " + ", ".join(
        part for part in (f"learned {learned}" if learned else "", side) if part
    )


def quality(one: Mapping[str, Any]) -> list[object]:
    cut = decimal(one.get("threshold"), 2)
    known: list[Fact] = [("Area under the ROC curve", decimal(one.get("auc"), 4))]
    known += [(f"{name} at {cut}", percent(one.get(name.lower()))) for name in ("Precision", "Recall")]
    known.append(("Calibration error", decimal(one.get("calibration_error"), 4)))
    known.append(("Brier score", decimal(one.get("brier"), 4)))
    known += counted(one, examples="Examples", positives="of them positive", held_out="Held out to measure")
    caught = [Bar(kind, number(share), percent(share)) for kind, share in named(one, "caught").items()]
    found = charts.bars(
        "Held-out bad text that it finds, by kind", caught, axis=f"share that scores below {cut}", form=percent, top=1.0
    )
    return [facts(known), tag("div", reliability(one), trade_off(one), class_="small"), found]


def reliability(one: Mapping[str, Any]) -> Html:
    """What share is positive among texts of about one score; on the diagonal, a score means what it says."""
    points = [(number(found.get("score")), number(found.get("positive"))) for found in listed(one, "bins")]
    drawn = [
        Curve("perfect", [(0.0, 0.0), (1.0, 1.0)] if points else [], "faint"),
        Curve("measured", [(x, y) for x, y in points if x is not None and y is not None]),
    ]
    return charts.curves("Calibration", drawn, x_axis="mean score", y_axis="share that is positive", from_zero=True)


def trade_off(one: Mapping[str, Any]) -> Html:
    cuts = listed(one, "cuts")

    def line(key: str) -> list[tuple[float, float]]:
        points = [(number(cut.get("threshold")), number(cut.get(key))) for cut in cuts]
        return [(x, y) for x, y in points if x is not None and y is not None]

    drawn = [Curve("precision", line("precision")), Curve("recall", line("recall"), "faint")]
    return charts.curves("Precision and recall", drawn, x_axis="cut", y_axis="share", from_zero=True)


def telling(one: Mapping[str, Any]) -> list[object]:
    """The n-grams of either side, those of text worth keeping first."""
    keys = ("telling_positive", "telling_negative")
    titles = ("Speaks for keeping", "Speaks for dropping")
    parts: list[object] = []
    for title, key in zip(titles, keys if one.get("keep") != "low" else keys[::-1], strict=True):
        grams = [tag("li", shown(gram).replace("\n", "⏎")) for gram in sequence(one, key)]
        parts += [tag("h4", title), tag("ul", *grams, class_="chips") if grams else NOTHING]
    return parts


def passing(cut: Mapping[str, Any]) -> list[object]:
    """The share of each domain that passes the limits, and how its scores lie."""
    rows = []
    for domain, tally in named(cut, "by_domain").items():
        passed, whole = number(at(tally, "passed")), number(at(tally, "documents"))
        share = passed / whole if passed is not None and whole else None
        rows.append(Bar(domain, share, f"{percent(share)} of {count(whole)}"))
    chart = charts.bars(
        "Passes its limits, by domain", rows, axis="share of the documents of a domain", form=percent, top=1.0
    )
    return [chart] if rows else []


def samples(one: Mapping[str, Any], cut: Mapping[str, Any]) -> list[object]:
    parts: list[object] = []
    for title, side in (("Just kept", "kept"), ("Just dropped", "dropped")):
        cards = [card(found) for found in listed(cut, "samples", side)]
        if cards:
            parts += [tag("h4", f"{title}: the {len(cards)} nearest the cut"), folded(cards, "cards")]
    return parts


def card(found: Mapping[str, Any]) -> Html:
    seen = f"{decimal(found.get('value'))} against {decimal(found.get('cut'), 2)}"
    head = tag("p", tag("b", shown(found.get("domain"))), tag("span", seen), class_="tagged")
    return tag("article", head, tag("p", shown(found.get("text")), class_="quote", dir="auto"), class_="card")
