"""Every section of a recipe: what can be set, what it means, and its default. `recipe.py` puts them in order."""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bloomery.core import extras
from bloomery.core.chat import TEMPERATURE, TemplateName
from bloomery.core.config import (
    VOLATILE,
    Between,
    Bytes,
    Config,
    Context,
    DiskPath,
    DocumentCount,
    FieldNumber,
    InnerShare,
    MemoryBytes,
    PositiveLength,
    Seed,
    Share,
    Temperature,
    TokenCount,
    repeated,
)
from bloomery.core.errors import ConfigError, DataError
from bloomery.core.extras import DATA
from bloomery.core.io import canonical, path_problem, sha256_bytes, sha256_file
from bloomery.core.pipeline import Stage, resolve
from bloomery.data.chat import preferences
from bloomery.data.chat.filters import DecontaminateChats as Unexamined
from bloomery.data.chat.readers import Conversations
from bloomery.data.decontamination import Sought
from bloomery.data.documents import LARGEST_SHARE
from bloomery.data.executor import Parallel
from bloomery.data.filters import apply
from bloomery.data.filters.apply import Rule
from bloomery.data.quality.thresholds import Threshold, ThresholdTable, spelled_out
from bloomery.data.sources.local import DocumentSource
from bloomery.data.synthesis.config import Synthesize as Synthesize
from bloomery.evaluation import tasks
from bloomery.evaluation import tasks as evaluation_tasks
from bloomery.evaluation.tasks import TASKS
from bloomery.hw import launcher
from bloomery.hw.host import DeviceChoice
from bloomery.model.config import ModelConfig
from bloomery.shards.config import Anneal, DomainWeight, ImportedShards, no_domain_twice
from bloomery.train.config import TOKENS_PER_PARAMETER, Depth, TokenRatio, Training
from bloomery.train.config import Finetune as Finetune
from bloomery.train.preference.config import Grpo
from bloomery.train.preference.config import Prefer as Prefer

WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def _is_a_folder(name: str) -> str:
    if problem := path_problem(name):
        raise ValueError(problem)
    if name.endswith(".") or WINDOWS_DEVICE.fullmatch(name):
        raise ValueError(f"Windows allows no folder {name!r}, and a run folder may move there: choose another name")
    return name


RunName = Annotated[str, Field(pattern=r"^\w[\w.-]*$"), AfterValidator(_is_a_folder)]
SampledDocuments = Annotated[int, Between(1, 10**7, "all are in memory")]
Features = Annotated[int, Between(2, 2**26, "a float of 64 bits is kept for each", "one is the same for all texts")]
NgramSize = Annotated[int, Between(1, 32, "longer n-grams come again in no other text")]
Strength = Annotated[float, Between(1e-6, 1e6, "beyond, a classifier learns either nothing or each text by heart")]
LabelValue = str | Annotated[int, Between(-(2**63), 2**63 - 1, "data has integers of 64 bits")] | FieldNumber


