"""
Hashes word and character n-grams of whole batches of texts at a time, in numpy.

Shingles, for comparing two texts: hashes of their n-word or n-character shingles.

    P[i] = Σ_{j<i} v(c_j) r**j              v: value of a code point in lower case; r: odd, so it has an inverse
    h(c_a … c_b) = (P[b + 1] − P[a]) r**−a   the hash of a run of characters, wherever it stands
    s_k = splitmix64(Σ_{j<n} h(word_{k+j}) q**j)    the hash of a shingle

All arithmetic is modulo 2**64, on purpose. One prefix sum gives every word of a batch (Karp & Rabin 1987, Efficient
randomized pattern-matching algorithms). Words are the runs of word characters (as Python's `re` defines them) in
`text.lower()`. Characters are those of the normalized text. It is in lower case, with each run of white space as
one space, and none at the ends. Two different words or shingles agree with p = 2**-64. The exception is text made
for that purpose (Thue–Morse strings of a thousand characters and more).

N-grams, for classifiers: n-grams of words and punctuation marks, and of characters.

A text is its code points in lower case. Tokens are runs of word characters, single ideographs and kana, single
marks and line breaks. The hash of a token is a polynomial in its code points modulo 2**64. One running sum over a
batch therefore contains the hashes of all its tokens. The hash of an n-gram combines the hashes of its tokens. A
multiplication takes its bucket from the upper bits (multiply-shift, Dietzfelbinger et al. 1997; the reduction to
any range, Lemire 2019, arXiv 1805.10941). Words and characters share the buckets (Joulin et al. 2017, Bag of
Tricks, arXiv 1607.01759).

The hashing of scikit-learn has the same tokens. It makes a Python string of each n-gram, though, and is many times
slower.

Scripts without spaces between words: Han, kana, Thai, Lao, Burmese and Khmer. To compare runs of words in these
scripts too, every ideograph and kana counts as a word. So does every cluster of the other scripts: a consonant with
the vowels around it, without its marks. Two such words hold about as much as one word of a language with spaces.

Shingles, n-grams and word splitting share one file because all define words, and both hashes use prefix sums.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.core.io import GOLDEN, splitmix64

Hashes = NDArray[np.uint64]
ShingleKind = Literal["words", "characters"]

CHARACTERS_PER_BLOCK = 1 << 16  # its arrays fit into a second-level cache
LARGEST_PIECE = 1 << 20  # a longer run of characters without white space is cut there

SPACE, WORD = np.uint32(1 << 24), np.uint32(1 << 25)
RADIX = GOLDEN
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
def _powers(size: int, radix: int) -> tuple[Hashes, Hashes]:
    """radix**i and radix**−i for i < size."""
    tables = np.full(size, radix, np.uint64), np.full(size, pow(radix, -1, 2**64), np.uint64)
    for powers in tables:
        powers[0] = 1
        np.cumprod(powers, out=powers)
    return tables


def _rounded(count: int) -> int:
    """A size of table that few others are asked for."""
    return max(CHARACTERS_PER_BLOCK * 2, 1 << (count - 1).bit_length())


class RollingHash(NamedTuple):
    """Hashes Σ_{a≤i<b} v_i r**(i−a) of runs [a, b) of a sequence v, wherever the runs stand."""

    sums: Hashes
    """P of the module docstring."""
    inverses: Hashes

    @classmethod
    def of(
        cls, values: NDArray[np.unsignedinteger[Any]], radix: int = RADIX, into: tuple[Hashes, Hashes] | None = None
    ) -> "RollingHash":
        """`into`: arrays for terms and sums, longer than `values`. The result is valid until their next use."""
        size = len(values)
        powers, inverses = _powers(_rounded(size + 1), radix)
        terms, sums = into or (np.empty(size, np.uint64), np.zeros(size + 1, np.uint64))
        terms, sums = terms[:size], sums[: size + 1]
        terms[:] = values
        terms *= powers[:size]
        np.cumsum(terms, out=sums[1:])
        return cls(sums, inverses)

    def runs(self, begins: NDArray[np.integer[Any]], ends: NDArray[np.integer[Any]]) -> Hashes:
        """Of the runs [begins[n], ends[n])."""
        hashes = self.sums.take(ends)
        hashes -= self.sums.take(begins)
        hashes *= self.inverses.take(begins)
        return hashes

    def windows(self, size: int) -> Hashes:
        """Of all runs of `size` values."""
        return (self.sums[size:] - self.sums[:-size]) * self.inverses[: len(self.sums) - size]


class _Room(NamedTuple):
    """Arrays that all calls of `scan` in a process reuse: allocating them would cost more than the computation."""

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
    points = code_points("\n".join(texts))
    size = len(points)
    room = _room(_rounded(size + 1))
    values = code_point_values().take(points, mode="clip", out=room.values[:size])
    rolling = RollingHash.of(values, into=(room.terms, room.sums))
    values >>= np.uint32(24)
    inside, changes = room.inside[: size + 2], room.changes[: size + 1]

    def pieces() -> Pieces:
        """Of the runs of characters that are `inside`."""
        inside[[0, -1]] = False
        edges = np.flatnonzero(np.not_equal(inside[1:], inside[:-1], out=changes))
        starts, ends = edges[::2], edges[1::2]
        return Pieces(splitmix64(rolling.runs(starts, ends)), starts, ends)

    np.equal(values, WORD >> np.uint32(24), out=inside[1:-1])
    words = pieces()
    np.not_equal(values, SPACE >> np.uint32(24), out=inside[1:-1])
    return words, pieces()


def of_words(hashes: Hashes, size: int) -> Hashes:
    """Hashes of `size` neighbors each: [max(0, len - size + 1)]."""
    count = max(0, len(hashes) - size + 1)
    if size > 6 and count:  # the same sums as differences of one running sum
        return splitmix64(RollingHash.of(hashes, STEP).windows(size))
    total = hashes[:count].copy()
    for shift in range(1, size):
        total += hashes[shift : shift + count] * np.uint64(pow(STEP, shift, 2**64))
    return splitmix64(total)


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
    return splitmix64(flat.astype(np.uint64) + np.uint64(1))


def shingles(texts: Sequence[str], kind: ShingleKind, size: int) -> Shingles:
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


def _of_long(text: str, kind: ShingleKind, size: int) -> Shingles:
    """The same for a text of many blocks, piece by piece."""
    lower = lowered(text)
    word_hashes: list[Hashes] = []
    digest = hashlib.sha256()
    for begin, end in cuts(lower):
        words, tokens = scan([lower[begin:end]])
        digest.update(tokens.hashes.tobytes())
        if kind == "words":
            word_hashes.append(words.hashes)
    hashes = of_words(np.concatenate(word_hashes) if kind == "words" else _characters(text), size)
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


IDEOGRAPHS = r"\u2e80-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Scripts without spaces between words, whose signs say about as much as words do elsewhere."""
TOKENS = rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s\0]|\n"
"""What a token is, as a regular expression: the array code below gives the same, by test."""

