"""
Preference losses (DPO, IPO, SimPO), the GRPO loss, and token log-probabilities.

Loss functions: one function for each loss on preferences, from log-probabilities of whole answers to a loss for
each. All losses and rewards are in nats. Letters used for shapes: P pairs.

Loss function over packed sequences of judged answers. A row holds whole pairs (chosen, rejected). Packed sequences
do not see each other. A table next to the rows says what each sequence is, and what the reference model says of it.
Letters used for shapes: R rows of a split, B rows of a batch, S sequences of a row, P pairs.

Loss function over answers that the model has sampled itself. Each has its advantage over the others of its group.
Letters used for shapes: N answers, G of them to a question, B rows of a batch, T tokens of a row.

Log-probabilities of given tokens, token by token, without the logits of all tokens at once. Letters used for
shapes: N tokens that count, D width, V vocabulary, B rows, T tokens of a row, S sequences of a row.

All of this is in one file because each loss function is applied to these log-probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.log import progress
from bloomery.core.signals import StopRequest
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.model.layers import NormalizedHead
from bloomery.model.transformer import Transformer
from bloomery.shards.build import first_fit_decreasing
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.train.loss import chunk_tokens, on_processor, padded_table
from bloomery.train.precision import Precision
from bloomery.train.preference.config import Dpo, Grpo, Ipo, SimPo
from bloomery.train.step import BatchTotals, LossSums, Placed, placed, supervised_hidden

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Answers(NamedTuple):
    """Answers under the model that is trained, and under the reference."""

    now: Float[Tensor, " P"]
    """Log-probability of all its tokens."""
    before: Float[Tensor, " P"]
    tokens: Float[Tensor, " P"]


class PreferenceOutcome(NamedTuple):
    """What a loss makes of pairs."""

    losses: Float[Tensor, " P"]
    chosen: Float[Tensor, " P"]
    """How much the loss takes the model to like the chosen answer: its reward."""
    rejected: Float[Tensor, " P"]


def dpo(chosen: Answers, rejected: Answers, how: Dpo) -> PreferenceOutcome:
    """Rafailov et al. 2023, eq. 7; with smoothing, Mitchell's conservative DPO."""
    good, bad = (how.beta * (one.now - one.before) for one in (chosen, rejected))
    margin = good - bad
    losses = -(1 - how.smoothing) * F.logsigmoid(margin) - how.smoothing * F.logsigmoid(-margin)
    return PreferenceOutcome(losses, good, bad)


def ipo(chosen: Answers, rejected: Answers, how: Ipo) -> PreferenceOutcome:
    """Azar et al. 2023, eq. 17."""
    good, bad = ((one.now - one.before) / one.tokens for one in (chosen, rejected))
    return PreferenceOutcome((good - bad - 1 / (2 * how.beta)).square(), how.beta * good, how.beta * bad)


def simpo(chosen: Answers, rejected: Answers, how: SimPo) -> PreferenceOutcome:
    """Meng et al. 2024, eq. 6."""
    good, bad = (how.beta * one.now / one.tokens for one in (chosen, rejected))
    return PreferenceOutcome(-F.logsigmoid(good - bad - how.gamma), good, bad)


def clipped(
    now: Tensor, drawn: Tensor, advantage: Tensor, clip: float
) -> tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]:
    """
    −min(ρA, clip(ρ) A), and where the clipped ratio counts; ρ = π now / π at sampling (Schulman et al. 2017, eq. 7,
    https://arxiv.org/abs/1707.06347).
    """
    ratio = torch.exp(now - drawn)
    free, held = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    return -torch.minimum(free, held), held < free


