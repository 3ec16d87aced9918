import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import native
from bloomery.core.errors import RunError
from bloomery.core.log import read_metrics
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.train import checkpointing, fsdp, launch
from bloomery.train.state import Hook, State
from bloomery.weights import checkpoint
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import ADAMW, MUON, run, session, stopped

import safetensors.torch
import torch

STEPS = 9


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model" / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    """The largest difference between any two weights."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [(MUON, 2), pytest.param(ADAMW, 2, marks=pytest.mark.slow), pytest.param(MUON, 3, marks=pytest.mark.slow)],
)
def test_several_ranks_are_one(shards: Path, tmp_path: Path, optimizer: dict[str, Any], ranks: int) -> None:
    """Also where rows do not divide evenly, and where each rank has several micro-batches."""
    for name, number in (("one", 1), ("more", ranks)):
        stats = run(shards, tmp_path / name, number, optimizer=optimizer, evaluate_every=5, micro_batch_tokens=16)
        assert stats["steps"] == STEPS
    assert losses(tmp_path / "more") == pytest.approx(losses(tmp_path / "one"), abs=1e-6)
    assert furthest(tmp_path / "one", tmp_path / "more") < 1e-6
    environment = json.loads((tmp_path / "more" / "checkpoints" / f"{STEPS:09d}" / "environment.json").read_text())
    assert environment["ranks"] == ranks


def summed(task: dict[str, Any], world: World) -> dict[str, Any]:
    """The sum of gradients of which some ranks have none, in buckets that hold one or two of them."""
    fsdp.BUCKET_NUMBERS = 10
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 2), torch.nn.Linear(1, 1)])
    for place, weight in enumerate(model.parameters()):
        if place < 4 and place % 2 == world.rank:
            weight.grad = torch.full_like(weight, place + 1.0)
    if world.rank == 0:
        first = next(model.parameters())
        first.grad = torch.ones_like(first)
    fsdp.sum_gradients(model, world)
    return {"found": [None if w.grad is None else w.grad.flatten().tolist() for w in model.parameters()]}


@pytest.mark.slow
def test_gradients_that_only_some_ranks_have_are_added_and_what_none_has_stays_without() -> None:
    found = launch.run("tests.train.test_parallel:summed", {}, ranks=2)["found"]
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


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_goes_on_with_another_number_of_ranks(
    shards: Path, tmp_path: Path, finished: Callable[..., Path], before: int, after: int
) -> None:
    """Within rounding; and bit for bit with the same number."""
    first = finished(before, "muon")
    other = stopped(first, tmp_path / "stopped", random.Random(after).randint(2, 6))
    run(shards, other, after, optimizer=MUON, keep_checkpoints=20)
    assert losses(other) == pytest.approx(losses(first), abs=1e-6)
    assert furthest(other, first) < 1e-6
    if before == after:
        assert furthest(other, first) == 0.0


def troubled(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session in which something happens to rank 1 after step 5."""
    run = session(Path(task["shards"]), Path(task["out"]), world, **task["settings"])
    whole = run._hooks

    def happen(state: State) -> None:
        if task["what"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("odd")

    def hooks(*args: Any) -> list[Hook]:
        return [*whole(*args), Hook(lambda state: state.step == 5 and world.rank == 1, happen, "happen")]

    run._hooks = hooks  # type: ignore[assignment, method-assign]
    return run.run()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "told"), [("die", "was ended by SIGKILL"), ("fail", "ended with exit code 1")])
def test_the_newest_step_is_saved_when_a_rank_is_lost_or_fails(
    shards: Path, tmp_path: Path, what: str, told: str
) -> None:
    settings = {"save_every_seconds": 1e9, "evaluate_every": 100}
    task = {"shards": str(shards), "out": str(tmp_path), "settings": settings, "what": what}
    with pytest.raises(RunError, match=rf"rank 1 \(process \d+\) {told}"):
        launch.run("tests.train.test_parallel:troubled", task, 2)
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpointing.LIBRARIES)
def test_another_compiled_library_is_said_on_resume(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    session(shards, tmp_path).run()
    environment = json.loads((tmp_path / "checkpoints" / f"{STEPS:09d}" / "environment.json").read_text())
    recorded = environment[f"library {name}"]
    assert recorded == native.identity(name)
    assert "library" not in (tmp_path / "log.txt").read_text()
    monkeypatch.setenv(native.SWITCH, "1" if recorded.startswith("off") else "0")
    session(shards, tmp_path).run()
    assert f"library {name} was {recorded} and is {native.identity(name)}" in (tmp_path / "log.txt").read_text()


def test_what_bits_depend_on_is_compared() -> None:
    before = {"threads": 2, "torch": "2.11.0", "gone": 1}
    now = {"threads": 1, "torch": "2.11.0", "new": "x"}
    assert checkpointing.differences(before, now) == ["threads was 2 and is 1", "new was None and is x"]
    assert checkpointing.differences({}, now) == []
    assert checkpointing.differences(now, now) == []
