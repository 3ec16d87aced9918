"""AdamW of the compiled library equals torch's, and takes a scale of gradients that are not written back."""

from typing import Any

import pytest

from bloomery.core import native
from bloomery.train.fused_adamw import LIBRARY, ScaledAdamW, total_norm

import torch
from torch import Tensor, nn

SIZES = [(1,), (15,), (300, 70), (17, 1000)]
NATIVE = pytest.mark.parametrize("wanted", ["0", "1"], ids=["torch", "compiled"])


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def give(to: list[nn.Parameter], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in to:
        weight.grad = torch.randn(weight.shape, generator=generator) * scale
    return [weight.grad for weight in to if weight.grad is not None]


@NATIVE
def test_weights_and_moments_are_those_of_torch(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, wanted)
    ours, theirs = weights(), weights()
    how: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    mine, reference = ScaledAdamW(ours, **how, fused=True), torch.optim.AdamW(theirs, **how, fused=True)
    for step in range(4):
        give(ours, step, scale=4.0)
        give(theirs, step)
        mine.scale = 0.25
        mine.step()
        reference.step()
        assert mine.scale == 1.0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        assert mine.state[a].keys() == reference.state[b].keys()
        for name, value in reference.state[b].items():
            assert torch.allclose(mine.state[a][name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.skipif(native.library(LIBRARY) is None, reason="the library of the optimizer is not there")
def test_scaled_gradients_stay_as_they_are_and_autograd_knows_of_the_new_weights() -> None:
    ours = weights()
    optimizer = ScaledAdamW(ours, lr=0.01)
    given = [gradient.clone() for gradient in give(ours, 0)]
    before = [weight._version for weight in ours]
    optimizer.scale = 0.5
    optimizer.step()
    assert all(
        weight.grad is not None and torch.equal(weight.grad, one) for weight, one in zip(ours, given, strict=True)
    )
    assert all(weight._version > version for weight, version in zip(ours, before, strict=True))


@NATIVE
def test_the_total_norm_is_that_of_all_numbers(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, wanted)
    given = give(weights(), 0)
    whole = torch.cat([gradient.double().flatten() for gradient in given])
    assert float(total_norm(given)) == pytest.approx(float(whole.norm()), rel=1e-6)
    assert float(total_norm([])) == 0.0
    given[2][5, 5] = float("nan")
    assert bool(total_norm(given).isnan())


@pytest.mark.skipif(native.library(LIBRARY) is None, reason="the library of the optimizer is not there")
def test_neither_update_nor_norm_depends_on_threads() -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ours = weights()
        norm = total_norm(give(ours, 0))
        ScaledAdamW(ours, lr=0.01).step()
        found.append([norm, *(weight.detach() for weight in ours)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
