"""What is broken in every way: each row comes out, as a conversation or with its line and the reason why it is none."""

import datetime
import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bloomery.core.chat import message_problem
from bloomery.core.config import build
from bloomery.data.chat import readers
from bloomery.data.chat.formats import SHAPES, Conversation, RejectedRow
from bloomery.data.chat.readers import ChatItem, Conversations

TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028c\x85d\x0be"}]
}
GOOD = json.dumps(TALK, ensure_ascii=False).encode()


def read(path: Path, **more: Any) -> list[ChatItem]:
    source = {"kind": "files", "name": "mine", "path": str(path), **more}
    found = list(readers.conversations(build(Conversations, {"sources": [source]}).read))
    for one in found:
        if isinstance(one, Conversation):
            assert not any(message_problem(message) for message in one.messages)
        else:
            assert one.problem.what
            assert one.problem.reason
            assert str(path) in one.location
    return found


def told(found: list[ChatItem]) -> list[tuple[str, str]]:
    """The end of the place, and the reason, or "" of what is a conversation."""
    return [
        (one.location.rpartition(":")[2], one.problem.reason if isinstance(one, RejectedRow) else "") for one in found
    ]


def test_a_row_that_shows_no_shape_decides_none_for_the_rows_behind_it(tmp_path: Path) -> None:
    sharegpt: dict[str, Any] = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    alpaca: dict[str, Any] = {"instruction": "a", "output": "b"}
    hollow: list[dict[str, Any]] = [
        {"conversations": []},
        {"messages": [None]},
        {"messages": []},
        {"conversations": None},
    ]
    reasons = ["no_messages", "bad_message", "no_messages", "unknown_shape"]
    for number, good in enumerate([sharegpt, TALK, alpaca]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in [*hollow, good, {"messages": [], **good}, good]))
        assert [reason for _, reason in told(read(path))] == [*reasons, "", "", ""]


def test_rows_of_two_merged_files_are_read_by_the_columns_that_have_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"instruction": "a", "output": "b"}, {"prompt": "c", "completion": "d"}, TALK]
    columns = ("instruction", "output", "prompt", "completion", "messages")
    merged = [{name: row.get(name) for name in columns} for row in rows]
    pq.write_table(pa.Table.from_pylist(merged), tmp_path / "a.parquet")
    assert [reason for _, reason in told(read(tmp_path / "a.parquet"))] == ["", "", ""]


