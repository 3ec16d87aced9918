"""
Records of WARC and WET files: the pages of a crawl, or their text.

Responses that hold HTML or plain text, and conversions (WET), can be documents; each of them comes out, or the
problem that it has. Requests, metadata and the like are passed. What is read of a record at once has a bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.data import extras, unpack
from bloomery.data.unpack import Problem

PAGES = ("text/html", "application/xhtml+xml")
OK = 200


@dataclass(frozen=True)
class Record:
    url: str | None
    data: bytes | Problem
    page: bool
    """Whether the data are HTML; else they are plain text."""
    charset: str | None
    """The encoding that the server told."""


def records(path: Path, max_bytes: int) -> Iterator[tuple[int, Record]]:
    """
    Number (from 1, of all records of the file) of every response and conversion, and what it holds.

    Problems: `http_status`, `not_html` (another type), `too_long`, and `torn` or `bomb` as the last one where the
    file cannot be read further. Raises DataError where it cannot be opened, and without the extra `web`.
    """
    warc = extras.load("fastwarc.warc", extra="web")
    stream, number = _Stream(path), 0
    try:
        for record in warc.ArchiveIterator(stream, parse_http=False):
            number += 1
            if record.record_type == warc.WarcRecordType.response and record.is_http:
                record.parse_http(auto_decode="all")
                found = _response(record, max_bytes)
            elif record.record_type == warc.WarcRecordType.conversion:
                found = Record(_url(record), _payload(record, max_bytes), False, "utf-8")
            else:
                continue
            if stream.problem is None or not isinstance(found.data, bytes):
                yield number, found
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise unpack.unreadable(path, error) from None
        number += 1
        stream.problem = Problem("torn", number, f"is broken from record {number} on, or no WARC file: {error}")
    if stream.problem is not None:
        yield number, Record(None, stream.problem, False, None)


def _response(record: Any, max_bytes: int) -> Record:
    kind = (record.http_content_type or "").lower()
    status = record.http_headers.status_code or 0
    data: bytes | Problem
    if status != OK:
        data = Problem("http_status", status, f"the server answered {status}")
    elif kind not in PAGES and kind != "text/plain":
        data = Problem("not_html", 0, f"its type is {kind or 'not told'}")
    else:
        data = _payload(record, max_bytes)
    return Record(_url(record), data, kind in PAGES, record.http_charset)


def _payload(record: Any, max_bytes: int) -> bytes | Problem:
    data: bytes = record.reader.read(max_bytes + 1)
    return data if len(data) <= max_bytes else unpack.too_long(len(data), max_bytes, "it", "at least ")


def _url(record: Any) -> str | None:
    url = record.headers.get("WARC-Target-URI")
    return url.strip("<>") if url else None


class _Stream:
    """The unpacked bytes of a file, for fastwarc, which is not told of what is wrong with them."""

    def __init__(self, path: Path) -> None:
        self._chunks = unpack.chunks(path)
        self._rest = b""
        self.problem: Problem | None = None

    def read(self, size: int) -> bytes:
        while not self._rest and self.problem is None:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            if isinstance(chunk, Problem):
                self.problem = chunk
            else:
                self._rest = chunk
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
