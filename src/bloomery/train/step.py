"""
The training loop and its step: micro-batches, the loss function, retries, the gradient norm, and the update.

    for each micro-batch:  forward pass -> sum of losses / count of the global batch -> backward pass
    then                   sum over ranks -> gradient norm -> guard: fine? -> clip -> update -> hooks

Only `forward_backward` has a loop over micro-batches. If memory runs out, it computes the same global
batch again with half as many rows at once. If float16 overflows, it computes the batch again with another loss scale.

The stage decides the loss function, if that is not the cross entropy of the next token. A loss function is a sum of
losses over a global batch, and a divisor.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.errors import HardwareError
from bloomery.core.log import counted, info
from bloomery.core.signals import StopRequest, Terminated
from bloomery.hw import device as devices
from bloomery.hw.distributed import World, exchanging
from bloomery.model.attention import segment_bounds
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train import collectives
from bloomery.train.collectives import Norms, gradient_norm
from bloomery.train.loss import token_losses
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import Hooks, LeftOthersError, PhaseTimer, SkippedStep, SpikeGuard, State

import torch
from torch import Tensor, nn

T = TypeVar("T")


class BatchTotals(NamedTuple):
    """What a loss function knows of a global batch before any of it goes through the model."""

    divisor: int
    """What the losses are divided by, the same on all ranks."""
    metrics_divisor: int = 0
    """What sums of metrics are divided by."""
    metrics: Mapping[str, float] = {}
    """Numbers by name that are known already."""


class LossSums(NamedTuple):
    """Of some rows of a global batch."""

    loss: Tensor
    """What is minimized, times the scale that was asked for."""
    reported: Tensor
    """What is reported, without gradient and scale."""
    metrics: Tensor | None = None
    """Sums in the order of `LossFunction.metrics`, on the CPU; None where there are none."""


@runtime_checkable
class LossFunction(Protocol):
    """
    Losses that are summed over a global batch, and divided by a number that the batch tells. `CausalLMLoss` is the
    plain one. It has no state: a batch may be computed again, where memory or the range of float16 was not enough.
    """

    metrics: ClassVar[tuple[str, ...]]
    """Names of further numbers, each a mean over the global batch."""
    positive: ClassVar[bool]
    """Whether its size tells of trouble. A loss around zero does only where it is not finite."""

    def totals(self, batch: Batch) -> BatchTotals: ...

    def micro_batches(self, share: Batch, size: int, precision: Precision) -> list[Batch]:
        """The rows of a rank in micro-batches, each with no more positions than `size` rows of the greatest length."""
        ...

    def losses(self, model: Transformer, micro_batch: Batch, precision: Precision, scale: float = 1.0) -> LossSums: ...

    def fullest(self, batch: Batch, precision: Precision) -> Batch:
        """The batch as a trial of memory needs it: with as many tokens as its rows may ever have."""
        ...


class BatchLoss(NamedTuple):
    """What came of a global batch, whose gradient is in the weights."""

    loss: float
    """The mean over what the loss function counts; for the plain one, the cross entropy in nats per token."""
    num_tokens: int
    """Supervised tokens."""
    metrics: dict[str, float]
    own_sum: Tensor
    """The sum of losses over this rank's sequences."""


class Gradients(NamedTuple):
    """What the backward passes of a global batch left in the weights, in numbers."""

    loss: float
    num_tokens: int
    metrics: dict[str, float]
    own_sum: Tensor
    norm: Tensor
    """Of all gradients together, before clipping."""
    rows: int
    """That went through the model at once."""


def forward_backward(
    model: Transformer,
    batch: Batch,
    rows: int,
    *,
    precision: Precision,
    loss_function: LossFunction,
    world: World,
    stop: StopRequest,
) -> Gradients:
    """
    Leave the gradient of a global batch in the weights, `rows` at once, or as many as fit. Raises HardwareError where
    one row is too much, and Terminated between two micro-batches.
    """

    def compute(rows: int) -> tuple[BatchLoss, Tensor]:
        work = partial(accumulate_gradients, model, batch, rows, precision, loss_function, world, stop)
        return retry_on_overflow(model, precision, work)

    (batch_loss, norm), rows = retry_on_oom(model, world, rows, compute)
    return Gradients(*batch_loss, norm, rows)


def clipping(max_grad_norm: float, norm: Tensor) -> float:
    """What to multiply gradients of this norm with, so that it is at most `max_grad_norm`: never more than one."""
    return min(1.0, max_grad_norm / (float(norm) + 1e-6))


