import math

import numpy as np
import pytest

from bloomery.shards.loader import IGNORE
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.losses import Drawn, GRPOLoss, advantages, by_token
from bloomery.train.step import accumulate_gradients
from tests.model.made import SHAPES, lively
from tests.train.made import on_cpu, random_batch

import torch

CPU = on_cpu()


def grpo(**given: object) -> Grpo:
    return Grpo.model_validate({"problems": [{"kind": "arithmetic"}], **given})


def test_advantages_are_those_of_each_group_by_its_own_mean_and_deviation() -> None:
    rewards, groups = np.array([1.0, 0, 0, 1, 1, 1, 1, 0, 0]), np.array([4, 4, 4, 4, 9, 9, 9, 7, 7])
    spread = math.sqrt(4 * 0.25 / 3) + 1e-4
    expected = [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread] + [0.0] * 5
    assert advantages(rewards, groups).tolist() == pytest.approx(expected)
    assert advantages(rewards, groups, deviation=False).tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5] + [0.0] * 5)


@pytest.mark.parametrize("normalize", ["answers", "tokens"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_loss_and_its_gradient_are_those_of_its_formula_token_by_token(normalize: str, micro_batch: int) -> None:
    loss, batch = grpo(normalize=normalize, kl_coef=0.3, clip=0.1, temperature=1.3), random_batch(4)
    order = np.argsort(batch.samples)
    rng = np.random.default_rng(0)
    now, before = (rng.normal(-5, 0.3, batch.ids.shape).astype(np.float32) for _ in range(2))
    plain = lively(SHAPES[0])
    with torch.no_grad():
        now += by_token(plain, batch, CPU, 1.3).numpy() - now.mean()
        before += by_token(plain, batch, CPU, 1.3).numpy() - before.mean()
    advantage = np.array([1.2, -0.7, 0.1, -0.6], np.float32)
    drawn = Drawn(batch.samples[order], advantage[order], now[order], before[order], {"reward": 0.25})
    model, policy = lively(SHAPES[0]), GRPOLoss(loss, lambda: drawn)
    value, _, metrics, _ = accumulate_gradients(model, batch, micro_batch, CPU, policy)
    found = by_token(plain, batch, CPU, 1.3)
    total, tokens, apart, held = torch.zeros(()), 0, 0.0, 0
    for row in range(4):
        places = np.flatnonzero(batch.targets[row] != IGNORE)
        each = torch.zeros(())
        for place in places:
            log_p = found[row, place]
            ratio = torch.exp(log_p - float(now[row, place]))
            a = float(advantage[row])
            q = torch.exp(float(before[row, place]) - log_p)
            k3 = q - torch.log(q) - 1
            best = torch.min(ratio * a, torch.clamp(ratio, 0.9, 1.1) * a)
            held += bool(best < ratio * a)
            apart += float(k3.detach())
            each = each - best + 0.3 * k3
        tokens += len(places)
        total = total + (each / max(len(places), 1) if normalize == "answers" else each)
    total = total / (4 if normalize == "answers" else tokens)
    torch.autograd.backward(total)
    assert value == pytest.approx(float(total.detach()), rel=1e-4)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            assert other.grad is not None
            assert torch.allclose(one.grad, other.grad, atol=1e-4 * float(other.grad.abs().max()) + 1e-7), name
    assert metrics["kl"] == pytest.approx(apart / tokens, rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(held / tokens)
    assert metrics["reward"] == 0.25


def test_with_answers_used_once_and_no_reference_the_gradient_is_that_of_the_advantage() -> None:
    batch = random_batch(3)
    order, advantage = np.argsort(batch.samples), np.array([0.5, -1.0, 0.5], np.float32)
    drawn = Drawn(batch.samples[order], advantage[order], None, None, {})
    model, plain = lively(SHAPES[0]), lively(SHAPES[0])
    policy = GRPOLoss(grpo(normalize="tokens", kl_coef=0.0), lambda: drawn)
    metrics = accumulate_gradients(model, batch, 3, CPU, policy).metrics
    counts = (batch.targets != IGNORE).sum()
    torch.autograd.backward(-(by_token(plain, batch, CPU) * torch.from_numpy(advantage)[:, None]).sum() / int(counts))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            assert other.grad is not None
            assert torch.allclose(one.grad, other.grad, atol=1e-6)
    assert metrics == {"kl": 0.0, "clip_fraction": 0.0}
