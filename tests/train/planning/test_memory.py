import pytest

from bloomery.core.config import build
from bloomery.model.config import cost
from bloomery.model.transformer import Transformer
from bloomery.train import loss, optim
from bloomery.train.config import Training, remarks
from bloomery.train.optim import Optimizers
from bloomery.train.plan import memory
from bloomery.train.plan.memory import optimizer_bytes, rows_at_once, rows_per_step
from bloomery.train.step import accumulate_gradients
from bloomery.weights import checkpoint
from tests.model.made import SHAPES, VOCAB_SIZE
from tests.train.made import on_cpu, random_batch


@pytest.mark.parametrize("kind", ["muon", "adamw", "ademamix", "lion", "adamw8bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_optimizer_takes_the_bytes_that_were_planned(shape: object, kind: str) -> None:
    config = build(Training, {"steps": 3, "global_batch_tokens": 64, "optimizer": {"kind": kind}})
    model = Transformer(shape, VOCAB_SIZE)  # type: ignore[arg-type]
    optimizers = Optimizers(model, config.optimizer)
    accumulate_gradients(model, random_batch(2), 2, on_cpu())
    assert cost(model.config, VOCAB_SIZE).parameters == sum(weight.numel() for weight in model.parameters())
    optimizers.step()
    moments = [value for name, value in optimizers.state().items() if not name.endswith("/step")]
    rounding = 8 * len(list(model.parameters())) if kind == "adamw8bit" else 0  # a last block of scales in each weight
    planned = optimizer_bytes(config.optimizer, model.config, VOCAB_SIZE)
    assert planned == pytest.approx(sum(value.nbytes for value in moments), abs=rounding)


@pytest.mark.parametrize("tokens", [1, 39, 40, 79, 80, 1000])
def test_a_step_is_whole_rows_and_at_least_one(tokens: int) -> None:
    """As the session trains them, so that what was planned is what is done."""
    config = build(Training, {"steps": 3, "global_batch_tokens": tokens, "micro_batch_tokens": tokens})
    assert rows_per_step(config, 40) == rows_at_once(config, 40) == max(1, tokens // 40)


def test_what_the_numbers_come_to_is_said_where_they_were_hardly_meant_so() -> None:
    def said(**settings: object) -> list[str]:
        return remarks(build(Training, {"steps": 10, "global_batch_tokens": 80} | settings), 40)

    assert said() == said(schedule={"kind": "cosine", "warmup_steps": 9}) == []
    assert said(global_batch_tokens=7) == ["a step is 1 row of 40: 40 tokens, and not 7"]
    assert said(global_batch_tokens=100) == ["a step is 2 rows of 40: 80 tokens, and not 100"]


def test_a_plan_counts_with_the_numbers_that_training_has() -> None:
    """`train/plan/memory.py` needs no torch, so it repeats them."""
    assert memory.LOGITS_CHUNK_BYTES == loss.CHUNK_BYTES
    assert memory.FILE_BYTES == checkpoint.FILE_BYTES
    assert (memory.UPDATE_NUMBERS, memory.WIDE_UPDATE_NUMBERS) == (optim.BATCH_NUMBERS, optim.WIDE_BATCH_NUMBERS)
    assert memory.COPIES_AT_ONCE == optim.COPIES_AT_ONCE


def test_chunks_of_logits_take_a_small_share_of_a_device_and_never_less_than_a_cpu_has() -> None:
    sizes = [memory.logits_chunk_bytes(gib * 2**30, processor=False) for gib in (0, 2, 8, 16, 24, 80, 288)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (memory.LOGITS_CHUNK_BYTES, memory.LARGEST_CHUNK_BYTES)
    assert all(size <= gib * 2**30 / 24 for gib, size in zip((8, 16, 24, 80), sizes[2:], strict=False))
    assert memory.logits_chunk_bytes(80 * 2**30, processor=True) == memory.LOGITS_CHUNK_BYTES
