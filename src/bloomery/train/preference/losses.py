"""
Preference losses (DPO, IPO, SimPO, KTO), the GRPO loss, and token log-probabilities.

Loss functions: one function for each loss on preferences, from log-probabilities of whole answers to a loss for
each. All losses and rewards are in nats. Letters used for shapes: P pairs, or single answers.

Objective over packed sequences of judged answers. A sequence holds whole pairs (chosen, rejected). For KTO it holds
whole examples: an answer, and another question's answer in its place. Packed sequences do not see each other. A
table next to the sequences says what each sequence is, and what the reference model says of it. Letters used for
shapes: R rows of a split, B rows of a batch, S sequences of a row, P pairs.

Objective over answers that the model has sampled itself. Each has its advantage over the others of its group.
Letters used for shapes: N answers, G of them to a question, B rows of a batch, T tokens of a row.

Log-probabilities of given tokens, token by token, without the logits of all tokens at once. Letters used for
shapes: N tokens that count, D width, V vocabulary, B rows, T tokens of a row, S sequences of a row.

All of this is in one file because each objective is a loss function applied to these log-probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.log import progress
from bloomery.core.signals import StopRequest
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.train.loss import chunk_tokens
from bloomery.train.precision import Precision
from bloomery.train.preference.config import Dpo, Grpo, Ipo, Kto, SimPo

import torch
import torch.nn.functional as F
from torch import Tensor


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


def kto(
    answers: Answers, wanted: Bool[Tensor, " P"], divergence: Float[Tensor, ""], how: Kto
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Losses and rewards (Ethayarajh et al. 2024, eq. 8). `divergence` is z, which has no gradient."""
    reward = how.beta * (answers.now - answers.before)
    gain = torch.where(wanted, reward - how.beta * divergence, how.beta * divergence - reward)
    weight = torch.where(wanted, how.wanted, how.unwanted)
    return weight * (1 - torch.sigmoid(gain)), reward


def clipped(
    now: Tensor, drawn: Tensor, advantage: Tensor, clip: float
) -> tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]:
    """
    −min(ρA, clip(ρ) A) with ρ = exp(now − drawn), and where the clipped one counts (Schulman et al. 2017, eq. 7,
    https://arxiv.org/abs/1707.06347).
    """
    ratio = torch.exp(now - drawn)
    free, held = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    return -torch.minimum(free, held), held < free


def divergence(now: Tensor, before: Tensor) -> Float[Tensor, "..."]:
    """
    An estimate of KL(now ‖ before) from tokens drawn by `now`, unbiased and never negative: q − log q − 1, where q is
    before / now ("k3": Schulman 2020, http://joschu.net/blog/kl-approx.html).
    """
    log_q = before - now
    return torch.exp(log_q) - log_q - 1


class _ChunkedLogProbs(torch.autograd.Function):
    """
        y = s[target] − log Σ exp(s)      s = h Wᵀ, in nats

    in chunks of tokens. Their scores are computed a second time backward, when it is known what each y weighs:
    ∂y/∂s = onehot(target) − softmax(s).
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        table = weight.to(hidden.dtype)
        for piece in _pieces(len(hidden), len(weight)):
            scores = (hidden[piece] @ table.t()).float()
            found[piece] = scores.gather(1, targets[piece, None])[:, 0] - torch.logsumexp(scores, 1)
        context.save_for_backward(hidden, weight, targets)
        return found

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, targets = context.saved_tensors
        table = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if context.needs_input_grad[1] else None
        for piece in _pieces(len(hidden), len(weight)):
            share = upstream[0][piece, None]
            slope = torch.softmax((hidden[piece] @ table.t()).float(), 1).mul_(-share)
            slope.scatter_add_(1, targets[piece, None], share)
            slope = slope.to(hidden.dtype)
            grad_hidden[piece] = slope @ table
            if grad_weight is not None:
                grad_weight += (slope.t() @ hidden[piece]).to(weight.dtype)
        return grad_hidden, grad_weight, None


def _pieces(count: int, vocab_size: int) -> list[slice]:
    size = chunk_tokens(vocab_size)
    return [slice(start, start + size) for start in range(0, count, size)]


def log_probs(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Of each target, in nats and in float32."""
    found: Tensor = _ChunkedLogProbs.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return found


