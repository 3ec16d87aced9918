"""Norms, learned positions and √D of a model in parts, whose matmuls are in bfloat16."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from bloomery.hw import distributed
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Lora, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train import collectives, fsdp, launch
from bloomery.train.config import Mesh
from bloomery.train.step import accumulate_gradients
from tests.model.made import CHOICES, SHAPES, lively
from tests.train.made import on_cpu, processor, random_batch

import torch

UNTIED = SHAPES[0].model_copy(update={"tie_embeddings": False})
SCALED = UNTIED.model_copy(update={"scale_embeddings": True})
NORMED = SHAPES[0].model_copy(update={"qk_norm": True})
BETWEEN = 1 + 2.0**-10
"""bfloat16 has 1 and 1 + 2⁻⁷ next to each other."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.c10d.HashStore())
    yield
    torch.distributed.destroy_process_group()


ADAPTERS = {"none": None, "bfloat16": Lora(rank=2, base_dtype="bfloat16"), "nf4": Lora(rank=2, base_dtype="nf4")}
CASES = [
    (shape, adapters) for shape in (UNTIED, SCALED, NORMED, CHOICES["absolute positions"]) for adapters in ADAPTERS
]


def made(shape: ModelConfig, adapters: str, norm: float = BETWEEN) -> Transformer:
    model = lively(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name != "positions.weight":
                weight.copy_(weight.bfloat16())  # embeddings are gathered in the format of matmuls
            if "norm.weight" in name:
                weight.fill_(norm)
    if (settings := ADAPTERS[adapters]) is not None:
        lora.attach(model, settings, 0)
    return model


def learned(model: Transformer, world: World | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    loss = accumulate_gradients(model, random_batch(4), 2, on_cpu(torch.bfloat16), world=world).loss
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss, {name: collectives.whole(grad) for name, grad in grads.items()}


def in_parts(shape: ModelConfig, adapters: str, world: World) -> tuple[float, dict[str, torch.Tensor]]:
    model = made(shape, adapters)
    fsdp.shard(model, world, processor(), Mesh(dp_shard=world.size), dtype=torch.bfloat16)
    return learned(model, world)


def assert_same(found: tuple[float, dict[str, Any]], shape: ModelConfig, adapters: str) -> None:
    (loss, grads), (rounded, _) = learned(made(shape, adapters)), learned(made(shape, adapters, 1.0))
    assert loss != rounded
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[1].keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.dist(torch.as_tensor(found[1][name]), grad) <= 0.02 * grad.norm(), name


@pytest.mark.parametrize(("shape", "adapters"), CASES)
def test_norms_positions_and_the_scale_of_embeddings_stay_in_float32_as_on_one_device(
    one_rank: None, shape: ModelConfig, adapters: str
) -> None:
    assert_same(in_parts(shape, adapters, World.alone()), shape, adapters)


def on_ranks(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = [in_parts(shape, adapters, world) for shape, adapters in CASES]
    return {"told": [[loss, {name: grad.tolist() for name, grad in grads.items()}] for loss, grads in results]}


@pytest.mark.slow
def test_two_ranks_whose_norms_and_positions_stay_in_float32_learn_what_one_device_learns() -> None:
    for found, (shape, adapters) in zip(launch.run(f"{__name__}:on_ranks", {}, 2)["told"], CASES, strict=True):
        assert_same((found[0], found[1]), shape, adapters)
