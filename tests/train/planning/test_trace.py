import gc

import pytest

from bloomery.core import native
from bloomery.model import products
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train.config import AdamW, Level, Muon, Optimizer
from bloomery.train.loop import Placed, gradients, placed_losses
from bloomery.train.optim import Optimizers
from bloomery.train.planning.meter import Meter
from bloomery.train.planning.trace import Step, trace
from bloomery.train.recompute import recompute
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE
from tests.train.made import processor
from tests.train.planning.made import SMALL

import torch
from torch import nn

ROWS = 3


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes the products of PyTorch, which hold rounded copies of weights; those by tiles hold none."""
    monkeypatch.setattr(products, "has_tiles", lambda: False)


def step(model: ModelConfig, level: Level = "none", optimizer: Optimizer | None = None, **changed: object) -> Step:
    settings = {"precision": torch.bfloat16, "rows": ROWS, "accumulates": False} | changed
    return Step(model=model, vocab_size=VOCAB_SIZE, optimizer=optimizer or AdamW(), recompute=level, **settings)  # type: ignore[arg-type]


def really(what: Step) -> tuple[int, int]:
    """Bytes at rest and at the peak of the second step, of real tensors."""
    device = processor(what.precision)
    with Meter(on_processor=True) as meter:
        model = Transformer(what.model, VOCAB_SIZE)
        model.initialize(0)
        recompute(model, what.recompute)
        optimizers = Optimizers(model, what.optimizer)
        ids = torch.zeros((what.rows, what.model.context), dtype=torch.int64)
        batch = Placed(ids, ids.clone(), None, ids.flatten().clone(), ids.flatten().clone())
        gc.collect()
        for again in range(2):
            gc.collect()
            resting = meter.live
            meter.restart()
            for _ in range(1 + what.accumulates):
                torch.autograd.backward(placed_losses(model, batch, device)[0])
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, nn.utils.get_total_norm(gradients(model)))
            optimizers.step()
            if again:
                return resting, meter.peak
            optimizers.zero_grad()
    raise AssertionError


@pytest.mark.parametrize("level", ["none", "selective", "block"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_a_trace_finds_what_a_real_step_holds(level: Level, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "library", lambda name: None)
    for optimizer in (AdamW(), Muon()):
        what = step(SMALL, level, optimizer, accumulates=True)
        trace.cache_clear()
        found, (resting, peak) = trace(what), really(what)
        trace.cache_clear()
        assert found.peak == pytest.approx(peak, rel=0.03)
        assert found.resting == pytest.approx(resting, rel=0.02, abs=3 * ROWS * 8 * SMALL.context)


@pytest.mark.parametrize("name", list(CHOICES))
def test_every_choice_of_a_shape_can_be_traced_on_both_kinds_of_device(name: str) -> None:
    for on_processor in (True, False):
        assert trace(step(CHOICES[name], on_processor=on_processor)).peak > 0


def test_two_small_models_tell_the_memory_of_a_deep_one() -> None:
    deep = SMALL.model_copy(update={"num_layers": 9})
    found = trace(step(deep, "none"))
    assert found.peak == pytest.approx(really(step(deep, "none"))[1], rel=0.01)


def test_layers_in_turn_are_extrapolated_by_whole_turns() -> None:
    shape = SMALL.model_copy(update={"num_layers": 12, "sliding_window": (5, "full")})
    assert trace(step(shape)).peak == pytest.approx(really(step(shape))[1], rel=0.02)


def test_a_model_too_large_for_any_machine_is_traced() -> None:
    large = ModelConfig(preset="llama-3.1-405b", context=4096)
    found = trace(step(large, "block", precision=torch.bfloat16, rows=1, on_processor=False))
    assert found.peak > 12 * 400e9


def test_gradients_of_earlier_micro_batches_count() -> None:
    alone, among_others = (trace(step(SHAPES[0], accumulates=more)).learning for more in (False, True))
    assert among_others > alone


def test_a_processor_writes_out_what_is_added_in_a_shorter_format() -> None:
    with Meter(on_processor=True) as there, Meter() as elsewhere:
        long, short = torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16)
        there.restart()
        elsewhere.restart()
        long.add_(short)
    assert (there.peak, elsewhere.peak) == (10_000, 6_000)
