"""
Does the arithmetic of a plan find the memory that a step takes on a GPU, for every preset?

    python benchmarks/gpu_memory.py [--json] [--quick] [--presets NAME …] [--into FILE]

The step is traced on tensors without numbers, as it runs on a GPU: with the attention kernel for masks, with a bias
where that kernel is not there, and on rows of one document. On one device and on eight that share the weights (FSDP),
each with the sequences and the recomputation that a run takes on 80 GB. The arithmetic decides those in a run; the plan
itself shows the trace. The number is the largest error of the arithmetic, for the kernel that runs take. --quick takes
three presets.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.hw.specs import named
from bloomery.model.config import PRESETS, ModelConfig
from bloomery.train.config import Training
from bloomery.train.plan import report, trace
from bloomery.train.plan.memory import of_entry
from bloomery.train.plan.search import Candidate, best, first_fitting
from bloomery.train.plan.trace import TracedStep, traced_step

GIB = 2**30
QUICK = ("gpt2-124m", "plasma-756m", "harness-1b")
CARD = "h100"


def choice(preset: str, devices: int) -> Candidate:
    """What a run of this preset takes on so many cards."""
    target = of_entry(named(CARD), devices)
    settings = {"steps": 1, "global_batch_tokens": 2**19, "parallelism": "fsdp" if devices > 1 else "none"}
    config = build(Training, settings | {"activation_checkpointing": "auto", "optimizer": {"kind": "adamw"}})
    model = build(ModelConfig, {"preset": preset})
    ask = report.asked("pretrain", config, model, PRESETS[preset].vocab_size, target)
    return first_fitting(ask, lambda way: best(ask, ask.what, way, target))


@contextmanager
def without_kernel_for_masks() -> Iterator[None]:
    """Packed rows of any length take a bias, as where Triton is missing or fails its trial."""
    before: int = vars(trace)["FLEX_TOKENS"]
    vars(trace)["FLEX_TOKENS"] = 2**62
    try:
        yield
    finally:
        vars(trace)["FLEX_TOKENS"] = before


def row(preset: str, devices: int) -> dict[str, Any]:
    taken = choice(preset, devices)
    step: TracedStep = traced_step(taken, accumulates=True)
    peaks = {"packed": trace.extrapolated(step).peak, "plain": trace.extrapolated(replace(step, packed=False)).peak}
    with without_kernel_for_masks():
        peaks["packed, with a bias"] = trace.extrapolated(step).peak
    return {
        "preset": preset,
        "devices": devices,
        "rows": taken.way.rows,
        "tokens": taken.what.model.context_length,
        "activation_checkpointing": taken.way.activation_checkpointing,
        "fits": taken.fits,
        "arithmetic_gib": round(taken.peak_bytes / GIB, 2),
        "traced_gib": {name: round(size / GIB, 2) for name, size in peaks.items()},
        "error": round(taken.peak_bytes / peaks["packed"] - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--into", type=Path, help="write the result there too")
    options = parser.parse_args()
    rows = []
    for preset in QUICK if options.quick else options.presets:
        for devices in (1, 8):
            rows.append(row(preset, devices))
            if not options.json:
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "name": "gpu_memory",
        "ours": {"value": max(abs(one["error"]) for one in rows), "unit": "largest error of a predicted peak"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {"card": CARD, "rows": rows},
    }
    if options.into:
        options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
