import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.hw import kernel_selection
from bloomery.hw.device import Device
from bloomery.hw.distributed import World
from bloomery.shards.loader import Batch
from bloomery.train.precision import KERNELS, Precision, Scaler, be_deterministic
from bloomery.train.state import State
from bloomery.train.step import BatchLoss, BatchTotals, CausalLMLoss, accumulate_gradients, retry_on_overflow
from tests.model.made import SHAPES, lively
from tests.train.made import on_cpu, processor, random_batch, trainer
from tests.train.planning.made import training

import torch
from torch import Tensor


def half(scale: float = 2.0**16) -> Precision:
    return Precision(processor(torch.float16), torch.float16, "", Scaler(scale))


@pytest.mark.parametrize(
    ("has", "wanted", "dtype", "why"),
    [
        (torch.bfloat16, "auto", torch.bfloat16, "bfloat16: a chip multiplies it in hardware"),
        (torch.float16, "auto", torch.float16, "float16: a chip has no units for bfloat16"),
        (torch.float32, "auto", torch.float32, "float32: a chip multiplies no shorter format faster"),
        (torch.bfloat16, "float32", torch.float32, "float32: asked for, where auto would have taken bfloat16"),
        (torch.float32, "float16", torch.float16, "float16: asked for, where auto would have taken float32"),
        (torch.bfloat16, "bfloat16", torch.bfloat16, "bfloat16: asked for"),
    ],
)
def test_the_format_is_what_the_device_has_units_for_or_what_is_asked_for_and_says_why(
    has: torch.dtype, wanted: str, dtype: torch.dtype, why: str
) -> None:
    found = Precision.decide(wanted, replace(processor(has), name="a chip"))  # type: ignore[arg-type]
    assert found.dtype == dtype
    assert found.why.startswith(why)
    assert (found.scaler is not None) == (dtype == torch.float16)
    with found.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == dtype


@given(st.lists(st.booleans(), max_size=40))
def test_the_scale_goes_the_way_of_torchs_scaler(finite: list[bool]) -> None:
    ours = Scaler(interval=3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for good in finite:
        weight.grad = theirs.scale(torch.ones(1)) * (1 if good else math.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.update(good)
        assert ours.scale == theirs.get_scale()


def test_a_scaled_loss_gives_the_gradients_of_the_loss() -> None:
    batch = random_batch(4)
    model, twin = lively(SHAPES[0]), lively(SHAPES[0])
    plain = accumulate_gradients(model, batch, 2, on_cpu())
    scaled = accumulate_gradients(twin, batch, 2, replace(on_cpu(), scaler=Scaler(2.0**10)))
    assert plain == scaled
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-6, atol=1e-9)


class Vast(CausalLMLoss):
    """One that is divided by the tokens of a large global batch."""

    def totals(self, batch: Batch) -> BatchTotals:
        return BatchTotals(2**19)


def test_gradients_in_float16_are_those_in_float32_however_many_tokens_a_step_has() -> None:
    found = []
    for precision in (half(), on_cpu()):
        model = lively(SHAPES[0])
        accumulate_gradients(model, random_batch(4), 2, precision, Vast())
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert float(torch.cosine_similarity(found[0], found[1], dim=0)) > 0.9999
    assert float(found[0].norm() / found[1].norm()) == pytest.approx(1.0, abs=1e-3)


def trained(precision: Precision, steps: int = 5) -> tuple[State, list[Tensor]]:
    model, state = lively(SHAPES[0]), State()
    trainer(model, repeat(random_batch(2)), state, steps=steps, precision=precision).train()
    return state, [weight.detach() for weight in model.parameters()]


def test_gradients_beyond_the_range_of_float16_are_computed_again_and_cost_no_step_and_no_sample() -> None:
    precision = half(2.0**40)
    state, weights = trained(precision)
    assert precision.scaler is not None
    assert 1 < precision.scaler.scale < 2.0**30
    assert (state.step, state.samples, state.guard.skipped) == (5, 10, 0)
    assert state.precision == {"scale": precision.scaler.scale, "good_steps": 5}
    assert state.metrics["scale"] == precision.scaler.scale
    small, expected = trained(half(2.0**10))
    assert state.metrics["loss"] == pytest.approx(small.metrics["loss"], rel=0.01)
    for one, other in zip(weights, expected, strict=True):
        assert float(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)) > 0.999


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    precision = half()
    assert not precision.overflowed(math.nan, math.nan)
    assert precision.state() == {"scale": 2.0**16, "good_steps": 0}
    assert precision.overflowed(1.0, math.inf)
    assert not precision.overflowed(math.nan, math.inf)
    assert precision.state() == {"scale": 2.0**16, "good_steps": 0}
    precision = half(1.0)
    assert not precision.overflowed(1.0, math.inf), "no smaller scale is tried, and the guard sees it"


