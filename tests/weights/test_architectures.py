"""Every family beside transformers: saved here and loaded there, saved there and loaded here."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from bloomery.core.errors import CheckpointError
from bloomery.model.config import PRESETS, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import architectures, hf
from bloomery.weights.gguf_layouts import LAYOUTS
from bloomery.weights.hf import CONFIG, LINEAGE, Lineage
from bloomery.weights.safetensors import SUMS
from tests.model.made import lively, random_config, random_ids
from tests.tokenizer.made import small
from tests.weights.made import in_float64

import safetensors.torch
import torch
import torch.nn.functional as F

VOCAB = small().vocab_size
RENDERER = Renderer(small())
SAID = Lineage(tokenizer=small().hash, template=None, shards="5" * 64)
SCALINGS = (
    LinearScaling(factor=2.5),
    Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_context_length=16),
    YarnScaling(factor=4.0, original_context_length=8),
    YarnScaling(factor=2.0, original_context_length=16, beta_fast=20.0, beta_slow=2.0, attention_factor=1.2),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}


def shape(seed: int, **changes: Any) -> ModelConfig:
    return ModelConfig(**(random_config(seed).model_dump() | changes))


def odd(seed: int, **changes: Any) -> ModelConfig:
    """A width that is no multiple of the heads, which transformers' Llama refuses."""
    return shape(seed, hidden_size=30 + 4 * seed, num_heads=4, num_kv_heads=2, head_dim=8 + 2 * seed, **changes)


def gpt2(seed: int) -> ModelConfig:
    plain = random_config(seed)
    rng = np.random.default_rng(seed)
    changes = {"num_kv_heads": plain.num_heads, "mlp": str(rng.choice(["gelu_tanh", "gelu", "relu2"]))}
    return shape(seed, position_embedding="learned", norm="layernorm", biases="all", **changes)


def even(seed: int, **changes: Any) -> ModelConfig:
    """Heads of 16 numbers."""
    heads, groups = 1 + seed % 2, 2
    sizes = {"num_kv_heads": heads, "num_heads": heads * groups, "hidden_size": 16 * heads * groups}
    return shape(seed, **sizes, **changes)


def gemma3(seed: int) -> ModelConfig:
    fields = {"norm_order": "both", "norm_plus_one": True, "scale_embeddings": True, "qk_norm": True}
    scaling = SCALINGS[0] if seed % 2 else None
    positions = {"rope_local_theta": 77.0, "rope_scaling": scaling, "query_pre_attn_scalar": 5.0 + seed}
    return shape(seed, mlp="geglu_tanh", head_dim=6, num_layers=3, sliding_window=[4, "full"], **fields, **positions)


def longrope(seed: int) -> ModelConfig:
    rng, attention = np.random.default_rng(seed), 1.3 if seed % 2 else None
    short, long = (tuple(1.0 + 2 * float(value) for value in rng.random(6)) for _ in range(2))
    scaling = {"kind": "longrope", "factor": 8.0, "original_context_length": 24, "attention_factor": attention}
    factors = {"short_factor": short, "long_factor": long}
    return even(seed, partial_rotary_factor=0.75, context_length=24, rope_scaling=scaling | factors)


def neox(seed: int) -> ModelConfig:
    config = even(seed)
    kinds = {"norm": "layernorm", "biases": "all", "num_kv_heads": config.num_heads, "tie_embeddings": False}
    changes = {"mlp": ["gelu", "gelu_tanh"][seed % 2], "parallel_residual": seed != 3, "partial_rotary_factor": 0.25}
    return ModelConfig(**(config.model_dump() | kinds | changes))


