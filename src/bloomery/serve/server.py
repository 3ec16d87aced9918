"""
The HTTP server: OpenAI's API for models, and the chat page.

    GET  /                      the page, with /static/*
    GET  /v1/models             every model of every run folder
    GET  /v1/models/NAME        one of them; a name may hold slashes, as they are or as %2F
    POST /v1/chat/completions   an answer, whole or streamed as server-sent events
    POST /v1/completions        the continuation of a text
    POST /v1/responses          an answer in the newer format; nothing is kept
    POST /v1/embeddings         the mean of the last hidden states of a text
    POST /tokenize              token IDs of a text or a conversation; /detokenize, /apply-template
    POST /v1/responses/input_tokens   their number
    GET  /health                {"status": "ok"}, or 503 while the first model is loaded
    GET  /metrics               counters and times, for Prometheus
    POST /login                 where there is a token: takes it from the form, and gives a cookie

A client that hangs up ends its answer after the token that is being made. Where there is a token, nothing but /health
and /login answers without it. On loopback only requests to a loopback name
are answered, because a foreign page may point its own name at 127.0.0.1 (DNS rebinding); no CORS header is ever sent.
"""

import asyncio
import errno
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.core.errors import BloomeryError, ConfigError, DataError, shorten
from bloomery.core.log import info
from bloomery.serve import openai_api, replies
from bloomery.serve.chat_model import (
    Answerer,
    Asked,
    ModelInfo,
    Models,
    NoRoomError,
    StoppedError,
    TextAnswerer,
    TextChunk,
)
from bloomery.serve.guard import Connection, RequestGuard, checked_token, proposal
from bloomery.serve.queue import BusyError, GenerationRequest, RequestQueue
from bloomery.tokenizer.chat_template import TooLongError

