"""
Limits on what clients may cost the server, and access control.

    Connection   limits of time and number for connections, around uvicorn's HTTP
    Guard        limits of bytes for bodies; the token; no request of a foreign page

A body is counted as it arrives, and its JSON before it is parsed: a parser needs up to 60 bytes for each byte of `[]`.
"""

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import Any
from urllib.parse import parse_qs

import h11
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bloomery.core.errors import ConfigError
from bloomery.serve.openai_api import ACCEPTED, MAX_DEPTH
from bloomery.serve.replies import error_body

MAX_CONNECTIONS = 512
"""Half of the 1,024 descriptors that a process usually has."""
HEADER_SECONDS, BODY_SECONDS, UNREAD_SECONDS, LINGER_SECONDS = 10.0, 30.0, 30.0, 2.0
"""For all headers, for a whole body, for a client to read what waits for it, and to hear a refusal while it sends."""
KIB, MIB = 2**10, 2**20
MAX_BODY_BYTES, MAX_OTHER_BYTES, MAX_HELD_BYTES = 16 * MIB, 4 * KIB, 64 * MIB
"""Of a text or conversation, of any other body, and of all bodies at once."""
BYTES_PER_TOKEN = 64
"""Of JSON: a token has 4 bytes of text on average, and every byte of it may be written as an escape of 6."""
MAX_SIGNS = 100_000
"""Of the brackets, braces, commas and colons of a body. A message has six of them."""
MIN_TOKEN = 16
"""Characters. 16 random hexadecimal digits take 10^11 years to guess at 3 attempts a second."""
LOGINS_A_MINUTE = 10
"""Failed ones, of one address."""

LOGIN, HEALTH = "/login", "/health"
BODIES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    }
)
"""Routes that take texts and conversations."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_SIGNS = bytes(set(range(256)) - set(b"[]{},:"))
_STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))

FORM = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Bloomery</title>
<h1>Bloomery</h1>
<form method="post" action="/login">
<p><label for="token">Token of this server</label></p>
<p><input id="token" name="token" type="password" autocomplete="current-password"
required autofocus>
<button>Open</button></p>
<p role="alert">{why}</p>
</form>
</html>
"""