class Fetch(Parallel):
    sources: tuple[Annotated[DocumentSource, Field(discriminator="kind")], ...] = ()
    """Where documents come from, in order."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Fetch":
        names = [source.name for source in self.sources]
        if twice := repeated(names):
            raise ValueError(f"two sources have the name {twice[0]!r}, so their documents would have the same IDs")
        return self


class ClassifierTraining(Config):
    """What every classifier of [classify] has."""

    samples: SampledDocuments = 2000
    """Maximum number of documents, chosen by hash and evenly over domains."""
    features: Features = 2**16
    """Buckets for hashed n-grams."""
    ngrams: tuple[NgramSize, NgramSize] = (1, 2)
    """Shortest and longest n-grams, in words and punctuation marks."""
    character_ngrams: tuple[NgramSize, NgramSize] | None = None
    """Shortest and longest n-grams of characters. None: no such n-grams."""
    max_chars: Annotated[int, Between(100, 10**7, "less says nothing, and more says no more")] = 3000
    """Characters of a long document that count: half at its start, half in its middle."""
    c: Strength | None = None
    """Inverse of the L2 penalty. None: the value of 1, 3 and 10 that orders the calibration texts best."""
    test_fraction: Annotated[float, Between(1e-4, 0.49, "as many calibrate, and the rest is trained on")] = 0.1
    """Share of documents for the test. Another such share is for calibration."""
    threshold: Share = 0.5
    """Threshold for reported precision and recall. [filter] decides which documents to drop."""
    seed: Seed = 0
    """Seed of its random choices."""

    @model_validator(mode="after")
    def _ngrams_ascend(self) -> "ClassifierTraining":
        for gram_range in (self.ngrams, self.character_ngrams):
            if gram_range is not None and gram_range[0] > gram_range[1]:
                raise ValueError(f"ngrams must be [shortest, longest], got {gram_range}")
        return self


ClassifierName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Contrast(ClassifierTraining):
    """
    The fetched documents against damaged copies: shuffled words, cut lines, repeated phrases, broken characters, and
    spam instead of the text. A copy is as long as its document, so length gives no hint. A score is the probability
    that a text is worth keeping.
    """

    kind: Literal["contrast"] = "contrast"
    name: ClassifierName = "quality"
    """Name of the classifier, for `[filter]`."""
    c: Strength | None = 30.0
    keep: Literal["high"] = "high"
    """High scores mark text worth keeping."""


class Labeled(ClassifierTraining):
    """Texts with labels from a file. A score is the probability of a positive label."""

    kind: Literal["labeled"] = "labeled"
    name: ClassifierName
    """Name of the classifier, for `[filter]`."""
    path: DiskPath
    """A jsonl file (.zst and .gz too), or parquet."""
    keep: Literal["high", "low"]
    """Which scores mark text worth keeping. "low": a positive label marks bad text, such as 1 = toxic."""
    text_field: str = "text"
    """The field that holds the text."""
    label_field: str = "label"
    """The field that holds the label."""
    group_field: str | None = None
    """Rows with the same value stay in one split. None: texts that differ only in case and marks stay together."""
    positive: tuple[LabelValue, ...] = (1,)
    """Labels that count as positive."""
    negative: tuple[LabelValue, ...] = (0,)
    """Labels that count as negative. Rows with any other label are skipped."""
    positive_from: FieldNumber | None = None
    """For numeric labels: labels of at least this value are positive. `positive` and `negative` then have no effect."""
    negative_below: FieldNumber | None = None
    """
    For numeric labels: negative below this value. Texts in between are not used. None: the value of positive_from.
    """
    samples: SampledDocuments = 100_000
    """Maximum number of texts, chosen by hash."""
    features: Features = 2**20
    character_ngrams: tuple[NgramSize, NgramSize] | None = (4, 4)

    @model_validator(mode="after")
    def _labels_differ(self) -> "Labeled":
        if both := set(self.positive) & set(self.negative):
            raise ValueError(f"the label {min(both, key=str)!r} is both positive and negative")
        if self.negative_below is not None and self.positive_from is None:
            raise ValueError(f"negative_below={self.negative_below} needs positive_from too")
        if self.negative_below is not None and self.negative_below > (self.positive_from or 0.0):
            raise ValueError(f"negative_below={self.negative_below} is above positive_from={self.positive_from}")
        return self


class Classify(ClassifierTraining):
    """
    Train the classifiers that [filter] may set limits for.

    `classifiers` names them. Without it, these keys describe a single classifier, `quality`. With `labeled`, it is
    trained on jsonl lines {"text", "label": 0 or 1 = keep}; without, on contrast.
    """

    classifiers: tuple[Annotated[Contrast | Labeled, Field(discriminator="kind")], ...] = ()
    """Several named classifiers, instead of a single one."""
    labeled: DiskPath | None = None
    """A jsonl file (.zst and .gz too) with `text` and `label` (1 = keep)."""
    required: bool | None = Field(None, json_schema_extra=VOLATILE)
    """
    Whether too few training texts are an error. If false, the run reports it and continues without the classifier.
    None: they are an error if the recipe has this section, or if [filter] has a threshold on scores.
    """
    c: Strength | None = 30.0

    def packages(self) -> tuple[str, ...]:
        return DATA

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
            raise ValueError(f"{moved[0]} belongs in [[classify.classifiers]] if classifiers are named")
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
    """The domain."""
    min_score: Share
    """Documents of the domain with a lower score are dropped."""


class Filter(Parallel):
    rules: tuple[Annotated[Rule, Field(discriminator="kind")], ...] = ()
    """Rules, in this order. The first rule that a document breaks is its reason. A preset is replaced by its rules."""
    min_score: Share = 0.0
    """Documents with a lower score of the first classifier are dropped (reason `classifier`)."""
    min_scores: tuple[MinScore, ...] = ()
    """Other thresholds for some domains."""
    thresholds: ThresholdTable = ()
    """Thresholds for any classifier, in this order after `min_score`. Or the name of a preset, "seed-1386"."""

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
        return bool(self.min_score or self.min_scores or self.thresholds)

    @property
    def spelled_thresholds(self) -> tuple[Threshold, ...]:
        return spelled_out(self.thresholds)


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
    """What to remove: lines, or paragraphs, which end with an empty line."""
    min_documents: Annotated[
        int, Between(2, 10**12, "no data set has more", "a line of one document is no repetition")
    ] = 10
    """Minimum number of kept documents that contain a line."""
    min_characters: PositiveLength = 30
    """Lines with fewer characters stay, not counting superfluous white space. So a line with only a brace stays."""


MINIMA = "every document keeps a number for each"


class Dedup(Parallel):
    """Copies: of each group of them the longest document stays, of equally long ones that with the smallest id."""

    preset: Literal["seed-1386"] | None = None
    """
    "seed-1386": 128 permutations in 16 bands of 8, banded once, shingles of 5 characters. It replaces these settings.
    With the preset, any other value of these settings is an error.
    """
    num_perm: Annotated[int, Between(1, 2**14, MINIMA)] = 112
    """Number of minima in a signature."""
    num_bands: Annotated[int, Between(1, 2**14, MINIMA)] = 14
    """
    Bands of minima. Documents that share a band are candidates. 14 bands of 8 find 92 % of pairs with Jaccard 0.8.
    """
    num_rotations: Annotated[int, Between(1, 16, "each sorts all documents once more")] = 2
    """How many times to group the minima into bands, each time differently. Without `verify`: once."""
    shingles: Literal["words", "characters"] = "words"
    """Whether shingles are runs of words or of characters."""
    shingle_size: Annotated[int, Between(1, 1000, "longer shingles are in no second document")] = 5
    """Words, or characters, in a shingle."""
    verify: bool = True
    """Whether to drop a document only if a kept document is similar enough. Otherwise a shared band is enough."""
    threshold: Annotated[float, Between(1e-3, 1, "it is a share of the shingles")] = 0.8
    """With `verify`: minimum exact Jaccard similarity of a duplicate with the kept document."""
    seed: Seed = 0
    """Seed of the hash functions."""
    decontaminate: Decontaminate | None = None
    """Drop documents that contain evaluation questions."""
    repeated_lines: RepeatedLines | None = None
    """Remove lines that many documents share."""
    memory_bytes: MemoryBytes | None = Field(None, json_schema_extra=VOLATILE)
    """Memory for sorting, joining and workers. This process needs 300 MB more. None: half of the free memory."""

    @model_validator(mode="after")
    def _preset_stands_in_for_what_is_not_set(self) -> "Dedup":
        preset = DEDUP_PRESETS[self.preset].items()
        unset = {name: value for name, value in preset if name not in self.model_fields_set}
        return self.model_copy(update=unset) if unset else self

    @model_validator(mode="after")
    def _preset_is_not_contradicted(self) -> "Dedup":
        for name, value in DEDUP_PRESETS[self.preset].items():
            if getattr(self, name) != value:
                raise ValueError(f"the preset {self.preset} sets {name}={value!r}; remove one of the two")
        return self

    @model_validator(mode="after")
    def _bands_divide(self) -> "Dedup":
        if self.num_perm % self.num_bands:
            most = min(self.num_bands, self.num_perm)
            near = next(number for number in range(most, 0, -1) if self.num_perm % number == 0)
            raise ValueError(f"{self.num_perm} permutations do not make {self.num_bands} equal bands; use {near}")
        return self


DEDUP_PRESETS: Mapping[str | None, Mapping[str, Any]] = {
    None: {},
    "seed-1386": {
        "num_perm": 128,
        "num_bands": 16,
        "num_rotations": 1,
        "shingles": "characters",
        "shingle_size": 5,
        "verify": True,
        "threshold": 0.8,
    },
}


class Shard(Parallel):
    imported: ImportedShards | None = None
    """Train on existing token files instead of documents."""
    weights: tuple[DomainWeight, ...] = ()
    """The mix leaves out domains without a weight. Empty: all domains in their natural proportions."""
    tokens: TokenCount | None = None
    """Size of the mix in tokens. None: the largest that the weights and epochs allow."""
    val_fraction: Annotated[float, Between(0, LARGEST_SHARE, "no tokenizer is trained on that share")] = 0.02
    """
    Share of documents for validation, at most 0.1. A hash of their text selects them. The model never trains on them.
    The tokenizer leaves out the tenth that the largest share would take, so another share does not train it again.
    """
    anneal: Anneal | None = None
    """A second mix, which `pretrain` reads at its end."""
    shard_tokens: Annotated[int, Between(1000, 2**30, "each shard is a file, and counts to 2^31")] = 100_000_000
    """Length of a shard: its documents begin within this many tokens. A header counts to 2^31."""
    memory_bytes: MemoryBytes = Field(2 * 2**30, json_schema_extra=VOLATILE)
    """Memory for all workers together, in addition to Python and its libraries. It changes only the speed."""
    seed: Seed = 0
    """Seed of the order of documents."""

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.imported is None else ("tokenizer",)

    def packages(self) -> tuple[str, ...]:
        return super().packages() if self.imported is None else ()

    @model_validator(mode="after")
    def _one_weight_a_domain(self) -> "Shard":
        if self.imported is not None and (self.weights or self.anneal or self.tokens):
            raise ValueError("weights, anneal and tokens apply to documents, but imported uses token files as they are")
        no_domain_twice("weights", [weight.domain for weight in self.weights])
        return self


class Pretrain(Training):
    model: ModelConfig = ModelConfig()
    """Shape of the model."""
    start_from: DiskPath | None = None
    """
    Model to start from: a run, stage, checkpoint or model folder, or hub:OWNER/NAME. Leave out `model` and [tokenizer]
    to use its shape and tokenizer.
    """
    depth: Depth | None = None
    """Number of layers. Also sets width, heads, tokens, steps and learning rates that you leave out."""
    tokens_per_parameter: TokenRatio = TOKENS_PER_PARAMETER
    """With `depth`: training tokens for each parameter."""
    continue_from: DiskPath | None = Field(None, json_schema_extra=VOLATILE)
    """A shorter run to start from: training does not repeat its constant phase."""
    hellaswag: DiskPath | None = Field(None, json_schema_extra=VOLATILE)
    """An evaluation file of llm.c, such as hellaswag_val.bin: its questions are asked at every evaluation."""
    hellaswag_questions: DocumentCount | None = Field(None, json_schema_extra=VOLATILE)
    """Number of these questions, at even distances. None: all."""


RowTokens = Annotated[int, Between(2, 2**24 + 1, "it is the context and its last target")]


class Instruct(Conversations):
    sequence_length: RowTokens = 257
    """
    Length of a packed sequence: the number of tokens plus 1, the last target. Not set: `pretrain.model.context_length`
    plus 1, which is 257 by default. With `finetune.start_from`: the model's context, at most 1,024, plus 1.
    """
    start_from: DiskPath | None = None
    """Model whose tokenizer and chat template are used. Not set: `finetune.start_from`, or else [tokenizer]."""
    val_fraction: InnerShare = 0.02
    """Share of conversations for validation, chosen by a hash of their messages."""
    samples: Annotated[int, Between(0, 1000, "they are on one page")] = 3
    """How many conversations the report shows, with the text in the loss in color."""
    chat_template: TemplateName | None = None
    """The chat template that writes conversations, by name. Not set: the model's own, or "bloomery"."""

    def needs(self, after: tuple[str, ...]) -> tuple[str, ...]:
        return after if self.start_from is None else tuple(name for name in after if name != "tokenizer")

    def packages(self) -> tuple[str, ...]:
        from_hub = any(isinstance(rule, Unexamined) and rule.tasks and not rule.data for rule in self.filters)
        return ("pyarrow",) if from_hub else ()

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "Instruct":
        for chat_filter in self.filters:
            known_tasks(chat_filter.tasks if isinstance(chat_filter, Unexamined) else ())
        return self


