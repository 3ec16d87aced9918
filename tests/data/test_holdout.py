import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.documents import is_held_out

TEXTS = [f"document number {number} tells of {random.Random(number).random()}" for number in range(20_000)]


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.5, 0.9])
def test_about_the_share_of_documents_is_held_out(share: float) -> None:
    found = sum(is_held_out(text, share) for text in TEXTS)
    error = (share * (1 - share) / len(TEXTS)) ** 0.5
    assert found / len(TEXTS) == pytest.approx(share, abs=4 * error)


@given(st.text())
def test_nothing_is_held_out_of_a_share_of_none_and_everything_of_all(text: str) -> None:
    assert not is_held_out(text, 0.0)
    assert is_held_out(text, 1.0)


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_out_what_a_smaller_one_does(text: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(text, small) <= is_held_out(text, large)


@given(st.lists(st.text("abcdeXYZéßµﬁ.", min_size=1, max_size=5), max_size=8), st.data())
def test_copies_that_differ_in_case_and_white_space_are_held_out_alike(words: list[str], data: st.DataObject) -> None:
    space = st.text(" \t\r\n\u00a0\u3000", min_size=1, max_size=3)
    copy = "".join(data.draw(space) + data.draw(st.sampled_from([word, word.upper(), word.lower()])) for word in words)
    assert all(is_held_out(" ".join(words), share) == is_held_out(copy + "\n", share) for share in SHARES)


WRITTEN = [19, 43, 63, 118, 130, 214, 219, 276, 278, 284]
SHARES = [step / 16 for step in range(17)]


def test_what_is_held_out_is_written_down_and_stays_so() -> None:
    """Models of older runs are measured with what they have not seen."""
    assert [number for number in range(300) if is_held_out(f"text {number}", 0.02)] == WRITTEN
