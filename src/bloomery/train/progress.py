"""
Check whether training learns. If it does not, it ends with an error, and its stage is not done. Needs no torch.

    rollbacks     the run went back `MOST` times in a row and each time no further than before, or
                  it went back so often, and skipped more steps than it kept
    tokens        no token is in the loss of any update that was kept
    loss          no update is left to report a loss of
    validation    the last validation loss is not finite, or
                  from scratch:          not below 0.9999 · the validation loss before the first step
                  from trained weights:  above max(log V, validation loss before the first step)
    change        no validation loss differs from the one before the first step by more than its float32 noise

A training from scratch has to end at least 0.01 % below the loss of its random weights. All validation losses are of
the same batches: the difference of two of them is the model's, and none of the sampling. Trained weights may start near
the best loss there is, and finetuning may overfit: they only have to change, and to end no worse than no model. With V
rows in the vocabulary, log V is the loss of a model that gives all tokens the same probability. Trained weights may
start above it, where a base has never seen the tokens of the chat template.

The loss before the first step is measured again when a run resumes, of the weights that the stage starts from. Where
the last evaluation of a loss of tokens failed, the mean of the last training losses stands in for it. The limit of a
preference loss is twice its value at the first step: it may rise a little while the model ranks more pairs right. A
loss of sampled answers has no validation and starts at 0, so it is not checked. `MOST` evaluations in a row
above 1.1 · max(log V, loss before the first step), after the warm-up, end a run early.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bloomery.core.errors import RunError
from bloomery.train.config import EarlyStopping
from bloomery.train.state import SpikeStats, State

MOST = 3
MARGIN = 0.9999
TOLERANCE, PREFERENCE_TOLERANCE = 1.1, 2.0
NOISE = 1e-5
"""Relative: a mean of 10,000 float32 losses, rounded to five decimals, is no more exact."""
LAST_LOSSES = 16


@dataclass(frozen=True, kw_only=True)
class ProgressCheck:
    """What a training has to be better than."""

    name: str
    """Of the stage."""
    vocab_size: int | None
    """None where the loss is none of tokens."""
    warmup_steps: int = 0
    from_scratch: bool = False
    """Whether training starts from random weights."""
    start_loss: float | None = None
    """The validation loss of the weights that training starts from; None where it is not measured."""
    keeps_best: bool = False
    """Whether the weights of the best evaluation are handed on, however the last ones are."""

    def limit(self, state: State) -> float:
        """The largest validation loss during a training that may still learn; infinity where nothing is known."""
        start = state.first_loss if self.start_loss is None else self.start_loss
        if self.vocab_size is not None:
            return TOLERANCE * max(math.log(self.vocab_size), start or 0.0)
        return math.inf if state.first_loss is None else PREFERENCE_TOLERANCE * state.first_loss

    def last_limit(self, state: State) -> float:
        """The same of the last validation loss, where the model is handed on."""
        if self.vocab_size is None or self.start_loss is None:
            return self.limit(state)
        return MARGIN * self.start_loss if self.from_scratch else max(math.log(self.vocab_size), self.start_loss)

    def check(self, state: State, measured: Mapping[int, float] | None, kept: int | None = None) -> None:
        """
        Raises RunError at the end of a training from which no model should be handed on. `measured` holds the
        validation losses by step; it is None on a rank that measures none. The weights of the step `kept` are handed
        on; None: those of the last.
        """
        kept = state.step if kept is None else kept
        check_rollbacks(self.name, state.step, state.guard)
        if not state.tokens:
            what = f"no token was trained on: {state.guard.skipped} of {state.step} steps were skipped"
            raise self._error(state.step, what)
        if last_loss(state) is None:
            raise self._error(state.step, f"there is no loss: {state.guard.skipped} of {state.step} steps were skipped")
        if measured is None:
            return
        if kept in measured:
            self._check_losses(state, [measured[kept]], self.last_limit(state))
        elif self.vocab_size is not None and (losses := _last_half(state.guard.losses)[-LAST_LOSSES:]):
            mean, kind = sum(losses) / len(losses), f"mean training loss of the last {len(losses)} steps"
            self._check_losses(state, [mean], self.last_limit(state), kind)
        self._check_change(state, [loss for step, loss in measured.items() if 0 < step <= state.step])

    def warning(self, measured: Mapping[int, float], errors: Mapping[int, float], kept: int) -> str:
        """That the weights of the step `kept` are worse than those that training started from, or ""."""
        loss, start = measured.get(kept), self.start_loss
        if self.from_scratch or loss is None or start is None or loss <= start + errors.get(kept, 0.0):
            return ""
        return (
            f"{self.name}: the validation loss is {loss:.4g}, and was {start:.4g} before the first step. Lower the "
            f"learning rate of [{self.name}.optimizer], or add data."
        )

    def check_early(self, state: State, measured: Mapping[int, float]) -> None:
        """Raises RunError as soon as so many evaluations in a row are no better than at the start."""
        losses = [measured[step] for step in sorted(measured) if self.warmup_steps < step <= state.step]
        if len(losses) >= MOST:
            self._check_losses(state, losses if self.keeps_best else losses[-MOST:], self.limit(state))

    def _check_losses(self, state: State, losses: Sequence[float], limit: float, kind: str = "validation loss") -> None:
        """Raises RunError where all these losses are too high, or no number."""
        if any(loss <= limit for loss in losses):
            return
        last, before = losses[-1], state.first_loss if self.start_loss is None else self.start_loss
        start = "" if before is None else f", and was {before:.5g} before the first step"
        what = f"the {kind} is {last:.5g}{start}; a model that learns stays below {limit:.5g}"
        raise self._error(state.step, what, slow=before is not None and last <= before * (1 + NOISE))

    def _check_change(self, state: State, losses: Sequence[float]) -> None:
        """Raises RunError where all these validation losses are the one before the first step."""
        start = self.start_loss
        if start is None or not losses or any(abs(loss - start) > NOISE * max(1.0, start) for loss in losses):
            return
        what = f"the validation loss is {losses[-1]:.5g}, the same as before the first step"
        raise self._error(state.step, what, slow=True)

    def _error(self, step: int, what: str, *, slow: bool = False) -> RunError:
        return _error(self.name, step, what, slow=slow)


@dataclass(frozen=True)
class KeptWeights:
    """Which weights of a run are handed on, and when it ends early."""

    keeps_best: bool
    """Whether they are those of the lowest validation loss. Else they are the last."""
    early_stopping: EarlyStopping | None = None

    def ends(self, measured: Mapping[int, float], errors: Mapping[int, float]) -> bool:
        """Whether as many evaluations as patience lasts have brought nothing."""
        if self.early_stopping is None:
            return False
        return without_gain(measured, errors, self.early_stopping.min_delta) >= self.early_stopping.patience


def best_step(measured: Mapping[int, float]) -> int | None:
    """The first step of the lowest validation loss; None where none is a number."""
    losses = [(loss, step) for step, loss in measured.items() if step and math.isfinite(loss)]
    return min(losses)[1] if losses else None


def without_gain(measured: Mapping[int, float], errors: Mapping[int, float], min_delta: float) -> int:
    """
    How many evaluations since the last improvement were not the lowest so far. An improvement is below the improvement
    before it by more than `min_delta` and by more than the standard error of that: luck begins no new count.
    """
    reference, margin, lowest, count = math.inf, 0.0, math.inf, 0
    for loss, error in ((measured[step], errors.get(step, 0.0)) for step in sorted(measured)):
        if loss < reference - margin:
            reference, margin, count = loss, max(min_delta, error), 0
        elif not loss < lowest - min_delta:
            count += 1
        lowest = min(lowest, loss) if math.isfinite(loss) else lowest
    return count


def _last_half(losses: Sequence[float]) -> Sequence[float]:
    return losses[len(losses) // 2 :]


def check_rollbacks(name: str, step: int, past: SpikeStats) -> None:
    """Raises RunError where a run that went back so often gets no further, or skips more steps than it keeps."""
    latest = past.rollbacks[-MOST:]
    if len(latest) < MOST:
        return
    if latest[-1][1] <= latest[0][1]:
        after = ", ".join(str(one[0]) for one in latest)
        what = f"it rolled back {MOST} times (after steps {after}), and never got past step {latest[0][1]} for good"
        raise _error(name, step, what)
    kept = step - past.num_given_up
    if past.skipped > kept:
        what = f"{past.skipped} of {step} steps were skipped, and only {kept} remain after the rollbacks"
        raise _error(name, step, what)


def last_loss(state: State) -> float | None:
    """Of the newest update. A last step that is skipped, or has no supervised token, has no loss of its own."""
    if "loss" in state.metrics:
        return float(state.metrics["loss"])
    return state.guard.losses[-1] if state.guard.losses else None


def _error(name: str, step: int, what: str, *, slow: bool = False) -> RunError:
    advice = f"Lower the learning rates of [{name}.optimizer], or raise {name}.schedule.warmup_steps, and run again. "
    if slow:
        advice = f"Raise the learning rates of [{name}.optimizer], or {name}.steps, and run again. "
    left = "The folder of the stage keeps checkpoints and metrics.jsonl, which says what was skipped."
    return RunError(f"nothing was learned: {what}", where=f"{name}, step {step}", hint=advice + left)
