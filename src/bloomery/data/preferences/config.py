"""Where preferences and problems come from: sources of the section [prefer] of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from bloomery.core.bounds import Between, DiskPath, Documents, RowBytes, Seed
from bloomery.core.config import Config
from bloomery.data.accept import FieldIs
from bloomery.data.conversations.config import TalkFiles, TalkHub
from bloomery.data.elsewhere import AtHub, Reach
from bloomery.data.reading import Name

Generated = Annotated[int, Between(1, 10**8, "all are in memory")]


class WorldPairs(Config):
    """
    Conversations of the generator of small worlds: the right answer, and that to another question of the same kind.
    """

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    count: Generated = 2000
    seed: Seed = 0


class Read(Config):
    """What every source of rows has."""

    name: Name
    """What reports call it."""
    max_rows: Documents | None = None
    """Reading stops behind so many that are understood."""
    accept: tuple[FieldIs, ...] = ()
    """Conditions that a row has to meet; the others are rejected with the condition and the value it saw."""
    max_row_bytes: RowBytes = 16 * 2**20
    """A longer row is rejected (`too_long`)."""


class PairRows(Read):
    """How rows are judged answers. None: by the usual names; see docs/prefer.md."""

    prompt_field: str | None = None
    chosen_field: str | None = None
    rejected_field: str | None = None
    completion_field: str | None = None
    label_field: str | None = None
    """Of single answers: true where it is wanted."""
    system_field: str | None = None


class PairFiles(PairRows):
    """Files of this machine: .jsonl, .json (a list) and .parquet, the first two also as .gz and .zst."""

    kind: Literal["files"] = "files"
    path: DiskPath
    """A file, a folder with all that is below it, or wildcards."""

    @property
    def files_read(self) -> TalkFiles:
        return TalkFiles(name=self.name, path=self.path, max_row_bytes=self.max_row_bytes)


class PairHub(PairRows, AtHub, Reach):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @property
    def files_read(self) -> TalkHub:
        return _at_hub(self)


Pairs = WorldPairs | PairFiles | PairHub


class Arithmetic(Config):
    """
    Questions of a generator of ours, such as "What is 12 plus 30?", with their one right number.

    The words are those of the small worlds, whose held-out sums never come; `steps` numbers above two make "3 plus 4
    minus 2".
    """

    kind: Literal["arithmetic"] = "arithmetic"
    name: Name = "arithmetic"
    count: Generated = 2000
    largest: Annotated[int, Between(1, 10**9, "answers are numbers that a model could learn")] = 49
    """Operands lie between 0 and this."""
    operations: tuple[Literal["plus", "minus", "times"], ...] = Field(("plus",), min_length=1)
    terms: Annotated[int, Between(2, 6, "few people ask for more", "a question has two operands")] = 2
    """Most operands of a question."""
    seed: Seed = 0


class ProblemRows(Read):
    """Rows of a question and its solution, whose number stands behind #### or is the last one."""

    question_field: str = "question"
    answer_field: str = "answer"


class ProblemFiles(ProblemRows):
    """Files in the format of GSM8K: .jsonl, .json or .parquet, the first two also as .gz and .zst."""

    kind: Literal["files"] = "files"
    path: DiskPath

    @property
    def files_read(self) -> TalkFiles:
        return TalkFiles(name=self.name, path=self.path, max_row_bytes=self.max_row_bytes)


class ProblemHub(ProblemRows, AtHub, Reach):
    """A data set of the hub in that format, such as "openai/gsm8k" with config = "main"."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @property
    def files_read(self) -> TalkHub:
        return _at_hub(self)


Problems = Arithmetic | ProblemFiles | ProblemHub


def _at_hub(source: PairHub | ProblemHub) -> TalkHub:
    shared = {name: getattr(source, name) for name in (*AtHub.model_fields, *Reach.model_fields)}
    return TalkHub(name=source.name, max_row_bytes=source.max_row_bytes, max_conversations=source.max_rows, **shared)
