"""
Every JSON file that our code reads back, and what becomes of a command where it holds something else.

A reader takes a folder in which everything is whole but one file. It returns, or raises a BloomeryError that a person
can act on; nothing else, whatever stands in the file.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from bloomery.core import cache, records, run_dir
from bloomery.core import io as core_io
from bloomery.core.errors import BloomeryError
from bloomery.core.io import MANIFEST
from bloomery.core.log import METRICS, read_metrics
from bloomery.core.records import CURRENT, content_hash, damage, read_manifest
from bloomery.data import decontamination, executor
from bloomery.data.quality import scorer, thresholds
from bloomery.hw import kernel_trials
from bloomery.hw.host import Host
from bloomery.shards import format as shards
from bloomery.stages import data_tools, prefer, run_report
from bloomery.tokenizer import importers
from bloomery.train import checkpointing, compile
from bloomery.train.state import State
from bloomery.weights import checkpoint, hf, opened, peft
from bloomery.weights.opened import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from bloomery.weights.safetensors import INDEX, Tensors
from tests.core.made import manifest
from tests.weights.made import model

HASH = "5" * 64


@dataclass(frozen=True)
class Reader:
    """A file below a folder, what it holds where it is whole, and who reads it."""

    file: str
    whole: Any
    read: Callable[[Path], Any]
    none_is_fine: bool = False
    """Whether what is no record of this kind is as good as no file: a cache, a stage that is made again."""


STAGE = "01-fetch-aaaaaaaa"
STATS = {"documents": 3, "by_source": {"a": {"documents": 3}}, "reasons": {"x": 1}, "mix": {"web": {"asked": 1.0}}}
WHOLE = manifest(
    {"a.txt": {"bytes": 0, "sha256": HASH}},
    stage="fetch",
    inputs={"make": "01-make-bbbbbbbb"},
    input_hashes={"make": HASH},
    stats=STATS,
    config={"sources": [{"name": "a"}]},
    versions={"python": "3.11"},
    hands_on="",
    resumed=False,
)
GUARD = {"losses": [1.0], "norms": [1.0], "in_a_row": 0, "skipped": 0, "rollbacks": [[3, 1]]}
STATE = {"step": 1, "samples": 2, "tokens": 3, "metrics": {"loss": 1.0}, "guard": GUARD, "precision": {}, "rows": 0}
FACTS = {
    **{"format": scorer.FORMAT, "tokens": "words", "characters": 100, "name": "q", "keep": "high", "place": 0},
    "grams": {"buckets": 8, "words": [1, 2], "characters": None},
}
OUTCOME = {"kernel": "matmul", "implementation": "", "status": "passed", "why": "", "milliseconds": 1.0}
OWN_LINEAGE = {"tokenizer": HASH, "template": None, "shards": HASH, "base": None, "step": 0}
SPLIT = "rows/train.questions.jsonl"


def whole_run(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A reader of a run whose only stage has this manifest."""

    def reader(root: Path) -> Any:
        core_io.write_json(root / CURRENT, {"fetch": STAGE})
        (root / STAGE / "a.txt").touch()
        return read(root)

    return reader


def in_checkpoint(folder: Path) -> Any:
    return State.restored(checkpoint.read_state(folder))


def of_tool(out: Path) -> Any:
    return data_tools._read_result(out / "result.json")


