"""
Known shapes by name, with the vocabulary that their published number of parameters counts. Needs no torch.

    plasma      1386.ai: Plasma 1.0, 1.1 and 1.2
    gpt2        Radford et al. 2019; as trained by llm.c, whose table of 50257 is padded to 50304 while it trains
    harness     LanguageModelTrainingHarness: its norms learn nothing. In its 1b, heads of differential layers are half
                as wide as here and their key heads half as many
    llama-3.1   Dubey et al. 2024, https://arxiv.org/abs/2407.21783
    baichuan2   Yang et al. 2023, https://arxiv.org/abs/2309.10305; without its NormHead
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    config: dict[str, Any]
    """Of a ModelConfig."""
    vocab_size: int
    """That its number of parameters is told for; a recipe's own tokenizer decides another."""


def _shape(width: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_width: int) -> dict[str, Any]:
    return {
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "mlp_width": mlp_width,
    }


def _gpt2(width: int, num_layers: int, num_heads: int) -> Preset:
    shape = _shape(width, num_layers, num_heads, num_heads, 4 * width)
    kinds = {"feed_forward": "gelu_tanh", "positions": "absolute", "norm": "layernorm", "biases": "all"}
    return Preset(shape | kinds | {"context": 1024}, 50257)


PLASMA = {"norm_eps": 1e-6}
HARNESS = {"context": 8192, "rope_theta": 100_000.0, "norm_weights": False, "norm_eps": 1.1920928955078125e-07}
LLAMA_31 = {
    "context": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_context": 8192},
    "tie_embeddings": False,
}
BAICHUAN2 = {"context": 4096, "norm_eps": 1e-6, "tie_embeddings": False}

PRESETS = {
    "plasma-235m": Preset(_shape(1024, 18, 16, 4, 2816) | PLASMA | {"context": 1024}, 32_000),
    "plasma-500m": Preset(_shape(1280, 26, 20, 4, 3584) | PLASMA | {"context": 1024}, 48_000),
    "plasma-756m": Preset(
        _shape(1536, 28, 24, 4, 4096) | PLASMA | {"context": 2048, "rope_theta": 100_000.0, "qk_norm": True}, 48_000
    ),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-350m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1558m": _gpt2(1600, 48, 25),
    "harness-220m": Preset(_shape(1024, 12, 16, 8, 3584) | HARNESS, 50_304),
    "harness-smol": Preset(_shape(512, 30, 8, 4, 1408) | HARNESS, 50_304),
    "harness-smed": Preset(_shape(768, 30, 12, 6, 2048) | HARNESS, 50_304),
    "harness-med": Preset(_shape(960, 32, 15, 5, 2560) | HARNESS, 50_304),
    "harness-1b": Preset(_shape(2048, 16, 32, 8, 8192) | HARNESS | {"attention": ["standard", "differential"]}, 50_304),
    "llama-3.1-8b": Preset(_shape(4096, 32, 32, 8, 14_336) | LLAMA_31, 128_256),
    "llama-3.1-70b": Preset(_shape(8192, 80, 64, 8, 28_672) | LLAMA_31, 128_256),
    "llama-3.1-405b": Preset(_shape(16_384, 126, 128, 8, 53_248) | LLAMA_31, 128_256),
    "baichuan2-7b": Preset(_shape(4096, 32, 32, 32, 11_008) | BAICHUAN2, 125_696),
    "baichuan2-13b": Preset(_shape(5120, 40, 40, 40, 13_696) | BAICHUAN2 | {"positions": "alibi"}, 125_696),
}
