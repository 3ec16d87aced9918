"""A model folder that no longer holds what was written into it is refused, wherever it lies and whoever reads it."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import main
from bloomery.core import io as core_io
from bloomery.core.errors import CheckpointError
from bloomery.core.io import MANIFEST
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import export, hf, llmc, peft
from bloomery.weights.hf import WEIGHTS, Lineage
from bloomery.weights.opened import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from bloomery.weights.safetensors import SUMS, verify
from tests.model.made import lively
from tests.tokenizer.made import small
from tests.weights import made

import safetensors.torch
import torch

LINEAGE = Lineage(tokenizer=small().hash, template=Renderer(small()).template.hash, shards="5" * 64)


def flip(file: Path, place: int = -5) -> None:
    """Change the lowest bit of one number: still a finite number, and a file of the same size."""
    data = bytearray(file.read_bytes())
    data[place // 4 * 4] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.model(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copied")


def test_one_flipped_bit_of_the_weights_is_refused_by_the_name_of_the_file(folder: Path) -> None:
    hf.load(folder)
    flip(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} has another sha256, unlike in .*{SUMS}") as caught:
        hf.load(folder)
    assert caught.value.where == str(folder)
    assert f"remove its line from {SUMS}" in caught.value.hint


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_list_of_hashes_that_is_no_regular_file_is_an_error(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / SUMS).unlink()
    make(folder / SUMS)
    with pytest.raises(CheckpointError, match=f"{SUMS}: cannot be read: ") as caught:
        hf.load(folder)
    assert "remove" in caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "bloomery.json"])
def test_every_file_beside_the_weights_is_compared_too(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + "\n")
    with pytest.raises(CheckpointError, match=f"{name} has another sha256"):
        hf.load(folder)


def stage(root: Path, *, sums: bool) -> Path:
    """A finished stage of a run with its manifest, as one of before SHA256SUMS had it, or not."""
    run = made.run(root, "pretrain")
    folder = run / made.FOLDERS["pretrain"]
    if not sums:
        (folder / "model" / SUMS).unlink()
    core_io.write_json(folder / MANIFEST, {"outputs": core_io.listing(folder), "hands_on": "model/"})
    return folder


@pytest.mark.parametrize("sums", [True, False])
def test_a_model_in_a_stage_is_compared_with_the_manifest_of_the_stage(tmp_path: Path, sums: bool) -> None:
    folder = stage(tmp_path / "run", sums=sums)
    hf.load(folder / "model")
    flip(folder / "model" / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} has another sha256, unlike in .*{MANIFEST}") as caught:
        hf.load(folder / "model")
    assert f"bloomery run {tmp_path / 'run' / 'recipe.toml'}" in caught.value.hint


def test_a_list_of_hashes_that_vanished_from_a_stage_is_missed(tmp_path: Path) -> None:
    folder = stage(tmp_path / "run", sums=True)
    (folder / "model" / SUMS).unlink()
    with pytest.raises(CheckpointError, match=f"{SUMS} is gone"):
        hf.load(folder / "model")


def test_a_checkpoint_from_before_lists_of_hashes_is_compared_with_its_manifest(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "000000010")
    (folder / SUMS).unlink()
    core_io.write_json(folder / MANIFEST, {"step": 10, "outputs": core_io.listing(folder)})
    hf.load(folder)
    flip(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} has another sha256"):
        hf.load(folder)


def verbs(folder: Path, out: Path) -> dict[str, list[str]]:
    return {
        "chat": ["chat", str(folder), "--prompt", "Hello"],
        "eval": ["eval", str(folder), "--toy-questions", "2"],
        "export": ["export", str(folder), str(out)],
        "import": ["import", str(folder), str(out)],
    }


@pytest.mark.parametrize("verb", ["chat", "eval", "export", "import"])
def test_no_verb_uses_a_damaged_model(
    folder: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / WEIGHTS)
    assert main(verbs(folder, tmp_path / "out")[verb]) == 2
    assert f"{WEIGHTS} has another sha256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_model_is_neither_gone_on_with_nor_started_from(folder: Path) -> None:
    model = hf.load(folder).model
    flip(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="another sha256"):
        hf.fill(model, folder, LINEAGE)
    with pytest.raises(CheckpointError, match="another sha256"):
        hf.digest(folder)


def test_sha256sum_reads_the_list_of_an_export(whole: Path, tmp_path: Path) -> None:
    shape = llmc.shape(16, 1, 2, 20)
    hf.save(tmp_path / "gpt2", lively(shape, 0, small().vocab_size), Renderer(small()), LINEAGE)
    for form, source in (("hf", whole), ("llmc", tmp_path / "gpt2")):
        out = tmp_path / form
        assert main(["export", str(source), str(out), "--format", form]) == 0
        done = subprocess.run(["sha256sum", "-c", SUMS], cwd=out, capture_output=True, text=True, check=True)
        assert done.stdout.count(": OK") == len(list(out.iterdir())) - 1


@pytest.mark.parametrize("name", [export.MODEL_FILE, export.TOKENIZER_FILE])
def test_an_export_for_llm_c_that_was_damaged_is_not_imported(tmp_path: Path, name: str) -> None:
    shape = llmc.shape(16, 1, 2, 20)
    hf.save(tmp_path / "gpt2", lively(shape, 0, small().vocab_size), Renderer(small()), LINEAGE)
    out = tmp_path / "out"
    export.write(hf.load(tmp_path / "gpt2"), out, "llmc", "float32")
    export.read(out / export.MODEL_FILE)
    flip(out / name, 1028)
    with pytest.raises(CheckpointError, match=f"{name} has another sha256"):
        export.read(out / export.MODEL_FILE)


LISTS: dict[str, bytes] = {
    "nothing": b"",
    "bytes": b"\xff\x00\xfe",
    "a path": b"0" * 64 + b"  ../../etc/passwd\n",
    "a short hash": b"0" * 63 + b"  model.safetensors\n",
    "two megabytes": b"0" * 2**21,
}


@pytest.mark.parametrize("text", LISTS.values(), ids=LISTS)
def test_what_is_no_list_of_hashes_is_refused(folder: Path, text: bytes) -> None:
    (folder / SUMS).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"is not a list of sha256 and names|the limit is 1,048,576"):
        verify(folder)


@pytest.mark.parametrize("text", ["{}", "[]", '{"outputs": 5}', '{"outputs": {"model/a": 5}}', "[" * 10**5, "{"])
def test_a_manifest_of_a_stage_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = stage(tmp_path / "run", sums=True)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(folder / "model")


# --- numbers that are none -----------------------------------------------------------------------------------------

KIND = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KIND)
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_tensor(
    folder: Path, kind: str, number: float
) -> None:
    weights = {name: one.to(KIND[kind]) for name, one in safetensors.torch.load_file(folder / WEIGHTS).items()}
    name = sorted(weights)[3]
    weights[name].view(-1)[-1] = number
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(weights))
    count = weights[name].numel()
    with pytest.raises(CheckpointError, match=rf"{name} holds 1 of {count:,} numbers that are NaN or infinite"):
        hf.load(folder)


def test_the_largest_finite_numbers_are_weights(folder: Path) -> None:
    (folder / SUMS).unlink()
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    weights["model.norm.weight"].fill_(torch.finfo(torch.float32).max)
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(weights))
    assert float(hf.load(folder).model.state_dict()["norm.weight"].max()) == torch.finfo(torch.float32).max


def test_a_model_of_llm_c_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = lively(llmc.shape(16, 1, 2, 20), 0, 40)
    with torch.no_grad():
        model.state_dict()["norm.weight"][0] = float("nan")
    llmc.write(tmp_path / "model.bin", model)
    with pytest.raises(CheckpointError, match=r"norm.weight holds 1 of 16 numbers that are NaN"):
        llmc.read(tmp_path / "model.bin")


def test_adapters_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"base_model.model.{name}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    tensors[f"base_model.model.{name}.lora_B.weight"][0, 0] = float("inf")
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(safetensors.torch.save(tensors))
    facts: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": 1, "base_model_name_or_path": "x"}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=rf"{name}.lora_B.weight holds 1 of 4 numbers that are NaN"):
        peft.read(tmp_path)


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "of 2^60 bytes": lambda data: (2**60).to_bytes(8, "little") + data[8:],
    "of 2^64 - 1 bytes": lambda data: b"\xff" * 8 + data[8:],
    "longer than the file": lambda data: len(data).to_bytes(8, "little") + data[8:],
    "of 7 bytes": lambda data: data[:7],
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_header_that_cannot_be_is_refused_before_it_is_read(folder: Path, change: Callable[[bytes], bytes]) -> None:
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
    with pytest.raises(CheckpointError, match="is torn"):
        hf.load(folder)
