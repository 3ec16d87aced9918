"""Models whose weights lie in parts on several ranks: what they learn is what one rank learns."""

import errno
import json
import math
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.config import build
from bloomery.core.errors import ConfigError, RunError
from bloomery.core.io import disk_errors
from bloomery.core.log import VARYING, Metrics
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer, on_meta
from bloomery.stages.rollouts import continuing
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import collectives, fsdp, launch, step
from bloomery.train.collectives import Norms
from bloomery.train.config import Mesh, Training
from bloomery.train.plan.memory import check_shard
from bloomery.train.preference.config import Prefer
from bloomery.train.state import Hook, State
from bloomery.train.step import accumulate_gradients
from bloomery.weights import checkpoint
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.tokenizer.made import small
from tests.train.made import (
    ADAMW,
    MUON,
    OPTIMIZERS,
    lines,
    newest_state,
    on_cpu,
    processor,
    random_batch,
    run,
    session,
    stopped,
)

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SAVES_AT_ENDS = {"save_every_seconds": 1e9}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_is_a_unit_and_so_are_the_ends_of_a_model_without_a_tied_head(shape: Any) -> None:
    model = lively(shape)
    found = fsdp.units(model, Mesh(dp_shard=2))
    ends = set() if model.config.tie_embeddings else {"embed", "head"}
    assert set(found) == {*ends, *(f"blocks.{number}" for number in range(len(model.blocks)))}


def test_a_weight_that_no_rule_knows_is_named() -> None:
    model = lively(SHAPES[0])
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\.weight fits 0 rows"):
        fsdp.units(model, Mesh(dp_shard=2))


@pytest.mark.parametrize(
    ("ranks", "settings", "told"),
    [
        (1, {"sample_every": 5}, 'sample_every does not work.*\nSet sample_every=0 or offload="none"'),
        (2, {}, 'needs a sharded model, but each of 2 processes holds all of it\nSet parallelism="fsdp" or a mesh'),
        (2, {"mesh": {"dp_shard": 2, "zero_stage": 2}}, "keep all weights on the device.*\nSet mesh.zero_stage=3"),
        (1, {"weight_dtype": "bfloat16"}, '"bfloat16" does not work with offload="host".*\nSet weight_dtype="float32"'),
    ],
)
def test_what_does_not_go_with_offloading_is_refused_by_name(ranks: int, settings: dict[str, Any], told: str) -> None:
    config = build(Training, {"steps": 1, "global_batch_tokens": 1, "offload": "host", **settings})
    with pytest.raises(ConfigError, match=told):
        check_shard(config, ranks)
    assert check_shard(config.model_copy(update={"offload": "auto"}), ranks) == config.mesh, "then it never offloads"


def test_a_process_that_offloads_alone_holds_the_only_part_adapters_included() -> None:
    config = build(Training, {"steps": 1, "global_batch_tokens": 1, "offload": "host"})
    assert check_shard(config, 1) == check_shard(config, 1, adapters=True) == Mesh()
    assert check_shard(config.model_copy(update={"offload": "none"}), 1) is None
    assert not launch.stays_here(config)


def test_preference_training_is_refused_with_parts_before_ranks_wait_for_each_other() -> None:
    """Each rank asks the model on its own, so that they would pass through it at other times."""
    pairs = {"pairs": [{"kind": "worlds"}]}
    config = build(Prefer, {"steps": 1, "global_batch_tokens": 1, "parallelism": "fsdp", **pairs})
    with pytest.raises(ConfigError, match=r'^\[prefer\] does not work with parallelism="fsdp".*\n.*parallelism="none"'):
        check_shard(config, 2)
    assert not check_shard(config.model_copy(update={"parallelism": "none"}), 2)
    with pytest.raises(ConfigError, match=r'need the whole model on the device\nSet prefer.offload="none"'):
        check_shard(config.model_copy(update={"offload": "host"}), 1)


