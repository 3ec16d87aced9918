"""Batches, devices and training runs for tests."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import launch
from bloomery.train.config import Training
from bloomery.train.trainer import TrainingRun
from bloomery.weights import checkpoint
from bloomery.weights.hf import Lineage
from tests.model.made import VOCAB_SIZE
from tests.tokenizer.made import small

import torch

T = 16
SHAPE = ModelConfig(width=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=24, context=T)
ADAMW = {"kind": "adamw", "learning_rate": 0.003}
MUON = {"kind": "muon", "matrix_learning_rate": 0.005}


def processor(dtype: torch.dtype = torch.float32) -> Device:
    return Device(
        place=torch.device("cpu"), vendor="cpu", name="test", memory_bytes=0, compute_dtype=dtype, backend="gloo"
    )


def random_batch(rows: int, seed: int = 0, supervised: Sequence[float] | float = 0.5) -> Batch:
    """Rows of two documents each, in which this share of targets is supervised, for all rows or for each."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB_SIZE, (rows, T))
    targets = rng.integers(0, VOCAB_SIZE, (rows, T))
    targets[rng.random((rows, T)) >= np.broadcast_to(supervised, rows)[:, None]] = IGNORE
    cuts = rng.integers(1, T, (rows, 1))
    place = np.arange(T)
    segments = (place >= cuts).astype(np.int64)
    return Batch(ids, targets, np.where(segments, place - cuts, place), segments, rng.permutation(1000)[:rows])


def write_samples(folder: Path, samples: int = 23) -> None:
    """A train and a val split of random documents of few different tokens, which a model learns in a few steps."""
    rng = np.random.default_rng(3)
    for split, count in (("train", samples), ("val", 5)):
        tokens = rng.integers(10, 30, count * T + 1)
        starts = [0, *sorted(rng.choice(np.arange(1, len(tokens)), count // 2, replace=False).tolist())]
        tokens[starts] = small().document_id
        format.write(
            folder / f"{split}-00000",
            tokens,
            vocab_size=small().vocab_size,
            starts=starts,
            tokenizer_hash=small().hash,
            facts={"document_id": small().document_id},
        )


def trained(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What a rank does that `launch.run` has started: a session with the settings of the task."""
    return session(Path(task["shards"]), Path(task["out"]), world, **task["settings"]).run()


def session(shards: Path, out: Path, world: World | None = None, **settings: Any) -> TrainingRun:
    """A run of 9 steps of 4 samples that saves after every step."""
    tree: dict[str, Any] = {
        "steps": 9,
        "tokens_per_step": 4 * T,
        "micro_batch_tokens": 3 * T,
        "dry_run": False,
        "save_every_seconds": 1e-9,
        "log_every": 1,
        "evaluate_every": 2,
        "precision": "float32",
        "schedule": {"kind": "wsd", "warmup_steps": min(2, settings.get("steps", 9) - 1)},
        **settings,
    }
    model = Transformer(SHAPE, small().vocab_size)
    model.initialize(5)
    return TrainingRun(
        name="pretrain",
        config=build(Training, tree),
        model=model,
        renderer=Renderer(small()),
        samples=PackedDataset(shards, "train", T, small().hash),
        validation=PackedDataset(shards, "val", T, small().hash),
        lineage=Lineage(tokenizer=small().hash, template=None, shards="5" * 64),
        out=out,
        world=world or World.alone(),
        from_scratch=True,
    )


def run(shards: Path, out: Path, ranks: int, **settings: Any) -> dict[str, Any]:
    """A session on this many ranks."""
    task = {"shards": str(shards), "out": str(out), "settings": settings}
    return launch.run("tests.train.made:trained", task, ranks)


def stopped(whole: Path, out: Path, after: int) -> Path:
    """A copy of a run, without what was saved after a step."""
    shutil.copytree(whole, out)
    for folder in checkpoint.folders(out / "checkpoints"):
        if int(folder.name) > after:
            checkpoint._remove(folder)
    return out
