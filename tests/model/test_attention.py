import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.model.attention import Cache, causal_mask, sdpa_attention, softmax_attention
from tests.model.made import SHAPES

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
"""B, K, H / K, T, S."""


def heads(
    shape: tuple[int, int, int, int, int], seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and a mask that lets every query see something."""
    B, K, group, T, S = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, m, 6, generator=generator).to(dtype) for n, m in ((K * group, T), (K, S), (K, S)))
    mask = torch.rand(B, T, S, generator=generator) < 0.6
    mask.scatter_(2, torch.randint(0, S, (B, T, 1), generator=generator), True)
    return q, k, v, mask


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q kᵀ / √E) v in float64; query head h reads key head h div (H / K)."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, dim=1) for one in (k, v))
    scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    return scores.masked_fill(~mask[:, None], -math.inf).softmax(dim=3) @ v


@settings(max_examples=40)
@given(sizes, st.integers(0, 1000), st.sampled_from(list(TOLERANCE)))
def test_both_ways_to_attend_are_the_formula(
    shape: tuple[int, int, int, int, int], seed: int, dtype: torch.dtype
) -> None:
    q, k, v, mask = heads(shape, seed, dtype)
    expected = by_formula(q, k, v, mask)
    for attend in (softmax_attention, sdpa_attention):
        y = attend(q, k, v, mask)
        assert y.dtype == dtype
        assert y.shape == q.shape
        assert (y.double() - expected).abs().max() <= TOLERANCE[dtype] * v.abs().max()


def gradients(attend: object, shape: tuple[int, int, int, int, int], seed: int) -> list[Tensor]:
    q, k, v, mask = heads(shape, seed)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    assert callable(attend)
    out = attend(*inputs, mask)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    torch.autograd.backward((out * weights).sum())
    return [one.grad for one in inputs if one.grad is not None]


@settings(max_examples=20)
@given(sizes, st.integers(0, 1000))
def test_both_ways_to_attend_have_the_gradients_of_the_formula(
    shape: tuple[int, int, int, int, int], seed: int
) -> None:
    expected = gradients(by_formula, shape, seed)
    for attend in (softmax_attention, sdpa_attention):
        for ours, theirs in zip(gradients(attend, shape, seed), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", [softmax_attention, sdpa_attention])
def test_what_is_masked_changes_no_bit(attend: object) -> None:
    assert callable(attend)
    for dtype in TOLERANCE:
        q, k, v, mask = heads((2, 2, 2, 7, 7), 1, dtype)
        mask[:, :, 3] = False
        mask[:, :, 0] = True
        before = attend(q, k, v, mask)
        k[:, :, 3], v[:, :, 3] = 1000.0, -1000.0
        assert torch.equal(attend(q, k, v, mask), before)


def test_keys_in_another_format_than_the_queries_are_converted() -> None:
    """A cache may be wider or narrower than what autocast computes in."""
    q, k, v, mask = heads((1, 2, 2, 5, 5), 2)
    for attend in (softmax_attention, sdpa_attention):
        assert torch.equal(attend(q.bfloat16(), k, v, mask), attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask))


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_a_token_may_look_back_within_its_segment_and_nowhere_else(rows: list[list[int]]) -> None:
    mask = causal_mask(torch.tensor(rows))
    for row, segments in enumerate(rows):
        for here in range(6):
            for there in range(6):
                allowed = there <= here and segments[there] == segments[here]
                assert bool(mask[row, here, there]) == allowed


def test_an_empty_cache_has_room_for_every_layer_and_looks_like_the_weights() -> None:
    config = SHAPES[0]
    cache = Cache.empty(config, 3, 17, torch.zeros(1, dtype=torch.bfloat16))
    assert cache.keys.shape == cache.values.shape == (2, 3, 2, 17, 8)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert (cache.capacity, cache.length) == (17, 0)
    assert cache.keys.data_ptr() != cache.values.data_ptr()
