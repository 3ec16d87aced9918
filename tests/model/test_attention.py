import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.hw import device as devices
from bloomery.model import attention
from bloomery.model.attention import (
    CHUNK_QUERIES,
    AttentionMask,
    Cache,
    DifferentialAttention,
    flexible_attention,
    fused_attention,
    processor_attention,
    sdpa_attention,
    segment_attention,
    segment_bounds,
    softmax_attention,
)
from bloomery.model.kernels import cpu
from bloomery.model.layers import alibi_slopes
from tests.model.made import CHOICES, SHAPES, lively

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

WAYS = (softmax_attention, sdpa_attention, fused_attention, processor_attention)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")
Heads = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(seed: int, size: tuple[int, int, int, int, int], wide: int = 6) -> tuple[Heads, AttentionMask]:
    """Queries, keys and values, and who sees whom: any of segments, window, slopes and a mask, or none."""
    B, K, group, T, before = size
    generator = torch.Generator().manual_seed(seed)
    S = T + before
    q, k, v = (
        drawn(B, K * group, T, 6, seed=seed),
        drawn(B, K, S, 6, seed=seed + 1),
        drawn(B, K, S, wide, seed=seed + 2),
    )
    use = torch.rand(4, generator=generator) < 0.5
    allowed = torch.rand(B, T, S, generator=generator) < 0.7
    allowed |= torch.arange(S) == torch.arange(before, S)[:, None]  # everybody sees itself
    mask = AttentionMask(
        num_queries=T,
        num_keys=S,
        device=CPU,
        window=int(torch.randint(1, S + 2, (), generator=generator)) if use[0] else None,
        segments=torch.randint(0, 2, (B, S), generator=generator).cumsum(dim=1) // 2 if use[1] else None,
        slopes=torch.tensor(alibi_slopes(K * group)) if use[2] else None,
        allowed=allowed if use[3] else None,
    )
    return (q, k, v), mask


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """In float64, one query after the other."""
    B, H, T, E = q.shape
    out = torch.zeros(B, H, T, v.shape[3], dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            here = t + mask.offset
            seen = [s for s in range(here + 1) if _sees(mask, b, t, here, s)]
            for h in range(H):
                keys, values = (one[b, h * k.shape[1] // H, seen].double() for one in (k, v))
                scores = keys @ q[b, h, t].double() / math.sqrt(E)
                if mask.slopes is not None:
                    scores = scores - mask.slopes[h].double() * (here - torch.tensor(seen))
                out[b, h, t] = scores.softmax(0) @ values
    return out


def _sees(mask: AttentionMask, b: int, t: int, here: int, s: int) -> bool:
    near = mask.window is None or here - s < mask.window
    same = mask.segments is None or bool(mask.segments[b, s] == mask.segments[b, here])
    return near and same and (mask.allowed is None or bool(mask.allowed[b, t, s]))


sizes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5))
"""B, K, H / K, T, tokens before."""


@settings(max_examples=40)
@given(st.integers(0, 1000), sizes, st.sampled_from([3, 6, 12]), st.sampled_from(list(TOLERANCE)))
def test_every_way_to_attend_is_the_formula(
    seed: int, size: tuple[int, int, int, int, int], wide: int, dtype: torch.dtype
) -> None:
    inputs, mask = case(seed, size, wide)
    q, k, v = (one.to(dtype) for one in inputs)
    expected = by_formula(q, k, v, mask)
    for attend in WAYS:
        y = attend(q, k, v, mask)
        assert y.dtype == dtype
        assert (y.double() - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(v.abs().max())), attend


def gradients(attend: Way, inputs: Heads, mask: AttentionMask) -> list[Tensor]:
    q, k, v = leaves = [one.clone().requires_grad_() for one in inputs]
    out = attend(q, k, v, mask)
    torch.autograd.backward((out * drawn(*out.shape, seed=9).to(out.device)).sum())
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def agree(way: Way, inputs: Heads, mask: AttentionMask) -> None:
    for ours, theirs in zip(gradients(way, inputs, mask), gradients(by_formula, inputs, mask), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5), way


@settings(max_examples=20)
@given(st.integers(0, 1000), sizes)
def test_every_way_to_attend_has_the_gradients_of_the_formula(seed: int, size: tuple[int, int, int, int, int]) -> None:
    inputs, mask = case(seed, size)
    for attend in WAYS:
        agree(attend, inputs, mask)


@pytest.mark.parametrize("seed", range(8))
def test_chunks_of_queries_change_nothing(seed: int) -> None:
    """A row long enough to be cut, and its last chunk is not whole."""
    T = 2 * CHUNK_QUERIES + 37
    inputs, mask = case(seed, (1, 2, 2, T, 11 * (seed % 2)))
    mask = replace(mask, window=None if mask.window is None else 13 + 60 * seed)
    assert torch.allclose(processor_attention(*inputs, mask), softmax_attention(*inputs, mask), atol=2e-6)
    ways = [gradients(way, inputs, mask) for way in (processor_attention, softmax_attention)]
    for ours, theirs in zip(*ways, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("attend", WAYS)
def test_what_may_not_be_seen_changes_no_bit(attend: Way) -> None:
    for dtype in TOLERANCE:
        for seed in range(6):
            inputs, mask = case(seed, (2, 2, 2, 7, 0))
            visible = torch.ones(2, 7, 7, dtype=torch.bool)
            visible[:, 4:, 3] = False
            visible = visible if mask.allowed is None else visible & mask.allowed
            mask = replace(mask, allowed=visible, _made={})
            q, k, v = (one.to(dtype) for one in inputs)
            before = attend(q, k, v, mask)
            k[:, :, 3], v[:, :, 3] = 1000.0, -1000.0
            after = attend(q, k, v, mask)
            assert torch.equal(after[:, :, [0, 1, 2, 4, 5, 6]], before[:, :, [0, 1, 2, 4, 5, 6]])


def test_keys_in_another_format_than_the_queries_are_converted() -> None:
    """A cache may be wider or narrower than what autocast computes in."""
    (q, k, v), mask = case(2, (1, 2, 2, 5, 0))
    for attend in WAYS:
        y = attend(q.bfloat16(), k, v, mask)
        assert torch.equal(y, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_made_for_a_mask_is_the_formula(seed: int) -> None:
    """As a function, without its compilation; long enough for several blocks."""
    inputs, mask = case(seed, (2, 1, 2, 300, 0), 12)
    mask = replace(mask, allowed=None, _made={})
    assert torch.allclose(flexible_attention(*inputs, mask), softmax_attention(*inputs, mask), atol=2e-6)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("group", [3, 5, 6])
def test_the_kernel_made_for_a_mask_takes_groups_that_are_no_power_of_two(group: int) -> None:
    """Of several documents."""
    inputs, _ = case(3, (2, 2, group, 300, 0), 6)
    segments = (torch.arange(300) // 70).expand(2, 300)
    mask = AttentionMask(num_queries=300, num_keys=300, device=CPU, segments=segments)
    assert torch.allclose(flexible_attention(*inputs, mask), softmax_attention(*inputs, mask), atol=2e-6)


def packed(seed: int, tokens: int, before: int, window: int | None) -> AttentionMask:
    generator = torch.Generator().manual_seed(seed)
    share = (0.002, 0.02, 0.4)[seed % 3]
    segments = (torch.rand(2, tokens + before, generator=generator) < share).cumsum(1)
    return AttentionMask(
        num_queries=tokens,
        num_keys=tokens + before,
        device=CPU,
        window=window,
        segments=segments if seed % 4 else None,
    )


@pytest.mark.parametrize(("tokens", "before"), [(128, 0), (300, 0), (700, 200), (1024, 0)])
@pytest.mark.parametrize("window", [None, 13, 130, 400])
def test_blocks_from_the_bounds_of_documents_are_those_of_the_whole_mask(
    tokens: int, before: int, window: int | None
) -> None:
    """Block by block what torch finds from the T × S mask, forward and for gradients, in the same order."""
    for seed in range(6):
        mask = packed(seed, tokens, before, window)
        ours = attention._blocks(mask)
        rows = None if mask.segments is None else 2
        theirs = create_block_mask(ours.mask_mod, rows, None, tokens, tokens + before, device="cpu")
        for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
            for either in (name, f"full_{name}"):
                assert torch.equal(getattr(ours, either), getattr(theirs, either)), either


@pytest.mark.parametrize("seed", range(6))
def test_of_documents_in_any_order_no_block_is_left_out_and_none_is_taken_whole_that_is_not(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments = torch.randint(0, 3, (2, 12), generator=generator).repeat_interleave(64, 1)
    mask = AttentionMask(num_queries=768, num_keys=768, device=CPU, segments=segments)
    some, full = attention._seen_blocks(mask)
    seen = mask.mask().view(2, 6, 128, 6, 128)
    assert bool((some | ~seen.any(4).any(2)).all())
    assert bool((~full | seen.all(4).all(2)).all())


def test_the_blocks_of_a_long_row_are_made_without_a_mask_of_its_size() -> None:
    """131,072 tokens would be 16 GiB of booleans. What is made has a number for each pair of blocks."""
    largest = [0]
    mode: Any = TorchDispatchMode

    class Sizes(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for one in made if isinstance(made, tuple | list) else [made]:
                if isinstance(one, Tensor):
                    largest[0] = max(largest[0], one.numel() * one.element_size())
            return made

    T = 131_072
    mask = AttentionMask(num_queries=T, num_keys=T, device=CPU, segments=(torch.arange(T) // 3000)[None])
    with Sizes():
        blocks = attention._blocks(mask)
    assert largest[0] <= 8 * (T // 128) ** 2
    assert blocks.shape == (1, 1, T, T)


HALF, FULL = torch.bfloat16, torch.float32
FAKE = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
"""What fake tensors import warns of itself."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], Any]]:
    """What fused_attention calls for tensors of a GPU that is not there: name, shape of the keys, mask."""
    calls: list[tuple[str, tuple[int, ...], Any]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
        calls.append(("sdpa", tuple(k.shape), attn_mask))
        return q.new_empty(*q.shape[:3], v.shape[3])

    def flex(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, kernel: Any = None) -> Tensor:
        calls.append(("flex", tuple(k.shape), mask))
        return q.new_empty(*q.shape[:3], v.shape[3])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(attention, "flexible_attention", flex)
    monkeypatch.setattr(devices, "compiles_kernels", lambda device: True)
    monkeypatch.setattr(devices, "_WITHOUT", set())
    return calls


def on_gpu(
    heads: tuple[int, int], tokens: int, dtype: torch.dtype = HALF, *, packed: bool, width: int = 64, wide: int = 64
) -> None:
    with FakeTensorMode():
        place = torch.device("cuda", 0)
        q, k, v = (
            torch.empty(2, count, tokens, size, device=place, dtype=dtype)
            for count, size in ((heads[0], width), (heads[1], width), (heads[1], wide))
        )
        segments = torch.zeros(2, tokens, dtype=torch.int64, device=place) if packed else None
        bias = torch.empty(2, 1, tokens, tokens, device=place, dtype=dtype)
        mask = AttentionMask(
            num_queries=tokens, num_keys=tokens, device=place, segments=segments, _made={("bias", dtype): bias}
        )
        fused_attention(q, k, v, mask)


@FAKE
@pytest.mark.parametrize("heads", [(20, 4), (24, 4), (15, 5), (12, 12), (32, 8)])
def test_on_gpus_every_grouping_of_heads_has_attention_that_keeps_no_square(
    called: list[tuple[str, tuple[int, ...], Any]], heads: tuple[int, int]
) -> None:
    on_gpu(heads, 2048, packed=True)
    on_gpu(heads, 2048, packed=False)
    on_gpu(heads, 512, packed=True)
    on_gpu(heads, 2048, FULL, packed=False)
    long, plain, short, full = called
    assert long[0] == "flex"
    assert (plain[0], plain[1][1], plain[2]) == ("sdpa", heads[1], None)
    assert (short[0], short[1][1], short[2].dtype) == ("sdpa", heads[0], HALF)
    assert (full[0], full[1][1], full[2]) == ("sdpa", heads[0], None)


@FAKE
def test_on_gpus_long_rows_that_no_fused_kernel_takes_go_to_the_kernel_made_for_a_mask(
    called: list[tuple[str, tuple[int, ...], Any]],
) -> None:
    on_gpu((20, 4), 2048, packed=False, wide=128)  # as differential attention has them
    devices.leave_attention(("flash", "efficient", "cudnn"))
    on_gpu((20, 4), 2048, packed=False)
    on_gpu((20, 4), 512, packed=False)
    assert [name for name, *_ in called] == ["flex", "flex", "sdpa"]


@FAKE
def test_on_gpus_where_the_kernel_made_for_a_mask_failed_torchs_attention_takes_the_mask(
    called: list[tuple[str, tuple[int, ...], Any]],
) -> None:
    devices.leave_attention(("flex",))
    on_gpu((20, 4), 2048, packed=True)
    [(name, keys, mask)] = called
    assert (name, keys[1], mask.dtype, tuple(mask.shape)) == ("sdpa", 20, HALF, (2, 1, 2048, 2048))


@pytest.mark.parametrize("seed", range(8))
def test_repeated_key_heads_and_a_mask_as_a_bias_are_the_formula(seed: int) -> None:
    (q, k, v), mask = case(seed, (2, 2, 3, 9, 4))
    bias = attention._full_bias(mask, q.dtype)
    y = torch.nn.functional.scaled_dot_product_attention(q, *attention._ungrouped(q, k, v), attn_mask=bias)
    assert torch.allclose(y, softmax_attention(q, k, v, mask), atol=2e-6)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 300))
def test_bounds_are_where_the_segments_of_all_rows_begin(seed: int, num_rows: int, length: int) -> None:
    generator, B, T = np.random.default_rng(seed), num_rows, length
    often = generator.random() ** 3
    segments = np.cumsum(generator.random((B, T)) < often, axis=1) + generator.integers(0, 3)
    bounds, most = segment_bounds(segments), max(B, -(-B * T // attention.TOKENS_OF_A_BOUND))
    if (np.diff(segments, axis=1) > 0).sum() + B > most:
        assert bounds is None
        return
    assert bounds is not None
    assert bounds.dtype == np.int32
    assert (bounds[0], bounds[-1], len(bounds)) == (0, B * T, most + 1)
    flat, rows = segments.reshape(-1), np.repeat(np.arange(B), T)
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    assert sum(len(flat[part]) for part in parts) == B * T
    for part in parts:
        assert len({*zip(rows[part], flat[part], strict=True)}) == 1, "a part is of one segment of one row"
    assert len(parts) == len({*zip(rows, flat, strict=True)}), "and all of it"
    assert segment_bounds(segments[:, ::-1].copy()) is None or (segments == segments[:, :1]).all()


def several(num_rows: int, length: int, device: torch.device) -> AttentionMask:
    """Rows of up to four segments."""
    segments = np.sort(np.random.default_rng(5).integers(0, max(2, length // 75), (num_rows, length)), axis=1)
    bounds = segment_bounds(segments)
    assert bounds is not None
    there, ends = (torch.from_numpy(one).to(device) for one in (segments, bounds))
    return AttentionMask(num_queries=length, num_keys=length, device=device, segments=there, bounds=ends)


def looped(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, *_: Any) -> tuple[Tensor]:
    """What torch's flash attention computes, one segment after another."""
    assert starts is ends
    found = []
    for begin, end in itertools.pairwise(starts.tolist()):
        mask = AttentionMask(num_queries=end - begin, num_keys=end - begin, device=CPU)
        a, b, c = (one[begin:end].transpose(0, 1)[None] for one in (q, k, v))
        found.append(softmax_attention(a, b, c, mask)[0].transpose(0, 1))
    return (torch.cat(found),)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_segments_one_after_another_are_the_formula_with_its_gradients(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    B, T, E = 3, 150, 8
    H, K = heads
    inputs = drawn(B, H, T, E, seed=1), drawn(B, K, T, E, seed=2), drawn(B, K, T, E, seed=3)
    mask = several(B, T, CPU)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", looped)
    ways = [gradients(way, inputs, mask) for way in (segment_attention, softmax_attention)]
    for ours, theirs in zip(*ways, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_flash_attention_takes_plain_segments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    plain = AttentionMask(num_queries=8, num_keys=8, device=CPU, segments=torch.zeros(1, 8).long(), bounds=bounds)

    def takes(mask: AttentionMask, dtype: torch.dtype = half, widths: tuple[int, int] = (64, 64)) -> bool:
        return attention._takes_segments(replace(mask, _made={}), gpu, dtype, *widths)

    assert takes(plain)
    assert not takes(plain, torch.float32)
    assert not takes(plain, widths=(64, 128))
    assert not takes(plain, widths=(60, 60))
    for other in ({"window": 4}, {"slopes": torch.ones(2)}, {"allowed": torch.ones(1, 8, 8).bool()}, {"bounds": None}):
        assert not takes(replace(plain, **other))
    assert not attention._takes_segments(replace(plain, _made={}), CPU, half, 64, 64)
    monkeypatch.setattr(devices, "_WITHOUT", {"varlen"})
    assert not takes(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(12, 12), (20, 4)])
def test_on_a_gpu_flash_attention_over_segments_is_the_formula(heads: tuple[int, int]) -> None:
    place = devices.find().torch_device
    B, T, E = 2, 300, 64
    q, k, v = (
        drawn(B, count, T, E, seed=seed).to(place, torch.bfloat16)
        for seed, count in enumerate((heads[0], heads[1], heads[1]))
    )
    mask = several(B, T, place)
    exact = gradients(softmax_attention, (q.float(), k.float(), v.float()), mask)
    for ours, theirs in zip(gradients(segment_attention, (q, k, v), mask), exact, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [4, 5, 10])  # a mask that was given, documents, documents within a window with ALiBi
def test_on_a_gpu_what_is_used_is_the_formula_with_its_gradients(seed: int) -> None:
    place = devices.find().torch_device
    inputs, mask = case(seed, (2, 2, 2, 1100, 0), 64)
    q, k = (torch.cat((one, drawn(*one.shape[:3], 58, seed=seed)), dim=3) for one in inputs[:2])
    moved: dict[str, Any] = {
        name: None if (value := getattr(mask, name)) is None else value.to(place) for name in ("segments", "slopes")
    }
    mask = replace(mask, device=place, allowed=None, _made={}, **moved)
    there = (q.to(place), k.to(place), inputs[2].to(place))
    assert torch.allclose(fused_attention(*there, mask), softmax_attention(*there, mask), atol=1e-3)
    ways = [gradients(way, there, mask) for way in (fused_attention, softmax_attention)]
    for ours, theirs in zip(*ways, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3)


def test_a_long_row_of_conversations_has_no_mask_of_its_size_in_memory() -> None:
    """Plain matrix products too take the mask in parts, and give what the formula gives."""
    T, H, K, E = 600, 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, E, generator=generator) for heads in (H, K, K))
    segments = (torch.arange(T) // 70).expand(2, T)
    for slopes in (None, torch.tensor([0.5, 0.25, 0.125, 0.0625])):
        mask = AttentionMask(num_queries=T, num_keys=T, device=CPU, segments=segments, slopes=slopes)
        found = processor_attention(q, k, v, mask)
        made = [one for one in mask._made.values() if isinstance(one, Tensor)]
        assert all(one.numel() < T * T for one in made)
        assert torch.allclose(found, softmax_attention(q, k, v, mask), atol=1e-6)


def test_where_no_compiled_operations_run_nobody_looks_at_the_numbers_of_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at a number cuts a graph of torch.compile in two."""
    monkeypatch.setattr(cpu, "ready", lambda *tensors: False)
    monkeypatch.setattr(AttentionMask, "_first", lambda *others: pytest.fail("looked"))
    q, k, v = (torch.randn(1, heads, 4, 8, generator=torch.Generator().manual_seed(heads)) for heads in (2, 1, 1))
    mask = AttentionMask(num_queries=4, num_keys=4, device=q.device, segments=torch.tensor([[0, 0, 1, 1]]))
    torch.testing.assert_close(fused_attention(q, k, v, mask), softmax_attention(q, k, v, mask))


# --- attention --------------------------------------------------------------------------------------------------------


def test_an_empty_cache_has_room_for_every_layer_and_looks_like_the_weights() -> None:
    config = SHAPES[0]
    cache = Cache.empty(config, 3, 17, torch.zeros(1, dtype=torch.bfloat16))
    assert cache.keys.shape == cache.values.shape == (2, 3, 2, 17, 8)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert (cache.capacity, cache.length) == (17, 0)
    assert cache.keys.data_ptr() != cache.values.data_ptr()


@pytest.mark.parametrize("layer", [0, 2])
def test_differential_attention_is_its_formula(layer: int) -> None:
    """A query head reads the keys of its place in the pair, and the values of the pair side by side."""
    config = CHOICES["differential in turn, many groups"].model_copy(update={"qk_norm": False})
    part: Any = DifferentialAttention(config, layer)
    torch.nn.init.normal_(part.pair_norm.weight)
    for name in ("q1", "k1", "q2", "k2"):
        torch.nn.init.normal_(getattr(part, f"lambda_{name}"), std=0.3)
    T, E, group = 7, config.head_size, 4
    x = torch.randn(2, T, config.hidden_size)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    parts = [part.lambda_q1 @ part.lambda_k1, part.lambda_q2 @ part.lambda_k2]
    amount = torch.exp(parts[0]) - torch.exp(parts[1]) + start
    q, k, v = (getattr(part, name)(x).view(2, T, -1, E).transpose(1, 2) for name in "qkv")  # (B, 8, T, E), (B, 2, T, E)
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    values = torch.cat((v[:, 0], v[:, 1]), dim=2)  # one pair of key heads
    found = []
    for pair in range(group):
        maps = [
            (q[:, which * group + pair] @ k[:, which].transpose(1, 2) / math.sqrt(E)).masked_fill(ahead, -torch.inf)
            for which in (0, 1)
        ]
        y = (maps[0].softmax(2) - amount * maps[1].softmax(2)) @ values
        y = y / torch.sqrt((y * y).mean(2, keepdim=True) + config.norm_eps) * part.pair_norm.weight
        found.append(y * (1 - start))
    expected = torch.cat(found, dim=2) @ part.out.weight.T
    mask = AttentionMask(num_queries=T, num_keys=T, device=x.device)
    assert torch.allclose(part(x, None, mask), expected, atol=1e-5)


def test_pairs_of_differential_attention_share_a_slope_of_alibi() -> None:
    model = lively(CHOICES["differential in a window"])
    slopes = model._slopes("differential", torch.device("cpu")).view(1, 2, 2)
    assert slopes[0, 0].tolist() == slopes[0, 1].tolist() == [2.0**-4, 2.0**-8]
