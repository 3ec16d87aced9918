"""
Finds documents that contain text of evaluation tasks, by word n-grams and whole questions.

Words are runs of letters and digits in Unicode's compatibility form (NFKC), case folded, without invisible
characters. Line breaks, punctuation and underscores only separate words. In scripts without spaces, every
ideograph, kana and cluster of letters is a word (see data/dedup/hashing.py).

A text of n words or more is found by any n-gram of it (n = 13 as in Brown et al. 2020, Language models are few-shot
learners, appendix C). A shorter text is found only as a whole, and only from `min_question_words` words on. For
this count, two words of a script without spaces count as one.

Text that more than MAX_ROWS rows share is skipped. It is a fixed phrase of the task and not one of its questions.

    n-grams        sorted 64-bit hashes, behind a bitmap that lets through fewer than one word in a hundred
    short texts    sorted hashes of their first words, then of all their words

The evaluation tasks supply the text that must not occur in training data. A row gives the texts of its fields
unchanged. It also gives them without the words that a harness adds ("Question:", "Choices:", "Answer:"). A text
with fewer words than an n-gram is also used together with its choices, and with the right choice. A question like
"The pleura" is thus distinguished from those two words alone.

The settings serve documents and conversations alike.

Settings, task texts and search share one file because all three must agree on what a word is.
"""

import hashlib
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from typing_extensions import TypedDict

from bloomery.core import io as core_io
from bloomery.core.config import Between, Config, DiskPath, PositiveLength
from bloomery.core.errors import DataError, RunError
from bloomery.core.extras import for_files, pa, pq
from bloomery.core.records import AGAIN, Count, read_record
from bloomery.data import documents
from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import CHARACTERS_PER_BLOCK, LARGEST_PIECE, Hashes, Places, cuts, of_words, scan
from bloomery.data.documents import batched_by_size, spans_by_size
from bloomery.data.executor import Part, PartRecord
from bloomery.data.readers import rows as readers_rows
from bloomery.data.readers.rows import ReadError

TEXT_FIELDS = (
    *("query", "question", "ctx", "context", "prompt", "text", "passage", "premise", "sentence", "story"),
    *("input", "instruction", "problem", "goal", "question_stem", "article", "context_options"),
)
"""
Fields that are looked at where a recipe names none, in whatever case. The last holds several texts, of which each is
one.
"""

CHOICES, ANSWERS = ("choices", "endings", "options", "answer_choices"), ("gold", "label", "answer", "answerKey")
LETTERS = "abcdefghij"
"""Fields of the choices of tasks that have one for each: A, B, C, D."""
FILLINGS = ("option1", "option2")
"""Fields of what may stand in the gap "_" of a sentence, as in WinoGrande."""
ENDINGS = ("continuation", "ending", "completion")
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet")
LONG_WORDS = 40
"""Texts of so many words are found by their n-grams, whatever stands around them."""

HEADING = re.compile(r"^[ \t]*(question|answer|choices|options|passage|context)[ \t]*:", re.IGNORECASE | re.MULTILINE)


class TaskText(NamedTuple):
    """A text of a task that may be found."""

    task: str
    row: int
    """From 1, in the task's file."""
    text: str


def task_files(places: Sequence[Path]) -> list[Path]:
    """The task files among the paths and in folders among them, in order. Raises DataError for a path without any."""
    files = []
    for task_path in places:
        inside = sorted(task_path.iterdir()) if task_path.is_dir() else [task_path]
        mine = [path for path in inside if path.is_file() and path.name.endswith(SUFFIXES)]
        if not mine:
            hint = f"Give files that end in {', '.join(SUFFIXES)}, or folders of such files."
            what = "holds no evaluation tasks" if task_path.exists() else "does not exist"
            raise DataError(what, where=str(task_path), hint=hint)
        files += mine
    return files


def task_name(path: Path) -> str:
    suffix = max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len)
    return path.name.removesuffix(suffix)


