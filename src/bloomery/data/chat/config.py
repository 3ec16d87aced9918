"""
Settings for chat data in the section [instruct]: sources, filters, presets and mixtures.

These settings are most of the section [instruct] of a recipe. They say where conversations come from and which of
them are dropped.

presets.toml names chat data sets that many models were trained on, and mixtures of them. A preset is settings of a
source. A recipe overrides any of them, and the resolved recipe holds all of them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bloomery.core.config import Between, Config, DiskPath, DocumentCount, RowBytes, Seed, packaged, repeated
from bloomery.core.extras import for_files
from bloomery.data.chat.filters import ChatFilter
from bloomery.data.chat.formats import ChatFormat, Fields
from bloomery.data.readers.read import FieldIs, Name
from bloomery.data.sources import remote
from bloomery.data.sources.remote import AtHub

ChatPresetName = Literal[
    "dolly",
    "no_robots",
    "oasst1",
    "slimorca",
    "ultrachat",
    "alpaca",
    "wizardlm",
    "hh_helpful",
    "metamath",
    "capybara",
    "codealpaca",
    "evolcode",
]
MixtureName = Literal["plasma-v3", "plasma-v4"]
PRESETS = Path(__file__).with_name("presets.toml")

SYNTHESIZE = "synthesize"
"""What reports call the conversations that the stage of that name has left."""


class ChatSource(Config):
    """What every source of conversations has."""

    name: Name
    """Name of the source in reports."""
    license: str | None = None
    """License of its conversations, for those that name none themselves (`license`)."""
    max_conversations: DocumentCount | None = None
    """Maximum number of conversations to read, before filters."""
    max_turns: DocumentCount | None = None
    """A conversation is truncated after this many answers."""
    repeat: Annotated[int, Between(1, 1000, "each is in the rows once more")] = 1
    """How often each conversation of the training split occurs in the packed sequences."""


class ToyChats(ChatSource):
    """Conversations of the generator of small worlds, whose answers a program can check."""

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    count: Annotated[int, Between(1, 10**8, "all are in memory")] = 10_000
    """Number of conversations."""
    seed: Seed = 0
    """Seed of its random choices."""


class Shaped(ChatSource):
    """What every source has whose files hold rows."""

    shape: ChatFormat | None = None
    """
    The shape of its rows. None: the first row of each file that fits a shape decides.

    "messages" is OpenAI's list of {"role", "content"}. "sharegpt" is a list of {"from", "value"}. "exchanges" is a list
    of {"input", "output"}. "alpaca" has an instruction, input and output. "pairs" has a question and its answer.
    "dialogue" is text of lines such as "User: …". "tree" has rows that are messages with a parent.
    """
    messages_field: str | None = None
    """The field with the list of messages, or with the text of a dialogue. None: one of the usual names."""
    question_field: str | None = None
    """The field with the question or instruction. Not set: one of the usual names."""
    context_field: str | None = None
    """The field with the input of an instruction. Not set: one of the usual names."""
    answer_field: str | None = None
    """The field with the answer, for "alpaca" and "pairs". None: one of the usual names."""
    system_field: str | None = None
    """The field with what opens the conversation. None: `system`, `system_prompt` and `tools`, where there are any."""
    speakers: tuple[str, str] | None = None
    """How the two speakers of a dialogue are written, as in ["<|prompter|>", "<|assistant|>"]."""
    separator: str = ""
    """Of text files: what stands between two dialogues. Empty: a file is one dialogue."""
    accept: tuple[FieldIs, ...] = ()
    """Conditions that a row has to meet. Other rows are rejected, with the condition and the value."""
    max_row_bytes: RowBytes = 16 * 2**20
    """
    A longer row is rejected (`too_long`), of parquet by the text in it. It bounds the memory of reading. In a .json
    list, an element that has no end within so much ends the reading of its file.
    """

    @property
    def fields(self) -> Fields:
        return Fields(
            messages=self.messages_field,
            question=self.question_field,
            context=self.context_field,
            answer=self.answer_field,
            system=self.system_field,
            speakers=self.speakers,
        )


class ChatFiles(Shaped):
    """
    Files of this machine: .jsonl, .json (a list), .parquet and .txt, the first two and the last also as .gz and .zst.

    With kind = "jsonl" they are lines of objects, whatever their names.
    """

    kind: Literal["files", "jsonl"] = "files"
    """`files`: the name of each file says its format. `jsonl`: each file holds JSON lines, whatever its name."""
    path: DiskPath
    """A file, a folder with all that is below it, or wildcards."""

    def packages(self) -> tuple[str, ...]:
        return () if self.kind == "jsonl" else for_files([self.path])


class ChatHub(Shaped, AtHub):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class ChatPreset(Shaped, AtHub):
    """A well-known data set with its files, shape, cap and license, from presets.toml; what is set here wins."""

    kind: Literal["preset"] = "preset"
    preset: ChatPresetName
    """Name of the preset. None: the same as `name`."""
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, raw: Any) -> Any:
        return remote.filled(cls, raw, packaged(PRESETS)["presets"])


class Mixture(Config):
    """Several presets at once, with the caps of a known model; it is replaced by them."""

    kind: Literal["mixture"] = "mixture"
    name: MixtureName
    """Name of the mixture."""


ChatSourceConfig = ToyChats | ChatFiles | ChatHub | ChatPreset


class Conversations(Config):
    sources: tuple[Annotated[ChatSourceConfig | Mixture, Field(discriminator="kind")], ...] = (ToyChats(),)
    """Where conversations come from."""
    filters: tuple[Annotated[ChatFilter, Field(discriminator="kind")], ...] = ()
    """Filters, in this order. The first that matches is the reason why a conversation is dropped."""

    @field_validator("sources")
    @classmethod
    def _spell_out(cls, sources: tuple[ChatSourceConfig | Mixture, ...]) -> tuple[ChatSourceConfig | Mixture, ...]:
        return tuple(_spelled_out(sources))

    @model_validator(mode="after")
    def _names_differ(self) -> "Conversations":
        names = [source.name for source in self.sources]
        if SYNTHESIZE in names:
            raise ValueError(f"the name {SYNTHESIZE!r} is reserved for the conversations of that stage")
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}, and nobody could tell them apart")
        return self

    @property
    def read(self) -> tuple[ChatSourceConfig, ...]:
        """The sources; mixtures are spelled out already."""
        return tuple(source for source in self.sources if not isinstance(source, Mixture))


def _spelled_out(sources: Sequence[ChatSourceConfig | Mixture]) -> Iterator[ChatSourceConfig]:
    for source in sources:
        if isinstance(source, Mixture):
            for preset, settings in packaged(PRESETS)["mixtures"][source.name].items():
                yield ChatPreset.model_validate({"kind": "preset", "name": preset, **settings})
        else:
            yield source
