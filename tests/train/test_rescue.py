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
from bloomery.core.files import disk_errors
from bloomery.core.log import VARYING, read_metrics
from bloomery.core.stop import Terminated
from bloomery.shards import loader
from bloomery.shards.loader import Batch
from bloomery.train import loop
from bloomery.train.hooks import Hook
from bloomery.train.optim import Optimizers
from bloomery.train.session import Session
from bloomery.train.state import State
from bloomery.train.validation import Validation
from bloomery.weights import checkpoint
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
    "evaluate_every": 100,
}


def poison_loss(monkeypatch: pytest.MonkeyPatch, bad: dict[int, float]) -> None:
    """Multiply the loss of the steps that take samples 4 · (step − 1) … by a number."""
    whole, inner, now = loader.batches, loop.micro_batch_losses, [0]

    def counted(samples: Any, *, first: int, size: int, **how: Any) -> Iterator[Batch]:
        for number, batch in enumerate(whole(samples, first=first, size=size, **how)):
            now[0] = first // size + number + 1
            yield batch

    monkeypatch.setattr("bloomery.train.session.batches", counted)

    def poisoned(*args: Any) -> tuple[Tensor, Tensor]:
        loss, entropy = inner(*args)
        return loss * bad.get(now[0], 1.0), entropy * bad.get(now[0], 1.0)

    monkeypatch.setattr(loop, "micro_batch_losses", poisoned)


def lines(out: Path, key: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out / "metrics.jsonl") if key in line]


def result(out: Path) -> Any:
    kept = [{k: v for k, v in line.items() if k not in VARYING} for line in read_metrics(out / "metrics.jsonl")]
    newest = checkpoint.newest(out / "checkpoints")
    assert newest is not None
    weights = {file.name: file.read_bytes() for file in (out / "model").iterdir()}
    return kept, newest.state, weights


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
    """Steps 8, 9 and 10 are bad, so the weights of 6 are the newest that a step after them has confirmed."""
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


def test_a_run_does_not_go_back_to_the_same_checkpoint_twice(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_loss(monkeypatch, dict.fromkeys(range(8, 14), math.inf))
    with pytest.raises(RunError, match="already gone back to step 6 after step 10, and it did not help") as caught:
        session(shards, tmp_path, **SETTINGS).run()
    assert caught.value.where == "step 13"
    assert "the same command goes on" in caught.value.cure


def test_a_run_that_is_bad_from_the_start_says_that_there_is_nothing_to_go_back_to(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_loss(monkeypatch, dict.fromkeys(range(1, 9), math.nan))
    with pytest.raises(RunError, match="There is no checkpoint to go back to"):
        session(shards, tmp_path, **SETTINGS).run()


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
    whole = Session._hooks
    monkeypatch.setattr(Session, "_hooks", lambda self, *args: [*whole(self, *args), hook])


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
    assert [failure["step"] for failure in stats["failures"]] == [4, 8, 9]
    assert stats["validation_loss"] is None
    assert [line["failed"] for line in lines(tmp_path, "failed")] == ["evaluate"] * 3
    assert lines(tmp_path, "failed")[0]["error"] == "ValueError: no such question"
    end = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "the hook 'evaluate' failed after step 9: ValueError: no such question" in end


def test_a_save_comes_before_each_evaluation(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(self: Validation, model: Any, device: Any) -> dict[str, float]:
        seen.append(max(folder.name for folder in (tmp_path / "checkpoints").iterdir()))
        return {"validation_loss": 1.0}

    monkeypatch.setattr(Validation, "measure", look)
    session(shards, tmp_path, evaluate_every=2, save_every_seconds=1e9).run()
    assert seen == [f"{step:09d}" for step in (2, 4, 6, 8, 9)]


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


def test_a_full_disk_stops_the_run_with_the_cure(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **named: Any) -> Path:
        with disk_errors(tmp_path / "checkpoints"):
            raise OSError(28, "No space left on device")
        raise AssertionError

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        session(shards, tmp_path).run()
    assert caught.value.cure == "Free some space and run the same command again: finished parts are kept."


# --- a polite end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_every", [1e9, 1e-9])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_where_it_was_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: float
) -> None:
    def ask(state: State) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    session(shards, tmp_path / "whole", save_every_seconds=save_every).run()
    with monkeypatch.context() as patch:
        add_hook(patch, Hook(lambda s: s.step == 5, ask, "ask"))
        with pytest.raises(Terminated) as caught:
            session(shards, tmp_path / "killed", save_every_seconds=save_every).run()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert max(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir()) == "000000005"
    session(shards, tmp_path / "killed", save_every_seconds=save_every).run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
