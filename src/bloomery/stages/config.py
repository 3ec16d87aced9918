"""Every section of a recipe: what can be set, what it means, and its default. `recipe.py` puts them in order."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bloomery.core.bounds import (
    Between,
    DiskPath,
    DocumentCount,
    FieldNumber,
    InnerShare,
    MemoryBytes,
    PositiveLength,
    Seed,
    Share,
    TokenCount,
)
from bloomery.core.config import VOLATILE, Config, repeated
from bloomery.data.chat.config import Conversations
from bloomery.data.chat.filters import DecontaminateChats as Unexamined
from bloomery.data.decontamination import Sought
from bloomery.data.documents import LARGEST_SHARE
from bloomery.data.executor import Parallel
from bloomery.data.filters import apply
from bloomery.data.filters.apply import Rule
from bloomery.data.quality.thresholds import Threshold, ThresholdTable, spelled_out
from bloomery.data.sources.local import DocumentSource
from bloomery.data.synthesis.config import Synthesize as Synthesize
from bloomery.evaluation.config import Evaluate as Evaluate
from bloomery.evaluation.tasks import TASKS
from bloomery.model.config import ModelConfig
from bloomery.shards.config import Anneal, DomainWeight, ImportedShards, no_domain_twice
from bloomery.tokenizer.chat_template import TemplateName
from bloomery.train.config import Finetune as Finetune
from bloomery.train.config import Training
from bloomery.train.preference.config import Prefer as Prefer
from bloomery.train.scaling_rules import TOKENS_PER_PARAMETER, Depth, TokenRatio

SampledDocuments = Annotated[int, Between(1, 10**7, "all are in memory")]
Features = Annotated[int, Between(2, 2**26, "a float of 64 bits is kept for each", "one is the same for all texts")]
NgramSize = Annotated[int, Between(1, 32, "longer n-grams come again in no other text")]
Strength = Annotated[float, Between(1e-6, 1e6, "beyond, a classifier learns either nothing or each text by heart")]
LabelValue = str | Annotated[int, Between(-(2**63), 2**63 - 1, "data has integers of 64 bits")] | FieldNumber


class Fetch(Parallel):
    sources: tuple[Annotated[DocumentSource, Field(discriminator="kind")], ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> "Fetch":
        names = [source.name for source in self.sources]
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}, and so would their documents' ids")
        return self


class ClassifierTraining(Config):
    """What every classifier of [classify] has."""

    samples: SampledDocuments = 2000
    """Most documents to learn from, chosen by hash and evenly over domains."""
    features: Features = 2**16
    """Buckets for hashed n-grams."""
    ngrams: tuple[NgramSize, NgramSize] = (1, 2)
    """Shortest and longest n-grams, in words and punctuation marks."""
    character_ngrams: tuple[NgramSize, NgramSize] | None = None
    """Shortest and longest n-grams of characters; None: none are looked at."""
    characters: Annotated[int, Between(100, 10**7, "less says nothing, and more says no more")] = 3000
    """How much of a long document is looked at: half of it at the start, half mid-way."""
    strength: Strength | None = None
    """Inverse of the l2 penalty. None: of 1, 3 and 10 the one that orders the calibrating texts best."""
    held_out: Annotated[float, Between(1e-4, 0.49, "as many calibrate, and the rest is learned from")] = 0.1
    """Share of the documents that measures; as many calibrate."""
    threshold: Share = 0.5
    """The cut whose precision and recall are told; what is dropped is said by [filter]."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _ngrams_ascend(self) -> "ClassifierTraining":
        for found in (self.ngrams, self.character_ngrams):
            if found is not None and found[0] > found[1]:
                raise ValueError(f"ngrams are shortest, longest; got {found}")
        return self


