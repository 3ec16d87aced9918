"""Conversations from files of every format, from data sets of a hub of our own, and from trees."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bloomery.core.config import build, packaged
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.chat import readers
from bloomery.data.chat.formats import Conversation, RejectedRow
from bloomery.data.chat.readers import ChatFiles, ChatItem, Conversations
from bloomery.data.sources import download
from tests.data.hub_server import Hub

PAIRS = [{"question": f"What is {n}?", "answer": f"It is\n{n} \u2028."} for n in range(40)]


def section(*sources: dict[str, Any]) -> Conversations:
    return build(Conversations, {"sources": list(sources)})


def read(*sources: dict[str, Any]) -> list[ChatItem]:
    return list(readers.conversations(section(*sources).read))


def files(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "files", "name": "mine", "path": str(path), **more}


def said(found: Sequence[ChatItem]) -> list[list[str]]:
    return [[message["content"] for message in one.messages] for one in found if isinstance(one, Conversation)]


def rejected(found: Sequence[ChatItem]) -> list[tuple[str, str]]:
    return [(one.location.rpartition("/")[2], one.problem.reason) for one in found if isinstance(one, RejectedRow)]


def lines(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(path: Path, rows: list[dict[str, Any]]) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path.read_bytes()


@pytest.mark.parametrize(("field", "told"), [("persona", False), ("personas", True)])
def test_an_optional_field_that_no_row_has_is_told(
    field: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([PAIRS[0], PAIRS[1] | {"persona": "a smith"}]))
    found = read(files(tmp_path / "a.jsonl", system_field=field))
    assert len(said(found)) == 2
    assert ("no row that was read has a field 'personas', which system_field" in capsys.readouterr().err) == told


def test_the_same_conversations_come_from_every_format(tmp_path: Path) -> None:
    expected = [[row["question"], row["answer"]] for row in PAIRS]
    listed, rows = json.dumps(PAIRS, indent=2).encode(), lines(PAIRS)
    made = {
        "a.jsonl": rows,
        "b.jsonl.gz": gzip.compress(rows),
        "c.jsonl.zst": zstandard.compress(rows),
        "d.json": listed,
        "e.json.gz": gzip.compress(json.dumps(PAIRS).encode()),
        "f.json.zst": zstandard.compress(b"\xef\xbb\xbf" + listed),
        "g.json": rows,  # lines, under the wrong name
        "h.parquet": parquet(tmp_path / "made", PAIRS),
    }
    (tmp_path / "in").mkdir()
    for name, content in made.items():
        (tmp_path / "in" / name).write_bytes(content)
        assert said(read(files(tmp_path / "in" / name))) == expected, name
    (tmp_path / "in" / "README.md").write_text("No conversation.")
    found = read(files(tmp_path / "in"))
    assert said(found) == expected * len(made)
    assert rejected(found) == [("README.md", "other_ending")]
    assert found[1].location == f"{tmp_path}/in/a.jsonl:1"
    assert isinstance(found[1], Conversation)
    assert found[1].id == "mine/a.jsonl:1"


def test_dialogues_are_read_from_text_files_whole_or_between_separators(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("User: a\nAssistant: b\n---\nUser: c\nAssistant: d\n---\nnobody\n")
    found = read(files(tmp_path / "a.txt", separator="---\n"))
    assert said(found) == [["a", "b"], ["c", "d"]]
    assert rejected(found) == [("a.txt:3", "no_speaker")]
    assert said(read(files(tmp_path / "a.txt"))) == [["a", "b\n---", "c", "d\n---\nnobody"]]


def test_every_row_comes_out_and_what_is_none_has_its_line_and_reason(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    asked = {"messages": good["messages"][:1]}
    rows = [json.dumps(row) for row in ({"x": 1}, good, {"question": "a", "answer": "b"}, asked, good)]
    rows[2:2] = ["{", "", "[1]"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + '\n{"messages": [')
    found = read(files(tmp_path))
    assert said(found) == [["a", "b"], ["a", "b"]]
    assert rejected(found) == [
        ("a.jsonl:1", "unknown_shape"),
        ("a.jsonl:3", "not_json"),
        ("a.jsonl:5", "not_json"),
        ("a.jsonl:6", "no_messages"),
        ("a.jsonl:7", "nothing_to_learn"),
        ("a.jsonl:9", "torn"),
    ]
    kept = [one.row for one in found if isinstance(one, RejectedRow)]
    assert kept == [{"x": 1}, None, None, {"question": "a", "answer": "b"}, asked, None]


def test_a_shape_that_is_said_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "User: a\nAssistant: b", "prompt": "p", "completion": "c"}]))
    assert said(read(files(tmp_path))) == [["p", "c"]]
    assert said(read(files(tmp_path, shape="dialogue"))) == [["a", "b"]]
    assert rejected(read(files(tmp_path, shape="sharegpt"))) == [("a.jsonl:1", "no_messages")]


def test_a_list_is_read_an_element_at_a_time_up_to_where_it_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    long = {"question": "long", "answer": "é" * 300_000}
    path.write_text(json.dumps([PAIRS[0], 3, long, PAIRS[1]], indent=1, ensure_ascii=False), encoding="utf-8")
    found = read(files(path))
    assert said(found) == [
        ["What is 0?", PAIRS[0]["answer"]],
        ["long", long["answer"]],
        ["What is 1?", PAIRS[1]["answer"]],
    ]
    assert rejected(found) == [("a.json:6", "not_json")]
    assert rejected(read(files(path, max_row_bytes=1000))) == [("a.json:6", "not_json"), ("a.json:7", "too_long")]
    path.write_bytes(path.read_bytes()[:-40])
    assert rejected(read(files(path)))[-1] == ("a.json:11", "torn")
    path.write_bytes('[{"question": "é"}]'.encode("utf-16"))
    [marked] = read(files(path))
    assert isinstance(marked, RejectedRow)
    assert "the byte order mark of UTF-16, which is not UTF-8" in marked.problem.what


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "b.json", "c.json", "d.json.gz", "e.parquet"])
def test_a_row_that_is_longer_than_its_source_allows_costs_itself_alone_and_names_the_setting(
    tmp_path: Path, name: str
) -> None:
    given = [PAIRS[0], {"question": "long", "answer": "é" * 600}, {"question": "short", "answer": "é" * 400}]
    made = {
        "a.jsonl": lines(given),
        "a.jsonl.gz": gzip.compress(lines(given)),
        "b.json": lines(given),
        "c.json": json.dumps(given, ensure_ascii=False).encode(),
        "d.json.gz": gzip.compress(json.dumps(given, ensure_ascii=False, indent=1).encode()),
        "e.parquet": parquet(tmp_path / "made", given),
    }
    (tmp_path / name).write_bytes(made[name])
    found = read(files(tmp_path / name, max_row_bytes=1000))
    assert [len(texts[1]) for texts in said(found)] == [len(PAIRS[0]["answer"]), 400]
    [problem] = [one.problem for one in found if isinstance(one, RejectedRow)]
    assert problem.reason == "too_long"
    assert 1200 <= problem.value < 1300
    assert problem.what.endswith("bytes, more than max_row_bytes = 1,000")


def test_an_element_far_beyond_what_its_source_allows_is_passed(tmp_path: Path) -> None:
    long = {"question": 'a "quoted" \\ [word', "answer": "x" * 2_000_000, "more": [{"deep": ["]}"]}]}
    (tmp_path / "a.json").write_text(json.dumps([PAIRS[0], long, PAIRS[1]], indent=1))
    found = read(files(tmp_path, max_row_bytes=1000))
    assert [len(texts) for texts in said(found)] == [2, 2]
    [problem] = [one.problem for one in found if isinstance(one, RejectedRow)]
    assert "has at least 2,000," in problem.what
    assert problem.what.endswith("more than max_row_bytes = 1,000")
    (tmp_path / "a.json").rename(tmp_path / "a.txt")
    [text] = read(files(tmp_path, max_row_bytes=1000))
    assert isinstance(text, RejectedRow)
    assert text.problem.what.endswith("more than max_row_bytes = 1,000")


def test_elements_of_a_list_that_stand_on_one_line_have_places_and_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([*PAIRS[:2], 3, PAIRS[0]]))
    found = read(files(tmp_path))
    assert [one.location.rpartition(":")[2] for one in found] == ["1", "1#2", "1#3", "1#4"]
    ids = [one.id.rpartition("/")[2] for one in found if isinstance(one, Conversation)]
    assert ids == ["a.json:1", "a.json:1#2", "a.json:1#4"]
    rows = readers.raw_rows(ChatFiles(name="a", path=tmp_path), [])
    assert [id for _, id, _ in rows] == ["a/a.json:1", "a/a.json:1#2", "a/a.json:1#3", "a/a.json:1#4"]


def test_one_bad_text_inside_of_a_parquet_file_costs_its_row_alone(tmp_path: Path) -> None:
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = pa.Table.from_pylist([{"messages": good, "big": "x"}, {"messages": good, "big": "x"}])
    values = table.column("messages").combine_chunks()
    contents = pa.array([b"a", b"b", b"\xff", b"b"], pa.binary()).view(pa.string())
    structs = pa.StructArray.from_arrays([contents, values.values.field("role")], ["content", "role"])
    listed = pa.ListArray.from_arrays(values.offsets, structs)
    pq.write_table(pa.table({"messages": listed}), tmp_path / "a.parquet")
    found = read(files(tmp_path))
    assert said(found) == [["a", "b"]]
    assert rejected(found) == [("a.parquet:1", "not_utf8")]


def node(id: str, parent: str | None, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"message_id": id, "parent_id": parent, "role": role, "text": text, "lang": "en", "rank": None, **more}


TREE = [
    node("1", None, "prompter", "Q"),
    node("1b", "1", "assistant", "second", rank=1),
    node("1a", "1", "assistant", "first", rank=0),
    node("1aa", "1a", "prompter", "And?"),
    node("1aaa", "1aa", "assistant", "That."),
    node("1bb", "1b", "prompter", "Why?"),
    node("2", None, "prompter", "Frage", lang="de"),
    node("3", "lost", "assistant", "?"),
    node("4", None, "prompter", "nobody"),
    node("1", None, "prompter", "again"),
    node("5", None, "prompter", "gone", deleted=True),
]


def test_every_way_through_a_tree_is_a_conversation_and_every_other_message_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TREE))
    accept = [{"kind": "field", "field": "lang", "one_of": ["en"]}]
    found = read(files(tmp_path, accept=accept))
    assert said(found) == [["Q", "first", "And?", "That."], ["Q", "second"]]
    assert sorted(rejected(found)) == [
        ("a.jsonl:10", "duplicate_id"),
        ("a.jsonl:11", "deleted"),
        ("a.jsonl:6", "unanswered"),
        ("a.jsonl:7", "accept.lang"),
        ("a.jsonl:8", "orphan"),
        ("a.jsonl:9", "unanswered"),
    ]
    talks = [one for one in found if isinstance(one, Conversation)]
    assert [(one.id, one.location.rpartition(":")[2]) for one in talks] == [("1aaa", "5"), ("1b", "2")]
    assert len({one.group for one in talks}) == 1, "what begins with the same is held out together"


def test_a_cap_ends_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{\n" + lines(PAIRS))
    found = read(files(tmp_path, max_conversations=3), {"kind": "worlds", "count": 2, "name": "w"})
    assert Counter((one.source, type(one)) for one in found) == {
        ("mine", RejectedRow): 1,
        ("mine", Conversation): 3,
        ("w", Conversation): 2,
    }


# --- the hub -------------------------------------------------------------------------------------------------------

HUB = {"kind": "hub", "name": "pairs", "dataset": "us/pairs"}


def test_a_data_set_of_the_hub_is_downloaded_and_read_offline_afterwards(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        f"data/{name}.parquet": parquet(tmp_path / name, PAIRS[n * 10 : n * 10 + 10]) for n, name in enumerate("abc")
    }
    sha = hub.put("us/pairs", {**content, "README.md": b"# pairs"})
    found = read({**HUB, "files": ["data/*.parquet"], "license": "MIT"})
    assert said(found) == [[row["question"], row["answer"]] for row in PAIRS[:30]]
    first = found[0]
    assert isinstance(first, Conversation)
    assert (first.location, first.license) == (f"hf://datasets/us/pairs@{sha}/data/a.parquet:0", "MIT")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.forget()
    assert read({**HUB, "files": ["data/*.parquet"], "license": "MIT"}) == found
    assert not hub.requests


def test_bytes_of_another_hash_are_never_read(hub: Hub) -> None:
    hub.put("us/pairs", {"a.jsonl": lines(PAIRS * 20)})
    hub.fail("blobs", wrong=True, times=2)
    with pytest.raises(DataError, match="has the sha256"):
        read({**HUB, "files": ["a.jsonl"], "attempts": 2})


def test_a_cap_downloads_no_more_files_than_it_needs_and_the_commit_is_the_digest(hub: Hub) -> None:
    rows = {f"{name}.jsonl": lines([*PAIRS[:10], {"padding": name * 5000}]) for name in "abcdef"}
    hub.put("us/pairs", rows)
    source = {**HUB, "files": ["*.jsonl"], "max_conversations": 15}
    found = read(source)
    assert len(said(found)) == 15
    names = {request.path.rpartition("/")[2] for request in hub.asked("/resolve/")}
    assert len(names) == 2, names
    before = readers.digest(section(source).read)
    download.commit.cache_clear()
    hub.put("us/pairs", {"a.jsonl": lines(PAIRS[:1])})
    assert readers.digest(section(source).read) != before


def test_files_of_a_data_set_that_hold_no_conversations_are_an_error(hub: Hub) -> None:
    hub.put("us/pairs", {"a.csv": b"a,b\n"})
    with pytest.raises(DataError, match=r"no conversations are read from a\.csv"):
        read({**HUB, "files": ["*.csv"]})
    with pytest.raises(DataError, match=r"no conversations are read from a\.csv"):
        read(HUB)
    download.commit.cache_clear()
    hub.put("us/pairs", {"a.csv": b"a,b\n", "b.jsonl": lines(PAIRS[:2])})
    assert len(said(read(HUB))) == 2, "where nothing is named, what can hold conversations is read"


# --- well-known sets -----------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ALPACA = {"instruction": "q", "input": "", "output": "a"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "dolly": [{"instruction": "q", "context": "", "response": "a", "category": "open_qa"}],
    "no_robots": [{"prompt": "q", "prompt_id": "1", "messages": CHAT, "category": "Chat"}],
    "oasst1": [
        node("1", None, "prompter", "q"),
        node("2", "1", "assistant", "a", rank=0),
        node("3", None, "prompter", "f", lang="fr"),
    ],
    "slimorca": [
        {"conversations": [{"from": "human", "value": "q", "weight": 0.0}, {"from": "gpt", "value": "a", "weight": 1}]}
    ],
    "ultrachat": [{"prompt": "q", "prompt_id": "1", "messages": CHAT}],
    "alpaca": [{**ALPACA, "text": "Below is an instruction"}],
    "wizardlm": [{"instruction": "q", "output": "a"}],
    "hh_helpful": [{"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}],
    "metamath": [{"query": "q", "response": "a", "type": "GSM", "original_question": "o"}],
    "capybara": [{"source": "x", "conversation": [{"input": "q", "output": "a"}]}],
    "codealpaca": [ALPACA],
    "evolcode": [{"instruction": "q", "output": "a"}],
}  # fmt: skip
"""A row of each set as its card shows it."""


def as_file(name: str, rows: list[dict[str, Any]], folder: Path) -> bytes:
    if name.endswith(".parquet"):
        return parquet(folder / "made.parquet", rows)
    if name.endswith(".json"):
        return json.dumps(rows).encode()
    return gzip.compress(lines(rows)) if name.endswith(".gz") else lines(rows)


@pytest.mark.parametrize("name", get_args(readers.ChatPresetName))
def test_every_preset_reads_its_own_files_and_gives_the_answer_that_they_hold(
    hub: Hub, name: str, tmp_path: Path
) -> None:
    preset = packaged(readers.PRESETS)["presets"][name]
    file = preset["files"][0].replace("*", "00000-of-00001")
    hub.put(preset["dataset"], {file: as_file(file, ROWS[name], tmp_path), "README.md": b"# card"})
    found = read({"kind": "preset", "name": name})
    assert said(found) == [["q", "a"]]
    assert {one.license for one in found if isinstance(one, Conversation)} == {preset["license"]}
    assert [reason for _, reason in rejected(found)] == (["accept.lang"] if name == "oasst1" else [])


def test_every_name_has_its_preset_or_mixture() -> None:
    known = packaged(readers.PRESETS)
    assert set(get_args(readers.ChatPresetName)) == set(known["presets"])
    assert set(get_args(readers.MixtureName)) == set(known["mixtures"])


def test_what_a_recipe_says_wins_over_the_preset_and_the_resolved_recipe_holds_all() -> None:
    config = section({"kind": "preset", "name": "talk", "preset": "oasst1", "max_conversations": 7})
    tree = json.loads(config.model_dump_json())
    assert build(Conversations, tree) == config
    assert tree["sources"][0]["max_conversations"] == 7
    assert tree["sources"][0]["dataset"] == "OpenAssistant/oasst1"
    with pytest.raises(ConfigError, match="there is no preset 'talks'; presets: dolly, no_robots"):
        section({"kind": "preset", "name": "talks"})


V3 = {"slimorca": 120, "ultrachat": 80, "wizardlm": 50, "metamath": 45, "alpaca": 40, "hh_helpful": 30, "oasst1": 25,
      "capybara": 15, "dolly": 15, "no_robots": 10}  # fmt: skip
V4 = {"no_robots": 10, "dolly": 15, "codealpaca": 20, "evolcode": 30, "oasst1": 8, "capybara": 8, "slimorca": 80,
      "wizardlm": 35, "alpaca": 35, "metamath": 20, "ultrachat": 32}  # fmt: skip


@pytest.mark.parametrize(("name", "thousands"), [("plasma-v3", V3), ("plasma-v4", V4)])
def test_a_mixture_is_its_presets_with_their_caps(name: str, thousands: dict[str, int]) -> None:
    config = section({"kind": "mixture", "name": name}, {"kind": "worlds", "name": "self", "repeat": 4})
    caps = {one.name: one.max_conversations for one in config.read}
    assert caps == {**{name: 1000 * cap for name, cap in thousands.items()}, "self": None}
    assert build(Conversations, json.loads(config.model_dump_json())) == config
    copies = {one.name: one.repeat for one in config.read if one.repeat > 1}
    assert copies == ({"no_robots": 3, "dolly": 2, "self": 4} if name == "plasma-v4" else {"self": 4})


def test_two_sources_of_one_name_and_a_name_that_is_taken_are_refused() -> None:
    with pytest.raises(ConfigError, match="two sources have the name 'worlds'"):
        section({"kind": "worlds"}, {"kind": "worlds"})
    with pytest.raises(ConfigError, match="is reserved for"):
        section({"kind": "worlds", "name": "synthesize"})
