"""
Rows of parquet and csv files. What is wrong with a row is data: a `Problem`, and the next row comes after it.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import files
from bloomery.data import isolated, rows, unpack
from bloomery.data.rows import Found
from bloomery.data.unpack import BOMB_BYTES, BOMB_RATIO, Problem

BATCH_BYTES, ROWS_PER_BATCH = 2**26, 1_000
"""A batch of parquet rows holds about so many bytes or rows, whichever are fewer."""


def parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, Found]]:
    """
    Row number (from 0) and cells of every row. The last item is a problem with reason `torn` where the file is broken.

    A column "a.b" that is not there stands for all of the column a. A file that lacks one of `columns` is one problem,
    `no_column`. Raises DataError where the file cannot be opened.
    """
    number = 0
    try:
        files.check_regular(path)
        if (problem := crashes(path)) is not None:
            yield 0, problem
            return
        with pq.ParquetFile(path) as file:
            wanted = _wanted(file.schema_arrow.names, columns, optional)
            if isinstance(wanted, Problem):
                yield 0, wanted
                return
            for group in range(file.metadata.num_row_groups):
                if problem := _bomb(file.metadata.row_group(group), wanted):
                    yield number, problem
                    number += file.metadata.row_group(group).num_rows
                    continue
                for row in _group_rows(file, group, wanted):
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns, which it decodes
        if getattr(error, "errno", None) is not None:  # from the system; what Arrow raises of content has none
            raise unpack.unreadable(path, error) from None
        yield number, Problem("torn", number, f"is broken from row {number} on, or no parquet file: {error}")


def crashes(path: Path) -> Problem | None:
    """The problem `torn` of a parquet file that ends the process which opens it; None for any other file."""
    reason = isolated.problem(path)
    return Problem("torn", 0, f"this file {reason}", "Remove it or write it again.") if reason else None


def _group_rows(file: Any, group: int, wanted: Sequence[str]) -> Iterator[Found]:
    for batch in file.iter_batches(batch_size=_batch_rows(file, group), row_groups=[group], columns=wanted):
        cells = [_cells(batch.column(name)) for name in wanted]
        for row in zip(*cells, strict=True):
            yield next((cell for cell in row if isinstance(cell, Problem)), dict(zip(wanted, row, strict=True)))


def _bomb(group: Any, wanted: Sequence[str]) -> Problem | None:
    """What is wrong with a group of rows whose columns would unpack to far more than text does."""
    for column in map(group.column, range(group.num_columns)):
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if column.path_in_schema.partition(".")[0] in wanted and size > BOMB_BYTES and size > BOMB_RATIO * packed:
            what = f"the {packed:,} bytes of {group.num_rows:,} rows unpack to {size:,}: this is a bomb, not text"
            return Problem("bomb", size, what)
    return None


def _wanted(names: Sequence[str], columns: Sequence[str], optional: Sequence[str]) -> list[str] | Problem:
    found = []
    for name in (*columns, *optional):
        known = next((one for one in (name, name.partition(".")[0]) if one in names), None)
        if names.count(known) > 1:
            return Problem(
                "no_column", 0, f"has {names.count(known)} columns of the name {known!r}: which one is meant?"
            )
        if known is None and name in columns:
            return Problem("no_column", 0, f"has no column {name!r}; its columns: {', '.join(names)}")
        if known is not None:
            found.append(known)
    return list(dict.fromkeys(found))


def _batch_rows(file: Any, group: int) -> int:
    """Rows in a batch, so that long ones fit in memory: by the size that the file's footer tells of the group."""
    facts = file.metadata.row_group(group)
    bytes_per_row = facts.total_byte_size / max(1, facts.num_rows)
    return int(min(ROWS_PER_BATCH, max(1, BATCH_BYTES // max(1, bytes_per_row))))


def _cells(column: pa.Array) -> list[Any]:
    """Values as Python. Strings pass through bytes, because a writer may have put anything into them."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()).to_pylist()
        return [None if cell is None else _text(cell) for cell in raw]
    try:
        cells: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):  # somewhere inside of lists and objects: cell by cell, only its row is lost
        cells = [_cell(one) for one in column]
    return cells


def _text(cell: bytes) -> str | Problem:
    """What is wrong with a cell cannot be cured by converting the file."""
    text = rows.decode(cell)
    return replace(text, cure="") if isinstance(text, Problem) else text


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Problem(
            "not_utf8", error.start, f"a text in it holds 0x{error.object[error.start]:02x}, which is not UTF-8"
        )
    except (ValueError, OverflowError) as error:  # a date of the year 60000, two fields of one name in an object
        return Problem("bad_cell", 0, f"a {scalar.type} in it is no value that can be read: {error}")


def delimited(path: Path, delimiter: str, max_bytes: int) -> Iterator[tuple[int, Found]]:
    """
    Line number (from 1) and fields by name of every row of a .csv or .tsv file (.gz, .zst); its first row names them.

    RFC 4180, strictly: a quote that is not closed or stands where none may is a problem `not_csv` of its row, and so
    is a row of too few or too many fields. A row of more than `max_bytes` is `too_long`. A last row that is not whole
    is `torn`. Raises DataError where the file cannot be opened.
    """
    feed = _Feed(path, max_bytes)
    names: list[str] | None = None
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes + 1))  # of all readers; what bounds ours is the feed
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except _BadLineError as bad:
            yield feed.began, bad.problem
        except csv.Error as error:
            reason = "torn" if feed.ended else "not_csv"
            yield feed.began, Problem(reason, feed.began, f"the row that begins on line {feed.began}: {error}")
        else:
            if cells and names is None:
                names = cells
            elif cells and names is not None:
                yield feed.began, _named(names, cells, feed.began)
        feed.next_row()


def _named(names: list[str], cells: list[str], line: int) -> Found:
    if len(cells) != len(names):
        return Problem("not_csv", len(cells), f"line {line} has {len(cells)} fields instead of {len(names)}")
    return dict(zip(names, cells, strict=True))


class _BadLineError(Exception):
    """A line that cannot be a part of any row."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


class _Feed:
    """Lines for csv.reader, which goes on at the next row after an error; a generator would be over."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._lines = unpack.lines(path, max_bytes)
        self._max_bytes = max_bytes
        self._row_bytes = 0
        self.began = 0
        """Number of the line on which the present row began."""
        self.ended = False

    def next_row(self) -> None:
        self.began = self._row_bytes = 0

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        found = next(self._lines, None)
        if found is None:
            self.ended = True
            raise StopIteration
        number, line = found
        self.began = self.began or number
        if isinstance(line, Problem):
            raise _BadLineError(line)
        self._row_bytes += len(line)
        if self._row_bytes > self._max_bytes:
            raise _BadLineError(
                unpack.too_long(self._row_bytes, self._max_bytes, f"the row that begins on line {number}")
            )
        text = rows.decode(line, mark=number == 1)
        if isinstance(text, Problem):
            raise _BadLineError(replace(text, value=number, what=f"line {number}: {text.what}"))
        return text
