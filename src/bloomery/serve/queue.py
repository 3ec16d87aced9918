"""
Takes requests, prepares each in a thread of its model, and hands it to the model's scheduler.

Loading a model, rendering a conversation and compiling a form take a while and block, so they happen in a thread. The
scheduler computes the requests of a model together. Their tokens come to the event loop, which makes text of them.
When too many requests are there, the next one is refused.

`ServerMetrics` counts what was asked and answered, in the text format of Prometheus.
"""

import asyncio
import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from bloomery.core.errors import BloomeryError, RunError
from bloomery.serve.chat_model import Answerer, Asked, Models, NoRoomError, RunningAnswer, StoppedError, TextChunk

MAX_REQUESTS = 64
"""That are answered or wait, of all models."""
MAX_ALL_SEQUENCES = 256
"""Answers to all of them: a request may ask for several."""
MAX_UNREAD = 4096
"""Tokens of an answer that a client has not read. More of them end the answer."""
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the parts of a histogram, in seconds."""

WorkResult = TypeVar("WorkResult")


class BusyError(RunError):
    """Too many requests wait already."""

    def __init__(self, count: int, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(f"{count} requests are already waiting", hint=f"Try again in {retry_after} seconds.")


class GenerationRequest:
    """One request on its way from its model to the event loop. Made and used in the event loop."""

    def __init__(self, name: str, sequences: int, ended: Callable[["GenerationRequest"], None]) -> None:
        self.name, self.sequences = name, sequences
        self.answer: RunningAnswer | None = None
        """Known when the first piece is there."""
        self.began = time.monotonic()
        self.first_seconds: float | None = None
        """Until the first piece was there."""
        self.tokens = 0
        self.outcome = "stopped"
        """How it ended: the finish of its last piece, `error`, or `stopped`."""
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self._unread, self._stopped, self._ended = 0, threading.Event(), ended
        self._prepared: asyncio.Future[None]

    def start(self, thread: ThreadPoolExecutor, models: Models, asked: Asked) -> None:
        """Get in line for the model's thread."""
        self._work = thread.submit(self._prepare, models, asked)
        self._prepared = asyncio.wrap_future(self._work)
        self._prepared.add_done_callback(lambda future: future.cancelled() or future.exception())

    def stop(self) -> None:
        """End the work at the next token, or leave the line. Does nothing once it has ended."""
        self._stopped.set()
        self._work.cancel()
        if self.answer is not None:
            self.answer.cancel()
        self._end()

    async def pieces(self) -> AsyncGenerator[TextChunk, None]:
        """Yield each piece once it is generated. Raises the model's error, and StoppedError for an answer cut short."""
        try:
            await asyncio.wait([self._prepared])
            if self._prepared.cancelled():
                raise StoppedError
            self._prepared.result()
            assert self.answer is not None
            while not self.answer.done:
                await self._changed.wait()
                self._changed.clear()
                self._unread = 0
                for piece in self.answer.take():
                    if self.first_seconds is None:
                        self.first_seconds = time.monotonic() - self.began
                    self.tokens += piece.tokens
                    self.outcome = piece.finish or self.outcome
                    yield piece
        except StoppedError:
            raise
        except Exception:
            self.outcome = "error"
            raise
        finally:
            if self.answer is not None and not self.answer.done:
                self.answer.cancel()  # also the others, where one of several failed
            self._end()

    def _prepare(self, models: Models, asked: Asked) -> None:
        if self._stopped.is_set():
            raise StoppedError
        asked = replace(asked, is_stopped=self._stopped.is_set)
        answer = loaded(models, self.name).begin(asked, self._notify)
        self.answer = answer
        if self._stopped.is_set():
            answer.cancel()

    def _notify(self) -> None:
        """There are pieces to take. Called from any thread."""
        self._unread += 1
        if self._unread > MAX_UNREAD * self.sequences and self.answer is not None:
            self.answer.cancel()
        with suppress(RuntimeError):  # the server has closed, and nobody waits
            self._loop.call_soon_threadsafe(self._changed.set)

    def _end(self) -> None:
        self._ended(self)


def loaded(models: Models, name: str) -> Answerer:
    """A model. Raises RunError where it cannot be loaded: a DataError would read as if the request were wrong."""
    try:
        return models.get(name)
    except BloomeryError as error:
        what = f"the model {name!r} cannot be loaded: {error.what}"
        kind = NoRoomError if isinstance(error, NoRoomError) else RunError
        raise kind(what, where=error.where, hint=error.hint) from error


