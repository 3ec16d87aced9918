from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"width": 100, "num_heads": 8}, "width 100 must be num_heads 8 times an even head width"),
    ({"width": 24, "num_heads": 8}, "width 24 must be num_heads 8 times an even head width"),
    ({"width": 4, "num_heads": 8}, "width 4 must be num_heads 8 times an even head width"),
    ({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 must be a multiple of num_kv_heads 3"),
    ({"num_heads": 4, "num_kv_heads": 8}, "num_heads 4 must be a multiple of num_kv_heads 8"),
    ({"num_layers": 0}, "num_layers: input should be greater than or equal to 1, got 0"),
    ({"context": -1}, "context: input should be greater than or equal to 1, got -1"),
    ({"rope_theta": 0.0}, "rope_theta: input should be greater than 0"),
    ({"norm_eps": -1e-5}, "norm_eps: input should be greater than 0"),
    ({"num_kv_head": 2}, "Did you mean 'num_kv_heads'"),
    ({"width": 256.5}, "width: input should be a valid integer"),
]


@pytest.mark.parametrize(("tree", "told"), BAD, ids=[told for _, told in BAD])
def test_a_shape_that_cannot_be_is_refused_and_the_message_holds_its_numbers(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ModelConfig, tree)
    assert told in str(caught.value)


def test_the_width_is_split_among_the_query_heads() -> None:
    assert ModelConfig(width=96, num_heads=6, num_kv_heads=2).head_width == 16