@pytest.mark.parametrize("seen", ["image", "images"])
def test_rows_with_images_are_refused_in_every_kind_of_file(tmp_path: Path, seen: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "What is this?", "completion": "A cat.", seen: "a.png"},
        {"prompt": "a", "completion": "b"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    merged = [{**dict.fromkeys(rows[0]), **row} for row in rows]
    pq.write_table(pa.Table.from_pylist(merged), tmp_path / "a.parquet")
    for ending in ("jsonl", "parquet"):
        assert [reason for _, reason in told(read(tmp_path / f"a.{ending}"))] == ["not_text", ""], ending


@pytest.mark.parametrize("nothing", [None, []])
def test_rows_of_merged_files_may_have_their_lists_in_different_columns(tmp_path: Path, nothing: Any) -> None:
    sharegpt: list[dict[str, str]] = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    turns: list[dict[str, str]] = [{"input": "a", "output": "b"}]
    columns = {"messages": TALK["messages"], "conversations": sharegpt, "conversation": turns}
    for count, order in enumerate(itertools.permutations(columns)):
        merged = [{**dict.fromkeys(columns, nothing), name: columns[name]} for name in order]
        (tmp_path / f"{count}.jsonl").write_text("\n".join(map(json.dumps, merged)))
        pq.write_table(pa.Table.from_pylist(merged), tmp_path / f"{count}.parquet")
        for ending in ("jsonl", "parquet"):
            assert [reason for _, reason in told(read(tmp_path / f"{count}.{ending}"))] == ["", "", ""], (order, ending)


def test_a_broken_list_of_messages_as_json_text_is_told_also_where_it_comes_first(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": json.dumps(TALK["messages"])[:-1]}, TALK]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    found = read(tmp_path / "a.jsonl")
    assert told(found) == [("1", "bad_message"), ("2", ""), ("3", "bad_message")]
    for one in (found[0], found[2]):
        assert isinstance(one, RejectedRow)
        assert one.problem.what.startswith(
            "field 'messages' does not hold messages: its text is not a JSON list (Expecting"
        )


# --- rows ----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    0,
    -5,
    3.5,
    10**300,
    "",
    " ",
    "a",
    "\ud800",
    "x\u2028y",
    "\0",
    "[",
    [],
    {},
    [None],
    [[]],
]
VALUES += [["a", None], [["a", "b"], ["c"]], {"role": "user"}, [{"role": "user"}], {"a": 1}, [1, 2], {"function": "f"}]
VALUES += [[{"function": 5}], [{"function": {"name": 1, "arguments": "[" * 3000}}], [5], 10**400]
VALUES += [[{"function": {"name": "\ud800", "arguments": {"a": "\udc00"}}}], ["user"], {"b": {"c": ["d"]}}]
ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": "a",
                "weight": 1,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                "function_call": {"name": "g", "arguments": "{}"},
            },
            {"role": "tool", "content": "1"},
        ],
        "system": "S",
        "tools": [{"name": "f"}],
        "license": "mit",
    },
    {"id": 1, "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}], "tools": "[]"},
    {"conversation": [{"input": "i", "output": "o"}, {"input": "i", "output": "o"}], "system_prompt": "p"},
    {"dialog": ["a", "b", "c"]},
    {"instruction": "i", "input": "c", "output": "o", "history": [["q", "a"]]},
    {"prompt": "p", "completion": "c", "history": [["q", "a"]], "system": "s"},
    {"prompt": [{"role": "user", "content": "u"}], "chosen": [{"role": "assistant", "content": "a"}]},
    {"text": "User: a\nAssistant: b"},
    {"message_id": "m", "parent_id": None, "text": "q", "role": "prompter", "rank": 0, "deleted": False},
    {"message_id": "n", "parent_id": "m", "text": "q", "role": "assistant", "rank": 0, "deleted": False},
]