Questions = Annotated[int, Between(0, 10**6, "all are in memory, and each is an answer to write")]


class Evaluate(Config):
    toy_questions: Questions = 200
    """Validation questions of the generator, the same number of each kind."""
    conversations: Questions = 0
    """Number of validation conversations to score and to answer, before and after finetuning."""
    seed: Seed = 0
    """Seed of the questions."""
    max_tokens: Context = 48
    """Maximum length of an answer to a question or conversation."""
    chat_temperature: Temperature = TEMPERATURE
    """Sampling temperature in validation conversations, by default as in chat. 0 takes the most probable token."""
    domains: tuple[str, ...] = ()
    """Domains whose validation text the stage scores. Empty: all domains."""
    val_bytes: Bytes = 400_000
    """Bytes of validation text of each domain, for the scores and for the compressors."""
    tasks: tuple[str, ...] = ()
    """Benchmarks: hellaswag, arc_easy, …, as in the table of docs/understand/evaluation.md, or core."""
    data: tuple[DiskPath, ...] = ()
    """Files of the tasks, or folders of files. None: from the hub."""
    limit: DocumentCount | None = None
    """Questions of each task, sampled by `seed`. None: all."""
    num_fewshot: Annotated[int, Between(0, 1000, "no context holds more examples")] | None = None
    """Number of examples before each question. None: the task's own number."""
    samples: Annotated[int, Between(1, 10_000, "each is an answer to write")] = 1
    """Answers to each question of a task with generated answers."""
    temperature: Temperature = 0.0
    """Sampling temperature of these answers."""
    run_code: bool = False
    """Whether programs that the model writes may run, in the sandbox. Tasks that need it refuse to run without it."""
    allow_partial_sandbox: bool = False
    """Whether programs may also run if the kernel cannot isolate the sandbox fully."""
    device: DeviceChoice = Field("auto", json_schema_extra=VOLATILE)
    """Where evaluation runs. `auto`: a GPU if there is one, or else the CPU."""

    def packages(self) -> tuple[str, ...]:
        return ("pyarrow",)

    @field_validator("tasks")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            evaluation_tasks.named([name for name in names if name != evaluation_tasks.NAME])
        except ConfigError as error:
            raise ValueError(f"{error.what}. {error.hint}") from None
        return names

    @model_validator(mode="after")
    def _code_may_run(self) -> "Evaluate":
        runs = [
            name
            for name in self.tasks
            if name in evaluation_tasks.TASKS and evaluation_tasks.TASKS[name].kind == "program"
        ]
        if runs and not self.run_code:
            raise ValueError(
                f"tasks has {runs[0]}, which runs code that the model writes and is not allowed: set "
                "evaluate.run_code=true, or remove the task"
            )
        return self