def task_texts(path: Path, fields: Sequence[str] = ()) -> Iterator[TaskText]:
    """
    The texts of every row of a task's file; the same text of one row may come twice.

    Raises DataError for a broken row, and where no row has one of the fields.
    """
    task, has_text, known = task_name(path), False, set[str]()
    for number, row in rows_of(path):
        known.update(row)
        for text in _texts(row, fields or TEXT_FIELDS):
            has_text = True
            yield TaskText(task, number, text)
    if not has_text:
        hint = f"Set decontaminate.fields to one of its fields: {', '.join(sorted(known)) or 'none'}."
        raise DataError("has no text to search for", where=str(path), hint=hint)


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number (from 1) and fields of every row of a task's file. Raises DataError for a broken one."""
    if path.suffix == ".parquet":
        if (problem := readers_rows.crashes(path)) is not None:
            raise DataError(problem.what, where=str(path), hint=problem.hint)
        try:
            core_io.check_regular(path)
            with pq.ParquetFile(path) as file:
                every = (row for batch in file.iter_batches() for row in batch.to_pylist())
                yield from enumerate(every, 1)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a text that is not UTF-8, a date
            raise readers_rows.unreadable(path, error) from None
        return
    for number, fields in readers_rows.jsonl(path):
        if isinstance(fields, ReadError):
            raise DataError(fields.what, where=str(path), hint="Repair or remove the file.")
        yield number, fields


def _texts(row: Mapping[str, Any], fields: Sequence[str]) -> Iterator[str]:
    row = {name.lower(): value for name, value in row.items()} | dict(row)
    ending = next((row[name] for name in ENDINGS if isinstance(row.get(name), str)), "")
    lettered = takewhile(lambda option: isinstance(option, str | int | float), map(row.get, LETTERS))
    listed = (value.get("text") if isinstance(value := row.get(name), Mapping) else value for name in CHOICES)
    choices: list[Any] = next((value for value in listed if isinstance(value, list)), list(lettered))
    fillings = [row[name] for name in FILLINGS if isinstance(row.get(name), str)]
    named = [str(choice) for choice in choices]
    right = _right(row, named)
    texts = []
    for field in fields:
        value = row.get(field)
        texts += [value] if isinstance(value, str) else []
        if isinstance(value, str) and value.count("_") == 1:
            texts += [value.replace("_", filling) for filling in fillings]
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            texts += value
            shared = _common_start(value)
            texts += [f"{shared} {ending}"] if ending and shared else []
    if len(texts) > 1 and sum(map(_words, texts)) < LONG_WORDS:
        yield "\n".join(texts)
    for text in texts:
        yield text
        for piece in (text, *_parts(text)):
            if _words(piece) < LONG_WORDS:  # the n-grams of a longer one are those of the text
                yield piece
                yield from (f"{piece}\n{more}" for more in (ending, right, "\n".join(named)) if more)


def _words(text: str) -> int:
    return len(text.split())


def _right(row: Mapping[str, Any], choices: Sequence[str]) -> str:
    """The choice that the row marks as right, or ""."""
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


MAX_ROWS = 8
SIEVE_BITS = 5
INVISIBLE = re.compile(f"[{hashing.INVISIBLE}]")
INSIDE = re.compile(r"(?<=[^\W_])[^\w\s](?=[^\W_])")
WORD = re.compile(r"[^\W_]+")

HIT = cache(
    lambda: pa.schema(
        [
            pa.field("task", pa.string(), nullable=False),
            pa.field("row", pa.int64(), nullable=False),  # from 1, in the task's file
            pa.field("matched", pa.string(), nullable=False),  # as it stands in the document
            pa.field("id", pa.string(), nullable=False),  # of the document
            pa.field("place", pa.int64(), nullable=False),  # in characters from its beginning
            pa.field("words", pa.int64(), nullable=False),  # in the first match
            pa.field("matches", pa.int64(), nullable=False),  # of different n-grams of this row in the document
        ]
    )
)


@dataclass(frozen=True, kw_only=True)
class OverlapSettings:
    """What is looked for."""

    files: tuple[Path, ...]
    fields: tuple[str, ...] = ()
    ngram_words: int = 13
    min_question_words: int = 4


