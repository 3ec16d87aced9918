import math

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bloomery.model.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from bloomery.model.layers import alibi_slopes, frequencies, rotate, rotation

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shape(head_dim: int, theta: float = 10_000.0, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


def test_angles_at_known_positions() -> None:
    """θ = 10⁴ and E = 4 make the frequencies 1 and 1/100."""
    cos, sin = rotation(torch.tensor([[0, 1, 50]]), shape(4))
    for place, position in enumerate((0, 1, 50)):
        angles = [position, position / 100, position, position / 100]
        assert cos[0, 0, place].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-6)
        assert sin[0, 0, place].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-6)


def test_the_first_half_of_a_head_turns_into_the_second() -> None:
    x = torch.eye(4)[None, None]  # each unit vector at position 1
    turned = rotate(x, rotation(torch.ones(1, 4, dtype=torch.long), shape(4)))[0, 0]
    fast, slow = (math.cos(1), math.sin(1)), (math.cos(0.01), math.sin(0.01))
    expected = [
        [fast[0], 0, fast[1], 0],
        [0, slow[0], 0, slow[1]],
        [-fast[1], 0, fast[0], 0],
        [0, -slow[1], 0, slow[0]],
    ]
    assert torch.allclose(turned, torch.tensor(expected), atol=1e-6)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 200), st.integers(1, 8))
def test_a_product_of_turned_heads_depends_on_their_distance_alone(p: int, q: int, shift: int, half: int) -> None:
    a, b = numbers(1, 1, 1, 2 * half), numbers(1, 1, 1, 2 * half, seed=1)

    def product(here: int, there: int) -> float:
        turned = [rotate(x, rotation(torch.tensor([[at]]), shape(2 * half))) for x, at in ((a, here), (b, there))]
        return float((turned[0] * turned[1]).sum())

    assert product(p, q) == pytest.approx(product(p + shift, q + shift), abs=2e-3)
    assert float(rotate(a, rotation(torch.tensor([[p]]), shape(2 * half))).norm()) == pytest.approx(
        float(a.norm()), rel=1e-5
    )


def test_turning_keeps_the_number_format() -> None:
    x = numbers(1, 2, 3, 8).bfloat16()
    assert rotate(x, rotation(torch.arange(3)[None], shape(8))).dtype == torch.bfloat16


@given(st.integers(1, 64), st.floats(1.0, 16.0))
def test_linear_scaling_slows_every_pair_alike(half: int, factor: float) -> None:
    plain, _ = frequencies(2 * half, 10_000.0, None)
    slowed, grown = frequencies(2 * half, 10_000.0, LinearScaling(factor=factor))
    assert grown == 1.0
    assert torch.allclose(slowed * factor, plain)


@pytest.mark.parametrize(
    "scaling", [Llama3Scaling(original_context_length=64), YarnScaling(factor=8.0, original_context_length=64)]
)
def test_fast_pairs_keep_their_speed_and_slow_ones_lose_the_whole_factor(scaling: RopeScaling) -> None:
    plain, _ = frequencies(64, 10_000.0, None)
    slowed, _ = frequencies(64, 10_000.0, scaling)
    ratio = plain / slowed
    assert ratio[0] == 1.0
    assert float(ratio[-1]) == pytest.approx(8.0)
    assert (ratio[1:] - ratio[:-1] >= -1e-6).all()


def test_yarn_makes_queries_and_keys_larger() -> None:
    grown = [
        frequencies(8, 100.0, YarnScaling(factor=4.0, original_context_length=9, attention_factor=one))[1]
        for one in (None, 2.0)
    ]
    assert grown == [pytest.approx(0.1 * math.log(4) + 1), 2.0]
    turn = rotation(
        torch.arange(5)[None],
        shape(8, scaling=YarnScaling(factor=4.0, original_context_length=9, attention_factor=2.0)),
    )
    x = numbers(1, 1, 5, 8)
    assert torch.allclose(rotate(x, turn).norm(dim=3), 2 * x.norm(dim=3))


def test_slopes_of_alibi_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2.0 ** (-n / 2) for n in range(1, 17)])
    assert alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("heads", [4, 6])
def test_the_slopes_of_alibi_are_those_of_bloom(heads: int) -> None:
    bias = transformers.models.bloom.modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    assert bias[:, 0, 1].tolist() == pytest.approx(alibi_slopes(heads))


@pytest.mark.parametrize("heads", [3, 6, 12, 40])
def test_other_numbers_of_heads_fill_in_slopes_of_the_next_power_of_two(heads: int) -> None:
    """As Baichuan2-13B with its 40 heads."""
    below = 2 ** int(math.log2(heads))
    slopes = alibi_slopes(heads)
    assert slopes[:below] == alibi_slopes(below)
    assert slopes[below:] == pytest.approx(alibi_slopes(2 * below)[::2][: heads - below])
    assert len(set(slopes)) == heads
