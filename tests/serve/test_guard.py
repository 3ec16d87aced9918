import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from typing import Any

import httpx
import openai
import pytest

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import ConfigError
from bloomery.serve import guard
from bloomery.serve import queue as serve_queue
from bloomery.serve.chat_model import Asked, ModelInfo, StoppedError
from bloomery.serve.server import STATIC, Server, app, serving

from .fakes import FakeAnswerer, FakeModels

TOKEN = "0123456789abcdef"
ASK: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LIMIT = guard.MIB + 64 * 1000


class Models(FakeModels):
    """Fakes with a context of 1,000 tokens."""

    def names(self) -> list[ModelInfo]:
        return [ModelInfo(one.id, one.created, one.path, 1000) for one in super().names()]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Models(FakeAnswerer("bloom"))) as url:
        yield url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """A server with a token."""
    with serving(Models(FakeAnswerer("bloom")), token=TOKEN) as url:
        yield url


def post(url: str, text: str = "hello", **how: Any) -> httpx.Response:
    asked = {"model": "bloom", "messages": [{"role": "user", "content": text}]}
    return httpx.post(url + CHAT, json=asked, timeout=60, **how)


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60)


def sent(url: str, data: bytes) -> bytes:
    """All that the server answers to these bytes until it closes."""
    with connected(url) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(2**16), b""))


def head(more: str) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}\r\n\r\n".encode()


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_may_have_a_mebibyte_and_64_bytes_for_each_token_of_the_context(url: str) -> None:
    empty = len(json.dumps({"model": "bloom", "messages": [{"role": "user", "content": ""}]}, separators=(",", ":")))
    assert post(url, "x" * (LIMIT - empty)).status_code == 200
    refused = post(url, "x" * (LIMIT - empty + 1))
    assert refused.status_code == 413
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert f"more than {LIMIT:,} bytes" in refused.json()["error"]["message"]


def test_a_declared_length_is_refused_before_any_of_the_body_is_read(url: str) -> None:
    assert sent(url, head("Content-Length: 100000000")).startswith(b"HTTP/1.1 413 ")
    assert sent(url, head("Content-Length: " + "9" * 20)).startswith(b"HTTP/1.1 413 ")
    with_body = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
    assert sent(url, with_body).startswith(b"HTTP/1.1 413 ")


@pytest.mark.slow
def test_a_body_whose_length_proxies_may_read_in_two_ways_is_refused(url: str) -> None:
    both = head("Content-Length: 4\r\nTransfer-Encoding: chunked") + b"0\r\n\r\n"
    assert sent(url, both).startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow
