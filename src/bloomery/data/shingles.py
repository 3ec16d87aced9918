"""
What of two texts is compared: hashes of their n-word or n-character shingles, for whole batches of texts at a time.

    P[i] = Σ_{j<i} v(c_j) r**j              v: value of a code point in lower case; r: odd, so it has an inverse
    h(c_a … c_b) = (P[b + 1] − P[a]) r**−a   the hash of a run of characters, wherever it stands
    s_k = mix(Σ_{j<n} h(word_{k+j}) q**j)    the hash of a shingle

All arithmetic is modulo 2**64, on purpose: one prefix sum gives every word of a batch (Karp & Rabin 1987, Efficient
randomized pattern-matching algorithms). Words are `re.findall(r"\\w+", text.lower())`, characters those of the
normalized text: lower case, every run of white space one space, none at the ends. Two different words or shingles
agree with p = 2**-64, unless somebody made them to (Thue–Morse strings of a thousand characters and more).
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Kind = Literal["words", "characters"]

CHARACTERS_PER_BLOCK = 1 << 16  # its arrays fit into a second-level cache
LARGEST_PIECE = 1 << 20  # a longer run of characters without white space is cut there

SPACE, WORD = np.uint32(1 << 24), np.uint32(1 << 25)
RADIX = 0x9E3779B97F4A7C15
STEP = 0xD1342543DE82EF95  # q


class Shingles(NamedTuple):
    """Of D texts; those of text d are hashes[bounds[d]:bounds[d + 1]], in their order, with repeats."""

    hashes: Hashes
    bounds: NDArray[np.int64]
    """[D + 1]"""
    digests: Hashes
    """[D, 2]: 128 bits that are equal for texts that differ in letter case and white space only."""


class Pieces(NamedTuple):
    """Words or tokens of a string: their hashes, and where each begins."""

    hashes: Hashes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def mix(values: Hashes) -> Hashes:
    """A bijection of 64-bit numbers that looks random (the finalizer of splitmix64, Steele et al. 2014)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@cache
def code_point_values() -> NDArray[np.uint32]:
    """Of every code point: its lower case, plus one, and flags for what `\\w` and `\\s` match."""
    points = "".join(map(chr, range(0x110000)))
    lowered = points.replace("İ", "i").replace("Σ", "σ").lower()  # the two whose lower case is not one letter alone
    values = np.frombuffer(lowered.encode("utf-32-le", "surrogatepass"), np.uint32) + np.uint32(1)
    for flag, pattern in ((WORD, r"\w+"), (SPACE, r"\s+")):
        for run in re.finditer(pattern, lowered):
            values[run.start() : run.end()] |= flag
    return values


@cache
def _powers(count: int, radix: int) -> tuple[Hashes, Hashes]:
    """radix**i and radix**−i for i < count."""
    tables = []
    for base in (radix, pow(radix, -1, 2**64)):
        factors = np.full(count, base, np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors, dtype=np.uint64))
    return tables[0], tables[1]


class _Room(NamedTuple):
    """Arrays that every call of `scan` in a process fills anew: fresh ones would cost more than what is computed."""

    values: NDArray[np.uint32]
    terms: Hashes
    sums: Hashes
    inside: NDArray[np.bool_]
    changes: NDArray[np.bool_]


@lru_cache(maxsize=1)
def _room(size: int) -> _Room:
    """Room for texts of fewer than `size` characters together."""
    truths = np.empty(size + 1, np.bool_), np.empty(size, np.bool_)
    return _Room(np.empty(size, np.uint32), np.empty(size, np.uint64), np.zeros(size, np.uint64), *truths)


