from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import Config, build, load, plain
from bloomery.core.errors import ConfigError
from bloomery.model.config import ModelConfig

YARN = {"kind": "yarn", "factor": 4.0, "original_context": 64}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"width": 100, "num_heads": 8}, "width 100 must be a multiple of num_heads 8, or head_width given"),
    ({"width": 24, "num_heads": 8}, "rotary positions turn pairs of numbers, and a head has 3"),
    ({"width": 4, "num_heads": 8}, "width 4 must be a multiple of num_heads 8"),
    ({"head_width": 7}, "a head has 7"),
    ({"attention": "differential", "num_kv_heads": 1}, "pairs heads: num_kv_heads 1 must be even"),
    ({"attention": []}, "attention: tuple should have at least 1 item"),
    ({"attention": ["standard", "linear"]}, "attention.1: input should be 'standard' or 'differential', got 'linear'"),
    ({"sliding_window": ["full", 0]}, "sliding_window.1"),
    ({"positions": "none", "rope_scaling": {"kind": "linear", "factor": 2}}, "positions is 'none'"),
    ({"rope_scaling": {"factor": 2}}, "Kinds: 'linear', 'llama3', 'yarn'"),
    ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "factor: must be at least 1"),
    ({"rope_scaling": {"kind": "llama3", "high_freq_factor": 1}}, "high_freq_factor 1.0 must be above"),
    ({"preset": "gpt2-124"}, "there is no preset 'gpt2-124'; did you mean 'gpt2-124m'"),
    ({"preset": 2}, "preset: input should be a valid string"),
    ({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 must be a multiple of num_kv_heads 3"),
    ({"num_heads": 4, "num_kv_heads": 8}, "num_heads 4 must be a multiple of num_kv_heads 8"),
    ({"num_layers": 0}, "num_layers: must be at least 1, got 0"),
    ({"context": -1}, "context: must be at least 1, got -1"),
    ({"rope_theta": 0.0}, "rope_theta: must be at least 0.1"),
    ({"rope_theta": 1.0, "rope_scaling": YARN}, "yarn divides by the logarithm of rope_theta 1.0"),
    ({"rope_theta": 0.5, "rope_scaling": YARN}, "rope_theta 0.5, which must be above 1"),
    ({"norm_eps": -1e-5}, "norm_eps: must be at least 1e-12"),
    ({"num_kv_head": 2}, "Did you mean 'num_kv_heads'"),
    ({"width": 256.5}, "width: input should be a valid integer"),
]


@pytest.mark.parametrize(("tree", "told"), BAD, ids=[told for _, told in BAD])
def test_a_shape_that_cannot_be_is_refused_and_the_message_holds_its_numbers(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ModelConfig, tree)
    assert told in str(caught.value)


def test_the_width_is_split_among_the_query_heads() -> None:
    assert ModelConfig(width=96, num_heads=6, num_kv_heads=2).head_size == 16
    assert ModelConfig(head_width=10).head_size == 10


def test_a_choice_is_a_cycle_over_the_layers_and_one_word_a_cycle_of_one() -> None:
    assert build(ModelConfig, {"sliding_window": "full"}) == ModelConfig(sliding_window=("full",))
    assert ModelConfig().layer(5) == ("standard", "full", "swiglu")


def test_what_is_said_beside_a_preset_changes_it() -> None:
    shape = build(ModelConfig, {"preset": "plasma-235m", "context": 64})
    assert (shape.width, shape.num_layers, shape.context) == (1024, 18, 64)
    assert build(ModelConfig, plain(shape)) == shape


class _Section(Config):
    model: ModelConfig = ModelConfig()


def test_a_preset_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    found = load(_Section, tmp_path / "recipe.toml", ["model.preset=plasma-500m", "model.context=128"]).model
    assert (found.width, found.num_layers, found.context) == (1280, 26, 128)
