"""Of the page: the scores of known tasks, with their intervals, clean and dirty."""

from typing import Any

from bloomery.evaluation import charts
from bloomery.evaluation.charts import DASH, Html, count, join, number, percent, tag
from bloomery.evaluation.pieces import Report, at, named, note, scored, sequence, text


def known_tasks(report: Report) -> list[object]:
    rows: list[list[object]] = []
    looked = False
    for name, told in named(report, "tasks").items():
        for metric, score in named(told, "scores").items():
            parts = [_part(told, part, metric) for part in ("clean", "dirty")]
            looked = looked or at(told, "dirty_n") is not None
            chance = percent(at(told, "chance")) if metric in ("acc", "acc_norm") else DASH
            rows.append([text(name), text(metric), scored(metric, score), count(at(score, "n")), chance, *parts])
    heads = ["Task", "Score", "Value (95% interval)", "Questions", "Chance", "Clean", "Dirty"]
    found = [charts.table(heads, rows), note(TOLD, LOOKED if looked else "")] if rows else []
    return [*found, *_core(report)]


TOLD = (
    "acc: the most likely choice is right; acc_norm: the most likely for each byte; every question is in tasks.jsonl."
)
LOOKED = (
    " Dirty questions stand in the training text, in 13 words in a row or as a whole; clean is the score of the others."
)


def _core(report: Report) -> list[object]:
    core = named(report, "core")
    if not core:
        return []
    missing = [text(one) for one in sequence(core, "missing")]
    found, lost = number(core.get("dirty_n")), sequence(core, "clean", "missing")
    clean = ""
    if found:
        without = f", without {len(lost) - len(missing)} parts of which all stand there" * (len(lost) > len(missing))
        others = f"of the others it is {_mean(core, 'clean')}{without}"
        clean = f" {count(found)} questions stand in the training text; {others}."
    if not missing:
        return [note(f"CORE, the mean of 22 centered accuracies: {_mean(core)}.{clean}")]
    told = f"Mean of {22 - len(missing)} centered accuracies of CORE's 22: {_mean(core)}.{clean} "
    return [note(told, f"It is not CORE: {', '.join(missing)} are missing.")]


def _mean(core: Any, *part: str) -> str:
    low, high, mean = (number(at(core, *part, name)) for name in ("low", "high", "mean_of_parts"))
    return DASH if mean is None or low is None or high is None else f"{mean:.4f} ({low:.4f} to {high:.4f})"


def _part(told: Any, part: str, metric: str) -> Html | str:
    score = named(told, part, metric)
    under = tag("span", f"of {count(score.get('n'))}", class_="under")
    return join(scored(metric, score), under) if number(score.get("n")) else DASH
