"""Models whose weights lie in parts on several ranks: what they learn is what one rank learns."""

import errno
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.config import build
from bloomery.core.errors import ConfigError, RunError
from bloomery.core.io import disk_errors
from bloomery.core.log import VARYING, Metrics, read_metrics
from bloomery.hw.distributed import World
from bloomery.stages.sampling import continuing
from bloomery.train import fsdp, launch, step
from bloomery.train.config import Training
from bloomery.train.plan.memory import check_shard
from bloomery.train.state import Hook, State
from bloomery.weights import checkpoint
from tests.model.made import SHAPES, lively
from tests.train.made import ADAMW, MUON, run, session, stopped
from tests.train.test_parallel import STEPS, furthest, losses

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROOT = Path(__file__).parents[2]
LION = {"kind": "lion", "learning_rate": 1e-4}
ADEMAMIX = {"kind": "ademamix", "learning_rate": 1e-3, "ramp_steps": 5}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_of_exactly_one_rule(shape: Any) -> None:
    model = lively(shape)
    found = fsdp.groups(model)
    assert sorted(itertools.chain(*found.values())) == sorted(name for name, _ in model.named_parameters())
    assert set(found) == {"", *(f"blocks.{number}" for number in range(len(model.blocks)))}


def test_a_weight_that_no_rule_knows_is_named() -> None:
    model = lively(SHAPES[0])
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\.weight is of 0 rules"):
        fsdp.groups(model)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"compile": "auto"}, 'compile="auto" does not go with shard="fsdp".*\nSay compile="off"'),
        ({"optimizer": {"kind": "adamw8bit"}}, 'optimizer.kind="adamw8bit" does not go.*\nSay optimizer.kind="adamw"'),
    ],
)
def test_what_does_not_go_with_parts_is_refused_by_name(settings: dict[str, Any], told: str) -> None:
    config = build(Training, {"steps": 1, "tokens_per_step": 1, "shard": "fsdp", **settings})
    with pytest.raises(ConfigError, match=told):
        check_shard(config, 2)
    assert not check_shard(config, 1)


def held(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session that tells besides which share of weights and of the optimizer's numbers each rank holds."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    made.run()
    kept = made._checkpoints.optimizers.state()
    tensors = [*made.model.parameters(), *(kept[name] for name in kept if not name.endswith("/step"))]
    own, all_ = (sum(count(one) for one in tensors) for count in (lambda t: fsdp.local(t).numel(), Tensor.numel))
    return {"shares": world.gather(own / all_)}


def compare(one: Path, other: Path) -> None:
    """The same losses, validation losses, norms and weights, but for rounding in float32."""
    assert losses(other) == pytest.approx(losses(one), abs=1e-6)
    assert furthest(one, other) < 1e-6
    first, second = (
        [{k: v for k, v in line.items() if k not in VARYING} for line in read_metrics(out / "metrics.jsonl")]
        for out in (one, other)
    )
    for mine, theirs in zip(first, second, strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("validation_loss", "gradient_norm", "weight_norm", "update_norm", "gradient_flow"):
            if name in mine:
                assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=2e-5), name


@pytest.mark.slow
def test_ranks_that_hold_parts_are_one_and_one_goes_on_from_their_checkpoint(shards: Path, tmp_path: Path) -> None:
    """Also where rows do not divide evenly, and where each rank has several micro-batches."""
    settings: dict[str, Any] = {
        "optimizer": MUON,
        "evaluate_every": 5,
        "micro_batch_tokens": 16,
        "norms_every": 4,
        "save_every_seconds": 1e9,
        "keep_every_steps": 4,
    }
    run(shards, tmp_path / "one", 1, **settings)
    task = {"shards": str(shards), "out": str(tmp_path / "parts"), "settings": settings | {"shard": "fsdp"}}
    shares = launch.run("tests.train.test_sharded:held", task, 2)["shares"]
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) < 0.55
    compare(tmp_path / "one", tmp_path / "parts")
    environment = json.loads((tmp_path / "parts" / "checkpoints" / f"{STEPS:09d}" / "environment.json").read_text())
    assert (environment["ranks"], environment["shard"]) == (2, "fsdp")
    alone = stopped(tmp_path / "parts", tmp_path / "alone", 4)
    run(shards, alone, 1, **settings)
    compare(tmp_path / "one", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "ranks", "level"),
    [
        (ADAMW, 2, "selective"),
        (ADAMW, 3, "none"),
        (MUON, 3, "block"),
        (LION, 2, "none"),
        (ADEMAMIX, 3, "none"),
    ],
)
def test_any_number_of_ranks_that_hold_parts_is_one(
    shards: Path, tmp_path: Path, optimizer: dict[str, Any], ranks: int, level: str
) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "evaluate_every": 5, "micro_batch_tokens": 16, "norms_every": 4}
    run(shards, tmp_path / "one", 1, **settings)
    run(shards, tmp_path / "parts", ranks, shard="fsdp", recompute=level, **settings)
    compare(tmp_path / "one", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "none"), (3, "fsdp")), ((2, "fsdp"), (3, "fsdp")), ((2, "fsdp"), (2, "none")), ((2, "fsdp"), (2, "fsdp"))],
)
def test_a_run_goes_on_with_other_ranks_and_other_parts(
    shards: Path, tmp_path: Path, finished: Callable[..., Path], before: tuple[int, str], after: tuple[int, str]
) -> None:
    """Within rounding; and bit for bit where nothing has changed."""
    first = finished(before[0], "adamw", shard=before[1])
    other = stopped(first, tmp_path / "stopped", 4)
    run(shards, other, after[0], optimizer=ADAMW, keep_checkpoints=20, shard=after[1])
    compare(first, other)
    if before == after:
        assert furthest(first, other) == 0.0


