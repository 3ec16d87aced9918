"""
Turn conversations and texts into answers, streamed as text pieces.

The scheduler works with token IDs. Here they become text that can be shown to a person at once. A piece never holds
half a character. It never holds the beginning of a stop string that a later token may complete.

A request may ask for several answers. They are computed together, and with those of other requests.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import LONGEST_ANSWER, Message, SamplingConfig
from bloomery.core.errors import MAX_TOKENS, CheckpointError, DataError, RunError
from bloomery.generate.engine import Engine
from bloomery.generate.scheduler import Request, Ticket, Timings
from bloomery.model.quantize import QuantizedLinear
from bloomery.serve.constrained import Form, Grammars, TextStream, ToolCall, ToolFormat, ToolText
from bloomery.tokenizer.chat_template import SHORTER, Renderer, TooLongError
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.weights.hf import Loaded

import torch

AnswerEnd = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: the model ended it (or a stop string did), there was no room for more, or it calls tools."""

ANSWERED_ROLES = ("user", "tool", "system")
MAX_CHOICES, MAX_SEQUENCES = 16, 64
"""Answers to one prompt, and to all prompts of a request."""
SCORED = 256
"""Positions of a prompt whose logits are there at once."""


class StoppedError(RunError):
    """An answer that ended before its end, because the client hung up or the server closes."""

    def __init__(self) -> None:
        super().__init__("the answer was stopped", hint="The server is closing. Start it, and repeat the request.")


class NoRoomError(RunError):
    """A model that does not fit into the free memory, next to those that are in use."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a model is asked for: the answer to `messages`, or the continuation of each of `prompts`."""

    sampling: SamplingConfig
    messages: tuple[Message, ...] = ()
    """If the last one is the assistant's, the answer continues it."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or token IDs."""
    choices: int = 1
    """Answers to each prompt. The first has the seed of `sampling`, the others have seeds derived from it."""
    logprobs: int | None = None
    """How many of the likeliest tokens each token comes with; None for tokens without log-probabilities."""
    form: Form | None = None
    tools: tuple[dict[str, Any], ...] = ()
    calls: Literal["auto", "required"] = "auto"
    one_call: bool = False
    """Of the calls in an answer, only the first counts."""
    drops_oldest: bool = False
    """Of a conversation that does not fit, the oldest messages are left out, but for those of the system."""
    echo: bool = False
    """An answer begins with its prompt."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether nobody waits for the answer any more. Asked between the prompts."""

    @property
    def sequences(self) -> int:
        return self.choices * max(1, len(self.prompts))


class TokenScore(NamedTuple):
    """A token with its log-probability, and the likeliest tokens at its position with theirs."""

    token: bytes
    logprob: float | None
    """None for a first token, which nothing comes before."""
    top: tuple[tuple[bytes, float], ...] = ()
    is_special: bool = False
    """Whether `token` is the name of a special token, which is not in the text."""


@dataclass(frozen=True)
class TextChunk:
    """
    What one step added to an answer: whole characters (maybe none yet), the tokens it took, and on the answer's last
    piece the reason why it ends. `index` is the answer's number.
    """

    text: str
    tokens: int
    finish: AnswerEnd | None = None
    index: int = 0
    scores: tuple[TokenScore, ...] = ()
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer that is made while `pieces` is read. The last piece has a finish; closing `pieces` ends the work."""

    prompt_tokens: int
    pieces: Generator[TextChunk, None, None]
    dropped: int = 0
    """Messages that were left out."""

    @property
    def texts(self) -> Iterator[str]:
        """What is shown of the pieces."""
        with closing(self.pieces):
            yield from (piece.text for piece in self.pieces if piece.text)


@runtime_checkable
class RunningAnswer(Protocol):
    """Answers to a request on their way."""

    prompt_tokens: int
    dropped: int
    """Messages that were left out."""

    def take(self) -> list[TextChunk]:
        """The pieces that nobody has read, at once. Raises the error that ended an answer."""
        ...

    @property
    def done(self) -> bool:
        """Whether all answers have ended, and all pieces were read."""
        ...

    def cancel(self) -> None:
        """End all answers before their next token."""
        ...

    def timings(self) -> dict[str, float]: ...

    @property
    def cached_tokens(self) -> int: ...


@runtime_checkable
class Answerer(Protocol):
    """A model that takes conversations and texts."""

    name: str

    def begin(self, asked: Asked, notify: Callable[[], None]) -> RunningAnswer:
        """
        Begin the answers. `notify` is called from any thread when there are pieces to take. Raises DataError, before
        any work, for what the model cannot take.
        """
        ...


@dataclass(frozen=True)
class ModelInfo:
    """What a list of models says of one: its name, when it was made (Unix seconds), where it lies, its context."""

    id: str
    created: int
    path: Path
    context: int = 0
    """In tokens; 0 where it is not known before the model is loaded."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More that is known of it."""


