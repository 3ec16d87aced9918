"""Inputs from other inputs: bytes that are damaged, and JSON of the wrong shape."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

DIGITS, DEEP = "@5000 digits@", "@deep@"
"""Stand for numbers and lists that json.dumps does not write."""
SPELLED = {f'"{DIGITS}"': "9" * 5000, f'"{DEEP}"': "[" * 5000 + "]" * 5000}

ODD_NUMBERS: tuple[int | float, ...] = (
    *(0, -1, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**9),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, 1e-9, float("nan"), float("inf"), float("-inf")),
)
ODD_TEXTS = ("", "x", "\0", "../..", "/", "/dev/zero", "/proc/self/mem", "\ud800", "x" * 3000, "é\u202e😀", "~", "*")
ODD_VALUES: tuple[Any, ...] = (*ODD_NUMBERS, *ODD_TEXTS, None, True, False, [], {}, [[]], [None], DIGITS, DEEP)

WORDS = (
    *(b"0", b"-1", b"9" * 30, b"1e999", b"NaN", b"Infinity", b"null", b"true", b'"', b"\\", b"\\ud800", b"\\u0000"),
    *(b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"<", b">", b"&#0;"),
    *(b"<!--", b"\r\n\r\n", b"Content-Length: 99999999999", b"Transfer-Encoding: chunked", b"WARC/1.0", b"../", b"'''"),
    *(b"#", b"=", b"[" * 200, b"\xff", b"\xff\xfe", b"\x80", b"\xed\xa0\x80", b"\0\0\0\0", b"\xff" * 8),
)
"""What readers take for more than letters."""


def damaged(data: bytes, key: int) -> bytes:
    """Bytes with one to six changes: bits, bytes, numbers, pieces that are gone, twice there or strange."""
    rng = Random(key)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 200)))
        piece: bytes
        match rng.randrange(7):
            case 0 if at < len(data):
                piece, end = bytes([data[at] ^ 1 << rng.randrange(8)]), at + 1
            case 1:
                piece = rng.randbytes(end - at)
            case 2:
                piece = b""
            case 3:
                piece = data[at:end] * rng.choice((2, 3, 50))
            case 4:
                piece, end = b"", len(data) if rng.random() < 0.5 else end
            case 5:
                piece = str(rng.choice(ODD_NUMBERS)).encode()
            case _:
                piece, end = rng.choice(WORDS), at if rng.random() < 0.7 else end
        data = data[:at] + piece + data[end:]
    return data


def bytes_like(examples: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Damaged copies of examples; one in ten is whole, so that a target that refuses everything is noticed."""
    key = st.integers(0, 2**62)
    return st.builds(lambda data, key: data if key % 10 == 0 else damaged(data, key), st.sampled_from(examples), key)


def written(tree: Any) -> bytes:
    text = json.dumps(tree, ensure_ascii=True)
    for marker, spelled in SPELLED.items():
        text = text.replace(marker, spelled)
    return text.encode()


VALUES = st.one_of(
    *[st.sampled_from(ODD_VALUES)] * 3,
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)
"""JSON values of every shape."""


def changed(tree: Any, key: int, value: Any) -> Any:
    """JSON data in which a value somewhere is another one, is gone, or has company."""
    rng, tree = Random(key), deepcopy(tree)
    node: Any = tree
    parent: Any = None
    step: Any = None
    while isinstance(node, dict | list) and node and (parent is None or rng.random() < 0.75):
        parent, step = node, rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = parent[step]
    if parent is None or rng.random() < 0.03:
        return value
    match rng.randrange(8):
        case 0:
            del parent[step]
        case 1 if isinstance(parent, dict):
            parent[str(value)[:30]] = value
        case _:
            parent[step] = value
    return tree


def json_like(trees: Sequence[Any]) -> SearchStrategy[bytes]:
    """JSON with a value of the wrong shape, and JSON that is damaged."""
    shapes = st.builds(changed, st.sampled_from(trees), st.integers(0, 2**62), VALUES).map(written)
    return st.one_of(shapes, shapes, bytes_like([written(tree) for tree in trees]))


def named(files: Mapping[str, SearchStrategy[bytes]]) -> SearchStrategy[bytes]:
    """A name, a line feed, and what that file holds."""
    return st.one_of([inner.map(f"{name}\n".encode().__add__) for name, inner in files.items()])


def split(data: bytes, names: Sequence[str]) -> tuple[str, bytes]:
    """The name and what the file holds; where the name is none of `names`, the first of them."""
    name, _, body = data.partition(b"\n")
    known = name.decode(errors="replace")
    return (known, body) if known in names else (names[0], body)
