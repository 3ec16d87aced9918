import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.train.state import SkippedStep, SpikeGuard, SpikeStats, forget, restored


def past(values: list[float]) -> SpikeStats:
    return SpikeStats(losses=list(values), norms=list(values))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_trouble_at_any_time(value: float) -> None:
    assert SpikeGuard().trouble(SpikeStats(), value, 1.0) == f"the loss is {value}"
    assert SpikeGuard().trouble(SpikeStats(), 1.0, value) == f"the gradient norm is {value}"


@given(st.lists(st.floats(0.5, 5), min_size=4, max_size=20), st.floats(0, 50), st.floats(2, 8))
def test_trouble_by_sigma_is_what_numpy_says_it_is(known: list[float], value: float, sigma: float) -> None:
    logs = np.log(known)
    limit = float(np.exp(logs.mean() + sigma * max(float(logs.std()), 1e-3)))
    if abs(value - limit) > 1e-6:
        found = SpikeGuard(sigma=sigma, window=len(known)).trouble(past(known), value, min(known))
        assert bool(found) == bool(value > limit)


def test_before_the_window_is_full_nothing_is_skipped_by_sigma() -> None:
    guard, seen = SpikeGuard(window=10), SpikeStats()
    for _ in range(9):
        guard.accept(seen, 1.0, 1.0)
        assert not guard.trouble(seen, 1e9, 1e9)
    guard.accept(seen, 1.0, 1.0)
    assert guard.trouble(seen, 1e9, 1.0) == "the loss is 1e+09, 20723.3 deviations (of logarithms) above 1"
    assert guard.trouble(seen, 1.0, 1.1).startswith("the gradient norm is 1.1, 95.3 deviations")


def test_a_loss_far_below_the_others_is_no_trouble() -> None:
    assert not SpikeGuard(window=4).trouble(past([3.0, 3.1, 3.0, 2.9]), 0.1, 0.1)


def test_norms_that_vary_by_factors_are_no_trouble() -> None:
    usual = [0.5 * 1.4 ** (n % 5 - 2) for n in range(128)]
    assert not SpikeGuard().trouble(past(usual), 0.5, 3.0)
    assert np.mean(usual) + 6 * np.std(usual) < 3.0
    assert SpikeGuard().trouble(past(usual), 0.5, 12.0)


def test_a_loss_that_hardly_varies_may_vary_by_a_thousandth_for_each_sigma() -> None:
    guard, seen = SpikeGuard(window=4), past([2.0] * 4)
    assert not guard.trouble(seen, 2.0119, 2.0)
    assert guard.trouble(seen, 2.0121, 2.0)


def test_the_window_holds_the_last_accepted_steps_alone() -> None:
    guard, seen = SpikeGuard(window=3), SpikeStats()
    for value in range(5):
        guard.accept(seen, float(value), float(-value))
        guard.skip(seen, SkippedStep(value, "", 99.0, 99.0, []))
    assert (seen.losses, seen.norms) == ([2.0, 3.0, 4.0], [-2.0, -3.0, -4.0])


def test_skips_in_a_row_are_counted_until_a_step_is_accepted() -> None:
    told: list[SkippedStep] = []
    guard, seen = SpikeGuard(max_skips=2, tell=told.append), SpikeStats()
    skips = [SkippedStep(n, "why", 1.0, 1.0, [n]) for n in range(3)]
    assert not guard.skip(seen, skips[0])
    guard.accept(seen, 1.0, 1.0)
    assert not guard.skip(seen, skips[1])
    assert guard.skip(seen, skips[2])
    assert (seen.in_a_row, seen.skipped) == (2, 3)
    assert told == skips


def test_what_is_remembered_comes_back_from_plain_data_as_it_was() -> None:
    seen = SpikeStats([1 / 3, 2e-17], [0.1], 2, 5, [[9, 4]])
    assert restored(asdict(seen)) == seen
    assert restored({}) == SpikeStats()


def test_another_kind_of_data_begins_another_window() -> None:
    seen = SpikeStats([1.0], [2.0], 1, 5, [[9, 4]])
    forget(seen)
    assert seen == SpikeStats([], [], 1, 5, [[9, 4]])