def divergence(now: Tensor, before: Tensor) -> Float[Tensor, "..."]:
    """
    An estimate of KL(now ‖ before) from tokens sampled by `now`, unbiased and never negative: q − log q − 1, where q is
    before / now ("k3": Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    log_q = before - now
    return torch.exp(log_q) - log_q - 1


class _ChunkedLogProbs(torch.autograd.Function):
    """
        y = s[target] − log Σ exp(s)      s = h Wᵀ, in nats

    in chunks of tokens. The backward pass computes their logits again, when the gradient of each y is known:
    ∂y/∂s = onehot(target) − softmax(s). On GPUs, the vocabulary is padded as in loss.py.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_p = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        table = _table(weight, hidden)
        for piece in _pieces(hidden, len(weight)):
            logits = _logits(hidden[piece], table, len(weight))
            log_p[piece] = logits.gather(1, targets[piece, None])[:, 0] - torch.logsumexp(logits, 1)
        context.save_for_backward(hidden, weight, targets)
        return log_p

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, targets = context.saved_tensors
        table = _table(weight, hidden)
        grad_hidden = torch.empty_like(hidden)
        kind = weight.dtype if on_processor(hidden) else torch.float32  # in which chunks are summed
        grad_weight = torch.zeros_like(weight, dtype=kind) if context.needs_input_grad[1] else None
        for piece in _pieces(hidden, len(weight)):
            share = upstream[0][piece, None]
            grad = torch.softmax(_logits(hidden[piece], table, len(weight)), 1).mul_(-share)
            grad.scatter_add_(1, targets[piece, None], share)
            grad = grad.to(hidden.dtype)
            grad_hidden[piece] = grad @ table
            if grad_weight is not None:
                grad_weight += (grad.t() @ hidden[piece])[: len(weight)].to(kind)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _table(weight: Tensor, hidden: Tensor) -> Tensor:
    return weight.to(hidden.dtype) if on_processor(hidden) else padded_table(weight, hidden.dtype)


def _logits(hidden: Tensor, table: Tensor, vocab_size: int) -> Tensor:
    logits = (hidden @ table.t()).float()
    logits[:, vocab_size:] = -torch.inf
    return logits


