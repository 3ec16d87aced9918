import fnmatch

import pytest

from bloomery.core.errors import DataError
from bloomery.model import lora, quantize
from bloomery.model.config import Base, Lora, ModelConfig, matrices
from bloomery.model.transformer import Transformer
from bloomery.train.compile import checkpoint_activations
from tests.model.made import SHAPES, VOCAB_SIZE, lively

import torch
from torch import Tensor, nn

BASES: tuple[Base, ...] = ("float32", "bfloat16", "int8", "nf4", "nf4_double")


def adapted(settings: Lora, shape: int = 0, woken: bool = True) -> Transformer:
    """A small model with adapters, whose B are no longer 0 if it is woken."""
    model = lively(SHAPES[shape], 0, VOCAB_SIZE)
    lora.attach(model, settings, seed=3)
    if woken:
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, weight in lora.weights(model).items():
                if name.endswith("lora_b"):
                    weight.normal_(0, 0.05, generator=generator)
    return model


def ids(rows: int = 3) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (rows, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrices_that_adapters_may_go_to_are_known_without_a_model(shape: ModelConfig) -> None:
    made = lively(shape, 0, VOCAB_SIZE).blocks.named_modules(prefix="blocks")
    assert list(matrices(shape)) == [name for name, one in made if isinstance(one, nn.Linear)]


def test_adapters_change_nothing_at_first() -> None:
    plain = lively(SHAPES[0], 0, VOCAB_SIZE)
    assert torch.equal(adapted(Lora(), woken=False)(ids()), plain(ids()))


def test_only_adapters_are_trained_and_each_of_them_is_reached() -> None:
    model = adapted(Lora(rank=2))
    model(ids()).square().sum().backward()
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (name in lora.weights(model)), name
        assert (weight.grad is not None) == weight.requires_grad, name
        assert weight.grad is None or bool(weight.grad.any()), name
    assert len(lora.weights(model)) == 2 * 7 * 2


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (("attention.q", "attention.v"), ["blocks.*.attention.q", "blocks.*.attention.v"]),
        (("blocks.1.mlp.*",), ["blocks.1.mlp.*"]),
        (("*.out", "mlp.down"), ["blocks.*.attention.out", "blocks.*.mlp.down"]),
        (("*",), ["*"]),
        (("all-linear",), ["*"]),
        (("W_pack", "fc2"), ["*.attention.[qkv]", "*.mlp.down"]),
        (("q_proj", "gate_up_proj"), ["*.attention.q", "*.mlp.gate", "*.mlp.up"]),
        (("re:.*\\.1\\.attention\\.[qk]",), ["blocks.1.attention.[qk]"]),
    ],
)
def test_targets_are_paths_in_every_block_or_in_one(patterns: tuple[str, ...], chosen: list[str]) -> None:
    model = adapted(Lora(target_modules=patterns))
    linears = [name for name, _ in lively(SHAPES[0], 0, VOCAB_SIZE).named_modules() if name.count(".") == 3]
    found = sorted({name.rpartition(".")[0] for name in lora.weights(model)})
    assert found == sorted(name for name in linears if any(fnmatch.fnmatch(name, one) for one in chosen))


def test_a_target_that_names_nothing_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(DataError) as caught:
        adapted(Lora(target_modules=("attention.q", "W_packed")))
    assert caught.value.what == "the target 'W_packed' matches no matrix of this model"
    assert "attention.q, attention.k, attention.v, attention.out, mlp.gate" in caught.value.hint


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert Lora(rank=16, alpha=32).scale == 2.0
    assert Lora(rank=16, alpha=32, rank_stabilized=True).scale == 8.0


@pytest.mark.parametrize("base", BASES)
def test_gradients_on_a_quantised_base_are_those_on_its_dense_numbers(base: Base) -> None:
    """Bit for bit: the same model, with matrices that were given back as float32."""
    settings = Lora(rank=2, base_dtype=base)
    quantised = adapted(settings)
    plain = lively(SHAPES[0], 0, VOCAB_SIZE)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if name.startswith("blocks.") and isinstance(module, nn.Linear):
                module.weight.copy_(quantize.frozen(module, base).dense(torch.float32))
    lora.attach(plain, Lora(rank=2), seed=3)
    own = lora.weights(plain)
    with torch.no_grad():
        for name, weight in lora.weights(quantised).items():
            own[name].copy_(weight)
    for model in (quantised, plain):
        model(ids()).square().sum().backward()
    for name, weight in lora.weights(quantised).items():
        assert torch.equal(_grad(weight), _grad(own[name])), name


