"""
Reads rows of text, JSONL, JSON, Parquet and CSV files; a broken row comes out as an error.

Errors are data: a read error stands for the broken text or row, and the next row comes after it.

A file that holds one JSON list of objects is read object by object, and never as a whole.

The row formats share one file because they share the checks of text and the form of errors.
"""

import codecs
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.extras import pa, pq
from bloomery.data import isolated
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers.bytes import BOMB_BYTES, BOMB_RATIO, ByteSpan
from bloomery.data.readers.bytes import ReadError as ReadError
from bloomery.data.readers.bytes import unreadable as unreadable

RowOrError = dict[str, Any] | ReadError
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks, the longer first. They override every other statement of the encoding."""
CONVERT = 'Convert it to UTF-8, as iconv -f {} -t UTF-8 does{}; of text files, encoding = "detect" finds out by itself.'
UNMARKED = CONVERT.format("WINDOWS-1252", ", if it is that")
"""The hint of bytes that say nothing of their encoding."""


def decode(data: bytes, *, mark: bool = True) -> str | ReadError:
    """Bytes as text, without a byte order `mark` where one may stand. Anything but UTF-8 without NUL is a problem."""
    mark_bytes = len(codecs.BOM_UTF8) if mark and data.startswith(codecs.BOM_UTF8) else 0
    if mark and (other := marked(data)):
        return other
    if (nul := data.find(b"\0")) >= 0:
        return ReadError("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
    try:
        return data[mark_bytes:].decode("utf-8")
    except UnicodeDecodeError as error:
        spot = error.start + mark_bytes
        what = f"byte offset {spot} holds 0x{data[spot]:02x}, which is not UTF-8"
        return ReadError("not_utf8", spot, what, UNMARKED)


def marked(data: bytes) -> ReadError | None:
    """What is wrong with bytes whose byte order mark says that they are not UTF-8."""
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    name = encoding[: len("utf-16")].upper()
    what = f"it begins with the byte order mark of {name}, which is not UTF-8"
    return None if encoding == "utf-8" else ReadError("not_utf8", 0, what, CONVERT.format(name, ""))


def checked(text: str) -> str | ReadError:
    """Text that a document can be made of, or why not: it is empty, holds a NUL, or half of a surrogate pair."""
    if not text or text.isspace():
        return ReadError("empty", 0, "is empty")
    if (nul := text.find("\0")) >= 0:
        return ReadError("binary", nul, f"character {nul} is a NUL: this is not text")
    try:
        utf8_bytes(text)
    except UnicodeEncodeError as error:
        spot = error.start
        return ReadError("not_unicode", spot, f"character {spot} is half a surrogate pair, which UTF-8 cannot hold")
    return text


def parts(text: str | ReadError, separator: str) -> list[tuple[str, str | ReadError]]:
    """
    What stands between separators, blank parts left out, each with its number as the end of an id (":1", …).

    Without a separator, and for what is blank or a problem, it is one part without a number.
    """
    if isinstance(text, ReadError) or not separator or not text or text.isspace():
        return [("", text)]
    pieces = [part for part in text.split(separator) if part and not part.isspace()]
    return [(f":{number}", part) for number, part in enumerate(pieces, 1)]


def utf8_bytes(text: str) -> int:
    """How many bytes a text has as UTF-8; known at once where it is ASCII. Raises UnicodeEncodeError."""
    return len(text) if text.isascii() else len(text.encode())


def jsonl(
    path: Path, max_bytes: int | None = None, span: ByteSpan | None = None, *, setting: str = readers_bytes.DOCUMENT
) -> Iterator[tuple[int, RowOrError]]:
    """
    Line number (from 1) and object of every line of a .jsonl, .jsonl.zst or .jsonl.gz file, or of a span of one that is
    not compressed; blank lines are passed.

    A line of more than `max_bytes`, which the source calls `setting`, is a problem `too_long`. The last item is a
    problem with reason `torn` where the file ends too early, or `bomb`. Raises DataError where it cannot be opened.
    """
    for number, line in readers_bytes.lines(path, max_bytes, blank=False, span=span, setting=setting):
        if isinstance(line, ReadError):
            yield number, line
            continue
        if line.isspace():
            continue
        yield number, _object(line, number)


ONE_LINE = "Write each object on a line of its own. The program jq does this with -c '.', or with -c '.[]' for a list."


def _object(line: bytes, number: int) -> RowOrError:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        if number == 1 and (other := marked(line)):
            return other
        what = f"line {number}, byte {error.start}, holds 0x{line[error.start]:02x}, which is not UTF-8"
        return ReadError("not_utf8", number, what, UNMARKED)
    except (ValueError, RecursionError) as error:
        what = f"line {number} is not JSON ({error})"
        if line.endswith(b"\n") or str(error).startswith("Extra data"):
            return ReadError("not_json", number, what, ONE_LINE)
        return ReadError("torn", number, f"{what}; it is the last line and incomplete: the file was cut off")
    if not isinstance(value, dict):
        what = f"line {number} holds {type(value).__name__} instead of an object"
        return ReadError("not_json", number, what, ONE_LINE)
    return value


def at(row: dict[str, Any], field: str) -> Any:
    """The value of a field, or None. "a.b" is the field b of the object a, unless there is a field of that name."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def number(value: Any) -> float | None:
    """A finite number as it stands in a row, or None. Truth values are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def spelled_number(cell: str) -> int | float | str:
    """The number that a cell of a table spells, such as 4 or 0.5; the cell itself where it spells none."""
    if NUMBER.fullmatch(cell) is None:
        return cell
    return int(cell) if WHOLE.fullmatch(cell) else float(cell)


NUMBER, WHOLE = (
    re.compile(r"[+-]?\d{1,300}(\.\d{0,300})?([eE][+-]?\d{1,3})?", re.ASCII),
    re.compile(r"[+-]?\d+", re.ASCII),
)
BATCH_BYTES, ROWS_PER_BATCH = 2**26, 1_000
"""A batch of parquet rows holds about so many bytes or rows, whichever are fewer."""


def parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, RowOrError]]:
    """
    Row number (from 0) and cells of every row. The last item is a problem with reason `torn` where the file is broken.

    A column "a.b" that is not there stands for all of the column a. A file that lacks one of `columns` is one problem,
    `no_column`. Raises DataError where the file cannot be opened.
    """
    number = 0
    try:
        core_io.check_regular(path)
        if (problem := crashes(path)) is not None:
            yield 0, problem
            return
        with pq.ParquetFile(path) as file:
            selected = _wanted(file.schema_arrow.names, columns, optional)
            if isinstance(selected, ReadError):
                yield 0, selected
                return
            for group in range(file.metadata.num_row_groups):
                if problem := _bomb(file.metadata.row_group(group), selected):
                    yield number, problem
                    number += file.metadata.row_group(group).num_rows
                    continue
                for row in _group_rows(file, group, selected):
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns, which it decodes
        if getattr(error, "errno", None) is not None:  # from the system; what Arrow raises of content has none
            raise readers_bytes.unreadable(path, error) from None
        yield (
            number,
            ReadError("torn", number, f"is not a valid Parquet file, or is broken from row {number} on: {error}"),
        )


def crashes(path: Path) -> ReadError | None:
    """The problem `torn` of a parquet file that ends the process which opens it; None for any other file."""
    reason = isolated.problem(path)
    return ReadError("torn", 0, f"this file {reason}", "Remove it or write it again.") if reason else None


def _group_rows(file: Any, group: int, selected: Sequence[str]) -> Iterator[RowOrError]:
    for batch in file.iter_batches(batch_size=_batch_rows(file, group), row_groups=[group], columns=selected):
        cells = [_cells(batch.column(name)) for name in selected]
        for row in zip(*cells, strict=True):
            yield next((cell for cell in row if isinstance(cell, ReadError)), dict(zip(selected, row, strict=True)))


def _bomb(group: Any, selected: Sequence[str]) -> ReadError | None:
    """What is wrong with a group of rows whose columns would unpack to far more than text does."""
    for column in map(group.column, range(group.num_columns)):
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if column.path_in_schema.partition(".")[0] in selected and size > BOMB_BYTES and size > BOMB_RATIO * packed:
            what = f"the {packed:,} bytes of {group.num_rows:,} rows unpack to {size:,}: a decompression bomb"
            return ReadError("bomb", size, what)
    return None


def _wanted(names: Sequence[str], columns: Sequence[str], optional: Sequence[str]) -> list[str] | ReadError:
    selected = []
    for name in (*columns, *optional):
        known = next((one for one in (name, name.partition(".")[0]) if one in names), None)
        if names.count(known) > 1:
            return ReadError("no_column", 0, f"has {names.count(known)} columns named {known!r}; rename all but one")
        if known is None and name in columns:
            return ReadError("no_column", 0, f"has no column {name!r}; its columns: {', '.join(names)}")
        if known is not None:
            selected.append(known)
    return list(dict.fromkeys(selected))


def _batch_rows(file: Any, group: int) -> int:
    """Rows in a batch, so that long ones fit in memory: by the size that the file's footer tells of the group."""
    facts = file.metadata.row_group(group)
    bytes_per_row = facts.total_byte_size / max(1, facts.num_rows)
    return int(min(ROWS_PER_BATCH, max(1, BATCH_BYTES // max(1, bytes_per_row))))


def _cells(column: "pa.Array") -> list[Any]:
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


def _text(cell: bytes) -> str | ReadError:
    """What is wrong with a cell cannot be cured by converting the file."""
    text = decode(cell)
    return replace(text, hint="") if isinstance(text, ReadError) else text


def _cell(scalar: "pa.Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return ReadError(
            "not_utf8", error.start, f"a text in it holds 0x{error.object[error.start]:02x}, which is not UTF-8"
        )
    except (ValueError, OverflowError) as error:  # a date of the year 60000, two fields of one name in an object
        return ReadError("bad_cell", 0, f"a {scalar.type} in it cannot be read: {error}")


def delimited(
    path: Path, delimiter: str, max_bytes: int, columns: Sequence[str] = (), optional: Sequence[str] = ()
) -> Iterator[tuple[int, RowOrError]]:
    """
    Line number (from 1) and fields by name of every row of a .csv or .tsv file (.gz, .zst); its first row names them.

    RFC 4180, strictly. A quote that is not closed or stands where none may is a problem `not_csv` of its row, which
    ends with the next quote. So is a row of too few or too many fields. A row of more than `max_bytes` is `too_long`.
    A last row that is not whole is `torn`. A file that lacks one of `columns`, or has two of that name or of an
    `optional` name, is one problem, `no_column`. Raises DataError where the file cannot be opened.
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
            lost = f"line {feed.began}" if feed.last == feed.began else f"lines {feed.began} to {feed.last}"
            yield feed.began, ReadError(reason, feed.began, f"one row of {lost}: {error}")
        else:
            if cells and names is None:
                names = cells
                if isinstance(selected := _wanted(names, columns, optional), ReadError):
                    yield feed.began, replace(selected, hint=_other_delimiter(names, delimiter))
                    return
            elif cells and names is not None:
                yield feed.began, _named(names, cells, feed.began)
        feed.next_row()


def _other_delimiter(names: list[str], delimiter: str) -> str:
    """A hint for a table whose only name holds what other programs put between names."""
    other = next((one for one in (";", "\t", ",", "|") if one in names[0]), None) if len(names) == 1 else None
    between = f"The first row seems to have {other!r} between its names, but {delimiter!r} is read"
    return "" if other is None else f"{between}. A .tsv file has tabs, and a .csv file commas: convert the file."


def _named(names: list[str], cells: list[str], line: int) -> RowOrError:
    if len(cells) != len(names):
        return ReadError("not_csv", len(cells), f"line {line} has {len(cells)} fields instead of {len(names)}")
    return dict(zip(names, cells, strict=True))


class _BadLineError(Exception):
    """A line that cannot be a part of any row."""

    def __init__(self, problem: ReadError) -> None:
        self.problem = problem


class _Feed:
    """Lines for csv.reader. It continues at the next row after an error, where a generator would have ended."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._lines = readers_bytes.lines(path, max_bytes)
        self._max_bytes = max_bytes
        self._row_bytes = 0
        self.began = 0
        """Number of the line on which the present row began."""
        self.last = 0
        """Number of the last line that was read."""
        self.ended = False

    def next_row(self) -> None:
        self.began = self._row_bytes = 0

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        item = next(self._lines, None)
        if item is None:
            self.ended = True
            raise StopIteration
        number, line = item
        self.began, self.last = self.began or number, number
        if isinstance(line, ReadError):
            raise _BadLineError(line)
        self._row_bytes += len(line)
        if self._row_bytes > self._max_bytes:
            raise _BadLineError(
                readers_bytes.too_long(self._row_bytes, self._max_bytes, f"the row that begins on line {number}")
            )
        text = decode(line, mark=number == 1)
        if isinstance(text, ReadError):
            raise _BadLineError(replace(text, value=number, what=f"line {number}: {text.what}"))
        return text


SPACE = re.compile(r"[ \t\r\n]*")
BETWEEN = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
BRACKETS = re.compile(r'[\[\]{}"]')
IN_QUOTES = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
NOT_DECODED = re.compile("[\udc80-\udcff]")
"""A byte that is no UTF-8, as the error handler surrogateescape keeps it."""


def holds_rows(path: Path, max_bytes: int) -> bool:
    """
    Whether a .json, .json.gz or .json.zst file is read by `objects`. An empty file is not, nor is one value over
    several lines of at most `max_bytes`, as files with settings are.
    """
    text = _Text(path)
    text.skip(SPACE)
    if text.held.startswith("[", text.at):
        return True
    data = readers_bytes.whole(path, max_bytes)
    if isinstance(data, ReadError):
        return True
    if not data.strip():
        return False
    try:
        json.loads(data.strip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        pass
    else:
        return True
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return True
    return False


def placed(numbered_rows: Iterable[tuple[int, RowOrError]]) -> Iterator[tuple[str, RowOrError]]:
    """Rows with the suffix of location and ID: ":LINE", and ":LINE#COUNT" from the second row of a line on."""
    last, count = -1, 0
    for line, row in numbered_rows:
        last, count = line, count + 1 if line == last else 1
        yield f":{line}" if count == 1 else f":{line}#{count}", row


def objects(path: Path, max_bytes: int, *, setting: str = readers_bytes.DOCUMENT) -> Iterator[tuple[int, RowOrError]]:
    """
    Line (from 1) on which it begins, and object, of every element of a .json, .json.gz or .json.zst file. A file that
    begins with no list is read as lines of objects: many are called so. Lists may follow each other.

    An element is a problem if it is no object, is not UTF-8, or has more than `max_bytes`, which the source calls
    `setting`. The next one comes after it. Reading ends at text that is no JSON: the last item is then the problem
    `torn`.
    """
    text = _Text(path)
    text.skip(SPACE)
    if not text.held.startswith("[", text.at):
        yield from jsonl(path, max_bytes, setting=setting)
        return
    text.at += 1
    while True:
        text.skip(BETWEEN)
        if text.held.startswith("]", text.at):
            text.at += 1
            text.skip(SPACE)
            if text.held.startswith("[", text.at):
                text.at += 1
                continue
            if text.problem or text.at < len(text.held):
                what = f"the list ends before line {text.line} does; the text after it is not read"
                yield text.line, text.problem or ReadError("torn", text.line, what)
            return
        line = text.line
        value = text.element(max_bytes, setting)
        yield line, value
        if isinstance(value, ReadError) and value.reason not in OF_ELEMENTS:
            return


OF_ELEMENTS = ("not_json", "not_utf8", "too_long")
"""What is wrong with one element of a list, which others may follow."""


class _Text:
    """The text of a file, of which only a part is held."""

    def __init__(self, path: Path) -> None:
        self._chunks = readers_bytes.chunks(path)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.held, self.at = "", 0
        """The text in memory, and the position in it that is read next."""
        self._passed, self._counted = 1, 0
        self._has_bad_bytes = False
        self.problem: ReadError | None = None
        """Why the rest of the file cannot be read."""

    @property
    def line(self) -> int:
        """Number of the line that is read next."""
        self._passed += self.held.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._passed

    def more(self) -> bool:
        """Hold at least twice of what is left to read; False where there is no more."""
        line, target_size, pieces = self.line, max(1, len(self.held) - self.at), [self.held[self.at :]]
        self.held, self.at, self._passed, self._counted = "", 0, line, 0
        size = 0
        while size < target_size and self.problem is None and (chunk := next(self._chunks, None)) is not None:
            if isinstance(chunk, ReadError):
                self.problem = chunk
                break
            pieces.append(self._decoder.decode(chunk))
            if not pieces[-1].isascii() and NOT_DECODED.search(pieces[-1]):
                self._has_bad_bytes = True
            size += len(pieces[-1])
        self.held = "".join(pieces)
        return size > 0

    def skip(self, what: re.Pattern[str]) -> None:
        """Go on behind what matches, reading more where it reaches the end of what is held."""
        while True:
            self.at = what.match(self.held, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.held) or not self.more():
                return

    def element(self, max_bytes: int, setting: str) -> RowOrError:
        """The object that begins here, or what is wrong with it. Reading continues behind it."""
        line = self.line
        what = f"the element that begins on line {line}"
        while True:
            try:
                value, end = JSON.raw_decode(self.held, self.at)
                break
            except json.JSONDecodeError as error:
                if len(self.held) - self.at > max_bytes:
                    if (size := self.pass_value()) > max_bytes:
                        return readers_bytes.too_long(size, max_bytes, what, "at least ", setting=setting)
                elif self.more():
                    continue
                what = f"the list is broken in the element on line {line}; the text after it is not read ({error})"
                return self.problem or ReadError("torn", line, what)
            except (ValueError, RecursionError) as error:  # it is JSON, but has too many digits or levels for Python
                if self.pass_value():
                    return ReadError("not_json", line, f"{what} cannot be read ({error})")
                return self.problem or ReadError("torn", line, f"{what} has no end; the text after it is not read")
        begin, self.at = self.at, end
        if self._has_bad_bytes and (byte := NOT_DECODED.search(self.held, begin, end)):
            return ReadError(
                "not_utf8", line, f"{what} holds 0x{ord(byte[0]) - 0xDC00:02x}, which is not UTF-8", UNMARKED
            )
        if 4 * (end - begin) > max_bytes and (size := utf8_bytes(self.held[begin:end])) > max_bytes:
            return readers_bytes.too_long(size, max_bytes, what, setting=setting)
        if isinstance(value, dict):
            return value
        return ReadError(
            "not_json", line, f"the element on line {line} holds {type(value).__name__} instead of an object"
        )

    def pass_value(self) -> int:
        """Pass the list, object or string that begins here. Gives its characters, 0 where it has no end."""
        depth, quoted, passed, begin = 0, False, 0, self.at
        if not self.held.startswith(("{", "[", '"'), begin):
            return 0
        while True:
            mark = IN_QUOTES.match(self.held, self.at) if quoted else BRACKETS.search(self.held, self.at)
            self.at = len(self.held) if mark is None else mark.end()
            if quoted and self.held.startswith('"', self.at):
                self.at, quoted = self.at + 1, False
            elif quoted or mark is None:
                passed += self.at - begin
                if not self.more():
                    return 0
                begin = 0
                continue
            else:
                quoted, depth = mark[0] == '"', depth + (mark[0] in "[{") - (mark[0] in "]}")
            if not quoted and depth <= 0:
                return passed + self.at - begin


JSON = json.JSONDecoder()
