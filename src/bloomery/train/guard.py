"""
The guard: an update that would hurt the weights is not made.

    skipped     loss or gradient norm x is not finite, or   log x > mean + sigma · max(deviation, 0.001)
                with mean and deviation of log x over the last `window` accepted steps, as soon as there are so many
    rolled back after `max_skips` in a row: weights and optimizer are those of the newest good checkpoint again, and
                training goes on with the samples behind the bad ones; steps and learning rate count on

A skipped step counts as a step, and its samples as seen. So the samples of a step follow from its number, rolled back
or not. Thresholds by sigma are those of OLMo (https://arxiv.org/abs/2501.00656) and of llm.c's `-sl` and `-sg`, whose
windows are lost by a resume; here they are part of the state. They look at logarithms because losses and norms vary by
factors: finetuning at a loss of 0.05 has sound batches of six times the usual norm, 15 plain deviations above it. A
loss that a model knows by heart hardly varies, so a deviation counts as at least a thousandth.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SMALLEST_DEVIATION = 1e-3
SMALLEST_NUMBER = 1e-12


def _log(value: float) -> float:
    return math.log(max(value, SMALLEST_NUMBER))


@dataclass
class Past:
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
class Skip:
    """An update that was not made."""

    step: int
    why: str
    loss: float
    norm: float
    samples: list[int]


def _tell_nobody(skip: Skip) -> None: ...


@dataclass(frozen=True)
class Guard:
    """When an update is skipped. `tell` hears of each one that was."""

    sigma: float = 6.0
    window: int = 128
    max_skips: int = 3
    tell: Callable[[Skip], None] = _tell_nobody

    def trouble(self, past: Past, loss: float, norm: float) -> str:
        """Why an update with this loss and gradient norm must not be made, or ""."""
        for name, value, known in (("loss", loss, past.losses), ("gradient norm", norm, past.norms)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
            if len(known) < self.window:
                continue
            logs = [_log(one) for one in known]
            mean = math.fsum(logs) / len(logs)
            deviation = math.sqrt(math.fsum([(one - mean) ** 2 for one in logs]) / len(logs))
            above = (_log(value) - mean) / max(deviation, SMALLEST_DEVIATION)
            if above > self.sigma:
                return f"the {name} is {value:.4g}, {above:.1f} deviations (of logarithms) above {math.exp(mean):.4g}"
        return ""

    def accept(self, past: Past, loss: float, norm: float) -> None:
        """Remember a step whose update was made."""
        past.in_a_row = 0
        for known, value in ((past.losses, loss), (past.norms, norm)):
            known.append(value)
            del known[: -self.window]

    def skip(self, past: Past, skip: Skip) -> bool:
        """Count a step whose update was not made, and tell of it. Returns whether that is one too many in a row."""
        past.in_a_row += 1
        past.skipped += 1
        self.tell(skip)
        return past.in_a_row >= self.max_skips


def forget(past: Past) -> None:
    """Begin a new window, because what follows is of another kind: other data have another loss."""
    past.losses.clear()
    past.norms.clear()


def restored(saved: Mapping[str, Any]) -> Past:
    """What `dataclasses.asdict` made of a Past; of a checkpoint without one, an empty one."""
    return Past(**saved)
