import gc
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import CheckpointError, DataError, RunError
from bloomery.core.io import MANIFEST
from bloomery.generate.engine import Engine
from bloomery.model.config import ModelConfig
from bloomery.model.quantize import kept_bytes
from bloomery.serve import models
from bloomery.serve.chat_model import Answerer, Models, TextAnswerer
from bloomery.serve.models import WEIGHT_BYTES, LoadSettings, ModelRegistry, answerer_of, weight_bytes
from bloomery.tokenizer.chat_template import Renderer
from bloomery.weights import hf
from bloomery.weights.hf import Lineage
from tests.core.made import manifest
from tests.model.made import lively
from tests.tokenizer.made import small
from tests.train.made import processor
from tests.weights.made import FOLDERS, model, run

import torch

ASK: list[Message] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def shelf(tmp_path: Path) -> ModelRegistry:
    run(tmp_path / "b", "pretrain", "finetune")
    run(tmp_path / "a", "pretrain")
    return ModelRegistry(tmp_path)


def test_a_shelf_lists_the_finished_models_and_new_ones_as_they_come(shelf: ModelRegistry) -> None:
    assert isinstance(shelf, Models)
    assert [one.id for one in shelf.names()] == ["a/pretrain", "b", "b/pretrain"]
    for one in shelf.names():
        assert one.created == int((one.path / hf.WEIGHTS).stat().st_mtime)
        assert one.context == hf.load(one.path).model.config.context_length == 40
    run(shelf.runs / "c", "pretrain", "finetune")
    assert [one.id for one in shelf.names()] == ["a/pretrain", "b", "b/pretrain", "c", "c/pretrain"]
    assert ModelRegistry(shelf.runs / "none").names() == []


