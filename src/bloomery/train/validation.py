"""
Validation loss on samples that are never trained on, and sample texts during training.

Every evaluation uses the same positions of the validation split. The sample texts continue given prompts while the
model trains, for people to read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.log import SAMPLES as SAMPLES
from bloomery.core.log import Metrics, info, read_metrics
from bloomery.core.signals import StopRequest
from bloomery.hw import device as devices
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train import collectives
from bloomery.train.config import Training
from bloomery.train.precision import Precision
from bloomery.train.state import Hook, LeftOthersError, State
from bloomery.train.step import LESS_MEMORY, CausalLMLoss, LossFunction, mean_metrics, retry_on_oom, row_losses

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
        """By which a loss in nats per token is one in bits per byte; None where it is none of a token."""
        ...

    def measure(self, model: Transformer, precision: Precision, most: int | None = None) -> dict[str, float]:
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
    loss_function: LossFunction | None = None
    """Gives the loss and the other numbers. None: the cross entropy of the next token."""
    by_row: bool = False
    """Whether the standard error of the cross entropy is measured too, from the loss of each sample."""
    name: str = "validation_loss"

    def batches(self, rows: int | None = None) -> Iterator[Batch]:
        """Samples at even distances in the split, so many at once: the same every time."""
        count, size = min(self.samples.num_samples, VALIDATION_SAMPLES), rows or self.rows
        chosen = np.arange(count) * self.samples.num_samples // count
        for start in range(0, count, size):
            self.stop.check()
            yield self.samples.batch(chosen[start : start + size])

    def measure(self, model: Transformer, precision: Precision, most: int | None = None) -> dict[str, float]:
        """
        Mean loss of the samples, in nats per token and, where their bytes are known, in bits per byte; of `most`
        batches only. Where memory runs out, half as many rows go through the model at once, now and later. Metrics of
        another loss function are means over all samples.
        """
        loss_function = self.loss_function or CausalLMLoss()
        if self.by_row:
            return self._by_row(model, precision, most)

        def compute(rows: int) -> tuple[float, int, dict[str, float]]:
            total, count, metrics_count = 0.0, 0, 0
            metrics = torch.zeros(len(loss_function.metrics), dtype=torch.float64)
            for batch in islice(self.batches(rows), most):
                totals, sums = loss_function.totals(batch), loss_function.losses(model, batch, precision)
                total, count, metrics_count = (
                    total + float(sums.loss),
                    count + totals.divisor,
                    metrics_count + totals.metrics_divisor,
                )
                if sums.metrics is not None:
                    metrics += sums.metrics
            return total, count, mean_metrics(loss_function, metrics, metrics_count)

        with evaluating(model):
            (total, count, metrics), self.rows = retry_on_oom(model, World.alone(), self.rows, compute)
        return self._numbers(total / max(count, 1), metrics)

    def _by_row(self, model: Transformer, precision: Precision, most: int | None) -> dict[str, float]:
        def compute(rows: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
            losses, counts = list[float](), list[int]()
            for batch in islice(self.batches(rows), most):
                losses += row_losses(model, batch, precision)
                counts += (batch.targets != IGNORE).sum(1).tolist()
            return np.array(losses), np.array(counts)

        with evaluating(model):
            (losses, counts), self.rows = retry_on_oom(model, World.alone(), self.rows, compute)
        loss, error = mean_and_error(losses, counts)
        return self._numbers(loss, {"standard_error": error})

    def _numbers(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        results = {"validation_loss": round(loss, 5)}
        results |= {f"validation_{name}": round(value, 5) for name, value in metrics.items()}
        if self.bytes_per_token:
            results["validation_bits_per_byte"] = round(loss / math.log(2) / self.bytes_per_token, 5)
        return results

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of the supervised tokens of the samples, by token; None where they have none, or are not the count."""
        if self.loss_function is not None:
            return None
        lengths = np.array(self.tokenizer.byte_lengths)
        targets = np.concatenate([batch.targets[batch.targets != IGNORE] for batch in self.batches()])
        return float(lengths[targets].mean()) or None if len(targets) else None


def mean_and_error(losses: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    """
    Mean loss a token of R samples with a sum of losses lᵣ over nᵣ tokens, and its standard error.

        L = Σ lᵣ / Σ nᵣ      error = √(R / (R − 1) · Σ (lᵣ − L nᵣ)²) / Σ nᵣ

    That of a ratio estimate (Cochran 1977, Sampling Techniques, §2.11). 0 for a single sample.
    """
    tokens, samples = max(int(counts.sum()), 1), len(losses)
    mean = float(losses.sum()) / tokens
    spread = float(np.square(losses - mean * counts).sum()) * samples / max(samples - 1, 1)
    return mean, math.sqrt(spread) / tokens if samples > 1 else 0.0


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """
    The model as it is when nobody trains it, and in training again afterwards. Raises LeftOthersError where memory runs
    out on a rank that holds parts of it.
    """
    model.eval()
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:
        if not (collectives.is_sharded(model) and devices.is_out_of_memory(error)):
            raise
        raise LeftOthersError(str(error).partition("\n")[0], hint=LESS_MEMORY) from None
    finally:
        collectives.settle(model)
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
    The hook that samples every `sample_every` steps, if the recipe asks for it. It drops the lines of lost steps. If
    lines of `step`, where the run resumes, are missing, it drops the others of that step too, and samples again after
    it. `agreed` gives the answer that all ranks share.
    """
    if sampler is None or not config.sample_every:
        yield []
        return
    sampled_prompts = [line.get("prompt") for line in read_metrics(out / SAMPLES) if line["step"] == step]
    whole = agreed(sampled_prompts == list(config.prompts))
    with Metrics(out / SAMPLES, step if whole else step - 1) as file:

        def is_due(state: State) -> bool:
            return state.step % config.sample_every == 0 and not (whole and state.step == step)

        def sample(state: State) -> None:
            with evaluating(model):
                texts = sampler(model, config.prompts, config.sample_tokens)
                if collectives.is_sharded(model):
                    texts = iter(list(texts))  # all ranks end what they do together before one may fail to write it
                for prompt, text in zip(config.prompts, texts, strict=True):
                    file.write(step=state.step, prompt=prompt, text=text)
                    info(f"  step {state.step}: {prompt!r} -> {text[:SHOWN]!r}")
                file.sync()

        yield [Hook(is_due, sample, "sample", vital=False)]
