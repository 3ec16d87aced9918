"""Ranks as threads: the gradients of a batch do not depend on how many ranks share it, nor on their memory."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest

from bloomery.core.errors import HardwareError
from bloomery.core.signals import StopRequest, Terminated
from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import Batch
from bloomery.train import collectives, fsdp, step
from bloomery.train.config import AdamW
from bloomery.train.state import State
from bloomery.train.step import accumulate_gradients
from tests.model.made import SHAPES, lively
from tests.train.made import (
    on_cpu,
    processor,
    random_batch,
    trainer,
)

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

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        self.sum(tensor)
        return lambda: None


def worlds(size: int) -> list[ThreadWorld]:
    room = Room(Barrier(size, timeout=60))
    return [ThreadWorld(rank, size, room=room) for rank in range(size)]


def together(batch: Batch, size: int, micro_batch: int) -> list[tuple[float, int, dict[str, Tensor]]]:
    """Loss, tokens and gradients of each of `size` ranks."""

    def one(world: World) -> tuple[float, int, dict[str, Tensor]]:
        model = lively(SHAPES[1])
        loss, tokens, *_ = accumulate_gradients(model, batch, micro_batch, on_cpu(), world=world)
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
        batches = iter([random_batch(5, seed, 0.5 if seed != 2 else 0.0) for seed in range(6)])
        trainer(model, batches, state, optimizer=AdamW(learning_rate=1e-3), steps=6, world=world).train()
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
            trainer(model, iter([random_batch(5)]), state, steps=2, world=world, stop=stop).train()
        return state.step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, worlds(2))) == [0, 0]


# --- sums that begin within the backward pass, and memory that runs out on one rank -----------------------------------


SUMS = collectives.GradientSums


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums as on GPUs, in several buckets."""
    monkeypatch.setattr(collectives, "GradientSums", lambda model, world, **how: SUMS(model, world, overlapped=True))
    monkeypatch.setattr(collectives, "BUCKET_NUMBERS", 2000)


@pytest.mark.parametrize(("size", "micro_batch"), [(2, 2), (3, 1), (8, 7)])
def test_overlapped_sums_are_those_after_the_backward_pass(
    size: int, micro_batch: int, request: pytest.FixtureRequest
) -> None:
    """Of eight ranks, one has no row, and so no backward pass."""
    batch = random_batch(7, 3, [0.5, 0, 1, 0, 0.05, 0, 0.7])
    plain = together(batch, size, micro_batch)
    request.getfixturevalue("overlapped")
    for (loss, tokens, grads), (same_loss, same_tokens, others) in zip(
        plain, together(batch, size, micro_batch), strict=True
    ):
        assert (loss, tokens) == (same_loss, same_tokens)
        assert grads.keys() == others.keys()
        for name in grads:  # other buckets, other orders of eight numbers
            torch.testing.assert_close(others[name], grads[name], rtol=1e-5, atol=1e-8)


def test_overlapped_sums_begin_before_the_backward_pass_ends(overlapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, at_end = list[int](), list[int]()
    sent, finish = SUMS._send, SUMS.finish

    def send(self: Any, failed: bool) -> None:
        begun.append(len(self._begun))
        sent(self, failed)

    def finished(self: Any, failed: bool = False) -> bool:
        at_end.append(len(begun))
        return bool(finish(self, failed))

    monkeypatch.setattr(SUMS, "_send", send)
    monkeypatch.setattr(SUMS, "finish", finished)
    accumulate_gradients(lively(SHAPES[1]), random_batch(4), 2, on_cpu(), world=Silent(0, 2))
    assert len(begun) > 3
    assert at_end == [len(begun)]
    assert begun == sorted(begun)


class Silent(World):
    """Of two ranks, of which the other has nothing to add."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize("kind", ["after", "overlapped"])
def test_where_memory_runs_out_on_one_rank_all_try_half_the_rows(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "overlapped":
        request.getfixturevalue("overlapped")
    batch, calls = random_batch(8), list[tuple[int, int]]()

    @dataclass(frozen=True)
    class Hungry(step.CausalLMLoss):
        rank: int = 0

        def losses(self, model: Transformer, micro_batch: Batch, precision: Any, scale: float = 1.0) -> step.LossSums:
            calls.append((self.rank, len(micro_batch.ids)))
            if self.rank == 1 and len(micro_batch.ids) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
            return super().losses(model, micro_batch, precision, scale)

    def one(world: World) -> tuple[int, float, dict[str, Tensor]]:
        model = lively(SHAPES[1])
        loss_function, stop = Hungry(rank=world.rank), StopRequest()
        grads = step.forward_backward(
            model, batch, 4, precision=on_cpu(), loss_function=loss_function, world=world, stop=stop
        )
        named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return grads.rows, grads.loss, named

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, worlds(2))
    assert first[0] == second[0] == 1
    assert {rows for rank, rows in calls if rank == 0} == {1, 2, 4}
    loss, _, expected = together(batch, 2, 1)[0]
    assert first[1] == second[1] == loss
    for found in (first[2], second[2]):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_row_that_is_too_much_on_one_rank_is_an_error_of_all() -> None:
    class Full(step.CausalLMLoss):
        def losses(self, *args: Any) -> step.LossSums:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def one(world: World) -> str:
        loss_function = Full() if world.rank else step.CausalLMLoss()
        how: dict[str, Any] = {"precision": on_cpu(), "loss_function": loss_function}
        with pytest.raises(HardwareError) as told:
            step.forward_backward(lively(SHAPES[0]), random_batch(4), 1, world=world, stop=StopRequest(), **how)
        return str(told.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, worlds(2))
    assert "memory is too small for 1 sequence at once: memory ran out on another rank" in first
    assert "CUDA out of memory" in second


# --- what ranks with parts measure, take up and gather ----------------------------------------------------------------
