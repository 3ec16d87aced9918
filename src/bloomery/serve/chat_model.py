"""
Turn a conversation into an answer, streamed as text pieces.

The engine works with token IDs. Here they become text that can be shown to a person at once. A piece never holds
half a character. It never holds the beginning of a stop string that a later token may complete.

`ModelRegistry` has the models of all run folders, and loads each when it is first requested.
"""

import codecs
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import CheckpointError, DataError, RunError
from bloomery.core.log import info
from bloomery.generate.engine import Engine
from bloomery.hw import device
from bloomery.tokenizer.chat_template import SHORTER
from bloomery.weights import hf, locate
from bloomery.weights.hf import Loaded, LoadFormat

Finish = Literal["stop", "length"]
"""Why an answer ended: the model ended it (or a stop string did), or there was no room for more."""

ANSWERED_ROLES = ("user", "tool")


@dataclass(frozen=True)
class TextChunk:
    """What one step added: whole characters (maybe none yet), the tokens it took, and on the last piece the reason."""

    text: str
    tokens: int
    finish: Finish | None = None


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer that is made while `pieces` is read. The last piece has a finish; closing `pieces` ends the work."""

    prompt_tokens: int
    pieces: Generator[TextChunk, None, None]


@runtime_checkable
class Answerer(Protocol):
    """A model that takes a conversation."""

    name: str

    def answer(self, messages: Sequence[Message], sampling: SamplingConfig) -> StreamedAnswer:
        """Begin an answer. Raises DataError, before any work, for a conversation that the model cannot take."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """What a list of models says of one: its name, when it was made (Unix seconds), where it lies, its context."""

    id: str
    created: int
    path: Path
    context: int = 0
    """In tokens; 0 where it is not known before the model is loaded."""


@runtime_checkable
class Models(Protocol):
    """The models that can be asked for. Both methods are called from several threads."""

    def names(self) -> Sequence[ModelInfo]: ...

    def get(self, name: str) -> Answerer:
        """Load a model, or hand out the one that is loaded. Raises RunError for an unknown name."""
        ...


@runtime_checkable
class EngineProtocol(Protocol):
    """Token IDs in, token IDs out. `context` is the number of positions. A stop ID is yielded and ends the stream."""

    @property
    def context(self) -> int: ...

    def stream(self, ids: Sequence[int], sampling: SamplingConfig, *, stop_ids: frozenset[int]) -> Iterator[int]: ...


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
class ByteDecoder(Protocol):
    """The part of a tokenizer that is needed here. Bytes, because one character may span tokens."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


