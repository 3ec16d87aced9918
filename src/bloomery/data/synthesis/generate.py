"""
Asks served models, records each request and its cost, and turns answers into conversations.

A request goes out in one of two protocols. PassingError says that it may be answered later, RefusedError that it will
not be, and each whether it may have been charged. A response with an error status means that no answer was generated.

Requests, answers and costs go to requests.jsonl in each stage's folder. These files outlive the process.
A line before a request states the most that it may cost. A line after it states the real cost, with the answer.
Each line holds its own SHA-256. A request with only the first line counts as spent in full; the process died or the
connection broke. The recorded sum is therefore an upper bound of what is paid, whatever happens.

A question that has its answer is never asked again. This also holds when a changed recipe has a new folder in the
same run. The records of the other folders are read too. Their costs count against the budget, in dollars at the
price that each request had.

An answer becomes conversations, or is rejected with a reason. Each answer that was paid for is among the
conversations or the rejected answers.

A request about a document asks for one of five results. These are a summary, its main points, questions that it
answers, an easier version, or a harder version.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import urllib3

from bloomery.core import extras
from bloomery.core.errors import DataError
from bloomery.core.io import canonical, disk_errors, sha256_bytes
from bloomery.data.chat.formats import not_text
from bloomery.data.readers import rows as readers_rows
from bloomery.data.sources import http_client
from bloomery.data.sources.http_client import PassingError, RefusedError
from bloomery.data.synthesis.config import Anthropic, Augment, ConversationTask, Mode, OpenAI, Synthesize, TokenPrice

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
            raise ValueError("no model is set")


def most_tokens(system: str, messages: Sequence[Mapping[str, str]], max_answer_tokens: int) -> tuple[int, int]:
    """Read and written for one request, at most."""
    texts = [system, *(message["content"] for message in messages)]
    return sum(len(text.encode()) + TOKENS_OF_A_MESSAGE for text in texts), max_answer_tokens


def _key(variable: str, *, required: bool) -> str:
    key = http_client.secret(os.environ.get(variable, ""), variable) if variable else ""
    if required and not key:
        hint = f"export {variable}=…   # or set another variable in synthesize.provider.key_variable"
        raise DataError("there is no API key", where=variable, hint=hint)
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
        raise UnknownError(f"did not return a chat completion: {type(error).__name__}: {error}") from None


def _text(content: Any) -> str:
    """Of a message: a text, or parts that are text."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _tokens(counted: Any) -> int:
    """What a server counted. Raises ValueError where that is no number of tokens: -1 would widen the budget."""
    if isinstance(counted, bool) or not isinstance(counted, int | float) or not 0 <= counted < 2**31:
        raise ValueError(f"{counted!r} is not a number of tokens")
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
            raise _error_of(error) from None
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
            raise UnknownError(f"did not return a message: {type(error).__name__}: {error}") from None


def _error_of(error: Any) -> PassingError | RefusedError:
    """What an answer with a status means."""
    status, headers = int(error.status_code), error.response.headers
    body = error.body if isinstance(error.body, dict) else {}
    said = str(body["error"].get("message") or "") if isinstance(body.get("error"), dict) else ""
    what = f"HTTP {status}" + (f": {said}" if said else "")
    if status in http_client.PASSING:
        return PassingError(what, http_client.retry_after(headers))
    hint = "Check the key and the credit of the account." if status in (401, 402, 403) or "credit" in said else ""
    return RefusedError(what, hint, status)


FILE = "requests.jsonl"
SHA256 = "sha256"
"""Of a line: the key of the hash of its other keys."""
TokenCounts = Sequence[int]
"""Read and written."""
DollarAmounts = Sequence[float]
"""Of a million tokens read, and of a million written."""