def _pieces(hidden: Tensor, vocab_size: int) -> list[slice]:
    size = chunk_tokens(vocab_size, processor=on_processor(hidden))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def log_probs(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Of each target, in nats and in float32."""
    log_p: Tensor = _ChunkedLogProbs.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return log_p


def _of_targets(model: Transformer, batch: Placed, precision: Precision, temperature: float) -> Float[Tensor, " N"]:
    """Of the targets that count, row after row."""
    chosen = supervised_hidden(model, batch, precision)
    chosen = chosen if temperature == 1.0 else chosen / temperature
    return log_probs(chosen, model.head_rows(chosen.dtype), batch.targets)


def by_token(
    model: Transformer,
    batch: Batch,
    precision: Precision,
    temperature: float = 1.0,
    length_step: int | None = None,
    capacity: int | None = None,
) -> Float[Tensor, "B T"]:
    """
    Log-probabilities, at a temperature, of the targets of a batch; 0 where a target does not count. With `length_step`,
    the model sees the columns up to the last target alone, in a multiple of it. With a `capacity` too, the model sees
    the rows packed into rows of that many tokens, unless a CPU computes.
    """
    if length_step is not None and capacity is not None and not on_processor(precision.device.torch_device):
        seen, origins = packed(batch, capacity, length_step)
        log_p = _of_targets(model, placed(seen, precision.device.torch_device), precision, temperature)
        (at,) = devices.staged([torch.from_numpy(origins[seen.targets != IGNORE])], log_p.device)
        return torch.zeros(batch.targets.size, device=log_p.device).index_put((at,), log_p).view(batch.targets.shape)
    seen = batch if length_step is None else shortened(batch, length_step)
    where = placed(seen, precision.device.torch_device)
    log_p = _of_targets(model, where, precision, temperature)
    spread = torch.zeros(seen.targets.size, device=log_p.device).index_put((where.supervised,), log_p)
    return F.pad(spread.view(seen.targets.shape), (0, batch.targets.shape[1] - seen.targets.shape[1]))


def shortened(batch: Batch, step: int) -> Batch:
    """Without the columns behind the last target that counts, in a multiple of `step`."""
    last = np.flatnonzero((batch.targets != IGNORE).any(0))
    length = step * -(-int(last[-1] + 1) // step) if len(last) else step
    names = ("ids", "targets", "positions", "segments")
    return replace(batch, **{name: getattr(batch, name)[:, :length] for name in names})


def packed(batch: Batch, capacity: int, step: int) -> tuple[Batch, NDArray[np.int64]]:
    """
    The rows of a batch, up to the last target of each, in as few rows of at most `capacity` tokens as fit. Also where
    each token was in the flattened batch, or −1 for padding. The width is a multiple of `step`, or the capacity.

    Documents keep their positions, and see only themselves. Padding follows the last document of its row, so that a row
    with a single document stays one. Segments of the batch must rise. `samples` are those of each row's first answer.
    """
    lengths, T = _used_tokens(batch), batch.ids.shape[1]
    rows = first_fit_decreasing(lengths, capacity)
    width = _width(max(sum(lengths[index] for index in row) for row in rows), capacity, step)
    origins = np.full((len(rows), width), -1)
    for row, indices in enumerate(rows):
        tokens = np.concatenate([index * T + np.arange(lengths[index]) for index in indices])
        origins[row, : len(tokens)] = tokens
    filled = origins >= 0
    ids, targets, positions, inner = (
        np.where(filled, array.reshape(-1)[origins], blank)
        for array, blank in ((batch.ids, 0), (batch.targets, IGNORE), (batch.positions, 0), (batch.segments, 0))
    )
    owners = origins // T
    begins = (owners[:, 1:] != owners[:, :-1]) | (inner[:, 1:] != inner[:, :-1])
    segments = np.pad(np.cumsum(begins & filled[:, 1:], axis=1), ((0, 0), (1, 0)))
    return Batch(ids, targets, positions, segments, batch.samples[[row[0] for row in rows]]), origins


def packed_groups(
    batch: Batch, size: int, precision: Precision, step: int | None, capacity: int | None
) -> list[NDArray[np.int64]]:
    """
    The rows of each micro-batch, by number. Where rows are packed, those of a micro-batch take at most `size` times
    `capacity` positions, and packed rows of similar length are together. Otherwise each has `size` rows.
    """
    if step is None or capacity is None or on_processor(precision.device.torch_device):
        numbers = np.arange(len(batch.ids))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]
    lengths, groups, most = _used_tokens(batch), list[list[list[int]]](), 0
    rows = sorted(first_fit_decreasing(lengths, capacity), key=lambda row: -sum(lengths[index] for index in row))
    for row in rows:
        if not groups or len(groups[-1]) == most:
            groups.append([])
            most = size * capacity // _width(sum(lengths[index] for index in row), capacity, step)
        groups[-1].append(row)
    # `packed` puts the answers of a group into the same rows again, as rows of other groups change nothing.
    return [np.sort(np.concatenate(group)) for group in groups]


def _used_tokens(batch: Batch) -> list[int]:
    """Tokens up to the last target of each row, and at least one."""
    lengths = ((batch.targets != IGNORE) * np.arange(1, batch.ids.shape[1] + 1)).max(1)
    tokens: list[int] = np.maximum(lengths, 1).tolist()
    return tokens


def _width(tokens: int, capacity: int, step: int) -> int:
    return min(step * -(-tokens // step), capacity)


class Sequences(NamedTuple):
    """Of each sequence in each row; 0 where a row has fewer."""

    sums: Float[Tensor, "B S"]
    """Log-probabilities of what was answered."""
    tokens: Float[Tensor, "B S"]
    """How many of them."""

    @property
    def means(self) -> Float[Tensor, "B S"]:
        return self.sums / self.tokens.clamp(min=1)


def by_sequence(model: Transformer, batch: Batch, most: int, precision: Precision) -> Sequences:
    """
    The sums over each of the first `most` sequences (S) of each row, in the CPU's memory. They are few, and the CPU
    adds them up in the same order for every device.
    """
    log_p = _of_targets(model, placed(batch, precision.device.torch_device), precision, 1.0).cpu()
    rows, places = np.nonzero(batch.targets != IGNORE)
    numbers = (batch.segments - batch.segments[:, :1])[rows, places]
    assert not len(numbers) or int(numbers.max()) < most, "padding has no target"
    lengths = torch.from_numpy(np.bincount(rows * most + numbers, minlength=len(batch.ids) * most))
    sums = torch.segment_reduce(log_p, "sum", lengths=lengths, initial=0.0, unsafe=True)
    return Sequences(sums.view(-1, most), lengths.view(-1, most).float())


def keep_as_computed(reference: Transformer, precision: Precision) -> None:
    """
    Keep the matrices of a frozen model in the number format that matmuls convert them to, in-place. The model computes
    the same bits in less memory. Embeddings, vectors and a head with normalized rows are read in float32, and stay.
    Nothing changes on CPUs, whose kernels read float32.
    """
    if on_processor(precision.device.torch_device) or precision.dtype == torch.float32:
        return
    for module in reference.modules():
        plain = isinstance(module, nn.Linear) and not isinstance(module, NormalizedHead)
        if plain and module.weight is not reference.embed.weight:
            module.weight.data = module.weight.data.to(precision.dtype)


NOTHING, CHOSEN, REJECTED = 0, 1, 2
"""What a sequence is: padding, the better answer, the worse answer."""

PairLoss = Dpo | Ipo | SimPo


@dataclass(frozen=True, eq=False)
class PairTable:
    """Of a split, by the numbers of its rows."""

    kinds: NDArray[np.int8]
    """R × S"""
    reference: NDArray[np.float32] | None = None
    """R × S: log-probabilities under the reference; None where the loss has none."""

    @property
    def most(self) -> int:
        return int(self.kinds.shape[1])


def reference_of(
    model: Transformer,
    samples: PackedDataset,
    table: PairTable,
    rows: int,
    precision: Precision,
    world: World,
    stop: StopRequest,
) -> NDArray[np.float32]:
    """What a model, as it is, says of every sequence (R × S). Ranks share the rows, and each gets all."""
    sums = torch.zeros(samples.num_samples, table.most)
    mine = np.arange(world.rank, samples.num_samples, world.size)
    model.eval()
    with torch.no_grad(), progress("reference", "rows", len(mine)) as meter:
        for start in range(0, len(mine), rows):
            if world.size == 1:  # ranks in company finish this together
                stop.check()
            numbers = mine[start : start + rows]
            sums[numbers] = by_sequence(model, samples.batch(numbers), table.most, precision).sums
            meter.at(start + len(numbers))
    model.train()
    return np.asarray(world.sum(sums).numpy(), np.float32)


@dataclass(eq=False)
class PreferenceLoss:
    """The loss function of pairs in rows."""

    loss: PairLoss
    table: PairTable
    metrics: ClassVar[tuple[str, ...]] = (
        *("margin", "accuracy", "reward_chosen", "reward_rejected"),
        *("log_p_chosen", "log_p_rejected"),
    )
    """Means over the pairs."""
    positive: ClassVar[bool] = True

    def micro_batches(self, share: Batch, size: int, precision: Precision) -> list[Batch]:
        return share.split(size)

    def totals(self, batch: Batch) -> BatchTotals:
        pairs = int((self.table.kinds[batch.samples] == CHOSEN).sum())
        return BatchTotals(pairs, pairs)

    def fullest(self, batch: Batch, precision: Precision) -> Batch:
        return batch

    def losses(self, model: Transformer, micro_batch: Batch, precision: Precision, scale: float = 1.0) -> LossSums:
        sequences = by_sequence(model, micro_batch, self.table.most, precision)
        chosen, rejected = (self._answers(sequences, micro_batch, kind) for kind in (CHOSEN, REJECTED))
        match self.loss:
            case Dpo():
                judged = dpo(chosen, rejected, self.loss)
            case Ipo():
                judged = ipo(chosen, rejected, self.loss)
            case SimPo():
                judged = simpo(chosen, rejected, self.loss)
        margin = judged.chosen - judged.rejected
        # A pair with equal rewards counts as half right.
        right = (margin > 0).float() + 0.5 * (margin == 0).float()
        metrics = (margin, right, judged.chosen, judged.rejected, chosen.now, rejected.now)
        total = judged.losses.sum()
        return LossSums(scale * total, total.detach(), torch.stack([values.detach().sum() for values in metrics]))

    def _answers(self, sequences: Sequences, micro_batch: Batch, kind: int) -> Answers:
        """Those of one kind, in the order of rows and of sequences: so that a chosen one meets its rejected one."""
        rows, numbers = np.nonzero(self.table.kinds[micro_batch.samples] == kind)
        at = (torch.from_numpy(rows), torch.from_numpy(numbers))
        if self.table.reference is None:
            before = torch.zeros_like(sequences.sums[at])
        else:
            before = torch.from_numpy(self.table.reference[micro_batch.samples])[at]
        return Answers(sequences.sums[at], before, sequences.tokens[at])


SMALLEST_DEVIATION = 1e-4
"""Added to that of a group; what others take too."""


def advantages(
    rewards: NDArray[np.float64], groups: NDArray[np.int64], *, deviation: bool = True
) -> NDArray[np.float32]:
    """
    (r − mean) / deviation of the group that each of N answers belongs to: 0 in a group whose answers are all alike.
    The deviation is that of a sample, with G − 1.
    """
    values = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = rewards[groups == group]
        apart = own - own.mean()
        if deviation and len(own) > 1:
            apart = apart / (own.std(ddof=1) + SMALLEST_DEVIATION)
        values[groups == group] = apart
    return values.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Answers of one global batch, by the numbers of their samples."""

    numbers: NDArray[np.int64]
    advantage: NDArray[np.float32]
    now: NDArray[np.float32] | None
    """N × T: log-probabilities at sampling; None for a single update, which computes the same values."""
    before: NDArray[np.float32] | None
    """N × T: under the reference; None where there is none."""
    facts: dict[str, float]
    """Logged facts of the answers: reward, length, …"""

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of samples here."""
        places = {number: place for place, number in enumerate(self.numbers.tolist())}
        return np.array([places[number] for number in numbers.tolist()], np.int64)


@dataclass(frozen=True, eq=False)
class GRPOLoss:
    """The loss function of answers that the model has sampled."""

    loss: Grpo
    drawn: Callable[[], Drawn]
    """Those of the batch at hand."""
    length_step: int | None = None
    """See `by_token`. None where compiled blocks want a single length."""
    capacity: int | None = None
    """Tokens of a row that answers share, on devices that are no CPU. None: each answer has its own row."""
    metrics: ClassVar[tuple[str, ...]] = ("kl", "clip_fraction")
    """Means over the tokens of the answers."""
    positive: ClassVar[bool] = False

    def totals(self, batch: Batch) -> BatchTotals:
        tokens = int((batch.targets != IGNORE).sum())
        count = len(batch.ids) if self.loss.normalize == "answers" else tokens
        return BatchTotals(count, tokens, self.drawn().facts)

    def micro_batches(self, share: Batch, size: int, precision: Precision) -> list[Batch]:
        groups = packed_groups(share, size, precision, self.length_step, self.capacity)
        return [share.rows(numbers) for numbers in groups]

    def losses(self, model: Transformer, micro_batch: Batch, precision: Precision, scale: float = 1.0) -> LossSums:
        now = by_token(model, micro_batch, precision, self.loss.temperature, self.length_step, self.capacity)
        drawn, device = self.drawn(), now.device
        rows = drawn.rows(micro_batch.samples)
        counts = torch.from_numpy(micro_batch.targets != IGNORE).to(device)
        advantage = torch.from_numpy(drawn.advantage[rows]).to(device)[:, None]
        earlier = now.detach() if drawn.now is None else torch.from_numpy(drawn.now[rows]).to(device)
        each, held = clipped(now, earlier, advantage, self.loss.clip)
        apart = torch.zeros_like(now)
        if drawn.before is not None:
            apart = divergence(now, torch.from_numpy(drawn.before[rows]).to(device))
            each = each + self.loss.kl_coef * apart
        metrics = torch.stack([(apart.detach() * counts).sum(), (held & counts).sum().float()]).cpu()
        total = self._weighed(each, counts).sum()
        return LossSums(scale * total, total.detach(), metrics)

    def fullest(self, batch: Batch, precision: Precision) -> Batch:
        """Each answer ends at the end of a row, so that micro-batches are full."""
        if self.capacity is None or on_processor(precision.device.torch_device):
            return batch
        targets, last = batch.targets.copy(), min(self.capacity, batch.ids.shape[1]) - 1
        targets[:, last] = batch.ids[:, last]
        return replace(batch, targets=targets)

    def _weighed(self, each: Float[Tensor, "B T"], counts: Tensor) -> Float[Tensor, " B"]:
        sums = (each * counts).sum(1)
        return sums / counts.sum(1).clamp(min=1) if self.loss.normalize == "answers" else sums
