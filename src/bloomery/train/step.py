"""
The gradients of one step: micro-batches, the loss function, retries, and the gradient norm.

    for each micro-batch:  forward pass -> sum of losses / count of the global batch -> backward pass
    then                   sum over ranks -> gradient norm

`forward_backward` is the only place with a loop over micro-batches. If memory runs out, it computes the same global
batch again with half as many rows at once. If float16 overflows, it computes the batch again with another loss scale.

The stage decides the loss function, if that is not the cross entropy of the next token. A loss function is a sum of
losses over a global batch, and a divisor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import HardwareError
from bloomery.core.log import info
from bloomery.core.signals import StopRequest
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train import fsdp
from bloomery.train.loss import token_losses
from bloomery.train.precision import Precision

import torch
from torch import Tensor, nn

T = TypeVar("T")


@runtime_checkable
class LossFunction(Protocol):
    """`CausalLMLoss` is the plain one. For each global batch: `begin`, `losses` of its parts, `end`, `told`."""

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        """
        What the losses of a global batch are divided by, the same on all ranks; what is needed of the whole of it is
        computed here. A batch may be begun again: where memory or the range of float16 was not enough.
        """
        ...

    def losses(self, model: Transformer, part: Batch, device: Device, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """Of some rows of it: the sum that is minimized, times `share`; the sum that is reported, without gradient."""
        ...

    def end(self, world: World) -> None:
        """All parts are done. Ranks add up here what they tell."""
        ...

    def told(self) -> dict[str, float]:
        """Numbers of that global batch, by name."""
        ...

    def watched(self, loss: float) -> float:
        """What the guard looks at, which takes logarithms: a number above zero whose size tells of trouble."""
        ...


class Gradients(NamedTuple):
    """What the backward passes of a global batch left in the weights, in numbers."""

    loss: float
    """The mean over what the loss function counts; for the plain one, the cross entropy in nats a token."""
    num_tokens: int
    """Supervised tokens."""
    norm: Tensor
    """Of all gradients together, before clipping."""
    rows: int
    """That went through the model at once."""


def forward_backward(
    model: Transformer,
    batch: Batch,
    rows: int,
    *,
    device: Device,
    precision: Precision,
    loss_function: LossFunction,
    world: World,
    stop: StopRequest,
) -> Gradients:
    """
    Leave the gradient of a global batch in the weights, `rows` at once, or as many as fit. Raises HardwareError where
    one row is too much, and Terminated between two micro-batches.
    """
    work = partial(accumulate_gradients, model, batch, device=device, world=world, stop=stop, objective=loss_function)
    (loss, num_tokens, norm), rows = retry_on_oom(
        model, world, rows, partial(retry_on_overflow, model, precision, work)
    )
    return Gradients(loss, num_tokens, norm, rows)


def clipping(max_norm: float, norm: Tensor) -> float:
    """What to multiply gradients of this norm with, so that it is at most `max_norm`: never more than one."""
    return min(1.0, max_norm / (float(norm) + 1e-6))


def retry_on_oom(model: nn.Module, world: World, rows: int, compute: Callable[[int], T]) -> tuple[T, int]:
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
                raise HardwareError(what, hint=LESS_MEMORY) from None
        model.zero_grad(set_to_none=True)  # outside of the handler, whose error holds on to all tensors of the step
        devices.give_back_memory()
        rows = (rows + 1) // 2
        info(f"memory ran out: from this step on {rows} rows go through the model at once, of the same batch", "yellow")


LESS_MEMORY = 'Say a smaller micro_batch_tokens or recompute="block"; `bloomery plan RECIPE` says what fits.'


def retry_on_overflow(
    model: nn.Module, precision: Precision, compute: Callable[..., tuple[float, int]], rows: int
) -> tuple[float, int, Tensor]:
    """What `compute` gives and the norm of its gradients: again, with another scale, if they left float16."""
    while True:
        loss, tokens = compute(micro_batch=rows, precision=precision)
        norm = fsdp.gradient_norm(gradients(model))
        if not precision.overflowed(loss, float(norm)):
            return loss, tokens, norm
        model.zero_grad(set_to_none=True)


def accumulate_gradients(
    model: Transformer,
    batch: Batch,
    micro_batch: int,
    device: Device,
    world: World | None = None,
    stop: StopRequest | None = None,
    precision: Precision | None = None,
    z_loss: float = 0.0,
    objective: LossFunction | None = None,
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
    objective = objective or CausalLMLoss(z_loss)
    tokens = int((batch.targets != IGNORE).sum())
    count = max(objective.begin(model, batch, micro_batch, device, world), 1)
    total = torch.zeros((), device=device.place)
    for part in fsdp.micro_batches(batch, micro_batch, world, model):
        if stop is not None and world.size == 1:
            stop.check()
        with sparse_embedding_grad(model):
            loss, reported = objective.losses(model, part, device, precision.factor / count)
            torch.autograd.backward(loss)
        total += reported
    fsdp.sum_gradients(model, world)
    precision.unscale(gradients(model))
    objective.end(world)
    return float(world.sum(total)) / count, tokens


@dataclass(frozen=True)
class CausalLMLoss:
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
def sparse_embedding_grad(model: Transformer) -> Iterator[None]:
    """
    Within, the rows of a tied embedding that tokens took get their gradient after the backward pass, which gives the
    table that of the head. Zeros for all other rows, and the sum of two such tables, take as long as some layers.
    """
    table, taken = model.embed.weight, list[tuple[Tensor, Tensor]]()
    elsewhere = table.device.type != "cpu" or cpu.ELSEWHERE.get()
    if model.head.weight is not table or type(table) not in cpu.PLAIN or elsewhere:
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