def retry_on_oom(model: nn.Module, world: World, rows: int, compute: Callable[[int], T]) -> tuple[T, int]:
    """
    What `compute(rows)` gives, and with how many rows; where memory runs out, half as many.

    Several ranks try again together, where all of them know that memory ran out on one. Raises HardwareError where one
    row is too much, and for ranks of which one ran out where the others wait for it.
    """
    while True:
        try:
            return compute(rows), rows
        except RuntimeError as error:
            agreed = isinstance(error, AgreedOutOfMemoryError)
            if not (agreed or devices.is_out_of_memory(error)):
                raise
            apart = collectives.is_sharded(model)
            if rows == 1 or apart or (world.size > 1 and not agreed):
                what = f"memory is too small for {counted(rows, 'sequence')} at once: {str(error).splitlines()[0]}"
                raise (LeftOthersError if apart else HardwareError)(what, hint=LESS_MEMORY) from None
        model.zero_grad(set_to_none=True)  # outside of the handler, whose error holds on to all tensors of the step
        devices.give_back_memory()
        rows = (rows + 1) // 2
        info(f"memory ran out: from now on, {rows} sequences go through the model at once, of the same batch", "yellow")


class AgreedOutOfMemoryError(RuntimeError):
    """Memory ran out on at least one rank, and all ranks know it."""


LESS_MEMORY = (
    'Set a smaller micro_batch_tokens or activation_checkpointing="full"; `bloomery plan RECIPE` says what fits.'
)


def retry_on_overflow(
    model: nn.Module, precision: Precision, compute: Callable[[], BatchLoss]
) -> tuple[BatchLoss, Tensor]:
    """What `compute` gives and the norm of its gradients: again, with another scale, if they left float16."""
    while True:
        batch_loss = compute()
        norm = gradient_norm(gradients(model))
        if not precision.overflowed(batch_loss.loss, float(norm)):
            return batch_loss, norm
        model.zero_grad(set_to_none=True)


def accumulate_gradients(
    model: Transformer,
    batch: Batch,
    micro_batch: int,
    precision: Precision,
    loss_function: LossFunction | None = None,
    world: World | None = None,
    stop: StopRequest | None = None,
) -> BatchLoss:
    """
    Leave in the weights the gradient of the mean loss over the global batch. Without a loss function it is the cross
    entropy of every supervised token.

    Rank r computes the sequences r, r + size, r + 2 · size, and so on. Each micro-batch adds its sum divided by the
    count of the global batch. So neither the split nor the ranks matter, and a micro-batch with few supervised tokens
    does not weigh too much. Raises Terminated between two micro-batches; several ranks first finish the step together.
    Raises AgreedOutOfMemoryError on all ranks if memory runs out on one, unless they hold parts of the model.
    """
    world, loss_function = world or World.alone(), loss_function or CausalLMLoss()
    totals = loss_function.totals(batch)
    count = max(totals.divisor, 1)
    total, metrics = torch.zeros((), device=precision.device.torch_device), torch.zeros(len(loss_function.metrics))
    split = partial(loss_function.micro_batches, precision=precision)
    parts = collectives.micro_batches(batch, micro_batch, world, model, split)
    same = world.size // collectives.data_rank(model, world)[1]  # ranks with the same rows
    overlapped, failure = precision.device.is_gpu, ""
    sums: LossSums | None = None
    with collectives.GradientSums(model, world, overlapped=overlapped) as gradient_sums:
        try:
            for number, rows in enumerate(parts, 1):
                if stop is not None and world.size == 1:
                    stop.check()
                if number == len(parts):
                    gradient_sums.begin()
                with sparse_embedding_grad(model):
                    sums = loss_function.losses(model, rows, precision, precision.factor / count)
                    torch.autograd.backward(sums.loss)
                total += sums.reported
                if sums.metrics is not None:
                    metrics += sums.metrics
                sums = None
        except RuntimeError as error:
            if world.size == 1 or collectives.is_sharded(model) or not devices.is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0]
        if failure:  # outside of the handler, whose error holds on to all tensors of the micro-batch
            sums = None  # and so does its loss
            model.zero_grad(set_to_none=True)
            devices.give_back_memory()
        if gradient_sums.finish(bool(failure)):
            raise AgreedOutOfMemoryError(failure or "memory ran out on another rank")
    precision.unscale(gradients(model))
    means, own_sum = dict(totals.metrics), total.clone()
    if loss_function.metrics:
        means |= mean_metrics(loss_function, world.sum(metrics) / same, totals.metrics_divisor)
    loss = float(world.sum(total)) / same / count
    return BatchLoss(loss, int((batch.targets != IGNORE).sum()), means, own_sum)


def mean_metrics(loss_function: LossFunction, sums: Tensor, count: int) -> dict[str, float]:
    return {name: value / max(count, 1) for name, value in zip(loss_function.metrics, sums.tolist(), strict=True)}


