"""What a model makes of samples that it is never trained on, at the same places of the split every time."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.stop import Stop
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, Samples
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import parallel
from bloomery.train.loop import in_memory, micro_batch_loss

import torch

VALIDATION_SAMPLES = 256


@dataclass
class Validation:
    """Some samples of a validation split. An evaluation ends early, by Terminated, where `stop` was asked for."""

    samples: Samples
    tokenizer: Tokenizer
    rows: int
    """That go through the model at once."""
    stop: Stop = field(default_factory=Stop)

    def batches(self, rows: int | None = None) -> Iterator[Batch]:
        """Samples at even distances in the split, so many at once: the same every time."""
        count, size = min(self.samples.num_samples, VALIDATION_SAMPLES), rows or self.rows
        chosen = np.arange(count) * self.samples.num_samples // count
        for start in range(0, count, size):
            self.stop.check()
            yield self.samples.batch(chosen[start : start + size])

    def measure(self, model: Transformer, device: Device, most: int | None = None) -> dict[str, float]:
        """
        Mean loss of the samples, in nats a token and, where their bytes are known, in bits a byte; of `most` batches
        only. Where memory runs out, half as many rows go through the model at once, now and later.
        """

        def sums(rows: int) -> tuple[float, int]:
            total, tokens = 0.0, 0
            for batch in islice(self.batches(rows), most):
                total += float(micro_batch_loss(model, batch, device))
                tokens += int((batch.targets != IGNORE).sum())
            return total, tokens

        with evaluating(model):
            (total, tokens), self.rows = in_memory(model, World.alone(), self.rows, sums)
        loss = total / max(tokens, 1)
        found = {"validation_loss": round(loss, 5)}
        if self.bytes_per_token:
            found["validation_bits_per_byte"] = round(loss / math.log(2) / self.bytes_per_token, 5)
        return found

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of the supervised tokens of the samples, by token; None where they have none."""
        lengths = np.array(self.tokenizer.byte_lengths)
        targets = np.concatenate([batch.targets[batch.targets != IGNORE] for batch in self.batches()])
        return float(lengths[targets].mean()) or None if len(targets) else None


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """The model as it is when nobody trains it, and in training again afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        parallel.settle(model)
        model.train()
