import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core import native
from bloomery.core.errors import CheckpointError
from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.train import collectives, fsdp, launch, optim
from bloomery.train.collectives import LIBRARY, total_norm
from bloomery.train.config import AdamW, AdamW8bit, AdEMAMix, Lion, Mesh, Muon, Optimizer
from bloomery.train.optim import (
    BATCH_NUMBERS,
    REMEMBERED,
    AdamW8bitOptimizer,
    AdEMAMixOptimizer,
    BatchedMuon,
    LionOptimizer,
    Optimizers,
    code_table,
    decode,
    encode,
    orthogonalize,
    slow_mean,
)
from bloomery.train.step import accumulate_gradients
from bloomery.weights import checkpoint
from bloomery.weights.safetensors import save_tensors
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import on_cpu, random_batch

import safetensors.torch
import torch
from torch import Tensor, nn

EVERY: list[Optimizer] = [
    Muon(weight_decay=0.3),
    AdamW(weight_decay=0.3),
    AdEMAMix(weight_decay=0.3, ramp_steps=4),
    AdamW8bit(weight_decay=0.3, block=32),
    Lion(weight_decay=0.3),
]
every = pytest.mark.parametrize("config", EVERY, ids=[config.kind for config in EVERY])

# --- who owns what -------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_in_exactly_one_optimizer(shape: ModelConfig, config: Optimizer) -> None:
    model = Transformer(shape, VOCAB_SIZE)
    optimizers = Optimizers(model, config)
    owned = [id(weight) for part in optimizers.parts for group in part.param_groups for weight in group["params"]]
    assert sorted(owned) == sorted(id(weight) for weight in model.parameters())


def groups(config: Optimizer) -> dict[str, tuple[str, float, float]]:
    """Optimizer, learning rate and weight decay of each weight, by name."""
    model = Transformer(SHAPES[1], VOCAB_SIZE)
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        names[id(weight)]: (type(part).__name__, group["lr"], group["weight_decay"])
        for part in Optimizers(model, config).parts
        for group in part.param_groups
        for weight in group["params"]
    }


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest_without_decay() -> None:
    for name, found in groups(Muon(muon_lr=0.5, learning_rate=0.25, weight_decay=0.125)).items():
        matrix = name.startswith("blocks.") and "norm" not in name
        assert found == (("BatchedMuon", 0.5, 0.125) if matrix else ("ScaledAdamW", 0.25, 0.0)), name


@every
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_matrices_decay_and_tables_where_that_is_wanted_and_vectors_never(
    config: Optimizer, decay_embeddings: bool
) -> None:
    config = config.model_copy(update={"decay_embeddings": decay_embeddings})
    for name, (_, _, decay) in groups(config).items():
        decays = "norm" not in name and (decay_embeddings or name.startswith("blocks."))
        assert decay == (0.3 if decays else 0.0), name


@every
def test_weights_that_are_frozen_are_left_out(config: Optimizer) -> None:
    model = lively(SHAPES[1])
    model.embed.weight.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {path.rpartition("/")[0] for path in optimizers.state()} == trained
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) == (name not in trained), name


@every
def test_a_share_scales_every_learning_rate_from_its_peak(config: Optimizer) -> None:
    optimizers = Optimizers(lively(SHAPES[0]), config)
    rates = [group["lr"] for part in optimizers.parts for group in part.param_groups]
    for value in (0.5, 0.1, 0.0, 1.0):
        assert optimizers.set_share(value) == rates[0] * value
        assert [group["lr"] for part in optimizers.parts for group in part.param_groups] == [r * value for r in rates]


# --- state ---------------------------------------------------------------------------------------------------------


def stepped(config: Optimizer, shape: int = 1) -> tuple[Transformer, Optimizers, dict[str, Tensor]]:
    """A model and its optimizers after one step, and a copy of their state."""
    model = lively(SHAPES[shape])
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    return model, optimizers, {path: value.clone() for path, value in optimizers.state().items()}


def step(model: Transformer, optimizers: Optimizers, seed: int) -> None:
    accumulate_gradients(model, random_batch(4, seed), 2, on_cpu())
    optimizers.step()
    optimizers.zero_grad()


