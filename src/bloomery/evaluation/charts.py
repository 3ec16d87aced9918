"""
Numbers, tables and charts as HTML and inline SVG: no scripts, no library, nothing to load.

All text goes through `tag`, which escapes whatever is not already `Html`. Charts have no size of their own: they are
laid out in shares of the width they get, so that letters stay as large as those around them, on a phone and on paper.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

SMALLEST, LARGEST = 1e-290, 1e300
"""Of numbers on an axis: below, they are drawn as zero; beyond, at its end. Shares of an axis stay finite."""

NOT_TEXT = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What neither HTML nor XML can hold."""

DASH = "—"
"""What is shown for a number that is not there."""

Points = Sequence[tuple[float, float]]
Format = Callable[[Any], str]


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
    return DASH if (found := number(value)) is None else f"{found:,.0f}"


def decimal(value: Any, digits: int = 3) -> str:
    """1.25 -> 1.250."""
    return DASH if (found := number(value)) is None else f"{found:,.{digits}f}"


def percent(value: Any) -> str:
    """0.635 -> 63.5%. Only nothing is 0%, and only all is 100%."""
    if (found := number(value)) is None:
        return DASH
    if 0 < found < 0.0005 or 0.9995 <= found < 1:
        return "<0.1%" if found < 0.5 else ">99.9%"
    return f"{found * 100:.1f}".removesuffix(".0") + "%"


def size(value: Any) -> str:
    """Bytes: 1234567 -> 1.2 MB."""
    if (found := number(value)) is None:
        return DASH
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if found >= limit:
            return f"{found / limit:,.1f} {unit}"
    return f"{found:.0f} bytes"


def duration(value: Any) -> str:
    """Seconds: 754 -> 12 min 34 s."""
    if (found := number(value)) is None:
        return DASH
    if found < 60:
        return f"{found:.1f} s"
    minutes, seconds = divmod(round(found), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def short(value: Any) -> str:
    """A number in as few letters as it takes: 1500000 -> 1.5M, 0.00002 -> 2e-5."""
    if (found := number(value)) is None:
        return DASH
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(found) >= limit:
            return f"{found / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{found:,.0f}" if abs(found) >= 1000 else re.sub(r"e-0", "e-", f"{found:.4g}")


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
    """The value as it is written beside the bar."""
    mark: float | None = None
    """Where a line across the bar stands, for what was asked or what others reach."""
    quiet: bool = False
    """Whether it is only there to compare with."""


def bar(one: Bar, top: float, grid: Sequence[float] = ()) -> Html:
    """One bar alone, from 0 to `top`."""
    lines = [tag("line", class_="grid", x1=_share(at, top), x2=_share(at, top), y1="0", y2="100%") for at in grid]
    fill = mark = None
    if one.value is not None:
        kind = "bar-fill quiet" if one.quiet else "bar-fill"
        fill = tag("rect", class_=kind, width=_share(one.value, top), y="15%", height="70%", rx="2")
    if one.mark is not None:
        mark = tag("line", class_="mark", x1=_share(one.mark, top), x2=_share(one.mark, top), y1="0", y2="100%")
    label = f"{one.label}: {one.shown}"
    return tag("svg", *lines, fill, mark, class_="bar", role="img", aria_label=label)


def bars(title: str, rows: Sequence[Bar], *, axis: str, form: Format = short, top: float | None = None) -> Html | None:
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
    left, right = min(0.0, *xs), max(xs)
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


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """
    About `wanted` steps of 1, 2, 2.5 or 5 times a power of ten, from `low` or below to `high` or above, of finite
    numbers. The first and the last always differ. Numbers so close that a float cannot hold the steps between them are
    one number, and around one number lies half of it on both sides.
    """
    low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
    size = max(abs(low), abs(high))
    if high - low <= max(size * 1e-9, SMALLEST):
        around = size / 2 if size > SMALLEST else 1.0
        low, high = low - around, high + around
    rough = (high - low) / wanted
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