ClassifierName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Contrast(ClassifierTraining):
    """
    The documents that were fetched against damaged copies of them: shuffled words, cut lines, repeated phrases, broken
    characters, and spam in their place. Copies are as long as what they were made from, so that length tells nothing.
    A score is the probability of being worth keeping.
    """

    kind: Literal["contrast"] = "contrast"
    name: ClassifierName = "quality"
    strength: Strength | None = 30.0
    keep: Literal["high"] = "high"


class Labeled(ClassifierTraining):
    """Texts with labels from a file. A score is the probability of a positive label."""

    kind: Literal["labeled"] = "labeled"
    name: ClassifierName
    path: DiskPath
    """A jsonl file (.zst and .gz too), or parquet."""
    keep: Literal["high", "low"]
    """Which scores are of text worth keeping: "low" where a positive label is bad, such as 1 = toxic."""
    text_field: str = "text"
    label_field: str = "label"
    group_field: str | None = None
    """Rows with the same value are never split up; without it, texts that differ in case and marks only."""
    positive: tuple[LabelValue, ...] = (1,)
    negative: tuple[LabelValue, ...] = (0,)
    positive_from: FieldNumber | None = None
    """For labels that are numbers: positive from here on. `positive` and `negative` are then not looked at."""
    negative_below: FieldNumber | None = None
    """Negative below; texts between the two are left out. None: the same as positive_from."""
    samples: SampledDocuments = 100_000
    """Most texts to learn from, chosen by hash."""
    features: Features = 2**20
    character_ngrams: tuple[NgramSize, NgramSize] | None = (4, 4)

    @model_validator(mode="after")
    def _labels_differ(self) -> "Labeled":
        if both := set(self.positive) & set(self.negative):
            raise ValueError(f"the label {min(both, key=str)!r} is positive and negative")
        if self.negative_below is not None and self.positive_from is None:
            raise ValueError(f"negative_below={self.negative_below} needs positive_from too")
        if self.negative_below is not None and self.negative_below > (self.positive_from or 0.0):
            raise ValueError(f"negative_below={self.negative_below} is above positive_from={self.positive_from}")
        return self


class Classify(ClassifierTraining):
    """
    Train the classifiers that [filter] may set limits for.

    `classifiers` names them. Without any there is one, `quality`, that these keys themselves describe: with `labeled`
    it learns from jsonl lines {"text", "label": 0 or 1 = keep}, without from contrast.
    """

    classifiers: tuple[Annotated[Contrast | Labeled, Field(discriminator="kind")], ...] = ()
    labeled: DiskPath | None = None
    """A jsonl file (.zst and .gz too) with `text` and `label` (1 = keep)."""
    required: bool | None = Field(None, json_schema_extra=VOLATILE)
    """
    Whether too few texts to learn from are an error; else the run goes on without that classifier, and says so. None:
    where the recipe has this section, or [filter] a limit on scores.
    """
    strength: Strength | None = 30.0

    @model_validator(mode="after")
    def _each_key_has_its_place(self) -> "Classify":
        names = [one.name for one in self.classifiers]
        if twice := repeated(names):
            raise ValueError(f"two classifiers have the name {twice[0]!r}")
        plain = type(self).model_construct()
        moved = [
            key for key in (*ClassifierTraining.model_fields, "labeled") if getattr(self, key) != getattr(plain, key)
        ]
        if self.classifiers and moved:
            raise ValueError(f"{moved[0]} belongs into [[classify.classifiers]] where classifiers are named")
        return self

    @property
    def named(self) -> tuple[Contrast | Labeled, ...]:
        """The classifiers that are trained, in order."""
        if self.classifiers:
            return self.classifiers
        common = {key: getattr(self, key) for key in ClassifierTraining.model_fields}
        if self.labeled is not None:
            return (Labeled(name="quality", path=self.labeled, keep="high", **common),)
        return (Contrast(**common),)


class MinScore(Config):
    domain: str
    min_score: Share


