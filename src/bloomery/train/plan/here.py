"""
This machine as a plan sees it, and the trial of a run before it trains.

A plan asks for memory, measured speed, and the sequences that go through a model at once. `DryRun` then tries two
steps, an evaluation and a save. A failure that would end a run after hours ends it before it begins.

In the trial the learning rate is 0, so that no weight changes, and the optimizer's state is cleared again. The first
step allocates the optimizer's memory. The second step has two micro-batches, if there are more, so that gradients
and activations exist together.
"""

import os
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_args

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.io import write_json
from bloomery.core.log import about, counted, info
from bloomery.core.records import read_record
from bloomery.hw import device as devices
from bloomery.hw import distributed, launcher
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.hw.host import Host, memory_bytes
from bloomery.hw.launcher import cores
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import SampleSource
from bloomery.train.config import LEVELS, Level, Training
from bloomery.train.optim import Optimizers
from bloomery.train.plan import report
from bloomery.train.plan.memory import USUAL_TOKENS, Machine, NumberType, TrainSetup, rows_at_once, usable
from bloomery.train.plan.search import Candidate, best, first_fitting, on_host, option
from bloomery.train.precision import Precision, short
from bloomery.train.step import (
    BatchLoss,
    LossFunction,
    accumulate_gradients,
    clipping,
    gradients,
    retry_on_oom,
    retry_on_overflow,
)
from bloomery.train.validation import EvalCheck
from bloomery.weights import checkpoint

import torch

COPY_NUMBERS, COPY_SECONDS = 2**24, 0.1
PROCESSOR_GAPS = 1.5
"""Bytes that a process holds for each that a tensor does, where the C library keeps what is freed (hw/device.py)."""


def here(config: Training, devices_wanted: int = 1) -> Machine:
    """This machine as the target of a section, with the measured peaks of its matmuls."""
    device = devices.find(config.device)
    if config.compute_dtype != "auto":
        device = replace(device, compute_dtype=getattr(torch, config.compute_dtype))
    machine = room(device, devices_wanted, devices_wanted)
    flops, bandwidth = measured_peak(device), copied_per_second(device)
    exact = flops if machine.precision == "float32" else measured_peak(replace(device, compute_dtype=torch.float32))
    if machine.processor:
        longer = slower(devices_wanted)
        flops, exact, bandwidth = flops / longer, exact / longer, bandwidth / devices_wanted
    return replace(machine, flops=flops, flops_from="measured", bandwidth=bandwidth, peaks={"float32": exact})


