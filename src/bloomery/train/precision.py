"""
The device and number format of training matmuls, why it was chosen, and loss scaling.

Weights, gradients and optimizer are float32, unless `weight_dtype` is bfloat16: autocast hands a rounded copy to each
matmul. float16 ends at 65,504 and loses what is below 6·10⁻⁸. So the loss is scaled up before the backward pass, and
gradients down after it (Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740, §3.2). bfloat16 has the range of
float32.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bloomery.core.errors import HardwareError
from bloomery.core.log import info
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.config import Float8
from bloomery.model.layers import multiply_in_float8
from bloomery.model.transformer import Transformer
from bloomery.train.config import Training
from bloomery.train.loss import check_float8

import torch
from torch import Tensor

KERNELS = "kernels.json"
"""Of a deterministic run: what trials of this machine found when it began."""
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
    """
    Where and how a step computes: the device, the number format of matmuls, why it was chosen, and the scaler where
    one is needed. A run makes one, and hands it to all that computes with the model.
    """

    device: Device
    """Its `compute_dtype` is `dtype`."""
    dtype: torch.dtype
    why: str
    scaler: Scaler | None = None

    @classmethod
    def decide(cls, requested: PrecisionChoice, device: Device) -> "Precision":
        """The format that a recipe asks for; for `auto`, what the device has units for."""
        dtype = device.compute_dtype if requested == "auto" else getattr(torch, requested)
        name = str(dtype).removeprefix("torch.")
        fastest = str(device.compute_dtype).removeprefix("torch.")
        if requested == "auto":
            why = f"{name}: {REASONS[name].format(device.name)}"
        elif dtype == device.compute_dtype:
            why = f"{name}: asked for"
        else:
            why = f"{name}: asked for, where auto would have taken {fastest}"
        return cls(replace(device, compute_dtype=dtype), dtype, why, Scaler() if dtype == torch.float16 else None)

    @classmethod
    def of_run(cls, config: Training, out: Path, world: World) -> "Precision":
        """
        The device and the format that a section of a recipe asks for; they are printed. A deterministic run keeps its
        choice of kernels in the folder `out`. All ranks take the choice that the first rank has kept.
        """
        from bloomery.hw import kernel_selection

        devices.return_freed_memory()  # what earlier stages of this process left
        device = devices.find(config.device, open=False)
        be_deterministic(config.deterministic)  # before the GPU is opened: its library reads the environment then
        keep = out / KERNELS if config.deterministic else None
        if keep is not None:
            with world.alike():
                kept = keep.read_text(encoding="utf-8") if world.is_first and keep.exists() else ""
            if (kept := world.broadcast(kept)) and not world.is_first:
                keep.write_text(kept, encoding="utf-8")
        # Not opened yet: trials of kernels are other processes, and some drivers let in one at a time.
        kernel_selection.select_kernels(device, keep=keep)
        device.open()
        devices.expand_segments(device)
        precision = cls.decide(config.compute_dtype, device)
        info(f"  computes in {precision.why}")
        if config.deterministic:
            info("  deterministic: another run of this recipe here, with this software, is the same bit for bit")
        return precision

    def for_trial(self) -> "Precision":
        """The same with a scaler of its own, for passes that are no step of the run."""
        return replace(self, scaler=None if self.scaler is None else Scaler())

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.torch_device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @property
    def muon_dtype(self) -> torch.dtype:
        """The format that Muon's matmuls are computed in: bfloat16 has float32's range, which float16 has not."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def factor(self) -> float:
        """
        The factor of the loss before the backward pass. It is applied together with the share of the global batch:
        gradients that were only divided by the batch's tokens would underflow float16 before they are scaled up.
        """
        return 1.0 if self.scaler is None else self.scaler.scale

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients by the loss scale, in-place."""
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

    def metrics(self) -> dict[str, float]:
        """What metrics tell of it."""
        return {} if self.scaler is None else {"scale": self.scaler.scale}

    def state(self) -> dict[str, float]:
        """What a resume needs: plain numbers. Empty without a scaler."""
        return {} if self.scaler is None else {"scale": self.scaler.scale, "good_steps": self.scaler.good_steps}

    def restore(self, saved: dict[str, float]) -> None:
        """Take up what `state` gave. A run that had no scaler starts a new one."""
        if self.scaler is not None and saved:
            self.scaler.scale, self.scaler.good_steps = float(saved["scale"]), int(saved["good_steps"])


def be_deterministic(deterministic: bool) -> None:
    """
    Have torch take algorithms that give the same bits each time, or whatever is fastest. torch raises RuntimeError for
    an operation that has none. Matmuls of NVIDIA also need a workspace of fixed size.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


def compute_in_short_formats(model: Transformer, config: Training, precision: Precision) -> None:
    """
    Have training compute the residual stream in bfloat16, and matmuls in float8, where the settings say so.

    Raises HardwareError if other matmuls are not in bfloat16 here, or if the device does not multiply float8.
    """
    for name, (value, default) in config.short_formats.items():
        if precision.dtype != torch.bfloat16:
            what = f'{name}="{value}" needs matmuls in bfloat16, but {precision.device.name} computes in'
            hint = f'Set precision="bfloat16", or {name}="{default}".'
            raise HardwareError(f"{what} {short(precision.dtype)}", hint=hint)
    if config.float8 != "off":
        check_float8(precision.device)
    set_short_formats(model, config.residual_dtype, config.float8, precision.device.torch_device)
    if config.float8 != "off":
        info(f"  matmuls in float8: {'the head' if config.float8 == 'head' else 'the head and all layers'}")


def set_short_formats(model: Transformer, residual_dtype: str, float8: Float8, device: torch.device) -> None:
    """Set the format of the residual stream, and which matmuls are in float8, with the formats of a device."""
    model.residual_dtype = torch.bfloat16 if residual_dtype == "bfloat16" else None
    multiply_in_float8(model, float8, device)


REASONS = {
    "bfloat16": "{} multiplies it in hardware, and it has the range of float32",
    "float16": "{} has no units for bfloat16; the loss is scaled so that gradients keep to its range",
    "float32": "{} multiplies no shorter format faster",
}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
