import math
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.model.config import GATED
from bloomery.model.layers import (
    ACTIVATIONS,
    MLP,
    ROWS_AT_ONCE,
    GatedMLP,
    LayerNorm,
    NormalizedHead,
    RMSNorm,
    build_mlp,
    norm,
)
from tests.model.made import CHOICES

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm_is_its_formula(scale: float) -> None:
    norm = RMSNorm(12, 1e-3)
    weight = norm.get_parameter("weight")
    with torch.no_grad():
        weight.copy_(numbers(12, seed=1))
    x = (numbers(2, 5, 12) * scale).double()
    expected = x / torch.sqrt((x * x).mean(dim=2, keepdim=True) + 1e-3) * weight.double()
    assert torch.allclose(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-7)


def test_rms_norm_computes_in_float32_and_hands_on_what_the_matrix_products_read() -> None:
    norm, x = RMSNorm(256, 1e-5), numbers(1, 3, 256).bfloat16()
    assert norm(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, norm(x).bfloat16())


def test_layer_norm_is_its_formula_in_float32() -> None:
    x = numbers(2, 5, 12) * 30 + 7
    for weights, bias in ((True, True), (True, False), (False, False)):
        layer = LayerNorm(12, 1e-3, weights, bias)
        expected = (x - x.mean(dim=2, keepdim=True)) / torch.sqrt(x.var(dim=2, keepdim=True, unbiased=False) + 1e-3)
        if layer.weight is not None:
            torch.nn.init.normal_(layer.weight)
            expected = expected * layer.weight
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias)
            expected = expected + layer.bias
        assert torch.allclose(layer(x), expected, atol=1e-5)
        assert layer(x.bfloat16()).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16


def test_a_bare_norm_has_nothing_to_learn() -> None:
    assert [list(norm(CHOICES[name]).parameters()) for name in ("GeGLU and bare norms", "bare LayerNorm")] == [[], []]
    named = dict(norm(CHOICES["absolute positions"]).named_parameters())
    assert named.keys() == {"weight", "bias"}


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_by_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN = {"gelu": gelu, "gelu_tanh": gelu_by_tanh, "relu2": lambda x: x.clamp(min=0) ** 2}
WITH_GATE = {"swiglu": lambda g: g * torch.sigmoid(g), "geglu": gelu, "geglu_tanh": gelu_by_tanh}


def test_every_kind_of_feed_forward_has_its_formula_here() -> None:
    assert {*PLAIN, *WITH_GATE} == set(ACTIVATIONS)
    assert set(WITH_GATE) == set(GATED)


@pytest.mark.parametrize(("kind", "act"), PLAIN.items())
def test_a_plain_feed_forward_is_its_formula(kind: Any, act: Callable[[Tensor], Tensor]) -> None:
    mlp, x = MLP(6, 10, kind, bias=True), numbers(2, 3, 6)
    expected = act(x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T + mlp.down.bias
    assert torch.allclose(mlp(x), expected, atol=1e-6)


@pytest.mark.parametrize(("kind", "act"), WITH_GATE.items())
def test_a_gated_feed_forward_is_its_formula(kind: Any, act: Callable[[Tensor], Tensor]) -> None:
    mlp, x = GatedMLP(6, 10, kind), numbers(2, 3, 6)
    expected = (act(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    assert torch.allclose(mlp(x), expected, atol=1e-6)


def test_layers_take_their_feed_forward_in_turn() -> None:
    shape = CHOICES["no positions"]
    assert [build_mlp(shape, layer).act.__name__ for layer in range(3)] == ["relu_squared", "gelu", "relu_squared"]


def test_rows_of_a_frozen_head_are_normalized_in_pieces_to_the_same_bits() -> None:
    head = NormalizedHead(8, ROWS_AT_ONCE + 3, bias=False).requires_grad_(False)
    assert torch.equal(head.rows(torch.bfloat16), head.rows().bfloat16())
