"""
The evaluation tasks' own text: which pieces of a task's rows must not stand in what a model is trained on.

A row gives its fields' texts as they stand, and without the words that a harness puts around them ("Question:",
"Choices:", "Answer:"). A text of fewer words than an n-gram also counts together with its choices, and with the right
one, so that a question like "The pleura" is told from the two words.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.data import rows, tables
from bloomery.data.rows import Problem

TEXT_FIELDS = (
    *("query", "question", "ctx", "context", "prompt", "text", "passage", "premise", "sentence", "story"),
    *("input", "instruction", "problem", "goal", "context_options"),
)
"""
Fields that are looked at where a recipe names none, in whatever case. The last holds several texts, of which each is
one.
"""

CHOICES, ANSWERS = ("choices", "endings", "options", "answer_choices"), ("gold", "label", "answer", "answerKey")
LETTERS = "abcdefghij"
"""Fields of the choices of tasks that have one for each: A, B, C, D."""
ENDINGS = ("continuation", "ending", "completion")
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")
LONG_WORDS = 40
"""Texts of so many words are found by their n-grams, whatever stands around them."""

HEADING = re.compile(r"^[ \t]*(question|answer|choices|options|passage|context)[ \t]*:", re.IGNORECASE | re.MULTILINE)


class Piece(NamedTuple):
    """A text of a task that may be found."""

    task: str
    row: int
    """From 1, in the task's file."""
    text: str


def task_files(places: Sequence[Path]) -> list[Path]:
    """The files of tasks, and those in folders of tasks, in order. Raises DataError where a place holds none."""
    found = []
    for place in places:
        inside = sorted(place.iterdir()) if place.is_dir() else [place]
        mine = [path for path in inside if path.is_file() and path.name.endswith(SUFFIXES)]
        if not mine:
            cure = f"Name files, or folders of files, that end in {', '.join(SUFFIXES)}."
            raise DataError("holds no evaluation tasks", where=str(place), cure=cure)
        found += mine
    return found


def task_name(path: Path) -> str:
    suffix = max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len)
    return path.name.removesuffix(suffix)


def pieces(path: Path, fields: Sequence[str] = ()) -> Iterator[Piece]:
    """
    The texts of every row of a task's file; the same text of one row may come twice.

    Raises DataError for a broken row, and where no row has one of the fields.
    """
    task, found, known = task_name(path), False, set[str]()
    for number, row in rows_of(path):
        known.update(row)
        for text in _texts(row, fields or TEXT_FIELDS):
            found = True
            yield Piece(task, number, text)
    if not found:
        cure = f"Name one of its fields in decontaminate.fields. There are {', '.join(sorted(known)) or 'none'}."
        raise DataError("has no text to look for", where=str(path), cure=cure)


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number (from 1) and fields of every row of a task's file. Raises DataError for a broken one."""
    if path.suffix == ".parquet":
        if (problem := tables.crashes(path)) is not None:
            raise DataError(problem.what, where=str(path), cure=problem.cure)
        try:
            files.check_regular(path)
            with pq.ParquetFile(path) as file:
                every = (row for batch in file.iter_batches() for row in batch.to_pylist())
                yield from enumerate(every, 1)
        except (pa.ArrowException, OSError) as error:
            raise rows.unreadable(path, error) from None
        return
    for number, found in rows.jsonl(path):
        if isinstance(found, Problem):
            raise DataError(found.what, where=str(path), cure="Mend the file, or leave it out.")
        yield number, found


def _texts(row: Mapping[str, Any], fields: Sequence[str]) -> Iterator[str]:
    """All texts of a row."""
    row = {name.lower(): value for name, value in row.items()} | dict(row)
    ending = next((row[name] for name in ENDINGS if isinstance(row.get(name), str)), "")
    lettered = takewhile(lambda one: isinstance(one, str | int | float), map(row.get, LETTERS))
    choices: list[Any] = next((row[name] for name in CHOICES if isinstance(row.get(name), list)), list(lettered))
    named = [str(choice) for choice in choices]
    right = _right(row, named)
    texts = []
    for field in fields:
        value = row.get(field)
        texts += [value] if isinstance(value, str) else []
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            texts += value
            shared = _common_start(value)
            texts += [f"{shared} {ending}"] if ending and shared else []
    if len(texts) > 1 and sum(map(_words, texts)) < LONG_WORDS:
        yield "\n".join(texts)
    for text in texts:
        yield text
        for part in (text, *_parts(text)):
            if _words(part) < LONG_WORDS:  # the n-grams of a longer one are those of the text
                yield part
                yield from (f"{part}\n{more}" for more in (ending, right, "\n".join(named)) if more)


def _words(text: str) -> int:
    return len(text.split())


def _right(row: Mapping[str, Any], choices: Sequence[str]) -> str:
    """The choice that is said to be right, or ""."""
    for name in ANSWERS:
        value = row.get(name)
        if isinstance(value, str) and len(value) == 1 and value.isalpha():
            value = ord(value.upper()) - ord("A")
        if isinstance(value, int) and 0 <= value < len(choices):
            return choices[value]
    return ""


def _parts(text: str) -> Iterator[str]:
    """What stands under headings, but for choices and answers; nothing where there are no headings."""
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]]
    for heading, end in zip(headings, [*ends, len(text)], strict=False):
        if heading[1].lower() not in ("answer", "choices", "options"):
            yield text[heading.end() : end]


def _common_start(texts: Sequence[str]) -> str:
    """What several texts begin with, in whole words: where a gap stood that each of them fills."""
    words = [text.split() for text in texts]
    same = 0
    while all(len(one) > same for one in words) and len({one[same] for one in words}) == 1:
        same += 1
    return " ".join(words[0][:same]) if words else ""
