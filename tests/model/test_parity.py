"""What transformers computes with the same weights: scores and gradients, in float32."""

from typing import Any

import pytest
import transformers

from bloomery.model.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from bloomery.model.rope import alibi_slopes
from bloomery.weights.architectures import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, Architecture, gathered, spread
from tests.model.made import VOCAB_SIZE, lively, random_config, random_ids

import torch


def agree(config: ModelConfig, theirs: Any, architecture: Architecture, seed: int) -> None:
    """Give both the same weights, and compare scores and gradients."""
    ours, ids = lively(config, seed), random_ids(2, config.context, seed)
    weights = dict(ours.named_parameters())
    pieces = architecture.pieces(list(weights))
    with torch.no_grad():
        for piece in pieces:
            theirs.get_parameter(piece.theirs).copy_(gathered(piece, weights))
    mine, yours = ours.logits(ours(ids)), theirs.eval()(ids).logits
    assert float(yours.detach().std()) > 0.3
    assert float((mine - yours).detach().abs().max()) < 1e-5 * max(1.0, float(yours.detach().abs().max()))
    for scores in (mine, yours):
        torch.autograd.backward(torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    expected = {name: torch.empty_like(weight) for name, weight in weights.items()}
    for piece in pieces:
        spread(piece, theirs.get_parameter(piece.theirs).grad, expected)
    for name, weight in weights.items():
        assert weight.grad is not None
        assert float((weight.grad - expected[name]).norm()) <= 1e-4 * float(expected[name].norm()) + 1e-7, name


def llama_like(kind: Any, model: Any, config: ModelConfig, rope: dict[str, Any] | None = None, **more: Any) -> Any:
    return model(
        kind(
            vocab_size=VOCAB_SIZE,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            intermediate_size=config.mlp_width,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"} | (rope or {}),
            attn_implementation="eager",
            **more,
        )
    )


def changed(seed: int, **what: Any) -> ModelConfig:
    return ModelConfig(**(dict(random_config(seed)) | {"num_layers": 2} | what))


seeds = pytest.mark.parametrize("seed", range(4))


@seeds
def test_a_llama(seed: int) -> None:
    config = changed(seed)
    agree(config, llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, config), LLAMA, seed)


@seeds
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_llama_whose_positions_are_stretched(seed: int, kind: str) -> None:
    context = 24
    scaling: Any = {
        "linear": LinearScaling(factor=2.5),
        "llama3": Llama3Scaling(original_context=context, factor=4.0),
        "yarn": YarnScaling(factor=4.0, original_context=context, attention_factor=None if seed % 2 else 1.3),
    }[kind]
    rope = {"rope_type": kind, "factor": scaling.factor}
    if kind != "linear":
        rope["original_max_position_embeddings"] = context
    if kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if kind == "yarn" and scaling.attention_factor:
        rope["attention_factor"] = scaling.attention_factor
    config = changed(seed, rope_scaling=scaling, context=60, head_width=16)
    model = llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, config, rope)
    agree(config, model, LLAMA, seed)


@seeds
def test_a_qwen2_with_its_biases(seed: int) -> None:
    config = changed(seed, biases="qkv")
    agree(config, llama_like(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, config), QWEN2, seed)


@seeds
def test_a_qwen3_with_its_norms_of_queries_and_keys(seed: int) -> None:
    config = changed(seed, qk_norm=True, head_width=10)
    agree(config, llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, config), QWEN3, seed)


@seeds
def test_a_mistral_with_its_window(seed: int) -> None:
    config = changed(seed, sliding_window=(5 + seed,))
    model = llama_like(transformers.MistralConfig, transformers.MistralForCausalLM, config, sliding_window=5 + seed)
    agree(config, model, MISTRAL, seed)


@seeds
def test_a_gpt2(seed: int) -> None:
    kinds: Any = {"positions": "absolute", "norm": "layernorm", "biases": "all", "feed_forward": ("gelu_tanh",)}
    sizes: Any = {"width": 12 * (seed + 1), "num_heads": 3, "num_kv_heads": 3, "tie_embeddings": True}
    config = changed(seed, **kinds, **sizes)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.mlp_width,
            layer_norm_epsilon=config.norm_eps,
        )
    )
    agree(config, theirs, GPT2, seed)


@pytest.mark.parametrize("heads", [4, 6])
def test_the_slopes_of_alibi_are_those_of_bloom(heads: int) -> None:
    bias = transformers.models.bloom.modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    assert bias[:, 0, 1].tolist() == pytest.approx(alibi_slopes(heads))


def test_far_positions_have_the_bits_of_transformers() -> None:
    config = ModelConfig(width=32, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=16, context=4000)
    agree(config, llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, config), LLAMA, 0)
