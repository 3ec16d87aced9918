"""
Reads plain and compressed files in bounded memory: chunks, lines, or a small file at once.

The name of a file says how it is compressed.

A compressed file that ends early is detected; zstandard's own stream reader takes it for a complete file. A file
that unpacks to far more than any text does is detected too. For example, 30 kB of zstd can hold a gigabyte of
zeros, which no chunk here ever holds at once. Errors in a file are data: a read error is the last item. Only a file
that cannot be opened raises DataError.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from bloomery.core import io as core_io
from bloomery.core.errors import DataError

CHUNK_BYTES = 1 << 18
ZSTD_BITE_BYTES = 1 << 10
"""What a zstd frame is fed at once. A block of 4 bytes can stand for 128 KiB, so a bite unpacks to 32 MiB at most."""
LARGEST_WINDOW_BYTES = 2**31  # `zstd --long=31` writes it; the library's default refuses more than 2**27
DOCUMENT, ROW = "max_document_bytes", "max_row_bytes"
"""Settings of sources that bound what is read at once: of documents, and of conversations and preferences."""
BOMB_BYTES, BOMB_RATIO = 2**28, 1000
"""What has unpacked to more than this many bytes, and to so many times its own, is a bomb: text gives 2 to 20."""


EMPTY = re.compile(rb"\n+")


@dataclass(frozen=True)
class ReadError:
    """What is wrong with a file or row: a stable reason, the value that was seen, and a sentence for a person."""

    reason: str
    value: int | float
    what: str
    hint: str = ""


class ByteSpan(NamedTuple):
    """Some whole lines of a file that is not compressed."""

    begin: int
    """In bytes from the beginning of the file, as `end` is."""
    end: int
    first: int
    """Number of its first line, from 1."""


def spans(path: Path, span_bytes: int) -> list[ByteSpan]:
    """A file in spans of about so many bytes, which end at line ends; its lines are counted for it."""
    try:
        size = path.stat().st_size
        count = max(1, size // span_bytes)
        byte_spans, begin, first, offset, line = list[ByteSpan](), 0, 1, 0, 1
        core_io.check_regular(path)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                start = 0
                while (target := size * (len(byte_spans) + 1) // count) < size:
                    end = chunk.find(b"\n", max(start, target - offset)) + 1
                    if not end or offset + end == size:
                        break
                    line += chunk.count(b"\n", start, end)
                    byte_spans.append(ByteSpan(begin, offset + end, first))
                    begin, first, start = offset + end, line, end
                line += chunk.count(b"\n", start)
                offset += len(chunk)
    except OSError as error:
        raise unreadable(path, error) from None
    return [*byte_spans, ByteSpan(begin, size, first)]


PACKED = (
    (b"\x1f\x8b\x08", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\xfd7zXZ\0", "xz", ""),
    (b"PK\x03\x04", "zip", ""),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", ""),
    (b"\x04\x22\x4d\x18", "lz4", ""),
    *((b"BZh%d1AY&SY" % level, "bzip2", "") for level in range(1, 10)),
)
"""First bytes of compressed files, what compressed them, and the end of a name with which they are read."""


def compressed(data: bytes) -> ReadError | None:
    """The problem of a file that begins with these bytes, if they are compressed; None for any other file."""
    for magic, program, ending in PACKED:
        if data.startswith(magic):
            hint = f"Rename it to end in {ending}." if ending else "Decompress it, or compress it as .gz or .zst."
            hint = hint if program != "zip" else f"{hint} Word and EPUB files are zip files: extract their text."
            why = f"but its name does not end in {ending}" if ending else "which is not read"
            what = f"its content is compressed with {program}, {why}"
            return ReadError("compressed", 0, what, hint)
    return None


def _bytes_of(file: BinaryIO, span: ByteSpan) -> Iterator[bytes]:
    left = span.end - file.seek(span.begin)
    while left and (data := file.read(min(CHUNK_BYTES, left))):
        left -= len(data)
        yield data


def chunks(path: Path, span: ByteSpan | None = None) -> Iterator[bytes | ReadError]:
    """
    The bytes of a file in pieces, or of a span of an uncompressed file.

    If reading cannot continue, the last piece is a problem: `torn`, `bomb` or `compressed`.
    """
    try:
        core_io.check_regular(path)
        with path.open("rb") as file:
            raw = _bytes_of(file, span) if span else iter(lambda: file.read(CHUNK_BYTES), b"")
            content = _unpacked(raw, FRAMES[path.suffix]) if path.suffix in FRAMES and not span else raw
            first = next(content, b"")
            if isinstance(first, bytes) and not (span and span.begin) and (problem := compressed(first)):
                yield problem
                return
            yield first
            yield from content
    except OSError as error:
        raise unreadable(path, error) from None


def lines(
    path: Path,
    max_bytes: int | None = None,
    *,
    blank: bool = True,
    span: ByteSpan | None = None,
    setting: str = DOCUMENT,
) -> Iterator[tuple[int, bytes | ReadError]]:
    """
    Number (from 1) and bytes of each line, with its line feed where it has one. Without `blank`, no empty ones.

    Lines end at "\\n" and nothing else: `str.splitlines` also breaks at U+2028, U+0085 and form feeds, which text
    holds. A line of more than `max_bytes`, which the source calls `setting`, is a problem `too_long`, and the next one
    comes after it.
    """
    number, held, size = span.first if span else 1, list[bytes](), 0

    def line(last: bytes) -> bytes | ReadError:
        if max_bytes is not None and size + len(last) > max_bytes:
            return too_long(size + len(last), max_bytes, f"line {number}", setting=setting)
        return b"".join((*held, last))

    for chunk in chunks(path, span):
        if isinstance(chunk, ReadError):
            what = chunk.what if chunk.reason == "compressed" else f"{chunk.what} (line {number} is incomplete)"
            yield number, replace(chunk, value=number, what=what)
            return
        start = 0
        while end := chunk.find(b"\n", start) + 1:
            if end == start + 1 and not (blank or size):
                end = EMPTY.match(chunk, start).end()  # type: ignore[union-attr]
                number, start = number + end - start, end
                continue
            yield number, line(chunk[start:end])
            number, held, size, start = number + 1, [], 0, end
        rest = chunk[start:]
        size += len(rest)
        if max_bytes is None or size <= max_bytes:
            held.append(rest)
        else:
            held = []
    if size:
        yield number, line(b"")


def whole(path: Path, max_bytes: int, *, setting: str = DOCUMENT) -> bytes | ReadError:
    """All bytes of a file, or the problem that it has; no more of it is read than `max_bytes`."""
    held, size = list[bytes](), 0
    for chunk in chunks(path):
        if isinstance(chunk, ReadError):
            return chunk
        size += len(chunk)
        if size > max_bytes:
            full = path.stat().st_size if path.suffix not in FRAMES else size
            return too_long(full, max_bytes, "it", "" if path.suffix not in FRAMES else "at least ", setting=setting)
        held.append(chunk)
    return b"".join(held)


def too_long(size: int, max_bytes: int, what: str, least: str = "", *, setting: str = DOCUMENT) -> ReadError:
    """The problem of a document or row of more bytes than this setting of its source allows."""
    return ReadError("too_long", size, f"{what} has {least}{size:,} bytes, more than {setting} = {max_bytes:,}")


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is absent or closed to this user, or whose disk fails."""
    hint = "Check that the file exists and that you may read it."
    return DataError(f"cannot be read: {error}", where=str(path), hint=hint)