FAMILIES: dict[str, Callable[[int], ModelConfig]] = {
    "LlamaForCausalLM": lambda seed: shape(seed, head_dim=2 * (1 + seed % 5)),
    "LlamaForCausalLM with biases": lambda seed: shape(seed, biases="all"),
    "LlamaForCausalLM with biases of attention": lambda seed: shape(seed, biases="attention"),
    "LlamaForCausalLM with biases of the MLP": lambda seed: shape(seed, biases="mlp"),
    "LlamaForCausalLM with geglu": lambda seed: shape(seed, mlp="geglu"),
    "LlamaForCausalLM with scaled positions": lambda seed: shape(
        seed, rope_scaling=SCALINGS[seed % 4], context_length=48
    ),
    "MistralForCausalLM without a window": lambda seed: odd(seed, rope_scaling=SCALINGS[seed - 2], context_length=48),
    "MistralForCausalLM": lambda seed: shape(seed, sliding_window=5),
    "Qwen2ForCausalLM": lambda seed: shape(seed, biases="qkv"),
    "Qwen2ForCausalLM with windows": lambda seed: shape(seed, biases="qkv", num_layers=3, sliding_window=["full", 4]),
    "Qwen3ForCausalLM": lambda seed: shape(seed, qk_norm=True, head_dim=2 * (1 + seed % 5)),
    "GPT2LMHeadModel": gpt2,
    "SmolLM3ForCausalLM": lambda seed: shape(seed, num_layers=3, rope_layers=[True, bool(seed % 2), False]),
    "Olmo2ForCausalLM": lambda seed: shape(seed, norm_order="after", qk_norm=True, qk_norm_over="width"),
    "Gemma3ForCausalLM": gemma3,
    "Phi3ForCausalLM": lambda seed: even(seed, partial_rotary_factor=(0.25, 0.5, 0.75)[seed % 3]),
    "Phi3ForCausalLM with longrope": longrope,
    "GPTNeoXForCausalLM": neox,
}


def there(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)


def differences(ours: Transformer, other: Any, seed: int, tokens: int = 40) -> float:
    """Of logits, relative to the largest."""
    ids = random_ids(2, min(tokens, ours.config.context_length), seed, VOCAB)
    with torch.no_grad():
        mine, yours = ours.logits(ours(ids))[..., :VOCAB], other(ids).logits.float()[..., :VOCAB]
    assert float(yours.std()) > 0.3
    return float((mine - yours).abs().max() / yours.abs().max())


def assert_same_gradients(ours: Transformer, other: Any, seed: int) -> None:
    """
    Of every weight, within 1e-5 of its norm in float64. Only the bias of keys without rotary positions has gradient 0,
    by softmax, so that 1e-12 of all of them is let pass.
    """
    ours, other = ours.double(), other.double()
    ids = random_ids(2, min(40, ours.config.context_length), seed, VOCAB)
    ids[ids == small().pad_id] = small().document_id  # transformers gives the padding token no gradient
    with in_float64():
        for logits in (ours.logits(ours(ids)), other(ids).logits):
            torch.autograd.backward(F.cross_entropy(logits[:, :-1, :VOCAB].flatten(0, 1), ids[:, 1:].flatten()))
    weights = dict(ours.named_parameters())
    expected = {name: torch.empty_like(weight) for name, weight in weights.items()}
    for piece in architectures.architecture(ours.config).pieces(list(weights)):
        theirs = piece.theirs.replace("embed_out", "lm_head")  # GPT-NeoX calls it otherwise in files
        architectures.spread(piece, other.get_parameter(theirs).grad, expected)
    total = max(float(grad.norm()) for grad in expected.values())
    for name, weight in weights.items():
        assert weight.grad is not None
        difference = float((weight.grad - expected[name]).norm())
        assert difference <= 1e-5 * float(expected[name].norm()) + 1e-12 * total, name


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)))