def compare(one: Path, other: Path, allowed: float = 1e-6) -> None:
    """The same losses, validation losses, norms and weights, but for rounding in float32."""
    assert losses(other) == pytest.approx(losses(one), abs=1e-6)
    assert furthest(one, other) < allowed
    first, second = (
        [{k: v for k, v in line.items() if k not in VARYING} for line in lines(out)] for out in (one, other)
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
        "eval_every": 5,
        "micro_batch_tokens": 16,
        "grad_stats_every": 4,
        "save_every_seconds": 1e9,
        "keep_every": 4,
    }
    run(shards, tmp_path / "one", 1, **settings)
    task = {"shards": str(shards), "out": str(tmp_path / "parts"), "settings": settings | {"parallelism": "fsdp"}}
    told = launch.run("tests.train.made:held", task, 2)
    shares = [sum(own) / told["all"] for own in told["held"]]
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) < 0.55
    compare(tmp_path / "one", tmp_path / "parts")
    environment = json.loads((tmp_path / "parts" / "checkpoints" / f"{STEPS:09d}" / "environment.json").read_text())
    assert (environment["ranks"], environment["parallelism"]) == (2, "fsdp")
    alone = stopped(tmp_path / "parts", tmp_path / "alone", 4)
    run(shards, alone, 1, **settings)
    compare(tmp_path / "one", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "ranks", "parallelism", "level"),
    [
        ("muon", 2, "none", "none"),
        ("muon", 3, "none", "none"),
        ("adamw", 2, "fsdp", "selective"),
        ("muon", 3, "fsdp", "full"),
        ("lion", 2, "fsdp", "none"),
        ("ademamix", 3, "fsdp", "none"),
    ],
)
def test_any_number_of_ranks_is_one_whether_they_hold_parts_or_all(
    shards: Path,
    tmp_path: Path,
    finished: Callable[..., Path],
    optimizer: str,
    ranks: int,
    parallelism: str,
    level: str,
) -> None:
    """Also where rows do not divide evenly, and where each rank has several micro-batches."""
    settings: dict[str, Any] = {"eval_every": 5, "micro_batch_tokens": 16, "grad_stats_every": 4, **SAVES_AT_ENDS}
    one = finished(1, optimizer, **settings)
    more: dict[str, Any] = {"parallelism": parallelism, "activation_checkpointing": level}
    assert run(shards, tmp_path, ranks, optimizer=OPTIMIZERS[optimizer], **settings, **more)["steps"] == STEPS
    compare(one, tmp_path)
    environment = json.loads((tmp_path / "checkpoints" / f"{STEPS:09d}" / "environment.json").read_text())
    assert environment["ranks"] == ranks


