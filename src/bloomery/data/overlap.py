"""
Decontamination: documents that hold text of the evaluation tasks, found by n-grams of words and by whole questions.

Words are runs of letters and digits of the text in Unicode's compatibility form (NFKC), case folded, without invisible
characters; line breaks, punctuation and underscores only separate them. Of what is written without spaces every
ideograph, kana and cluster of letters is a word (`unspaced`). A text of n words and more is found by any n-gram of it
(n = 13 as in Brown et al. 2020, Language models are few-shot learners, appendix C); a shorter one only whole, and only
from `min_question_words` words on, where two that are written without spaces count as one.
What more than MAX_ROWS rows share is a form of words of the task, not one of its questions, and is passed over.

    n-grams        sorted 64-bit hashes, behind a bit map that passes under one word of a hundred
    short ones     sorted hashes of their first words, then of all their words
"""

import hashlib
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from bloomery.core import files
from bloomery.core.errors import RunError
from bloomery.core.records import AGAIN, Count, read_record
from bloomery.data import document, examined, unspaced
from bloomery.data.engine import Part, Record
from bloomery.data.shingles import LARGEST_PIECE, Hashes, blocks, cuts, of_words, scan

Places = NDArray[np.int64]

MAX_ROWS = 8
SIEVE_BITS = 5
INVISIBLE = re.compile(f"[{unspaced.INVISIBLE}]")
INSIDE = re.compile(r"(?<=[^\W_])[^\w\s](?=[^\W_])")
WORD = re.compile(r"[^\W_]+")

