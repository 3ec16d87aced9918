"""A table of numbers as a picture: rows by columns, the larger the stronger, in steps of equal ratio."""

import math
from collections.abc import Sequence

from bloomery.evaluation.charts import DASH, Html, short, tag

PALEST = 0.06
LABELS = 16
"""Rows that are named, at most."""

Row = tuple[str, Sequence[float | None]]


def heat(title: str, rows: Sequence[Row], columns: Sequence[float], *, x_axis: str, unit: str) -> Html:
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
    place = (math.log(value) - low) / (high - low) if high > low else 1.0
    return PALEST + (1 - PALEST) * place
