"""
Reads WARC and WET crawl records, and extracts plain text from HTML pages.

The records are the pages of a crawl, or their text. They are read by the ISO 28500 grammar, in bounded memory.

Responses that hold HTML or plain text, and conversions (WET), can be documents. Each of these records comes out as
a document or as a read error. Requests, metadata and the like are skipped. Bytes between records are skipped and
reported.

Plain text of HTML pages comes from resiliparse. Bytes are decoded whatever their encoding.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bloomery.core import extras
from bloomery.data.readers import bytes as readers_bytes
from bloomery.data.readers.bytes import ReadError
from bloomery.data.readers.rows import MARKS

PAGES = ("text/html", "application/xhtml+xml")
OK = 200
HEADER_BYTES = 2**20
"""No header of a record or of an answer is longer; what is longer is none."""

BITE_BYTES = 4096
"""What a member of gzip is fed at once. What comes after its end is copied, and a member may have 20 bytes."""
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
"""The line before a chunk of an answer."""

CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:\-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class WarcRecord:
    url: str | None
    data: bytes | ReadError
    page: bool
    """Whether the data are HTML; else they are plain text."""
    charset: str | None
    """The encoding that the server told."""


def records(path: Path, max_bytes: int) -> Iterator[tuple[int, WarcRecord]]:
    """
    Number (from 1, of all records of the file) of every response and conversion, and what it holds.

    Problems: `http_status`, `not_html` (another type), `too_long`, `torn_page` (content that ends early), `not_warc`
    (bytes that are no record). The last one may be `torn` or `bomb`, where the file cannot be read further. Raises
    DataError where it cannot be opened.
    """
    stream, number, whole = _Stream(path), 0, True
    line = stream.line()
    while line is not None and whole:
        if not line.strip():
            line = stream.line()
            continue
        number += 1
        fields = _fields(stream) if line.startswith(b"WARC/") else None
        if fields is None and stream.ended:
            whole = False
            break
        length = (fields or {}).get("content-length", "")
        if fields is None or not (length.isascii() and length.isdigit()):
            yield number, _lost(ReadError("not_warc", number, f"the bytes from {line[:40]!r} on are not a WARC record"))
            line = stream.line()
            while line is not None and not line.startswith(b"WARC/"):
                line = stream.line()
            continue
        kind = fields.get("warc-type", "").lower()
        is_content = kind in ("response", "conversion")
        block, left = stream.read(int(length), max_bytes + HEADER_BYTES if is_content else 0)
        whole = left == 0
        if is_content and whole:
            url = fields.get("warc-target-uri", "").strip("<>") or None
            yield number, _record(kind, url, block, int(length), max_bytes)
        line = stream.line()
    if not whole and stream.problem is None:
        stream.problem = ReadError("torn", number, f"record {number} is incomplete: the file was cut off")
    if stream.problem is not None:
        yield number + whole, _lost(stream.problem)


def _lost(problem: ReadError) -> WarcRecord:
    return WarcRecord(None, problem, False, None)


def _record(kind: str, url: str | None, block: bytes, length: int, max_bytes: int) -> WarcRecord:
    if len(block) < length or (kind == "conversion" and length > max_bytes):
        return WarcRecord(url, readers_bytes.too_long(length, max_bytes, "it"), False, None)
    if kind == "conversion":
        return WarcRecord(url, block, False, "utf-8")
    head, _, body = block.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = _named(lines)
    status = re.match(r"HTTP/\S+\s+(\d{3})", first)
    content_type = fields.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    charset = CHARSET.search(content_type)
    data: bytes | ReadError
    if status is None or int(status[1]) != OK:
        code = int(status[1]) if status else 0
        data = ReadError("http_status", code, f"the server answered {code or first[:40]}")
    elif kind not in PAGES and kind != "text/plain":
        data = ReadError("not_html", 0, f"its type is {kind or 'not given'}")
    else:
        data = _body(body, fields, max_bytes)
    return WarcRecord(url, data, kind in PAGES, charset[1] if charset else None)


def _body(data: bytes, fields: Mapping[str, str], max_bytes: int) -> bytes | ReadError:
    """The content of an answer: its chunks joined and unpacked, where the header says so and the bytes agree."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        joined = _joined(data)
        if isinstance(joined, ReadError):
            return joined
        data = joined
    names = [name.strip().lower() for name in fields.get("content-encoding", "").split(",")]
    encoding = ", ".join(name for name in names if name not in ("", "identity", "none", "utf-8"))
    if encoding in ("gzip", "x-gzip", "deflate"):
        is_whole = data[:1] in (b"\x1f", b"\x78")  # else a crawler's stale header, or a stream without its own
        unpacked = _unpacked(data, max_bytes) if is_whole else _inflated(data, max_bytes) or data
        if isinstance(unpacked, ReadError):
            return unpacked
        data = unpacked
    elif encoding:
        return ReadError("not_html", 0, f"its encoding {encoding[:20]!r} is not supported")
    return data if len(data) <= max_bytes else readers_bytes.too_long(len(data), max_bytes, "it", "at least ")


