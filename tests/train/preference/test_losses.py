"""Each loss against its formula, written once more with Python's own numbers."""

import math
from collections.abc import Callable
from itertools import product

import pytest

from bloomery.train.preference import losses
from bloomery.train.preference.config import Dpo, Ipo, SimPo
from bloomery.train.preference.losses import Answers, PreferenceOutcome

import torch

NUMBERS = list(product((-31.5, -2.0, -0.01), (-8.0, -1.25), (-20.0, -3.0), (-11.0, -0.5), (1.0, 7.0), (3.0, 12.0)))
Formula = Callable[[float, float, float, float, float, float], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def of_dpo(c: float, r: float, c0: float, r0: float, nc: float, nr: float) -> float:
    return -math.log(sigmoid(0.3 * ((c - c0) - (r - r0))))


def of_smooth_dpo(c: float, r: float, c0: float, r0: float, nc: float, nr: float) -> float:
    h = 0.3 * (math.log(math.exp(c) / math.exp(r)) - math.log(math.exp(c0) / math.exp(r0)))
    return -0.9 * math.log(sigmoid(h)) - 0.1 * math.log(sigmoid(-h))


def of_ipo(c: float, r: float, c0: float, r0: float, nc: float, nr: float) -> float:
    return (c / nc - c0 / nc - (r / nr - r0 / nr) - 1 / (2 * 0.3)) ** 2


def of_simpo(c: float, r: float, c0: float, r0: float, nc: float, nr: float) -> float:
    return -math.log(sigmoid(2.5 / nc * c - 2.5 / nr * r - 1.4))


CASES: list[tuple[Callable[[Answers, Answers], PreferenceOutcome], Formula]] = [
    (lambda good, bad: losses.dpo(good, bad, Dpo(beta=0.3)), of_dpo),
    (lambda good, bad: losses.dpo(good, bad, Dpo(beta=0.3, smoothing=0.1)), of_smooth_dpo),
    (lambda good, bad: losses.ipo(good, bad, Ipo(beta=0.3)), of_ipo),
    (lambda good, bad: losses.simpo(good, bad, SimPo(beta=2.5, gamma=1.4)), of_simpo),
]


def answers(requires_grad: bool = False) -> tuple[Answers, Answers]:
    c, r, c0, r0, nc, nr = torch.tensor(NUMBERS, dtype=torch.float64).unbind(1)
    c, r = (one.clone().requires_grad_(requires_grad) for one in (c, r))
    return Answers(c, c0, nc), Answers(r, r0, nr)


@pytest.mark.parametrize(("loss", "formula"), CASES, ids=["dpo", "smooth dpo", "ipo", "simpo"])
def test_a_loss_on_pairs_and_its_gradient_are_those_of_its_formula(
    loss: Callable[[Answers, Answers], PreferenceOutcome], formula: Formula
) -> None:
    chosen, rejected = answers(requires_grad=True)
    judged = loss(chosen, rejected)
    assert judged.losses.tolist() == pytest.approx([formula(*row) for row in NUMBERS], rel=1e-9)
    torch.autograd.backward(judged.losses.sum())
    step = 1e-5
    for place, answer in enumerate((chosen, rejected)):
        moved = [[*row[:place], row[place] + way * step, *row[place + 1 :]] for way in (1, -1) for row in NUMBERS]
        values = [formula(*row) for row in moved]
        half = len(NUMBERS)
        slopes = [(up - down) / (2 * step) for up, down in zip(values[:half], values[half:], strict=True)]
        assert answer.now.grad is not None
        assert answer.now.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


def test_before_the_first_step_a_pair_costs_log_2_and_is_half_right() -> None:
    same = Answers(torch.tensor([-3.0, -50.0]), torch.tensor([-3.0, -50.0]), torch.tensor([2.0, 9.0]))
    other = Answers(torch.tensor([-7.0, -1.0]), torch.tensor([-7.0, -1.0]), torch.tensor([4.0, 1.0]))
    judged = losses.dpo(same, other, Dpo())
    assert judged.losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert (judged.chosen - judged.rejected).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "held"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),
        (1.5, -2.0, 3.0, False),
        (0.5, -2.0, 1.6, True),
        (0.5, 2.0, -1.0, False),
    ],
)
def test_a_ratio_is_held_where_it_would_gain_by_going_further(
    ratio: float, advantage: float, expected: float, held: bool
) -> None:
    now, drawn = torch.tensor([math.log(ratio) - 5.0], requires_grad=True), torch.tensor([-5.0])
    loss, clipped = losses.clipped(now, drawn, torch.tensor([advantage]), 0.2)
    assert loss.tolist() == pytest.approx([expected], rel=1e-5)
    assert clipped.tolist() == [held]
    torch.autograd.backward(loss.sum())
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0 if held else -advantage * ratio], rel=1e-5)


def test_the_divergence_is_never_negative_and_is_that_of_two_distributions_on_the_mean() -> None:
    now, before = torch.log_softmax(torch.randn(2, 7, generator=torch.Generator().manual_seed(3)).double(), 1)
    each = losses.divergence(now, before)
    assert (each >= 0).all()
    assert losses.divergence(now, now).tolist() == [0.0] * 7
    exact = (now.exp() * (now - before)).sum()
    assert float((now.exp() * each).sum()) == pytest.approx(float(exact))
