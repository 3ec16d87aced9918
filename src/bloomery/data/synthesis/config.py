"""
Settings of the section [synthesize], and question templates.

A category of questions is a set of templates with slots. Together they produce every question at most once. A
question is the number of its template and the value of each of its slots. The seed decides which questions come
first, so that a resumed run asks the same questions.

presets.toml holds categories by the name of a preset.

Settings and templates share one file because a category is a setting.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from bloomery.core.config import (
    VOLATILE,
    Attempts,
    Between,
    Config,
    Context,
    PositiveLength,
    Seed,
    TokenCount,
    Weight,
    build,
    packaged,
    repeated,
)
from bloomery.core.extras import DATA
from bloomery.data.chat.formats import not_text

SLOT = re.compile(r"\{(\w+)\}")


class Slot(Config):
    name: Annotated[str, Field(pattern=r"^\w+$")]
    """The name in braces."""
    values: tuple[str, ...] = Field(min_length=1)
    """The values that can stand there."""


class Category(Config):
    """A kind of question."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name of the category."""
    weight: Weight = 1.0
    """Weight of the category: its share of questions, relative to the other categories."""
    system: str = ""
    """System prompt for the model; it is not part of the stored conversation."""
    prompts: tuple[str, ...] = Field(min_length=1)
    """Templates of what a user asks; {name} is filled from the slot of that name."""
    slots: tuple[Slot, ...] = ()
    """Values for the names in braces of the question."""
    follow_ups: tuple[tuple[str, ...], ...] = ()
    """Follow-up messages of the user, turn by turn; one of each turn's options is sampled."""
    verbatim: bool = False
    """Whether braces in `prompts` are literal text, not slots."""

    @model_validator(mode="after")
    def _slots_are_there(self) -> "Category":
        names = [slot.name for slot in self.slots]
        for prompt in self.prompts:
            if missing := next((name for name in _slots(self, prompt) if name not in names), None):
                raise ValueError(
                    f"the prompt {prompt!r} has the slot {missing!r}, but slots has only {', '.join(names)}"
                )
        if any(not turn for turn in self.follow_ups):
            raise ValueError("follow_ups has an empty turn")
        return self


@dataclass(frozen=True)
class ConversationTask:
    """One conversation to ask for."""

    number: int
    category: str
    asks: tuple[str, ...]
    """What the user says, turn by turn."""
    system: str = ""
    document: str = ""
    """The id of the document that it is about."""
    text: str = ""
    """Where the answer is a list of questions: the text that they are about."""
    max_questions: int = 0
    """Above 0, the answer is a list of questions and answers as JSON."""


def tasks(categories: Sequence[Category], seed: int) -> Iterator[ConversationTask]:
    """
    Every question of all categories, each time of the one that is furthest behind its weight. One that has no more
    questions leaves its share to the others.
    """
    left = {category.name: _questions(category, seed) for category in categories}
    weights = {category.name: category.weight for category in categories}
    systems = {category.name: category.system for category in categories}
    counts = dict.fromkeys(weights, 0)
    number = 0
    while left:
        name = min(left, key=lambda category_name: (counts[category_name] + 1) / weights[category_name])
        asks = next(left[name], None)
        if asks is None:
            del left[name]
            continue
        counts[name] += 1
        yield ConversationTask(number, name, asks, systems[name])
        number += 1


def possible(category: Category) -> int:
    """How many different first questions a category has."""
    return sum(_size(category, prompt) for prompt in category.prompts)


def _slots(category: Category, prompt: str) -> list[str]:
    return [] if category.verbatim else list(dict.fromkeys(SLOT.findall(prompt)))


def _size(category: Category, prompt: str) -> int:
    values = {slot.name: len(slot.values) for slot in category.slots}
    return math.prod(values[name] for name in _slots(category, prompt))


def _questions(category: Category, seed: int) -> Iterator[tuple[str, ...]]:
    rng = random.Random(f"{seed} {category.name}")
    total = possible(category)
    order = list(range(total)) if total == len(category.prompts) else rng.sample(range(total), min(total, 10**6))
    for number in order:
        yield (_question(category, number), *(rng.choice(turn) for turn in category.follow_ups))


