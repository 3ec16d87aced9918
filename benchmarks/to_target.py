"""
How long does the default recipe take to reach the loss that nanoGPT ends with?

    python benchmarks/to_target.py --nanogpt DIR [--json] [--quick] [--steps N] [--threads N] [--images FOLDER]
        [--folder FOLDER] [--only PROGRAM] [--rates RATE …]

Web pages and code (the folder $BLOOMERY_SHARED), one tokenizer of 8,192 ids, models of 19 million parameters and equal
shape but for what each project chooses (positions, feed-forward, norms), rows of 256 tokens, 16 rows a step. Programs
run one after another, each alone in a process of its own (learners.py): Bloomery with the defaults of a recipe; nanoGPT
as its train.py runs on a processor, which is in float32, and once more in the bfloat16 autocast that it has for GPUs.
Its schedule is made for this length, and its rate is the best of those that --rates has tried in the same folder.
Both see the same number of tokens; then Bloomery makes a second run, of as many steps as fit into nanoGPT's time. The
loss is that of the same held-out rows, by the same lines of code, in float32; its time is not counted.

With --folder, what is done stays there, and the same command goes on; --only makes one program's part of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import curves
import learners
import numpy as np
from learners import ROWS, VOCAB_SIZE, Measured, T
from numpy.typing import NDArray

from bloomery.core.stage import machine, versions
from bloomery.data import sources
from bloomery.data.holdout import is_held_out
from bloomery.shards import format
from bloomery.tokenizer.quick import Encoder
from bloomery.tokenizer.train import train as train_tokenizer

import torch

OURS, DEFAULT, BFLOAT16 = "ours", "nanogpt", "nanogpt_bfloat16"
RATE = 1e-3
"""Of nanoGPT's configurations for small models."""
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BLOOMERY_SHARED", "")))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--only", choices=(OURS, DEFAULT, BFLOAT16, "longer"))
    parser.add_argument("--rates", type=float, nargs="+", help="of nanoGPT, each tried for all steps in bfloat16")
    parser.add_argument("--side", choices=(OURS, DEFAULT, BFLOAT16), help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=RATE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(learned(options)))
        return
    if options.quick:
        options.steps = 2
    if not options.nanogpt or not (options.data / "data" / "dev").is_dir():
        sys.exit("this needs --nanogpt DIR and the shared text: name its folder in BLOOMERY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder)
        options.folder.mkdir(parents=True, exist_ok=True)
        facts = prepared(options)
        tried = {rate: run(BFLOAT16, options.steps, options, rate)["measured"][-1][3] for rate in options.rates or ()}
        print(json.dumps(tried) if options.rates else compared(options, facts))


def compared(options: argparse.Namespace, facts: dict[str, Any]) -> str:
    """Every program in turn, and the line of JSON; with --only, that one's losses."""
    tried = {
        float(file.stem.split("@")[1]): json.loads(file.read_text(encoding="utf-8"))["measured"][-1][3]
        for file in options.folder.glob(f"{BFLOAT16}-{options.steps}-*@*.json")
    }
    rate = min(tried, key=lambda one: tried[one]) if tried else RATE
    runs: dict[str, Run] = {}
    for name in (OURS, BFLOAT16, DEFAULT, "longer"):
        if name == "longer":
            pace = last(runs[DEFAULT], options) / last(runs[OURS], options)
            runs[name] = run(OURS, int(options.steps * pace), options)
        else:
            runs[name] = run(name, options.steps, options, None if name == OURS else rate)
        if name == options.only:
            return json.dumps(runs[name])
    return json.dumps(result(runs, facts | {"rate": rate, "rates_tried": tried}, options))


def run(side: str, steps: int, options: argparse.Namespace, rate: float | None = None) -> Run:
    """A program from its first step to its last, or what the folder has of it."""
    kept = options.folder / f"{side}-{steps}-{options.threads}threads{f'@{rate:g}' if rate else ''}.json"
    if not kept.exists():
        words = ["--side", side, "--folder", str(options.folder), "--steps", str(steps), "--rate", str(rate or RATE)]
        words += ["--nanogpt", str(options.nanogpt), "--threads", str(options.threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        if side != OURS:
            environment["GOMP_SPINCOUNT"] = "300000"  # GNU's own; ours is lower
        command = [sys.executable, __file__, *words]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        kept.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    found: Run = json.loads(kept.read_text(encoding="utf-8"))
    return found


def learned(options: argparse.Namespace) -> Run:
    """One program, in this process."""
    torch.set_num_threads(options.threads)
    if options.side == OURS:
        learner = learners.ours(options.folder, options.steps)
    else:
        warmup, bfloat16 = options.steps // 10, options.side == BFLOAT16
        learner = learners.nanogpt(options.folder, options.steps, options.nanogpt, options.rate, warmup, bfloat16)
    before = stolen()
    measured = learners.course(learner, options.steps, learners.held_out(options.folder))
    parameters = sum(weight.numel() for weight in learner.model.parameters())
    return {"measured": measured, "parameters": parameters, "stolen_seconds": round(stolen() - before, 1)}


def stolen() -> float:
    """Seconds of this machine's processors that its host has given to others."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def prepared(options: argparse.Namespace) -> dict[str, Any]:
    kept = options.folder / "facts.json"
    if not kept.exists():
        kept.write_text(json.dumps(prepare(options.data, options.folder, 300 if options.quick else None)))
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def prepare(data: Path, folder: Path, limit: int | None) -> dict[str, Any]:
    """Token files of both kinds in `folder`: shards, and nanoGPT's train.bin. Held out is what a recipe holds out."""
    files = [data / "data" / "dev" / name for name in ("web.jsonl.zst", "code.jsonl.zst")]
    texts = [text for file in files for text in islice(_texts(file), limit)]
    tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 3000)], VOCAB_SIZE)
    tokenizer.save(folder)
    encoder = Encoder(tokenizer, aloud=False)
    np.random.default_rng(0).shuffle(texts)
    counts = {}
    for split in ("train", "val"):
        chosen = [text for text in texts if is_held_out(text, 0.02) == (split == "val")]
        opened = [np.concatenate([[tokenizer.document_id], ids]) for ids in encoder.encode_batch(chosen)]
        tokens: NDArray[np.int64] = np.concatenate(opened)
        starts = np.cumsum([0, *map(len, opened[:-1])]).tolist()
        format.write(
            folder / f"{split}-00000",
            tokens,
            vocab_size=VOCAB_SIZE,
            starts=starts,
            tokenizer_hash=tokenizer.hash,
            facts={"document_id": tokenizer.document_id},
        )
        counts[f"{split}_tokens"] = len(tokens)
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
    return counts


