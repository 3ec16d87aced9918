"""
Examples for classifiers: labeled texts from a file, or fetched documents against damaged copies of them.

Which examples are taken is a function of their texts and a seed. Texts of one group (versions of one page, a document
and its damaged copy) stay on one side of every split.
"""

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.data import damage, document, rows, tables, unpack

SHORTEST = 100
"""Characters of the shortest excerpts of contrast; lengths are even on a logarithmic scale."""
TABLES = (".parquet",)
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst", ".json")

Label = str | int | float


@dataclass(frozen=True)
class Example:
    """One text to learn from. Texts with the same `group` are never split up."""

    text: str
    positive: bool
    group: str
    kind: str = ""
    """How it came to be, for the report: "" as found, else the kind of damage or the label."""


@dataclass(frozen=True)
class Labels:
    """
    Which labels mean what. A label is one of `positive` or `negative`; or, with `positive_from`, a number: positive
    from there on, negative below `negative_below`, and in between the text is left out.
    """

    positive: tuple[Label, ...] = (1,)
    negative: tuple[Label, ...] = (0,)
    positive_from: float | None = None
    negative_below: float | None = None


def excerpt(text: str, characters: int) -> str:
    """What is looked at: a text that is not longer, or the first half of that many characters and as many mid-way."""
    if len(text) <= characters:
        return text
    half = characters // 2
    middle = half + (len(text) - half - (characters - half)) // 2
    return text[:half] + "\n" + text[middle : middle + characters - half]


def contrast(folder: Path, *, samples: int, characters: int, seed: int) -> Iterator[Example]:
    """
    Documents and a damaged copy of each, both as an excerpt of one length, which hash chooses for each document.

    With excerpts as long as they can be, 300 characters of good text scored below 0.5 in 55 of 100 cases: text that
    repeats itself and text that is short have the same lack of different words.
    """
    chosen = _chosen(folder, samples, seed)
    for row in document.read(folder, ["id", "text"]):
        if (name := row["id"]) in chosen:
            share = int(_hash(f"length:{name}", seed)[:8], 16) / 2**32
            length = round(SHORTEST * (characters / SHORTEST) ** share)
            text, kind = excerpt(row["text"], length), damage.choose(name, seed)
            yield Example(text, True, name)
            yield Example(damage.damage(text, kind, seed), False, name, kind)


def labeled(
    path: Path,
    labels: Labels,
    *,
    text_field: str,
    label_field: str,
    group_field: str | None,
    samples: int,
    characters: int,
    seed: int,
) -> list[Example]:
    """
    The texts of a jsonl or parquet file with their labels, at most `samples` of them, chosen by hash of their text.

    Raises DataError, with the row, for a text that is empty or none, a label that is none of the known ones, and a row
    that lacks a field; and where one of the two classes has no text.
    """
    found: list[tuple[str, int, Example]] = []
    for number, row in _rows(path, [text_field, label_field], group_field):
        where = f"{path}:{number}"
        if isinstance(row, unpack.Problem):
            raise DataError(row.what, where=where, cure="Repair or remove this row.")
        text = _text(row, text_field, where)
        positive = _side(row, label_field, labels, where)
        if positive is not None:
            group = _group(row, group_field, text, where)
            example = Example(excerpt(text, characters), positive, group)
            found.append((_hash(f"{group}\n{text}", seed), number, example))
    found.sort(key=lambda one: one[:2])
    taken = [example for *_, example in found[:samples]]
    _both_sides(taken, path, label_field)
    return taken


def _rows(path: Path, fields: Sequence[str], group: str | None) -> Iterator[tuple[int, rows.Found]]:
    if path.name.endswith(TABLES):
        return tables.parquet(path, [*fields, *([group] if group else [])])
    if path.name.endswith(LINES):
        return rows.jsonl(path)
    cure = "Give a .jsonl (.gz and .zst too) or .parquet file."
    raise DataError(f"{path.name} is neither jsonl nor parquet", where=str(path), cure=cure)


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        cure = f"Name the field of the text with text_field; the row has {', '.join(map(repr, row)) or 'none'}."
        raise DataError(f"has no field {field!r}", where=where, cure=cure)
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"its {field} is {text!r}, which is no text", where=where, cure="Repair or remove this row.")
    if not text.strip():
        raise DataError(f"its {field} is empty, so there is nothing to learn", where=where, cure="Remove this row.")
    return text


def _side(row: Mapping[str, Any], field: str, labels: Labels, where: str) -> bool | None:
    """Whether a row is positive; None where its label lies between the two thresholds."""
    if field not in row:
        cure = f"Name the field of the label with label_field; the row has {', '.join(map(repr, row)) or 'none'}."
        raise DataError(f"has no field {field!r}", where=where, cure=cure)
    label = row[field]
    if labels.positive_from is not None:
        below = labels.positive_from if labels.negative_below is None else labels.negative_below
        if isinstance(label, int | float) and label == label:
            return True if label >= labels.positive_from else False if label < below else None
        raise DataError(f"has label {label!r}, which is no number", where=where, cure="Repair or remove this row.")
    if any(_same(label, one) for one in labels.positive):
        return True
    if any(_same(label, one) for one in labels.negative):
        return False
    known = f"positive {', '.join(map(repr, labels.positive))}; negative {', '.join(map(repr, labels.negative))}"
    cure = f"Known labels are {known}. Add it to `positive` or `negative`, or remove this row."
    raise DataError(f"has label {label!r}, which is neither", where=where, cure=cure)


def _same(label: Any, known: Label) -> bool:
    return isinstance(label, str) == isinstance(known, str) and bool(label == known)


def _group(row: Mapping[str, Any], field: str | None, text: str, where: str) -> str:
    """The group that a row names; without one, texts that differ only in case, marks and white space are a group."""
    if field is None:
        return hashlib.sha256(" ".join(re.findall(r"\w+", text.lower())).encode("utf-8", "replace")).hexdigest()
    if row.get(field) is None:
        raise DataError(f"has no {field}", where=where, cure="Give every row a group, or leave group_field out.")
    return str(row[field])


def _both_sides(taken: Sequence[Example], path: Path, field: str) -> None:
    positives = sum(example.positive for example in taken)
    if positives in (0, len(taken)):
        have = f"{len(taken)} texts, {positives} of them positive"
        cure = "A classifier needs texts of both classes: check `positive` and `negative`, or the file."
        raise DataError(f"has {have}, by {field}", where=str(path), cure=cure)


def _chosen(folder: Path, samples: int, seed: int) -> set[str]:
    """Ids of the documents to learn from: of each domain those with the smallest hashes, evenly over domains."""
    smallest: dict[str, list[tuple[int, str]]] = {}
    for row in document.read(folder, ["domain", "id"]):
        heap = smallest.setdefault(row["domain"], [])
        entry = (-int(_hash(row["id"], seed), 16), row["id"])  # negative: the heap's first is the largest hash
        if len(heap) < samples:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    ranked: list[tuple[int, int, str]] = []
    taken = Counter[str]()
    for spot, domain, name in sorted((-spot, domain, name) for domain, heap in smallest.items() for spot, name in heap):
        ranked.append((taken[domain], spot, name))
        taken[domain] += 1
    return {name for *_, name in sorted(ranked)[:samples]}


def _hash(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:sample:{name}".encode("utf-8", "replace")).hexdigest()
