"""
Sends one request to a served model, in two protocols, and interprets the response.

Raises PassingError if the same request may be answered later, and RefusedError if it will not be. Each says whether
the request may have been charged. A response with an error status means that no answer was generated. After a
broken connection the charge is unknown.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import urllib3

from bloomery.core import extras
from bloomery.core.errors import DataError
from bloomery.data.sources import http_client
from bloomery.data.sources.http_client import PassingError, RefusedError
from bloomery.data.synthesis.config import Anthropic, OpenAI, Synthesize

WHOLE = ("stop", "end_turn", "stop_sequence", "eos", "eos_token")
"""Reasons to stop that mean: the answer is whole."""
CUT = ("length", "max_tokens", "model_context_window_exceeded")
"""Those that mean: it is not."""
MAX_ANSWER_BYTES = 64 * 2**20
REFUSED = ("refusal", "content_filter")
NOT_TAKEN = "not taken"
"""Of an answer that is none: the server takes others, and not this question."""
TOKENS_OF_A_MESSAGE = 64
"""More than a template adds to the content of a message, whose tokens are at most its bytes."""


class UnknownError(PassingError):
    """The request may be repeated, and may have been answered and paid for all the same."""


@dataclass(frozen=True)
class ProviderAnswer:
    text: str
    stopped: str
    """Why the model stopped, in the provider's words."""
    model: str
    id: str
    input_tokens: int
    output_tokens: int


Ask = Callable[[str, Sequence[Mapping[str, str]], str], ProviderAnswer]
"""
System, messages, name -> one turn. The name is the same for the same request: a server that knows such names answers
it only once.
"""


def not_taken(why: str) -> ProviderAnswer:
    """In place of the answer to a question that the server refuses: it cost nothing."""
    return ProviderAnswer(text=why, stopped=NOT_TAKEN, model="", id="", input_tokens=0, output_tokens=0)


def asker(config: Synthesize) -> Ask:
    """Raises DataError where the key, or the package of the protocol, is missing."""
    match config.provider:
        case Anthropic() as provider:
            return _Anthropic(provider, config).ask
        case OpenAI() as provider:
            return _OpenAI(provider, config).ask
        case None:
            raise ValueError("no model is named that could answer")


def most_tokens(system: str, messages: Sequence[Mapping[str, str]], max_answer_tokens: int) -> tuple[int, int]:
    """Read and written for one request, at most."""
    texts = [system, *(message["content"] for message in messages)]
    return sum(len(text.encode()) + TOKENS_OF_A_MESSAGE for text in texts), max_answer_tokens


def _key(variable: str, *, required: bool) -> str:
    key = http_client.secret(os.environ.get(variable, ""), variable) if variable else ""
    if required and not key:
        hint = f"export {variable}=…   # or name another variable in synthesize.provider.key_variable"
        raise DataError("there is no key", where=variable, hint=hint)
    return key


class _OpenAI:
    def __init__(self, provider: OpenAI, config: Synthesize) -> None:
        self._provider, self._config = provider, config
        self._url = provider.address.rstrip("/") + "/chat/completions"
        self._key = _key(provider.key_variable, required=bool(provider.key_variable))
        self._timeout = urllib3.Timeout(connect=15.0, read=config.timeout_seconds)

    def ask(self, system: str, messages: Sequence[Mapping[str, str]], name: str) -> ProviderAnswer:
        said = [{"role": "system", "content": system}, *messages] if system else list(messages)
        body: dict[str, Any] = {
            "model": self._provider.model,
            "messages": said,
            self._provider.limit_field: self._config.max_answer_tokens,
        }
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        headers = {"Content-Type": "application/json", "Idempotency-Key": name}
        begun = time.monotonic()
        try:
            with http_client.asked(
                "POST",
                self._url,
                token=self._key,
                headers=headers,
                body=json.dumps(body).encode(),
                timeout=self._timeout,
            ) as response:
                left = self._config.timeout_seconds - (time.monotonic() - begun)
                data = http_client.whole(response, MAX_ANSWER_BYTES, left)
        except http_client.BrokenError as error:
            raise UnknownError(str(error)) from None
        return _completion(data, most_tokens(system, messages, self._config.max_answer_tokens))


