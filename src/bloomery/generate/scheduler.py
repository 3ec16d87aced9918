"""
Serves many requests with one model at once: requests join and leave between steps, and each gets its tokens as a
stream. One thread computes all steps. The token IDs of a request do not depend on the other requests.

V is the number of token IDs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError, ConfigError, DataError, RunError
from bloomery.core.log import size
from bloomery.generate.decoder import PAGE, Decoder, PackedAdapter, PagedText, PagePool, Pages
from bloomery.generate.engine import (
    PROMPT_TOKENS,
    Drafter,
    Engine,
    ModelBatch,
    PackedBatch,
    check_rows,
    compute_format,
)
from bloomery.generate.sampling import TokenSampler
from bloomery.hw.device import find
from bloomery.hw.host import Host, free_bytes

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled"]
"""The model or its constraint ended the answer; there was no room for more; or somebody ended it."""
MAX_TOP_LOGPROBS = 20
PART_TOKENS = 32
"""Of a prompt, that are computed at once while others wait for their next token."""
MAX_RUNNING, MAX_WAITING = 16, 256
OPEN_ANSWER = 256
"""Tokens of an answer whose length nobody sets that are taken at least, if memory and context hold them."""
"""Requests that are computed at once, and that wait."""
CACHE_SHARE = 4
"""Of the free memory, keys and values get one part in so many."""
MAX_REQUESTS = 1024
"""What both may be set to."""


@runtime_checkable
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
    adapter: PackedAdapter | None = None
    """Of the engine's model, for this request."""


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
        self.finish_reason: FinishReason | None = None
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
                token = self._unread.popleft() if self._unread else None
                if token is None and self._error is not None:
                    raise self._error
            if token is None:
                return
            yield token

    def take(self) -> list[Token]:
        """The tokens that nobody has read, at once. Raises the error that ended the request, after its last token."""
        with self._changed:
            tokens = list(self._unread)
            self._unread.clear()
            failed = self._error is not None
            if failed and not tokens:
                assert self._error is not None
                raise self._error
        if failed and self._notify is not None:
            self._notify()  # the error is still to be taken
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

    def _end(self, reason: FinishReason | None, error: Exception | None = None) -> None:
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
    sampler: TokenSampler
    ids: list[int]
    """Of prompt and answer."""
    room: int
    """Tokens that may still come."""
    drafter: Drafter
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    text: PagedText = field(default_factory=PagedText)
    drafts: list[int] = field(default_factory=list)
    """Guesses of the next tokens that are computed in the same step as the last ID."""
    rows: PackedBatch | ModelBatch | None = None

    @property
    def adapter(self) -> PackedAdapter | None:
        return self.ticket.request.adapter

    @property
    def open_tokens(self) -> int:
        """Tokens that are to be computed."""
        return len(self.ids) - self.text.length


Ready = list[tuple[_Sequence, Tensor | Exception]]
"""
Logits of sequences whose next tokens can be chosen: after the last ID, and after each draft. Or the error of a sequence
that was computed alone.
"""