LEFTOVER = {
    "record": {"files": []},
    "outputs": {},
    "sha256": core_io.sha256_bytes(core_io.canonical({"record": {"files": []}, "outputs": {}})),
}
READERS = {
    "current": Reader(CURRENT, {"fetch": STAGE}, run_dir.states),
    "waste": Reader(CURRENT, {"fetch": STAGE}, run_dir.waste),
    "manifest": Reader(MANIFEST, WHOLE, read_manifest),
    "content": Reader(MANIFEST, WHOLE, content_hash),
    "damage": Reader(MANIFEST, WHOLE, damage, none_is_fine=True),
    "status": Reader(f"{STAGE}/{MANIFEST}", WHOLE, whole_run(run_dir.states), none_is_fine=True),
    "clean": Reader(f"{STAGE}/{MANIFEST}", WHOLE, whole_run(run_dir.waste), none_is_fine=True),
    "card": Reader(f"{STAGE}/{MANIFEST}", WHOLE, whole_run(run_report.write_card), none_is_fine=True),
    "overview": Reader(f"{STAGE}/{MANIFEST}", WHOLE, whole_run(run_report.write_page), none_is_fine=True),
    "metrics": Reader(METRICS, {"step": 1, "loss": 2.0}, lambda folder: read_metrics(folder / METRICS)),
    "checkpoint": Reader(
        f"000000001/{MANIFEST}",
        {"step": 1, "goal": True, "outputs": {"state.json": {"bytes": 0, "sha256": HASH}}},
        lambda root: (checkpoint.damage(root / "000000001"), checkpoint.is_goal(root / "000000001")),
        none_is_fine=True,
    ),
    "state": Reader("state.json", STATE, in_checkpoint),
    "settings": Reader(checkpointing.SETTINGS, {"steps": 3}, checkpointing._settings),
    "continued": Reader(checkpointing.CONTINUED, {"from": "a", "step": 1}, checkpointing.continued_from),
    "verdict": Reader("v.json", {"4": {"compiled": True, "why": ""}}, lambda folder: compile._noted(folder / "v.json")),
    "lineage": Reader(hf.LINEAGE, OWN_LINEAGE, hf.lineage_of),
    "template": Reader(hf.LINEAGE, OWN_LINEAGE, hf.template_of),
    "index of weights": Reader(INDEX, {"weight_map": {"a": "a.safetensors"}}, lambda folder: Tensors(folder, "fix")),
    "index of tokens": Reader(
        "a.json",
        {"tokens": 1, "layout": "stream", "tokenizer": HASH, "sha256": {}, "edges": {}, "starts": [0]},
        lambda folder: shards._read_index(folder / "a.json"),
    ),
    "part": Reader(
        f"{executor.RECORDS}/work/p.json",
        LEFTOVER,
        lambda out: executor._done(out, "work", "p"),
        none_is_fine=True,  # the part runs again
    ),
    "facts": Reader(scorer.FACTS, FACTS, scorer.read_facts),
    "left out": Reader(
        thresholds.LEFT_OUT,
        [{"name": "q", "why": "few"}],
        lambda folder: thresholds.load(folder, [], min_score=0.0, min_scores={}),
    ),
    "rows": Reader(
        "rows.json",
        {"ngram_words": 13, "min_question_words": 4, "rows": [["t", 0]], "lengths": [4]},
        decontamination.OverlapIndex.load,
    ),
    "prepared": Reader("rows/prepared.json", {"record": {"hash": HASH, "read": 1}}, prefer.prepared),
    "questions": Reader(
        SPLIT,
        {"id": "1", "question": "1+1?", "solution": "2"},
        lambda out: list(records.read_lines(out / SPLIT, prefer.AskedQuestion)),
    ),
    "result": Reader(
        "result.json",
        {"documents": 1, "kept": 1, "dropped": 0, "reasons": {}, "seconds": 1.0, "made_from": "a", "outputs": {}},
        of_tool,
    ),
    "vocabulary": Reader(
        "vocab.json", {"a": 0}, lambda folder: importers._gpt2(folder / "merges.txt", folder / "vocab.json")
    ),
    "cache": Reader(
        "n.json", {"state": [1], "sha256": HASH}, lambda root: cache.load_note(root / "n.json", cache.NotedHash), True
    ),
}


def prepare(folder: Path) -> None:
    """What readers need besides the file that they are asked for."""
    (folder / "merges.txt").write_text("")
    for name in ("long", "starts", "whole-4"):
        for column in ("hashes", "owners"):
            np.save(folder / f"{name}-{column}.npy", np.zeros(0, np.uint64 if column == "hashes" else np.int64))


