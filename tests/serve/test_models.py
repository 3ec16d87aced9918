import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.core import io as core_io
from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import CheckpointError, ConfigError, DataError, RunError
from bloomery.core.io import MANIFEST
from bloomery.core.log import size
from bloomery.generate.decoder import PAGE, PagePool, Pages, work_bytes
from bloomery.generate.engine import PROMPT_TOKENS, Engine
from bloomery.model.config import Lora, ModelConfig
from bloomery.model.quantize import kept_bytes
from bloomery.model.transformer import on_meta
from bloomery.serve import models
from bloomery.serve.chat_model import Answerer, AnswerStreams, Asked, Models, NoRoomError, TextAnswerer
from bloomery.serve.models import WEIGHT_BYTES, LoadSettings, ModelRegistry, answerer_of, weight_bytes
from bloomery.serve.server import serving
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.plan.report import kv_bytes
from bloomery.weights import hf
from bloomery.weights.hf import Lineage
from tests.core.made import manifest
from tests.generate.test_scheduler import needs_library
from tests.model.made import CHOICES, lively
from tests.tokenizer.made import small
from tests.train.made import processor
from tests.weights.made import FOLDERS, model, run
from tests.weights.test_peft import adapted

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

    def counted(name: str, *rest: Any) -> Any:
        loads.append(name)
        return whole(name, *rest)

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

    def watched(*arguments: Any) -> Any:
        seen.append(shelf.is_loading)
        return whole(*arguments)

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
        sizes[dtype] = weight_bytes(on_meta(*hf.config_of(folder)), dtype)
        assert sizes[dtype] == pytest.approx(kept, rel=0.03), dtype
    assert sizes["float32"] > sizes["bfloat16"] > sizes["int8"] > sizes["int4"] > sizes["nf4"]


def test_a_model_that_does_not_fit_with_keys_and_values_is_refused(
    shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "free_device_bytes", lambda device: 1000)
    with pytest.raises(RunError, match=r"(?s)its weights take .*; 1.0 kB of memory are free.*--dtype int8"):
        shelf.get("b")
    shape, rows = hf.config_of(shelf.runs / "b" / FOLDERS["finetune"] / "model")
    keys = PagePool.page_bytes(shape, torch.float32) * Pages.needed(shape.context_length)
    assert keys == kv_bytes(shape, 4) * Pages.needed(shape.context_length) * PAGE // shape.context_length
    whole = weight_bytes(on_meta(shape, rows), "float32") + 4 * keys + PROMPT_TOKENS * work_bytes(shape)
    monkeypatch.setattr(models, "free_device_bytes", lambda device: whole - 1)
    with pytest.raises(RunError, match=f"keys and values {size(keys)}, .* intermediate results"):
        shelf.get("b")
    monkeypatch.setattr(models, "free_device_bytes", lambda device: whole)
    assert shelf.get("b") is shelf.get("b")


@pytest.mark.slow
def test_idle_models_leave_memory_for_one_that_has_no_room_and_those_in_use_stay(
    shelf: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "free_device_bytes", lambda device: (2 - len(shelf._loaded)) * 10**8)
    monkeypatch.setattr(models, "work_bytes", lambda config: 10**8 // PROMPT_TOKENS - 10**5)
    for name in ("a/pretrain", "b", "a/pretrain", "b/pretrain"):
        shelf.get(name)
    assert set(shelf._loaded) == {"a/pretrain", "b/pretrain"}  # b was asked longest ago
    held = shelf.get("a/pretrain")
    monkeypatch.setattr(TextAnswerer, "is_busy", property(lambda self: self.name == "b/pretrain"))
    for _ in range(2):
        with pytest.raises(NoRoomError, match=r"its weights take .*; 0 bytes of memory are free"):
            shelf.get("b")
        assert set(shelf._loaded) == {"a/pretrain", "b/pretrain"}
    with shelf._locks["b/pretrain"]:  # another thread asks for it
        monkeypatch.undo()
        assert not shelf._makes_room("b/pretrain")
    assert shelf.get("a/pretrain") is held


def test_a_model_that_no_idle_one_can_make_room_for_is_refused_with_status_503(shelf: ModelRegistry) -> None:
    with pytest.MonkeyPatch.context() as patch, serving(shelf) as url:
        patch.setattr(models, "free_device_bytes", lambda device: 1000)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "b", "messages": ASK}, timeout=60)
    assert answer.status_code == 503
    assert "1.0 kB of memory are free" in answer.json()["error"]["message"]


def test_a_format_of_keys_that_a_model_cannot_have_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("the weights were read"))
    renderer, shape = Renderer(small()), CHOICES["differential"]
    lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    hf.save(tmp_path / "m", lively(shape, 0, small().vocab_size), renderer, lineage)
    named = {"differential": tmp_path / "m", "large": model(tmp_path / "large")}
    lent = ModelRegistry(tmp_path / "runs", named, LoadSettings(kv_dtype="int8"))
    with pytest.raises(ConfigError, match="keys and values in int8 need weights that are packed"):
        lent.get("differential")
    room = 3 * weight_bytes(on_meta(*hf.config_of(named["large"])), "float32")
    monkeypatch.setattr(models, "free_device_bytes", lambda device: room - 1)
    with pytest.raises(NoRoomError, match=r"three times as much to be packed; .* of memory are free"):
        lent.get("large")


