"""
Serves many requests with one model at once: requests join and leave between steps, and each gets its tokens as a
stream. One thread computes all steps. The token IDs of a request do not depend on the requests beside it.

V is the number of token IDs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxtyping import Bool, Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import DataError, RunError
from bloomery.generate.engine import Engine
from bloomery.generate.sampling import Sampler

import torch
from torch import Tensor

Finish = Literal["stop", "length", "cancelled"]
"""The model or its constraint ended the answer; there was no room for more; or somebody ended it."""
MAX_TOP_LOGPROBS = 20
MAX_RUNNING, MAX_WAITING = 16, 256
"""Requests that are computed at once, and that wait."""


class Constraint(Protocol):
    """
    What an answer may be: a grammar or a schema. A request has its own. The scheduler's thread calls it, before and
    after each token of the answer.
    """

    def allowed(self) -> Bool[Tensor, " V"]:
        """Which token IDs may come next, on the CPU; stop IDs too, where the answer may end. At least one is True."""
        ...

    def accept(self, id: int) -> None:
        """The token that came. Not called for a stop ID."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing more may come: the answer then ends with "stop", without a stop ID."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it. `top_logprobs` 0 asks for the log-probability of each token alone."""

    ids: Sequence[int]
    sampling: SamplingConfig
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Token:
    """
    A token of an answer. Log-probabilities are those of the model itself: before temperature, penalties, bias and
    constraint. `top` has the likeliest IDs with theirs, the highest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Timings:
    """Seconds that a request waited, that its prompt took, and from its first token to its last."""

    waiting_seconds: float = 0.0
    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0


class Ticket:
    """
    A request on its way. Iterate it for Tokens, which blocks, or call `take` for those that are there. One thread reads
    a ticket; any thread may cancel it. The last token is a stop ID where the model ended its answer by one.
    """

    def __init__(self, request: Request, notify: Callable[[], None] | None) -> None:
        self.request = request
        self.prompt_tokens = len(request.ids)
        self.cached_tokens = 0
        """Of the prompt, whose keys and values were there. Known when the first token is."""
        self.finish_reason: Finish | None = None
        """Known when the last token is."""
        self.timings = Timings()
        self._notify = notify
        self._changed = threading.Condition()
        self._unread: deque[Token] = deque()
        self._ended = self._cancelled = False
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they are decided. Raises the error that ended the request."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unread or self._ended)
            tokens = self.take()
            yield from tokens
            if not tokens and self._ended:
                return

    def take(self) -> list[Token]:
        """The tokens that nobody has read, at once. Raises the error that ended the request, after its last token."""
        with self._changed:
            tokens = list(self._unread)
            self._unread.clear()
            if not tokens and self._error is not None:
                raise self._error
            return tokens

    @property
    def done(self) -> bool:
        """Whether the request has ended, and all its tokens were read."""
        with self._changed:
            return self._ended and not self._unread

    def cancel(self) -> None:
        """End the request before its next token. Does nothing once it has ended."""
        self._cancelled = True

    def _put(self, token: Token) -> None:
        with self._changed:
            self._unread.append(token)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def _end(self, reason: Finish | None, error: Exception | None = None) -> None:
        with self._changed:
            if self._ended:
                return
            self.finish_reason, self._error, self._ended = reason, error, True
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()


@dataclass(eq=False)
class _Sequence:
    """A request that is computed: its text so far, and where its answer may end."""

    ticket: Ticket
    sampler: Sampler
    ids: list[int]
    room: int
    """Tokens that may still come."""
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0


class Scheduler:
    """
    Computes requests with one engine, in a thread of its own, until it is closed. Also a context manager.

    Requests that there is no room for wait in the order of their arrival.
    """

    def __init__(self, engine: Engine, *, max_running: int = MAX_RUNNING, max_waiting: int = MAX_WAITING) -> None:
        self.engine, self.max_running, self.max_waiting = engine, max_running, max_waiting
        self._wake = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket:
        """
        Get a request in line. `notify` is called by the scheduler's thread after each token and at the end; it must
        return at once and raise nothing.

        Raises DataError for a prompt that is empty or fills the context, and for a setting that this model cannot
        take; RunError where too many requests wait, and after `close`.
        """
        self.engine.check(request.ids, request.sampling)
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            what = f"must be at least 0 and at most {MAX_TOP_LOGPROBS}, got {request.top_logprobs}"
            raise DataError(what, where="top_logprobs")
        ticket = Ticket(request, notify)
        room = min(request.sampling.max_tokens, self.engine.context - len(request.ids))
        sequence = _Sequence(ticket, Sampler(request.sampling, request.ids), list(request.ids), room)
        with self._wake:
            if self._closing:
                raise RunError("the model was closed", hint="Start it again.")
            if len(self._waiting) >= self.max_waiting:
                raise RunError(f"{self.max_waiting} requests wait already", hint="Ask again later.")
            if not room:
                ticket._end("length")
                return ticket
            self._waiting.append(sequence)
            self._wake.notify()
        return ticket

    def close(self) -> None:
        """End all requests as cancelled, and the thread. Returns when both have ended."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._waiting)
                if self._closing:
                    for waiting in self._waiting:
                        waiting.ticket._end("cancelled")
                    return
                sequence = self._waiting.popleft()
            try:
                self._answer(sequence)
            except Exception as error:
                sequence.ticket._end(None, error)

    def _answer(self, sequence: _Sequence) -> None:
        ticket, begun = sequence.ticket, time.monotonic()
        ticket.timings.waiting_seconds = begun - sequence.arrived
        rows = self.engine.rows([sequence.ids], [sequence.room])
        logits = rows.begin()
        first = time.monotonic()
        ticket.timings.prompt_seconds = first - begun
        while True:
            if ticket._cancelled or self._closing:
                return ticket._end("cancelled")
            id, reason = self._said(sequence, logits[0])
            ticket.timings.answer_seconds = time.monotonic() - first
            if reason:
                return ticket._end(reason)
            logits = rows.extend([0], [id])

    def _said(self, sequence: _Sequence, logits: Float[Tensor, " V"]) -> tuple[int, Finish | None]:
        """Choose and hand out a sequence's next token, and say whether its answer ends there."""
        request, constraint = sequence.ticket.request, sequence.ticket.request.constraint
        logits = logits.cpu()
        id = sequence.sampler.choose(logits, None if constraint is None else constraint.allowed())
        sequence.ids.append(id)
        sequence.room -= 1
        sequence.ticket._put(_token(id, logits, request.top_logprobs))
        if id in request.stop_ids:
            return id, "stop"
        if constraint is not None:
            constraint.accept(id)
            if constraint.finished:
                return id, "stop"
        return id, None if sequence.room else "length"


def _token(id: int, logits: Float[Tensor, " V"], top: int | None) -> Token:
    if top is None:
        return Token(id)
    chances = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(chances, min(top, len(chances)))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(id, float(chances[id]), pairs)
