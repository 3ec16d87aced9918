import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import openai
import pytest

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import ConfigError, DataError
from bloomery.serve.server import STATIC, Server, serving

from .fakes import FakeAnswerer, FakeModels

ASK: Any = [{"role": "user", "content": "hello"}]
LONG: Any = [{"role": "user", "content": "long"}]


class Site(NamedTuple):
    url: str
    bloom: FakeAnswerer
    client: openai.OpenAI


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    bloom = FakeAnswerer("bloom")
    with (
        serving(FakeModels(bloom, FakeAnswerer("slag"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        yield Site(url, bloom, client)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"model": "bloom", "messages": ASK, **body}, timeout=60)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_the_openai_client_finds_every_model(site: Site) -> None:
    assert [model.id for model in site.client.models.list()] == ["bloom", "slag"]


@pytest.mark.parametrize("name", ["bloom", "runs/demo", "a b/ä%2F#?"])
def test_the_openai_client_finds_one_model_by_a_name_with_slashes_too(name: str) -> None:
    with (
        serving(FakeModels(FakeAnswerer("slag"), FakeAnswerer(name))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        assert client.models.retrieve(name) in client.models.list().data
        for safe in ("", "/"):
            assert httpx.get(f"{url}/v1/models/{quote(name, safe=safe)}").json()["id"] == name
        for unknown in ("gold", f"{name}/", "", f"{name}/pretrain"):
            answer = httpx.get(f"{url}/v1/models/{quote(unknown)}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert f"There are: slag, {name}." in answer.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError, match=r"no model 'gold'"):
            client.models.retrieve("gold")


def test_the_openai_client_gets_a_whole_answer_with_its_usage(site: Site) -> None:
    got = site.client.chat.completions.create(model="bloom", messages=ASK)
    assert got.choices[0].message.content == "bloom heard hello (1 messages)"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (1, 5, 6)


def test_the_openai_client_reads_a_stream_in_openais_order(site: Site) -> None:
    chunks = list(site.client.chat.completions.create(model="bloom", messages=ASK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert texts == ["bloom", " heard", " hello", " (1", " messages)"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_its_usage_when_it_is_wanted(site: Site) -> None:
    *_, last = site.client.chat.completions.create(
        model="bloom", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 5)


def test_the_wire_of_a_stream_is_server_sent_events(site: Site) -> None:
    response = post(site.url, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_the_first_words_arrive_before_the_last_are_made() -> None:
    gate = threading.Event()
    with (
        serving(FakeModels(FakeAnswerer("bloom", gate=gate))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.chat.completions.create(model="bloom", messages=ASK, stream=True) as stream,
    ):
        seen = [next(stream).choices[0].delta.content for _ in range(3)]
        assert seen == ["", "bloom", " heard"]
        gate.set()
        assert next(stream).choices[0].delta.content == " hello"


def test_what_a_client_asks_for_reaches_the_model(site: Site) -> None:
    site.client.chat.completions.create(
        model="bloom",
        messages=ASK,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["\n", "User:"],
        extra_body={"top_k": 3},
    )
    assert site.bloom.samplings[-1] == SamplingConfig(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=7, stop=("\n", "User:")
    )
    site.client.chat.completions.create(model="bloom", messages=ASK, stop="x")
    assert site.bloom.samplings[-1] == SamplingConfig(stop=("x",))


def test_an_answer_that_is_cut_says_so(site: Site) -> None:
    got = site.client.chat.completions.create(model="bloom", messages=ASK, max_tokens=2)
    assert got.choices[0].message.content == "bloom heard"
    assert got.choices[0].finish_reason == "length"


def test_an_answer_can_be_sent_back_as_it_came(site: Site) -> None:
    first = site.client.chat.completions.create(model="bloom", messages=ASK).choices[0].message
    again: Any = [
        *ASK,
        first,
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    site.client.chat.completions.create(model="bloom", messages=again)
    assert [message["role"] for message in site.bloom.heard[-1]] == ["user", "assistant", "user"]
    assert [message["content"] for message in site.bloom.heard[-1]][1:] == ["bloom heard hello (1 messages)", "ab"]


def test_a_developers_message_is_a_systems(site: Site) -> None:
    site.client.chat.completions.create(model="bloom", messages=[{"role": "developer", "content": "be brief"}, *ASK])
    assert site.bloom.heard[-1][0] == {"role": "system", "content": "be brief"}


def test_an_unknown_model_is_answered_with_those_that_there_are(site: Site) -> None:
    with pytest.raises(openai.NotFoundError, match=r"no model 'gold'.*bloom, slag") as caught:
        site.client.chat.completions.create(model="gold", messages=ASK)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 17),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tools", [{"type": "code_interpreter"}]),
        ("tool_choice", "required"),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("guided_choice", []),
        ("guided_choice", ["x"] * 1001),
        ("guided_regex", "x" * 20_000),
        ("guided_grammar", "a: b\n" * 300),
        ("guided_json", {"anyOf": [{"$ref": "#/x"}] * 201}),
        ("frequency_penalty", 2.5),
        ("min_p", 1.5),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("penalty_window", -1),
        ("no_repeat_ngram", 33),
        ("guided_json", {"type": "integer", "multipleOf": 250_007}),
        ("guided_json", {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}),
        ("guided_json", '{"type": "integer", "multiple\\u004ff": 250007}'),
        ("guided_json", {"type": "number", "multipleOf": 1e-300}),
        ("guided_json", f'{{"type": "number", "multipleOf": 0.{"0" * 50}1}}'),
        ("guided_json", '{"a":' * 5000),
        ("guided_json", "[" * 70_000),
        ("guided_grammar", 'start: %json {"multipleOf": 999983}'),
        ("logit_bias", {"1": 10**400}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(id): 1 for id in range(1025)}),
        ("truncation", "newest"),
        ("best_off", 3),
        ("temperature", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", 2**24 + 1),
        ("max_tokens", 2**24 + 1),
        ("max_completion_tokens", 10**30),
        ("seed", 2**63),
        ("stop", ["x"] * 17),
        ("stop", "x" * 513),
        ("stop", ["x" * 513]),
        ("model", "x" * 1025),
        ("presence_penalty", -3),
        ("messages", ASK * 10_001),
        ("messages", [{"role": "user", "content": "a\0b"}]),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("stop", [""]),
        ("messages", []),
        ("messages", [{"role": "assistant", "content": "a"}]),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_the_field(site: Site, field: str, value: Any) -> None:
    asked: Any = {"model": "bloom", "messages": ASK, field: value}
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        site.client.post("/chat/completions", body=asked, cast_to=object)
    assert str(caught.value.param).partition(".")[0] == field
    assert caught.value.type == "invalid_request_error"


def call(arguments: str) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "oracle", "content": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": None},
        {"role": "user", "content": "a", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "content": "", "tool_calls": [call('{"a":' * 5000)]},
    ],
)
def test_a_message_that_cannot_be_read_is_an_error(site: Site, message: Any) -> None:
    response = post(site.url, messages=[message])
    assert response.status_code == 400
    assert re.search("messages.0|tool_calls", response.json()["error"]["message"])


def test_fields_that_ask_for_nothing_are_accepted(site: Site) -> None:
    harmless = {"n": 1, "tools": [], "user": "me", "metadata": {"a": "b"}, "logprobs": False, "logit_bias": None}
    assert post(site.url, **harmless, response_format={"type": "text"}, presence_penalty=0).status_code == 200


def test_a_model_that_fails_before_the_first_word_is_asked_once(site: Site) -> None:
    before = len(site.bloom.heard)
    with pytest.raises(openai.InternalServerError, match=r"the weights are torn"):
        site.client.chat.completions.create(
            model="bloom", messages=[{"role": "user", "content": "refuse"}], stream=True
        )
    assert len(site.bloom.heard) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gets_no_path_of_the_server_and_the_log_gets_all_of_it(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/home/a b/runs{stream}/bad7"

    class Torn(FakeModels):
        def get(self, name: str) -> FakeAnswerer:
            what = f"it is of the base {path}/base/model.safetensors, '{path}/x' and ~{path}/y"
            raise DataError(what, where=f"{path}/config.json:3", hint=f"bloomery run {path}/recipe.toml")

    class Buggy(FakeModels):
        def get(self, name: str) -> FakeAnswerer:
            raise FileNotFoundError(2, "No such file", f"{path}/weights")

    for models, shown in (
        (Torn, "the model 'bloom' cannot be loaded: it is of the base model.safetensors, 'x' and y\n"),
        (Buggy, "FileNotFoundError: [Errno 2] No such file: 'weights'\n"),
    ):
        with serving(models(FakeAnswerer("bloom"))) as url:
            for _ in range(2):
                response = post(url, stream=stream)
                assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
                assert response.json()["error"]["message"].startswith(shown), response.text
                assert "runs" not in response.text
                assert "home" not in response.text
    said = [record.getMessage() for record in caplog.records if f"{path}/config.json:3: " in record.getMessage()]
    assert len(said) == 1
    assert f"bloomery run {path}/recipe.toml" in said[0]


def test_a_name_that_is_no_utf_8_is_no_error_of_the_server() -> None:
    with serving(FakeModels(FakeAnswerer("b\udcff"))) as url:
        response = post(url, model="gold")
        assert response.status_code == 404
        assert r"There are: b\udcff." in response.json()["error"]["message"]


def test_a_failure_in_the_middle_of_a_stream_reaches_the_client(site: Site) -> None:
    seen = []
    with (
        site.client.chat.completions.create(
            model="bloom", messages=[{"role": "user", "content": "break"}], stream=True
        ) as stream,
        pytest.raises(openai.APIError, match="ValueError: a bug in the engine"),
    ):
        seen += [chunk.choices[0].delta.content for chunk in stream]
    assert "[DONE]" not in post(site.url, messages=[{"role": "user", "content": "break"}], stream=True).text


def test_a_bug_is_answered_with_its_name(site: Site) -> None:
    response = post(site.url, messages=[{"role": "user", "content": "break"}])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "ValueError: a bug in the engine\nThis is a bug in Bloomery."


def test_a_client_that_leaves_a_stream_stops_the_model() -> None:
    bloom = FakeAnswerer("bloom", 0.01)
    with (
        serving(FakeModels(bloom)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        with client.chat.completions.create(model="bloom", messages=LONG, max_tokens=100_000, stream=True) as stream:
            next(stream)
        assert bloom.closed.wait(60)
    assert bloom.words_said < 10_000


def test_a_client_that_does_not_wait_for_a_whole_answer_stops_the_model() -> None:
    bloom = FakeAnswerer("bloom", 0.01)
    with serving(FakeModels(bloom)) as url:
        body = {"model": "bloom", "messages": LONG, "max_tokens": 100_000}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=1))
        assert bloom.closed.wait(60)
    assert bloom.words_said < 10_000


def test_requests_to_one_model_are_answered_side_by_side() -> None:
    bloom = FakeAnswerer("bloom", gate=(gate := threading.Event()))
    with serving(FakeModels(bloom)) as url, ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(post, url) for _ in range(2)]
        assert wait_for(lambda: bloom.words_said == 4)
        gate.set()
        assert [answer.result().status_code for answer in waiting] == [200, 200]
    (_, first_end), (second_begin, _) = sorted(bloom.spans)
    assert second_begin < first_end


def test_a_client_that_leaves_stops_its_own_answer_alone() -> None:
    bloom = FakeAnswerer("bloom", 0.01)
    with serving(FakeModels(bloom)) as url, ThreadPoolExecutor(1) as clients:
        body = {"model": "bloom", "messages": LONG, "max_tokens": 100_000}
        stays = clients.submit(httpx.post, f"{url}/v1/chat/completions", json={**body, "max_tokens": 200}, timeout=60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=1))
        assert wait_for(lambda: len(bloom.spans) == 1)
        assert stays.result().json()["usage"]["completion_tokens"] == 200


def test_a_closing_server_cuts_answers_short_and_says_so() -> None:
    server = Server(FakeModels(FakeAnswerer("bloom", 0.01)), "127.0.0.1", 0)
    thread = threading.Thread(target=server.listen)
    thread.start()
    asked = {"model": "bloom", "messages": LONG, "max_tokens": 100_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.close()
        assert "the answer was stopped" in list(filter(None, lines))[-1]
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_lets_answers_end_and_a_second_one_cuts_them_short(again: bool) -> None:
    server = Server(FakeModels(FakeAnswerer("bloom", 0.01)), "127.0.0.1", 0)
    thread = threading.Thread(target=server.listen)
    thread.start()
    asked = {"model": "bloom", "messages": LONG, "max_tokens": 100_000 if again else 100, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        for _ in range(1 + again):
            server.handle_exit(signal.SIGTERM, None)
        rest = list(filter(None, lines))
    assert rest[-1] == "data: [DONE]" if not again else "the answer was stopped" in rest[-1]
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_ends_the_server_without_an_error() -> None:
    code = (
        "from serve.fakes import *; from bloomery.serve.server import serve;"
        "serve(FakeModels(FakeAnswerer('bloom')), port=0); print('over')"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline() + process.stderr.readline()
        found = re.search(r"Open (http://127\.0\.0\.1:\d+) ", said)
        assert found is not None, said
        assert httpx.get(f"{found[1]}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "over\n", "")


def test_a_busy_port_is_an_error_that_names_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*\n.*--port {port + 1}"):
            Server(FakeModels(), "127.0.0.1", port)


@pytest.mark.parametrize("host", ["a" * 70, "x\udcff", "a..b", "\udcff.\u3002", "x" * 100_000])
def test_a_host_that_is_no_name_is_an_error_that_names_the_flag(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)--host: cannot listen there: '.*is not a host name.*127\.0\.0\.1"
    ) as caught:
        Server(FakeModels(), host, 0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 8000), ("127.0.0.1", 99999)])
def test_an_address_that_cannot_be_had_is_an_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        Server(FakeModels(), host, port, token="a token of 20 letters".replace(" ", "-"))


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_name_is_refused_on_loopback(site: Site, name: str) -> None:
    assert httpx.get(f"{site.url}/v1/models", headers={"Host": name}).status_code == 400


@pytest.mark.parametrize("name", ["localhost", "localhost:8000", "127.0.0.1:99", "[::1]:8000"])
def test_every_name_of_loopback_is_answered(site: Site, name: str) -> None:
    assert httpx.get(f"{site.url}/v1/models", headers={"Host": name}).status_code == 200


def test_a_request_that_a_foreign_page_could_send_is_refused(site: Site) -> None:
    body = json.dumps({"model": "bloom", "messages": ASK})
    before = len(site.bloom.heard)
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    response = httpx.post(f"{site.url}/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 403
    assert len(site.bloom.heard) == before
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_page_is_served_with_a_policy_and_loads_nothing_from_elsewhere(site: Site) -> None:
    response = httpx.get(site.url)
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'self';")
    for name in re.findall(r'(?:href|src)="([^"]*)"', response.text):
        assert httpx.get(site.url + name).status_code == 200
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|@import", text), file.name


def test_what_can_be_read_has_headers_too(site: Site) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/bloom"):
        whole, headers = httpx.get(site.url + path), httpx.head(site.url + path)
        assert (headers.status_code, headers.text) == (200, "")
        assert headers.headers["content-type"] == whole.headers["content-type"]


def test_an_unknown_path_is_an_error_in_openais_shape(site: Site) -> None:
    response = httpx.get(f"{site.url}/v1/nothing")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found")
