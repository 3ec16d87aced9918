"""
Models behind HTTP: what the `openai` client speaks, and the page to talk to them.

    GET  /                      the page, with /static/*
    GET  /v1/models             every model of every run folder
    GET  /v1/models/NAME        one of them; a name may hold slashes, as they are or as %2F
    POST /v1/chat/completions   an answer, whole or streamed as server-sent events
    GET  /health                {"status": "ok"}

A client that hangs up ends its answer after the token that is being made. On loopback only requests to a loopback name
are answered, because a foreign page may point its own name at 127.0.0.1 (DNS rebinding); no CORS header is ever sent.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bloomery.core.errors import BloomeryError, ConfigError, DataError
from bloomery.core.log import say
from bloomery.serve import wire
from bloomery.serve.answerer import ModelInfo, Models, Piece
from bloomery.serve.desk import Desk, Job, StoppedError

STATIC = Path(__file__).parent / "static"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
SECONDS_TO_CLOSE = 5

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

log = logging.getLogger("bloomery.serve")


class EventStream(StreamingResponse):
    """Server-sent events that stop their job however they end, also when the client hung up before the first one."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
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


def app(models: Models, hosts: Sequence[str] = (*LOOPBACK_NAMES, "testserver")) -> FastAPI:
    """The HTTP application. `hosts` are the names under which it answers; "*" is any name."""
    desk = Desk(models)
    # FastAPI's own documentation pages load their script from elsewhere.
    api = FastAPI(title="Bloomery", openapi_url=None, docs_url=None, redoc_url=None)
    api.state.desk = desk
    api.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    api.add_middleware(WithHeaders)
    api.add_exception_handler(RequestValidationError, _wrong_body)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(BloomeryError, _failed)
    api.add_exception_handler(Exception, _failed)
    api.mount("/static", StaticFiles(directory=STATIC), name="static")

    @api.get("/")
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse(wire.model_list(await asyncio.to_thread(models.names)))

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        infos = await asyncio.to_thread(models.names)
        found = next((info for info in infos if info.id == name), None)
        return JSONResponse(wire.model_entry(found)) if found else _no_such_model(name, infos)

    @api.post("/v1/chat/completions", response_model=None)
    async def complete(body: wire.ChatRequest, request: Request) -> Response:
        job = await desk.ask(body.model, body.conversation(), body.sampling())
        if job is None:
            return _no_such_model(body.model, await asyncio.to_thread(models.names))
        return await _answer(job, body, request)

    return api


async def _answer(job: Job, body: wire.ChatRequest, request: Request) -> Response:
    """Wait for the first piece, so that what is wrong before it gets its own status, and then for all or for none."""
    reply, pieces = wire.Reply(body.model), job.pieces()
    with ExitStack() as on_error:
        on_error.callback(job.stop)
        async with _stopped_when_alone(request, job):
            first = await anext(pieces)
            reply.prompt_tokens = job.prompt_tokens
            if not body.stream:
                got = [first] + [piece async for piece in pieces]
                reply.completion_tokens = sum(piece.tokens for piece in got)
                finish = got[-1].finish or "length"
                return JSONResponse(reply.whole("".join(piece.text for piece in got), finish))
        on_error.pop_all()
    return EventStream(job, _events(reply, first, pieces, usage=body.wants_usage))


async def _events(
    reply: wire.Reply, first: Piece, rest: AsyncGenerator[Piece, None], *, usage: bool
) -> AsyncIterator[str]:
    """A stream as OpenAI's: the role, the text, why it ended, maybe the usage, and [DONE]; or an error instead."""
    yield wire.event(reply.chunk({"role": "assistant", "content": ""}, usage=usage))
    try:
        async for piece in _chain(first, rest):
            reply.completion_tokens += piece.tokens
            for chunk in reply.chunks(piece, usage=usage):
                yield wire.event(chunk)
    except BloomeryError as error:
        yield wire.event(_error_body(error))
        return
    except Exception as error:
        log.exception("an answer failed")
        yield wire.event(_error_body(error))
        return
    if usage:
        yield wire.event(reply.usage_chunk())
    yield wire.DONE