def _of_targets(model: Transformer, batch: Batch, device: Device, temperature: float) -> Float[Tensor, " N"]:
    """Of the targets that count, row after row."""
    whole = bool((batch.segments == batch.segments[:, :1]).all())
    ids, positions, targets = (
        torch.from_numpy(part).to(device.place) for part in (batch.ids, batch.positions, batch.targets)
    )
    segments = None if whole else torch.from_numpy(batch.segments).to(device.place)
    with Precision.decide("auto", device).autocast():
        hidden = model(ids, positions=positions, segments=segments)
    places = _places(batch).to(device.place)
    chosen = hidden.flatten(0, 1)[places]
    chosen = chosen if temperature == 1.0 else chosen / temperature
    return log_probs(chosen, model.head.weight, targets.flatten()[places])


def _places(batch: Batch) -> Int[Tensor, " N"]:
    return torch.from_numpy(np.flatnonzero(batch.targets != IGNORE))


def by_token(model: Transformer, batch: Batch, device: Device, temperature: float = 1.0) -> Float[Tensor, "B T"]:
    """Log-probabilities, at a temperature, of the targets of a batch; 0 where a target does not count."""
    found = _of_targets(model, batch, device, temperature)
    spread = torch.zeros(batch.targets.size, device=found.device).index_put((_places(batch).to(found.device),), found)
    return spread.view(batch.targets.shape)


class Sequences(NamedTuple):
    """Of each sequence in each row; 0 where a row has fewer."""

    sums: Float[Tensor, "B S"]
    """Log-probabilities of what was answered."""
    tokens: Float[Tensor, "B S"]
    """How many of them."""

    @property
    def means(self) -> Float[Tensor, "B S"]:
        return self.sums / self.tokens.clamp(min=1)


def by_sequence(model: Transformer, batch: Batch, most: int, device: Device) -> Sequences:
    """
    The sums over each of the first `most` sequences (S) of each row, in memory of the processor: they are few, and are
    added up there in one order, whatever the device.
    """
    found = _of_targets(model, batch, device, 1.0).cpu()
    rows, places = np.nonzero(batch.targets != IGNORE)
    numbers = (batch.segments - batch.segments[:, :1])[rows, places]
    assert not len(numbers) or int(numbers.max()) < most, "padding has no target"
    lengths = torch.from_numpy(np.bincount(rows * most + numbers, minlength=len(batch.ids) * most))
    sums = torch.segment_reduce(found, "sum", lengths=lengths, initial=0.0, unsafe=True)
    return Sequences(sums.view(-1, most), lengths.view(-1, most).float())


NOTHING, CHOSEN, REJECTED, ELSEWHERE = 0, 1, 2, 3
"""What a sequence is: padding; better, or wanted; worse, or unwanted; an answer to another question."""

OF_PAIRS = ("margin", "accuracy", "reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected")
OF_SINGLES = ("reward_wanted", "num_wanted", "reward_unwanted", "num_unwanted")
"""What is told."""

PairLoss = Dpo | Ipo | SimPo | Kto


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
    device: Device,
    world: World,
    stop: StopRequest,
) -> NDArray[np.float32]:
    """What a model, as it is, says of every sequence (R × S). Ranks share the rows, and each gets all."""
    found = torch.zeros(samples.num_samples, table.most)
    mine = np.arange(world.rank, samples.num_samples, world.size)
    model.eval()
    with torch.no_grad(), progress("reference", "rows", len(mine)) as meter:
        for start in range(0, len(mine), rows):
            if world.size == 1:  # ranks in company finish this together
                stop.check()
            numbers = mine[start : start + rows]
            found[numbers] = by_sequence(model, samples.batch(numbers), table.most, device).sums
            meter.at(start + len(numbers))
    model.train()
    return np.asarray(world.sum(found).numpy(), np.float32)


