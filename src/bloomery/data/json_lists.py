"""Files that hold one JSON list of objects, read an object at a time, and never as a whole."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from bloomery.data import rows, unpack
from bloomery.data.rows import Found
from bloomery.data.unpack import Problem

SPACE = re.compile(r"[ \t\r\n]*")
BETWEEN = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


def objects(path: Path, max_bytes: int) -> Iterator[tuple[int, Found]]:
    """
    Line (from 1) on which it begins, and object, of every element of a .json, .json.gz or .json.zst file. A file that
    holds no list is read as lines of objects: many are called so.

    An element that is no object, or is one of more than `max_bytes`, is a problem, and the next one comes after it.
    Behind text that is no JSON, and where so much was read and the element had no end yet, nothing is found again: the
    problem `torn` or `too_long` is the last item, and says so.
    """
    text = _Text(path)
    text.more()
    if not text.held[SPACE.match(text.held).end() :].startswith("["):  # type: ignore[union-attr]
        yield from rows.jsonl(path, max_bytes, setting=unpack.ROW)
        return
    text.skip(SPACE)
    text.at += 1
    decoder = json.JSONDecoder()
    while True:
        text.skip(BETWEEN)
        if text.held.startswith("]", text.at):
            text.at += 1
            text.skip(SPACE)
            if text.problem or text.at < len(text.held):
                what = f"the list ends before line {text.line} does; what follows it is not read"
                yield text.line, text.problem or Problem("not_json", text.line, what)
            return
        line = text.line
        while True:
            try:
                value, end = decoder.raw_decode(text.held, text.at)
                break
            except (ValueError, RecursionError) as error:
                if len(text.held) - text.at > max_bytes:
                    found = _too_long(text.held[text.at :], max_bytes, line, "at least ")
                    yield line, Problem(found.reason, found.value, f"{found.what}; what follows it is not read")
                    return
                if not text.more():
                    what = f"the list is broken in the element on line {line}; what follows it is not read ({error})"
                    yield line, text.problem or Problem("torn", line, what)
                    return
        held = text.held[text.at : end] if 4 * (end - text.at) > max_bytes else ""
        text.at = end
        if rows.utf8_bytes(held) > max_bytes:
            yield line, _too_long(held, max_bytes, line)
        elif isinstance(value, dict):
            yield line, value
        else:
            what = f"the element on line {line} holds {type(value).__name__} instead of an object"
            yield line, Problem("not_json", line, what)


def _too_long(held: str, max_bytes: int, line: int, least: str = "") -> Problem:
    what = f"the element that begins on line {line}"
    return unpack.too_long(rows.utf8_bytes(held), max_bytes, what, least, setting=unpack.ROW)


class _Text:
    """The text of a file, of which only a part is held."""

    def __init__(self, path: Path) -> None:
        self._chunks = unpack.chunks(path)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.held, self.at = "", 0
        """What is held, and the place in it that is read next."""
        self._passed, self._counted = 1, 0
        self.problem: Problem | None = None

    @property
    def line(self) -> int:
        """Number of the line that is read next."""
        self._passed += self.held.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._passed

    def more(self) -> bool:
        """Hold at least twice of what is left to read; False where there is no more."""
        line, wanted, found = self.line, max(1, len(self.held) - self.at), [self.held[self.at :]]
        self.held, self.at, self._passed, self._counted = "", 0, line, 0
        size = 0
        while size < wanted and self.problem is None and (chunk := next(self._chunks, None)) is not None:
            if isinstance(chunk, Problem):
                self.problem = chunk
                break
            try:
                found.append(self._decoder.decode(chunk))
            except UnicodeDecodeError as error:
                what = f"holds 0x{error.object[error.start]:02x} behind line {line}, which is not UTF-8"
                self.problem = rows.marked(error.object) if line == 1 else None
                self.problem = self.problem or Problem("not_utf8", line, what, rows.UNMARKED)
                break
            size += len(found[-1])
        self.held = "".join(found)
        return size > 0

    def skip(self, what: re.Pattern[str]) -> None:
        """Go on behind what matches, reading more where it reaches the end of what is held."""
        while True:
            self.at = what.match(self.held, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.held) or not self.more():
                return