class Budget:
    """The requests of a folder. Every method may be called from any thread."""

    def __init__(self, folder: Path, config: Synthesize) -> None:
        self._path = folder / FILE
        self._config = config
        price = (config.provider and config.provider.price) or TokenPrice(input_dollars=0.0, output_dollars=0.0)
        self._price = price.input_dollars, price.output_dollars
        self._lock = threading.Condition()
        self._open: dict[str, tuple[int, int]] = {}
        """Requests under way: tokens in and out, at most."""
        self._taken = [0, 0]
        self.dollars = 0.0
        """What that cost."""
        self.answers: dict[str, ProviderAnswer] = {}
        self.lost = 0
        """Requests that may have been paid for, and brought nothing."""
        self.served = 0
        """Those that brought an answer since this was opened."""
        for path in sorted({*folder.parent.glob(f"*-synthesize-*/{FILE}"), self._path}):
            self._read(path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._lock, disk_errors(self._path):
            self._file.close()

    def reserve(self, name: str, system: str, messages: Sequence[Mapping[str, str]]) -> bool:
        """
        Set aside what a request may cost at most. False where the budget has no room for it, also when all requests
        under way have come in; until then it waits. It also waits for the same request where that is under way, and
        where it has its answer then, nothing is set aside.
        """
        most = most_tokens(system, messages, self._config.max_answer_tokens)
        with self._lock:
            while name in self._open or not self._has_room(most):
                if not self._open:
                    return False
                self._lock.wait()
                if name in self.answers:
                    return True
            self._open[name] = most
            self._write({"request": name, "at_most": most, "price": self._price})
        return True

    def answered(self, name: str, answer: ProviderAnswer) -> None:
        with self._lock:
            self._settle(name)
            self.served += 1
            self._take(name, answer, self._price)
            self._write({"request": name, "answer": asdict(answer), "price": self._price})

    def not_served(self, name: str, why: str) -> None:
        """The request was turned down, and cost nothing."""
        with self._lock:
            self._settle(name)
            self._write({"request": name, "not_served": why})

    def unknown(self, name: str, why: str) -> None:
        """Nobody knows whether the request was served: it counts as paid."""
        with self._lock:
            most = self._settle(name)
            self._lose(most, self._price)
            self._write({"request": name, "unknown": why})

    @property
    def tokens(self) -> tuple[int, int]:
        """Read and written so far, those of lost requests at most."""
        return self._taken[0], self._taken[1]

    def _has_room(self, most: tuple[int, int]) -> bool:
        more = [sum(kind) for kind in zip(most, *self._open.values(), strict=True)]
        limit = self._config.max_dollars
        affordable = limit is None or self.dollars + _cost(more, self._price) <= limit
        return sum(self._taken) + sum(more) <= self._config.max_tokens and affordable

    def _settle(self, name: str) -> tuple[int, int]:
        most = self._open.pop(name)
        self._lock.notify_all()
        return most

    def _take(self, name: str, answer: ProviderAnswer, price: DollarAmounts) -> None:
        self.answers[name] = answer
        self._spend((answer.input_tokens, answer.output_tokens), price)

    def _lose(self, most: TokenCounts, price: DollarAmounts) -> None:
        self.lost += 1
        self._spend(most, price)

    def _spend(self, tokens: TokenCounts, price: DollarAmounts) -> None:
        self._taken = [sum(kind) for kind in zip(self._taken, tokens, strict=True)]
        self.dollars += _cost(tokens, price)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:  # an interrupt has ended the stage: who reads this counts what was under way as paid
            return
        with disk_errors(self._path):
            line = {**line, SHA256: _sha256(line)}
            self._file.write(json.dumps(line) + "\n")  # in ASCII: an answer may hold half a surrogate pair
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, path: Path) -> None:
        """What earlier attempts left. A last line that a dying process left torn is cut off."""
        if not path.exists():
            return
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        begun: dict[str, tuple[TokenCounts, DollarAmounts]] = {}
        for number, line in readers_rows.jsonl(path):
            price = self._price_of(line)
            match _unchanged(line):
                case {"request": str(name), "at_most": [int(), int()] as most}:
                    if name in begun:
                        self._lose(*begun[name])
                    begun[name] = most, price
                case {"request": str(name), "answer": dict(answer)} if _is_whole(answer):
                    begun.pop(name, None)
                    self._take(name, ProviderAnswer(**answer), price)
                case {"request": str(name), "not_served": str()}:
                    begun.pop(name, None)
                case {"request": str(name), "unknown": str()}:
                    self._lose(*begun.pop(name, ((0, 0), price)))
                case _:
                    hint = "The file is damaged or was changed by hand. Remove that line: its request is sent again."
                    raise DataError("is not a valid line of a ledger", where=f"{path}:{number}", hint=hint)
        for most, price in begun.values():
            self._lose(most, price)

    def _price_of(self, line: object) -> DollarAmounts:
        """At which a line was written; today's, where it does not say."""
        match line:
            case {"price": [int() | float(), int() | float()] as price}:
                return float(price[0]), float(price[1])
        return self._price


def _unchanged(line: object) -> object:
    """The content of a line, or None for one that is not as it was written."""
    content = {name: value for name, value in line.items() if name != SHA256} if isinstance(line, dict) else {}
    return content if isinstance(line, dict) and line.get(SHA256) == _sha256(content) else None


def _sha256(line: Mapping[str, Any]) -> str:
    return sha256_bytes(json.dumps(line, sort_keys=True).encode())


def _cost(tokens: TokenCounts, price: DollarAmounts) -> float:
    return sum(count * dollars for count, dollars in zip(tokens, price, strict=True)) / 1e6