@dataclass(eq=False)
class PreferenceLoss:
    """The loss function: see `LossFunction` for what is called when."""

    loss: PairLoss
    table: PairTable
    _divergence: Tensor = field(default_factory=lambda: torch.zeros(()))
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        """The number of pairs, or of single answers. For KTO, z of the whole batch is computed first."""
        self._sums = {name: torch.zeros(()) for name in (OF_SINGLES if isinstance(self.loss, Kto) else OF_PAIRS)}
        kinds = self.table.kinds[batch.samples]
        single = isinstance(self.loss, Kto)
        self._count = int(np.isin(kinds, (CHOSEN, REJECTED) if single else (CHOSEN,)).sum())
        if isinstance(self.loss, Kto):
            self._divergence = self._elsewhere(model, batch, micro_batch, device, world)
        return self._count

    def losses(self, model: Transformer, part: Batch, device: Device, share: float = 1.0) -> tuple[Tensor, Tensor]:
        found = by_sequence(model, part, self.table.most, device)
        if isinstance(self.loss, Kto):
            total = self._of_singles(self.loss, found, part)
        else:
            total = self._of_pairs(self.loss, found, part)
        return share * total, total.detach()

    def end(self, world: World) -> None:
        flat = torch.stack(list(self._sums.values()))
        self._sums = dict(zip(self._sums, world.sum(flat), strict=True))

    def told(self) -> dict[str, float]:
        """Means over the pairs; for KTO, over the wanted and the unwanted answers each."""
        sums = {name: float(value) for name, value in self._sums.items()}
        if not isinstance(self.loss, Kto):
            return {name: value / max(self._count, 1) for name, value in sums.items()}
        counts = {name: sums.pop(f"num_{name}", 0.0) for name in ("wanted", "unwanted")}
        found = {f"reward_{name}": sums[f"reward_{name}"] / max(count, 1) for name, count in counts.items()}
        if all(counts.values()):
            found["margin"] = found["reward_wanted"] - found["reward_unwanted"]
        return found | {"divergence": float(self._divergence)}

    def watched(self, loss: float) -> float:
        return loss

    def _of_pairs(self, how: Dpo | Ipo | SimPo, found: Sequences, part: Batch) -> Tensor:
        chosen, rejected = (self._answers(found, part, kind) for kind in (CHOSEN, REJECTED))
        match how:
            case Dpo():
                judged = dpo(chosen, rejected, how)
            case Ipo():
                judged = ipo(chosen, rejected, how)
            case SimPo():
                judged = simpo(chosen, rejected, how)
        margin = judged.chosen - judged.rejected
        # A pair that is told apart by nothing is right half of the time.
        right = (margin > 0).float() + 0.5 * (margin == 0).float()
        self._add(
            margin=margin,
            accuracy=right,
            reward_chosen=judged.chosen,
            reward_rejected=judged.rejected,
            log_p_chosen=chosen.now,
            log_p_rejected=rejected.now,
        )
        return judged.losses.sum()

    def _of_singles(self, how: Kto, found: Sequences, part: Batch) -> Tensor:
        total = found.sums.new_zeros(())
        for name, kind in (("wanted", CHOSEN), ("unwanted", REJECTED)):
            answers = self._answers(found, part, kind)
            wanted = torch.full_like(answers.now, kind == CHOSEN, dtype=torch.bool)
            each, reward = kto(answers, wanted, self._divergence, how)
            total = total + each.sum()
            self._add(**{f"reward_{name}": reward, f"num_{name}": torch.ones_like(reward)})
        return total

    def _elsewhere(self, model: Transformer, batch: Batch, rows: int, device: Device, world: World) -> Tensor:
        """z: the mean of log π / π₀ over answers to other questions, not below 0."""
        sums = torch.zeros(2)
        with torch.no_grad():
            for part in batch.of_rank(world.rank, world.size).split(rows):
                answers = self._answers(by_sequence(model, part, self.table.most, device), part, ELSEWHERE)
                sums += torch.stack([(answers.now - answers.before).sum(), torch.tensor(float(len(answers.now)))])
        total, count = world.sum(sums).tolist()
        return torch.tensor(max(0.0, total / max(count, 1.0)))

    def _answers(self, found: Sequences, part: Batch, kind: int) -> Answers:
        """Those of one kind, in the order of rows and of sequences: so that a chosen one meets its rejected one."""
        rows, numbers = np.nonzero(self.table.kinds[part.samples] == kind)
        at = (torch.from_numpy(rows), torch.from_numpy(numbers))
        if self.table.reference is None:
            before = torch.zeros_like(found.sums[at])
        else:
            before = torch.from_numpy(self.table.reference[part.samples])[at]
        return Answers(found.sums[at], before, found.tokens[at])

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value.detach().sum()


