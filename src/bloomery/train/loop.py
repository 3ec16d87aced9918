"""
The training loop. There is one, and pretraining and finetuning both call it.

    for each step:
        learning rate -> gradients of all micro-batches -> norm -> guard: fine? -> clip -> update -> hooks

What differs between the two (data, loss mask, which weights train) is decided by the stage, before the loop starts; so
is what is minimized, where that is not the cross entropy of the next token.
Hooks run in the order given, after a step, and at no other time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from bloomery.core.errors import HardwareError
from bloomery.core.log import say
from bloomery.core.stop import Stop, Terminated
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model import kernels
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train import parallel
from bloomery.train.clock import Clock
from bloomery.train.guard import Guard, Skip
from bloomery.train.hooks import Hooks
from bloomery.train.loss import token_losses
from bloomery.train.norms import Norms
from bloomery.train.objective import Objective
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import State

import torch
from torch import Tensor, nn

T = TypeVar("T")


def train(
    model: Transformer,
    optimizers: Optimizers,
    batches: Iterator[Batch],
    *,
    state: State,
    steps: int,
    micro_batch: int,
    learning_rate_share: Callable[[int], float],
    max_norm: float,
    device: Device,
    precision: Precision | None = None,
    objective: Objective | None = None,
    world: World | None = None,
    guard: Guard | None = None,
    roll_back: Callable[[State], None] | None = None,
    hooks: Hooks | None = None,
    norms: Norms | None = None,
    clock: Clock | None = None,
    stop: Stop | None = None,
) -> None:
    """
    Train from `state.step` to `steps`, updating `state` in place. Every rank calls it with the same global batches.
    Where memory runs out, the same global batch is computed again with half as many rows at once, and so are the next.
    A step without supervised tokens, or with trouble that the guard sees, counts, and changes neither a weight nor what
    the optimizers remember. Raises Terminated, between two updates, where the process was asked to stop.
    """
    world, guard, hooks = world or World.alone(), guard or Guard(), hooks or Hooks()
    precision, norms = precision or Precision.decide("auto", device), norms or Norms(model, every=0)
    clock, stop, objective = clock or Clock(), stop or Stop(), objective or NextToken()
    model.train()
    rows = min(micro_batch, state.rows or micro_batch)
    heed(stop, world)  # what is due at this step was left out on the way here, and comes again
    while state.step < steps:
        clock.enter("data")
        batch = next(batches)
        lr = optimizers.set_share(learning_rate_share(state.step + 1))
        clock.enter("forward_backward")
        work = partial(accumulate_gradients, model, batch, device=device, world=world, stop=stop, objective=objective)
        (loss, tokens, norm), rows = in_memory(model, world, rows, partial(in_range, model, precision, work))
        clock.enter("optimizer")
        state.step, state.samples, state.precision = state.step + 1, state.samples + len(batch.ids), precision.state()
        state.rows, state.metrics = rows if rows < micro_batch else 0, {"learning_rate": lr, "tokens": tokens}
        if state.step == 1 and math.isfinite(loss):
            state.first_loss = loss
        if trouble := guard.trouble(state.guard, objective.watched(loss), float(norm)):
            skip = Skip(state.step, trouble, loss, float(norm), batch.samples.tolist())
            if guard.skip(state.guard, skip) and roll_back is not None:
                roll_back(state)
        elif tokens:
            norms.before_update(state.step)
            optimizers.step(clipping(max_norm, norm))
            norms.after_update()
            guard.accept(state.guard, objective.watched(loss), float(norm))
            state.tokens += tokens
            state.metrics |= {"loss": loss, "gradient_norm": float(norm), **objective.told(), **precision.told()}
        optimizers.zero_grad()
        clock.enter("hooks")
        hooks.after_step(state)
        heed(stop, world)
    clock.enter("rest")


def heed(stop: Stop, world: World) -> None:
    """Raises Terminated on all ranks where one of them was asked to stop."""
    if world.any(stop.asked):
        raise Terminated(stop.code)


def clipping(max_norm: float, norm: Tensor) -> float:
    """What to multiply gradients of this norm with, so that it is at most `max_norm`: never more than one."""
    return min(1.0, max_norm / (float(norm) + 1e-6))


def in_memory(model: nn.Module, world: World, rows: int, compute: Callable[[int], T]) -> tuple[T, int]:
    """
    What `compute(rows)` gives, and with how many rows; where memory runs out, half as many.

    Raises HardwareError where one row is too much, and for ranks in company, which would wait for each other.
    """
    while True:
        try:
            return compute(rows), rows
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            if rows == 1 or world.size > 1:
                what = f"{rows} rows at once are more than the memory holds: {str(error).splitlines()[0]}"
                raise HardwareError(what, cure=LESS_MEMORY) from None
        model.zero_grad(set_to_none=True)  # outside of the handler, whose error holds on to all tensors of the step
        devices.give_back_memory()
        rows = (rows + 1) // 2
        say(f"memory ran out: from this step on {rows} rows go through the model at once, of the same batch", "yellow")


LESS_MEMORY = 'Say a smaller micro_batch_tokens or recompute="block"; `bloomery plan RECIPE` says what fits.'


def in_range(
    model: nn.Module, precision: Precision, compute: Callable[..., tuple[float, int]], rows: int
) -> tuple[float, int, Tensor]:
    """What `compute` gives and the norm of its gradients: again, with another scale, if they left float16."""
    while True:
        loss, tokens = compute(micro_batch=rows, precision=precision)
        norm = parallel.gradient_norm(gradients(model))
        if not precision.overflowed(loss, float(norm)):
            return loss, tokens, norm
        model.zero_grad(set_to_none=True)


def accumulate_gradients(
    model: Transformer,
    batch: Batch,
    micro_batch: int,
    device: Device,
    world: World | None = None,
    stop: Stop | None = None,
    precision: Precision | None = None,
    z_loss: float = 0.0,
    objective: Objective | None = None,
) -> tuple[float, int]:
    """
    Leave in the weights the gradient of the mean loss over every supervised token of the global batch; return the mean
    cross entropy, in nats a token, and the number of those tokens. With another objective it is a mean over whatever
    that one counts.

    Rank r computes rows r, r + size, r + 2 · size … Each micro-batch adds its sum divided by the count of the global
    batch, so that neither the split nor the ranks matter, and one with few supervised tokens does not weigh too much.
    Raises Terminated between two micro-batches; ranks in company first finish the step together.
    """
    world, precision = world or World.alone(), precision or Precision.decide("auto", device)
    objective = objective or NextToken(z_loss)
    tokens = int((batch.targets != IGNORE).sum())
    count = max(objective.begin(model, batch, micro_batch, device, world), 1)
    total = torch.zeros((), device=device.place)
    for part in parallel.micro_batches(batch, micro_batch, world, model):
        if stop is not None and world.size == 1:
            stop.check()
        with few_rows_of_the_table(model):
            loss, reported = objective.losses(model, part, device, precision.factor / count)
            torch.autograd.backward(loss)
        total += reported
    parallel.sum_gradients(model, world)
    precision.unscale(gradients(model))
    objective.end(world)
    return float(world.sum(total)) / count, tokens


@dataclass(frozen=True)
class NextToken:
    """The cross entropy of the supervised tokens."""

    z_loss: float = 0.0

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        return int((batch.targets != IGNORE).sum())

    def losses(self, model: Transformer, part: Batch, device: Device, share: float = 1.0) -> tuple[Tensor, Tensor]:
        return micro_batch_losses(model, part, device, self.z_loss, share)

    def end(self, world: World) -> None: ...

    def told(self) -> dict[str, float]:
        return {}

    def watched(self, loss: float) -> float:
        return loss


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def micro_batch_loss(model: Transformer, batch: Batch, device: Device) -> Tensor:
    """Sum of the loss over the supervised tokens of a micro-batch, in nats. Zero, with zero gradients, for none."""
    return micro_batch_losses(model, batch, device)[0]


def micro_batch_losses(
    model: Transformer, batch: Batch, device: Device, z_loss: float = 0.0, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What is minimized, times `share`, and the cross entropy alone: see `token_losses`."""
    whole = bool((batch.segments == batch.segments[:, :1]).all())  # known here without asking the device
    ids, positions, segments = (
        None if part is None else torch.from_numpy(part).to(device.place)
        for part in (batch.ids, batch.positions, None if whole else batch.segments)
    )
    assert ids is not None
    flat = torch.from_numpy(batch.targets).flatten()
    supervised = (flat != IGNORE).nonzero().flatten()
    placed = Placed(ids, positions, segments, supervised.to(device.place), flat[supervised].to(device.place))
    return placed_losses(model, placed, device, z_loss, share)


