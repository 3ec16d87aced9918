"""
What is minimized over packed rows of judged answers, and what is told of it.

A row holds whole pairs (chosen, rejected), or for KTO whole examples (an answer, and another question's in its place);
no sequence sees another. What each sequence is and what the reference says of it stand in a table beside the rows.

Letters used for shapes: R rows of a split, B rows of a batch, S sequences of a row, P pairs.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.log import progress
from bloomery.core.stop import Stop
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch, Samples
from bloomery.train.preference import losses
from bloomery.train.preference.config import Dpo, Ipo, Kto, SimPo
from bloomery.train.preference.logprobs import Sequences, by_sequence
from bloomery.train.preference.losses import Answers

import torch
from torch import Tensor

NOTHING, CHOSEN, REJECTED, ELSEWHERE = 0, 1, 2, 3
"""What a sequence is: padding; better, or wanted; worse, or unwanted; an answer to another question."""

OF_PAIRS = ("margin", "accuracy", "reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected")
OF_SINGLES = ("reward_wanted", "num_wanted", "reward_unwanted", "num_unwanted")
"""What is told."""

PairLoss = Dpo | Ipo | SimPo | Kto


@dataclass(frozen=True, eq=False)
class Table:
    """Of a split, by the numbers of its rows."""

    kinds: NDArray[np.int8]
    """R × S"""
    reference: NDArray[np.float32] | None = None
    """R × S: log-probabilities under the reference; None where the loss has none."""

    @property
    def most(self) -> int:
        return int(self.kinds.shape[1])


def reference_of(
    model: Transformer, samples: Samples, table: Table, rows: int, device: Device, world: World, stop: Stop
) -> NDArray[np.float32]:
    """What a model, as it is, says of every sequence (R × S). Ranks share the rows, and each gets all."""
    found = torch.zeros(samples.num_samples, table.most)
    mine = np.arange(world.rank, samples.num_samples, world.size)
    model.eval()
    with torch.no_grad(), progress("reference", "rows", len(mine)) as meter:
        for start in range(0, len(mine), rows):
            if world.size == 1:  # ranks in company finish this together
                stop.check()
            numbers = mine[start : start + rows]
            found[numbers] = by_sequence(model, samples.batch(numbers), table.most, device).sums
            meter.at(start + len(numbers))
    model.train()
    return np.asarray(world.sum(found).numpy(), np.float32)


@dataclass(eq=False)
class Preference:
    """The objective: see `Objective` for what is called when."""

    loss: PairLoss
    table: Table
    _divergence: Tensor = field(default_factory=lambda: torch.zeros(()))
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        """The number of pairs, or of single answers. For KTO, z of the whole batch is computed first."""
        self._sums = {name: torch.zeros(()) for name in (OF_SINGLES if isinstance(self.loss, Kto) else OF_PAIRS)}
        kinds = self.table.kinds[batch.samples]
        single = isinstance(self.loss, Kto)
        self._count = int(np.isin(kinds, (CHOSEN, REJECTED) if single else (CHOSEN,)).sum())
        if isinstance(self.loss, Kto):
            self._divergence = self._elsewhere(model, batch, micro_batch, device, world)
        return self._count

    def losses(self, model: Transformer, part: Batch, device: Device, share: float = 1.0) -> tuple[Tensor, Tensor]:
        found = by_sequence(model, part, self.table.most, device)
        if isinstance(self.loss, Kto):
            total = self._of_singles(self.loss, found, part)
        else:
            total = self._of_pairs(self.loss, found, part)
        return share * total, total.detach()

    def end(self, world: World) -> None:
        flat = torch.stack(list(self._sums.values()))
        self._sums = dict(zip(self._sums, world.sum(flat), strict=True))

    def told(self) -> dict[str, float]:
        """Means over the pairs; for KTO, over the wanted and the unwanted answers each."""
        sums = {name: float(value) for name, value in self._sums.items()}
        if not isinstance(self.loss, Kto):
            return {name: value / max(self._count, 1) for name, value in sums.items()}
        counts = {name: sums.pop(f"num_{name}", 0.0) for name in ("wanted", "unwanted")}
        found = {f"reward_{name}": sums[f"reward_{name}"] / max(count, 1) for name, count in counts.items()}
        if all(counts.values()):
            found["margin"] = found["reward_wanted"] - found["reward_unwanted"]
        return found | {"divergence": float(self._divergence)}

    def watched(self, loss: float) -> float:
        return loss

    def _of_pairs(self, how: Dpo | Ipo | SimPo, found: Sequences, part: Batch) -> Tensor:
        chosen, rejected = (self._answers(found, part, kind) for kind in (CHOSEN, REJECTED))
        match how:
            case Dpo():
                judged = losses.dpo(chosen, rejected, how)
            case Ipo():
                judged = losses.ipo(chosen, rejected, how)
            case SimPo():
                judged = losses.simpo(chosen, rejected, how)
        margin = judged.chosen - judged.rejected
        # A pair that is told apart by nothing is right half of the time.
        right = (margin > 0).float() + 0.5 * (margin == 0).float()
        self._add(
            margin=margin,
            accuracy=right,
            reward_chosen=judged.chosen,
            reward_rejected=judged.rejected,
            log_p_chosen=chosen.now,
            log_p_rejected=rejected.now,
        )
        return judged.losses.sum()

    def _of_singles(self, how: Kto, found: Sequences, part: Batch) -> Tensor:
        total = found.sums.new_zeros(())
        for name, kind in (("wanted", CHOSEN), ("unwanted", REJECTED)):
            answers = self._answers(found, part, kind)
            wanted = torch.full_like(answers.now, kind == CHOSEN, dtype=torch.bool)
            each, reward = losses.kto(answers, wanted, self._divergence, how)
            total = total + each.sum()
            self._add(**{f"reward_{name}": reward, f"num_{name}": torch.ones_like(reward)})
        return total

    def _elsewhere(self, model: Transformer, batch: Batch, rows: int, device: Device, world: World) -> Tensor:
        """z: the mean of log π / π₀ over answers to other questions, not below 0."""
        sums = torch.zeros(2)
        with torch.no_grad():
            for part in batch.of_rank(world.rank, world.size).split(rows):
                answers = self._answers(by_sequence(model, part, self.table.most, device), part, ELSEWHERE)
                sums += torch.stack([(answers.now - answers.before).sum(), torch.tensor(float(len(answers.now)))])
        total, count = world.sum(sums).tolist()
        return torch.tensor(max(0.0, total / max(count, 1.0)))

    def _answers(self, found: Sequences, part: Batch, kind: int) -> Answers:
        """Those of one kind, in the order of rows and of sequences: so that a chosen one meets its rejected one."""
        rows, numbers = np.nonzero(self.table.kinds[part.samples] == kind)
        at = (torch.from_numpy(rows), torch.from_numpy(numbers))
        if self.table.reference is None:
            before = torch.zeros_like(found.sums[at])
        else:
            before = torch.from_numpy(self.table.reference[part.samples])[at]
        return Answers(found.sums[at], before, found.tokens[at])

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value.detach().sum()