class RequestQueue:
    """Takes requests, and prepares each in the one thread of its model. Used in the event loop."""

    def __init__(self, models: Models) -> None:
        self._models, self.metrics = models, ServerMetrics()
        self.is_closing = False
        """Whether answers are cut short."""
        self._threads: dict[tuple[str, str], ThreadPoolExecutor] = {}
        self._jobs: set[GenerationRequest] = set()
        self._works = 0
        self._mean_seconds = 1.0
        """Of the last answers."""

    def check_room(self, sequences: int = 1) -> None:
        """Raise BusyError where the line is full."""
        count = len(self._jobs) + self._works
        if count >= MAX_REQUESTS or sum(job.sequences for job in self._jobs) + sequences > MAX_ALL_SEQUENCES:
            self.metrics.count("bloomery_refused_requests_total")
            raise BusyError(count, self._retry_after(count))

    async def ask(self, name: str, asked: Asked) -> GenerationRequest | None:
        """A request that waits in line, or None if there is no such model. Raises BusyError where the line is full."""
        if not await self._is_known(name):
            return None
        self.check_room(asked.sequences)
        job = GenerationRequest(name, asked.sequences, self._end)
        job.start(self._thread(name, "model"), self._models, asked)
        self._jobs.add(job)
        if self.is_closing:
            job.stop()
        return job

    async def use(self, name: str, work: Callable[[Answerer], WorkResult]) -> WorkResult | None:
        """
        The result of some work with a model, in a thread next to the one that prepares answers; None if there is no
        such model. Raises BusyError where the line is full.
        """
        if not await self._is_known(name):
            return None
        self.check_room()
        thread = self._thread(name, "work with")
        self._works += 1
        try:
            return await asyncio.wrap_future(thread.submit(lambda: work(loaded(self._models, name))))
        finally:
            self._works -= 1

    async def _is_known(self, name: str) -> bool:
        infos = await asyncio.to_thread(self._models.names)
        return name in {info.id for info in infos}

    def _thread(self, name: str, what: str) -> ThreadPoolExecutor:
        if (name, what) not in self._threads:
            self._threads[name, what] = ThreadPoolExecutor(1, thread_name_prefix=f"{what} {name}")
        return self._threads[name, what]

    def _end(self, job: GenerationRequest) -> None:
        if job not in self._jobs:
            return
        self._jobs.discard(job)
        seconds = time.monotonic() - job.began
        if job.tokens:
            self._mean_seconds += (seconds - self._mean_seconds) / 8
        metrics, model = self.metrics, {"model": job.name}
        metrics.count("bloomery_requests_total", {**model, "outcome": job.outcome})
        metrics.count("bloomery_generated_tokens_total", model, job.tokens)
        if job.answer is not None:
            metrics.count("bloomery_prompt_tokens_total", model, job.answer.prompt_tokens)
            metrics.count("bloomery_cached_prompt_tokens_total", model, job.answer.cached_tokens)
        metrics.measure("bloomery_request_seconds", model, seconds)
        if job.first_seconds is not None:
            metrics.measure("bloomery_first_token_seconds", model, job.first_seconds)

    def _retry_after(self, count: int) -> int:
        """Seconds in which half of so many requests are answered. Clients of OpenAI wait 60 at most."""
        return min(60, math.ceil(self._mean_seconds * max(1, count) / 2))

    @property
    def is_busy(self) -> bool:
        """Whether answers wait or are made."""
        return bool(self._jobs)

    def close(self) -> None:
        """End all answers at their next token. May be called from any thread."""
        self.is_closing = True
        for job in list(self._jobs):
            job._stopped.set()
            if job.answer is not None:
                job.answer.cancel()

    def report(self) -> str:
        """All metrics, in the text format of Prometheus."""
        gauges = {
            "bloomery_requests_in_progress": len(self._jobs) + self._works,
            "bloomery_sequences_in_progress": sum(job.sequences for job in self._jobs),
        }
        return self.metrics.text(gauges)


HELP = {
    "bloomery_requests_total": "Requests for answers that have ended, by model and outcome.",
    "bloomery_refused_requests_total": "Requests that were refused with status 429 because too many were there.",
    "bloomery_prompt_tokens_total": "Tokens of prompts.",
    "bloomery_cached_prompt_tokens_total": "Tokens of prompts whose keys and values were there.",
    "bloomery_generated_tokens_total": "Tokens of answers.",
    "bloomery_request_seconds": "Seconds from a request to its last token.",
    "bloomery_first_token_seconds": "Seconds from a request to its first token.",
    "bloomery_requests_in_progress": "Requests that wait or are answered.",
    "bloomery_sequences_in_progress": "Answers that wait or are made; a request may ask for several.",
}


class ServerMetrics:
    """Counters and histograms by name and labels. Labels are names of models that exist, so their number is bounded."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in HELP if name.endswith("_total")}
        self._histograms: dict[str, dict[str, tuple[list[int], float]]] = {
            name: {} for name in HELP if name.endswith("_seconds")
        }

    def count(self, name: str, labels: Mapping[str, str] | None = None, by: int = 1) -> None:
        self._counters[name][_labels(labels or {})] += by

    def measure(self, name: str, labels: Mapping[str, str], seconds: float) -> None:
        counts, total = self._histograms[name].get(_labels(labels), ([0] * (len(BUCKETS) + 1), 0.0))
        counts[bisect_left(BUCKETS, seconds)] += 1
        self._histograms[name][_labels(labels)] = counts, total + seconds

    def text(self, gauges: Mapping[str, int]) -> str:
        """https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [*_head(name, "gauge"), f"{name} {value}"]
        for name, counter in self._counters.items():
            lines += [*_head(name, "counter"), *(f"{name}{_braced(one)} {value}" for one, value in counter.items())]
        for name, histograms in self._histograms.items():
            lines += _head(name, "histogram")
            for labels, (counts, total) in histograms.items():
                below = 0
                for end, count in zip((*BUCKETS, math.inf), counts, strict=True):
                    below += count
                    bound = "+Inf" if math.isinf(end) else f"{end:g}"
                    both = ",".join(filter(None, (labels, f'le="{bound}"')))
                    lines.append(f"{name}_bucket{_braced(both)} {below}")
                lines += [f"{name}_sum{_braced(labels)} {total}", f"{name}_count{_braced(labels)} {below}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    value = value.encode("utf-8", "backslashreplace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
