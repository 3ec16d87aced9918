"""A run whose memory ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import HardwareError, RunError
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.train import launch, step
from bloomery.train.step import retry_on_oom
from tests.train.made import T, lines, model_bytes, session, stopped

import torch
from torch import nn


class Small:
    """A device that holds so many rows at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.asked = list[int]()
        plain = step.micro_batch_losses

        def limited(model: Transformer, batch: Any, *rest: Any) -> Any:
            self.asked.append(len(batch.ids))
            if len(batch.ids) > rows:
                raise torch.OutOfMemoryError(f"tried to hold {len(batch.ids)} rows")
            return plain(model, batch, *rest)

        monkeypatch.setattr(step, "micro_batch_losses", limited)


def test_a_run_whose_memory_ends_goes_on_with_fewer_rows_of_the_same_batch(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"global_batch_tokens": 8 * T, "steps": 4, "eval_every": 3}
    told = session(shards, tmp_path / "small-from-the-start", micro_batch_tokens=2 * T, **settings).run()
    device = Small(monkeypatch, rows=2)
    found = session(shards, tmp_path / "small-in-the-end", micro_batch_tokens=8 * T, **settings).run()
    assert found["loss"] == told["loss"]
    assert found["tokens"] == told["tokens"]
    assert device.asked[:5] == [5, 4, 2, 2, 1], "an evaluation before the first step finds out for itself"
    assert device.asked[5:11] == [8, 4, 2, 2, 2, 2]
    assert set(device.asked[11:]) == {1, 2}, "later steps and evaluations begin with what fits"
    assert found["validation_loss"] == pytest.approx(told["validation_loss"], rel=1e-5)
    assert "failed" not in capsys.readouterr().err


def test_a_run_that_goes_on_begins_with_the_rows_that_fitted(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"global_batch_tokens": 8 * 16, "micro_batch_tokens": 8 * 16, "steps": 4}
    with monkeypatch.context() as patch:
        Small(patch, rows=2)
        session(shards, tmp_path / "undisturbed", **settings).run()
        stopped(tmp_path / "undisturbed", tmp_path / "again", after=2)
    device = Small(monkeypatch, rows=8)
    session(shards, tmp_path / "again", **settings).run()
    assert max(device.asked[1:9]) == 2
    assert model_bytes(tmp_path / "undisturbed") == model_bytes(tmp_path / "again")


def test_other_errors_are_no_want_of_memory() -> None:
    def broken(rows: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        retry_on_oom(nn.Linear(1, 1), World.alone(), 8, broken)


def test_the_processor_says_it_in_other_words() -> None:
    def hungry(rows: int) -> int:
        if rows > 3:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return rows

    assert retry_on_oom(nn.Linear(1, 1), World.alone(), 12, hungry) == (3, 3)


def test_one_row_that_is_too_much_ends_the_run_with_the_hint() -> None:
    def hungry(rows: int) -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(HardwareError, match="too small for 1 sequence at once") as raised:
        retry_on_oom(nn.Linear(1, 1), World.alone(), 8, hungry)
    assert "bloomery plan" in raised.value.hint


class FullInEvaluation(step.CausalLMLoss):
    """On the second rank, in the second evaluation."""

    calls = 0

    def losses(self, model: Transformer, *rest: Any) -> step.LossSums:
        FullInEvaluation.calls += 1
        if torch.distributed.get_rank() == 1 and FullInEvaluation.calls == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().losses(model, *rest)


def full_in_evaluation(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    made = session(Path(task["shards"]), Path(task["out"]), world, parallelism="fsdp", steps=3, eval_every=1)
    made.validation_loss_function = FullInEvaluation()
    return made.run()


@pytest.mark.slow
def test_memory_that_ends_in_an_evaluation_of_one_rank_is_named_where_others_wait_for_its_parts(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot try again alone: the others are in the midst of the same evaluation."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    task = {"shards": str(shards), "out": str(tmp_path / "out")}
    with pytest.raises(RunError, match=r"3 sequences at once.*CUDA out of memory.*\n.*micro_batch_tokens"):
        launch.run("tests.train.test_memory:full_in_evaluation", task, 2)
    assert [line["step"] for line in lines(tmp_path / "out", "loss")] == [1]
