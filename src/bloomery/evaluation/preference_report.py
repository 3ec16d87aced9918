"""Of the report: what became of what is preferred: margins or rewards, on the way and before and after."""

from collections.abc import Mapping
from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import Curve, count, decimal, tag
from bloomery.evaluation.pieces import Fact, Report, facts, listed, named, note, tallied, text
from bloomery.evaluation.training_report import (
    SMOOTHING,
    gradient_flow,
    series,
    time_by_phase,
    troubles,
    written,
)

NAMES = {
    "loss": ("Loss", "loss"),
    "margin": ("Margin: how much more the better answer is liked", "nats"),
    "accuracy": ("Pairs that are told apart rightly", "share"),
    "reward": ("Reward: answers that are right", "share"),
    "kl": ("Distance to the reference", "KL in nats per token"),
    "divergence": ("Distance to the reference, on other answers", "nats per answer"),
    "clip_fraction": ("Tokens whose ratio was held", "share"),
    "ended": ("Answers that ended", "share"),
    "answer_tokens": ("Length of answers", "tokens"),
}
"""What metrics.jsonl may hold, with a title and the name of an axis."""
METHODS = {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "kto": "KTO", "grpo": "GRPO"}


def preferred(report: Report) -> list[object]:
    """Nothing for a run without the stage `prefer`."""
    rows, stats = listed(report, "curves", "prefer"), named(report, "preference")
    if not rows and not stats:
        return []
    parts: list[object] = [tag("h3", "Prefer"), facts(known(stats))]
    before = named(stats, "before")
    after = [row for row in rows if any(name in row for name in before)]
    if before and after:
        listed_names = [name for name in before if name in after[-1]]
        cells = [[spoken(name), decimal(before[name]), decimal(after[-1][name])] for name in listed_names]
        parts.append(charts.table(["Of held-out ones", "Before", "After"], cells))
    drawn = [
        charts.curves(title, curves(rows, name), x_axis="step", y_axis=axis)
        for name, (title, axis) in NAMES.items()
        if series(rows, name)
    ]
    parts.append(tag("div", *drawn, class_="small"))
    data = named(stats, "data")
    table = tallied("What was rejected", named(data, "rejected_by_reason"), None, "rows")
    parts += [table] if table is not None else []
    if data:
        parts.append(note("What was rejected stands in rejected.jsonl of the stage, with file, line and reason."))
    return parts + gradient_flow(rows) + time_by_phase(rows) + troubles(rows) + written(report, "prefer")


def known(stats: Mapping[str, Any]) -> list[Fact]:
    data = named(stats, "data")
    found: list[Fact] = [("Method", METHODS.get(text(stats.get("method")), text(stats.get("method"))))]
    found += [("Steps", count(stats.get("steps"))), ("Rows read", count(data.get("read")))]
    for split, name in (("train", "Learned from"), ("val", "Held out")):
        sizes = named(data, split)
        told = [f"{count(sizes[key])} {key}" for key in ("questions", "chosen", "rejected") if key in sizes]
        found.append((name, ", ".join(told) or "–"))
    found.append(("Cut at a turn", count(data.get("cut_at_a_turn"))))
    return found if stats else found[:0]


def curves(rows: list[Mapping[str, Any]], name: str) -> list[Curve]:
    seen = series(rows, name)
    drawn = [Curve("train", seen, "faint")]
    drawn.append(Curve("smoothed", charts.smoothed(seen, max(1, len(seen) // SMOOTHING))))
    held_out = series(rows, f"validation_{name}")
    return [*drawn, Curve("held out", held_out, "dots")] if held_out else drawn


def spoken(name: str) -> str:
    return name.removeprefix("validation_").replace("_", " ")
