import time
from dataclasses import replace

import pytest

from bloomery.hw.device import Device
from bloomery.model.config import Lora, ModelConfig
from bloomery.train.collectives import total_norm
from bloomery.train.config import AdamW
from bloomery.train.plan import trace
from bloomery.train.plan.trace import Timed, TracedStep, timed
from tests.train.made import processor
from tests.train.planning.made import SMALL

import torch
from torch import Tensor

STEP = TracedStep(
    model=SMALL,
    vocab_size=61,
    optimizer=AdamW(),
    activation_checkpointing="none",
    precision=torch.float32,
    rows=4,
    accumulates=True,
)


def test_each_further_turn_of_layers_takes_what_the_second_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(steps: tuple[TracedStep, ...], device: Device) -> list[Timed]:
        return [Timed(1.0 + 2.0 * one.model.num_layers, 2.0, 0.5) for one in steps]

    monkeypatch.setattr(trace, "measured", found)
    monkeypatch.setattr(trace, "SLICE_SECONDS", 0.0)
    assert timed(STEP, processor()) == Timed(1.0 + 2.0 * 6, 2.0, 0.5)
    turns = SMALL.model_copy(update={"sliding_window": (5, "full"), "num_layers": 7})
    assert timed(replace(STEP, model=turns), processor()) == pytest.approx((15.0, 2.0, 0.5))


def test_layers_are_left_out_before_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, ...]]()

    def found(steps: tuple[TracedStep, ...], device: Device) -> list[Timed]:
        made.append(tuple(one.model.num_layers for one in steps))
        return [Timed(1.0, 1.0, 1.0) for _ in steps]

    monkeypatch.setattr(trace, "measured", found)
    for seconds, layers in ((10.0, (6,)), (0.45, (1, 4)), (1e-9, (1, 2))):
        monkeypatch.setattr(trace, "SLICE_SECONDS", seconds)
        monkeypatch.setattr(trace, "_row_seconds", lambda step, _: 0.1 * step.model.num_layers / step.rows)
        timed(STEP, processor())
        assert made[-1] == layers


def test_what_is_done_once_for_all_rows_is_not_done_for_each_row_that_was_left_out() -> None:
    some, half = Timed(5.0 + 4 * 0.5, 3.0 + 4 * 0.5, 1.0), Timed(5.0 + 2 * 0.5, 3.0 + 2 * 0.5, 1.0)
    assert trace.with_rows(some, half, 4, 20) == pytest.approx((5.0 + 20 * 0.5, 3.0 + 20 * 0.5, 1.0))
    assert trace.with_rows(some, None, 4, 20) == pytest.approx((35.0, 25.0, 1.0))
    disturbed = Timed(9.0, 9.0, 1.0)  # fewer rows that took longer: then none is free, and none costs less than nothing
    assert trace.with_rows(some, disturbed, 4, 20) == pytest.approx((7.0, 5.0, 1.0))
    assert trace.with_rows(some, Timed(0.0, 0.0, 1.0), 4, 20) == pytest.approx((35.0, 25.0, 1.0))


def test_rows_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, int]]()

    class Ready:
        def __init__(self, step: TracedStep, device: Device) -> None:
            self.step = step
            made.append((step.model.num_layers, step.rows))

        def once(self) -> Timed:
            layers, rows = self.step.model.num_layers, self.step.rows
            return Timed(2.0 + layers * rows, 1.0 + layers * rows, 0.5 * layers)

    monkeypatch.setattr(trace, "_Ready", Ready)
    monkeypatch.setattr(trace, "_row_seconds", lambda step, _: trace.SLICE_SECONDS / 4)
    what = replace(STEP, rows=10)
    assert timed(what, processor(torch.bfloat16)) == pytest.approx((2.0 + 6 * 10, 1.0 + 6 * 10, 3.0))
    assert made == [(1, 4), (2, 4), (1, 2)]


def test_a_step_is_its_micro_batches_and_its_update() -> None:
    assert Timed(3.0, 2.0, 0.5).step(4) == 3.0 + 3 * 2.0 + 0.5


@pytest.mark.parametrize("lora", [None, Lora(rank=2, base_dtype="nf4")])
def test_steps_of_small_models_are_really_made(lora: Lora | None) -> None:
    found = timed(replace(STEP, lora=lora), processor())
    assert found is not None
    assert all(0 < seconds < 5 for seconds in found)


def test_what_waits_for_the_processor_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(gradients: list[Tensor]) -> Tensor:
        time.sleep(0.2)
        return total_norm(gradients)

    monkeypatch.setattr(trace, "total_norm", slow)
    found = timed(replace(STEP, rows=3), processor())
    assert found is not None
    assert found.updating < 0.2


def test_what_is_too_large_for_a_plan_is_not_made() -> None:
    assert timed(replace(STEP, model=ModelConfig(preset="llama-3.1-70b")), processor()) is None


def test_steps_that_take_long_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def once(self: object) -> Timed:
        rounds.append(self)
        return Timed(trace.MAX_SECONDS, 1.0, 1.0)

    monkeypatch.setattr(trace._Ready, "once", once)
    trace.measured.cache_clear()
    (found,) = trace.measured((STEP,), processor())
    trace.measured.cache_clear()
    assert found.first > 0
    assert len(rounds) == len(set(rounds))
