from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core import config as configs
from bloomery.model.config import ModelConfig, cost
from bloomery.model.transformer import Transformer
from bloomery.recipe import Recipe
from bloomery.stages.tokenizer import vocab_size
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, any_config, random_ids

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


@settings(max_examples=150)
@given(st.integers(0, 10**6))
def test_a_model_has_as_many_weights_as_its_cost_says(seed: int) -> None:
    config = any_config(seed)
    with torch.device("meta"):
        model = Transformer(config, VOCAB_SIZE)
    facts = cost(config, VOCAB_SIZE)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    linear = [part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)]
    assert facts.matmul_parameters == sum(linear)


def test_the_demo_has_four_million_parameters() -> None:
    recipe = configs.load(Recipe, DEMO)
    assert recipe.pretrain is not None
    assert cost(recipe.pretrain.model, vocab_size(recipe.tokenizer)).parameters == 4_000_000


@pytest.mark.parametrize("config", [*SHAPES, *CHOICES.values()])
def test_the_work_of_a_token_is_three_times_what_a_forward_pass_counts_without_what_nobody_sees(
    config: ModelConfig,
) -> None:
    """A pass over a row makes the whole square; the cost counts what may be seen of it, the diagonal half."""
    model, T = Transformer(config, VOCAB_SIZE), config.context_length
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(random_ids(1, T)))
    unseen = 0.0
    for number in range(config.num_layers):
        kind, window, _ = config.layer(number)
        ahead = torch.arange(T)[:, None] - torch.arange(T)
        seen = (ahead > 0) & (ahead < (T + 1 if window == "full" else window)) | (ahead == 0)
        square = float(seen.sum()) - int(T if window == "full" else window) / 2
        numbers = config.head_size * (3 if kind == "differential" else 2)
        unseen += 2 * config.num_heads * numbers * (T * T - square) / T
    assert cost(config, VOCAB_SIZE).train_flops_per_token == pytest.approx(3 * (counter.get_total_flops() / T - unseen))
