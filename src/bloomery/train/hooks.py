"""
Hooks: what happens after a step, besides training. None of them can cost more than itself.

A hook is in an explicit list, and runs in its place there. One that raises is said by its name, after the newest state
was saved if the step was not saved already. Then the run stops if it cannot do without the hook (saving, the file of
metrics), or goes on (evaluating, sampling, what others show of the run). An interrupt is no error and passes through.

With several ranks, one that has to stop asks all of them to: they stop after the same step, so that it can be saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.core.log import say
from bloomery.core.stop import Stop, Terminated
from bloomery.hw.dist import World
from bloomery.train.state import State


@dataclass(frozen=True)
class Hook:
    """Something to do after steps: `when(state)` says after which, `run(state)` does it."""

    when: Callable[[State], bool]
    run: Callable[[State], None]
    name: str = "hook"
    vital: bool = True
    """Whether the run stops where this fails. One that is not is tried again when it is due again."""
    once: bool = False
    """Whether it is not tried again after it failed."""


@dataclass(frozen=True)
class Failure:
    step: int
    hook: str
    error: str


def _save_nothing(state: State) -> None: ...


def _record_nothing(failure: Failure) -> None: ...


@dataclass
class Hooks:
    """The hooks of a run, in their order."""

    hooks: Sequence[Hook] = ()
    save: Callable[[State], None] = _save_nothing
    """Makes the newest state safe, if it is not yet. Called before an error of a hook is said."""
    record: Callable[[Failure], None] = _record_nothing
    """Hears of each hook that failed without stopping the run."""
    failures: list[Failure] = field(default_factory=list)
    world: World = field(default_factory=World.alone)
    stop: Stop = field(default_factory=Stop)
    """What a rank asks the others with, to stop after this step."""
    fatal: BaseException | None = None
    """Why."""

    def after_step(self, state: State) -> None:
        for hook in self.hooks:
            gone = hook.once and any(failure.hook == hook.name for failure in self.failures)
            if not gone and hook.when(state):
                self._run(hook, state)

    def _run(self, hook: Hook, state: State) -> None:
        try:
            hook.run(state)
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:  # one that calls sys.exit, or whose library panics, is no wish of a person's
            try:
                self._bear(hook, state, error)
            except (KeyboardInterrupt, Terminated):
                raise
            except BaseException as fatal:
                if self.world.size == 1:
                    raise
                self.fatal, self.stop.asked = self.fatal or fatal, True

    def _bear(self, hook: Hook, state: State, error: BaseException) -> None:
        """Say and note that a hook has failed, or raise why the run cannot go on."""
        where = f"hook {hook.name!r} after step {state.step}"
        if not (hook.vital and self.world.size > 1):
            self._make_safe(state, error, where)
        if hook.vital:
            error.add_note(f"This came from the {where}.")
            raise error
        failure = Failure(state.step, hook.name, f"{type(error).__name__}: {error}")
        self.failures.append(failure)
        say(f"the {where} failed, and training goes on: {failure.error}", style="yellow")
        self.record(failure)

    def raise_fatal(self) -> None:
        """To be called by all ranks when they have stopped and saved: raise why on each, if it was for a hook."""
        with self.world.alike():
            if self.fatal is not None:
                raise self.fatal

    def told(self, stage: str) -> list[dict[str, Any]]:
        """Say at the end what failed without stopping the run, and return it as plain data."""
        for failure in self.failures:
            say(f"{stage}: the hook {failure.hook!r} failed after step {failure.step}: {failure.error}", "yellow")
        return [asdict(failure) for failure in self.failures]

    def _make_safe(self, state: State, error: BaseException, where: str) -> None:
        try:
            self.save(state)
        except Exception as second:
            second.add_note(f"This came from saving, because the {where} had failed: {error}")
            raise second from error
