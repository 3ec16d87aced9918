"""
The shapes of OpenAI's chat completions, as far as this server speaks them.

A field that this server does not know is an error, because an ignored one changes the answer in silence. Ignored all
the same are those in IGNORED: they say who asks, what it may cost or where it is kept, never what the answer is.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bloomery.core.errors import DataError
from bloomery.serve.answerer import Finish, ModelInfo, Piece, Sampling
from bloomery.tokenizer.chat import Message

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

UNION_MEMBERS = ("str", "list[str]", "list[Part]")
"""What pydantic puts into the place of a problem, where a field takes one of two types. No field is called so."""


class Part(BaseModel):
    """One part of a message's content. Text is the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class WireMessage(BaseModel):
    """
    A message as a client sends it. `developer` is a newer name of the system's role; `name` and `tool_call_id` are
    ignored. Fields that are null pass, so that the message of an answer can be sent back as it came.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                raise DataError("this server does not know that field of a message", where=name, cure="Leave it out.")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. What is left out is as in Sampling; `top_k` is an extension."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    messages: list[WireMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def conversation(self) -> list[Message]:
        return [message.plain() for message in self.messages]

    def sampling(self) -> Sampling:
        """How to answer. Raises DataError for a field that asks for what this server cannot do."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in ASKS_NOTHING.get(name, ()):
                continue
            if name in ASKS_NOTHING:
                accepted = " or ".join(json.dumps(one) for one in ASKS_NOTHING[name])
                what = f"this server does not do {_shown(value)}, only {accepted}"
                raise DataError(what, where=name, cure="Leave it out.")
            cure = f"Fields that change an answer are {', '.join(_sampling_fields())}."
            raise DataError("unknown field", where=name, cure=cure)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise DataError("a stop string is empty", where="stop", cure="Every text begins with it. Leave it out.")
        given: dict[str, Any] = {
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": stop,
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})


def _sampling_fields() -> list[str]:
    return sorted(set(ChatRequest.model_fields) - {"model", "messages", "stream", "stream_options"})


@dataclass
class Reply:
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

    def chunks(self, piece: Piece, *, usage: bool) -> list[dict[str, Any]]:
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


def explain(problem: Mapping[str, Any], body: object) -> tuple[str, str]:
    """Of one problem that pydantic has with a body: the field, or "", and what is wrong, with the value or the cure."""
    if problem["type"] == "json_invalid":
        spot = problem["loc"][-1]
        rest = f"where it reads {_shown(body[spot:])}" if isinstance(body, str) and body[spot:] else "where it ends"
        return "", f"the body is no JSON: {problem['ctx']['error']} at character {spot}, {rest}. {ACCEPTED}"
    field = ".".join(str(part) for part in problem["loc"][1:] if part not in UNION_MEMBERS)
    if problem["type"] == "missing":
        return field, "is required" if field else f"there is no body. {ACCEPTED}"
    what = f"{problem['msg'][0].lower()}{problem['msg'][1:]}, got {_shown(problem['input'])}"
    return field, what if field else f"the body is {_shown(problem['input'])}. {ACCEPTED}"


def _shown(value: object) -> str:
    """A value as JSON, cut where it is long; what UTF-8 cannot hold is written out."""
    text = json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:80]}…"


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"