def _is_whole(answer: Mapping[str, Any]) -> bool:
    kinds = {"text": str, "stopped": str, "model": str, "id": str, "input_tokens": int, "output_tokens": int}
    return answer.keys() == kinds.keys() and all(isinstance(answer[name], kind) for name, kind in kinds.items())


ASKS: Mapping[Mode, str] = {
    "summary": "Summarize this text in a few sentences:\n\n{text}",
    "key_points": "List the key points of this text, one on each line:\n\n{text}",
    "harder": "Rewrite this text for an expert, in exact terms with full arguments, and leave nothing out:\n\n{text}",
    "simpler": "Rewrite this text in plain words and short sentences, and leave nothing out:\n\n{text}",
    "questions": "{text}\n\n---\nWrite {count} that this text answers, each with its answer in one or two whole "
    'sentences. Reply with nothing but a JSON list of objects {{"question": "…", "answer": "…"}}.',
}
LIST = re.compile(r"\[[ \t\r\n]*\{")
"""How a JSON list of objects begins."""
MOST_BEGINNINGS = 100
SYSTEM = "Work with the given text alone: add nothing that it does not say. Reply without preface."


def tasks(config: Augment, documents: Iterable[Mapping[str, Any]]) -> Iterator[ConversationTask]:
    """One task for each document that a mode can take; `documents` have id, text and domain."""
    turn = number = 0
    for row in documents:
        if config.domains and row["domain"] not in config.domains:
            continue
        text = beginning(row["text"], config.max_characters)
        words = len(text.split())
        if words < config.min_words:
            continue
        modes = [*config.modes[turn % len(config.modes) :], *config.modes[: turn % len(config.modes)]]
        mode = next((mode for mode in modes if _takes(mode, text, config)), None)
        if mode is None:
            continue
        turn += 1
        num_questions = min(config.max_questions, max(1, words // config.words_per_question))
        count = "1 question" if num_questions == 1 else f"{num_questions} questions"
        ask = ASKS[mode].format(text=text, count=count)
        many = num_questions if mode == "questions" else 0
        yield ConversationTask(number, mode, (ask,), SYSTEM, document=row["id"], text=text, max_questions=many)
        number += 1


def _takes(mode: Mode, text: str, config: Augment) -> bool:
    if mode not in ("harder", "simpler"):
        return True
    ease = reading_ease(text)
    return ease > config.easy_from if mode == "harder" else ease < config.hard_below


def beginning(text: str, limit: int) -> str:
    """At most `limit` characters from the front, to the end of a paragraph if there is one, or else of a word."""
    if len(text) <= limit:
        return text.strip()
    cut = text[:limit]
    end = cut.rfind("\n\n")
    if end < limit // 2:
        end = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[: end if end > 0 else limit].strip()


def reading_ease(text: str) -> float:
    """
    Flesch's reading ease: 206.835 − 1.015 words a sentence − 84.6 syllables a word (Flesch 1948,
    https://doi.org/10.1037/h0057532). Syllables are counted as groups of vowels, without a silent e at the end.
    """
    words = re.findall(r"[^\W\d_]+", text)
    if not words:
        return 0.0
    sentences = max(1, len(re.findall(r"[.!?]+(?=\s|$)", text)))
    syllables = sum(_syllables(word.lower()) for word in words)
    return 206.835 - 1.015 * len(words) / sentences - 84.6 * syllables / len(words)


def _syllables(word: str) -> int:
    groups = len(re.findall(r"[aeiouyäöüáéíóúàèìòùâêîôû]+", word))
    silent = word.endswith("e") and not word.endswith(("le", "ee")) and groups > 1
    return max(1, groups - silent)


def questions(answer: str, limit: int) -> list[tuple[str, str]]:
    """
    Question and answer pairs of a model's reply, which may have a fence or a few words around its JSON. Raises
    ValueError where there are none.
    """
    items = _first_list(answer)
    pairs = []
    for item in items:
        match item:
            case {"question": str(question), "answer": str(said)} if question.strip() and said.strip():
                if not_text(question + said):
                    raise ValueError("holds a NUL or half a surrogate pair")
                pairs.append((question.strip(), said.strip()))
            case _:
                raise ValueError("holds an element that is not a question with an answer")
    if not pairs:
        raise ValueError("holds no question")
    return pairs[:limit]


def _first_list(answer: str) -> list[object]:
    """The first JSON list of objects in a text. Few beginnings are tried: each may be read up to the end."""
    decoder = json.JSONDecoder()
    for begin in islice(LIST.finditer(answer), MOST_BEGINNINGS):
        try:
            value, _ = decoder.raw_decode(answer, begin.start())
        except (ValueError, RecursionError):  # a bracket of the words around it
            continue
        if isinstance(value, list):
            return value
    raise ValueError("holds no JSON list")


SHORT_CHARACTERS = 40
"""Answers of fewer letters may be the same to different questions."""

PlainMessages = list[dict[str, str]]


@dataclass(frozen=True)
class TaskOutcome:
    """What became of a task: conversations, or the reason why there are none."""

    task: ConversationTask
    talks: list[PlainMessages]
    reason: str = ""
    answers: Sequence[ProviderAnswer] = ()


def request_name(config: Synthesize, task: ConversationTask, turn: int) -> str:
    """A hash of all that decides about an answer: the same question has the same name in every attempt."""
    asked = config.provider
    how = [asked and asked.kind, asked and asked.model, config.max_answer_tokens, config.temperature]
    return sha256_bytes(canonical([*how, task.system, *task.asks[: turn + 1]]))[:24]


def outcome(config: Synthesize, task: ConversationTask, answers: Mapping[str, ProviderAnswer]) -> TaskOutcome | None:
    """What the answers so far make of a task; None as long as a turn is missing that has to be asked."""
    messages: PlainMessages = []
    received: list[ProviderAnswer] = []
    for turn, ask in enumerate(task.asks):
        answer = answers.get(request_name(config, task, turn))
        if answer is None:
            return None
        received.append(answer)
        if reason := _trouble(answer):
            return TaskOutcome(task, [], reason, received)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer.text.strip()}]
    if not task.max_questions:
        return TaskOutcome(task, [messages], "", received)
    try:
        pairs = questions(received[0].text, task.max_questions)
    except ValueError:
        return TaskOutcome(task, [], "no_questions", received)
    asked = [(f"{task.text}\n\n{question}", answer) for question, answer in pairs]
    return TaskOutcome(
        task,
        [[{"role": "user", "content": ask}, {"role": "assistant", "content": said}] for ask, said in asked],
        "",
        received,
    )


