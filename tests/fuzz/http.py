"""Requests: bodies for the application in this process, and bytes for a server on loopback."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hypothesis import strategies as st
from starlette.types import Message

from bloomery.serve.models import ModelRegistry
from bloomery.serve.server import app, serving
from tests.fuzz.mutation import bytes_like, json_like
from tests.fuzz.outcome import RefusedError, Target, WrongError
from tests.weights.made import run

ASK: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "Where is the lamp?"}], "max_tokens": 4}
BODIES: list[Any] = [
    ASK,
    ASK | {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a"], "stream": True},
    ASK | {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *ASK["messages"]]},
    ASK | {"n": 1, "tools": [], "logit_bias": {}, "stream_options": {"include_usage": True}, "stream": True},
    ASK
    | {"n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "response_format": {"type": "json_object"}},
    ASK | {"guided_json": {"type": "array", "items": {"enum": [1, "a"]}}, "truncation": "oldest", "min_p": 0.1},
    ASK | {"guided_regex": "[ab]{1,3}|c", "presence_penalty": 0.5, "no_repeat_ngram": 2, "penalty_window": 9},
    ASK | {"guided_grammar": 'start: "a" b\nb: /x+/', "typical_p": 0.5, "repetition_penalty": 1.1},
]
SECONDS_TO_ANSWER = 3.0


def _shelf(folder: Path) -> ModelRegistry:
    run(folder / "run", "fetch", "pretrain", "finetune")
    return ModelRegistry(folder)


def requests(folder: Path) -> Target:
    api = app(_shelf(folder), hosts=("localhost",))
    loop = asyncio.new_event_loop()
    BODIES[:] = [body | {"model": name} for body in BODIES for name in [api_model(folder)]]

    async def asked(body: bytes) -> tuple[int, bytes]:
        sent: list[Message] = []
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for part in parts:
                return part
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        facts = {"path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "root_path": ""}
        scope = {"type": "http", "method": "POST", "headers": headers, "scheme": "http", "http_version": "1.1", **facts}
        await api({**scope, "asgi": {"version": "3.0"}}, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    def attempt(data: bytes, work: Path) -> None:
        _judged(*loop.run_until_complete(asked(data)))

    return Target(json_like(BODIES), attempt)


def api_model(folder: Path) -> str:
    return ModelRegistry(folder).names()[0].id


def _judged(status: int, body: bytes) -> None:
    shown = body.decode(errors="replace")
    if status >= 500 or '"server_error"' in shown:
        raise WrongError("traceback", f"{status}: {shown[:1500]}", f"{status} {_message(shown)}")
    if status >= 400:
        raise RefusedError(shown)


def _message(shown: str) -> str:
    try:
        message = json.loads(shown.removeprefix("data: "))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = shown
    return str(message)[:60]


def sockets(folder: Path) -> Target:
    """Bytes of requests; afterwards the server is as healthy as before."""
    running = serving(_shelf(folder))  # until this process ends
    address = urlsplit(running.__enter__())
    where = (str(address.hostname), int(address.port or 0))
    ask = json.dumps(ASK | {"model": api_model(folder)}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    examples = [
        head + b"Content-Length: %d\r\n\r\n" % len(ask) + ask,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(ask), ask),
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models/a%2Fb HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /static/../server.py HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]

    def attempt(data: bytes, work: Path) -> None:
        assert running is not None, "what nobody holds is closed"
        answer = _sent(where, data)
        health = _sent(where, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        if b" 200 " not in health:
            raise WrongError("hang", f"/health says {health[:200]!r} after it", "no health")
        status = answer.split(b" ", 2)[1:2]
        if status and status[0].isdigit():
            _judged(int(status[0]), answer)

    return Target(st.one_of(bytes_like(examples), st.binary(max_size=100)), attempt)


def _sent(where: tuple[str, int], data: bytes) -> bytes:
    """What a server answers, as far as it does so in time. A server may hang up before all is sent."""
    pieces = []
    with socket.create_connection(where, SECONDS_TO_ANSWER) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(2**16):
                pieces.append(piece)
        except (TimeoutError, ConnectionError):
            pass
    return b"".join(pieces)
