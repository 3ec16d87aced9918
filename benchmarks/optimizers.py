"""
Which optimizer does the demo's model learn more with in equal steps, AdamW or Muon, each at its best rates?

    python benchmarks/optimizers.py [--json] [--quick] [--steps N] [--rows N] [--seeds N] [--folder FOLDER]
        [--images FOLDER]

The shards, the model and the schedule are those of recipes/demo.toml; a step has 8 rows of 256 tokens instead of 16,
so that all of it takes minutes on one thread. First each optimizer tries four or five settings for half of the steps;
then its best one makes all steps with several seeds, of weights and of the order of samples. The loss is that of 32
held-out rows, in float32, the same for every run. With --folder, what is done stays there, and the command goes on.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import curves
import learners
from pydantic import TypeAdapter

from bloomery.core import config
from bloomery.core.pipeline import machine, versions
from bloomery.recipe import Recipe
from bloomery.train.config import Optimizer

import torch

GRID: dict[str, tuple[dict[str, float], ...]] = {
    "muon": tuple(
        {"muon_lr": matrix, "learning_rate": rest}
        for matrix, rest in ((0.01, 3e-3), (0.02, 3e-3), (0.04, 3e-3), (0.02, 6e-3))
    ),
    "adamw": tuple({"learning_rate": rate} for rate in (3e-4, 6e-4, 1e-3, 2e-3, 4e-3)),
}
"""The rates that are tried; the rest of an optimizer are its defaults."""
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--only", choices=GRID, help="of the two, with --folder: to do both at once")
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
        found = {kind: tuned(kind, options) for kind in GRID if kind == (options.only or kind)}
    if not options.only:
        print(json.dumps(result(found, options)))


def tuned(kind: str, options: argparse.Namespace) -> Run:
    """The grid, and the runs of its best."""
    tried: list[dict[str, Any]] = []
    for rates in GRID[kind]:
        measured = run({"kind": kind, **rates}, options.steps // 2, 0, options, marks=1)
        tried.append({"rates": rates, "last_loss": measured[-1][3]})
    best = min(tried, key=lambda one: one["last_loss"])["rates"]
    runs = [run({"kind": kind, **best}, options.steps, seed, options) for seed in range(options.seeds)]
    return {"tried": tried, "best": best, "curves": runs, "last_losses": [one[-1][3] for one in runs]}


def run(
    optimizer: dict[str, Any], steps: int, seed: int, options: argparse.Namespace, marks: int = learners.MARKS
) -> learners.Measured:
    """One training in a process of its own, or what the folder has of it."""
    words = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in optimizer.values())
    kept = options.folder / f"{words}-{steps}x{options.rows}-seed{seed}.json"
    one = {"optimizer": optimizer, "steps": steps, "seed": seed, "marks": marks}
    return learners.in_own_process(__file__, kept, one, options.rows)


def learned(options: argparse.Namespace) -> learners.Measured:
    """One training, in this process."""
    torch.set_num_threads(1)
    section = config.load(Recipe, learners.DEMO).pretrain
    assert section is not None
    shards, tokenizer = learners.demo_shards(options.folder)
    optimizer: Optimizer = TypeAdapter(Optimizer).validate_python(options.one["optimizer"])
    learner = learners.ours(
        shards,
        options.one["steps"],
        tokenizer,
        section.model,
        optimizer,
        section.schedule,
        options.rows,
        options.one["seed"],
    )
    return learners.course(learner, options.one["steps"], learners.held_out(shards, tokenizer), options.one["marks"])


def result(found: dict[str, Run], options: argparse.Namespace) -> dict[str, Any]:
    losses = {kind: mean(one["last_losses"]) for kind, one in found.items()}
    if options.images:
        draw(found, options)
    return {
        "name": "optimizers",
        "ours": {"value": round(losses["muon"], 4), "unit": "nats a token, Muon, mean of the seeds"},
        "peers": {"adamw": {"value": round(losses["adamw"], 4), "unit": "nats a token", "version": torch.__version__}},
        "ratio_to_best_peer": round(losses["adamw"] / losses["muon"], 4),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": options.quick,
            "steps": options.steps,
            "steps_of_the_grid": options.steps // 2,
            "global_batch_tokens": options.rows * learners.T,
            "deviation": {
                kind: round(stdev(one["last_losses"]), 4) for kind, one in found.items() if len(one["last_losses"]) > 1
            },
            "seconds_of_the_processor": {
                kind: round(mean(one[-1][2] for one in all_of["curves"]), 1) for kind, all_of in found.items()
            },
            **found,
        },
    }


def draw(found: dict[str, Run], options: argparse.Namespace) -> None:
    """A line for each seed."""
    names = {"adamw": "AdamW", "muon": "Muon"}
    drawn = [
        curves.Curve(names[kind] if seed == 0 else "", [(m[0], m[3]) for m in measured], color, thin=True)
        for color, (kind, one) in enumerate(found.items())
        for seed, measured in enumerate(one["curves"])
    ]
    title = f"Held-out loss of the demo's model, {options.seeds} seeds, best rates of each"
    picture = curves.picture(title, drawn, x_axis="steps", y_axis="nats a token")
    options.images.mkdir(parents=True, exist_ok=True)
    (options.images / "optimizers.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