def test_a_quantised_model_takes_the_bytes_that_its_format_says() -> None:
    plain = lively(SHAPES[0], 0, VOCAB_SIZE)
    matrices = sum(one.weight.numel() for name, one in plain.named_modules() if _in_block(name, one))
    widths = sum(len(one.weight) for name, one in plain.named_modules() if _in_block(name, one))
    rest = quantize.kept_bytes(plain) - 4 * matrices
    for base, size in (("bfloat16", 2 * matrices), ("int8", matrices + 4 * widths)):
        model = adapted(Lora(base_dtype=base))
        adapters = 4 * sum(weight.numel() for weight in lora.weights(model).values())
        assert quantize.kept_bytes(model) == rest + size + adapters


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_leaves_out_its_share_scales_up_the_rest_and_rests_when_not_training() -> None:
    layer = lora.LoRALinear(quantize.frozen(nn.Linear(400, 8, bias=False), "float32"), Lora(dropout=0.3))
    x = torch.randn(500, 400, generator=torch.Generator().manual_seed(0))
    dropped = layer._dropped(x)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], x[kept] / 0.7)
    rows = (dropped == 0).float().mean(0)
    assert 0.2 < float(rows.min()) < float(rows.max()) < 0.4
    model = adapted(Lora(dropout=0.5))
    model.eval()
    assert torch.equal(model(ids()), adapted(Lora()).eval()(ids()))
    model.train()
    assert not torch.equal(model(ids()), adapted(Lora())(ids()))


def test_the_coins_of_dropout_are_the_same_again_until_the_adapter_changes() -> None:
    """So recomputing in the backward pass, and going on after a kill, drop what was dropped."""
    model = adapted(Lora(dropout=0.5))
    model.train()
    first = model(ids())
    assert torch.equal(first, model(ids()))
    first.square().sum().backward()
    grads = {name: _grad(weight).clone() for name, weight in lora.weights(model).items()}
    model.zero_grad()
    checkpoint_activations(model, "full")
    model(ids()).square().sum().backward()
    for name, weight in lora.weights(model).items():
        assert torch.equal(_grad(weight), grads[name]), name
    with torch.no_grad():
        for weight in lora.weights(model).values():
            weight.mul_(1.001)
    layer = model.get_submodule("blocks.0.attention.q")
    assert isinstance(layer, lora.LoRALinear)
    x = torch.randn(9, layer.base.width)
    before = layer._dropped(x) == 0
    with torch.no_grad():
        layer.lora_b.mul_(1.001)
    assert not torch.equal(before, layer._dropped(x) == 0)


def _grad(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _in_block(name: str, module: nn.Module) -> bool:
    return name.startswith("blocks.") and isinstance(module, nn.Linear)


@pytest.mark.parametrize("base", BASES)
def test_dora_changes_nothing_at_first_and_then_has_rows_of_the_lengths_that_it_learned(base: Base) -> None:
    settings = Lora(rank=2, dora=True, base_dtype=base)
    frozen = adapted(Lora(rank=2, base_dtype=base), woken=False)(ids())
    assert torch.allclose(adapted(settings, woken=False)(ids()), frozen, atol=1e-5)
    model = adapted(settings)
    layer = model.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, lora.LoRALinear)
    assert layer.magnitude is not None
    with torch.no_grad():
        layer.magnitude.mul_(2.0)
        x = torch.randn(5, layer.base.width, generator=torch.Generator().manual_seed(1))
        whole = layer.base.dense(torch.float32) + layer.scale * layer.lora_b @ layer.lora_a
        rows = whole / whole.norm(dim=1, keepdim=True) * layer.magnitude[:, None]
        assert torch.allclose(layer(x), x @ rows.t(), atol=1e-5)
    model(ids()).square().sum().backward()
    assert all(bool(weight.grad.any()) for weight in lora.weights(model).values() if weight.grad is not None)
    assert len(lora.weights(model)) == 2 * 7 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_dropped_on_gpus_is_what_is_dropped_on_a_processor(dtype: torch.dtype) -> None:
    """In half the bits, and in-place in memory of its own."""
    x, salt = torch.randn(3, 700, 40).to(dtype), torch.randn(40, 8)
    before = x.clone()
    long, short = lora._coins(x, salt), lora._short_coins(x, salt)
    assert short.dtype == torch.int32
    assert torch.equal(long, short.long() + 2**31)
    assert torch.equal(x, before)
    assert abs(float((long < 0.3 * 2**32).double().mean()) - 0.3) < 0.01