class _PagedSteps:
    """
    Steps of packed weights, each for all sequences at once. A prompt is computed in parts, which are small while others
    wait for their next token. Where pages run out, the newest sequence makes room, and is computed again later: to the
    bit the same.
    """

    open_answers: ClassVar[int] = 1
    """How many answers without a limit, at their longest, the memory holds."""

    def __init__(self, decoder: Decoder, num_ids: int, count: int) -> None:
        self.decoder, self.num_ids, self.pool = decoder, num_ids, PagePool(decoder.config, count, decoder.dtype)
        self.computed_tokens = 0

    def fits(self, sequence: _Sequence, running: Sequence[_Sequence]) -> bool:
        """Whether a sequence can begin next to these, which may have prompts that are not computed yet."""
        promised = sum(Pages.needed(len(one.ids) + 1) - one.text.num_pages for one in running)
        return self.pool.missing(sequence.ids, sequence.adapter) + promised <= self.pool.available

    def needed(self, prompt_tokens: int, room: int) -> int:
        """For how many tokens a sequence takes memory that is computed alone."""
        return prompt_tokens + room

    def begin(self, sequence: _Sequence, running: Sequence[_Sequence]) -> None:
        sequence.text = self.pool.begin(sequence.ids, sequence.adapter)

    def end(self, sequence: _Sequence) -> None:
        self.pool.end(sequence.text, sequence.ids)

    def step(self, running: Sequence[_Sequence]) -> tuple[Ready, list[_Sequence]]:
        """Logits of sequences, and the sequences that made room and wait again. `running` is in order of arrival."""
        parts, left = self._parts(running)
        ids, rows, positions, outputs = list[int](), list[int](), list[int](), list[int]()
        for row, (sequence, count) in enumerate(parts):
            begin, before = sequence.text.length, len(ids)
            ids += sequence.ids[begin : begin + count]
            ids += sequence.drafts
            rows += [row] * count
            positions += range(begin, begin + count)
            if begin + count >= len(sequence.ids):
                outputs += range(before + count - 1 - len(sequence.drafts), before + count)
        most = max(sequence.text.num_pages for sequence, _ in parts)
        of_sequences = [[*one.text.pages, *[0] * (most - one.text.num_pages)] for one, _ in parts]
        pages = torch.tensor(of_sequences, dtype=torch.int32)
        adapters = [sequence.adapter for sequence, _ in parts]
        logits, finite = self.decoder.step(ids, rows, positions, pages, self.pool.memory, outputs, adapters)
        logits = logits[:, : self.num_ids]
        self.computed_tokens += len(ids)
        ready: Ready = []
        for sequence, count in parts:
            if sequence.text.length + count >= len(sequence.ids):
                some, logits = logits[: 1 + len(sequence.drafts)], logits[1 + len(sequence.drafts) :]
                ready.append((sequence, some if finite else _checked(some)))
            else:
                self.pool.advance(sequence.text, sequence.ids, sequence.text.length + count)
        return ready, left

    def advance(self, sequence: _Sequence, length: int) -> None:
        """So many of a sequence's IDs are computed; drafts behind them were wrong."""
        self.pool.advance(sequence.text, sequence.ids, length)

    def _parts(self, running: Sequence[_Sequence]) -> tuple[list[tuple[_Sequence, int]], list[_Sequence]]:
        """How many tokens of each sequence come into the next step, with pages for them."""
        left, parts = list[_Sequence](), list[tuple[_Sequence, int]]()
        others_wait = any(sequence.open_tokens == 1 for sequence in running)
        prompt_tokens = PART_TOKENS if others_wait else PROMPT_TOKENS
        for sequence in running:
            if sequence in left:
                continue
            count, text = min(sequence.open_tokens, prompt_tokens), sequence.text
            if sequence.open_tokens == 1:
                sequence.drafts = sequence.drafter.guess(sequence.ids, sequence.room - 1)
                if not self.pool.grow(text, text.length + 1 + len(sequence.drafts)):
                    sequence.drafts = []
                count = 1 + len(sequence.drafts)
            else:
                prompt_tokens -= count
            while sequence not in left and not self.pool.grow(text, text.length + count):
                newest = next(other for other in reversed(running) if other not in left)
                self.end(newest)
                left.append(newest)
            if sequence not in left and count:
                parts.append((sequence, count))
        return parts, left


