"""
The state of a run, the guard against loss spikes, the phase timer, and hooks.

The state is all that changes while training, except weights and optimizer. It is plain data and needs no torch.
The timer splits the seconds of a run into data, forward and backward, optimizer, and hooks.

The guard does not make an update that would hurt the weights.

    skipped      loss or gradient norm x is not finite, or   log x > mean + sigma · max(deviation, 0.001)
                 with mean and deviation of log x over the last `window` accepted steps, once there are that many
    rolled back  after the largest allowed number of skips in a row: weights and optimizer are those of the newest
                 good checkpoint again, and training resumes with the samples after the bad samples; steps and
                 learning rate count on

A skipped step counts as a step, and its samples count as seen. So the samples of a step follow from its number,
rolled back or not. Thresholds by sigma are those of OLMo (https://arxiv.org/abs/2501.00656) and of llm.c's `-sl`
and `-sg`. Their windows are lost by a resume; here they are part of the state. Thresholds look at logarithms
because losses and norms vary by factors. Finetuning at a loss of 0.05 has sound batches of six times the usual
norm, 15 plain deviations above it. A loss that a model knows by heart hardly varies, so a deviation counts as at
least a thousandth.

A hook is any work after a step that is not training. No hook can cost more than itself. Hooks are in an explicit
list, and run in that order. A hook that raises is reported by name. If the step was not saved already, the newest
state is saved first. Then the run stops if it cannot do without the hook (saving, the metrics file). It continues
if it can (evaluating, sampling, other displays of the run). An interrupt is no error and passes through.

With several ranks, a rank that has to stop asks all ranks to stop. They stop after the same step, so that it can be
saved.

These share one file because every step passes through all of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.core.errors import HardwareError
from bloomery.core.log import info
from bloomery.core.signals import StopRequest, Terminated
from bloomery.hw.distributed import World


@dataclass
class PhaseTimer:
    """Adds up time by phase. The CPU waits for an asynchronous device only where it reads a number."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since `take`."""
    phase: str = ""
    """What time counts for now."""
    _since: float = 0.0

    @property
    def before_update(self) -> bool:
        """Whether the weights are those of the last finished step, whose hooks have run."""
        return self.phase in ("data", "forward_backward")

    @property
    def at_work(self) -> float:
        """Seconds since `take` that training took: those of all phases that have ended, but for hooks."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "hooks")

    def enter(self, phase: str) -> None:
        """From now on time counts for this phase."""
        now = time.perf_counter()
        if self.phase:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last time that they were taken."""
        self.enter(self.phase)
        phase_seconds, self.seconds = self.seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in phase_seconds.items()}


SMALLEST_DEVIATION = 1e-3
SMALLEST_NUMBER = 1e-12


def _log(value: float) -> float:
    return math.log(max(value, SMALLEST_NUMBER))


@dataclass
class SpikeStats:
    """All that the guard remembers, as plain data."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of the last accepted steps, the oldest first."""
    in_a_row: int = 0
    """Steps skipped since the last update."""
    skipped: int = 0
    """In all."""
    rollbacks: list[list[int]] = field(default_factory=list)
    """Each as [after which step, to the weights of which step]."""

    @property
    def left(self) -> tuple[range, ...]:
        """Steps whose weights the run has given up: those after one that it went back to, until it did."""
        return tuple(range(to + 1, after) for after, to in self.rollbacks)

    @property
    def num_given_up(self) -> int:
        """How many steps are not in the weights because the run went back behind them, skipped ones included."""
        count, first = 0, math.inf
        for after, to in reversed(self.rollbacks):
            end = min(after, first)
            count, first = count + int(max(0, end - to)), min(first, to)
        return count


@dataclass(frozen=True)
class SkippedStep:
    """An update that was not made."""

    step: int
    why: str
    loss: float
    norm: float
    samples: list[int]


def _tell_nobody(skip: SkippedStep) -> None: ...


@dataclass(frozen=True)
class SpikeGuard:
    """When an update is skipped. `tell` hears of each one that was."""

    sigma: float = 6.0
    window: int = 128
    max_skipped_steps: int = 3
    tell: Callable[[SkippedStep], None] = _tell_nobody

    def trouble(self, past: SpikeStats, loss: float, norm: float, share: float = 1.0) -> str:
        """
        Why an update with this loss and gradient norm must not be made, or "". `share` of the batch's tokens are in the
        loss: a mean over fewer tokens has a larger gradient, by about the root of their number.
        """
        root = math.sqrt(share)
        for name, value, known, scale in (
            ("loss", loss, past.losses, 1.0),
            ("gradient norm", norm * root, past.norms, root),
        ):
            if not math.isfinite(value):
                return f"the {name} is {value}"
            if len(known) < self.window:
                continue
            logs = [_log(one) for one in known]
            mean = math.fsum(logs) / len(logs)
            deviation = math.sqrt(math.fsum([(one - mean) ** 2 for one in logs]) / len(logs))
            above = (_log(value) - mean) / max(deviation, SMALLEST_DEVIATION)
            if above > self.sigma:
                usual = math.exp(mean) / scale
                return f"the {name} is {value / scale:.4g}, {above:.1f} deviations (of logarithms) above {usual:.4g}"
        return ""

    def accept(self, past: SpikeStats, loss: float, norm: float, share: float = 1.0) -> None:
        """Remember a step whose update was made."""
        past.in_a_row = 0
        for known, value in ((past.losses, loss), (past.norms, norm * math.sqrt(share))):
            known.append(value)
            del known[: -self.window]

    def skip(self, past: SpikeStats, skip: SkippedStep) -> bool:
        """Count a step whose update was not made, and tell of it. Returns whether that is one too many in a row."""
        past.in_a_row += 1
        past.skipped += 1
        self.tell(skip)
        return past.in_a_row >= self.max_skipped_steps