def _trouble(answer: ProviderAnswer) -> str:
    if answer.stopped in CUT:
        return "cut"
    if answer.stopped in REFUSED:
        return "refusal"
    if answer.stopped == NOT_TAKEN:
        return "not_taken"
    if problem := not_text(answer.text):
        return problem.reason
    if not answer.text.strip():
        return "empty"
    return "" if answer.stopped in WHOLE else "unfinished"


@dataclass
class NewConversations:
    """Conversations that are new: no first question is there twice, and no answers but short ones."""

    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def sorted_out(self, task_outcome: TaskOutcome) -> Iterator[tuple[PlainMessages, str]]:
        """Each conversation of a task with "" or the reason why it is rejected. One without any has one empty."""
        for talk in task_outcome.talks or [[]]:
            reason = task_outcome.reason or ("duplicate" if self._is_known(talk) else "")
            self.count += not reason
            yield talk, reason

    def _is_known(self, talk: PlainMessages) -> bool:
        answers = " ".join(message["content"] for message in talk if message["role"] == "assistant")
        marks = [_mark("question", talk[0]["content"])]
        if len(answers) >= SHORT_CHARACTERS:
            marks.append(_mark("answers", answers))
        if any(mark in self._seen for mark in marks):
            return True
        self._seen.update(marks)
        return False


def _mark(kind: str, text: str) -> bytes:
    """The same for texts that differ in case, white space and marks only."""
    plain = " ".join("".join(letter if letter.isalnum() else " " for letter in text.casefold()).split())
    return hashlib.sha256(f"{kind} {plain or text}".encode()).digest()


def rows(outcomes: Iterable[TaskOutcome]) -> Iterator[tuple[dict[str, Any], str]]:
    """What is written of each conversation, in the order of the tasks, with "" or the reason why it is rejected."""
    kept = NewConversations()
    for task_outcome in sorted(outcomes, key=lambda item: item.task.number):
        for index, (talk, reason) in enumerate(kept.sorted_out(task_outcome)):
            yield row(task_outcome, talk, index, reason), reason


def row(task_outcome: TaskOutcome, talk: PlainMessages, index: int, reason: str) -> dict[str, Any]:
    task, answers = task_outcome.task, task_outcome.answers
    facts: dict[str, Any] = {
        "messages": talk,
        "id": f"synthesize/{task.number}" + (f"/{index}" if len(task_outcome.talks) > 1 else ""),
        "category": task.category,
        "model": answers[-1].model,
        "request_ids": [answer.id for answer in answers],
        "input_tokens": sum(answer.input_tokens for answer in answers),
        "output_tokens": sum(answer.output_tokens for answer in answers),
        "system": task.system,
    }
    if task.document:
        facts["document"] = task.document
    if reason:
        facts |= {"reason": reason, "asked": list(task.asks), "answers": [answer.text for answer in answers]}
    return facts
