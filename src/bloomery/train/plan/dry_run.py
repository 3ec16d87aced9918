"""
Try two steps, an evaluation and a save before training, so that late failures happen early.

A failure that would end a run after hours ends it before it begins.

The learning rate is 0, so that no weight changes, and the optimizer's state is cleared again. The first step
allocates the optimizer's memory. The second step has two micro-batches, if there are more, so that gradients and
activations exist together.
"""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.log import about, counted, info
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import SampleSource
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.step import (
    BatchLoss,
    LossFunction,
    accumulate_gradients,
    clipping,
    gradients,
    retry_on_oom,
    retry_on_overflow,
)
from bloomery.train.validation import EvalCheck
from bloomery.weights import checkpoint

import torch

MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Tried:
    rows: int
    """That went through the model at once: fewer than was asked for, where memory ran out."""
    peak_bytes: int
    """As `Device.peak_bytes`."""
    micro_batch_seconds: float
    update_seconds: float

    def step_seconds(self, rows_per_step: int, ranks: int = 1) -> float:
        return -(-rows_per_step // (self.rows * ranks)) * self.micro_batch_seconds + self.update_seconds


@dataclass(frozen=True, kw_only=True)
class DryRun:
    model: Transformer
    optimizers: Optimizers
    samples: SampleSource
    validation: EvalCheck
    world: World
    precision: Precision
    max_grad_norm: float
    loss_function: LossFunction
    one_shape: bool = False
    """Whether blocks are compiled, which happens again for each shape."""

    def run(self, rows: int, rows_per_step: int) -> Tried:
        """Raises HardwareError where not even one row fits."""
        most = -(-rows_per_step // self.world.size)
        self.precision.device.restart_peak()  # that of a trial of other blocks does not count
        self.optimizers.set_share(0.0)
        rows = min(rows, most)
        self._step(rows if self.one_shape else 1, 1)
        used, seconds, update = self._step(rows, MICRO_BATCHES if rows < most else 1)
        self.validation.measure(self.model, self.precision, most=1)
        if self.world.size == 1:
            weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            kept = checkpoint.copy_state(weights), checkpoint.copy_state(self.optimizers.state())
            del kept
        self.optimizers.restore({})
        return Tried(
            rows=used,
            peak_bytes=self.precision.device.peak_bytes(),
            micro_batch_seconds=seconds,
            update_seconds=update,
        )

    def _step(self, rows: int, micro_batches: int) -> tuple[int, float, float]:
        """Rows at once, seconds of a micro-batch, seconds of the update."""
        numbers = np.arange(rows * micro_batches * self.world.size) % self.samples.num_samples
        batch = self.samples.batch(numbers)

        def compute(rows: int) -> tuple[BatchLoss, torch.Tensor]:
            model, world = self.model, self.world
            work = partial(accumulate_gradients, model, batch, rows, self.precision, self.loss_function, world)
            return retry_on_overflow(model, self.precision, work)

        began = time.perf_counter()
        (_, norm), used = retry_on_oom(self.model, self.world, rows, compute)
        learned = time.perf_counter()
        if not bool(norm.isfinite()):  # a rate of 0 keeps no weight from such a gradient
            torch._foreach_zero_(gradients(self.model))
            norm = torch.zeros(())
        self.optimizers.step(clipping(self.max_grad_norm, norm))
        self.optimizers.zero_grad()
        self.precision.device.synchronize()
        parts = -(-rows * micro_batches // used)
        return used, (learned - began) / parts, time.perf_counter() - learned


def tell(tried: Tried, rows_per_step: int, steps: int, device: Device, world: World) -> None:
    """Say what came of it, and for how long training will take. The run shows this line."""
    memory = f"{tried.peak_bytes / 2**30:,.1f} GiB"
    if device.memory_bytes:
        memory = f"{tried.peak_bytes / 2**30:,.1f} of {device.memory_bytes / 2**30:,.1f} GiB"
    each = tried.step_seconds(rows_per_step, world.size)
    info(f"  Dry run OK: {memory}, micro-batch {tried.rows}, {about(steps * each)} for {counted(steps, 'step')}", "dim")