RAW = [b"", b"{", b"[", b"null", b"5", b'"x"', b"[]", b"{}", b"[[]]", b"[null]", b"[5]", b"true", b"nan", b"NaN"]
RAW += [b"\xff", b"-Infinity", b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xef\xbb\xbf{}", b"\x00"]
RAW += [b'{"step": NaN}', b'{"a": 1}', b'{"": ""}', b'{"step": "\\ud800"}']
RAW += [b'{"x": "' + b"x" * 100_000 + b'"}', b'["' + b"y" * 1000 + b'"]']
VALUES: list[Any] = [None, True, -1, 5, 0.5, 1e300, 10**19, 2**63, "", "x", "../x", "/etc/passwd", "x" * 5000, "a\0b"]
VALUES += [[], [None], [[]], [5], ["x"], {}, {"": 5}, {"x": None}, {"x": {"y": []}}, {"../x": {"bytes": 1}}]
VALUES += [[{"step": 1}], {"x" * 300: 1}, [[1, 2, 3]], [-1, 10**19], "\u2028", json.loads("[" * 90 + "]" * 90)]


def changed(whole: Any) -> Iterator[Any]:
    """A record with each of its keys gone, or holding each of VALUES; also one level and two levels below."""
    if isinstance(whole, dict):
        for key, value in whole.items():
            yield {name: other for name, other in whole.items() if name != key}
            for strange in (*VALUES, *changed(value)):
                yield {**whole, key: strange}
    elif isinstance(whole, list):
        for strange in (*VALUES, *(inner for one in whole for inner in changed(one))):
            yield [strange]


def attempt(reader: Reader, folder: Path) -> BloomeryError | None:
    """Read; anything but a BloomeryError fails the test."""
    try:
        reader.read(folder)
    except BloomeryError as caught:
        error = caught
    else:
        return None
    assert len(str(error)) < 1500, str(error)[:2000]
    return error


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_json_of_a_kind_is_an_error_that_names_the_file_and_the_fix(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    prepare(tmp_path)
    file = tmp_path / reader.file
    file.parent.mkdir(parents=True, exist_ok=True)
    for raw in RAW:
        file.write_bytes(raw + (b"\n" if reader.file.endswith(".jsonl") else b""))
        error = attempt(reader, tmp_path)
        if error is not None:
            assert file.name in error.where or file.name in error.what or file.parent.name in error.where
            assert error.hint
        elif raw in (b"{", b"[" * 100_000, b"\xff", b"NaN"):
            assert reader.none_is_fine, raw


@pytest.mark.parametrize("name", READERS)
def test_json_of_the_wrong_shape_is_an_error_and_never_a_traceback(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    prepare(tmp_path)
    file = tmp_path / reader.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(reader.whole) + "\n")
    if name not in ("index of weights", "left out", "vocabulary"):  # which want more than this file
        assert attempt(reader, tmp_path) is None
    step = 16 if reader.whole is WHOLE and "/" in reader.file else 1  # a whole run is slow, and reads as others do
    for record in islice(changed(reader.whole), 0, None, step):
        file.write_text(json.dumps(record) + "\n")
        attempt(reader, tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_a_device_and_an_enormous_file_are_refused_before_they_are_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    prepare(tmp_path)
    file = tmp_path / reader.file
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(2**42)
    for special in ("folder", "sparse", "fifo", "/dev/zero"):
        file.symlink_to(tmp_path / special)
        assert attempt(reader, tmp_path) is not None or reader.none_is_fine, special
        file.unlink()


def test_outcomes_of_trials_that_cannot_be_read_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trials, "outcomes_file", lambda host, vendor: tmp_path / "probes.json")
    reader = Reader("probes.json", {"outcomes": [OUTCOME]}, lambda folder: kernel_trials.load(Host.here(), "cpu"))
    for value in (*VALUES, *changed(reader.whole)):
        core_io.write_json(tmp_path / "probes.json", value)
        attempt(reader, tmp_path)


MODEL_FILES = (hf.CONFIG, hf.LINEAGE)


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_model_folder_whose_json_has_another_shape_is_refused_or_read(name: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    whole = json.loads((folder / name).read_text())
    every = [*whole, "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "use_sliding_window", "adapts"]
    every += ["head_dim", "attention_bias", "partial_rotary_factor"]
    for key in every:
        for value in VALUES:
            (folder / name).write_text(json.dumps({**whole, key: value}))
            attempt(Reader(name, whole, read_model_json), folder)


def read_model_json(folder: Path) -> None:
    opened.understood(folder / hf.CONFIG)
    hf.lineage_of(folder)
    hf.template_of(folder)


def test_an_adapter_whose_configuration_has_another_shape_is_refused(tmp_path: Path) -> None:
    whole = {"peft_type": "LORA", "base_model_name_or_path": "base", "lora_alpha": 8, "alpha_pattern": {"a": 1.0}}
    name = "base_model.model.a.lora_{}.weight"
    pair = {name.format("A"): np.zeros((4, 2), np.float32), name.format("B"): np.zeros((2, 4), np.float32)}
    safetensors.numpy.save_file(pair, tmp_path / ADAPTER_WEIGHTS)
    reader = Reader(ADAPTER_CONFIG, whole, peft.read)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(whole))
    assert attempt(reader, tmp_path) is None
    for record in (*changed(whole), *VALUES):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(record))
        attempt(reader, tmp_path)


def test_a_message_never_repeats_a_long_value(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for value in ("x" * 100_000, ["y" * 100_000] * 3, {"k" * 100_000: 1}, 10**19):
        core_io.write_json(file, {"a": value})
        with pytest.raises(BloomeryError) as caught:
            records.read_record(file, dict[str, bool])
        assert len(str(caught.value)) < 1000
        assert str(file) in str(caught.value)


def test_numbers_that_json_cannot_hold_are_written_as_their_names(tmp_path: Path) -> None:
    value = {"a": float("nan"), "b": [float("inf"), 1.5], "c": (float("-inf"), {"d": 2})}
    core_io.write_json(tmp_path / "a.json", value)
    assert core_io.read_json(tmp_path / "a.json") == {"a": "nan", "b": ["inf", 1.5], "c": ["-inf", {"d": 2}]}


@pytest.mark.parametrize("text", ["1" * 20, "-" + "9" * 20, '"' + "1" * 5000 + '"', "0." + "1" * 400, "[1, 2]"])
def test_numbers_of_64_bits_and_long_texts_are_read(text: str) -> None:
    assert core_io.parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("levels", [99, 100, 101, 900, 10**6])
def test_a_hundred_levels_are_read_and_no_more(levels: int) -> None:
    data = b"[" * levels + b"]" * levels
    if levels <= core_io.MAX_JSON_DEPTH:
        assert core_io.parse_json(data) == json.loads(data)
    else:
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            core_io.parse_json(data)
