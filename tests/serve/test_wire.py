import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bloomery.serve.server import serving

from .fakes import FakeAnswerer, FakeModels


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeModels(FakeAnswerer("bloom"))) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"n": 2}, "n", "n: this server does not do 2, only 1\nLeave it out."),
        ({"tool_choice": "any"}, "tool_choice", 'does not do "any", only "none" or "auto"'),
        ({"temperature": 3}, "temperature", "temperature: input should be less than or equal to 2, got 3"),
        ({"stop": 3}, "stop", "stop: input should be a valid string, got 3"),
        ({"seed": "x" * 200}, "seed", f'got "{"x" * 79}…'),
        ({"seed": "\ud800"}, "seed", 'got "\\ud800"'),
        ({"messages": "hello"}, "messages", 'messages: input should be a valid list, got "hello"'),
        (b'{"model": bloom}', None, 'no JSON: Expecting value at character 10, where it reads "bloom}". Send a JSON'),
        (b'{"model": ', None, "no JSON: Expecting value at character 10, where it ends. Send a JSON object"),
        (b'["bloom"]', None, 'the body is ["bloom"]. Send a JSON object with "model" and "messages"'),
        (b"", None, 'there is no body. Send a JSON object with "model" and "messages"'),
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
