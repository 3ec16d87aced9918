"""Rows of every shape as messages, and rows that are none."""

import json
from typing import Any

import pytest

from bloomery.data.chat import formats
from bloomery.data.chat.formats import ChatFormat, Conversation, Fields
from bloomery.data.readers.bytes import ReadError

U, A, S, T = "user", "assistant", "system", "tool"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
GARBLED = {"name": "g", "arguments": "{"}
ROWS: list[tuple[ChatFormat, dict[str, Any], list[tuple[str, str]]]] = [
    ("messages", {"messages": [{"role": U, "content": "Hi"}, {"role": A, "content": "Yes"}]}, [(U, "Hi"), (A, "Yes")]),
    (
        "messages",
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": U, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": A, "content": None, "tool_calls": [CALL]},
                {"role": T, "content": "3"},
                {"role": A, "content": ""},
            ],
            "tools": [{"name": "f"}],
        },
        [
            (S, 'Be brief.\n\n{"name": "f"}'),
            (U, "ab"),
            (A, '{"name": "f", "arguments": {"x": 1}}'),
            (T, "3"),
            (A, ""),
        ],
    ),
    (
        "messages",  # as parquet gives it: every key is there
        {"messages": [{"role": A, "content": "x", "tool_calls": None, "function_call": GARBLED}]},
        [(A, 'x\n{"name": "g", "arguments": "{"}')],
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": "{}"},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "A", "weight": 1.0},
            ],
            "system": "S",
            "tools": "[]",
        },
        [(S, "S"), (U, "Q"), (A, "{}"), (T, "1"), (A, "A")],
    ),
    ("exchanges", {"conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]},
     [(U, "a"), (A, "b"), (U, "c"), (A, "d")]),
    ("exchanges", {"dialog": ["a", "b", "c"]}, [(U, "a"), (A, "b"), (U, "c")]),
    ("alpaca", {"instruction": "Add", "input": "1 2", "output": "3"}, [(U, "Add\n\n1 2"), (A, "3")]),
    ("pairs", {"question": "How?", "context": "A table.", "answer": "3"}, [(U, "How?\n\nA table."), (A, "3")]),
    ("pairs", {"prompt": "Add", "input": "1 2", "output": "3"}, [(U, "Add\n\n1 2"), (A, "3")]),
    ("pairs", {"question": "How many?", "context": " ", "answer": "3"}, [(U, "How many?"), (A, "3")]),
    ("alpaca", {"instruction": "Add", "input": " ", "output": "3", "text": "User: x"}, [(U, "Add"), (A, "3")]),
    ("alpaca", {"instruction": "Why?", "context": None, "response": "So."}, [(U, "Why?"), (A, "So.")]),
    (
        "alpaca",
        {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"},
        [(S, "s"), (U, "a"), (A, "b"), (U, "c"), (A, "d")],
    ),
    ("pairs", {"prompt": "p", "completion": "c"}, [(U, "p"), (A, "c")]),
    ("pairs", {"question": "q", "answer": "a", "id": 3}, [(U, "q"), (A, "a")]),
    ("pairs", {"query": "q", "response": "r"}, [(U, "q"), (A, "r")]),
    (
        "pairs",
        {"prompt": [{"role": U, "content": "p"}], "completion": [{"role": A, "content": "c"}]},
        [(U, "p"), (A, "c")],
    ),
    ("dialogue", {"text": "User: a\nb\nAssistant: c\n\nUser: d\nAssistant: e"},
     [(U, "a\nb"), (A, "c"), (U, "d"), (A, "e")]),
    ("dialogue", {"chosen": "\n\nHuman: q\n\nAssistant: Answer: 3", "rejected": "x"}, [(U, "q"), (A, "Answer: 3")]),
    ("dialogue", {"text": "### Instruction:\nq\n\n### Response:\na"}, [(U, "q"), (A, "a")]),
    ("dialogue", {"text": "System: s\nUser: a\nAssistant: b\nSystem: ok"}, [(S, "s"), (U, "a"), (A, "b\nSystem: ok")]),
    ("dialogue", {"text": "用户：你好\n助手：您好"}, [(U, "你好"), (A, "您好")]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "row", "expected"), ROWS)
def test_a_row_of_each_shape_is_told_by_its_fields_and_read(
    shape: ChatFormat, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert formats.detected(row, Fields()) == shape
    found = formats.READ[shape](row, Fields())
    assert not isinstance(found, ReadError), found.what
    assert [(message["role"], message["content"]) for message in found] == expected


MARKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"weight": 1, "train": True, "reasoning": ""}, {}),
    ({"weight": None, "train": None, "reasoning_content": None, "thinking": []}, {}),
    ({"weight": 0}, {"train": False}),
    ({"weight": 0.0, "train": True}, {"train": False}),
    ({"train": False}, {"train": False}),
    ({"training": False, "thinking": "So."}, {"train": False, "reasoning": "So."}),
    ({"reasoning_content": [{"type": "text", "text": "Hm."}], "reasoning": "Hm."}, {"reasoning": "Hm."}),
]