def broken(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """A copy in which one to three places, however deep, are gone or hold something else."""
    made: dict[str, Any] = json.loads(json.dumps(row))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder: Any = None
        key: Any = None
        value: Any = made
        while isinstance(value, dict | list) and value and (holder is None or rng.random() < 0.75):
            holder, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
            value = holder[key]
        if holder is None:
            break
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = json.loads(json.dumps(rng.choice(VALUES)))
    return made


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_no_row_of_any_shape_ends_the_reading_whatever_its_fields_hold(tmp_path: Path, shape: str | None) -> None:
    rng = random.Random(str(shape))
    more = {"shape": shape} if shape else {}
    for row in ROWS:
        rows = [broken(rng, row) for _ in range(25)]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        found = read(path, **more)
        places = [place for place, _ in told(found)]
        assert set(places) == {str(number) for number in range(1, 26)}, "a row is nowhere"
        if shape != "tree" and "message_id" not in row:
            assert len(places) == 25


CALL = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "reason", "what"),
    [
        (
            {"messages": [{**CALL, "tool_calls": 5}]},
            "bad_message",
            "message 1 has a tool call of the type int, not an ob",
        ),
        ({"messages": [{**CALL, "tool_calls": ["f"]}]}, "bad_message", "message 1 has a tool call of the type str"),
        ({"messages": [{**CALL, "function_call": "f"}]}, "bad_message", "message 1 has a tool call of the type str"),
        ({"messages": [{**CALL, "tool_calls": [{"function": {"name": "\ud800"}}]}]}, "not_unicode", "a call in mess"),
        ({"prompt": "p", "completion": "c", "history": 5}, "bad_message", "its history is int, not a list of pairs"),
        ({"messages": [CALL], "tools": [{"name": "\ud800"}]}, "not_unicode", "a tool holds half a surrogate"),
        ({**TALK, "id": "\ud800"}, "not_unicode", "field 'id' holds half a surrogate"),
        ({**TALK, "id": "a\0"}, "binary", "field 'id' holds a NUL at character 1"),
        (
            {"messages": [{**CALL, "content": "a\0b"}]},
            "binary",
            "message 1 holds a NUL at character 1: this is not text",
        ),
        ({**ROWS[-2], "text": "\0"}, "binary", "holds a NUL at character 0"),
        ({**ROWS[-1], "message_id": "\0"}, "binary", "field 'message_id' holds a NUL at character 0"),
        ({**ROWS[-1], "parent_id": "\0"}, "binary", "field 'parent_id' holds a NUL at character 0"),
        ({**ROWS[-2], "role": ["prompter"]}, "unknown_role", r"has the role \['prompter'\]"),
    ],
)
def test_what_stands_where_an_object_should_is_told(tmp_path: Path, row: Any, reason: str, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(row).encode() + b"\n")
    (found,) = read(path)
    assert isinstance(found, RejectedRow)
    assert found.problem.reason == reason
    assert found.problem.what.startswith(what.replace("\\", ""))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", (GOOD + b"\r\n") * 2, [("1", ""), ("2", "")]),
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD, [("1", "")]),
        ("a.json", b"\xef\xbb\xbf[\r\n" + GOOD + b",\r\n" + GOOD + b"\r\n]\r\n", [("2", ""), ("3", "")]),
        ("a.jsonl", b'1\n"a"\nnull\n[1]\n{}\n', [*[(n, "not_json") for n in "1234"], ("5", "unknown_shape")]),
        ("a.jsonl", json.dumps(TALK).encode("utf-16"), [("1", "not_utf8")]),
        ("a.jsonl", b'{"messages": "\xff"}\n' + GOOD, [("1", "not_utf8"), ("2", "")]),
        ("a.jsonl", GOOD + b"\n" + GOOD[:-9], [("1", ""), ("2", "torn")]),
        ("a.jsonl", b'{"messages":' + b"[" * 99_999 + b"]" * 99_999 + b"}\n" + GOOD, [("1", "not_json"), ("2", "")]),
        ("a.jsonl", b'{"messages": ' + b"1" * 5000 + b"}\n" + GOOD, [("1", "not_json"), ("2", "")]),
        ("a.json", b"[" + GOOD + b"]\n[" + GOOD + b"]", [("1", ""), ("2", "")]),
        ("a.json", b"[" + GOOD + b"]\n" + GOOD, [("1", ""), ("2", "torn")]),
        ("a.json", b"[" + b"[" * 99_999 + b"]" * 99_999 + b",\n" + GOOD + b"]", [("1", "not_json"), ("2", "")]),
        ("a.json", b"[" + b"1" * 5000 + b",\n" + GOOD + b"]", [("1", "torn")]),
        ("a.json", b'[{"a":' + b"1" * 5000 + b"},\n" + GOOD + b"]", [("1", "not_json"), ("2", "")]),
        ("a.json", b'[{"a":"caf\xe9"},\n' + GOOD + b"]", [("1", "not_utf8"), ("2", "")]),
        ("a.json", b"[" + GOOD + b",\n" + GOOD[:-9], [("1", ""), ("2", "torn")]),
        ("a.json", b'[{"question": "\xff"}]', [("1", "not_utf8")]),
        ("a.json", b"[]", []),
        ("a.json.gz", gzip.compress(b"[" + GOOD + b"]", mtime=0)[:-9], [("1", ""), ("1#2", "torn")]),
        ("a.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], [("1", "torn")]),
        ("a.jsonl.zst", zstandard.compress(GOOD)[:-9], [("1", "torn")]),
        ("a.jsonl.zst", b"no frame", [("1", "torn")]),
        ("a.jsonl.gz", b"no member", [("1", "torn")]),
    ],
)  # fmt: skip
def test_files_are_read_up_to_where_they_are_broken(
    tmp_path: Path, name: str, data: bytes, expected: list[tuple[str, str]]
) -> None:
    (tmp_path / name).write_bytes(data)
    assert told(read(tmp_path / name)) == expected


