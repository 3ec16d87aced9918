"""
What is minimized over answers that the model has drawn itself, each with its advantage over the others of its group.

Letters used for shapes: N answers, G of them to a question, B rows of a batch, T tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.preference import losses
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.logprobs import by_token

import torch
from torch import Tensor

SMALLEST_DEVIATION = 1e-4
"""Added to that of a group; what others take too."""


def advantages(
    rewards: NDArray[np.float64], groups: NDArray[np.int64], *, deviation: bool = True
) -> NDArray[np.float32]:
    """
    (r − mean) / deviation of the group that each of N answers belongs to: 0 in a group whose answers are all alike.
    The deviation is that of a sample, with G − 1.
    """
    found = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = rewards[groups == group]
        apart = own - own.mean()
        if deviation and len(own) > 1:
            apart = apart / (own.std(ddof=1) + SMALLEST_DEVIATION)
        found[groups == group] = apart
    return found.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Answers of one global batch, by the numbers of their samples."""

    numbers: NDArray[np.int64]
    advantage: NDArray[np.float32]
    now: NDArray[np.float32] | None
    """N × T: log-probabilities when they were drawn; None where they are used once, and are what they are."""
    before: NDArray[np.float32] | None
    """N × T: under the reference; None where there is none."""
    facts: dict[str, float]
    """What is told of them: reward, length, …"""

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of samples here."""
        places = {number: place for place, number in enumerate(self.numbers.tolist())}
        return np.array([places[number] for number in numbers.tolist()], np.int64)


@dataclass(eq=False)
class Policy:
    """The objective: see `Objective` for what is called when."""

    loss: Grpo
    drawn: Callable[[], Drawn]
    """Those of the batch at hand."""
    _sums: Tensor = field(default_factory=lambda: torch.zeros(2))
    _tokens: int = 0

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        self._sums = torch.zeros(2)
        self._tokens = int((batch.targets != IGNORE).sum())
        return len(batch.ids) if self.loss.normalize == "answers" else self._tokens

    def losses(self, model: Transformer, part: Batch, device: Device) -> tuple[Tensor, Tensor]:
        now = by_token(model, part, device, self.loss.temperature)
        drawn, place = self.drawn(), now.device
        rows = drawn.rows(part.samples)
        counts = torch.from_numpy(part.targets != IGNORE).to(place)
        advantage = torch.from_numpy(drawn.advantage[rows]).to(place)[:, None]
        earlier = now.detach() if drawn.now is None else torch.from_numpy(drawn.now[rows]).to(place)
        each, held = losses.clipped(now, earlier, advantage, self.loss.clip)
        apart = torch.zeros_like(now)
        if drawn.before is not None:
            apart = losses.divergence(now, torch.from_numpy(drawn.before[rows]).to(place))
            each = each + self.loss.kl_weight * apart
        self._sums += torch.stack([(apart.detach() * counts).sum(), (held & counts).sum().float()]).cpu()
        total = self._weighed(each, counts).sum()
        return total, total.detach()

    def end(self, world: World) -> None:
        world.sum(self._sums)

    def told(self) -> dict[str, float]:
        """Means over the tokens of the answers, and what there is to say of these."""
        kl, held = (self._sums / max(self._tokens, 1)).tolist()
        return {**self.drawn().facts, "kl": kl, "clip_fraction": held}

    def watched(self, loss: float) -> float:
        """A loss around zero tells of trouble only when it is not finite; the gradient norm is watched as always."""
        return 1.0 if np.isfinite(loss) else loss

    def _weighed(self, each: Float[Tensor, "B T"], counts: Tensor) -> Float[Tensor, " B"]:
        sums = (each * counts).sum(1)
        return sums / counts.sum(1).clamp(min=1) if self.loss.normalize == "answers" else sums
