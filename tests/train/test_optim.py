from pathlib import Path

import pytest

from bloomery.core.errors import CheckpointError
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train.config import AdamW, AdamW8bit, AdEMAMix, Lion, Muon, Optimizer
from bloomery.train.optim import REMEMBERED, Optimizers
from bloomery.train.step import accumulate_gradients
from bloomery.weights.safetensors import save_tensors
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import processor, random_batch

import safetensors.torch
import torch

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
    for name, found in groups(Muon(matrix_learning_rate=0.5, learning_rate=0.25, weight_decay=0.125)).items():
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


def step(model: Transformer, optimizers: Optimizers, seed: int) -> None:
    accumulate_gradients(model, random_batch(4, seed), 2, processor())
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
    model = lively(SHAPES[1])
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    whole = {path: value.clone() for path, value in optimizers.state().items()}
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
    model = lively(SHAPES[1])
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    whole = {path: value.clone() for path, value in optimizers.state().items()}
    for path, value in whole.items():
        floats = value.is_floating_point()
        for forged in (value.to(torch.uint8 if floats else torch.float32), torch.zeros((*value.shape, 2)).to(value)):
            with pytest.raises(CheckpointError, match=r"the state of the optimizer holds '\w+' of .* of shape"):
                optimizers.restore(whole | {path: forged})
    found = optimizers.state()
    assert all(torch.equal(found[path], value) for path, value in whole.items())


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = lively(SHAPES[0])
    optimizers = Optimizers(model, AdamW())
    step(model, optimizers, 0)
    for config in EVERY[2:] + EVERY[:1]:
        with pytest.raises(CheckpointError, match=r"the state of the optimizer (misses|holds)"):
            Optimizers(model, config).restore(optimizers.state())


@every
def test_the_state_of_before_the_first_step_starts_anew(config: Optimizer) -> None:
    model = lively(SHAPES[0])
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    optimizers.restore({})
    assert optimizers.state() == {}


@every
def test_a_restored_state_shares_no_memory_with_the_one_it_was_made_from(config: Optimizer) -> None:
    model = lively(SHAPES[0])
    optimizers = Optimizers(model, config)
    step(model, optimizers, 0)
    saved = optimizers.state()
    before = {path: value.clone() for path, value in saved.items()}
    optimizers.restore(saved)
    step(model, optimizers, 1)
    assert all(torch.equal(value, before[path]) for path, value in saved.items())


# --- learning --------------------------------------------------------------------------------------------------------


def losses(config: Optimizer, steps: int = 40) -> list[float]:
    model = Transformer(SHAPES[0], VOCAB_SIZE)
    model.initialize(0)
    optimizers, found = Optimizers(model, config), []
    for number in range(steps):
        found.append(accumulate_gradients(model, random_batch(4, number % 3), 4, processor())[0])
        optimizers.step()
        optimizers.zero_grad()
    return found


@pytest.mark.parametrize(
    "config", [AdEMAMix(learning_rate=0.01, ramp_steps=40), Lion(learning_rate=0.003)], ids=["ademamix", "lion"]
)
def test_a_model_learns_with_every_optimizer(config: Optimizer) -> None:
    found = losses(config)
    assert found[-1] < 0.8 * found[0]


def test_moments_of_8_bits_learn_as_those_of_32() -> None:
    coded, whole = losses(AdamW8bit(learning_rate=0.01)), losses(AdamW(learning_rate=0.01))
    assert whole[-1] < 0.8 * whole[0]
    assert coded == pytest.approx(whole, abs=0.05)
