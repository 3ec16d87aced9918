"""Whether the GPUs of this machine can add up their numbers, each driven by a process of its own."""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from bloomery.core import child
from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import find
from bloomery.hw.probe.compare import say, tell_device

import torch
import torch.distributed as dist

WATCHDOG_SECONDS = 10
COUNT = 2**22


def all_reduce() -> None:
    """Start a process for each GPU (two without one), which end by themselves when one of them waits too long."""
    device = find()
    tell_device(device)
    world = max(2, torch.cuda.device_count() if device.place.type == "cuda" else 0)
    say(trying=f"{world} processes")
    with tempfile.TemporaryDirectory() as folder:
        words = {"WORLD_SIZE": str(world), "BLOOMERY_MEET": str(Path(folder) / "meet")}
        processes = [
            subprocess.Popen(
                child.leashed([sys.executable, "-m", "bloomery.hw.probe", "all-reduce-rank"]),
                env={**os.environ, **words, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        codes = [process.wait() for process in processes]
    say(ranks=world, codes=codes)


def rank() -> None:
    """One of them: it adds what all have, several times, and the first tells what came out and how fast."""
    device = find()
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        device.backend,
        init_method=f"file://{os.environ['BLOOMERY_MEET']}",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=WATCHDOG_SECONDS),
    )
    given = torch.full((COUNT,), float(number + 1), device=device.place)
    best, wrong = float("inf"), 0
    for _ in range(3):
        total = given.clone()
        device.synchronize()
        began = time.perf_counter()
        dist.all_reduce(total)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
        wrong += int((total != world * (world + 1) / 2).sum())
    if number == 0:
        say(wrong=wrong, bytes_per_second=2 * (world - 1) / world * 4 * COUNT / best)
    dist.destroy_process_group()
