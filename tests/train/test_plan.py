import pytest

from bloomery.core.config import build
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.train.config import Training
from bloomery.train.loop import accumulate_gradients
from bloomery.train.optim import Optimizers
from bloomery.train.plan import activation_bytes_per_token, plan, remarks, rows_at_once, rows_per_step
from tests.model.made import SHAPES, VOCAB_SIZE
from tests.train.made import processor, random_batch


@pytest.mark.parametrize("kind", ["muon", "adamw", "ademamix", "lion", "adamw8bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_gradients_and_optimizer_take_the_bytes_that_were_planned(shape: object, kind: str) -> None:
    config = build(Training, {"steps": 3, "tokens_per_step": 64, "optimizer": {"kind": kind}})
    model = Transformer(shape, VOCAB_SIZE)  # type: ignore[arg-type]
    optimizers = Optimizers(model, config.optimizer)
    accumulate_gradients(model, random_batch(2), 2, processor())
    needs = plan(config, model.config, VOCAB_SIZE)
    assert needs.parameters == sum(weight.numel() for weight in model.parameters())
    assert needs.weights_bytes == sum(weight.nbytes for weight in model.parameters())
    assert needs.gradient_bytes == sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
    optimizers.step()
    moments = [value for name, value in optimizers.state().items() if not name.endswith("/step")]
    rounding = 8 * len(list(model.parameters())) if kind == "adamw8bit" else 0  # a last block of scales in each weight
    assert needs.optimizer_bytes == pytest.approx(sum(value.nbytes for value in moments), abs=rounding)
    parts = (
        needs.weights_bytes,
        needs.gradient_bytes,
        needs.optimizer_bytes,
        needs.activation_bytes,
        needs.copies_bytes,
    )
    assert needs.peak_bytes == sum(parts)
    assert needs.tokens == 3 * max(1, 64 // model.config.context) * model.config.context


@pytest.mark.parametrize("tokens", [1, 39, 40, 79, 80, 1000])
def test_a_step_is_whole_rows_and_at_least_one(tokens: int) -> None:
    """As the session trains them, so that what was planned is what is done."""
    config = build(Training, {"steps": 3, "tokens_per_step": tokens, "micro_batch_tokens": tokens})
    rows = max(1, tokens // 40)
    assert rows_per_step(config, 40) == rows_at_once(config, 40) == rows
    needs = plan(config, (shape := SHAPES[0].model_copy(update={"context": 40})), VOCAB_SIZE)
    assert needs.tokens == 3 * rows * 40
    assert needs.flops == needs.tokens * cost(shape, VOCAB_SIZE).train_flops_per_token
    assert needs.activation_bytes == rows * 40 * activation_bytes_per_token(shape)


def test_what_the_numbers_come_to_is_said_where_they_were_hardly_meant_so() -> None:
    def said(**settings: object) -> list[str]:
        return remarks(build(Training, {"steps": 10, "tokens_per_step": 80} | settings), 40)

    assert said() == said(schedule={"kind": "cosine", "warmup_steps": 9}) == []
    assert said(tokens_per_step=7) == ["a step is 1 row of 40: 40 tokens, and not 7"]
    assert said(tokens_per_step=100) == ["a step is 2 rows of 40: 80 tokens, and not 100"]


def test_a_larger_micro_batch_takes_more_memory_until_it_is_the_whole_step() -> None:
    T = SHAPES[0].context
    sizes = [
        plan(
            build(Training, {"steps": 1, "tokens_per_step": 8 * T, "micro_batch_tokens": rows * T}),
            SHAPES[0],
            VOCAB_SIZE,
        ).activation_bytes
        for rows in (2, 4, 8, 72)
    ]
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == sizes[3] == 4 * sizes[0]
