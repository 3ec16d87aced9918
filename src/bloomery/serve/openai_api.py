"""
Request and response formats of OpenAI's chat completions, as far as this server supports them.

A field that this server does not know is an error, because an ignored field changes the answer silently. The fields
in IGNORED are the exception. They say who asks, what the answer may cost or where it is kept, never what the answer
is.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from bloomery.core.chat import MAX_SEED, MAX_TOKENS, Message, SamplingConfig, bad_character
from bloomery.core.errors import DataError, readable
from bloomery.serve.chat_model import Finish, ModelInfo, TextChunk

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""`prediction` only makes an answer faster, `parallel_tool_calls` means nothing without tools."""

ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "modalities": (["text"],),
}
"""Fields of which only the values that ask for nothing are accepted."""

ACCEPTED = 'Send a JSON object with "model" and "messages", as application/json.'

MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_LENGTH, MAX_NAME = 10_000, 1000, 16, 512, 1024
"""Of a request; parts of one message. Every token of an answer is compared with every stop string."""
MAX_FIELDS = 16
"""Of `stream_options`, and of a part of a message."""

SHOWN = 80
"""Characters of a value that an error repeats."""

TEXT, LIST = "str", "list"
"""Of a field that takes text or a list. pydantic puts them into the location of a problem; no field is called so."""


def _text_or_list(value: object) -> str:
    """Which of the two a value is checked as: against both, a wrong list would cost two errors for each element."""
    return LIST if isinstance(value, list) else TEXT


TextOrList = Discriminator(_text_or_list)


def _has_few_fields(value: object) -> object:
    """An object that is small enough for an error about each of its fields."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"Object should have at most {MAX_FIELDS} fields")
    return value


FewFields = BeforeValidator(_has_few_fields)


class ContentPart(BaseModel):
    """One part of a message's content. Text is the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


Parts = Annotated[list[Annotated[ContentPart, FewFields]], Field(max_length=MAX_PARTS, fail_fast=True), Tag(LIST)]


class WireMessage(BaseModel):
    """
    A message as a client sends it. `developer` is a newer name of the system's role; `name` and `tool_call_id` are
    ignored. Fields that are null pass, so that the message of an answer can be sent back as it came.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Parts, TextOrList]
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                what = "this server does not know that field of a message"
                raise DataError(what, where=name[:SHOWN], hint="Leave it out.")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        if problem := bad_character(text, "a message"):
            raise DataError(f"{problem.reason}: {problem.what}", where="messages", hint="Leave that character out.")
        return Message(role="system" if self.role == "developer" else self.role, content=text)


StopStrings = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[StopStrings], Field(max_length=MAX_STOPS, fail_fast=True), Tag(LIST)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. What is left out is as in SamplingConfig; `top_k` is an extension."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: Annotated[str, Field(max_length=MAX_NAME)]
    messages: Annotated[list[WireMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, FewFields] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[Annotated[StopStrings, Tag(TEXT)] | Stops, TextOrList] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def conversation(self) -> list[Message]:
        return [message.plain() for message in self.messages]

    def sampling(self) -> SamplingConfig:
        """How to answer. Raises DataError for a field that asks for what this server cannot do."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in ASKS_NOTHING.get(name, ()):
                continue
            if name in ASKS_NOTHING:
                accepted = " or ".join(json.dumps(one) for one in ASKS_NOTHING[name])
                what = f"this server does not do {_shown(value)}, only {accepted}"
                raise DataError(what, where=name[:SHOWN], hint="Leave it out.")
            hint = f"Fields that change an answer are {', '.join(_sampling_fields())}."
            raise DataError("unknown field", where=name[:SHOWN], hint=hint)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise DataError("a stop string is empty", where="stop", hint="Every text begins with it. Leave it out.")
        values: dict[str, Any] = {
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": stop,
        }
        return SamplingConfig.of(values)


def _sampling_fields() -> list[str]:
    return sorted(set(ChatRequest.model_fields) - {"model", "messages", "stream", "stream_options"})


@dataclass
class ChatReply:
    """One answer on its way out: what every chunk of it repeats, and the tokens so far."""

    model: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def whole(self, text: str, finish: Finish) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage()}

    def chunk(self, delta: dict[str, str], finish: Finish | None = None, *, usage: bool = False) -> dict[str, Any]:
        """One event of a stream. With `usage`, it says that the tokens are counted in a later one."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **({"usage": None} if usage else {})}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def chunks(self, piece: TextChunk, *, usage: bool) -> list[dict[str, Any]]:
        """The events that one piece makes: text, and a separate one for the reason why it ends."""
        events = [self.chunk({"content": piece.text}, usage=usage)] if piece.text else []
        return events + ([self.chunk({}, piece.finish, usage=usage)] if piece.finish else [])

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def model_list(infos: Sequence[ModelInfo]) -> dict[str, Any]:
    """The answer of GET /v1/models."""
    return {"object": "list", "data": [model_entry(info) for info in infos]}


def model_entry(info: ModelInfo) -> dict[str, Any]:
    """The answer of GET /v1/models/NAME."""
    return {"id": info.id, "object": "model", "created": info.created, "owned_by": "bloomery"}


class CheckedRequest(NamedTuple):
    """A request that is known to be right."""

    body: ChatRequest
    messages: list[Message]
    sampling: SamplingConfig


def question(body: bytes, content_type: str) -> CheckedRequest:
    """The request of a body. Raises DataError, which names the field. Takes milliseconds: call it in a thread."""
    kind = content_type.partition(";")[0].strip().lower()
    if body and not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise DataError(f"the body is sent as {_shown(kind or None)}", hint=ACCEPTED)
    if not body:
        raise DataError("there is no body", hint=ACCEPTED)
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos : error.pos + SHOWN + 1]
        spot = f"where it reads {_shown(rest)}" if rest else "where it ends"
        what = f"the body is no JSON: {error.msg} at character {error.pos}, {spot}"
        raise DataError(what, hint=ACCEPTED) from None
    except ValueError as error:
        raise DataError(f"the body cannot be read: {error}", hint=ACCEPTED) from None
    return checked(value)


def checked(value: object) -> CheckedRequest:
    """A request as JSON data. Raises DataError, which names the field."""
    try:
        request = ChatRequest.model_validate(value)
    except ValidationError as error:
        problems = [_explained(problem) for problem in error.errors(include_url=False)[:3]]
        rest = "".join(f"; {field}: {what}" for field, what in problems[1:])
        field, what = problems[0]
        raise DataError(what + rest, where=field, hint="" if field else ACCEPTED) from None
    return CheckedRequest(request, request.conversation(), request.sampling())


def _explained(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Of one problem that pydantic has with a request: the field, or "", and what is wrong, with the value."""
    field = ".".join(str(part) for part in problem["loc"] if part not in (TEXT, LIST))
    if problem["type"] == "missing":
        return field, "is required"
    what = f"{problem['msg'][0].lower()}{problem['msg'][1:]}, got {_shown(problem['input'])}"
    return field, what if field else f"the body is {_shown(problem['input'])}"


def _shown(value: object) -> str:
    """The beginning of a value as JSON, without the work for all of it; what UTF-8 cannot hold is written out."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        text += piece
        if len(text) > SHOWN:
            return f"{readable(text[:SHOWN])}…"
    return readable(text)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": readable(message), "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"