SMALLEST_DEVIATION = 1e-4
"""Added to that of a group; what others take too."""


def advantages(
    rewards: NDArray[np.float64], groups: NDArray[np.int64], *, deviation: bool = True
) -> NDArray[np.float32]:
    """
    (r − mean) / deviation of the group that each of N answers belongs to: 0 in a group whose answers are all alike.
    The deviation is that of a sample, with G − 1.
    """
    found = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = rewards[groups == group]
        apart = own - own.mean()
        if deviation and len(own) > 1:
            apart = apart / (own.std(ddof=1) + SMALLEST_DEVIATION)
        found[groups == group] = apart
    return found.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Answers of one global batch, by the numbers of their samples."""

    numbers: NDArray[np.int64]
    advantage: NDArray[np.float32]
    now: NDArray[np.float32] | None
    """N × T: log-probabilities when they were drawn; None where they are used once, and are what they are."""
    before: NDArray[np.float32] | None
    """N × T: under the reference; None where there is none."""
    facts: dict[str, float]
    """What is told of them: reward, length, …"""

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of samples here."""
        places = {number: place for place, number in enumerate(self.numbers.tolist())}
        return np.array([places[number] for number in numbers.tolist()], np.int64)


@dataclass(eq=False)
class GRPOLoss:
    """The loss function: see `LossFunction` for what is called when."""

    loss: Grpo
    drawn: Callable[[], Drawn]
    """Those of the batch at hand."""
    _sums: Tensor = field(default_factory=lambda: torch.zeros(2))
    _tokens: int = 0

    def begin(self, model: Transformer, batch: Batch, micro_batch: int, device: Device, world: World) -> int:
        self._sums = torch.zeros(2)
        self._tokens = int((batch.targets != IGNORE).sum())
        return len(batch.ids) if self.loss.normalize == "answers" else self._tokens

    def losses(self, model: Transformer, part: Batch, device: Device, share: float = 1.0) -> tuple[Tensor, Tensor]:
        now = by_token(model, part, device, self.loss.temperature)
        drawn, place = self.drawn(), now.device
        rows = drawn.rows(part.samples)
        counts = torch.from_numpy(part.targets != IGNORE).to(place)
        advantage = torch.from_numpy(drawn.advantage[rows]).to(place)[:, None]
        earlier = now.detach() if drawn.now is None else torch.from_numpy(drawn.now[rows]).to(place)
        each, held = clipped(now, earlier, advantage, self.loss.clip)
        apart = torch.zeros_like(now)
        if drawn.before is not None:
            apart = divergence(now, torch.from_numpy(drawn.before[rows]).to(place))
            each = each + self.loss.kl_weight * apart
        self._sums += torch.stack([(apart.detach() * counts).sum(), (held & counts).sum().float()]).cpu()
        total = self._weighed(each, counts).sum()
        return share * total, total.detach()

    def end(self, world: World) -> None:
        world.sum(self._sums)

    def told(self) -> dict[str, float]:
        """Means over the tokens of the answers, and what there is to say of these."""
        kl, held = (self._sums / max(self._tokens, 1)).tolist()
        return {**self.drawn().facts, "kl": kl, "clip_fraction": held}

    def watched(self, loss: float) -> float:
        """A loss around zero tells of trouble only when it is not finite; the gradient norm is watched as always."""
        return 1.0 if np.isfinite(loss) else loss

    def _weighed(self, each: Float[Tensor, "B T"], counts: Tensor) -> Float[Tensor, " B"]:
        sums = (each * counts).sum(1)
        return sums / counts.sum(1).clamp(min=1) if self.loss.normalize == "answers" else sums
