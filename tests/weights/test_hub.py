"""Models of a hub: only the files that are needed are fetched, once, and they open without a network afterwards."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.core.errors import CheckpointError, UnreachableError
from bloomery.model.config import Lora
from bloomery.weights import export as exports
from bloomery.weights import hf, locate
from tests.data import hub_server
from tests.model.made import SHAPES
from tests.weights.test_export import saved, told
from tests.weights.test_peft import adapted, logits_of, renamed_base

import torch

NAME = Path("hub:me/tiny")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("BLOOMERY_CACHE", str(tmp_path / "ours"))
    with hub_server.serving() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        yield made


def files(folder: Path) -> dict[str, bytes]:
    """A model folder as its makers publish it, with files that nobody needs."""
    saved(folder, SHAPES[0])
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    there = {name: (folder / name).read_bytes() for name in names}
    return there | {"pytorch_model.bin": b"a pickle", "README.md": b"# tiny", "onnx/model.safetensors": b"another"}


def test_only_files_that_are_needed_are_fetched_once_and_open_offline(
    server: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = files(tmp_path / "model")
    server.put("me/tiny", there)
    folder = locate.locate_model(NAME)
    assert {one.name for one in folder.iterdir()} == {
        name for name in there if "/" not in name and name.endswith((".json", ".safetensors", ".md"))
    }
    assert hf.load(folder).tokenizer.hash == hf.load(tmp_path / "model").tokenizer.hash
    server.forget()
    assert locate.locate_model(NAME) == folder
    assert not server.sent("safetensors")
    server.forget()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate.locate_model(NAME) == folder
    assert not server.asked()
    with pytest.raises(UnreachableError, match="is not in the cache"):
        locate.locate_model(Path("hub:me/other"))


def sharded(folder: Path) -> dict[str, bytes]:
    """The files of a model whose weights are in several files, next to a second copy of them under another name."""
    there = {name: data for name, data in files(folder).items() if "/" not in name}
    exports.write(hf.streamed(folder), folder / "several", "hf", "float32", 20_000)
    shards = {file.name: file.read_bytes() for file in (folder / "several").glob("model*")}
    assert len(shards) > 2
    copy = there.pop("model.safetensors")
    return there | shards | {"consolidated.safetensors": copy, "model-extra.safetensors": copy}


def test_a_second_copy_of_the_weights_is_neither_fetched_nor_counted(
    server: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = sharded(tmp_path / "model")
    server.put("me/tiny", there)
    copies = {"consolidated.safetensors", "model-extra.safetensors"}
    needed = {name: data for name, data in there.items() if name not in copies and not name.endswith(".bin")}
    room = shutil.disk_usage(tmp_path)._replace(free=sum(map(len, needed.values())))
    with monkeypatch.context() as patch:
        patch.setattr("bloomery.weights.locate.shutil.disk_usage", lambda path: room)
        folder = locate.locate_model(NAME)
    assert {file.name for file in folder.iterdir()} == {*needed}
    assert torch.equal(logits_of(hf.load(folder).model), logits_of(hf.load(tmp_path / "model").model))
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert locate.locate_model(NAME) == folder
        next(folder.glob("model-00002-*")).unlink()
        with pytest.raises(UnreachableError, match="the copy in the cache has no file model-00002") as caught:
            locate.locate_model(NAME)
        assert "without HF_HUB_OFFLINE" in caught.value.hint
    server.put("me/one", there | {"model.safetensors": there["consolidated.safetensors"]})
    names = {file.name for file in locate.locate_model(Path("hub:me/one")).iterdir()}
    assert {name for name in names if name.endswith(".safetensors")} == {"model.safetensors"}


def test_adapters_of_a_hub_are_fetched(server: hub_server.Hub, tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    server.put("me/adapters", {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})
    fetched = locate.locate_model(Path("hub:me/adapters"))
    assert (fetched / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def test_an_index_that_leads_elsewhere_or_names_no_file_is_refused_before_weights_are_fetched(
    server: hub_server.Hub, tmp_path: Path
) -> None:
    there = sharded(tmp_path / "model")
    lost = next(name for name in there if name.startswith("model-00002"))
    server.put("me/tiny", {name: data for name, data in there.items() if name != lost})
    with pytest.raises(CheckpointError, match=rf"has no file {lost}, which model\.safetensors\.index\.json names"):
        locate.locate_model(NAME)
    for wrong in ("../model.safetensors", "/etc/passwd", "onnx/model.safetensors", "pytorch_model.bin"):
        index = json.dumps({"weight_map": {"lm_head.weight": wrong}}).encode()
        server.put("me/tiny", there | {"model.safetensors.index.json": index, "onnx/model.safetensors": b"another"})
        with pytest.raises(CheckpointError) as caught:
            locate.locate_model(NAME)
        assert wrong in str(caught.value)
    server.put("me/tiny", there | {"model.safetensors.index.json": b"[" * 100})
    with pytest.raises(CheckpointError, match="cannot be read"):
        locate.locate_model(NAME)
    assert not [one for one in server.asked() if one.path.endswith((".safetensors", ".bin"))]


def test_weights_under_another_name_alone_are_refused_by_that_name_before_they_are_fetched(
    server: hub_server.Hub, tmp_path: Path
) -> None:
    there = sharded(tmp_path / "model")
    other = {name: data for name, data in there.items() if not name.startswith("model")}
    server.put("me/tiny", other)
    with pytest.raises(CheckpointError, match=r"has consolidated\.safetensors, but no model\.safetensors and no model"):
        locate.locate_model(NAME)
    assert not server.asked("consolidated")


def test_adapters_find_their_base_of_a_hub_in_the_cache_and_never_fetch_it(
    server: hub_server.Hub, tmp_path: Path
) -> None:
    server.put("me/tiny", files(tmp_path / "model"))
    _, folder = adapted(tmp_path, SHAPES[0], Lora(rank=2))
    renamed_base(folder, "me/tiny")
    with pytest.raises(CheckpointError, match="needs the base model me/tiny, which is neither in the cache") as caught:
        hf.load(folder)
    assert "run: hf download me/tiny\n" in caught.value.hint
    assert not server.asked()
    base = locate.locate_model(NAME)
    server.forget()
    assert hf.base_of(folder) == base
    renamed_base(folder, str(tmp_path / "model"))
    expected = logits_of(hf.load(folder).model)
    for more in ({}, {"revision": None}, {"revision": "main"}, {"revision": base.name}):
        renamed_base(folder, "me/tiny", **more)
        assert torch.equal(logits_of(hf.load(folder).model), expected)
    renamed_base(folder, "me/tiny", revision="v2")
    with pytest.raises(CheckpointError, match="needs the base model me/tiny") as caught:
        hf.load(folder)
    assert "run: hf download me/tiny --revision v2\n" in caught.value.hint
    assert not server.asked()


def test_a_full_disk_refuses_only_what_is_not_in_the_cache(
    server: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = files(tmp_path / "model")
    server.put("me/tiny", there)
    full = shutil.disk_usage(tmp_path)._replace(free=900)
    with monkeypatch.context() as patch:
        patch.setattr("bloomery.weights.locate.shutil.disk_usage", lambda path: full)
        with pytest.raises(CheckpointError, match=r"needs .* GB, but 0\.0 GB are free"):
            locate.locate_model(NAME)
    folder = locate.locate_model(NAME)
    server.put("me/tiny", there | {"generation_config.json": b"{}"})  # another commit, whose weights are cached
    monkeypatch.setattr("bloomery.weights.locate.shutil.disk_usage", lambda path: full)
    newer = locate.locate_model(NAME)
    assert newer != folder
    assert (newer / "model.safetensors").resolve() == (folder / "model.safetensors").resolve()


def test_a_model_of_a_hub_is_a_model_for_every_verb(
    server: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = server.put("me/tiny", files(tmp_path / "model"))
    assert told(capsys, "export", NAME, tmp_path / "out")["architecture"] == "LlamaForCausalLM"
    assert told(capsys, "import", f"{NAME}@{commit}", tmp_path / "in")["number_format"] == "float32"
    assert main(["chat", str(NAME), "--complete", "--prompt", "The", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("The")


def test_a_gguf_file_of_a_hub_is_fetched_alone(
    server: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model", SHAPES[0])
    told(capsys, "export", tmp_path / "model", tmp_path / "a.gguf", "--format", "gguf")
    there = {"a.gguf": (tmp_path / "a.gguf").read_bytes(), "b.gguf": b"another", "config.json": b"{}"}
    server.put("me/tiny", there)
    assert hf.load(locate.locate_model(Path(f"{NAME}/a.gguf"))).model.config.hidden_size == SHAPES[0].hidden_size
    assert not server.sent("b.gguf")
    with pytest.raises(CheckpointError, match="has no weights as safetensors") as raised:
        locate.locate_model(NAME)
    assert "hub:me/tiny/a.gguf" in raised.value.hint


def test_a_damaged_file_of_the_cache_is_refused_by_name(server: hub_server.Hub, tmp_path: Path) -> None:
    server.put("me/tiny", files(tmp_path / "model"))
    blob = (locate.locate_model(NAME) / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has the sha256"):
        locate.locate_model(NAME)


def test_a_hub_that_has_no_such_model_or_is_not_there_is_an_error_without_a_traceback(
    server: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="is not on the hub, or is private"):
        locate.locate_model(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="the hub did not answer"):
        locate.locate_model(NAME)
    with pytest.raises(CheckpointError, match="is not a model name of a hub"):
        locate.parsed("hub:alone")
