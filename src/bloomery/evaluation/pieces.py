"""
What the sections of a report are made of: values of its data, however odd, and small pieces of the page.

What is not there is None, and is shown as a dash.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bloomery.evaluation import charts, shown
from bloomery.evaluation.charts import DASH, Bar, Html, count, join, number, percent, tag

Report = Mapping[str, Any]
Fact = tuple[str, object]
Section = Callable[[Report], Sequence[object]]

SHOWN_AT_ONCE = 6
"""Samples of a kind before the rest is folded away."""


def at(data: Any, *path: str) -> Any:
    """The value at a path of keys, or None where the path breaks off."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def named(data: Any, *path: str) -> Mapping[str, Any]:
    found = at(data, *path)
    return found if isinstance(found, Mapping) else {}


def sequence(data: Any, *path: str) -> list[Any]:
    found = at(data, *path)
    return list(found) if isinstance(found, list | tuple) else []


def listed(data: Any, *path: str) -> list[Mapping[str, Any]]:
    return [one for one in sequence(data, *path) if isinstance(one, Mapping)]


def text(value: Any) -> str:
    return DASH if value is None else str(value)


def scored(metric: str, score: Any) -> str:
    """A score with its interval, as it is shown in a terminal, and a dash where it is none."""
    fits = isinstance(score, Mapping) and all(number(score.get(name)) is not None for name in ("value", "low", "high"))
    return shown.shown(metric, score) if fits else DASH


NOTHING = tag("p", f"{DASH} Nothing was recorded.", class_="missing")


def facts(pairs: Sequence[Fact], look: str = "facts") -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_=look)


def counted(data: Mapping[str, Any], **names: str) -> list[Fact]:
    """`tokens="Tokens to train on"` shows `data["tokens"]` as a count, under that name."""
    return [(name, count(data.get(key))) for key, name in names.items()]


def note(*sentences: object) -> Html:
    return tag("p", *sentences, class_="note")


def folded(cards: Sequence[Html], look: str) -> Html:
    """The first cards, and a fold with the rest."""
    first, rest = cards[:SHOWN_AT_ONCE], cards[SHOWN_AT_ONCE:]
    summary = tag("summary", f"{len(rest)} more")
    more = tag("details", summary, tag("div", *rest, class_=look)) if rest else None
    return join(tag("div", *first, class_=look), more)


def tallied(title: str, reasons: Mapping[str, Any], whole: float | None, axis: str) -> Html | None:
    """Bars of counts, the largest first, each with its share of the whole."""
    rows = []
    for reason, value in sorted(reasons.items(), key=lambda pair: (-(number(pair[1]) or 0.0), pair[0])):
        n = number(value)
        rows.append(Bar(reason, n, count(n) + (f" ({percent(n / whole)})" if whole and n is not None else "")))
    return charts.bars(title, rows, axis=axis)


def tile(name: str, value: str, below: str, picture: Html | None = None, look: str = "tile") -> Html:
    big = tag("p", value, class_="big")
    return tag("div", tag("h3", name), big, picture, tag("p", below, class_="note"), class_=look)


def cell(label: str, value: Any, form: charts.Format, top: float, quiet: bool) -> Html:
    """A number with its bar, for a table."""
    return join(tag("span", form(value)), charts.bar(Bar(label, number(value), form(value), quiet=quiet), top))