def lowered(text: str) -> str:
    """`text.lower()` where letters depend on their neighbors or change the length; else the text, for the table."""
    return text.lower() if "İ" in text or "Σ" in text else text


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def scan(texts: Sequence[str]) -> tuple[Pieces, Pieces]:
    """
    The words and the white-space-separated tokens of texts, of at most a few million characters together.

    Places are those in the texts joined by line breaks. Not for several threads at a time.
    """
    points = np.frombuffer("\n".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    size = len(points)
    room = _room(_rounded(size + 1))
    powers, inverses = _powers(_rounded(size + 1), RADIX)
    values = code_point_values().take(points, mode="clip", out=room.values[:size])
    terms, sums = room.terms[:size], room.sums[: size + 1]
    terms[:] = values
    terms *= powers[:size]
    np.cumsum(terms, out=sums[1:])
    values >>= np.uint32(24)
    inside, changes = room.inside[: size + 2], room.changes[: size + 1]

    def pieces() -> Pieces:
        """Of the runs of characters that are `inside`."""
        inside[[0, -1]] = False
        edges = np.flatnonzero(np.not_equal(inside[1:], inside[:-1], out=changes))
        starts, found = edges[::2], sums.take(edges)
        hashes = found[1::2] - found[::2]
        hashes *= inverses.take(starts)
        return Pieces(mix(hashes), starts, edges[1::2])

    np.equal(values, WORD >> np.uint32(24), out=inside[1:-1])
    words = pieces()
    np.not_equal(values, SPACE >> np.uint32(24), out=inside[1:-1])
    return words, pieces()


def _rounded(count: int) -> int:
    """A size of table that few others are asked for."""
    return max(CHARACTERS_PER_BLOCK * 2, 1 << (count - 1).bit_length())


def of_words(hashes: Hashes, size: int) -> Hashes:
    """Hashes of `size` neighbors each: [max(0, len - size + 1)]."""
    count = max(0, len(hashes) - size + 1)
    if size > 6 and count:  # the same sums as differences of one running sum
        powers, inverses = _powers(_rounded(len(hashes)), STEP)
        sums = np.zeros(len(hashes) + 1, np.uint64)
        np.cumsum(hashes * powers[: len(hashes)], out=sums[1:])
        return mix((sums[size:] - sums[:count]) * inverses[:count])
    total = hashes[:count].copy()
    for shift in range(1, size):
        total += hashes[shift : shift + count] * np.uint64(pow(STEP, shift, 2**64))
    return mix(total)


def _grouped(hashes: Hashes, counts: NDArray[np.int64], size: int) -> tuple[Hashes, NDArray[np.int64]]:
    """`_of_words` for several texts in a row: what reaches over the end of one is left out."""
    every = of_words(hashes, size)
    bounds = np.concatenate(([0], np.cumsum(np.maximum(counts - size + 1, 0))))
    if len(every) > bounds[-1]:
        over = np.subtract.outer(np.cumsum(counts)[:-1], np.arange(1, size)).ravel()
        inside = np.ones(len(every), np.bool_)
        inside[over[(over >= 0) & (over < len(every))]] = False
        every = np.compress(inside, every)
    return every, bounds


def _characters(text: str) -> Hashes:
    """Values of the characters of the normalized text."""
    flat = code_points(" ".join(text.lower().split()))
    return mix(flat.astype(np.uint64) + np.uint64(1))


def blocks(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of texts that are looked at together; one that is longer than a block stands alone."""
    begin, size = 0, 0
    for place, text in enumerate(texts):
        if begin < place and size + len(text) > CHARACTERS_PER_BLOCK:
            yield begin, place
            begin, size = place, 0
        size += len(text) + 1
    if begin < len(texts):
        yield begin, len(texts)


def shingles(texts: Sequence[str], kind: Kind, size: int) -> Shingles:
    """The shingles and digests of one block of texts: of `size` words, or of `size` characters."""
    if len(texts) == 1 and len(texts[0]) > LARGEST_PIECE:
        return _of_long(texts[0], kind, size)
    lower = [lowered(text) for text in texts]
    words, tokens = scan(lower)
    ends = np.cumsum([len(text) + 1 for text in lower], dtype=np.int64)
    borders = np.concatenate(([0], np.searchsorted(tokens.starts, ends))).tolist()
    raw = tokens.hashes.tobytes()
    digests = b"".join(_digest(raw[8 * a : 8 * b]) for a, b in pairwise(borders))
    if kind == "words":
        counts = np.diff(np.searchsorted(words.starts, ends), prepend=0)
        hashes, bounds = _grouped(words.hashes, counts, size)
    else:
        values = [_characters(text) for text in texts]
        counts = np.array([len(one) for one in values], np.int64)
        hashes, bounds = _grouped(np.concatenate(values), counts, size)
    return Shingles(hashes, bounds, np.frombuffer(digests, np.uint64).reshape(-1, 2))


def _digest(tokens: bytes) -> bytes:
    return hashlib.sha256(tokens).digest()[:16]


def _of_long(text: str, kind: Kind, size: int) -> Shingles:
    """The same for a text of many blocks, piece by piece."""
    lower = lowered(text)
    found: list[Hashes] = []
    digest = hashlib.sha256()
    for begin, end in cuts(lower):
        words, tokens = scan([lower[begin:end]])
        digest.update(tokens.hashes.tobytes())
        if kind == "words":
            found.append(words.hashes)
    hashes = of_words(np.concatenate(found) if kind == "words" else _characters(text), size)
    bounds = np.array([0, len(hashes)], np.int64)
    return Shingles(hashes, bounds, np.frombuffer(digest.digest()[:16], np.uint64).reshape(1, 2))


def cuts(text: str) -> Iterator[tuple[int, int]]:
    """Pieces of a long text that end in front of white space, where there is some within a million characters."""
    begin = 0
    space = re.compile(r"\s")
    while begin < len(text):
        end = begin + LARGEST_PIECE
        gap = space.search(text, end, end + LARGEST_PIECE)
        end = min(gap.start() if gap else end + LARGEST_PIECE, len(text))
        yield begin, end
        begin = end


def shingle_set(hashes: Hashes) -> Hashes:
    """Without repeats, ascending: what `jaccard` takes."""
    ordered = np.sort(hashes)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


def jaccard(a: Hashes, b: Hashes) -> float:
    """
    |A ∩ B| / |A ∪ B| of two sets of hashes, exactly. Sets are ascending and without repeats.

    That of two empty sets is 1.
    """
    both = np.concatenate((a, b))
    both.sort()
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared) if len(both) else 1.0