def _inflated(data: bytes, max_bytes: int) -> bytes | None:
    """What a deflate stream without a header holds, or `max_bytes` and one more of it; None for other data."""
    stream = zlib.decompressobj(wbits=-15)
    try:
        text = stream.decompress(data, max_bytes + 1)
    except zlib.error:  # not such a stream
        return None
    return text if stream.eof or len(text) > max_bytes else None


def _unpacked(data: bytes, max_bytes: int) -> bytes | ReadError:
    """
    What a gzip or zlib stream holds, with the gzip members after it, or the first `max_bytes` and one more of it. Other
    bytes after it are ignored. A problem `torn_page` where it ends early or is broken.
    """
    pieces, room, at, member = list[bytes](), max_bytes + 1, 0, None
    while room and at < len(data) and (member is not None or not pieces or data[at] == 0x1F):
        member = member or zlib.decompressobj(wbits=47)
        bite = data[at : at + BITE_BYTES]
        try:
            pieces.append(member.decompress(bite, room))
        except zlib.error as error:
            return ReadError("torn_page", at, f"its compressed content is broken: {error}")
        room -= len(pieces[-1])
        at += len(bite) - len(member.unused_data)
        member = None if member.eof else member
    if room and member is not None:
        return ReadError("torn_page", at, f"its compressed content ends early, after {at:,} bytes")
    return b"".join(pieces)


def _joined(data: bytes) -> bytes | ReadError:
    """
    The chunks of a chunked answer as one (RFC 9112, 7.1), or the data as they are where they are not chunked. A problem
    `torn_page` where the empty chunk that ends them is missing.
    """
    pieces, start, length = list[bytes](), 0, 1
    while length and (size := CHUNK_SIZE.match(data, start)):
        begin, length = size.end(), int(size[1], 16)
        pieces.append(data[begin : begin + length])
        start = begin + length + 2
    if pieces and length:
        return ReadError("torn_page", len(data), f"its chunks end early, after {len(data):,} bytes")
    return b"".join(pieces) if pieces else data


def _fields(stream: "_Stream") -> dict[str, str] | None:
    """The fields of a record's header by their names in lower case, or None where it has no end."""
    lines, size = list[str](), 0
    while (line := stream.line()) is not None and size < HEADER_BYTES:
        if not line.strip():
            return _named(lines)
        lines.append(line.decode("utf-8", "replace"))
        size += len(line)
    return None


def _named(lines: list[str]) -> dict[str, str]:
    pairs = [line.partition(":") for line in lines]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


class _Stream:
    """The unpacked bytes of a file, by lines and by counts."""

    def __init__(self, path: Path) -> None:
        self._chunks = readers_bytes.chunks(path)
        self._held, self._at = b"", 0
        self.problem: ReadError | None = None
        """What ended it too early, once it has ended."""
        self.ended = False

    def _more(self) -> bool:
        """Whether there are bytes left; then the next ones are held."""
        while self._at == len(self._held) and not self.ended:
            chunk = next(self._chunks, None)
            if isinstance(chunk, bytes):
                self._held, self._at = chunk, 0
            else:
                self.problem, self.ended = chunk, True
        return self._at < len(self._held)

    def line(self) -> bytes | None:
        """Bytes up to a line feed, with it; or HEADER_BYTES or a little more of them without; None at the end."""
        pieces, size = list[bytes](), 0
        while size < HEADER_BYTES and self._more():
            end = self._held.find(b"\n", self._at) + 1
            pieces.append(self._held[self._at : end or self._at + HEADER_BYTES])
            size, self._at = size + len(pieces[-1]), self._at + len(pieces[-1])
            if end:
                break
        return b"".join(pieces) if pieces else None

    def read(self, count: int, most: int) -> tuple[bytes, int]:
        """So many bytes, or none where they are more than `most`; they are passed in either case. And how many lack."""
        pieces, left = list[bytes](), count
        while left and self._more():
            piece = self._held[self._at : self._at + left]
            self._at, left = self._at + len(piece), left - len(piece)
            if count <= most:
                pieces.append(piece)
        return b"".join(pieces), left