def test_far_positions_have_the_bits_of_transformers(tmp_path: Path) -> None:
    config = ModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, context_length=4000
    )
    model = lively(config, 0, VOCAB)
    hf.save(tmp_path, model, RENDERER, SAID)
    assert differences(model, there(tmp_path), 0, tokens=4000) < 1e-5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_and_learns_the_same_with_what_is_saved_here_and_what_it_saves_goes_back_bit_for_bit(
    name: str, seed: int, tmp_path: Path
) -> None:
    config = FAMILIES[name](seed)
    model = lively(config, seed, VOCAB)
    hf.save(tmp_path / "first", model, RENDERER, SAID)
    other = there(tmp_path / "first")
    assert (type(other).__name__, other.dtype) == (name.split()[0], torch.float32)
    assert differences(model, other, seed) < 1e-5
    other.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if seed % 2 else "1GB")
    small().save(tmp_path / "theirs")
    loaded = hf.load(tmp_path / "theirs")
    assert loaded.lineage == Lineage(tokenizer=small().hash, template=None, shards="imported")
    layers = range(config.num_layers)
    assert [loaded.model.config.layer(n) for n in layers] == [config.layer(n) for n in layers]
    hf.save(tmp_path / "back", loaded.model, loaded.language, loaded.lineage)
    back = there(tmp_path / "back").state_dict()
    for weight_name, weight in other.state_dict().items():
        assert torch.equal(back[weight_name], weight), weight_name
    assert differences(loaded.model, other, seed) < 1e-5
    assert_same_gradients(loaded.model, other, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_folders_in_bfloat16_go_both_ways(name: str, tmp_path: Path) -> None:
    model = lively(FAMILIES[name](1), 1, VOCAB)
    hf.save(tmp_path / "ours", model, RENDERER, SAID, number_format="bfloat16")
    other = there(tmp_path / "ours")
    assert other.dtype == torch.bfloat16
    found = hf.load(tmp_path / "ours").model
    exact = there(tmp_path / "ours", dtype=torch.float32)  # .float() would keep Gemma's √hidden_size in bfloat16
    assert differences(found, exact, 1) < 1e-5
    there(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    small().save(tmp_path / "theirs")
    again = hf.load(tmp_path / "theirs").model
    for one, weight in found.state_dict().items():
        assert torch.equal(again.state_dict()[one], weight), one


def test_gpt2_as_it_lies_on_the_hub_is_read(tmp_path: Path) -> None:
    """Names without the first part, beside them the causal mask as a tensor, and a config.json of an older kind."""
    model = lively(
        gpt2(0).model_copy(update={"mlp": ("gelu_tanh",), "tie_embeddings": True, "rope_theta": 1e4}), 0, VOCAB
    )
    hf.save(tmp_path, model, RENDERER, SAID)
    for ours in (LINEAGE, SUMS):
        (tmp_path / ours).unlink()
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    bare["h.0.attn.bias"], bare["h.0.attn.masked_bias"] = torch.ones(1, 1, 8, 8), torch.tensor(-1e4)
    file.write_bytes(safetensors.torch.save(bare))
    facts = json.loads((tmp_path / CONFIG).read_text())
    old = {name: facts[name] for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_ctx", "n_inner")}
    known = {"architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": facts["layer_norm_epsilon"]}
    (tmp_path / CONFIG).write_text(json.dumps(old | known))
    found = hf.load(tmp_path).model
    assert found.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


def test_masks_that_pythia_keeps_as_tensors_are_no_weights(tmp_path: Path) -> None:
    model = lively(neox(0), 0, VOCAB)
    hf.save(tmp_path, model, RENDERER, SAID)
    for ours in (LINEAGE, SUMS):
        (tmp_path / ours).unlink()
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    for layer in range(model.config.num_layers):
        name = f"gpt_neox.layers.{layer}.attention"
        weights |= {f"{name}.bias": torch.ones(1, 1, 8, 8), f"{name}.masked_bias": torch.tensor(-1e9)}
        weights[f"{name}.rotary_emb.inv_freq"] = torch.ones(2)
    file.write_bytes(safetensors.torch.save(weights))
    found = hf.load(tmp_path).model
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


# --- what is no family ---------------------------------------------------------------------------------------------

NONE: dict[str, tuple[dict[str, Any], str]] = {
    "differential": ({"attention": "differential"}, "attention='differential' is nothing that LlamaForCausalLM has"),
    "cycled": ({"mlp": ["swiglu", "gelu"]}, r"mlp=\['swiglu', 'gelu'\] is nothing"),
    "none": ({"position_embedding": "none"}, "position_embedding='none' is nothing that LlamaForCausalLM has"),
    "alibi": ({"position_embedding": "alibi"}, "position_embedding='alibi' is nothing that LlamaForCausalLM has"),
    "layernorm": ({"norm": "layernorm"}, "norm='layernorm' is nothing that LlamaForCausalLM has"),
    "two windows": ({"sliding_window": [4, 8]}, r"sliding_window=\[4, 8\] is nothing that LlamaForCausalLM has"),
}
ODD = {"head_dim": 8, "hidden_size": 30, "biases": "all"}
NONE["odd width with biases"] = (ODD, "hidden_size=30 is not a multiple of num_heads=4, as in LlamaForCausalLM")
EVEN = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, context_length=40)


@pytest.mark.parametrize("kind", NONE)
def test_what_transformers_does_not_have_is_saved_under_our_name_and_refused_there(kind: str, tmp_path: Path) -> None:
    changes, told = NONE[kind]
    config = ModelConfig(**(EVEN.model_dump() | changes))
    assert architectures.family(config) is None
    (why,) = architectures.reasons(config)
    assert re.match(told, why)
    model = lively(config, 0, VOCAB)
    hf.save(tmp_path, model, RENDERER, SAID)
    found = hf.load(tmp_path)
    assert found.model.config == config
    for name, weight in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name
    with pytest.raises(ValueError, match="model type `bloomery`"):
        there(tmp_path)


def test_the_known_shapes_are_what_transformers_calls_them() -> None:
    found = {name: architectures.family(ModelConfig(preset=name)) for name in PRESETS}
    names = {name: one.name if one else None for name, one in found.items()}
    assert names["plasma-500m"] == names["llama-3.1-405b"] == names["baichuan2-7b"] == "LlamaForCausalLM"
    assert names["plasma-756m"] == "Qwen3ForCausalLM"
    assert names["gpt2-1558m"] == "GPT2LMHeadModel"
    assert names["harness-220m"] is names["baichuan2-13b"] is names["harness-1b"] is None
    assert architectures.reasons(ModelConfig(preset="harness-220m")) == []


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "dynamic", "factor": 8.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        YARN | {"mscale": 0.7},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 1.3},
    ],
)
def test_scaling_that_others_spell_otherwise_is_read_as_transformers_computes_and_learns_it(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of_others(tmp_path / "theirs", 1)
    changed(folder / CONFIG, rope_scaling=scaling)
    (folder / SUMS).unlink()
    found = hf.load(folder).model
    assert differences(found, there(folder), 1) < 1e-5
    assert_same_gradients(found, there(folder), 1)


@pytest.mark.parametrize("kind", [one.model_type for one in architectures.WRITTEN if one.model_type != "baichuan"])
def test_a_key_that_a_configuration_lacks_has_the_value_that_transformers_takes(kind: str) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 32, "num_hidden_layers": 6, "intermediate_size": 64}
    if kind == "gpt2":
        sizes = {"n_embd": 512, "n_head": 32, "n_layer": 6}
    sizes |= {"vocab_size": 700}
    name = next(one.name for one in architectures.WRITTEN if one.model_type == kind)
    named = {"architectures": [name], "model_type": kind}
    whole = AutoConfig.for_model(kind, **sizes, pad_token_id=None).to_dict() | named
    known = architectures.of_file(sizes | named)
    assert known.understand(sizes | named) == known.understand(whole)


