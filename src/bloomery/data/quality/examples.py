"""
Training examples for classifiers: labeled texts, or documents and damaged copies of them.

Labeled texts come from a file; damaged copies are made of fetched documents. The selection of examples is a
function of their texts and a seed. Texts of one group stay on one side of every split. A group is versions of one
page, or a document and its damaged copy.

Damaged copies are negative examples for when nobody has labeled any text. A copy is about as long as its original
and keeps its lines and indentation where it can. The classifier should learn the damage, not the length or the
shape. Every copy is a function of the text, the kind of damage and a seed.
"""

import hashlib
import heapq
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.io import stable_hash
from bloomery.data import documents
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers import rows

MOJIBAKE = ("Ã©", "â€™", "â€œ", "Â", "ï¿½", "�", "Ã¼", "â€”", "ðŸ", "Ð¿")
"""UTF-8 read as Windows-1252, and what replaces what cannot be read."""

OFFERS = ("buy {a} online", "cheap {a}", "best {a} {b} deals", "{a} for sale", "free {a} download", "discount {a} {b}")
PUSHES = ("Click here!", "Limited time offer!", "Order now!", "Act fast!", "100% guaranteed.", "No questions asked.")
CLAIMS = (
    "Looking for {a}? You have come to the right place.",
    "Our {a} is the best {a} for your {b}.",
    "Everyone needs {a} to get {b} today.",
    "Read our top 10 {a} reviews and save on {b}.",
)
GOODS = (
    *(
        "pills",
        "shoes",
        "watches",
        "casino",
        "bonus",
        "loans",
        "insurance",
        "handbags",
        "jewelry",
        "software",
        "hosting",
    ),
    *("followers", "backlinks", "vitamins", "diet", "iphone", "sunglasses", "mortgage", "credit", "dating", "essays"),
    *("hosting", "coupons", "furniture", "tickets", "jerseys"),
)


def damage(text: str, kind: str, seed: int = 0) -> str:
    """
    A damaged copy of about the same length and never longer. `kind` is one of KINDS.

    A text of few words may come out as it is.
    """
    number = stable_hash(f"{seed}:{kind}:{text}".encode("utf-8", "replace"))
    return KINDS[kind](text, random.Random(number))[: len(text)]


def choose(name: str, seed: int = 0) -> str:
    """The kind of damage for a document, by hash of its id."""
    return sorted(KINDS)[stable_hash(f"{seed}:{name}") % len(KINDS)]


def _shuffled(text: str, rng: random.Random) -> str:
    """The words in random order; white space stays as it is."""
    pieces = re.split(r"(\s+)", text)
    words = pieces[::2]
    rng.shuffle(words)
    pieces[::2] = words
    return "".join(pieces)


def _repeated(text: str, rng: random.Random) -> str:
    """The start of the text, up to half of it, then a phrase of the text again and again."""
    pieces = re.split(r"(?<=\s)(?=\S)", text)
    size = rng.randint(3, 12)
    start = rng.randrange(max(1, len(pieces) - size))
    phrase = "".join(pieces[start : start + size]).rstrip() + rng.choice((" ", " ", "\n"))
    head = text[: int(len(text) * rng.uniform(0.0, 0.5))]
    return head + phrase * round((len(text) - len(head)) / len(phrase))


def _cut(text: str, rng: random.Random) -> str:
    """Lines of the two halves interleave, and many end in the tail of another line, as in misread columns."""
    lines, end = text.split("\n"), "\n"
    if len(lines) < 4:
        end = " "
        pieces = re.split(r"(?<=[.,;:!?])\s+", text)
        lines = [" ".join(pieces[start : start + 2]) for start in range(0, len(pieces), 2)]
    half = (len(lines) + 1) // 2
    mixed = [line for pair in zip(lines[:half], [*lines[half:], ""], strict=False) for line in pair]
    cut: list[str] = []
    tails: list[str] = []
    for line in mixed:
        spot = rng.randint(0, len(line)) if rng.random() < 0.6 else len(line)
        seam = tails.pop(0) if tails and rng.random() < 0.7 else ""
        cut.append(line[:spot] + seam)
        tails += [line[spot:]] if spot < len(line) else []
    cut += tails
    return end.join(cut)


