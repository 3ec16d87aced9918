"""This machine as a plan sees it: its memory, its measured speed, and the rows that go through a model at once."""

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
from bloomery.hw.host import Host, memory_bytes
from bloomery.hw.launcher import cores
from bloomery.model.config import ModelConfig
from bloomery.train.config import Training
from bloomery.train.plan import report
from bloomery.train.plan.memory import USUAL_TOKENS, Machine, NumberType, usable
from bloomery.train.plan.search import best
from bloomery.train.precision import short

import torch

COPY_NUMBERS, COPY_SECONDS = 2**24, 0.1
PROCESSOR_GAPS = 1.5
"""Bytes that a process holds for each that a tensor does, where the C library keeps what is freed (hw/device.py)."""


def here(config: Training, devices_wanted: int = 1) -> Machine:
    """This machine as the target of a section, with the measured peaks of its matmuls."""
    device = devices.find(config.device)
    if config.precision != "auto":
        device = replace(device, compute_dtype=getattr(torch, config.precision))
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
    )


def _host_bytes(device: Device) -> int | None:
    return memory_bytes(Host.here()) if device.torch_device.type != "cpu" else device.memory_bytes or None


def decided(config: Training, model: ModelConfig, vocab_size: int, device: Device, world: World) -> Training:
    """
    A section with its micro-batch, if the recipe leaves that open. It follows from the model's shape and the whole
    memory of the device, so that a resumed run decides the same. All ranks take the most that fits on each rank.
    """
    if config.micro_batch_tokens != "auto":
        return config
    target = room(device, world.size, distributed.ranks_here(world))
    ask = report.asked("", config, model, vocab_size, target)
    candidate = best(ask, ask.what, ask.way, target) if target.memory_bytes else None
    tokens = USUAL_TOKENS if candidate is None else candidate.way.rows * model.context_length
    return config.model_copy(update={"micro_batch_tokens": min(world.gather(tokens))})


def _format(dtype: torch.dtype) -> NumberType:
    return next(form for form in get_args(NumberType) if form == short(dtype))


@cache
def copied_per_second(device: Device) -> float:
    """Bytes a second that a copy of a large tensor reads and writes."""
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