@pytest.mark.slow
@every
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_state_that_was_written_and_restored_makes_the_same_next_step(
    config: Optimizer, shape: ModelConfig, tmp_path: Path
) -> None:
    model, twin = lively(shape), lively(shape, seed=9)
    optimizers = Optimizers(model, config)
    for seed in range(3):
        step(model, optimizers, seed)
    twin.load_state_dict(model.state_dict())
    save_tensors(tmp_path / "state", optimizers.state())
    restored = Optimizers(twin, config)
    restored.restore(safetensors.torch.load_file(tmp_path / "state"))
    assert restored.state().keys() == optimizers.state().keys()
    for name, value in restored.state().items():
        assert torch.equal(value, optimizers.state()[name]), name
    for seed in (3, 4):
        step(model, optimizers, seed)
        step(twin, restored, seed)
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, twin.state_dict()[name]), name


@every
def test_a_state_names_every_weight_and_is_independent_of_later_steps_once_written(config: Optimizer) -> None:
    model = lively(SHAPES[1])
    optimizers = Optimizers(model, config)
    assert optimizers.state() == {}
    step(model, optimizers, 0)
    found = optimizers.state()
    assert {name.rsplit("/", 1)[0] for name in found} == {name for name, _ in model.named_parameters()}
    for part in optimizers.parts:
        for weight in (weight for group in part.param_groups for weight in group["params"]):
            assert tuple(part.state[weight]) == REMEMBERED[type(part)]


@every
def test_a_state_that_misses_a_weight_is_refused_by_name_and_changes_nothing(config: Optimizer) -> None:
    _, optimizers, whole = stepped(config)
    lost = {path: value + 1 for path, value in whole.items() if not path.startswith("blocks.0.mlp.up.weight/")}
    with pytest.raises(
        CheckpointError, match=r"misses '\w+' of 'blocks\.0\.mlp\.up\.weight'.*\n.*the recipe that made it"
    ):
        optimizers.restore(lost)
    more = {path: value + 1 for path, value in whole.items()} | {"blocks.9.mlp.up.weight/step": torch.ones(())}
    with pytest.raises(CheckpointError, match=r"holds an unknown 'step' of 'blocks\.9\.mlp\.up\.weight'"):
        optimizers.restore(more)
    found = optimizers.state()
    assert all(torch.equal(found[path], value) for path, value in whole.items())


@every
def test_a_state_of_another_shape_or_number_format_is_refused_and_changes_nothing(config: Optimizer) -> None:
    _, optimizers, whole = stepped(config)
    for path, value in whole.items():
        floats = value.is_floating_point()
        for forged in (value.to(torch.uint8 if floats else torch.float32), torch.zeros((*value.shape, 2)).to(value)):
            with pytest.raises(CheckpointError, match=r"the state of the optimizer holds '\w+' of .* of shape"):
                optimizers.restore(whole | {path: forged})
    found = optimizers.state()
    assert all(torch.equal(found[path], value) for path, value in whole.items())


def test_the_state_of_another_optimizer_is_refused() -> None:
    model, optimizers, _ = stepped(AdamW(), 0)
    for config in EVERY[2:] + EVERY[:1]:
        with pytest.raises(CheckpointError, match=r"the state of the optimizer (misses|holds)"):
            Optimizers(model, config).restore(optimizers.state())


@every
def test_the_state_of_before_the_first_step_starts_anew(config: Optimizer) -> None:
    _, optimizers, _ = stepped(config)
    optimizers.restore({})
    assert optimizers.state() == {}


@every
def test_a_restored_state_shares_no_memory_with_the_one_it_was_made_from(config: Optimizer) -> None:
    model, optimizers, before = stepped(config)
    saved = optimizers.state()
    optimizers.restore(saved)
    step(model, optimizers, 1)
    assert all(torch.equal(value, before[path]) for path, value in saved.items())


# --- learning --------------------------------------------------------------------------------------------------------


def losses(config: Optimizer, steps: int = 40) -> list[float]:
    model = Transformer(SHAPES[0], VOCAB_SIZE)
    model.initialize(0)
    optimizers, found = Optimizers(model, config), []
    for number in range(steps):
        found.append(accumulate_gradients(model, random_batch(4, number % 3), 4, on_cpu())[0])
        optimizers.step()
        optimizers.zero_grad()
    return found


@pytest.mark.parametrize(
    "config", [AdEMAMix(learning_rate=0.01, ramp_steps=40), Lion(learning_rate=0.003)], ids=["ademamix", "lion"]
)
def test_a_model_learns_with_every_optimizer(config: Optimizer) -> None:
    found = losses(config)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.slow
