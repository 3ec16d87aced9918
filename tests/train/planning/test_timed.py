from dataclasses import replace

import pytest

from bloomery.model.config import ModelConfig
from bloomery.train.config import AdamW
from bloomery.train.planning import timed as timing
from bloomery.train.planning.timed import Timed, timed
from bloomery.train.planning.trace import Step
from tests.train.made import processor
from tests.train.planning.made import SMALL

import torch

STEP = Step(
    model=SMALL, vocab_size=61, optimizer=AdamW(), recompute="none", precision=torch.float32, rows=4, accumulates=True
)


def test_each_further_turn_of_layers_takes_what_the_second_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_measured", lambda step, device: Timed(1.0 + 2.0 * step.model.num_layers, 0.5))
    assert timed(STEP, processor()) == Timed(1.0 + 2.0 * 6, 0.5)
    turns = SMALL.model_copy(update={"sliding_window": (5, "full"), "num_layers": 7})
    assert timed(replace(STEP, model=turns), processor()) == pytest.approx((15.0, 0.5))


def test_steps_of_small_models_are_really_made() -> None:
    found = timed(STEP, processor())
    assert found is not None
    assert 0 < found.learning < 5
    assert 0 < found.updating < 5


def test_what_is_too_large_for_a_plan_is_not_made() -> None:
    assert timed(replace(STEP, model=ModelConfig(preset="llama-3.1-70b")), processor()) is None
