"""Plans for this machine, with measured speed and memory from tracing."""

import os
import time
from dataclasses import replace
from functools import cache
from typing import get_args

import bloomery.hw.require_torch  # noqa: F401
from bloomery.hw import device as devices
from bloomery.hw import distributed, launcher
from bloomery.hw.device import Device, measured_peak
from bloomery.hw.distributed import World
from bloomery.hw.launcher import cores
from bloomery.model.config import ModelConfig
from bloomery.train.config import Training
from bloomery.train.plan import report
from bloomery.train.plan.memory import USUAL_TOKENS, Machine, NumberType, TrainSetup, usable
from bloomery.train.plan.search import Candidate, PlanRequest, best
from bloomery.train.plan.trace import TracedStep, timed, trace
from bloomery.train.precision import short

import torch

COPY_NUMBERS, COPY_SECONDS = 2**24, 0.1
PROCESSOR_GAPS = 1.5
"""Bytes that a process holds for each that a tensor does, where the C library keeps what is freed (hw/device.py)."""


def here(config: Training, devices_wanted: int = 1) -> Machine:
    """This machine as a target for what a section asks of it, with the measured peaks of its products."""
    device = devices.find(config.device)
    if config.precision != "auto":
        device = replace(device, compute_dtype=getattr(torch, config.precision))
    found = room(device, devices_wanted, devices_wanted)
    flops, bandwidth = measured_peak(device), copied_per_second(device)
    exact = flops if found.precision == "float32" else measured_peak(replace(device, compute_dtype=torch.float32))
    if found.processor:
        longer = slower(devices_wanted)
        flops, exact, bandwidth = flops / longer, exact / longer, bandwidth / devices_wanted
    return replace(found, flops=flops, flops_from="measured", bandwidth=bandwidth, peaks={"float32": exact})


def slower(ranks: int) -> float:
    """How much longer a product takes a rank on the processor, of so many, than it takes this process alone."""
    alone = devices.threads()
    each = max(1, cores() // ranks)
    if said := os.environ.get("OMP_NUM_THREADS"):  # "4,2" is 4 threads, and 2 within each
        outer = {"OMP_NUM_THREADS": said.partition(",")[0]}
        each = launcher.number("OMP_NUM_THREADS", outer, at_least=1, hint="Unset it, or set it to a number of threads.")
    return alone / each * max(1.0, each * ranks / cores())


def room(device: Device, devices_wanted: int = 1, together: int = 1) -> Machine:
    """
    A device as a target of which only the memory is known. Ranks that compute `together` on one processor share its
    memory; of other devices each has its own.
    """
    processor = device.place.type == "cpu"
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
    )


def decided(config: Training, model: ModelConfig, vocab_size: int, device: Device, world: World) -> Training:
    """
    A section with the rows that go through the model at once, where it leaves them open: from its shape and the whole
    memory of the device, so that a run which goes on decides the same; on all ranks what fits on each of them.
    """
    if config.micro_batch_tokens != "auto":
        return config
    target = room(device, world.size, distributed.ranks_here(world))
    ask = report.asked("", config, model, vocab_size, target)
    found = best(ask, ask.what, ask.way, target) if target.memory_bytes else None
    tokens = USUAL_TOKENS if found is None else found.way.rows * model.context
    return config.model_copy(update={"micro_batch_tokens": min(world.gather(tokens))})


def _format(dtype: torch.dtype) -> NumberType:
    return next(form for form in get_args(NumberType) if form == short(dtype))


@cache
def copied_per_second(device: Device) -> float:
    """Bytes a second that a copy of a large tensor reads and writes."""
    source = torch.ones(COPY_NUMBERS, device=device.place)
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


def traceable(way: TrainSetup) -> bool:
    """Whether the step is one that this software makes."""
    return not way.sharded or way.method == "full"


def check(ask: PlanRequest, target: Machine, option: Candidate) -> Candidate:
    """The memory of a way as tracing finds it, where it can be traced, and its speed by timing, where that is here."""
    if not traceable(option.way):
        return option
    what = step(option, option.way.rows * option.way.devices < ask.rows_per_step)
    found = trace(what)
    moment, kept = found.at_peak
    kept["weights"] += option.what.reference_bytes(option.way.method)  # which takes part in no step that is traced
    peak = sum(kept.values())
    option = replace(option, peak_bytes=peak, fits=peak <= target.usable_bytes, traced=(moment, kept))
    if target.flops_from != "measured" or option.pace is None or option.way.sharded:  # others are waited for there
        return option
    seconds = timed(what, _device(target))
    if seconds is None:
        return option
    parts = -(-ask.rows_per_step // (option.way.rows * option.way.devices))
    tokens = ask.rows_per_step * ask.what.model.context
    rate = tokens / (seconds.step(parts) * (slower(target.devices) if target.processor else 1.0))
    return replace(option, pace=replace(option.pace, tokens_per_second=rate, timed=True))


def _device(target: Machine) -> Device:
    """The device that a target here stands for."""
    return devices.find("cpu" if target.processor else "auto")


def step(option: Candidate, accumulates: bool) -> TracedStep:
    """What is traced and timed of a way."""
    return TracedStep(
        model=option.what.model,
        vocab_size=option.what.vocab_size,
        optimizer=option.what.optimizer,
        recompute=option.way.recompute,
        precision=getattr(torch, option.way.precision),
        rows=option.way.rows,
        accumulates=accumulates,
        on_processor=option.what.processor,
        ranks=option.way.devices if option.way.sharded else 1,
        lora=option.what.adapters(option.way),
    )
