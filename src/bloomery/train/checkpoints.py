"""
Where the state of a run is safe: what it goes on from, what it saves, and what it goes back to.

A save is begun and goes on in a thread; weights that are not finite are never saved. A run goes on from the newest
checkpoint, whenever that was saved. It goes back only to one of a step that is saved whatever a clock says, the start
among them: else weights would depend on how fast the machine was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import RunError
from bloomery.core.log import say
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.train import exactness, parallel, progress
from bloomery.train.guard import forget
from bloomery.train.keeping import Kept
from bloomery.train.optim import Optimizers
from bloomery.train.state import State
from bloomery.weights import checkpoint
from bloomery.weights.checkpoint import Checkpoint, Saver, Standing
from bloomery.weights.huggingface import Lineage

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass
class Checkpoints:
    """The checkpoints of a run, in `root`. Each rank has one; what one of them calls, all call."""

    name: str
    root: Path
    model: Transformer
    kept: Kept
    optimizers: Optimizers
    lineage: Lineage
    environment: dict[str, Any]
    goals: Callable[[int], bool]
    """Of which steps there is a checkpoint whatever a clock says, so that a run may go back to it."""
    others_begin: Callable[[int, int], bool]
    """Whether data of another kind, which have another loss, begin among these samples of the run."""
    saver: Saver
    world: World
    _saved: tuple[float, int] = (0.0, -1)
    """When, and of which step, the newest one was begun."""
    _whole: tuple[float, int] = (0.0, -1)
    """The same of the newest that is known to be whole."""
    _passed_over: frozenset[int] = frozenset()
    """Steps of those that `resume` found damaged, until the first save."""

    def resume(self) -> State:
        """Take up the newest whole one. Without any, the state is that of before the first step, and saved."""
        found = self._newest(None)
        if found is None:
            self._saved = self._whole = (time.monotonic(), -1)
            self.save(State())
            return State()
        self._take_up(found)
        say(f"  {self.name} goes on from step {found.state['step']} ({found.folder.name})")
        exactness.tell(found.environment, self.environment)
        self._saved = self._whole = (time.monotonic(), found.state["step"])
        self._passed_over = frozenset(int(one.name) for one in checkpoint.folders(self.root) if one > found.folder)
        return State.restored(found.state)

    def _take_up(self, found: Checkpoint) -> None:
        self.kept.fill(found.folder, self.lineage)
        self.optimizers.restore(found.training)

    def _place(self, name: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
        """Room for what an optimizer remembers: of a weight that is spread over ranks, for this rank's part."""
        weights = dict(self.model.named_parameters())
        weight = weights[name.rpartition("/")[0]]
        if isinstance(weight, DTensor) and weight.shape == shape:
            return torch.zeros_like(weight, dtype=kind)
        return torch.empty(shape, dtype=kind)

    def roll_back(self, state: State) -> int:
        """
        Give weights, optimizers and the guard's window back what they held at the newest good checkpoint; where data of
        another kind have come since, the window begins anew. Returns its step.

        That a checkpoint is good is only known when the step after it was accepted, so the one right before the bad
        steps is used only if there is no other; and one of another step than `goals`, or one that the run has gone back
        behind, only if there is none of these.
        Raises RunError where there is none, where no update was made since the run went back the last time, and where
        it has gone back too often: see progress.py.
        """
        bad, accepted = state.guard.in_a_row, state.step - state.guard.in_a_row
        after, last = state.guard.rollbacks[-1] if state.guard.rollbacks else (-1, 0)
        what, where = f"{bad} steps in a row were skipped; metrics.jsonl names their samples", f"step {state.step}"
        cure = (
            f"Where the samples are bad, the same command with max_skips={2 * bad} goes on behind them; where only the "
            "threshold is too low, with a larger skip_sigma. A lower learning rate or precision=float32 makes another "
            "run, from the start."
        )
        if accepted <= after:
            what = f"{what}. The run has already gone back to step {last} after step {after}, and it did not help"
            raise RunError(what, where=where, cure=cure)
        self.wait()
        left = state.guard.left
        goal = self._newest(accepted, goals=True, left=left) or self._newest(accepted + 1, goals=True, left=left)
        found = goal or self._newest(accepted) or self._newest(None)
        if found is None:
            raise RunError(f"{what}. There is no checkpoint to go back to", where=where, cure=cure)
        self._take_up(found)
        past = State.restored(found.state)
        if self.others_begin(past.samples, state.samples):
            forget(past.guard)
        past.guard.skipped, past.guard.in_a_row = state.guard.skipped, 0
        past.guard.rollbacks = [*state.guard.rollbacks, [state.step, past.step]]
        progress.check_rollbacks(self.name, state.step, past.guard)
        state.tokens, state.guard = past.tokens, past.guard
        return past.step

    def _newest(self, before: int | None, *, goals: bool = False, left: Sequence[range] = ()) -> Checkpoint | None:
        return checkpoint.newest(self.root, before, goals=goals, left=left, world=self.world, place=self._place)

    def late(self, seconds: float) -> bool:
        """Whether the newest one is older than that."""
        return time.monotonic() - self._saved[0] >= seconds

    def wait(self, before: Callable[[], None] | None = None) -> None:
        """
        Return when nothing is being written. Raises RunError where a save has failed: its step is not safe then. What
        comes `before` may fail as well; where ranks hold parts of the weights, all of them raise what one has to.
        """
        try:
            with self._company.alike():
                if before is not None:
                    before()
                self.saver.wait()
        except Exception:
            self._saved = self._whole
            raise
        self._whole = self._saved

    @property
    def _company(self) -> World:
        """The ranks that save together."""
        return self.world if parallel.is_sharded(self.model) else World.alone()

    def save(self, state: State, before: Callable[[], None] | None = None) -> None:
        """
        Begin to make the state safe, or wait until it is if that was begun before. Weights that are not finite are not
        worth it. Raises RunError for what went wrong with the save before, and for what has to be done `before`.
        """
        sharded = parallel.is_sharded(self.model)
        if not (self.world.is_first or sharded):
            return
        self.wait(before)
        if self._saved[1] == state.step:
            return
        if not parallel.is_finite(self.model, self.world):
            say(f"step {state.step} is not saved: its weights are not finite", style="yellow")
            return
        if sharded:
            self._saved = (time.monotonic(), state.step)  # also if it fails: all ranks have to think the same
        (write, size), lineage = self.kept.copied(self.world), self.lineage_of(state)
        doubtful, passed_over = state.guard.in_a_row > 0, self._passed_over
        good = self.goals(state.step) and not doubtful
        self.saver.start(
            state.step,
            lambda folder: write(folder, lineage),
            self.optimizers.state(),
            asdict(state),
            environment=self.environment,
            model_bytes=size,
            standing=Standing(goal=good, doubtful=doubtful, left=state.guard.left, passed_over=passed_over),
        )
        self._saved, self._passed_over = (time.monotonic(), state.step), frozenset()

    def rescue(self, state: State, before: Callable[[], None]) -> None:
        """
        Save the newest step when another rank is gone: no other will save it. Ranks lose each other before an update
        or after the hooks, so that the weights are those of `state.step`; after skipped steps older ones are better.
        Parts of weights that are gone cannot be saved.
        """
        if self.world.is_first and not state.guard.in_a_row and not parallel.is_sharded(self.model):
            self.save(state, before)
            self.wait()

    def lineage_of(self, state: State) -> Lineage:
        return replace(self.lineage, step=state.step)

    def leave_model(self, folder: Path, state: State) -> None:
        """Leave the model as it is, for others to read."""
        write = self.kept.copied(self.world)[0] if parallel.is_sharded(self.model) else self.kept.write
        if self.world.is_first:
            write(folder, self.lineage_of(state))

    def check_finite(self, state: State) -> None:
        """Raises RunError where the last updates have hurt the weights."""
        if not parallel.is_finite(self.model, self.world):
            raise RunError(
                "the last updates left weights that are not finite",
                where=f"step {state.step}",
                cure=f"The good ones are in {self.root}. Lower the learning rate, or train in float32.",
            )