def slower(ranks: int) -> float:
    """How many times as long a matmul takes each of `ranks` on the CPU as it takes this process alone."""
    alone = devices.threads()
    each = max(1, cores() // ranks)
    if said := os.environ.get("OMP_NUM_THREADS"):  # "4,2" is 4 threads, and 2 within each
        outer = {"OMP_NUM_THREADS": said.partition(",")[0]}
        each = launcher.number("OMP_NUM_THREADS", outer, at_least=1, hint="Unset it, or set it to a number of threads.")
    return alone / each * max(1.0, each * ranks / cores())


def room(device: Device, devices_wanted: int = 1, together: int = 1) -> Machine:
    """
    A device as a target of which only the memory is known. Ranks that compute `together` on one CPU share its
    memory. Every other device has its own memory.
    """
    processor = device.torch_device.type == "cpu"
    size = device.memory_bytes // together if processor else device.memory_bytes
    free = int(usable(device.memory_bytes, shared=True) / PROCESSOR_GAPS) // together if processor else usable(size)
    return Machine(
        name=device.name,
        devices=devices_wanted,
        memory_bytes=size,
        usable_bytes=max(free, 0),
        flops=None,
        flops_from="unknown",
        bandwidth=None,
        precision=_format(device.compute_dtype),
        processor=processor,
        host_bytes=_host_bytes(device) if together == devices_wanted else None,  # else on several hosts
        offloads=device.is_gpu and not device.shared,
        float8=devices.multiplies_float8(device.torch_device),
    )


def _host_bytes(device: Device) -> int | None:
    return memory_bytes(Host.here()) if device.torch_device.type != "cpu" else device.memory_bytes or None


DECIDED = "decided.json"


class Decided(TypedDict):
    """What a run has decided, and for what: it is taken up again on the same devices."""

    on: list[str | int]
    micro_batch_tokens: Annotated[int, Field(ge=1)]
    activation_checkpointing: Level
    offload: NotRequired[Literal["none", "host"]]
    """Not in records of a recipe that does not leave it open."""


def decided(
    config: Training, model: ModelConfig, vocab_size: int, device: Device, world: World, folder: Path
) -> Training:
    """
    A section with its micro-batch, recomputation and offloading, if the recipe leaves those open. They follow from the
    model's shape and the whole memory of device and host. All ranks recompute what one has to, offload where one has
    to, and take the most that fits on each.

    `folder` keeps the decision, so that a resumed run computes as before, also in another version of Bloomery.
    """
    asked = {name: getattr(config, name) for name in ("micro_batch_tokens", "activation_checkpointing")}
    if config.offload != "none":
        asked["offload"] = config.offload
    if "auto" not in asked.values():
        return config
    on: list[str | int] = [device.name, device.memory_bytes, world.size, *map(str, asked.values())]
    on += [] if config.mesh is None else [str(config.mesh)]
    on += ["compiled"] if config.compile == "on" else []
    with world.alike():
        known = _kept(folder / DECIDED, on) if world.is_first else None
    known = world.broadcast(known) or _decide(config, model, vocab_size, device, world)
    if world.is_first:
        write_json(folder / DECIDED, {"on": on, **known})
    return config.model_copy(update=known)


def _kept(file: Path, on: list[str | int]) -> dict[str, Any] | None:
    """What was decided for the same devices and settings; None where nothing was."""
    fix = "Remove it to decide again. The resumed run may then differ in the last bits."
    saved = read_record(file, Decided, fix=fix) if file.exists() else None
    if saved is None or saved["on"] != on:
        return None
    return {name: value for name, value in saved.items() if name != "on"}


def _decide(config: Training, model: ModelConfig, vocab_size: int, device: Device, world: World) -> dict[str, Any]:
    target = room(device, world.size, distributed.ranks_here(world))
    ask = report.asked("", config, model, vocab_size, target)
    ask = replace(
        ask, may_offload=ask.may_offload and target.host_bytes is not None
    )  # not with hosts that nobody knows

    def find(way: TrainSetup) -> Candidate:
        return best(ask, ask.what, way, target)

    if not target.memory_bytes:
        level, tokens, offload = ask.way.activation_checkpointing, USUAL_TOKENS, ask.way.offload
    else:
        way = first_fitting(ask, find).way
        level, offload = way.activation_checkpointing, world.any(way.offload)
        level = LEVELS[max(world.gather(LEVELS.index(level)))] if ask.levels else level
        way = replace(on_host(ask.way) if offload else ask.way, activation_checkpointing=level)
        tokens = find(way).way.rows * model.context_length
    if config.micro_batch_tokens != "auto":
        tokens = config.micro_batch_tokens
    decision: dict[str, Any] = {"micro_batch_tokens": min(world.gather(tokens)), "activation_checkpointing": level}
    return decision | ({} if config.offload == "none" else {"offload": "host" if offload else "none"})


def offload_cost(config: Training, model: ModelConfig, vocab_size: int, device: Device, world: World) -> str:
    """
    What a run tells of weights that stay on the host. Raises ConfigError for a device without memory of its own.
    """
    target = room(device, world.size, distributed.ranks_here(world))
    ask = report.asked("", config, model, vocab_size, target)
    if target.processor:
        return "  offload: nothing moves, as a CPU computes in the host's memory"
    choice = option(ask, ask.what, replace(ask.way, rows=rows_at_once(config, model.context_length)), target)
    return f"  offload: weights, gradients and optimizer stay on the host. {report.bus(ask, choice)}"


def _format(dtype: torch.dtype) -> NumberType:
    return next(form for form in get_args(NumberType) if form == short(dtype))


@cache
def copied_per_second(device: Device) -> float:
    """Bytes per second that a copy of a large tensor reads and writes."""
    source = torch.ones(COPY_NUMBERS, device=device.torch_device)
    target = torch.empty_like(source)
    best, end = float("inf"), time.perf_counter() + COPY_SECONDS
    target.copy_(source)
    device.synchronize()
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * source.nbytes / best


MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Tried:
    rows: int
    """That went through the model at once: fewer than was asked for, where memory ran out."""
    peak_bytes: int
    """As `Device.peak_bytes`."""
    micro_batch_seconds: float
    update_seconds: float

    def step_seconds(self, rows_per_step: int, ranks: int = 1) -> float:
        return -(-rows_per_step // (self.rows * ranks)) * self.micro_batch_seconds + self.update_seconds


@dataclass(frozen=True, kw_only=True)
class DryRun:
    model: Transformer
    optimizers: Optimizers
    samples: SampleSource
    validation: EvalCheck
    world: World
    precision: Precision
    max_grad_norm: float
    loss_function: LossFunction
    one_shape: bool = False
    """Whether blocks are compiled, which happens again for each shape."""

    def run(self, rows: int, rows_per_step: int) -> Tried:
        """Raises HardwareError where not even one row fits."""
        most = -(-rows_per_step // self.world.size)
        self.precision.device.restart_peak()  # that of a trial of other blocks does not count
        self.optimizers.set_share(0.0)
        rows = min(rows, most)
        self._step(rows if self.one_shape else 1, 1)
        used, seconds, update = self._step(rows, MICRO_BATCHES if rows < most else 1)
        self.validation.measure(self.model, self.precision, most=1)
        if self.world.size == 1:
            weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
            kept = checkpoint.copy_state(weights), checkpoint.copy_state(self.optimizers.state())
            del kept
        self.optimizers.restore({})
        return Tried(
            rows=used,
            peak_bytes=self.precision.device.peak_bytes(),
            micro_batch_seconds=seconds,
            update_seconds=update,
        )

    def _step(self, rows: int, micro_batches: int) -> tuple[int, float, float]:
        """Rows at once, seconds of a micro-batch, seconds of the update."""
        numbers = np.arange(rows * micro_batches * self.world.size) % self.samples.num_samples
        batch = self.loss_function.fullest(self.samples.batch(numbers), self.precision)

        def compute(rows: int) -> tuple[BatchLoss, torch.Tensor]:
            model, world = self.model, self.world
            work = partial(accumulate_gradients, model, batch, rows, self.precision, self.loss_function, world)
            return retry_on_overflow(model, self.precision, work)

        began = time.perf_counter()
        (_, norm), used = retry_on_oom(self.model, self.world, rows, compute)
        learned = time.perf_counter()
        if not bool(norm.isfinite()):  # a rate of 0 keeps no weight from such a gradient
            torch._foreach_zero_(gradients(self.model))
            norm = torch.zeros(())
        self.optimizers.step(clipping(self.max_grad_norm, norm))
        self.optimizers.zero_grad()
        self.precision.device.synchronize()
        parts = -(-rows * micro_batches // used)
        return used, (learned - began) / parts, time.perf_counter() - learned


def tell(tried: Tried, rows_per_step: int, steps: int, device: Device, world: World) -> None:
    """Say what came of it, and for how long training will take. The run shows this line."""
    memory = f"{tried.peak_bytes / 2**30:,.1f} GiB"
    if device.memory_bytes:
        memory = f"{tried.peak_bytes / 2**30:,.1f} of {device.memory_bytes / 2**30:,.1f} GiB"
    each = tried.step_seconds(rows_per_step, world.size)
    info(f"  Dry run OK: {memory}, micro-batch {tried.rows}, {about(steps * each)} for {counted(steps, 'step')}", "dim")
