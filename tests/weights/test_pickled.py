"""Weights that PyTorch has pickled are read where they are named, without their code, and once."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from bloomery import cli
from bloomery.core.errors import CheckpointError
from bloomery.tokenizer import importers
from bloomery.weights import hf, locate, pickled
from tests import warm
from tests.model.made import scores
from tests.tokenizer.test_train import theirs as sentencepiece_model
from tests.weights.test_architectures import folder_of_others

import safetensors.torch
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The process that reads a file is forked, but in one test."""
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))
    if request.function is not test_a_named_file_becomes_the_same_weights_once:
        monkeypatch.setattr("bloomery.weights.pickled.subprocess.run", warm.run)


def theirs(folder: Path) -> dict[str, Tensor]:
    """A folder as transformers saves it, with its weights pickled; returns the weights."""
    folder_of_others(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.slow
def test_a_named_file_becomes_the_same_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = theirs(tmp_path / "theirs")
    folder = locate.locate_model(tmp_path / "theirs" / "pytorch_model.bin")
    found = safetensors.torch.load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    hf.load(folder)
    monkeypatch.setattr(pickled, "_in_a_child", None)  # the second time, no child is started
    assert locate.locate_model(tmp_path / "theirs" / "pytorch_model.bin") == folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_several_files_with_an_index_in_the_format_of_old_and_new(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in theirs(tmp_path).items()}
    (tmp_path / "pytorch_model.bin").unlink()
    names, weight_map = sorted(weights), dict[str, str]()
    for number, some in enumerate((names[:5], names[5:]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: weights[name] for name in some}, tmp_path / file, _use_new_zipfile_serialization=number == 1)
        weight_map |= dict.fromkeys(some, file)
    (tmp_path / pickled.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = hf.load(locate.locate_model(tmp_path / pickled.INDEX_NAME), dtype="auto")
    assert loaded.model.embed.weight.dtype == dtype
    assert torch.equal(loaded.model.embed.weight, weights["model.embed_tokens.weight"])


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.folder / 'was-run'}",)


def expanded(folder: Path) -> Any:
    return {"model.norm.weight": torch.zeros(1).expand(2**40)}


ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda folder: {"model.norm.weight": Runs(folder)}, "UnpicklingError"),
    "a list": (lambda folder: [torch.zeros(3)], "it holds list"),
    "a number in place of a tensor": (lambda folder: {"a": 3}, "'a' is int, not a tensor"),
    "a tensor larger than its storage": (expanded, "more numbers than its storage"),
    "a sparse tensor": (lambda folder: {"a": torch.eye(3).to_sparse()}, "a is not a plain tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_state_dict_is_refused_and_leaves_nothing(tmp_path: Path, attack: str) -> None:
    make, reason = ATTACKS[attack]
    folder_of_others(tmp_path / "theirs")
    file = tmp_path / "theirs" / "pytorch_model.bin"
    torch.save(make(tmp_path), file)
    with pytest.raises(CheckpointError, match=reason) as caught:
        locate.locate_model(file)
    assert caught.value.where == str(file)
    assert not (tmp_path / "was-run").exists()
    assert not any((tmp_path / "cache" / "unpickled").iterdir())


@pytest.mark.slow
def test_bytes_that_are_no_pickle_are_refused(tmp_path: Path) -> None:
    folder_of_others(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    for data in (b"", b"\x80\x02", struct.pack("<Q", 2**60), pickle.dumps({"a": 1}), b"PK\x03\x04" + b"\0" * 50):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read as a pickle of tensors"):
            locate.locate_model(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="cannot be read as a pickle of tensors"):
        locate.locate_model(file)


def test_an_index_names_weights_of_its_own_folder_alone(tmp_path: Path) -> None:
    theirs(tmp_path)
    cases = {
        "../pytorch_model.bin": "pytorch_model.bin",
        "config.json": "holds no weights",
        "pytorch_model-00001-of-00001.bin": "does not exist",
    }
    for name, reason in cases.items():
        (tmp_path / pickled.INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match=reason):
            locate.locate_model(tmp_path / pickled.INDEX_NAME)


# --- checkpoints of 1386.ai ------------------------------------------------------------------------------------------

TOKENIZER: dict[str, Any] = {"vocab_size": 400, "remove_extra_whitespaces": True, "split_digits": True, "pad_id": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "1.0": {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 32},
    "1.2": {"num_heads": 3, "num_kv_heads": 1, "hidden_size": 48, "rope_theta": 1e5, "qk_norm": True},
}


def checkpoint(file: Path, shape: dict[str, Any], **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint as 1386.ai saves it, next to its tokenizer; returns its weights and the settings of its model."""
    library = sentencepiece_model(**TOKENIZER)
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / "tokenizer_1.0.model").write_bytes(library)
    rows = len(importers.parse_sentencepiece(library).pieces)
    model = {"vocab_size": rows, "num_layers": 2, "intermediate_size": 40, "max_seq_len": 64, "dropout": 0.0} | shape
    head = model["hidden_size"] // model["num_heads"]
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        numbers: Tensor = torch.randn(size, generator=generator) * size[-1] ** -0.5 + float(len(size) == 1)
        return numbers

    weights = {"tok_emb.weight": draw(rows, model["hidden_size"]) * 3, "norm.weight": draw(model["hidden_size"])}
    for layer in range(2):
        at, width, inner = f"layers.{layer}.", model["hidden_size"], model["intermediate_size"]
        weights |= {f"{at}{name}_norm.weight": draw(width) for name in ("attn", "ffn")}
        weights |= {f"{at}attn.{name}_proj.weight": draw(width, width) for name in "qo"}
        weights |= {f"{at}attn.{name}_proj.weight": draw(head * model["num_kv_heads"], width) for name in "kv"}
        weights |= {f"{at}ffn.{name}_proj.weight": draw(inner, width) for name in ("gate", "up")}
        weights[f"{at}ffn.down_proj.weight"] = draw(width, inner)
        if shape.get("qk_norm"):
            weights |= {f"{at}attn.{name}_norm.weight": draw(head) for name in "qk"}
    weights["output.weight"] = weights["tok_emb.weight"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(weights["tok_emb.weight"])])
    settings = {"model": model, "training": {"betas": [0.9, 0.95], "compile": True}, "data": {"seq_len": 64}}
    held = {"step": 7, "model_state_dict": weights, "optimizer_state_dict": optimizer.state_dict(), "config": settings}
    torch.save(held | changes, file)
    return weights, model


def computed(weights: dict[str, Tensor], model: dict[str, Any], ids: Tensor) -> Tensor:
    """Logits of one text by 1386.ai's formulas: complex numbers of neighbors, each turned by its own angle."""
    heads, head = model["num_heads"], model["hidden_size"] // model["num_heads"]
    speeds = model.get("rope_theta", 1e4) ** (-torch.arange(0, head, 2).double() / head)
    turns = torch.polar(torch.ones(1).double(), torch.arange(len(ids)).double()[:, None] * speeds)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name].double()

    def times(x: Tensor, name: str) -> Tensor:
        product: Tensor = x @ weights[name].double().T
        return product

    x = weights["tok_emb.weight"].double()[ids]
    for layer in range(model["num_layers"]):
        at = f"layers.{layer}."
        h, parts = normed(x, f"{at}attn_norm.weight"), {}
        for name in "qkv":
            part = times(h, f"{at}attn.{name}_proj.weight").view(len(ids), -1, head).transpose(0, 1)
            if name != "v":
                part = normed(part, f"{at}attn.{name}_norm.weight") if model.get("qk_norm") else part
                pairs = torch.view_as_complex(part.reshape(*part.shape[:2], -1, 2).contiguous())
                part = torch.view_as_real(pairs * turns).flatten(2)
            parts[name] = part.repeat_interleave(heads // len(part), 0)
        s = parts["q"] @ parts["k"].transpose(1, 2) / head**0.5
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + times((s @ parts["v"]).transpose(0, 1).flatten(1), f"{at}attn.o_proj.weight")
        h = normed(x, f"{at}ffn_norm.weight")
        gate, up = (times(h, f"{at}ffn.{name}_proj.weight") for name in ("gate", "up"))
        x = x + times(torch.nn.functional.silu(gate) * up, f"{at}ffn.down_proj.weight")
    return times(normed(x, "norm.weight"), "output.weight")


@pytest.mark.parametrize("version", SHAPES)
def test_a_checkpoint_of_1386_computes_here_what_its_formulas_say(version: str, tmp_path: Path) -> None:
    weights, shape = checkpoint(tmp_path / "checkpoints" / "pretrain_final.pt", SHAPES[version])
    loaded = hf.load(locate.locate_model(tmp_path / "checkpoints" / "pretrain_final.pt"))
    ids = torch.randint(0, shape["vocab_size"], (50,), generator=torch.Generator().manual_seed(1))
    expected = computed(weights, shape, ids)
    assert float(expected.std()) > 0.3
    difference = float((scores(loaded.model, ids[None])[0] - expected).abs().max() / expected.abs().max())
    assert difference < 1e-5
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(**TOKENIZER))
    for text in ("the lamp", "  two  spaces   here ", "", " ", "12 + 30", "é\n東京 😀", "a \n b"):
        assert loaded.tokenizer.encode(text) == library.encode(text), text
    assert library.eos_id() in loaded.language.stop_ids
    with pytest.raises(CheckpointError, match="has no chat template"):
        _ = loaded.renderer


def test_a_checkpoint_of_1386_is_imported_with_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "1.0_step_7.pt"
    weights, shape = checkpoint(file, SHAPES["1.0"])
    elsewhere = (file.parent / "tokenizer_1.0.model").rename(tmp_path / "plasma.model")
    with pytest.raises(CheckpointError, match="needs its tokenizer in the same folder, which has none") as caught:
        locate.locate_model(file)
    assert "--tokenizer" in caught.value.hint
    assert cli.main(["import", str(file), str(tmp_path / "ours"), "--tokenizer", str(elsewhere)]) == 0
    loaded = hf.load(tmp_path / "ours")
    ids = torch.arange(40)
    expected = computed(weights, shape, ids)
    assert float((scores(loaded.model, ids[None])[0] - expected).abs().max()) < 1e-5 * float(expected.abs().max())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another program": (
        {"model_state_dict": None, "model": {}},
        "it is not a checkpoint of 1386.ai, which holds model_s",
    ),
    "no settings": ({"config": {"training": {}}}, "it is not a checkpoint of 1386.ai"),
    "a field that is not known": ({"config": {"model": SHAPES["1.0"] | {"experts": 4}}}, "vocab_size None"),
    "a strange weight": (
        {"model_state_dict": {"layers.0.moe.weight": torch.ones(2)}},
        "moe.weight is not a weight of th",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_of_another_program_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    changes, reason = WRONG[case]
    checkpoint(tmp_path / "a.pt", SHAPES["1.0"], **changes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        locate.locate_model(tmp_path / "a.pt")
    assert caught.value.where == str(tmp_path / "a.pt")