STATIC = Path(__file__).parent / "static"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
SECONDS_TO_END, SECONDS_TO_CLOSE = 20, 5
"""After a signal: for the answers that are being made, and then to tell the clients of those cut short."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with "no-referrer" the form of /login would have no origin
    "Cache-Control": "no-cache",
}

IN_LOG = "The log of the server says where, and how to fix it."
_FOLDERS = re.compile(r"""(?<![\w.])(?:~|[A-Za-z]:)?[/\\](?:[^/\\\n'"`]*[/\\])*(?=[^/\\\n'"`\s])""")
"""Of an absolute path, all but its last part. Folders may have spaces in their names."""

log = logging.getLogger("bloomery.serve")

Wire = TypeVar("Wire", bound=openai_api.WireRequest)
Checked = TypeVar("Checked")


class EventStream(StreamingResponse):
    """Server-sent events that stop their job however they end, also when the client hung up before the first one."""

    media_type = "text/event-stream"

    def __init__(self, job: GenerationRequest, events: AsyncIterator[str]) -> None:
        super().__init__(events)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.stop()


class WithHeaders:
    """Puts HEADERS on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def app(models: Models, hosts: Sequence[str], token: str | None = None) -> FastAPI:
    """The HTTP application. `hosts` are the names under which it answers; "*" is any name."""

    async def context() -> int:
        return max((known.context for known in await asyncio.to_thread(models.names)), default=0)

    desk = RequestQueue(models)
    # FastAPI's own documentation pages load their script from elsewhere.
    api = FastAPI(title="Bloomery", openapi_url=None, docs_url=None, redoc_url=None)
    api.state.desk = desk
    api.add_middleware(RequestGuard, context=context, token=token)
    api.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    api.add_middleware(WithHeaders)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(BloomeryError, _failed)
    api.add_exception_handler(Exception, _failed)
    api.mount("/static", StaticFiles(directory=STATIC), name="static")

    @api.get("/")
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @api.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "loading"}, 503) if models.is_loading else JSONResponse({"status": "ok"})

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(desk.report(), media_type="text/plain; version=0.0.4")

    @api.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse(replies.model_list(await asyncio.to_thread(models.names)))

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        infos = await asyncio.to_thread(models.names)
        model_info = next((known for known in infos if known.id == name), None)
        return JSONResponse(replies.model_entry(model_info)) if model_info else _no_such_model(name, infos)

    for getter in api.routes:
        if isinstance(getter, APIRoute) and getter.methods:
            getter.methods.add("HEAD")
    routes = _Routes(models, desk)
    for path, route in routes.by_path().items():
        api.add_api_route(path, route, methods=["POST"], response_model=None)
    return api


class _Routes:
    """What is done with texts and conversations."""

    def __init__(self, models: Models, desk: RequestQueue) -> None:
        self._models, self._desk, self._one_at_a_time = models, desk, asyncio.Lock()

    def by_path(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Each is a POST, and guard.BODIES has its path."""
        return {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/v1/responses": self.respond,
            "/v1/responses/input_tokens": self.count_tokens,
            "/v1/embeddings": self.embed,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/apply-template": self.apply_template,
        }

    async def read(self, request: Request, kind: type[Wire], check: Callable[[Wire], Checked]) -> tuple[Wire, Checked]:
        """The body of a request, and what `check` makes of it, in a thread."""
        self._desk.check_room()
        data, sent_as = await request.body(), request.headers.get("content-type", "")

        def checked() -> tuple[Wire, Checked]:
            body = openai_api.parsed(kind, data, sent_as)
            return body, check(body)

        async with self._one_at_a_time:
            return await asyncio.to_thread(checked)

    async def answer(
        self, request: Request, asked: Asked, reply: replies.Reply, name: str, *, stream: bool
    ) -> Response:
        job = await self._desk.ask(name, asked)
        if job is None:
            return _no_such_model(name, await asyncio.to_thread(self._models.names))
        return await _answer(job, reply, request, stream=stream)

    async def use(
        self,
        name: str,
        work: Callable[[TextAnswerer], dict[str, Any]],
        request: Request,
        gone: threading.Event | None = None,
    ) -> Response:
        """The result of some work with a model as JSON. `gone` is set when the client hangs up."""
        gone = gone or threading.Event()

        def with_model(model: Answerer) -> dict[str, Any]:
            assert isinstance(model, TextAnswerer)
            check_there(gone)
            return work(model)

        async with _told_when_alone(request, gone.set):
            result = await self._desk.use(name, with_model)
        if result is None:
            return _no_such_model(name, await asyncio.to_thread(self._models.names))
        return JSONResponse(result)

    async def chat(self, request: Request) -> Response:
        body, asked = await self.read(request, openai_api.ChatRequest, lambda body: body.asked())
        reply = replies.ChatReply(body.model, body.wants_usage, choices=asked.choices)
        return await self.answer(request, asked, reply, body.model, stream=bool(body.stream))

    async def complete(self, request: Request) -> Response:
        body, asked = await self.read(request, openai_api.CompletionRequest, lambda body: body.asked())
        scored = body.logprobs is not None
        reply = replies.CompletionReply(
            body.model, body.wants_usage, kept=body.n or 1, asked=asked.choices, scored=scored
        )
        return await self.answer(request, asked, reply, body.model, stream=bool(body.stream))

    async def respond(self, request: Request) -> Response:
        body, asked = await self.read(request, openai_api.ResponsesRequest, lambda body: body.asked())
        reply = replies.ResponsesReply(body.model, settings=body.settings())
        with openai_api.response_names():
            return await self.answer(request, asked, reply, body.model, stream=bool(body.stream))

    async def embed(self, request: Request) -> Response:
        body, inputs = await self.read(request, openai_api.EmbeddingRequest, lambda body: body.inputs())

        gone = threading.Event()

        def work(model: TextAnswerer) -> dict[str, Any]:
            ids, vectors = [model.text_ids(text, "input") for text in inputs], []
            for each in ids:
                check_there(gone)
                vectors.append(model.embedding(each))
            as_base64 = body.encoding_format == "base64"
            return replies.embedding_list(body.model, vectors, sum(map(len, ids)), as_base64=as_base64)

        return await self.use(body.model, work, request, gone)

    async def tokenize(self, request: Request) -> Response:
        body, _ = await self.read(request, openai_api.TokenizeRequest, lambda body: body.text())

        def work(model: TextAnswerer) -> dict[str, Any]:
            return replies.token_list(body, model)

        return await self.use(body.model, work, request)

    async def count_tokens(self, request: Request) -> Response:
        body, asked = await self.read(request, openai_api.ResponsesRequest, lambda body: body.asked())

        def work(model: TextAnswerer) -> dict[str, Any]:
            return {"object": "response.input_tokens", "input_tokens": len(model.written_ids(asked))}

        with openai_api.response_names():
            return await self.use(body.model, work, request)

    async def detokenize(self, request: Request) -> Response:
        body, ids = await self.read(request, openai_api.DetokenizeRequest, lambda body: body.ids())

        def work(model: TextAnswerer) -> dict[str, Any]:
            text = model.shown_text(ids)
            return {"prompt": text, "content": text}

        return await self.use(body.model, work, request)

    async def apply_template(self, request: Request) -> Response:
        body, asked = await self.read(request, openai_api.ChatRequest, lambda body: body.asked())

        def work(model: TextAnswerer) -> dict[str, Any]:
            return {"prompt": model.shown_text(model.written_ids(asked))}

        return await self.use(body.model, work, request)


async def _answer(job: GenerationRequest, reply: replies.Reply, request: Request, *, stream: bool) -> Response:
    """Wait for the first piece, so that what is wrong before it gets its own status, and then for all or for none."""
    pieces = job.pieces()
    with ExitStack() as on_error:
        on_error.callback(job.stop)
        async with _told_when_alone(request, job.stop):
            first = await anext(pieces)
            assert job.answer is not None
            reply.begin(job.answer)
            if not stream:
                whole = [first] + [piece async for piece in pieces]
                # in a thread: with log-probabilities it may take seconds
                return await asyncio.to_thread(lambda: JSONResponse(reply.whole(whole)))
        on_error.pop_all()
    return EventStream(job, _events(reply, first, pieces))


async def _events(reply: replies.Reply, first: TextChunk, rest: AsyncGenerator[TextChunk, None]) -> AsyncIterator[str]:
    """A stream as OpenAI's, or an error instead of its rest."""
    for event in reply.start():
        yield event
    try:
        async for piece in _chain(first, rest):
            for event in reply.events(piece):
                yield event
    except BloomeryError as error:
        yield replies.event(_error_body(error))
        return
    except Exception as error:
        log.exception("an answer failed")
        yield replies.event(_error_body(error))
        return
    for event in reply.end():
        yield event


async def _chain(first: TextChunk, rest: AsyncGenerator[TextChunk, None]) -> AsyncIterator[TextChunk]:
    yield first
    async for piece in rest:
        yield piece


@asynccontextmanager
async def _told_when_alone(request: Request, tell: Callable[[], None]) -> AsyncIterator[None]:
    """Call `tell` if the client hangs up while the block runs. A response that has begun sees to that itself."""

    async def listen() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tell()

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()


def check_there(gone: threading.Event) -> None:
    """Raise StoppedError where the client has hung up: nobody reads it."""
    if gone.is_set():
        raise StoppedError


def _no_such_model(name: str, infos: Sequence[ModelInfo]) -> JSONResponse:
    names = ", ".join(known.id for known in infos)
    there = f"There are: {names}." if names else "There are none yet: `bloomery run RECIPE` makes one."
    body = replies.error_body(
        f"There is no model {name[: openai_api.SHOWN]!r}. {there}",
        kind="invalid_request_error",
        param="model",
        code="model_not_found",
    )
    return JSONResponse(body, 404)


def _error_body(error: Exception) -> dict[str, object]:
    """What a client gets: the whole error where its request is wrong, else a message without folders and commands."""
    if isinstance(error, DataError):
        code = "context_length_exceeded" if isinstance(error, TooLongError) else None
        return replies.error_body(str(error), kind="invalid_request_error", param=error.where or None, code=code)
    if isinstance(error, BusyError | StoppedError):
        return replies.error_body(str(error), kind="server_error")
    if isinstance(error, BloomeryError):
        _log_once(str(error))
        return replies.error_body(f"{_without_folders(error.what)}\n{IN_LOG}", kind="server_error")
    bug = _without_folders(f"{type(error).__name__}: {error}")
    return replies.error_body(f"{bug}\nThis is a bug in Bloomery.", kind="server_error")


@lru_cache(maxsize=1000)
def _log_once(message: str) -> None:
    """Log an error, and not again for each request that meets it: strangers would fill the log."""
    log.error("%s", message)


def _without_folders(text: str) -> str:
    """A text in which only the last part of each path is left."""
    return _FOLDERS.sub("", text)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, BusyError):
        return JSONResponse(_error_body(error), 429, {"retry-after": str(error.retry_after)})
    status = 400 if isinstance(error, DataError) else 503 if isinstance(error, NoRoomError | StoppedError) else 500
    # Clients of OpenAI ask again after a 5xx, and look at this header first: the same again would fail the same.
    return JSONResponse(_error_body(error), status, {"x-should-retry": "false"})


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(
        replies.error_body(error.detail, kind="invalid_request_error"), error.status_code, error.headers
    )


