"""
What surrounds the loop in a stage: device, batches, resume, checkpoints, metrics, progress.

Pretraining and finetuning differ in where their weights and samples come from, and in nothing here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.log import Meter, Metrics, progress, say
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Samples, batches
from bloomery.tokenizer.chat import Renderer
from bloomery.train.config import Training
from bloomery.train.loop import Hook, State, micro_batch_loss, train
from bloomery.train.optim import Optimizers, share
from bloomery.weights import checkpoint, huggingface
from bloomery.weights.huggingface import Lineage

import torch

VALIDATION_BATCHES = 16


@dataclass
class Session:
    """A training run: what it trains, on what, and where it leaves its results."""

    name: str
    config: Training
    model: Transformer
    renderer: Renderer
    samples: Samples
    validation: Samples | None
    lineage: Lineage
    out: Path
    evaluate_every: int | None = None

    def run(self) -> dict[str, Any]:
        """Train to the end from the newest whole checkpoint, and leave the model in `out/model`."""
        device = find_device(self.config)
        self.model.to(device.place)
        optimizers = Optimizers(self.model, self.config.optimizer)
        state = self._resume(optimizers, device)
        rows = max(1, self.config.tokens_per_step // self.samples.length)
        began, seen_before = time.monotonic(), state.tokens
        source = batches(self.samples, first=state.samples, size=rows, seed=self.config.seed)
        with (
            Metrics(self.out / "metrics.jsonl", state.step) as metrics,
            progress(self.name, "steps", self.config.steps) as meter,
        ):
            meter.start_at(state.step)
            train(
                self.model,
                optimizers,
                source,
                state=state,
                steps=self.config.steps,
                micro_batch=max(1, self.config.micro_batch_tokens // self.samples.length),
                learning_rate_share=lambda step: share(self.config.schedule, step, self.config.steps),
                max_norm=self.config.max_norm,
                device=device,
                hooks=self._hooks(optimizers, device, metrics, meter),
            )
        source.close()
        seconds = time.monotonic() - began
        huggingface.save(self.out / "model", self.model, self.renderer, self._lineage(state))
        final = self._validate(device) if self.validation else None
        facts = cost(self.model.config, self.model.vocab_size)
        return {
            "parameters": facts.parameters,
            "steps": state.step,
            "tokens": state.tokens,
            "epochs": round(state.samples / self.samples.num_samples, 3),
            "loss": round(state.metrics.get("loss", float("nan")), 5) if state.metrics else None,
            "validation_loss": final,
            "tokens_per_second": round((state.tokens - seen_before) / max(seconds, 1e-9)),
            "device": device.name,
            "precision": str(device.compute_dtype).removeprefix("torch."),
            "threads": devices.threads(),
            "peak_bytes": device.peak_bytes(),
        }

    def _resume(self, optimizers: Optimizers, device: Device) -> State:
        found = checkpoint.newest(self.out / "checkpoints")
        if found is None:
            return State()
        saved = huggingface.load(found.folder, device.place)
        self.model.load_state_dict(saved.model.state_dict())
        optimizers.restore(found.training)
        say(f"  {self.name} goes on from step {found.state['step']} ({found.folder.name})")
        return State(**found.state)

    def _lineage(self, state: State) -> Lineage:
        return Lineage(**{**self.lineage.__dict__, "step": state.step})

    def _hooks(self, optimizers: Optimizers, device: Device, metrics: Metrics, meter: Meter) -> Sequence[Hook]:
        """Log, save, evaluate: in this order, so that the weights are safe before anything else may fail."""
        last_save, last_log = time.monotonic(), (time.monotonic(), 0)
        due: Callable[[State], bool] = lambda s: (  # noqa: E731
            time.monotonic() - last_save >= self.config.save_every_seconds or s.step == self.config.steps
        )

        def log(state: State) -> None:
            nonlocal last_log
            now = time.monotonic()
            speed = (state.tokens - last_log[1]) / (now - last_log[0]) if last_log[1] else 0.0
            last_log = (now, state.tokens)
            metrics.write(step=state.step, **state.metrics, tokens_per_second=round(speed, 1))
            meter.at(state.step, tokens_per_second=speed, loss=state.metrics["loss"])

        def save(state: State) -> None:
            nonlocal last_save
            checkpoint.save(
                self.out / "checkpoints",
                state.step,
                lambda folder: huggingface.save(folder, self.model, self.renderer, self._lineage(state)),
                optimizers.state(),
                state.__dict__,
                keep=self.config.keep_checkpoints,
            )
            last_save = time.monotonic()

        def evaluate(state: State) -> None:
            metrics.write(step=state.step, validation_loss=self._validate(device))

        hooks = [
            Hook(lambda s: s.step % self.config.log_every == 0 or s.step == self.config.steps, log),
            Hook(due, save),
        ]
        if self.validation and (every := self.evaluate_every):
            hooks.append(Hook(lambda s: s.step % every == 0, evaluate))
        return hooks

    def _validate(self, device: Device) -> float:
        """Mean loss, in nats a token, over the first samples of the validation split."""
        assert self.validation is not None
        size = max(1, self.config.micro_batch_tokens // self.validation.length)
        count = min(self.validation.num_samples, size * VALIDATION_BATCHES)
        total, tokens = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                batch = self.validation.batch(np.arange(start, min(start + size, count)))
                total += float(micro_batch_loss(self.model, batch, device))
                tokens += int((batch.targets != IGNORE).sum())
        self.model.train()
        return round(total / max(tokens, 1), 5)


def find_device(config: Training) -> Device:
    """The device that a recipe asks for, with the number format that it asks for."""
    devices.keep_freed_memory()
    found = devices.find(config.device)
    if config.precision == "auto":
        return found
    return Device(**{**found.__dict__, "compute_dtype": getattr(torch, config.precision)})
