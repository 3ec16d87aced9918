from pathlib import Path

import pytest

from bloomery.core import config as configs
from bloomery.model.cost import cost
from bloomery.model.transformer import Transformer
from bloomery.recipe import Recipe
from bloomery.stages.tokenizer import vocab_size
from tests.model.made import VOCAB_SIZE, random_config, random_ids

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


@pytest.mark.parametrize("seed", range(12))
def test_a_model_has_as_many_weights_as_its_cost_says(seed: int) -> None:
    config = random_config(seed)
    model = Transformer(config, VOCAB_SIZE)
    facts = cost(config, VOCAB_SIZE)
    assert facts.parameters == sum(weight.numel() for weight in model.parameters())
    linear = [part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)]
    assert facts.matmul_parameters == sum(linear)


def test_the_demo_has_four_million_parameters() -> None:
    recipe = configs.load(Recipe, DEMO)
    assert recipe.pretrain is not None
    assert cost(recipe.pretrain.model, vocab_size(recipe.tokenizer)).parameters == 4_000_000


@pytest.mark.parametrize("seed", range(3))
def test_the_work_of_a_token_is_three_times_what_a_forward_pass_counts_with_half_of_the_attention(seed: int) -> None:
    config = random_config(seed)
    model = Transformer(config, VOCAB_SIZE)
    T = config.context
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(random_ids(1, T)))
    attention = 4 * config.num_layers * config.num_heads * config.head_size * T
    forward = counter.get_total_flops() / T
    assert cost(config, VOCAB_SIZE).train_flops_per_token == 3 * (forward - attention / 2)
