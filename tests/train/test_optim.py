from pathlib import Path

import pytest

from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train.config import AdamW, Muon
from bloomery.train.loop import accumulate_gradients
from bloomery.train.optim import Optimizers
from bloomery.weights.tensors import save_tensors
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import processor, random_batch

import safetensors.torch
import torch
from torch import Tensor

both = pytest.mark.parametrize("config", [Muon(), AdamW(weight_decay=0.3)], ids=["muon", "adamw"])

# --- who owns what -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_in_exactly_one_optimizer(shape: ModelConfig, config: Muon | AdamW) -> None:
    model = Transformer(shape, VOCAB_SIZE)
    optimizers = Optimizers(model, config)
    owned = [id(weight) for part in optimizers.parts for group in part.param_groups for weight in group["params"]]
    assert sorted(owned) == sorted(id(weight) for weight in model.parameters())


def groups(config: Muon | AdamW) -> dict[str, tuple[str, float, float]]:
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
        assert found == (("Muon", 0.5, 0.125) if matrix else ("AdamW", 0.25, 0.0)), name


def test_adamw_decays_matrices_and_no_norms() -> None:
    for name, found in groups(AdamW(learning_rate=0.25, weight_decay=0.125)).items():
        assert found == ("AdamW", 0.25, 0.0 if "norm" in name else 0.125), name


@both
def test_a_share_scales_every_learning_rate_from_its_peak(config: Muon | AdamW) -> None:
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


@both
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_state_that_was_written_and_restored_makes_the_same_next_step(
    config: Muon | AdamW, shape: ModelConfig, tmp_path: Path
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


@both
def test_a_state_names_every_weight_and_is_independent_of_later_steps_once_written(config: Muon | AdamW) -> None:
    model = lively(SHAPES[1])
    optimizers = Optimizers(model, config)
    assert optimizers.state() == {}
    step(model, optimizers, 0)
    found: dict[str, Tensor] = optimizers.state()
    assert {name.rsplit("/", 1)[0] for name in found} == {name for name, _ in model.named_parameters()}
    moments = {name for name in found if not name.endswith("/step")}
    weights = dict(model.named_parameters())
    assert all(found[name].shape == weights[name.rsplit("/", 1)[0]].shape for name in moments)
