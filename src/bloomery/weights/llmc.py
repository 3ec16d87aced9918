"""
GPT-2 in the files of llm.c.

    model .bin     256 int32: 20240326, 3 (float32) or 5 (bfloat16), context, V, L, H, D, V padded; then, each for all
                   layers: wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb

Matrices are outputs × inputs, as ours. (https://github.com/karpathy/llm.c, train_gpt2.py)
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.config import explained
from bloomery.core.errors import CheckpointError
from bloomery.core.io import check_regular, whole_file
from bloomery.model.config import ModelConfig, cost
from bloomery.model.transformer import Transformer, on_meta
from bloomery.weights.safetensors import finite, rounded

import torch
from torch import Tensor

MODEL = 20240326
VERSIONS: dict[int, Any] = {3: np.dtype("<f4"), 5: np.dtype("<u2")}
"""float32; bfloat16, which NumPy does not have."""
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
PADDED_TO = 128

WeightNames = tuple[str, ...]
LAYOUT: tuple[tuple[str, WeightNames], ...] = (
    ("wte", ("embed.weight",)),
    ("wpe", ("positions.weight",)),
    ("ln1w", ("blocks.{}.attention_norm.weight",)),
    ("ln1b", ("blocks.{}.attention_norm.bias",)),
    ("qkvw", tuple(f"blocks.{{}}.attention.{which}.weight" for which in "qkv")),
    ("qkvb", tuple(f"blocks.{{}}.attention.{which}.bias" for which in "qkv")),
    ("attprojw", ("blocks.{}.attention.out.weight",)),
    ("attprojb", ("blocks.{}.attention.out.bias",)),
    ("ln2w", ("blocks.{}.mlp_norm.weight",)),
    ("ln2b", ("blocks.{}.mlp_norm.bias",)),
    ("fcw", ("blocks.{}.mlp.up.weight",)),
    ("fcb", ("blocks.{}.mlp.up.bias",)),
    ("fcprojw", ("blocks.{}.mlp.down.weight",)),
    ("fcprojb", ("blocks.{}.mlp.down.bias",)),
    ("lnfw", ("norm.weight",)),
    ("lnfb", ("norm.bias",)),
)
"""Their tensors in order, and the weights of ours, one below the other, that each layer's part is made of."""


@dataclass(frozen=True)
class LlmcModel:
    """A model file: its shape, and its weights by our names, in its own number format, without padding."""

    config: ModelConfig
    vocab_size: int
    weights: dict[str, Tensor]


def read(file: Path) -> LlmcModel:
    """Read a model. Raises CheckpointError, which names the file, for one that is torn or something else."""
    header = _header(file)
    context, vocab_size, num_layers, num_heads, width, padded = map(int, header[2:8])
    kind = VERSIONS[int(header[1])]
    if not 0 < vocab_size <= padded or min(context, num_layers, num_heads, width) < 1 or width % num_heads:
        shown = (
            f"context {context}, {vocab_size} of {padded} ids, {num_layers} layers, {num_heads} heads, width {width}"
        )
        raise CheckpointError(f"its header describes no model: {shown}", where=str(file), hint=_AGAIN)
    # computed before anything is built: a damaged header can name billions of layers
    one_layer, two_layers = (
        cost(_shape(file, width, layers, num_heads, context), padded).parameters for layers in (1, 2)
    )
    total = one_layer + (num_layers - 1) * (two_layers - one_layer)
    size, expected = file.stat().st_size, HEADER_BYTES + total * kind.itemsize
    if size != expected:
        raise CheckpointError(f"has {size} bytes, but its header needs {expected}", where=str(file), hint=_AGAIN)
    config = _shape(file, width, num_layers, num_heads, context)
    model = _empty(config, padded)
    numbers = np.memmap(file, dtype=kind, mode="r", offset=HEADER_BYTES)
    weights = _named(_tensors(numbers, model, num_layers), vocab_size)
    return LlmcModel(config, vocab_size, {name: finite(name, one, str(file), _AGAIN) for name, one in weights.items()})


