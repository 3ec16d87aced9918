import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bloomery.core.config import Config, build, load, plain
from bloomery.core.errors import ConfigError
from bloomery.model.config import PRESETS, ModelConfig, cost
from bloomery.model.transformer import Transformer

import torch

YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 64}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 100, "num_heads": 8}, "hidden_size 100 must be a multiple of num_heads 8; else set head_dim"),
    ({"hidden_size": 24, "num_heads": 8}, "needs an even head_dim, not 3"),
    ({"hidden_size": 4, "num_heads": 8}, "hidden_size 4 must be a multiple of num_heads 8"),
    ({"head_dim": 7}, "even head_dim, not 7"),
    ({"attention": "differential", "num_kv_heads": 1}, "pairs heads: num_kv_heads 1 must be even"),
    ({"attention": []}, "attention: tuple should have at least 1 item"),
    ({"attention": ["standard", "linear"]}, "attention.1: input should be 'standard' or 'differential', got 'linear'"),
    ({"sliding_window": ["full", 0]}, "sliding_window.1"),
    (
        {"position_embedding": "none", "rope_scaling": {"kind": "linear", "factor": 2}},
        "position_embedding=\"rope\", not 'none'",
    ),
    ({"rope_scaling": {"factor": 2}}, "Kinds: 'linear', 'llama3', 'yarn'"),
    ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "factor: must be at least 1"),
    ({"rope_scaling": {"kind": "llama3", "high_freq_factor": 1}}, "high_freq_factor 1.0 must be above"),
    ({"preset": "gpt2-124"}, "there is no preset 'gpt2-124'; did you mean 'gpt2-124m'"),
    ({"preset": 2}, "preset: input should be a valid string"),
    ({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 must be a multiple of num_kv_heads 3"),
    ({"num_heads": 4, "num_kv_heads": 8}, "num_heads 4 must be a multiple of num_kv_heads 8"),
    ({"num_layers": 0}, "num_layers: must be at least 1, got 0"),
    ({"context_length": -1}, "context_length: must be at least 1, got -1"),
    ({"rope_theta": 0.0}, "rope_theta: must be at least 0.1"),
    ({"rope_theta": 1.0, "rope_scaling": YARN}, "yarn divides by the logarithm of rope_theta 1.0"),
    ({"rope_theta": 0.5, "rope_scaling": YARN}, "rope_theta 0.5, which must be above 1"),
    ({"norm_eps": -1e-5}, "norm_eps: must be at least 1e-12"),
    ({"num_kv_head": 2}, "Did you mean 'num_kv_heads'"),
    ({"hidden_size": 256.5}, "hidden_size: input should be a valid integer"),
]


@pytest.mark.parametrize(("tree", "told"), BAD, ids=[told for _, told in BAD])
def test_a_shape_that_cannot_be_is_refused_and_the_message_holds_its_numbers(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ModelConfig, tree)
    assert told in str(caught.value)


def test_the_width_is_split_among_the_query_heads() -> None:
    assert ModelConfig(hidden_size=96, num_heads=6, num_kv_heads=2).head_size == 16
    assert ModelConfig(head_dim=10).head_size == 10


def test_a_choice_is_a_cycle_over_the_layers_and_one_word_a_cycle_of_one() -> None:
    assert build(ModelConfig, {"sliding_window": "full"}) == ModelConfig(sliding_window=("full",))
    assert ModelConfig().layer(5) == ("standard", "full", "swiglu")


def test_what_is_said_beside_a_preset_changes_it() -> None:
    shape = build(ModelConfig, {"preset": "plasma-235m", "context_length": 64})
    assert (shape.hidden_size, shape.num_layers, shape.context_length) == (1024, 18, 64)
    assert build(ModelConfig, plain(shape)) == shape


class _Section(Config):
    model: ModelConfig = ModelConfig()


def test_a_preset_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    found = load(_Section, tmp_path / "recipe.toml", ["model.preset=plasma-500m", "model.context_length=128"]).model
    assert (found.hidden_size, found.num_layers, found.context_length) == (1280, 26, 128)


# --- The numbers of parameters that others have published or compute, for every preset --------------------------------


EXACT = {
    "plasma-235m": 235_705_344,
    "plasma-500m": 521_570_560,
    "plasma-756m": 756_442_112,
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "harness-220m": 221_380_608,
    "harness-smol": 50_304 * 512 + 30 * (512 * 64 * 2 * (8 + 4) + 3 * 512 * 1408),
    "harness-smed": 233_275_392,
    "harness-med": 50_304 * 960 + 32 * (960 * 64 * 2 * (15 + 5) + 3 * 960 * 2560),
    "harness-1b": 50_304 * 2048 + 16 * (2048 * 64 * 2 * (32 + 8) + 3 * 2048 * 8192) + 8 * 4 * 64,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160,
}


def shape(name: str) -> ModelConfig:
    return ModelConfig(preset=name)


def weights(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_exactly_the_parameters_of_what_it_is_named_after(name: str) -> None:
    found = cost(shape(name), PRESETS[name].vocab_size).parameters
    assert found == EXACT[name]
    with torch.device("meta"):
        assert weights(Transformer(shape(name), PRESETS[name].vocab_size)) == found


def test_the_page_about_models_tells_the_numbers_of_every_preset() -> None:
    page = (Path(__file__).parents[2] / "docs" / "understand" / "model.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    told = {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in rows}
    assert told == {name: (EXACT[name], one.vocab_size, shape(name).context_length) for name, one in PRESETS.items()}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("llama", "plasma", "gpt2"))])
def test_transformers_counts_the_same(name: str) -> None:
    ours = shape(name)
    model: Any
    config: Any
    if name.startswith("gpt2"):
        model, config = GPT2LMHeadModel, GPT2Config()
        config.n_embd, config.n_layer, config.n_head = ours.hidden_size, ours.num_layers, ours.num_heads
    else:
        model, config = (Qwen3ForCausalLM, Qwen3Config()) if ours.qk_norm else (LlamaForCausalLM, LlamaConfig())
        config.hidden_size, config.num_hidden_layers, config.intermediate_size = (
            ours.hidden_size,
            ours.num_layers,
            ours.intermediate_size,
        )
        config.num_attention_heads, config.num_key_value_heads = ours.num_heads, ours.num_kv_heads
        config.head_dim, config.tie_word_embeddings = ours.head_size, ours.tie_embeddings
    config.vocab_size = PRESETS[name].vocab_size
    with torch.device("meta"):
        assert weights(model(config)) == EXACT[name]
