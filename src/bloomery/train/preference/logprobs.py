"""
Log-probabilities of given tokens, one by one, without the scores of all tokens at once.

Letters used for shapes: N tokens that count, D width, V vocabulary, B rows, T tokens of a row, S sequences of a row.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.loss import chunk_tokens
from bloomery.train.precision import Precision

import torch
from torch import Tensor


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