class Connection(H11Protocol):
    """A connection that ends when its client is late. Of too many, that ends which has sent no request for longest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._lingers = False
        self.idle_since: float | None = self.loop.time()
        transport.set_write_buffer_limits(high=0)  # whatever waits to be read calls pause_writing
        # asyncio sets it only on sockets that name their protocol; without it every answer takes 40 ms longer.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_request()
        if len(self.connections) > MAX_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one.idle_since is not None]
            min(idle, key=lambda connection: connection.idle_since or 0.0).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        super().data_received(data)
        if self._late is None or self._is_busy():
            self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # A client that still sends reads the refusal only if its connection is not reset under it.
            self._lingers = True
            with contextlib.suppress(OSError):  # the client has left meanwhile
                self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        """Set the time limit for the headers of a request, unless one is being answered."""
        if self._late is not None:
            self._late.cancel()
        self._late, self.idle_since = None, None
        if not self._is_busy():
            self.idle_since = self.loop.time()
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)


class RequestGuard:
    """An application behind limits, and behind a token where there is one."""

    def __init__(self, app: ASGIApp, context: Callable[[], Awaitable[int]], token: str | None = None) -> None:
        """`context` is the largest of the models that are served, in tokens."""
        self._app, self._context = app, context
        self._token = _digest(token) if token else b""
        self._session = hmac.new((token or "").encode(), b"bloomery session", "sha256").hexdigest()
        self._failed: Counter[str] = Counter()
        self._failed_minute = 0
        self._held_bytes = 0
        self._one_at_a_time = asyncio.Lock()
        """Threads that work on bodies share the interpreter with the event loop; two of them would hold it up twice."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, body = Request(scope, receive), bytearray()
        try:
            answer = await self._refusal(request, body)
            if answer is None:
                await self._app(scope, _replay(bytes(body), receive), send)
            else:
                await answer(scope, receive, send)
        finally:
            self._held_bytes -= len(body)

    async def _refusal(self, request: Request, body: bytearray) -> Response | None:
        """An answer that needs no application, or None, and then the body is read."""
        path = request.scope["path"]
        if path != HEALTH and _is_foreign(request):
            return _error(403, "a page from elsewhere sent this request; only pages of this server may.")
        is_login = bool(self._token) and path == LOGIN and request.method == "POST"
        if path != HEALTH and not is_login and not self._is_known(request):
            return self._ask_for_token(request)
        limit = MAX_OTHER_BYTES
        if path in BODIES:
            limit = min(MIB + BYTES_PER_TOKEN * await self._context(), MAX_BODY_BYTES)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                answer = await self._read(request, body, limit)
        except TimeoutError:
            return _error(408, f"the body took longer than {BODY_SECONDS:.0f} seconds.")
        if answer is None and path in BODIES:
            async with self._one_at_a_time:
                answer = await asyncio.to_thread(too_complex, bytes(body))
        return answer or (self._log_in(request, bytes(body)) if is_login else None)

    async def _read(self, request: Request, body: bytearray, limit: int) -> Response | None:
        """Fill `body`, or refuse it at the first byte that is too many."""
        declared = request.headers.get("content-length", "0")
        if {"content-length", "transfer-encoding"} <= set(request.headers):  # proxies may read the other one
            return _error(400, "the body has a Content-Length and a Transfer-Encoding; send one of them.")
        if int(declared[:20]) > limit:
            return _too_large(limit)
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return _error(400, "the body ended too early.")
            body += message.get("body", b"")
            self._held_bytes += len(message.get("body", b""))
            if len(body) > limit:
                return _too_large(limit)
            if self._held_bytes > MAX_HELD_BYTES:
                return _error(429, "the bodies of other requests fill the memory for them.", {"Retry-After": "5"})
            if not message.get("more_body", False):
                return None

    def _is_known(self, request: Request) -> bool:
        if not self._token:
            return True
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        by_header = hmac.compare_digest(_digest(sent.strip()), self._token) and scheme.lower() == "bearer"
        cookie = request.cookies.get(_cookie(request), "")
        return by_header or hmac.compare_digest(_digest(cookie), _digest(self._session))

    def _ask_for_token(self, request: Request, why: str = "") -> Response:
        ask = {"WWW-Authenticate": "Bearer"}
        if request.scope["path"] in ("/", LOGIN):
            return HTMLResponse(FORM.format(why=why), 401, ask)
        return _error(401, 'this server needs its token. Send it as "Authorization: Bearer TOKEN" (api_key).', ask)

    def _log_in(self, request: Request, body: bytes) -> Response:
        address = request.client.host if request.client else ""
        minute = int(asyncio.get_running_loop().time() // 60)
        if minute != self._failed_minute:
            self._failed_minute = minute
            self._failed.clear()
        if self._failed[address] >= LOGINS_A_MINUTE:
            return _error(429, "too many wrong tokens from this address.", {"Retry-After": "60"})
        sent = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not hmac.compare_digest(_digest(sent), self._token):
            self._failed[address] += 1
            return self._ask_for_token(request, "That is not the token.")
        answer = RedirectResponse("/", 303)
        month = 30 * 24 * 3600
        answer.set_cookie(_cookie(request), self._session, max_age=month, httponly=True, samesite="strict")
        return answer


def too_complex(body: bytes) -> Response | None:
    """Refuse JSON with a NUL byte, or whose nesting or number of values would cost a parser much."""
    if b"\0" in body:
        return _error(400, f"the body holds a NUL byte, which JSON in UTF-8 never does. {ACCEPTED}")
    unquoted, strings = _STRING.subn(b"", body, MAX_SIGNS + 1)
    signs = unquoted.translate(None, _NO_SIGNS)
    if max(strings, len(signs)) > MAX_SIGNS:
        return _error(400, f"the JSON has more than {MAX_SIGNS:,} values.")
    deepest = max(accumulate(map(_STEPS.__getitem__, signs.translate(None, b",:"))), default=0)
    if deepest > MAX_DEPTH:
        return _error(400, f"the JSON is nested {deepest:,} deep; {MAX_DEPTH} is allowed.")
    return None


def checked_token(token: str | None, command: str) -> str | None:
    """A token that is fit to be one. Raises ConfigError."""
    if token is None or (len(token) >= MIN_TOKEN and token.isascii() and token.isprintable() and " " not in token):
        return token
    what = f"the token has {len(token)} characters; it needs at least {MIN_TOKEN} of printable ASCII, without spaces"
    raise ConfigError(what, where="--token", hint=f"For example: {proposal(command)}")


def proposal(command: str) -> str:
    """A command line with a token that nobody knows yet; in the environment it is not seen in a list of processes."""
    return f"BLOOMERY_TOKEN={secrets.token_hex(16)} {command}"


def _replay(body: bytes, receive: Receive) -> Receive:
    """What was read, as one message, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def _is_foreign(request: Request) -> bool:
    """Whether a browser sent this for a page of another site. Following a link to the page is allowed."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    follows = request.method in ("GET", "HEAD") and request.headers.get("sec-fetch-mode") == "navigate"
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not follows


def _cookie(request: Request) -> str:
    """Browsers share cookies between the ports of a host."""
    return f"bloomery-{request.scope['server'][1]}"


def _digest(text: str) -> bytes:
    """Of equal length for every text, so that comparing takes the same time."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    retry: dict[str, Any] = {} if status == 429 else {"x-should-retry": "false"}
    body = error_body(message, kind="invalid_request_error", code="invalid_api_key" if status == 401 else None)
    return JSONResponse(body, status, {**retry, **(headers or {})})


def _too_large(limit: int) -> JSONResponse:
    return _error(413, f"the body has more than {limit:,} bytes, which no model here has the context for.")
