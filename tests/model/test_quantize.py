from typing import Literal

import pytest

from bloomery.core.errors import ConfigError
from bloomery.model import quantize
from bloomery.model.config import Base
from bloomery.model.quantize import BLOCK, GROUP, QuantizedLinear, frozen, kept_bytes, normal_float

import torch
import torch.nn.functional as F
from torch import nn

Kept = Base | Literal["int4"]
BASES: tuple[Kept, ...] = ("float32", "bfloat16", "int8", "int4", "nf4", "nf4_double")
PUBLISHED = [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.07958030]
PUBLISHED += [0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]
"""Appendix E of the paper."""


def linear(rows: int = 48, width: int = 200, bias: bool = False, seed: int = 0) -> nn.Linear:
    made = nn.Linear(width, rows, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.normal_(0, 0.02, generator=generator)
        made.weight[3] = 0.0
    return made


def dense(layer: QuantizedLinear, like: nn.Linear) -> nn.Linear:
    """An ordinary layer with the numbers that a frozen one computes with."""
    made = nn.Linear(like.in_features, like.out_features, bias=like.bias is not None)
    with torch.no_grad():
        made.weight.copy_(layer.dense(torch.float32))
        if like.bias is not None:
            made.bias.copy_(like.bias)
    return made.requires_grad_(False)


def test_the_numbers_of_nf4_are_the_published_ones() -> None:
    assert normal_float() == pytest.approx(tuple(PUBLISHED), abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_a_quantised_layer_computes_and_hands_back_the_bits_of_its_dense_numbers(
    base: Kept, autocast: bool, bias: bool
) -> None:
    like = linear(bias=bias)
    layer = frozen(like, base)
    plain = dense(layer, like)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 200, generator=generator)
    slope = torch.randn(3, 7, 48, generator=generator)
    found = []
    for one in (layer, plain):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = one(given)
        y.backward(slope.to(y.dtype))
        assert given.grad is not None
        found.append((y.detach(), given.grad))
    assert found[0][0].dtype == found[1][0].dtype
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_how_far_each_format_is_from_the_weights_and_how_many_bytes_it_takes() -> None:
    like = linear(256, 512)
    far, size = {}, {}
    for base in BASES:
        layer = frozen(like, base)
        far[base] = float((layer.dense(torch.float32) - like.weight).norm().detach() / like.weight.norm().detach())
        size[base] = kept_bytes(layer) / like.weight.numel()
    assert far["float32"] == 0.0
    assert 0 < far["bfloat16"] < 0.002
    assert 0 < far["int8"] < 0.01
    assert 0.074 < far["int4"] < 0.083
    assert 0.085 < far["nf4"] < 0.096
    assert far["nf4_double"] == pytest.approx(far["nf4"], abs=0.002)
    assert size["float32"] == 4
    assert size["bfloat16"] == 2
    assert size["int8"] == 1 + 4 / 512
    assert size["int4"] == 0.5 + 4 / GROUP
    assert size["nf4"] == 0.5 + 2 / BLOCK
    assert size["nf4_double"] == pytest.approx(0.5 + (1 + 4 / 256) / BLOCK, abs=1e-4)


@pytest.mark.parametrize("base", ["nf4", "nf4_double"])
def test_blocks_end_with_their_row_also_where_64_does_not_divide_it(base: Base) -> None:
    """Rows of 100 numbers: what one row holds makes no difference to the others."""
    one, other = linear(8, 100), linear(8, 100)
    with torch.no_grad():
        other.weight[5] *= 50
    ours, theirs = (quantize.NF4(layer)._scales() for layer in (one, other))
    assert ours.shape == (8, 2)
    rest = [0, 1, 2, 4, 6, 7]
    assert torch.equal(ours[rest], theirs[rest])
    assert frozen(one, base).dense(torch.float32).shape == (8, 100)


def test_numbers_that_nf4_can_say_come_back_as_they_were() -> None:
    like = nn.Linear(BLOCK, 2, bias=False)
    with torch.no_grad():
        like.weight.copy_(torch.tensor(normal_float()).repeat(2, BLOCK // 16) * torch.tensor([[1.0], [0.25]]))
    assert torch.equal(quantize.NF4(like).dense(torch.float32), like.weight.detach())


@pytest.mark.parametrize("width", [1, 31, 32, 100])
def test_int4_has_the_smallest_and_the_largest_number_of_each_group(width: int) -> None:
    like = linear(5, width, seed=2)
    found, weight = frozen(like, "int4").dense(torch.float32), like.weight.detach()
    assert found.shape == weight.shape
    for begin in range(0, width, GROUP):
        ours, theirs = found[:, begin : begin + GROUP], weight[:, begin : begin + GROUP]
        whole = F.pad(theirs, (0, GROUP - theirs.shape[1]))
        step = (whole.amax(1) - whole.amin(1)) / 15
        assert ((ours - theirs).abs() <= 0.51 * step[:, None] + 2e-4 * theirs.abs().max()).all()


def test_weights_that_int4_cannot_hold_are_an_error() -> None:
    like = linear(4, 40)
    with torch.no_grad():
        like.weight[2, 7] = -7e4
    with pytest.raises(ConfigError, match=r"(?s)the largest weight is 7e\+04, but int4 holds at most 65,504.*bfloat16"):
        frozen(like, "int4")


def test_a_tied_weight_is_counted_once() -> None:
    pair = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)])
    pair[1].weight = pair[0].weight
    assert kept_bytes(pair) == 4 * 12
