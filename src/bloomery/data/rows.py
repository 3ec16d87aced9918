"""
Documents from bytes: text, and the objects of jsonl files. What is wrong with one is data too: a `Problem`.
"""

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.data import unpack
from bloomery.data.unpack import Problem as Problem
from bloomery.data.unpack import Span
from bloomery.data.unpack import unreadable as unreadable

Found = dict[str, Any] | Problem
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks, the longer first. They win over all that is said of a file or page."""
CONVERT = 'Convert it to UTF-8, as iconv -f {} -t UTF-8 does{}; of text files, encoding = "detect" finds out by itself.'
UNMARKED = CONVERT.format("WINDOWS-1252", ", if it is that")
"""The cure of bytes that say nothing of their encoding."""


def decode(data: bytes, *, mark: bool = True) -> str | Problem:
    """Bytes as text, without a byte order `mark` where one may stand. Anything but UTF-8 without NUL is a problem."""
    mark_bytes = len(codecs.BOM_UTF8) if mark and data.startswith(codecs.BOM_UTF8) else 0
    if mark and (other := marked(data)):
        return other
    if (nul := data.find(b"\0")) >= 0:
        return Problem("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
    try:
        return data[mark_bytes:].decode("utf-8")
    except UnicodeDecodeError as error:
        spot = error.start + mark_bytes
        what = f"byte offset {spot} holds 0x{data[spot]:02x}, which is not UTF-8"
        return Problem("not_utf8", spot, what, UNMARKED)


def marked(data: bytes) -> Problem | None:
    """What is wrong with bytes whose byte order mark says that they are not UTF-8."""
    found = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    name = found[: len("utf-16")].upper()
    what = f"it begins with the byte order mark of {name}, which is not UTF-8"
    return None if found == "utf-8" else Problem("not_utf8", 0, what, CONVERT.format(name, ""))


def checked(text: str) -> str | Problem:
    """Text that a document can be made of, or why not: it is empty, holds a NUL, or half of a surrogate pair."""
    if not text or text.isspace():
        return Problem("empty", 0, "is empty")
    if (nul := text.find("\0")) >= 0:
        return Problem("binary", nul, f"character {nul} is a NUL: this is not text")
    try:
        utf8_bytes(text)
    except UnicodeEncodeError as error:
        spot = error.start
        return Problem("not_unicode", spot, f"character {spot} is half a surrogate pair, which no UTF-8 can hold")
    return text


def parts(text: str | Problem, separator: str) -> list[tuple[str, str | Problem]]:
    """
    What stands between separators, blank parts left out, each with its number as the end of an id (":1", …).

    Without a separator, and for what is blank or a problem, it is one part without a number.
    """
    if isinstance(text, Problem) or not separator or not text or text.isspace():
        return [("", text)]
    found = [part for part in text.split(separator) if part and not part.isspace()]
    return [(f":{number}", part) for number, part in enumerate(found, 1)]


def utf8_bytes(text: str) -> int:
    """How many bytes a text has as UTF-8; known at once where it is ASCII. Raises UnicodeEncodeError."""
    return len(text) if text.isascii() else len(text.encode())


def jsonl(
    path: Path, max_bytes: int | None = None, span: Span | None = None, *, setting: str = unpack.DOCUMENT
) -> Iterator[tuple[int, Found]]:
    """
    Line number (from 1) and object of every line of a .jsonl, .jsonl.zst or .jsonl.gz file, or of a span of one that is
    not compressed; blank lines are passed.

    A line of more than `max_bytes`, which the source calls `setting`, is a problem `too_long`. The last item is a
    problem with reason `torn` where the file ends too early, or `bomb`. Raises DataError where it cannot be opened.
    """
    for number, line in unpack.lines(path, max_bytes, blank=False, span=span, setting=setting):
        if isinstance(line, Problem):
            yield number, line
            continue
        if line.isspace():
            continue
        found = _object(line, number)
        if isinstance(found, Problem) and found.reason == "not_json" and not line.endswith(b"\n"):
            found = Problem("torn", found.value, f"{found.what}; it is the last line and has no end: the file was cut")
        yield number, found


def _object(line: bytes, number: int) -> Found:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        if number == 1 and (other := marked(line)):
            return other
        what = f"line {number}, byte {error.start} of it, holds 0x{line[error.start]:02x}, which is not UTF-8"
        return Problem("not_utf8", number, what, UNMARKED)
    except (ValueError, RecursionError) as error:
        return Problem("not_json", number, f"line {number} is not JSON ({error})")
    if not isinstance(value, dict):
        return Problem("not_json", number, f"line {number} holds {type(value).__name__} instead of an object")
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
