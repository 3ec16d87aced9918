"""
Requests of OpenAI's API, checked: chat completions, completions, embeddings and responses, and what llama.cpp and vLLM
add to them. replies.py has the answers.

A field that this server does not know is an error, because an ignored field changes the answer silently. The fields
in IGNORED are the exception. They say who asks, what the answer may cost or where it is kept, never what the answer
is.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from bloomery.core.chat import (
    LIMITS,
    MAX_BIAS,
    Message,
    SamplingConfig,
    ToolMessage,
    bad_character,
)
from bloomery.core.errors import MAX_SEED, MAX_TOKENS, DataError, readable
from bloomery.serve.chat_model import MAX_CHOICES, MAX_SEQUENCES, Asked
from bloomery.serve.constrained import (
    MAX_SCHEMA,
    Form,
    choice_form,
    grammar_form,
    object_form,
    regex_form,
    schema_form,
)

IGNORED = frozenset(
    {
        "metadata",
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
"""`prediction` only makes an answer faster."""

ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "background": (False,),
    "include": ([],),
}
"""Fields of which only the values that ask for nothing are accepted."""

ACCEPTED = 'Send a JSON object with "model" and "messages", as application/json.'

MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_LENGTH, MAX_NAME = 10_000, 1000, 16, 512, 1024
"""Of a request; parts of one message. Every token of an answer is compared with every stop string."""
MAX_FIELDS = 16
"""Of `stream_options`, and of a part of a message."""
MAX_LOGPROBS, MAX_TOOLS, MAX_CALLS, MAX_INPUTS, MAX_NGRAM, MAX_DEPTH = 20, 128, 128, 2048, 32, 32
"""
Likeliest tokens at each position; tools of a request; calls of a message; texts of a request for embeddings. MAX_NGRAM
is of an n-gram that is not repeated: each sequence keeps all of its own. MAX_DEPTH is of JSON, also in a string.
"""
TOOL_NAME_CHARS = 64

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
    A message as a client sends it. `developer` is a newer name of the system's role. Fields that are null pass, so that
    the message of an answer can be sent back as it came.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Parts, TextOrList] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None

    def plain(self, where: str) -> Message:
        """The message. Raises DataError for one that cannot be read; `where` is its path in the request."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                what = "this server does not support that field of a message"
                raise DataError(what, where=name[:SHOWN], hint="Remove it.")
        calls = _calls(self.tool_calls, f"{where}.tool_calls") if self.tool_calls else []
        if calls and self.role != "assistant":
            raise DataError(f"a message from the {self.role} cannot call tools", where=f"{where}.tool_calls")
        if self.content is None and not calls:
            raise DataError("is required", where=f"{where}.content")
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        if problem := bad_character(text, "a message"):
            raise DataError(f"{problem.reason}: {problem.what}", where="messages", hint="Remove that character.")
        message = ToolMessage(role="system" if self.role == "developer" else self.role, content=text)
        if calls:
            message["tool_calls"] = calls
        if self.role == "tool":
            if self.tool_call_id is not None:
                message["tool_call_id"] = self.tool_call_id
            if self.name is not None:
                message["name"] = self.name
        return message


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    """The calls of a message as templates read them: with arguments as JSON data. Raises DataError."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise DataError(f"must be a list of at most {MAX_CALLS} calls, got {_shown(value)}", where=where)
    calls = []
    for number, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"is not a function call: {_shown(call)}", where=f"{where}.{number}")
        arguments = function.get("arguments") or {}  # some clients write "" for none
        arguments = _json_text(arguments, f"{where}.{number}.function.arguments")
        _check_characters(call, f"{where}.{number}")
        if not isinstance(arguments, dict):
            raise DataError(f"is not an object: {_shown(arguments)}", where=f"{where}.{number}.function.arguments")
        _check_characters(arguments, f"{where}.{number}.function.arguments")
        named = {"name": function["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": named})
    return calls


StopStrings = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[StopStrings], Field(max_length=MAX_STOPS, fail_fast=True), Tag(LIST)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _number(name: str, low: float | None = None, high: float | None = None) -> Any:
    """The limits of a sampling setting, or narrower ones."""
    least, most = LIMITS[name]
    return Field(ge=least if low is None else low, le=most if high is None else high, allow_inf_nan=False)


WireKind = TypeVar("WireKind", bound="WireRequest")


class WireRequest(BaseModel):
    """What every request has."""

    model_config = ConfigDict(strict=True, extra="allow")
    own: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no sampling settings."""
    model: Annotated[str, Field(max_length=MAX_NAME)]

    def check_unknown(self) -> None:
        """Raise DataError for a field that asks for what this server cannot do."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in ASKS_NOTHING.get(name, ()):
                continue
            if name in ASKS_NOTHING:
                accepted = " or ".join(json.dumps(one) for one in ASKS_NOTHING[name])
                what = f"this server does not support {_shown(value)}, only {accepted}"
                raise DataError(what, where=name[:SHOWN], hint="Remove it.")
            known = sorted(set(type(self).model_fields) - {"model", "messages", "stream", "stream_options"})
            raise DataError("unknown field", where=name[:SHOWN], hint=f"Fields are {', '.join(known)}.")
        if getattr(self, "stream_options", None) is not None and not getattr(self, "stream", None):
            raise DataError("needs stream: true", where="stream_options", hint="Set stream, or leave this out.")


class SamplingRequest(WireRequest):
    """How an answer is sampled. What is left out is as in SamplingConfig, or as the model's makers recommend."""

    stream: bool | None = None
    stream_options: Annotated[StreamOptions, FewFields] | None = None
    temperature: Annotated[float, _number("temperature", high=2)] | None = None
    top_p: Annotated[float, _number("top_p")] | None = None
    top_k: Annotated[int, _number("top_k", low=-1)] | None = None
    """-1 is 0, as in vLLM: no limit."""
    min_p: Annotated[float, _number("min_p")] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, _number("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _number("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _number("frequency_penalty")] | None = None
    penalty_window: Annotated[int, _number("penalty_window")] | None = None
    no_repeat_ngram: Annotated[int, _number("no_repeat_ngram", high=MAX_NGRAM)] | None = None
    logit_bias: Any = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[Annotated[StopStrings, Tag(TEXT)] | Stops, TextOrList] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def longest(self) -> int | None:
        """Of the answer, in tokens."""
        raise NotImplementedError

    def sampling(self) -> SamplingConfig:
        """Raises DataError for a setting that is out of its limits."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise DataError("a stop string is empty", where="stop", hint="Every text begins with it. Remove it.")
        values: dict[str, Any] = {name: getattr(self, name) for name in LIMITS if name != "max_tokens"}
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        biases = None if not self.logit_bias else _biases(self.logit_bias)
        return SamplingConfig.of({**values, "max_tokens": self.longest, "logit_bias": biases, "stop": stop})

    def form(self) -> Form | None:
        """What the answer must be. Raises DataError for several forms, or one that is not understood."""
        forms = [*_response_forms(self.response_format, "response_format")]
        if self.guided_json is not None:
            forms.append(schema_form(_schema(self.guided_json, "guided_json"), "guided_json"))
        if self.guided_regex is not None:
            forms.append(regex_form(self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            forms.append(choice_form(_texts(self.guided_choice, "guided_choice"), "guided_choice"))
        if self.guided_grammar is not None:
            forms.append(grammar_form(self.guided_grammar, "guided_grammar"))
        if len(forms) > 1:
            what = f"{forms[0].field} requests another form"
            raise DataError(what, where=forms[1].field, hint="Request only one form.")
        return forms[0] if forms else None


def _response_forms(value: object, field: str) -> Iterator[Form]:
    """The form of OpenAI's `response_format`; none for text. Raises DataError."""
    if value is None:
        return
    value = value if isinstance(value, dict) else {}
    kind = value.get("type")
    if kind == "json_object" and not value.get("schema"):
        yield object_form(field)
    elif kind in ("json_object", "json_schema"):  # llama.cpp and instructor write a schema into the first too
        inside = value.get("json_schema", value)  # /v1/responses has the schema one level higher
        schema = inside.get("schema") if isinstance(inside, dict) else None
        yield schema_form(_schema(schema, f"{field}.schema"), field)
    elif kind != "text":
        what = f"has no supported type, got {_shown(value)}"
        raise DataError(what, where=field, hint='Types are "text", "json_object" and "json_schema".')


