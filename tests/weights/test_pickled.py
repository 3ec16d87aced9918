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

from bloomery.core.errors import CheckpointError
from bloomery.weights import hf, locate, pickled
from tests.weights.test_architectures import folder_of_others

import safetensors.torch
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "cache"))


def theirs(folder: Path) -> dict[str, Tensor]:
    """A folder as transformers saves it, with its weights pickled; returns the weights."""
    folder_of_others(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


def test_a_named_file_becomes_the_same_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = theirs(tmp_path / "theirs")
    folder = locate.locate_model(tmp_path / "theirs" / "pytorch_model.bin")
    found = safetensors.torch.load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    hf.load(folder)
    monkeypatch.setattr(pickled, "_in_a_child", None)  # the second time, no child is started
    assert locate.locate_model(tmp_path / "theirs" / "pytorch_model.bin") == folder


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
    "a number in place of a tensor": (lambda folder: {"a": 3}, "'a' is int, and no tensor"),
    "a tensor larger than its storage": (expanded, "more numbers than its storage"),
    "a sparse tensor": (lambda folder: {"a": torch.eye(3).to_sparse()}, "a is no plain tensor"),
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
