from collections.abc import Callable

import pytest

from bloomery.core.signals import Terminated
from bloomery.hw.distributed import World
from bloomery.train.state import Failure, Hook, Hooks, State


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