class Placed(NamedTuple):
    """A micro-batch where the model is."""

    ids: Tensor
    positions: Tensor | None
    segments: Tensor | None
    supervised: Tensor
    """Places of the tokens whose targets count."""
    targets: Tensor
    """Of those."""


def placed_losses(
    model: Transformer, batch: Placed, device: Device, z_loss: float = 0.0, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `micro_batch_losses`, of what is on the device."""
    with Precision.decide("auto", device).autocast():
        hidden = model(batch.ids, positions=batch.positions, segments=batch.segments).flatten(0, 1)
    chosen = hidden if len(batch.supervised) == len(hidden) else hidden[batch.supervised]
    return token_losses(chosen, model.head.weight, batch.targets, z_loss, share)


@contextmanager
def few_rows_of_the_table(model: Transformer) -> Iterator[None]:
    """
    Within, the rows of a tied embedding that tokens took get their gradient after the backward pass, which gives the
    table that of the head. Zeros for all other rows, and the sum of two such tables, take as long as some layers.
    """
    table, taken = model.embed.weight, list[tuple[Tensor, Tensor]]()
    elsewhere = table.device.type != "cpu" or kernels.ELSEWHERE.get()
    if model.head.weight is not table or type(table) not in kernels.PLAIN or elsewhere:
        yield
        return

    def take(_: nn.Module, ids: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        taken.append((ids[0].flatten(), rows.detach().requires_grad_(rows.requires_grad)))
        return taken[-1][1]

    hook = model.embed.register_forward_hook(take)
    try:
        yield
    finally:
        hook.remove()
    for ids, rows in taken:
        if table.grad is not None and rows.grad is not None:
            table.grad.index_add_(0, ids, rows.grad.flatten(0, -2))
