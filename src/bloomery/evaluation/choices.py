"""
Questions with answers to choose from that are ids already (`shards/choices.py`): which does a model find likeliest?

    per byte     the highest   Σ log p(answer | question) / bytes of the answer
    per token    the highest   Σ log p(answer | question) / tokens of the answer, which is what llm.c counts

The sum alone would favor short answers. By bytes, models with different tokenizers can be compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import DataError
from bloomery.core.stop import Stop
from bloomery.hw.device import Device
from bloomery.model.transformer import Transformer
from bloomery.shards import choices
from bloomery.shards.choices import Example
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.precision import Precision

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choices:
    """Examples, and how many bytes each id stands for."""

    examples: Sequence[Example]
    byte_lengths: Sequence[int]
    rows_at_once: int = 16

    @classmethod
    def read(cls, file: Path, tokenizer: Tokenizer, *, limit: int | None = None, rows_at_once: int = 16) -> "Choices":
        """All examples of a file, or so many of them at even distances. Raises DataError where it is none of ours."""
        found = choices.read(file, vocab_size=tokenizer.vocab_size)
        if not found:
            raise DataError("holds no example", where=str(file), cure="Make it or fetch it again.")
        count = min(limit or len(found), len(found))
        chosen = [found[place * len(found) // count] for place in range(count)]
        return cls(chosen, tokenizer.byte_lengths, rows_at_once)

    def accuracy(self, name: str, model: Transformer, device: Device, stop: Stop) -> dict[str, float]:
        """
        The share of examples whose right answer is the likeliest, as `name` by bytes and `name`_per_token. Raises
        Terminated where `stop` was asked for.
        """
        sums = iter(self._log_likelihoods(model, device, stop))
        by_bytes = by_tokens = 0
        for example in self.examples:
            likelihoods = np.array([next(sums) for _ in example.answers])
            sizes = np.array([sum(self.byte_lengths[id] for id in ids) for ids in example.answers])
            counts = np.array([len(ids) for ids in example.answers])
            by_bytes += int(np.argmax(likelihoods / np.maximum(sizes, 1))) == example.right
            by_tokens += int(np.argmax(likelihoods / counts)) == example.right
        total = len(self.examples)
        return {name: round(by_bytes / total, 5), f"{name}_per_token": round(by_tokens / total, 5)}

    def _log_likelihoods(self, model: Transformer, device: Device, stop: Stop) -> Iterator[float]:
        """Of each answer after its question, in nats, in order."""
        rows = [(example.question, ids) for example in self.examples for ids in example.answers]
        for first in range(0, len(rows), self.rows_at_once):
            stop.check()
            yield from log_likelihoods(model, device, rows[first : first + self.rows_at_once]).tolist()


@torch.no_grad()
def log_likelihoods(model: Transformer, device: Device, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tensor:
    """
    Σ log p(answer | question) of each row, in nats. Of what is longer than the model's context the end is read; of an
    answer that is, only its last tokens count.
    """
    whole = [np.concatenate(row).astype(np.int64)[-model.config.context - 1 :] for row in rows]
    scored = [min(len(answer), len(ids) - 1) for (_, answer), ids in zip(rows, whole, strict=True)]
    longest = max(len(ids) for ids in whole) - 1
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    targets, counts = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (tokens, count) in enumerate(zip(whole, scored, strict=True)):
        end = len(tokens) - 1
        ids[row, :end], targets[row, :end] = torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])
        counts[row, end - count : end] = True
    place = device.place
    with Precision.decide("auto", device).autocast():
        hidden = model(ids.to(place))
        scores = model.logits(hidden[counts.to(place)][None])[0]
    found = torch.log_softmax(scores.float(), -1).gather(1, targets[counts].to(place)[:, None])[:, 0]
    owner = torch.arange(len(rows)).repeat_interleave(counts.sum(1)).to(place)
    return torch.zeros(len(rows), device=place, dtype=torch.float32).index_add(0, owner, found).cpu()
