"""
A model as a folder that `transformers` loads as it is, and that says what it was made from.

    config.json             LlamaForCausalLM; an architecture of our own for a shape that is none
    model.safetensors       its weights, float32, under transformers' names, or ours
    tokenizer.json, tokenizer_config.json (with the chat template), generation_config.json
    bloomery.json           lineage: hashes of tokenizer, chat template and shards
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from bloomery.core.config import build, plain
from bloomery.core.errors import CheckpointError
from bloomery.core.files import read_json, write_json
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from bloomery.tokenizer.chat import Renderer, Template
from bloomery.tokenizer.tokenizer import PAD, Tokenizer
from bloomery.weights.tensors import save_tensors

import safetensors.torch
import torch
from torch import Tensor

T = TypeVar("T")
WEIGHTS, CONFIG, LINEAGE = "model.safetensors", "config.json", "bloomery.json"

NAMES = (
    (r"embed\.weight", "model.embed_tokens.weight"),
    (r"blocks\.(\d+)\.attention\.(q|k|v)\.weight", r"model.layers.\1.self_attn.\2_proj.weight"),
    (r"blocks\.(\d+)\.attention\.out\.weight", r"model.layers.\1.self_attn.o_proj.weight"),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.weight", r"model.layers.\1.mlp.\2_proj.weight"),
    (r"blocks\.(\d+)\.attention_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"blocks\.(\d+)\.mlp_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"head\.weight", "lm_head.weight"),
)
"""Our name of a weight, and transformers' name of it."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What a model was made from, as hashes. A tokenizer, template or shard that does not match is refused."""

    tokenizer: str
    template: str | None
    """None for a model that never saw a conversation."""
    shards: str
    """The content hash of the shards that it was trained on."""
    base: str | None = None
    """The content hash of the stage whose model it started from."""
    step: int = 0


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    tokenizer: Tokenizer
    renderer: Renderer
    lineage: Lineage
    folder: Path


def theirs(name: str) -> str:
    """Transformers' name of one of our weights."""
    for pattern, replacement in NAMES:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    raise ValueError(f"{name!r} has no counterpart in a LlamaForCausalLM")


def is_llama(config: ModelConfig) -> bool:
    """Whether a LlamaForCausalLM computes the same. Sizes may be any; of the choices, none but the default."""
    sizes = {"width", "num_layers", "num_heads", "num_kv_heads", "head_width", "mlp_width", "context"}
    free = sizes | {"rope_theta", "norm_eps", "tie_embeddings"}
    choices = ModelConfig.model_fields.keys() - free
    return all(getattr(config, name) == ModelConfig.model_fields[name].default for name in choices)


def _name(config: ModelConfig, name: str) -> str:
    """The name of a weight in the file."""
    return theirs(name) if is_llama(config) else name


