"""A model over a mesh learns what it learns on one device."""

from collections.abc import Mapping
from typing import Any

import pytest

from bloomery.core.errors import ConfigError
from bloomery.hw.distributed import World
from bloomery.model import lora
from bloomery.model.config import Lora, ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train import launch
from bloomery.train.config import Mesh
from bloomery.train.mesh import AXES, check_model, gradient_norm, parallelize

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

SHAPE = ModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=128,
    context_length=32,
    tie_embeddings=False,
)
VOCAB, ROWS, STEPS = 96, 8, 5
MESHES = ((1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4))
WAYS: dict[str, Lora | None] = {
    "full": None,
    "LoRA": Lora(rank=4, base_dtype="float32"),
    "LoRA, int8": Lora(rank=4, base_dtype="int8"),
    "DoRA, NF4": Lora(rank=4, base_dtype="nf4", dora=True),
}
CASES = [
    *((way, axes) for way in ("full", "LoRA") for axes in MESHES),
    ("LoRA, int8", (1, 2, 2)),
    ("DoRA, NF4", (1, 4, 1)),
]


def made(adapters: Lora | None) -> Transformer:
    model = Transformer(SHAPE, VOCAB)
    model.initialize(0)
    if adapters is not None:
        lora.attach(model, adapters, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in lora.weights(model).items():
                if name.endswith("lora_b"):  # at 0, A would learn nothing in the first step
                    weight.copy_(torch.empty(weight.shape).normal_(0, 0.02, generator=generator))
    return model


def learned(model: Transformer, part: slice, world: World) -> dict[str, list[float]]:
    """Losses and gradient norms of steps of AdamW. Each device has some of the rows."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3, foreach=False)
    told: dict[str, list[float]] = {"losses": [], "norms": []}
    ids = torch.randint(0, VOCAB, (ROWS, 33), generator=torch.Generator().manual_seed(0))[part]
    for _ in range(STEPS):
        logits = model.logits(model(ids[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / (ROWS * 32)
        torch.autograd.backward(loss)
        told["norms"].append(gradient_norm(model))
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(float(world.sum(loss.detach().clone())))
    return told


def over_meshes(task: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What each rank does."""
    found = {}
    for way, axes in CASES:
        mesh = Mesh(preset="gpt2-124m", **dict(zip(AXES, axes, strict=True)))
        model = made(WAYS[way])
        parallelize(model, mesh, init_device_mesh("cpu", axes, mesh_dim_names=AXES))
        groups, group = axes[0] * axes[1], world.rank // axes[2]
        rows = ROWS // groups
        told = learned(model, slice(group * rows, (group + 1) * rows), world)
        told["losses"] = [loss / axes[2] for loss in told["losses"]]
        held = sum(one.to_local().nbytes for one in model.parameters())  # type: ignore[attr-defined]
        found[f"{way} {axes}"] = {**told, "held": world.gather(held)}
    return found


@pytest.mark.slow
def test_four_devices_learn_what_one_learns_on_every_mesh() -> None:
    found = launch.run("tests.train.test_mesh:over_meshes", {}, 4)
    for way, axes in CASES:
        model = made(WAYS[way])
        whole = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
        alone, told = learned(model, slice(0, ROWS), World.alone()), found[f"{way} {axes}"]
        assert alone["losses"][-1] < alone["losses"][0] - 0.01
        assert told["losses"] == pytest.approx(alone["losses"], rel=2e-6), (way, axes)
        assert told["norms"] == pytest.approx(alone["norms"], rel=2e-6), (way, axes)
        assert max(told["held"]) * axes[1] * axes[2] < 1.25 * whole  # tp does not cut norms and some adapters


@pytest.mark.parametrize(
    ("changes", "tp", "told"),
    [
        ({"tie_embeddings": True}, 1, "a tied head is in two units"),
        ({"position_embedding": "alibi"}, 2, "ALiBi counts all heads"),
        ({"qk_norm": True}, 2, "vectors that heads share"),
        ({}, 3, "num_heads is 8, and tp=3 does not divide it"),
    ],
)
def test_a_model_that_a_mesh_cannot_train_is_refused_by_name(changes: dict[str, Any], tp: int, told: str) -> None:
    model = Transformer(ModelConfig(**(SHAPE.model_dump() | changes)), VOCAB)
    with pytest.raises(ConfigError, match=told):
        check_model(model, Mesh(preset="gpt2-124m", tp=tp))


@pytest.mark.parametrize("adapters", [Lora(base_dtype="nf4"), Lora(dora=True)])
def test_adapters_that_tp_cannot_train_are_refused_by_name(adapters: Lora) -> None:
    model = made(adapters)
    check_model(model, Mesh(preset="gpt2-124m", dp_shard=4))
    with pytest.raises(ConfigError, match="NF4 and DoRA are not cut by tp yet"):
        check_model(model, Mesh(preset="gpt2-124m", tp=2))
