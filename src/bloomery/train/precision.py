"""
The device and number format of training matmuls, why it was chosen, and loss scaling.

Weights, gradients and optimizer are float32 throughout: autocast hands a rounded copy to each matmul. float16 ends
at 65,504 and loses what is below 6·10⁻⁸. So the loss is scaled up before the backward pass, and gradients down
after it (Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740, §3.2). bfloat16 has the range of float32.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from bloomery.core.log import info
from bloomery.hw import device as devices
from bloomery.hw import kernel_selection
from bloomery.hw.device import Device
from bloomery.train.config import Training

import torch
from torch import Tensor

SMALLEST, TRIES = 1.0, 3
"""Scale; and what is tried of a step before it."""

PrecisionChoice = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass
class _Search:
    """For a scale at which a step's gradients are finite."""

    before: tuple[float, int]
    """Scale and good steps ahead of it."""
    failures: int = 0
    next: float | None = None
    """Scale that comes after the smallest, if that is any help."""


@dataclass
class Scaler:
    """
    torch.amp.GradScaler's rule, decided by the norm that the loop computes anyway, so that all ranks decide alike.

        s ← s / 2      after gradients that are not finite, which are computed again
            2·s        after `interval` good steps in a row

    Where halving it twice does not help, the smallest scale, 1, says whether the scale is the cause. If not, the step
    is hurt and the scale stays as it was: it would need `interval` good steps for each time that it was halved.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    interval: int = 2000
    _search: _Search | None = field(default=None, repr=False, compare=False)

    def again(self, finite: bool) -> bool:
        """Whether a step is to be computed again, with the scale that is set then."""
        search = self._search or _Search((self.scale, self.good_steps))
        if finite and search.next is None:
            self._search = None
            self.update(True)
            return False
        self._search = search
        if finite:
            self.scale, search.next = search.next or self.scale, None
            return True
        if self.scale <= SMALLEST:
            self.give_up()
            return False
        search.failures += 1
        self.update(False)
        if search.failures == TRIES:
            search.next, self.scale = self.scale, SMALLEST
        return True

    def give_up(self) -> None:
        """It is not the scale: take it up again as it was before this step."""
        if self._search is not None:
            (self.scale, self.good_steps), self._search = self._search.before, None

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass
class Precision:
    """How a step computes: the format of products, why it was chosen, and the scaler where one is needed."""

    kind: str
    """Of device, as torch names it."""
    dtype: torch.dtype
    why: str
    scaler: Scaler | None = None

    @classmethod
    def decide(cls, wanted: PrecisionChoice, device: Device) -> "Precision":
        """The format that a recipe asks for; for `auto`, what the device has units for."""
        dtype = device.compute_dtype if wanted == "auto" else getattr(torch, wanted)
        name = str(dtype).removeprefix("torch.")
        fastest = str(device.compute_dtype).removeprefix("torch.")
        if wanted == "auto":
            why = f"{name}: {REASONS[name].format(device.name)}"
        elif dtype == device.compute_dtype:
            why = f"{name}: asked for"
        else:
            why = f"{name}: asked for, where auto would have taken {fastest}"
        return cls(device.place.type, dtype, why, Scaler() if dtype == torch.float16 else None)

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @property
    def factor(self) -> float:
        """
        What the loss is multiplied with before it is differentiated: together with its share of the global batch, for
        slopes that were divided by its tokens alone would be below float16 before they are scaled up.
        """
        return 1.0 if self.scaler is None else self.scaler.scale

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Make gradients of what was differentiated those of the loss, in place."""
        if self.scaler is not None:
            for gradient in gradients:
                gradient.div_(self.scaler.scale)

    def overflowed(self, loss: float, norm: float) -> bool:
        """
        Whether the gradients left the range although the loss is finite, so that they have to be computed again: the
        scale is another now. To be asked once after each backward pass, with the norm of what `unscale` left. Gradients
        that no scale makes finite are left to the guard.
        """
        if self.scaler is None:
            return False
        if not math.isfinite(loss):
            self.scaler.give_up()
            return False
        return self.scaler.again(math.isfinite(norm))

    def told(self) -> dict[str, float]:
        """What metrics tell of it."""
        return {} if self.scaler is None else {"scale": self.scaler.scale}

    def state(self) -> dict[str, float]:
        """What a resume needs: plain numbers. Empty without a scaler."""
        return {} if self.scaler is None else {"scale": self.scaler.scale, "good_steps": self.scaler.good_steps}

    def restore(self, saved: dict[str, float]) -> None:
        """Take up what `state` gave. A run that had no scaler starts a new one."""
        if self.scaler is not None and saved:
            self.scaler.scale, self.scaler.good_steps = float(saved["scale"]), int(saved["good_steps"])


REASONS = {
    "bfloat16": "{} multiplies it in hardware, and it has the range of float32",
    "float16": "{} has no units for bfloat16; the loss is scaled so that gradients keep to its range",
    "float32": "{} multiplies no shorter format faster",
}


def find_device(config: Training) -> Device:
    """The device that a recipe asks for, with the number format that it asks for."""
    devices.return_freed_memory()  # what earlier stages of this process left
    found = devices.find(config.device)
    kernel_selection.select_kernels(found)
    info(f"  computes in {Precision.decide(config.precision, found).why}")
    if config.precision == "auto":
        return found
    return replace(found, compute_dtype=getattr(torch, config.precision))


def fast_dtype(device: Device) -> torch.dtype:
    """The format that Muon's products are made in: bfloat16 has float32's range, which float16 has not."""
    return torch.bfloat16 if device.compute_dtype == torch.bfloat16 else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
