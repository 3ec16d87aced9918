import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.evaluation.stats import Score, pass_at, wilson

KNOWN = [
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("successes", "n", "low", "high"), KNOWN)
def test_the_interval_is_that_of_the_literature(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_of_no_trials_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000), st.data())
def test_an_interval_holds_the_share_and_lies_within_zero_and_one(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert (low, high) == pytest.approx(tuple(1 - bound for bound in reversed(wilson(n - successes, n))), abs=1e-9)
    wider = wilson(successes, n)
    narrower = wilson(4 * successes, 4 * n)
    assert narrower[1] - narrower[0] < wider[1] - wider[0]


# --- means and pass@k ----------------------------------------------------------------------------------------------


def test_shares_have_wilsons_interval_and_other_means_a_bootstrap_that_a_seed_fixes() -> None:
    low, high = wilson(3, 4)
    assert Score.of([1.0, 0.0, 1.0, 1.0]) == Score(0.75, round(low, 6), round(high, 6), 4)
    rng = random.Random(0)
    numbers = [rng.gauss(3.0, 2.0) for _ in range(400)]
    score = Score.of(numbers)
    assert score == Score.of(numbers)
    assert score.value is not None
    assert score.low < score.value < score.high
    assert score.high - score.low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.15)
    assert Score.of([]) == Score(None, 0.0, 1.0, 0)


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_program_that_passes(
    tried: int, data: st.DataObject
) -> None:
    k, passed = data.draw(st.integers(1, tried)), data.draw(st.integers(0, tried))
    draws = list(combinations([True] * passed + [False] * (tried - passed), k))
    assert pass_at(k, tried, passed) == pytest.approx(sum(map(any, draws)) / len(draws))
