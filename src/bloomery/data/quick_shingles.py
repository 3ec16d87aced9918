"""
What shingles.py and minhash.py compute, number for number, by the compiled library: on UTF-8 as Arrow holds it.

Every function takes the library as `native.library("text")` gives it, which is None where there is none; callers
then go the way of numpy.
"""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bloomery.data import shingles as plain
from bloomery.data.minhash import Minima, Settings, multipliers
from bloomery.data.shingles import Hashes, Kind, Shingles

Library = ctypes.CDLL
Bounds = NDArray[np.int64]

DEPENDENT = ("İ".encode(), "Σ".encode())
"""Letters whose lower case is more than one letter, or depends on the neighbors."""


BYTES_PER_BLOCK = 1 << 18
"""Of texts that are looked at together: what is made of them fits into a second-level cache."""


class Packed(NamedTuple):
    """Texts in UTF-8, one after the other; text d is data[bounds[d]:bounds[d + 1]]. Surrogates may stand in them."""

    data: NDArray[np.uint8]
    bounds: Bounds

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Packed":
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), bounds)

    @classmethod
    def of_arrow(cls, column: pa.Array) -> "Packed":
        """Without a copy, of a column without nulls."""
        wide = column if pa.types.is_large_string(column.type) else column.cast(pa.large_string())
        _, offsets, data = wide.buffers()
        bounds = np.frombuffer(offsets, np.int64)[wide.offset : wide.offset + len(wide) + 1]
        return cls(np.frombuffer(data or b"", np.uint8), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, begin: int, end: int) -> "Packed":
        return Packed(self.data, self.bounds[begin : end + 1])

    def strings(self) -> list[str]:
        return [str(text, "utf-8", "surrogatepass") for text in self.each()]

    def each(self) -> Iterator[memoryview]:
        view = self.data.data
        return (view[a:b] for a, b in pairwise(self.bounds.tolist()))

    def lowered(self) -> "Packed":
        """With texts that have a letter of DEPENDENT in lower case, so that a table does for the others."""
        whole = self.data[self.bounds[0] : self.bounds[-1]].tobytes()
        if not any(letter[:1] in whole and letter in whole for letter in DEPENDENT):  # one byte is soon looked for
            return self
        return Packed.of([plain.lowered(text) for text in self.strings()])


def blocks(texts: Packed) -> Iterator[tuple[int, int]]:
    """Ranges of texts that are looked at together; a longer one stands alone."""
    begin, bounds = 0, texts.bounds
    while begin < len(texts):
        limit = bounds[begin] + BYTES_PER_BLOCK
        end = max(begin + 1, int(np.searchsorted(bounds, limit, side="right")) - 1)
        yield begin, end
        begin = end


@lru_cache(maxsize=8)
def _room(name: str, size: int) -> Hashes:
    """An array that is filled anew by every call: fresh memory would cost more than what is written to it."""
    return np.empty(size, np.uint64)


def _taken(name: str, size: int) -> Hashes:
    """So much of an array whose size few others are asked for."""
    if size > BYTES_PER_BLOCK:
        return np.empty(size, np.uint64)
    return _room(name, BYTES_PER_BLOCK)[:size]


def shingles(library: Library, texts: Packed, kind: Kind, size: int) -> Shingles:
    """As `shingles.shingles`. The hashes are valid until the next call; not for several threads at a time."""
    long = len(texts) == 1 and _longer(texts, plain.LARGEST_PIECE)
    lower = texts.lowered()
    count, room = len(lower), int(lower.bounds[-1] - lower.bounds[0])
    words, tokens = (_taken(name, room // 2 + count + 1) for name in ("words", "tokens"))
    word_bounds, token_bounds, bounds = np.empty((3, count + 1), np.int64)
    given = _address(lower.data), _address(lower.bounds), count, _address(plain.code_point_values())
    piece = plain.LARGEST_PIECE if long else 0
    _call(library.bloomery_scan, *given, piece, *map(_address, (words, word_bounds, tokens, token_bounds)))
    raw = tokens.data.cast("B")
    places = (8 * token_bounds).tolist()
    digests = b"".join([hashlib.sha256(raw[a:b]).digest()[:16] for a, b in pairwise(places)])
    if kind == "characters":
        words = _taken("characters", room)
        _call(library.bloomery_characters, *given, _address(words), _address(word_bounds))
    found = _taken("shingles", int(word_bounds[-1]))
    given = _address(words), _address(word_bounds), count, size
    _call(library.bloomery_shingles, *given, _address(found), _address(bounds))
    return Shingles(found[: bounds[-1]], bounds, np.frombuffer(digests, np.uint64).reshape(-1, 2))


def minima(library: Library, found: Shingles, settings: Settings) -> Minima:
    """As `minhash.minima`."""
    texts = len(found.bounds) - 1
    result, factors = np.empty((settings.permutations, texts), np.uint32), multipliers(settings)
    given = _address(found.hashes), _address(found.bounds), texts
    _call(library.bloomery_minima, *given, _address(factors), len(factors), _address(result))
    return result


def sets(library: Library, found: Shingles) -> tuple[Hashes, Bounds]:
    """`shingles.shingle_set` of each text, one after the other, and their sizes. Valid until the next call."""
    into, sizes = _taken("sets", len(found.hashes)), np.empty(len(found.bounds) - 1, np.int64)
    given = _address(found.hashes), _address(found.bounds), len(sizes)
    _call(library.bloomery_sets, *given, _address(into), _address(sizes))
    return into[: sizes.sum()], sizes


def jaccard(library: Library, a: Hashes, b: Hashes) -> float:
    """As `shingles.jaccard`."""
    shared: int = _call(library.bloomery_shared, _address(a), len(a), _address(b), len(b))
    return shared / (len(a) + len(b) - shared) if len(a) or len(b) else 1.0


def _call(function: Any, *arguments: int) -> Any:
    """All arguments are addresses or counts, and so is what comes back, if anything does."""
    function.restype = ctypes.c_int64
    return function(*map(ctypes.c_int64, arguments))


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _longer(texts: Packed, characters: int) -> bool:
    """Whether texts have more characters than that: every byte but the continuing ones begins one."""
    data = texts.data[texts.bounds[0] : texts.bounds[-1]]
    return len(data) > characters and int(np.count_nonzero((data & 0xC0) != 0x80)) > characters
