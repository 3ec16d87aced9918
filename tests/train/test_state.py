import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.signals import Terminated
from bloomery.hw.distributed import World
from bloomery.train.state import Failure, Hook, Hooks, SkippedStep, SpikeGuard, SpikeStats, State, forget, restored


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


def test_a_batch_with_few_tokens_in_its_loss_may_have_a_larger_norm() -> None:
    """The gradient of a mean over n tokens falls with the root of n."""
    guard, seen = SpikeGuard(window=64), SpikeStats()
    for number in range(64):
        share = 0.5 + 0.1 * math.sin(number)
        guard.accept(seen, 1.0, (1 + 0.05 * math.cos(number)) / math.sqrt(share), share)
    assert not guard.trouble(seen, 1.0, 1 / math.sqrt(0.01), 0.01)
    assert guard.trouble(seen, 1.0, 1 / math.sqrt(0.01), 0.5).startswith("the gradient norm is 10, ")
    assert guard.trouble(seen, 1.0, 3 / math.sqrt(0.01), 0.01).startswith("the gradient norm is 30, ")


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
    guard, seen = SpikeGuard(max_skipped_steps=2, tell=told.append), SpikeStats()
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


# --- hooks ------------------------------------------------------------------------------------------------------------


class Told:
    """A run's hooks, and what became of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.failures: list[Failure] = []

    def hook(self, name: str, error: BaseException | None = None, **how: bool) -> Hook:
        def run(state: State) -> None:
            self.seen.append(name)
            if error is not None:
                raise error

        return Hook(lambda state: True, run, name, **how)

    def hooks(self, *hooks: Hook, save: Callable[[State], None] | None = None) -> Hooks:
        return Hooks(hooks, save=save or (lambda state: self.seen.append("saved")), record=self.failures.append)


def test_a_hook_that_a_run_can_do_without_is_named_and_the_others_run() -> None:
    told = Told()
    hooks = told.hooks(told.hook("evaluate", ValueError("no such thing"), vital=False), told.hook("next"))
    hooks.after_step(State(step=7))
    assert told.seen == ["evaluate", "saved", "next"]
    assert told.failures == hooks.failures == [Failure(7, "evaluate", "ValueError: no such thing")]
    hooks.after_step(State(step=8))
    assert [failure.step for failure in hooks.failures] == [7, 8]


def test_a_hook_that_ends_as_a_program_does_has_failed_as_any_other() -> None:
    class Panic(BaseException):
        """What libraries in other languages raise."""

    told = Told()
    told.hooks(told.hook("sink", SystemExit("sys.exit"), vital=False), told.hook("next")).after_step(State(step=7))
    assert (told.seen, told.failures) == (["sink", "saved", "next"], [Failure(7, "sink", "SystemExit: sys.exit")])
    with pytest.raises(Panic):
        told.hooks(told.hook("log", Panic())).after_step(State(step=8))
    assert told.seen[3:] == ["log", "saved"]


def test_a_hook_that_is_tried_once_is_not_tried_again() -> None:
    told = Told()
    hooks = told.hooks(told.hook("watcher", OSError("gone"), vital=False, once=True), told.hook("next"))
    for step in range(3):
        hooks.after_step(State(step=step))
    assert told.seen == ["watcher", "saved", "next", "next", "next"]


def test_a_hook_that_a_run_needs_stops_it_after_the_state_is_safe() -> None:
    told = Told()
    with pytest.raises(OSError, match="full") as caught:
        told.hooks(told.hook("log", OSError("full")), told.hook("next")).after_step(State(step=7))
    assert told.seen == ["log", "saved"]
    assert caught.value.__notes__ == ["This came from the hook 'log' after step 7."]


def test_where_saving_fails_too_both_errors_are_said() -> None:
    told = Told()

    def save(state: State) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room") as caught:
        told.hooks(told.hook("sample", ValueError("odd"), vital=False), save=save).after_step(State(step=7))
    assert caught.value.__notes__ == ["This came from saving, because the hook 'sample' after step 7 had failed: odd"]
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Terminated()])
def test_an_interrupt_is_no_failure(interrupt: BaseException) -> None:
    told = Told()
    with pytest.raises(type(interrupt)):
        told.hooks(told.hook("evaluate", interrupt, vital=False)).after_step(State())
    assert (told.seen, told.failures) == (["evaluate"], [])


def test_a_rank_in_company_runs_all_hooks_of_a_step_and_asks_to_stop_for_the_first_that_was_fatal() -> None:
    """Also where no more can be noted: the others wait for it in the hooks that follow."""
    told, full = Told(), OSError("full")
    odd = told.hook("sample", ValueError("odd"), vital=False)

    def record(failure: Failure) -> None:
        raise full

    hooks = Hooks([odd, told.hook("log", OSError("too")), told.hook("next")], record=record, world=World(0, 2))
    hooks.after_step(State(step=7))
    assert told.seen == ["sample", "log", "next"]
    assert (hooks.fatal, hooks.stop.asked) == (full, True)