class Filter(Parallel):
    rules: tuple[Annotated[Rule, Field(discriminator="kind")], ...] = ()
    """Applied in this order; the first that a document breaks is its reason. A preset is replaced by its rules."""
    min_score: Share = 0.0
    """Documents whose score by the first classifier is lower are dropped (reason `classifier`)."""
    min_scores: tuple[MinScore, ...] = ()
    """Other limits for some domains."""
    limits: ThresholdTable = ()
    """Limits of any classifier, applied in this order after those; or the name of a preset, "seed-1386"."""

    @field_validator("rules")
    @classmethod
    def _spell_out(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return apply.spelled_out(rules)

    @model_validator(mode="after")
    def _one_limit_a_domain(self) -> "Filter":
        no_domain_twice("min_scores", [limit.domain for limit in self.min_scores])
        return self

    @property
    def needs_scores(self) -> bool:
        """Whether a limit asks for the score of a classifier."""
        return bool(self.min_score or self.min_scores or self.limits)

    @property
    def spelled_limits(self) -> tuple[Threshold, ...]:
        return spelled_out(self.limits)


def known_tasks(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is in no row of the table of tasks."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"there is no task {name!r}; tasks: {', '.join(TASKS)}")


class Decontaminate(Sought):
    """Documents that hold text of evaluation tasks are dropped, with the reason decontaminate.TASK."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "Decontaminate":
        known_tasks(self.tasks)
        return self


class RepeatedLines(Config):
    """
    Lines that many documents share are taken out of all of them but the first in the order of keeping. Texts change.

    A document of which only white space is left is dropped, with the reason `repeated_lines`.
    """

    unit: Literal["line", "paragraph"] = "line"
    """Paragraphs end with an empty line."""
    min_documents: Annotated[
        int, Between(2, 10**12, "no data set has more", "a line of one document is no repetition")
    ] = 10
    """In how many documents that stay a line has to stand."""
    min_characters: PositiveLength = 30
    """Shorter lines stay, counted without superfluous white space: a brace on its own is no repetition."""


MINIMA = "every document keeps a number for each"


class Dedup(Parallel):
    """Copies: of each group of them the longest document stays, of equally long ones that with the smallest id."""

    preset: Literal["seed-1386"] | None = None
    """
    "seed-1386": 128 permutations in 16 bands of 8, banded once, shingles of 5 characters. It stands in for these
    settings; one of them that says something else is an error.
    """
    permutations: Annotated[int, Between(1, 2**14, MINIMA)] = 112
    """Minima in a signature."""
    bands: Annotated[int, Between(1, 2**14, MINIMA)] = 14
    """Groups of minima; sharing one makes two documents candidates. 14 of 8 find a Jaccard of 0.8 with p = 0.92."""
    bandings: Annotated[int, Between(1, 16, "each sorts all documents once more")] = 2
    """How often the minima are put into bands, every time in another way. Once, where nothing is verified."""
    shingles: Literal["words", "characters"] = "words"
    shingle_size: Annotated[int, Between(1, 1000, "longer shingles are in no second document")] = 5
    """Words, or characters, in a shingle."""
    verify: bool = True
    """Whether a document goes only for a kept one that is similar enough. Else for any linked by bands."""
    min_jaccard: Annotated[float, Between(1e-3, 1, "it is a share of the shingles")] = 0.8
    """With `verify`: a document goes only when its exact Jaccard with the kept one reaches this."""
    seed: Seed = 0
    decontaminate: Decontaminate | None = None
    repeated_lines: RepeatedLines | None = None
    memory_bytes: MemoryBytes | None = Field(None, json_schema_extra=VOLATILE)
    """What sorting, joining and workers may hold, beside 300 MB for this process. None: half of what is free."""

    @model_validator(mode="after")
    def _preset_stands_in(self) -> "Dedup":
        wanted = DEDUP_PRESETS.get(self.preset, {})
        for name, value in wanted.items():
            if getattr(self, name) not in (value, type(self).model_fields[name].default):
                raise ValueError(f"the preset {self.preset} says {name}={value!r}; leave out one of the two")
        self.__dict__.update(wanted)  # spelt out, so that the saved recipe tells all
        return self

    @model_validator(mode="after")
    def _bands_divide(self) -> "Dedup":
        if self.permutations % self.bands:
            most = min(self.bands, self.permutations)
            near = next(number for number in range(most, 0, -1) if self.permutations % number == 0)
            raise ValueError(f"{self.permutations} permutations are not {self.bands} equal bands; {near} would do")
        return self


DEDUP_PRESETS: dict[Any, dict[str, Any]] = {
    "seed-1386": {
        "permutations": 128,
        "bands": 16,
        "bandings": 1,
        "shingles": "characters",
        "shingle_size": 5,
        "verify": True,
        "min_jaccard": 0.8,
    }
}


class Shard(Parallel):
    imported: ImportedShards | None = None
    weights: tuple[DomainWeight, ...] = ()
    """Domains that are not named are left out; without any, all domains in their own proportion."""
    tokens: TokenCount | None = None
    """Size of the mix. None: as large as the weights and epochs allow."""
    hold_out: Annotated[float, Between(0, LARGEST_SHARE, "no tokenizer learns from that share")] = 0.02
    """Share of documents, by hash of their text, that no model and no tokenizer is trained on."""
    anneal: Anneal | None = None
    """What `pretrain` reads last, from shards of its own."""
    shard_tokens: Annotated[int, Between(1000, 2**30, "each shard is a file, and counts to 2^31")] = 100_000_000
    """A shard's length: its documents begin within as many tokens. A header counts to 2^31."""
    memory_bytes: MemoryBytes = Field(2 * 2**30, json_schema_extra=VOLATILE)
    """For all workers together, besides what Python and its libraries need. It changes the speed, and no byte."""
    seed: Seed = 0

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.imported is None else ("tokenizer",)

    @model_validator(mode="after")
    def _one_weight_a_domain(self) -> "Shard":
        if self.imported is not None and (self.weights or self.anneal or self.tokens):
            raise ValueError("weights, anneal and tokens are for documents, and imported takes token files as they are")
        no_domain_twice("weights", [weight.domain for weight in self.weights])
        return self


class Pretrain(Training):
    model: ModelConfig = ModelConfig()
    start_from: DiskPath | None = None
    """A model folder whose weights are where training starts, such as GPT-2's; [model] says the same shape."""
    depth: Depth | None = None
    """Fills in width, heads, tokens, steps and learning rates that are not given: see `train/scaling_rules.py`."""
    tokens_per_parameter: TokenRatio = TOKENS_PER_PARAMETER
    """How long a run of a given depth is."""
    continue_from: DiskPath | None = Field(None, json_schema_extra=VOLATILE)
    """The folder of this stage in a shorter run, whose constant phase is not repeated: `train/checkpointing.py`."""
    hellaswag: DiskPath | None = Field(None, json_schema_extra=VOLATILE)
    """An evaluation file of llm.c, such as hellaswag_val.bin: its questions are asked at every evaluation."""
    hellaswag_questions: DocumentCount | None = Field(None, json_schema_extra=VOLATILE)
    """How many of them, at even distances. None: all."""


RowTokens = Annotated[int, Between(2, 2**24 + 1, "it is the context and its last target")]


class Instruct(Conversations):
    row_tokens: RowTokens = 257
    """Length of a packed row: the model's context and one more, the last target. A recipe with a model fills it in."""
    hold_out: InnerShare = 0.02
    """Share of conversations, by hash of what is said in them, that is validated on."""
    samples: Annotated[int, Between(0, 1000, "they are on one page")] = 3
    """How many conversations the page shows, with what is learned of them in color."""
    template: TemplateName = "bloomery"
    """How conversations are written, by its name in `tokenizer/chat_template.py`."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "Instruct":
        for one in self.filters:
            known_tasks(one.tasks if isinstance(one, Unexamined) else ())
        return self
