"""
Where requests wait in line: one thread per model.

Making an answer keeps a processor busy and blocks, so it happens in a thread, always the same one for a model: requests
to it come one after the other, and what torch keeps per thread stays where it was set.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from bloomery.core.errors import DataError, RunError
from bloomery.serve.answerer import Models, Piece, Sampling
from bloomery.tokenizer.chat import Message


class StoppedError(RunError):
    """An answer that ended before its end, because the client hung up or the server closes."""


class Job:
    """One answer on its way from its model's thread to the event loop. Made and used in the event loop."""

    def __init__(self, closing_down: threading.Event) -> None:
        self.prompt_tokens = 0
        """Known when the first piece is there."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._stop, self._closing_down = threading.Event(), closing_down
        self._future: asyncio.Future[None]

    def start(
        self, thread: ThreadPoolExecutor, models: Models, name: str, messages: Sequence[Message], sampling: Sampling
    ) -> None:
        """Get in line for the model's thread."""
        self._future = self._loop.run_in_executor(thread, self._work, models, name, messages, sampling)
        self._future.add_done_callback(self._finished)

    def stop(self) -> None:
        """End the work at the next token, or when its turn comes. Does nothing once it has ended."""
        self._stop.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces as they come. Raises what the model raised, and StoppedError when the answer was cut short."""
        while (piece := await self._queue.get()) is not None:
            yield piece
            if piece.finish:
                return
        self._future.result()
        assert self._ended(), "an answer ended without a finish"
        raise StoppedError("the answer was stopped", cure="The server is closing. Start it again and ask again.")

    def _work(self, models: Models, name: str, messages: Sequence[Message], sampling: Sampling) -> None:
        if self._ended():
            return
        try:
            answerer = models.get(name)
        except DataError as error:  # From here it would read as if the request were wrong, and not the model's files.
            raise RunError(error.what, where=error.where, cure=error.cure) from error
        answer = answerer.answer(messages, sampling)
        self.prompt_tokens = answer.prompt_tokens
        with closing(answer.pieces):
            for piece in answer.pieces:
                if self._ended():
                    return
                self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._closing_down.is_set()

    def _finished(self, future: asyncio.Future[None]) -> None:
        future.exception()  # Looked at here, asyncio does not report it again for an answer that nobody awaits.
        self._queue.put_nowait(None)


class Desk:
    """Takes requests, and gives each to the one thread of its model."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._closing_down = threading.Event()
        self._threads: dict[str, ThreadPoolExecutor] = {}

    async def ask(self, name: str, messages: Sequence[Message], sampling: Sampling) -> Job | None:
        """A job that waits in line, or None if there is no such model."""
        infos = await asyncio.to_thread(self._models.names)
        if name not in {info.id for info in infos}:
            return None
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=f"model {name}")
        job = Job(self._closing_down)
        job.start(self._threads[name], self._models, name, messages, sampling)
        return job

    def close(self) -> None:
        """End all answers at their next token."""
        self._closing_down.set()
