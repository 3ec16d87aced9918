from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.model.kernels import cpu
from bloomery.train import loss
from bloomery.train.loss import chunk_tokens, token_losses

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
D, V = 12, 31


def inputs(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, V, (n,), generator=generator)


def token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    return token_losses(hidden, weight, targets, z_loss)[0]


C = 128
"""Tokens of a chunk, where `few` is in force."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * C)


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    scores = hidden.double() @ weight.double().T
    return F.cross_entropy(scores, targets, reduction="sum") + z_loss * scores.logsumexp(1).square().sum()


def values(loss_of: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> list[Tensor]:
    """The loss and the gradients of `scale` times it."""
    loss = loss_of(hidden, weight, targets)
    torch.autograd.backward(loss * scale)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Mean error against the largest value, or against 1: a small loss is the difference of scores that are not."""
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.shape == expected.shape
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        assert float((mine.double() - expected).abs().sum()) <= tolerance * max(largest, 1.0) * max(mine.numel(), 1)


@pytest.mark.parametrize("n", [0, 1, 2, 100, C - 1, C, C + 1, 2 * C + 77])
@pytest.mark.usefixtures("few")
def test_the_loss_in_chunks_is_cross_entropy_and_so_are_its_gradients(n: int) -> None:
    expected = values(reference, *inputs(n), scale=0.37)
    assert_close(values(token_loss, *inputs(n), scale=0.37), expected, 1e-6)


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 45), st.sampled_from([0.0, 1e-4, 0.03, 1.0]), st.integers(0, 99))
def test_in_chunks_of_any_size_the_loss_and_its_penalty_of_large_scores_have_the_gradients_of_autograd(
    n: int, chunk: int, z_loss: float, seed: int
) -> None:
    expected = values(partial(reference, z_loss=z_loss), *inputs(n, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_BYTES", 4 * V * chunk)
        assert_close(values(partial(token_loss, z_loss=z_loss), *inputs(n, seed)), expected, 1e-6)


def test_the_cross_entropy_can_be_told_from_the_penalty() -> None:
    objective, entropy = token_losses(*inputs(50), z_loss=0.01)
    assert not entropy.requires_grad
    assert float(entropy) == float(token_loss(*inputs(50)).detach())
    assert float(objective.detach()) == pytest.approx(float(reference(*inputs(50), z_loss=0.01).detach()))
    with torch.no_grad():
        assert float(token_losses(*inputs(50), z_loss=0.01)[0]) == pytest.approx(float(objective.detach()))


def test_the_loss_of_what_is_known_almost_surely_is_that_of_float64() -> None:
    """A score of 15 has six digits after the point: differences are summed up, for sums of scores have three."""
    targets = torch.randint(0, 517, (4096,), generator=torch.Generator().manual_seed(0))
    hidden = 15.0 * F.one_hot(targets, 517).float()
    exact = F.cross_entropy(hidden.double(), targets, reduction="sum")
    assert float(token_losses(hidden, torch.eye(517), targets)[1]) == pytest.approx(float(exact), rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16])
def test_few_tokens_have_as_exact_gradients_as_many_with_a_real_vocabulary(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, 24, generator=generator), 0.12 * torch.randn(50_257, 24, generator=generator)
    expected = (hidden.double() @ weight.double().T).softmax(1) @ weight.double() - weight[:n].double()
    torch.autograd.backward(token_loss(hidden.requires_grad_(), weight, torch.arange(n)))
    assert hidden.grad is not None
    assert float((hidden.grad - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


def test_a_second_backward_pass_is_refused_and_does_not_give_other_gradients() -> None:
    made = token_loss(*inputs(5))
    torch.autograd.backward(made, retain_graph=True)
    with pytest.raises(RuntimeError, match="were given to a backward pass before"):
        torch.autograd.backward(made)


def test_a_chunk_is_bounded_in_bytes_and_has_at_least_one_token() -> None:
    for vocab_size in (1, 257, 50_257, 256_000):
        assert 4 * vocab_size * chunk_tokens(vocab_size) <= loss.CHUNK_BYTES
    assert chunk_tokens(10**9) == 1


def test_the_loss_of_no_tokens_is_zero_and_so_are_its_gradients() -> None:
    found = values(token_loss, *inputs(0))
    assert float(found[0]) == 0.0
    assert torch.equal(found[2], torch.zeros(V, D))


def test_scores_beyond_the_range_of_exponentials_are_no_trouble() -> None:
    hidden, weight, targets = inputs(50)
    hidden, weight = ((one.detach() * 60).requires_grad_() for one in (hidden, weight))
    found = values(token_loss, hidden, weight, targets)
    assert all(bool(torch.isfinite(one).all()) for one in found)
    assert float(found[0]) == pytest.approx(float(reference(hidden, weight, targets).detach()), rel=1e-5)


def test_under_bfloat16_gradients_keep_the_formats_of_what_they_belong_to() -> None:
    hidden, weight, targets = inputs(300, dtype=torch.bfloat16)
    found = values(token_loss, hidden, weight, targets)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.float32]
    rounded = [one.detach().bfloat16().float().requires_grad_() for one in (hidden, weight)]
    expected = values(reference, rounded[0], rounded[1], targets)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=5e-3)
    for mine, yours in zip(found[1:], expected[1:], strict=True):
        assert float((mine.float() - yours).norm()) <= 0.01 * float(yours.norm())


class CountProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def test_the_loss_can_be_had_without_gradients() -> None:
    hidden, weight, targets = inputs(20)
    with torch.no_grad():
        with CountProducts() as products:  # type: ignore[no-untyped-call]
            found = token_loss(hidden, weight, targets)
        assert float(found) == pytest.approx(float(reference(hidden, weight, targets)))
    assert products.count == 1, "gradients cost two more matrix products"


@pytest.mark.usefixtures("few")
def test_the_scores_of_all_tokens_never_exist_at_once() -> None:
    """The largest tensor that is made has the size of a chunk's scores, or of a gradient."""
    sizes = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)
            return out

    n = 4 * C
    hidden, weight, targets = inputs(n)
    with Watch():  # type: ignore[no-untyped-call]
        token_loss(hidden, weight, targets)
    assert max(sizes) == max(C * V, n * D)
    assert max(sizes) < n * V


