"""
Settings for chat data in the section [instruct]: sources, filters, presets and mixtures.

These settings are most of the section [instruct] of a recipe. They say where conversations come from and which of
them are dropped.

Presets name chat data sets that many models were trained on, and mixtures combine several presets. A preset is
nothing but settings of a source. It says which files to read, how rows form conversations, and how many to take at
most. It also holds the license that the data set's card states. A recipe overrides any of these settings, and the
resolved recipe holds them all.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bloomery.core.bounds import Between, DiskPath, DocumentCount, RowBytes, Seed
from bloomery.core.config import Config, repeated
from bloomery.data.chat.filters import ChatFilter
from bloomery.data.chat.formats import ChatFormat, Fields
from bloomery.data.readers.read import FieldIs, Name
from bloomery.data.sources import remote
from bloomery.data.sources.remote import AtHub, Reach

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

ENGLISH = [{"kind": "field", "field": "lang", "one_of": ["en"]}]

PRESETS: dict[str, dict[str, Any]] = {
    "dolly": {
        "dataset": "databricks/databricks-dolly-15k",
        "files": ["databricks-dolly-15k.jsonl"],
        "shape": "alpaca",
        "question_field": "instruction",
        "context_field": "context",
        "answer_field": "response",
        "max_conversations": 15_000,
        "license": "CC-BY-SA-3.0",
    },
    "no_robots": {
        "dataset": "HuggingFaceH4/no_robots",
        "files": ["data/train-*.parquet"],
        "shape": "messages",
        "max_conversations": 10_000,
        "license": "CC-BY-NC-4.0",
    },
    "oasst1": {
        "dataset": "OpenAssistant/oasst1",
        "files": ["data/train-*.parquet"],
        "shape": "tree",
        "accept": ENGLISH,
        "max_conversations": 60_000,
        "license": "Apache-2.0",
    },
    "slimorca": {
        "dataset": "Open-Orca/SlimOrca",
        "files": ["oo-labeled_correct.gpt4.sharegpt.jsonl"],
        "shape": "sharegpt",
        "max_conversations": 200_000,
        "license": "MIT",
    },
    "ultrachat": {
        "dataset": "HuggingFaceH4/ultrachat_200k",
        "files": ["data/train_sft-*.parquet"],
        "shape": "messages",
        "max_conversations": 150_000,
        "license": "MIT",
    },
    "alpaca": {
        "dataset": "tatsu-lab/alpaca",
        "files": ["data/train-*.parquet"],
        "shape": "alpaca",
        "max_conversations": 50_000,
        "license": "CC-BY-NC-4.0",
    },
    "wizardlm": {
        "dataset": "WizardLMTeam/WizardLM_evol_instruct_70k",
        "files": ["alpaca_evol_instruct_70k.json"],
        "shape": "alpaca",
        "max_conversations": 70_000,
        "license": "MIT",
    },
    "hh_helpful": {
        "dataset": "Anthropic/hh-rlhf",
        "files": ["helpful-base/train.jsonl.gz"],
        "shape": "dialogue",
        "messages_field": "chosen",
        "speakers": ["Human:", "Assistant:"],
        "max_conversations": 50_000,
        "license": "MIT",
    },
    "metamath": {
        "dataset": "meta-math/MetaMathQA",
        "files": ["MetaMathQA-395K.json"],
        "shape": "pairs",
        "question_field": "query",
        "answer_field": "response",
        "max_conversations": 50_000,
        "license": "MIT",
    },
    "capybara": {
        "dataset": "LDJnr/Capybara",
        "files": ["CapybaraPure_Decontaminated.jsonl"],
        "shape": "exchanges",
        "messages_field": "conversation",
        "max_conversations": 16_000,
        "license": "Apache-2.0",
    },
    "codealpaca": {
        "dataset": "sahil2801/CodeAlpaca-20k",
        "files": ["code_alpaca_20k.json"],
        "shape": "alpaca",
        "max_conversations": 20_000,
        "license": "CC-BY-4.0",
    },
    "evolcode": {
        "dataset": "theblackcat102/evol-codealpaca-v1",
        "files": ["train.jsonl"],
        "shape": "alpaca",
        "max_conversations": 110_000,
        "license": "Apache-2.0",
    },
}

MIXTURES: dict[str, dict[str, dict[str, int]]] = {
    "plasma-v3": {
        "slimorca": {"max_conversations": 120_000},
        "ultrachat": {"max_conversations": 80_000},
        "wizardlm": {"max_conversations": 50_000},
        "metamath": {"max_conversations": 45_000},
        "alpaca": {"max_conversations": 40_000},
        "hh_helpful": {"max_conversations": 30_000},
        "oasst1": {"max_conversations": 25_000},
        "capybara": {"max_conversations": 15_000},
        "dolly": {"max_conversations": 15_000},
        "no_robots": {"max_conversations": 10_000},
    },
    "plasma-v4": {
        "no_robots": {"max_conversations": 10_000, "copies": 3},
        "dolly": {"max_conversations": 15_000, "copies": 2},
        "codealpaca": {"max_conversations": 20_000},
        "evolcode": {"max_conversations": 30_000},
        "oasst1": {"max_conversations": 8_000},
        "capybara": {"max_conversations": 8_000},
        "slimorca": {"max_conversations": 80_000},
        "wizardlm": {"max_conversations": 35_000},
        "alpaca": {"max_conversations": 35_000},
        "metamath": {"max_conversations": 20_000},
        "ultrachat": {"max_conversations": 32_000, "max_answers": 3},
    },
}
"""
What a pipeline took to finetune models of 235 and 500 M parameters, in its third and fourth version. The fourth also
had four copies of conversations about the model itself, which each model needs of its own: add them as a source.
"""


def filled(cls: type[Config], given: Any) -> Any:
    """The settings of a preset under those that are given. Raises ValueError for a name that is none."""
    if not isinstance(given, dict):
        return given
    preset = given.get("preset", given.get("name"))
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; presets: {', '.join(PRESETS)}")
    defaults = {"name": preset, "preset": preset, **PRESETS[preset]}
    if given.get("config") is not None:
        defaults.pop("files", None)
    return {key: remote.parsed(cls, key, value) for key, value in {**defaults, **given}.items()}


def mixed(name: str) -> Iterator[dict[str, Any]]:
    """The settings of the presets of a mixture."""
    for preset, settings in MIXTURES[name].items():
        yield {"kind": "preset", "name": preset, "preset": preset, **settings}


SYNTHESIZE = "synthesize"
"""What reports call the conversations that the stage of that name has left."""


class ChatSource(Config):
    """What every source of conversations has."""

    name: Name
    """What reports call it."""
    license: str | None = None
    """License of its conversations, where they do not say themselves (`license`)."""
    max_conversations: DocumentCount | None = None
    """Reading stops behind so many, whatever filters make of them."""
    max_answers: DocumentCount | None = None
    """A conversation of more answers is cut behind so many."""
    copies: Annotated[int, Between(1, 1000, "each is in the rows once more")] = 1
    """How often each of those that are not held out is in the rows to train on."""


class ToyChats(ChatSource):
    """Conversations of the generator of small worlds, whose answers a program can check."""

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    count: Annotated[int, Between(1, 10**8, "all are in memory")] = 10_000
    seed: Seed = 0


class Shaped(ChatSource):
    """What every source has whose files hold rows."""

    shape: ChatFormat | None = None
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


class ChatFiles(Shaped):
    """
    Files of this machine: .jsonl, .json (a list), .parquet and .txt, the first two and the last also as .gz and .zst.

    With kind = "jsonl" they are lines of objects, whatever their names.
    """

    kind: Literal["files", "jsonl"] = "files"
    path: DiskPath
    """A file, a folder with all that is below it, or wildcards."""


class ChatHub(Shaped, AtHub, Reach):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")


class ChatPreset(Shaped, AtHub, Reach):
    """A well-known data set with its files, shape, cap and license, from `presets.PRESETS`; what is set here wins."""

    kind: Literal["preset"] = "preset"
    preset: ChatPresetName
    """Which one. Where it is left out, `name` says it."""
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        return filled(cls, given)


class Mixture(Config):
    """Several presets at once, with the caps of a known model; it is replaced by them."""

    kind: Literal["mixture"] = "mixture"
    name: MixtureName


ChatSourceConfig = ToyChats | ChatFiles | ChatHub | ChatPreset


class Conversations(Config):
    sources: tuple[Annotated[ChatSourceConfig | Mixture, Field(discriminator="kind")], ...] = (ToyChats(),)
    filters: tuple[Annotated[ChatFilter, Field(discriminator="kind")], ...] = ()
    """Applied in this order; the first that finds something is why a conversation is dropped."""

    @field_validator("sources")
    @classmethod
    def _spell_out(cls, given: tuple[ChatSourceConfig | Mixture, ...]) -> tuple[ChatSourceConfig | Mixture, ...]:
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
    def read(self) -> tuple[ChatSourceConfig, ...]:
        """The sources; mixtures are spelled out already."""
        return tuple(source for source in self.sources if not isinstance(source, Mixture))


def _spelled_out(given: Sequence[ChatSourceConfig | Mixture]) -> Iterator[ChatSourceConfig]:
    for source in given:
        if isinstance(source, Mixture):
            for tree in mixed(source.name):
                yield ChatPreset.model_validate(tree)
        else:
            yield source
