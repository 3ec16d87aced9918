"""
Training steps of one program, timed in this process. `train_step.py` starts it once a round for each program.

    python benchmarks/stepper.py PROGRAM --rows 4 --tokens 64 --threads 1 [--seconds S] [--most N] [--folder DIR]

Prints one line of JSON: seconds of the wall and of the processor for each step after the first, the losses, peak
memory; for ours also the work of a step, and how fast this process multiplies matrices in bfloat16.

Every program trains the same shape on the same random tokens: gradients, update, nothing else but what it does by
itself. No program drops out, and no one reads data. Names ending in _kept let freed memory stay with the process, as
ours do (hw/device.py); peers do not do that by themselves.
"""

import argparse
import importlib
import importlib.util
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.hw import device as devices
from bloomery.model.config import ModelConfig
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train.config import AdamW
from bloomery.train.loop import train
from bloomery.train.optim import Optimizers
from bloomery.train.state import State

import torch
from torch import Tensor

Step = Callable[[], float]
"""Trains once; gives the loss."""

GPT2 = {"width": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "mlp_width": 2048, "context": 1024}
SMALL = {"width": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 2, "mlp_width": 704, "context": 256}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {"gpt2": (GPT2, 50257), "small": (SMALL, 4096)}
"""Keys of [pretrain.model], and the vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="of nanoGPT")
    options = parser.parse_args()
    if options.program.startswith("ours") or options.program.endswith("_kept"):
        devices.keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    step = PROGRAMS[options.program](options)
    found: dict[str, Any] = timed(step, options.seconds, options.most)
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.program == "ours":
        found |= ceiling(options)
    print(json.dumps(found))


def timed(step: Step, seconds: float, most: int) -> dict[str, list[float]]:
    """Steps until either limit; the first one, which allocates, is left out, and at least one is counted."""
    losses = [step()]
    wall: list[float] = []
    cpu: list[float] = []
    began = time.perf_counter()
    while not wall or (len(wall) < most and time.perf_counter() - began < seconds):
        start = time.perf_counter(), time.process_time()
        losses.append(step())
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {"wall": wall, "cpu": cpu, "losses": losses}


def random_rows(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, the same for every program."""
    vocab_size = SHAPES[options.shape][1]
    rng = np.random.default_rng(0)
    while True:
        ids = torch.from_numpy(rng.integers(0, vocab_size, (options.rows, options.tokens + 1)))
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    positions = np.tile(np.arange(options.tokens), (options.rows, 1))
    samples = np.arange(options.rows)
    for ids, targets in random_rows(options):
        yield Batch(ids.numpy(), targets.numpy(), positions, np.zeros_like(positions), samples)


def ours(options: argparse.Namespace) -> Step:
    """One step of the loop that every stage uses, clipping and the check for finite numbers included."""
    keys, vocab_size = SHAPES[options.shape]
    device = devices.find("cpu")
    if options.program.endswith("float32"):
        device = replace(device, compute_dtype=torch.float32)
    model = Transformer(build(ModelConfig, keys), vocab_size)
    model.initialize(0)
    optimizers, state, source = Optimizers(model, AdamW()), State(), batches(options)

    def step() -> float:
        train(
            model,
            optimizers,
            source,
            state=state,
            steps=state.step + 1,
            micro_batch=options.rows,
            learning_rate_share=lambda _: 1.0,
            max_norm=1.0,
            device=device,
        )
        return state.metrics["loss"]

    return step


def huggingface(options: argparse.Namespace) -> Step:
    """The model of `transformers` for the same shape, and torch's AdamW, each as it comes but for dropout."""
    transformers: Any = importlib.import_module("transformers")
    keys, vocab_size = SHAPES[options.shape]
    if options.shape == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**off))
    else:
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=keys["width"],
            intermediate_size=keys["mlp_width"],
            num_hidden_layers=keys["num_layers"],
            num_attention_heads=keys["num_heads"],
            num_key_value_heads=keys["num_kv_heads"],
            max_position_embeddings=keys["context"],
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    source = random_rows(options)

    def step() -> float:
        ids, targets = next(source)
        with autocast(options):
            scores = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def nanogpt(options: argparse.Namespace) -> Step:
    """nanoGPT's model, its own optimizer, and clipping as in its train.py."""
    spec = importlib.util.spec_from_file_location("nanogpt", options.folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig())
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    source = random_rows(options)

    def step() -> float:
        ids, targets = next(source)
        with autocast(options):
            loss = model(ids, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def autocast(options: argparse.Namespace) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if "bfloat16" in options.program else nullcontext()


PROGRAMS: dict[str, Callable[[argparse.Namespace], Step]] = {
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


def ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """
    Work of a step by `model.cost`, and GFLOP/s of this process: of a large square product, and of the products of this
    model at this batch (forward, gradient of the input, gradient of the weight), each alone and repeated.
    """
    keys, vocab_size = SHAPES[options.shape]
    config = build(ModelConfig, keys | {"context": options.tokens})
    size = 4096 if options.shape == "gpt2" else 2048
    N, D, M = options.rows * options.tokens, config.width, config.mlp_width
    narrow = D * config.num_kv_heads // config.num_heads
    layers = config.num_layers
    products = [(2 * layers, D, D), (2 * layers, D, narrow), (2 * layers, D, M), (layers, M, D), (1, D, vocab_size)]
    work = sum(count * 6.0 * N * wide * out for count, wide, out in products)
    spent = sum(count * sum(product(*sizes) for sizes in three(N, wide, out)) for count, wide, out in products)
    return {
        "flops": cost(config, vocab_size).train_flops_per_token * N,
        "square_gflops": 2.0 * size**3 / product(size, size, size) / 1e9,
        "shapes_gflops": work / spent / 1e9,
    }


def three(tokens: int, wide: int, out: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, inner and columns of y = x W, of ∂x = ∂y Wᵀ, of ∂W = xᵀ ∂y."""
    return (tokens, wide, out), (tokens, out, wide), (wide, tokens, out)


def product(rows: int, inner: int, columns: int) -> float:
    """Seconds of the processor, the least of three, of one product in bfloat16; of the wall with several threads."""
    left = torch.randn(rows, inner).bfloat16()
    right = torch.randn(inner, columns).bfloat16()
    into = torch.empty(rows, columns, dtype=torch.bfloat16)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for _ in range(4):
        start = clock()
        torch.mm(left, right, out=into)
        best = min(best, clock() - start)
    return best


if __name__ == "__main__":
    main()
