"""Scores of tasks as lines of a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

PERCENT = ("acc", "acc_norm", "exact", "flexible", "right", "ended")


def lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One for every score of every task, with its interval; clean and dirty beside it, where both are known."""
    for name, told in found.items():
        for metric, score in told["scores"].items():
            chance = f"  chance {told['chance']:.1%}" if metric in ("acc", "acc_norm") and told.get("chance") else ""
            parts = [f"{part} {shown(metric, told[part][metric])}" for part in ("clean", "dirty") if _has(told, part)]
            apart = f"  ({', '.join(parts)})" if parts else ""
            yield f"{name:<16} {metric:<11} {shown(metric, score)}  of {score['n']:,}{chance}{apart}"


def shown(metric: str, score: Mapping[str, Any]) -> str:
    """Value and 95 % interval."""
    if score["value"] is None:
        return "–"
    if metric in PERCENT or metric.startswith("pass@"):
        return f"{score['value']:.1%} ({score['low']:.1%} to {score['high']:.1%})"
    value, low, high = (_written(score[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _written(number: float) -> str:
    """With four digits, and no exponent below a billion."""
    return f"{number:,.0f}" if 1000 <= number < 1e9 else f"{number:.4g}"


def core(told: Mapping[str, Any]) -> Iterator[str]:
    """The mean of centered accuracies, which is CORE where no task is missing."""
    for name, part in told["parts"].items():
        yield f"{name:<34} {part['acc']:7.1%}  centered {part['centered']:7.4f}  of {part['n']:,}"
    name = f"mean of {len(told['parts'])} of CORE's {told['of']}" if told["missing"] else "CORE"
    yield f"{name:<34} {told['mean_of_parts']:.4f} ({told['low']:.4f} to {told['high']:.4f})"
    if clean := told.get("dirty_n") and told.get("clean"):
        share = f"of {clean['n']:,}, without {told['dirty_n']:,} that stand in the training text"
        yield f"{'clean':<34} {clean['mean_of_parts']:.4f} ({clean['low']:.4f} to {clean['high']:.4f})  {share}"
    if told["missing"]:
        yield f"missing: {', '.join(told['missing'])}"


def _has(told: Mapping[str, Any], part: str) -> bool:
    return bool(told.get(part)) and bool(told.get("dirty_n"))