def test_a_folder_whose_name_is_no_utf_8_is_left_out_and_reported_once(
    shelf: ModelRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        shutil.copytree(shelf.runs / "b", shelf.runs / os.fsdecode(b"b\xff"))
        stage = shelf.runs / "a" / FOLDERS["pretrain"]
        shutil.copytree(stage, stage.with_name(os.fsdecode(b"10-finetune-\xff")))
    except OSError:
        pytest.skip("the file system takes only names in UTF-8")
    again = ModelRegistry(shelf.runs)
    assert r"b\udcff: left out, because its name is not UTF-8. Rename it." in capsys.readouterr().err
    for _ in range(2):
        assert [one.id for one in again.names()] == ["a/pretrain", "b", "b/pretrain"]
    with pytest.raises(RunError, match="there is no model"):
        again.get(os.fsdecode(b"b\xff"))
    assert capsys.readouterr().err == ""


def test_no_other_model_answers_under_the_name_of_one_that_is_damaged(shelf: ModelRegistry) -> None:
    stage = shelf.runs / "b" / FOLDERS["finetune"]
    core_io.write_json(stage / MANIFEST, manifest(core_io.listing(stage), hands_on="model/"))
    assert shelf.get("b").name == "b"
    (stage / "model" / "config.json").unlink()
    assert [one.id for one in shelf.names()] == ["a/pretrain", "b/pretrain"]
    with pytest.raises(CheckpointError, match=r"its model is damaged: model/config\.json is gone\nRemove "):
        shelf.get("b")
    with pytest.raises(RunError, match="there is no model 'c'") as caught:
        shelf.get("c")
    assert caught.value.hint == "Models: a/pretrain, b/pretrain."


def test_what_a_model_says_is_what_its_engine_and_its_renderer_say(shelf: ModelRegistry) -> None:
    folder = shelf.runs / "b" / FOLDERS["finetune"] / "model"
    answerer = shelf.get("b")
    assert isinstance(answerer, Answerer)
    assert isinstance(answerer, TextAnswerer)
    answer = answerer.answer(ASK, SamplingConfig.greedy(9))
    prompt = Renderer(small()).prompt(ASK)
    engine = Engine(hf.load(folder).model, small().vocab_size)
    ids = list(engine.stream(prompt, SamplingConfig.greedy(9), stop_ids=Renderer(small()).end_ids))
    assert answer.prompt_tokens == len(prompt)
    assert "".join(piece.text for piece in answer.pieces) == small().decode(ids)


def test_a_model_is_loaded_to_the_device_of_this_machine(shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(processor(), torch_device=torch.device("meta"))
    monkeypatch.setattr("bloomery.hw.device.find", lambda: other)
    places: list[torch.device] = []
    whole = hf.load

    def watched(folder: Path, place: torch.device, dtype: hf.LoadFormat) -> hf.Loaded:
        places.append(place)
        return whole(folder, dtype=dtype)

    monkeypatch.setattr(hf, "load", watched)
    shelf.get("b")
    assert places == [other.torch_device]


def test_a_model_is_loaded_once_also_when_two_ask_for_it_at_once(
    shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    whole = models.answerer

    def counted(name: str, folder: Path, settings: LoadSettings) -> Any:
        loads.append(name)
        return whole(name, folder, settings)

    monkeypatch.setattr(models, "answerer", counted)
    got: list[Answerer] = []
    threads = [threading.Thread(target=lambda: got.append(shelf.get("b"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["b"]
    assert all(one is got[0] for one in got)
    assert shelf.get("b/pretrain") is not got[0]


def test_a_model_that_was_trained_again_is_loaded_again(shelf: ModelRegistry) -> None:
    folder, greedy = shelf.runs / "b" / FOLDERS["finetune"] / "model", SamplingConfig.greedy(9)
    before = shelf.get("b")
    said = "".join(piece.text for piece in before.answer(ASK, greedy).pieces)
    made = (folder / hf.WEIGHTS).stat().st_mtime
    model(folder, seed=4)
    os.utime(folder / hf.WEIGHTS, (made + 5, made + 5))
    after = shelf.get("b")
    assert after is not before
    assert "".join(piece.text for piece in after.answer(ASK, greedy).pieces) != said
    assert shelf.get("b") is after


def test_the_list_of_models_tells_what_is_known_of_each(shelf: ModelRegistry) -> None:
    folder = shelf.runs / "b" / FOLDERS["finetune"] / "model"
    before = {one.id: one.facts for one in shelf.names()}["b"]
    assert before == {"parameters": sum(weight.numel() for weight in hf.load(folder).model.parameters())}
    shelf.get("b")
    after = {one.id: one.facts for one in shelf.names()}
    more = {"chats": True, "chat_template": "bloomery", "tools": False, "number_format": "float32"}
    assert after["b"] == {**before, **more}
    assert after["b/pretrain"] == before


def test_a_model_is_loading_until_the_first_is_there(shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    whole = models.answerer

    def watched(name: str, folder: Path, settings: LoadSettings) -> Any:
        seen.append(shelf.is_loading)
        return whole(name, folder, settings)

    monkeypatch.setattr(models, "answerer", watched)
    for name in ("b", "b/pretrain"):
        assert not shelf.is_loading
        shelf.get(name)
    assert seen == [True, False]


def test_a_model_that_nobody_holds_ends_its_thread(tmp_path: Path) -> None:
    answerer: TextAnswerer | None = answerer_of("m", hf.load(model(tmp_path)))
    threads = {thread for thread in threading.enumerate() if thread.name == "scheduler"}
    answerer = None  # noqa: F841
    gc.collect()
    assert len([thread for thread in threads if thread.is_alive()]) < len(threads)


def test_the_estimated_memory_of_weights_is_that_of_the_loaded_model(tmp_path: Path) -> None:
    shape = ModelConfig(
        hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=512, context_length=40
    )
    renderer = Renderer(small())
    lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    hf.save(folder := tmp_path / "model", lively(shape, 0, small().vocab_size), renderer, lineage)
    sizes = {}
    for dtype in WEIGHT_BYTES:
        kept = kept_bytes(hf.load(folder, dtype=dtype).model)
        sizes[dtype] = weight_bytes(folder, dtype)
        assert sizes[dtype] == pytest.approx(kept, rel=0.03), dtype
    assert sizes["float32"] > sizes["bfloat16"] > sizes["int8"] > sizes["int4"] > sizes["nf4"]


def test_a_model_larger_than_the_free_memory_is_refused(shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_device_bytes", lambda device: 1000)
    with pytest.raises(RunError, match=r"(?s)its weights take .*, and 1.0 kB of memory are free.*--dtype int8"):
        shelf.get("b")
    monkeypatch.undo()
    assert shelf.get("b") is shelf.get("b")


def test_an_idle_model_leaves_memory_and_one_that_computes_stays(
    shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = ModelRegistry(shelf.runs, settings=LoadSettings(unload_after=3600))
    busy, idle = lent.get("b"), lent.get("b/pretrain")
    monkeypatch.setattr(TextAnswerer, "is_busy", property(lambda self: self is busy))
    lent._unload_idle("b/pretrain")
    assert lent.get("b/pretrain") is idle
    lent._asked = {"b": 0.0, "b/pretrain": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: 4000.0)
    lent._unload_idle("b")
    lent._unload_idle("b/pretrain")
    monkeypatch.undo()
    assert lent.get("b") is busy
    assert lent.get("b/pretrain") is not idle


def test_an_unknown_model_is_an_error_that_names_the_known_ones(shelf: ModelRegistry) -> None:
    with pytest.raises(RunError, match=r"(?s)there is no model 'd'.*Models: a/pretrain, b, b/pretrain\."):
        shelf.get("d")
    with pytest.raises(RunError, match=r"Models: none yet\."):
        ModelRegistry(shelf.runs / "none").get("b")


def test_a_model_whose_run_was_removed_is_gone(shelf: ModelRegistry) -> None:
    shelf.get("b")
    shutil.rmtree(shelf.runs / "b")
    with pytest.raises(RunError, match="there is no model 'b'"):
        shelf.get("b")


def test_a_model_that_cannot_be_loaded_is_an_error_and_the_others_stay(shelf: ModelRegistry) -> None:
    (shelf.runs / "b" / FOLDERS["finetune"] / "model" / "bloomery.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"bloomery\.json: cannot be read: tokenizer: field required"):
        shelf.get("b")
    assert shelf.get("b/pretrain").name == "b/pretrain"


def test_a_prompt_that_cannot_fit_is_refused_with_its_least_number_of_tokens(shelf: ModelRegistry) -> None:
    answerer = shelf.get("b")
    least = -(-1_000_000 // max(small().byte_lengths))
    with pytest.raises(DataError, match=rf"has at least {least + 2} tokens, but the model's context is 40"):
        answerer.answer([{"role": "user", "content": "x" * 1_000_000}], SamplingConfig())
