"""
How long does the default recipe take to reach the loss that nanoGPT ends with?

    python benchmarks/to_target.py --nanogpt DIR [--json] [--quick] [--steps N] [--images FOLDER]
        [--folder FOLDER [--first]]

Web pages and code (the folder $BLOOMERY_SHARED), one tokenizer of 8,192 ids, models of 19 million parameters and equal
shape but for what each project chooses (positions, feed-forward, norms), rows of 256 tokens, 8 rows a step. Programs
are processes of one thread, two at a time, and what counts is the processor's time (learners.py). Bloomery has the
defaults of a recipe. nanoGPT has a schedule for this length and the best of RATES, and runs in the bfloat16 autocast
that it has for GPUs; as it runs on a processor by default, in float32, it makes the first steps of the same run, which
say how much longer that takes. Both programs see the same number of tokens; then Bloomery makes a second run of as many
steps as fit into nanoGPT's time. The loss is that of the same 32 held-out rows, by the same lines of code, in float32;
its time is not counted.

With --folder, what is done stays there, and the same command goes on; --first makes only what is tried first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import curves
import learners
import numpy as np
from learners import ROWS, VOCAB_SIZE, Measured, T
from numpy.typing import NDArray
from stand_in import PLACE

from bloomery.core.pipeline import machine, versions
from bloomery.data.documents import is_held_out
from bloomery.data.sources import local
from bloomery.shards import format
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.train import train_byte_level as train_tokenizer

import torch

OURS, DEFAULT, BFLOAT16 = "ours", "nanogpt", "nanogpt_bfloat16"
RATES = (3e-4, 6e-4, 1e-3, 2e-3)
FLOAT32_MARKS = 2
"""How many of the measurements of a run it goes through in float32."""
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--data", type=Path, default=PLACE)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--side", choices=(OURS, DEFAULT, BFLOAT16), help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
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
        print(json.dumps(compared(options, prepared(options))))


def compared(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """All programs, two at a time; with --first, what was found until nanoGPT's rate is known."""
    with ThreadPoolExecutor(2) as pool:
        trials = {rate: pool.submit(run, BFLOAT16, options.steps, options, rate) for rate in RATES}
        ours = pool.submit(run, OURS, options.steps, options).result()
        tried = {rate: trial.result()["measured"][-1][3] for rate, trial in trials.items()}
        rate = min(tried, key=lambda one: tried[one])
        theirs, facts = trials[rate].result(), facts | {"rate": rate, "rates_tried": tried}
        if options.first:
            return facts | {OURS: ours, BFLOAT16: theirs}
        fitting = round(options.steps * seconds(theirs) / seconds(ours))
        begun = pool.submit(run, DEFAULT, options.steps, options, rate)
        longer = pool.submit(run, OURS, fitting, options)
        runs = {OURS: ours, "longer": longer.result(), BFLOAT16: theirs, DEFAULT: begun.result()}
    return result(runs, facts, options)


def run(side: str, steps: int, options: argparse.Namespace, rate: float | None = None) -> Run:
    """A program from its first step to its last, or what the folder has of it."""
    kept: Path = options.folder / f"{side}-{steps}{f'@{rate:g}' if rate else ''}.json"
    if not kept.exists():
        words = ["--side", side, "--folder", str(options.folder), "--steps", str(steps)]
        words += ["--nanogpt", str(options.nanogpt), *(["--rate", str(rate)] if rate else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *words]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        kept.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    found: Run = json.loads(kept.read_text(encoding="utf-8"))
    return found


def learned(options: argparse.Namespace) -> Run:
    """One program, in this process."""
    torch.set_num_threads(1)
    if options.side == OURS:
        learner = learners.ours(options.folder, options.steps)
    else:
        warmup, bfloat16 = options.steps // 10, options.side == BFLOAT16
        learner = learners.nanogpt(options.folder, options.steps, options.nanogpt, options.rate, warmup, bfloat16)
    before = stolen()
    most = FLOAT32_MARKS if options.side == DEFAULT else learners.MARKS
    measured = learners.course(learner, options.steps, learners.held_out(options.folder), most=most)
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
    source = local.Jsonl(name="file", domain="text", path=file, invalid="skip")
    return (item["text"] for item in local.read(source) if isinstance(item, dict))


def seconds(found: Run) -> float:
    return float(found["measured"][-1][2])


def reached(measured: Measured, target: float) -> float | None:
    """Seconds of the processor until the held-out loss was `target`, on a line between two measurements."""
    for before, after in pairwise(measured):
        if after[3] <= target:
            share = (before[3] - target) / max(before[3] - after[3], 1e-9)
            return before[2] + (after[2] - before[2]) * share
    return None


def result(runs: dict[str, Run], facts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    theirs, begun = runs[BFLOAT16]["measured"], runs[DEFAULT]["measured"]
    target, whole = theirs[-1][3], seconds(runs[BFLOAT16])
    slower = begun[-1][2] / theirs[len(begun) - 1][2]
    times = {name: reached(runs[name]["measured"], target) for name in (OURS, "longer")}
    best = min((one for one in times.values() if one), default=None)
    if options.images:
        draw(runs, options)
    command = ["git", "-C", str(options.nanogpt), "describe", "--always"]
    version = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    unit = "s of the processor"
    return {
        "name": "to_target",
        "ours": {"value": best and round(best, 1), "unit": f"{unit} to nanoGPT's last loss"},
        "peers": {
            BFLOAT16: {"value": whole, "unit": unit, "version": version},
            DEFAULT: {"value": round(slower * whole, 1), "unit": f"{unit}, from its first steps", "version": version},
        },
        "ratio_to_best_peer": best and round(whole / best, 2),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": options.quick,
            "seconds": {name: seconds(found) for name, found in runs.items()},
            "target": target,
            "seconds_to_target": times,
            "share_of_its_time": best and round(best / whole, 3),
            "share_of_its_time_by_default": best and round(best / whole / slower, 3),
            "last_loss": {name: found["measured"][-1][3] for name, found in runs.items()},
            "stolen_seconds": {name: found["stolen_seconds"] for name, found in runs.items()},
            "global_batch_tokens": ROWS * T,
            "parameters": {name: found["parameters"] for name, found in runs.items()},
            **facts,
            "curves": {name: found["measured"] for name, found in runs.items()},
        },
    }


def draw(runs: dict[str, Run], options: argparse.Namespace) -> None:
    named = (
        ("Bloomery", OURS, 0),
        ("Bloomery, equal time", "longer", 5),
        ("nanoGPT, bfloat16", BFLOAT16, 3),
        ("nanoGPT, float32", DEFAULT, 1),
    )
    drawn = [curves.Curve(name, [(m[2], m[3]) for m in runs[run]["measured"]], color) for name, run, color in named]
    target = runs[BFLOAT16]["measured"][-1][3]
    title = "Held-out loss, 19M parameters, web and code, one thread"
    picture = curves.picture(title, drawn, x_axis="seconds of the processor", y_axis="nats a token", level=target)
    options.images.mkdir(parents=True, exist_ok=True)
    (options.images / "to_target.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