class TextAnswerer:
    """An engine, a renderer and a tokenizer as one model that takes a conversation."""

    def __init__(
        self,
        name: str,
        engine: EngineProtocol,
        renderer: Callable[[], RendererProtocol],
        tokenizer: ByteDecoder,
        recommended: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        `renderer` gives the chat template, or raises CheckpointError for a model without one. `recommended` are the
        sampling settings of the model's makers.
        """
        self.name = name
        self._engine, self._renderer, self._tokenizer = engine, renderer, tokenizer
        self._recommended = recommended

    def answer(self, messages: Sequence[Message], sampling: SamplingConfig) -> StreamedAnswer:
        """Begin an answer. Raises DataError for wrong roles, no question, or a prompt that fills the context."""
        check_conversation(messages)
        renderer = self._renderer()
        ids = renderer.prompt(messages, self._engine.context)
        self._check_room(ids, "the conversation", "messages", SHORTER)
        return StreamedAnswer(len(ids), self._pieces(ids, sampling, renderer.end_ids, renderer.lead))

    def continuation(self, ids: Sequence[int], sampling: SamplingConfig, stop_ids: frozenset[int]) -> StreamedAnswer:
        """
        Begin a continuation of token IDs, without the chat template. It ends before an ID of `stop_ids`. Raises
        DataError for a prompt that is empty or fills the context.
        """
        self._check_room(ids, "the prompt", "prompt", "Shorten it.")
        return StreamedAnswer(len(ids), self._pieces(ids, sampling, stop_ids, ""))

    def _check_room(self, ids: Sequence[int], subject: str, where: str, hint: str) -> None:
        if len(ids) >= self._engine.context:
            what = f"{subject} takes {len(ids)} tokens, and {self.name} has a context of {self._engine.context}"
            raise DataError(what, where=where, hint=hint)

    def _pieces(
        self, ids: Sequence[int], sampling: SamplingConfig, stop_ids: frozenset[int], lead: str
    ) -> Generator[TextChunk, None, None]:
        sampling = sampling.recommended(self._recommended)
        text = TextStream(sampling.stop, lead)
        for token in self._engine.stream(ids, sampling, stop_ids=stop_ids):
            if token in stop_ids:
                yield TextChunk(text.end(), 1, "stop")
                return
            shown = text.add(self._tokenizer.decode_bytes([token]))
            if text.stopped:
                yield TextChunk(shown, 1, "stop")
                return
            yield TextChunk(shown, 1)
        # What was held back may hold a whole stop string only now that no byte can follow.
        yield TextChunk(text.end(), 0, "stop" if text.stopped else "length")


class TextStream:
    """
    Bytes in, text out that nothing later can take back.

    Held back are the bytes of an unfinished character, and the longest end of the text that begins a stop string.
    What is given out, joined, is the text of all bytes up to the stop string that is complete first, however the bytes
    were cut.
    """

    def __init__(self, stop: Sequence[str] = (), lead: str = "") -> None:
        """`lead` is left out where the text begins with it."""
        self.stopped = False
        self._stop = [mark for mark in stop if mark]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._lead = "", lead

    def add(self, data: bytes) -> str:
        """The text that is certain after these bytes."""
        return self._take(self._decoder.decode(data), last=False)

    def end(self) -> str:
        """What was held back, now that nothing follows. A character that was never finished becomes U+FFFD."""
        return self._take(self._decoder.decode(b"", final=True), last=True)

    def _take(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        if self._lead:
            if not last and len(text) < len(self._lead) and self._lead.startswith(text):
                self._held = text
                return ""
            text, self._lead = text.removeprefix(self._lead), ""
        matches = [(position + len(mark), position) for mark in self._stop if (position := text.find(mark)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        keep = 0 if last else max((_overlap(text, mark) for mark in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def check_conversation(messages: Sequence[Message]) -> None:
    """Raise DataError unless the last message is one to be answered. The renderer checks each message."""
    if not messages or messages[-1]["role"] not in ANSWERED_ROLES:
        what = f"the last one is from the {messages[-1]['role']}" if messages else "there are none"
        raise DataError(what, where="messages", hint="A conversation ends with a message of the user or a tool.")


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark` without being all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def answerer(name: str, path: Path, dtype: LoadFormat = "float32") -> TextAnswerer:
    """Load a model to this machine's device, with the tokenizer and template it was trained with."""
    return answerer_of(name, hf.load(path, device.find().torch_device, dtype=dtype))


def answerer_of(name: str, loaded: Loaded) -> TextAnswerer:
    """The answerer of a model that is loaded."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size, pack=True)
    return TextAnswerer(name, engine, lambda: loaded.renderer, loaded.tokenizer, loaded.language.sampling)


class ModelRegistry:
    """
    Finds the models below a folder of runs, and those that were named. New ones appear as runs finish. Loaded ones stay
    in memory.

    A model that has been trained again since it was loaded is loaded again.
    """

    def __init__(
        self, runs: Path, named: Mapping[str, Path] = MappingProxyType({}), dtype: LoadFormat = "float32"
    ) -> None:
        """`named` are models outside of `runs`, by the names that clients use. `dtype` is how weights are kept."""
        self.runs, self.named, self.dtype = runs, named, dtype
        self._loaded: dict[str, tuple[float, Answerer]] = {}
        self._contexts: dict[tuple[Path, float], int] = {}
        self._lock = threading.Lock()
        for folder in locate.unnamable(runs):
            info(f"{folder}: left out, because its name is not UTF-8. Rename it.", "yellow")

    def names(self) -> Sequence[ModelInfo]:
        there = {model.name: model.folder for model in locate.models(self.runs) if not model.damage}
        return [
            ModelInfo(name, int(mtime := _made(path)), path, self._context(path, mtime))
            for name, path in {**self.named, **there}.items()
        ]

    def get(self, name: str) -> Answerer:
        models = {one.name: one for one in locate.models(self.runs)}
        if name in models:
            path = models[name].folder
            locate.check(path.parents[1], path.parent, models[name].damage)
        elif name in self.named:
            path = self.named[name]
        else:
            known = [*self.named, *(one.name for one in models.values() if not one.damage)]
            hint = f"Models: {', '.join(known) or 'none yet'}."
            raise RunError(f"there is no model {name!r}", where=str(self.runs), hint=hint)
        mtime = _made(path)
        with self._lock:
            if name not in self._loaded or self._loaded[name][0] != mtime:
                self._loaded[name] = mtime, answerer(name, path, self.dtype)
            return self._loaded[name][1]

    def _context(self, folder: Path, mtime: float) -> int:
        """The context length; 0 for a model that cannot be read. A request for that model gets the error."""
        if (folder, mtime) not in self._contexts:
            try:
                self._contexts[folder, mtime] = hf.context(folder)
            except CheckpointError:
                self._contexts[folder, mtime] = 0
        return self._contexts[folder, mtime]


def _made(path: Path) -> float:
    """When the weights of a model were written last: of one file, several, or adapters."""
    files = [path] if path.is_file() else list(path.glob(f"*{hf.WEIGHTS_SUFFIX}"))
    return max(file.stat().st_mtime for file in files)