def test_moments_of_8_bits_learn_as_those_of_32() -> None:
    coded, whole = losses(AdamW8bit(learning_rate=0.01)), losses(AdamW(learning_rate=0.01))
    assert whole[-1] < 0.8 * whole[0]
    assert coded == pytest.approx(whole, abs=0.05)


# --- AdamW of the compiled library equals torch's, and takes a scale of gradients that are not written ----------------


SIZES = [(1,), (15,), (300, 70), (17, 1000)]
NATIVE = pytest.mark.parametrize("wanted", ["0", "1"], ids=["torch", "compiled"])


def sized(seed: int = 0) -> list[nn.Parameter]:
    return weights(*SIZES, seed=seed)


def give(to: list[nn.Parameter], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in to:
        weight.grad = torch.randn(weight.shape, generator=generator) * scale
    return [weight.grad for weight in to if weight.grad is not None]


@NATIVE
def test_weights_and_moments_are_those_of_torch(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, wanted)
    ours, theirs = sized(), sized()
    how: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    mine, reference = optim.ScaledAdamW(ours, **how, fused=True), torch.optim.AdamW(theirs, **how, fused=True)
    for step in range(4):
        give(ours, step, scale=4.0)
        give(theirs, step)
        mine.scale = 0.25
        mine.step()
        reference.step()
        assert mine.scale == 1.0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        assert mine.state[a].keys() == reference.state[b].keys()
        for name, value in reference.state[b].items():
            assert torch.allclose(mine.state[a][name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.skipif(native.library(LIBRARY) is None, reason="the library of the optimizer is not there")
def test_scaled_gradients_stay_as_they_are_and_autograd_knows_of_the_new_weights() -> None:
    ours = sized()
    optimizer = optim.ScaledAdamW(ours, lr=0.01)
    given = [gradient.clone() for gradient in give(ours, 0)]
    before = [weight._version for weight in ours]
    optimizer.scale = 0.5
    optimizer.step()
    assert all(
        weight.grad is not None and torch.equal(weight.grad, one) for weight, one in zip(ours, given, strict=True)
    )
    assert all(weight._version > version for weight, version in zip(ours, before, strict=True))


@NATIVE
def test_the_total_norm_is_that_of_all_numbers(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, wanted)
    given = give(sized(), 0)
    whole = torch.cat([gradient.double().flatten() for gradient in given])
    assert float(total_norm(given)) == pytest.approx(float(whole.norm()), rel=1e-6)
    assert float(total_norm([])) == 0.0
    given[2][5, 5] = float("nan")
    assert bool(total_norm(given).isnan())


@pytest.mark.skipif(native.library(LIBRARY) is None, reason="the library of the optimizer is not there")
def test_neither_update_nor_norm_depends_on_threads() -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ours = sized()
        norm = total_norm(give(ours, 0))
        optim.ScaledAdamW(ours, lr=0.01).step()
        found.append([norm, *(weight.detach() for weight in ours)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- optim rules ------------------------------------------------------------------------------------------------------


STEPS = 12


def weights(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(shape: tuple[int, ...], steps: int = STEPS, seed: int = 1) -> list[Tensor]:
    """Of sizes that differ between numbers and from step to step, as those of a model do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).mul(2).exp()
    return [torch.randn(shape, generator=generator) * sizes * (0.3 + step % 3) for step in range(steps)]


def trained(
    made: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shape: tuple[int, ...] = (5, 7)
) -> list[Tensor]:
    """The weight after each step."""
    (weight,) = weights(shape)
    optimizer, seen = made([weight]), []
    for gradient in gradients(shape):
        weight.grad = gradient.clone()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


# --- formulas, number by number ---------------------------------------------------------------------------------------


def by_hand(
    rule: Callable[[int, float, float, dict[str, float]], float], shape: tuple[int, ...] = (5, 7)
) -> list[Tensor]:
    """The weight after each step of `rule(t, p, g, memory) -> p`, in double precision."""
    (weight,) = weights(shape)
    numbers = weight.detach().flatten().tolist()
    memories: list[dict[str, float]] = [{} for _ in numbers]
    seen = []
    for t, gradient in enumerate(gradients(shape), start=1):
        flat = gradient.flatten().tolist()
        numbers = [rule(t, p, g, memory) for p, g, memory in zip(numbers, flat, memories, strict=True)]
        seen.append(torch.tensor(numbers).view(shape))
    return seen


def ademamix(t: int, p: float, g: float, memory: dict[str, float]) -> float:
    """Algorithm 1 of arXiv 2409.03137 with β = (0.9, 0.99, 0.999), α = 5, ε = 1e-8, λ = 0.1, lr = 0.01 and T = 8."""
    b1, b2, b3, alpha, ramp = 0.9, 0.99, 0.999, 5.0, 8
    at = min(t * alpha / ramp, alpha)
    exponent = math.log(b1) * math.log(b3) / ((1 - t / ramp) * math.log(b3) + t / ramp * math.log(b1))
    b3t = min(math.exp(exponent), b3) if t <= ramp else b3
    memory["m1"] = b1 * memory.get("m1", 0.0) + (1 - b1) * g
    memory["m2"] = b3t * memory.get("m2", 0.0) + (1 - b3t) * g
    memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g * g
    m, v = memory["m1"] / (1 - b1**t), memory["v"] / (1 - b2**t)
    return p - 0.01 * ((m + at * memory["m2"]) / (math.sqrt(v) + 1e-8) + 0.1 * p)


def lion(t: int, p: float, g: float, memory: dict[str, float]) -> float:
    """Algorithm 2 of arXiv 2302.06675 with β = (0.9, 0.99), λ = 0.1 and lr = 0.01."""
    m = memory.get("m", 0.0)
    memory["m"] = 0.99 * m + (1 - 0.99) * g
    return p - 0.01 * (math.copysign(1.0, 0.9 * m + (1 - 0.9) * g) + 0.1 * p)


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (
            lambda w: AdEMAMixOptimizer(
                [{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99, 0.999), alpha=5.0, eps=1e-8, ramp=8
            ),
            ademamix,
        ),
        (lambda w: LionOptimizer([{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99)), lion),
    ],
    ids=["ademamix", "lion"],
)
def test_each_step_is_that_of_the_paper(made: Any, rule: Any) -> None:
    for ours, expected in zip(trained(made), by_hand(rule), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_without_a_slow_mean_ademamix_is_adamw() -> None:
    group: Callable[[Any], Any] = lambda w: [{"params": w, "weight_decay": 0.1}]  # noqa: E731
    ours = trained(
        lambda w: AdEMAMixOptimizer(group(w), lr=0.01, betas=(0.9, 0.95, 0.999), alpha=0.0, eps=1e-8, ramp=0)
    )
    theirs = trained(lambda w: torch.optim.AdamW(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8))
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-7)


def test_the_slow_mean_rises_from_the_fast_one_and_is_there_when_the_ramp_ends() -> None:
    betas = (0.9, 0.999, 0.9999)
    found = [slow_mean(t, 8.0, betas, 1000) for t in range(1, 1002)]
    assert slow_mean(0, 8.0, betas, 1000)[1] == pytest.approx(0.9)
    assert found[499][0] == 4.0
    halves = [math.log(0.5) / math.log(found[t - 1][1]) for t in (250, 500, 750)]
    assert halves[1] - halves[0] == pytest.approx(halves[2] - halves[1]), "its half-life rises in a line"
    assert found[999] == found[1000] == (8.0, 0.9999)


# --- 8 bits ----------------------------------------------------------------------------------------------------------


def test_codes_stand_for_256_numbers_of_which_most_are_small() -> None:
    signed, unsigned = code_table(True), code_table(False)
    for table in (signed, unsigned):
        assert len(table) == 256
        assert bool((table[1:] > table[:-1]).all())
        assert float(table[-1]) == 1.0
        assert 0.0 in table
    assert float(signed[0]) == pytest.approx(-(0.1 + 0.9 * 63.5 / 64))
    assert float(unsigned[0]) == 0.0
    assert float((unsigned < 0.1).float().mean()) == pytest.approx(127 / 256)
    assert float(unsigned[1]) == pytest.approx(3.25e-7)


@settings(max_examples=40)
@given(st.integers(1, 700), st.integers(1, 300), st.booleans(), st.integers(0, 99), st.floats(-30, 30))
def test_what_codes_stand_for_is_near_what_they_were_made_from(
    count: int, block: int, signed: bool, seed: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp() * 10.0**exponent
    numbers = numbers if signed else numbers.abs()
    table = code_table(signed)
    codes, scales = torch.zeros(count, dtype=torch.uint8), torch.zeros(-(-count // block))
    encode(numbers, table, signed, block, codes, scales)
    found = decode(codes, scales, table, block)
    largest = scales.abs().repeat_interleave(block)[:count]
    assert bool(((found - numbers).abs() <= 0.008 * largest).all())
    near = numbers.abs() > 0.1 * largest
    assert bool(((found - numbers).abs() <= 0.08 * numbers.abs())[near].all())
    kept = numbers == scales.repeat_interleave(block)[:count]
    assert bool((found[kept] == numbers[kept]).all()), "the largest is kept as it is"
    again, their_scales = torch.zeros_like(codes), torch.zeros_like(scales)
    encode(found, table, signed, block, again, their_scales)
    assert torch.equal(decode(again, their_scales, table, block), found), "what was decoded is coded as it was"
    assert torch.equal(their_scales, scales)
    if not signed:
        assert bool((found[numbers > 0] > 0).all()), "a second moment of 0 would divide by ε"


def test_zeros_have_codes_that_stand_for_zeros() -> None:
    codes, scales = torch.full((10,), 7, dtype=torch.uint8), torch.ones(3)
    encode(torch.zeros(10), code_table(True), True, 4, codes, scales)
    assert not bool(decode(codes, scales, code_table(True), 4).any())


@pytest.mark.parametrize("shape", [(64, 48), (3, 5), (1, 1000)])
def test_adamw_in_8_bits_goes_where_adamw_goes(shape: tuple[int, ...]) -> None:
    group: Callable[[Any], Any] = lambda w: [{"params": w, "weight_decay": 0.1}]  # noqa: E731
    ours = trained(lambda w: AdamW8bitOptimizer(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8, block=256), shape)
    theirs = trained(lambda w: torch.optim.AdamW(group(w), lr=0.01, betas=(0.9, 0.95), eps=1e-8), shape)
    start = weights(shape)[0].detach()
    assert torch.allclose(ours[0], theirs[0], atol=1e-6), "the first step is made before anything is rounded"
    way, expected = (ours[-1] - start).flatten(), (theirs[-1] - start).flatten()
    assert float(torch.cosine_similarity(way, expected, dim=0)) > 0.96
    assert float(way.norm() / expected.norm()) == pytest.approx(1, abs=0.1)


def test_a_weight_of_many_chunks_is_changed_as_one_of_one(monkeypatch: pytest.MonkeyPatch) -> None:

    def made(w: Any) -> Any:
        return AdamW8bitOptimizer([{"params": w, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8, block=16)

    whole = trained(made, (13, 17))
    monkeypatch.setattr("bloomery.train.optim.CHUNK_NUMBERS", 48)
    assert all(torch.equal(one, other) for one, other in zip(trained(made, (13, 17)), whole, strict=True))


# --- Muon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_batched_muon_makes_the_steps_of_torchs_bit_for_bit(scaling: str) -> None:
    shapes = [(24, 24), (40, 16), (16, 40), (24, 24), (40, 16), (24, 24), (8, 64)]
    ours, theirs = weights(*shapes), weights(*shapes)
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": scaling}
    optimizers = BatchedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(6):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = gradients(one.shape, 1, 100 * step + place)[0]
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), step


def test_matrices_that_are_orthogonalized_together_are_no_more_than_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def watched(matrices: Tensor, *settings: Any) -> Tensor:
        sizes.append(matrices.numel())
        return orthogonalize(matrices, *settings)

    monkeypatch.setattr("bloomery.train.optim.orthogonalize", watched)
    monkeypatch.setattr("bloomery.train.optim.BATCH_NUMBERS", 1000)
    made = weights(*[(16, 20)] * 7, (50, 50))
    for weight in made:
        weight.grad = torch.ones_like(weight)
    BatchedMuon(made).step()
    assert sizes == [960, 960, 320, 2500]
    assert BATCH_NUMBERS * 2 <= 8 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_orthogonalized_has_singular_values_near_one_and_the_same_sides(dtype: torch.dtype) -> None:
    matrices = torch.stack(gradients((12, 30), 3)).to(dtype)
    found = orthogonalize(matrices, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
    left, values, right = torch.linalg.svd(matrices.float(), full_matrices=False)
    kept = left.mT @ found @ right.mT
    diagonal = kept.diagonal(dim1=1, dim2=2)
    assert bool((diagonal[values > 0.05 * values[:, :1]] > 0.5).all())
    assert bool((diagonal < 1.3).all())
    assert float((kept - torch.diag_embed(diagonal)).abs().max()) < (0.1 if dtype == torch.bfloat16 else 1e-4)


def test_a_state_is_taken_over_without_a_copy_only_where_that_is_asked_for() -> None:
    model = lively(SHAPES[0])
    optimizers = Optimizers(model, AdamW())
    model(torch.zeros((1, 4), dtype=torch.int64)).sum().backward()
    optimizers.step()
    saved = {name: tensor.clone() for name, tensor in optimizers.state().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in saved.items()}
    optimizers.restore(saved)
    assert all(tensor.data_ptr() != addresses[name] for name, tensor in optimizers.state().items())
    optimizers.restore(saved, take_over=True)
    assert {name: tensor.data_ptr() for name, tensor in optimizers.state().items()} == addresses


def muon_stepped(model: Transformer, world: World, *, resumes: bool = False) -> dict[str, list[float]]:
    """
    All weights after three steps of Muon with the same gradients on every rank, with matmuls in float32. With
    `resumes`, each step has an optimizer of its own, which takes up the state of the last.
    """
    optimizers = Optimizers(model, Muon(muon_lr=0.05), torch.float32, world=world)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = collectives.like(weight, torch.randn(weight.shape, generator=generator))
        optimizers.step()
        if resumes:
            state = optimizers.state(checkpoint.as_part)
            optimizers = Optimizers(model, Muon(muon_lr=0.05), torch.float32, world=world)
            optimizers.restore(state)
    return {name: collectives.whole(weight).flatten().tolist() for name, weight in model.named_parameters()}


DEALT = ModelConfig(
    hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=48, context_length=8, mlp="swiglu"
)
"""12 matrices of 32 x 32, of which tp cuts 9 by rows and 3 by columns, 6 of 48 x 32, and 3 of 32 x 48."""
MESHES: dict[int, tuple[Mesh | None, ...]] = {
    2: (None, Mesh(dp_shard=2), Mesh(tp=2), Mesh(dp_replicate=2)),
    3: (None, Mesh(dp_shard=3)),
    4: (Mesh(dp_replicate=2, dp_shard=2), Mesh(dp_shard=2, tp=2), Mesh(dp_replicate=2, tp=2), Mesh(tp=4)),
    8: (Mesh(dp_replicate=2, dp_shard=2, tp=2),),
}
"""By ranks; None for whole copies without a mesh."""


def stepped_together(task: dict[str, Any], world: World) -> dict[str, Any]:
    """As on GPUs: matrices in batches of about one for each rank or two, dealt out to ranks of a mesh."""
    torch.set_num_threads(1)
    token, stepped = cpu.ELSEWHERE.set(True), []
    for mesh in MESHES[world.size]:
        counts = [0]

        def counted(matrices: Tensor, *settings: Any, counts: list[int] = counts) -> Tensor:
            counts[0] += len(matrices)
            return orthogonalize(matrices, *settings)

        vars(optim)["orthogonalize"] = counted
        for numbers, resumes in ((1024, False), (2048, True)):
            optim.WIDE_BATCH_NUMBERS, model = numbers, lively(DEALT)
            if mesh is not None:
                fsdp.shard(model, world, on_cpu().device, mesh)
            weights = muon_stepped(model, world, resumes=resumes)
            stepped.append({"weights": world.gather(weights), "counts": world.gather(counts[0])})
            counts[0] = 0
    cpu.ELSEWHERE.reset(token)
    return {"stepped": stepped}


def furthest(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    return max(float((torch.tensor(one[name]) - torch.tensor(other[name])).abs().max()) for name in one)


def test_muon_in_large_batches_is_muon_in_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = muon_stepped(lively(SHAPES[1]), World.alone())
    for numbers in (1, 3 * 16 * 16, 2**25):
        monkeypatch.setattr(optim, "WIDE_BATCH_NUMBERS", numbers)
        token = cpu.ELSEWHERE.set(True)
        assert furthest(expected, muon_stepped(lively(SHAPES[1]), World.alone())) < 1e-5
        cpu.ELSEWHERE.reset(token)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MESHES)
def test_on_every_mesh_one_rank_orthogonalizes_each_matrix_and_all_end_with_what_one_process_computes(
    ranks: int,
) -> None:
    expected = muon_stepped(lively(DEALT), World.alone())
    stepped = launch.run("tests.train.test_optim:stepped_together", {}, ranks)["stepped"]
    assert len(stepped) == 2 * len(MESHES[ranks])
    for case in stepped:
        assert sum(case["counts"]) == 3 * 21
        assert max(case["counts"]) <= 3 * sum(-(-number // ranks) for number in (9, 3, 6, 3))
        assert all(weights == case["weights"][0] for weights in case["weights"])
        assert furthest(expected, case["weights"][0]) < 1e-5
