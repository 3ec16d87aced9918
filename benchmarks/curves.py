"""Curves as an SVG picture that stands alone, for documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 48
COLORS = ("#b3541e", "#33658a", "#5f7a3a", "#7d5a9b", "#8a8a8a", "#c49a1a")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    name: str
    points: Points
    color: int = 0
    """Place in COLORS."""
    thin: bool = False


def picture(title: str, curves: Sequence[Curve], *, x_axis: str, y_axis: str, level: float | None = None) -> str:
    """All curves in one frame; names stand at their ends. `level` is drawn across."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    frame = (0.0, max(xs), min(ys), max(ys))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
        *(_across(value, frame) for value in ticks(frame[2], frame[3])),
        *(_down(value, frame) for value in ticks(frame[0], frame[1])),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_axis)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_axis)}</text>',
    ]
    if level is not None:
        y = _place((0, level), frame)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#444444" stroke-dasharray="4 4"/>')
    taken: list[float] = []
    for curve in curves:
        spots = [_place(point, frame) for point in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        color, width = COLORS[curve.color], 1 if curve.thin else 2.2
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        if curve.name:
            y = spots[-1][1]
            while any(abs(y - other) < 15 for other in taken):
                y += 15
            taken.append(y)
            parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" fill="{color}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers between the two."""
    span = max(high - low, 1e-9)
    step = min(
        (base * 10.0**power for power in range(-6, 9) for base in (1, 2, 5)), key=lambda one: abs(span / one - wanted)
    )
    first = -(-low // step)
    return [round(step * (first + n), 9) for n in range(int(span / step) + 2) if step * (first + n) <= high + 1e-9]


def _place(point: tuple[float, float], frame: tuple[float, float, float, float]) -> tuple[float, float]:
    low_x, high_x, low_y, high_y = frame
    x = LEFT + (point[0] - low_x) / max(high_x - low_x, 1e-9) * (WIDTH - LEFT - RIGHT)
    return x, HEIGHT - BOTTOM - (point[1] - low_y) / max(high_y - low_y, 1e-9) * (HEIGHT - TOP - BOTTOM)


def _across(value: float, frame: tuple[float, float, float, float]) -> str:
    y = _place((0, value), frame)[1]
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>'
    return line + f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _down(value: float, frame: tuple[float, float, float, float]) -> str:
    x = _place((value, frame[2]), frame)[0]
    line = f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eeeeee"/>'
    return line + f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
