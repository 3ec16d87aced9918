import pytest

from bloomery.shards.loader import IGNORE
from bloomery.train import loss as losses
from bloomery.train.preference.losses import by_sequence, by_token, log_probs
from bloomery.train.step import micro_batch_loss
from tests.model.made import SHAPES, lively
from tests.train.made import on_cpu, random_batch

import torch

CPU = on_cpu()


@pytest.mark.parametrize("chunk_bytes", [1, 2**10, 2**27])
def test_log_probabilities_and_gradients_are_those_of_a_log_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (13, 29))
    targets = torch.randint(0, 29, (13,), generator=generator)
    upstream = torch.randn(13, generator=generator)
    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.log_softmax(plain[0] @ plain[1].t(), 1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward((expected * upstream).sum())
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = log_probs(ours[0], ours[1], targets)
    torch.autograd.backward((found * upstream).sum())
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    for one, other in zip(ours, plain, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(5, 4)
    torch.autograd.backward(log_probs(hidden, weight, torch.tensor([0, 4, 2])).sum())
    assert weight.grad is None
    assert hidden.grad is not None


def test_all_tokens_together_are_the_cross_entropy() -> None:
    model, batch = lively(SHAPES[0]), random_batch(4)
    found = by_token(model, batch, CPU).detach()
    assert float(-found.sum()) == pytest.approx(float(micro_batch_loss(model, batch, CPU).detach()), rel=1e-5)
    assert bool((found[torch.from_numpy(batch.targets == IGNORE)] == 0).all())


def test_a_sequence_counts_its_own_tokens_and_no_others() -> None:
    model, batch = lively(SHAPES[0]), random_batch(4)
    with torch.no_grad():
        found = by_sequence(model, batch, 3, CPU)
    each = by_token(model, batch, CPU).detach()
    for row, segments in enumerate(batch.segments):
        for number in range(3):
            inside = segments == segments[0] + number
            assert float(found.sums[row, number]) == pytest.approx(float(each[row, inside].sum()), abs=1e-5)
            assert int(found.tokens[row, number]) == int((batch.targets[row, inside] != IGNORE).sum())


def test_a_temperature_is_that_of_the_scores() -> None:
    model, batch = lively(SHAPES[0]), random_batch(2)
    ids, positions, segments = (torch.from_numpy(one) for one in (batch.ids, batch.positions, batch.segments))
    with torch.no_grad():
        scores = model.logits(model(ids, positions=positions, segments=segments))
        warm = by_token(model, batch, CPU, 2.0)
    counts = torch.from_numpy(batch.targets != IGNORE)
    targets = torch.from_numpy(batch.targets).clamp(min=0)
    expected = torch.log_softmax(scores / 2.0, 2).gather(2, targets[:, :, None])[:, :, 0]
    assert torch.allclose(warm[counts], expected[counts], atol=1e-5)
