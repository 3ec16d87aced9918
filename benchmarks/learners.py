"""What the benchmarks of optimizers, formats and time to a target compare: programs as they train, by one measure."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.hw import device as devices
from bloomery.model.config import Float8, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch, PackedDataset, batches
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.train.config import Muon, Optimizer, Schedule, WSDSchedule
from bloomery.train.optim import Optimizers, learning_rate_share
from bloomery.train.precision import Precision, PrecisionChoice, set_short_formats
from bloomery.train.state import State
from bloomery.train.step import Trainer

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB_SIZE, T, ROWS = 8192, 256, 8
SHAPE = ModelConfig(
    hidden_size=384, num_layers=9, num_heads=6, num_kv_heads=6, intermediate_size=1024, context_length=T
)
HELD_OUT_ROWS, MARKS = 32, 8
DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"

Measured = list[tuple[int, float, float, float]]
"""Step, seconds of the wall and of the processor spent on training, held-out loss."""


@dataclass(frozen=True)
class Learner:
    model: nn.Module
    train: Callable[[int], None]
    """Up to this step."""
    scores: Callable[[Batch], Tensor]
    """Of each next token, (B, T, V) in float32."""


def ours(
    folder: Path,
    steps: int,
    tokenizer: Path | None = None,
    shape: ModelConfig = SHAPE,
    optimizer: Optimizer = Muon(),  # noqa: B008  frozen
    schedule: Schedule = WSDSchedule(warmup_steps=10),  # noqa: B008  frozen
    rows: int = ROWS,
    seed: int = 0,
    precision: PrecisionChoice = "auto",
    float8: Float8 = "off",
) -> Learner:
    """
    The loop of every stage on the shards of a folder: by default with a recipe's defaults of optimizer, precision,
    clipping and guard, and its schedule after a warm-up of ten steps.
    """
    devices.keep_freed_memory()
    device, known = devices.find("cpu"), Tokenizer.load(tokenizer or folder)
    model = Transformer(shape, known.vocab_size)
    model.initialize(seed)
    set_short_formats(model, "float32", float8, device.torch_device)
    source = batches(PackedDataset(folder, "train", shape.context_length, known.hash), first=0, size=rows, seed=seed)
    how, state = Precision.decide(precision, device), State()
    optimizers = Optimizers(model, optimizer, how.muon_dtype)

    def learn(until: int) -> None:
        Trainer(
            model,
            optimizers,
            source,
            state=state,
            steps=until,
            micro_batch=rows,
            learning_rate_share=lambda step: learning_rate_share(schedule, step, steps),
            max_grad_norm=1.0,
            precision=how,
        ).train()

    def scores(batch: Batch) -> Tensor:
        ids, positions, segments = (torch.from_numpy(one) for one in (batch.ids, batch.positions, batch.segments))
        found: Tensor = model.head(model(ids, positions=positions, segments=segments))
        return found

    return Learner(model, learn, scores)


def nanogpt(folder: Path, steps: int, program: Path, rate: float, warmup: int, bfloat16: bool) -> Learner:
    """
    What its train.py does on a processor with --device=cpu --compile=False: AdamW (0.9, 0.95), decay 0.1, clipping at
    1, warm-up and cosine to a tenth of the rate, rows from anywhere. Its float32 there is no setting; with `bfloat16`
    the forward pass stands in the autocast that it has for GPUs.
    """
    torch.manual_seed(1337)
    spec = importlib.util.spec_from_file_location("nanogpt", program / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {"n_layer": SHAPE.num_layers, "n_head": SHAPE.num_heads, "n_embd": SHAPE.hidden_size, "bias": False}
    model: Any = module.GPT(module.GPTConfig(block_size=T, vocab_size=VOCAB_SIZE, **shape))
    optimizer = model.configure_optimizers(0.1, rate, (0.9, 0.95), "cpu")
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    done = 0

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if bfloat16 else nullcontext()

    def learn(until: int) -> None:
        nonlocal done
        model.train()
        for step in range(done, until):
            for group in optimizer.param_groups:
                group["lr"] = cosine(step, steps, rate, warmup)
            places = torch.randint(len(data) - T, (ROWS,)).tolist()
            rows = torch.from_numpy(np.stack([data[place : place + T + 1] for place in places]).astype(np.int64))
            with context():
                loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1]
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = until

    def scores(batch: Batch) -> Tensor:
        found: Tensor = model(torch.from_numpy(batch.ids), torch.from_numpy(batch.targets))[0]
        return found

    return Learner(model, learn, scores)


def cosine(step: int, steps: int, rate: float, warmup: int) -> float:
    """The rate of step 0 … as nanoGPT's get_lr gives it, with a least rate of a tenth."""
    if step < warmup:
        return rate * (step + 1) / (warmup + 1)
    x = (step - warmup) / max(1, steps - warmup)
    return rate * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2)


def course(learner: Learner, steps: int, held_out: list[Batch], marks: int = MARKS, most: int = MARKS) -> Measured:
    """Train, measure, train: at `marks` steps, of which the last is the end, or only at the first `most` of them."""
    found: Measured = []
    wall = cpu = 0.0
    for until in sorted({max(1, round(steps * n / marks)) for n in range(1, marks + 1)})[:most]:
        start = time.perf_counter(), time.process_time()
        learner.train(until)
        wall, cpu = wall + time.perf_counter() - start[0], cpu + time.process_time() - start[1]
        found.append((until, round(wall, 2), round(cpu, 2), round(loss(learner, held_out), 4)))
    return found


def loss(learner: Learner, held_out: list[Batch]) -> float:
    """Nats a token of the same held-out rows, in float32 for everybody."""
    learner.model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in held_out:
            targets = torch.from_numpy(batch.targets).flatten()
            scores = learner.scores(batch).flatten(0, 1)
            total += float(F.cross_entropy(scores, targets, ignore_index=IGNORE, reduction="sum"))
            tokens += int((targets != IGNORE).sum())
    return total / tokens


def held_out(folder: Path, tokenizer: Path | None = None) -> list[Batch]:
    """Rows from all over the held-out text."""
    samples = PackedDataset(folder, "val", T, Tokenizer.load(tokenizer or folder).hash)
    count = min(samples.num_samples, HELD_OUT_ROWS)
    chosen = np.arange(count) * samples.num_samples // count
    return [samples.batch(chosen[start : start + ROWS]) for start in range(0, count, ROWS)]


def make_demo_shards(folder: Path) -> None:
    """Those of recipes/demo.toml, for `demo_shards`."""
    words = ["run", str(DEMO), "--until", "shard", "--runs", str(folder)]
    subprocess.run([sys.executable, "-m", "bloomery.cli", *words], check=True, stderr=subprocess.DEVNULL)


def demo_shards(folder: Path) -> tuple[Path, Path]:
    """The folders of shards and tokenizer."""
    shards, tokenizer = (next((folder / "demo").glob(f"*-{stage}-*")) for stage in ("shard", "tokenizer"))
    return shards, tokenizer


def in_own_process(script: str, kept: Path, one: dict[str, Any], rows: int) -> Measured:
    """What `script --one` measures in a process of its own with one thread, or what was kept of it."""
    if not kept.exists():
        command = [sys.executable, script, "--one", json.dumps(one), "--folder", str(kept.parent), "--rows", str(rows)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        kept.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    found: Measured = json.loads(kept.read_text(encoding="utf-8"))
    return found
