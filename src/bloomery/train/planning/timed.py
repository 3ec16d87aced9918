"""
How long a step takes on this machine: made with all its layers where that is soon done, and else with one turn of them
and with some more. What these add, each further turn adds too. Models go through the functions of the loop, in turn,
and each of their times is the best of a few.

Layers are left out before rows are: a step takes its time for each layer, but not for each row, where weights are
rounded or put together from four bits, and gradients written, once for all rows. Where rows are left out too, the
smaller model is timed with half of them besides, which tells what each further row adds.

On a processor it is the time that this thread had on it, so that what else the machine does at the moment is not
planned with; on other devices it is what a clock says.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.hw.peak import measured_peak
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.train.loop import Placed, clipping, few_rows_of_the_table, gradients, placed_losses
from bloomery.train.optim import Optimizers
from bloomery.train.optim_adamw import total_norm
from bloomery.train.planning.step import Step

import torch

SLICE_SECONDS, SLICE_PARAMETERS = 0.4, 10**8
"""Of a micro-batch of the larger model, at the peak; and how many weights that model may have at most."""
MAX_SECONDS = 3.0
"""Of a plan, for all times of a slice: a round that was begun is ended, and slow steps need no repetition."""
TIMES = 3
"""Of slices, whose errors the layers that are left out multiply. A whole model takes longer and needs one less."""


class Timed(NamedTuple):
    """Seconds."""

    first: float
    """Of the first micro-batch of a step, forward and backward."""
    further: float
    """Of each other one, which adds to the gradients that are there."""
    updating: float

    def step(self, micro_batches: int) -> float:
        return self.first + (micro_batches - 1) * self.further + self.updating


def timed(step: Step, device: Device) -> Timed | None:
    """None where even the small models are too large to be made for a plan."""
    layers, few = step.model.num_layers, step.turn
    more = _layers(step, device)
    if cost(step.with_layers(more).model, step.vocab_size).parameters > SLICE_PARAMETERS:
        return None
    if layers <= more:
        return measured((step,), device)[0]
    low, high = measured((step.with_layers(few), step.with_layers(more)), device)
    times = (layers - few) / (more - few)
    return Timed(*(max(first, first + times * (second - first)) for first, second in zip(low, high, strict=True)))


@cache
def measured(steps: tuple[Step, ...], device: Device) -> list[Timed]:
    """Of models that take turns, so that what disturbs one disturbs the others; once a process for the same ones."""
    rows, all_rows = _rows(steps[-1], device), steps[0].rows
    fewer = [replace(steps[0], rows=rows // 2)] if 1 < rows < all_rows else []
    ready = [_Ready(step, device) for step in [*(replace(step, rows=rows) for step in steps), *fewer]]
    found = list[list[Timed]]()
    while len(found) < (TIMES + 1 if len(steps) > 1 else TIMES) and _total(found) < MAX_SECONDS:
        found.append([one.once() for one in ready])
    warm = found[1:] or found
    best = [Timed(*(min(values) for values in zip(*times, strict=True))) for times in zip(*warm, strict=True)]
    low = with_rows(best[0], best[-1] if fewer else None, rows, all_rows)
    share = all_rows / rows
    more = [
        Timed(
            low.first + share * (one.first - best[0].first),
            low.further + share * (one.further - best[0].further),
            one.updating,
        )
        for one in best[1 : len(steps)]
    ]
    return [low, *more]


def with_rows(timed: Timed, half: Timed | None, rows: int, all_rows: int) -> Timed:
    """How long all rows take, by some of them and by half of those; without a half, each row costs the same."""
    if half is None:
        return Timed(timed.first * all_rows / rows, timed.further * all_rows / rows, timed.updating)

    def whole(some: float, fewer: float) -> float:
        one = min(max(some - fewer, 0.0) / (rows - rows // 2), some / rows)
        return some + (all_rows - rows) * one

    return Timed(whole(timed.first, half.first), whole(timed.further, half.further), timed.updating)


def _layers(step: Step, device: Device) -> int:
    """Of the larger model: whole turns, as many as are soon done with all rows, two at least; or all there are."""
    layers, turn = step.model.num_layers, step.turn
    more = min(layers, 2 * turn)
    while more < layers and _is_small(step.with_layers(min(layers, more + turn)), device):
        more = min(layers, more + turn)
    return more


def _is_small(step: Step, device: Device) -> bool:
    parameters = cost(step.model, step.vocab_size).parameters
    return parameters <= SLICE_PARAMETERS and step.rows * _row_seconds(step, device) <= SLICE_SECONDS


def _rows(step: Step, device: Device) -> int:
    """Of a micro-batch: all of them, unless that takes too long."""
    return max(1, min(step.rows, int(SLICE_SECONDS / _row_seconds(step, device))))


def _row_seconds(step: Step, device: Device) -> float:
    """What one row takes at the peak."""
    work = cost(step.model, step.vocab_size).train_flops_per_token * step.model.context
    return work / measured_peak(replace(device, compute_dtype=step.precision))


def _total(rounds: Sequence[Sequence[Timed]]) -> float:
    return sum(sum(one) for times in rounds for one in times)


class _Ready:
    """A model that can make steps."""

    def __init__(self, step: Step, device: Device) -> None:
        self._accumulates, self._device = step.accumulates, replace(device, compute_dtype=step.precision)
        self._model: Transformer = step.load(initialized=True).to(device.place)
        self._optimizers: Optimizers = step.prepare(self._model, self._device)
        ids = torch.randint(step.vocab_size, (step.rows, step.model.context), device=device.place)
        places = torch.arange(step.model.context, device=device.place).expand(step.rows, -1)
        self._batch = Placed(ids, places, None, torch.arange(ids.numel(), device=device.place), ids.flatten())

    def once(self) -> Timed:
        began = self._now()
        self._learn()
        learned = again = self._now()
        if self._accumulates:
            self._learn()
            again = self._now()
        self._optimizers.step(clipping(1.0, total_norm(gradients(self._model))))
        self._optimizers.zero_grad()
        first, updating = learned - began, self._now() - again
        return Timed(first, again - learned if self._accumulates else first, updating)

    def _learn(self) -> None:
        with few_rows_of_the_table(self._model):
            loss, _ = placed_losses(self._model, self._batch, self._device, share=1 / self._batch.ids.numel())
            torch.autograd.backward(loss)

    def _now(self) -> float:
        self._device.synchronize()
        return time.thread_time() if self._device.place.type == "cpu" else time.perf_counter()
