"""Compiled causal attention equals the formula, gradients too, in each of the two ways that it is computed."""

from typing import Any

import pytest

from bloomery.core import native
from bloomery.model.attention import AttentionMask, softmax_attention
from bloomery.model.kernels import cpu
from bloomery.model.kernels.cpu import causal_attention
from tests.model.test_cpu_kernels import DTYPES, compare, near
from tests.model.test_cpu_kernels import library as library

import torch
import torch.nn.functional as F
from torch import Tensor


def looking_back(segments: Tensor, window: int | None = None) -> AttentionMask:
    tokens = segments.shape[1]
    return AttentionMask(tokens, tokens, segments.device, window=window, segments=segments)


def assert_formula(segments: Tensor, given: list[Tensor], window: int | None = None) -> None:
    """Attention and its gradients are those of the formula."""
    compare(
        lambda q, k, v: causal_attention(q, k, v, cpu.first_seen(segments, window)),
        lambda q, k, v: softmax_attention(q, k, v, looking_back(segments, window)),
        given,
    )


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by pairs, also where the processor has something better for other products."""
    if cpu.units() == cpu.NONE:
        pytest.skip(f"not on this processor, or there is no library: {native.state(cpu.MATMUL_LIBRARY)}")
    monkeypatch.setattr(cpu, "units", lambda: cpu.PAIRS)


def heads(tokens: int, numbers: tuple[int, int], widths: tuple[int, int], split: bool = True) -> list[Tensor]:
    """Queries, keys and values of two rows; split, they lie in memory as a projection leaves them."""
    (H, K), (E, F) = numbers, widths
    made = [torch.randn(2, tokens, n, width).bfloat16() for n, width in ((H, E), (K, E), (K, F))]
    return [one.transpose(1, 2) if split else one.transpose(1, 2).contiguous() for one in made]


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_attention_sees_the_past_of_its_own_segment_only(
    dtype: torch.dtype, heads: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cpu.QUERIES_PER_BLOCK, dtype, 128)
    segments = torch.randint(0, 4, (2, tokens)).sort(1).values
    given = [torch.randn(2, tokens, n, 16).to(dtype).transpose(1, 2) for n in (heads[0], heads[1], heads[1])]
    assert_formula(segments, given)


def test_values_may_be_wider_than_keys() -> None:
    """As differential attention has them."""
    segments = torch.zeros(2, 20, dtype=torch.long)
    compare(
        lambda q, k, v: causal_attention(q, k, v, cpu.first_seen(segments)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [torch.randn(2, 4, 20, width) for width in (16, 16, 32)],
    )


def test_a_window_ends_what_a_query_sees() -> None:
    segments = torch.tensor([[0, 0, 0, 0, 0, 3, 3, 3]])
    assert cpu.first_seen(segments).tolist() == [[0, 0, 0, 0, 0, 5, 5, 5]]
    assert cpu.first_seen(segments, 2).tolist() == [[0, 0, 1, 2, 3, 5, 5, 6]]
    assert_formula(segments, [torch.randn(1, 2, 8, 16) for _ in range(3)], 2)


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16) * 40
    segments = torch.zeros(1, 40, dtype=torch.long)
    found = causal_attention(q, k, v, cpu.first_seen(segments))
    near(found, softmax_attention(q, k, v, looking_back(segments)), torch.float32)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("numbers", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 300])
def test_by_pairs_it_sees_the_past_of_its_own_segment_only(tokens: int, numbers: tuple[int, int], split: bool) -> None:
    segments = torch.randint(0, 4, (2, tokens)).sort(1).values
    given = heads(tokens, numbers, (32, 32), split)
    assert cpu.by_pairs(given[0], given[2])
    assert_formula(segments, given)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("window", [1, 7, 40, 150])
@pytest.mark.parametrize("widths", [(64, 64), (32, 96), (128, 32)])
def test_by_pairs_heads_have_widths_and_windows(widths: tuple[int, int], window: int) -> None:
    segments = torch.randint(0, 2, (2, 190)).sort(1).values
    assert_formula(segments, heads(190, (2, 1), widths), window)


@pytest.mark.usefixtures("pairs")
def test_other_heads_are_not_computed_by_pairs() -> None:
    q, _, v = heads(8, (2, 2), (32, 32))
    assert not cpu.by_pairs(q.float(), v.float())
    assert not cpu.by_pairs(q[..., :16], v)
    assert not cpu.by_pairs(q, v[..., :31])


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("threads", [2, 3])
def test_by_pairs_no_bit_depends_on_threads_nor_on_tokens_that_follow(threads: int) -> None:
    given, first = [one.requires_grad_() for one in heads(150, (4, 2), (64, 64))], torch.zeros(2, 150, dtype=torch.long)
    slope, results = torch.randn(2, 4, 150, 64).bfloat16(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        y = causal_attention(given[0], given[1], given[2], first)
        results.append([y, *torch.autograd.grad(y, given, slope)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    q, k, v = (one[:, :, :99] for one in given)
    fewer = causal_attention(q, k, v, first[:, :99])
    assert torch.equal(fewer, results[0][0][:, :, :99])


@pytest.mark.usefixtures("pairs")
def test_by_pairs_what_is_far_apart_does_not_overflow_and_what_is_not_finite_stays_so() -> None:
    first = torch.zeros(2, 40, dtype=torch.long)
    q, k, v = heads(40, (2, 2), (32, 32))
    found = causal_attention(q * 40, k * 40, v, first)
    near(found, softmax_attention((q * 40).float(), (k * 40).float(), v.float(), looking_back(first)), torch.bfloat16)
    for bad in (float("nan"), float("inf"), float("-inf")):
        for one in (q, k, v):
            spoiled = one.clone()
            spoiled[:, :, 3] = bad
            a, b, c = (spoiled if x is one else x for x in (q, k, v))
            y = causal_attention(a, b, c, first)
            assert not y[:, :, 3].isfinite().all()
            if one is not q:
                assert not y[:, :, 5:].isfinite().all()


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("mean", [0.0, 2.0, 8.0])
def test_by_pairs_a_mean_that_all_keys_and_values_share_cancels(mean: float) -> None:
    """Gradients are as near to those in float64 as three roundings to bfloat16; six with the largest mean."""
    q, k, v = heads(256, (4, 2), (64, 64))
    given = [one.requires_grad_() for one in (q, (k + mean).bfloat16(), (v + mean).bfloat16())]
    exact = [one.detach().double().requires_grad_() for one in given]
    first, slope = torch.zeros(2, 256, dtype=torch.long), torch.randn(q.shape).bfloat16()
    found = torch.autograd.grad(causal_attention(given[0], given[1], given[2], first), given, slope)
    plain = softmax_attention(exact[0], exact[1], exact[2], looking_back(first))
    for mine, theirs in zip(found, torch.autograd.grad(plain, exact, slope.double()), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 3 * 2**-8 * max(1.0, mean / 4)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("size", [1e3, 1e4, 1e5])
def test_by_pairs_scores_as_large_as_they_come_stay_finite(size: float) -> None:
    q, k, v = heads(100, (2, 2), (64, 64))
    given = [one.requires_grad_() for one in (q * size, k * size, v)]
    y = causal_attention(given[0], given[1], given[2], torch.zeros(2, 100, dtype=torch.long))
    dq, dk, dv = torch.autograd.grad(y, given, torch.ones_like(y))
    assert all(bool(one.isfinite().all()) for one in (y, dq, dk, dv))
    assert float(dv.abs().max()) <= 101  # a key's weights, each at most 1


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(("tokens", "widths"), [(1, (32, 32)), (65, (96, 32)), (257, (64, 128))])
def test_by_pairs_the_memory_of_threads_is_enough(
    tokens: int, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern behind it has to be there afterwards."""
    sizes, behind = cpu._sizes, []

    def guarded(*given: Any) -> tuple[Any, ...]:
        *rest, room, each = sizes(*given)
        longer = torch.full((len(room) + 4096,), 77, dtype=torch.uint8)
        behind.append(longer[len(room) :])
        return *rest, longer, each

    monkeypatch.setattr(cpu, "_sizes", guarded)
    q, k, v = (one.requires_grad_() for one in heads(tokens, (2, 1), widths))
    y = causal_attention(q, k, v, torch.zeros(2, tokens, dtype=torch.long))
    torch.autograd.grad(y.sum(), (q, k, v))
    assert len(behind) == 2
    assert all(bool((one == 77).all()) for one in behind)
