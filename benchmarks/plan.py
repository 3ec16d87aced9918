"""
Is what a plan says what a run then takes?

    python benchmarks/plan.py [--json] [--quick] [--memory]

Each configuration trains for a few steps in a process of its own, on this machine's processor. Memory is the most that
the process held beyond what it held before (Linux: VmHWM, set back), after a tiny model has warmed the libraries up:
once with an allocator that gives back what is freed, as a trace reckons, and once with that of runs, which keep it
(hw/device.py). What is predicted comes by the functions of `bloomery plan`. Speed is what it says from small models,
against steps in the same process: both by the time that a thread had on the processor, so that what else the machine
does counts for neither; steps by the clock stand beside it. What a neighbor takes of caches and memory counts all the
same, and varies within minutes: steps and plans take turns, the error is that of the median plan against the median
step, and each plan against the steps just before and after it stands in the file. The numbers are the largest errors
of memory and of speed. --quick does three configurations, --memory the memory alone.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from demo import commit

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.hw import device as devices
from bloomery.hw.device import Device, measured_peak
from bloomery.model.config import ModelConfig
from bloomery.shards.loader import Batch
from bloomery.train.collectives import total_norm
from bloomery.train.config import Finetune, Training
from bloomery.train.plan import report, trace
from bloomery.train.plan.here import room
from bloomery.train.plan.memory import Machine
from bloomery.train.plan.search import Candidate, PlanRequest, best
from bloomery.train.plan.trace import check, traced_step
from bloomery.train.precision import Precision
from bloomery.train.step import accumulate_gradients, clipping, gradients

import torch

WIDE = {
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 1408,
    "context_length": 256,
}
TINY = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "intermediate_size": 128,
    "context_length": 64,
}
ADAMW, MUON = {"kind": "adamw"}, {"kind": "muon"}
Settings = dict[str, Any]
CONFIGURATIONS: dict[str, Settings] = {
    "all weights, muon": {"model": WIDE, "optimizer": MUON},
    "all weights, checkpointing full": {"model": WIDE, "optimizer": ADAMW, "activation_checkpointing": "full"},
    "vocabulary of 100,000": {
        "model": WIDE | {"hidden_size": 256, "intermediate_size": 704},
        "optimizer": ADAMW,
        "vocab_size": 100_000,
    },
    "all weights, adamw": {"model": WIDE, "optimizer": ADAMW},
    "all weights, checkpointing selective": {
        "model": WIDE,
        "optimizer": ADAMW,
        "activation_checkpointing": "selective",
    },
    "float32": {"model": WIDE, "optimizer": ADAMW, "precision": "float32"},
    "one micro-batch": {"model": WIDE, "optimizer": ADAMW, "micro_batches": 1},
    "LoRA on bfloat16": {"model": WIDE, "lora": {"base_dtype": "bfloat16"}},
    "LoRA on bfloat16, checkpointing full": {
        "model": WIDE,
        "lora": {"base_dtype": "bfloat16"},
        "activation_checkpointing": "full",
    },
    "LoRA on bfloat16, checkpointing selective": {
        "model": WIDE,
        "lora": {"base_dtype": "bfloat16"},
        "activation_checkpointing": "selective",
    },
    "LoRA on NF4": {"model": WIDE, "lora": {"base_dtype": "nf4"}},
    "LoRA on NF4, checkpointing full": {
        "model": WIDE,
        "lora": {"base_dtype": "nf4"},
        "activation_checkpointing": "full",
    },
    "LoRA on int8": {"model": WIDE, "lora": {"base_dtype": "int8"}},
    "absolute positions, gelu": {
        "model": WIDE | {"position_embedding": "learned", "norm": "layernorm", "biases": "all", "mlp": "gelu_tanh"},
        "optimizer": ADAMW,
    },
}
QUICK = 3
STEPS, PLANS, TOKENS = 3, 3, 2048
ALLOCATORS = {"given back": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}, "kept": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true", help="memory alone, which other work on the machine leaves be")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(**json.loads(options.child))))
        return
    rows = []
    for name in list(CONFIGURATIONS)[: QUICK if options.quick else None]:
        kept = None if options.memory else in_child(name, "kept")
        rows.append(row(name, in_child(name, "given back"), kept))
        if not options.json:
            print(as_text(rows[-1]), file=sys.stderr)
    worst = max(abs(float(one["error"])) for one in rows)
    slower = {"largest_speed_error": max(abs(one["speed_error"]) for one in rows)} if not options.memory else {}
    facts = {
        "name": "plan",
        "ours": {"value": worst, "unit": "largest error of a predicted peak"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine() | {"threads": devices.threads()},
        "versions": versions(),
        "notes": {"commit": commit(), **slower, "rows": rows},
    }
    print(json.dumps(facts))


def row(name: str, found: Settings, kept: Settings | None) -> Settings:
    predicted, measured_bytes = found["predicted_bytes"], found["measured_bytes"]
    memory = {
        "configuration": name,
        "predicted_mib": round(predicted / 2**20, 1),
        "measured_mib": round(measured_bytes / 2**20, 1),
        "error": round(predicted / measured_bytes - 1, 4),
    }
    if kept is None:
        return memory
    return memory | {
        "as_runs_keep_it_mib": round(kept["measured_bytes"] / 2**20, 1),
        "planned_tokens_per_second": round(kept["planned"]),
        "measured_tokens_per_second": round(kept["speed"]),
        "by_the_clock": round(kept["clock"]),
        "speed_error": round(kept["planned"] / kept["speed"] - 1, 4),
        "of_each_plan": [round(error, 4) for error in kept["errors"]],
    }


def as_text(one: Settings) -> str:
    memory = f"{one['predicted_mib']:>8} {one['measured_mib']:>8} MiB {one['error']:>+7.1%}"
    if "speed_error" not in one:
        return f"{one['configuration']:<38} {memory}"
    speed = f"{one['planned_tokens_per_second']:>7} {one['measured_tokens_per_second']:>7} tokens/s"
    speed += f" {one['speed_error']:>+7.1%} (by the clock {one['by_the_clock']:>7})"
    return f"{one['configuration']:<38} {memory}   kept {one['as_runs_keep_it_mib']:>8}   {speed}"


def in_child(name: str, allocator: str) -> Settings:
    words = json.dumps({"name": name, "kept": allocator == "kept"})
    command = [sys.executable, str(Path(__file__)), "--child", words]
    done = subprocess.run(
        command, env=os.environ | ALLOCATORS[allocator], stdout=subprocess.PIPE, check=True, text=True
    )
    found: Settings = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: str, kept: bool) -> Settings:
    """In this process, which nothing else uses."""
    if kept:
        devices.keep_freed_memory()
    settings = CONFIGURATIONS[name]
    tiny = Run(settings | {"model": TINY, "vocab_size": 500})
    tiny.step()
    del tiny
    gc.collect()
    devices.return_freed_memory()
    before = in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run = Run(settings)
    taken = [run.step() for _ in range(STEPS)]
    peak = in_use("VmHWM") - before
    ask, target, option, _ = asked(settings)
    if not kept:  # nor timed, which takes as long again
        predicted = check(ask, replace(target, flops_from="unknown"), option).peak_bytes
        return {"predicted_bytes": predicted, "measured_bytes": peak}
    blocks, planned = [taken[1:]], []
    for _ in range(PLANS):
        planned.append(planned_now(ask, target, option))
        blocks.append([run.step() for _ in range(STEPS)])
    clock, own = (statistics.median(times) for times in zip(*chain(*blocks), strict=True))
    around = [statistics.median(own for _, own in [*low, *high]) for low, high in pairwise(blocks)]
    return {
        "measured_bytes": peak,
        "planned": statistics.median(planned),
        "speed": ask.tokens / own,
        "clock": ask.tokens / clock,
        "errors": [plan * seconds / ask.tokens - 1 for plan, seconds in zip(planned, around, strict=True)],
    }


def planned_now(ask: PlanRequest, target: Machine, option: Candidate) -> float:
    """Tokens per second, timed anew: a process times each model once."""
    trace.measured.cache_clear()
    told = check(ask, target, option)
    assert told.traced
    assert told.pace is not None
    assert told.pace.timed
    return told.pace.tokens_per_second


def in_use(field: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def asked(settings: Settings) -> tuple[PlanRequest, Machine, Candidate, Device]:
    """What a recipe with these settings asks for, as `bloomery plan` understands it."""
    shape, parts = build(ModelConfig, settings["model"]), settings.get("micro_batches", 2)
    wanted: Settings = {
        key: settings[key] for key in ("optimizer", "activation_checkpointing", "precision", "lora") if key in settings
    }
    wanted |= {"steps": 1, "micro_batch_tokens": TOKENS, "global_batch_tokens": parts * TOKENS, "device": "cpu"}
    config: Training = build(Finetune if "lora" in settings else Training, wanted)
    device = devices.find("cpu")
    if config.precision != "auto":
        device = replace(device, compute_dtype=getattr(torch, config.precision))
    target = replace(room(device), flops=measured_peak(device), flops_from="measured")
    ask = report.asked("stage", config, shape, settings.get("vocab_size", 8192), target)
    return ask, target, best(ask, ask.what, ask.way, target), device


class Run:
    """Steps as the loop makes them."""

    def __init__(self, settings: Settings) -> None:
        ask, _, option, self.device = asked(settings)
        what = traced_step(option, accumulates=True)
        self.model = what.load(initialized=True)
        self.precision = Precision.decide("auto", self.device)
        self.optimizers, self.rows = what.prepare(self.model, self.precision), what.rows
        ids = np.random.default_rng(0).integers(0, what.vocab_size, (ask.rows_per_step, what.model.context_length))
        places = np.tile(np.arange(what.model.context_length), (len(ids), 1))
        self.batch = Batch(ids, ids, places, np.zeros_like(ids), np.arange(len(ids)))

    def step(self) -> tuple[float, float]:
        """Seconds on the clock, and of this thread on the processor."""
        began, worked = time.perf_counter(), time.thread_time()
        accumulate_gradients(self.model, self.batch, self.rows, self.precision)
        self.optimizers.step(clipping(1.0, total_norm(gradients(self.model))))
        self.optimizers.zero_grad()
        return time.perf_counter() - began, time.thread_time() - worked


if __name__ == "__main__":
    main()
