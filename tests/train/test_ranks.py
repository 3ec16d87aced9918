"""Ranks, each a thread: what they compute together is what one computes alone."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest

from bloomery.core.signals import StopRequest, Terminated
from bloomery.hw.distributed import World
from bloomery.shards.loader import Batch
from bloomery.train import fsdp
from bloomery.train.config import AdamW
from bloomery.train.optim import Optimizers
from bloomery.train.precision import Precision
from bloomery.train.state import State
from bloomery.train.step import accumulate_gradients
from bloomery.train.trainer import Trainer
from tests.model.made import SHAPES, lively
from tests.train.made import processor, random_batch

import torch
from torch import Tensor

CPU = processor()


@dataclass
class Room:
    """Where threads meet to add up their tensors."""

    barrier: Barrier
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadWorld(World):
    room: Room = field(default_factory=lambda: Room(Barrier(1)))

    def sum(self, tensor: Tensor) -> Tensor:
        self.room.parts[self.rank] = tensor.detach().clone()
        self.room.barrier.wait()
        total = torch.stack([self.room.parts[rank] for rank in range(self.size)]).sum(0)
        self.room.barrier.wait()
        tensor.copy_(total)
        return tensor


def worlds(size: int) -> list[ThreadWorld]:
    room = Room(Barrier(size, timeout=60))
    return [ThreadWorld(rank, size, room=room) for rank in range(size)]


def together(batch: Batch, size: int, micro_batch: int) -> list[tuple[float, int, dict[str, Tensor]]]:
    """Loss, tokens and gradients of each of `size` ranks."""

    def one(world: World) -> tuple[float, int, dict[str, Tensor]]:
        model = lively(SHAPES[1])
        loss, tokens = accumulate_gradients(model, batch, micro_batch, CPU, world)
        return loss, tokens, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, worlds(size)))


@pytest.mark.parametrize("micro_batch", [1, 2, 7])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_gradients_do_not_depend_on_ranks_nor_on_micro_batches(size: int, micro_batch: int) -> None:
    """Rows 1, 3 and 5 are masked, so that of two ranks one has nothing to learn; of eight, one has no row."""
    batch = random_batch(7, 3, [0.5, 0, 1, 0, 0.05, 0, 0.7])
    loss, tokens, alone = together(batch, 1, 7)[0]
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    for rank_loss, rank_tokens, gradients in together(batch, size, micro_batch):
        assert rank_tokens == tokens
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert gradients.keys() == alone.keys()
        assert max(float((gradients[name] - alone[name]).abs().max()) for name in alone) < 1e-6 * largest


def test_a_rank_that_is_all_masked_adds_exactly_zero() -> None:
    batch = random_batch(4, 3, [0.5, 0, 0.7, 0])
    kept = batch.of_rank(0, 2)
    (loss, tokens, alone), *_ = together(kept, 1, 2)
    for found in together(batch, 2, 2):
        assert found[:2] == (loss, tokens)
        for name, gradient in found[2].items():
            assert torch.equal(gradient, alone[name]), name


def test_the_peak_of_several_ranks_is_that_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "measured_peak", lambda device: 2.5e9)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda world: fsdp.peak(CPU, world), worlds(3))) == [7.5e9] * 3


def test_every_rank_ends_with_the_same_bits_and_with_those_of_one_but_for_rounding() -> None:
    def one(world: World) -> tuple[State, dict[str, Tensor]]:
        model, state = lively(SHAPES[0]), State()
        Trainer(
            model,
            Optimizers(model, AdamW(learning_rate=1e-3)),
            iter([random_batch(5, seed, 0.5 if seed != 2 else 0.0) for seed in range(6)]),
            state=state,
            steps=6,
            micro_batch=2,
            learning_rate_share=lambda step: 1.0,
            max_norm=1.0,
            device=CPU,
            world=world,
            precision=Precision.decide("auto", CPU),
        ).train()
        return state, dict(model.state_dict())

    (alone, weights), *_ = map(one, worlds(1))
    with ThreadPoolExecutor(3) as pool:
        (first, mine), *others = pool.map(one, worlds(3))
    assert (first.step, first.samples, first.tokens) == (alone.step, alone.samples, alone.tokens)
    assert max(float((mine[name] - weights[name]).abs().max()) for name in weights) < 1e-6
    for state, theirs in others:
        assert state == first
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_ranks_of_which_one_was_asked_to_stop_before_the_first_step_make_none() -> None:
    """What is due before it, an evaluation that was missed, was left out, and would be skipped for ever."""

    def one(world: World) -> int:
        model, state, stop = lively(SHAPES[0]), State(), StopRequest()
        if world.is_first:
            stop.ask(signal.SIGTERM)
        with pytest.raises(Terminated):
            Trainer(
                model,
                Optimizers(model, AdamW(learning_rate=1e-3)),
                iter([random_batch(5)]),
                state=state,
                steps=2,
                micro_batch=2,
                learning_rate_share=lambda step: 1.0,
                max_norm=1.0,
                device=CPU,
                world=world,
                stop=stop,
                precision=Precision.decide("auto", CPU),
            ).train()
        return state.step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, worlds(2))) == [0, 0]
