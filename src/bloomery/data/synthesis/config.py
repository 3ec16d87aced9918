"""What a recipe says in [synthesize]."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.bounds import Attempts, Between, Context, PositiveLength, Seed, Tokens
from bloomery.core.config import VOLATILE, Config, repeated
from bloomery.data.conversations.conversation import not_text
from bloomery.data.synthesis.presets import PRESETS
from bloomery.data.synthesis.prompts import Category

Dollars = Annotated[float, Between(0, 1e6, "nobody asks for more")]

ReadingEase = Annotated[float, Between(-10_000, 10_000, "Flesch's reading ease of a text ends at 121")]


class Price(Config):
    """Of a million tokens, as the page of the provider says. Prices change, so none is known here."""

    input_dollars: Dollars
    output_dollars: Dollars


class Anthropic(Config):
    """The API of Anthropic, through its own client; needs `pip install 'bloomery[anthropic]'`."""

    kind: Literal["anthropic"] = "anthropic"
    model: str = Field("claude-haiku-4-5", min_length=1)
    address: str | None = Field(None, json_schema_extra=VOLATILE)
    """Another address than the client's own, such as that of a gateway."""
    key_variable: str = Field("ANTHROPIC_API_KEY", min_length=1, json_schema_extra=VOLATILE)
    """The environment variable that holds the key."""
    price: Price | None = Field(None, json_schema_extra=VOLATILE)

    @model_validator(mode="after")
    def _is_an_address(self) -> "Anthropic":
        _check_address(self.address)
        return self


class OpenAI(Config):
    """A server that speaks OpenAI's protocol: Ollama, vLLM, llama.cpp, `bloomery serve` and many providers."""

    kind: Literal["openai"] = "openai"
    model: str = Field(min_length=1)
    address: str = "http://127.0.0.1:11434/v1"
    """The part before /chat/completions. By default Ollama on this machine."""
    key_variable: str = Field("", json_schema_extra=VOLATILE)
    """The environment variable that holds the key; empty for a server that needs none."""
    price: Price | None = Field(None, json_schema_extra=VOLATILE)
    limit_field: Literal["max_tokens", "max_completion_tokens"] = Field("max_tokens", json_schema_extra=VOLATILE)
    """What the server calls the longest answer: newer models of OpenAI take only the second."""

    @model_validator(mode="after")
    def _is_an_address(self) -> "OpenAI":
        _check_address(self.address)
        return self


def _check_address(address: str | None) -> None:
    if address is not None and not address.startswith(("http://", "https://")):
        raise ValueError(f"address {address!r} does not begin with http:// or https://")


Provider = Annotated[Anthropic | OpenAI, Field(discriminator="kind")]

Mode = Literal["summary", "key_points", "questions", "harder", "simpler"]


class Augment(Config):
    """
    Conversations about the documents of this run, after [dedup]: the ROCm fork's modes.

    harder and simpler rewrite a document, and take those that are easy or hard to read: by Flesch's reading ease
    (1948, https://doi.org/10.1037/h0057532) above `easy_from` and below `hard_below`. It is meant for English.
    """

    modes: tuple[Mode, ...] = Field(("summary", "key_points", "questions", "harder", "simpler"), min_length=1)
    """In turn, one for each document; a document that a mode cannot take gets the next one that can."""
    domains: tuple[str, ...] = ()
    """None named: all."""
    max_characters: Annotated[int, Between(200, 10**9, "less says nothing, and no model reads more")] = 4000
    """Longer documents are cut at the end of a paragraph, or else of a word."""
    min_words: PositiveLength = 50
    """Shorter documents are left out."""
    words_per_question: PositiveLength = 200
    max_questions: Annotated[int, Between(1, 1000, "no answer holds more")] = 5
    easy_from: ReadingEase = 80.0
    hard_below: ReadingEase = 60.0


ProviderTemperature = Annotated[
    float, Between(1e-3, 2, "providers take no more", "logits are divided by it", or_zero=True)
]
Connections = Annotated[int, Between(1, 256, "each is a thread and a connection")]


class Synthesize(Config):
    """Conversations written by another model. Off: a key in the environment alone never spends money."""

    enabled: bool = False
    provider: Provider | None = None
    """Who is asked."""
    topics: tuple[str, ...] = ()
    """Questions to ask as they are, each once."""
    categories: tuple[Category, ...] = ()
    """Questions made of templates, in the proportion of their weights."""
    preset: Literal["seed-1386"] | None = None
    """Categories with the names and weights of 1386.ai, and questions of our own."""
    augment: Augment | None = None
    count: Annotated[int, Between(1, 10**8, "each is a request")] = 100
    """Conversations to have. A document that brings several questions may exceed it by a few."""
    max_answer_tokens: Context = 512
    """Of one turn. A longer answer comes cut, and is not kept."""
    temperature: ProviderTemperature | None = None
    """None: as the provider has it."""
    max_tokens: Tokens = 100_000
    """Budget for all that is read and written. A request that could exceed it is not made."""
    max_dollars: Annotated[float, Between(1e-6, 1e9, "no request costs less, and nobody has more")] | None = None
    """The same in dollars; it needs the provider's `price`."""
    seed: Seed = 0
    concurrency: Connections = Field(4, json_schema_extra=VOLATILE)
    """Requests under way at once."""
    attempts: Attempts = Field(6, json_schema_extra=VOLATILE)
    """Of a request that fails for now (429, 5xx, broken connections), with growing waits or as long as asked."""
    timeout_seconds: Annotated[float, Between(1e-3, 86_400, "a day is 86,400 seconds", "no server answers sooner")] = (
        Field(120.0, json_schema_extra=VOLATILE)
    )
    """Of a request. With kind = "anthropic", where its client measures, from one piece of the answer to the next."""

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.enabled and self.augment is not None else ()

    @property
    def named(self) -> tuple[Category, ...]:
        """All categories, with those of the preset and the topics."""
        asked = (Category(name="topics", prompts=self.topics, verbatim=True),) if self.topics else ()
        return (*PRESETS.get(self.preset or "", ()), *self.categories, *asked)

    @model_validator(mode="after")
    def _somebody_can_be_asked_something(self) -> "Synthesize":
        if not self.enabled:
            return self
        if self.provider is None:
            raise ValueError('provider says who is asked: { kind = "anthropic" } or { kind = "openai", model = "…" }')
        if not self.named and self.augment is None:
            raise ValueError("nothing to ask for: name topics, categories, a preset, or augment")
        if self.named and self.augment is not None:
            raise ValueError("augment asks about documents, topics and categories do not; take one of the two")
        for category in self.named:
            for text in (*category.prompts, category.system):
                if (problem := not_text(text, f"a question or system message of {category.name!r}")) is not None:
                    raise ValueError(f"{problem.what}: {text[:40]!r}")
        names = [category.name for category in self.named]
        if twice := repeated(names):
            raise ValueError(f"two categories have the name {twice[0]!r}")
        if self.max_dollars is not None and self.provider.price is None:
            raise ValueError(f"max_dollars={self.max_dollars} needs provider.price, the dollars of a million tokens")
        return self
