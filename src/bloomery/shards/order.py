"""
Which sample comes when: a pure function, so that there is nothing to store and nothing to lose.

    sample(n) = position of the n-th sample of a run = permutation of (seed, epoch = n div N) at n mod N

The permutation is a four-round Feistel network on the smallest even number of bits that holds N, walked until the
result is below N (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It is a bijection for every key,
takes no memory, and seeks to any place at once.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 4


def sample_positions(first: int, count: int, num_samples: int, seed: int) -> NDArray[np.int64]:
    """Positions in the data of the samples first … first + count − 1 of a run over `num_samples` samples."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    epochs, places = numbers // np.uint64(num_samples), numbers % np.uint64(num_samples)
    return permute(places, epochs, num_samples, seed).astype(np.int64)


def permute(places: NDArray[np.uint64], epochs: NDArray[np.uint64], num_samples: int, seed: int) -> NDArray[np.uint64]:
    """A bijection of 0 … num_samples − 1 for each epoch and seed, applied to each place."""
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    result = places.copy()
    walking = np.ones(len(places), dtype=bool)
    while walking.any():
        result[walking] = _feistel(result[walking], epochs[walking], half, seed)
        walking = result >= num_samples
    return result


def _feistel(values: NDArray[np.uint64], epochs: NDArray[np.uint64], half: np.uint64, seed: int) -> NDArray[np.uint64]:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for round_number in range(ROUNDS):
        key = np.uint64((seed * 0x9E3779B97F4A7C15 + round_number * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF)
        left, right = right, left ^ (scramble(right + key + epochs * np.uint64(0xA0761D6478BD642F)) & low_bits)
    return (left << half) | right


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the input moves every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