@pytest.mark.parametrize(("marks", "more"), MARKED)
def test_marks_of_the_loss_and_reasoning_are_read_whatever_they_are_called(
    marks: dict[str, Any], more: dict[str, Any]
) -> None:
    plain = {"role": U, "content": "a", "weight": 0, "train": None, "reasoning": None}
    row = {"messages": [plain, {"role": A, "content": "b"} | marks]}
    assert formats.READ["messages"](row, Fields()) == [
        {"role": U, "content": "a"},
        {"role": A, "content": "b"} | more,
    ]
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"} | marks]}
    assert formats.READ["sharegpt"](row, Fields()) == [{"role": U, "content": "a"}, {"role": A, "content": "b"} | more]


def test_the_text_of_a_conversation_holds_its_reasoning() -> None:
    said = formats.READ["messages"]({"messages": [{"role": A, "content": "b", "thinking": "a"}]}, Fields())
    assert not isinstance(said, ReadError)
    assert Conversation(said, "s", "1", "f:1").text == "a\nb"


def test_a_list_that_is_held_as_json_text_is_that_list() -> None:
    for shape, row, expected in ROWS:
        if shape in ("messages", "sharegpt"):
            written = {name: json.dumps(row[name]) if name in formats.LISTS else row[name] for name in row}
            test_a_row_of_each_shape_is_told_by_its_fields_and_read(shape, written, expected)
    for text in ("[", "[1, 2]", "[]", '{"role": "user", "content": "x"}'):
        assert formats.detected({"messages": text}, Fields()) is None, text


ASKED, SAID = [{"role": U, "content": "p"}], [{"role": A, "content": "c"}]


@pytest.mark.parametrize("asked", [ASKED, json.dumps(ASKED), "p"])
@pytest.mark.parametrize("said", [SAID, json.dumps(SAID, indent=1), "c"])
@pytest.mark.parametrize("names", [("prompt", "completion"), ("question", "answer"), ("q", "r")])
def test_a_question_and_its_answer_are_texts_or_lists_of_messages_or_those_as_json_text(
    asked: Any, said: Any, names: tuple[str, str]
) -> None:
    fields = Fields(question="q", answer="r") if names[0] == "q" else Fields()
    row = dict(zip(names, (asked, said), strict=True))
    assert formats.detected(row, fields) == "pairs"
    assert formats.READ["pairs"](row, fields) == [*ASKED, *SAID]


@pytest.mark.parametrize("text", ['[{"name": "f", "arguments": {}}]', "[1, 2]", "[]", '["a"]', '[{"role": ', "[{}]"])
def test_an_answer_in_json_that_is_no_list_of_messages_is_a_text(text: str) -> None:
    for asked in ("p", ASKED):
        assert formats.READ["pairs"]({"prompt": asked, "chosen": text}, Fields()) == [
            {"role": U, "content": "p"},
            {"role": A, "content": text},
        ]
    assert formats.detected({"prompt": "p", "chosen": text}, Fields()) == "pairs"


