"""
CORE: the mean of 22 centered accuracies (Li et al. 2024, DataComp-LM, arXiv 2406.11794).

    centered = (accuracy − chance) / (1 − chance)        0 is guessing, 1 is all right

Tasks, examples before each question, and chance are those of DCLM's evaluation. Of choices the one with the highest
mean of log p over its tokens wins; what has to be continued is right where every token is the most likely one. Examples
are drawn from the task's other questions, by row. With some tasks missing it is another number, and is called so.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.data import examined
from bloomery.evaluation import shapes, tasks
from bloomery.evaluation.shapes import Item, Shape
from bloomery.evaluation.tasks import Place

NAME = "core"
ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class Part:
    """One of the 22."""

    shots: int = 10
    chance: float = 0.0
    ending: str = ""
    """What stands between a question and its choice, beside the space."""
    aliases: tuple[str, ...] = ()

    def shape(self, name: str) -> Shape:
        if name.startswith("hellaswag"):
            return shapes.hellaswag
        return partial(shapes.ready, ending=self.ending)


PARTS: Mapping[str, Part] = {
    "hellaswag_zeroshot": Part(0, 0.25, aliases=("hellaswag",)),
    "jeopardy": Part(ending=ANSWER, aliases=("jeopardy_all",)),
    "bigbench_qa_wikidata": Part(),
    "arc_easy": Part(10, 0.25, ANSWER),
    "arc_challenge": Part(10, 0.25, ANSWER),
    "copa": Part(0, 0.5),
    "commonsense_qa": Part(10, 0.2),
    "piqa": Part(10, 0.5, ANSWER),
    "openbook_qa": Part(0, 0.25),
    "lambada_openai": Part(0, aliases=("lambada",)),
    "hellaswag": Part(10, 0.25),
    "winograd": Part(0, 0.5, aliases=("winograd_wsc",)),
    "winogrande": Part(0, 0.5),
    "bigbench_dyck_languages": Part(),
    "agi_eval_lsat_ar": Part(3, 0.2),
    "bigbench_cs_algorithms": Part(),
    "bigbench_operators": Part(),
    "bigbench_repeat_copy_logic": Part(),
    "squad": Part(),
    "coqa": Part(0),
    "boolq": Part(10, 0.62, ANSWER),
    "bigbench_language_identification": Part(10, 0.091),
}


def questions(name: str, place: Place, limit: int | None, seed: int) -> list[Item]:
    """The questions of a part behind their examples. Raises DataError where its file is not there."""
    part = PARTS[name]
    path = tasks.find((name, *part.aliases), place.paths, tasks.SPLITS, what=name)
    every = [
        replace(tasks.shaped(part.shape(name), row, f"{path}:{number}"), row=number)
        for number, row in examined.rows_of(path)
    ]
    chosen: Sequence[int] = range(len(every))
    if limit is not None and limit < len(every):
        chosen = sorted(random.Random(f"{seed}:{name}").sample(chosen, limit))
    return [tasks.prompted(every[place], every, part.shots) for place in chosen]


def files_of(place: Place) -> list[Path]:
    """The files of the parts that are there."""
    return [
        tasks.find((name, *PARTS[name].aliases), place.paths, tasks.SPLITS, what=name) for name in present(place)[0]
    ]


def present(place: Place) -> tuple[list[str], list[str]]:
    """Names of the parts whose files are there, and of the others. Raises DataError where none is."""
    if not place.paths:
        raise DataError("CORE has no home on the hub", cure="Name the folder with DCLM's files: --data PATH.")
    there = []
    for name, part in PARTS.items():
        try:
            tasks.find((name, *part.aliases), place.paths, tasks.SPLITS, what=name)
        except DataError as error:
            if not error.what.startswith("there is no file of"):
                raise
            continue
        there.append(name)
    if not there:
        raise DataError("holds none of CORE's 22 tasks", where=", ".join(map(str, place.paths)))
    return there, [name for name in PARTS if name not in there]


def average(right: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """The mean of the centered accuracies, its 95 % interval, and what was left out; `core` is None without all 22."""
    centered: list[float] = []
    parts: dict[str, dict[str, float]] = {}
    spread = 0.0
    for name, found in right.items():
        chance, share = PARTS[name].chance, sum(found) / len(found)
        centered.append((share - chance) / (1 - chance))
        spread += share * (1 - share) / len(found) / (1 - chance) ** 2
        parts[name] = {"n": len(found), "acc": round(share, 6), "centered": round(centered[-1], 6)}
    mean, error = sum(centered) / len(centered), 1.959964 * math.sqrt(spread) / len(centered)
    missing = [name for name in PARTS if name not in right]
    return {
        "core": None if missing else round(mean, 6),
        "mean_of_parts": round(mean, 6),
        "low": round(mean - error, 6),
        "high": round(mean + error, 6),
        "n": sum(map(len, right.values())),
        "of": len(PARTS),
        "missing": missing,
        "parts": parts,
    }


Judge = Callable[[Sequence[Item]], Sequence[bool]]


def run(place: Place, limit: int | None, seed: int, judge: Judge) -> dict[str, Any]:
    """All parts that are there, each judged by `judge`."""
    there, _ = present(place)
    return average({name: judge(questions(name, place, limit, seed)) for name in there})
