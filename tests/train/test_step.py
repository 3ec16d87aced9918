import math
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.signals import StopRequest, Terminated
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train import step
from bloomery.train.config import AdamW, Muon
from bloomery.train.optim import Optimizers
from bloomery.train.state import Hook, Hooks, SkippedStep, SpikeGuard, State
from bloomery.train.step import accumulate_gradients
from tests.model.made import CHOICES, SHAPES, lively
from tests.train.made import on_cpu, random_batch, trainer

import torch
import torch.nn.functional as F
from torch import Tensor

CPU = on_cpu()


def gradients(batch: Batch, micro_batch: int, seed: int = 0) -> tuple[float, int, dict[str, Tensor]]:
    model = lively(SHAPES[seed % len(SHAPES)], seed)
    loss, tokens, *_ = accumulate_gradients(model, batch, micro_batch, CPU)
    return loss, tokens, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def reference(batch: Batch, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Mean cross entropy over all supervised tokens, from full scores."""
    model = lively(SHAPES[seed % len(SHAPES)], seed)
    ids, targets, positions, segments = (
        torch.from_numpy(part) for part in (batch.ids, batch.targets, batch.positions, batch.segments)
    )
    scores = model.logits(model(ids, positions=positions, segments=segments)).flatten(0, 1)
    loss = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE)
    torch.autograd.backward(loss)
    return float(loss.detach()), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether all bits are equal; what is not a number equals itself."""
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference between two gradients, as a share of the largest number in them."""
    assert ours.keys() == theirs.keys()
    largest = max(float(one.abs().max()) for one in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


# --- one batch is one batch, however it is split ----------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=7), st.integers(1, 8), st.integers(0, 99))
def test_gradients_are_those_of_the_whole_batch_however_it_is_split(
    supervised: list[float], micro_batch: int, seed: int
) -> None:
    batch = random_batch(len(supervised), seed, supervised)
    loss, tokens, found = gradients(batch, micro_batch, seed)
    assert tokens == int((batch.targets != IGNORE).sum())
    if tokens:
        assert difference(found, gradients(batch, len(supervised), seed)[2]) < 1e-6
        expected, theirs = reference(batch, seed)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert difference(found, theirs) < 3e-6, "full scores are rounded otherwise"


def test_a_micro_batch_that_is_all_masked_adds_exactly_zero() -> None:
    batch = random_batch(6, supervised=[0.7, 0.7, 0, 0, 0.7, 0.7])
    kept = np.array([0, 1, 4, 5])
    without = Batch(*(getattr(batch, n)[kept] for n in ("ids", "targets", "positions", "segments", "samples")))
    one, other = gradients(batch, 2), gradients(without, 2)
    assert one[:2] == other[:2]
    for name, gradient in one[2].items():
        assert torch.equal(gradient, other[2][name]), name


def test_a_batch_that_is_all_masked_has_a_loss_and_gradients_of_zero() -> None:
    loss, tokens, found = gradients(random_batch(3, supervised=0.0), 2)
    assert (loss, tokens) == (0.0, 0)
    assert found
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_a_global_batch_that_is_all_masked_counts_and_changes_nothing() -> None:
    model, state = lively(SHAPES[0]), State()
    optimizers = run(model, iter([random_batch(2)]), state)
    weights, remembered = copied(model.state_dict()), copied(optimizers.state())
    run(model, repeat(random_batch(2, supervised=0.0)), state, steps=3, optimizer=optimizers)
    assert (state.step, state.samples, len(state.guard.losses)) == (3, 6, 1)
    assert state.metrics == {"tokens": 0, "learning_rate": 0.01}
    assert same(model.state_dict(), weights)
    assert same(optimizers.state(), remembered)


def test_under_bfloat16_the_gradient_points_the_same_way() -> None:
    batch = random_batch(4, supervised=1.0)
    model = lively(SHAPES[0])
    loss = accumulate_gradients(model, batch, 2, on_cpu(torch.bfloat16)).loss
    expected, theirs = reference(batch)
    assert loss == pytest.approx(expected, rel=0.02)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert float(F.cosine_similarity(weight.grad.flatten(), theirs[name].flatten(), dim=0)) > 0.98, name


# --- the loop ------------------------------------------------------------------------------------------------------


def run(model: Transformer, batches: Iterator[Batch], state: State, **how: Any) -> Optimizers:
    made = trainer(model, batches, state, **how)
    made.train()
    return made.optimizers


@pytest.mark.slow
@pytest.mark.parametrize("config", [Muon(), AdamW(learning_rate=0.01)], ids=["muon", "adamw"])
def test_a_model_learns_a_batch_by_heart(config: Muon | AdamW) -> None:
    model, state, losses = Transformer(SHAPES[0], 61), State(), list[float]()
    model.initialize(0)
    hook = Hook(lambda s: True, lambda s: losses.append(s.metrics["loss"]))
    run(model, repeat(random_batch(2)), state, steps=60, optimizer=config, hooks=Hooks([hook]))
    assert losses[0] == pytest.approx(math.log(61), rel=0.05)
    assert losses[-1] < 0.3 * losses[0]


def test_the_state_counts_steps_samples_and_supervised_tokens() -> None:
    batches = [random_batch(rows, rows) for rows in (3, 5, 2)]
    state = State(step=4, samples=100, tokens=7)
    shares: list[int] = []

    def share(step: int) -> float:
        shares.append(step)
        return 0.5

    run(lively(SHAPES[0]), iter(batches), state, steps=7, learning_rate_share=share)
    assert shares == [5, 6, 7]
    assert (state.step, state.samples) == (7, 110)
    assert state.tokens == 7 + sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    assert state.metrics["tokens"] == int((batches[-1].targets != IGNORE).sum())
    assert state.metrics["learning_rate"] == 0.005


def test_a_state_at_the_last_step_has_nothing_to_do() -> None:
    model, state = lively(SHAPES[0]), State(step=3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    run(model, iter([]), state, steps=3)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_hooks_run_after_their_steps_in_their_order() -> None:
    seen: list[tuple[str, int]] = []
    hooks = [
        Hook(lambda s: s.step % 2 == 0, lambda s: seen.append(("even", s.step))),
        Hook(lambda s: True, lambda s: seen.append(("all", s.step))),
        Hook(lambda s: s.step == 3, lambda s: seen.append(("last", s.step))),
    ]
    run(lively(SHAPES[0]), repeat(random_batch(2)), State(), steps=3, hooks=Hooks(hooks))
    assert seen == [("all", 1), ("even", 2), ("all", 2), ("all", 3), ("last", 3)]


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_gradients_are_scaled_down_to_the_largest_norm_and_never_up(
    max_grad_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state = lively(SHAPES[0]), State()
    optimizers = Optimizers(model, AdamW())
    applied: list[float] = []

    def step(scale: float, number: int) -> None:
        norms = [weight.grad.norm() for weight in model.parameters() if weight.grad is not None]
        applied.append(scale * float(torch.stack(norms).norm()))

    monkeypatch.setattr(optimizers, "step", step)
    run(model, repeat(random_batch(2)), state, max_grad_norm=max_grad_norm, optimizer=optimizers)
    whole = state.metrics["gradient_norm"]
    assert whole == pytest.approx(float(torch.stack([g.norm() for g in reference(random_batch(2))[1].values()]).norm()))
    assert applied[0] == pytest.approx(min(whole, max_grad_norm), rel=1e-4)
    assert all(weight.grad is None for weight in model.parameters())


# --- the guard -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.inf, math.nan], ids=["infinite", "not a number"])
@pytest.mark.parametrize("config", [Muon(), AdamW()], ids=["muon", "adamw"])
def test_a_loss_that_is_not_finite_changes_no_weight_and_nothing_that_the_optimizers_remember(
    poison: float, config: Muon | AdamW
) -> None:
    model, state, told = lively(SHAPES[1]), State(), list[SkippedStep]()
    good, bad = random_batch(3, 1), random_batch(3, 2)
    good.ids[good.ids == 7] = 8
    bad.ids[1], bad.targets[1] = 7, 3
    with torch.no_grad():
        model.embed.weight[7] = poison
    guard = SpikeGuard(tell=told.append)
    optimizers = run(model, iter([good]), state, optimizer=config, guard=guard)
    weights, remembered, tokens = copied(model.state_dict()), copied(optimizers.state()), state.tokens
    run(model, iter([bad]), state, steps=2, optimizer=optimizers, guard=guard)
    assert same(model.state_dict(), weights)
    assert same(optimizers.state(), remembered)
    assert (state.step, state.samples, state.tokens) == (2, 6, tokens)
    assert (state.guard.skipped, state.guard.in_a_row, len(state.guard.losses)) == (1, 1, 1)
    assert "loss" not in state.metrics
    assert [(skip.step, skip.samples) for skip in told] == [(2, bad.samples.tolist())]
    assert told[0].why == "the loss is nan"  # infinity in a weight makes none in a norm that divides by it
    assert all(weight.grad is None for weight in model.parameters())


def test_a_batch_with_another_loss_than_all_before_is_skipped_and_the_run_goes_on() -> None:
    """A model that knows one batch by heart meets another."""
    model, state, told = lively(SHAPES[0]), State(), list[SkippedStep]()
    known, poisoned = random_batch(2, 1), random_batch(2, 2)
    batches = iter([*repeat(known, 60), poisoned, *repeat(known, 5)])
    run(model, batches, state, steps=66, guard=SpikeGuard(window=8, tell=told.append))
    assert [skip.step for skip in told] == [61]
    assert (state.step, state.guard.in_a_row, state.guard.skipped) == (66, 0, 1)
    assert told[0].why.startswith("the loss is ")
    assert state.metrics["loss"] < told[0].loss / 2


def test_a_gradient_that_is_too_large_is_skipped_though_its_loss_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state, told = lively(SHAPES[0]), State(), list[SkippedStep]()
    norms = iter([1.0, 1.1, 0.9, 5.0])
    monkeypatch.setattr(step, "gradient_norm", lambda grads: torch.tensor(next(norms)))
    run(model, repeat(random_batch(2)), state, steps=4, guard=SpikeGuard(window=3, tell=told.append))
    assert [(skip.step, skip.norm) for skip in told] == [(4, 5.0)]


def test_after_so_many_skips_in_a_row_the_run_goes_back_once() -> None:
    model, state, back = lively(SHAPES[1]), State(), list[int]()
    bad = random_batch(2, 2)
    bad.ids[:], bad.targets[:] = 7, 3
    with torch.no_grad():
        model.embed.weight[7] = math.nan

    def roll_back(state: State) -> None:
        back.append(state.step)
        state.guard.in_a_row = 0

    good = random_batch(2)
    good.ids[good.ids == 7] = 8
    run(model, iter([good, bad, bad, bad, bad, bad, good, bad]), state, steps=8, roll_back=roll_back)
    assert back == [4]
    assert (state.guard.skipped, state.guard.in_a_row) == (6, 1)


# --- the end, when asked for ----------------------------------------------------------------------------------------


def test_a_run_that_is_asked_to_stop_does_so_between_two_updates() -> None:
    model, state, stop = lively(SHAPES[0]), State(), StopRequest()

    def ask(state: State) -> None:
        stop.asked = state.step == 2

    with pytest.raises(Terminated):
        run(model, repeat(random_batch(2)), state, steps=9, hooks=Hooks([Hook(lambda s: True, ask)]), stop=stop)
    assert (state.step, len(state.guard.losses)) == (2, 2)


def test_a_step_of_many_micro_batches_is_left_half_way() -> None:
    model, state, stop, seen = lively(SHAPES[0]), State(), StopRequest(), list[int]()

    def forward(module: object, inputs: object, output: object) -> None:
        seen.append(1)
        stop.asked = len(seen) == 3

    before = copied(model.state_dict())
    model.register_forward_hook(forward)
    with pytest.raises(Terminated):
        run(model, repeat(random_batch(10)), state, steps=9, micro_batch=2, stop=stop)
    assert (state.step, state.samples, len(seen)) == (0, 0, 3)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_goes_to_a_device_in_one_copy_is_what_a_cpu_computes_with(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for a GPU; its numbers are looked at where they are packed."""
    batch, copies = random_batch(rows), list[tuple[Tensor, bool]]()
    plain = Tensor.to

    def to(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        copies.append((self, non_blocking))
        return self

    here = step.placed(batch, torch.device("cpu"))
    monkeypatch.setattr(Tensor, "to", to)
    there = step.placed(batch, torch.device("meta"))
    monkeypatch.setattr(Tensor, "to", plain)
    ((packed, non_blocking),) = copies
    assert non_blocking
    assert packed.dtype == torch.int32
    assert here.bounds is there.bounds is None, "no GPU reads them"
    for name, mine, theirs in zip(here._fields[:-1], here[:-1], there[:-1], strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs), name
        assert mine.dtype == theirs.dtype == torch.int64, name


@pytest.mark.parametrize("name", ["NormHead", "Qwen3"])
def test_the_losses_of_rows_add_up_to_the_loss_of_the_batch(name: str) -> None:
    model, batch = lively(CHOICES[name], 3), random_batch(4)
    rows = step.row_losses(model, batch, CPU)
    assert sum(rows) == pytest.approx(float(step.micro_batch_losses(model, batch, CPU)[1]), rel=1e-5)