CHARACTERS_AT_ONCE = 2**17
"""Of text in one batch. At this size, its arrays stay in the CPU cache."""
BASE = np.uint64(RADIX)
MIX = np.uint64(0xD6E8FEB86659FD93)
NGRAM_SPACE, RUN, SINGLE = 0, 1, 2

Places = NDArray[np.int64]


@dataclass(frozen=True)
class NgramSizes:
    """Which n-grams are looked at. `words` and `characters` are shortest and longest; None leaves a family out."""

    buckets: int
    words: tuple[int, int] | None = (1, 2)
    characters: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class NgramMatches:
    """The n-grams of one family in some texts: the bucket of each, the number of its text, and how many a text has."""

    buckets: Places
    texts: Places
    counts: Places


@dataclass(frozen=True, eq=False)
class TokenArrays:
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


def lay(texts: Sequence[str], pad: int = 1) -> Laid:
    """Texts as one array of code points; halves of surrogate pairs pass."""
    joined = ("\0" * pad).join([*texts, ""])
    points = code_points(joined)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return Laid(points, np.cumsum(lengths + pad) - lengths - pad, lengths, pad)


def hashed(texts: Sequence[str], grams: NgramSizes) -> list[NgramMatches]:
    """
    The n-grams of every family of `grams` in these texts: words before characters, shorter ones first.

    In a family they go by length, then by where they begin. What a text has depends on no other text.
    """
    laid = lay([text.lower() for text in texts], pad=max(1, (grams.characters or (0, 1))[1] - 1))
    families = []
    if grams.words is not None:
        families.append(_of_words(tokens(laid), len(texts), grams.words, grams.buckets))
    if grams.characters is not None:
        families.append(_of_characters(laid, grams.characters, grams.buckets))
    return families


def present(matches: NgramMatches, buckets: int) -> tuple[Places, Places]:
    """Each bucket that a text's n-grams fall into once: buckets, and the numbers of their texts."""
    keys = matches.texts * buckets + matches.buckets
    if len(matches.counts) * buckets < 2**32:
        keys = keys.astype(np.uint32)  # sorts twice as fast
    keys.sort()
    new = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    texts, places = np.divmod(keys[new].astype(np.int64), buckets)
    return places, texts


def spelled(text: str, words: tuple[int, int]) -> list[str]:
    """The word n-grams of a text in the order of `hashed`, as text: tokens with a space between them."""
    token_texts = re.findall(TOKENS, text.lower())
    least, most = words
    return [" ".join(token_texts[i : i + n]) for n in range(least, most + 1) for i in range(len(token_texts) - n + 1)]


def tokens(laid: Laid) -> TokenArrays:
    """The tokens of texts that were laid out; equal tokens have equal hashes, in any batch."""
    points = laid.points
    kinds = _kinds()[points]
    run, single = kinds == RUN, kinds == SINGLE
    starts, stops = run.copy(), run.copy()
    starts[1:] &= ~run[:-1]
    stops[:-1] &= ~run[1:]
    first, last = np.flatnonzero(starts | single), np.flatnonzero(stops | single)
    hashes = _mixed(RollingHash.of(points + np.uint32(1)).runs(first, last + 1))
    counts = np.diff(np.append(np.searchsorted(first, laid.starts), len(first)))
    return TokenArrays(hashes, np.repeat(np.arange(len(counts)), counts), run[first], first)