NAMED_PATHS = {"hellaswag": "file", "continue_from": "folder", "gpt2": "folder"}
"""Paths that no fingerprint holds, and what they are: otherwise seen when their stage begins."""


def check_named_paths(section: str, config: Config) -> None:
    """Raises DataError for a path of NAMED_PATHS that is not there, or is of another kind."""
    for name, kind in NAMED_PATHS.items():
        path: Path | None = getattr(config, name, None)
        is_kind = os.path.isfile if kind == "file" else os.path.isdir
        if path is not None and not is_kind(path.expanduser()):
            hint = f"Use an existing {kind}, or remove {section}.{name}."
            raise DataError(f"there is no such {kind}", where=f"{section}.{name} = {path}", hint=hint)


def start_digest(config: Pretrain | Finetune | Prefer | Instruct) -> str:
    """A hash of the model that a stage starts from; "" where it is the run's own, which needs no torch."""
    return "" if config.start_from is None else str(resolve("bloomery.stages.pretrain:digest")(config.start_from))


SINKS = ("wandb", "trackio")
"""Kinds that are a package, and an extra, of the same name."""


def check_training(section: str, config: Training) -> None:
    """
    Raises DataError for a sink whose package is missing, and HardwareError for more ranks than the machine has devices.
    Each names its key. Where a launcher has started this process, it says how many ranks there are.
    """
    process = launcher.launched()
    ranks = config.num_processes if process is None else process.local_size
    if ranks > 1 and find_spec("torch") is not None:  # which takes seconds to load
        resolve("bloomery.hw.distributed:check_ranks")(ranks, config.device, f"{section}.num_processes")
    for index, sink in enumerate(config.sinks):
        if sink.kind in SINKS:
            extras.load(sink.kind, where=f"{section}.sinks.{index}")


