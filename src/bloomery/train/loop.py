"""
The training loop. There is one, and pretraining and finetuning both call it.

    for each step:
        learning rate -> gradients of all micro-batches -> clip -> finite? -> update -> hooks

What differs between the two (data, loss mask, which weights train) is decided by the stage, before the loop starts.
Hooks run in the order given, after a step, and at no other time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bloomery.core.errors import BloomeryError
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.loss import token_loss
from bloomery.train.optim import Optimizers

import torch
from torch import Tensor, nn


@dataclass
class State:
    """All that changes while training, besides weights and optimizer: so all that a resume needs besides them."""

    step: int = 0
    samples: int = 0
    """Seen so far; the number of the next sample, and the loader's whole state."""
    tokens: int = 0
    """Supervised so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step: loss in nats a token, gradient norm before clipping, learning rate, tokens."""


@dataclass(frozen=True)
class Hook:
    """Something to do after steps: `when(state)` says after which, `run(state)` does it."""

    when: Callable[[State], bool]
    run: Callable[[State], None]


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
    hooks: Sequence[Hook] = (),
) -> None:
    """
    Train from `state.step` to `steps`, updating `state` in place.

    Raises BloomeryError, before the update, for a loss or gradient that is not finite.
    """
    model.train()
    while state.step < steps:
        batch = next(batches)
        lr = optimizers.set_share(learning_rate_share(state.step + 1))
        loss, tokens = accumulate_gradients(model, batch, micro_batch, device)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise BloomeryError(
                f"the loss is {loss} and the gradient norm {norm}; no weight was changed",
                where=f"step {state.step + 1}, samples {', '.join(map(str, batch.samples[:8].tolist()))} …",
                cure="Lower the learning rate, or train in float32 (precision=float32).",
            )
        optimizers.step()
        optimizers.zero_grad()
        state.step += 1
        state.samples += len(batch.ids)
        state.tokens += tokens
        state.metrics = {"loss": loss, "gradient_norm": norm, "learning_rate": lr, "tokens": tokens}
        for hook in hooks:
            if hook.when(state):
                hook.run(state)


def accumulate_gradients(model: Transformer, batch: Batch, micro_batch: int, device: Device) -> tuple[float, int]:
    """
    Leave in the weights the gradient of the mean loss over every supervised token of the batch; return that loss, in
    nats a token, and the number of those tokens.

    Each micro-batch adds its sum divided by the count of the whole batch, so that how a batch is split does not
    matter, and one with few supervised tokens does not weigh too much.
    """
    tokens = int((batch.targets != IGNORE).sum())
    total = torch.zeros((), device=device.place)
    for part in batch.split(micro_batch):
        loss = micro_batch_loss(model, part, device)
        torch.autograd.backward(loss / max(tokens, 1))
        total += loss.detach()
    return float(total) / max(tokens, 1), tokens


def micro_batch_loss(model: Transformer, batch: Batch, device: Device) -> Tensor:
    """Sum of the loss over the supervised tokens of a micro-batch, in nats. Zero, with zero gradients, for none."""
    ids, positions, segments = (
        torch.from_numpy(part).to(device.place) for part in (batch.ids, batch.positions, batch.segments)
    )
    flat = torch.from_numpy(batch.targets).flatten()
    supervised = (flat != IGNORE).nonzero().flatten()
    with torch.autocast(device.place.type, dtype=device.compute_dtype, enabled=device.compute_dtype != torch.float32):
        hidden = model(ids, positions=positions, segments=segments)
    chosen = hidden.flatten(0, 1)[supervised.to(device.place)]
    return token_loss(chosen, model.head.weight, flat[supervised].to(device.place))
