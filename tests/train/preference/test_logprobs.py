from typing import Any

import pytest

from bloomery.model.kernels import cpu
from bloomery.shards.loader import IGNORE
from bloomery.train import loss as losses
from bloomery.train.preference.losses import by_sequence, by_token, log_probs
from bloomery.train.step import micro_batch_loss
from tests.model.made import SHAPES, lively
from tests.train.made import on_cpu, random_batch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class MatmulSides(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The lengths of the sides of all matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sides = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ == "mm":
            self.sides |= {*args[0].shape, *args[1].shape}
        return function(*args, **(kwargs or {}))


def test_on_a_gpu_the_vocabulary_is_padded_and_gradients_of_a_short_head_are_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 8, generator=generator).bfloat16()
    weight = torch.randn(29, 8, generator=generator).bfloat16()
    targets = torch.randint(0, 29, (1024,), generator=generator)
    plain = [one.double().requires_grad_() for one in (hidden, weight)]
    expected = torch.log_softmax(plain[0] @ plain[1].t(), 1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward(expected.sum())
    ours = [one.clone().requires_grad_() for one in (hidden, weight)]
    token = cpu.ELSEWHERE.set(True)
    with losses.chunks_of(4 * 29 * 300), MatmulSides() as seen:
        torch.autograd.backward(log_probs(ours[0], ours[1], targets).sum())
    cpu.ELSEWHERE.reset(token)
    assert seen.sides == {8, 64, losses.TILE_TOKENS}
    for one, other in zip(ours, plain, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        assert float((one.grad.double() - other.grad).abs().max()) < 0.01 * float(other.grad.abs().max())


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


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_columns_behind_the_last_target_change_nothing_and_are_not_computed(step: int) -> None:
    model, batch = lively(SHAPES[0]), random_batch(4)
    batch.targets[:, 5:] = IGNORE
    columns = min(batch.ids.shape[1], step * -(-5 // step))
    seen: list[int] = []
    hook = model.embed.register_forward_hook(lambda _, ids, rows: seen.append(ids[0].shape[1]))
    found = by_token(model, batch, CPU, 1.0, step)
    hook.remove()
    assert seen == [columns]
    assert torch.allclose(found, by_token(model, batch, CPU), atol=1e-6)
    batch.targets[:] = IGNORE
    assert not by_token(model, batch, CPU, 1.0, step).any()


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
