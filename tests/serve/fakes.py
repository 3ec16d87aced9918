"""Models that answer without a model: slowly, word by word, and what they are told to."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import RunError
from bloomery.serve.chat_model import AnswerEnd, Asked, ModelInfo, StoppedError, TextChunk, check_conversation

HOSTILE = '<img src=x onerror="document.title=`broken`"> & <script>document.title=`broken`</script>'


class FakeAnswerer:
    """
    Answers "NAME heard LAST (N messages)", one word a piece, and counts what it does.

    A question decides: "long" goes on until it is stopped, "break" raises after two words, "refuse" before the first,
    "hostile" answers with HTML. `gate`, if it is given, holds the answer after its second word until it is set.
    """

    def __init__(self, name: str, seconds_per_word: float = 0.0, gate: threading.Event | None = None) -> None:
        self.name, self._seconds, self._gate = name, seconds_per_word, gate
        self.asked: list[Asked] = []
        self.heard: list[list[Message]] = []
        self.spans: list[tuple[float, float]] = []
        self.words_said = 0
        self.closed = threading.Event()

    def begin(self, asked: Asked, notify: Callable[[], None]) -> "FakeAnswer":
        messages = [*asked.messages, *(Message(role="user", content=str(prompt)) for prompt in asked.prompts)]
        check_conversation(messages)
        self.heard.append(messages)
        self.asked.append(asked)
        if messages[-1]["content"] == "refuse":
            raise RunError("the weights are torn", hint="Run the recipe again.")
        count = sum(len(m["content"].split()) for m in messages)
        return FakeAnswer(count, self._pieces(messages, asked.sampling), notify)

    @property
    def samplings(self) -> list[SamplingConfig]:
        return [asked.sampling for asked in self.asked]

    def _pieces(self, messages: Sequence[Message], sampling: SamplingConfig) -> Generator[TextChunk, None, None]:
        began = time.monotonic()
        try:
            words = self._words(messages)
            finish: AnswerEnd = "stop" if len(words) <= sampling.max_tokens else "length"
            for place, word in enumerate(words[: sampling.max_tokens]):
                if place == 2 and messages[-1]["content"] == "break":
                    raise ValueError("a bug in the engine")
                if place == 2 and self._gate is not None:
                    assert self._gate.wait(60)
                time.sleep(self._seconds)
                self.words_said += 1
                yield TextChunk(word if place == 0 else f" {word}", 1)
            yield TextChunk("", 0, finish)
        finally:
            self.spans.append((began, time.monotonic()))
            self.closed.set()

    def _words(self, messages: Sequence[Message]) -> list[str]:
        question = messages[-1]["content"]
        if question == "long":
            return ["on"] * 100_000
        if question == "hostile":
            return HOSTILE.split(" ")
        return f"{self.name} heard {question} ({len(messages)} messages)".split(" ")


class FakeAnswer:
    """An answer whose pieces a thread makes."""

    dropped = cached_tokens = 0

    def __init__(
        self, prompt_tokens: int, pieces: Generator[TextChunk, None, None], notify: Callable[[], None]
    ) -> None:
        self.prompt_tokens, self._notify = prompt_tokens, notify
        self._unread: list[TextChunk] = []
        self._lock, self._cancelled = threading.Lock(), False
        self._error: Exception | None = None
        self._done = False
        threading.Thread(target=self._work, args=(pieces,), daemon=True).start()

    def _work(self, pieces: Generator[TextChunk, None, None]) -> None:
        try:
            with closing(pieces):
                for piece in pieces:
                    if self._cancelled:
                        raise StoppedError
                    with self._lock:
                        self._unread.append(piece)
                    self._notify()
        except Exception as error:
            self._error = error
            self._notify()

    def take(self) -> list[TextChunk]:
        with self._lock:
            pieces, self._unread = self._unread, []
        self._done = self._done or any(piece.finish for piece in pieces)
        if not pieces and self._error is not None:
            raise self._error
        if self._error is not None:
            self._notify()
        return pieces

    @property
    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        self._cancelled = True

    def timings(self) -> dict[str, float]:
        return {}


class FakeModels:
    """A shelf of fakes."""

    def __init__(self, *answerers: FakeAnswerer) -> None:
        self._answerers = {answerer.name: answerer for answerer in answerers}

    def names(self) -> list[ModelInfo]:
        return [ModelInfo(name, 1_700_000_000, Path("runs") / name) for name in self._answerers]

    is_loading = False

    def get(self, name: str) -> FakeAnswerer:
        if name not in self._answerers:
            raise RunError(f"there is no model {name!r}")
        return self._answerers[name]