def _question(category: Category, number: int) -> str:
    for prompt in category.prompts:
        if number < (size := _size(category, prompt)):
            break
        number -= size
    filled: dict[str, str] = {}
    values = {slot.name: slot.values for slot in category.slots}
    for name in _slots(category, prompt):
        number, chosen = divmod(number, len(values[name]))
        filled[name] = values[name][chosen]
    return prompt if category.verbatim else SLOT.sub(lambda match: filled[match[1]], prompt)


PRESETS = Path(__file__).with_name("presets.toml")
SynthesisPresetName = Literal["seed-1386"]


@cache
def categories(preset: SynthesisPresetName) -> tuple[Category, ...]:
    """The categories of a preset, each with the slots that its templates name: its own, or those that all share."""
    table = packaged(PRESETS)[preset]
    built = []
    for category in table["categories"]:
        values = {**table["slots"], **category.get("slots", {})}
        names = dict.fromkeys(SLOT.findall(" ".join(category["prompts"])))
        slots = [{"name": name, "values": values[name]} for name in names]
        built.append(build(Category, {**category, "slots": slots}, str(PRESETS)))
    return tuple(built)


Dollars = Annotated[float, Between(0, 1e6, "nobody asks for more")]

ReadingEase = Annotated[float, Between(-10_000, 10_000, "Flesch's reading ease of a text ends at 121")]


class TokenPrice(Config):
    """Of a million tokens, as the page of the provider says. Prices change, so none is known here."""

    input_dollars: Dollars
    """Dollars for a million input tokens."""
    output_dollars: Dollars
    """Dollars for a million output tokens."""


P = TypeVar("P", "Anthropic", "OpenAI")


def _checked_address(provider: P) -> P:
    if provider.address is not None and not provider.address.startswith(("http://", "https://")):
        raise ValueError(f"address {provider.address!r} does not begin with http:// or https://")
    return provider


class Anthropic(Config):
    """The API of Anthropic, through its own client; needs `pip install 'bloomery[anthropic]'`."""

    kind: Literal["anthropic"] = "anthropic"
    model: str = Field("claude-haiku-4-5", min_length=1)
    """Name of the model."""
    address: str | None = Field(None, json_schema_extra=VOLATILE)
    """An address instead of the client's default, such as a gateway."""
    key_variable: str = Field("ANTHROPIC_API_KEY", min_length=1, json_schema_extra=VOLATILE)
    """The environment variable that holds the key."""
    price: TokenPrice | None = Field(None, json_schema_extra=VOLATILE)
    """Price of its tokens. It counts against the budget."""
    _address = model_validator(mode="after")(_checked_address)


