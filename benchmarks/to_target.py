"""
How long does the default recipe take to reach the loss that nanoGPT ends with?

    python benchmarks/to_target.py --nanogpt DIR [--json] [--quick] [--steps N] [--images FOLDER]

Web pages and code (the folder $BLOOMERY_SHARED), one tokenizer of 8,192 ids, models of 19 million parameters and equal
shape but for what each project chooses (positions, feed-forward, norms), rows of 256 tokens, 16 rows a step. Each side
runs with its own defaults: Bloomery's optimizer, schedule and precision; nanoGPT's AdamW, clipping and cosine, with the
rates and the warm-up of its configuration for small models, as a warm-up of 2000 steps would not end here. The two run
at the same time, each with one thread, so that what else the machine does slows both. Both see the same number of
tokens; then Bloomery alone makes a second run, of as many steps as fit into nanoGPT's time. The validation loss is that
of the same held-out samples, and its time is not counted.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import curves
import numpy as np
from numpy.typing import NDArray

from bloomery.core.stage import machine, versions
from bloomery.data import sources
from bloomery.data.holdout import is_held_out
from bloomery.hw import device as devices
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, Samples, batches
from bloomery.tokenizer.quick import Encoder
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.tokenizer.train import train as train_tokenizer
from bloomery.train.config import WSD, Muon
from bloomery.train.loop import micro_batch_loss, train
from bloomery.train.optim import Optimizers
from bloomery.train.schedule import share
from bloomery.train.state import State

import torch
from torch import nn

VOCAB_SIZE, T, ROWS = 8192, 256, 16
SHAPE = ModelConfig(width=384, num_layers=9, num_heads=6, num_kv_heads=6, mlp_width=1024, context=T)
WARMUP, RATE, LEAST_RATE = 100, 1e-3, 1e-4
"""nanoGPT's config/train_shakespeare_char.py."""
VALIDATION_SAMPLES = 32
Measured = list[tuple[int, float, float, float]]
"""Step, seconds of the wall and of the processor spent on training, validation loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BLOOMERY_SHARED", "")))
    parser.add_argument("--images", type=Path)
    parser.add_argument("--side", choices=("ours", "nanogpt"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps = 2
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return
    if not options.nanogpt or not (options.data / "data" / "dev").is_dir():
        sys.exit("this needs --nanogpt DIR and the shared text: name its folder in BLOOMERY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        facts = prepare(options.data, options.folder, 300 if options.quick else None)
        both = [started(side, options, options.steps) for side in ("ours", "nanogpt")]
        ours, theirs = (json.loads(process.communicate()[0].splitlines()[-1]) for process in both)
        speed = theirs["measured"][-1][2] / ours["measured"][-1][2]
        longer = json.loads(started("ours", options, int(options.steps * speed)).communicate()[0].splitlines()[-1])
    print(json.dumps(result(ours, theirs, longer, facts, options)))


def started(side: str, options: argparse.Namespace, steps: int) -> "subprocess.Popen[str]":
    words = ["--side", side, "--folder", str(options.folder), "--steps", str(steps), "--nanogpt", str(options.nanogpt)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


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


def ours(options: argparse.Namespace) -> dict[str, Any]:
    devices.keep_freed_memory()
    torch.set_num_threads(1)
    device, tokenizer = devices.find("cpu"), Tokenizer.load(options.folder)
    model = Transformer(SHAPE, VOCAB_SIZE)
    model.initialize(0)
    samples = Samples(options.folder, "train", T, tokenizer.hash)
    optimizers, state, schedule = Optimizers(model, Muon()), State(), WSD(warmup_steps=10)
    source = batches(samples, first=0, size=ROWS, seed=0)

    def steps(until: int) -> None:
        train(
            model,
            optimizers,
            source,
            state=state,
            steps=until,
            micro_batch=ROWS,
            learning_rate_share=lambda step: share(schedule, step, options.steps),
            max_norm=1.0,
            device=device,
        )

    def loss() -> float:
        model.eval()
        total = tokens = 0.0
        with torch.no_grad():
            for batch in validation(options.folder):
                total += float(micro_batch_loss(model, batch, device))
                tokens += int((batch.targets != IGNORE).sum())
        return total / tokens

    found = course(steps, loss, options.steps)
    source.close()
    return {"measured": found, "parameters": sum(weight.numel() for weight in model.parameters())}


def nanogpt(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    spec = importlib.util.spec_from_file_location("nanogpt", options.nanogpt / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {"n_layer": SHAPE.num_layers, "n_head": SHAPE.num_heads, "n_embd": SHAPE.width, "bias": False}
    model: Any = module.GPT(module.GPTConfig(block_size=T, vocab_size=VOCAB_SIZE, **shape))
    optimizer = model.configure_optimizers(0.1, RATE, (0.9, 0.95), "cpu")
    data = np.memmap(options.folder / "train.bin", dtype=np.uint16, mode="r")
    done = 0

    def steps(until: int) -> None:
        nonlocal done
        model.train()
        for step in range(done, until):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, options.steps)
            places = torch.randint(len(data) - T, (ROWS,)).tolist()
            rows = torch.from_numpy(np.stack([data[place : place + T + 1] for place in places]).astype(np.int64))
            loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1]
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = until

    def loss() -> float:
        model.eval()
        total = tokens = 0.0
        with torch.no_grad():
            for batch in validation(options.folder):
                ids, targets = torch.from_numpy(batch.ids), torch.from_numpy(batch.targets)
                total += float(model(ids, targets)[1]) * targets.numel()
                tokens += targets.numel()
        return total / tokens

    return {"measured": course(steps, loss, options.steps), "parameters": sum(w.numel() for w in model.parameters())}


SIDES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"ours": ours, "nanogpt": nanogpt}


def rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    x = (step - WARMUP) / max(1, steps - WARMUP)
    return LEAST_RATE + (1 + math.cos(math.pi * x)) / 2 * (RATE - LEAST_RATE)


def course(steps: Callable[[int], None], loss: Callable[[], float], total: int) -> Measured:
    """Train, measure, train: 15 times, the last time at the end."""
    found: Measured = [(0, 0.0, 0.0, loss())]
    wall = cpu = 0.0
    marks = sorted({max(1, round(total * n / 15)) for n in range(1, 16)})
    for until in marks:
        start = time.perf_counter(), time.process_time()
        steps(until)
        wall, cpu = wall + time.perf_counter() - start[0], cpu + time.process_time() - start[1]
        found.append((until, round(wall, 2), round(cpu, 2), round(loss(), 4)))
    return found


def validation(folder: Path) -> Iterator[Any]:
    samples = Samples(folder, "val", T, Tokenizer.load(folder).hash)
    count = min(samples.num_samples, VALIDATION_SAMPLES)
    chosen = np.arange(count) * samples.num_samples // count
    return (samples.batch(chosen[start : start + ROWS]) for start in range(0, count, ROWS))


def reached(measured: Measured, target: float) -> float | None:
    """Seconds of the processor until the validation loss was `target`, on a line between the two measurements."""
    for (_, _, before, high), (_, _, after, low) in pairwise(measured):
        if low <= target:
            return before + (after - before) * (high - target) / max(high - low, 1e-9)
    return None


def result(
    ours: dict[str, Any], theirs: dict[str, Any], longer: dict[str, Any], facts: dict[str, Any], options: Any
) -> dict[str, Any]:
    target, seconds = theirs["measured"][-1][3], theirs["measured"][-1][2]
    times = {"equal_tokens": reached(ours["measured"], target), "equal_time": reached(longer["measured"], target)}
    best = min((one for one in times.values() if one is not None), default=None)
    if options.images:
        named = (("Bloomery", ours, 0), ("Bloomery, equal time", longer, 2), ("nanoGPT", theirs, 1))
        drawn = [curves.Curve(name, [(m[2], m[3]) for m in run["measured"]], color) for name, run, color in named]
        title = "Held-out loss, 19M parameters, web and code, one thread"
        picture = curves.picture(title, drawn, x_axis="seconds of the processor", y_axis="nats a token", level=target)
        (options.images / "to_target.svg").write_text(picture, encoding="utf-8")
    version = subprocess.run(
        ["git", "-C", str(options.nanogpt), "describe", "--always"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "name": "to_target",
        "ours": {"value": best and round(best, 1), "unit": "s of the processor to nanoGPT's last loss"},
        "peers": {"nanogpt": {"value": seconds, "unit": "s of the processor", "version": version}},
        "ratio_to_best_peer": best and round(seconds / best, 2),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": options.quick,
            "share_of_its_time": best and round(best / seconds, 3),
            "target": target,
            "seconds_to_target": times,
            "last_loss": {"equal_tokens": ours["measured"][-1][3], "equal_time": longer["measured"][-1][3]},
            "tokens_per_step": ROWS * T,
            "parameters": {"ours": ours["parameters"], "nanogpt": theirs["parameters"]},
            **facts,
            "curves": {
                "equal_tokens": ours["measured"],
                "equal_time": longer["measured"],
                "nanogpt": theirs["measured"],
            },
        },
    }


if __name__ == "__main__":
    main()
