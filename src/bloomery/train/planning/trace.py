"""
The memory of a training step, from the step itself: model, loss and optimizer run on fake tensors, and nothing is
allocated. Of a deep model two small ones are run, and what a layer adds between them is added for the others.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model import kernels, products, quantize
from bloomery.train import parallel
from bloomery.train.loop import Placed, few_rows_of_the_table, gradients, placed_losses
from bloomery.train.planning.meter import WORK, Meter, Product
from bloomery.train.planning.needs import Moment
from bloomery.train.planning.step import Step

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


class Traced(NamedTuple):
    """Bytes of tensors, and what a micro-batch and an update ask of the device."""

    loading: int
    """The most while the model is made: on a processor, where weights are there whole before they are frozen."""
    resting: int
    """Weights, and what the optimizer remembers."""
    learning: int
    """The most during the forward and backward pass."""
    updating: int
    """The most while the optimizer works."""
    room: int
    """What libraries of products keep for themselves."""
    products: Counter[Product]
    """Of a micro-batch."""
    moved: int
    """Bytes that its other operations read and write."""
    update_products: Counter[Product]
    update_moved: int
    kept_learning: Counter[str]
    """What `learning` is made of, by kind."""
    kept_updating: Counter[str]

    @property
    def peak(self) -> int:
        return max(self.loading, self.room + max(self.learning, self.updating))

    @property
    def at_peak(self) -> tuple[Moment, dict[str, int]]:
        """When the most is there, and its parts, which add up to it."""
        if self.peak == self.loading:
            return "loading", {"weights": self.loading}
        moment: Moment = "micro-batch" if self.learning >= self.updating else "update"
        kept, most = (
            (self.kept_learning, self.learning) if moment == "micro-batch" else (self.kept_updating, self.updating)
        )
        parts = {kind: size for kind, size in kept.items() if size > 0}
        rest = "activations" if moment == "micro-batch" else "update"
        parts[rest] = parts.get(rest, 0) + most - sum(parts.values())  # what rounding of small models has left
        return moment, parts | {"libraries": self.room}


KERNEL_BYTES = 7 * 2**20 // 10
"""
Of what oneDNN compiles for a product of two bytes a number, of each size and layout, and keeps: 0.5 to 1.0 MiB for 14
of 16, by the memory of a process before and after each (torch 2.13, AMX).
"""


@cache
def trace(step: Step) -> Traced:
    """A step after the first, so that all that the optimizer remembers is there."""
    turns = 2 if step.ranks == 1 else 3  # of two layers, both lie together: the next is on its way
    layers, few, more = step.model.num_layers, turns * step.turn, (turns + 1) * step.turn
    if layers <= more:
        return _traced(step)
    low, high = _traced(step.with_layers(few)), _traced(step.with_layers(more))
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


def _traced(step: Step) -> Traced:
    device = Device(
        place=torch.device("cpu"),
        vendor="cpu",
        name="nothing",
        memory_bytes=0,
        compute_dtype=step.precision,
        backend="gloo",
    )
    counting = Meter(on_processor=step.on_processor, vocab_size=step.vocab_size)
    with _company(step.ranks) as mesh, _apart(step.on_processor) as room, FakeTensorMode(), counting as meter:
        model = step.load()
        loading = meter.peak if step.on_processor else 0
        if mesh is not None:
            parallel.shard(model, World(0, step.ranks), device, mesh)
        optimizers = step.prepare(model, device)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.register_post_accumulate_grad_hook(partial(_learned, meter))  # type: ignore[no-untyped-call]
            weight.grad = torch.empty_like(weight)
        meter.making = "optimizer"
        optimizers.step()
        optimizers.zero_grad()
        resting, meter.making = meter.live, WORK
        ids = torch.zeros((step.rows, step.model.context), dtype=torch.int64)
        batch = Placed(ids, ids.clone(), None, ids.flatten().clone(), ids.flatten().clone())
        total = torch.zeros(())
        if step.accumulates:
            for weight in trained:
                weight.grad = torch.empty_like(weight)
                meter.count_as("gradients", weight.grad)
        meter.restart()
        with few_rows_of_the_table(model):
            loss, entropy = placed_losses(model, batch, device, share=1 / ids.numel())
            torch.autograd.backward(loss)
        total += entropy
        del loss, entropy
        learning, made, moved, during = meter.peak, meter.products.copy(), meter.moved, meter.at_peak
        meter.restart()
        meter.making = "update"
        norm = nn.utils.get_total_norm(gradients(model))
        nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        optimizers.step()
        kept = sum(room) + (KERNEL_BYTES * len(meter.kinds) if step.on_processor else 0)
        most = loading, resting, learning, meter.peak, kept
        return Traced(*most, made, moved, meter.products.copy(), meter.moved, during, meter.at_peak)


@contextmanager
def _company(ranks: int) -> Iterator[DeviceMesh | None]:
    """Other ranks that nobody hears: what they would say has the right size and no meaning. None for one alone."""
    if ranks == 1:
        yield None
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        torch.distributed.destroy_process_group()


def _learned(meter: Meter, weight: torch.Tensor) -> None:
    assert weight.grad is not None
    meter.count_as("gradients", weight.grad)


@contextmanager
def _apart(on_processor: bool) -> Iterator[list[int]]:
    """Nothing without numbers is kept for later, nothing with numbers taken from before. Gives what `ROOM` comes to."""
    room = [0, 0, 0]
    elsewhere, taken = kernels.ELSEWHERE.set(not on_processor), products.ROOM.set(room)
    quantize.forget()
    try:
        yield room
    finally:
        quantize.forget()
        products.ROOM.reset(taken)
        kernels.ELSEWHERE.reset(elsewhere)