class OpenAI(Config):
    """A server that speaks OpenAI's protocol: Ollama, vLLM, llama.cpp, `bloomery serve` and many providers."""

    kind: Literal["openai"] = "openai"
    model: str = Field(min_length=1)
    """Name of the model."""
    address: str = "http://127.0.0.1:11434/v1"
    """The part before /chat/completions. By default Ollama on this machine."""
    key_variable: str = Field("", json_schema_extra=VOLATILE)
    """The environment variable that holds the key; empty for a server that needs none."""
    price: TokenPrice | None = Field(None, json_schema_extra=VOLATILE)
    """Price of its tokens. It counts against the budget."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = Field("max_tokens", json_schema_extra=VOLATILE)
    """Name of the field for the maximum answer length. Newer models of OpenAI accept only the second."""
    _address = model_validator(mode="after")(_checked_address)


Provider = Annotated[Anthropic | OpenAI, Field(discriminator="kind")]

Mode = Literal["summary", "key_points", "questions", "harder", "simpler"]


class Augment(Config):
    """
    Conversations about the documents of this run, after [dedup]: the ROCm fork's modes.

    harder and simpler rewrite a document, and take those that are easy or hard to read: by Flesch's reading ease
    (1948, https://doi.org/10.1037/h0057532) above `easy_from` and below `hard_below`. It is meant for English.
    """

    modes: tuple[Mode, ...] = Field(("summary", "key_points", "questions", "harder", "simpler"), min_length=1)
    """Modes in turn, one for each document. A document that a mode cannot use gets the next mode."""
    domains: tuple[str, ...] = ()
    """Domains of the documents. Empty: all."""
    max_characters: Annotated[int, Between(200, 10**9, "less says nothing, and no model reads more")] = 4000
    """Longer documents are cut at the end of a paragraph, or else of a word."""
    min_words: PositiveLength = 50
    """Shorter documents are skipped."""
    words_per_question: PositiveLength = 200
    """Mode `questions`: words of a document for each question."""
    max_questions: Annotated[int, Between(1, 1000, "no answer holds more")] = 5
    """Mode `questions`: maximum number of questions about a document."""
    easy_from: ReadingEase = 80.0
    """Reading ease above which a document is rewritten to be harder."""
    hard_below: ReadingEase = 60.0
    """Reading ease below which a document is rewritten to be simpler."""


ProviderTemperature = Annotated[
    float, Between(1e-3, 2, "providers take no more", "logits are divided by it", or_zero=True)
]
Connections = Annotated[int, Between(1, 256, "each is a thread and a connection")]


class Synthesize(Config):
    """Conversations written by another model. Off: a key in the environment alone never spends money."""

    enabled: bool = False
    """Whether to send requests, which may cost money."""
    provider: Provider | None = None
    """The service that answers."""
    topics: tuple[str, ...] = ()
    """Questions to send unchanged, each once."""
    categories: tuple[Category, ...] = ()
    """Questions from templates, in the proportion of their weights."""
    preset: SynthesisPresetName | None = None
    """Categories with the names and weights of 1386.ai; the questions were written for Bloomery."""
    augment: Augment | None = None
    """Conversations about the documents of this run."""
    count: Annotated[int, Between(1, 10**8, "each is a request")] = 100
    """Number of conversations. A document with several questions may exceed it by a few."""
    max_answer_tokens: Context = 512
    """Maximum length of one answer. Bloomery discards an answer that the limit truncates."""
    temperature: ProviderTemperature | None = None
    """Sampling temperature. None: the provider's default."""
    max_tokens: TokenCount = 100_000
    """Budget of tokens, input and output. Bloomery sends no request that could exceed it."""
    max_dollars: Annotated[float, Between(1e-6, 1e9, "no request costs less, and nobody has more")] | None = None
    """Budget in dollars. It needs the provider's `price`."""
    seed: Seed = 0
    """Seed of its random choices."""
    concurrency: Connections = Field(4, json_schema_extra=VOLATILE)
    """Number of requests at the same time."""
    attempts: Attempts = Field(6, json_schema_extra=VOLATILE)
    """Attempts for a request that fails for now (429, 5xx, broken connections), with growing waits."""
    timeout_seconds: Annotated[float, Between(1e-3, 86_400, "a day is 86,400 seconds", "no server answers sooner")] = (
        Field(120.0, json_schema_extra=VOLATILE)
    )
    """Time limit of a request. With kind = "anthropic", between two pieces of the answer."""

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.enabled and self.augment is not None else ()

    def is_idle(self) -> bool:
        return not self.enabled

    def packages(self) -> tuple[str, ...]:
        if not self.enabled:
            return ()
        documents = DATA if self.augment is not None else ()
        return (*documents, "anthropic") if isinstance(self.provider, Anthropic) else documents

    @property
    def named(self) -> tuple[Category, ...]:
        """All categories, with those of the preset and the topics."""
        asked = (Category(name="topics", prompts=self.topics, verbatim=True),) if self.topics else ()
        return (*(categories(self.preset) if self.preset else ()), *self.categories, *asked)

    @model_validator(mode="after")
    def _somebody_can_be_asked_something(self) -> "Synthesize":
        if not self.enabled:
            return self
        if self.provider is None:
            raise ValueError('provider is missing: set { kind = "anthropic" } or { kind = "openai", model = "…" }')
        if not self.named and self.augment is None:
            raise ValueError("nothing to generate: set topics, categories, a preset or augment")
        if self.named and self.augment is not None:
            raise ValueError("augment uses documents; topics and categories do not: set one or the other")
        for category in self.named:
            for text in (*category.prompts, category.system):
                if (problem := not_text(text, f"a question or system message of {category.name!r}")) is not None:
                    raise ValueError(f"{problem.what}: {text[:40]!r}")
        names = [category.name for category in self.named]
        if twice := repeated(names):
            raise ValueError(f"two categories have the name {twice[0]!r}")
        if self.max_dollars is not None and self.provider.price is None:
            raise ValueError(f"max_dollars={self.max_dollars} needs provider.price, in dollars for a million tokens")
        return self