class _GzipMember:
    """One member of a gzip file."""

    def __init__(self) -> None:
        self._state = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        out = bytes(CHUNK_BYTES)
        # after its end the tail may stay as it was; and behind a full chunk there may be more that was not given yet
        while not self._state.eof and (data or len(out) == CHUNK_BYTES):
            out = self._state.decompress(data, CHUNK_BYTES)
            data = self._state.unconsumed_tail
            yield out

    def rest(self) -> bytes | None:
        """What was fed after its end, or None before it. gzip allows zeros between members."""
        return self._state.unused_data.lstrip(b"\0") if self._state.eof else None


class _ZstdFrame:
    """One frame of a zstd file."""

    def __init__(self) -> None:
        self._state = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES).decompressobj()
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), ZSTD_BITE_BYTES):
            yield self._state.decompress(data[start : start + ZSTD_BITE_BYTES])
            if self._state.eof:
                self._rest = self._state.unused_data + data[start + ZSTD_BITE_BYTES :]
                return

    def rest(self) -> bytes | None:
        return self._rest if self._state.eof else None


Frame = _GzipMember | _ZstdFrame
FRAMES: dict[str, type[Frame]] = {".zst": _ZstdFrame, ".gz": _GzipMember}


def _unpacked(raw: Iterable[bytes], new_frame: type[Frame]) -> Iterator[bytes | ReadError]:
    """Chunks of about CHUNK_BYTES from frame after frame, and a problem where they end early or are a bomb."""
    held: list[bytes] = []
    unpacked_bytes = size = 0
    problem = None
    try:
        for read_bytes, data in _frames(raw, new_frame):
            unpacked_bytes, size = unpacked_bytes + len(data), size + len(data)
            held.append(data)
            if size >= CHUNK_BYTES:
                yield b"".join(held)
                held, size = [], 0
            if unpacked_bytes > BOMB_BYTES and unpacked_bytes > BOMB_RATIO * read_bytes:
                what = f"its first {read_bytes:,} bytes unpack to more than {unpacked_bytes:,}: a decompression bomb"
                problem = ReadError("bomb", unpacked_bytes, what)
                break
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        problem = ReadError("torn", 0, f"its compressed data ends early or is broken: {error}")
    yield b"".join(held)
    if problem:
        yield problem


def _frames(raw: Iterable[bytes], new_frame: type[Frame]) -> Iterator[tuple[int, bytes]]:
    """How many bytes were read so far, and a piece of what they unpack to. Raises EOFError where the end is missing."""
    read_bytes, frame = 0, None
    for chunk in raw:
        read_bytes += len(chunk)
        rest = chunk if frame is not None else chunk.lstrip(b"\0")
        while rest:
            frame = frame or new_frame()
            for data in frame.feed(rest):
                yield read_bytes, data
            after = frame.rest()
            frame, rest = (frame, b"") if after is None else (None, after)
    if frame is not None:
        raise EOFError("its last frame is incomplete")