@runtime_checkable
class Models(Protocol):
    """The models that can be asked for. All methods are called from several threads."""

    def names(self) -> Sequence[ModelInfo]: ...

    def get(self, name: str) -> Answerer:
        """
        Load a model, or hand out the one that is loaded. Raises RunError for an unknown name, and NoRoomError where it
        does not fit into memory.
        """
        ...

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded, and none is there yet."""
        ...


@runtime_checkable
class RendererProtocol(Protocol):
    """
    Writes a conversation as token IDs, up to where the assistant starts. `lead` is the text before every answer, and
    `end_ids` are the tokens that end the assistant's turn.
    """

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def lead(self) -> str: ...

    def prompt(self, messages: Sequence[Message], max_tokens: int) -> list[int]: ...


@runtime_checkable
class TextCoder(Protocol):
    """The part of a tokenizer that is needed here. Bytes, because one character may span tokens."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_after(self, text: str) -> list[int]: ...

    @property
    def puts_space_first(self) -> bool: ...

    def encode_within(self, text: str, max_tokens: int) -> list[int] | int: ...


@runtime_checkable
class SchedulerProtocol(Protocol):
    """Computes requests side by side, each as a stream of tokens."""

    def longest_answer(self, prompt_tokens: int) -> int: ...

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket: ...

    @property
    def is_busy(self) -> bool: ...


@dataclass(frozen=True)
class ModelWords:
    """How a model's texts become token IDs, and these texts again."""

    tokenizer: TextCoder
    renderer: Callable[[], RendererProtocol]
    """Gives the chat template, or raises CheckpointError for a model without one."""
    context: int
    stop_ids: frozenset[int]
    """IDs that end a continuation."""
    opening: tuple[int, ...] = ()
    """IDs before a text that is to be continued."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """The sampling settings of the model's makers."""

    @classmethod
    def of(cls, loaded: Loaded) -> "ModelWords":
        language = loaded.language
        return cls(
            tokenizer=loaded.tokenizer,
            renderer=lambda: loaded.renderer,
            context=loaded.model.config.context_length,
            stop_ids=language.stop_ids,
            opening=tuple(language.opening_ids),
            recommended=language.sampling,
        )