class Server(uvicorn.Server):
    """
    The application on a socket that is already open. Raises ConfigError if the address cannot be had, or can be
    reached from elsewhere and there is no token.
    """

    def __init__(self, models: Models, host: str, port: int, token: str | None = None) -> None:
        self._socket, private = _listen(host, port, checked_token(token, _command(host, port)))
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        api = app(models, hosts=(*LOOPBACK_NAMES, host) if private else ("*",), token=token)
        self._desk: RequestQueue = api.state.desk
        super().__init__(
            uvicorn.Config(
                api,
                lifespan="off",
                http=Connection,
                proxy_headers=False,  # anyone may send them, and the limit on wrong tokens counts addresses
                ws="none",
                log_level="error",  # a warning for each broken request would let strangers fill a log
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SECONDS_TO_END + SECONDS_TO_CLOSE,
            )
        )

    def listen(self) -> None:
        """
        Answer until Ctrl-C or SIGTERM, or until another thread calls `close`. After a signal, answers that are being
        made have SECONDS_TO_END to end; a second signal cuts them short.
        """
        with suppress(KeyboardInterrupt):
            self.run(sockets=[self._socket])

    def close(self) -> None:
        """Cut the answers short, and end `listen`. May be called from any thread."""
        self._desk.close()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self._desk.is_closing:
            return self._desk.close()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._desk.is_busy and not self._desk.is_closing:
            info(f"Answers that are being made have {SECONDS_TO_END} s to end. Ctrl-C again stops them.", "dim")
        asyncio.get_running_loop().call_later(SECONDS_TO_END, self._desk.close)
        await super().shutdown(sockets)


