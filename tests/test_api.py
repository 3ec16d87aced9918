"""The Python API: what the verbs do, as functions."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import bloomery
from bloomery.core import pipeline
from bloomery.core.chat import SamplingConfig
from bloomery.core.config import to_toml
from bloomery.core.errors import BloomeryError, ConfigError, DataError, RunError
from bloomery.core.log import console
from bloomery.core.signals import INTERRUPTED, Terminated
from bloomery.data import documents as data_documents
from tests.calling import Call
from tests.two_stages import STAGES, Recipe
from tests.weights.made import model, run

import torch

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "pyarrow", "pydantic", "rich", "tokenizers", "duckdb", "scipy", "sklearn")
WATER = "Water boils at a lower temperature on a high mountain than it does at the sea."
LAMP = "Today Mia put the lamp upstairs, and then Tom took it downstairs to read a book."
TEXTS = [WATER, LAMP, WATER, "", "half a pair \ud800", "a NUL \0 in it", f"{LAMP} It is évening, 東京.", LAMP]
GREEDY: bloomery.api.SamplingOptions = {"max_tokens": 30, "temperature": 0}


# --- import --------------------------------------------------------------------------------------------------------


def test_import_bloomery_imports_the_standard_library_alone() -> None:
    code = "import json, sys, bloomery; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*HEAVY} & {*json.loads(done.stdout)}


def test_everything_that_the_api_exports_has_a_line_in_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert [name for name in bloomery.__all__ if name not in page and name != "UnreachableError"] == []
    assert issubclass(bloomery.UnreachableError, bloomery.DataError)


# --- examples ------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "do" / "use-the-api-from-python.md"
EXAMPLES = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("<!-- examples -->")[2], re.DOTALL
)


def test_the_examples_of_the_page_run_and_are_about_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "runs" / "demo", "pretrain", "finetune")
    monkeypatch.chdir(tmp_path)
    names: list[dict[str, Any]] = [{}, {}]
    for example, scope in zip(EXAMPLES, names, strict=True):
        assert 8 <= len(example.splitlines()) <= 12
        exec(compile(example, str(PAGE), "exec"), scope)
    out = capsys.readouterr().out
    assert names[0]["answer"] == bloomery.load("runs/demo").chat("What is 17 plus 25?", **GREEDY)
    assert names[0]["answer"] == bloomery.Run(Path("runs/demo")).model().chat(names[0]["question"]["content"], **GREEDY)
    assert out.endswith("'The lamp is upstairs.']\n2 is a copy of 0 (exact)\n")


# --- models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("api") / "model", context=300)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> bloomery.Model:
    return bloomery.load(str(folder), device="cpu")


@pytest.mark.parametrize(("temperature", "seed"), [(0, 0), (0.7, 1), (2, 1), (2, 2)])
def test_chat_answers_what_the_verb_answers(
    call: Call, folder: Path, loaded: bloomery.Model, temperature: float, seed: int
) -> None:
    said = loaded.chat("Hi", max_tokens=12, temperature=temperature, seed=seed)
    words = ["--temperature", str(temperature), "--seed", str(seed), "--max-tokens", "12"]
    assert call("chat", folder, "--prompt", "Hi", *words)[1] == f"> Hi\n{said}\n"
    messages = [{"role": "user", "content": "Hi"}]
    pieces = loaded.chat(messages, stream=True, max_tokens=12, temperature=temperature, seed=seed)
    assert "".join(pieces) == said


def test_a_continuation_is_what_the_logits_say(loaded: bloomery.Model) -> None:
    ids = [loaded.tokenizer.document_id, *loaded.tokenizer.encode("Once upon")]
    logits = loaded.logits("Once upon")
    assert (logits.shape, logits.dtype) == ((len(ids), loaded.tokenizer.vocab_size), torch.float32)
    assert torch.equal(logits, loaded.logits(ids))
    greedy = list(ids)
    for _ in range(5):
        greedy.append(int(loaded.logits(greedy)[-1].argmax()))
    said = loaded.generate("Once upon", max_tokens=5, temperature=0)
    assert said.startswith(loaded.tokenizer.decode(greedy[len(ids) :]).split("\ufffd")[0])
    assert "".join(loaded.stream("Once upon", max_tokens=5, temperature=0)) == said


def test_the_options_of_a_model_are_those_of_the_server_with_their_defaults(loaded: bloomery.Model) -> None:
    assert loaded._checked([{"role": "user", "content": "a"}], {}).sampling == SamplingConfig()
    whole = loaded.generate("a", seed=3, max_tokens=8, temperature=1, top_k=50, top_p=0.9)
    stop = whole[2:4]
    for stops in (stop, [stop], (stop, "…")):
        said = loaded.generate("a", seed=3, max_tokens=8, temperature=1, top_k=50, top_p=0.9, stop=stops)
        assert said == whole[: whole.find(stop)]
    assert whole != loaded.generate("a", seed=4, max_tokens=8, temperature=1, top_k=50, top_p=0.9)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": "1"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"beam": 2}, "beam"),
    ],
)
def test_a_wrong_option_is_an_error_before_anything_is_generated(
    loaded: bloomery.Model, options: dict[str, Any], where: str
) -> None:
    for ask in (loaded.generate, loaded.stream, loaded.chat):
        with pytest.raises(DataError) as caught:
            ask("Hi", **options)
        assert caught.value.where == where


def test_biases_have_token_ids_as_numbers_or_as_text(loaded: bloomery.Model) -> None:
    (lamp,) = loaded.tokenizer.encode("a")
    for biases in ({lamp: 100.0}, {str(lamp): 100.0}):
        assert loaded.generate("x", max_tokens=3, temperature=0, logit_bias=biases) == "aaa"


def test_what_a_model_cannot_take_is_an_error_with_its_fix(loaded: bloomery.Model) -> None:
    with pytest.raises(DataError, match=r"prompt: the prompt takes \d+ tokens, but .* has a context of 300\nShorten"):
        loaded.generate("word " * 400)
    with pytest.raises(DataError, match="context"):
        loaded.chat("word " * 400)
    with pytest.raises(DataError, match=r"messages\.0\.content: is required"):
        loaded.chat([{"role": "user"}])
    with pytest.raises(DataError, match=r"logits: there is no token ID 99999\nUse token IDs from 0 to"):
        loaded.logits([0, 99999])
    for ids in ([], [0] * 301):
        with pytest.raises(DataError, match=r"token IDs, but the model's context is 300\nPass 1 to 300 token IDs"):
            loaded.logits(ids)
    with pytest.raises(bloomery.CheckpointError, match=r"runs/none: does not exist\nUse a run folder"):
        bloomery.load("runs/none")


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("bloomery.recipe.STAGES", STAGES)
    monkeypatch.setattr("bloomery.recipe.Recipe", Recipe)
    monkeypatch.chdir(tmp_path)
    return {"name": "small", "make": {"number": 2}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 2), ("response_format", {"type": "json_object"}), ("guided_regex", "a"), ("tools", []), ("logprobs", True)],
)
def test_an_option_that_would_be_ignored_is_an_error(loaded: bloomery.Model, name: str, value: Any) -> None:
    options: Any = {name: value}
    for ask in (loaded.chat, loaded.generate):
        with pytest.raises(DataError, match=f"^{name}: is not an option of the Python API"):
            ask("Hi", **options)


def test_arguments_of_a_wrong_type_are_errors_that_show_them(loaded: bloomery.Model) -> None:
    wrong: Any
    for wrong in ([1.5], ["1"], [True], b"ab", 3, None, [[1]]):
        with pytest.raises(DataError, match=r"^logits: must be a text or a list of token IDs, got "):
            loaded.logits(wrong)
    with pytest.raises(DataError, match=r"^logits: the text holds half a surrogate pair at character 1"):
        loaded.logits("a\ud800")
    for wrong in (None, 5, {"role": "user", "content": "Hi"}):
        with pytest.raises(DataError, match=r"^messages: must be a question or a list of messages, got "):
            loaded.chat(wrong)
    for wrong in (None, 5, ["a"]):
        with pytest.raises(DataError, match=r"^prompt: must be a text, got "):
            loaded.generate(wrong)
    wrong = "int3"
    with pytest.raises(ConfigError, match=r"^dtype: 'int3' is not a number format"):
        bloomery.load("~nobody-here/model", dtype=wrong)
    with pytest.raises(BloomeryError, match="~nobody-here/model: does not exist"):
        bloomery.load("~nobody-here/model")
    assert loaded.logits(torch.tensor([1, 2])).shape == loaded.logits([1, 2]).shape  # type: ignore[arg-type]


def test_run_and_status_are_the_verbs(call: Call, small: dict[str, Any], tmp_path: Path) -> None:
    settings = {"make.number": 3, "double": {"number": 4}, "double.number": 5}
    made = bloomery.run(small, settings)
    assert (small, settings["double"]) == ({"name": "small", "make": {"number": 2}}, {"number": 4})
    assert made.folder == Path("runs/small")
    assert {name: (path / "out.txt").read_text() for name, path in made.stages.items()} == {
        "make": "xxx",
        "double": "xxxxx",
    }
    assert bloomery.status(made.folder) == json.loads(call("status", "runs/small", "--json")[1])
    (tmp_path / "small.toml").write_text('name = "small"\n')
    assert "everything is up to date" in call("run", "small.toml", "make.number=3", "double.number=5")[2]
    assert bloomery.run("small.toml", {"make.number": 3}, runs="others", until="make").folder == Path("others/small")
    assert [one["state"] for one in bloomery.status("others/small")["stages"]] == ["done", "waiting"]


@pytest.mark.parametrize(
    ("recipe", "settings", "more", "message"),
    [
        ("none.toml", None, {}, "no such recipe"),
        (3, None, {}, r"recipe: 3 is not a recipe\nPass the path"),
        ({"nam": "a"}, None, {}, r"recipe: name: is required\nnam: unknown key\nDid you mean 'name'"),
        ({"name": "a"}, {"make.numbr": 1}, {}, "make.numbr: unknown key\nDid you mean 'number'"),
        ({"name": "a"}, {"make.number": "1"}, {}, "make.number: .*integer"),
        ({"name": "a"}, ["make.number=1"], {}, r"settings: \['make.number=1'\] is not a dict with strings as keys"),
        ({"name": "a"}, {3: 1}, {}, r"settings: \{3: 1\} is not a dict with strings as keys\nWrite"),
        ({"name": "a"}, {"": 1}, {}, "unknown key"),
        ({"name": "a"}, None, {"until": "make", "only": "make"}, "exclude each other"),
        ({"name": "a"}, None, {"until": "mke"}, "there is no stage 'mke'"),
        ({"name": "a"}, {"make.number": 13}, {}, "13 is no number"),
    ],
)
def test_what_stops_a_run_is_a_bloomery_error(
    small: dict[str, Any], recipe: Any, settings: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BloomeryError, match=message):
        bloomery.run(recipe, settings, **more)


def test_an_interrupted_run_raises_keyboard_interrupt_and_sigterm_ends_the_process(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, raised in ((INTERRUPTED, KeyboardInterrupt), (143, Terminated)):

        def ended(*given: object, code: int = code, **more: object) -> None:
            raise Terminated(code)

        monkeypatch.setattr(pipeline, "run", ended)
        with pytest.raises(raised):
            bloomery.run(small)


def test_plan_is_the_verb(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(WATER)
    source = {"kind": "files", "name": "notes", "domain": "prose", "path": "notes.txt"}
    shape = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "intermediate_size": 64,
        "context_length": 32,
    }
    recipe = {"name": "a", "fetch": {"sources": [source]}, "pretrain": {"global_batch_tokens": 1024, "model": shape}}
    Path("a.toml").write_text(to_toml(recipe))
    made = bloomery.plan(recipe, {"name": "b", "pretrain.steps": 10}, device="mi300x", price=2.5)
    words = ["name=b", "pretrain.steps=10", "--device", "mi300x", "--price", "2.5", "--json"]
    assert made == json.loads(call("plan", "a.toml", *words)[1])
    assert (made["recipe"], made["fits"]) == ("b", True)
    with pytest.raises(ConfigError, match=r"pretrain\.steps"):
        bloomery.plan(recipe, {"pretrain.steps": 0})
    for wrong in ({"memory_bytes": -5}, {"devices": 0}, {"price": -1}, {"power_watts": float("nan")}):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: got .*\nPass a (whole )?number from "):
            bloomery.plan(recipe, **wrong)
    for strange in ({"memory_bytes": "80"}, {"devices": 1.5}, {"price": True}, {"device": 5}):
        with pytest.raises(ConfigError, match=f"^{next(iter(strange))}: got .*\nPass "):
            bloomery.plan(recipe, **strange)
    numbers: dict[str, Any] = {"devices": np.int32(1)}
    counted = bloomery.plan(recipe, {"pretrain.steps": np.int64(10)}, device="mi300x", **numbers)
    assert counted["stages"] == bloomery.plan(recipe, {"pretrain.steps": 10}, device="mi300x", devices=1)["stages"]
    with pytest.raises(RunError, match="does not exist"):
        bloomery.status("runs/a")


# --- data tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "filter",
            {"rules": [{"kind": "length", "min_characters": 81}]},
            ['rules=[{kind="length", min_characters=81}]'],
        ),
        ("filter", {}, []),
        ("dedup", {"settings": {"threshold": 0.6}}, ["threshold=0.6"]),
        ("decontaminate", {"texts": [WATER[:60]]}, ["--against", "texts.jsonl"]),
        ("decontaminate", {"files": ["texts.jsonl"]}, ["--against", "texts.jsonl"]),
    ],
)
def test_a_data_tool_does_what_the_verb_does(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(TEXTS)]
    Path("in.jsonl").write_text("\n".join(lines) + "\n")
    Path("texts.jsonl").write_text(json.dumps({"text": WATER[:60]}) + "\n")
    code, out, err = call("data", name, "in.jsonl", "--out", "out", "--id-field", "id", "--json", *words)
    assert code == 0, err
    result = getattr(bloomery, name)(TEXTS, **arguments)
    assert not console.quiet
    kept = {row["id"]: row["text"] for row in data_documents.read(Path("out/kept"))}
    dropped = {row["id"]: row for row in data_documents.read(Path("out/dropped"))}
    assert result.kept == [kept[f"d{index}"] for index in result.kept_indices]
    assert {f"d{index}" for index in result.kept_indices} == {*kept}
    assert result.reasons == json.loads(out)["reasons"]
    assert [one.index for one in result.dropped] == sorted(int(id[1:]) for id in dropped)
    for one in result.dropped:
        row = dropped[f"d{one.index}"]
        assert (one.reason, one.value) == (row["reason"], row["value"])
        assert row.get("kept_id") == (None if one.duplicate_of is None else f"d{one.duplicate_of}")
    assert len(result.kept) + len(result.dropped) == len(TEXTS)
    assert result.dropped


def test_kept_documents_have_the_type_that_came_in_and_the_texts_that_rules_left(
    capfd: pytest.CaptureFixture[str],
) -> None:
    mail, rules = "Write to mia.smith@mail.com about the lamp.", [{"kind": "pii"}]
    rows = [{"body": LAMP, "n": 1, "domain": "web"}, {"body": "", "n": 2}, {"body": mail, "n": 3}]
    dicts = bloomery.filter(rows, rules, text_field="body")
    assert dicts.kept[0] is rows[0]
    assert (rows[2]["body"], dicts.kept[1]["n"]) == (mail, 3)
    assert dicts.kept[1]["body"] == "Write to <EMAIL> about the lamp."
    table = pa.table({"n": [1, 2, 3], "body": pa.array([row["body"] for row in rows], pa.large_string())})
    arrow = bloomery.filter(table, rules, text_field="body")
    assert arrow.kept.schema == table.schema
    assert arrow.kept.to_pylist() == [{"n": row["n"], "body": row["body"]} for row in dicts.kept]
    assert (dicts.kept_indices, arrow.kept_indices, dicts.dropped) == ([0, 2], [0, 2], arrow.dropped)
    pair: tuple[str, ...] = (LAMP, "")
    assert bloomery.filter(pair, rules).kept == (LAMP,)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("pick", [lambda table: table, lambda table: table.to_batches()[0]])
def test_columns_of_views_are_selected_like_all_others(pick: Callable[[pa.Table], Any]) -> None:
    columns = {"text": ["a", LAMP, "b", LAMP * 2], "n": [1, 2, 3, 4]}
    documents = pick(pa.table(columns, schema=pa.schema({"text": pa.string_view(), "n": pa.int64()})))
    kept = bloomery.filter(documents, [{"kind": "length", "min_characters": 10}]).kept
    assert kept.schema == documents.schema
    assert kept.to_pylist() == [{"text": LAMP, "n": 2}, {"text": LAMP * 2, "n": 4}]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (None, "documents: None is a NoneType\nPass a list of texts"),
        (LAMP, "documents: '.*' is a str\nPass a list of texts"),
        ([], "documents: is empty\nPass at least one text"),
        (["", " "], "documents: every text is empty\nPass at least one text"),
        ([LAMP, 3], r"documents\[1\]: 3 is a int\nPass each document as a string"),
        ([{"text": LAMP}, {"body": LAMP}], r"documents\[1\]: has no field 'text'\n.*text_field"),
        ([{"text": None}], r"documents\[0\]: its 'text' is None, not a text\n.*text_field"),
        (pa.table({"body": [LAMP]}), "documents: has no column 'text'\nSet text_field to one of its columns: body"),
        (
            pa.Table.from_arrays([pa.array([LAMP])] * 2, names=["text"] * 2),
            "documents: has 2 columns named 'text'\nRen",
        ),
        (pa.table({"text": [LAMP, None]}), r"documents\[1\]: its 'text' is None"),
        (pa.table({"text": [1]}), r"documents\[0\]: its 'text' is 1, not a text"),
    ],
)
def test_what_is_no_list_of_documents_is_an_error_with_its_place_and_its_fix(documents: Any, message: str) -> None:
    for tool in (bloomery.filter, bloomery.dedup):
        with pytest.raises(DataError, match=message):
            tool(documents)
    with pytest.raises(DataError, match=message):
        bloomery.decontaminate(documents, [WATER])


def test_texts_are_looked_for_whatever_fields_are_named_of_files() -> None:
    dropped = bloomery.decontaminate([f"A page. {WATER}", LAMP], [WATER], {"fields": ["question"]}).dropped
    assert [one.index for one in dropped] == [0]


def test_decontaminate_needs_something_to_look_for_and_says_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="there is no text to look for\nPass texts, files or tasks"):
        bloomery.decontaminate([LAMP])
    with pytest.raises(ConfigError, match=r"tasks: 'hellaswag' is a str\nPass a list: tasks=\['hellaswag'\]"):
        bloomery.decontaminate([LAMP], tasks="hellaswag")
    with pytest.raises(DataError, match=r"texts: '.*' is a str"):
        bloomery.decontaminate([LAMP], WATER)
    with pytest.raises(ConfigError, match=r"dedup\.num_per: unknown key\nDid you mean 'num_perm'"):
        bloomery.dedup([LAMP], {"num_per": 0.5})
