import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.model.layers import GatedMLP, RMSNorm, rotate, rotation

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm_is_its_formula(scale: float) -> None:
    norm = RMSNorm(12, 1e-3)
    with torch.no_grad():
        norm.weight.copy_(numbers(12, seed=1))
    x = (numbers(2, 5, 12) * scale).double()
    expected = x / torch.sqrt((x * x).mean(dim=2, keepdim=True) + 1e-3) * norm.weight.double()
    assert torch.allclose(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-7)


def test_rms_norm_computes_in_float32_and_hands_on_what_the_matrix_products_read() -> None:
    norm, x = RMSNorm(256, 1e-5), numbers(1, 3, 256).bfloat16()
    assert norm(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, norm(x).bfloat16())


def test_the_feed_forward_is_its_formula() -> None:
    mlp, x = GatedMLP(6, 10), numbers(2, 3, 6)
    g, u = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    expected = (g * torch.sigmoid(g) * u) @ mlp.down.weight.T
    assert torch.allclose(mlp(x), expected, atol=1e-6)


def test_angles_at_known_positions() -> None:
    """θ = 10⁴ and E = 4 make the frequencies 1 and 1/100."""
    cos, sin = rotation(torch.tensor([[0, 1, 50]]), 4, 10_000.0)
    for place, position in enumerate((0, 1, 50)):
        angles = [position, position / 100, position, position / 100]
        assert cos[0, 0, place].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-6)
        assert sin[0, 0, place].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-6)


def test_the_first_half_of_a_head_turns_into_the_second() -> None:
    x = torch.eye(4)[None, None]  # each unit vector at position 1
    turned = rotate(x, rotation(torch.ones(1, 4, dtype=torch.long), 4, 10_000.0))[0, 0]
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
        turned = [rotate(x, rotation(torch.tensor([[at]]), 2 * half, 10_000.0)) for x, at in ((a, here), (b, there))]
        return float((turned[0] * turned[1]).sum())

    assert product(p, q) == pytest.approx(product(p + shift, q + shift), abs=2e-3)
    assert float(rotate(a, rotation(torch.tensor([[p]]), 2 * half, 10_000.0)).norm()) == pytest.approx(
        float(a.norm()), rel=1e-5
    )


def test_turning_keeps_the_number_format() -> None:
    x = numbers(1, 2, 3, 8).bfloat16()
    assert rotate(x, rotation(torch.arange(3)[None], 8, 10_000.0)).dtype == torch.bfloat16