# --- tables ----------------------------------------------------------------------------------------------------------

TEXT = pa.string()
MESSAGE = [("role", TEXT), ("content", TEXT)]


def listed(*more: Any) -> Any:
    return pa.list_(pa.struct([*MESSAGE, *more]))


def nulls() -> Any:
    kept = [TALK["messages"], None, [], [None], [{"role": None, "content": None}]]
    return pa.table({"messages": pa.array(kept, listed())})


def late() -> Any:
    """Dates that Python's calendar does not have."""
    rows = [[{**message, "at": 2**60} for message in TALK["messages"]], TALK["messages"]]
    return pa.table({"messages": pa.array(rows, listed(("at", pa.timestamp("us"))))})


def twice() -> Any:
    """Two fields of one name in an object."""
    fields = [pa.field(name, TEXT) for name in ("role", "content", "content")]
    structs = pa.StructArray.from_arrays([pa.array(["assistant"]), *[pa.array(["a"])] * 2], fields=fields)
    return pa.table({"messages": pa.ListArray.from_arrays([0, 1], structs)})


def timed(name: str) -> Any:
    """Calls and tools whose arguments JSON cannot hold."""
    value = {"name": "f", "arguments": {"at": datetime.datetime(2020, 1, 1), "data": b"x"}}
    told = {"role": "assistant", "content": "a", **({"tool_calls": [value]} if name == "calls" else {})}
    row = {"messages": [told], **({"tools": [value]} if name == "tools" else {})}
    return pa.Table.from_pylist([row])


def parts() -> Any:
    content = pa.list_(pa.struct([("type", TEXT), ("text", TEXT)]))
    row = [{"role": "assistant", "content": [{"type": "text", "text": text}]} for text in ("a", None)]
    kind = pa.list_(pa.struct([("role", TEXT), ("content", content)]))
    return pa.table({"messages": pa.array([row[:1], row], kind)})


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (nulls, ["", "no_messages", "no_messages", "bad_message", "unknown_role"]),
        (late, ["bad_cell", ""]),
        (twice, ["bad_cell"]),
        (lambda: timed("calls"), ["not_text"]),
        (lambda: timed("tools"), ["not_text"]),
        (parts, ["", "not_text"]),
        (lambda: pa.table({"body": ["a"]}), ["no_column"]),
        (lambda: pa.table({"prompt": [b"\xff"], "completion": ["a"]}), ["not_text"]),
        (lambda: pa.table({"prompt": ["a"], "completion": pa.array([3]).dictionary_encode()}), ["not_text"]),
        (lambda: pa.Table.from_arrays([pa.array(["a"])] * 3, ["prompt", "completion", "prompt"]), ["no_column"]),
        (lambda: pa.table({"messages": pa.array([[("role", "user")]], pa.map_(TEXT, TEXT))}), ["bad_message"]),
    ],
)
def test_cells_of_tables_cost_their_row_alone(tmp_path: Path, table: Callable[[], Any], expected: list[str]) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    assert told(read(tmp_path / "a.parquet")) == [(str(row), reason) for row, reason in enumerate(expected)]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1garbage PAR1"])
def test_a_file_that_is_no_table_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    assert told(read(tmp_path / "a.parquet")) == [("0", "torn")]


def test_a_table_that_was_cut_or_overwritten_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(nulls(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert told(read(path)) == [("0", "torn")]
    path.write_bytes(whole[:20] + b"\xff" * 40 + whole[60:])
    assert told(read(path)) == [("0", "torn")]
    path.write_bytes(whole.replace(b"messages", b"message\xf3"))
    assert told(read(path)) == [("0", "torn")]