# --- what is refused -----------------------------------------------------------------------------------------------


def folder_of_others(root: Path, seed: int = 0) -> Path:
    hf.save(root, lively(random_config(seed), seed, VOCAB), RENDERER, SAID)
    (root / LINEAGE).unlink()
    return root


def changed(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "its architecture is PhiForCausalLM; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "phi3"}, "architectures is None; it must be one of LlamaForCausa"),
        ({"architectures": []}, r"architectures is \[\]; it must be one of .* as in \['LlamaForCausalLM'\]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is LlamaForCausalLM; it must be one of"),
        ({"architectures": [7]}, r"architectures is \[7\]; it must be one of"),
        ({"model_type": "gpt2"}, "architectures is LlamaForCausalLM, but model_type is gpt2, not 'llama'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; num_heads: "),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; norm_eps: "),
        ({"max_position_embeddings": "x" * 5000}, "max_position_embeddings is x{100}…; context_length: "),
        ({"rope_scaling": YARN | {"finetuned": True}}, "not supported: rope_scaling.finetuned: unknown key\n"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "not supported: yarn divides by the logarithm of rope_theta 1.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weights are quantized \(quantization_config: fp8\)"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu, gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 2.0}}, "rope_scaling of the type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling of the type 'longrope'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "yarn without truncation"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5 changes what LlamaForCausalLM computes"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 changes what"),
        ({"mup_scale": 2.0}, "mup_scale = 2.0 is not known for LlamaForCausalLM; remove the field"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": -1}, "not supported: vocab_size is -1, not a number"),
        ({"vocab_size": 2**31}, "not supported: vocab_size is 2147483648, not a number from 1 to 4,194,304"),
        ({"max_position_embeddings": 10**15}, "context_length: must be at most 16,777,216"),
        ({"rms_norm_eps": 1e308}, "norm_eps: must be at most 0.1"),
        ({"rope_theta": 1e308}, r"rope_theta: must be at most 1e\+15"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_scaling": YARN},
            "rope_scaling differs from rope_parameters",
        ),
        ({"rope_theta": 0}, r"rope_theta: must be at least 0\.1"),
        ({"rope_parameters": {"rope_theta": 0.0}}, r"rope_theta: must be at least 0\.1"),
        ({"eos_token_id": 10**9}, r"eos_token_id is 1000000000, but the last token ID is [0-9,]+"),
        ({"bos_token_id": [1, 10**9]}, r"bos_token_id is 1000000000, but the last token ID is"),
        ({"vocab_size": 300}, r"the tokenizer has \d+ token IDs, but the model has 300"),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    folder = folder_of_others(tmp_path / "theirs")
    changed(folder / CONFIG, **changes)
    with pytest.raises(CheckpointError, match=told) as caught:
        hf.load(folder)
    assert caught.value.hint
    assert "damaged" not in caught.value.hint
    assert "stage" not in caught.value.hint


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (["sliding_attention", "chunked_attention"], "layer_types names 'chunked_attention', which is not one of full"),
        (["sliding_attention"], "layer_types has 1 entries for 2 layers"),
    ],
)
def test_kinds_of_layers_that_are_not_known_are_not_taken_for_others(
    tmp_path: Path, kinds: list[str], told: str
) -> None:
    config = ModelConfig(**(EVEN.model_dump() | {"qk_norm": True, "sliding_window": ["full", 4]}))
    hf.save(tmp_path, lively(config, 0, VOCAB), RENDERER, SAID)
    changed(tmp_path / CONFIG, layer_types=kinds)
    with pytest.raises(CheckpointError, match=told):
        hf.load(tmp_path)