class HashTable(NamedTuple):
    """Hashes, ascending, with the piece that each is of."""

    hashes: Hashes
    owners: Places
    sieve: NDArray[np.uint8]
    shift: int
    """A hash without that many low bits is the number of its bit in the sieve."""

    @classmethod
    def of(cls, hashes: Hashes, owners: Places) -> "HashTable":
        """`hashes` ascend."""
        bits = max(10, len(hashes).bit_length() + SIEVE_BITS)
        sieve = np.zeros(1 << bits - 3, np.uint8)
        places = hashes >> np.uint64(64 - bits)
        np.bitwise_or.at(sieve, places >> np.uint64(3), (1 << (places & np.uint64(7))).astype(np.uint8))
        return cls(hashes, owners, sieve, 64 - bits)

    def places(self, hashes: Hashes) -> Places:
        """Where in `hashes` stands one of the table's."""
        where = hashes >> np.uint64(self.shift)
        bits = self.sieve.take((where >> np.uint64(3)).astype(np.int64)) >> (where & np.uint64(7)).astype(np.uint8)
        maybe = np.flatnonzero(bits & 1)
        near = np.searchsorted(self.hashes, hashes[maybe])
        near[near == len(self.hashes)] = 0
        return maybe[self.hashes[near] == hashes[maybe]] if len(self.hashes) else maybe[:0]

    def owners_of(self, value: np.uint64) -> list[int]:
        first, last = (int(np.searchsorted(self.hashes, value, side)) for side in ("left", "right"))
        owners: list[int] = self.owners[first:last].tolist()
        return owners


class Match(NamedTuple):
    """Some words of a text that are some row's."""

    text: int
    word: int
    words: int
    row: int
    """Number of the row in `OverlapIndex.rows`."""


def plain(text: str) -> str:
    """A text in the form that is compared."""
    if not text.isascii():
        text = hashing.spaced(INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold()))
    return text.replace("_", " ")


def is_question(text: str, words: int, least: int) -> bool:
    """Whether a text of some words is long enough to be looked for on its own."""
    return words >= least and (text.isascii() or 2 * words - hashing.count(text) >= 2 * least)


def spellings(text: str) -> list[str]:
    """A task's text, and with the marks inside its words left out, as in "womans hair" and "shortrun"."""
    closed = INSIDE.sub("", text)
    return [text] if closed == text else [text, closed]


def of_block(texts: Sequence[str]) -> tuple[Hashes, list[int]]:
    """Hashes of all words of one block of texts, and where each text's end."""
    flat = [plain(text) for text in texts]
    if len(flat) == 1 and len(flat[0]) > LARGEST_PIECE:
        words = np.concatenate([scan([flat[0][begin:end]])[0].hashes for begin, end in cuts(flat[0])])
        return words, [len(words)]
    pieces, _ = scan(flat)
    ends: list[int] = np.searchsorted(pieces.starts, np.cumsum([len(text) + 1 for text in flat])).tolist()
    return pieces.hashes, ends


def hashed(texts: Sequence[str]) -> Iterator[Hashes]:
    for block in batched_by_size(texts, CHARACTERS_PER_BLOCK):
        words, ends = of_block(block)
        for first, last in pairwise([0, *ends]):
            yield words[first:last]


SavedRow = Annotated[list[str | Count], Field(min_length=2, max_length=2)]
"""A task, and the number of a row."""


class SavedIndex(TypedDict):
    """What rows.json holds."""

    ngram_words: Count
    min_question_words: Count
    rows: list[SavedRow]
    lengths: list[Count]