@pytest.mark.slow
def test_blocks_of_a_model_in_parts_are_compiled_one_by_one(shards: Path, tmp_path: Path) -> None:
    """Between the exchanges of weights, which no compiled code holds."""
    settings: dict[str, Any] = {"optimizer": ADAMW, "eval_every": 5, "micro_batch_tokens": 16, **SAVES_AT_ENDS}
    run(shards, tmp_path / "plain", 2, parallelism="fsdp", **settings)
    run(shards, tmp_path / "fast", 2, parallelism="fsdp", compile="on", activation_checkpointing="full", **settings)
    [verdict] = json.loads((tmp_path / "fast" / "compile.json").read_text()).values()
    assert verdict["compiled"], verdict
    assert re.search(r"; \d+ graphs? compiled in", verdict["why"]), verdict
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        *(("muon", (before, "none"), (after, "none")) for before, after in ((1, 2), (2, 1), (2, 2), (2, 3))),
        ("adamw", (1, "none"), (3, "fsdp")),
        ("adamw", (2, "fsdp"), (3, "fsdp")),
        ("adamw", (2, "fsdp"), (2, "none")),
        ("adamw", (2, "fsdp"), (2, "fsdp")),
        ("adamw8bit", (1, "none"), (2, "fsdp")),
        ("adamw8bit", (2, "fsdp"), (3, "fsdp")),
        ("adamw8bit", (2, "fsdp"), (1, "none")),
        ("adamw8bit", (2, "fsdp"), (2, "fsdp")),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_other_parts(
    shards: Path,
    tmp_path: Path,
    finished: Callable[..., Path],
    optimizer: str,
    before: tuple[int, str],
    after: tuple[int, str],
) -> None:
    """Within rounding; and bit for bit where nothing has changed."""
    first = finished(before[0], optimizer, parallelism=before[1])
    other = stopped(first, tmp_path / "stopped", random.Random(after[0]).randint(2, 6))
    run(shards, other, after[0], optimizer=OPTIMIZERS[optimizer], parallelism=after[1], **SAVES_AT_ENDS)
    compare(first, other, 1e-4 if optimizer == "adamw8bit" else 1e-6)  # a last bit may change a code
    if before == after:
        assert furthest(first, other) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_with_weights_on_the_host_is_one_without_and_goes_on_as_either(
    shards: Path, tmp_path: Path, finished: Callable[..., Path], optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, norms, saves and the model that is left included."""
    settings: dict[str, Any] = {"eval_every": 5, "micro_batch_tokens": 16, "grad_stats_every": 4, **SAVES_AT_ENDS}
    one, more = finished(1, optimizer, **settings), settings | {"optimizer": OPTIMIZERS[optimizer], "keep_last": 20}
    run(shards, tmp_path / "host", 1, offload="host", **more)
    assert "offload: nothing moves, as a CPU computes in the host's memory" in capsys.readouterr().err
    compare(one, tmp_path / "host")
    for name, offload in (("again", "host"), ("back", "none")):
        other = stopped(tmp_path / "host", tmp_path / name, 5)
        run(shards, other, 1, offload=offload, **more)
        compare(one, other)
        assert offload == "none" or furthest(tmp_path / "host", other) == 0.0
    two = run(shards, tmp_path / "two", 2, parallelism="fsdp", offload="host", **more)
    assert two["steps"] == STEPS
    compare(one, tmp_path / "two")


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
    made.sampler = continuing(Renderer(small()))
    made.evaluations = {"asked": lambda model, *how: {"asked": float(model.logits(model(IDS)).sum())}}
    return made.run()


IDS = torch.arange(12).view(1, 12)


@pytest.mark.slow
def test_ranks_that_hold_parts_skip_go_back_sample_and_ask_as_one_does(shards: Path, tmp_path: Path) -> None:
    settings = {
        "steps": 14,
        "optimizer": ADAMW,
        "micro_batch_tokens": 16,
        "eval_every": 100,
        "keep_last": 20,
        "spike_window": 4,
        "spike_sigma": 30.0,
        "sample_every": 6,
        "main_log": True,
    }
    found = []
    for name, ranks, passes in (("one", 1, 4), ("parts", 2, 2)):
        task = {"shards": str(shards), "out": str(tmp_path / name), "passes": passes}
        task |= {"settings": settings | ({"parallelism": "fsdp"} if ranks > 1 else {})}
        found.append(launch.run("tests.train.test_fsdp:poisoned", task, ranks))
        assert (tmp_path / name / "main.log").read_text().count("trl") == 11
    assert [(one["skipped_steps"], one["rollbacks"], one["failures"]) for one in found] == [(3, 1, [])] * 2
    compare(tmp_path / "one", tmp_path / "parts")
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "parts")]
    assert texts[0] == texts[1]
    asked = [[line["asked"] for line in lines(tmp_path / name, "asked")] for name in ("one", "parts")]
    assert asked[0] == pytest.approx(asked[1], rel=1e-4)


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
    mine, theirs = launch.run("tests.train.test_fsdp:breaking", {"root": str(tmp_path)}, 2)["told"]
    assert len(mine) == len(theirs) == len(PARTS) + 1
    for number, (rank, owner, name, fail) in enumerate(PARTS, 1):
        if fail is odd:
            own, other = (mine, theirs) if rank == 0 else (theirs, mine)
            assert own[number - 1] == "ZeroDivisionError odd"
            assert other[number - 1].startswith(
                "RankLostError another rank had to stop: ZeroDivisionError: odd\nRead the"
            )
        else:
            first, second = (re.sub(r"[\d,.]+ MiB free", "", one[number - 1]) for one in (mine, theirs))
            assert first == second, (owner, name)
            assert f"{number:09d}" in mine[number - 1], (owner, name)
            assert f" (rank {rank}): " in mine[number - 1], (owner, name)
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

    saved = Path(task["out"]) / "checkpoints" / f"{3:09d}"

    def limit(state: State) -> None:
        end = time.monotonic() + 120
        while not saved.is_dir() and time.monotonic() < end:  # a thread may still be writing what came before
            time.sleep(0.01)
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
        (
            0,
            60_000,
            r"00000000\d.partial/model.safetensors \(rank 0\): cannot be written: File too large.*\n.*`ulimit -f`",
        ),
        (
            1,
            30_000,
            r"checkpoints/00000000\d.partial/training \(rank 1\): cannot be written: File too large.*\n.*`ulimit -f`",
        ),
        (0, 0, r"metrics.jsonl: cannot be written: No space left on device.*\nFree some space"),
    ],
    ids=["model", "training part", "metrics"],
)
def test_a_save_that_fails_on_one_rank_stops_all_with_the_cure_and_the_same_command_goes_on(
    shards: Path, tmp_path: Path, rank: int, size: int, told: str
) -> None:
    settings = {"parallelism": "fsdp", "keep_last": 20, "eval_every": 5}
    task = {"shards": str(shards), "out": str(tmp_path), "settings": settings, "rank": rank, "bytes": size}
    with pytest.raises(RunError, match=told):
        launch.run("tests.train.test_fsdp:limited", task, 2)
    assert newest_state(tmp_path)["step"] == 3
    assert run(shards, tmp_path, 2, **settings)["steps"] == STEPS
    assert [int(one.name) for one in checkpoint.folders(tmp_path / "checkpoints")] == list(range(STEPS + 1))


# --- parallel ---------------------------------------------------------------------------------------------------------


STEPS = 9


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out, "loss")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model" / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    """The largest difference between any two weights."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def summed(task: dict[str, Any], world: World) -> dict[str, Any]:
    """The sum of gradients of which some ranks have none, in buckets that hold one or two of them."""
    collectives.BUCKET_NUMBERS = 10
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 2), torch.nn.Linear(1, 1)])
    for place, weight in enumerate(model.parameters()):
        if place < 4 and place % 2 == world.rank:
            weight.grad = torch.full_like(weight, place + 1.0)
    if world.rank == 0:
        first = next(model.parameters())
        first.grad = torch.ones_like(first)
    collectives.sum_gradients(model, world)
    return {"found": [None if w.grad is None else w.grad.flatten().tolist() for w in model.parameters()]}


