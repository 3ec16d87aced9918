"""Plain text of HTML pages by resiliparse, and text of bytes in whatever encoding they are."""

import re
from functools import cache
from typing import Any

from bloomery.data import extras
from bloomery.data.rows import MARKS
from bloomery.data.unpack import Problem

SAMPLE_BYTES = 2**16
"""What the detection of an encoding looks at, as resiliparse does by default."""


DEEPEST = 1000
"""Elements in elements. Browsers stop at 512; extraction takes time by the square of it, minutes at 100,000."""
ELEMENTS = re.compile(r"<(/?)(?!(?:p|li|t[rdh]|d[td]|br|hr|img|input|meta|link|option|source|wbr|area|col)\b)[a-zA-Z]")
"""Tags that open or close what has to be closed."""


DOUBLE = ("gbk", "gb18030", "big5", "euc_kr", "euc_jp", "shift_jis")
"""Encodings of two bytes a character, as the library calls them: a few of their characters may be UTF-8 by chance."""
ENOUGH = 16
"""So many are no chance: one character of GBK is two bytes of UTF-8 with p = 0.08."""
BEYOND = re.compile(r"[^\x00-\x7f]+")


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
    Bytes as text: by their byte order mark; as UTF-8 where they are that, beyond ASCII, whatever is said of them; else
    by `charset` where it is told (as in an HTTP header) and known, as a `page` says itself, or as they look (uchardet).
    Bytes that are no text in it give Windows-1252, as browsers do.

    NUL bytes in what is no UTF-16 or UTF-32 are a problem: this is not text. Raises DataError without the extra `web`.
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
        return Problem("binary", nul, f"byte offset {nul} holds a NUL: this is not text")
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
