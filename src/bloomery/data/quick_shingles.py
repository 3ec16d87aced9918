"""
What shingles.py and minhash.py compute, number for number, by the compiled library: on UTF-8 as Arrow holds it.

Every function takes the library as `native.library("text")` gives it, which is None where there is none; callers
then go the way of numpy.
"""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
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
        view = memoryview(self.data)
        return (view[a:b] for a, b in pairwise(self.bounds.tolist()))

    def lowered(self) -> "Packed":
        """With texts that have a letter of DEPENDENT in lower case, so that a table does for the others."""
        whole = self.data[self.bounds[0] : self.bounds[-1]].tobytes()
        if not any(letter in whole for letter in DEPENDENT):
            return self
        return Packed.of([plain.lowered(text) for text in self.strings()])


def blocks(texts: Packed) -> Iterator[tuple[int, int]]:
    """Ranges of texts whose arrays fit into a second-level cache together; a longer one stands alone."""
    begin, bounds = 0, texts.bounds
    while begin < len(texts):
        limit = bounds[begin] + plain.CHARACTERS_PER_BLOCK
        end = max(begin + 1, int(np.searchsorted(bounds, limit, side="right")) - 1)
        yield begin, end
        begin = end


def shingles(library: Library, texts: Packed, kind: Kind, size: int) -> Shingles:
    """As `shingles.shingles`."""
    long = len(texts) == 1 and _longer(texts, plain.LARGEST_PIECE)
    lower = texts.lowered()
    count, room = len(lower), int(lower.bounds[-1] - lower.bounds[0])
    words, tokens = (np.empty(room // 2 + count, np.uint64) for _ in range(2))
    word_bounds, token_bounds = (np.empty(count + 1, np.int64) for _ in range(2))
    given = _pointer(lower.data), _pointer(lower.bounds), ctypes.c_int64(count), _pointer(plain.code_point_values())
    piece = ctypes.c_int64(plain.LARGEST_PIECE if long else 0)
    library.bloomery_scan(*given, piece, *map(_pointer, (words, word_bounds, tokens, token_bounds)))
    raw = memoryview(tokens).cast("B")
    digests = b"".join(hashlib.sha256(raw[8 * a : 8 * b]).digest()[:16] for a, b in pairwise(token_bounds.tolist()))
    if kind == "characters":
        words = np.empty(room, np.uint64)
        library.bloomery_characters(*given, _pointer(words), _pointer(word_bounds))
    found, bounds = np.empty(int(word_bounds[-1]), np.uint64), np.empty(count + 1, np.int64)
    sized = ctypes.c_int64(count), ctypes.c_int64(size)
    library.bloomery_shingles(_pointer(words), _pointer(word_bounds), *sized, _pointer(found), _pointer(bounds))
    return Shingles(found[: bounds[-1]], bounds, np.frombuffer(digests, np.uint64).reshape(-1, 2))


def minima(library: Library, found: Shingles, settings: Settings) -> Minima:
    """As `minhash.minima`."""
    texts = len(found.bounds) - 1
    result, factors = np.empty((settings.permutations, texts), np.uint32), multipliers(settings)
    given = _pointer(found.hashes), _pointer(found.bounds), ctypes.c_int64(texts)
    library.bloomery_minima(*given, _pointer(factors), ctypes.c_int64(len(factors)), _pointer(result))
    return result


def sets(library: Library, found: Shingles) -> tuple[Hashes, Bounds]:
    """`shingles.shingle_set` of each text, one after the other, and their sizes."""
    into, sizes = np.empty(len(found.hashes), np.uint64), np.empty(len(found.bounds) - 1, np.int64)
    hashes, bounds = _pointer(found.hashes), _pointer(found.bounds)
    library.bloomery_sets(hashes, bounds, ctypes.c_int64(len(sizes)), _pointer(into), _pointer(sizes))
    return into[: sizes.sum()], sizes


def jaccard(library: Library, a: Hashes, b: Hashes) -> float:
    """As `shingles.jaccard`."""
    count = library.bloomery_shared
    count.restype = ctypes.c_int64
    shared: int = count(_pointer(a), ctypes.c_int64(len(a)), _pointer(b), ctypes.c_int64(len(b)))
    return shared / (len(a) + len(b) - shared) if len(a) or len(b) else 1.0


def _longer(texts: Packed, characters: int) -> bool:
    """Whether texts have more characters than that: every byte but the continuing ones begins one."""
    data = texts.data[texts.bounds[0] : texts.bounds[-1]]
    return len(data) > characters and int(np.count_nonzero((data & 0xC0) != 0x80)) > characters


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
