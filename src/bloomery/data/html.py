"""Plain text of HTML pages by resiliparse, and text of bytes in whatever encoding they are."""

from functools import cache
from typing import Any

from bloomery.data import extras
from bloomery.data.unpack import Problem

SAMPLE_BYTES = 2**16
"""What the detection of an encoding looks at, as resiliparse does by default."""


@cache
def _resiliparse(module: str) -> Any:
    return extras.load(f"resiliparse.{module}", extra="web")


def plain_text(page: str, *, main_content: bool) -> str:
    """
    What a reader sees of a page: paragraphs, lists and preformatted text by lines, without scripts, forms and links.

    `main_content` leaves out what is around the main part too (navigation, comments, footers), by resiliparse's rules;
    "" where a page has no such part. Raises DataError where the extra `web` is not installed.
    """
    text: str = _resiliparse("extract.html2text").extract_plain_text(
        page, preserve_formatting=True, main_content=main_content, alt_texts=False
    )
    return text


def decoded(data: bytes, charset: str | None = None, *, page: bool) -> str | Problem:
    """
    Bytes as text: by `charset` where it is told (as in an HTTP header) and true, else as a `page` says itself, else
    by what the bytes look like (uchardet). Bytes that are no text in it give Windows-1252, as browsers do.

    NUL bytes in what is no UTF-16 are a problem: this is not text. Raises DataError without the extra `web`.
    """
    encoding = _resiliparse("parse.encoding")
    name = encoding.map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    if name is None:
        name = encoding.detect_encoding(data, max_len=SAMPLE_BYTES, from_html_meta=page)
    if not name.lower().startswith("utf-16") and (nul := data.find(b"\0")) >= 0:
        return Problem("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
    text: str = encoding.bytes_to_str(data, name)
    return text