@pytest.fixture
def elsewhere(few: None) -> Iterator[None]:
    """As on a GPU, with chunks of 256 tokens."""
    token = cpu.ELSEWHERE.set(True)
    with loss.chunks_of(4 * V * 300):
        yield
    cpu.ELSEWHERE.reset(token)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 700])
@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.usefixtures("elsewhere")
def test_a_vocabulary_that_is_padded_for_a_gpu_changes_neither_the_loss_nor_its_gradients(
    n: int, z_loss: float
) -> None:
    tensors = inputs(n, dtype=torch.bfloat16)
    hidden, weight = (one.detach().double().requires_grad_() for one in tensors[:2])
    expected = values(partial(reference, z_loss=z_loss), hidden, weight, tensors[2])
    found = values(partial(token_loss, z_loss=z_loss), *tensors)
    assert_close(found, expected, 0.01)
    assert found[2].shape == (V, D)


@pytest.mark.usefixtures("elsewhere")
def test_no_matmul_of_the_head_has_an_odd_side_on_a_gpu() -> None:
    class Sides(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.sides = set[int]()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ == "mm":
                self.sides |= {args[0].shape[0], args[0].shape[1], args[1].shape[1]}
            return output

    hidden, weight, targets = inputs(512, dtype=torch.bfloat16)
    with Sides() as seen:
        torch.autograd.backward(token_loss(hidden, weight, targets))
    assert seen.sides == {D, 64, 256}


@pytest.mark.usefixtures("elsewhere")
def test_chunks_on_a_gpu_are_whole_tiles_and_gradients_of_a_short_head_are_summed_in_float32() -> None:
    assert chunk_tokens(V, processor=False) == 256
    assert chunk_tokens(V) == C
    hidden, weight, targets = inputs(2048, dtype=torch.bfloat16)
    short = weight.detach().bfloat16().requires_grad_()
    torch.autograd.backward(token_loss(hidden, short, targets))
    exact = values(
        reference, hidden.detach().double().requires_grad_(), short.detach().double().requires_grad_(), targets
    )
    assert short.grad is not None
    assert short.grad.dtype == torch.bfloat16
    assert float((short.grad.double() - exact[2]).abs().max()) < 0.01 * float(exact[2].abs().max())
