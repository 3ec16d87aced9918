"""
Hashed n-grams of many texts at once, in numpy: of words and marks, and of characters.

A text is its code points in lower case. Tokens are runs of word characters, single ideographs and kana, single marks
and line breaks. The hash of a token is a polynomial in its code points modulo 2**64, so that one running sum over a
batch has those of all its tokens; an n-gram's hash combines those of its parts, and a product takes its bucket from
the upper bits (multiply-shift, Dietzfelbinger et al. 1997; the reduction to any range, Lemire 2019, arXiv 1805.10941).
Words and characters share the buckets (Joulin et al. 2017, Bag of Tricks, arXiv 1607.01759).

scikit-learn's hashing has the same tokens, but makes a Python string of each n-gram, and is many times slower.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

IDEOGRAPHS = r"\u2e80-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Scripts without spaces between words, whose signs say about as much as words do elsewhere."""
TOKENS = rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s\0]|\n"
"""What a token is, as a regular expression: the array code below gives the same, by test."""

CHARACTERS_AT_ONCE = 2**17
"""Of text in one batch, so that its arrays stay in the processor's cache."""
BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
MIX = np.uint64(0xD6E8FEB86659FD93)
SPACE, RUN, SINGLE = 0, 1, 2

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Grams:
    """Which n-grams are looked at. `words` and `characters` are shortest and longest; None leaves a family out."""

    buckets: int
    words: tuple[int, int] | None = (1, 2)
    characters: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """The n-grams of one family in some texts: the bucket of each, the number of its text, and how many a text has."""

    buckets: Places
    texts: Places
    counts: Places


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some texts in order: hash, number of the text, and whether it is a run of word characters."""

    hashes: Hashes
    texts: Places
    runs: NDArray[np.bool_]
    first: Places
    """Where each begins in `Laid.points`."""


@dataclass(frozen=True, eq=False)
class Laid:
    """Texts laid out one after the other, as code points, each with `pad` NULs after it."""

    points: NDArray[np.uint32]
    starts: Places
    lengths: Places
    pad: int


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about CHARACTERS_AT_ONCE characters; a longer one stands alone."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def lay(texts: Sequence[str], pad: int = 1) -> Laid:
    """Texts as one array of code points; halves of surrogate pairs pass."""
    joined = ("\0" * pad).join([*texts, ""])
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return Laid(points, np.cumsum(lengths + pad) - lengths - pad, lengths, pad)


def hashed(texts: Sequence[str], grams: Grams) -> list[Found]:
    """
    The n-grams of every family of `grams` in these texts: words before characters, shorter ones first.

    In a family they go by length, then by where they begin. What a text has depends on no other text.
    """
    laid = lay([text.lower() for text in texts], pad=max(1, (grams.characters or (0, 1))[1] - 1))
    found = []
    if grams.words is not None:
        found.append(_of_words(tokens(laid), len(texts), grams.words, grams.buckets))
    if grams.characters is not None:
        found.append(_of_characters(laid, grams.characters, grams.buckets))
    return found


def present(found: Found, buckets: int) -> tuple[Places, Places]:
    """Each bucket that a text's n-grams fall into once: buckets, and the numbers of their texts."""
    keys = found.texts * buckets + found.buckets
    if len(found.counts) * buckets < 2**32:
        keys = keys.astype(np.uint32)  # sorts twice as fast
    keys.sort()
    new = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    texts, places = np.divmod(keys[new].astype(np.int64), buckets)
    return places, texts


def spelled(text: str, words: tuple[int, int]) -> list[str]:
    """The word n-grams of a text in the order of `hashed`, as text: tokens with a space between them."""
    found = re.findall(TOKENS, text.lower())
    least, most = words
    return [" ".join(found[i : i + n]) for n in range(least, most + 1) for i in range(len(found) - n + 1)]


def tokens(laid: Laid) -> Tokens:
    """The tokens of texts that were laid out; equal tokens have equal hashes, in any batch."""
    points = laid.points
    kinds = _kinds()[points]
    run, single = kinds == RUN, kinds == SINGLE
    starts, stops = run.copy(), run.copy()
    starts[1:] &= ~run[:-1]
    stops[:-1] &= ~run[1:]
    first, last = np.flatnonzero(starts | single), np.flatnonzero(stops | single)
    powers, inverses = _powers(1 << len(points).bit_length())
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum((points + np.uint32(1)) * powers[: len(points)], out=sums[1:])
    hashes = _mixed((sums[last + 1] - sums[first]) * inverses[first])
    counts = np.diff(np.append(np.searchsorted(first, laid.starts), len(first)))
    return Tokens(hashes, np.repeat(np.arange(len(counts)), counts), run[first], first)


def joined(found: Tokens, size: int) -> tuple[Hashes, Places]:
    """Hashes of all n-grams of `size` tokens, and the number of the text that each stands in."""
    hashes, texts = found.hashes, found.texts
    for place in range(1, size):
        hashes = hashes[:-1] * BASE + found.hashes[place:]
    whole = texts[: len(hashes)] == texts[size - 1 :]
    return hashes[whole] + np.uint64(size), texts[: len(hashes)][whole]


def _of_words(found: Tokens, texts: int, sizes: tuple[int, int], buckets: int) -> Found:
    pairs = [joined(found, size) for size in range(sizes[0], sizes[1] + 1)]
    return _found([_buckets(hashes, buckets) for hashes, _ in pairs], [where for _, where in pairs], texts)


def _of_characters(laid: Laid, sizes: tuple[int, int], buckets: int) -> Found:
    """Every position begins one n-gram of each size; at the end of a text it holds the NULs that follow."""
    texts = np.repeat(np.arange(len(laid.lengths)), laid.lengths)
    begins = np.arange(len(texts)) + laid.pad * texts
    values = laid.points.astype(np.uint64)
    chosen = []
    combined = values
    for size in range(1, sizes[1] + 1):
        if size > 1:
            combined = combined[:-1] * BASE + values[size - 1 :]
        if size >= sizes[0]:
            chosen.append(_buckets(combined[begins] + np.uint64(size << 32), buckets))
    return _found(chosen, [texts] * len(chosen), len(laid.lengths))


def _found(chosen: Sequence[Places], places: Sequence[Places], texts: int) -> Found:
    where = np.concatenate(places)
    return Found(np.concatenate(chosen), where, np.bincount(where, minlength=texts).astype(np.int64))


def _mixed(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * MIX
    return hashes ^ (hashes >> np.uint64(29))


def _buckets(hashes: Hashes, buckets: int) -> Places:
    upper = _mixed(hashes * BASE) >> np.uint64(32)
    return ((upper * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


@cache
def _kinds() -> NDArray[np.uint8]:
    """For every code point: SPACE (no part of a token), RUN (word character) or SINGLE (a token by itself)."""
    kinds = np.full(0x110000, SPACE, np.uint8)
    everything = "".join(map(chr, range(0x110000)))
    for pattern, kind in ((r"[^\s\0]+", SINGLE), (rf"[^\W{IDEOGRAPHS}]+", RUN), (r"\n", SINGLE)):
        for match in re.finditer(pattern, everything):
            kinds[match.start() : match.end()] = kind
    return kinds


@cache
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """BASE**i and BASE**-i for i below `size`."""
    bases = np.full(size, BASE), np.full(size, INVERSE)
    for powers in bases:
        powers[0] = 1
        np.cumprod(powers, out=powers)
    return bases
