import random
import statistics
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.quality.examples import KINDS, choose, damage

CODE = "".join(
    f"def f{n}(x, y):\n    if x > {n}:\n        return 'é' + str(y)\n    return x * {n}\n\n\n" for n in range(40)
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_damaged_copy_is_another_text_of_about_the_same_length(kind: str) -> None:
    rng = random.Random(0)
    shares = []
    for _ in range(50):
        words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(rng.randint(60, 400)))
        text = ". ".join(words)
        copy = damage(text, kind)
        assert copy != text
        shares.append(len(copy) / len(text))
    assert min(shares) > 0.75
    assert max(shares) < 1.3
    assert 0.9 < statistics.mean(shares) < 1.1


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_damaged_copy_depends_on_text_kind_and_seed_only(kind: str) -> None:
    assert damage(CODE, kind, 1) == damage(CODE, kind, 1)
    assert damage(CODE, kind, 1) != damage(CODE, kind, 2)


def test_shuffled_words_keep_their_white_space() -> None:
    copy = damage(CODE, "shuffled")
    assert sorted(copy.split()) == sorted(CODE.split())
    assert [len(line) - len(line.lstrip()) for line in copy.split("\n")] == [
        len(line) - len(line.lstrip()) for line in CODE.split("\n")
    ]


@given(st.text(max_size=60), st.sampled_from(sorted(KINDS)))
def test_no_text_is_too_odd_to_be_damaged(text: str, kind: str) -> None:
    copy = damage(text, kind)
    assert len(copy) <= 3 * len(text) + 100


def test_kinds_are_spread_evenly_over_documents() -> None:
    counts = [[choose(f"doc{n}") for n in range(2000)].count(kind) for kind in KINDS]
    assert min(counts) > 300
