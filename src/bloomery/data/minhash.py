"""
MinHash signatures and their bands, which propose pairs of similar texts.

    J(A, B) = |A ∩ B| / |A ∪ B|             A, B: sets of the shingles of two texts
    h_i(x) = a_i x mod 2**32, a_i odd       permutations of 32-bit numbers; x: half of a shingle's hash
    P(min h_i(A) = min h_i(B)) = J          so b bands of r minima each agree in one band with 1 − (1 − J**r)**b

The same minima may be banded more than once: banding t takes for band k the minima (k − t j mod b, j), j < r, so that
two minima of a band are never together again. Sources: Broder 1997, On the resemblance and containment of documents;
Leskovec et al., Mining of Massive Datasets, 3.4.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bloomery.data.shingles import Hashes, Kind, Shingles, mix

Minima = NDArray[np.uint32]

SHINGLES_PER_STEP = 1 << 15  # one permutation of them fits into a first- or second-level cache


@dataclass(frozen=True, kw_only=True)
class Settings:
    permutations: int = 112
    bands: int = 14
    """Divides `permutations`."""
    bandings: int = 2
    shingles: Kind = "words"
    shingle_size: int = 5
    seed: int = 0

    @property
    def keys(self) -> int:
        """Band keys of a document."""
        return self.bands * self.bandings


def multipliers(settings: Settings) -> Minima:
    """The a_i: [permutations]."""
    counter = np.arange(1, settings.permutations + 1, dtype=np.uint64)
    numbers = mix(counter * np.uint64(0x9E3779B97F4A7C15) + mix(np.array([settings.seed], np.uint64)))
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def minima(found: Shingles, settings: Settings) -> Minima:
    """The signatures of D texts: [permutations, D]. A text without shingles has the largest number everywhere."""
    texts = len(found.bounds) - 1
    result = np.full((settings.permutations, texts), np.iinfo(np.uint32).max, np.uint32)
    numbers = (found.hashes >> np.uint64(32)).astype(np.uint32)
    factors = multipliers(settings)
    begin = 0
    while begin < texts:
        limit = int(found.bounds[begin]) + SHINGLES_PER_STEP
        end = max(begin + 1, int(np.searchsorted(found.bounds, limit, side="right")) - 1)
        for first in range(int(found.bounds[begin]), int(found.bounds[end]), SHINGLES_PER_STEP):
            last = (
                min(first + SHINGLES_PER_STEP, int(found.bounds[end])) if end == begin + 1 else int(found.bounds[end])
            )
            step = numbers[first:last]
            starts = np.maximum(found.bounds[begin:end], first) - first
            filled = found.bounds[begin + 1 : end + 1] - first > starts
            _lower(result[:, begin:end], step, starts, filled, factors)
            if last == found.bounds[end]:
                break
        begin = end
    return result


def _lower(into: Minima, step: Minima, starts: NDArray[np.int64], filled: NDArray[np.bool_], factors: Minima) -> None:
    """Lower the minima of some texts by the shingles of one step. Text d's begin at starts[d]."""
    columns, places = np.flatnonzero(filled), starts[filled]
    if not len(columns):
        return
    hashed = np.empty_like(step)
    lows = np.empty((len(factors), len(places)), np.uint32)
    for row, factor in enumerate(factors):
        np.multiply(step, factor, out=hashed)
        np.minimum.reduceat(hashed, places, out=lows[row])
    into[:, columns] = np.minimum(into[:, columns], lows)


def band_keys(signatures: Minima, settings: Settings) -> Hashes:
    """Keys of D signatures: [bands × bandings, D]. Equal keys (almost surely) mean the same band and equal minima."""
    rows = settings.permutations // settings.bands
    table = signatures.reshape(settings.bands, rows, -1)
    number = mix(np.arange(settings.keys, dtype=np.uint64)).reshape(settings.bandings, settings.bands, 1)
    keys = np.repeat(number, table.shape[2], axis=2)
    for banding in range(settings.bandings):
        for row in range(rows):
            column = np.roll(table[:, row], banding * row, axis=0)
            keys[banding] = mix(keys[banding] + column + np.uint64(1))
    return keys.reshape(settings.keys, -1)