def check_pretraining(section: str, config: Pretrain) -> None:
    """Raises DataError for a sink whose package is missing or a path that is not there, HardwareError for ranks."""
    check_training(section, config)
    check_named_paths(section, config)


def preference_files(config: Prefer) -> str:
    """A hash of the contents of all files and of the model that are read. Raises DataError."""
    data = preferences.digest(config.loss.problems if isinstance(config.loss, Grpo) else config.pairs)
    return f"{data} {start_digest(config)}".rstrip()


def task_files(config: Evaluate) -> str:
    """A hash of the content of the tasks' files, and of those of their examples; "" without tasks. Raises DataError."""
    files = tasks.task_files(config.tasks, config.data)
    names = tasks.named([name for name in config.tasks if name != tasks.NAME])
    digests = [sha256_file(path) for name in names for path in tasks.paths(name, files)]
    for name in names:
        shots = TASKS[name].num_fewshot if config.num_fewshot is None else config.num_fewshot
        if shots and TASKS[name].examples:
            digests += [sha256_file(path) for path in tasks.paths(name, files, examples=True)]
    if tasks.NAME in config.tasks:
        digests += [sha256_file(path) for path in tasks.files_of(files)]
    return sha256_bytes(canonical(digests)) if digests else ""


_TRAINS = {"VERSION": 2, "RESUMES": True, "OUTPUT_PREFIX": "model/", "preflight": check_training}
PRETRAIN = SimpleNamespace(
    **{**_TRAINS, "OWNS_LEFTOVERS": True, "external_inputs": start_digest, "preflight": check_pretraining}
)
FINETUNE = SimpleNamespace(**{**_TRAINS, "VERSION": 3}, OWNS_LEFTOVERS=True, external_inputs=start_digest)
PREFER = SimpleNamespace(**_TRAINS, external_inputs=preference_files)
EVALUATE = SimpleNamespace(VERSION=5, external_inputs=task_files)
"""What a plan asks of the four stages whose modules need torch, which takes seconds to import."""

