"""The data tools: what goes in comes out in kept/ or dropped/, whatever it was, and nothing of anybody's is lost."""

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from bloomery import cli, recipe
from bloomery.core.pipeline import Stage, plan_stages
from bloomery.data import documents as data_documents
from bloomery.stages import data_tools
from bloomery.tokenizer.tokenizer import Tokenizer
from tests.test_end_to_end import prose

TEXTS = [prose(random.Random(number)) for number in range(30)]


def rows(path: Path, more: Sequence[str] = ()) -> Path:
    """A jsonl file: a line for each text, one without any text, and lines as they are given."""
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(TEXTS)]
    path.write_text("\n".join([*lines, json.dumps({"id": "none", "text": ""}), *more]) + "\n", encoding="utf-8")
    return path


def tool(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["data", *words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out) if code == 0 else {"error": said.err}


def interrupted_before_the_end(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    """Run a tool that is interrupted when its stages are done, before anything is brought to its place."""

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(data_tools, "_delivered", killed)
        cli.main(["data", *words])


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in data_documents.read(folder, ["id"])] if folder.is_dir() else []


def check(result: dict[str, Any], out: Path, documents: int) -> None:
    """What holds of every tool that keeps and drops."""
    assert result["documents"] == documents == result["kept"] + result["dropped"]
    assert sum(result["reasons"].values()) == result["dropped"]
    found = ids(out / "kept") + ids(out / "dropped")
    assert len(found) == len(set(found)) == documents
    assert all(row["reason"] for row in data_documents.read(out / "dropped", ["reason"]))
    whole = json.loads((out / "result.json").read_text())
    names = [path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if path.is_file()]
    assert sorted(whole.pop("outputs")) == [name for name in names if name not in (".lock", "result.json")]
    assert whole == result
    assert not (out / "work").exists()


def test_filter_drops_by_its_rules_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = rows(tmp_path / "in.jsonl", ['{"id": "short", "text": "too short"}', "{no json", '{"id": "x"}'])
    out = tmp_path / "out"
    words = ["filter", str(broken), "--out", str(out), 'rules=[{kind="length", min_characters=20}]']
    result = tool(capsys, *words)
    check(result, out, len(TEXTS) + 4)
    assert result["reasons"] == {"empty": 1, "length.too_short": 1, "not_json": 1, "no_text": 1}
    assert set(ids(out / "kept")) == {f"d{number}" for number in range(len(TEXTS))}
    assert (
        tool(capsys, "filter", str(broken), "--out", str(out), 'rules=[{kind="length", min_characters=20}]') == result
    )


@pytest.mark.parametrize("folder", ["kept", "dropped"])
def test_a_result_that_was_damaged_and_kept_its_size_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    out = tmp_path / "out"
    words = ["filter", str(rows(tmp_path / "in.jsonl")), "--out", str(out)]
    tool(capsys, *words)
    (damaged,) = (out / folder).glob("*.parquet")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    said = tool(capsys, *words, code=2)["error"]
    assert f"was changed: {folder}/{damaged.name} has another sha256" in said
    assert "Name a new folder with --out, or remove this one." in said
    assert damaged.read_bytes() == data


def test_a_finished_stage_that_was_damaged_before_its_files_were_handed_over_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["filter", str(rows(tmp_path / "in.jsonl")), "--out", str(out)]
    interrupted_before_the_end(monkeypatch, words)
    (damaged,) = out.rglob("kept/*.parquet")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    said = tool(capsys, *words, code=2)["error"]
    assert f"is damaged: kept/{damaged.name} has another sha256\nRemove {damaged.parents[1]}/manifest.json, and" in said
    (damaged.parents[1] / "manifest.json").unlink()
    assert tool(capsys, *words)["kept"] == len(TEXTS)


def test_dedup_keeps_one_of_all_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = [json.dumps({"id": f"copy{number}", "text": TEXTS[number]}) for number in range(5)]
    result = tool(capsys, "dedup", str(rows(tmp_path / "in.jsonl", copies)), "--out", str(tmp_path / "out"))
    check(result, tmp_path / "out", len(TEXTS) + 6)
    dropped = dataset.dataset(tmp_path / "out" / "dropped").to_table().to_pylist()
    twins = {row["id"]: row["kept_id"] for row in dropped}
    assert twins == {"none": None, **{f"d{number}": f"copy{number}" for number in range(5)}}
    assert pq.read_metadata(tmp_path / "out" / "clusters.parquet").num_rows == 10
    assert set(ids(tmp_path / "out" / "kept")) == {*(f"copy{number}" for number in range(5))} | {
        f"d{number}" for number in range(5, len(TEXTS))
    }


def test_the_kept_documents_of_one_tool_are_the_input_of_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"body": [*TEXTS, TEXTS[0]], "domain": ["wiki"] * 31}), tmp_path / "in.parquet")
    words = ["--text-field", "body", "--workers", "2"]
    first = tool(capsys, "filter", str(tmp_path / "in.parquet"), "--out", str(tmp_path / "clean"), *words)
    second = tool(capsys, "dedup", str(tmp_path / "clean" / "kept"), "--out", str(tmp_path / "unique"))
    assert (first["kept"], second["kept"]) == (31, 30)
    assert {row["domain"] for row in data_documents.read(tmp_path / "unique" / "kept", ["domain"])} == {"wiki"}
    assert set(ids(tmp_path / "unique" / "kept")) < set(ids(tmp_path / "clean" / "kept"))