MEMORY_AFTER_UNLOADING = """
import gc, re, sys
from pathlib import Path
from bloomery.core.chat import SamplingConfig
from bloomery.serve.models import LoadSettings, ModelRegistry

def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

lent = ModelRegistry(Path("none"), {"m": Path(sys.argv[1])}, LoadSettings(unload_after=3600))
list(lent.get("m").answer([{"role": "user", "content": "Hi"}], SamplingConfig.greedy(3)).texts)
before = anonymous()
lent._asked["m"] -= 4000
lent._unload_idle("m")
assert not lent._loaded
print(before - anonymous())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
def test_an_idle_model_that_is_unloaded_gives_its_memory_back(tmp_path: Path) -> None:
    shape = ModelConfig(
        hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=8, intermediate_size=1536, context_length=40
    )
    renderer, loaded = Renderer(small()), lively(shape, 0, small().vocab_size)
    lineage = Lineage(tokenizer=small().hash, template=renderer.template.hash, shards="5" * 64)
    hf.save(tmp_path / "model", loaded, renderer, lineage)
    command = [sys.executable, "-c", MEMORY_AFTER_UNLOADING, str(tmp_path / "model")]
    freed = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert freed > 0.8 * kept_bytes(loaded)


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
    assert lent._loaded["b/pretrain"][1] is idle  # this test holds it, so that unloading it would free nothing
    there, lent._asked["b/pretrain"] = weakref.ref(idle), -1e9
    del idle
    lent._unload_idle("b/pretrain")
    assert there() is None
    assert lent.get("b/pretrain").name == "b/pretrain"


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


ALIGNED = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, context_length=40, head_dim=8
)


RANK_2 = Lora(rank=2)


def with_adapters(root: Path, settings: Lora = RANK_2) -> dict[str, Path]:
    """A base and three adapters of it, by name."""
    folders = {"base": root / "base"}
    for seed in range(3):
        name = f"adapter{seed}"
        _, folders[name] = adapted(root / name, ALIGNED, settings, seed=seed)
        shutil.rmtree(root / "base", ignore_errors=True)
        shutil.copytree(root / name / "base", root / "base")
        facts = json.loads((folders[name] / hf.LINEAGE).read_text())
        facts[hf.BASE]["folder"] = os.path.relpath(root / "base", folders[name])
        (folders[name] / hf.LINEAGE).write_text(json.dumps(facts))
        (folders[name] / "SHA256SUMS").unlink()
    return folders


@pytest.mark.slow
@needs_library
def test_a_base_and_its_adapters_answer_in_the_same_steps_and_share_weights(tmp_path: Path) -> None:
    folders = with_adapters(tmp_path)
    lent, greedy = ModelRegistry(tmp_path / "runs", folders), SamplingConfig.greedy(12)
    models_of = {name: lent.get(name) for name in reversed(folders)}
    assert len({id(one._scheduler) for one in models_of.values()}) == 1
    engines = [one._engine for one in models_of.values() if one._engine is not None]
    assert len({one.model.embed.weight.data_ptr() for one in engines}) == 1
    asked = Asked(sampling=greedy, messages=tuple(ASK))
    together = {name: one.begin(asked, lambda: None) for name, one in models_of.items()}
    texts = {}
    for name, answer in together.items():
        assert isinstance(answer, AnswerStreams)
        texts[name] = ""
        while not answer.done:
            texts[name] += "".join(chunk.text for chunk in answer.take())
            time.sleep(0.01)
    for name, one in models_of.items():
        merged = answerer_of(name, hf.load(folders[name]))
        assert texts[name] == "".join(one.answer(ASK, greedy).texts) == "".join(merged.answer(ASK, greedy).texts)
        assert one.embedding([1, 2, 3]) == pytest.approx(merged.embedding([1, 2, 3]), rel=1e-3, abs=1e-5)
        assert one.words.context == 40
    assert len(set(texts.values())) > 1


@pytest.mark.slow
@needs_library
def test_a_base_that_several_models_share_ends_with_the_last_of_them(tmp_path: Path) -> None:
    lent = ModelRegistry(tmp_path / "runs", with_adapters(tmp_path))
    thread = lent.get("adapter0")._scheduler._thread  # type: ignore[attr-defined]
    assert lent.get("adapter1")._scheduler._thread is thread  # type: ignore[attr-defined]
    lent._loaded.pop("adapter0")
    gc.collect()
    assert thread.is_alive()
    assert len(lent._bases) == 1
    lent._loaded.clear()
    gc.collect()
    assert not thread.is_alive()
    assert not lent._bases


@pytest.mark.parametrize("settings", [Lora(rank=2, dora=True), Lora(rank=2, base_dtype="nf4")])
def test_adapters_that_need_a_base_of_their_own_are_merged(tmp_path: Path, settings: Lora) -> None:
    folders = with_adapters(tmp_path, settings)
    assert hf.separate_adapter(folders["adapter0"], "float32") is None
    assert (hf.separate_adapter(folders["adapter0"], "nf4") is None) == settings.dora
    lent, greedy = ModelRegistry(tmp_path / "runs", folders), SamplingConfig.greedy(5)
    said = "".join(lent.get("adapter0").answer(ASK, greedy).texts)
    assert said == "".join(answerer_of("m", hf.load(folders["adapter0"])).answer(ASK, greedy).texts)
