"""
Rows of jsonl and parquet files, and text from bytes. What is wrong with a row is data too: a `Problem`.

Rows of jsonl end with "\\n" and nothing else. `str.splitlines` also breaks at U+2028, U+0085 and form feeds, which
text holds, and would tear such rows. A compressed file that ends early is noticed: zstandard's own stream reader
takes it for a whole one.
"""

import codecs
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from bloomery.core.errors import DataError

CHUNK_BYTES = 1 << 18
ROWS_PER_BATCH = 1_000
LARGEST_WINDOW_BYTES = 2**31  # `zstd --long=31` writes it; the library's default refuses more than 2**27


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file or row: a stable reason, the value that was seen, and a sentence for a person."""

    reason: str
    value: int | float
    what: str


Found = dict[str, Any] | Problem


def decode(data: bytes) -> str | Problem:
    """Bytes of a document as text, without a byte order mark. Anything but UTF-8 without NUL is a problem."""
    mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    if (nul := data.find(b"\0")) >= 0:
        return Problem("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
    try:
        return data[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        spot = error.start + mark
        return Problem("not_utf8", spot, f"byte offset {spot} holds 0x{data[spot]:02x}, which is not UTF-8")


def jsonl(path: Path) -> Iterator[tuple[int, Found]]:
    """
    Line number (from 1) and object of every line of a .jsonl, .jsonl.zst or .jsonl.gz file; blank lines are passed.

    The last item is a problem with reason `torn` where a compressed file ends too early. Raises DataError where the
    file cannot be opened.
    """
    number, rest = 0, b""
    chunks = _chunks(path)
    while (chunk := next(chunks, None)) is not None:
        if isinstance(chunk, Problem):
            yield number + 1, Problem(chunk.reason, number + 1, f"{chunk.what} (line {number + 1} is not whole)")
            return
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            if line.strip():
                yield number, _object(line, number)
    if rest.strip():
        found = _object(rest, number + 1)
        if isinstance(found, Problem) and found.reason == "not_json":
            found = Problem("torn", found.value, f"{found.what}; it is the last line and has no end: the file was cut")
        yield number + 1, found


def _object(line: bytes, number: int) -> Found:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        what = f"line {number}, byte {error.start} of it, holds 0x{line[error.start]:02x}, which is not UTF-8"
        return Problem("not_utf8", number, what)
    except (ValueError, RecursionError) as error:
        return Problem("not_json", number, f"line {number} is not JSON ({error})")
    if not isinstance(value, dict):
        return Problem("not_json", number, f"line {number} holds {type(value).__name__} instead of an object")
    return value


def _chunks(path: Path) -> Iterator[bytes | Problem]:
    """The bytes of a file, decompressed as its name says; the last one is a problem if the file ends too early."""
    try:
        with path.open("rb") as file:
            chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
            yield from _unpacked(chunks, FRAMES[path.suffix]) if path.suffix in FRAMES else chunks
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        yield Problem("torn", 0, f"its compressed data ends early or is broken: {error}")
    except OSError as error:
        raise unreadable(path, error) from None


def _unpacked(chunks: Iterable[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    """Frame after frame, or gzip member after member. Raises EOFError where the last one is not whole."""
    frame = None
    for chunk in chunks:
        rest = chunk if frame is not None else chunk.lstrip(b"\0")  # gzip allows zeros after a member
        while rest:
            frame = frame or new_frame()
            yield frame.decompress(rest)
            rest = frame.unused_data.lstrip(b"\0") if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("its last frame is not whole")


def _zstd_frame() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES).decompressobj()


def _gzip_member() -> Any:
    return zlib.decompressobj(wbits=31)


FRAMES: dict[str, Callable[[], Any]] = {".zst": _zstd_frame, ".gz": _gzip_member}


def parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[int, Found]]:
    """
    Row number (from 0) and cells of every row. The last item is a problem with reason `torn` where the file is broken.

    Raises DataError where the file cannot be opened, or lacks one of `columns`.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                cure = f"Its columns: {', '.join(names)}."
                raise DataError(f"has no column {missing[0]!r}", where=str(path), cure=cure)
            wanted = list(dict.fromkeys([*columns, *(name for name in optional if name in names)]))
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted):
                cells = [_cells(batch.column(name)) for name in wanted]
                for row in zip(*cells, strict=True):
                    yield number, next((c for c in row if isinstance(c, Problem)), dict(zip(wanted, row, strict=True)))
                    number += 1
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # from the system; what Arrow raises of content has none
            raise unreadable(path, error) from None
        yield number, Problem("torn", number, f"is broken from row {number} on, or no parquet file: {error}")


def _cells(column: pa.Array) -> list[Any]:
    """Values as Python. Strings pass through bytes, because a writer may have put anything into them."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()).to_pylist()
        return [None if cell is None else decode(cell) for cell in raw]
    cells: list[Any] = column.to_pylist()
    return cells


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that is absent or closed to this user, or whose disk fails."""
    cure = "Check that the file is there and may be read."
    return DataError(f"cannot be read: {error}", where=str(path), cure=cure)