SAMPLE_BYTES = 2**16
"""What the detection of an encoding looks at, as resiliparse does by default."""


DEEPEST = 1000
"""Elements in elements. Browsers stop at 512; extraction takes time by the square of it, minutes at 100,000."""
ELEMENTS = re.compile(r"<(/?)(?!(?:p|li|t[rdh]|d[td]|br|hr|img|input|meta|link|option|source|wbr|area|col)\b)[a-zA-Z]")
"""Tags that open or close what has to be closed."""


DOUBLE = ("gbk", "gb18030", "big5", "euc_kr", "euc_jp", "shift_jis")
"""Encodings of two bytes per character, as the library calls them: a few of their characters may be UTF-8 by chance."""
ENOUGH = 16
"""So many are no chance: one character of GBK is two bytes of UTF-8 with p = 0.08."""
BEYOND = re.compile(r"[^\x00-\x7f]+")


@cache
def _resiliparse(module: str) -> Any:
    return extras.load(f"resiliparse.{module}")


XHTML, XHTML_CHARACTERS = re.compile(r"<\?xml|xhtml", re.IGNORECASE), 1_000
EMPTY_ELEMENT = re.compile(r"<(title|script|style|textarea|iframe|noscript)\b([^<>]{0,2000})/>", re.IGNORECASE)
"""An element that XML closes at once. As HTML, it would hold the rest of the page."""


def plain_text(page: str, *, main_content: bool) -> str | ReadError:
    """
    What a reader sees of a page: paragraphs, lists and preformatted text by lines, without scripts, forms and links.

    `main_content` leaves out what is around the main part too (navigation, comments, footers), by resiliparse's rules;
    "" where a page has no such part. A page whose elements are nested too deeply is a problem `too_deep`. Raises
    DataError where the extra `web` is not installed.
    """
    if page.count("<") > DEEPEST and (depth := _depth(page)) > DEEPEST:
        return ReadError("too_deep", depth, f"its elements are nested {depth:,} deep, more than {DEEPEST:,}")
    if XHTML.search(page[:XHTML_CHARACTERS]):
        page = EMPTY_ELEMENT.sub(r"<\1\2></\1>", page)
    text: str = _resiliparse("extract.html2text").extract_plain_text(
        page, preserve_formatting=True, main_content=main_content, alt_texts=False
    )
    return text


def _depth(page: str) -> int:
    """How many elements that have to be closed are open at once, at most."""
    deepest = depth = 0
    for tag in ELEMENTS.finditer(page):
        depth = max(0, depth + (-1 if tag[1] else 1))
        deepest = max(deepest, depth)
    return deepest


def decoded(data: bytes, charset: str | None = None, *, page: bool) -> str | ReadError:
    """
    Decodes bytes as text. A byte order mark decides first, then valid UTF-8 beyond ASCII, whatever a header says. Next
    come a known `charset` (from an HTTP header, say), the declaration of a `page`, and the guess of uchardet.
    Bytes that are invalid in that encoding are read as Windows-1252, as browsers do.

    NUL bytes outside UTF-16 and UTF-32 are a problem: this is not text. Raises DataError without the extra `web`.
    """
    marked = next(((mark, name) for mark, name in MARKS if data.startswith(mark)), None)
    if marked and marked[1] != "utf-8":
        return data[len(marked[0]) :].decode(marked[1], "replace")
    encoding = _resiliparse("parse.encoding")
    name = encoding.map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    if name is None and not marked:
        name = encoding.detect_encoding(data, max_len=SAMPLE_BYTES, from_html_meta=page)
    wide = name is not None and name.lower().startswith("utf-16") and not marked
    if (nul := data.find(b"\0")) >= 0 and not wide:
        return ReadError("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
    if marked:
        return data[len(marked[0]) :].decode("utf-8", "replace")
    if nul < 0 and (utf8 := _beyond_ascii(data, least=1 if name not in DOUBLE else ENOUGH)) is not None:
        return utf8
    text: str = encoding.bytes_to_str(data, name)
    return text


def _beyond_ascii(data: bytes, least: int) -> str | None:
    """Bytes as UTF-8 text that has at least so many characters beyond ASCII, or None where they are not that."""
    if data.isascii():
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if sum(map(len, BEYOND.findall(text))) >= least else None
