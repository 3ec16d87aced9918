"""Plain text of HTML pages by resiliparse, and text of bytes in whatever encoding they are."""

import re
from functools import cache
from typing import Any

from bloomery.data import extras
from bloomery.data.unpack import Problem

SAMPLE_BYTES = 2**16
"""What the detection of an encoding looks at, as resiliparse does by default."""


DEEPEST = 1000
"""Elements in elements. Browsers stop at 512; extraction takes time by the square of it, minutes at 100,000."""
ELEMENTS = re.compile(r"<(/?)(?!(?:p|li|t[rdh]|d[td]|br|hr|img|input|meta|link|option|source|wbr|area|col)\b)[a-zA-Z]")
"""Tags that open or close what has to be closed."""


@cache
def _resiliparse(module: str) -> Any:
    return extras.load(f"resiliparse.{module}", extra="web")


def plain_text(page: str, *, main_content: bool) -> str | Problem:
    """
    What a reader sees of a page: paragraphs, lists and preformatted text by lines, without scripts, forms and links.

    `main_content` leaves out what is around the main part too (navigation, comments, footers), by resiliparse's rules;
    "" where a page has no such part. A page whose elements are nested too deeply is a problem `too_deep`. Raises
    DataError where the extra `web` is not installed.
    """
    if page.count("<") > DEEPEST and (depth := _depth(page)) > DEEPEST:
        return Problem("too_deep", depth, f"its elements are nested {depth:,} deep, more than {DEEPEST:,}")
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
