"""
The training loop. There is one, and pretraining and finetuning both call it.

    for each step:
        learning rate -> gradients of all micro-batches -> norm -> guard: fine? -> clip -> update -> hooks

What differs between the two (data, loss mask, which weights train) is decided by the stage, before the loop starts.
Hooks run in the order given, after a step, and at no other time.
"""

from collections.abc import Callable, Iterator

from bloomery.core.stop import Stop, Terminated
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.clock import Clock
from bloomery.train.guard import Guard, Skip
from bloomery.train.hooks import Hooks
from bloomery.train.loss import token_loss
from bloomery.train.norms import Norms
from bloomery.train.optim import Optimizers
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

    A step without supervised tokens, or with trouble that the guard sees, counts, and changes no weight and nothing
    that the optimizers remember. Raises Terminated where the process was asked to stop: between two updates, so that
    `state` is that of the weights.
    """
    world, guard, hooks = world or World.alone(), guard or Guard(), hooks or Hooks()
    norms, clock, stop = norms or Norms(model, every=0), clock or Clock(), stop or Stop()
    model.train()
    while state.step < steps:
        clock.enter("data")
        batch = next(batches)
        lr = optimizers.set_share(learning_rate_share(state.step + 1))
        clock.enter("forward_backward")
        loss, tokens = accumulate_gradients(model, batch, micro_batch, device, world, stop)
        norm = nn.utils.get_total_norm(gradients(model))
        clock.enter("optimizer")
        state.step += 1
        state.samples += len(batch.ids)
        state.metrics = {"learning_rate": lr, "tokens": tokens}
        if trouble := guard.trouble(state.guard, loss, float(norm)):
            skip = Skip(state.step, trouble, loss, float(norm), batch.samples.tolist())
            if guard.skip(state.guard, skip) and roll_back is not None:
                roll_back(state)
        elif tokens:
            norms.before_update(state.step)
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
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


def accumulate_gradients(
    model: Transformer,
    batch: Batch,
    micro_batch: int,
    device: Device,
    world: World | None = None,
    stop: Stop | None = None,
) -> tuple[float, int]:
    """
    Leave in the weights the gradient of the mean loss over every supervised token of the global batch; return that
    loss, in nats a token, and the number of those tokens.

    Rank r computes rows r, r + size, r + 2 · size … Each micro-batch adds its sum divided by the count of the global
    batch, so that neither the split nor the ranks matter, and one with few supervised tokens does not weigh too much.
    Raises Terminated between two micro-batches; ranks in company first finish the step together.
    """
    world = world or World.alone()
    tokens = int((batch.targets != IGNORE).sum())
    total = torch.zeros((), device=device.place)
    for part in batch.of_rank(world.rank, world.size).split(micro_batch):
        if stop is not None and world.size == 1:
            stop.check()
        loss = micro_batch_loss(model, part, device)
        torch.autograd.backward(loss / max(tokens, 1))
        total += loss.detach()
    if world.size > 1:
        for weight in model.parameters():
            if weight.requires_grad:  # a rank without rows has no gradients, and the others wait for it
                weight.grad = world.sum(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return float(world.sum(total)) / max(tokens, 1), tokens


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def micro_batch_loss(model: Transformer, batch: Batch, device: Device) -> Tensor:
    """Sum of the loss over the supervised tokens of a micro-batch, in nats. Zero, with zero gradients, for none."""
    whole = bool((batch.segments == batch.segments[:, :1]).all())  # known here without asking the device
    ids, positions, segments = (
        None if part is None else torch.from_numpy(part).to(device.place)
        for part in (batch.ids, batch.positions, None if whole else batch.segments)
    )
    flat = torch.from_numpy(batch.targets).flatten()
    supervised = (flat != IGNORE).nonzero().flatten()
    with torch.autocast(device.place.type, dtype=device.compute_dtype, enabled=device.compute_dtype != torch.float32):
        hidden = model(ids, positions=positions, segments=segments)
    chosen = hidden.flatten(0, 1)[supervised.to(device.place)]
    return token_loss(chosen, model.head.weight, flat[supervised].to(device.place))