class _ModelSteps:
    """
    Steps of the model itself, for one sequence after the other; prompts are computed whole, and not shared. Memory for
    `count` pages holds the keys and values of running sequences and of idle steps, and a second copy of a prompt while
    it is computed.
    """

    open_answers: ClassVar[int] = 4
    """How many answers without a limit, at their longest, the memory holds: it is taken when they begin."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine, self.tokens = engine, count * PAGE
        self.computed_tokens = 0

    def needed(self, prompt_tokens: int, room: int) -> int:
        """For how many tokens a sequence takes memory that is computed alone."""
        return self.engine.kept_tokens(prompt_tokens + room) + prompt_tokens

    def _kept(self, sequence: _Sequence) -> int:
        if isinstance(sequence.rows, ModelBatch):
            return sequence.rows.step.cache.capacity  # a step that was idle may be larger than it has to be
        return self.engine.kept_tokens(len(sequence.ids) + sequence.room)

    def _held(self, sequences: Sequence[_Sequence]) -> int:
        """For how many tokens sequences take memory while the longest open prompt is computed."""
        prompts = (len(one.ids) for one in sequences if not one.text.length)
        return sum(map(self._kept, sequences)) + max(prompts, default=0)

    def fits(self, sequence: _Sequence, running: Sequence[_Sequence]) -> bool:
        return self._held([sequence, *running]) <= self.tokens

    def begin(self, sequence: _Sequence, running: Sequence[_Sequence]) -> None:
        others = self._held([sequence, *running]) - self._kept(sequence)
        self.engine.give_up_idle(len(sequence.ids) + sequence.room, self.tokens - others)
        sequence.rows = self.engine.rows([sequence.ids], [sequence.room])

    def end(self, sequence: _Sequence) -> None:
        sequence.rows = None

    def advance(self, sequence: _Sequence, length: int) -> None:
        sequence.text.length = length

    def step(self, running: Sequence[_Sequence]) -> tuple[Ready, list[_Sequence]]:
        ready: Ready = []
        for sequence in running:
            assert sequence.rows is not None
            self.computed_tokens += sequence.open_tokens
            begins = not sequence.text.length
            try:
                logits = sequence.rows.begin() if begins else sequence.rows.extend([0], sequence.ids[-1:])
            except Exception as error:
                ready.append((sequence, error))
                continue
            ready.append((sequence, logits.cpu()))
        return ready, []


class Scheduler:
    """
    Computes requests with one engine, in a thread of its own, until it is closed. Also a context manager.

    With packed weights, each step computes the next tokens of all running requests together, whatever their adapters.
    Requests of an adapter whose prompts begin alike share the keys and values of that beginning. Without packed weights
    (on GPUs, and in models with differential attention) the running requests take turns. Requests that there is no room
    for wait in the order of their arrival.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        memory_bytes: int | None = None,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        draft_tokens: int = 0,
    ) -> None:
        """
        `memory_bytes` bounds keys and values, those of idle steps and the second copy of a prompt included. By default
        they get a quarter of the free memory, and no more than `max_running` texts as long as the context take. With
        packed weights, up to `draft_tokens` of each answer are guessed at once (see Drafter), which changes no token.
        Raises ConfigError for numbers out of their limits, and where the memory holds no page of 32 tokens.
        """
        for name, value in (("max_running", max_running), ("max_waiting", max_waiting)):
            if not 1 <= value <= MAX_REQUESTS:
                raise ConfigError(f"must be at least 1 and at most {MAX_REQUESTS:,}, got {value}", where=name)
        Drafter(draft_tokens)  # which checks the number
        self.engine, self.max_running, self.max_waiting = engine, max_running, max_waiting
        self.draft_tokens = draft_tokens if engine.decoder else 0
        dtype = engine.decoder.dtype if engine.decoder else compute_format(engine.model)
        page_bytes = PagePool.page_bytes(engine.model.config, dtype)
        if memory_bytes is None:
            pages = max_running * Pages.needed(engine.kept_tokens(engine.context))
            pages += 0 if engine.decoder else Pages.needed(engine.context)  # the second copy of a prompt
            free = free_device_bytes(engine.model.embed.weight.device)
            memory_bytes = min(pages * page_bytes, free // CACHE_SHARE)
        if memory_bytes < page_bytes:
            what = f"{size(memory_bytes)} of memory cannot hold keys and values of 32 tokens ({size(page_bytes)})"
            raise ConfigError(what, where="memory_bytes", hint=f"Set at least {size(page_bytes)}.")
        self.num_pages = memory_bytes // page_bytes
        self._steps = (
            _ModelSteps(engine, self.num_pages)
            if engine.decoder is None
            else _PagedSteps(engine.decoder, engine.num_ids, self.num_pages)
        )
        self._wake = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def computed_tokens(self) -> int:
        """That went through the model so far: of prompts and of answers."""
        return self._steps.computed_tokens

    @property
    def is_busy(self) -> bool:
        """Whether requests are computed or wait."""
        return bool(self._waiting or self._running)

    def longest_answer(self, prompt_tokens: int) -> int:
        """
        How many tokens may follow a prompt, by the context and by the memory for one request, or for `open_answers` of
        them if these are at least OPEN_ANSWER long.
        """
        held = self.num_pages * PAGE

        def limited(room: int, held: int) -> int:
            while room > 1 and (excess := self._steps.needed(prompt_tokens, room) - held) > 0:
                room = max(1, room - excess)
            return room

        longest = limited(self.engine.context - prompt_tokens, held)
        return max(min(OPEN_ANSWER, longest), limited(longest, held // self._steps.open_answers))

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket:
        """
        Get a request in line. `notify` is called by the scheduler's thread after each token and at the end; it must
        return at once and raise nothing.

        Raises DataError for a prompt that is empty or fills the context, and for a setting that this model cannot take.
        The same for a prompt and answer that are too long for the memory. Raises RunError where too many requests wait,
        and after `close`.
        """
        self.engine.check(request.ids, request.sampling)
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            what = f"must be at least 0 and at most {MAX_TOP_LOGPROBS}, got {request.top_logprobs}"
            raise DataError(what, where="top_logprobs")
        ticket = Ticket(request, notify)
        room = min(request.sampling.max_tokens, self.engine.context - len(request.ids))
        if (needed := self._steps.needed(len(request.ids), room)) > self.num_pages * PAGE:
            what = f"prompt and answer may take memory for {needed:,} tokens, but it holds {self.num_pages * PAGE:,}"
            raise DataError(what, where="max_tokens", hint="Request a shorter answer, or shorten the prompt.")
        sequence = _Sequence(
            ticket, TokenSampler(request.sampling, request.ids), list(request.ids), room, Drafter(self.draft_tokens)
        )
        with self._wake:
            if self._closing:
                raise RunError("the model was closed", hint="Load it again.")
            if len(self._waiting) >= self.max_waiting:
                raise RunError(f"{self.max_waiting} requests are already waiting", hint="Try again later.")
            if not room:
                ticket._end("length")
                return ticket
            self._waiting.append(sequence)
            self._wake.notify()
        return ticket

    def close(self) -> None:
        """End all requests as cancelled, and the thread. Returns when they have ended."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._waiting or self._running)
                closing = self._closing
            try:
                self._end_cancelled(all_of_them=closing)
                if closing:
                    return
                self._admit()
                self._step()
            except Exception as error:  # of a step, which concerns all that are running
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End what is running. A function of its own, so that the loop keeps no request, and with it the model."""
        for sequence in list(self._running):
            self._leave(sequence, None, error)

    def _end_cancelled(self, *, all_of_them: bool) -> None:
        with self._wake:
            gone = [one for one in self._waiting if all_of_them or one.ticket._cancelled]
            self._waiting = deque(one for one in self._waiting if one not in gone)
        for sequence in gone:
            sequence.ticket._end("cancelled")
        for sequence in list(self._running):
            if all_of_them or sequence.ticket._cancelled:
                self._leave(sequence, "cancelled")

    def _admit(self) -> None:
        """Requests that have waited longest begin, as long as there is memory for them."""
        while len(self._running) < self.max_running:
            with self._wake:
                if not self._waiting or not self._steps.fits(self._waiting[0], self._running):
                    return
                sequence = self._waiting.popleft()
            others = [*self._running]
            self._running.append(sequence)
            try:
                self._steps.begin(sequence, others)
            except Exception as error:  # of memory
                self._leave(sequence, None, error)
                continue
            if sequence.admitted is None:
                sequence.admitted = time.monotonic()
                sequence.ticket.timings.waiting_seconds = sequence.admitted - sequence.arrived
                sequence.ticket.cached_tokens = sequence.text.length

    def _step(self) -> None:
        if not self._running:
            return
        ready, left = self._steps.step(self._running)
        if left:
            self._running = [sequence for sequence in self._running if sequence not in left]
            with self._wake:
                self._waiting.extendleft(left)  # the newest comes first, and so behind the others
        for sequence, logits in ready:
            try:
                reason = self._say(sequence, logits)
            except Exception as error:  # of this sequence alone: its constraint, or logits that are not finite
                self._leave(sequence, None, error)
            else:
                if reason:
                    self._leave(sequence, reason)

    def _say(self, sequence: _Sequence, logits: Tensor | Exception) -> FinishReason | None:
        """Hand out a next token, and more as long as the drafts are right. Gives why the answer ends, if it does."""
        if isinstance(logits, Exception):
            raise logits
        length, drafts, right = len(sequence.ids), sequence.drafts, 0
        for row in logits:
            reason = self._token(sequence, row)
            if reason or right == len(drafts) or sequence.ids[-1] != drafts[right]:
                break
            right += 1
        self._steps.advance(sequence, length + right)
        sequence.drafter.judge(len(drafts), right)
        sequence.drafts = []
        return reason

    def _leave(self, sequence: _Sequence, reason: FinishReason | None, error: Exception | None = None) -> None:
        self._running.remove(sequence)
        self._steps.end(sequence)
        sequence.ticket._end(reason, error)

    def _token(self, sequence: _Sequence, logits: Float[Tensor, " V"]) -> FinishReason | None:
        """Choose and hand out a sequence's next token, and say whether its answer ends there."""
        ticket, constraint = sequence.ticket, sequence.ticket.request.constraint
        id = sequence.sampler.choose(logits, None if constraint is None else constraint.allowed())
        sequence.ids.append(id)
        sequence.room -= 1
        now = time.monotonic()
        if sequence.first_token is None:
            sequence.first_token = now
            ticket.timings.prompt_seconds = sequence.first_token - (sequence.admitted or sequence.arrived)
        if not ticket._cancelled:  # the reader of a canceled ticket takes no more tokens
            ticket.timings.answer_seconds = now - sequence.first_token
        ticket._put(_token(id, logits, ticket.request.top_logprobs))
        if id in ticket.request.stop_ids:
            return "stop"
        if constraint is not None:
            constraint.accept(id)
            if constraint.finished:
                return "stop"
        return None if sequence.room else "length"


def _checked(logits: Float[Tensor, "O V"]) -> Tensor | CheckpointError:
    try:
        check_rows(logits)
    except CheckpointError as error:
        return error
    return logits


def _token(id: int, logits: Float[Tensor, " V"], top: int | None) -> Token:
    if top is None:
        return Token(id)
    chances = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(chances, min(top, len(chances)))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(id, float(chances[id]), pairs)


def free_device_bytes(device: torch.device) -> int:
    """Memory that is free where a model is: of the GPU, or of this machine."""
    return free_bytes(Host.here()) if device.type == "cpu" else find().free_bytes()