def poisoned(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session with bad losses in steps 8, 9 and 10, that also samples and asks questions."""
    inner, calls = step.micro_batch_losses, [0]

    def losses(*args: Any) -> tuple[Tensor, Tensor]:
        calls[0] += torch.is_grad_enabled()  # an evaluation is no step
        loss, entropy = inner(*args)
        bad = math.inf if 8 <= 1 + (calls[0] - 1) // task["passes"] <= 10 else 1.0
        return loss * bad, entropy * bad

    step.micro_batch_losses = losses  # type: ignore[assignment]
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    made.sampler = continuing(made.renderer)
    made.evaluations = {"asked": lambda model, *how: {"asked": float(model.logits(model(IDS)).sum())}}
    return made.run()


IDS = torch.arange(12).view(1, 12)


@pytest.mark.slow
def test_ranks_that_hold_parts_skip_go_back_sample_and_ask_as_one_does(shards: Path, tmp_path: Path) -> None:
    settings = {
        "steps": 14,
        "optimizer": ADAMW,
        "micro_batch_tokens": 16,
        "evaluate_every": 100,
        "keep_checkpoints": 20,
        "skip_window": 4,
        "skip_sigma": 30.0,
        "sample_every": 6,
        "main_log": True,
    }
    found = []
    for name, ranks, passes in (("one", 1, 4), ("parts", 2, 2)):
        task = {"shards": str(shards), "out": str(tmp_path / name), "passes": passes}
        task |= {"settings": settings | ({"shard": "fsdp"} if ranks > 1 else {})}
        found.append(launch.run("tests.train.test_sharded:poisoned", task, ranks))
        assert (tmp_path / name / "main.log").read_text().count("trl") == 11
    assert [(one["skipped_steps"], one["rollbacks"], one["failures"]) for one in found] == [(3, 1, [])] * 2
    compare(tmp_path / "one", tmp_path / "parts")
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "parts")]
    assert texts[0] == texts[1]
    asked = [
        [line["asked"] for line in read_metrics(tmp_path / n / "metrics.jsonl") if "asked" in line]
        for n in ("one", "parts")
    ]
    assert asked[0] == pytest.approx(asked[1], rel=1e-4)


def failing(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session in which a hook of rank 1 fails after step 5."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    whole = made._hooks

    def fail(state: State) -> None:
        raise ZeroDivisionError("odd")

    def hooks(*args: Any) -> list[Hook]:
        return [Hook(lambda state: state.step == 5 and world.rank == 1, fail, "fail"), *whole(*args)]

    made._hooks = hooks  # type: ignore[assignment, method-assign]
    return made.run()


@pytest.mark.slow
def test_a_hook_that_fails_on_a_rank_with_parts_costs_no_step(shards: Path, tmp_path: Path) -> None:
    settings = {"save_every_seconds": 1e9, "evaluate_every": 100, "shard": "fsdp"}
    task = {"shards": str(shards), "out": str(tmp_path), "settings": settings}
    with pytest.raises(RunError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        launch.run("tests.train.test_sharded:failing", task, 2)
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state["step"] == 5


# --- saves that fail on one rank -------------------------------------------------------------------------------------


def full(*args: Any, **how: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def odd(*args: Any, **how: Any) -> Any:
    raise ZeroDivisionError("odd")


PARTS: list[tuple[int, Any, str, Callable[..., Any]]] = [
    (0, checkpoint, "copy_state", odd),
    (1, checkpoint, "copy_state", odd),
    (0, checkpoint, "_check_way", full),
    (0, checkpoint, "_check_way", odd),
    (0, checkpoint, "check_space", full),
    (1, Path, "mkdir", full),
    (0, HuggingFaceStorageWriter, "write_data", full),
    (1, HuggingFaceStorageWriter, "write_data", full),
    (1, core_io, "sync_folder", full),
    (0, core_io, "write_json", full),
    (0, core_io, "listing", full),
    (0, Path, "rename", full),
    (0, checkpoint, "_prune", full),
]
"""Rank, and what fails on it alone: each part of a save of weights in parts."""


def write_model(folder: Path) -> None:
    (folder / "model").write_text("whole")


def breaking(task: dict[str, Any], world: World) -> dict[str, Any]:
    """Saves, in each of which one part fails on one rank, and at last one in which none does."""
    signal.alarm(SECONDS)
    mesh = init_device_mesh("cpu", (world.size,))
    training: dict[str, Tensor] = {"w/momentum": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    told = []
    with checkpoint.Saver(Path(task["root"]), checkpoint.RetentionPolicy(last=1), world) as saver:
        for step, (rank, owner, name, fail) in enumerate([*PARTS, (-1, checkpoint, "_prune", full)], 1):
            with pytest.MonkeyPatch.context() as patch:
                if rank == world.rank:
                    patch.setattr(owner, name, fail)
                try:
                    saver.start(step, write_model, training, {"step": step, "samples": 0})
                    saver.wait()
                except (RunError, ZeroDivisionError) as error:
                    told.append(f"{type(error).__name__} {error}")
                else:
                    told.append("")
            world.barrier()
    return {"told": world.gather(told)}


SECONDS = 150
"""Of patience with ranks that wait for each other."""


@pytest.mark.slow
def test_whatever_part_of_a_save_fails_on_one_rank_all_ranks_are_told_why(tmp_path: Path) -> None:
    mine, theirs = launch.run("tests.train.test_sharded:breaking", {"root": str(tmp_path)}, 2)["told"]
    assert len(mine) == len(theirs) == len(PARTS) + 1
    for number, (rank, owner, name, fail) in enumerate(PARTS, 1):
        if fail is odd:
            own, other = (mine, theirs) if rank == 0 else (theirs, mine)
            assert own[number - 1] == "ZeroDivisionError odd"
            assert other[number - 1].startswith(
                "RankLostError another rank had to stop: ZeroDivisionError: odd\nLook at"
            )
        else:
            assert mine[number - 1] == theirs[number - 1], (owner, name)
            assert f"{number:09d}" in mine[number - 1], (owner, name)
            assert "cannot be written: No space left on device" in mine[number - 1], (owner, name)
            assert "\nFree some space and run the same command again" in mine[number - 1], (owner, name)
    assert mine[-1] == theirs[-1] == ""
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == [f"{len(PARTS) + 1:09d}"]
    assert checkpoint.damage(checkpoint.folders(tmp_path)[0]) == ""


def limited(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session in which one rank cannot write what it could any more, from step 4 on."""
    signal.alarm(SECONDS)
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    whole = made._hooks

    def limit(state: State) -> None:
        if task["bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (task["bytes"], task["bytes"]))
        else:
            Metrics.sync = full_metrics  # type: ignore[method-assign]

    def hooks(*args: Any) -> list[Hook]:
        return [Hook(lambda state: state.step == 4 and world.rank == task["rank"], limit, "limit"), *whole(*args)]

    made._hooks = hooks  # type: ignore[assignment, method-assign]
    return made.run()


def full_metrics(self: Metrics) -> None:
    with disk_errors(self._path):
        full()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [
        (0, 60_000, r"00000000\d.partial/model.safetensors: cannot be written: File too large.*\n.*`ulimit -f`"),
        (1, 30_000, r"checkpoints/00000000\d: cannot be written: File too large.*\n.*`ulimit -f`"),
        (0, 0, r"metrics.jsonl: cannot be written: No space left on device.*\nFree some space"),
    ],
    ids=["model", "training part", "metrics"],
)
def test_a_save_that_fails_on_one_rank_stops_all_with_the_cure_and_the_same_command_goes_on(
    shards: Path, tmp_path: Path, rank: int, size: int, told: str
) -> None:
    settings = {"shard": "fsdp", "keep_checkpoints": 20, "evaluate_every": 5}
    task = {"shards": str(shards), "out": str(tmp_path), "settings": settings, "rank": rank, "bytes": size}
    with pytest.raises(RunError, match=told):
        launch.run("tests.train.test_sharded:limited", task, 2)
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state["step"] == 3
    assert run(shards, tmp_path, 2, **settings)["steps"] == STEPS
    assert [int(one.name) for one in checkpoint.folders(tmp_path / "checkpoints")] == list(range(STEPS + 1))


TRAIN = """
import json, sys
from bloomery.train import launch
launch.run("tests.train.made:trained", json.loads(sys.argv[1]), 2)
"""


@pytest.mark.slow
def test_ranks_with_parts_that_are_asked_to_stop_save_and_go_on(shards: Path, tmp_path: Path) -> None:
    settings = {"steps": 100_000, "save_every_seconds": 1e6, "evaluate_every": 10**6, "shard": "fsdp"}
    task = {"shards": str(shards), "out": str(tmp_path), "settings": settings}
    with subprocess.Popen([sys.executable, "-c", TRAIN, json.dumps(task)], cwd=ROOT, env=os.environ) as parent:
        deadline = time.monotonic() + 180
        while len(read_metrics(tmp_path / "metrics.jsonl")) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=60) == 143
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state["step"] == read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] >= 5