STAGES = (
    Stage("fetch", "bloomery.stages.fetch"),
    Stage("classify", "bloomery.stages.classify", after=("fetch",)),
    Stage("filter", "bloomery.stages.filter", after=("fetch", "classify")),
    Stage("dedup", "bloomery.stages.dedup", after=("filter",)),
    Stage("tokenizer", "bloomery.stages.tokenizer", after=("dedup",)),
    Stage("shard", "bloomery.stages.shard", after=("dedup", "tokenizer")),
    Stage("pretrain", "bloomery.stages.pretrain", after=("tokenizer", "shard"), planned_by=f"{__name__}:PRETRAIN"),
    Stage("synthesize", "bloomery.stages.synthesize", after=("dedup",)),
    Stage("instruct", "bloomery.stages.instruct", after=("tokenizer", "synthesize")),
    Stage("finetune", "bloomery.stages.finetune", after=("pretrain", "instruct"), planned_by=f"{__name__}:FINETUNE"),
    Stage("prefer", "bloomery.stages.prefer", after=("finetune",), optional=True, planned_by=f"{__name__}:PREFER"),
    Stage(
        "evaluate",
        "bloomery.stages.evaluate",
        after=(
            *("fetch", "classify", "filter", "dedup", "tokenizer", "shard"),
            *("pretrain", "instruct", "finetune", "prefer"),
        ),
        planned_by=f"{__name__}:EVALUATE",
    ),
)
"""
A stage's own file has its version, what it reads from outside the run, and what it needs before it starts. What of
this needs no torch stands above. The pipeline reads them by name when it plans or runs the stage
(`core/pipeline.py`: Stage).
"""
