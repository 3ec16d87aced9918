"""The compiled operations equal lines of PyTorch, gradients too; without the library there is nothing to compare."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from bloomery.core import native
from bloomery.model.kernels import cpu
from bloomery.model.kernels.cpu import causal_attention

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Of the largest number: float32 sums in another order, bfloat16 is rounded once instead of at every step."""


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    if native.library(cpu.LIBRARY) is None:
        pytest.skip(f"the library of training is not there: {native.state(cpu.LIBRARY)}")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    error = (found.detach().float() - expected.detach().float()).abs().max()
    assert error <= TOLERANCE[dtype] * expected.detach().abs().max().clamp(min=1e-3)


def compare(ours: Callable[..., Tensor], plain: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    """Results and gradients, against the same computed in float32."""
    dtype = given[0].dtype
    exact = [one.detach().float().requires_grad_() for one in given]
    given = [one.detach().requires_grad_() for one in given]
    found, expected = ours(*given), plain(*exact)
    near(found, expected, dtype)
    grad = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(expected, exact, grad.float()), strict=True
    ):
        near(mine, theirs, dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 31, 700])
def test_activations_equal_their_formulas(dtype: torch.dtype, size: int) -> None:
    given = [(torch.randn(3, size) * 6).to(dtype) for _ in range(2)]
    compare(cpu.swiglu, lambda gate, up: F.silu(gate) * up, given)
    compare(cpu.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), given[:1])


def test_activations_of_very_large_numbers_are_finite() -> None:
    x = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e10])
    assert cpu.gelu_tanh(x[1:]).tolist() == pytest.approx([0.0, 0.0, 200.0, 1e10], abs=1e-6)
    assert cpu.swiglu(x[1:], torch.ones(4)).tolist() == pytest.approx([0.0, 0.0, 200.0, 1e10], abs=1e-6)


@DTYPES
def test_a_norm_equals_that_of_torch_and_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5, 140)[..., ::2] * 3, (torch.rand(140) + 0.5)[::2]
    given = [x.requires_grad_(), weight.requires_grad_()]
    found, expected = cpu.rms_norm(x, weight, 1e-5, dtype), F.rms_norm(x, (70,), weight, 1e-5)
    assert found.dtype == dtype
    near(found, expected, dtype)
    grad = torch.randn(x.shape).to(dtype)
    mine, theirs = (torch.autograd.grad(y, given, grad.to(y.dtype)) for y in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        near(a, b, torch.float32)


@DTYPES
@pytest.mark.parametrize("learned", [2, 1, 0])
def test_a_norm_with_a_mean_equals_that_of_torch(learned: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, 70) * 3 + 1).requires_grad_()
    some = [(torch.rand(70) + 0.5).requires_grad_() for _ in range(learned)]
    weight, bias = [*some, None, None][:2]
    found = cpu.layer_norm(x, weight, bias, 1e-5, dtype)
    expected = F.layer_norm(x, (70,), weight, bias, 1e-5)
    near(found, expected, dtype)
    grad = torch.randn(x.shape).to(dtype)
    mine, theirs = (torch.autograd.grad(y, [x, *some], grad.to(y.dtype)) for y in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        near(a, b, torch.float32)


@DTYPES
def test_turning_by_position_equals_the_formula(dtype: torch.dtype) -> None:
    angle = torch.rand(2, 1, 9, 8) * 100
    cosine, sine = (torch.cat((one, one), -1) for one in (angle.cos(), angle.sin()))
    x = torch.randn(2, 9, 3, 16).to(dtype).transpose(1, 2)
    for c, s in ((cosine, sine), (cosine[:1], sine[:1])):
        compare(lambda x, c=c, s=s: cpu.rotate(x, c, s), lambda x, c=c, s=s: rotate(x, c, s), [x])


@DTYPES
@pytest.mark.parametrize("apart", [501, 512])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_cross_entropy_and_its_slopes_equal_those_of_torch(dtype: torch.dtype, z_loss: float, apart: int) -> None:
    whole, targets = (torch.randn(7, apart) * 5).to(dtype), torch.randint(0, 501, (7,))
    scores, beside = whole[:, :501], whole[:, 501:].clone()
    exact = scores.float().requires_grad_()
    z = exact.logsumexp(1)
    loss = F.cross_entropy(exact, targets, reduction="sum") + z_loss * z.square().sum()
    (grads,) = torch.autograd.grad(loss, exact)
    untouched = scores.clone()
    near(cpu.cross_entropy_(scores, targets, z_loss=z_loss, with_grads=False), z, torch.float32)
    assert torch.equal(scores, untouched)
    near(cpu.cross_entropy_(scores, targets, z_loss=z_loss, share=0.75), z, torch.float32)
    near(scores, 0.75 * grads, dtype)
    assert torch.equal(whole[:, 501:], beside)


def test_what_is_not_finite_stays_so() -> None:
    """The guard of the loop has to see it."""
    for bad in (float("nan"), float("inf")):
        scores = torch.zeros(2, 64)
        scores[1, 5] = bad
        losses = cpu.cross_entropy_(scores, torch.tensor([0, 1]))
        assert losses.isfinite().tolist() == [True, False]
        x = torch.ones(1, 1, 40, 16)
        x[0, 0, 3] = bad
        first = torch.zeros(1, 40, dtype=torch.long)
        assert not causal_attention(x, x, x, first)[0, 0, 5:].isfinite().any()
        assert not cpu.swiglu(x, x).isfinite().all()
        assert not cpu.gelu_tanh(x).isfinite().all()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (300, 5), (130, 257)])
def test_sums_of_columns_are_those_in_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    whole = torch.randn(shape[0], 2 * shape[1]).to(dtype)
    for x in (whole[:, : shape[1]], whole):
        near(cpu.column_sums(x), x.double().sum(0).float(), torch.float32)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_threads(threads: int) -> None:
    q, k, v = (torch.randn(2, 4, 50, 16, requires_grad=True) for _ in range(3))
    first = torch.zeros(2, 50, dtype=torch.long)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        y = cpu.swiglu(causal_attention(q, k, v, first), q)
        results.append([y, *torch.autograd.grad(y.sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_it_is_ready_for_tensors_of_one_known_format(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3)
    assert cpu.ready(x, x)
    assert cpu.ready(x.bfloat16())
    assert not cpu.ready(x.half())
    assert not cpu.ready(x, x.bfloat16())
    monkeypatch.setenv(native.SWITCH, "0")
    assert not cpu.ready(x)
