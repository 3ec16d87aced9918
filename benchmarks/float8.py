"""
How much does the demo's model learn with matmuls in float8, in equal steps from equal weights?

    python benchmarks/float8.py [--json] [--quick] [--steps N] [--rows N] [--seeds N] [--folder FOLDER]
        [--into FILE]

The shards, the model and the schedule are those of recipes/demo.toml; a step has 8 rows of 256 tokens, and AdamW
updates. What is not in float8 is in float32, so that a CPU without units for bfloat16 takes minutes. The loss is that
of 32 held-out rows, in float32, the same for every run. CPUs compute a matmul in float8 by other means, so that this
says nothing about speed. With --folder, what is done stays there, and the command goes on.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import learners

from bloomery.core import config
from bloomery.core.pipeline import machine, versions
from bloomery.model.config import Float8
from bloomery.recipe import Recipe
from bloomery.train.config import AdamW

import torch

FORMATS: dict[str, Float8] = {"float32": "off", "head": "head", "all": "all"}
"""Name -> the setting `float8`."""
OPTIMIZER = AdamW(learning_rate=1e-3)
"""The best rate that optimizers.py tried for the same model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--into", type=Path, help="write the result there too")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(learned(options)))
        return
    if options.quick:
        options.steps, options.seeds = 4, 1
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder)
        options.folder.mkdir(parents=True, exist_ok=True)
        learners.make_demo_shards(options.folder)
        losses = {name: [run(name, seed, options)[-1][3] for seed in range(options.seeds)] for name in FORMATS}
    report = result(losses, options)
    if options.into:
        options.into.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def run(name: str, seed: int, options: argparse.Namespace) -> learners.Measured:
    """One training in a process of its own, or what the folder has of it."""
    kept = options.folder / f"{name}-{options.steps}x{options.rows}-seed{seed}.json"
    measured = learners.in_own_process(
        __file__, kept, {"name": name, "steps": options.steps, "seed": seed}, options.rows
    )
    if not options.json:
        print(f"{name}, seed {seed}: {measured[-1][3]} nats", flush=True)
    return measured


def learned(options: argparse.Namespace) -> learners.Measured:
    """One training, in this process."""
    torch.set_num_threads(1)
    section = config.load(Recipe, learners.DEMO).pretrain
    assert section is not None
    shards, tokenizer = learners.demo_shards(options.folder)
    one = options.one
    learner = learners.ours(
        shards,
        one["steps"],
        tokenizer,
        section.model,
        OPTIMIZER,
        section.schedule,
        options.rows,
        one["seed"],
        "float32",
        float8=FORMATS[one["name"]],
    )
    return learners.course(learner, one["steps"], learners.held_out(shards, tokenizer), 1)


def result(losses: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    means = {name: round(mean(values), 4) for name, values in losses.items()}
    return {
        "name": "float8",
        "ours": {"value": means["all"], "unit": "nats a token with float8 = all, mean of the seeds"},
        "peers": {"float32": {"value": means["float32"], "unit": "nats a token", "version": torch.__version__}},
        "ratio_to_best_peer": round(means["float32"] / means["all"], 4),
        "machine": machine(),
        "versions": versions(),
        "notes": {
            "quick": options.quick,
            "steps": options.steps,
            "global_batch_tokens": options.rows * learners.T,
            "means": means,
            "deviation": {name: round(stdev(values), 4) for name, values in losses.items() if len(values) > 1},
            "losses": losses,
        },
    }


if __name__ == "__main__":
    main()
