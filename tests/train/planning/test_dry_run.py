"""What is tried before the first step, and what it leaves behind: nothing."""

from pathlib import Path
from typing import Any

import pytest

from bloomery.hw.device import Device
from bloomery.train import step
from bloomery.train.plan import here
from bloomery.train.plan.here import Tried
from tests.train.made import T, model_bytes, session
from tests.train.test_memory import Small


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "adamw", "adamw8bit", "ademamix", "lion"])
def test_a_run_that_was_tried_ends_in_the_same_weights(kind: str, shards: Path, tmp_path: Path) -> None:
    for tried in (True, False):
        session(shards, tmp_path / str(tried), dry_run=tried, optimizer={"kind": kind}, steps=5).run()
    assert model_bytes(tmp_path / "True") == model_bytes(tmp_path / "False")


def test_a_sample_without_finite_gradients_leaves_no_trace_in_the_weights(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = step.micro_batch_losses

    def poisoned(model: Any, batch: Any, *rest: Any) -> Any:
        loss, told = plain(model, batch, *rest)
        return loss * (float("nan") if model.training and 0 in batch.samples else 1.0), told

    monkeypatch.setattr(step, "micro_batch_losses", poisoned)
    for tried in (True, False):
        session(shards, tmp_path / str(tried), dry_run=tried, steps=4).run()
    assert model_bytes(tmp_path / "True") == model_bytes(tmp_path / "False")


def test_what_ends_memory_is_found_before_the_first_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Small(monkeypatch, rows=2).asked
    run = session(shards, tmp_path / "run", global_batch_tokens=8 * T, micro_batch_tokens=8 * T, steps=2, dry_run=True)
    run.run()
    assert asked[:3] == [1, 8, 4], "one row to make room, then all that was asked for"
    assert asked[7:9] == [5, 4], "then an evaluation, which finds out for itself"
    assert max(asked[9:]) == 2
    assert run.config.micro_batch_tokens == 2 * T


def test_it_is_said_what_was_found(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session(shards, tmp_path / "run", steps=2, dry_run=True).run()
    assert "Dry run OK: " in capsys.readouterr().err


def test_nothing_is_tried_where_it_is_not_wanted(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*anything: Any) -> Tried:
        raise AssertionError

    monkeypatch.setattr(here.DryRun, "run", never)
    session(shards, tmp_path / "run", steps=2).run()


def test_steps_are_reckoned_with_whole_micro_batches() -> None:
    tried = Tried(rows=3, peak_bytes=0, micro_batch_seconds=2.0, update_seconds=1.0)
    assert tried.step_seconds(7) == 3 * 2.0 + 1.0
    assert tried.step_seconds(7, ranks=2) == 2 * 2.0 + 1.0


def test_memory_that_is_nearly_used_up_is_said_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "peak_bytes", lambda device: int(0.95 * device.memory_bytes))
    session(shards, tmp_path / "run", steps=4).run()
    assert capsys.readouterr().err.count("memory: 95% of") == 1
