"""
Log training metrics to metrics.jsonl, the live line, W&B, TensorBoard, Trackio and main.log.

    mfu             the model's own floating-point operations a second / the measured peak of the device's matmuls
    mfu_catalogue   the same / the spec sheet's peak of the device, if the spec sheet has the device

Destinations are metrics.jsonl, the live line, Weights & Biases, TensorBoard, Trackio, a main.log in llm.c's format,
and whoever watches the run. All but metrics.jsonl are optional. A requested package that is missing is reported
before the first stage, by a check that needs no torch. The same check covers other needs of training settings. A
service that fails later is reported once, then left alone, and stops nothing.

TensorBoard's event files are written without TensorBoard. A record is an 8-byte length, its checksum, the bytes,
their checksum; the bytes are a protocol buffer `Event`:

    1 wall_time double   2 step int64   3 file_version string   5 summary { 1 value { 1 tag string, 2 number float } }

The checksum is CRC-32C (Castagnoli), turned right by 15 bits, plus 0xa282ead8. Source:
https://github.com/tensorflow/tensorboard, record_writer.py and event.proto.

All destinations share one file because each gets the same records.
"""

import math
import os
import platform
import re
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core import extras
from bloomery.core.io import disk_errors, whole_file
from bloomery.core.log import Metrics, ProgressMeter, info
from bloomery.hw.device import Device
from bloomery.hw.monitor import GpuMonitor
from bloomery.train.collectives import Norms
from bloomery.train.config import Sink, TensorBoard, Trackio, WeightsAndBiases
from bloomery.train.state import Failure, Hook, PhaseTimer, SkippedStep, State

SHOWN_SAMPLES = 8
NEARLY_FULL = 0.92


