"""Batches, devices and training runs for tests."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.core.io import MANIFEST
from bloomery.core.log import VARYING, read_metrics
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.shards import format
from bloomery.shards.loader import IGNORE, Batch, PackedDataset
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import collectives, launch
from bloomery.train.checkpointing import FullModelSaver
from bloomery.train.config import AdamW, Training
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import State
from bloomery.train.step import Trainer
from bloomery.train.trainer import TrainingRun
from bloomery.weights import checkpoint
from bloomery.weights.hf import Lineage
from tests.model.made import VOCAB_SIZE
from tests.tokenizer.made import small

import torch

T = 16
SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=24, context_length=T)
ADAMW = {"kind": "adamw", "learning_rate": 0.003}
LINEAGE = Lineage(tokenizer=small().hash, template=None, shards="5" * 64)
MUON = {"kind": "muon", "muon_lr": 0.005}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "muon": MUON,
    "lion": {"kind": "lion", "learning_rate": 1e-4},
    "ademamix": {"kind": "ademamix", "learning_rate": 1e-3, "ramp_steps": 5},
    "adamw8bit": {"kind": "adamw8bit", "learning_rate": 1e-3, "block": 8},  # parts of SHAPE have whole blocks
}


def processor(dtype: torch.dtype = torch.float32) -> Device:
    return Device(
        torch_device=torch.device("cpu"), vendor="cpu", name="test", memory_bytes=0, compute_dtype=dtype, backend="gloo"
    )


def on_cpu(dtype: torch.dtype = torch.float32) -> Precision:
    return Precision.decide("auto", processor(dtype))


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


def held(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The same; it tells besides how many bytes of weights and of optimizers each rank holds, and of how many."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    made.run()
    kept = made._checkpoints.optimizers.state()
    groups = list(made.model.parameters()), [kept[name] for name in kept if not name.endswith("/step")]
    own = [sum(collectives.local(tensor).nbytes for tensor in tensors) for tensors in groups]
    whole = sum(tensor.nbytes for tensors in groups for tensor in tensors)
    return {"held": world.gather(own), "all": whole, "vocab_size": made.model.vocab_size}


def session(shards: Path, out: Path, world: World | None = None, **settings: Any) -> TrainingRun:
    """A run of 9 steps of 4 samples that saves after every step."""
    tree: dict[str, Any] = {
        "steps": 9,
        "global_batch_tokens": 4 * T,
        "micro_batch_tokens": 3 * T,
        "dry_run": False,
        "save_every_seconds": 1e-9,
        "log_every": 1,
        "eval_every": 2,
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
        model_saver=FullModelSaver(model, Renderer(small()), LINEAGE),
        tokenizer=small(),
        samples=PackedDataset(shards, "train", T, small().hash),
        validation=PackedDataset(shards, "val", T, small().hash),
        out=out,
        world=world or World.alone(),
        from_scratch=True,
    )


def trainer(model: Transformer, batches: Iterator[Batch], state: State, **how: Any) -> Trainer:
    """Of AdamW for one step in micro-batches of 2, unless told otherwise."""
    settings: dict[str, Any] = {
        "optimizer": AdamW(learning_rate=0.01),
        "steps": 1,
        "micro_batch": 2,
        "learning_rate_share": lambda step: 1.0,
        "max_grad_norm": 1.0,
        "precision": on_cpu(),
        **how,
    }
    optimizer = settings.pop("optimizer")
    optimizers = optimizer if isinstance(optimizer, Optimizers) else Optimizers(model, optimizer)
    return Trainer(model, optimizers, batches, state=state, **settings)


def run(shards: Path, out: Path, ranks: int, **settings: Any) -> dict[str, Any]:
    """A session on this many ranks."""
    task = {"shards": str(shards), "out": str(out), "settings": settings}
    return trained(task, World.alone()) if ranks == 1 else launch.run("tests.train.made:trained", task, ranks)


def result(out: Path) -> dict[str, Any]:
    """All that a run leaves behind at its end but for how long it took."""
    newest = checkpoint.folders(out / "checkpoints")[-1]
    return {
        "metrics": [{k: v for k, v in line.items() if k not in VARYING} for line in lines(out)],
        "model": {file.name: file.read_bytes() for file in sorted((out / "model").iterdir())},
        "checkpoint": content(newest),
    }


def content(folder: Path) -> dict[str, bytes]:
    """
    The files of a checkpoint, and each number of its training state. Not the bytes of its files: two notes in the
    header of a safetensors file come in any order.
    """
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != MANIFEST}
    state = checkpoint.read(folder / "training")
    return files | {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def lines(out: Path, key: str = "step") -> list[dict[str, Any]]:
    """Of metrics.jsonl, those that have a key."""
    return [line for line in read_metrics(out / "metrics.jsonl") if key in line]


def model_bytes(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def newest_state(out: Path) -> Mapping[str, Any]:
    """Of a run's newest whole checkpoint, as a resume would take it up."""
    newest = checkpoint.newest(out / "checkpoints")
    assert newest is not None
    return newest.state


def wait_for_steps(out: Path, seconds: float = 180) -> None:
    """Until another process has logged some steps."""
    deadline = time.monotonic() + seconds
    while len(read_metrics(out / "metrics.jsonl")) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stopped(whole: Path, out: Path, after: int) -> Path:
    """A copy of a run, without what was saved after a step."""
    shutil.copytree(whole, out)
    for folder in checkpoint.folders(out / "checkpoints"):
        if int(folder.name) > after:
            checkpoint._remove(folder)
    return out
