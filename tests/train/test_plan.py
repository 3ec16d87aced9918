import pytest

from bloomery.core.config import build
from bloomery.model.transformer import Transformer
from bloomery.train.config import Training
from bloomery.train.loop import accumulate_gradients
from bloomery.train.optim import Optimizers
from bloomery.train.plan import plan
from tests.model.made import SHAPES, VOCAB_SIZE
from tests.train.made import processor, random_batch


@pytest.mark.parametrize("kind", ["muon", "adamw"])
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
    assert needs.optimizer_bytes == sum(value.nbytes for value in moments)
    parts = (needs.weights_bytes, needs.gradient_bytes, needs.optimizer_bytes, needs.activation_bytes)
    assert needs.peak_bytes == sum(parts)
    assert needs.tokens == 192


def test_a_larger_micro_batch_takes_more_memory_until_it_is_the_whole_step() -> None:
    sizes = [
        plan(
            build(Training, {"steps": 1, "tokens_per_step": 1000, "micro_batch_tokens": tokens}), SHAPES[0], VOCAB_SIZE
        ).activation_bytes
        for tokens in (250, 500, 1000, 9000)
    ]
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == sizes[3] == 4 * sizes[0]
