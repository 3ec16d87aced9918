"""
What a run tells of itself while it trains: to metrics.jsonl, to the live line, and to whoever watches.

    mfu             the model's own floating-point operations a second / the measured peak of the device's products
    mfu_catalogue   the same / what the catalogue says of the device, where it knows it
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bloomery.core.log import Meter, Metrics, say
from bloomery.hw.device import Device
from bloomery.train.clock import Clock
from bloomery.train.guard import Skip
from bloomery.train.hooks import Failure
from bloomery.train.norms import Norms
from bloomery.train.state import State

SHOWN_SAMPLES = 8
NEARLY_FULL = 0.92


@dataclass
class Recorder:
    metrics: Metrics
    meter: Meter
    clock: Clock
    norms: Norms
    device: Device
    tokens_per_step: int
    """Positions that go through the model, padding included."""
    flops_per_token: float
    """Of the model, as `model.cost` counts them."""
    peak_flops: float
    """A second, of all devices that train, as measured."""
    listed_flops: float | None
    """A second, as the catalogue has it. A peak is never borrowed from another device."""
    bytes_per_token: float | None
    """Of the supervised tokens of the validation split; what a loss in bits per byte is reckoned with."""
    watchers: list[Callable[[int, Mapping[str, Any]], None]] = field(default_factory=list)
    _last: int = 0
    """Step of the last line."""
    _warned: bool = False

    def peaks(self) -> str:
        """What MFU is a share of."""
        form = str(self.device.compute_dtype).removeprefix("torch.")
        listed = "unknown" if self.listed_flops is None else f"{self.listed_flops / 1e12:.2f}"
        return (
            f"MFU is a share of its matrix products' {self.peak_flops / 1e12:.2f} TFLOP/s, measured, in {form} "
            f"(of the catalogue's: {listed})"
        )

    def start_at(self, state: State, *, tells: bool = True) -> None:
        """
        Go on from a step. One that `tells` says which lines of the steps before are lost: a run that died cuts them off
        only where the whole machine did.
        """
        self._last = state.step
        self.meter.start_at(state.step)
        there = max((line["step"] for line in self.metrics.kept if "learning_rate" in line), default=0)
        if tells and there < state.logged:
            say(
                f"metrics.jsonl has lost what it told of the steps after {there}; the weights are of {state.step}",
                "yellow",
            )

    def write(self, step: int, **values: Any) -> None:
        """One line of metrics, which others see too."""
        self.metrics.write(step=step, **values)
        for watcher in self.watchers:
            watcher(step, values)

    def log(self, state: State) -> None:
        """What the last step did, and how fast the steps since the last such line were, hooks left out."""
        step = state.step
        speed = (step - self._last) * self.tokens_per_step / max(self.clock.at_work, 1e-9)
        self._last = state.logged = step
        values: dict[str, Any] = dict(state.metrics)
        if "loss" in values and (bits := self.bits_per_byte(values["loss"])) is not None:
            values["bits_per_byte"] = round(bits, 5)
        if self.listed_flops is not None:
            values["mfu_catalogue"] = round(speed * self.flops_per_token / self.listed_flops, 4)
        self._watch_memory()
        self.write(
            step,
            **values,
            tokens_per_second=round(speed, 1),
            mfu=round(speed * self.flops_per_token / self.peak_flops, 4),
            memory_bytes=self.device.peak_bytes(),
            seconds=self.clock.take(),
        )
        shown = {"loss": state.metrics["loss"]} if "loss" in state.metrics else {}
        self.meter.at(step, tokens_per_second=speed, **shown)

    def _watch_memory(self) -> None:
        """Say once that memory is nearly used up: the next long row or another program may be too much."""
        used, there = self.device.peak_bytes(), self.device.memory_bytes
        if there and used > NEARLY_FULL * there and not self._warned:
            self._warned = True
            say(
                f"memory: {used / there:.0%} of {there / 2**30:.1f} GiB were in use. If it runs out, fewer rows go "
                'through the model at once; recompute="block" would make room',
                style="yellow",
            )

    def log_norms(self, state: State) -> None:
        if self.norms.latest:
            self.write(state.step, **self.norms.latest)
            self.norms.latest = {}

    def skipped(self, skip: Skip) -> None:
        """Name the samples of an update that was not made."""
        first = ", ".join(map(str, skip.samples[:SHOWN_SAMPLES]))
        more = f" and {len(skip.samples) - SHOWN_SAMPLES} more" if len(skip.samples) > SHOWN_SAMPLES else ""
        say(f"step {skip.step} is skipped, no weight was changed: {skip.why}; samples {first}{more}", style="yellow")
        self.write(
            skip.step,
            skipped=skip.why,
            skipped_loss=skip.loss,
            skipped_gradient_norm=skip.norm,
            samples=skip.samples,
        )

    def rolled_back(self, step: int, to: int) -> None:
        say(
            f"after step {step} the weights are those of step {to} again; training goes on behind these samples",
            "yellow",
        )
        self.write(step, rolled_back_to=to)

    def failed(self, failure: Failure) -> None:
        self.metrics.write(step=failure.step, failed=failure.hook, error=failure.error)

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        if not self.bytes_per_token:
            return None
        return nats_per_token / math.log(2) / self.bytes_per_token
