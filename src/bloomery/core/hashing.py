"""
Hashes that are the same in every run, on every machine and in every version.

What rests on them is on disk: validation splits, the order of documents and samples, signatures of documents.

    splitmix64(x)    the finalizer of splitmix64 (Steele et al. 2014, Fast splittable pseudorandom number generators)
    stable_hash(s)   the first 64 bits of the SHA-256 of s
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, and odd: the step of splitmix64."""


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers in which every bit of the input changes every bit of the output."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def stable_hash(text: str | bytes) -> int:
    """64 bits of a text, which may hold anything that UTF-8 can encode."""
    return int.from_bytes(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()[:8])