def _broken(text: str, rng: random.Random) -> str:
    """Characters become mojibake or vanish, mostly those that are not ASCII."""
    share = rng.uniform(0.01, 0.06)
    out = []
    for character in text:
        if character.isspace() or rng.random() > (share if character.isascii() else 0.9):
            out.append(character)
        elif rng.random() < 0.7:
            out.append(rng.choice(MOJIBAKE))
    return "".join(out)


def _spam(text: str, rng: random.Random) -> str:
    """Sentences that sell, with words of the text in them and lines about as long as its own."""
    own = re.findall(r"[^\W\d_]{4,}", text[:4000]) or GOODS
    wide = max(40, min(400, len(text) // (text.count("\n") + 1)))
    topic = rng.sample(GOODS, 4) + rng.choices(own, k=2)
    lines, line, size = [], "", 0
    while size < len(text):
        form = rng.choice((OFFERS, OFFERS, CLAIMS, PUSHES))
        line += rng.choice(form).format(a=rng.choice(topic), b=rng.choice(topic)) + rng.choice((" ", ", ", " - "))
        if len(line) >= wide or size + len(line) >= len(text):
            lines.append(line.rstrip(" ,-"))
            line, size = "", size + len(lines[-1]) + 1
    return "\n".join(lines)


KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "broken": _broken,
    "cut": _cut,
    "repeated": _repeated,
    "shuffled": _shuffled,
    "spam": _spam,
}


SHORTEST = 100
"""Characters of the shortest excerpts of contrast; lengths are even on a logarithmic scale."""
TABLES = (".parquet",)
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst", ".json")

TextLabel = str | int | float


@dataclass(frozen=True)
class TextExample:
    """One training text. Texts with the same `group` stay in one split."""

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

    positive: tuple[TextLabel, ...] = (1,)
    negative: tuple[TextLabel, ...] = (0,)
    positive_from: float | None = None
    negative_below: float | None = None


def excerpt(text: str, characters: int) -> str:
    """What is looked at: a text that is not longer, or the first half of that many characters and as many mid-way."""
    if len(text) <= characters:
        return text
    half = characters // 2
    middle = half + (len(text) - half - (characters - half)) // 2
    return text[:half] + "\n" + text[middle : middle + characters - half]


def contrast(folder: Path, *, samples: int, characters: int, seed: int) -> Iterator[TextExample]:
    """
    Documents and a damaged copy of each, both as an excerpt of one length. A hash chooses the length.

    With the longest excerpts possible, 300 characters of good text scored below 0.5 in 55 of 100 cases. Short text has
    few different words, as has text that repeats itself.
    """
    chosen = _chosen(folder, samples, seed)
    for row in documents.read(folder, ["id", "text"]):
        if (name := row["id"]) in chosen:
            share = int(_hash(f"length:{name}", seed)[:8], 16) / 2**32
            length = round(SHORTEST * (characters / SHORTEST) ** share)
            text, kind = excerpt(row["text"], length), choose(name, seed)
            yield TextExample(text, True, name)
            yield TextExample(damage(text, kind, seed), False, name, kind)


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
) -> list[TextExample]:
    """
    The texts of a jsonl or parquet file with their labels, at most `samples` of them, chosen by hash of their text.

    Raises DataError, with the row, for a text that is empty or missing, an unknown label, and a row that lacks a field.
    Also raises it where one of the two classes has no text.
    """
    ranked: list[tuple[str, int, TextExample]] = []
    for number, row in _rows(path, [text_field, label_field], group_field):
        where = f"{path}:{number}"
        if isinstance(row, readers_bytes.ReadError):
            raise DataError(row.what, where=where, hint="Repair or remove this row.")
        text = _text(row, text_field, where)
        positive = _side(row, label_field, labels, where)
        if positive is not None:
            group = _group(row, group_field, text, where)
            example = TextExample(excerpt(text, characters), positive, group)
            ranked.append((_hash(f"{group}\n{text}", seed), number, example))
    ranked.sort(key=lambda entry: entry[:2])
    selected = [example for *_, example in ranked[:samples]]
    _both_sides(selected, path, label_field)
    return selected