def forget(past: SpikeStats) -> None:
    """Begin a new window, because what follows is of another kind: other data have another loss."""
    past.losses.clear()
    past.norms.clear()


def restored(saved: Mapping[str, Any]) -> SpikeStats:
    """What `dataclasses.asdict` made of a SpikeStats; of a checkpoint without one, an empty one."""
    return SpikeStats(**saved)


@dataclass
class State:
    """All that a resume needs, except weights and optimizer."""

    step: int = 0
    samples: int = 0
    """Seen so far; the number of the next sample, and the loader's whole state."""
    tokens: int = 0
    """Supervised tokens of all updates kept so far."""
    metrics: dict[str, float | int] = field(default_factory=dict)
    """
    Of the last step: learning rate and supervised tokens; if there was an update, the loss in nats per token and the
    gradient norm before clipping too.
    """
    guard: SpikeStats = field(default_factory=SpikeStats)
    precision: dict[str, float] = field(default_factory=dict)
    """Of the scaler that float16 needs."""
    rows: int = 0
    """That go through the model at once since memory ran out; 0 where it did not."""

    first_loss: float | None = None
    """Of the first step: that of the weights which training started from. None where it was not finite."""

    logged: int = 0
    """The newest step whose line is in metrics.jsonl."""

    def advance(self, samples: int, loss: float, precision: dict[str, float]) -> None:
        """Count a step, whether its update is made or not."""
        self.step, self.samples, self.precision = self.step + 1, self.samples + samples, precision
        if self.step == 1 and math.isfinite(loss):
            self.first_loss = loss

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "State":
        """What `dataclasses.asdict` made of a State, in which JSON has names for numbers that are not finite."""
        known = saved.get("metrics", {})
        metrics = {name: float(value) if isinstance(value, str) else value for name, value in known.items()}
        return cls(**{**saved, "metrics": metrics, "guard": restored(saved.get("guard", {}))})


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


class LeftOthersError(HardwareError):
    """A rank ran out of memory where others wait for its parts of the model. It can only end, and they with it."""


def _save_nothing(state: State) -> None: ...


def _record_nothing(failure: Failure) -> None: ...


@dataclass
class Hooks:
    """The hooks of a run, in their order."""

    hooks: Sequence[Hook] = ()
    save: Callable[[State], None] = _save_nothing
    """Saves the newest state, unless it is saved already. Called before the error of a hook is reported."""
    record: Callable[[Failure], None] = _record_nothing
    """Hears of each hook that failed without stopping the run."""
    failures: list[Failure] = field(default_factory=list)
    world: World = field(default_factory=World.alone)
    stop: StopRequest = field(default_factory=StopRequest)
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
        except (KeyboardInterrupt, Terminated, LeftOthersError):
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
        """Log and record that a hook has failed, or raise the error if the run cannot continue."""
        where = f"hook {hook.name!r} after step {state.step}"
        if not (hook.vital and self.world.size > 1):
            self._make_safe(state, error, where)
        if hook.vital:
            error.add_note(f"This came from the {where}.")
            raise error
        failure = Failure(state.step, hook.name, f"{type(error).__name__}: {error}")
        self.failures.append(failure)
        info(f"the {where} failed, and training continues: {failure.error}", style="yellow")
        self.record(failure)

    def raise_fatal(self) -> None:
        """To be called by all ranks when they have stopped and saved: raise why on each, if it was for a hook."""
        with self.world.alike():
            if self.fatal is not None:
                raise self.fatal

    def report_failures(self, stage: str) -> list[dict[str, Any]]:
        """Say at the end what failed without stopping the run, and return it as plain data."""
        for failure in self.failures:
            info(f"{stage}: the hook {failure.hook!r} failed after step {failure.step}: {failure.error}", "yellow")
        return [asdict(failure) for failure in self.failures]

    def _make_safe(self, state: State, error: BaseException, where: str) -> None:
        try:
            self.save(state)
        except Exception as second:
            second.add_note(f"This came from saving, because the {where} had failed: {error}")
            raise second from error
