"""Models that answer without a model: slowly, word by word, and what they are told to."""

import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import RunError
from bloomery.serve.chat_model import Finish, ModelInfo, StreamedAnswer, TextChunk, check_conversation

HOSTILE = '<img src=x onerror="document.title=`broken`"> & <script>document.title=`broken`</script>'


class FakeAnswerer:
    """
    Answers "NAME heard LAST (N messages)", one word a piece, and counts what it does.

    A question decides: "long" goes on until it is stopped, "break" raises after two words, "refuse" before the first,
    "hostile" answers with HTML. `gate`, if it is given, holds the answer after its second word until it is set.
    """

    def __init__(self, name: str, seconds_per_word: float = 0.0, gate: threading.Event | None = None) -> None:
        self.name, self._seconds, self._gate = name, seconds_per_word, gate
        self.heard: list[list[Message]] = []
        self.samplings: list[SamplingConfig] = []
        self.spans: list[tuple[float, float]] = []
        self.words_said = 0
        self.closed = threading.Event()

    def answer(self, messages: Sequence[Message], sampling: SamplingConfig) -> StreamedAnswer:
        check_conversation(messages)
        self.heard.append([*messages])
        self.samplings.append(sampling)
        if messages[-1]["content"] == "refuse":
            raise RunError("the weights are torn", hint="Run the recipe again.")
        return StreamedAnswer(sum(len(m["content"].split()) for m in messages), self._pieces(messages, sampling))

    def _pieces(self, messages: Sequence[Message], sampling: SamplingConfig) -> Generator[TextChunk, None, None]:
        began = time.monotonic()
        try:
            words = self._words(messages)
            finish: Finish = "stop" if len(words) <= sampling.max_tokens else "length"
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


class FakeModels:
    """A shelf of fakes."""

    def __init__(self, *answerers: FakeAnswerer) -> None:
        self._answerers = {answerer.name: answerer for answerer in answerers}

    def names(self) -> list[ModelInfo]:
        return [ModelInfo(name, 1_700_000_000, Path("runs") / name) for name in self._answerers]

    def get(self, name: str) -> FakeAnswerer:
        if name not in self._answerers:
            raise RunError(f"there is no model {name!r}")
        return self._answerers[name]
