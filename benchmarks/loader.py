"""
Does training wait for its data?

    python benchmarks/loader.py [--json] [--quick]

Per shape (the demo's model, and a Llama of the size of GPT-2 124M at B=4 T=64 and B=8 T=512): how long the thread of
the loader works on a batch, how long the training step takes, and how long the step stood still to take a batch from
the loader. Shards are random tokens, memory-mapped as ever; the step is forward and backward. The number is the worst
share of a step that was waited; beside it the share that a loader without a thread would take. --quick leaves out the
largest batch.
"""

import argparse
import json
import sys
import tempfile
import time
import tomllib
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from demo import commit
from stand_in import ROOT

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.hw import device as devices
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import PackedDataset, batches
from bloomery.train.precision import Precision
from bloomery.train.step import accumulate_gradients

DOCUMENT, HASH, SAMPLES, STEPS = 0, "0" * 64, 4096, 7
SHAPES = (("demo", 32, 256), ("124m", 4, 64), ("124m", 8, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    shapes = SHAPES[:-1] if options.quick else SHAPES
    rows: list[dict[str, Any]] = []
    for name, size, length in shapes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"model": name, "batch": size, "tokens": length} | measured(Path(folder), name, size, length))
        if not options.json:
            print(rows[-1], file=sys.stderr)
    worst = max(float(row["waited_share"]) for row in rows)
    print(
        json.dumps(
            {
                "name": "loader",
                "ours": {"value": worst, "unit": "share of a step that waits for data"},
                "peers": {},
                "ratio_to_best_peer": None,
                "machine": machine() | {"threads": devices.threads()},
                "versions": versions(),
                "notes": {"commit": commit(), "rows": rows},
            }
        )
    )


def model_of(name: str, length: int) -> Transformer:
    if name == "demo":
        tree = tomllib.loads((ROOT / "recipes" / "demo.toml").read_text(encoding="utf-8"))
        return Transformer(build(ModelConfig, tree["pretrain"]["model"]), tree["tokenizer"]["vocab_size"])
    shape = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "intermediate_size": 2048}
    return Transformer(build(ModelConfig, {**shape, "context_length": length}), 50257)


def measured(folder: Path, name: str, size: int, length: int) -> dict[str, Any]:
    model = model_of(name, length)
    model.initialize(0)
    write(folder, model.vocab_size, length)
    samples = PackedDataset(folder, "train", length, HASH)
    alone = []
    for step in range(20):
        began = time.perf_counter()
        samples.batch(samples.order(step * size, size, 0))
        alone.append(time.perf_counter() - began)
    precision, waited, whole = Precision.decide("auto", devices.find("cpu")), [], []
    with closing(batches(samples, first=0, size=size, seed=0)) as source:
        for _ in range(STEPS):
            began = time.perf_counter()
            batch = next(source)
            waited.append(time.perf_counter() - began)
            accumulate_gradients(model, batch, size, precision)
            model.zero_grad()
            whole.append(time.perf_counter() - began)
    step_seconds = median(whole[2:])
    return {
        "step_ms": round(step_seconds * 1e3, 1),
        "waited_ms": round(median(waited[2:]) * 1e3, 3),
        "batch_ms": round(median(alone) * 1e3, 3),
        "waited_share": round(median(waited[2:]) / step_seconds, 6),
        "share_without_thread": round(median(alone) / step_seconds, 6),
    }


def write(folder: Path, vocab_size: int, length: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, vocab_size, SAMPLES * length + 1)
    starts = [0, *range(300, len(tokens), 300)]
    tokens[starts] = DOCUMENT
    facts = {"document_id": DOCUMENT}
    format.write(folder / "train-00000", tokens, vocab_size=vocab_size, starts=starts, tokenizer_hash=HASH, facts=facts)


if __name__ == "__main__":
    main()