def joined(token_arrays: TokenArrays, size: int) -> tuple[Hashes, Places]:
    """Hashes of all n-grams of `size` tokens, and the number of the text that each stands in."""
    hashes, texts = token_arrays.hashes, token_arrays.texts
    for offset in range(1, size):
        hashes = hashes[:-1] * BASE + token_arrays.hashes[offset:]
    whole = texts[: len(hashes)] == texts[size - 1 :]
    return hashes[whole] + np.uint64(size), texts[: len(hashes)][whole]


def _of_words(token_arrays: TokenArrays, texts: int, sizes: tuple[int, int], buckets: int) -> NgramMatches:
    pairs = [joined(token_arrays, size) for size in range(sizes[0], sizes[1] + 1)]
    return _found([_buckets(hashes, buckets) for hashes, _ in pairs], [where for _, where in pairs], texts)


def _of_characters(laid: Laid, sizes: tuple[int, int], buckets: int) -> NgramMatches:
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


def _found(chosen: Sequence[Places], places: Sequence[Places], texts: int) -> NgramMatches:
    where = np.concatenate(places)
    return NgramMatches(np.concatenate(chosen), where, np.bincount(where, minlength=texts).astype(np.int64))


def _mixed(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * MIX
    return hashes ^ (hashes >> np.uint64(29))


def _buckets(hashes: Hashes, buckets: int) -> Places:
    upper = _mixed(hashes * BASE) >> np.uint64(32)
    return ((upper * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


@cache
def _kinds() -> NDArray[np.uint8]:
    """For every code point: NGRAM_SPACE (in no token), RUN (word character) or SINGLE (a token by itself)."""
    flags = code_point_values() & np.uint32(SPACE | WORD)
    kinds = np.select([flags == WORD, flags == SPACE], [np.uint8(RUN), np.uint8(NGRAM_SPACE)], np.uint8(SINGLE))
    for match in re.finditer(f"[{IDEOGRAPHS}]+", "".join(map(chr, range(len(kinds))))):
        ideograph_kinds = kinds[match.start() : match.end()]
        ideograph_kinds[ideograph_kinds == RUN] = SINGLE
    kinds[[ord("\0"), ord("\n")]] = NGRAM_SPACE, SINGLE
    return kinds


ALONE = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Ideographs, kana and bopomofo, as in a class of a regular expression."""
LEADING = "\u0e40-\u0e44\u0ec0-\u0ec4"
"""Thai and Lao vowels that are written in front of their consonant."""
TRAILING = "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3"
MARKS = re.compile(
    "[\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece"
    "\u102b-\u103e\u1056-\u1059\u105e-\u1060\u1062-\u1064\u1067-\u106d\u1071-\u1074\u1082-\u108d\u108f\u109a-\u109d\u17b4-\u17d3\u17dd]+"
)
"""Signs of vowels and tones of Thai, Lao, Burmese and Khmer, which are no letters of their own."""
CLUSTERED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
CLUSTER = re.compile(
    f"[{LEADING}]*[\u0e01-\u0e2e\u0e81-\u0eae\u0edc-\u0edf\u1000-\u102a\u103f\u1050-\u1055\u1780-\u17b3][{TRAILING}]*|[^\\W_]"
)
"""What stands for a word, in text without MARKS."""
FIRST, END_OF_CLUSTERED, FIRST_ALONE = 0xE00, 0x1800, 0x2E80
UNSPACED_RUN = re.compile(f"[{ALONE}]+|[{CLUSTERED}]+")
INVISIBLE = "\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff"
"""Characters that tell nothing; some of them stand between words of these scripts, and some do not."""
PIECE = re.compile(f"[{ALONE}][\u3099\u309a]*|[{CLUSTERED}][{CLUSTERED}{INVISIBLE}]*|[^\\s{ALONE}{CLUSTERED}]+")
"""Parts of a text between which no word reaches: what `spaced` makes of a text is what it makes of them, one by one."""


def spaced(text: str) -> str:
    """A text in which spaces stand around what is a word of its own. The text itself where nothing is."""
    points = code_points(text)
    high = points[points >= FIRST]
    if not np.any((high < END_OF_CLUSTERED) | (high >= FIRST_ALONE)):  # four times as fast as to look by an expression
        return text
    return UNSPACED_RUN.sub(lambda run: f" {' '.join(_words(run[0]))} ", text)


def count(text: str) -> int:
    """How many words of a text have no spaces around them."""
    return sum(len(_words(run)) for run in UNSPACED_RUN.findall(text))


def _words(run: str) -> Sequence[str]:
    return CLUSTER.findall(MARKS.sub("", run)) if ord(run[0]) < END_OF_CLUSTERED else run