@dataclass
class MetricsLogger:
    metrics: Metrics
    meter: ProgressMeter
    timer: PhaseTimer
    norms: Norms
    device: Device
    global_batch_tokens: int
    """Positions that go through the model, padding included."""
    flops_per_token: float
    """Of the model, as `model.cost` counts them."""
    peak_flops: float
    """A second, of all devices that train, as measured."""
    listed_flops: float | None
    """A second, from the vendor's spec sheet. A peak is never borrowed from another device."""
    bytes_per_token: float | None
    """Of the supervised tokens of the validation split; it converts the loss to bits per byte."""
    watchers: list[Callable[[int, Mapping[str, Any]], None]] = field(default_factory=list)
    gpus: GpuMonitor | None = None
    _last: int = 0
    """Step of the last line."""
    _warned: bool = False

    def peaks(self) -> str:
        """What MFU is a share of."""
        form = str(self.device.compute_dtype).removeprefix("torch.")
        listed = "unknown" if self.listed_flops is None else f"{self.listed_flops / 1e12:.2f}"
        return (
            f"MFU is a share of {self.peak_flops / 1e12:.2f} TFLOP/s, measured in matmuls of {form} "
            f"(spec sheet: {listed})"
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
            info(
                f"metrics.jsonl has lost the steps after {there}; the weights are of {state.step}",
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
        speed = (step - self._last) * self.global_batch_tokens / max(self.timer.at_work, 1e-9)
        self._last = state.logged = step
        values: dict[str, Any] = dict(state.metrics)
        if "loss" in values and (bits := self.bits_per_byte(values["loss"])) is not None:
            values["bits_per_byte"] = round(bits, 5)
        if self.listed_flops is not None:
            values["mfu_catalogue"] = round(speed * self.flops_per_token / self.listed_flops, 4)
        if self.gpus is not None and (readings := self.gpus.take()):
            values["gpus"] = readings
        self._watch_memory()
        self.write(
            step,
            **values,
            tokens_per_second=round(speed, 1),
            mfu=round(speed * self.flops_per_token / self.peak_flops, 4),
            memory_bytes=self.device.peak_bytes(),
            seconds=self.timer.take(),
        )
        shown = {"loss": state.metrics["loss"]} if "loss" in state.metrics else {}
        self.meter.at(step, tokens_per_second=speed, **shown)

    def _watch_memory(self) -> None:
        """Say once that memory is nearly used up: the next long row or another program may be too much."""
        used, there = self.device.peak_bytes() + self.device.others_bytes(), self.device.memory_bytes
        if there and used > NEARLY_FULL * there and not self._warned:
            self._warned = True
            info(
                f"memory: {used / there:.0%} of {there / 2**30:.1f} GiB were in use. If it runs out, fewer rows go "
                'through the model at once; activation_checkpointing="full" would make room',
                style="yellow",
            )

    def log_norms(self, state: State) -> None:
        if self.norms.latest:
            self.write(state.step, **self.norms.latest)
            self.norms.latest = {}

    def skipped(self, skip: SkippedStep) -> None:
        """Name the samples of an update that was not made."""
        first = ", ".join(map(str, skip.samples[:SHOWN_SAMPLES]))
        more = f" and {len(skip.samples) - SHOWN_SAMPLES} more" if len(skip.samples) > SHOWN_SAMPLES else ""
        info(f"skipped step {skip.step} and changed no weight: {skip.why}", style="yellow")
        info(f"  samples {first}{more}")
        self.write(
            skip.step,
            skipped=skip.why,
            skipped_loss=skip.loss,
            skipped_gradient_norm=skip.norm,
            samples=skip.samples,
        )

    def rolled_back(self, step: int, to: int) -> None:
        info(
            f"after step {step} the weights are those of step {to} again; training resumes after these samples",
            "yellow",
        )
        self.write(step, rolled_back_to=to)

    def failed(self, failure: Failure) -> None:
        self.metrics.write(step=failure.step, failed=failure.hook, error=failure.error)

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        if not self.bytes_per_token:
            return None
        return nats_per_token / math.log(2) / self.bytes_per_token


VERSION = "brain.Event:2"
CASTAGNOLI = 0x82F63B78


class EventFile:
    """One file of numbers by step. A resumed run begins another, which TensorBoard shows as the same run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = folder / f"events.out.tfevents.{now:.6f}.{platform.node()}.{os.getpid()}"
        self._file = self.path.open("wb")
        self._add(_field(1, 1) + struct.pack("<d", now) + _bytes_field(3, VERSION.encode()))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = b"".join(
            _bytes_field(1, _bytes_field(1, name.encode()) + _field(2, 5) + struct.pack("<f", value))
            for name, value in numbers.items()
        )
        event = _field(1, 1) + struct.pack("<d", time.time()) + _field(2, 0) + _varint(step) + _bytes_field(5, values)
        self._add(event)

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _field(number: int, wire: int) -> bytes:
    return bytes([number << 3 | wire])


def _bytes_field(number: int, content: bytes) -> bytes:
    return _field(number, 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (CASTAGNOLI if entry & 1 else 0)
        table.append(entry)
    return table


@runtime_checkable
class MetricsSink(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


MAIN_LOG = "main.log"
Open = Callable[[], MetricsSink]
Watch = Callable[[int, Mapping[str, Any]], None]


@dataclass
class BufferedSink:
    """A sink with what it has not taken yet. It opens with its first line, so that a dead service costs no start."""

    name: str
    open: Open
    _waiting: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    _target: MetricsSink | None = None
    _works: bool = True

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        if self._works and (numbers := flat(values)):
            self._waiting.append((step, numbers))

    def hook(self) -> Hook:
        return Hook(lambda state: bool(self._waiting), self._pass_on, self.name, vital=False, once=True)

    def _pass_on(self, state: State) -> None:
        waiting, self._waiting = self._waiting, []
        self._works = False
        self._target = self._target or self.open()
        for step, numbers in waiting:
            self._target.write(step, numbers)
        self._works = True

    def end(self) -> Hook:
        """The hook that runs once, at the end."""
        return Hook(lambda state: self._works and self._target is not None, self._close, self.name, vital=False)

    def _close(self, state: State) -> None:
        self._pass_on(state)
        assert self._target is not None
        self._target.close()


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics: those inside others as outer/inner, texts and lists left out."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def watcher(sink: Sink, run: str, out: Path, facts: Mapping[str, Any]) -> BufferedSink:
    """
    What passes numbers on to a sink. `run` names the run there, `facts` are its settings. Raises DataError where a
    package is missing.
    """
    match sink:
        case WeightsAndBiases():
            module = extras.load("wandb")
            return BufferedSink("wandb", lambda: _WandB(module, sink, run, out, facts))
        case Trackio():
            module = extras.load("trackio")
            return BufferedSink("trackio", lambda: _Trackio(module, sink, run, facts))
        case TensorBoard():
            return BufferedSink("tensorboard", lambda: EventFile(out / "tensorboard"))


class _WandB:
    """A killed and resumed run stays a single run at W&B: its run ID is the name of the stage's folder."""

    def __init__(self, module: Any, sink: WeightsAndBiases, run: str, out: Path, facts: Mapping[str, Any]) -> None:
        mode = "offline" if sink.offline else "online"
        how = {"project": sink.project, "name": run, "id": run, "resume": "allow", "dir": str(out), "mode": mode}
        self._run = module.init(config=dict(facts), **how)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, module: Any, sink: Trackio, run: str, facts: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project=sink.project, name=run, config=dict(facts), resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


class MainLog:
    """
    main.log in the words of llm.c (logger.h), for those whose scripts read it.

        s:12 trl:3.1416 lr:0.000600 norm:1.23      training: the batch that is read after 12 updates
        s:20 tel:3.0000                            validation loss after 20 updates
        s:20 eval:0.3000                           accuracy on HellaSwag after 20 updates, by mean loss of a token

    A resumed run drops the lines of the steps that were lost.
    """

    def __init__(self, path: Path, resume_at: int) -> None:
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        with whole_file(path, "w") as file:
            file.writelines(f"{line}\n" for line in before if _updates(line) <= resume_at)
        self._path = path

    def train(self, state: State) -> None:
        if "loss" in state.metrics:
            loss, lr, norm = (state.metrics[name] for name in ("loss", "learning_rate", "gradient_norm"))
            self._add(f"s:{state.step - 1} trl:{loss:.4f} lr:{lr:.6f} norm:{norm:.2f}")

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """What an evaluation has found."""
        for name, word in (("validation_loss", "tel"), ("hellaswag_per_token", "eval")):
            if isinstance(value := values.get(name), float):
                self._add(f"s:{step} {word}:{value:.4f}")

    def _add(self, line: str) -> None:
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main_log(path: Path, resume_at: int, watchers: list[Watch]) -> Hook:
    """The hook that writes it; what evaluations find comes from the watchers of metrics."""
    file = MainLog(path, resume_at)
    watchers.append(file.take)
    return Hook(lambda state: True, file.train, "main_log")


def _updates(line: str) -> float:
    """After how many updates a line could be written; a line that is none of ours does not stay."""
    match = re.fullmatch(r"s:(\d+) (trl|tel|eval):.*", line)
    if match is None:
        return float("inf")
    return float(match[1]) + (match[2] == "trl")