@dataclass(frozen=True)
class CausalLMLoss:
    """The cross entropy of the supervised tokens."""

    z_loss: float = 0.0
    metrics: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[bool] = True

    def totals(self, batch: Batch) -> BatchTotals:
        return BatchTotals(int((batch.targets != IGNORE).sum()))

    def micro_batches(self, share: Batch, size: int, precision: Precision) -> list[Batch]:
        return share.split(size)

    def losses(self, model: Transformer, micro_batch: Batch, precision: Precision, scale: float = 1.0) -> LossSums:
        return LossSums(*micro_batch_losses(model, micro_batch, precision, self.z_loss, scale))

    def fullest(self, batch: Batch, precision: Precision) -> Batch:
        return batch


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def micro_batch_loss(model: Transformer, batch: Batch, precision: Precision) -> Tensor:
    """Sum of the loss over the supervised tokens of a micro-batch, in nats. Zero, with zero gradients, for none."""
    return micro_batch_losses(model, batch, precision)[0]


def micro_batch_losses(
    model: Transformer, batch: Batch, precision: Precision, z_loss: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What is minimized, times `scale`, and the cross entropy alone: see `token_losses`."""
    return placed_losses(model, placed(batch, precision.device.torch_device), precision, z_loss, scale)


def placed(batch: Batch, device: torch.device) -> "Placed":
    """A micro-batch on a device. What depends on its numbers is found out here, without asking the device."""
    whole = bool((batch.segments == batch.segments[:, :1]).all())
    arrays = [batch.ids, batch.positions] if whole else [batch.ids, batch.positions, batch.segments]
    by_bounds = devices.is_gpu(device) and devices.may_attend("varlen")
    bounds = segment_bounds(batch.segments) if by_bounds and not whole else None
    flat = torch.from_numpy(batch.targets).flatten()
    supervised = (flat != IGNORE).nonzero().flatten()
    last = [] if bounds is None else [torch.from_numpy(bounds)]
    numbers = [supervised, flat[supervised], *map(torch.from_numpy, arrays), *last]
    supervised, targets, ids, positions, *rest = devices.staged(numbers, device)
    segments = None if whole else rest[0]
    return Placed(ids, positions, segments, supervised, targets, None if bounds is None else rest[1].int())


class Placed(NamedTuple):
    """A micro-batch where the model is."""

    ids: Tensor
    positions: Tensor | None
    segments: Tensor | None
    supervised: Tensor
    """Places of the tokens whose targets count."""
    targets: Tensor
    """Of those."""
    bounds: Tensor | None = None
    """Of segments, where a GPU computes: see `attention.segment_bounds`."""


def row_losses(model: Transformer, batch: Batch, precision: Precision) -> list[float]:
    """The sum of the loss over the supervised tokens of each row, in nats."""
    where = placed(batch, precision.device.torch_device)
    hidden = supervised_hidden(model, where, precision)
    counts, head = (batch.targets != IGNORE).sum(1).tolist(), model.head_rows(hidden.dtype)
    rows = zip(torch.split(hidden, counts), torch.split(where.targets, counts), strict=True)
    return [float(token_losses(some, head, targets)[1]) for some, targets in rows]


def placed_losses(
    model: Transformer, batch: Placed, precision: Precision, z_loss: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `micro_batch_losses`, of what is on the device."""
    chosen, float8 = supervised_hidden(model, batch, precision), model.head_float8 if model.training else None
    return token_losses(chosen, model.head_rows(chosen.dtype), batch.targets, z_loss, scale, float8)


def supervised_hidden(model: Transformer, batch: Placed, precision: Precision) -> Tensor:
    """The hidden states of the supervised tokens (N, D), row after row."""
    with precision.autocast():
        tokens = {"positions": batch.positions, "segments": batch.segments, "bounds": batch.bounds}
        hidden = model(batch.ids, **tokens).flatten(0, 1)
    return hidden if len(batch.supervised) == len(hidden) else _rows(hidden, batch.supervised)


def _rows(hidden: Tensor, numbers: Tensor) -> Tensor:
    """Some rows, each at most once. The gradient of an index would sort the numbers on a GPU."""
    return hidden[numbers] if hidden.device.type == "cpu" else hidden.index_select(0, numbers)


@contextmanager
def sparse_embedding_grad(model: Transformer) -> Iterator[None]:
    """
    Within, the rows of a tied embedding that tokens took get their gradient after the backward pass, which gives the
    table that of the head. Zeros for all other rows, and the sum of two such tables, take as long as some layers.
    """
    table, lookups = model.embed.weight, list[tuple[Tensor, Tensor]]()
    elsewhere = table.device.type != "cpu" or cpu.ELSEWHERE.get() or collectives.is_sharded(model)
    if model.head.weight is not table or type(table) not in cpu.PLAIN or elsewhere:
        yield
        return

    def take(_: nn.Module, ids: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        lookups.append((ids[0].flatten(), rows.detach().requires_grad_(rows.requires_grad)))
        return lookups[-1][1]

    hook = model.embed.register_forward_hook(take)
    try:
        yield
    finally:
        hook.remove()
    for ids, rows in lookups:
        if table.grad is not None and rows.grad is not None:
            table.grad.index_add_(0, ids, rows.grad.flatten(0, -2))


@dataclass
class Trainer:
    """
    The training loop, from `state.step` to `steps`. Every rank makes one, with the same global batches.

    A step without supervised tokens, or with trouble that the guard sees, counts. It changes neither a weight nor what
    the optimizers remember. `train` raises Terminated, between two updates, where the process was asked to stop.
    """

    model: Transformer
    optimizers: Optimizers
    batches: Iterator[Batch]
    _: KW_ONLY
    state: State
    """Updated in-place."""
    steps: int
    micro_batch: int
    """Rows that go through the model at once, if memory allows."""
    learning_rate_share: Callable[[int], float]
    """Of the peak, by step; the first step is 1."""
    max_grad_norm: float
    precision: Precision
    loss_function: LossFunction = field(default_factory=CausalLMLoss)
    world: World = field(default_factory=World.alone)
    guard: SpikeGuard = field(default_factory=SpikeGuard)
    roll_back: Callable[[State], None] | None = None
    hooks: Hooks = field(default_factory=Hooks)
    norms: Norms | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    stop: StopRequest = field(default_factory=StopRequest)
    ends_early: Callable[[], bool] = bool
    """Whether training ends before all steps are done; asked before each step, of all ranks."""

    def train(self) -> None:
        self.model.train()
        self.raise_if_stopped()  # setup left out the hooks that are due at this step; they run on resume
        while self.state.step < self.steps and not self.ends_early():
            self.train_step()
            self.timer.enter("hooks")
            self.hooks.after_step(self.state)
            self.raise_if_stopped()
        self.timer.enter("rest")

    def train_step(self) -> None:
        """Learning rate, gradients, guard, clipping, update. `state.metrics` says what came of it."""
        state = self.state
        self.timer.enter("data")
        batch = next(self.batches)
        lr = self.optimizers.set_share(self.learning_rate_share(state.step + 1))
        self.timer.enter("forward_backward")
        exchanges = exchanging("weights-and-gradients") if collectives.is_sharded(self.model) else nullcontext()
        with exchanges:
            grads = self._forward_backward(batch)
        self.timer.enter("optimizer")
        state.advance(len(batch.ids), grads.loss, self.precision.state())
        state.metrics = {"learning_rate": lr, "tokens": grads.num_tokens}
        norm = float(grads.norm)
        watched = grads.loss if self.loss_function.positive or not math.isfinite(grads.loss) else 1.0
        share = grads.num_tokens / batch.ids.size
        if reason := self.guard.trouble(state.guard, watched, norm, share):
            reason += self._culprits(grads)
            self._skip(SkippedStep(state.step, reason, grads.loss, norm, batch.samples.tolist()))
        elif grads.num_tokens:
            if self.norms:
                self.norms.before_update(state.step)
            self.optimizers.step(clipping(self.max_grad_norm, grads.norm), state.step)
            if self.norms:
                self.norms.after_update()
            self.guard.accept(state.guard, watched, norm, share)
            state.tokens += grads.num_tokens
            state.metrics |= {"loss": grads.loss, "gradient_norm": norm, **grads.metrics, **self.precision.metrics()}
        self.optimizers.zero_grad()

    def _culprits(self, grads: Gradients) -> str:
        """Of a loss that is not finite: on which ranks it came about, where not on all. A GPU may be broken."""
        if self.world.size == 1 or math.isfinite(grads.loss):
            return ""
        finite = self.world.gather(math.isfinite(float(grads.own_sum)))
        bad = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
        return "" if len(bad) == len(finite) else f", from rank {' and '.join(bad)} of {self.world.size}"

    def _forward_backward(self, batch: Batch) -> Gradients:
        """The gradients of a global batch, with as many rows at once as memory allows, now and later."""
        grads = forward_backward(
            self.model,
            batch,
            min(self.micro_batch, self.state.rows or self.micro_batch),
            precision=self.precision,
            loss_function=self.loss_function,
            world=self.world,
            stop=self.stop,
        )
        self.state.rows = grads.rows if grads.rows < self.micro_batch else 0
        return grads

    def raise_if_stopped(self) -> None:
        """Raises Terminated on all ranks where one of them was asked to stop."""
        if self.world.any(self.stop.asked):
            raise Terminated(self.stop.code)

    def _skip(self, skip: SkippedStep) -> None:
        """Count a step without its update. After too many in a row, go back to the newest good checkpoint."""
        if self.guard.skip(self.state.guard, skip) and self.roll_back is not None:
            self.roll_back(self.state)