class TextAnswerer:
    """A scheduler, a tokenizer and a chat template as one model that takes conversations and texts."""

    def __init__(
        self,
        name: str,
        scheduler: SchedulerProtocol,
        words: ModelWords,
        engine: Engine | None = None,
        base: object = None,
    ) -> None:
        """`base` is what the scheduler lives as long as."""
        self.name, self._base = name, base
        self._scheduler, self.words, self._engine = scheduler, words, engine

    def answer(self, messages: Sequence[Message], sampling: SamplingConfig, *, drops: bool = False) -> StreamedAnswer:
        """One answer to a conversation, made in the thread that reads it. Raises DataError as `begin` does."""
        return self._streamed(Asked(sampling=sampling, messages=tuple(messages), drops_oldest=drops))

    def continuation(self, prompt: str | Sequence[int], sampling: SamplingConfig) -> StreamedAnswer:
        """One continuation of a text or of token IDs, without the chat template. Raises DataError as `begin` does."""
        return self._streamed(Asked(sampling=sampling, prompts=(prompt if isinstance(prompt, str) else tuple(prompt),)))

    def begin(self, asked: Asked, notify: Callable[[], None]) -> RunningAnswer:
        """
        Begin the answers. Raises DataError for wrong roles, no question, a prompt that fills the context, tools that
        the chat template was not made for, and a form that cannot be compiled.
        """
        return self._prepared(asked).start(notify)

    def _streamed(self, asked: Asked) -> StreamedAnswer:
        prepared = self._prepared(asked)

        def pieces() -> Generator[TextChunk, None, None]:
            changed = threading.Event()
            answer = prepared.start(changed.set)
            try:
                while not answer.done:
                    changed.wait()
                    changed.clear()
                    yield from answer.take()
            finally:
                answer.cancel()

        return StreamedAnswer(prepared.prompt_tokens, pieces(), prepared.dropped)

    def _prepared(self, asked: Asked) -> "_Prepared":
        sampling = asked.sampling.recommended(self.words.recommended)
        if asked.messages or not asked.prompts:
            is_open = "max_tokens" in asked.sampling.unset
            asked = replace(asked, sampling=replace(sampling, max_tokens=LONGEST_ANSWER) if is_open else sampling)
            ids, dropped = self.conversation_ids(asked)
            if is_open:
                longest = min(LONGEST_ANSWER, self._scheduler.longest_answer(len(ids)))
                asked = replace(asked, sampling=replace(sampling, max_tokens=longest))
            return _Prepared(self, asked, (_Prompt(ids),), self._renderer(asked).end_ids, dropped)
        asked = replace(asked, sampling=sampling)
        prompts = []
        for number, prompt in enumerate(asked.prompts):
            if asked.is_stopped():
                raise StoppedError
            ids = self.text_ids(prompt)
            self._check_room(ids, "the prompt", "prompt", "Shorten it.", self.words.context)
            opened = len(self.words.opening) if isinstance(prompt, str) else 0
            scores = self.scores(ids, asked.logprobs)[opened:] if asked.echo and asked.logprobs is not None else ()
            scores = [*scores]
            if scores and self.words.tokenizer.puts_space_first:  # no part of the text
                scores[0] = scores[0]._replace(token=scores[0].token.removeprefix(b" "))
            prompts.append(_Prompt(ids, self.text(ids) if asked.echo else "", tuple(scores), number))
        return _Prepared(self, asked, tuple(prompts), self.words.stop_ids, 0)

    def _renderer(self, asked: Asked) -> RendererProtocol:
        """The chat template. Raises DataError where there is none, or it does not support tools."""
        renderer = self._chat_renderer()
        speaks_of_tools = asked.tools or any("tool_calls" in message for message in asked.messages)
        if speaks_of_tools and self.tool_format is None:
            what = f"the chat template of {self.name} does not support tools"
            hint = "Remove the tools, or use a model whose template supports them."
            raise DataError(what, where="tools" if asked.tools else "messages", hint=hint)
        return renderer

    def _chat_renderer(self) -> RendererProtocol:
        try:
            return self.words.renderer()
        except CheckpointError as error:
            what = f"{self.name} has no chat template: it continues text"
            hint = f"Use POST /v1/completions with a prompt. In a terminal: {error.hint}"
            raise DataError(what, where="messages", hint=hint) from None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the chat template writes calls of tools; None where it does not."""
        try:
            return ToolFormat.of(self.words.renderer())
        except CheckpointError:
            return None

    def conversation_ids(self, asked: Asked) -> tuple[list[int], int]:
        """
        The token IDs of a conversation up to where the answer begins or continues, and how many messages were left out.
        Raises DataError.
        """
        check_conversation(asked.messages)
        renderer, messages = self._renderer(asked), asked.messages
        if not asked.drops_oldest:
            return self._rendered(renderer, messages, asked, self.words.context), 0
        room = self.words.context - min(asked.sampling.max_tokens, self.words.context // 4)
        first = next((at for at, one in enumerate(messages) if one["role"] != "system"), 0)
        begins = [first] + [at for at, one in enumerate(messages) if one["role"] == "user" and at > first]
        low, high = 0, len(begins) - 1
        while low < high:  # of the beginnings from which the conversation fits, the earliest
            middle = (low + high) // 2
            try:
                self._rendered(renderer, _without_oldest(messages, begins[middle]), asked, room)
                high = middle
            except TooLongError:
                low = middle + 1
        kept = _without_oldest(messages, begins[low])
        return self._rendered(renderer, kept, asked, self.words.context), len(messages) - len(kept)

    def _rendered(
        self, renderer: RendererProtocol, messages: tuple[Message, ...], asked: Asked, max_tokens: int
    ) -> list[int]:
        begun = messages[-1] if messages[-1]["role"] == "assistant" else None
        heard = messages[:-1] if begun else messages
        if isinstance(renderer, JinjaRenderer) and asked.tools:
            ids = renderer.prompt(heard, max_tokens, tools=list(asked.tools))
        else:
            ids = renderer.prompt(heard, max_tokens)
        if begun is not None:
            content = begun["content"]
            content = renderer.template.content(begun) if isinstance(renderer, Renderer) else content
            ids += self._following(ids, renderer.lead + content)
        elif renderer.lead and (asked.form is not None or asked.calls == "required"):
            ids += self._following(ids, renderer.lead)  # the form is that of the text behind it
        self._check_room(ids, "the conversation", "messages", SHORTER, max_tokens)
        return ids

    def _following(self, ids: Sequence[int], text: str) -> list[int]:
        """The token IDs of a text after a prompt, as in training. A special token begins a new part."""
        tokenizer = self.words.tokenizer
        return tokenizer.encode(text) if ids and ids[-1] in self.special_names else tokenizer.encode_after(text)

    def text_ids(self, prompt: str | Sequence[int], where: str = "prompt") -> list[int]:
        """
        The token IDs of a text that is to be continued. Raises DataError for token IDs that the model lacks, and
        TooLongError for a text that does not fit.
        """
        if not isinstance(prompt, str):
            if self._engine is not None:
                self._engine.check_tokens(prompt, where)
            return list(prompt)
        opening = list(self.words.opening)
        ids = self.words.tokenizer.encode_within(prompt, self.words.context - len(opening))
        if isinstance(ids, int):
            what = f"takes at least {ids + len(opening)} tokens, but {self.name} has a context of {self.words.context}"
            raise TooLongError(what, where=where, hint="Shorten it.")
        return [*opening, *ids] or sorted(self.words.stop_ids)[:1]

    def encoded(self, text: str, *, opened: bool) -> list[int]:
        """The token IDs of any text, with those that open a text if it is to be `opened`."""
        ids = self.words.tokenizer.encode_within(text, MAX_TOKENS)
        assert isinstance(ids, list), "no body holds so many tokens"
        return [*self.words.opening, *ids] if opened else ids

    def written_ids(self, asked: Asked) -> list[int]:
        """The token IDs of a conversation, also of one that does not fit. Raises DataError for one without question."""
        check_conversation(asked.messages)
        return self._rendered(self._renderer(asked), asked.messages, asked, MAX_TOKENS)

    def shown_text(self, ids: Iterable[int]) -> str:
        """The text of token IDs, with the names of special tokens. Raises DataError for IDs that the model lacks."""
        ids = self.text_ids(list(ids), "tokens")
        text = b"".join(map(self.token, ids)).decode("utf-8", "replace")
        added = self.words.tokenizer.puts_space_first and not (ids and ids[0] in self.special_names)
        return text.removeprefix(" ") if added else text

    def text(self, ids: Iterable[int]) -> str:
        """The text of token IDs, without special tokens."""
        return self.words.tokenizer.decode(list(ids))

    def _check_room(self, ids: Sequence[int], subject: str, where: str, hint: str, max_tokens: int) -> None:
        if len(ids) >= max_tokens:
            what = f"{subject} takes {len(ids)} tokens, but {self.name} has a context of {self.words.context}"
            raise TooLongError(what, where=where, hint=hint)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the forms that answers have to have."""
        tokenizer: Any = self.words.tokenizer
        try:
            return Grammars(tokenizer, self.words.renderer().end_ids)
        except CheckpointError:
            return Grammars(tokenizer, self.words.stop_ids)

    def token(self, id: int) -> bytes:
        """The bytes of a token; of a special token its name."""
        return self.special_names.get(id) or self.words.tokenizer.decode_bytes([id])

    @cached_property
    def special_names(self) -> dict[int, bytes]:
        outline = getattr(self.words.tokenizer, "outline", {"added_tokens": []})
        return {token["id"]: token["content"].encode() for token in outline["added_tokens"] if token["special"]}

    @torch.inference_mode()
    def scores(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Each token of a text with its log-probability after those before it, and the `top` likeliest ones there."""
        assert self._engine is not None
        model, size = self._engine.model, self._engine.num_ids
        hidden = model(torch.tensor([list(ids)], device=model.embed.weight.device))[:, :-1]
        scores = [TokenScore(self.token(ids[0]), None, (), ids[0] in self.special_names)]
        for begin in range(0, hidden.shape[1], SCORED):
            logits = model.logits(hidden[:, begin : begin + SCORED])[0, :, :size].float()
            chances = torch.log_softmax(logits, dim=-1)
            best = torch.topk(chances, min(top, size), dim=-1)
            for row, id in enumerate(ids[begin + 1 : begin + 1 + SCORED]):
                pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
                likeliest = tuple((self.token(other), value) for other, value in pairs)
                special = id in self.special_names
                scores.append(TokenScore(self.token(id), float(chances[row, id]), likeliest, special))
        return scores

    def facts(self) -> dict[str, Any]:
        """What is known of a model that is loaded: its number format, whether it chats, and by which template."""
        try:
            template = getattr(self.words.renderer(), "name", None)
        except CheckpointError:
            return {"chats": False, **self._number_format()}
        tools = self.tool_format is not None
        return {"chats": True, "chat_template": template, "tools": tools, **self._number_format()}

    def _number_format(self) -> dict[str, str]:
        if self._engine is None:
            return {}
        frozen = next((one for one in self._engine.model.modules() if isinstance(one, QuantizedLinear)), None)
        dtype = str(self._engine.model.embed.weight.dtype).removeprefix("torch.")
        return {"number_format": dtype if frozen is None else type(frozen).__name__.lower()}

    @property
    def is_busy(self) -> bool:
        """Whether answers are computed or wait."""
        return self._scheduler.is_busy

    def embedding(self, ids: Sequence[int]) -> list[float]:
        """The mean of the last hidden states of a text. Raises DataError for one that does not fit."""
        assert self._engine is not None
        numbers: list[float] = self._engine.embed(ids).tolist()
        return numbers


class _Prompt(NamedTuple):
    """A prompt, and what an answer that echoes it begins with."""

    ids: list[int]
    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class _Prepared:
    """A request that is known to be right."""

    model: TextAnswerer
    asked: Asked
    prompts: tuple[_Prompt, ...]
    stop_ids: frozenset[int]
    dropped: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def start(self, notify: Callable[[], None]) -> "AnswerStreams":
        """Hand all sequences to the scheduler. Raises what it raises."""
        asked, model = self.asked, self.model
        form, format = asked.form, model.tool_format if asked.tools else None
        special = {name.decode(): id for id, name in model.special_names.items()}
        if format is not None and asked.calls == "required":
            form = format.form(asked.tools, special)
        continues = not asked.messages or asked.messages[-1]["role"] == "assistant" or form is not None
        lead = "" if continues else model.words.renderer().lead
        names = [tool["function"]["name"] for tool in asked.tools]
        choices: list[ChoiceStream] = []
        for prompt in self.prompts:
            for number in range(asked.choices):
                constraint = model.grammars.constraint(form) if form is not None else None
                sampling = replace(asked.sampling, seed=derived_seed(asked.sampling.seed, number))
                adapter = None if model._engine is None else model._engine.adapter
                request = Request(prompt.ids, sampling, self.stop_ids, asked.logprobs, constraint, adapter)
                index = prompt.number * asked.choices + number
                try:
                    ticket = model._scheduler.submit(request, notify)
                except Exception:
                    for choice in choices:
                        choice.cancel()
                    raise
                calls = None if format is None else ToolText(format, names, one_call=asked.one_call)
                stream = TextStream(asked.sampling.stop, lead)
                choices.append(ChoiceStream(model, index, ticket, stream, prompt, calls, scores_end=not asked.messages))
        return AnswerStreams(choices, self.prompt_tokens, self.dropped, model)


def derived_seed(seed: int | None, number: int) -> int | None:
    """The seed of the answer with this number: that of the request for the first. None stays a new one each time."""
    if seed is None or number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "big")


class ChoiceStream:
    """One answer: its tokens as pieces of text."""

    def __init__(
        self,
        model: TextAnswerer,
        index: int,
        ticket: Ticket,
        text: TextStream,
        prompt: _Prompt,
        calls: "ToolText | None",
        *,
        scores_end: bool,
    ) -> None:
        """`scores_end`: the token that ends the answer has a score, as in completions."""
        self._scores_end = scores_end
        self.index, self.ticket, self.prompt_number = index, ticket, prompt.number
        self.finish: AnswerEnd | None = None
        self.num_tokens = 0
        self._model, self._text, self._calls = model, text, calls
        self._held = deque[tuple[int, TokenScore]]()
        """Scores of tokens whose text is not certain, each with the character at which its text begins."""
        self._echo = TextChunk(prompt.text, 0, None, index, prompt.scores) if prompt.text or prompt.scores else None

    def cancel(self) -> None:
        self.ticket.cancel()

    def take(self) -> list[TextChunk]:
        """Pieces of all tokens that are there. The last one has a finish. Raises what ended the ticket."""
        chunks: list[TextChunk] = []
        if self._echo is not None:
            chunks, self._echo = [self._echo], None
        if self.finish is not None:
            return chunks
        stop_ids = self.ticket.request.stop_ids
        for token in self.ticket.take():
            self.num_tokens += 1
            ends = token.id in stop_ids
            if token.logprob is not None and (self._scores_end or not ends):
                top = tuple((self._model.token(id), logprob) for id, logprob in token.top)
                special = ends or token.id in self._model.special_names
                score = TokenScore(self._model.token(token.id), token.logprob, top, special)
                self._held.append((self._text.num_decoded, score))
            if ends:
                chunks.append(self._end(1, "stop"))
                return chunks
            shown = self._text.add(self._bytes(token.id))
            if self._text.stopped:
                self.ticket.cancel()
                chunks.append(self._end(1, "stop", shown))
                return chunks
            shown = shown if self._calls is None else self._calls.add(shown)
            chunks.append(TextChunk(shown, 1, None, self.index, self._scores()))
        if self.ticket.done and self.ticket.finish_reason is not None:
            if self.ticket.finish_reason == "cancelled":
                raise StoppedError
            # What was held back may hold a whole stop string only now that no byte can follow.
            chunks.append(self._end(0, "stop" if self.ticket.finish_reason == "stop" else "length"))
        return chunks

    def _bytes(self, id: int) -> bytes:
        if self._calls is not None and id in self._model.special_names:
            return self._calls.shown(self._model.special_names[id])
        return self._model.words.tokenizer.decode_bytes([id])

    def _scores(self, *, last: bool = False) -> tuple[TokenScore, ...]:
        """Scores of the tokens that have a part in the text so far. With `last`, all but those behind a stop."""
        scores = list[TokenScore]()
        while self._held and (self._held[0][0] < self._text.num_certain or (last and not self._text.stopped)):
            scores.append(self._held.popleft()[1])
        return tuple(scores)

    def _end(self, tokens: int, finish: AnswerEnd, shown: str | None = None) -> TextChunk:
        text = self._text.end() if shown is None else shown
        self.finish = "stop" if self._text.stopped else finish
        calls: tuple[ToolCall, ...] = ()
        if self._calls is not None:
            text, calls = self._calls.end(text)
            self.finish = "tool_calls" if calls and self.finish == "stop" else self.finish
        return TextChunk(text, tokens, self.finish, self.index, self._scores(last=True), calls)


class AnswerStreams:
    """All answers to a request on their way."""

    def __init__(self, choices: Sequence[ChoiceStream], prompt_tokens: int, dropped: int, model: TextAnswerer) -> None:
        self.prompt_tokens, self.dropped = prompt_tokens, dropped
        self._choices = choices
        self._model = model  # whose scheduler closes with it

    def take(self) -> list[TextChunk]:
        """Pieces of all answers that are there. Raises what ended one of them, and StoppedError after `cancel`."""
        return [chunk for choice in self._choices for chunk in choice.take()]

    @property
    def done(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def cancel(self) -> None:
        """End all answers before their next token."""
        for choice in self._choices:
            choice.cancel()

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, whose keys and values were there."""
        of_prompt: dict[int, int] = {}  # several answers to one prompt read it once
        for choice in self._choices:
            cached = choice.ticket.cached_tokens
            of_prompt[choice.prompt_number] = min(cached, of_prompt.get(choice.prompt_number, cached))
        return sum(of_prompt.values())

    def timings(self) -> dict[str, float]:
        """In the names of llama.cpp. Of several answers, the times are those of the slowest."""
        times: list[Timings] = [choice.ticket.timings for choice in self._choices]
        said = sum(choice.num_tokens for choice in self._choices)
        read = self.prompt_tokens - self.cached_tokens if len(self._choices) == 1 else self.prompt_tokens
        waiting = max(one.waiting_seconds for one in times)
        prompt, answer = max(one.prompt_seconds for one in times), max(one.answer_seconds for one in times)
        rates = {
            **({"prompt_per_second": read / prompt} if prompt else {}),
            **({"predicted_per_second": said / answer} if answer else {}),
        }
        return {
            "queue_ms": 1000 * waiting,
            "cache_n": self.cached_tokens,
            "prompt_n": read,
            "prompt_ms": 1000 * prompt,
            "predicted_n": said,
            "predicted_ms": 1000 * answer,
            **rates,
        }


def _without_oldest(messages: Sequence[Message], begin: int) -> tuple[Message, ...]:
    """The messages from `begin` on, and those of the system before."""
    return tuple(one for at, one in enumerate(messages) if at >= begin or one["role"] == "system")


def check_conversation(messages: Sequence[Message]) -> None:
    """
    Raise DataError unless the last message is one to be answered, or the beginning of an answer to one. The renderer
    checks each message.
    """
    begins = len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    asked = messages[:-1] if begins else messages
    if not asked or asked[-1]["role"] not in ANSWERED_ROLES:
        what = f"the last one is from the {asked[-1]['role']}" if asked else "there are none"
        hint = "End it with a message of the user, a tool or the system, or with the beginning of an answer to it."
        raise DataError(what, where="messages", hint=hint)
