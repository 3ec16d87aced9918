"""Where conversations come from, and which of them are left out: most of the section [instruct] of a recipe."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bloomery.core.bounds import Between, DiskPath, Documents, RowBytes, Seed
from bloomery.core.config import Config, repeated
from bloomery.data.accept import FieldIs
from bloomery.data.conversations import presets
from bloomery.data.conversations.filters import Filter
from bloomery.data.conversations.shapes import Fields, Shape
from bloomery.data.elsewhere import AtHub, Reach
from bloomery.data.reading import Name

SYNTHESIZE = "synthesize"
"""What reports call the conversations that the stage of that name has left."""


class Talks(Config):
    """What every source of conversations has."""

    name: Name
    """What reports call it."""
    license: str | None = None
    """License of its conversations, where they do not say themselves (`license`)."""
    max_conversations: Documents | None = None
    """Reading stops behind so many, whatever filters make of them."""
    max_answers: Documents | None = None
    """A conversation of more answers is cut behind so many."""
    copies: Annotated[int, Between(1, 1000, "each is in the rows once more")] = 1
    """How often each of those that are not held out is in the rows to train on."""


class WorldTalks(Talks):
    """Conversations of the generator of small worlds, whose answers a program can check."""

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    count: Annotated[int, Between(1, 10**8, "all are in memory")] = 10_000
    seed: Seed = 0


class Shaped(Talks):
    """What every source has whose files hold rows."""

    shape: Shape | None = None
    """
    How its rows are conversations. None: as the first row of each file that fits a shape says.

    "messages" is OpenAI's list of {"role", "content"}; "sharegpt" a list of {"from", "value"}; "exchanges" a list of
    {"input", "output"}; "alpaca" an instruction, input and output; "pairs" a question and its answer; "dialogue" text
    of lines such as "User: …"; "tree" rows that are messages with a parent.
    """
    messages_field: str | None = None
    """The field with the list of messages, or with the text of a dialogue. None: one of the usual names."""
    question_field: str | None = None
    context_field: str | None = None
    answer_field: str | None = None
    """Of "alpaca" and "pairs"."""
    system_field: str | None = None
    """The field with what opens the conversation. None: `system`, `system_prompt` and `tools`, where there are any."""
    speakers: tuple[str, str] | None = None
    """How the two speakers of a dialogue are written, as in ["<|prompter|>", "<|assistant|>"]."""
    separator: str = ""
    """Of text files: what stands between two dialogues. Empty: a file is one dialogue."""
    accept: tuple[FieldIs, ...] = ()
    """Conditions that a row has to meet; the others are rejected with the condition and the value it saw."""
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


class TalkFiles(Shaped):
    """
    Files of this machine: .jsonl, .json (a list), .parquet and .txt, the first two and the last also as .gz and .zst.

    With kind = "jsonl" they are lines of objects, whatever their names.
    """

    kind: Literal["files", "jsonl"] = "files"
    path: DiskPath
    """A file, a folder with all that is below it, or wildcards."""


class TalkHub(Shaped, AtHub, Reach):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class TalkPreset(Shaped, AtHub, Reach):
    """A well-known data set with its files, shape, cap and license, from `presets.PRESETS`; what is set here wins."""

    kind: Literal["preset"] = "preset"
    preset: presets.PresetName
    """Which one. Where it is left out, `name` says it."""
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        return presets.filled(cls, given)


class Mixture(Config):
    """Several presets at once, with the caps of a known model; it is replaced by them."""

    kind: Literal["mixture"] = "mixture"
    name: presets.MixtureName


Source = WorldTalks | TalkFiles | TalkHub | TalkPreset


class Conversations(Config):
    sources: tuple[Annotated[Source | Mixture, Field(discriminator="kind")], ...] = (WorldTalks(),)
    filters: tuple[Annotated[Filter, Field(discriminator="kind")], ...] = ()
    """Applied in this order; the first that finds something is why a conversation is dropped."""

    @field_validator("sources")
    @classmethod
    def _spell_out(cls, given: tuple[Source | Mixture, ...]) -> tuple[Source | Mixture, ...]:
        return tuple(_spelled_out(given))

    @model_validator(mode="after")
    def _names_differ(self) -> "Conversations":
        names = [source.name for source in self.sources]
        if SYNTHESIZE in names:
            raise ValueError(f"the name {SYNTHESIZE!r} is that of the stage whose conversations are read beside these")
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}, and nobody could tell them apart")
        return self

    @property
    def read(self) -> tuple[Source, ...]:
        """The sources; mixtures are spelled out already."""
        return tuple(source for source in self.sources if not isinstance(source, Mixture))


def _spelled_out(given: Sequence[Source | Mixture]) -> Iterator[Source]:
    for source in given:
        if isinstance(source, Mixture):
            for tree in presets.mixed(source.name):
                yield TalkPreset.model_validate(tree)
        else:
            yield source