@dataclass(frozen=True, kw_only=True)
class OverlapIndex:
    """All that is looked for."""

    ngram_words: int
    min_question_words: int
    rows: list[tuple[str, int]]
    """Task and row of every row that has a text."""
    long: HashTable
    """Of n-grams."""
    starts: HashTable
    """Of the first words of shorter texts."""
    whole: dict[int, HashTable]
    """Of shorter texts, by their number of words."""

    @classmethod
    def of(cls, settings: OverlapSettings) -> "OverlapIndex":
        """Of the tasks' files. Raises DataError where one is broken, or has no text."""
        size, least = settings.ngram_words, settings.min_question_words
        rows: list[tuple[str, int]] = []
        long: list[tuple[int, Hashes]] = []
        short: list[tuple[int, Hashes]] = []
        seen: set[bytes] = set()
        for path in task_files(settings.files):
            pieces = [(one, text) for one in task_texts(path, settings.fields) for text in spellings(one.text)]
            for (piece, text), words in zip(pieces, hashed([text for _, text in pieces]), strict=True):
                if not rows or rows[-1] != (piece.task, piece.row):
                    rows.append((piece.task, piece.row))
                if (content := hashlib.blake2b(words.tobytes(), digest_size=16).digest()) in seen:
                    continue  # the first row that has it stands for all: a text of many rows is no form
                seen.add(content)
                if len(words) >= size:
                    long.append((len(rows) - 1, of_words(words, size)))
                elif is_question(text, len(words), least):
                    short.append((len(rows) - 1, words))
        whole: dict[int, list[tuple[int, Hashes]]] = {}
        for row, words in short:
            whole.setdefault(len(words), []).append((row, of_words(words, len(words))))
        return cls(
            ngram_words=size,
            min_question_words=least,
            rows=rows,
            long=_table(long),
            starts=_table([(row, of_words(words[:least], least)) for row, words in short], common=True),
            whole={length: _table(found, common=True) for length, found in sorted(whole.items())},
        )

    def save(self, folder: Path) -> None:
        """Write arrays, and rows.json last."""
        tables = {"long": self.long, "starts": self.starts}
        tables |= {f"whole-{length}": table for length, table in self.whole.items()}
        for name, table in tables.items():
            for column, values in (("hashes", table.hashes), ("owners", table.owners)):
                with core_io.whole_file(folder / f"{name}-{column}.npy") as file:
                    np.save(file, values, allow_pickle=False)
        facts = {"ngram_words": self.ngram_words, "min_question_words": self.min_question_words, "rows": self.rows}
        core_io.write_json(folder / "rows.json", facts | {"lengths": list(self.whole)})

    @classmethod
    def load(cls, folder: Path) -> "OverlapIndex":
        """What `save` has written."""
        facts = read_record(folder / "rows.json", SavedIndex)

        def table(name: str) -> HashTable:
            places = (folder / f"{name}-{column}.npy" for column in ("hashes", "owners"))
            try:
                return HashTable.of(*(np.load(place, allow_pickle=False) for place in places))
            except (OSError, ValueError) as error:
                raise RunError(f"its table {name} cannot be read: {error}", where=str(folder), hint=AGAIN) from None

        return cls(
            ngram_words=facts["ngram_words"],
            min_question_words=facts["min_question_words"],
            rows=[(str(task), int(row)) for task, row in facts["rows"]],
            long=table("long"),
            starts=table("starts"),
            whole={length: table(f"whole-{length}") for length in facts["lengths"]},
        )

    def find(self, texts: Sequence[str]) -> Iterator[Match]:
        """The matches in some texts, in their order; more than one for the same row where several n-grams are there."""
        for begin, end in spans_by_size(map(len, texts), CHARACTERS_PER_BLOCK):
            words, ends = of_block(texts[begin:end])
            for position, length, row in sorted(self._matches(words)):
                text = bisect_right(ends, position)
                if position + length <= ends[text]:
                    yield Match(begin + text, position - (ends[text - 1] if text else 0), length, row)

    def _matches(self, words: Hashes) -> Iterator[tuple[int, int, int]]:
        """Word number, words and row of every match in a run of words."""
        size, least = self.ngram_words, self.min_question_words
        grams = of_words(words, size)
        for position in self.long.places(grams).tolist():
            for row in self.long.owners_of(grams[position]):
                yield position, size, row
        starts = self.starts.places(of_words(words, least))
        for length, table in self.whole.items():
            fitting = starts[starts + length <= len(words)]
            runs = words[np.add.outer(fitting, np.arange(length))]
            whole = of_words(runs.ravel(), length)[::length] if len(fitting) else np.zeros(0, np.uint64)
            for hit in table.places(whole).tolist():
                for row in table.owners_of(whole[hit]):
                    yield int(fitting[hit]), length, row


