"""Files that hold good documents and poisoned ones, for tests."""

import gzip
import json
from pathlib import Path

import zstandard

POISONED_LINES = {
    b'{"text": "' + b"x" * 40_000 + b'"}': "too_long",
    b'{"text": "caf\xe9"}': "not_utf8",
    b'{"text": "a\\u0000b"}': "binary",
    b'{"text": "\\ud800"}': "not_unicode",
    b'{"text": ' + b"[" * 15_000 + b"]" * 15_000 + b"}": "not_json",
    b'{"a": 1e400, "text": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}": "not_json",
    b'{"text": 3}': "not_text",
    b'{"text": ["a"]}': "not_text",
    b'{"text": ' + b"9" * 5_000 + b"}": "not_json",
    b'{"body": "x"}': "no_text",
    b'{"text": "  \\n"}': "empty",
    b"[1]": "not_json",
    b"\x00\x01": "not_json",
}
"""Lines of jsonl, and why each is rejected where a document has 32,768 bytes at most."""
MOST_BYTES = 2**15


def line(text: str, **more: object) -> bytes:
    return json.dumps({"text": text, **more}, ensure_ascii=False).encode()


def zstd_bomb(path: Path, size: int, byte: bytes = b"\0") -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        for _ in range(size >> 24):
            file.write(packer.compress(byte * 2**24))
        file.write(packer.flush())


def gzip_bomb(path: Path, size: int) -> None:
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(size >> 24):
            file.write(bytes(2**24))


def answer(number: int, body: bytes, *, status: str = "200 OK", kind: str = "text/html", more: str = "") -> bytes:
    """A response record of a WARC file."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode()
    return record("response", number, head + body)


def record(kind: str, number: int, block: bytes) -> bytes:
    """Any record of a WARC file."""
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://x/{number}\r\nContent-Length: {len(block)}\r\n"
    return head.encode() + b"\r\n" + block + b"\r\n\r\n"
