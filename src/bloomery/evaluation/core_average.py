"""
CORE: the mean of 22 centered accuracies (Li et al. 2024, DataComp-LM, arXiv 2406.11794).

    centered = (accuracy − chance) / (1 − chance)        0 is guessing, 1 is all right

Tasks, examples before each question, and chance are those of DCLM's evaluation. Of choices the one with the highest
mean of log p over its tokens wins; what has to be continued is right where every token is the most likely one. Examples
are drawn from the task's other questions, by row. With some tasks missing it is another number, and is called so.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.data import examined
from bloomery.evaluation import tasks
from bloomery.evaluation.core_parts import PARTS
from bloomery.evaluation.scoring import wilson
from bloomery.evaluation.shapes import Item
from bloomery.evaluation.tasks import Place

NAME = "core"


def questions(name: str, place: Place, limit: int | None, seed: int) -> list[Item]:
    """The questions of a part behind their examples. Raises DataError where its file is not there."""
    chosen, every = drawn(name, place, limit, seed)
    return [tasks.prompted(item, every, PARTS[name].shots) for item in chosen]


def drawn(name: str, place: Place, limit: int | None, seed: int) -> tuple[list[Item], list[Item]]:
    """The questions of a part that are asked, without examples, and all that it has."""
    part = PARTS[name]
    path = tasks.find(_called(name), place.paths, tasks.SPLITS, what=name)
    every = [
        replace(tasks.shaped(part.shape(name), row, f"{path}:{number}"), row=number)
        for number, row in examined.rows_of(path)
    ]
    if not every:
        raise DataError(f"has no rows of {name}", where=str(path), cure="Put its rows there, or the file elsewhere.")
    chosen: Sequence[int] = range(len(every))
    if limit is not None and limit < len(every):
        chosen = sorted(random.Random(f"{seed}:{name}").sample(chosen, limit))
    return [every[place] for place in chosen], every


def files_of(place: Place) -> list[Path]:
    """The files of the parts that are there."""
    return [tasks.find(_called(name), place.paths, tasks.SPLITS, what=name) for name in present(place)[0]]


def present(place: Place) -> tuple[list[str], list[str]]:
    """Names of the parts whose files are there, and of the others. Raises DataError where none is."""
    if not place.paths:
        raise DataError("CORE has no home on the hub", cure="Name the folder with DCLM's files: --data PATH.")
    there = [name for name in PARTS if tasks.look(_called(name), place.paths, tasks.SPLITS, what=name)]
    if not there:
        cure = f"Their files are called {', '.join(f'{name}.jsonl' for name in PARTS)} (.zst, .gz), or .parquet."
        raise DataError("holds none of CORE's 22 tasks", where=", ".join(map(str, place.paths)), cure=cure)
    return there, [name for name in PARTS if name not in there]


def _called(name: str) -> tuple[str, ...]:
    return name, *PARTS[name].aliases


def average(right: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """
    The mean of the centered accuracies, its 95 % interval, and what was left out; `core` is None without all 22.

    Of each part's interval (Wilson's) the longer arm counts, and arms add up as errors do that do not depend on each
    other: a part with nothing right, or all, is not known for sure. Nothing right and all right are the bounds.
    """
    centered: list[float] = []
    parts: dict[str, dict[str, float]] = {}
    spread = least = 0.0
    for name, found in right.items():
        chance, share = PARTS[name].chance, sum(found) / len(found)
        low, high = wilson(sum(found), len(found))
        centered.append((share - chance) / (1 - chance))
        spread += (max(share - low, high - share) / (1 - chance)) ** 2
        least -= chance / (1 - chance) / len(right)
        parts[name] = {"n": len(found), "acc": round(share, 6), "centered": round(centered[-1], 6)}
    mean, error = sum(centered) / len(centered), math.sqrt(spread) / len(centered)
    missing = [name for name in PARTS if name not in right]
    return {
        "core": None if missing else round(mean, 6),
        "mean_of_parts": round(mean, 6),
        "low": round(max(mean - error, least), 6),
        "high": round(min(mean + error, 1.0), 6),
        "n": sum(map(len, right.values())),
        "of": len(PARTS),
        "missing": missing,
        "parts": parts,
    }