@pytest.mark.slow
def test_gradients_that_only_some_ranks_have_are_added_and_what_none_has_stays_without() -> None:
    found = launch.run("tests.train.test_fsdp:summed", {}, ranks=2)["found"]
    assert found == [[1.0] * 6, [2.0] * 2, [3.0] * 4, [4.0] * 2, None, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_has_the_weights_of_its_moment(shape: Any) -> None:
    model = lively(shape)
    twin = fsdp.copy_of(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    after = twin.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert isinstance(twin, Transformer)
    assert twin.vocab_size == VOCAB_SIZE


def troubled(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session in which something happens to a rank after step 5; where ranks hold parts, before all other hooks."""
    run = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    whole = run._hooks

    def happen(state: State) -> None:
        if task["what"].startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("odd")

    def hooks(*args: Any) -> list[Hook]:
        hook = Hook(lambda state: state.step == 5 and world.rank == task["rank"], happen, "happen")
        first = task["settings"]["parallelism"] == "fsdp" or task["what"] == "die at once"
        return [hook, *whole(*args)] if first else [*whole(*args), hook]

    run._hooks = hooks  # type: ignore[assignment, method-assign]
    return run.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "parallelism", "rank", "told"),
    [
        ("die", "none", 1, "was ended by SIGKILL"),
        ("die", "none", 0, "was ended by SIGKILL"),
        ("fail", "none", 1, "ended with exit code 1"),
        ("fail", "fsdp", 1, "ended with exit code 1"),
    ],
)
def test_the_newest_step_is_saved_when_a_rank_is_lost_or_fails(
    shards: Path, tmp_path: Path, what: str, parallelism: str, rank: int, told: str
) -> None:
    settings = {"save_every_seconds": 1e9, "eval_every": 100, "parallelism": parallelism}
    task = {"shards": str(shards), "out": str(tmp_path / "out"), "settings": settings, "what": what, "rank": rank}
    with pytest.raises(RunError, match=rf"rank {rank} \(process \d+\) {told}"):
        launch.run("tests.train.test_fsdp:troubled", task, 3)
    assert newest_state(tmp_path / "out")["step"] == 5
    if what == "die":
        run(shards, tmp_path / "out", 2, **settings)
        run(shards, tmp_path / "alone", 1, **settings)
        losses = [[line["loss"] for line in lines(tmp_path / name, "loss")] for name in ("out", "alone")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.slow
def test_what_another_rank_saves_in_place_of_the_first_is_what_the_first_would_have_saved(
    shards: Path, tmp_path: Path
) -> None:
    """A step to go back to, with its line of metrics. Older checkpoints stay, whatever was passed over."""
    settings = {"save_every_seconds": 1e9, "eval_every": 5, "parallelism": "none", "keep_last": 1}
    out = tmp_path / "out"
    run(shards, out, 2, **settings | {"save_every_seconds": 1e-9, "keep_last": 9, "steps": 4})
    for folder in (out / "checkpoints").iterdir():
        if folder.name > "000000000":
            (folder / "state.json").write_text("{}")  # damaged
    task = {"shards": str(shards), "out": str(out), "settings": settings, "what": "die at once", "rank": 0}
    with pytest.raises(RunError, match=r"rank 0 \(process \d+\) was ended by SIGKILL"):
        launch.run("tests.train.test_fsdp:troubled", task, 3)
    there = {folder.name: checkpoint.damage(folder) == "" for folder in checkpoint.folders(out / "checkpoints")}
    assert [name for name, whole in there.items() if whole] == ["000000000", "000000005"]
    assert checkpoint.is_goal(out / "checkpoints" / "000000005")
    run(shards, out, 1, **settings)
    assert [line["step"] for line in lines(out, "loss")] == list(range(1, 10))
    assert newest_state(out)["step"] == 9


# --- Ranks, each a thread: what they compute together is what one computes alone --------------------------------------


def in_parts(task: dict[str, Any], world: World) -> dict[str, Any]:
    """
    A model of which the first rank alone has numbers, in parts: norms of a change, the largest tensor that was put
    together for them, the loss and gradients in float32 and in bfloat16, and formats of gathered weights.
    """
    signal.alarm(SECONDS)
    shape, batch = SHAPES[task["shape"]], random_batch(4)
    largest, plain = [0], DTensor.full_tensor

    def full_tensor(self: DTensor, **how: Any) -> Tensor:
        largest[0] = max(largest[0], self.numel())
        return plain(self, **how)

    answer: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = lively(shape) if world.is_first else on_meta(shape, VOCAB_SIZE)
        fsdp.shard(model, world, processor(dtype), dtype=dtype, spread=True)
        gathered = set[str]()
        block: Any = model.blocks[0]
        block.attention.q.register_forward_hook(lambda module, *_, seen=gathered: seen.add(str(module.weight.dtype)))
        loss = accumulate_gradients(model, batch, 2, on_cpu(dtype), world=world).loss
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        name = str(dtype).removeprefix("torch.")
        answer[name] = {
            "loss": loss,
            "gathered": sorted(gathered),
            "kept": sorted({str(g.dtype) for g in grads.values()}),
        }
        DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
        norms = Norms(model, every=1)
        norms.before_update(1)
        with torch.no_grad():
            for weight in model.parameters():
                collectives.local(weight).mul_(1.25)
        norms.after_update()
        DTensor.full_tensor = plain  # type: ignore[method-assign]
        answer[name] |= {"norms": world.gather(norms.latest), "largest": largest[0]}
        answer[name]["tied"] = model.head.weight is model.embed.weight
        settled = {
            key: collectives.whole(weight).flatten().double().norm().item() for key, weight in model.named_parameters()
        }
        answer[name]["weights"] = settled
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("shape", [0, 1, len(SHAPES) - 1])
def test_ranks_measure_their_parts_take_weights_from_the_first_and_gather_them_in_bfloat16(shape: int) -> None:
    found = launch.run("tests.train.test_fsdp:in_parts", {"shape": shape}, 2)
    for dtype in (torch.float32, torch.bfloat16):
        model, name = lively(SHAPES[shape]), str(dtype).removeprefix("torch.")
        told = found[name]
        expected = accumulate_gradients(model, random_batch(4), 2, on_cpu(dtype)).loss
        exact = dtype == torch.float32
        assert told["loss"] == pytest.approx(expected, rel=1e-6 if exact else 3e-3)
        assert told["gathered"] == [str(dtype)]
        assert told["kept"] == ["torch.float32"], "gradients are added up in float32"
        assert told["tied"] == (model.head.weight is model.embed.weight)
        norms = Norms(model, every=1)
        norms.before_update(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.25)
        norms.after_update()
        assert told["norms"][0] == told["norms"][1]
        for key in ("weight_norm", "update_norm"):
            assert told["norms"][0][key] == pytest.approx(norms.latest[key], rel=1e-5)
        flow = norms.latest["gradient_flow"]
        assert told["norms"][0]["gradient_flow"] == pytest.approx(flow, rel=1e-5 if exact else 0.05, abs=1e-6)
        expected_weights = {key: weight.flatten().double().norm().item() for key, weight in model.named_parameters()}
        assert told["weights"] == pytest.approx(expected_weights, rel=1e-12)
        assert told["largest"] <= 4 + len(model.blocks), "sums alone are put together"


def from_the_first(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session in which other ranks than the first have no weights before they take their parts."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    if not world.is_first:
        made.model = made.model_saver.model = on_meta(made.model.config, made.model.vocab_size)  # type: ignore[attr-defined]
    return made.run()


@pytest.mark.slow
def test_ranks_without_weights_begin_and_resume_as_those_with_weights(shards: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parallelism": "fsdp", "keep_last": 20, "steps": 6}
    run(shards, tmp_path / "with", 2, **settings)
    task = {"shards": str(shards), "out": str(tmp_path / "without"), "settings": settings}
    launch.run("tests.train.test_fsdp:from_the_first", task, 2)
    assert furthest(tmp_path / "with", tmp_path / "without") == 0.0
    resumed = stopped(tmp_path / "without", tmp_path / "resumed", 3)
    launch.run("tests.train.test_fsdp:from_the_first", task | {"out": str(resumed)}, 2)
    assert furthest(tmp_path / "with", resumed) == 0.0
