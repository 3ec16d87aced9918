from collections.abc import Iterator

import pytest

from bloomery.core import native
from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.train import collectives, fsdp
from bloomery.train.compile import checkpoint_activations
from bloomery.train.config import Level, Mesh
from bloomery.train.plan.memory import activation_bytes_per_token
from bloomery.train.plan.sharding import computed_shape
from bloomery.train.step import accumulate_gradients
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import on_cpu, processor, random_batch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

LEVELS: list[Level] = ["none", "selective", "full"]


def gradients(shape: ModelConfig, level: Level, dtype: torch.dtype) -> list[Tensor]:
    model = lively(shape)
    checkpoint_activations(model, level)
    accumulate_gradients(model, random_batch(3), 2, on_cpu(dtype))
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["full", "selective"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_have_the_same_bits_at_every_level(shape: ModelConfig, level: Level, dtype: torch.dtype) -> None:
    found, expected = gradients(shape, level, dtype), gradients(shape, "none", dtype)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_names_of_weights_stay_and_a_level_takes_the_place_of_another(level: Level) -> None:
    model = lively(SHAPES[0])
    names = list(model.state_dict())
    for one in ("selective", "full", level):
        checkpoint_activations(model, one)
    assert list(model.state_dict()) == names
    assert ("forward" in model.blocks[0].__dict__) == (level != "none")
    accumulate_gradients(model, random_batch(3), 2, on_cpu())
    with torch.no_grad():
        assert torch.equal(
            model(torch.zeros(1, 3, dtype=torch.long)), lively(SHAPES[0])(torch.zeros(1, 3, dtype=torch.long))
        )


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages that operations made, and how large those are that something still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                storage = collectives.local(one).untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        return out

    def held_bytes(self) -> int:
        alive = [size for reference, size in self.made.values() if not reference.expired()]  # type: ignore[no-untyped-call]
        return sum(alive)


WIDE = ModelConfig(hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=176, context_length=64)


def held_bytes_per_token(level: Level, dtype: torch.dtype, tp: int = 1) -> float:
    """What a forward pass leaves for the backward pass, without what does not grow with the batch."""
    found = list[int]()
    for rows in (4, 8):
        model = Transformer(WIDE, VOCAB_SIZE)
        model.initialize(0)
        if tp > 1:
            fsdp.shard(model, World(0, tp), processor(), Mesh(tp=tp))
        checkpoint_activations(model, level)
        ids = torch.zeros(rows, WIDE.context_length, dtype=torch.long)
        with Alive() as alive, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            hidden = model(ids)
        found.append(alive.held_bytes())
        del hidden
    return (found[1] - found[0]) / (4 * WIDE.context_length)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_level_keeps_less_than_the_one_before_it_and_about_as_much_as_was_planned(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = [held_bytes_per_token(level, dtype) for level in LEVELS]
    assert compiled[0] > compiled[1] > compiled[2]
    monkeypatch.setattr(native, "library", lambda name: None)  # plans are of PyTorch's operations, which keep more
    measured = [held_bytes_per_token(level, dtype) for level in LEVELS]
    assert all(less <= more for less, more in zip(compiled, measured, strict=True))
    assert measured[0] > 2 * measured[1] > 2 * 2 * measured[2]
    planned = [activation_bytes_per_token(WIDE, level, dtype.itemsize) for level in LEVELS]
    assert planned[0] == pytest.approx(measured[0], rel=0.1)
    for kept, plan in zip(measured[1:], planned[1:], strict=True):
        assert kept < plan < kept + 1.1 * measured[0] / WIDE.num_layers, "and a layer while it is computed again"


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is the first, and exchanges nothing with the other, which is not there."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_the_plan_of_tp_counts_its_own_tokens_between_matmuls(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its part of heads and inner width, and its tokens of the stream. Matmuls read all tokens."""
    monkeypatch.setattr(native, "library", lambda name: None)
    cut, whole = (held_bytes_per_token("none", torch.float32, tp) for tp in (2, 1))
    planned = activation_bytes_per_token(computed_shape(WIDE, 2), "none", 4, devices=2)
    assert planned == pytest.approx(cut, rel=0.1)
    assert 0.5 * whole < cut < 0.6 * whole
