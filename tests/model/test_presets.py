"""The numbers of parameters that others have published or compute, for every preset."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bloomery.model.config import PRESETS, ModelConfig
from bloomery.model.flops import cost
from bloomery.model.transformer import Transformer

import torch

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
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    told = {name: tuple(int(number.replace(",", "")) for number in numbers) for name, *numbers in rows}
    assert told == {name: (EXACT[name], one.vocab_size, shape(name).context) for name, one in PRESETS.items()}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("llama", "plasma", "gpt2"))])
def test_transformers_counts_the_same(name: str) -> None:
    ours = shape(name)
    model: Any
    config: Any
    if name.startswith("gpt2"):
        model, config = GPT2LMHeadModel, GPT2Config()
        config.n_embd, config.n_layer, config.n_head = ours.width, ours.num_layers, ours.num_heads
    else:
        model, config = (Qwen3ForCausalLM, Qwen3Config()) if ours.qk_norm else (LlamaForCausalLM, LlamaConfig())
        config.hidden_size, config.num_hidden_layers, config.intermediate_size = (
            ours.width,
            ours.num_layers,
            ours.mlp_width,
        )
        config.num_attention_heads, config.num_key_value_heads = ours.num_heads, ours.num_kv_heads
        config.head_dim, config.tie_word_embeddings = ours.head_size, ours.tie_embeddings
    config.vocab_size = PRESETS[name].vocab_size
    with torch.device("meta"):
        assert weights(model(config)) == EXACT[name]
