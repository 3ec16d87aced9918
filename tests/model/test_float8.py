"""Matmuls of numbers in 8 bits: what they compute, where they are used, and what refuses them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.core.errors import ConfigError, HardwareError
from bloomery.hw.device import float8_formats
from bloomery.model import layers as float8
from bloomery.model.config import Float8, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train.precision import set_short_formats
from bloomery.train.step import Placed, placed_losses
from tests.train.made import on_cpu, processor

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
OCP, FNUZ = (torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SHAPE = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=1, intermediate_size=112, context_length=32)
VOCABULARY = 203


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the numbers that a matmul reads, in float64."""
    codes, scale = float8.to_float8(x, dtype)
    return codes.double() * scale.double()


def model(float8_kind: Float8 = "off", residual_dtype: str = "float32") -> Transformer:
    made = Transformer(SHAPE, VOCABULARY)
    made.initialize(3)
    set_short_formats(made, residual_dtype, float8_kind, CPU)
    return made.train()


def batch(tokens: int = 0) -> Placed:
    """Two rows, of which some tokens have a target; 0: all but 5, which is no multiple of 16."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 32))
    supervised = torch.arange(tokens or 59)
    return Placed(ids, torch.arange(32)[None].expand(2, -1), None, supervised, ids.flatten()[supervised] ^ 1)


def learned(made: Transformer, data: Placed, z_loss: float = 0.0) -> tuple[float, dict[str, Tensor]]:
    """The mean loss, and the gradients by name."""
    made.zero_grad(set_to_none=True)
    share = 1 / len(data.supervised)
    loss, _ = placed_losses(made, data, on_cpu(torch.bfloat16), z_loss, share)
    torch.autograd.backward(loss)
    return float(loss.detach()), {n: w.grad.clone() for n, w in made.named_parameters() if w.grad is not None}


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The smallest cosine between two gradients of a weight."""
    assert one.keys() == other.keys()
    return min(float(torch.cosine_similarity(one[n].flatten().double(), other[n].flatten().double(), 0)) for n in one)


@pytest.mark.parametrize("formats", [OCP, FNUZ])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_a_matmul_is_that_of_rounded_numbers_and_so_are_its_gradients(formats: float8.Formats, tokens: int) -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(tokens, 48), torch.randn(32, 48) / 7, 3e-4 * torch.randn(tokens, 32)
    one, other = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = float8.float8_linear(one, other, None, formats, torch.float32)
    torch.autograd.backward(y, g)
    x8, w8, g8 = rounded(x, formats[0]), rounded(w, formats[0]), rounded(g, formats[1])
    pairs = ((y, x8 @ w8.t()), (one.grad, g8 @ w8), (other.grad, g8.t() @ x8))
    for found, right in pairs:
        assert found is not None
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("formats", [OCP, FNUZ])
def test_rounding_is_relative_to_the_largest_number_and_keeps_it(formats: float8.Formats) -> None:
    x = torch.randn(40, 64) * torch.logspace(-3, 0, 64)
    for dtype, bits in zip(formats, (3, 2), strict=True):
        y = rounded(x * 1e9, dtype) / 1e9
        assert float((y - x).abs().max()) <= float(x.abs().max()) * 2.0 ** -(bits + 1)
        assert float(y.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)
    assert not rounded(torch.zeros(16, 16), formats[0]).any()


@pytest.mark.parametrize("tokens", [1, 37, 64])
def test_a_gpu_gets_the_layouts_and_multiples_that_it_wants(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's rules for tensors of a GPU, which a CPU has not: for tensors without numbers, they are checked here."""
    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda tensor: "cuda")
    for formats in (OCP, FNUZ):
        with FakeTensorMode(), torch.no_grad():
            x, w = float8.padded_rows(torch.empty(tokens, 48, dtype=torch.bfloat16)), torch.empty(32, 48)
            for upstream in (torch.empty(len(x), 32), torch.empty(32, len(x)).t(), torch.empty(()).expand(len(x), 32)):
                kept = Kept()
                y = float8._RoundedLinear.forward(kept, x, w, formats, torch.bfloat16)
                grads = float8._RoundedLinear.backward(kept, upstream.to(torch.bfloat16))
                assert (y.shape, grads[0].shape, grads[1].shape) == ((len(x), 32), x.shape, w.shape)
            head = float8.HeadInFloat8(torch.empty(203, 48), formats, 64)
            logits = head.logits(torch.empty(tokens, 48, dtype=torch.bfloat16))
            assert logits.shape == (tokens, 256)
            grad = float8.to_float8(float8.padded_rows(logits), formats[1])
            rows, matrix = head.gradients(grad, torch.bfloat16, learns=True)
            assert (len(rows) >= tokens, matrix is not None and matrix.shape) == (True, (256, 48))


