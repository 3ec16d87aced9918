"""Model files of llm.c: bytes laid out by hand from the documented layout, and what transformers computes of them."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from bloomery.core.errors import CheckpointError
from bloomery.model.config import ModelConfig
from bloomery.weights import llmc
from tests.model.made import lively, random_ids

import torch

LAYERS, HEADS, WIDTH, CONTEXT, VOCAB, PADDED = 2, 3, 12, 20, 61, 128
NAMES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def theirs(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        n_positions=CONTEXT,
        vocab_size=VOCAB,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        initializer_range=0.4,
    )
    model: Any = GPT2LMHeadModel(config)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "ln" in name and "weight" in name else 0.0, 0.3)
    return model


def parts(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a GPT2LMHeadModel, or their gradients, in the order of llm.c's table."""
    block = {name: torch.stack([tensors[f"transformer.h.{n}.{name}"] for n in range(LAYERS)]) for name in _each()}
    wte = torch.zeros(PADDED, WIDTH)
    wte[:VOCAB] = tensors["transformer.wte.weight"]
    ordered = [wte, tensors["transformer.wpe.weight"], block["ln_1.weight"], block["ln_1.bias"]]
    ordered += [block["attn.c_attn.weight"].transpose(1, 2), block["attn.c_attn.bias"]]
    ordered += [block["attn.c_proj.weight"].transpose(1, 2), block["attn.c_proj.bias"]]
    ordered += [block["ln_2.weight"], block["ln_2.bias"]]
    ordered += [block["mlp.c_fc.weight"].transpose(1, 2), block["mlp.c_fc.bias"]]
    ordered += [block["mlp.c_proj.weight"].transpose(1, 2), block["mlp.c_proj.bias"]]
    return [*ordered, tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"]]


def _each() -> list[str]:
    return [f"{name}.{kind}" for name in ("ln_1", "ln_2", *NAMES) for kind in ("weight", "bias")]


def header(magic: int, version: int, *rest: int) -> bytes:
    return struct.pack("<256i", magic, version, *rest, *[0] * (254 - len(rest)))


def by_hand(model: Any, version: int = 3) -> bytes:
    head = header(20240326, version, CONTEXT, VOCAB, LAYERS, HEADS, WIDTH, PADDED)
    body = b""
    for part in parts(dict(model.named_parameters())):
        numbers = part.detach().contiguous()
        body += numbers.bfloat16().view(torch.int16).numpy().tobytes() if version == 5 else numbers.numpy().tobytes()
    return head + body


def loaded(file: Path) -> Any:
    found = llmc.read(file)
    model = lively(found.config, 0, found.vocab_size)
    with torch.no_grad():
        for name, weight in found.weights.items():
            model.state_dict()[name].copy_(weight)
    return model


@pytest.mark.parametrize("version", [3, 5])
def test_bytes_laid_out_as_documented_compute_what_transformers_computes(version: int, tmp_path: Path) -> None:
    other = theirs()
    (tmp_path / "gpt2.bin").write_bytes(by_hand(other, version))
    model = loaded(tmp_path / "gpt2.bin")
    if version == 5:
        other = other.bfloat16().float()
    ids = random_ids(2, CONTEXT, 1, VOCAB)
    with torch.no_grad():
        mine, yours = model.logits(model(ids)), other(ids).logits
    assert float(yours.std()) > 0.5
    assert float((mine - yours).abs().max()) < 1e-5


@pytest.mark.parametrize(("version", "number_format"), [(3, "float32"), (5, "bfloat16")])
def test_what_is_written_is_those_bytes(version: int, number_format: Any, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(by_hand(theirs(), version))
    llmc.write(tmp_path / "b.bin", loaded(tmp_path / "a.bin"), number_format)
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 30), st.integers(2, 300), st.booleans())
@settings(max_examples=25)
def test_models_of_any_size_come_back(
    tmp_path_factory: pytest.TempPathFactory, layers: int, heads: int, each: int, context: int, rows: int, small: bool
) -> None:
    file = tmp_path_factory.mktemp("any") / "model.bin"
    model = lively(llmc.shape(heads * each, layers, heads, context), 3, rows)
    llmc.write(file, model, "bfloat16" if small else "float32")
    found = llmc.read(file)
    assert (found.config, found.vocab_size) == (model.config, rows)
    for name, weight in model.state_dict().items():
        if name != "head.weight":
            wanted = weight.bfloat16() if small else weight
            assert torch.equal(found.weights[name], wanted), name


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "torn": (lambda data: data[:-1], r"has \d+ bytes, but its header needs \d+"),
    "without a header": (lambda data: data[:99], "has 99 bytes, less than a header"),
    "a tokenizer": (lambda data: header(20240328, 2) + data[1024:], "begins with 20240328 and 2"),
    "of another version": (lambda data: header(20240326, 4) + data[1024:], "begins with 20240326 and 4"),
    "without a width": (
        lambda data: header(20240326, 3, 9, 9, 1, 1, 0, 128) + data[1024:],
        "its header describes no model",
    ),
    "of billions of layers": (
        lambda data: header(20240326, 3, CONTEXT, VOCAB, 2**31 - 1, HEADS, WIDTH, PADDED) + data[1024:],
        r"has \d+ bytes, but its header needs \d+",
    ),
    "of a width of billions": (
        lambda data: header(20240326, 3, CONTEXT, VOCAB, LAYERS, 1, 2**31 - 1, PADDED) + data[1024:],
        r"its header describes no model: hidden_size: must be at most 1,048,576",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_model_is_refused_by_name_before_anything_is_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmc, "Transformer", None)
    do, told = BROKEN[kind]
    file = tmp_path / "model.bin"
    file.write_bytes(do(by_hand(theirs())))
    with pytest.raises(CheckpointError, match=f"{file}: {told}"):
        llmc.read(file)


def test_a_model_that_llm_c_does_not_have_is_not_written(tmp_path: Path) -> None:
    config = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp is .* and not .*; position_embedding is 'rope' and not 'learned'"):
        llmc.write(tmp_path / "model.bin", lively(config), "float32")
    assert list(tmp_path.iterdir()) == []