def _table(row_hashes: Sequence[tuple[int, Hashes]], *, common: bool = False) -> HashTable:
    """Of rows and hashes, each pair once; without what too many rows share, unless that is what is wanted."""
    hashes = np.concatenate([one for _, one in row_hashes]) if row_hashes else np.zeros(0, np.uint64)
    owners = np.repeat([row for row, _ in row_hashes], [len(one) for _, one in row_hashes]).astype(np.int64)
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    single = np.ones(len(hashes), np.bool_)
    single[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    hashes, owners = hashes[single], owners[single]
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    rare = (counts[inverse] <= MAX_ROWS) | common
    return HashTable.of(hashes[rare], owners[rare])


def located(text: str, runs: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """Where in a text some of its words stand, by (number, count): the first character, and all as it stands there."""
    tokens, after = [], [0]
    for token in hashing.PIECE.finditer(text):
        tokens.append(token.span())
        after.append(after[-1] + len(WORD.findall(plain(token[0]))))
    spots = []
    for word, words in runs:
        begin = tokens[min(bisect_right(after, word), len(tokens)) - 1][0]
        end = tokens[min(bisect_left(after, word + words), len(tokens)) - 1][1]
        spots.append((begin, text[begin:end]))
    return spots


def hits(
    index: OverlapIndex, batch: "pa.RecordBatch"
) -> tuple[dict[int, tuple[str, int]], list[documents.DocumentRow]]:
    """
    For a batch of documents: row -> the task with the most n-grams in the document and their number, and HIT rows.

    There is one hit for each document and row of a task. Among equally frequent tasks, the first by name is given.
    """
    texts = batch.column("text").to_pylist()
    ids = batch.column("id").to_pylist()
    matches: dict[tuple[int, int], list[Match]] = {}
    for match in index.find(texts):
        matches.setdefault((match.text, match.row), []).append(match)
    tasks: dict[int, Counter[str]] = {}
    listed = []
    for text, group in groupby(sorted(matches), lambda key: key[0]):
        keys = list(group)
        first = [min(matches[key]) for key in keys]
        spots = located(texts[text], [(match.word, match.words) for match in first])
        for key, match, (begin, matched) in zip(keys, first, spots, strict=True):
            task, number = index.rows[key[1]]
            tasks.setdefault(text, Counter())[task] += len(matches[key])
            facts = (task, number, matched, ids[text], begin, match.words, len(matches[key]))
            listed.append(dict(zip(HIT().names, facts, strict=True)))
    worst = {text: min(counts.items(), key=lambda item: (-item[1], item[0])) for text, counts in tasks.items()}
    return worst, listed


BARRED = cache(lambda: pa.schema([("row", pa.int64()), ("reason", pa.string()), ("value", pa.float64())]))


def check(index: str, chunk: Part, out: Path) -> PartRecord:
    """Write barred/NAME.parquet, the documents that hold a task's text, and hits/NAME.parquet; `index`: its folder."""
    loaded = OverlapIndex.load(Path(index))
    names = [f"{folder}/{chunk.name}.parquet" for folder in ("barred", "hits")]
    barred: list[documents.DocumentRow] = []
    begin = 0
    with documents.PartWriter(out / names[1], HIT()) as writer:
        for batch in documents.part_batches(Path(chunk.inputs["path"]), ["id", "text"]):
            worst, listed = hits(loaded, batch)
            writer.write(listed)
            for row, (task, matches) in sorted(worst.items()):
                barred.append({"row": begin + row, "reason": f"decontaminate.{task}", "value": float(matches)})
            begin += batch.num_rows
    with documents.PartWriter(out / names[0], BARRED()) as writer:
        writer.write(barred)
    return {"files": names, "documents": begin, "barred": len(barred)}


class Sought(Config):
    files: tuple[DiskPath, ...] = ()
    """Files of tasks, or folders of them: jsonl (.zst and .gz too) and parquet. The file name is the task's name."""
    tasks: tuple[str, ...] = ()
    """Names of tasks of [evaluate], with its prompts."""
    data: tuple[DiskPath, ...] = ()
    """Files of these tasks, or folders of files. None: from the hub."""
    fields: tuple[str, ...] = ()
    """Fields of a row with the text to look for. Empty: the usual fields of evaluation sets (query, …)."""
    ngram_words: Annotated[int, Between(5, 1000, "fewer words are in every text, and more in none")] = 13
    """How many consecutive words of a text make a match. A shorter text must match completely."""
    min_question_words: PositiveLength = 4
    """
    Texts of fewer words are searched only together with their choices. In scripts without spaces, two characters count
    as a word here.
    """

    def packages(self) -> tuple[str, ...]:
        return for_files((*self.files, *self.data))

    @field_validator("files", "data")
    @classmethod
    def _may_lie_at_home(cls, places: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(place.expanduser() for place in places)

    @model_validator(mode="after")
    def _something_is_looked_for(self) -> "Sought":
        if not self.files and not self.tasks:
            raise ValueError("neither files nor tasks are set, so there is nothing to search for")
        return self

    @model_validator(mode="after")
    def _questions_are_shorter(self) -> "Sought":
        if self.min_question_words >= self.ngram_words:
            raise ValueError(f"min_question_words={self.min_question_words} must be less than {self.ngram_words=}")
        return self