def test_weights_saved_under_another_name_by_an_earlier_version_are_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = lively(EVEN, 0, VOCAB), lively(EVEN, 1, VOCAB)
    with monkeypatch.context() as earlier:
        earlier.setattr(architectures, "architecture", lambda config: architectures.OWN)
        hf.save(tmp_path, model, RENDERER, SAID)
    hf.fill(twin, tmp_path, SAID)
    for name, weight in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], weight), name


UP, HEAD, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
BIAS, BEYOND = "model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight"
STRANGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "int8": (
        lambda w: {UP: w[UP].to(torch.int8)},
        f"{UP} is stored as I8; only float32, bfloat16, float16 can be read",
    ),
    "fp8": (lambda w: {UP: w[UP].to(torch.float8_e4m3fn)}, f"{UP} is stored as F8_E4M3"),
    "float64": (lambda w: {UP: w[UP].double()}, f"{UP} is stored as F64"),
    "scales": (lambda w: {UP + "_scale_inv": torch.ones(1, 1)}, f"does not have: {UP}_scale_inv"),
    "a bias": (lambda w: {BIAS: torch.ones(32)}, f"a LlamaForCausalLM of this config.json does not have: {BIAS}"),
    "a layer more": (lambda w: {BEYOND: w[UP].clone()}, f"does not have: {BEYOND}"),
    "another head": (lambda w: {HEAD: w[EMBEDDING] + 1e-3}, f"{HEAD} differs from {EMBEDDING}, but config.json ties"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_weights_that_would_not_be_used_as_they_are_meant_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    do, told = STRANGE[kind]
    hf.save(tmp_path, lively(EVEN, 0, VOCAB), RENDERER, SAID)
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    file.write_bytes(safetensors.torch.save(weights | do(weights)))
    for lineage in (SAID, None):
        with pytest.raises(CheckpointError, match=re.escape(told)) as caught:
            hf.load(tmp_path)
        assert caught.value.where == str(file)
        assert caught.value.hint
        if lineage is not None:
            (tmp_path / LINEAGE).unlink()


def test_what_follows_from_a_configuration_may_lie_beside_the_weights(tmp_path: Path) -> None:
    model = lively(EVEN, 0, VOCAB)
    hf.save(tmp_path, model, RENDERER, SAID)
    (tmp_path / SUMS).unlink()
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights[HEAD] = weights[EMBEDDING].clone()
    file.write_bytes(safetensors.torch.save(weights))
    assert torch.equal(hf.load(tmp_path).model.embed.weight, model.embed.weight)


def test_a_pickle_is_read_only_where_it_is_named(tmp_path: Path) -> None:
    folder = folder_of_others(tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"its weights are a pickle \(pytorch_model.bin\)") as caught:
        hf.load(folder)
    assert str(folder / "pytorch_model.bin") in caught.value.hint


def test_a_missing_or_torn_part_of_the_weights_is_named(tmp_path: Path) -> None:
    first = folder_of_others(tmp_path / "first", 1)
    there(first).save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    small().save(tmp_path / "theirs")
    parts = sorted((tmp_path / "theirs").glob("model-*.safetensors"))
    assert len(parts) > 2
    hf.load(tmp_path / "theirs")
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=f"{parts[1]}: is torn"):
        hf.load(tmp_path / "theirs")
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"there is no {parts[1].name}, which the index names"):
        hf.load(tmp_path / "theirs")


def test_the_page_on_finetuning_lists_every_family_as_the_tables_have_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "do" / "finetune-a-model.md").read_text(encoding="utf-8")
    section = page.partition("\n## Families\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    names = [re.findall(r"`(\w+)`", cell) for _, cell, _, _ in rows]
    assert sorted(name for row_names in names for name in row_names) == sorted(
        architectures.READ.keys() - {architectures.OWN.name}
    )
    exported = {row_names[0] for row_names, (_, _, cell, _) in zip(names, rows, strict=True) if cell.startswith("yes")}
    assert exported == {one.name for one in architectures.WRITTEN}
    in_gguf = {row_names[0]: cell.strip("`") for row_names, (_, _, _, cell) in zip(names, rows, strict=True) if cell}
    assert in_gguf.pop("MistralForCausalLM") == "llama"  # where llama.cpp has it too
    assert in_gguf == {layout.name: arch for arch, layout in LAYOUTS.items()}
