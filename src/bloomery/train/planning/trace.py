"""
The memory of a training step, from the step itself: model, loss and optimizer run on fake tensors, and nothing is
allocated. Of a deep model two small ones are run, and what a layer adds between them is added for the others.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.model import kernels
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train.config import Level, Optimizer
from bloomery.train.device import fast_dtype
from bloomery.train.loop import Placed, gradients, placed_losses
from bloomery.train.optim import Optimizers
from bloomery.train.planning.meter import Meter, Product
from bloomery.train.recompute import recompute

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is traced: a step of some rows, in one or more micro-batches."""

    model: ModelConfig
    vocab_size: int
    optimizer: Optimizer
    recompute: Level
    precision: torch.dtype
    rows: int
    """Of a micro-batch."""
    accumulates: bool
    """Whether there are more micro-batches, whose gradients are there before its own."""
    on_processor: bool = True


class Traced(NamedTuple):
    """Bytes of tensors, and what a micro-batch and an update ask of the device."""

    resting: int
    """Weights, and what the optimizer remembers."""
    learning: int
    """The most during the forward and backward pass."""
    updating: int
    """The most while the optimizer works."""
    products: Counter[Product]
    """Of a micro-batch."""
    moved: int
    """Bytes that its other operations read and write."""
    update_products: Counter[Product]
    update_moved: int

    @property
    def peak(self) -> int:
        return max(self.learning, self.updating)


@cache
def trace(step: Step) -> Traced:
    """A step after the first, so that all that the optimizer remembers is there."""
    cycle = math.lcm(*(len(one) for one in (step.model.attention, step.model.sliding_window, step.model.feed_forward)))
    layers, few, more = step.model.num_layers, 2 * cycle, 3 * cycle
    if layers <= more:
        return _traced(step, layers)
    low, high = _traced(step, few), _traced(step, more)
    return _line(low, high, (layers - few) / (more - few))


def _line(low: Traced, high: Traced, times: float) -> Traced:
    """What is found `times` the way from the lower to the higher and beyond."""
    values = list[Any]()
    for first, second in zip(low, high, strict=True):
        if isinstance(first, int):
            assert isinstance(second, int)
            values.append(round(first + times * (second - first)))
        else:
            assert isinstance(first, Counter)
            assert isinstance(second, Counter)
            values.append(
                Counter({key: round(first[key] + times * (count - first[key])) for key, count in second.items()})
            )
    return Traced(*values)


def _traced(step: Step, layers: int) -> Traced:
    shape = step.model.model_copy(update={"num_layers": layers})
    device = Device(
        place=torch.device("cpu"),
        vendor="cpu",
        name="nothing",
        memory_bytes=0,
        compute_dtype=step.precision,
        backend="gloo",
    )
    with _elsewhere(not step.on_processor), FakeTensorMode(), Meter(on_processor=step.on_processor) as meter:
        model = Transformer(shape, step.vocab_size)
        recompute(model, step.recompute)
        optimizers = Optimizers(model, step.optimizer, fast_dtype(device))
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight)
        optimizers.step()
        optimizers.zero_grad()
        resting = meter.live
        ids = torch.zeros((step.rows, shape.context), dtype=torch.int64)
        batch = Placed(ids, ids.clone(), None, ids.flatten().clone(), ids.flatten().clone())
        total = torch.zeros(())
        if step.accumulates:
            for weight in model.parameters():
                weight.grad = torch.empty_like(weight)
        meter.restart()
        loss, entropy = placed_losses(model, batch, device, share=1 / ids.numel())
        torch.autograd.backward(loss)
        total += entropy
        del loss, entropy
        learning, products, moved = meter.peak, meter.products.copy(), meter.moved
        meter.restart()
        norm = nn.utils.get_total_norm(gradients(model))
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizers.step()
        return Traced(resting, learning, meter.peak, products, moved, meter.products.copy(), meter.moved)


@contextmanager
def _elsewhere(really: bool) -> Iterator[None]:
    token = kernels.ELSEWHERE.set(really)
    try:
        yield
    finally:
        kernels.ELSEWHERE.reset(token)
