"""
What surrounds the loop in a stage: device, batches, resume, checkpoints, metrics, progress.

Pretraining and finetuning differ in where their weights and samples come from, and in nothing here.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.log import METRICS, Meter, Metrics, progress, say
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Course, Samples, batches
from bloomery.tokenizer.chat import Renderer
from bloomery.train.config import Training
from bloomery.train.loop import Hook, State, micro_batch_loss, train
from bloomery.train.optim import Optimizers, share
from bloomery.train.plan import rows_at_once, rows_per_step
from bloomery.weights import checkpoint, huggingface
from bloomery.weights.huggingface import Lineage

import torch

VALIDATION_SAMPLES = 256
STEPS_BETWEEN_TRIMS = 25


@dataclass
class Session:
    """A training run: what it trains, on what, and where it leaves its results."""

    name: str
    config: Training
    model: Transformer
    renderer: Renderer
    samples: Samples | Course
    validation: Samples
    lineage: Lineage
    out: Path
    measured: dict[int, float] = field(default_factory=dict)
    """Step -> validation loss, so far."""

    def run(self) -> dict[str, Any]:
        """Train to the end from the newest whole checkpoint, and leave the model in `out/model`."""
        device = find_device(self.config)
        self.model.to(device.place)
        optimizers = Optimizers(self.model, self.config.optimizer)
        state = self._resume(optimizers)
        began, first_step = time.monotonic(), state.step
        source = batches(self.samples, first=state.samples, size=self.rows, seed=self.config.seed)
        with (
            closing(source),
            Metrics(self.out / METRICS, state.step) as metrics,
            progress(self.name, "steps", self.config.steps) as meter,
        ):
            meter.start_at(state.step)
            train(
                self.model,
                optimizers,
                source,
                state=state,
                steps=self.config.steps,
                micro_batch=rows_at_once(self.config, self.samples.length),
                learning_rate_share=lambda step: share(self.config.schedule, step, self.config.steps),
                max_norm=self.config.max_norm,
                device=device,
                hooks=self._hooks(state, optimizers, device, metrics, meter),
            )
        steps, seconds = state.step - first_step, time.monotonic() - began
        huggingface.save(self.out / "model", self.model, self.renderer, self._lineage(state))
        facts = cost(self.model.config, self.model.vocab_size)
        return {
            "parameters": facts.parameters,
            "steps": state.step,
            "tokens": state.step * self.tokens_per_step,
            "supervised_tokens": state.tokens,
            "epochs": round(self.samples.epochs(state.samples), 3),
            "loss": round(state.metrics["loss"], 5) if state.metrics else None,
            "validation_loss": self._validation_loss(state, device),
            "tokens_per_second": round(steps * self.tokens_per_step / seconds) if steps else None,
            "device": device.name,
            "precision": str(device.compute_dtype).removeprefix("torch."),
            "threads": devices.threads(),
            "peak_bytes": device.peak_bytes(),
        }

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return rows_per_step(self.config, self.samples.length)

    @property
    def tokens_per_step(self) -> int:
        """Positions that go through the model in a step, padding included."""
        return self.rows * self.samples.length

    def _resume(self, optimizers: Optimizers) -> State:
        found = checkpoint.newest(self.out / "checkpoints")
        if found is None:
            return State()
        huggingface.fill(self.model, found.folder, self.lineage)
        optimizers.restore(found.training)
        say(f"  {self.name} goes on from step {found.state['step']} ({found.folder.name})")
        return State(**found.state)

    def _lineage(self, state: State) -> Lineage:
        return replace(self.lineage, step=state.step)

    def _hooks(
        self, start: State, optimizers: Optimizers, device: Device, metrics: Metrics, meter: Meter
    ) -> Sequence[Hook]:
        """Log, save, evaluate: in this order, so that the weights are safe before anything else may fail."""
        steps, every = self.config.steps, self.config.evaluate_every
        last_save = time.monotonic()
        last_log = (last_save, start.step)

        def log(state: State) -> None:
            nonlocal last_log
            now = time.monotonic()
            speed = (state.step - last_log[1]) * self.tokens_per_step / (now - last_log[0])
            last_log = (now, state.step)
            metrics.write(step=state.step, **state.metrics, tokens_per_second=round(speed, 1))
            meter.at(state.step, tokens_per_second=speed, loss=state.metrics["loss"])

        def save(state: State) -> None:
            nonlocal last_save
            checkpoint.save(
                self.out / "checkpoints",
                state.step,
                lambda folder: huggingface.save(folder, self.model, self.renderer, self._lineage(state)),
                optimizers.state(),
                asdict(state),
                keep=self.config.keep_checkpoints,
            )
            last_save = time.monotonic()

        def save_is_due(state: State) -> bool:
            return time.monotonic() - last_save >= self.config.save_every_seconds or state.step == steps

        def evaluate(state: State) -> None:
            metrics.write(step=state.step, validation_loss=self._validation_loss(state, device))

        known = {line["step"]: line["validation_loss"] for line in metrics.kept if "validation_loss" in line}
        self.measured.update(known)
        if start.step and start.step % every == 0 and start.step not in known:
            evaluate(start)  # the process died between saving and evaluating
        return [
            Hook(lambda s: s.step % self.config.log_every == 0 or s.step == steps, log),
            Hook(save_is_due, save),
            Hook(lambda s: s.step % every == 0, evaluate),
            Hook(lambda s: s.step % STEPS_BETWEEN_TRIMS == 0, lambda s: devices.return_freed_memory()),
        ]

    def _validation_loss(self, state: State, device: Device) -> float:
        """What `_validate` gives, measured once for a step."""
        if state.step not in self.measured:
            self.measured[state.step] = self._validate(device)
        return self.measured[state.step]

    def _validate(self, device: Device) -> float:
        """Mean loss, in nats a token, over samples at even distances in the validation split: the same every time."""
        size = rows_at_once(self.config, self.validation.length)
        count = min(self.validation.num_samples, VALIDATION_SAMPLES)
        chosen = np.arange(count) * self.validation.num_samples // count
        total, tokens = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                batch = self.validation.batch(chosen[start : start + size])
                total += float(micro_batch_loss(self.model, batch, device))
                tokens += int((batch.targets != IGNORE).sum())
        self.model.train()
        return round(total / max(tokens, 1), 5)


def find_device(config: Training) -> Device:
    """The device that a recipe asks for, with the number format that it asks for."""
    devices.return_freed_memory()  # what earlier stages of this process left
    found = devices.find(config.device)
    if config.precision == "auto":
        return found
    return replace(found, compute_dtype=getattr(torch, config.precision))