@pytest.mark.parametrize("name", ["dialog", "dialogue", "conversation", "chat"])
def test_texts_in_turn_may_be_held_as_json_text(name: str) -> None:
    row = {name: '["hi", "yo"]'}
    assert formats.detected(row, Fields()) == "exchanges"
    assert formats.READ["exchanges"](row, Fields()) == formats.READ["exchanges"]({name: ["hi", "yo"]}, Fields())


def test_fields_that_the_recipe_names_are_read_and_no_others() -> None:
    row = {"a": {"q": "Q"}, "r": "A", "c": "C", "messages_": [], "sys": "S", "prompt": "p", "completion": "c"}
    fields = Fields(question="a.q", answer="r", system="sys")
    assert formats.detected(row, fields) == "pairs"
    expected = [{"role": S, "content": "S"}, {"role": U, "content": "Q"}, {"role": A, "content": "A"}]
    assert formats.READ["pairs"](row, fields) == expected
    with_context = Fields(question="a.q", context="c", answer="r")
    assert formats.detected(row, with_context) == "alpaca"
    assert formats.READ["alpaca"](row, with_context) == [
        {"role": U, "content": "Q\n\nC"},
        {"role": A, "content": "A"},
    ]
    spoken = {"t": "<a>x<b>y"}
    told = Fields(messages="t", speakers=("<a>", "<b>"))
    assert isinstance(formats.READ["dialogue"](spoken, told), list)


PAIR = {"question": "How many?", "passage": "A table.", "context": "Other.", "answer": "3"}


@pytest.mark.parametrize(
    ("row", "fields", "spoken"),
    [
        (PAIR, Fields(context="passage"), [(U, "How many?\n\nA table."), (A, "3")]),
        (PAIR, Fields(context="nope"), "no text field named nope"),
        (PAIR, Fields(messages="nope"), "no list named nope"),
        (
            {**PAIR, "context": None, "told": "Be brief.", "tools": [{"name": "f"}]},
            Fields(system="told"),
            [(S, 'Be brief.\n\n{"name": "f"}'), (U, "How many?"), (A, "3")],
        ),
    ],
)
def test_a_field_that_the_recipe_names_is_never_passed_over(
    row: dict[str, Any], fields: Fields, spoken: list[tuple[str, str]] | str
) -> None:
    shape = formats.detected(row, fields)
    assert shape is not None
    read = formats.READ[shape](row, fields)
    if isinstance(spoken, str):
        assert isinstance(read, ReadError)
        assert spoken in read.what
    else:
        assert isinstance(read, list)
        assert [(message["role"], message["content"]) for message in read] == spoken


@pytest.mark.parametrize(
    ("row", "shape", "expected"),
    [
        ({"instruction": None, "output": None, "prompt": "p", "completion": "c"}, "pairs", ["p", "c"]),
        ({"prompt": None, "completion": None, "question": "q", "answer": "a"}, "pairs", ["q", "a"]),
        ({"instruction": None, "input": "x", "output": "y"}, "alpaca", ["x", "y"]),
        ({"messages": [], "conversations": [{"from": "gpt", "value": "a"}]}, "sharegpt", ["a"]),
        ({"messages": None, "text": None, "dialogue": "User: a\nAssistant: b"}, "dialogue", ["a", "b"]),
        ({**dict.fromkeys(("message_id", "parent_id", "text", "role")), "prompt": "p", "answer": "a"}, "pairs", None),
    ],
)
def test_columns_without_a_value_say_nothing_about_the_shape(
    row: dict[str, Any], shape: ChatFormat, expected: list[str] | None
) -> None:
    assert formats.detected(row, Fields()) == shape
    found = formats.READ[shape](row, Fields())
    assert isinstance(found, list)
    assert expected is None or [message["content"] for message in found] == expected


def test_speakers_that_the_recipe_names_tell_a_dialogue_and_one_may_begin_as_the_other_does() -> None:
    row, fields = {"text": "Al: hi\nAl: B: yo", "prompt": "p", "answer": "a"}, Fields(speakers=("Al:", "Al: B:"))
    assert formats.detected(row, fields) == "dialogue"
    assert formats.READ["dialogue"](row, fields) == [{"role": U, "content": "hi"}, {"role": A, "content": "yo"}]