def _rows(path: Path, fields: Sequence[str], group: str | None) -> Iterator[tuple[int, rows.RowOrError]]:
    if path.name.endswith(TABLES):
        return rows.parquet(path, [*fields, *([group] if group else [])])
    if path.name.endswith(LINES):
        return rows.jsonl(path)
    hint = "Use a .jsonl file (also .jsonl.gz or .jsonl.zst) or a .parquet file."
    raise DataError(f"{path.name} is neither jsonl nor parquet", where=str(path), hint=hint)


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        hint = f"Set text_field to the field that holds the text; the row has {', '.join(map(repr, row)) or 'none'}."
        raise DataError(f"has no field {field!r}", where=where, hint=hint)
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"its {field} is {text!r}, not text", where=where, hint="Repair or remove this row.")
    if not text.strip():
        raise DataError(f"its {field} is empty", where=where, hint="Remove this row.")
    return text


def _side(row: Mapping[str, Any], field: str, labels: Labels, where: str) -> bool | None:
    """Whether a row is positive; None where its label lies between the two thresholds."""
    if field not in row:
        hint = f"Set label_field to the field that holds the label; the row has {', '.join(map(repr, row)) or 'none'}."
        raise DataError(f"has no field {field!r}", where=where, hint=hint)
    label = row[field]
    if labels.positive_from is not None:
        below = labels.positive_from if labels.negative_below is None else labels.negative_below
        if isinstance(label, int | float) and label == label:
            return True if label >= labels.positive_from else False if label < below else None
        raise DataError(f"has label {label!r}, not a number", where=where, hint="Repair or remove this row.")
    if any(_same(label, one) for one in labels.positive):
        return True
    if any(_same(label, one) for one in labels.negative):
        return False
    known = f"positive {', '.join(map(repr, labels.positive))}; negative {', '.join(map(repr, labels.negative))}"
    hint = f"Known labels are {known}. Add it to `positive` or `negative`, or remove this row."
    raise DataError(f"has label {label!r}, which is neither positive nor negative", where=where, hint=hint)


def _same(label: Any, known: TextLabel) -> bool:
    return isinstance(label, str) == isinstance(known, str) and bool(label == known)


def _group(row: Mapping[str, Any], field: str | None, text: str, where: str) -> str:
    """The group that a row names; without one, texts that differ only in case, marks and white space are a group."""
    if field is None:
        return hashlib.sha256(" ".join(re.findall(r"\w+", text.lower())).encode("utf-8", "replace")).hexdigest()
    if row.get(field) is None:
        raise DataError(f"has no {field}", where=where, hint="Give every row a group, or remove group_field.")
    return str(row[field])


def _both_sides(examples: Sequence[TextExample], path: Path, field: str) -> None:
    positives = sum(example.positive for example in examples)
    if positives in (0, len(examples)):
        have = f"{len(examples)} texts, {positives} of them positive"
        hint = "Add texts of the missing class, or check `positive` and `negative`."
        raise DataError(f"has {have}, by {field}", where=str(path), hint=hint)


def _chosen(folder: Path, samples: int, seed: int) -> set[str]:
    """Ids of the training documents: in each domain those with the smallest hashes, evenly over domains."""
    smallest: dict[str, list[tuple[int, str]]] = {}
    for row in documents.read(folder, ["domain", "id"]):
        heap = smallest.setdefault(row["domain"], [])
        entry = (-int(_hash(row["id"], seed), 16), row["id"])  # negative: the heap's first is the largest hash
        if len(heap) < samples:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    ranked: list[tuple[int, int, str]] = []
    counts = Counter[str]()
    for spot, domain, name in sorted((-spot, domain, name) for domain, heap in smallest.items() for spot, name in heap):
        ranked.append((counts[domain], spot, name))
        counts[domain] += 1
    return {name for *_, name in sorted(ranked)[:samples]}


def _hash(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:sample:{name}".encode("utf-8", "replace")).hexdigest()
