"""Every section of a recipe: what can be set, what it means, and its default. `recipe.py` puts them in order."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloomery.core.config import VOLATILE, Config, Count, Positive, Share
from bloomery.data.engine import Parallel
from bloomery.data.holdout import LARGEST_SHARE
from bloomery.data.rules import Rule
from bloomery.data.sources import Source
from bloomery.hw.host import Wanted
from bloomery.model.config import ModelConfig
from bloomery.train.config import AdamW, Muon, Schedule, Training


class Fetch(Parallel):
    sources: tuple[Annotated[Source, Field(discriminator="kind")], ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> "Fetch":
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources have the name {twice[0]!r}, and so would their documents' ids")
        return self


class Classify(Config):
    """
    Train a classifier that tells text worth keeping from text that is not.

    With `labeled` it learns from jsonl lines {"text", "label": 0 or 1}; without, from contrast: the documents that were
    fetched against damaged copies of them (shuffled words, cut lines, repeated phrases, broken characters, and spam in
    their place). Copies are as long as what they were made from, so that length tells nothing.
    """

    labeled: Path | None = None
    """A jsonl file (.zst and .gz too) with `text` and `label` (1 = keep)."""
    samples: Positive = 2000
    """Most documents to learn from, chosen by hash and evenly over domains."""
    features: Positive = 2**16
    """Buckets for hashed n-grams."""
    ngrams: tuple[Positive, Positive] = (1, 2)
    """Shortest and longest n-grams, in words and punctuation marks."""
    characters: Annotated[int, Field(ge=100)] = 3000
    """How much of a long document is looked at: half of it at the start, half mid-way."""
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """Share of the documents that measures; as many calibrate."""
    seed: Count = 0

    @model_validator(mode="after")
    def _ngrams_ascend(self) -> "Classify":
        if self.ngrams[0] > self.ngrams[1]:
            raise ValueError(f"ngrams are shortest, longest; got {self.ngrams}")
        return self


class MinScore(Config):
    domain: str
    min_score: Share


class Filter(Parallel):
    rules: tuple[Annotated[Rule, Field(discriminator="kind")], ...] = ()
    """Applied in this order; the first that a document breaks is its reason."""
    min_score: Share = 0.0
    """Documents whose classifier score is lower are dropped (reason `classifier`)."""
    min_scores: tuple[MinScore, ...] = ()
    """Other limits for some domains."""

    @model_validator(mode="after")
    def _one_limit_a_domain(self) -> "Filter":
        _no_domain_twice("min_scores", [limit.domain for limit in self.min_scores])
        return self


def _no_domain_twice(key: str, domains: list[str]) -> None:
    if twice := sorted({domain for domain in domains if domains.count(domain) > 1}):
        raise ValueError(f"{key} names the domain {', '.join(map(repr, twice))} twice; leave one of the two")


class Dedup(Parallel):
    permutations: Positive = 112
    """Minima in a signature."""
    bands: Positive = 14
    """Groups of minima; sharing one makes two documents candidates. 14 of 8 find a Jaccard of 0.8 with p = 0.92."""
    shingle_words: Positive = 5
    min_jaccard: Annotated[float, Field(gt=0, le=1)] = 0.8
    """A document goes only when its exact Jaccard with the kept one reaches this."""
    seed: Count = 0

    @model_validator(mode="after")
    def _bands_divide(self) -> "Dedup":
        if self.permutations % self.bands:
            near = next(number for number in range(self.bands, 0, -1) if self.permutations % number == 0)
            raise ValueError(f"{self.permutations} permutations are not {self.bands} equal bands; {near} would do")
        return self


class Vocabulary(Config):
    """The stage `tokenizer`."""

    vocab_size: Positive = 4096
    sample_bytes: Positive = 20_000_000
    """Text to learn from: the same share of every domain, documents chosen by hash."""


class Weight(Config):
    domain: str
    weight: float = Field(gt=0)
    """Share of the mix, relative to the other weights."""
    max_epochs: float = Field(4.0, gt=0)
    """How often a document of this domain is repeated at most."""


class Anneal(Config):
    """A mix of its own for the last part of training, when the learning rate falls."""

    weights: tuple[Weight, ...] = Field(min_length=1)
    """As those of the mix. Epochs are counted anew."""
    tokens: Positive | None = None
    """Size of this mix."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Its size as a share of both mixes together."""

    @model_validator(mode="after")
    def _one_size_and_one_weight_a_domain(self) -> "Anneal":
        if (self.tokens is None) == (self.share is None):
            raise ValueError("give either tokens or share, so that it is known how large the anneal mix is")
        _no_domain_twice("anneal.weights", [weight.domain for weight in self.weights])
        return self


