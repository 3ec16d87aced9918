"""The loss over packed rows: what it depends on, and what it does not."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from bloomery.hw.distributed import World
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, Batch
from bloomery.train.preference import losses
from bloomery.train.preference.config import Dpo, Ipo, SimPo
from bloomery.train.preference.losses import (
    CHOSEN,
    REJECTED,
    Answers,
    PairLoss,
    PairTable,
    PreferenceLoss,
    by_sequence,
)
from bloomery.train.step import accumulate_gradients
from tests.model.made import SHAPES, VOCAB_SIZE, lively
from tests.train.made import T, on_cpu
from tests.train.test_ranks_in_threads import worlds

import torch

CPU = on_cpu()
LOSSES: list[PairLoss] = [Dpo(beta=0.5), Ipo(beta=0.5), SimPo()]


def pairs_in_rows(rows: int, seed: int = 0) -> Batch:
    """Rows of four sequences of four tokens, of which the last two are looked at."""
    rng = np.random.default_rng(seed)
    place = np.tile(np.arange(T), (rows, 1))
    targets = np.where(place % 4 < 2, IGNORE, rng.integers(0, VOCAB_SIZE, (rows, T)))
    ids = rng.integers(0, VOCAB_SIZE, (rows, T))
    return Batch(ids, targets, place % 4, place // 4 + 1, np.arange(rows))


def table_of(loss: PairLoss, rows: int) -> PairTable:
    kinds = np.tile(np.array([CHOSEN, REJECTED] * 2, np.int8), (rows, 1))
    kinds[-1, 2:] = 0  # the last row holds less
    rng = np.random.default_rng(5)
    reference = None if isinstance(loss, SimPo) else rng.normal(-9.0, 2.0, kinds.shape).astype(np.float32)
    return PairTable(kinds, reference)


def found(loss: PairLoss, micro_batch: int, size: int) -> list[tuple[float, dict[str, float], Transformer]]:
    """Loss, what is told and the model with its gradients, of each of `size` ranks."""
    batch, table = pairs_in_rows(5), table_of(loss, 5)

    def one(world: World) -> tuple[float, dict[str, float], Transformer]:
        model = lively(SHAPES[1])
        value, _, metrics, _ = accumulate_gradients(model, batch, micro_batch, CPU, PreferenceLoss(loss, table), world)
        return value, metrics, model

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, worlds(size)))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.kind))
def test_neither_ranks_nor_micro_batches_matter(loss: PairLoss) -> None:
    [(alone, told, model)] = found(loss, 5, 1)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in gradients.values())
    for micro_batch, size in ((1, 1), (2, 2), (5, 3), (1, 8)):
        for value, numbers, other in found(loss, micro_batch, size):
            assert value == pytest.approx(alone, rel=1e-5)
            assert numbers == pytest.approx(told, rel=1e-4)
            for name, one in other.named_parameters():
                if name in gradients:
                    assert one.grad is not None
                    assert float((one.grad - gradients[name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.kind))
def test_the_loss_is_the_mean_over_pairs_that_stand_alone(loss: PairLoss) -> None:
    """Each sequence goes through the model in a row of its own."""
    batch, table, model = pairs_in_rows(5), table_of(loss, 5), lively(SHAPES[1])
    each = []
    for row in range(5):
        for first in (0, 2) if row < 4 else (0,):
            answers = []
            for number in (first, first + 1):
                part = slice(4 * number, 4 * number + 4)
                ids, targets, places = (one[row : row + 1, part] for one in (batch.ids, batch.targets, batch.positions))
                alone = Batch(ids, targets, places, np.zeros((1, 4), np.int64), np.array([0]))
                with torch.no_grad():
                    said = by_sequence(model, alone, 1, CPU)
                before = torch.tensor([0.0 if table.reference is None else table.reference[row, number]])
                answers.append(Answers(said.sums[:, 0], before, said.tokens[:, 0]))
            match loss:
                case Dpo():
                    judged = losses.dpo(answers[0], answers[1], loss)
                case Ipo():
                    judged = losses.ipo(answers[0], answers[1], loss)
                case SimPo():
                    judged = losses.simpo(answers[0], answers[1], loss)
            each.append(float(judged.losses))
    value = accumulate_gradients(model, batch, 2, CPU, PreferenceLoss(loss, table)).loss
    assert value == pytest.approx(sum(each) / 9, rel=1e-5)


def test_changing_one_answer_leaves_the_others_bit_for_bit() -> None:
    model, batch = lively(SHAPES[1]), pairs_in_rows(3)
    ids = batch.ids.copy()
    ids[1, 4:8] = (ids[1, 4:8] + 1) % VOCAB_SIZE
    with torch.no_grad():
        before, after = (by_sequence(model, replace(batch, ids=one), 4, CPU).sums for one in (batch.ids, ids))
    same = torch.ones_like(before, dtype=torch.bool)
    same[1, 1] = False
    assert torch.equal(before[same], after[same])
    assert before[1, 1] != after[1, 1]
