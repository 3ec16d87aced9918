"""
Validation loss on samples that are never trained on, and sample texts during training.

Every evaluation uses the same positions of the validation split. The sample texts continue given prompts while the
model trains, for people to read.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.log import SAMPLES as SAMPLES
from bloomery.core.log import Metrics, info, read_metrics
from bloomery.core.signals import StopRequest
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import fsdp
from bloomery.train.config import Training
from bloomery.train.state import Hook, State
from bloomery.train.step import CausalLMLoss, LossFunction, retry_on_oom

import torch

VALIDATION_SAMPLES = 256


@runtime_checkable
class EvalCheck(Protocol):
    """What a run measures at each evaluation before all else."""

    @property
    def name(self) -> str:
        """Of a number that it always gives."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """By which a loss in nats a token is one in bits a byte; None where it is none of a token."""
        ...

    def measure(self, model: Transformer, device: Device, most: int | None = None) -> dict[str, float]:
        """Numbers by name; with `most`, quicker ones that nobody reads."""
        ...


@dataclass
class Validation:
    """Some samples of a validation split. An evaluation ends early, by Terminated, where `stop` was asked for."""

    samples: PackedDataset
    tokenizer: Tokenizer
    rows: int
    """That go through the model at once."""
    stop: StopRequest = field(default_factory=StopRequest)
    objective: LossFunction | None = None
    """Whose loss and numbers these are; those of the next token, if nothing else is said."""
    name: str = "validation_loss"

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
        only. Where memory runs out, half as many rows go through the model at once, now and later. What another
        objective tells is a mean over batches, weighted by what it counts.
        """
        objective, alone = self.objective or CausalLMLoss(), World.alone()

        def sums(rows: int) -> tuple[float, int, dict[str, float]]:
            total, counted, told = 0.0, 0, dict[str, float]()
            for batch in islice(self.batches(rows), most):
                count = objective.begin(model, batch, rows, device, alone)
                total += float(objective.losses(model, batch, device)[0])
                objective.end(alone)
                told = {name: told.get(name, 0.0) + value * count for name, value in objective.told().items()}
                counted += count
            return total, counted, told

        with evaluating(model):
            (total, count, told), self.rows = retry_on_oom(model, alone, self.rows, sums)
        loss = total / max(count, 1)
        found = {"validation_loss": round(loss, 5)}
        found |= {f"validation_{name}": round(value / max(count, 1), 5) for name, value in told.items()}
        if self.bytes_per_token:
            found["validation_bits_per_byte"] = round(loss / math.log(2) / self.bytes_per_token, 5)
        return found

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of the supervised tokens of the samples, by token; None where they have none, or are not the count."""
        if self.objective is not None:
            return None
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
        fsdp.settle(model)
        model.train()


SHOWN = 200

Sampler = Callable[[Transformer, Sequence[str], int], Iterator[str]]
"""Of a model, prompts and a number of tokens: what follows each prompt. A stage gives it: training knows no text."""


@contextmanager
def sampling(
    config: Training,
    model: Transformer,
    sampler: Sampler | None,
    out: Path,
    step: int,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[list[Hook]]:
    """
    The hook that samples every so many steps, if that was asked for; its lines of lost steps are dropped, and those of
    `step`, which a run goes on from, if they are not all there: then it is due after that step too. `agreed` says what
    all ranks take for true.
    """
    if sampler is None or not config.sample_every:
        yield []
        return
    told = [line.get("prompt") for line in read_metrics(out / SAMPLES) if line["step"] == step]
    whole = agreed(told == list(config.prompts))
    with Metrics(out / SAMPLES, step if whole else step - 1) as file:

        def is_due(state: State) -> bool:
            return state.step % config.sample_every == 0 and not (whole and state.step == step)

        def sample(state: State) -> None:
            try:
                texts = sampler(model, config.prompts, config.sample_tokens)
                if fsdp.is_sharded(model):
                    texts = iter(list(texts))  # all ranks end what they do together before one may fail to write it
                for prompt, text in zip(config.prompts, texts, strict=True):
                    file.write(step=state.step, prompt=prompt, text=text)
                    info(f"  step {state.step}: {prompt!r} -> {text[:SHOWN]!r}")
                file.sync()
            finally:
                fsdp.settle(model)
                model.train()

        yield [Hook(is_due, sample, "sample", vital=False)]
