import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.train.optim import (
    BATCH_NUMBERS,
    AdamW8bitOptimizer,
    AdEMAMixOptimizer,
    BatchedMuon,
    LionOptimizer,
    code_table,
    decode,
    encode,
    orthogonalize,
    slow_mean,
)

import torch
from torch import Tensor, nn

STEPS = 12


def weights(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(shape: tuple[int, ...], steps: int = STEPS, seed: int = 1) -> list[Tensor]:
    """Of sizes that differ between numbers and from step to step, as those of a model do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).mul(2).exp()
    return [torch.randn(shape, generator=generator) * sizes * (0.3 + step % 3) for step in range(steps)]


def trained(
    made: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shape: tuple[int, ...] = (5, 7)
) -> list[Tensor]:
    """The weight after each step."""
    (weight,) = weights(shape)
    optimizer, seen = made([weight]), []
    for gradient in gradients(shape):
        weight.grad = gradient.clone()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


# --- formulas, number by number ---------------------------------------------------------------------------------------


def by_hand(
    rule: Callable[[int, float, float, dict[str, float]], float], shape: tuple[int, ...] = (5, 7)
) -> list[Tensor]:
    """The weight after each step of `rule(t, p, g, memory) -> p`, in double precision."""
    (weight,) = weights(shape)
    numbers = weight.detach().flatten().tolist()
    memories: list[dict[str, float]] = [{} for _ in numbers]
    seen = []
    for t, gradient in enumerate(gradients(shape), start=1):
        flat = gradient.flatten().tolist()
        numbers = [rule(t, p, g, memory) for p, g, memory in zip(numbers, flat, memories, strict=True)]
        seen.append(torch.tensor(numbers).view(shape))
    return seen


def ademamix(t: int, p: float, g: float, memory: dict[str, float]) -> float:
    """Algorithm 1 of arXiv 2409.03137 with β = (0.9, 0.99, 0.999), α = 5, ε = 1e-8, λ = 0.1, lr = 0.01 and T = 8."""
    b1, b2, b3, alpha, ramp = 0.9, 0.99, 0.999, 5.0, 8
    at = min(t * alpha / ramp, alpha)
    exponent = math.log(b1) * math.log(b3) / ((1 - t / ramp) * math.log(b3) + t / ramp * math.log(b1))
    b3t = min(math.exp(exponent), b3) if t <= ramp else b3
    memory["m1"] = b1 * memory.get("m1", 0.0) + (1 - b1) * g
    memory["m2"] = b3t * memory.get("m2", 0.0) + (1 - b3t) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    m, v = memory["m1"] / (1 - b1**t), memory["v"] / (1 - b2**t)
    return p - 0.01 * ((m + at * memory["m2"]) / (math.sqrt(v) + 1e-8) + 0.1 * p)


def lion(t: int, p: float, g: float, memory: dict[str, float]) -> float:
    """Algorithm 2 of arXiv 2302.06675 with β = (0.9, 0.99), λ = 0.1 and lr = 0.01."""
    m = memory.get("m", 0.0)
    memory["m"] = 0.99 * m + (1 - 0.99) * g
    return p - 0.01 * (math.copysign(1.0, 0.9 * m + (1 - 0.9) * g) + 0.1 * p)


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (
            lambda w: AdEMAMixOptimizer(
                [{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99, 0.999), alpha=5.0, eps=1e-8, ramp=8
            ),
            ademamix,
        ),
        (lambda w: LionOptimizer([{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99)), lion),
    ],
    ids=["ademamix", "lion"],
)
def test_each_step_is_that_of_the_paper(made: Any, rule: Any) -> None:
    for ours, expected in zip(trained(made), by_hand(rule), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_without_a_slow_mean_ademamix_is_adamw() -> None:
    group: Callable[[Any], Any] = lambda w: [{"params": w, "weight_decay": 0.1}]  # noqa: E731
    ours = trained(
        lambda w: AdEMAMixOptimizer(group(w), lr=0.01, betas=(0.9, 0.95, 0.999), alpha=0.0, eps=1e-8, ramp=0)
    )
    theirs = trained(lambda w: torch.optim.AdamW(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8))
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-7)


def test_the_slow_mean_rises_from_the_fast_one_and_is_there_when_the_ramp_ends() -> None:
    betas = (0.9, 0.999, 0.9999)
    found = [slow_mean(t, 8.0, betas, 1000) for t in range(1, 1002)]
    assert slow_mean(0, 8.0, betas, 1000)[1] == pytest.approx(0.9)
    assert found[499][0] == 4.0
    halves = [math.log(0.5) / math.log(found[t - 1][1]) for t in (250, 500, 750)]
    assert halves[1] - halves[0] == pytest.approx(halves[2] - halves[1]), "its half-life rises in a line"
    assert found[999] == found[1000] == (8.0, 0.9999)


# --- 8 bits ----------------------------------------------------------------------------------------------------------


def test_codes_stand_for_256_numbers_of_which_most_are_small() -> None:
    signed, unsigned = code_table(True), code_table(False)
    for table in (signed, unsigned):
        assert len(table) == 256
        assert bool((table[1:] > table[:-1]).all())
        assert float(table[-1]) == 1.0
        assert 0.0 in table
    assert float(signed[0]) == pytest.approx(-(0.1 + 0.9 * 63.5 / 64))
    assert float(unsigned[0]) == 0.0
    assert float((unsigned < 0.1).float().mean()) == pytest.approx(127 / 256)
    assert float(unsigned[1]) == pytest.approx(3.25e-7)


@settings(max_examples=40)
@given(st.integers(1, 700), st.integers(1, 300), st.booleans(), st.integers(0, 99), st.floats(-30, 30))
def test_what_codes_stand_for_is_near_what_they_were_made_from(
    count: int, block: int, signed: bool, seed: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp() * 10.0**exponent
    numbers = numbers if signed else numbers.abs()
    table = code_table(signed)
    codes, scales = torch.zeros(count, dtype=torch.uint8), torch.zeros(-(-count // block))
    encode(numbers, table, signed, block, codes, scales)
    found = decode(codes, scales, table, block)
    largest = scales.repeat_interleave(block)[:count]
    assert bool(((found - numbers).abs() <= 0.008 * largest).all())
    near = numbers.abs() > 0.1 * largest
    assert bool(((found - numbers).abs() <= 0.08 * numbers.abs())[near].all())
    assert bool((found[numbers == largest] == numbers[numbers == largest]).all()), "the largest is kept as it is"
    if not signed:
        assert bool((found[numbers > 0] > 0).all()), "a second moment of 0 would divide by ε"


def test_zeros_have_codes_that_stand_for_zeros() -> None:
    codes, scales = torch.full((10,), 7, dtype=torch.uint8), torch.ones(3)
    encode(torch.zeros(10), code_table(True), True, 4, codes, scales)
    assert not bool(decode(codes, scales, code_table(True), 4).any())


@pytest.mark.parametrize("shape", [(64, 48), (3, 5), (1, 1000)])
def test_adamw_in_8_bits_goes_where_adamw_goes(shape: tuple[int, ...]) -> None:
    group: Callable[[Any], Any] = lambda w: [{"params": w, "weight_decay": 0.1}]  # noqa: E731
    ours = trained(lambda w: AdamW8bitOptimizer(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8, block=256), shape)
    theirs = trained(lambda w: torch.optim.AdamW(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8), shape)
    start = weights(shape)[0].detach()
    assert torch.allclose(ours[0], theirs[0], atol=1e-6), "the first step is made before anything is rounded"
    way, expected = (ours[-1] - start).flatten(), (theirs[-1] - start).flatten()
    assert float(torch.cosine_similarity(way, expected, dim=0)) > 0.96
    assert float(way.norm() / expected.norm()) == pytest.approx(1, abs=0.1)


def test_a_weight_of_many_chunks_is_changed_as_one_of_one(monkeypatch: pytest.MonkeyPatch) -> None:

    def made(w: Any) -> Any:
        return AdamW8bitOptimizer([{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8, block=16)

    whole = trained(made, (13, 17))
    monkeypatch.setattr("bloomery.train.optim.CHUNK_NUMBERS", 48)
    assert all(torch.equal(one, other) for one, other in zip(trained(made, (13, 17)), whole, strict=True))


# --- Muon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_batched_muon_makes_the_steps_of_torchs_bit_for_bit(scaling: str) -> None:
    shapes = [(24, 24), (40, 16), (16, 40), (24, 24), (40, 16), (24, 24), (8, 64)]
    ours, theirs = weights(*shapes), weights(*shapes)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": scaling}
    optimizers = BatchedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(6):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = gradients(one.shape, 1, 100 * step + place)[0]
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), step


def test_matrices_that_are_orthogonalized_together_are_no_more_than_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def watched(matrices: Tensor, *settings: Any) -> Tensor:
        sizes.append(matrices.numel())
        return orthogonalize(matrices, *settings)

    monkeypatch.setattr("bloomery.train.optim.orthogonalize", watched)
    monkeypatch.setattr("bloomery.train.optim.BATCH_NUMBERS", 1000)
    made = weights(*[(16, 20)] * 7, (50, 50))
    for weight in made:
        weight.grad = torch.ones_like(weight)
    BatchedMuon(made).step()
    assert sizes == [960, 960, 320, 2500]
    assert BATCH_NUMBERS * 2 <= 8 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_orthogonalized_has_singular_values_near_one_and_the_same_sides(dtype: torch.dtype) -> None:
    matrices = torch.stack(gradients((12, 30), 3)).to(dtype)
    found = orthogonalize(matrices, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    left, values, right = torch.linalg.svd(matrices.float(), full_matrices=False)
    kept = left.mT @ found @ right.mT
    diagonal = kept.diagonal(dim1=1, dim2=2)
    assert bool((diagonal[values > 0.05 * values[:, :1]] > 0.5).all())
    assert bool((diagonal < 1.3).all())
    assert float((kept - torch.diag_embed(diagonal)).abs().max()) < (0.1 if dtype == torch.bfloat16 else 1e-4)
