"""Numbers written down once: a change here moves documents between splits, and changes every order and signature."""

import numpy as np

from bloomery.core.io import GOLDEN, splitmix64, stable_hash


def test_splitmix64_gives_the_numbers_of_its_reference() -> None:
    """Of the generator with seed 1234567, as in the reference code in C (https://prng.di.unimi.it/splitmix64.c)."""
    states = 1234567 + np.arange(1, 6, dtype=np.uint64) * np.uint64(GOLDEN)
    before = states.copy()
    assert splitmix64(states).tolist() == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    ]
    assert np.array_equal(states, before)


def test_a_stable_hash_is_the_beginning_of_the_sha256() -> None:
    assert stable_hash("abc") == stable_hash(b"abc") == 0xBA7816BF8F01CFEA
