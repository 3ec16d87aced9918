import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import NgramSizes, hashed, lay, spelled, tokens

TEXTS = [
    "The cat sat. the cat",
    "",
    "a",
    "日本語 text ok",
    "x\ny  z!!",
    "\u2028 é\x0b_a",
    "İstanbul ǅ",
    "a\0b",
    "👩‍👩‍👧 fam",
]


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_tokens_are_those_of_the_regular_expression(texts: list[str]) -> None:
    found = hashed([*texts, *TEXTS], NgramSizes(2**30, (1, 3)))[0]
    assert found.counts.tolist() == [len(spelled(text, (1, 3))) for text in [*texts, *TEXTS]]


def test_equal_n_grams_share_a_bucket_and_others_do_not() -> None:
    words = [f"{one}{two}" for one in "abcdefghij" for two in range(40)]
    texts = [" ".join(pair) for pair in pairwise(words)]
    known: dict[str, int] = {}
    for text in texts:
        (found,) = hashed([text], NgramSizes(2**31, (1, 2)))
        for gram, bucket in zip(spelled(text, (1, 2)), found.buckets.tolist(), strict=True):
            assert known.setdefault(gram, bucket) == bucket
    assert len(known) == 799
    assert len(set(known.values())) == 799


@pytest.mark.parametrize("buckets", [1, 7, 1000, 2**16, 2**20 + 1])
def test_buckets_are_filled_evenly(buckets: int) -> None:
    text = " ".join(f"w{number}" for number in range(20_000))
    (found,) = hashed([text], NgramSizes(buckets, (1, 1)))
    assert found.buckets.min() >= 0
    assert found.buckets.max() < buckets
    expected = buckets * (1 - np.exp(-20_000 / buckets))
    assert len(np.unique(found.buckets)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "grams", [NgramSizes(2**20, (1, 2), (2, 5)), NgramSizes(999, None, (1, 1)), NgramSizes(2**20, (2, 2), (4, 4))]
)
def test_the_n_grams_of_a_text_are_the_same_in_any_company(grams: NgramSizes) -> None:
    together = hashed(TEXTS, grams)
    for number, text in enumerate(TEXTS):
        for many, one in zip(together, hashed([text], grams), strict=True):
            assert many.buckets[many.texts == number].tolist() == one.buckets.tolist()
            assert many.counts[number] == len(one.buckets)


def test_every_position_begins_one_n_gram_of_characters_of_each_size() -> None:
    (found,) = hashed(["abcabc", "é"], NgramSizes(2**30, None, (2, 3)))
    assert found.counts.tolist() == [12, 2]
    first = found.buckets[found.texts == 0].reshape(2, 6)
    assert first[0, 0] == first[0, 3]  # "ab" twice
    assert len(np.unique(first)) == 4 + 5  # ab bc ca c·, abc bca cab bc· c··


def test_case_does_not_matter() -> None:
    one, two = (hashed([text], NgramSizes(2**30, (1, 2), (3, 3))) for text in ("Straße WORD", "straße word"))
    assert all(a.buckets.tolist() == b.buckets.tolist() for a, b in zip(one, two, strict=True))


def test_buckets_stay_the_same_between_versions_and_machines() -> None:
    """Numbers written down once: a change here makes the weights of every earlier classifier worthless."""
    found = hashed(["The quick brown fox"], NgramSizes(2**20, (1, 2), (3, 3)))
    assert [one.buckets[-3:].tolist() for one in found] == BUCKETS


BUCKETS = [[762520, 296214, 679099], [714015, 875524, 1020089]]


def test_a_long_text_has_the_tokens_of_its_words() -> None:
    words = [f"w{number % 1000}" for number in range(60_000)]
    found = tokens(lay([" ".join(words)]))
    assert len(found.hashes) == 60_000
    assert len(np.unique(found.hashes)) == 1000
    assert found.hashes[:1000].tolist() == found.hashes[59_000:].tolist()


def test_the_pattern_of_tokens_leaves_out_white_space_only() -> None:
    text = "One, two\tthree\n四五 six_7"
    assert re.findall(hashing.TOKENS, text) == ["One", ",", "two", "three", "\n", "四", "五", "six_7"]
