"""Forms and calls that a client or a model spells badly: bounded work, and answers that can be sent."""

import json
import random
from typing import Any

import pytest

from bloomery.core.errors import DataError
from bloomery.serve.constrained import Grammars, ToolCall, ToolFormat, grammar_form, regex_form, schema_form
from bloomery.serve.openai_api import ChatRequest, _as_messages, validated
from bloomery.serve.replies import event
from bloomery.tokenizer.importers import from_json
from tests.tokenizer.made import made_for
from tests.tokenizer.test_importers import like_llama

PATTERNS = [{"pattern": f".*a.{{{count}}}b"} for count in range(16)]
TOGETHER: dict[str, dict[str, Any]] = {
    "in allOf": {"type": "string", "allOf": PATTERNS},
    "of a property": {"allOf": [{"properties": {"a": one}} for one in PATTERNS]},
    "in allOf of allOf": {"items": {"allOf": [{"allOf": PATTERNS[:8]}, {"anyOf": [{"allOf": PATTERNS[8:]}, {}]}]}},
    "by references": {
        "$defs": {**{f"a{n}": one for n, one in enumerate(PATTERNS)}, "a/b": {"allOf": PATTERNS}},
        "anyOf": [{"$ref": "#/$defs/a~1b"}, {"allOf": [{"$ref": f"#/$defs/a{n}"} for n in range(16)]}],
    },
    "in a chain": {
        "$defs": {f"a{n}": {**one, "$ref": f"#/$defs/a{n + 1}"} for n, one in enumerate(PATTERNS)} | {"a16": {}},
        "$ref": "#/$defs/a0",
    },
}


@pytest.mark.parametrize("schema", TOGETHER.values(), ids=TOGETHER)
def test_patterns_that_one_text_matches_together_are_bounded(schema: dict[str, Any]) -> None:
    """The compiler takes twice the time and memory for each further pattern: 8 s and 600 MB for fourteen."""
    with pytest.raises(DataError, match="too many patterns at once"):
        schema_form(schema, "guided_json")
    with pytest.raises(DataError, match="too many patterns at once"):
        grammar_form(f"start: %json {json.dumps(schema)}", "guided_grammar")


def test_intersections_of_a_grammar_are_bounded() -> None:
    with pytest.raises(DataError, match=r"its 15 intersections \(&\) may take too much work"):
        grammar_form("start: A\nA: " + " & ".join(f"/{one['pattern']}/" for one in PATTERNS), "guided_grammar")
    grammar_form("start: " + " | ".join([r'"&\"&" /a&&\/b&/ // & and &'] * 9), "guided_grammar")


def test_patterns_of_different_texts_are_not_counted_together() -> None:
    apart = {f"p{number}": one for number, one in enumerate(PATTERNS)}
    few = [{"pattern": "[A-Z]"}, {"pattern": "[0-9]"}, {"$ref": "#"}]
    schema_form({"type": "object", "properties": apart | {"password": {"allOf": few, "minLength": 8}}}, "guided_json")
    schema_form({"anyOf": [*PATTERNS, {"enum": PATTERNS}, {"$ref": "#/nothing/1"}]}, "guided_json")


@pytest.mark.parametrize("form", [schema_form({"$ref": "#"}, "f"), regex_form(r"[^\s\S]", "f")])
def test_a_form_that_permits_no_text_is_an_error_that_says_so(form: Any) -> None:
    tokenizer = made_for("chatml")
    with pytest.raises(DataError, match="f: no text has this form"):
        Grammars(tokenizer, frozenset({tokenizer.special_id("<|im_end|>") or 0})).constraint(form).allowed()


@pytest.mark.parametrize(
    ("arguments", "read"),
    [(r'{"a": "\ud83d\ude00\ud800"}', {"a": "😀\ufffd"}), ('{"a": NaN}', None), ('{"a": 1e999}', None)],
)
def test_calls_can_be_sent_as_json_in_utf_8(arguments: str, read: dict[str, str] | None) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    rest, calls = ToolFormat("<tool_call>\n", "arguments", "\n</tool_call>").calls(text, ["f"])
    assert (rest, calls) == ((text, []) if read is None else ("", [ToolCall("f", read)]))


def test_arguments_of_a_tool_may_be_behind_a_reference() -> None:
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"b": {"const": 1}}, "required": ["b"]}}}
    format = ToolFormat("<tool_call>\n", "arguments", "\n</tool_call>")
    form = format.form([{"function": {"name": "f", "parameters": schema}}], {})
    tokenizer = made_for("chatml")
    matcher = Grammars(tokenizer, frozenset({tokenizer.special_id("<|im_end|>") or 0})).constraint(form)
    for id in tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'):
        assert matcher.allowed()[id]
        matcher.accept(id)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], "must be object"),
        ("messages", r'{"a": "\ud800"}', "messages.1.tool_calls.0.function.arguments: holds half a character"),
        ("messages", '{"a":' * 40 + "1" + "}" * 40, "function.arguments: is nested more than 32 deep"),
        ("guided_json", '{"not":' * 800 + "{}" + "}" * 800, "guided_json: is nested more than 32 deep"),
        ("guided_json", "[" * 60_000, "guided_json: is not JSON, or is nested too deeply"),
        ("messages", '{"a": 1e999}', "messages.1.tool_calls.0.function.arguments: holds a number that is too large"),
    ],
)
def test_tools_and_calls_that_no_template_can_write_are_refused(field: str, value: Any, what: str) -> None:
    ask: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
    if field == "messages":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": value}}
        value = [*ask, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    with pytest.raises(DataError, match=what):
        validated(ChatRequest, {"model": "m", "messages": ask, field: value}).asked()


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (regex_form("ab|ba ab", "f"), {"ab", "ba ab"}),
        (schema_form({"enum": ["ab", " ab"]}, "f"), {'"ab"', '" ab"'}),
    ],
)
def test_a_form_is_kept_where_the_tokenizer_puts_a_space_before_each_text(form: Any, texts: set[str]) -> None:
    tokenizer = from_json(like_llama().to_str(), "made", {"eos_token": "<s>"})
    end, found = tokenizer.special_id("<s>"), set()
    grammars = Grammars(tokenizer, frozenset({end or 0}))
    for seed in range(20):
        rng, constraint, ids = random.Random(seed), grammars.constraint(form), list[int]()
        while not constraint.finished and (not ids or ids[-1] != end):
            ids.append(rng.choice(constraint.allowed().nonzero().flatten().tolist()))
            constraint.accept(ids[-1])
        found.add(tokenizer.decode_bytes(ids).decode())
    assert found == texts


def test_tools_with_a_form_are_refused_because_no_tool_could_be_called() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "tools": [tool]}
    form = {"response_format": {"type": "json_object"}}
    assert validated(ChatRequest, body | form | {"tool_choice": "none"}).asked().form is not None
    with pytest.raises(DataError, match="response_format: asks for a form, so that no tool could be called"):
        validated(ChatRequest, body | form).asked()


def test_a_call_behind_a_text_of_the_assistant_is_of_the_same_message() -> None:
    """As the server's own answers have them."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Let me look."}, call, call]
    user, assistant = _as_messages([*items])
    assert (user["role"], assistant["content"], len(assistant["tool_calls"])) == ("user", "Let me look.", 2)
    assert [one["role"] for one in _as_messages([items[0], call])] == ["user", "assistant"]


def test_an_event_is_one_line_for_every_client() -> None:
    data = {"text": "a\u2028b\u2029c\x85é"}
    (line,) = event(data).strip().splitlines()
    assert json.loads(line.removeprefix("data: ")) == data
