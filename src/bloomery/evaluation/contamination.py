"""
Which questions of a task stand in text that a model was trained on.

It looks for the same n-grams and whole questions as decontamination (`data/decontamination.py`), by the same
definitions of tasks.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bloomery.core import io as core_io
from bloomery.data import decontamination
from bloomery.data.documents import batched_by_size
from bloomery.evaluation import tasks
from bloomery.evaluation.tasks import EvalItem, TaskFiles

CHARACTERS_AT_ONCE = 2**20
FIELDS = ("query", "context_options")
"""Of the rows that `write` writes."""


def write(folder: Path, asked: Mapping[str, Sequence[EvalItem]]) -> tuple[Path, ...]:
    """Files of what must not be found, one for each task, called as it."""
    return tuple(_write(folder / f"{name}.jsonl", _lines(items)) for name, items in asked.items())


def written(folder: Path, names: Sequence[str], files: TaskFiles) -> tuple[Path, ...]:
    """The same of whole tasks."""
    return write(folder, {name: tasks.rows(name, files) for name in tasks.named(names)})


def dirty(asked: Mapping[str, Sequence[EvalItem]], texts: Iterable[str], scratch: Path) -> dict[str, set[int]]:
    """
    Rows of the questions that stand somewhere in the texts, by task.

    A question that several tasks ask, as CORE's do, is looked for once, and found in each of them.
    """
    rows_by_task: dict[str, set[int]] = {name: set() for name in asked}
    owners: dict[str, list[tuple[str, int]]] = {}
    for name, items in asked.items():
        for item, line in zip(items, _lines(items), strict=True):
            owners.setdefault(line, []).append((name, item.row))
    path = _write(scratch / "asked.jsonl", owners)
    index, by_line = (
        decontamination.OverlapIndex.of(decontamination.OverlapSettings(files=(path,))),
        list(owners.values()),
    )
    for batch in batched_by_size(texts, CHARACTERS_AT_ONCE):
        for match in index.find(batch):
            for name, number in by_line[index.rows[match.row][1] - 1]:
                rows_by_task[name].add(number)
    return rows_by_task


def _lines(items: Sequence[EvalItem]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in tasks.as_rows(items))


def _write(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with core_io.whole_file(path, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path