async def _chain(first: Piece, rest: AsyncGenerator[Piece, None]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


@asynccontextmanager
async def _stopped_when_alone(request: Request, job: Job) -> AsyncIterator[None]:
    """Stop the job if the client hangs up while the block runs. A response that has begun sees to that itself."""

    async def listen() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.stop()

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()


def _no_such_model(name: str, infos: Sequence[ModelInfo]) -> JSONResponse:
    names = ", ".join(info.id for info in infos)
    there = f"There are: {names}." if names else "There are none yet: `bloomery run` makes one."
    body = wire.error_body(
        f"There is no model {name!r}. {there}", kind="invalid_request_error", param="model", code="model_not_found"
    )
    return JSONResponse(body, 404)


def _error_body(error: Exception) -> dict[str, object]:
    if isinstance(error, DataError):
        return wire.error_body(str(error), kind="invalid_request_error", param=error.where or None)
    if isinstance(error, BloomeryError):
        return wire.error_body(str(error), kind="server_error")
    return wire.error_body(f"{type(error).__name__}: {error}\nThis is a bug in Bloomery.", kind="server_error")


async def _failed(_: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, DataError) else 503 if isinstance(error, StoppedError) else 500
    # Clients of OpenAI ask again after a 5xx, and look at this header first: the same again would fail the same.
    return JSONResponse(_error_body(error), status, {"x-should-retry": "false"})


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    why = f"the body cannot be read: {error.__cause__}\n{wire.ACCEPTED}" if error.__cause__ else error.detail
    return JSONResponse(wire.error_body(why, kind="invalid_request_error"), error.status_code, error.headers)


async def _wrong_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [wire.explain(problem, error.body) for problem in error.errors()[:3]]
    message = "; ".join(f"{place}: {what}" if place else what for place, what in found)
    return JSONResponse(wire.error_body(message, kind="invalid_request_error", param=found[0][0] or None), 400)


class Server(uvicorn.Server):
    """The application on a socket that is already open. Raises ConfigError if the address cannot be had."""

    def __init__(self, models: Models, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        address, bound_port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        self.private = ipaddress.ip_address(address).is_loopback
        api = app(models, hosts=(*LOOPBACK_NAMES, host) if self.private else ("*",))
        self._desk: Desk = api.state.desk
        super().__init__(
            uvicorn.Config(
                api,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SECONDS_TO_CLOSE,
            )
        )

    def listen(self) -> None:
        """Answer until Ctrl-C, or until another thread calls `close`."""
        with suppress(KeyboardInterrupt):
            self.run(sockets=[self._socket])

    def close(self) -> None:
        """Cut the answers short, and end `listen`. May be called from any thread."""
        self._desk.close()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._desk.close()
        super().handle_exit(sig, frame)


def serve(models: Models, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until Ctrl-C. Raises ConfigError if the address cannot be had; port 0 takes a free one."""
    server = Server(models, host, port)
    names = [info.id for info in models.names()]
    say(f"Serving {', '.join(names) or 'no model yet'}", "dim")
    say(f"Open {server.url} (OpenAI's API is at {server.url}/v1). Ctrl-C ends it.", "bold")
    if not server.private:
        say("Everyone who can reach this address can use it: there is no password.", "yellow")
    server.listen()


@contextmanager
def serving(models: Models, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve from a thread while the block runs, and yield the address: for tests, notebooks and screenshots."""
    server = Server(models, host, port)
    thread = threading.Thread(target=server.listen, name="server")
    thread.start()
    try:
        yield server.url
    finally:
        server.close()
        thread.join()


def _listen(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    if not 0 <= port < 2**16:
        raise ConfigError(f"cannot listen there: {port} is no port", where=where, cure="Ports go from 0 to 65535.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"Choose another port: bloomery serve --port {port + 1}"
            raise ConfigError("another program listens there", where=where, cure=cure) from None
        cure = "--host takes an address of this machine, and ports below 1024 need rights."
        raise ConfigError(f"cannot listen there: {error.strerror or error}", where=where, cure=cure) from None
