import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bloomery.core.errors import DataError
from bloomery.serve import guard, openai_api
from bloomery.serve.server import serving

from .fakes import FakeAnswerer, FakeModels


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeModels(FakeAnswerer("bloom"))) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"modalities": ["audio"]}, "modalities", 'this server does not support ["audio"], only ["text"]\nRemove it.'),
        ({"tool_choice": "any"}, "tool_choice", 'must be auto, none, required, or name a function, got "any"'),
        ({"temperature": 3}, "temperature", "temperature: input should be less than or equal to 2, got 3"),
        ({"stop": 3}, "stop", "stop: input should be a valid string, got 3"),
        ({"seed": "x" * 200}, "seed", f'got "{"x" * 79}…'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"seed": "\ud800"}, "seed", 'got "\\ud800"'),
        ({"messages": "hello"}, "messages", 'messages: input should be a valid list, got "hello"'),
        (b'{"model": bloom}', None, 'not JSON: Expecting value at character 10, where it reads "bloom}"\nSend a JSON'),
        (b'{"model": ', None, "not JSON: Expecting value at character 10, where it ends\nSend a JSON object"),
        (b'["bloom"]', None, 'the body is ["bloom"]\nSend a JSON object with "model" and "messages"'),
        (b"", None, 'there is no body\nSend a JSON object with "model" and "messages"'),
        (b"{\xff}", None, "the body cannot be read: 'utf-8' codec can't decode byte 0xff in position 1"),
    ],
)
def test_a_wrong_request_is_told_the_value_and_what_is_accepted(
    url: str, body: dict[str, Any] | bytes, param: str | None, told: str
) -> None:
    sent = body if isinstance(body, bytes) else json.dumps({"model": "bloom", "messages": [], **body})
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{url}/v1/chat/completions", content=sent, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert told in error["message"]


def test_a_body_that_is_not_sent_as_json_is_refused(url: str) -> None:
    body = json.dumps({"model": "bloom", "messages": [{"role": "user", "content": "hello"}]})
    for kind, status in (("text/plain", 400), ("application/json; charset=utf-8", 200), ("application/a+json", 200)):
        response = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code == status, kind
        assert status == 200 or 'the body is sent as "text/plain"' in response.json()["error"]["message"]


def many(value: str) -> str:
    return "[" + f"{value}," * 49_000 + f"{value}]"


EMPTY = '""'
OBJECT = "{" + ",".join(f'"k{number}":1' for number in range(30_000)) + "}"
COSTLY = {
    "content of numbers": f'"messages":[{{"role":"user","content":{many("1")}}}]',
    "content of good parts": '"messages":[{"role":"user","content":['
    + '{"type":"text","text":""},' * 14_000
    + '{"type":"text","text":""}]}]',
    "a part of many fields": f'"messages":[{{"role":"user","content":[{OBJECT}]}}]',
    "messages of numbers": f'"messages":{many("1")}',
    "messages without fields": '"messages":[' + "{}," * 32_000 + "{}]",
    "9,000 wrong messages": '"messages":[' + '{"role":"x","content":1},' * 9_000 + "{}]",
    "a message of many fields": f'"messages":[{{"role":"user","content":"hi",{OBJECT[1:]}]',
    "stop of numbers": f'"messages":[],"stop":{many("1")}',
    "stop of texts": f'"messages":[],"stop":{many(EMPTY)}',
    "options of a stream": f'"messages":[],"stream_options":{OBJECT}',
    "tools": f'"messages":[],"tools":{many("1")}',
    "an unknown field": f'"messages":[],"unknown":{many("1")}',
    "a number that is a list": f'"messages":[],"seed":{many("1")}',
    "a name that is a list": f'"messages":[],"model":{many("1")}',
}
"""Bodies with as many values as the guard lets pass."""


@pytest.mark.parametrize("fields", COSTLY.values(), ids=COSTLY)
def test_a_wrong_request_takes_milliseconds_and_a_short_error_however_many_values_are_wrong(fields: str) -> None:
    body = f'{{"model":"bloom",{fields}}}'.encode()
    began = time.thread_time()
    assert guard.too_complex(body) is None
    with pytest.raises(DataError) as caught:
        openai_api.parsed(openai_api.ChatRequest, body, "application/json").asked()
    assert time.thread_time() - began < 0.5
    assert len(str(caught.value)) < 500


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from schemas(inner)
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        yield value


def test_every_list_of_a_request_is_bounded_and_ends_at_its_first_wrong_element() -> None:
    made = list(schemas(openai_api.ChatRequest.__pydantic_core_schema__))
    lists = [one for one in made if one["type"] == "list"]
    assert len(lists) == 3
    assert all(one["max_length"] and one["fail_fast"] for one in lists)
    kinds = {one["type"] for one in made}
    assert not kinds & {"union", "dict", "tuple", "set", "frozenset", "generator"}  # a union checks every member


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("metadata", '{"a": "\\ud800"}'),
        ("user", '"\\udfff"'),
        ("tools", '[{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]'),
    ],
)
def test_half_a_character_is_refused_where_it_stands(field: str, text: str) -> None:
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "a"}}], "{field}": {text}}}'
    with pytest.raises(DataError, match="half a character") as caught:
        openai_api.parsed(openai_api.ChatRequest, body.encode(), "application/json")
    assert caught.value.where == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_of_json_is_refused(number: str) -> None:
    body = f'{{"model": "m", "messages": [], "metadata": {{"a": {number}}}}}'
    with pytest.raises(DataError, match=f"{number} is not a JSON number"):
        openai_api.parsed(openai_api.ChatRequest, body.encode(), "application/json")


@pytest.mark.parametrize("field", ["metadata", "tools", "logit_bias"])
def test_a_number_above_all_floats_is_refused(field: str) -> None:
    body = f'{{"model": "m", "messages": [], "{field}": {{"1": 1e999}}}}'
    with pytest.raises(DataError, match="too large") as caught:
        openai_api.parsed(openai_api.ChatRequest, body.encode(), "application/json")
    assert caught.value.where == field


def test_half_a_character_in_a_call_of_a_tool_is_refused() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}
    message = openai_api.WireMessage(role="assistant", content="", tool_calls=[call])
    with pytest.raises(DataError, match="half a character"):
        message.plain("messages.0")
