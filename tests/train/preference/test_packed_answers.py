"""Answers that share rows, as devices other than CPUs compute them, and a reference in the format of matmuls."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from bloomery.hw.distributed import World
from bloomery.model.config import ModelConfig
from bloomery.model.kernels import cpu
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.config import AdamW
from bloomery.train.plan.memory import TrainSetup, Workload
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.losses import (
    Drawn,
    GRPOLoss,
    by_token,
    keep_as_computed,
    packed,
    packed_groups,
    shortened,
)
from bloomery.train.step import accumulate_gradients
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, lively
from tests.train.made import on_cpu, random_batch
from tests.train.test_ranks_in_threads import worlds

import torch
from torch import Tensor

CPU, STEP, ROOM = on_cpu(), 4, 24
MODELS = CHOICES | {f"shape {number}": shape for number, shape in enumerate(SHAPES)}


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The code of devices that are no CPU, on this CPU."""
    token = cpu.ELSEWHERE.set(True)
    yield
    cpu.ELSEWHERE.reset(token)


def answers(count: int, seed: int = 0, width: int = ROOM) -> Batch:
    """Questions with answers of all lengths, as `Rollouts` has them; one answer has no token."""
    rng = np.random.default_rng(seed)
    ids, place = rng.integers(0, VOCAB_SIZE, (count, width + 1)), np.arange(width)
    begins = rng.integers(1, width // 3, (count, 1))
    ends = begins + np.minimum(rng.lognormal(1.2, 0.8, (count, 1)).astype(np.int64) + 1, width - begins)
    ends[1] = begins[1]
    targets = np.where((place >= begins - 1) & (place < ends - 1), ids[:, 1:], IGNORE)
    zeros = np.zeros((count, width), np.int64)
    return Batch(ids[:, :-1], targets, np.tile(place, (count, 1)), zeros, rng.permutation(100)[:count])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("two_documents", [False, True])
def test_packed_rows_hold_every_token_up_to_the_last_target_once_and_documents_stay_apart(
    seed: int, two_documents: bool
) -> None:
    batch = random_batch(9, seed, 0.2) if two_documents else answers(9, seed)
    width = batch.ids.shape[1]
    rows, origins = packed(batch, ROOM, STEP)
    filled = origins >= 0
    where = np.sort(origins[filled])
    used = [max(1, *(np.flatnonzero(row != IGNORE) + 1).tolist(), 0) for row in batch.targets]
    assert where.tolist() == [row * width + place for row in range(9) for place in range(used[row])]
    assert rows.ids.shape[1] <= ROOM
    assert len(rows.ids) < 9
    for name in ("ids", "targets", "positions"):
        assert np.array_equal(getattr(rows, name)[filled], getattr(batch, name).reshape(-1)[origins[filled]])
    assert (rows.targets[~filled] == IGNORE).all()
    assert (rows.targets != IGNORE).sum() == (batch.targets != IGNORE).sum()
    for row in range(len(rows.ids)):
        segments, sources = rows.segments[row], origins[row][filled[row]]
        documents = [(source // width, batch.segments.reshape(-1)[source]) for source in sources.tolist()]
        assert (np.diff(segments) >= 0).all()
        assert (segments[filled[row].sum() :] == segments[filled[row].sum() - 1]).all()
        for i, one in enumerate(documents):
            for j, other in enumerate(documents):
                assert (segments[i] == segments[j]) == (one == other)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_packed_answers_are_those_of_answers_in_rows_of_their_own(name: str) -> None:
    model, batch = lively(MODELS[name]), answers(7)
    with torch.no_grad():
        found = by_token(model, batch, CPU, 1.3, STEP, ROOM)
        assert torch.allclose(found, by_token(model, batch, CPU, 1.3), atol=2e-5)
    assert bool((found[torch.from_numpy(batch.targets == IGNORE)] == 0).all())


Learned = tuple[float, dict[str, float], dict[str, Tensor]]


def learned(batch: Batch, loss: Grpo, size: int, capacity: int | None, world: World | None = None) -> Learned:
    """Loss, metrics and gradients of a step over answers with two updates and a reference."""
    rng, model = np.random.default_rng(1), lively(SHAPES[0])
    order = np.argsort(batch.samples)
    with torch.no_grad():
        log_p = by_token(model, batch, CPU).numpy()
    now, before = (log_p + rng.normal(0, 0.2, log_p.shape).astype(np.float32) for _ in range(2))
    advantage = rng.normal(0, 1, len(order)).astype(np.float32)
    drawn = Drawn(batch.samples[order], advantage, now[order], before[order], {})
    policy = GRPOLoss(loss, lambda: drawn, STEP, capacity)
    value, _, metrics, _ = accumulate_gradients(model, batch, size, CPU, policy, world)
    return value, metrics, {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def alike(one: Learned, other: Learned) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    assert one[1] == pytest.approx(other[1], rel=1e-4)
    assert one[2].keys() == other[2].keys()
    for name, gradient in one[2].items():
        assert torch.allclose(gradient, other[2][name], atol=1e-5 * float(gradient.abs().max()) + 1e-7), name


def grpo(normalize: str = "answers") -> Grpo:
    settings = {"normalize": normalize, "kl_coef": 0.3, "clip": 0.1}
    return Grpo.model_validate({"problems": [{"kind": "arithmetic"}], **settings})


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("normalize", ["answers", "tokens"])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_step_over_packed_answers_is_the_step_over_answers_in_rows_of_their_own(normalize: str, size: int) -> None:
    batch = answers(9)
    alike(learned(batch, grpo(normalize), size, ROOM), learned(batch, grpo(normalize), size, None))


@pytest.mark.parametrize("ranks", [2, 3, 11])
def test_gradients_of_packed_answers_do_not_depend_on_ranks(ranks: int) -> None:
    """Each rank packs its own answers, and has its own number of micro-batches; of eleven, two have no answer."""
    batch = answers(9)

    def rank(world: World) -> Learned:
        cpu.ELSEWHERE.set(True)  # of this thread
        return learned(batch, grpo(), 1, ROOM, world)

    with ThreadPoolExecutor(ranks) as pool:
        shared = list(pool.map(rank, worlds(ranks)))
    for one in shared:
        alike(one, learned(batch, grpo(), 9, None))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_micro_batch_of_packed_answers_has_no_more_positions_than_its_rows_may(size: int) -> None:
    batch = answers(40)
    groups = packed_groups(batch, size, CPU, STEP, ROOM)
    assert np.sort(np.concatenate(groups)).tolist() == list(range(40))
    shapes = [packed(batch.rows(group), ROOM, STEP)[0].ids.shape for group in groups]
    assert all(rows * width <= size * ROOM for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) == len(packed(batch, ROOM, STEP)[0].ids), "packed again, rows are the same"
    assert len(groups) < -(-40 // size)
    again = packed_groups(batch.rows(np.arange(40)), size, CPU, STEP, ROOM)
    assert [one.tolist() for one in again] == [one.tolist() for one in groups]
    assert packed_groups(batch.rows(np.arange(0)), size, CPU, STEP, ROOM) == []


@pytest.mark.usefixtures("elsewhere")
def test_a_trial_of_memory_has_micro_batches_that_are_full() -> None:
    """Answers grow in training: what was tried has to be the most that may come."""
    policy, batch = GRPOLoss(grpo(), lambda: pytest.fail("not needed"), STEP, ROOM), answers(8)
    full = policy.fullest(batch, CPU)
    parts = policy.micro_batches(full, 4, CPU)
    assert [packed(part, ROOM, STEP)[0].ids.shape for part in parts] == [(4, ROOM)] * 2
    assert (batch.targets[:, -1] == IGNORE).any(), "the batch itself stays as it is"
    assert np.array_equal(full.targets[:, :-1], batch.targets[:, :-1])


def test_on_a_cpu_each_answer_keeps_its_own_row_and_its_bits() -> None:
    batch, model = answers(7), lively(SHAPES[0])
    policy = GRPOLoss(grpo(), lambda: pytest.fail("not needed"), STEP, ROOM)
    assert policy.fullest(batch, CPU) is batch
    for one, other in zip(policy.micro_batches(batch, 3, CPU), batch.split(3), strict=True):
        assert np.array_equal(one.samples, other.samples)
        assert np.array_equal(one.ids, other.ids)
    with torch.no_grad():
        assert torch.equal(by_token(model, batch, CPU, 1.0, STEP, ROOM), by_token(model, batch, CPU, 1.0, STEP))


@pytest.mark.usefixtures("elsewhere")
def test_packing_leaves_little_padding_where_lengths_differ_much() -> None:
    rng = np.random.default_rng(0)
    shares = np.array([padding(drawn_lengths(rng, 64)) for _ in range(8)]).mean(0)
    assert shares[0] > 0.4
    assert shares[1] < 0.08


def drawn_lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Of questions with their answers, which end after 256 tokens."""
    asked = np.repeat(rng.integers(40, 120, count // 8), 8)
    return asked + np.minimum(rng.lognormal(4.4, 0.7, count).astype(np.int64) + 1, 256)


def padding(lengths: NDArray[np.int64], size: int = 16, most: int = 376) -> tuple[float, float]:
    """Share of positions without a token: of answers in rows of their own, and of packed answers."""
    width = min(most, 64 * -(-int(lengths.max()) // 64))
    place = np.arange(width)[None] + np.zeros((len(lengths), 1), np.int64)
    zeros = np.zeros_like(place)
    batch = Batch(zeros, np.where(place == lengths[:, None] - 1, 0, IGNORE), place, zeros, np.arange(len(lengths)))
    own = sum(shortened(part, 64).ids.size for part in batch.split(size))
    groups = packed_groups(batch, size, CPU, 64, most)
    shared = sum(packed(batch.rows(group), most, 64)[0].ids.size for group in groups)
    return 1 - lengths.sum() / own, 1 - lengths.sum() / shared


def size_of(model: Transformer) -> int:
    return sum(weight.nbytes for weight in model.parameters())


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_a_reference_in_the_format_of_matmuls_computes_the_same_bits_in_the_planned_bytes(
    name: str, dtype: torch.dtype
) -> None:
    precision, batch = on_cpu(dtype), answers(5)
    whole = lively(MODELS[name]).requires_grad_(False)
    short = copy.deepcopy(whole)
    keep_as_computed(short, precision)
    with torch.no_grad():
        assert torch.equal(by_token(short, batch, precision), by_token(whole, batch, precision))
    planned = reference_bytes(MODELS[name], "float16" if dtype == torch.float16 else "bfloat16")
    assert size_of(short) == planned < reference_bytes(MODELS[name], "float32") == size_of(whole)


def reference_bytes(shape: ModelConfig, precision: str, processor: bool = False) -> int:
    what = Workload(
        model=shape, vocab_size=VOCAB_SIZE, optimizer=AdamW(learning_rate=1.0), processor=processor, reference=True
    )
    return what.reference_bytes(TrainSetup(rows=1, precision=precision))  # type: ignore[arg-type]


def test_on_a_cpu_and_in_float32_the_reference_stays_as_it_is(request: pytest.FixtureRequest) -> None:
    model = lively(SHAPES[1])
    whole = size_of(model)
    keep_as_computed(model, on_cpu(torch.bfloat16))
    assert size_of(model) == whole == reference_bytes(SHAPES[1], "bfloat16", processor=True)
    request.getfixturevalue("elsewhere")
    keep_as_computed(model, CPU)
    assert size_of(model) == whole == reference_bytes(SHAPES[1], "float32")
