"""A finetuned model that is small, and what is preferred of it."""

import json
import random
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.config import build
from bloomery.core.io import MANIFEST
from bloomery.core.log import VARYING, read_metrics
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.preference.config import Prefer
from bloomery.weights import hf
from bloomery.weights.hf import Lineage
from tests.core.made import manifest
from tests.tokenizer.made import small

import torch

CONTEXT = 48
SHAPE = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48, context_length=CONTEXT
)


def tuned(folder: Path) -> Path:
    """The folder of a stage that left a model of conversations."""
    model, renderer = Transformer(SHAPE, small().vocab_size), Renderer(small())
    model.initialize(1)
    lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    hf.save(folder / "model", model, renderer, lineage)
    core_io.write_json(folder / MANIFEST, manifest(core_io.listing(folder), hands_on="model/"))
    return folder


def guessing(folder: Path, steps: int = 40) -> Path:
    """As `tuned`, but it answers every sum with some digit, and ends."""
    tuned(folder)
    loaded = hf.load(folder / "model")
    model, renderer, rng = loaded.model.train(), loaded.renderer, random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for _ in range(steps):
        said = []
        for _ in range(8):
            asked = f"What is {rng.randint(0, 3)} plus {rng.randint(0, 3)}?"
            answer = str(rng.randint(0, 6))
            said.append(renderer.render([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]))
        ids, mask = (torch.tensor([getattr(one, name) for one in said]) for name in ("ids", "mask"))
        scores, learned = model.logits(model(ids[:, :-1])), mask[:, 1:] > 0
        torch.autograd.backward(torch.nn.functional.cross_entropy(scores[learned], ids[:, 1:][learned]))
        optimizer.step()
        optimizer.zero_grad()
    hf.save(folder / "model", model, loaded.language, loaded.lineage)
    core_io.write_json(folder / MANIFEST, manifest(core_io.listing(folder), hands_on="model/"))
    return folder


def polite_pairs(path: Path, count: int = 120) -> Path:
    """Pairs of which the better answer is always the same one of two."""
    rows = [{"prompt": f"What is {n} plus {n + 1}?", "chosen": "yes", "rejected": "no"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(**given: Any) -> Prefer:
    """A run of 6 steps that saves after each."""
    tree: dict[str, Any] = {
        "steps": 6,
        "global_batch_tokens": 4 * 2 * CONTEXT,
        "micro_batch_tokens": 3 * 2 * CONTEXT,
        "dry_run": False,
        "save_every_seconds": 1e-9,
        "log_every": 1,
        "eval_every": 3,
        "precision": "float32",
        "val_fraction": 0.2,
        "keep_last": 3,
        "optimizer": {"kind": "adamw", "learning_rate": 0.003, "weight_decay": 0.0},
        **given,
    }
    return build(Prefer, tree)


def left(out: Path) -> dict[str, Any]:
    """All that a run leaves behind but for how long it took."""
    lines = [{k: v for k, v in line.items() if k not in VARYING} for line in read_metrics(out / "metrics.jsonl")]
    return {"metrics": lines, "model": {file.name: file.read_bytes() for file in sorted((out / "model").iterdir())}}