def _completion(data: bytes, most: tuple[int, int]) -> ProviderAnswer:
    """A server that does not count is taken to have needed the most."""
    try:
        reply = json.loads(data)
        choice, usage = reply["choices"][0], reply.get("usage")
        message = choice["message"]
        text, refusal = _text(message.get("content")), message.get("refusal")
        counted = most if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
        return ProviderAnswer(
            text=text or str(refusal or ""),
            stopped=REFUSED[0] if refusal and not text else str(choice.get("finish_reason") or ""),
            model=str(reply.get("model") or ""),
            id=str(reply.get("id") or ""),
            input_tokens=_tokens(counted[0]),
            output_tokens=_tokens(counted[1]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownError(f"gave no chat completion: {type(error).__name__}: {error}") from None


def _text(content: Any) -> str:
    """Of a message: a text, or parts that are text."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _tokens(counted: Any) -> int:
    """What a server counted. Raises ValueError where that is no number of tokens: -1 would widen the budget."""
    if isinstance(counted, bool) or not isinstance(counted, int | float) or not 0 <= counted < 2**31:
        raise ValueError(f"{counted!r} is no number of tokens")
    return int(counted)


class _Anthropic:
    def __init__(self, provider: Anthropic, config: Synthesize) -> None:
        self._provider, self._config = provider, config
        self._api: Any = extras.load("anthropic")
        key = _key(provider.key_variable, required=True)
        # It would try again by itself, without telling what that may cost, and take its questions to other hosts.
        self._client = self._api.Anthropic(
            api_key=key,
            base_url=provider.address,
            max_retries=0,
            timeout=config.timeout_seconds,
            http_client=self._api.DefaultHttpxClient(follow_redirects=False),
        )

    def ask(self, system: str, messages: Sequence[Mapping[str, str]], name: str) -> ProviderAnswer:
        more: dict[str, Any] = {"system": system} if system else {}
        if self._config.temperature is not None:
            more["temperature"] = self._config.temperature
        try:
            message = self._client.messages.create(
                model=self._provider.model,
                max_tokens=self._config.max_answer_tokens,
                messages=list(messages),
                extra_headers={"Idempotency-Key": name},
                **more,
            )
        except self._api.APIStatusError as error:
            raise _trouble(error) from None
        except (self._api.APIError, ValueError, RecursionError) as error:  # broken, too late, or no JSON
            cause = error.__cause__
            what = f"{type(error).__name__}: {error}" + (f" ({type(cause).__name__}: {cause})" if cause else "")
            if type(cause).__name__ in ("ConnectError", "ConnectTimeout"):  # of its own client: it was not sent
                raise PassingError(what) from None
            raise UnknownError(what) from None
        try:
            return ProviderAnswer(
                text="".join(block.text for block in message.content if block.type == "text"),
                stopped=str(message.stop_reason or ""),
                model=str(message.model or ""),
                id=str(message.id or ""),
                input_tokens=_tokens(message.usage.input_tokens),
                output_tokens=_tokens(message.usage.output_tokens),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise UnknownError(f"gave no message: {type(error).__name__}: {error}") from None


def _trouble(error: Any) -> PassingError | RefusedError:
    """What an answer with a status means."""
    status, headers = int(error.status_code), error.response.headers
    body = error.body if isinstance(error.body, dict) else {}
    said = str(body["error"].get("message") or "") if isinstance(body.get("error"), dict) else ""
    what = f"HTTP {status}" + (f": {said}" if said else "")
    if status in http_client.PASSING:
        return PassingError(what, http_client.retry_after(headers))
    hint = "See the key, and what the account may still spend." if status in (401, 402, 403) or "credit" in said else ""
    return RefusedError(what, hint, status)
