"""
How many times as long a text can become before a tokenizer's model sees it: a bound, from its tokenizer.json.

Each step of a normalizer, pre-tokenizer or decoder has a factor, in bytes; steps in sequence multiply. Without a bound,
five steps that write 100 letters for one make 10^10 bytes of a single letter.
"""

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Any

from bloomery.core.errors import shorten

MAX_GROWTH = 1024
"""SentencePiece's table of NFKC (33), runs of spaces as one (4), and Metaspace (4) make 528."""

_FACTORS = {
    # Unicode: what a character of each form takes at most (U+0390, U+FDFA; https://unicode.org/faq/normalization.html)
    **{"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5},
    # accents split off (3), small letters (1.5), and a space on either side of a Chinese character (5 bytes for 3)
    "BertNormalizer": 7.5,
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), 1.0),
    # pre-tokenizers that only cut
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1.0),
    **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1.0),
    # decoders; these write less than the name of a token, or a space after it
    **dict.fromkeys(("BPEDecoder", "ByteFallback", "CTC", "Fuse", "WordPiece"), 2.0),
}
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
BEFORE_MODEL = ("normalizer", "pre_tokenizer")


def steps(part: Any, name: str) -> list[dict[str, Any]]:
    """What a normalizer, pre-tokenizer or decoder does, one step after the other."""
    if not part:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[_LISTS[name]] for step in steps(inner, name)]


def growth(spec: dict[str, Any]) -> float:
    """How many times as many bytes normalizer and pre-tokenizer can make of a text."""
    return _product(_taken(spec, BEFORE_MODEL))


def problem(spec: dict[str, Any]) -> str:
    """Why the steps of a tokenizer must not run, or ""; `spec` is as the library writes it."""
    for name in _LISTS:
        for step in steps(spec[name], name):
            title = name.replace("_", "-")
            if step["type"] not in _FACTORS and step["type"] not in _BY_CONTENT:
                return f"has a {title} of the unknown type {shorten(step['type'])!r}"
            if step.get("pattern") in ({"String": ""}, {"Regex": ""}):
                return f"has a {title} {step['type']} with an empty pattern, which stands between any two characters"
            if step.get("prepend") == "":
                return f"has a {title} Prepend with an empty text"
            if _factor(step) > MAX_GROWTH:
                return f"has a {title} {step['type']} that can make a text {_factor(step):,.0f} times as long{_LIMIT}"
    for names in (BEFORE_MODEL, ("decoder",)):
        taken = _taken(spec, names)
        if (product := _product(taken)) > MAX_GROWTH:
            shown = shorten(", ".join(step["type"] for step in taken if _factor(step) > 1))
            return f"has steps that can make a text {product:,.0f} times as long ({shown}){_LIMIT}"
    return ""


_LIMIT = f"; {MAX_GROWTH:,} times is the limit"


def _taken(spec: dict[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    return [step for name in names for step in steps(spec[name], name)]


def _product(taken: Iterable[dict[str, Any]]) -> float:
    product = 1.0
    for step in taken:
        product = min(product * _factor(step), 1e30)
    return product


def _factor(step: dict[str, Any]) -> float:
    by_content = _BY_CONTENT.get(step["type"])
    return by_content(step) if by_content else _FACTORS[step["type"]]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _replaced(step: dict[str, Any]) -> float:
    """A pattern of text by its length; any other may match one byte, or between two."""
    content, pattern = _size(step["content"]), step["pattern"].get("String")
    return max(1.0, content / max(1, _size(pattern))) if pattern is not None else 1.0 + content


def _by_table(step: dict[str, Any]) -> float:
    """The longest text of SentencePiece's table: 4 bytes with the size of a trie, the trie, texts that end with NUL."""
    try:
        table = base64.b64decode(step["precompiled_charsmap"] or "")
    except binascii.Error:
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max(1, *(len(text) for text in texts.split(b"\0"))) if texts else 1)


_BY_CONTENT: dict[str, Callable[[dict[str, Any]], float]] = {
    "Replace": _replaced,
    "Prepend": lambda step: 1.0 + _size(step["prepend"]),
    "Precompiled": _by_table,
    # each byte becomes a letter of one or two bytes, and a word may get a space
    "ByteLevel": lambda step: 4.0 if step.get("add_prefix_space") else 2.0,
    "Metaspace": lambda step: 1.0 + _size(step["replacement"]),
}
"""Steps whose factor depends on their settings. Added tokens cut a text, so each byte may get a prefix of its own."""
