"""What the loop minimizes, as it sees it: a sum of losses over a global batch, and what that is divided by."""

from typing import Protocol, runtime_checkable

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch

from torch import Tensor


@runtime_checkable
class Objective(Protocol):
    """`NextToken` of loop.py is the plain one. For each global batch: `begin`, `losses` of its parts, `end`, `told`."""

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        """
        What the losses of a global batch are divided by, the same on all ranks; what is needed of the whole of it is
        computed here. A batch may be begun again: where memory or the range of float16 was not enough.
        """
        ...

    def losses(self, model: Transformer, part: Batch, device: Device) -> tuple[Tensor, Tensor]:
        """Of some rows of it: the sum that is minimized, and the sum that is reported, which has no gradient."""
        ...

    def end(self, world: World) -> None:
        """All parts are done. Ranks add up here what they tell."""
        ...

    def told(self) -> dict[str, float]:
        """Numbers of that global batch, by name."""
        ...

    def watched(self, loss: float) -> float:
        """What the guard looks at, which takes logarithms: a number above zero whose size tells of trouble."""
        ...
