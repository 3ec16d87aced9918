"""
Numbers, tables, heat maps and charts as HTML and inline SVG, with the style sheet of a page.

A page uses no scripts and no library, and loads nothing.

All text goes through `tag`, which escapes everything that is not already `Html`. Charts have no fixed size. Their
layout uses shares of the available width. So letters stay as large as the text around them, on a phone and on paper.

The helpers for report sections read any value of the data, however odd. A missing value is None, and appears as a dash.

A heat map shows a table of numbers by rows and columns. Larger numbers are stronger, in steps of equal ratio.

The style sheet has colors for light and dark mode, and rules for phones and paper. Every page contains it, so that
a page needs nothing else.

Everything is in one file because every report page uses all of it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

from bloomery.evaluation import stats

SMALLEST, LARGEST = 1e-290, 1e300
"""Of numbers on an axis: below, they are drawn as zero; beyond, at its end. Shares of an axis stay finite."""

NOT_TEXT = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What neither HTML nor XML can hold."""

DASH = "—"
"""What is shown for a number that is not there."""

Points = Sequence[tuple[float, float]]
ValueFormat = Callable[[Any], str]


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` is written class, `aria_label` aria-label; None is left out; plain text is escaped."""
    named = {key.strip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{_escaped(value)}"' for key, value in named.items())
    return Html(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*parts: object) -> Html:
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts if part is not None))


def _escaped(value: object) -> str:
    return escape(NOT_TEXT.sub("\ufffd", str(value)))


# --- numbers for people --------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else None


def count(value: Any) -> str:
    """1234567 -> 1,234,567."""
    return DASH if (amount := number(value)) is None else f"{amount:,.0f}"


def decimal(value: Any, digits: int = 3) -> str:
    """1.25 -> 1.250."""
    return DASH if (amount := number(value)) is None else f"{amount:,.{digits}f}"


def percent(value: Any) -> str:
    """0.635 -> 63.5%. Only nothing is 0%, and only all is 100%."""
    if (share := number(value)) is None:
        return DASH
    if 0 < share < 0.0005 or 0.9995 <= share < 1:
        return "<0.1%" if share < 0.5 else ">99.9%"
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def size(value: Any) -> str:
    """Bytes: 1234567 -> 1.2 MB."""
    if (num_bytes := number(value)) is None:
        return DASH
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def duration(value: Any) -> str:
    """Seconds: 754 -> 12 min 34 s."""
    if (total_seconds := number(value)) is None:
        return DASH
    if total_seconds < 60:
        return f"{total_seconds:.1f} s"
    minutes, seconds = divmod(round(total_seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def short(value: Any) -> str:
    """A number in as few letters as it takes: 1500000 -> 1.5M, 0.00002 -> 2e-5."""
    if (amount := number(value)) is None:
        return DASH
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(amount) >= limit:
            return f"{amount / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{amount:,.0f}" if abs(amount) >= 1000 else re.sub(r"e-0", "e-", f"{amount:.4g}")


# --- tables and bars -----------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """A table. The first column names the row; the others are set flush right."""
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll", tabindex="0")


@dataclass(frozen=True)
class Bar:
    label: str
    value: float | None
    shown: str
    """The value as text, next to the bar."""
    mark: float | None = None
    """Where a line across the bar stands, for what was asked or what others reach."""
    quiet: bool = False
    """Whether it is only there to compare with."""


def bar(row: Bar, top: float, grid: Sequence[float] = ()) -> Html:
    lines = [tag("line", class_="grid", x1=_share(at, top), x2=_share(at, top), y1="0", y2="100%") for at in grid]
    fill = mark = None
    if row.value is not None:
        kind = "bar-fill quiet" if row.quiet else "bar-fill"
        fill = tag("rect", class_=kind, width=_share(row.value, top), y="15%", height="70%", rx="2")
    if row.mark is not None:
        mark = tag("line", class_="mark", x1=_share(row.mark, top), x2=_share(row.mark, top), y1="0", y2="100%")
    label = f"{row.label}: {row.shown}"
    return tag("svg", *lines, fill, mark, class_="bar", role="img", aria_label=label)


def bars(
    title: str, rows: Sequence[Bar], *, axis: str, form: ValueFormat = short, top: float | None = None
) -> Html | None:
    """Horizontal bars from 0, in the order given, over an axis with round numbers. Values must not be negative."""
    if not rows:
        return None
    known = [value for row in rows for value in (row.value, row.mark) if value is not None]
    marks = ticks(0.0, top or max(*known, 0.0) or 1.0, 4) if known else [0.0]
    top = top or marks[-1] or 1.0
    listed = [
        tag("div", tag("span", row.label, class_="name"), bar(row, top, marks), tag("span", row.shown, class_="value"))
        for row in rows
    ]
    numbers = [tag("text", form(at), class_="tick", x=_share(at, top), y="1em") for at in marks]
    numbers.append(tag("text", axis, class_="axis", x="50%", y="2.5em"))
    scale = tag("div", tag("svg", *numbers, class_="scale", aria_hidden="true")) if known else None
    return tag("figure", tag("figcaption", title), *listed, scale, class_="bars", aria_label=f"{title}, in {axis}")


def interval(low: float, middle: float, high: float) -> Html:
    """A share with its interval of confidence, on a line from 0 to 100%."""
    label = f"{percent(middle)}, with an interval from {percent(low)} to {percent(high)}"
    ends = [
        tag("line", class_="grid", x1=_share(at, 1.0), x2=_share(at, 1.0), y1="0", y2="16") for at in (0.0, 0.5, 1.0)
    ]
    names = [tag("text", percent(at), class_="tick", x=_share(at, 1.0), y="30") for at in (0.0, 0.5, 1.0)]
    parts = [
        tag("line", class_="grid", x1="0", x2="100%", y1="8", y2="8"),
        tag("line", class_="reach", x1=_share(low, 1.0), x2=_share(high, 1.0), y1="8", y2="8"),
        tag("circle", class_="middle", cx=_share(middle, 1.0), cy="8", r="5"),
    ]
    return tag("svg", *ends, *names, *parts, class_="interval", role="img", aria_label=label)


# --- curves --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    look: str = "strong"
    """"strong" or "faint" for a line, "dots" for points on their own."""


def smoothed(points: Points, reach: int) -> list[tuple[float, float]]:
    """The mean over each point and `reach` others on either side, where there are so many."""
    wide = 2 * reach + 1
    sums = [0.0, *accumulate(y for _, y in points)]
    return [(points[n + reach][0], (sums[n + wide] - sums[n]) / wide) for n in range(len(points) - wide + 1)]


def curves(title: str, drawn: Sequence[Curve], *, x_axis: str, y_axis: str, from_zero: bool = False) -> Html:
    """Lines and points over one pair of axes. Curves without points are left out; without any, there is no chart."""
    drawn = [curve for curve in drawn if curve.points]
    if not drawn:
        return tag("p", f"{title}: {DASH}", class_="missing")
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points] + ([0.0] if from_zero else [])
    left, right = (min(max(end, -LARGEST), LARGEST) for end in (min(0.0, *xs), max(xs)))
    rows, columns = ticks(min(ys), max(ys), 4), ticks(left, right, 4)
    if right - left > SMALLEST:
        columns = [at for at in columns if left <= at <= right]
    else:
        left, right = 0.0, 1.0
    frame = _Frame(left, right, rows[0], rows[-1])
    shapes = [shape for curve in drawn for shape in frame.draw(curve)]
    label = f"{title}. " + " ".join(_told(curve, x_axis) for curve in drawn)
    plot = tag("svg", *frame.axes(columns, rows, x_axis, y_axis), *shapes, class_="plot", role="img", aria_label=label)
    keys = [tag("span", tag("i", class_=curve.look), curve.name, class_="key") for curve in drawn]
    legend = tag("p", *keys, class_="legend") if len(drawn) > 1 else None
    return tag("figure", tag("figcaption", title), legend, plot, class_="curves")


def _told(curve: Curve, x_axis: str) -> str:
    (x0, y0), (x1, y1) = curve.points[0], curve.points[-1]
    return f"{curve.name}: {short(y0)} at {x_axis} {short(x0)}, {short(y1)} at {x_axis} {short(x1)}."


@dataclass(frozen=True)
class _Frame:
    """From data to shares of the plot's width and height."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return _within((value - self.left) / (self.right - self.left))

    def y(self, value: float) -> float:
        return _within((self.top - value) / (self.top - self.bottom))

    def draw(self, curve: Curve) -> list[Html]:
        if curve.look == "dots" or len(curve.points) == 1:
            return [
                tag("circle", tag("title", f"{short(x)}: {y:.4g}"), class_="dot", cx=_part(px), cy=_part(py), r="3.5")
                for x, y in curve.points
                for px, py in [(self.x(x), self.y(y))]
            ]
        path = " ".join(f"{self.x(x) * 1000:.1f},{self.y(y) * 1000:.1f}" for x, y in curve.points)
        line = tag("polyline", class_=curve.look, points=path)
        return [tag("svg", line, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%")]

    def axes(self, columns: Sequence[float], rows: Sequence[float], x_axis: str, y_axis: str) -> list[Html]:
        parts = []
        for at in rows:
            y = _part(self.y(at))
            parts.append(tag("line", class_="grid", x1="0", x2="100%", y1=y, y2=y))
            parts.append(tag("text", short(at), class_="tick row", x="0", y=y, dx="-8", dy="0.32em"))
        for at in columns:
            x = _part(self.x(at))
            parts.append(tag("line", class_="grid", x1=x, x2=x, y1="100%", y2="100%", stroke_linecap="round"))
            parts.append(tag("text", short(at), class_="tick", x=x, y="100%", dy="1.5em"))
        parts.append(tag("text", x_axis, class_="axis", x="50%", y="100%", dy="3em"))
        parts.append(tag("text", y_axis, class_="axis first", x="0", y="0", dx="-4.5em", dy="-1em"))
        return parts


def ticks(low: float, high: float, num_steps: int) -> list[float]:
    """
    About `num_steps` steps of 1, 2, 2.5 or 5 times a power of ten, from `low` or below to `high` or above, of finite
    numbers. The first and the last always differ. Numbers so close that a float cannot hold the steps between them are
    one number, and around one number lies half of it on both sides.
    """
    low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
    size = max(abs(low), abs(high))
    if high - low <= max(size * 1e-9, SMALLEST):
        around = size / 2 if size > SMALLEST else 1.0
        low, high = low - around, high + around
    rough = (high - low) / num_steps
    power = math.floor(math.log10(rough))
    step = next(found for factor in (1, 2, 2.5, 5, 10) if (found := float(f"{factor}e{power}")) >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def _share(value: float, top: float) -> str:
    return _part(_within(value / top if top > SMALLEST else 0.0))


def _within(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def _part(share: float) -> str:
    return f"{share * 100:.2f}%"


Report = Mapping[str, Any]
Tile = tuple[str, object]
Section = Callable[[Report], Sequence[object]]

SHOWN_AT_ONCE = 6
"""Samples of a kind before the rest is folded away."""


def at(data: Any, *path: str) -> Any:
    """The value at a path of keys, or None where the path breaks off."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def named(data: Any, *path: str) -> Mapping[str, Any]:
    value = at(data, *path)
    return value if isinstance(value, Mapping) else {}


def sequence(data: Any, *path: str) -> list[Any]:
    value = at(data, *path)
    return list(value) if isinstance(value, list | tuple) else []


def listed(data: Any, *path: str) -> list[Mapping[str, Any]]:
    return [one for one in sequence(data, *path) if isinstance(one, Mapping)]


def text(value: Any) -> str:
    return DASH if value is None else str(value)


def scored(metric: str, score: Any) -> str:
    """A score with its interval, as it is shown in a terminal, and a dash where it is none."""
    fits = isinstance(score, Mapping) and all(number(score.get(name)) is not None for name in ("value", "low", "high"))
    return stats.shown(metric, score) if fits else DASH


NOTHING = tag("p", f"{DASH} Nothing was recorded.", class_="missing")


def facts(pairs: Sequence[Tile], look: str = "facts") -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_=look)


def counted(data: Mapping[str, Any], **names: str) -> list[Tile]:
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
    return bars(title, rows, axis=axis)


def tile(name: str, value: str, below: str, picture: Html | None = None, look: str = "tile") -> Html:
    big = tag("p", value, class_="big")
    return tag("div", tag("h3", name), big, picture, tag("p", below, class_="note"), class_=look)


def cell(label: str, value: Any, form: ValueFormat, top: float, quiet: bool) -> Html:
    """A number with its bar, for a table."""
    return join(tag("span", form(value)), bar(Bar(label, number(value), form(value), quiet=quiet), top))


PALEST = 0.06
LABELS = 16
"""Rows that are named, at most."""

TableRow = tuple[str, Sequence[float | None]]


def heat(title: str, rows: Sequence[TableRow], columns: Sequence[float], *, x_axis: str, unit: str) -> Html:
    """Rows from top to bottom; each holds a number, or None, for every column. Without a number there is no picture."""
    known = [value for _, values in rows for value in values if value is not None and value > 0]
    if not known:
        return tag("p", f"{title}: {DASH}", class_="missing")
    low, high = math.log(min(known)), math.log(max(known))
    width, height = 100 / len(columns), 100 / len(rows)
    cells = [
        tag(
            "rect",
            tag("title", f"{name}, {x_axis} {short(columns[c])}: {value:.3g}"),
            x=f"{c * width:.3f}%",
            y=f"{r * height:.3f}%",
            width=f"{width:.3f}%",
            height=f"{height:.3f}%",
            fill_opacity=f"{_strength(value, low, high):.3f}",
        )
        for r, (name, values) in enumerate(rows)
        for c, value in enumerate(values)
        if value is not None
    ]
    every = max(1, math.ceil(len(rows) / LABELS))
    names = [
        tag("text", name, class_="tick row", x="0", y=f"{(r + 0.5) * height:.2f}%", dx="-8", dy="0.32em")
        for r, (name, _) in enumerate(rows)
        if r % every == 0
    ]
    ends = sorted({0, len(columns) // 2, len(columns) - 1})
    ticks = [
        tag("text", short(columns[c]), class_="tick", x=f"{(c + 0.5) * width:.2f}%", y="100%", dy="1.5em") for c in ends
    ]
    axis = tag("text", x_axis, class_="axis", x="50%", y="100%", dy="3em")
    label = f"{title}: {len(rows)} rows, {unit} from {short(min(known))} to {short(max(known))}."
    plot = tag("svg", *cells, *names, *ticks, axis, class_="plot", role="img", aria_label=label)
    scale = [f"{unit} {short(min(known))}", tag("i", class_="scale"), short(max(known))]
    legend = tag("p", tag("span", scale[0], " ", scale[1], " ", scale[2], class_="key"), class_="legend")
    return tag("figure", tag("figcaption", title), legend, plot, class_="heat")


def _strength(value: float, low: float, high: float) -> float:
    if value <= 0:
        return 0.0
    fraction = (math.log(value) - low) / (high - low) if high > low else 1.0
    return PALEST + (1 - PALEST) * fraction


STYLE = """
:root {
  color-scheme: light dark;
  --paper: #faf7f2; --card: #fffefb; --ink: #231c16; --quiet: #6b5f54; --line: #e3dacd; --ember: #b8480f;
  --blue: #1d6a86; --gray: #978a7b; --asked: #f6e3d5; --right: #2a6b3d; --wrong: #9d1c1c;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #161310; --card: #211c18; --ink: #ece4da; --quiet: #a79a8c; --line: #3a3129; --ember: #f2935a;
    --blue: #79c3e0; --gray: #74695e; --asked: #472a19; --right: #8fd19e; --wrong: #ffa69e;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 78rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
a { color: var(--ember); text-underline-offset: .15em; }
h1 { margin: 0; font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; overflow-wrap: anywhere; }
h2 { margin: 0 0 1rem; padding-top: 1.2rem; border-top: 1px solid var(--line); font-size: 1.45rem; break-after: avoid; }
h3, h4 { margin: 1.6rem 0 .6rem; font-size: 1.05rem; break-after: avoid; }
h4 { font-size: .95rem; color: var(--quiet); }
section { margin-bottom: 2.6rem; }
header { margin-bottom: 1.6rem; }
.over { letter-spacing: .08em; text-transform: uppercase; }
nav ol { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 0 0 2rem; padding: 0; list-style: none; }
nav { font-size: .92rem; }
header p, .note, .missing { color: var(--quiet); font-size: .9rem; margin: .5rem 0; }
dl, dd, .card { margin: 0; min-width: 0; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin-bottom: 1.2rem; }
.facts dd { font-size: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .9rem; }
.tile, .card { padding: .9rem 1.1rem; border: 1px solid var(--line); border-radius: .8rem; background: var(--card); }
.tile h3 { margin: 0; font-size: .92rem; font-weight: 500; color: var(--quiet); }
.tile .note { margin: .5rem 0 0; font-size: .85rem; line-height: 1.4; }
.big { margin: .1rem 0 0; font-size: 2.2rem; font-weight: 650; line-height: 1.2; }
.wrong { color: var(--wrong); border-color: var(--wrong); }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 0 1.5rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td { white-space: nowrap; }
.under { display: block; font-size: .9em; color: var(--quiet); }
th { font-weight: 500; }
thead th, dt { font-size: .82rem; color: var(--quiet); vertical-align: bottom; }
th:first-child { padding-left: 0; text-align: left; }
.commands :is(th, td) { text-align: left; }
.commands td:last-child { min-width: 13rem; white-space: normal; }
code { font-size: .88em; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: .9rem; }
.wide { grid-template-columns: 100%; }
.tagged { display: flex; flex-wrap: wrap; gap: 0 .8rem; margin: 0 0 .6rem;
  justify-content: space-between; font-size: .85rem; color: var(--quiet); }
.tagged b { color: var(--ember); overflow-wrap: anywhere; }
.quote { margin: 0; font: .84rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark.learned { background: var(--asked); color: inherit; border-radius: .2rem; box-decoration-break: clone; }
.unlearned { color: var(--quiet); }
.special { font-weight: 650; color: var(--blue); }
.tiles + .facts { margin-top: 1.4rem; }
.legend + .cards { margin-top: .8rem; }
.talk { display: flex; flex-direction: column; gap: .5rem; }
.bubble { align-self: flex-start; max-width: 92%; margin: 0; padding: .45rem .8rem; font-size: .92rem;
  border: 1px solid var(--line); border-radius: .3rem 1rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.bubble.user { align-self: flex-end; border: 0; border-radius: 1rem 1rem .3rem; background: var(--asked); }
.who { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.verdict { margin: .7rem 0 0; font-size: .88rem; font-weight: 500; overflow-wrap: anywhere; }
.right { color: var(--right); }
.chips { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0; padding: 0; list-style: none; }
.chips li { padding: .1rem .6rem; border: 1px solid var(--line); border-radius: 1rem; background: var(--card);
  font: .85rem ui-monospace, monospace; white-space: pre-wrap; }
summary { margin: .9rem 0; cursor: pointer; color: var(--ember); }
footer { padding-top: 1.2rem; border-top: 1px solid var(--line); }
.foot { display: flex; flex-wrap: wrap; gap: .5rem 1.8rem; font-size: .85rem; }
@media screen and (min-width: 70rem) {
  body { display: grid; grid-template-columns: 13rem minmax(0, 1fr); gap: 0 3rem; }
  header, footer { grid-column: 1 / -1; }
  nav ol { position: sticky; top: 1.5rem; flex-direction: column; gap: .45rem; }
  .tiles { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  article .quote { max-height: 14rem; overflow: auto; }
  section:first-child h2 { border-top: 0; padding-top: 0; }
}
@media print {
  :root { --paper: #fff; --card: #fff; font-size: 10pt; }
  body { padding: 0; }
  * { print-color-adjust: exact; }
  figure, tr, .tile, .card { break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
}
figure { margin: 1.2rem 0 .5rem; }
figcaption { font-weight: 600; margin-bottom: .6rem; }
svg { display: block; overflow: visible; }
svg text { font-size: .75rem; fill: var(--quiet); text-anchor: middle; }
svg text.row { text-anchor: end; }
svg text.first { text-anchor: start; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.plot { width: calc(100% - 4.2rem); height: 15rem; margin: 1.9rem .8rem 3.1rem 3.4rem; }
.small .plot { height: 8rem; }
.small polyline { stroke-width: 1.2; }
polyline { fill: none; stroke: var(--ember); stroke-width: 2; vector-effect: non-scaling-stroke; }
polyline.faint { stroke-width: 1; opacity: .45; }
.dot { fill: var(--blue); stroke: var(--paper); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0; font-size: .85rem; color: var(--quiet); }
.key i { display: inline-block; width: 1.3rem; margin-right: .45rem; border-top: 3px solid var(--ember); }
.key i { vertical-align: .22em; }
.key i.faint { border-top-width: 1px; opacity: .6; }
.key i.dots { width: .55rem; height: .55rem; border: 0; border-radius: 50%; background: var(--blue); }
.key i:not(.faint, .strong) { vertical-align: -.05em; }
.key i.mark { width: 0; height: .9rem; border: 0; border-left: 2px solid var(--ink); }
.heat rect { fill: var(--ember); shape-rendering: crispEdges; }
.heat .plot { width: calc(100% - 6.2rem); margin-left: 5.4rem; }
.key i.scale { width: 6rem; height: .8rem; border: 0; vertical-align: -.1em;
  background: linear-gradient(to right, rgb(from var(--ember) r g b / .06), var(--ember)); }
.bars { display: grid; align-items: center; gap: 0 .9rem; }
.bars { grid-template-columns: fit-content(18rem) minmax(5rem, 1fr) auto; }
.bars > div { display: contents; }
.bars figcaption { grid-column: 1 / -1; }
.bars span { font-size: .9rem; line-height: 1.3; }
.bars .name { min-width: 7rem; overflow-wrap: anywhere; }
.bar { width: 100%; height: 1.5rem; }
.scale { grid-column: 2; width: 100%; height: 2.7rem; }
.bar-fill { fill: var(--ember); }
.bar-fill.quiet { fill: var(--gray); }
.mark { stroke: var(--ink); stroke-width: 2; }
.interval { width: calc(100% - 2.4rem); height: 2.3rem; margin: .7rem 1.2rem 0; }
.reach { stroke: var(--ember); stroke-width: 6; stroke-linecap: round; opacity: .4; }
.middle { fill: var(--ember); }
td .bar { display: inline-block; width: clamp(3rem, 8vw, 7rem); height: 1.1rem; margin-left: .7rem; }
td .bar { vertical-align: middle; }
@media (max-width: 38rem) {
  .tiles { grid-template-columns: 100%; }
  .commands td { min-width: 9rem; white-space: normal; }
  .bars { grid-template-columns: minmax(0, 1fr) auto; }
  .bars .name { grid-column: 1 / -1; margin-top: .3rem; }
  .scale { grid-column: 1; }
  td .bar { display: block; width: 4.5rem; margin: 0 0 0 auto; }
}
"""