def _schema(value: object, where: str) -> object:
    """A JSON Schema, also as text. Raises DataError."""
    schema = _json_text(value, where)
    if not isinstance(schema, dict):
        raise DataError(f"must be a JSON Schema, got {_shown(schema)}", where=where)
    return schema


def _json_text(value: Any, where: str) -> Any:
    """A value that may be sent as JSON in a string. Raises DataError."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA:
        raise DataError(f"has {len(value):,} characters; {MAX_SCHEMA:,} are allowed", where=where)
    try:
        data = json.loads(value)
    except (ValueError, RecursionError):
        raise DataError(f"is not JSON, or is nested too deeply: {_shown(value)}", where=where) from None
    level = [data]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one if isinstance(one, list) else () for one in level)
        if not (level := list(chain.from_iterable(inner))):
            return data
    raise DataError(f"is nested more than {MAX_DEPTH} deep: {_shown(value)}", where=where)


def _check_characters(value: object, where: str) -> None:
    """Raise DataError where JSON data holds half a character, which no UTF-8 has, or a number above all floats."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        what = "holds half a character (a lone surrogate)"
        raise DataError(what, where=where, hint="Remove that character.") from None
    except ValueError:
        raise DataError("holds a number that is too large", where=where, hint="Numbers end at 1.8e308.") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _texts(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise DataError(f"must be a list of texts, got {_shown(value)}", where=where)
    return value


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """An object of token IDs and biases. SamplingConfig checks how many, and how large. Raises DataError."""
    if not isinstance(value, dict):
        raise DataError(f"must be an object of token IDs and biases, got {_shown(value)}", where="logit_bias")
    biases = []
    for id, bias in value.items():
        if not (id.isascii() and id.isdecimal() and len(id) < 10):
            raise DataError(f"{_shown(id)} is not a token ID", where="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise DataError(f"the bias of {id} is {_shown(bias)}, not a number", where="logit_bias")
        biases.append((int(id), float(bias)))
    return tuple(biases)


class ChatRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[WireMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "oldest"] | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def asked(self) -> Asked:
        """What the model is asked for. Raises DataError, which names the field."""
        self.check_unknown()
        messages = tuple(message.plain(f"messages.{index}") for index, message in enumerate(self.messages))
        if self.top_logprobs and not self.logprobs:
            raise DataError("needs logprobs: true", where="top_logprobs", hint="Set logprobs, or remove this field.")
        tools, calls = _tools(self.tools, self.tool_choice)
        form = self.form()
        if calls == "required" and form is not None:
            raise DataError("asks for a form, but tool_choice for a call", where=form.field, hint="Remove one of them.")
        if tools and form is not None:
            hint = 'Set tool_choice to "none", or remove this field.'
            raise DataError("asks for a form, so that no tool could be called", where=form.field, hint=hint)
        return Asked(
            sampling=self.sampling(),
            messages=messages,
            choices=self.n or 1,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            form=form,
            tools=tools,
            calls=calls,
            one_call=self.parallel_tool_calls is False,
            drops_oldest=self.truncation == "oldest",
        )


def _tools(value: object, choice: object) -> tuple[tuple[dict[str, Any], ...], Literal["auto", "required"]]:
    """The tools that a model may call, and whether it has to. Raises DataError."""
    tools = value or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise DataError(f"must be a list of at most {MAX_TOOLS} tools, got {_shown(tools)}", where="tools")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools.{number}")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise DataError("two tools have the same name", where="tools", hint="Give each tool its own name.")
    match choice:
        case None | "auto":
            return tuple(tools), "auto"
        case "none":
            return (), "auto"
        case "required":
            named = names
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            named = [name]
        case _:
            what = f"must be auto, none, required, or name a function, got {_shown(choice)}"
            raise DataError(what, where="tool_choice")
    chosen = tuple(tool for tool in tools if tool["function"]["name"] in named)
    if not chosen:
        raise DataError(f"there is no tool for {_shown(choice)}", where="tool_choice", hint="Send it in tools.")
    return chosen, "required"


def _check_tool(tool: object, where: str) -> None:
    """Raise DataError for what is no function with a name and a schema."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise DataError(f'must be of the type "function", got {_shown(tool)}', where=where)
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= TOOL_NAME_CHARS:
        what = f"must be a text of at most {TOOL_NAME_CHARS} characters, got {_shown(name)}"
        raise DataError(what, where=f"{where}.function.name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise DataError(f"is not a JSON Schema: {_shown(function['parameters'])}", where=f"{where}.function.parameters")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        what = f"must be object, got {_shown(kind)}"
        raise DataError(what, where=f"{where}.function.parameters.type", hint="Arguments of a call have names.")


class ResponsesRequest(WireRequest):
    """The body of POST /v1/responses. It becomes a ChatRequest; nothing is kept between requests."""

    input: Any
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None

    def settings(self) -> dict[str, Any]:
        """What the answer repeats of the request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": (self.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": self.temperature,
            "text": self.text or {"format": {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
        }

    def asked(self) -> Asked:
        """What the model is asked for. Raises DataError, which names the field."""
        self.check_unknown()
        if self.previous_response_id is not None:
            hint = "Send the whole conversation as input."
            raise DataError("this server keeps no responses", where="previous_response_id", hint=hint)
        if self.text is not None and (not isinstance(self.text, dict) or set(self.text) - {"format"}):
            raise DataError(f"must be an object with a format, got {_shown(self.text)}", where="text")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        values = {
            "model": self.model,
            "messages": system + _as_messages(self.input),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": _nested(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": (self.text or {}).get("format"),
            "truncation": "oldest" if self.truncation == "auto" else "disabled",
        }
        with response_names():
            return validated(ChatRequest, values).asked()


@contextmanager
def response_names() -> Iterator[None]:
    """Errors of a ChatRequest in the names of /v1/responses."""
    try:
        yield
    except DataError as error:
        renamed = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
        first, dot, rest = error.where.partition(".")
        raise DataError(error.what, where=renamed.get(first, first) + dot + rest, hint=error.hint) from None


def _as_messages(value: object) -> list[dict[str, Any]]:
    """The input of /v1/responses as messages of chat completions. Raises DataError."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise DataError(f"must be a text or a list of items, got {_shown(value)}", where="input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        match item:
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                call = {"id": item.get("call_id", ""), "function": {"name": name, "arguments": arguments}}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case {"type": "function_call_output", "output": output}:
                message = {"role": "tool", "content": _plain_parts(output)}
                messages.append({**message, "tool_call_id": item.get("call_id")})
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                messages.append({"role": role, "content": _plain_parts(content)})
            case _:
                raise DataError(f"is not a supported item: {_shown(item)}", where=f"input.{index}")
    return messages


def _plain_parts(content: object) -> object:
    """The parts of a content as chat completions name them. What is no text stays as it is, and is refused there."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": piece["text"]}
        if isinstance(piece, dict) and piece.get("type") in ("input_text", "output_text") and "text" in piece
        else piece
        for piece in content
    ]


def _nested(tools: object) -> object:
    """Functions of /v1/responses as chat completions write them. What is no function is refused there."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions: texts or token IDs that the model continues, without a chat template."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def longest(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def asked(self) -> Asked:
        """What the model is asked for. Raises DataError, which names the field."""
        self.check_unknown()
        prompts, choices = _prompts(self.prompt, "prompt"), self.best_of or self.n or 1
        if choices < (self.n or 1):
            raise DataError(f"is {choices}, but n is {self.n}", where="best_of", hint="Set it to at least n.")
        if choices > (self.n or 1) and self.stream:
            raise DataError("the best answers are known only at the end", where="best_of", hint="Set stream to false.")
        if len(prompts) * choices > MAX_SEQUENCES:
            what = f"{len(prompts)} prompts with {choices} answers each; {MAX_SEQUENCES} answers are allowed"
            raise DataError(what, where="prompt")
        return Asked(
            sampling=self.sampling(),
            prompts=prompts,
            choices=choices,
            logprobs=0 if self.logprobs is None and choices > (self.n or 1) else self.logprobs,
            form=self.form(),
            echo=bool(self.echo),
        )


def _prompts(value: object, where: str, most: int = MAX_SEQUENCES) -> tuple[str | tuple[int, ...], ...]:
    """One text, several texts, the token IDs of one, or of several. Raises DataError."""
    prompts: list[str | tuple[int, ...]] = []
    for entry in value if isinstance(value, list) and value and not _is_ids(value) else [value]:
        if isinstance(entry, str):
            if problem := bad_character(entry, "it"):
                raise DataError(f"{problem.reason}: {problem.what}", where=where, hint="Remove that character.")
            prompts.append(entry)
        elif _is_ids(entry):
            prompts.append(tuple(entry))  # type: ignore[arg-type]
        else:
            what = f"must be a text, a list of texts, or lists of token IDs, got {_shown(value)}"
            raise DataError(what, where=where)
        if len(prompts) > most:
            raise DataError(f"has more than {most} texts", where=where)
    return tuple(prompts)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and 0 <= id < MAX_TOKENS for id in value)


class EmbeddingRequest(WireRequest):
    """The body of POST /v1/embeddings."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        """The texts, or the token IDs of each. Raises DataError."""
        self.check_unknown()
        return _prompts(self.input, "input", MAX_INPUTS)


class TokenizeRequest(WireRequest):
    """
    The body of POST /tokenize, /apply-template and /v1/responses/input_tokens: a text (`prompt` of vLLM, `content` of
    llama.cpp, `input` of OpenAI), or messages.
    """

    prompt: str | None = None
    content: str | None = None
    input: str | None = None
    messages: Annotated[list[WireMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    def text(self) -> str | None:
        """The text; None where there are messages. Raises DataError where there is not exactly one of them."""
        self.check_unknown()
        sources = [name for name in ("prompt", "content", "input", "messages") if getattr(self, name) is not None]
        if len(sources) != 1:
            what = f"has {' and '.join(sources)}" if sources else "there is no text"
            raise DataError(what, where="prompt", hint='Send "prompt" or "messages".')
        if sources == ["messages"]:
            return None
        text: str = getattr(self, sources[0])
        if problem := bad_character(text, "it"):
            raise DataError(f"{problem.reason}: {problem.what}", where=sources[0], hint="Remove that character.")
        return text

    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.plain(f"messages.{index}") for index, message in enumerate(self.messages or ()))

    def offered(self) -> tuple[dict[str, Any], ...]:
        """The tools."""
        return _tools(self.tools, None)[0]


class DetokenizeRequest(WireRequest):
    """The body of POST /detokenize."""

    tokens: Any

    def ids(self) -> tuple[int, ...]:
        self.check_unknown()
        if self.tokens != [] and not _is_ids(self.tokens):
            raise DataError(f"must be a list of token IDs, got {_shown(self.tokens)}", where="tokens")
        return tuple(self.tokens)


def parsed(kind: type[WireKind], body: bytes, content_type: str) -> WireKind:
    """The request of a body. Raises DataError, which names the field. Takes milliseconds: call it in a thread."""
    sent_as = content_type.partition(";")[0].strip().lower()
    if body and not (sent_as.startswith("application/") and sent_as.endswith(("/json", "+json"))):
        raise DataError(f"the body is sent as {_shown(sent_as or None)}", hint=ACCEPTED)
    if not body:
        raise DataError("there is no body", hint=ACCEPTED)
    try:
        value = json.loads(body, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos : error.pos + SHOWN + 1]
        spot = f"where it reads {_shown(rest)}" if rest else "where it ends"
        what = f"the body is not JSON: {error.msg} at character {error.pos}, {spot}"
        raise DataError(what, hint=ACCEPTED) from None
    except ValueError as error:
        raise DataError(f"the body cannot be read: {error}", hint=ACCEPTED) from None
    checked = validated(kind, value)
    for name, setting in value.items():
        if name != "messages":  # whose texts are checked one by one
            _check_characters(setting, name[:SHOWN])
    return checked


def validated(kind: type[WireKind], value: object) -> WireKind:
    """A request as JSON data. Raises DataError, which names the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = [_explained(problem) for problem in error.errors(include_url=False)[:3]]
        rest = "".join(f"; {field}: {what}" for field, what in problems[1:])
        field, what = problems[0]
        raise DataError(what + rest, where=field, hint="" if field else ACCEPTED) from None


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