def serve(models: Models, host: str = "127.0.0.1", port: int = 8000, token: str | None = None) -> None:
    """Serve until Ctrl-C. Raises ConfigError as Server does; port 0 takes a free one."""
    server = Server(models, host, port, token)
    names = [known.id for known in models.names()]
    info(f"Serving {', '.join(names) or 'no model yet'}", "dim")
    info(f"Open {server.url} (OpenAI's API is at {server.url}/v1). Ctrl-C ends it.", "bold")
    server.listen()


@contextmanager
def serving(models: Models, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> Iterator[str]:
    """Serve from a thread while the block runs, and yield the address: for tests, notebooks and screenshots."""
    server = Server(models, host, port, token)
    thread = threading.Thread(target=server.listen, name="server")
    thread.start()
    try:
        yield server.url
    finally:
        server.close()
        thread.join()


def _command(host: str, port: int) -> str:
    return f"bloomery serve --host {host}" + (f" --port {port}" if port != 8000 else "")


def _listen(host: str, port: int, token: str | None) -> tuple[socket.socket, bool]:
    """A socket, and whether only this machine reaches it."""
    where = f"{host}:{port}"
    if not 0 <= port < 2**16:
        raise ConfigError(f"cannot listen there: {port} is not a port", where=where, hint="Use a port from 0 to 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        private = ipaddress.ip_address(address[0]).is_loopback
        if not private and token is None:
            what = f"anyone who can reach {host} could use the models, so this address needs a token"
            raise ConfigError(what, where="--token", hint=f"For example: {proposal(_command(host, port))}")
        return socket.create_server(address[:2], family=family), private
    except UnicodeError as error:  # of IDNA, which has labels of 1 to 63 characters
        hint = "--host takes an address of this machine, for example 127.0.0.1."
        what = f"cannot listen there: {shorten(host)!r} is not a host name ({error.__cause__ or error})"
        raise ConfigError(what, where="--host", hint=hint) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = f"Choose another port: bloomery serve --port {port + 1}"
            raise ConfigError("another program listens there", where=where, hint=hint) from None
        hint = "--host takes an address of this machine, and ports below 1024 need special rights."
        raise ConfigError(f"cannot listen there: {error.strerror or error}", where=where, hint=hint) from None
