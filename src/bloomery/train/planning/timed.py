"""
How long a step takes on this machine, from two small models of the same width: one turn of layers and two, on a few
rows. What the second turn adds, each further one adds too.
"""

import math
import time
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.train.device import fast_dtype
from bloomery.train.loop import Placed, gradients, placed_losses
from bloomery.train.optim import Optimizers
from bloomery.train.planning.trace import Step
from bloomery.train.recompute import recompute

import torch
from torch import nn

SLICE_TOKENS, SLICE_PARAMETERS = 1024, 3 * 10**7
"""What goes through the small models at once, and how many weights they may have at most, on a processor."""
TIMES = 2


class Timed(NamedTuple):
    learning: float
    """Seconds of a micro-batch, forward and backward."""
    updating: float
    """Seconds of an update."""


def timed(step: Step, device: Device) -> Timed | None:
    """None where even the small models are too large to be made for a plan."""
    cycle = math.lcm(*(len(one) for one in (step.model.attention, step.model.sliding_window, step.model.feed_forward)))
    layers, few, more = step.model.num_layers, cycle, 2 * cycle
    if cost(_slice(step, min(layers, more)).model, step.vocab_size).parameters > SLICE_PARAMETERS:
        return None
    if layers <= more:
        return _measured(_slice(step, layers), device)
    low, high = _measured(_slice(step, few), device), _measured(_slice(step, more), device)
    times = (layers - few) / (more - few)
    return Timed(*(max(first, first + times * (second - first)) for first, second in zip(low, high, strict=True)))


def _slice(step: Step, layers: int) -> Step:
    return replace(step, model=step.model.model_copy(update={"num_layers": layers}))


@cache
def _measured(step: Step, device: Device) -> Timed:
    """The best of a few times: what else the machine does comes on top of it."""
    shape, place = step.model, device.place
    rows = max(1, min(step.rows, SLICE_TOKENS // shape.context))
    device = replace(device, compute_dtype=step.precision)
    model = Transformer(shape, step.vocab_size)
    model.initialize(0)
    model.to(place)
    recompute(model, step.recompute)
    optimizers = Optimizers(model, step.optimizer, fast_dtype(device))
    ids = torch.randint(step.vocab_size, (rows, shape.context), device=place)
    places = torch.arange(shape.context, device=place).expand(rows, -1)
    batch = Placed(ids, places, None, torch.arange(ids.numel(), device=place), ids.flatten())
    found = [_once(model, optimizers, batch, device) for _ in range(TIMES + 1)][1:]
    learning, updating = (min(one[number] for one in found) for number in range(2))
    return Timed(learning * step.rows / rows, updating)


def _once(model: Transformer, optimizers: Optimizers, batch: Placed, device: Device) -> Timed:
    began = time.perf_counter()
    torch.autograd.backward(placed_losses(model, batch, device)[0] / batch.ids.numel())
    device.synchronize()
    learned = time.perf_counter()
    norm = nn.utils.get_total_norm(gradients(model))
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizers.step()
    optimizers.zero_grad()
    device.synchronize()
    return Timed(learned - began, time.perf_counter() - learned)
