"""
Training steps of one program, timed in this process, which lives as long as its standard input: `train_step.py` has
one for each program, or for each turn, and has them take turns.

    python benchmarks/stepper.py PROGRAM [--shape small] [--nanogpt DIR]

Reads a line of JSON for each turn (rows, tokens, threads, warm, steps, seconds) and answers with one: seconds of the
wall and of the processor for each step that was not a warm-up, the losses, peak memory; for ours also the work of a
step, and how fast this process multiplied matrices in bfloat16 right after.

Every program trains the same shape on the same random tokens: gradients, update, nothing else but what it does by
itself. No program drops out, and no one reads data. Names ending in _kept let freed memory stay with the process, as
ours do (hw/device.py); peers do not do that by themselves.
"""

import argparse
import importlib
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.hw import device as devices
from bloomery.model.config import PRESETS, ModelConfig, cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train.config import AdamW
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import State
from bloomery.train.step import Trainer

import torch
from torch import Tensor

Step = Callable[[], float]
"""Trains once; gives the loss."""

SMALL = {
    "hidden_size": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "intermediate_size": 704,
    "context_length": 256,
}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (PRESETS["gpt2-124m"].config, PRESETS["gpt2-124m"].vocab_size),
    "small": (SMALL, 4096),
}
"""Keys of [pretrain.model], and the vocabulary."""


@dataclass
class Turn:
    rows: int = 1
    tokens: int = 8
    threads: int = 1
    warm: int = 1
    """Steps before those that count."""
    steps: int = 1
    """That count, at most, …"""
    seconds: float = 10.0
    """… none of them begun later than that; the first one always is."""


@dataclass
class Worker:
    """What a program needs to know while it lives."""

    program: str
    shape: str
    nanogpt: Path | None
    turn: Turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--nanogpt", type=Path)
    options = parser.parse_args()
    if options.program.startswith("ours") or options.program.endswith("_kept"):
        devices.keep_freed_memory()
    torch.manual_seed(0)
    worker = Worker(options.program, options.shape, options.nanogpt, Turn())
    with redirect_stdout(sys.stderr):  # what a peer says there is no answer
        step = PROGRAMS[options.program](worker)
    print("ready", flush=True)
    for line in sys.stdin:
        worker.turn = Turn(**json.loads(line))
        torch.set_num_threads(worker.turn.threads)
        found: dict[str, Any] = timed(step, worker.turn)
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if options.program == "ours":
            found |= ceiling(worker)
        print(json.dumps(found), flush=True)


def timed(step: Step, turn: Turn) -> dict[str, list[float]]:
    losses = [step() for _ in range(turn.warm)]
    wall: list[float] = []
    cpu: list[float] = []
    began = time.perf_counter()
    while not wall or (len(wall) < turn.steps and time.perf_counter() - began < turn.seconds):
        start = time.perf_counter(), time.process_time()
        losses.append(step())
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {"wall": wall, "cpu": cpu, "losses": losses}


def random_rows(worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, the same for every program."""
    vocab_size = SHAPES[worker.shape][1]
    rng = np.random.default_rng(0)
    while True:
        ids = torch.from_numpy(rng.integers(0, vocab_size, (worker.turn.rows, worker.turn.tokens + 1)))
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def batches(worker: Worker) -> Iterator[Batch]:
    for ids, targets in random_rows(worker):
        positions = np.tile(np.arange(worker.turn.tokens), (worker.turn.rows, 1))
        samples = np.arange(worker.turn.rows)
        yield Batch(ids.numpy(), targets.numpy(), positions, np.zeros_like(positions), samples)


def ours(worker: Worker) -> Step:
    """One step of the loop that every stage uses, clipping and the check for finite numbers included."""
    keys, vocab_size = SHAPES[worker.shape]
    device = devices.find("cpu")
    if worker.program.endswith("float32"):
        device = replace(device, compute_dtype=torch.float32)
    model = Transformer(build(ModelConfig, keys), vocab_size)
    model.initialize(0)
    optimizers, state, source = Optimizers(model, AdamW()), State(), batches(worker)

    def step() -> float:
        Trainer(
            model,
            optimizers,
            source,
            state=state,
            steps=state.step + 1,
            micro_batch=worker.turn.rows,
            learning_rate_share=lambda _: 1.0,
            max_grad_norm=1.0,
            precision=Precision.decide("auto", device),
        ).train()
        return state.metrics["loss"]

    return step


def huggingface(worker: Worker) -> Step:
    """The model of `transformers` for the same shape, and torch's AdamW, each as it comes but for dropout."""
    transformers: Any = importlib.import_module("transformers")
    keys, vocab_size = SHAPES[worker.shape]
    if worker.shape == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**off))
    else:
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=keys["hidden_size"],
            intermediate_size=keys["intermediate_size"],
            num_hidden_layers=keys["num_layers"],
            num_attention_heads=keys["num_heads"],
            num_key_value_heads=keys["num_kv_heads"],
            max_position_embeddings=keys["context_length"],
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    source = random_rows(worker)

    def step() -> float:
        ids, targets = next(source)
        with autocast(worker):
            scores = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def nanogpt(worker: Worker) -> Step:
    """nanoGPT's model, its own optimizer, and clipping as in its train.py."""
    assert worker.nanogpt is not None
    spec = importlib.util.spec_from_file_location("nanogpt", worker.nanogpt / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig())
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    source = random_rows(worker)

    def step() -> float:
        ids, targets = next(source)
        with autocast(worker):
            loss = model(ids, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def autocast(worker: Worker) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if "bfloat16" in worker.program else nullcontext()


PROGRAMS: dict[str, Callable[[Worker], Step]] = {
    "ours": ours,
    "ours_plain": ours,
    "ours_float32": ours,
    "ours_plain_float32": ours,
    "huggingface": huggingface,
    "huggingface_kept": huggingface,
    "huggingface_bfloat16": huggingface,
    "huggingface_bfloat16_kept": huggingface,
    "nanogpt": nanogpt,
    "nanogpt_kept": nanogpt,
    "nanogpt_bfloat16": nanogpt,
    "nanogpt_bfloat16_kept": nanogpt,
}


def ceiling(worker: Worker) -> dict[str, Any]:
    """Work of a step by `model.cost`, and GFLOP/s of the best of three large square products in bfloat16."""
    keys, vocab_size = SHAPES[worker.shape]
    config = build(ModelConfig, keys | {"context_length": worker.turn.tokens})
    size = 4096 if worker.shape == "gpt2" else 2048
    left, right = (torch.randn(size, size).bfloat16() for _ in "lr")
    into = torch.empty_like(left)
    clock = time.process_time if worker.turn.threads == 1 else time.perf_counter
    best = float("inf")
    for _ in range(4):
        start = clock()
        torch.mm(left, right, out=into)
        best = min(best, clock() - start)
    work = cost(config, vocab_size).train_flops_per_token * worker.turn.rows * worker.turn.tokens
    return {"flops": work, "ceiling_gflops": 2.0 * size**3 / best / 1e9}


if __name__ == "__main__":
    main()
