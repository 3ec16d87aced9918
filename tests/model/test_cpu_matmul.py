"""Products by tiles and by pairs equal PyTorch's in float32 of the same rounded numbers, of any shapes and strides."""

from collections.abc import Callable, Iterator

import pytest

from bloomery.core import native
from bloomery.model.kernels import cpu
from bloomery.model.layers import Linear

import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.fixture(autouse=True, params=[cpu.PAIRS, cpu.TILES], ids=["pairs", "tiles"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if cpu.units() < request.param:
        pytest.skip(f"not on this processor, or there is no library: {native.state(cpu.MATMUL_LIBRARY)}")
    monkeypatch.setattr(cpu, "units", lambda: request.param if native.library(cpu.MATMUL_LIBRARY) else cpu.NONE)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-6 if found.dtype == torch.float32 else 2**-8
    assert found.shape == expected.shape
    assert float((found.float() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


SHAPES = [(1, 1, 1), (33, 45, 7), (64, 70, 4097), (31, 1000, 64), (256, 96, 160), (40, 700, 1537)]


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("wide", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_equals_that_of_the_rounded_numbers(
    shape: tuple[int, int, int], wide: tuple[torch.dtype, torch.dtype], transposed: tuple[bool, bool]
) -> None:
    M, N, K = shape
    left = torch.randn((K, M) if transposed[0] else (M, K)).to(wide[0])
    right = torch.randn((N, K) if transposed[1] else (K, N)).to(wide[1])
    left, right = (one.t() if turned else one for one, turned in zip((left, right), transposed, strict=True))
    expected, bias = left.bfloat16().float() @ right.bfloat16().float(), torch.randn(N)
    near(cpu.product(left, right, torch.empty(M, N)), expected)
    near(cpu.product(left, right, torch.ones(M, N), add=True), expected + 1)
    near(cpu.product(left, right, torch.empty(M, N, dtype=torch.bfloat16), bias), expected + bias)


def test_nothing_beside_the_result_is_written() -> None:
    whole = torch.zeros(100, 90)
    cpu.product(torch.randn(40, 50).bfloat16(), torch.randn(50, 37), whole[10:50, 5:42])
    assert int(whole.count_nonzero()) == int(whole[10:50, 5:42].count_nonzero()) == 40 * 37


def test_rows_begin_on_lines_of_the_cache_and_hold_what_was_asked_for() -> None:
    into = cpu.aligned_rows(70, 501)
    assert into.shape == (70, 501)
    assert all(into[row].data_ptr() % 64 == 0 for row in (0, 1, 69))
    left, right = torch.randn(70, 64).bfloat16(), torch.randn(64, 501)
    near(cpu.product(left, right, into), left.float() @ right.bfloat16().float())
    near(cpu.product(into.t(), left, torch.ones(501, 64), add=True), into.t().float() @ left.float() + 1)


@pytest.mark.parametrize("rows", [64, 65, 300, 700])
@pytest.mark.parametrize("columns", [64, 300])
def test_it_does_not_matter_which_side_is_kept(rows: int, columns: int) -> None:
    """More rows than columns, or fewer."""
    x, weight, bias = torch.randn(rows, 1100).bfloat16(), torch.randn(columns, 1100), torch.randn(columns)
    expected = x.float() @ weight.bfloat16().float().t()
    found = cpu.product(x, weight.t(), torch.empty(rows, columns, dtype=torch.bfloat16), bias)
    near(found, expected + bias)
    alone = cpu.product(x[:64], weight.t(), torch.empty(64, columns, dtype=torch.bfloat16), bias)
    assert torch.equal(found[:64], alone)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_no_bit_depends_on_threads_nor_on_the_rows_beside(threads: int) -> None:
    left, right = torch.randn(300, 5000).bfloat16(), torch.randn(5000, 170)
    torch.set_num_threads(1)
    one = cpu.product(left, right, torch.empty(300, 170))
    torch.set_num_threads(threads)
    assert torch.equal(cpu.product(left, right, torch.empty(300, 170)), one)
    assert torch.equal(cpu.product(left[50:131], right, torch.empty(81, 170)), one[50:131])


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_has_the_gradients_of_a_linear_one_and_does_not_round_those_of_weights(biased: bool) -> None:
    layer = Linear(96, 80, bias=biased)
    x = torch.randn(3, 70, 96).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    slope = torch.randn(y.shape).bfloat16()
    found = torch.autograd.grad(y, [x, *layer.parameters()], slope)
    exact = [one.detach().bfloat16().float().requires_grad_() for one in (x, layer.weight)]
    bias = layer.bias.detach().requires_grad_() if biased else None
    expected = F.linear(exact[0], exact[1], bias)
    near(y.detach(), expected.detach())
    theirs = torch.autograd.grad(expected, exact + ([] if bias is None else [bias]), slope.float())
    assert [one.dtype for one in found] == [torch.bfloat16, *[torch.float32] * (len(found) - 1)]
    for mine, yours in zip(found, theirs, strict=True):
        near(mine, yours)


Change = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Change] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack((x, x), 2).flatten(1)[:, ::2],
    "one row for all": lambda x: x[:1].expand(x.shape),
    "one column for all": lambda x: x[:, :1].expand(x.shape),
    "one number for all": lambda x: x[:1, :1].expand(x.shape),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_how_what_comes_in_lies_in_memory_does_not_matter(change: Change) -> None:
    x, slope = (change(torch.randn(70, size).bfloat16()) for size in (96, 80))
    layer = Linear(96, 80)
    layer.bias = torch.nn.Parameter(torch.randn(160)[::2])

    def values(*given: Tensor) -> list[Tensor]:
        rows = given[0].detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(rows)
        return [y.detach(), *torch.autograd.grad(y, [rows, *layer.parameters()], given[1])]

    for found, expected in zip(values(x, slope), values(x.contiguous(), slope.contiguous()), strict=True):
        assert torch.equal(found, expected)


def test_what_is_not_finite_stays_so_in_its_row() -> None:
    x, weight = torch.zeros(64, 64).bfloat16(), torch.ones(40, 64)
    x[5, 3], x[6, 4] = float("nan"), float("inf")
    finite = cpu.linear(x, weight, None).isfinite().all(1)
    assert finite.nonzero().flatten().tolist() == [row for row in range(64) if row not in (5, 6)]


def test_it_is_ready_for_many_rows_in_bfloat16_by_float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(64, 8).bfloat16(), torch.zeros(8, 8)
    assert cpu.matmul_ready(x, weight)
    assert not cpu.matmul_ready(x[:63], weight)
    assert not cpu.matmul_ready(x.float(), weight)
    assert not cpu.matmul_ready(x, weight.bfloat16())
    monkeypatch.setenv(native.SWITCH, "0")
    assert not cpu.matmul_ready(x, weight)
