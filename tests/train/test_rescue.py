"""Runs that meet bad batches, bad optimizers, bad hooks, and a polite end."""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.errors import RunError
from bloomery.core.io import disk_errors
from bloomery.core.log import VARYING, read_metrics
from bloomery.core.signals import Terminated
from bloomery.shards import loader
from bloomery.shards.loader import AnnealedDataset, Batch, PackedDataset
from bloomery.train import step
from bloomery.train.optim import Optimizers
from bloomery.train.state import Hook, State
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import Validation
from bloomery.weights import checkpoint, hf
from tests.train.made import T, session
from tests.train.test_session import die_after

import torch
from torch import Tensor

STEPS = 16
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "skip_window": 4,
    "skip_sigma": 30.0,
    "keep_checkpoints": 20,
    "evaluate_every": 3,
}


def poison_loss(monkeypatch: pytest.MonkeyPatch, bad: dict[int, float]) -> None:
    """Multiply the loss of the steps that take samples 4 · (step − 1) … by a number."""
    whole, inner, now = loader.batches, step.micro_batch_losses, [0]

    def counted(samples: Any, *, first: int, size: int, **how: Any) -> Iterator[Batch]:
        for number, batch in enumerate(whole(samples, first=first, size=size, **how)):
            now[0] = first // size + number + 1
            yield batch

    monkeypatch.setattr("bloomery.train.trainer.batches", counted)

    def poisoned(*args: Any) -> tuple[Tensor, Tensor]:
        loss, entropy = inner(*args)
        return loss * bad.get(now[0], 1.0), entropy * bad.get(now[0], 1.0)

    monkeypatch.setattr(step, "micro_batch_losses", poisoned)


def lines(out: Path, key: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out / "metrics.jsonl") if key in line]


def result(out: Path) -> Any:
    kept = [{k: v for k, v in line.items() if k not in VARYING} for line in read_metrics(out / "metrics.jsonl")]
    newest = checkpoint.newest(out / "checkpoints")
    assert newest is not None
    weights = {file.name: file.read_bytes() for file in (out / "model").iterdir()}
    return kept, newest.state, weights