@given(st.integers(0, 40), st.integers(-3, 42), st.integers(0, 1999))
def test_the_scale_falls_to_where_gradients_are_finite_and_stays_where_none_helps(
    begins: int, largest: int, good_steps: int
) -> None:
    """A step with one gradient that is not finite would else cost small gradients their digits for 34,000 steps."""
    precision, scales = half(2.0**begins), list[float]()
    assert precision.scaler is not None
    precision.scaler.good_steps = good_steps
    model = torch.nn.Linear(1, 1)

    def compute() -> BatchLoss:
        scales.append(precision.factor)
        model.weight.grad = torch.full((1, 1), 1.0 if precision.factor <= 2.0**largest else math.nan)
        return BatchLoss(2.0, 1, {}, torch.zeros(()))

    norm = retry_on_overflow(model, precision, compute)[1]
    helped = largest >= 0
    assert math.isfinite(norm) == helped
    assert precision.scaler.scale == (2.0 ** min(begins, largest) if helped else 2.0**begins) * (
        2 if helped and begins <= largest and good_steps == 1999 else 1
    )
    assert precision.metrics() == {"scale": precision.scaler.scale}
    if helped:
        assert len(scales) <= max(0, begins - largest) + 3
    else:
        assert (len(scales), precision.scaler.good_steps) == (min(begins, 3) + 1, good_steps)


def test_the_scale_is_part_of_what_a_resume_takes_up() -> None:
    precision = half(2.0**40)
    state, _ = trained(precision)
    again = half()
    again.restore(State.restored(asdict(state)).precision)
    assert again.scaler == precision.scaler
    again.restore({})
    assert again.scaler == precision.scaler
    none = on_cpu(torch.bfloat16)
    none.restore(state.precision)
    assert none.state() == {}


def test_a_penalty_of_scores_is_minimized_and_not_reported_as_loss() -> None:
    batch = random_batch(3)
    found = []
    for z_loss in (0.0, 0.1):
        model = lively(SHAPES[0])
        loss = accumulate_gradients(model, batch, 2, on_cpu(), CausalLMLoss(z_loss)).loss
        assert model.head.weight.grad is not None
        found.append((loss, model.head.weight.grad.clone()))
    assert found[0][0] == found[1][0]
    assert not torch.allclose(found[0][1], found[1][1])


def test_a_deterministic_run_sets_what_that_takes_and_the_next_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    be_deterministic(True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        be_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kept", ["", '{"identity": {}, "outcomes": []}'])
def test_all_ranks_of_a_deterministic_run_take_the_choice_of_kernels_that_the_first_has_kept(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank writes of itself is thrown away at the end, so that only the first finds it again."""

    class Rank(World):
        def broadcast(self, value: object) -> Any:
            assert (value == kept) if self.is_first else (value == "")
            return kept

        @contextmanager
        def alike(self) -> Iterator[None]:
            yield

    found = list[str | None]()

    def look(device: Device, host: object = None, keep: Path | None = None) -> dict[str, object]:
        assert keep is not None
        found.append(keep.read_text("utf-8") if keep.exists() else "")
        return {}

    monkeypatch.setattr(kernel_selection, "select_kernels", look)
    config = training(deterministic=True, device="cpu")
    for rank in (0, 1):
        desk = tmp_path / str(rank)
        desk.mkdir()
        if kept and rank == 0:
            (desk / KERNELS).write_text(kept, encoding="utf-8")
        try:
            Precision.of_run(config, desk, Rank(rank, 2))
        finally:
            be_deterministic(False)
    assert found == [kept, kept]
