"""
Answers in OpenAI's formats: chat completions, completions, responses, embeddings, lists of models, and errors.

A reply gets the pieces of an answer. It makes one body of all of them, or the server-sent events of each.
"""

import base64
import json
import struct
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import readable
from bloomery.serve.chat_model import AnswerEnd, Asked, ModelInfo, RunningAnswer, TextAnswerer, TextChunk, TokenScore
from bloomery.serve.constrained import ToolCall
from bloomery.serve.openai_api import TokenizeRequest

DONE = "data: [DONE]\n\n"


@runtime_checkable
class Reply(Protocol):
    """The format of one answer."""

    def begin(self, answer: RunningAnswer) -> None:
        """The answer that this reply is about."""
        ...

    def start(self) -> Iterable[str]:
        """The events before the first piece."""
        ...

    def events(self, piece: TextChunk) -> Iterable[str]: ...

    def end(self) -> Iterable[str]:
        """The events after the last piece."""
        ...

    def whole(self, pieces: Sequence[TextChunk]) -> dict[str, Any]:
        """The body for a client that does not stream."""
        ...


@dataclass
class _Counted:
    """What every reply says: who answers, since when, and how many tokens it took."""

    model: str
    usage: bool = False
    """Whether a stream ends with the tokens that it took."""
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    answer: RunningAnswer | None = None

    def begin(self, answer: RunningAnswer) -> None:
        self.answer = answer

    @property
    def prompt_tokens(self) -> int:
        return self.answer.prompt_tokens if self.answer is not None else 0

    def tokens(self) -> dict[str, Any]:
        """The usage in chat completions and completions."""
        cached = self.answer.cached_tokens if self.answer is not None else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def more(self) -> dict[str, Any]:
        """What this server adds to a finished answer: times, and how many messages were left out, if any were."""
        if self.answer is None:
            return {}
        dropped = {"dropped_messages": self.answer.dropped} if self.answer.dropped else {}
        return {"timings": self.answer.timings(), **dropped}