@pytest.mark.slow
@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e4])
def test_one_poisoned_batch_is_one_skip_with_its_samples_named(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    poison_loss(monkeypatch, {8: factor})
    run = session(shards, tmp_path, **SETTINGS)
    stats = run.run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (STEPS, 1, 0)
    (line,) = lines(tmp_path, "skipped")
    assert line["step"] == 8
    assert line["samples"] == run.samples.order(28, 4, 0).tolist()
    assert line["skipped"].startswith("the loss is ")
    assert [one["step"] for one in lines(tmp_path, "loss")] == [n for n in range(1, STEPS + 1) if n != 8]
    assert "step 8 is skipped" in (tmp_path / "log.txt").read_text()


def test_a_run_goes_back_behind_a_window_of_bad_batches(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 8, 9 and 10 are bad, so the weights of 6 are the newest to go back to that a later step has confirmed."""
    poison_loss(monkeypatch, dict.fromkeys((8, 9, 10), math.inf))
    stats = session(shards, tmp_path, **SETTINGS).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (STEPS, 3, 1)
    assert [(line["step"], line["rolled_back_to"]) for line in lines(tmp_path, "rolled_back_to")] == [(10, 6)]
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.state["guard"]["rollbacks"] == [[10, 6]]
    assert newest.state["samples"] == 4 * STEPS  # no sample came again
    assert stats["supervised_tokens"] == (6 + 6) * 4 * T
    saved = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert not {"000000008", "000000009"} & saved


def test_weights_that_an_optimizer_poisoned_are_never_saved_and_the_run_goes_back(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Optimizers.step, list[int]()

    def poisoned(self: Optimizers, scale: float) -> None:
        whole(self, scale)
        calls.append(1)
        if len(calls) == 7:
            with torch.no_grad():
                self.parts[0].param_groups[0]["params"][0].fill_(math.nan)
            for part in self.parts:
                for state in part.state.values():
                    state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].fill_(math.nan)

    monkeypatch.setattr(Optimizers, "step", poisoned)
    stats = session(shards, tmp_path, **SETTINGS).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (STEPS, 3, 1)
    assert lines(tmp_path, "rolled_back_to")[0]["rolled_back_to"] == 6
    assert "step 7 is not saved: its weights are not finite" in (tmp_path / "log.txt").read_text()
    assert np.isfinite(stats["validation_loss"])
    assert not (tmp_path / "checkpoints" / "000000007").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "told"),
    [(8, "already gone back to step 6 after step 10"), (1, "already gone back to step 0 after step 3")],
)
def test_a_run_that_did_not_get_further_by_going_back_stops_and_goes_on_with_the_hint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, told: str
) -> None:
    poison_loss(monkeypatch, dict.fromkeys(range(first, first + 6), math.inf))
    for _ in range(2):
        with pytest.raises(RunError, match=f"{told}, and it did not help") as caught:
            session(shards, tmp_path, **SETTINGS).run()
    assert caught.value.where == f"step {first + 5}"
    assert "the same command with max_skips=6 goes on behind them" in caught.value.hint
    stats = session(shards, tmp_path, **SETTINGS, max_skips=6).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (STEPS, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "goal"), [((2, 3, 4), 0), ((8, 9, 10), 6), ((7, 8, 9), 3)])
@pytest.mark.parametrize("keep", [1, 2])
def test_where_a_run_goes_back_to_depends_on_no_clock_and_no_kill(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], goal: int, keep: int
) -> None:
    """Also where it is asked to stop between two bad steps, and where the first of them comes right behind a goal."""
    poison_loss(monkeypatch, dict.fromkeys(bad, math.inf))
    settings = {**SETTINGS, "keep_checkpoints": keep, "evaluate_every": 3}
    found = []
    for seconds in (1e9, 1e-9):
        session(shards, tmp_path / str(seconds), **{**settings, "save_every_seconds": seconds}).run()
        found.append(result(tmp_path / str(seconds)))
    with monkeypatch.context() as patch:
        add_hook(patch, Hook(lambda s: s.step == bad[1], lambda s: os.kill(os.getpid(), signal.SIGTERM), "ask"))
        with pytest.raises(Terminated):
            session(shards, tmp_path / "killed", **settings).run()
    session(shards, tmp_path / "killed", **settings).run()
    assert found[0] == found[1] == result(tmp_path / "killed")
    assert found[0][1]["guard"]["rollbacks"] == [[bad[-1], goal]]
    assert {one.name for one in checkpoint.folders(tmp_path / "1e-09" / "checkpoints")} >= {"000000015", "000000016"}


def test_a_run_goes_back_to_no_weights_that_it_has_gone_back_behind(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step after 8 was accepted before the run left it for 4: its weights may be what was bad."""
    poison_loss(monkeypatch, dict.fromkeys((9, 10, 11, 13, 14, 15), math.inf))
    for seconds in (1e9, 1e-9):
        out = tmp_path / str(seconds)
        session(
            shards, out, **SETTINGS | {"evaluate_every": 4, "keep_checkpoints": 1, "save_every_seconds": seconds}
        ).run()
        assert [line["rolled_back_to"] for line in lines(out, "rolled_back_to")] == [4, 4]


def test_a_window_of_other_data_does_not_come_back(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin with step 11, and the checkpoint of 9 remembers losses from before."""
    poison_loss(monkeypatch, dict.fromkeys((12, 13, 14), math.inf))
    run = session(shards, tmp_path, **SETTINGS)
    assert isinstance(run.samples, PackedDataset)
    run.samples = AnnealedDataset(run.samples, run.samples, 4 * STEPS)
    assert run.samples.switch // 4 == 10
    run.run()
    assert [line["rolled_back_to"] for line in lines(tmp_path, "rolled_back_to")] == [9]
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert len(newest.state["guard"]["losses"]) == STEPS - 14


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(9,), (11, 13)])
def test_a_run_that_was_killed_around_its_bad_batches_is_one_that_was_not_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, ...]
) -> None:
    poison_loss(monkeypatch, {4: math.nan, 8: 1e4, 9: 1e4, 10: math.inf, 13: 1e3})
    session(shards, tmp_path / "whole", **SETTINGS).run()
    for kill in kills:
        with monkeypatch.context() as patch:
            die_after(kill, patch)
            with pytest.raises(KeyboardInterrupt):
                session(shards, tmp_path / "killed", **SETTINGS).run()
    session(shards, tmp_path / "killed", **SETTINGS).run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


# --- hooks -----------------------------------------------------------------------------------------------------------


def add_hook(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    whole = TrainingRun._hooks
    monkeypatch.setattr(TrainingRun, "_hooks", lambda self, *args: [*whole(self, *args), hook])


def raising(error: Exception) -> Any:
    def run(state: State) -> None:
        raise error

    return run


def test_an_evaluation_that_fails_does_not_stop_training_and_is_named_at_the_end(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Validation, model: Any, device: Any) -> Any:
        raise ValueError("no such question")

    monkeypatch.setattr(Validation, "measure", failing)
    stats = session(shards, tmp_path, evaluate_every=4).run()
    assert [failure["step"] for failure in stats["failures"]] == [0, 4, 8, 9]
    assert stats["validation_loss"] is None
    assert [line["failed"] for line in lines(tmp_path, "failed")] == ["evaluate"] * 3
    assert lines(tmp_path, "failed")[0]["error"] == "ValueError: no such question"
    end = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "the hook 'evaluate' failed after step 9: ValueError: no such question" in end


def test_a_save_comes_before_each_evaluation(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(self: Validation, model: Any, device: Any) -> dict[str, float]:
        seen.append(max((folder.name for folder in (tmp_path / "checkpoints").glob("*")), default=""))
        return {"validation_loss": 1.0 / len(seen)}

    monkeypatch.setattr(Validation, "measure", look)
    session(shards, tmp_path, evaluate_every=2, save_every_seconds=1e9).run()
    assert seen == ["", *(f"{step:09d}" for step in (2, 4, 6, 8, 9))]


def test_a_hook_that_stops_the_run_does_so_after_its_step_is_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(shards, tmp_path / "whole", save_every_seconds=1e9).run()
    with monkeypatch.context() as patch:
        add_hook(patch, Hook(lambda s: s.step == 5, raising(RuntimeError("odd")), "log"))
        with pytest.raises(RuntimeError, match="odd"):
            session(shards, tmp_path / "killed", save_every_seconds=1e9).run()
    assert (tmp_path / "killed" / "checkpoints" / "000000005").is_dir()
    session(shards, tmp_path / "killed", save_every_seconds=1e9).run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"save_every_seconds": 1e9, "evaluate_every": 3}, {"evaluate_every": 100}], ids=["evaluated", "late"]
)
@pytest.mark.parametrize("asked", [False, True], ids=["alone", "asked to stop"])
def test_a_full_disk_stops_the_run_with_the_cure_and_the_same_command_goes_on(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], asked: bool
) -> None:
    """Whoever waits for the save that fails: an evaluation, the next save, or the end that was asked for."""
    session(shards, tmp_path / "whole", **settings).run()
    root, whole = tmp_path / "run" / "checkpoints", checkpoint.save

    def full(root: Path, step: int, *args: Any, **named: Any) -> Path:
        if step < 6:
            return whole(root, step, *args, **named)
        with disk_errors(root):
            raise OSError(28, "No space left on device")
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        if asked:
            add_hook(patch, Hook(lambda s: s.step == 6, lambda s: os.kill(os.getpid(), signal.SIGTERM), "ask"))
        with pytest.raises(RunError, match="No space left on device") as caught:
            session(shards, root.parent, **settings).run()
    assert caught.value.hint == "Free some space and run the same command again: finished parts are kept."
    assert "asked to stop" not in (root.parent / "log.txt").read_text()
    assert not (root.parent / "model").exists()
    session(shards, root.parent, **settings).run()
    assert result(root.parent) == result(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "forward", "update"])
def test_an_error_between_two_updates_leaves_the_last_finished_step_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the midst of an update the weights are those of no step, and an older checkpoint is gone on from."""
    settings: dict[str, Any] = {"save_every_seconds": 1e9, "evaluate_every": 4}
    owner, name, calls = {
        "data": (loader.PackedDataset, "order", 8),
        "forward": (step, "accumulate_gradients", 8),
        "update": (Optimizers, "step", 8),
    }[where]
    session(shards, tmp_path / "whole", **settings).run()
    inner, seen = getattr(owner, name), list[int]()

    def failing(*args: Any, **how: Any) -> Any:
        seen.append(1)
        if len(seen) == calls:
            raise IndexError("a page cannot be read")
        return inner(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(IndexError, match="a page"):
            session(shards, tmp_path / "killed", **settings).run()
    newest = max(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir())
    assert newest == ("000000005" if where == "update" else "000000007")
    session(shards, tmp_path / "killed", **settings).run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


# --- a polite end -----------------------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    """The signals of this process, whose run ends as if the process did; under a shell it may ignore Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_every", "number", "code"),
    [(1e9, signal.SIGTERM, 143), (1e-9, signal.SIGTERM, 143), (1e9, signal.SIGINT, 130)],
)
@pytest.mark.usefixtures("as_before")
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_where_it_was_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: float, number: int, code: int
) -> None:
    def ask(state: State) -> None:
        os.kill(os.getpid(), number)

    session(shards, tmp_path / "whole", save_every_seconds=save_every).run()
    with monkeypatch.context() as patch:
        add_hook(patch, Hook(lambda s: s.step == 5, ask, "ask"))
        with pytest.raises(Terminated) as caught:
            session(shards, tmp_path / "killed", save_every_seconds=save_every).run()
    assert caught.value.code == code
    assert max(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir()) == "000000005"
    session(shards, tmp_path / "killed", save_every_seconds=save_every).run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.parametrize("when", ["checkpoint", "model"])
@pytest.mark.usefixtures("as_before")
def test_a_run_that_is_asked_to_stop_in_its_last_save_or_as_it_leaves_its_model_ends_that_and_stops(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    write, asked = hf.save, list[str]()

    def ask(folder: Path, *args: Any, **how: Any) -> Any:
        if folder.name == {"checkpoint": f"{STEPS:09d}.partial", "model": "model"}[when]:
            asked.append(folder.name)
            os.kill(os.getpid(), signal.SIGTERM)
        return write(folder, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(hf, "save", ask)
        with pytest.raises(Terminated) as caught:
            session(shards, tmp_path, steps=STEPS, save_every_seconds=1e9).run()
    assert (caught.value.code, len(asked)) == (143, 1)
    assert (tmp_path / "checkpoints" / f"{STEPS:09d}").is_dir()
    again = session(shards, tmp_path, steps=STEPS, save_every_seconds=1e9).run()
    assert (again["steps"], again["tokens_per_second"]) == (STEPS, None)
