"""Of the report: what became of the loss, of each layer's gradients, and of the time, while a model was trained."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Bar, Curve, count, decimal, number, percent, tag
from bloomery.evaluation.heat import heat
from bloomery.evaluation.pieces import NOTHING, Fact, Report, facts, folded, listed, named, note, sequence, text

SMOOTHING = 20
"""A smoothed curve is a mean over one such part of its points to either side."""
COLUMNS = 60
"""Of a picture of gradients over the run, at most."""
PASSES = ("pretrain", "finetune")
PHASES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "optimizer": "norm, clip and update",
    "hooks": "logging, saving, evaluating",
}

Rows = Sequence[Mapping[str, Any]]


def training(report: Report) -> list[object]:
    parts: list[object] = []
    known = [phase for phase in PASSES if listed(report, "curves", phase)]
    for phase in known or PASSES:
        rows = listed(report, "curves", phase)
        parts.append(tag("h3", phase.capitalize()))
        parts += phase_curves(phase.capitalize(), rows) if rows else [NOTHING]
        parts += gradient_flow(rows) + time_by_phase(rows) + troubles(rows) + written(report, phase)
    return parts


def phase_curves(phase: str, rows: Rows) -> list[object]:
    loss, checked = series(rows, "loss"), series(rows, "validation_loss")
    reach = max(1, len(loss) // SMOOTHING)
    drawn = [
        Curve("train loss", loss, "faint"),
        Curve(f"mean of {2 * reach + 1} logged steps", charts.smoothed(loss, reach)),
        Curve("validation loss", checked, "dots"),
    ]
    speeds = [value for _, value in series(rows, "tokens_per_second") if value > 0]
    bits, shares = series(rows, "validation_bits_per_byte"), [value for _, value in series(rows, "mfu")]
    last: list[Fact] = [
        ("Steps", count(max((x for x, _ in loss + checked), default=None))),
        ("Last train loss", decimal(loss[-1][1] if loss else None)),
        ("Last validation loss", decimal(checked[-1][1] if checked else None)),
        ("Median speed", f"{count(statistics.median(speeds) if speeds else None)} tokens/s"),
    ]
    if bits:
        last.insert(3, ("Its bits per byte", decimal(bits[-1][1])))
    if shares:
        last.append(("Median MFU, of the measured peak", percent(statistics.median(shares))))
    if memory := series(rows, "memory_bytes"):
        last.append(("Most memory", charts.size(max(value for _, value in memory))))
    rate, norm = (Curve(key, series(rows, key)) for key in ("learning_rate", "gradient_norm"))
    small = [
        charts.curves("Learning rate", [rate], x_axis="step", y_axis="learning rate", from_zero=True),
        charts.curves("Gradient norm", [norm], x_axis="step", y_axis="norm before clipping", from_zero=True),
    ]
    if update := relative_updates(rows):
        curve = Curve("update / weights", update)
        title = "Size of an update"
        small.append(charts.curves(title, [curve], x_axis="step", y_axis="norm of update / weights", from_zero=True))
    big = charts.curves(f"{phase}: loss", drawn, x_axis="step", y_axis="loss in nats per token")
    return [facts(last), big, tag("div", *small, class_="small")]


def gradient_flow(rows: Rows) -> list[object]:
    """How large the gradient of each layer was: over the run, and layer by layer at its beginning, middle and end."""
    flows = [(number(row.get("step")), named(row, "gradient_flow")) for row in rows]
    seen = [(step, flow) for step, flow in flows if step is not None and flow]
    if not seen:
        return []
    layers = list(seen[0][1])
    seen = [seen[n * len(seen) // min(len(seen), COLUMNS)] for n in range(min(len(seen), COLUMNS))]
    steps = [step for step, _ in seen]
    picture = heat(
        "Gradient flow: norm of each layer's gradient over the run",
        [(layer, [number(flow.get(layer)) for _, flow in seen]) for layer in layers],
        steps,
        x_axis="step",
        unit="norm",
    )
    looks = {0: "faint", len(seen) // 2: "dots", len(seen) - 1: "strong"}
    drawn = [Curve(f"step {charts.short(steps[n])}", by_depth(seen[n][1], layers), look) for n, look in looks.items()]
    profile = charts.curves("The same by depth", drawn, x_axis="layer", y_axis="gradient norm", from_zero=True)
    told = note(f"Layers are counted from {layers[0]} (0) to {layers[-1]} ({len(layers) - 1}). Norms before clipping.")
    return [picture, profile, told]


def by_depth(flow: Mapping[str, Any], layers: Sequence[str]) -> list[tuple[float, float]]:
    found = [(depth, number(flow.get(layer))) for depth, layer in enumerate(layers)]
    return [(float(depth), value) for depth, value in found if value is not None]


def relative_updates(rows: Rows) -> list[tuple[float, float]]:
    weights = dict(series(rows, "weight_norm"))
    return [(step, value / weights[step]) for step, value in series(rows, "update_norm") if weights.get(step)]


def time_by_phase(rows: Rows) -> list[object]:
    spent: dict[str, float] = {}
    for row in rows:
        for phase, seconds in named(row, "seconds").items():
            spent[phase] = spent.get(phase, 0.0) + (number(seconds) or 0.0)
    whole = sum(spent.values())
    bars = [
        Bar(name, spent[phase], f"{charts.duration(spent[phase])} ({percent(spent[phase] / whole)})")
        for phase, name in PHASES.items()
        if whole and phase in spent
    ]
    return [charts.bars("Where the seconds of training went", bars, axis="seconds")] if bars else []


def troubles(rows: Rows) -> list[object]:
    """What was skipped, where the run went back, and which hooks failed."""
    told: list[list[object]] = []
    for row in rows:
        step = count(row.get("step"))
        if "skipped" in row:
            samples = ", ".join(map(str, sequence(row, "samples")[:8]))
            told.append([step, "skipped", f"{text(row['skipped'])}; samples {samples} …"])
        if "rolled_back_to" in row:
            told.append([step, "rolled back", f"to step {count(row['rolled_back_to'])}"])
        if "failed" in row:
            told.append([step, f"{text(row['failed'])} failed", text(row.get("error"))])
    table = tag("div", charts.table(["Step", "What", "Why"], told), class_="commands")
    return [tag("h4", "What went wrong on the way"), table] if told else []


def written(report: Report, phase: str) -> list[object]:
    cards = [
        tag(
            "article",
            tag("p", tag("b", f"step {count(one.get('step'))}"), class_="tagged"),
            tag("p", tag("b", text(one.get("prompt"))), text(one.get("text")), class_="quote", dir="auto"),
            class_="card",
        )
        for one in reversed(listed(report, "written", phase))
    ]
    return [tag("h4", "What it wrote on the way, the latest first"), folded(cards, "cards")] if cards else []


def series(rows: Rows, key: str) -> list[tuple[float, float]]:
    found = [(number(row.get("step")), number(row.get(key))) for row in rows]
    return [(step, value) for step, value in found if step is not None and value is not None]