def save(folder: Path, model: Transformer, renderer: Renderer, lineage: Lineage) -> None:
    """
    Write a model folder. The tied head is not written twice. A model that never saw a conversation ends with the token
    that opens the next document, as it has learned, and has no chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, template = renderer.tokenizer, renderer.template
    end = template.opening if lineage.template is None else template.end
    ids = {
        "bos_token_id": tokenizer.special[template.opening],
        "eos_token_id": tokenizer.special[end],
        "pad_token_id": tokenizer.pad_id,
    }
    save_tensors(folder / WEIGHTS, {_name(model.config, name): weight for name, weight in _own(model).items()})
    write_json(folder / CONFIG, _config(model.config, model.vocab_size) | ids)
    write_json(folder / "generation_config.json", {"do_sample": False} | ids)
    tokenizer.save(folder)
    chat = {} if lineage.template is None else {"chat_template": template.jinja()}
    write_json(folder / "tokenizer_config.json", _tokenizer_config(template, end, model.config.context) | chat)
    write_json(folder / LINEAGE, asdict(lineage))


def load(folder: Path, device: torch.device | str = "cpu") -> Loaded:
    """
    Read a model folder written by `save`. Raises CheckpointError where a file is missing or torn, the weights have
    another shape, or tokenizer or template are not those the model was trained with; it says which two differ.
    """
    for name in (CONFIG, WEIGHTS, LINEAGE):
        if not (folder / name).is_file():
            cure = "Name a run folder, a stage folder, or a checkpoint folder."
            raise CheckpointError(f"there is no {name}", where=str(folder), cure=cure)
    config, vocab_size = _read(folder / CONFIG, lambda facts: (_model_config(facts), int(facts["vocab_size"])))
    lineage = _lineage(folder)
    tokenizer = Tokenizer.load(folder)
    renderer = Renderer(tokenizer)
    _same("tokenizer", lineage.tokenizer, tokenizer.hash, folder)
    if lineage.template is not None:
        _same("chat template", lineage.template, renderer.template.hash, folder)
    model = Transformer(config, vocab_size)
    _fill(model, folder)
    return Loaded(model.to(device).eval(), tokenizer, renderer, lineage, folder)


def fill(model: Transformer, folder: Path, lineage: Lineage) -> None:
    """
    Read the weights of a model folder into a model, where it is. Raises CheckpointError where they were not made from
    what `lineage` says (at whatever step), have another shape, or are torn.
    """
    made, wanted = (asdict(replace(one, step=0)) for one in (_lineage(folder), lineage))
    for name in made:
        if made[name] != wanted[name]:
            was, is_now = (one[name][:8] if one[name] else "none" for one in (made, wanted))
            cure = f"To train from the start, remove {folder.parent}."
            raise CheckpointError(f"was made with {name} {was}, and this one is {is_now}", where=str(folder), cure=cure)
    _fill(model, folder)


_AGAIN = "The file is damaged. Remove its stage's manifest.json and run the recipe again."


def _read(file: Path, parse: Callable[[Any], T]) -> T:
    try:
        return parse(read_json(file))
    except (ValueError, KeyError, TypeError) as error:
        what = f"is no {file.name} of a model of ours: {type(error).__name__}: {error}"
        raise CheckpointError(what, where=str(file), cure=_AGAIN) from None


def _same(what: str, trained: str, given: str, folder: Path) -> None:
    if trained != given:
        raise CheckpointError(
            f"the model was trained with the {what} {trained[:8]}, and this one is {given[:8]}",
            where=str(folder),
            cure=f"Use the {what} that lies beside the weights, or train again.",
        )


def _lineage(folder: Path) -> Lineage:
    return _read(folder / LINEAGE, lambda facts: Lineage(**facts))


def _own(model: Transformer) -> dict[str, Tensor]:
    """The weights of a model by name, without a tied head, which is the embedding."""
    weights: dict[str, Tensor] = model.state_dict()
    return {name: weights[name] for name in weights if not (model.config.tie_embeddings and name == "head.weight")}


def _fill(model: Transformer, folder: Path) -> None:
    file = folder / WEIGHTS
    try:
        weights = safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"is torn: {error}", where=str(file), cure=_AGAIN) from None
    for name, weight in _own(model).items():
        known = _name(model.config, name)
        given = weights.get(known)
        if given is None or given.shape != weight.shape:
            shown = "is missing" if given is None else f"has shape {tuple(given.shape)}, not {tuple(weight.shape)}"
            raise CheckpointError(f"{known} {shown}", where=str(file), cure="It belongs to another model.")
        weight.copy_(given)


def _config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    if not is_llama(config):
        ours = {"architectures": ["BloomeryForCausalLM"], "model_type": "bloomery", "torch_dtype": "float32"}
        return ours | {"vocab_size": vocab_size, "bloomery": plain(config)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _model_config(facts: Mapping[str, Any]) -> ModelConfig:
    if facts["model_type"] == "bloomery":
        return build(ModelConfig, facts["bloomery"])
    usual = facts["head_dim"] * facts["num_attention_heads"] == facts["hidden_size"]
    return ModelConfig(
        head_width=None if usual else facts["head_dim"],
        width=facts["hidden_size"],
        num_layers=facts["num_hidden_layers"],
        num_heads=facts["num_attention_heads"],
        num_kv_heads=facts["num_key_value_heads"],
        mlp_width=facts["intermediate_size"],
        context=facts["max_position_embeddings"],
        rope_theta=facts["rope_theta"],
        norm_eps=facts["rms_norm_eps"],
        tie_embeddings=facts["tie_word_embeddings"],
    )


def _tokenizer_config(template: Template, end: str, context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": template.opening,
        "eos_token": end,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
