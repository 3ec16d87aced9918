"""A server on this machine that speaks both protocols, charges for what it answers, and fails as it is told."""

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = str
"""
429, 500, 529, 401 …, 429cut (the same with a body that ends early), or: cut (an answer that ends early), chunk (of one
sent in chunks), html, half (JSON that ends early), deep (JSON of a thousand lists), numbers (tokens that are none),
silent (no answer), late (one that comes after the client has gone), drip (one that comes a byte at a time).
"""


class ModelServer(ThreadingHTTPServer):
    """`fault(number)` says how the request of this number fails, or "" if it is served."""

    daemon_threads = True

    def __init__(self) -> None:
        self.fault: Callable[[int], Fault] = lambda number: ""
        self.reply: Callable[[list[dict[str, str]]], str] = lambda messages: f"Answer to: {messages[-1]['content']}"
        self.stop = ""
        self.retry_after = ""
        self.late_seconds = 1.0
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.names: list[str] = []
        self.charged = [0, 0]
        """Tokens of all answers that were made, also of those that never arrived."""
        self.answered: Counter[str] = Counter()
        """Answers that arrived whole, by the name of the request."""
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def last_asks(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]

    @contextmanager
    def serving(self) -> Iterator["ModelServer"]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.asked)
            self.asked.append({"path": handler.path, **body})
            self.keys.append(handler.headers["Authorization"] or handler.headers["X-Api-Key"])
            self.names.append(handler.headers["Idempotency-Key"])
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            self._answer(handler, body, number)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
        fault = self.fault(number)
        if fault[:3].isdecimal():
            said = {"type": "error", "error": {"type": "some_error", "message": f"told to say {fault}"}}
            data = json.dumps(said).encode()
            length = len(data) + 9 if fault.endswith("cut") else None
            _send(handler, data, int(fault[:3]), length, retry_after=self.retry_after)
            handler.close_connection = True
            return
        text = self.reply(body["messages"])
        read = sum(len(message["content"].split()) + 4 for message in body["messages"])
        wrote = min(len(text.split()) + 1, body["max_tokens"])
        with self._lock:
            self.charged[0] += read
            self.charged[1] += wrote
        anthropic = handler.path.endswith("/messages")
        data = (_message if anthropic else _completion)(body, text, read, wrote, self.stop, number)
        drawn = (b"-50", b"Infinity", b"1e400", b"null", b'"many"')[number % 5]
        match fault:
            case "":
                with self._lock:
                    self.answered[self.names[number]] += 1
                _send(handler, data)
            case "cut":
                _send(handler, data[: len(data) // 2], length=len(data))
                handler.close_connection = True
            case "half":
                _send(handler, data[: len(data) // 2])
            case "chunk":
                _begin(handler, 200, {"Transfer-Encoding": "chunked"})
                handler.wfile.write(b"%x\r\n%s\r\n40\r\n" % (len(data) // 2, data[: len(data) // 2]))
                handler.close_connection = True
            case "deep":
                _send(handler, b"[" * 99_999)
            case "numbers":
                _send(handler, re.sub(rb'(?<=tokens": )\d+', lambda _: drawn, data))
            case "late":
                time.sleep(self.late_seconds)
                with contextlib.suppress(OSError):
                    _send(handler, data)
            case "drip":
                _begin(handler, 200, {"Content-Length": "1000"})
                with contextlib.suppress(OSError):
                    for _ in range(1000):
                        handler.wfile.write(b" ")
                        time.sleep(0.02)
            case "html":
                _send(handler, b"<html>a proxy</html>")
            case "silent":
                handler.close_connection = True
            case _:
                raise AssertionError(fault)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, ModelServer)
        self.server.take(self)

    def log_message(self, *_: Any) -> None: ...


def _begin(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    handler.protocol_version = "HTTP/1.1" if "Transfer-Encoding" in headers else handler.protocol_version
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()


def _send(
    handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None, retry_after: str = ""
) -> None:
    headers = {"Content-Length": str(len(body) if length is None else length)}
    _begin(handler, status, headers | ({"Retry-After": retry_after} if retry_after else {}))
    handler.wfile.write(body)


def _completion(body: dict[str, Any], text: str, read: int, wrote: int, stop: str, number: int) -> bytes:
    choice = {"index": 0, "finish_reason": stop or "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    found = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": body["model"]}
    return json.dumps(found | {"choices": [choice], "usage": usage}).encode()


def _message(body: dict[str, Any], text: str, read: int, wrote: int, stop: str, number: int) -> bytes:
    found = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"]}
    content = [{"type": "text", "text": text}] if text else []
    usage = {"input_tokens": read, "output_tokens": wrote}
    return json.dumps(
        found | {"content": content, "stop_reason": stop or "end_turn", "stop_sequence": None, "usage": usage}
    ).encode()
