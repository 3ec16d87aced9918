"""
Queue requests, with one worker thread per model.

Generating an answer keeps a CPU busy and blocks, so it happens in a thread. A model always has the same thread. So
requests to a model come one after the other, and torch's per-thread settings stay as they were set. When too many
requests wait, the next request is refused.
"""

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import BloomeryError, RunError
from bloomery.serve.chat_model import Models, TextChunk

MAX_REQUESTS = 64
"""That are answered or wait, of all models."""
MAX_UNREAD = 4096
"""Pieces of an answer that a client has not read. More of them end the answer."""


class BusyError(RunError):
    """Too many requests wait already."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(f"{MAX_REQUESTS} requests wait already", hint=f"Ask again in {retry_after} seconds.")


class StoppedError(RunError):
    """An answer that ended before its end, because the client hung up or the server closes."""


class GenerationRequest:
    """One answer on its way from its model's thread to the event loop. Made and used in the event loop."""

    def __init__(self, closing_down: threading.Event) -> None:
        self.prompt_tokens = 0
        """Known when the first piece is there."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[TextChunk | None] = asyncio.Queue()
        self._stop, self._closing_down = threading.Event(), closing_down
        self._work_done: Future[None]
        self.future: asyncio.Future[None]
        self.seconds = 0.0
        """That the model worked on it; waiting is not counted."""

    def start(
        self,
        thread: ThreadPoolExecutor,
        models: Models,
        name: str,
        messages: Sequence[Message],
        sampling: SamplingConfig,
    ) -> None:
        """Get in line for the model's thread."""
        self._work_done = thread.submit(self._timed, models, name, messages, sampling)
        self.future = asyncio.wrap_future(self._work_done)
        self.future.add_done_callback(self._finished)

    def stop(self) -> None:
        """End the work at the next token, or leave the line. Does nothing once it has ended."""
        self._stop.set()
        self._work_done.cancel()

    async def pieces(self) -> AsyncGenerator[TextChunk, None]:
        """Yield each piece once it is generated. Raises the model's error, and StoppedError for an answer cut short."""
        while (piece := await self._queue.get()) is not None:
            yield piece
            if piece.finish:
                return
        if not self.future.cancelled():
            self.future.result()
        assert self._ended(), "an answer ended without a finish"
        raise StoppedError("the answer was stopped", hint="The server is closing. Start it again and ask again.")

    def _timed(self, models: Models, name: str, messages: Sequence[Message], sampling: SamplingConfig) -> None:
        began = time.monotonic()
        try:
            self._work(models, name, messages, sampling)
        finally:
            self.seconds = time.monotonic() - began

    def _work(self, models: Models, name: str, messages: Sequence[Message], sampling: SamplingConfig) -> None:
        if self._ended():
            return
        try:
            answerer = models.get(name)
        except BloomeryError as error:  # a DataError would read as if the request were wrong, and not the model's files
            what = f"the model {name!r} cannot be loaded: {error.what}"
            raise RunError(what, where=error.where, hint=error.hint) from error
        answer = answerer.answer(messages, sampling)
        self.prompt_tokens = answer.prompt_tokens
        with closing(answer.pieces):
            for piece in answer.pieces:
                if self._queue.qsize() > MAX_UNREAD:
                    self._stop.set()
                if self._ended():
                    return
                self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._closing_down.is_set()

    def _finished(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            future.exception()  # Looked at here, asyncio does not report it again for an answer that nobody awaits.
        self._queue.put_nowait(None)


class RequestQueue:
    """Takes requests, and gives each to the one thread of its model."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._closing_down = threading.Event()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._jobs: set[asyncio.Future[None]] = set()
        self._mean_seconds = 1.0
        """Of the last answers."""

    def check_room(self) -> None:
        """Raise BusyError where the line is full."""
        if len(self._jobs) >= MAX_REQUESTS:
            raise BusyError(self._retry_after())

    async def ask(self, name: str, messages: Sequence[Message], sampling: SamplingConfig) -> GenerationRequest | None:
        """A job that waits in line, or None if there is no such model. Raises BusyError where the line is full."""
        infos = await asyncio.to_thread(self._models.names)
        if name not in {info.id for info in infos}:
            return None
        self.check_room()
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=f"model {name}")
        job = GenerationRequest(self._closing_down)
        job.start(self._threads[name], self._models, name, messages, sampling)
        self._jobs.add(job.future)
        job.future.add_done_callback(lambda future: self._count(job, future))
        return job

    def _count(self, job: GenerationRequest, future: asyncio.Future[None]) -> None:
        self._jobs.discard(future)
        if job.seconds:
            self._mean_seconds += (job.seconds - self._mean_seconds) / 8

    def _retry_after(self) -> int:
        """Seconds in which half of those who wait now are answered. Clients of OpenAI wait 60 at most."""
        return min(60, math.ceil(self._mean_seconds * len(self._jobs) / 2))

    def close(self) -> None:
        """End all answers at their next token."""
        self._closing_down.set()