def test_files_that_hold_nothing_stop_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    pq.write_table(pa.table({"body": ["a text"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": ["a text", "two"], "id": [1.5, 2.5]}), tmp_path / "numbers.parquet")
    names = [str(rows(tmp_path / "in.jsonl"))] + [
        str(tmp_path / n) for n in ("empty.txt", "other.parquet", "numbers.parquet")
    ]
    result = tool(capsys, "dedup", *names, "--out", str(tmp_path / "out"))
    check(result, tmp_path / "out", len(TEXTS) + 1 + 1 + 1 + 2)
    assert result["reasons"] == {"empty": 2, "no_column": 1}
    found = tool(capsys, "dedup", names[2], "--out", str(tmp_path / "no"), code=2)["error"]
    assert re.search(r"gave no documents \(1 rejected: 1 no_column\); the first: .*other\.parquet.*'text'.*body", found)


def test_rules_that_nothing_passes_leave_everything_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict = 'rules=[{kind="length", min_characters=1000000}]'
    words = ["filter", str(rows(tmp_path / "in.jsonl")), "--out", str(tmp_path / "out"), strict]
    result = tool(capsys, *words)
    check(result, tmp_path / "out", len(TEXTS) + 1)
    assert result["kept"] == 0
    assert len(ids(tmp_path / "out" / "kept")) == 0


def test_decontaminate_drops_what_holds_a_question_and_lists_the_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "Which of the seven bridges of the old town did the baker's daughter cross twice on Sunday?"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "riddles.jsonl").write_text(json.dumps({"question": question, "answer": "None."}) + "\n")
    planted = TEXTS[3] + "\n" + question.upper().replace(" OF ", "\nof ").replace("?", " !") + "\n" + TEXTS[4]
    source = rows(tmp_path / "in.jsonl", [json.dumps({"id": "planted", "text": planted})])
    out = tmp_path / "out"
    result = tool(capsys, "decontaminate", str(source), "--out", str(out), "--against", str(tmp_path / "tasks"))
    check(result, out, len(TEXTS) + 2)
    assert result["reasons"] == {"decontaminate.riddles": 1, "empty": 1}
    assert "planted" in ids(out / "dropped")
    assert {(hit["task"], hit["id"]) for hit in pq.read_table(out / "hits.parquet").to_pylist()} == {
        ("riddles", "planted")
    }
    words = ["decontaminate", str(source), "--out", str(tmp_path / "other")]
    assert "--against tasks/" in tool(capsys, *words, code=2)["error"]


@pytest.mark.slow
def test_tokenize_leaves_shards_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["tokenize", str(rows(tmp_path / "in.jsonl")), "--out", str(out), "tokenizer.vocab_size=500"]
    result = tool(capsys, *words)
    assert (result["documents"], result["kept"], result["dropped"]) == (len(TEXTS) + 1, len(TEXTS), 1)
    assert result["stats"]["tokens"] == sum(
        path.stat().st_size // 2 - 512 for path in (out / "shards").glob("train*.bin")
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "current.json").write_text('{"tokenizer": "05-tokenizer-00000000"}')
    again = ["tokenize", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "again"), "--tokenizer", str(run)]
    assert "has no finished tokenizer" in tool(capsys, *again, code=2)["error"]
    shutil.copytree(out / "tokenizer", run / "05-tokenizer-00000000")
    assert tool(capsys, *again)["stats"]["tokens"] == result["stats"]["tokens"], "the tokenizer of a run"
    assert Tokenizer.load(tmp_path / "again" / "tokenizer").hash == Tokenizer.load(out / "tokenizer").hash


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    words = ["filter", str(rows(tmp_path / "in.jsonl")), "--out", str(tmp_path / "out")]
    assert "holds something else: mine.txt" in tool(capsys, *words, code=2)["error"]
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock"] == ["mine.txt"]
    words[3] = str(tmp_path / "other")
    tool(capsys, *words)
    assert "holds something else" in tool(capsys, *words, 'rules=[{kind="length"}]', code=2)["error"]


def test_folders_of_others_are_kept_though_they_are_called_as_those_of_a_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, far = rows(tmp_path / "in.jsonl"), tmp_path / "out", tmp_path / "far"
    for name in ("work", "kept", "dropped", "shards", "tokenizer", "repeated"):
        (out / name).mkdir(parents=True)
        (out / name / "thesis.txt").write_text("mine")
    words = ["dedup", str(data), "--out", str(out)]
    assert "holds something else: dropped, kept" in tool(capsys, *words, code=2)["error"]
    assert len(list(out.rglob("thesis.txt"))) == 6
    far.mkdir()
    (far / "a").write_text("mine")
    for name in ("work", "kept"):
        (tmp_path / f"linked-{name}").mkdir()
        (tmp_path / f"linked-{name}" / name).symlink_to(far)
        words[-1] = str(tmp_path / f"linked-{name}")
        assert f"holds something else: {name}" in tool(capsys, *words, code=2)["error"]
        assert [path.name for path in far.iterdir()] == ["a"]


def test_what_a_tool_left_when_it_was_killed_is_taken_up_and_a_link_in_it_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, far = tmp_path / "out", tmp_path / "far"
    words = ["filter", str(rows(tmp_path / "in.jsonl")), "--out", str(out)]
    interrupted_before_the_end(monkeypatch, words)
    far.mkdir()
    (far / "a").write_text("mine")
    (out / "kept").symlink_to(far)
    check(tool(capsys, *words), out, len(TEXTS) + 1)
    assert [path.name for path in far.iterdir()] == ["a"]


def test_an_input_that_lies_in_the_folder_of_the_result_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("work", "kept"):
        (tmp_path / name / name).mkdir(parents=True)
        data = rows(tmp_path / name / name / "in.jsonl")
        error = tool(capsys, "filter", str(data), "--out", str(tmp_path / name), code=2)["error"]
        assert f"{data}: lies in {tmp_path / name}" in error
        assert data.is_file()


def test_a_link_to_itself_is_an_input_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    error = tool(capsys, "filter", str(loop), "--out", str(tmp_path / "out"), code=2)["error"]
    assert str(loop) in error
    assert "bug in Bloomery" not in error


def test_what_is_not_there_or_no_setting_is_an_error_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert "no such file" in tool(capsys, "filter", str(tmp_path / "none"), "--out", out, code=2)["error"]
    bad = str(tmp_path / "bad\udcff.jsonl")
    assert r"bad\udcff.jsonl': is not valid UTF-8" in tool(capsys, "filter", bad, "--out", out, code=2)["error"]
    (tmp_path / "in").mkdir()
    rows(tmp_path / "in" / "a.jsonl")
    for inside in (tmp_path / "in" / "clean", tmp_path / "in"):
        found = tool(capsys, "filter", str(tmp_path / "in"), "--out", str(inside), code=2)["error"]
        assert f"lies in {tmp_path / 'in'}, so the tool would read its own output" in found
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a.jsonl"]
    found = tool(capsys, "dedup", str(rows(tmp_path / "in.jsonl")), "--out", out, "num_per=0.5", code=2)["error"]
    assert "Did you mean 'num_perm'?" in found


def test_the_tools_stages_are_those_of_a_recipe_in_all_that_decides_about_leftovers() -> None:
    """A folder that a recipe would discard is not gone on from by a tool either."""
    known = {one.name: one for one in recipe.STAGES}
    for tool in data_tools.TOOLS.values():
        for one in tool.stages:
            if one.name != "decontaminate":
                assert one.code is known[one.name].code
    one, other = data_tools.DECONTAMINATE, known["dedup"]  # in a recipe the same work is a step of dedup
    for field in ("version", "resumes", "owns_leftovers", "output_prefix"):
        assert getattr(one, field) == getattr(other, field), field
    assert one.code.preflight is other.code.preflight
    assert hasattr(one.code, "external_inputs")


def test_a_tool_does_not_resume_from_what_an_earlier_version_left(tmp_path: Path, monkeypatch: Any) -> None:
    """As a recipe does not: the version is a part of the folder's name."""
    texts = tmp_path / "a.jsonl"
    texts.write_text('{"text": "one"}\n')
    asked = data_tools.DataCommand(tool="dedup", inputs=[str(texts)], out=tmp_path / "out", sections={})
    tool = data_tools.TOOLS["dedup"]
    folders = []
    dedup = recipe_stage("dedup")
    for version in (1, dedup.version):
        monkeypatch.setattr(dedup.code, "VERSION", version)
        plans = plan_stages(tool.stages, data_tools._sections(asked, tool), tmp_path)
        folders.append(plans[-1].folder)
    assert folders[0] != folders[1]
    assert folders[1] == plan_stages(tool.stages, data_tools._sections(asked, tool), tmp_path)[-1].folder


def recipe_stage(name: str) -> Stage:
    return next(one for one in recipe.STAGES if one.name == name)