def test_a_chunked_body_without_end_is_refused_where_it_passes_the_limit(url: str) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 2**16

    response = httpx.post(url + CHAT, content=endless(), headers=JSON, timeout=60)
    assert response.status_code == 413
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100, "nested 100 deep"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested 5,000 deep"),
        (b"[" + b"0," * 100_001 + b"0]", "more than 100,000 values"),
        (b'"a"' * 100_001, "more than 100,000 values"),
        (('{"model": "∢' + "[" * 50).encode("utf-16"), "NUL"),
        (b'{"seed": ' + b"9" * 5_000 + b"}", "the body cannot be read: Exceeds the limit"),
        (b'{"model": "bloom", "messages": [], "' + b"x" * 10_000 + b'": 1}', "x: unknown field"),
    ],
)
def test_json_that_would_cost_its_parser_much_is_refused(url: str, body: bytes, why: str) -> None:
    response = httpx.post(url + CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert why in response.json()["error"]["message"]
    assert len(response.text) < 1000


def test_brackets_and_quotes_in_text_are_no_nesting() -> None:
    for text in ("[" * 1000, '"' * 1000 + "[" * 1000, "\\" * 1001 + "{" * 1000, '\\"[' * 1000):
        assert guard.too_complex(json.dumps({"a": [text, text]}).encode()) is None
        assert guard.too_complex(json.dumps(text).encode()[:-1] + b"[" * 100) is None  # still the same string
    assert guard.too_complex(b'["\\\\",' + b"[" * 100) is not None
    assert guard.too_complex(b'"' + b'\\"' * 1_000_000) is None  # in linear time


def test_bodies_of_all_requests_together_have_a_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_HELD_BYTES", 1000)
    refused = post(url, "x" * 1000)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    for _ in range(5):
        assert post(url).status_code == 200


ROUTES = sorted(guard.BODIES)


def test_every_route_that_takes_a_body_is_bounded_as_conversations_are() -> None:
    routes: list[Any] = [route for route in app(FakeModels(), ["*"]).routes if getattr(route, "methods", None)]
    posts = {route.path for route in routes if "POST" in route.methods}
    assert posts == guard.BODIES


@pytest.mark.parametrize("route", ROUTES)
def test_all_limits_hold_on_every_route(route: str, url: str, locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token, the origin, the kind, size, depth and time of a body, all bodies together, and the queue."""

    def sent_to(site: str, body: bytes = b"{}", **headers: str) -> httpx.Response:
        return httpx.post(site + route, content=body, headers={**JSON, **headers}, timeout=60)

    assert sent_to(locked).status_code == 401
    assert sent_to(locked, Authorization=f"Bearer {TOKEN}").status_code == 400
    assert sent_to(url, Origin="https://evil.example").status_code == 403
    assert sent_to(url, Host="evil.example").status_code == 400
    assert sent_to(url, b"x" * (LIMIT + 1)).status_code == 413
    for body, said in (
        (b"[" * 100, "nested 100 deep"),
        (b"[" + b"0," * 100_001 + b"0]", "more than 100,000 values"),
        (b"{}", "is required"),
        (b"[]", "the body is []"),
        (b"{", "the body is not JSON"),
    ):
        refused = sent_to(url, body)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    assert "sent as" in httpx.post(url + route, content=b"{}", headers={"Content-Type": "text/plain"}).text
    many: dict[str, Any] = {"messages": ASK, "input": "x", "prompt": "x", "tokens": [1]}
    known = {
        name: value
        for name, value in many.items()
        if f'"{name}' in sent_to(url).text or f"{name}: " in sent_to(url).text
    }
    if route == "/tokenize":
        known = {"prompt": "x"}
    unknown = sent_to(url, json.dumps({"model": "bloom", **known, "unknown_field": 1}).encode())
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "unknown_field")
    missing = sent_to(url, json.dumps({"model": "gold", **known}).encode())
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    with monkeypatch.context() as patch:
        patch.setattr(guard, "MAX_HELD_BYTES", 1)
        assert sent_to(url).status_code == 429
    with monkeypatch.context() as patch:
        patch.setattr(serve_queue, "MAX_REQUESTS", 0)
        busy = sent_to(url)
        assert busy.status_code == 429
        assert busy.headers["retry-after"]
    with monkeypatch.context() as patch:
        patch.setattr(guard, "BODY_SECONDS", 0.3)
        patch.setattr(guard, "LINGER_SECONDS", 0.3)
        late = (
            f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        assert sent(url, late.encode()).startswith(b"HTTP/1.1 408 ")


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_client_that_is_late_with_its_headers_is_cut(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)
    with serving(FakeModels()) as url, connected(url) as client:
        client.sendall(data)
        began = time.monotonic()
        if data:
            with suppress(ConnectionError):
                while time.monotonic() - began < 10:  # a byte now and then is no reason to wait
                    client.send(b"a")
                    time.sleep(0.05)
        assert is_cut(client)
        assert 0.2 < time.monotonic() - began < 10


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_client_that_is_late_with_its_body_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.3)
    with serving(FakeModels()) as url:
        for data in (head("Content-Length: 10") + b'{"a"', head("Transfer-Encoding: chunked") + b"2\r\n{"):
            assert sent(url, data).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_waits_for_its_answer_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.2)
    with serving(FakeModels(FakeAnswerer("bloom", 0.2))) as url:
        assert post(url).json()["choices"][0]["message"]["content"] == "bloom heard hello (1 messages)"


@pytest.mark.slow
def test_a_client_that_reads_nothing_loses_its_connection_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "UNREAD_SECONDS", 0.3)
    bloom = FakeAnswerer("bloom", 0.0001)
    asked = {"model": "bloom", "messages": [{"role": "user", "content": "long"}], "max_tokens": 100_000, "stream": True}
    body = json.dumps(asked).encode()
    with serving(FakeModels(bloom)) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        client.sendall(head(f"Content-Length: {len(body)}") + body)
        assert bloom.closed.wait(60)
    assert bloom.words_said < 100_000


def test_pieces_that_nobody_reads_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queue, "MAX_UNREAD", 10)
    bloom = FakeAnswerer("bloom", 0.001)

    async def ask() -> None:
        job = await serve_queue.RequestQueue(FakeModels(bloom)).ask(
            "bloom",
            Asked(sampling=SamplingConfig(max_tokens=100_000), messages=({"role": "user", "content": "long"},)),
        )
        assert job is not None
        await asyncio.to_thread(bloom.closed.wait, 60)
        with pytest.raises(StoppedError):
            async for _ in job.pieces():
                pass

    asyncio.run(ask())
    assert bloom.words_said < 1000


def test_an_answer_does_not_wait_for_an_acknowledgement(url: str) -> None:
    """Nagle's algorithm would hold the body of each for 40 ms, until the client's delayed acknowledgement."""
    with httpx.Client(base_url=url) as client:
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            seconds.append(time.monotonic() - began)
    assert sorted(seconds)[5] < 0.03


# --- how many --------------------------------------------------------------------------------------------------------


def test_of_too_many_connections_the_one_that_idles_longest_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_CONNECTIONS", 4)
    gate = threading.Event()
    with serving(FakeModels(FakeAnswerer("bloom", gate=gate))) as url, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(post, url)
        idle = []
        for _ in range(4):
            idle.append(connected(url))
            time.sleep(0.05)
        assert httpx.get(f"{url}/health").status_code == 200
        gate.set()
        assert is_cut(idle[0])
        assert answer.result().status_code == 200
        for client in idle:
            client.close()


def test_of_too_many_requests_each_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queue, "MAX_REQUESTS", 3)
    gate = threading.Event()
    bloom = FakeAnswerer("bloom", gate=gate)
    with (
        serving(FakeModels(bloom)) as url,
        ThreadPoolExecutor(3) as clients,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as patient,
    ):
        waiting = [clients.submit(patient.chat.completions.create, model="bloom", messages=ASK) for _ in range(3)]
        while len(bloom.heard) < 3:
            time.sleep(0.01)
        refused = httpx.post(url + CHAT, json={"model": "bloom", "messages": ASK}, timeout=60)
        with pytest.raises(openai.RateLimitError, match="3 requests are already waiting"):
            client.chat.completions.create(model="bloom", messages=ASK)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "2"  # half of the line, at one second each
        assert "x-should-retry" not in refused.headers
        threading.Timer(0.5, gate.set).start()
        assert patient.chat.completions.create(model="bloom", messages=ASK).choices[0].message.content
        assert {answer.result().choices[0].finish_reason for answer in waiting} == {"stop"}


def test_a_request_that_left_the_line_makes_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queue, "MAX_REQUESTS", 2)
    bloom = FakeAnswerer("bloom", gate=(gate := threading.Event()))
    with serving(FakeModels(bloom)) as url, ThreadPoolExecutor(2) as clients:
        first = clients.submit(post, url)
        while bloom.words_said < 2:
            time.sleep(0.01)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + CHAT, json={"model": "bloom", "messages": ASK}, timeout=httpx.Timeout(60, read=0.5))
        second = clients.submit(post, url)
        time.sleep(0.2)
        gate.set()
        assert (first.result().status_code, second.result().status_code) == (200, 200)


# --- who -------------------------------------------------------------------------------------------------------------


def test_with_a_token_no_route_but_health_answers_without_it(locked: str) -> None:
    routes = {"/", "/nothing", "/login", "/static/nothing", "/v1/models", "/v1/models/bloom", CHAT, "/docs"}
    routes |= {f"/static/{file.name}" for file in STATIC.iterdir()}
    routes |= {str(getattr(route, "path", "/")) for route in app(FakeModels(), ["*"]).routes} - {"/health"}
    methods = ("GET", "HEAD", "POST", "PUT", "OPTIONS")
    wrong: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"})
    with httpx.Client(base_url=locked) as client:
        for route, method, headers in product(sorted(routes), methods, wrong):
            if (route, method) != (guard.LOGIN, "POST"):
                answer = client.request(method, route, headers=headers)
                assert answer.status_code == 401, (method, route)
                assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{locked}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("target", ["/v1/models", "/health/../v1/models", "/v1/models?/health", "http://x/health"])
@pytest.mark.parametrize("host", ["x", "x/health?", "x/health#", "[", "/health"])
def test_no_host_or_target_passes_for_health(target: str, host: str) -> None:
    async def ask() -> int:
        received, statuses = iter([{"type": "http.request", "body": b""}]), list[int]()

        async def receive() -> Any:
            return next(received)

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        path = target.partition("?")[0]
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "server": ("x", 1),
            "scheme": "http",
        }
        headers = [(b"host", host.encode())]
        await app(FakeModels(), ["*"], TOKEN)({**scope, "headers": headers}, receive, send)
        return statuses[0]

    assert asyncio.run(ask()) == 401


def test_the_openai_client_sends_the_token_as_its_key(locked: str) -> None:
    with openai.OpenAI(base_url=f"{locked}/v1", api_key=TOKEN) as client:
        assert client.chat.completions.create(model="bloom", messages=ASK).choices[0].message.content
        assert [model.id for model in client.models.list()] == ["bloom"]
    with (
        openai.OpenAI(base_url=f"{locked}/v1", api_key=f"{TOKEN}x") as client,
        pytest.raises(openai.AuthenticationError, match="this server needs its token"),
    ):
        client.chat.completions.create(model="bloom", messages=ASK)


def test_without_the_token_a_body_is_not_read(locked: str) -> None:
    assert sent(locked, head("Content-Length: 900000")).startswith(b"HTTP/1.1 401 ")


def test_the_form_takes_the_token_and_gives_a_cookie(locked: str) -> None:
    origin = {"Origin": locked, "Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=locked, follow_redirects=True, headers=origin) as browser:
        asked = browser.get("/")
        assert asked.status_code == 401
        assert '<form method="post" action="/login">' in asked.text
        assert "script" not in asked.text
        wrong = browser.post("/login", data={"token": "wrong"})
        assert (wrong.status_code, wrong.cookies) == (401, httpx.Cookies())
        right = browser.post("/login", data={"token": TOKEN})
        (redirect,) = right.history
        assert redirect.status_code == 303
        assert re_matches(redirect.headers["set-cookie"], "HttpOnly", "SameSite=strict", "Path=/")
        assert TOKEN not in redirect.headers["set-cookie"]
        assert "<title>Bloomery</title>" in right.text
        assert browser.get("/v1/models").status_code == 200
        browser.cookies.set(f"bloomery-{locked.rsplit(':', 1)[1]}", "forged", domain="127.0.0.1")
        assert httpx.get(f"{locked}/v1/models", headers={"Cookie": "bloomery-1=x"}).status_code == 401


def re_matches(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)


def test_an_address_may_try_ten_wrong_tokens_a_minute() -> None:
    with serving(FakeModels(), token=TOKEN) as url:
        codes = [httpx.post(f"{url}/login", data={"token": f"wrong{n}"}).status_code for n in range(12)]
        assert codes[:10] == [401] * 10
        assert codes[-1] in (429, 401)  # a new minute may have begun
        if codes[-1] == 429:
            refused = httpx.post(f"{url}/login", data={"token": TOKEN})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_header_of_a_proxy_gives_no_other_address() -> None:
    with serving(FakeModels(), token=TOKEN) as url:
        codes = []
        for number in range(25):  # a new minute may begin once
            forged = {"X-Forwarded-For": f"9.9.9.{number}", "Forwarded": f"for=9.9.9.{number}", "X-Real-IP": "9.9.9.9"}
            codes.append(httpx.post(f"{url}/login", data={"token": f"wrong{number}"}, headers=forged).status_code)
        assert 429 in codes


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, "/login", "/v1/models", "/static/app.js", "/"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_a_foreign_page_gets_nothing_from_any_route(locked: str, url: str, path: str, headers: dict[str, str]) -> None:
    for site in (locked, url):
        for method in ("GET", "POST"):
            answer = httpx.request(method, site + path, headers={**headers, "Authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_own_page_and_links_to_it_are_answered(url: str) -> None:
    own = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
    assert post(url, headers=own).status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(url, headers=link).status_code == 200
    assert post(url, headers=link).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs a token\nFor example: BLOOMERY_TOKEN=\w{{32}} .* --host {host}"):
        Server(FakeModels(), host, 0)


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "with spaces in its middle", "ä" * 20, "x" * 20 + "\n"])
def test_a_token_that_is_short_or_fits_no_header_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"--token: the token has \d+ characters; it needs at least 16"):
        Server(FakeModels(), "127.0.0.1", 0, token)


def test_health_answers_while_many_prompts_are_refused(url: str) -> None:
    with ThreadPoolExecutor(4) as clients:
        refused = [clients.submit(post, url, "x" * (LIMIT + 1)) for _ in range(12)]
        slowest = 0.0
        while not all(answer.done() for answer in refused):
            began = time.monotonic()
            assert httpx.get(f"{url}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2
    assert {answer.result().status_code for answer in refused} == {413}