def write(
    file: Path,
    model: Transformer,
    number_format: Literal["float32", "bfloat16"] = "float32",
    num_ids: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """
    Write a model, its table of ids padded with zeros. Rows beyond the `num_ids` of its tokenizer are left out.
    `weights` stand in for those of the model, as in `hf.save`. Raises CheckpointError for one that is no GPT-2 of
    llm.c.
    """
    if odd := unlike(model.config):
        hint = 'Use `bloomery export MODEL OUT --format hf`. llm.c has only GPT-2: model.preset = "gpt2-124m".'
        raise CheckpointError("; ".join(odd), where="export", hint=hint)
    config, rows = model.config, num_ids or model.vocab_size
    padded = -(-rows // PADDED_TO) * PADDED_TO
    header = np.zeros(HEADER_INTS, dtype="<i4")
    version = 3 if number_format == "float32" else 5
    shown = (
        MODEL,
        version,
        config.context_length,
        rows,
        config.num_layers,
        config.num_heads,
        config.hidden_size,
        padded,
    )
    header[: len(shown)] = shown
    if weights is None:
        weights = model.state_dict()
    form: torch.dtype = getattr(torch, number_format)
    with whole_file(file) as opened:
        opened.write(header.tobytes())
        for _, names in _in_order(config.num_layers):
            for name in names:
                weight = weights[name][:rows] if name == "embed.weight" else weights[name]
                opened.write(_bytes(rounded(name, weight, form, str(file))))
            if names == ("embed.weight",):
                opened.write(bytes((padded - rows) * config.hidden_size * VERSIONS[version].itemsize))


def shape(width: int, num_layers: int, num_heads: int, context: int) -> ModelConfig:
    """The GPT-2 that llm.c has in these sizes."""
    return ModelConfig(
        hidden_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        intermediate_size=4 * width,
        context_length=context,
        norm_eps=1e-5,
        position_embedding="learned",
        norm="layernorm",
        mlp=("gelu_tanh",),
        biases="all",
        tie_embeddings=True,
    )


def _shape(file: Path, width: int, num_layers: int, num_heads: int, context: int) -> ModelConfig:
    """The shape that the header of a file names. Raises CheckpointError where no model has it."""
    try:
        return shape(width, num_layers, num_heads, context)
    except ValidationError as error:
        what = f"its header describes no model: {explained(ModelConfig, error)[0]}"
        raise CheckpointError(what, where=str(file), hint=_AGAIN) from None


def unlike(config: ModelConfig) -> list[str]:
    """What a model has otherwise than a GPT-2 of llm.c."""
    if config.hidden_size % config.num_heads:
        return [f"hidden_size {config.hidden_size} is not a multiple of {config.num_heads} heads"]
    reference = shape(config.hidden_size, config.num_layers, config.num_heads, config.context_length)
    both = (
        (name, getattr(config, name), getattr(reference, name)) for name in ModelConfig.model_fields if name != "preset"
    )
    return [f"{name} is {is_now!r} and not {there!r}" for name, is_now, there in both if is_now != there]


_AGAIN = "The file is damaged or of another model. Create or download it again."


def _header(file: Path) -> NDArray[np.int32]:
    if os.path.exists(file):
        check_regular(file)
    size = file.stat().st_size if os.path.isfile(file) else -1
    if size < HEADER_BYTES:
        shown = "is missing" if size < 0 else f"has {size} bytes, less than a header of {HEADER_BYTES}"
        raise CheckpointError(shown, where=str(file), hint=_AGAIN)
    header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    if header[0] != MODEL or int(header[1]) not in VERSIONS:
        hint = f"Use a GPT-2 model of llm.c, which begins with {MODEL} and {' or '.join(map(str, VERSIONS))}."
        raise CheckpointError(f"begins with {header[0]} and {header[1]}", where=str(file), hint=hint)
    return header


def _empty(config: ModelConfig, rows: int) -> dict[str, Tensor]:
    """The weights of a model by name, of which only the shapes are there."""
    weights: dict[str, Tensor] = on_meta(config, rows).state_dict()
    del weights["head.weight"]  # tied
    return weights


def _in_order(num_layers: int) -> Iterator[tuple[str, WeightNames]]:
    """Each tensor of theirs, layer by layer where it has layers, and what of ours it holds."""
    for theirs, names in LAYOUT:
        if "{}" in names[0]:
            for layer in range(num_layers):
                yield theirs, tuple(name.format(layer) for name in names)
        else:
            yield theirs, names


def _tensors(numbers: NDArray[Any], shapes: Mapping[str, Tensor], num_layers: int) -> Iterator[tuple[str, Tensor]]:
    offset = 0
    for _, names in _in_order(num_layers):
        for name in names:
            count = shapes[name].numel()
            some = np.array(numbers[offset : offset + count])
            tensor = (
                torch.from_numpy(some.view(np.int16)).view(torch.bfloat16)
                if some.itemsize == 2
                else torch.from_numpy(some)
            )
            yield name, tensor.view(shapes[name].shape)
            offset += count


def _named(tensors: Iterator[tuple[str, Tensor]], vocab_size: int) -> dict[str, Tensor]:
    return {name: tensor[:vocab_size] if name == "embed.weight" else tensor for name, tensor in tensors}


def _bytes(weight: Tensor) -> bytes:
    there = weight.detach().cpu().contiguous()
    return there.view(torch.int16).numpy().tobytes() if there.itemsize == 2 else there.numpy().tobytes()
