import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import ShingleKind, jaccard, shingle_set, shingles

TEXTS = st.text(st.sampled_from([*"aAbB1_ \n\t.,-'é\u0307ΣσςİiΑ東京が\u0085\u2028\x00ﬁ", "😀"]), max_size=60)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def characters(text: str) -> list[str]:
    return list(" ".join(text.lower().split()))


def sequence(text: str, kind: str, size: int) -> list[tuple[str, ...]]:
    found = words(text) if kind == "words" else characters(text)
    return [tuple(found[start : start + size]) for start in range(len(found) - size + 1)]


@given(st.lists(TEXTS, min_size=1, max_size=6), st.sampled_from(["words", "characters"]), st.integers(1, 4))
def test_hashes_are_equal_where_shingles_are(texts: list[str], kind: ShingleKind, size: int) -> None:
    found = shingles(texts, kind, size)
    expected = [sequence(text, kind, size) for text in texts]
    assert np.diff(found.bounds).tolist() == [len(one) for one in expected]
    flat = [shingle for one in expected for shingle in one]
    assert len(flat) == len(found.hashes)
    pairs = set(zip(flat, found.hashes.tolist(), strict=True))
    assert len(pairs) == len(set(flat)) == len(set(found.hashes.tolist()))


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_digests_are_equal_where_texts_are_but_for_case_and_white_space(texts: list[str]) -> None:
    found = shingles(texts, "words", 2)
    normal = [" ".join(text.lower().split()) for text in texts]
    assert len(set(zip(normal, map(tuple, found.digests.tolist()), strict=True))) == len(set(normal))
    assert len(set(map(tuple, found.digests.tolist()))) == len(set(normal))


def test_a_text_gives_the_same_in_any_company() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab 東.ΣİA\n", k=rng.randrange(400))) for _ in range(60)]
    alone = [shingles([text], "words", 3) for text in texts]
    together = shingles(texts, "words", 3)
    assert np.array_equal(np.concatenate([one.hashes for one in alone]), together.hashes)
    assert np.array_equal(np.concatenate([one.digests for one in alone]), together.digests)


def test_a_long_text_is_cut_at_white_space_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    text = "".join(rng.choices("abc Σ.\n", k=3000))
    whole = shingles([text], "words", 5)
    monkeypatch.setattr(hashing, "LARGEST_PIECE", 100)
    cut = shingles([text], "words", 5)
    assert np.array_equal(whole.hashes, cut.hashes)
    assert np.array_equal(whole.digests, cut.digests)
    assert len(shingles(["x" * 1000], "words", 1).hashes) == 5


@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 30), max_size=40))
def test_jaccard_equals_that_of_python_sets(a: list[int], b: list[int]) -> None:
    one, two = shingle_set(np.array(a, np.uint64)), shingle_set(np.array(b, np.uint64))
    assert one.tolist() == sorted(set(a))
    assert jaccard(one, two) == (len(set(a) & set(b)) / len(set(a) | set(b)) if a or b else 1.0)


def test_hashes_stay_the_same_between_versions_and_machines() -> None:
    """Numbers written down once: a change here makes every earlier signature worthless."""
    found = shingles(["The quick brown fox jumps over the lazy dog"], "words", 5)
    assert int(found.hashes[0]) == HASH
    assert int(found.digests[0, 0]) == DIGEST


HASH, DIGEST = 0x735AA0E0320467A6, 0x5469ADC78364DE49