HIT = pa.schema(
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is looked for."""

    files: tuple[Path, ...]
    fields: tuple[str, ...] = ()
    ngram_words: int = 13
    min_question_words: int = 4


class Table(NamedTuple):
    """Hashes, ascending, with the piece that each is of."""

    hashes: Hashes
    owners: Places
    sieve: NDArray[np.uint8]
    shift: int
    """A hash without that many low bits is the number of its bit in the sieve."""

    @classmethod
    def of(cls, hashes: Hashes, owners: Places) -> "Table":
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
    """Number of the row in `Index.rows`."""


def plain(text: str) -> str:
    """A text in the form that is compared."""
    if not text.isascii():
        text = unspaced.spaced(INVISIBLE.sub("", unicodedata.normalize("NFKC", text).casefold()))
    return text.replace("_", " ")


def is_question(text: str, words: int, least: int) -> bool:
    """Whether a text of some words is long enough to be looked for on its own."""
    return words >= least and (text.isascii() or 2 * words - unspaced.count(text) >= 2 * least)


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
    found, _ = scan(flat)
    ends: list[int] = np.searchsorted(found.starts, np.cumsum([len(text) + 1 for text in flat])).tolist()
    return found.hashes, ends


def hashed(texts: Sequence[str]) -> Iterator[Hashes]:
    """Hashes of the words of each text."""
    for begin, end in blocks(texts):
        words, ends = of_block(texts[begin:end])
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
class Index:
    """All that is looked for."""

    ngram_words: int
    min_question_words: int
    rows: list[tuple[str, int]]
    """Task and row of every row that has a text."""
    long: Table
    """Of n-grams."""
    starts: Table
    """Of the first words of shorter texts."""
    whole: dict[int, Table]
    """Of shorter texts, by their number of words."""

    @classmethod
    def of(cls, settings: Settings) -> "Index":
        """Of the tasks' files. Raises DataError where one is broken, or has no text."""
        size, least = settings.ngram_words, settings.min_question_words
        rows: list[tuple[str, int]] = []
        long: list[tuple[int, Hashes]] = []
        short: list[tuple[int, Hashes]] = []
        seen: set[bytes] = set()
        for path in examined.task_files(settings.files):
            pieces = [(one, text) for one in examined.pieces(path, settings.fields) for text in spellings(one.text)]
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
                with files.whole_file(folder / f"{name}-{column}.npy") as file:
                    np.save(file, values, allow_pickle=False)
        facts = {"ngram_words": self.ngram_words, "min_question_words": self.min_question_words, "rows": self.rows}
        files.write_json(folder / "rows.json", facts | {"lengths": list(self.whole)})

    @classmethod
    def load(cls, folder: Path) -> "Index":
        """What `save` has written."""
        facts = read_record(folder / "rows.json", SavedIndex)

        def table(name: str) -> Table:
            places = (folder / f"{name}-{column}.npy" for column in ("hashes", "owners"))
            try:
                return Table.of(*(np.load(place, allow_pickle=False) for place in places))
            except (OSError, ValueError) as error:
                raise RunError(f"its table {name} cannot be read: {error}", where=str(folder), cure=AGAIN) from None

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
        for begin, end in blocks(texts):
            words, ends = of_block(texts[begin:end])
            for place, length, row in sorted(self._matches(words)):
                text = bisect_right(ends, place)
                if place + length <= ends[text]:
                    yield Match(begin + text, place - (ends[text - 1] if text else 0), length, row)

    def _matches(self, words: Hashes) -> Iterator[tuple[int, int, int]]:
        """Word number, words and row of every match in a run of words."""
        size, least = self.ngram_words, self.min_question_words
        grams = of_words(words, size)
        for place in self.long.places(grams).tolist():
            for row in self.long.owners_of(grams[place]):
                yield place, size, row
        starts = self.starts.places(of_words(words, least))
        for length, table in self.whole.items():
            fitting = starts[starts + length <= len(words)]
            runs = words[np.add.outer(fitting, np.arange(length))]
            whole = of_words(runs.ravel(), length)[::length] if len(fitting) else np.zeros(0, np.uint64)
            for hit in table.places(whole).tolist():
                for row in table.owners_of(whole[hit]):
                    yield int(fitting[hit]), length, row


def _table(found: Sequence[tuple[int, Hashes]], *, common: bool = False) -> Table:
    """Of rows and hashes, each pair once; without what too many rows share, unless that is what is wanted."""
    hashes = np.concatenate([one for _, one in found]) if found else np.zeros(0, np.uint64)
    owners = np.repeat([row for row, _ in found], [len(one) for _, one in found]).astype(np.int64)
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    single = np.ones(len(hashes), np.bool_)
    single[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    hashes, owners = hashes[single], owners[single]
    _, place, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    rare = (counts[place] <= MAX_ROWS) | common
    return Table.of(hashes[rare], owners[rare])


def located(text: str, runs: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """Where in a text some of its words stand, by (number, count): the first character, and all as it stands there."""
    tokens, after = [], [0]
    for token in unspaced.PIECE.finditer(text):
        tokens.append(token.span())
        after.append(after[-1] + len(WORD.findall(plain(token[0]))))
    found = []
    for word, words in runs:
        begin = tokens[min(bisect_right(after, word), len(tokens)) - 1][0]
        end = tokens[min(bisect_left(after, word + words), len(tokens)) - 1][1]
        found.append((begin, text[begin:end]))
    return found


def hits(index: Index, batch: pa.RecordBatch) -> tuple[dict[int, tuple[str, int]], list[document.Row]]:
    """
    Of a batch of documents: row -> the task that it holds most of and how many n-grams, and HIT rows.

    One hit for each document and row of a task; of equally frequent tasks the first by name is told.
    """
    texts = batch.column("text").to_pylist()
    ids = batch.column("id").to_pylist()
    found: dict[tuple[int, int], list[Match]] = {}
    for match in index.find(texts):
        found.setdefault((match.text, match.row), []).append(match)
    tasks: dict[int, Counter[str]] = {}
    listed = []
    for text, group in groupby(sorted(found), lambda key: key[0]):
        keys = list(group)
        first = [min(found[key]) for key in keys]
        spots = located(texts[text], [(match.word, match.words) for match in first])
        for key, match, (place, matched) in zip(keys, first, spots, strict=True):
            task, number = index.rows[key[1]]
            tasks.setdefault(text, Counter())[task] += len(found[key])
            facts = (task, number, matched, ids[text], place, match.words, len(found[key]))
            listed.append(dict(zip(HIT.names, facts, strict=True)))
    worst = {text: min(counts.items(), key=lambda one: (-one[1], one[0])) for text, counts in tasks.items()}
    return worst, listed


BARRED = pa.schema([("row", pa.int64()), ("reason", pa.string()), ("value", pa.float64())])


def check(index: str, part: Part, out: Path) -> Record:
    """Write barred/NAME.parquet, the documents that hold a task's text, and hits/NAME.parquet; `index`: its folder."""
    loaded = Index.load(Path(index))
    names = [f"{folder}/{part.name}.parquet" for folder in ("barred", "hits")]
    barred: list[document.Row] = []
    begin = 0
    with document.PartWriter(out / names[1], HIT) as writer:
        for batch in document.part_batches(Path(part.given["path"]), ["id", "text"]):
            worst, listed = hits(loaded, batch)
            writer.write(listed)
            for row, (task, matches) in sorted(worst.items()):
                barred.append({"row": begin + row, "reason": f"decontaminate.{task}", "value": float(matches)})
            begin += batch.num_rows
    with document.PartWriter(out / names[0], BARRED) as writer:
        writer.write(barred)
    return {"files": names, "documents": begin, "barred": len(barred)}
