"""
Where the state of a run is safe: what it goes on from, what it saves, and what it goes back to.

A save is begun and goes on in a thread; weights that are not finite are never saved.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import RunError
from bloomery.core.log import say
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.train import exactness, parallel
from bloomery.train.keeping import Kept
from bloomery.train.optim import Optimizers
from bloomery.train.state import State
from bloomery.weights import checkpoint
from bloomery.weights.checkpoint import Checkpoint, Saver
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
    max_skips: int
    saver: Saver
    world: World
    _saved: tuple[float, int] = (0.0, 0)
    """When, and of which step, the newest one is."""

    def resume(self) -> State:
        """Take up the newest whole one. Without any, the state is that of before the first step."""
        self._saved = (time.monotonic(), 0)
        found = checkpoint.newest(self.root, world=self.world, place=self._place)
        if found is None:
            return State()
        self._take_up(found)
        say(f"  {self.name} goes on from step {found.state['step']} ({found.folder.name})")
        exactness.tell(found.environment, self.environment)
        self._saved = (time.monotonic(), found.state["step"])
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
        Give weights, optimizers and the guard's window back what they held at the newest good checkpoint. Returns its
        step.

        That a checkpoint is good is only known when the step after it was accepted, so the one right before the bad
        steps is used only if there is no other. Raises RunError where there is none, and where none was saved since the
        run went back the last time.
        """
        bad = self.max_skips
        last = state.guard.rollbacks[-1] if state.guard.rollbacks else [0, 0]
        self.saver.wait()
        found = checkpoint.newest(self.root, before=state.step - bad, world=self.world, place=self._place)
        if found is None or int(found.state["step"]) <= last[0]:
            found = checkpoint.newest(self.root, world=self.world, place=self._place)
        where, what = f"step {state.step}", f"{bad} steps in a row were skipped; metrics.jsonl names their samples"
        cure = "Lower the learning rate, take precision=float32, or raise skip_sigma; the same command goes on"
        if found is None:
            raise RunError(f"{what}. There is no checkpoint to go back to", where=where, cure=f"{cure}.")
        to = int(found.state["step"])
        if to <= last[0]:
            what = f"{what}. The run has already gone back to step {last[1]} after step {last[0]}, and it did not help"
            raise RunError(what, where=where, cure=f"{cure} from {found.folder}.")
        self._take_up(found)
        past = State.restored(found.state)
        past.guard.skipped, past.guard.in_a_row = state.guard.skipped, 0
        past.guard.rollbacks = [*state.guard.rollbacks, [state.step, to]]
        state.tokens, state.guard = past.tokens, past.guard
        return to

    def late(self, seconds: float) -> bool:
        """Whether the newest one is older than that."""
        return time.monotonic() - self._saved[0] >= seconds

    def save(self, state: State) -> None:
        """Begin to make the state safe, if that was not done yet. Weights that are not finite are not worth it."""
        sharded = parallel.is_sharded(self.model)
        if self._saved[1] == state.step or not (self.world.is_first or sharded):
            return
        if not parallel.is_finite(self.model, self.world):
            say(f"step {state.step} is not saved: its weights are not finite", style="yellow")
            return
        if sharded:
            self._saved = (time.monotonic(), state.step)  # also if it fails: all ranks have to think the same
        (write, size), lineage = self.kept.copied(self.world), self.lineage_of(state)
        self.saver.start(
            state.step,
            lambda folder: write(folder, lineage),
            self.optimizers.state(),
            asdict(state),
            environment=self.environment,
            model_bytes=size,
        )
        self._saved = (time.monotonic(), state.step)

    def rescue(self, state: State) -> None:
        """
        Save the newest step when another rank is gone: no other will save it. Ranks lose each other before an update
        or after the hooks, so that the weights are those of `state.step`; after skipped steps older ones are better.
        Parts of weights that are gone cannot be saved.
        """
        if self.world.is_first and not state.guard.in_a_row and not parallel.is_sharded(self.model):
            self.save(state)
            self.saver.wait()

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