class Shard(Parallel):
    weights: tuple[Weight, ...] = ()
    """Domains that are not named are left out; without any, all domains in their own proportion."""
    tokens: Positive | None = None
    """Size of the mix. None: as large as the weights and epochs allow."""
    hold_out: float = Field(0.02, ge=0, le=LARGEST_SHARE)
    """Share of documents, by hash of their text, that no model and no tokenizer is trained on."""
    anneal: Anneal | None = None
    """What `pretrain` reads last, from shards of its own."""
    shard_tokens: Positive = 100_000_000
    """A shard's length: its documents begin within as many tokens."""
    memory_bytes: Annotated[int, Field(ge=2**26)] = Field(2 * 2**30, json_schema_extra=VOLATILE)
    """For all workers together, besides what Python and its libraries need. It changes the speed, and no byte."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_weight_a_domain(self) -> "Shard":
        _no_domain_twice("weights", [weight.domain for weight in self.weights])
        return self


class Pretrain(Training):
    model: ModelConfig = ModelConfig()


class Synthesize(Config):
    """Conversations written by another model. Off: a key in the environment alone never spends money."""

    enabled: bool = False
    endpoint: str = "http://127.0.0.1:11434/v1"
    """Base address of an OpenAI-compatible server."""
    model: str = ""
    key_variable: str = Field("OPENAI_API_KEY", json_schema_extra=VOLATILE)
    """The environment variable that holds the key; empty for a server that needs none."""
    topics: tuple[str, ...] = ()
    """Questions to ask, in turn."""
    count: Positive = 100
    max_answer_tokens: Positive = 512
    max_tokens: Positive = 100_000
    """Budget for all questions and answers; no further request is made once it is reached."""

    @model_validator(mode="after")
    def _somebody_can_be_asked(self) -> "Synthesize":
        if self.enabled and not self.topics:
            raise ValueError("topics is empty, so there is nothing to ask for")
        if self.enabled and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} is no address that begins with http:// or https://")
        return self


class WorldTalks(Config):
    """Conversations of the generator of small worlds, whose answers a program can check."""

    kind: Literal["worlds"] = "worlds"
    name: str = "worlds"
    count: Positive = 10_000
    seed: int = 0


class TalkFile(Config):
    """Conversations as jsonl lines {"messages": [{"role", "content"}]} (.zst and .gz too)."""

    kind: Literal["jsonl"] = "jsonl"
    name: str
    path: Path


Talks = Annotated[WorldTalks | TalkFile, Field(discriminator="kind")]


class Instruct(Config):
    sources: tuple[Talks, ...] = (WorldTalks(),)
    row_tokens: Positive = 257
    """Length of a packed row: the model's context and one more, the last target."""
    hold_out: Share = 0.02


class Finetune(Training):
    """The same loop, on conversations, from the pretrained weights."""

    optimizer: Annotated[Muon | AdamW, Field(discriminator="kind")] = Muon(
        matrix_learning_rate=0.01, learning_rate=1e-3
    )
    schedule: Schedule = Schedule(decay=1.0)


class Evaluate(Config):
    questions: Positive = 200
    """Held-out questions of the generator, the same number of each kind."""
    seed: int = 0
    max_tokens: Positive = 48
    domains: tuple[str, ...] = ()
    """Domains whose held-out text is scored; all of them if none is named."""
    heldout_bytes: Positive = 400_000
    """Held-out text of each domain that is scored, and given to the compressors."""
    device: Wanted = Field("auto", json_schema_extra=VOLATILE)