@dataclass
class _Choices(_Counted):
    """Answers as a list of choices."""

    id: str = ""
    chunk_kind: ClassVar[str]
    """What an event of a stream calls itself."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(kind), "choices": choices, "usage": self.tokens(), **self.more()}

    def _event(self, choice: dict[str, Any], more: Mapping[str, Any] | None = None) -> str:
        usage = {"usage": None} if self.usage else {}
        return event({**self._head(self.chunk_kind), "choices": [choice], **usage, **(more or {})})

    def end(self) -> Iterable[str]:
        if self.usage:
            yield event(self._body(self.chunk_kind, []))
        yield DONE


@dataclass
class ChatReply(_Choices):
    """The answer of POST /v1/chat/completions."""

    choices: int = 1
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    chunk_kind = "chat.completion.chunk"

    def whole(self, pieces: Sequence[TextChunk]) -> dict[str, Any]:
        self.completion_tokens = sum(piece.tokens for piece in pieces)
        choices = []
        for index in range(self.choices):
            own = [piece for piece in pieces if piece.index == index]
            text, calls = "".join(piece.text for piece in own), own[-1].calls
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
            scores = [score for piece in own for score in piece.scores]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_scores(scores) if scores else None,
                    "finish_reason": own[-1].finish,
                }
            )
        return self._body("chat.completion", choices)

    def start(self) -> Iterable[str]:
        for index in range(self.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, piece: TextChunk) -> Iterable[str]:
        self.completion_tokens += piece.tokens
        if piece.text or piece.scores:
            yield self._chunk(piece.index, {"content": piece.text}, scores=piece.scores)
        for number, call in enumerate(piece.calls):
            yield self._chunk(piece.index, {"tool_calls": [{"index": number, **_call(call)}]})
        if piece.finish:
            is_last = self.answer is not None and self.answer.done
            yield self._chunk(piece.index, {}, piece.finish, more=self.more() if is_last else {})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: AnswerEnd | None = None,
        scores: Sequence[TokenScore] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _chat_scores(scores) if scores else None,
            "finish_reason": finish,
        }
        return self._event(choice, more)


@dataclass
class CompletionReply(_Choices):
    """The answer of POST /v1/completions. Of `asked` answers to each prompt, the `kept` likeliest are sent."""

    kept: int = 1
    asked: int = 1
    scored: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    chunk_kind = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, pieces: Sequence[TextChunk]) -> dict[str, Any]:
        self.completion_tokens = sum(piece.tokens for piece in pieces)
        answers: dict[int, list[TextChunk]] = {}
        for piece in pieces:
            answers.setdefault(piece.index, []).append(piece)
        choices: list[dict[str, Any]] = []
        for begin in range(0, len(answers), self.asked):
            group = [answers[index] for index in range(begin, begin + self.asked)]
            best = sorted(group, key=_mean_logprob, reverse=True) if self.kept < self.asked else group
            for own in best[: self.kept]:
                scores = [score for piece in own for score in piece.scores]
                text = "".join(piece.text for piece in own)
                choices.append(self._choice(len(choices), text, own[-1].finish, scores))
        return self._body(self.chunk_kind, choices)

    def start(self) -> Iterable[str]:
        return ()

    def events(self, piece: TextChunk) -> Iterable[str]:
        self.completion_tokens += piece.tokens
        if piece.text or piece.scores or piece.finish:
            is_last = piece.finish and self.answer is not None and self.answer.done
            choice = self._choice(piece.index, piece.text, piece.finish, piece.scores)
            yield self._event(choice, self.more() if is_last else {})

    def _choice(self, index: int, text: str, finish: AnswerEnd | None, scores: Sequence[TokenScore]) -> dict[str, Any]:
        logprobs = None
        if self.scored:
            offsets = []
            for score in scores:
                offsets.append(self._offsets.get(index, 0))
                in_text = b"" if score.is_special else score.token
                self._offsets[index] = offsets[-1] + sum(byte & 0xC0 != 0x80 for byte in in_text)
            logprobs = {
                "tokens": [_token_text(score.token) for score in scores],
                "token_logprobs": [score.logprob for score in scores],
                "top_logprobs": [
                    {_token_text(token): logprob for token, logprob in _with_own(score)} or None for score in scores
                ],
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


@dataclass
class ResponsesReply(_Counted):
    """The answer of POST /v1/responses. Nothing of it is kept."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the answer repeats."""
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _items: list[dict[str, Any]] = field(default_factory=list)
    _text: str = ""
    _events: int = 0
    _finish: AnswerEnd | None = None

    def whole(self, pieces: Sequence[TextChunk]) -> dict[str, Any]:
        for piece in pieces:
            for _ in self.events(piece):
                pass
        return self._body()

    def start(self) -> Iterable[str]:
        yield self._event("response.created", response=self._body())
        yield self._event("response.in_progress", response=self._body())

    def events(self, piece: TextChunk) -> Iterable[str]:
        self.completion_tokens += piece.tokens
        self._finish = piece.finish or self._finish
        if piece.text or (piece.finish and not piece.calls and not self._items):
            yield from self._add_text(piece.text)
        if piece.finish and self._items:
            yield from self._end_text()
        for call in piece.calls:
            yield from self._add_call(call)

    def end(self) -> Iterable[str]:
        kind = "response.incomplete" if self._finish == "length" else "response.completed"
        yield self._event(kind, response=self._body())

    def _add_text(self, text: str) -> Iterable[str]:
        if not self._items:
            item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
            self._items.append({**item, "status": "in_progress"})
            yield self._event("response.output_item.added", output_index=0, item=self._items[0])
            yield self._event("response.content_part.added", **self._part_at(), part=_part(""))
        self._text += text
        if text:
            yield self._event("response.output_text.delta", **self._part_at(), delta=text, logprobs=[])

    def _end_text(self) -> Iterable[str]:
        self._items[0] |= {"content": [_part(self._text)], "status": self._status}
        yield self._event("response.output_text.done", **self._part_at(), text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._part_at(), part=_part(self._text))
        yield self._event("response.output_item.done", output_index=0, item=self._items[0])

    def _add_call(self, call: ToolCall) -> Iterable[str]:
        index, arguments = len(self._items), json.dumps(call.arguments, ensure_ascii=False)
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": _call_id(), "name": call.name}
        self._items.append({**item, "arguments": arguments, "status": "completed"})
        at = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
        yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=index, item=self._items[index])

    def _part_at(self) -> dict[str, Any]:
        return {"item_id": self._items[0]["id"], "output_index": 0, "content_index": 0}

    @property
    def _status(self) -> str:
        return "in_progress" if self._finish is None else "incomplete" if self._finish == "length" else "completed"

    def _body(self) -> dict[str, Any]:
        used = None
        if self._finish is not None:
            total = self.tokens()
            used = {
                "input_tokens": total["prompt_tokens"],
                "input_tokens_details": total["prompt_tokens_details"],
                "output_tokens": total["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": total["total_tokens"],
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._finish == "length" else None,
            "output": [dict(item) for item in self._items],
            "previous_response_id": None,
            "store": False,
            **self.settings,
            "usage": used,
            **(self.more() if self._finish is not None else {}),
        }

    def _event(self, kind: str, **data: Any) -> str:
        self._events += 1
        body = {"type": kind, "sequence_number": self._events - 1, **data}
        return f"event: {kind}\n{event(body)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_id() -> str:
    """Nine letters and digits: some templates refuse longer ones."""
    return uuid.uuid4().hex[:9]


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": _call_id(), "type": "function", "function": function}


def _chat_scores(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """The log-probabilities of tokens as chat completions have them."""
    content = [
        {**_scored(score.token, score.logprob or 0.0), "top_logprobs": [_scored(*pair) for pair in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _scored(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


def _token_text(token: bytes) -> str:
    r"""A token as completions show it: text, or `bytes:\xe2` for a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _mean_logprob(pieces: Sequence[TextChunk]) -> float:
    """Of the tokens of an answer, without those of an echoed prompt."""
    own = [piece for piece in pieces if piece.tokens or piece.finish]
    scores = [score.logprob for piece in own for score in piece.scores if score.logprob is not None]
    return sum(scores) / max(1, len(scores))


def embedding_list(model: str, vectors: Sequence[Sequence[float]], tokens: int, *, as_base64: bool) -> dict[str, Any]:
    """The answer of POST /v1/embeddings. Base64 is of float32 numbers, the lowest byte first."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def token_list(request: TokenizeRequest, model: TextAnswerer) -> dict[str, Any]:
    """The answer of POST /tokenize, in the names of vLLM and llama.cpp. Raises DataError."""
    text = request.text()
    if text is None:
        sampling = SamplingConfig()
        asked = Asked(sampling=sampling, messages=request.conversation(), tools=request.offered())
        ids = model.written_ids(asked)
    else:
        is_opened = request.add_special_tokens if request.add_special is None else request.add_special
        ids = model.encoded(text, opened=is_opened is not False)
    pieces = [model.token(id).decode("utf-8", "replace") for id in ids]
    return {
        "count": len(ids),
        "max_model_len": model.words.context,
        "tokens": ids,
        **({"token_strs": pieces} if request.return_token_strs or request.with_pieces else {}),
    }


def model_list(infos: Sequence[ModelInfo]) -> dict[str, Any]:
    """The answer of GET /v1/models."""
    return {"object": "list", "data": [model_entry(info) for info in infos]}


def model_entry(info: ModelInfo) -> dict[str, Any]:
    """The answer of GET /v1/models/NAME: what OpenAI's has, and what is known of the model."""
    context = {"max_model_len": info.context} if info.context else {}
    entry = {"id": info.id, "object": "model", "created": info.created, "owned_by": "bloomery"}
    return {**entry, **context, **info.facts}


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": readable(message), "type": kind, "param": param, "code": code}}


def _with_own(score: TokenScore) -> list[tuple[bytes, float]]:
    """The likeliest tokens, and the one that was taken, as OpenAI has them."""
    own = [] if score.logprob is None or score.token in dict(score.top) else [(score.token, score.logprob)]
    return [*score.top, *own]


LINE_ENDS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
"""Characters at which some clients end a line, as JSON escapes them."""


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False).translate(LINE_ENDS)}\n\n"