def _texts(file: Path) -> Iterator[str]:
    source = sources.Jsonl(name="file", domain="text", path=file, invalid="skip")
    return (item["text"] for item in sources.read(source) if isinstance(item, dict))


def clock(options: argparse.Namespace) -> int:
    """Which time of a measurement counts: the wall's, but with one thread the processor's, which is disturbed less."""
    return 2 if options.threads == 1 else 1


def last(found: Run, options: argparse.Namespace) -> float:
    return float(found["measured"][-1][clock(options)])


def reached(measured: Measured, target: float, clock: int) -> float | None:
    """Seconds until the held-out loss was `target`, on a line between the two measurements around it."""
    for before, after in pairwise(measured):
        if after[3] <= target:
            share = (before[3] - target) / max(before[3] - after[3], 1e-9)
            return float(before[clock] + (after[clock] - before[clock]) * share)
    return None


def result(runs: dict[str, Run], facts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    which = clock(options)
    shares: dict[str, dict[str, float | None]] = {}
    for peer in (DEFAULT, BFLOAT16):
        target, seconds = runs[peer]["measured"][-1][3], last(runs[peer], options)
        times = {name: reached(runs[name]["measured"], target, which) for name in (OURS, "longer")}
        shares[peer] = {name: time and round(time / seconds, 3) for name, time in times.items()}
    best = {peer: min((one for one in found.values() if one), default=None) for peer, found in shares.items()}
    share = best[DEFAULT]
    ours = None if share is None else round(share * last(runs[DEFAULT], options), 1)
    if options.images:
        draw(runs, options)
    command = ["git", "-C", str(options.nanogpt), "describe", "--always"]
    version = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    unit = "s of the wall" if which == 1 else "s of the processor"
    peers = {peer: {"value": last(runs[peer], options), "unit": unit, "version": version} for peer in shares}
    slowest = None if None in best.values() else max(one for one in best.values() if one)
    return {
        "name": "to_target",
        "ours": {"value": ours, "unit": f"{unit} to nanoGPT's last loss"},
        "peers": peers,
        "ratio_to_best_peer": slowest and round(1 / slowest, 2),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": options.quick,
            "threads": options.threads,
            "share_of_its_time": shares,
            "last_loss": {name: found["measured"][-1][3] for name, found in runs.items()},
            "stolen_seconds": {name: found["stolen_seconds"] for name, found in runs.items()},
            "tokens_per_step": ROWS * T,
            "parameters": {name: found["parameters"] for name, found in runs.items()},
            **facts,
            "curves": {name: found["measured"] for name, found in runs.items()},
        },
    }


def draw(runs: dict[str, Run], options: argparse.Namespace) -> None:
    named = (
        ("Bloomery", OURS, 0, False),
        ("Bloomery, equal time", "longer", 5, False),
        ("nanoGPT", DEFAULT, 1, False),
        ("nanoGPT, bfloat16", BFLOAT16, 3, False),
    )
    drawn = [
        curves.Curve(name, [(m[clock(options)], m[3]) for m in runs[run]["measured"]], color, thin)
        for name, run, color, thin in named
    ]
    target = runs[DEFAULT]["measured"][-1][3]
    title = f"Held-out loss, 19M parameters, web and code, {options.threads} threads"
    picture = curves.picture(title, drawn, x_axis="seconds of training", y_axis="nats a token", level=target)
    (options.images / "to_target.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
