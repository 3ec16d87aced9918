"""
The training loop. There is one, and pretraining and finetuning both call it.

    for each step:
        learning rate -> gradients of all micro-batches -> norm -> guard: fine? -> clip -> update -> hooks

What differs between the two (data, loss mask, which weights train) is decided by the stage, before the loop starts.
Hooks run in the order given, after a step, and at no other time.
"""

from collections.abc import Callable, Iterator
from functools import partial

from bloomery.core.stop import Stop, Terminated
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train import parallel
from bloomery.train.clock import Clock
from bloomery.train.guard import Guard, Skip
from bloomery.train.hooks import Hooks
from bloomery.train.loss import token_losses
from bloomery.train.norms import Norms
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import State

import torch
from torch import Tensor, nn


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
    z_loss: float = 0.0,
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

    A step without supervised tokens, or with trouble that the guard sees, counts, and changes neither a weight nor what
    the optimizers remember. Raises Terminated, between two updates, where the process was asked to stop.
    """
    world, guard, hooks = world or World.alone(), guard or Guard(), hooks or Hooks()
    precision = precision or Precision.decide("auto", device)
    norms, clock, stop = norms or Norms(model, every=0), clock or Clock(), stop or Stop()
    model.train()
    while state.step < steps:
        clock.enter("data")
        batch = next(batches)
        lr = optimizers.set_share(learning_rate_share(state.step + 1))
        clock.enter("forward_backward")
        compute = partial(accumulate_gradients, model, batch, micro_batch, device, world, stop, precision, z_loss)
        loss, tokens, norm = in_range(model, precision, compute)
        clock.enter("optimizer")
        state.step, state.samples = state.step + 1, state.samples + len(batch.ids)
        state.precision = precision.state()
        state.metrics = {"learning_rate": lr, "tokens": tokens}
        if trouble := guard.trouble(state.guard, loss, float(norm)):
            skip = Skip(state.step, trouble, loss, float(norm), batch.samples.tolist())
            if guard.skip(state.guard, skip) and roll_back is not None:
                roll_back(state)
        elif tokens:
            norms.before_update(state.step)
            clip(model, max_norm, norm)
            optimizers.step()
            norms.after_update()
            guard.accept(state.guard, loss, float(norm))
            state.tokens += tokens
            state.metrics |= {"loss": loss, "gradient_norm": float(norm)}
        optimizers.zero_grad()
        clock.enter("hooks")
        hooks.after_step(state)
        if world.any(stop.asked):
            raise Terminated
    clock.enter("rest")


def clip(model: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this norm down to `max_norm`. Those below it are left alone, not multiplied by one."""
    if float(norm) > max_norm:
        parallel.clip(model, max_norm, norm)


def in_range(
    model: nn.Module, precision: Precision, compute: Callable[[], tuple[float, int]]
) -> tuple[float, int, Tensor]:
    """What `compute` gives and the norm of its gradients: again, with a smaller scale, if they left float16."""
    while True:
        loss, tokens = compute()
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
) -> tuple[float, int]:
    """
    Leave in the weights the gradient of the mean loss over every supervised token of the global batch; return the mean
    cross entropy, in nats a token, and the number of those tokens.

    Rank r computes rows r, r + size, r + 2 · size … Each micro-batch adds its sum divided by the count of the global
    batch, so that neither the split nor the ranks matter, and one with few supervised tokens does not weigh too much.
    Raises Terminated between two micro-batches; ranks in company first finish the step together.
    """
    world, precision = world or World.alone(), precision or Precision.decide("auto", device)
    tokens = int((batch.targets != IGNORE).sum())
    total = torch.zeros((), device=device.place)
    for part in parallel.micro_batches(batch, micro_batch, world, model):
        if stop is not None and world.size == 1:
            stop.check()
        loss, entropy = micro_batch_losses(model, part, device, z_loss)
        torch.autograd.backward(precision.scale(loss / max(tokens, 1)))
        total += entropy
    parallel.sum_gradients(model, world)
    precision.unscale(gradients(model))
    return float(world.sum(total)) / max(tokens, 1), tokens


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def micro_batch_loss(model: Transformer, batch: Batch, device: Device) -> Tensor:
    """Sum of the loss over the supervised tokens of a micro-batch, in nats. Zero, with zero gradients, for none."""
    return micro_batch_losses(model, batch, device)[0]


def micro_batch_losses(model: Transformer, batch: Batch, device: Device, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """What is minimized, and the cross entropy alone: see `token_losses`."""
    whole = bool((batch.segments == batch.segments[:, :1]).all())  # known here without asking the device
    ids, positions, segments = (
        None if part is None else torch.from_numpy(part).to(device.place)
        for part in (batch.ids, batch.positions, None if whole else batch.segments)
    )
    flat = torch.from_numpy(batch.targets).flatten()
    supervised = (flat != IGNORE).nonzero().flatten()
    with Precision.decide("auto", device).autocast():
        hidden = model(ids, positions=positions, segments=segments)
    chosen = hidden.flatten(0, 1)[supervised.to(device.place)]
    return token_losses(chosen, model.head.weight, flat[supervised].to(device.place), z_loss)
