"""
Is what a plan says what a run then takes?

    python benchmarks/plan.py [--json] [--quick]

Each configuration trains for a few steps in a process of its own, on this machine's processor. Memory is the most that
the process held beyond what it held before (Linux: VmHWM, set back), after a tiny model has warmed the libraries up:
once with an allocator that gives back what is freed, as a trace reckons, and once with that of runs, which keep it
(hw/device.py). Speed is what `bloomery plan` says from small models, against the best of some steps. The number is the
largest error of the memory. --quick does three configurations.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from demo import commit

from bloomery.core.config import build
from bloomery.core.stage import machine, versions
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train.config import Training
from bloomery.train.device import fast_dtype
from bloomery.train.loop import accumulate_gradients, clipping, gradients
from bloomery.train.optim import Optimizers
from bloomery.train.optim_adamw import total_norm
from bloomery.train.planning.timed import timed
from bloomery.train.planning.trace import Step, trace
from bloomery.train.precision import Precision
from bloomery.train.recompute import recompute

import torch

WIDE = {"width": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "mlp_width": 1408, "context": 256}
TINY = {"width": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 128, "context": 64}
ADAMW, MUON = {"kind": "adamw"}, {"kind": "muon"}
Settings = dict[str, Any]
CONFIGURATIONS: dict[str, Settings] = {
    "all weights, muon": {"model": WIDE, "optimizer": MUON},
    "all weights, recompute block": {"model": WIDE, "optimizer": ADAMW, "recompute": "block"},
    "vocabulary of 100,000": {
        "model": WIDE | {"width": 256, "mlp_width": 704},
        "optimizer": ADAMW,
        "vocab_size": 100_000,
    },
    "all weights, adamw": {"model": WIDE, "optimizer": ADAMW},
    "all weights, recompute selective": {"model": WIDE, "optimizer": ADAMW, "recompute": "selective"},
    "float32": {"model": WIDE, "optimizer": ADAMW, "precision": "float32"},
    "one micro-batch": {"model": WIDE, "optimizer": ADAMW, "micro_batches": 1},
    "absolute positions, gelu": {
        "model": WIDE | {"positions": "absolute", "norm": "layernorm", "biases": "all", "feed_forward": "gelu_tanh"},
        "optimizer": ADAMW,
    },
}
QUICK = 3
STEPS = 3
ALLOCATORS = {"given back": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}, "kept": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(**json.loads(options.child))))
        return
    rows = []
    for name in list(CONFIGURATIONS)[: QUICK if options.quick else None]:
        found = {kind: in_child(name, kind) for kind in ALLOCATORS}
        rows.append(row(name, found["given back"], found["kept"]))
        if not options.json:
            print(as_text(rows[-1]), file=sys.stderr)
    worst = max(abs(float(one["error"])) for one in rows)
    facts = {
        "name": "plan",
        "ours": {"value": worst, "unit": "largest error of a predicted peak"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine() | {"threads": devices.threads()},
        "versions": versions(),
        "notes": {"commit": commit(), "rows": rows},
    }
    print(json.dumps(facts))


def row(name: str, found: Settings, kept: Settings) -> Settings:
    predicted, measured_bytes = found["predicted_bytes"], found["measured_bytes"]
    return {
        "configuration": name,
        "predicted_mib": round(predicted / 2**20, 1),
        "measured_mib": round(measured_bytes / 2**20, 1),
        "error": round(predicted / measured_bytes - 1, 4),
        "as_runs_keep_it_mib": round(kept["measured_bytes"] / 2**20, 1),
        "planned_tokens_per_second": round(kept["planned"]),
        "measured_tokens_per_second": round(kept["speed"]),
        "speed_error": round(kept["planned"] / kept["speed"] - 1, 4),
    }


def as_text(one: Settings) -> str:
    memory = f"{one['predicted_mib']:>8} {one['measured_mib']:>8} MiB {one['error']:>+7.1%}"
    speed = f"{one['planned_tokens_per_second']:>7} {one['measured_tokens_per_second']:>7} tokens/s"
    kept = one["as_runs_keep_it_mib"]
    return f"{one['configuration']:<34} {memory}   kept {kept:>8}   {speed} {one['speed_error']:>+7.1%}"


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
    run(settings | {"model": TINY, "vocab_size": 500})
    gc.collect()
    devices.return_freed_memory()
    before = in_use("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    seconds = run(settings)
    peak = in_use("VmHWM") - before
    what, device = step_of(settings)
    if not kept:
        return {"predicted_bytes": trace(what).peak, "measured_bytes": peak}
    told = timed(what, device)
    assert told is not None
    parts = settings.get("micro_batches", 2)
    tokens = what.rows * what.model.context * parts
    planned = tokens / (told.learning * parts + told.updating)
    return {"measured_bytes": peak, "planned": planned, "speed": tokens / min(seconds[1:])}


def in_use(field: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def step_of(settings: Settings) -> tuple[Step, Device]:
    shape = build(ModelConfig, settings["model"])
    wanted: Settings = {key: settings[key] for key in ("optimizer", "recompute") if key in settings}
    config = build(Training, {"steps": 1, "tokens_per_step": 1, **wanted})
    dtype = getattr(torch, settings.get("precision", "bfloat16"))
    what = Step(
        model=shape,
        vocab_size=settings.get("vocab_size", 8192),
        optimizer=config.optimizer,
        recompute=config.recompute,
        precision=dtype,
        rows=2048 // shape.context,
        accumulates=settings.get("micro_batches", 2) > 1,
    )
    return what, replace(devices.find("cpu"), compute_dtype=dtype)


def run(settings: Settings) -> list[float]:
    """Seconds of each of a few steps, as the loop makes them."""
    what, device = step_of(settings)
    model = Transformer(what.model, what.vocab_size)
    model.initialize(0)
    recompute(model, what.recompute)
    optimizers = Optimizers(model, what.optimizer, fast_dtype(device))
    precision = Precision.decide("auto", device)
    rows = what.rows * settings.get("micro_batches", 2)
    ids = np.random.default_rng(0).integers(0, what.vocab_size, (rows, what.model.context))
    places = np.tile(np.arange(what.model.context), (rows, 1))
    batch = Batch(ids, ids, places, np.zeros_like(ids), np.arange(rows))
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        accumulate_gradients(model, batch, what.rows, device, precision=precision)
        optimizers.step(clipping(1.0, total_norm(gradients(model))))
        optimizers.zero_grad()
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