class Kept:
    """What an operation keeps for its backward pass."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def test_sides_may_lie_in_memory_in_any_order() -> None:
    x, w = torch.randn(32, 48), torch.randn(64, 48)
    y = float8.float8_linear(x, w, None, OCP, torch.float32)
    other = float8.float8_linear(x.t().contiguous().t(), w.t().contiguous().t(), None, OCP, torch.float32)
    torch.testing.assert_close(other, y)
    assert float8.to_float8(x.t(), OCP[0])[0].is_contiguous()


@pytest.mark.parametrize("rows", [203, 5000])
def test_the_head_is_rounded_as_any_matrix_and_padded_with_zeros(rows: int) -> None:
    weight = torch.randn(rows, 32)
    head = float8.HeadInFloat8(weight, OCP, 64)
    codes, scale = float8.to_float8(weight, OCP[0])
    assert torch.equal(head.rows[0][:rows].float(), codes.float())
    assert torch.equal(head.rows[1], scale)
    assert len(head.rows[0]) % 64 == 0
    assert not head.rows[0][rows:].float().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_seen_in_the_result(bad: float) -> None:
    x, w = torch.randn(16, 32), torch.randn(16, 32).requires_grad_()
    x[3, 5] = bad
    y = float8.float8_linear(x, w, None, OCP, torch.bfloat16)
    assert not y.isfinite().all()
    with torch.no_grad():
        w[0, 0] = bad
    assert not float8.float8_linear(torch.randn(16, 32), w, None, OCP, torch.bfloat16).isfinite().all()


@pytest.mark.parametrize(("kind", "least"), [("head", 0.998), ("all", 0.98)])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_a_model_learns_in_about_the_same_direction(kind: Float8, least: float, z_loss: float) -> None:
    loss, grads = learned(model(), batch(), z_loss)
    found, others = learned(model(kind), batch(), z_loss)
    assert found == pytest.approx(loss, rel=2e-3)
    assert found != loss, "something was multiplied in 8 bits"
    assert least < alike(grads, others) < 1.0 - 1e-7


def test_the_residual_stream_in_bfloat16_learns_in_about_the_same_direction() -> None:
    loss, grads = learned(model(), batch())
    found, others = learned(model(residual_dtype="bfloat16"), batch())
    assert found == pytest.approx(loss, rel=1e-3)
    assert 0.999 < alike(grads, others) < 1.0 - 1e-7


def test_the_stream_between_blocks_has_the_format_that_was_asked_for() -> None:
    for dtype in ("float32", "bfloat16"):
        made, seen = model(residual_dtype=dtype), list[torch.dtype]()
        for block in made.blocks:
            block.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0].dtype, output.dtype)))  # noqa: B023
        learned(made, batch())
        assert set(seen) == {getattr(torch, dtype)}


def test_evaluation_is_in_the_formats_of_a_model_without_these_settings() -> None:
    """A validation loss is that of the model as it will be used, bit for bit."""
    loss, grads = learned(model().eval(), batch())
    found, others = learned(model("all", "bfloat16").eval(), batch())
    assert found == loss
    assert all(torch.equal(grads[name], others[name]) for name in grads)


def test_chunks_of_the_head_need_no_multiple_of_16_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tokens of a chunk share a scale, so that other chunks round a little differently."""
    whole, grads = learned(model("head"), batch())
    monkeypatch.setattr("bloomery.train.loss.CHUNK_BYTES", 4 * VOCABULARY * 21)
    found, others = learned(model("head"), batch())
    assert found == pytest.approx(whole, rel=1e-3)
    assert alike(grads, others) > 0.999


def test_a_frozen_head_gets_no_gradient() -> None:
    made = Transformer(SHAPE.model_copy(update={"tie_embeddings": False}), VOCABULARY)
    made.initialize(0)
    made.head.weight.requires_grad_(False)
    set_short_formats(made, "float32", "all", CPU)
    _, grads = learned(made.train(), batch())
    assert "head.weight" not in grads
    assert all(grad.isfinite().all() for grad in grads.values())


def test_a_compiled_block_is_one_graph() -> None:
    """In a process without the checks of types, which no graph holds."""
    command = [sys.executable, "-c", "from tests.model import test_float8; test_float8.main()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["graphs"] <= 2
    assert found["breaks"] == {}
    assert found["alike"] > 0.99


def main() -> None:
    _, grads = learned(model("all", "bfloat16"), batch())
    made = model("all", "bfloat16")
    for block in made.blocks:
        block.compile(backend="aot_eager")
    _, others = learned(made, batch())
    facts = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
    print(json.dumps(facts | {"alike": alike(grads, others)}))


def test_a_matrix_with_other_sides_is_named() -> None:
    odd = Transformer(SHAPE.model_copy(update={"intermediate_size": 24}), VOCABULARY)
    with pytest.raises(ConfigError, match=r'mlp\.gate has 24 x 64\nSet float8="head" or "off"'):
        float8.multiply_in_float8(odd, "all", CPU)
    assert odd.head_float8 is None, "nothing is half set"
    float8.multiply_in_float8(odd, "head", CPU)


def test_a_cpu_is_refused_and_so_is_a_gpu_that_cannot_or_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        HardwareError, match=r'needs a GPU that multiplies numbers of 8 bits, not test\nSet float8="off"'
    ):
        float8.check_device(processor())
    gpu = replace(processor(torch.bfloat16), name="a card")
    monkeypatch.setattr(type(gpu), "is_gpu", property(lambda self: True))
    float8.check_device(gpu)

    def cannot(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", cannot)
        with pytest.raises(
            HardwareError, match=r"a card does not multiply numbers of 8 bits: torch._scaled_mm is only"
        ):
            float8.check_device(gpu)
    right = torch._scaled_mm
    for wrong in (lambda *a, **o: 1.5 * right(*a, **o), lambda *a, **o: torch.nan * right(*a, **o)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_scaled_mm", wrong)
            with pytest.raises(HardwareError, match=r"a card multiplies numbers of 8 bits wrongly"):
                float8.check_device(gpu)


def test_the_formats_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_formats(CPU) == OCP
    monkeypatch.setattr("bloomery.hw.device.is_rocm", lambda: True)
    for chip, formats in (("gfx942:sramecc+:xnack-", FNUZ), ("gfx950:sramecc+:xnack-", OCP), ("gfx1201", OCP)):
        facts = type("Facts", (), {"gcnArchName": chip})
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, facts=facts: facts)
        assert float8_formats(torch.device("cuda", 0)) == formats