BROKEN: list[tuple[ChatFormat, dict[str, Any], str, str]] = [
    ("messages", {"x": 1}, "no_messages", "has no list named messages or conversations; its fields: x"),
    (
        "messages",
        {"messages": "Hi"},
        "no_messages",
        "has no list named messages or conversations (messages is a text, and no",
    ),
    (
        "messages",
        {"messages": "[]"},
        "no_messages",
        "(messages is a text, and no list of messages in JSON); its fields: ",
    ),
    (
        "messages",
        {"messages": '[{"role": "user"'},
        "bad_message",
        "field 'messages' does not hold messages: its text is no",
    ),
    ("sharegpt", {"conversations": ' ["a", '}, "bad_message", "its text is not a JSON list (Expecting value"),
    ("pairs", {"prompt": "a", "answer": json.dumps(ASKED)}, "bad_message", "its question is text, but its answer"),
    ("messages", {"messages": [{"role": U, "content": [{"type": "image_url"}]}]}, "not_text", "of the types image_url"),
    ("pairs", {"prompt": "What is this?", "completion": "A cat.", "images": ["a.png"]}, "not_text", "field 'images'"),
    (
        "messages",
        {"messages": [{"role": A, "content": "a", "weight": 0.5}]},
        "bad_mark",
        "has weight 0.5; it must be 0",
    ),
    (
        "messages",
        {"messages": [{"role": A, "content": "a", "train": "no"}]},
        "bad_mark",
        "1 of the assistant has train",
    ),
    (
        "messages",
        {"messages": [{"role": U, "content": "a", "train": True}]},
        "bad_mark",
        "1 of the user has train True",
    ),
    ("messages", {"messages": [{"role": U, "content": "a", "thinking": "b"}]}, "bad_mark", "of the user has thinking"),
    (
        "messages",
        {"messages": [{"role": A, "content": "a", "reasoning": {"x": 1}}]},
        "not_text",
        "reasoning of message 1",
    ),
    (
        "messages",
        {"messages": [{"role": A, "content": "a", "thinking": "b\0"}]},
        "binary",
        "thinking of message 1 holds a",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": "a", "thinking": "b", "reasoning": "c"}]},
        "bad_mark",
        "message 1 of the assistant has reasoning and thinking; only an assistant has one of them",
    ),
    ("messages", {"messages": [{"role": A}]}, "bad_message", "message 1 has no role and content"),
    ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "unknown_role", "has the role 'narrator'"),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": 3}]},
        "not_text",
        "message 1 has content of the type int",
    ),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "\ud83d"}]}, "not_unicode", "half a surrogate pair"),
    ("exchanges", {"conversation": [{"input": "a"}]}, "bad_message", "exchange 1 has no input and output"),
    ("alpaca", {"instruction": "a", "output": None}, "no_field", "has no text field named output or response"),
    (
        "alpaca",
        {"instruction": "a", "input": 3, "output": "b"},
        "not_text",
        "field 'input' has content of the type int",
    ),
    ("alpaca", {"instruction": "a", "output": "b", "history": ["c"]}, "bad_message", "entry 1 of its history"),
    ("pairs", {"prompt": "a"}, "no_field", "has no text field named completion or response"),
    ("dialogue", {"text": "Just text."}, "no_speaker", "no line begins with a speaker"),
    ("dialogue", {"text": "Once\nUser: a\nAssistant: b"}, "no_speaker", "begins with text before the first speaker"),
]


@pytest.mark.parametrize(("shape", "row", "reason", "what"), BROKEN)
def test_a_row_that_is_none_is_told_why(shape: ChatFormat, row: dict[str, Any], reason: str, what: str) -> None:
    found = formats.READ[shape](row, Fields())
    assert isinstance(found, ReadError)
    assert found.reason == reason
    assert what in found.what


@pytest.mark.parametrize(
    "row", [{}, {"text": "Once upon a time."}, {"text": "User: hello"}, {"title": "a", "body": "b"}]
)
def test_a_row_without_a_shape_has_none(row: dict[str, Any]) -> None:
    assert formats.detected(row, Fields()) is None
