"""
Preference pairs and math problems for the section [prefer].

The sources have their settings in the section [prefer] of a recipe.

Readers go row by row. A row that does not fit also comes out, as a rejected row. The order depends on nothing but
names and the config.

Math problems have one number as their answer, so that a program can check it. They come from our generator or from
files.

Settings, formats and readers share one file because a change of a row format changes all three.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from bloomery.core.chat import as_message
from bloomery.core.config import Between, Config, DiskPath, DocumentCount, RowBytes, Seed
from bloomery.data.chat import formats, readers
from bloomery.data.chat.formats import ChatRow, Fields, Messages, RejectedRow, not_text
from bloomery.data.chat.readers import ChatFiles, ChatHub
from bloomery.data.readers import rows
from bloomery.data.readers.bytes import ReadError
from bloomery.data.readers.read import FieldIs, Name, first_unmet
from bloomery.data.sources import toy_worlds
from bloomery.data.sources.remote import AtHub

Generated = Annotated[int, Between(1, 10**8, "all are in memory")]


class WorldPairs(Config):
    """
    Conversations of the generator of small worlds: the right answer, and one to another question of the same kind.
    """

    kind: Literal["worlds"] = "worlds"
    name: Name = "worlds"
    """Name of the source."""
    count: Generated = 2000
    """Number of pairs."""
    seed: Seed = 0
    """Seed of its random choices."""


class Read(Config):
    """What every source of rows has."""

    name: Name
    """Name of the source in reports."""
    max_rows: DocumentCount | None = None
    """Maximum number of rows to read, without rejected ones."""
    accept: tuple[FieldIs, ...] = ()
    """Conditions that a row must meet. Other rows are rejected, with the condition and the value."""
    max_row_bytes: RowBytes = 16 * 2**20
    """A longer row is rejected (`too_long`)."""


class PairRows(Read):
    """How rows are judged answers. None: by the usual names; see docs/understand/preferences.md."""

    prompt_field: str | None = None
    """The field with the prompt. Not set: one of the usual names."""
    chosen_field: str | None = None
    """The field with the chosen answer. Not set: one of the usual names."""
    rejected_field: str | None = None
    """The field with the rejected answer. Not set: one of the usual names."""
    system_field: str | None = None
    """The field with the system message. Not set: one of the usual names."""


class PairFiles(PairRows):
    """Files of this machine: .jsonl, .json (a list) and .parquet, the first two also as .gz and .zst."""

    kind: Literal["files"] = "files"
    path: DiskPath
    """A file, a folder with everything below it, or wildcards."""

    def packages(self) -> tuple[str, ...]:
        return self.files_read.packages()

    @property
    def files_read(self) -> ChatFiles:
        return ChatFiles(name=self.name, path=self.path, max_row_bytes=self.max_row_bytes)


class PairHub(PairRows, AtHub):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @property
    def files_read(self) -> ChatHub:
        return _at_hub(self)


Pairs = WorldPairs | PairFiles | PairHub


class Arithmetic(Config):
    """
    Generated questions, such as "What is 12 plus 30?", each with one correct number.

    Questions are worded as in the toy worlds and leave out their validation sums. `terms` above two gives "3 plus 4
    minus 2".
    """

    kind: Literal["arithmetic"] = "arithmetic"
    name: Name = "arithmetic"
    """Name of the source."""
    count: Generated = 2000
    """Number of questions."""
    largest: Annotated[int, Between(1, 10**9, "answers are numbers that a model could learn")] = 49
    """Largest operand. The smallest is 0."""
    operations: tuple[Literal["plus", "minus", "times"], ...] = Field(("plus",), min_length=1)
    """Operations that questions use."""
    terms: Annotated[int, Between(2, 6, "few people ask for more", "a question has two operands")] = 2
    """Maximum number of operands of a question."""
    seed: Seed = 0
    """Seed of its random choices."""


class ProblemRows(Read):
    """Rows of a question and its solution, whose number stands behind #### or is the last one."""

    question_field: str = "question"
    """The field with the question."""
    answer_field: str = "answer"
    """The field with the solution."""


class ProblemFiles(ProblemRows):
    """Files in the format of GSM8K: .jsonl, .json or .parquet, the first two also as .gz and .zst."""

    kind: Literal["files"] = "files"
    path: DiskPath
    """A file, a folder with everything below it, or wildcards."""

    def packages(self) -> tuple[str, ...]:
        return self.files_read.packages()

    @property
    def files_read(self) -> ChatFiles:
        return ChatFiles(name=self.name, path=self.path, max_row_bytes=self.max_row_bytes)


class ProblemHub(ProblemRows, AtHub):
    """A data set of the hub in that format, such as "openai/gsm8k" with config = "main"."""

    kind: Literal["hub"] = "hub"
    dataset: str = Field(pattern=r"^([\w.\-]+/)?[\w.\-]+$")

    @property
    def files_read(self) -> ChatHub:
        return _at_hub(self)


Problems = Arithmetic | ProblemFiles | ProblemHub


def _at_hub(source: PairHub | ProblemHub) -> ChatHub:
    shared = {name: getattr(source, name) for name in AtHub.model_fields}
    return ChatHub(name=source.name, max_row_bytes=source.max_row_bytes, max_conversations=source.max_rows, **shared)


PreferenceRow = Mapping[str, Any]

PROMPTS = ("prompt", "question", "instruction", "query", "input", "conversations", "messages")
CHOSEN = ("chosen", "chosen_response", "preferred")
REJECTED = ("rejected", "rejected_response", "dispreferred")
SYSTEM = ("system", "system_prompt")
BESIDE = ("context", "history")
KNOWN = (*PROMPTS, *BESIDE, *formats.NOT_TEXT, *CHOSEN, *REJECTED, *SYSTEM, "id", "prompt_id")
"""Fields that are looked at where the recipe names none: of wide tables no other column is read."""


@dataclass(frozen=True)
class JudgedRow:
    """Two answers after a prompt, the better one and the worse one. Each is a message, or messages that end in one."""

    prompt: Messages
    """What both see. The last message is not the assistant's."""
    chosen: Messages
    rejected: Messages
    source: str
    location: str
    """File and line, or the number of what was generated."""
    id: str = ""

    @property
    def asked(self) -> str:
        """The text of the prompt; pairs with the same prompt go to the same split."""
        return "\n".join(message["content"] for message in self.prompt)


Understood = tuple[Messages, Messages, Messages]
"""Prompt, chosen, rejected."""


def understood(row: PreferenceRow, how: PairRows) -> Understood | ReadError:
    """A row as two judged answers, or why it is none."""
    if (more := formats.beyond_text(row)) is not None:
        return more
    chosen, rejected = _found(row, how.chosen_field, CHOSEN), _found(row, how.rejected_field, REJECTED)
    if chosen is None or rejected is None:
        return ReadError("unknown_shape", 0, f"does not have two answers; its fields: {', '.join(row)}")
    prompt = _prompt(row, how)
    if isinstance(prompt, ReadError):
        return prompt
    reply = _said(chosen, "assistant", alone=not prompt)
    if isinstance(reply, ReadError):
        return reply
    other = _said(rejected, "assistant", alone=not prompt)
    if isinstance(other, ReadError):
        return other
    return _split(prompt, reply, other)


def _split(prompt: Messages, first: Messages, second: Messages) -> Understood | ReadError:
    """
    What both answers begin with belongs to the prompt. Where each answer is the whole conversation, the prompt is not
    said twice.
    """
    both = range(min(len(first), len(second)))
    answered = next((place for place in both if first[place] != second[place]), min(len(first), len(second)))
    shared, first, second = first[:answered], first[answered:], second[answered:]
    before = _once(prompt, shared)
    if not first or not second:
        return ReadError("same_answer", 0, "the two answers are the same, or one is the beginning of the other")
    if not before or before[-1]["role"] == "assistant":
        what = "it has no prompt" if not before else "the message before the answers is the assistant's"
        return ReadError("no_prompt", 0, what)
    for name, answer in (("chosen", first), ("rejected", second)):
        if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            return ReadError("no_answer", 0, f"the {name} answer does not begin and end with the assistant")
    return before, first, second


def _once(prompt: Messages, shared: Messages) -> Messages:
    """What stands in the prompt and what both answers begin with; where one holds the other, that one alone."""
    opening = prompt[:1] if prompt and prompt[0]["role"] == "system" else []
    asked = _bare(prompt[len(opening) :])
    if not asked or asked not in (_bare(shared)[-len(asked) :], _bare(_without_system(shared))[: len(asked)]):
        return prompt + shared
    return shared if shared[0]["role"] == "system" else opening + shared


def _without_system(said: Messages) -> Messages:
    return said[1:] if said and said[0]["role"] == "system" else said


def _bare(said: Messages) -> list[tuple[str, str]]:
    """Role and content of each message, stripped: some data sets keep outer white space in only one column."""
    return [(message["role"], message["content"].strip()) for message in said]


def _prompt(row: PreferenceRow, how: PairRows) -> Messages | ReadError:
    """What is asked; empty where the answers begin with it."""
    names = PROMPTS if how.prompt_field is None else (how.prompt_field,)
    name, prompt = next(
        ((name, value) for name in names if (value := rows.at(dict(row), name)) is not None), ("", None)
    )
    if name == "instruction" and isinstance(prompt, str):
        prompt = formats.instructed(row)
        if isinstance(prompt, ReadError):
            return prompt
    asked: Messages | ReadError = [] if prompt is None or prompt == [] else _said(prompt, "user")
    before: Messages | ReadError = [] if name == "history" else _history(row)
    if isinstance(before, ReadError):
        return before
    if isinstance(asked, list) and before:
        rest = _without_system(asked)
        asked = asked[: len(asked) - len(rest)] + _once(before, rest)
    system = _found(row, how.system_field, SYSTEM)
    if isinstance(asked, ReadError) or system is None or system == "":
        return asked
    opening = _said(system, "system")
    if isinstance(opening, ReadError):
        return opening
    return asked if asked and asked[0]["role"] == "system" else opening + asked


def _history(row: PreferenceRow) -> Messages | ReadError:
    """The turns before the prompt, as pairs or as messages."""
    history = row.get("history")
    is_messages = isinstance(history, list) and history != [] and isinstance(history[0], Mapping)
    return _said(history, "user") if is_messages else formats.earlier(row)


def _said(value: Any, role: str, *, alone: bool = False) -> Messages | ReadError:
    """Messages of a text, of one message or of a list of them. A text that is all there is may be a dialogue."""
    if isinstance(value, str) and alone and formats.is_dialogue(value):
        return formats.parse_dialogue(value)
    listed = [{"role": role, "content": value}] if isinstance(value, str) else value
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not listed:
        return ReadError("not_text", 0, f"holds {type(value).__name__}, not text or messages")
    row = {"messages": listed}
    shape = "sharegpt" if isinstance(listed[0], Mapping) and "from" in listed[0] else "messages"
    return formats.READ[shape](row, Fields(messages="messages"))  # type: ignore[index]


def _found(row: PreferenceRow, named: str | None, known: tuple[str, ...]) -> Any:
    """The value of the field that the recipe names, or of the first that is there; None where there is none."""
    names = known if named is None else (named,)
    return next((value for name in names if (value := rows.at(dict(row), name)) is not None), None)


TRIES = 200
"""Attempts to find a new question before generation stops."""


@dataclass(frozen=True)
class ArithmeticProblem:
    question: str
    solution: str
    """Ends with the number, behind #### in GSM8K's own format."""
    source: str
    location: str
    id: str


def arithmetic_problems(source: Arithmetic) -> Iterator[ArithmeticProblem]:
    """As many different questions as the source asks for, or as there are; each depends on seed and number alone."""
    seen: set[str] = set()
    for number in range(source.count):
        for attempt in range(TRIES):
            question, result = _made(random.Random(f"arithmetic {source.seed} {number} {attempt}"), source)
            if question and question not in seen:
                break
        else:
            return
        seen.add(question)
        name = f"{source.name}/{number}"
        yield ArithmeticProblem(question, f"#### {result}", source.name, str(number), name)


def _made(rng: random.Random, source: Arithmetic) -> tuple[str, int]:
    """A question and its number; "" for a validation sum of the toy worlds. "times" binds before "plus" and "minus"."""
    terms = [rng.randint(0, source.largest) for _ in range(rng.randint(2, source.terms))]
    signs = [rng.choice(source.operations) for _ in terms[1:]]
    if signs == ["plus"] and toy_worlds.is_held_out(toy_worlds.sum_of(terms[0], terms[1]).fact):
        return "", 0
    expression = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
    total, product, sign = 0, terms[0], 1
    for operation, term in zip(signs, terms[1:], strict=True):
        if operation == "times":
            product *= term
            continue
        total += sign * product
        product, sign = term, 1 if operation == "plus" else -1
    return f"What is {expression}?", total + sign * product


def read_arithmetic(
    row: Mapping[str, Any], question_field: str, answer_field: str, source: str, location: str, id: str
) -> ArithmeticProblem | ReadError:
    """A row of a question and its solution, or why it is none."""
    fields = {}
    for name in (question_field, answer_field):
        value = rows.at(dict(row), name)
        value = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if value is None:
            return ReadError("no_field", 0, f"has no field {name!r}; its fields: {', '.join(row)}")
        if not isinstance(value, str) or not value.strip():
            return ReadError("not_text", 0, f"field {name!r} holds {type(value).__name__}, not text")
        if problem := not_text(value, f"field {name!r}"):
            return problem
        fields[name] = value
    if not any(sign.isdigit() for sign in fields[answer_field]):
        return ReadError("no_number", 0, f"field {answer_field!r} holds no number to check an answer against")
    return ArithmeticProblem(fields[question_field], fields[answer_field], source, location, id)


T = TypeVar("T")


def digest(read: Iterable[Pairs | Problems]) -> str:
    """
    A hash of the contents of all files, and of the commits of data sets, for a stage's fingerprint. Raises DataError
    where a file cannot be read, or the hub does not say what a revision is.
    """
    return readers.digest([one.files_read for one in read if not isinstance(one, WorldPairs | Arithmetic)])


def judged(read: Iterable[Pairs]) -> Iterator[JudgedRow | RejectedRow]:
    """Every pair of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        yield from _of_worlds(source) if isinstance(source, WorldPairs) else _of_answers(source)


def problems(read: Iterable[Problems]) -> Iterator[ArithmeticProblem | RejectedRow]:
    """Every question of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        yield from arithmetic_problems(source) if isinstance(source, Arithmetic) else _of_solutions(source)


def _of_answers(source: PairFiles | PairHub) -> Iterator[JudgedRow | RejectedRow]:
    def read(row: ChatRow, location: str, id: str) -> JudgedRow | ReadError:
        answers = understood(row, source)
        return (
            answers
            if isinstance(answers, ReadError)
            else JudgedRow(*answers, source=source.name, location=location, id=id)
        )

    named = [str(value) for name, value in source if name.endswith("_field") and value]
    seen: set[str] = set()
    yield from readers.capped(source.max_rows, _of_rows(source, {*KNOWN, *named}, read, seen))
    optional = {"prompt_field": source.prompt_field, "system_field": source.system_field}
    readers.warn_of_missing(source.name, optional, seen)


def _of_solutions(source: ProblemFiles | ProblemHub) -> Iterator[ArithmeticProblem | RejectedRow]:
    def read(row: ChatRow, location: str, id: str) -> ArithmeticProblem | ReadError:
        return read_arithmetic(row, source.question_field, source.answer_field, source.name, location, id)

    return readers.capped(source.max_rows, _of_rows(source, {source.question_field, source.answer_field}, read, set()))


def _of_rows(
    source: PairFiles | PairHub | ProblemFiles | ProblemHub,
    fields: Set[str],
    read: Callable[[ChatRow, str, str], T | ReadError],
    seen: set[str],
) -> Iterator[T | RejectedRow]:
    """The result of `read` for each row, its location and its ID; the names of its fields are added to `seen`."""
    columns = {name.partition(".")[0] for name in (*fields, *(one.field for one in source.accept))}
    for location, id, row in readers.raw_rows(source.files_read, columns):
        if isinstance(row, ReadError):
            yield RejectedRow(source.name, location, row)
            continue
        seen.update(row)
        item = first_unmet(source.accept, "", row) or read(row, location, id)
        yield RejectedRow(source.name, location, item, row) if isinstance(item, ReadError) else item


def _of_worlds(source: WorldPairs) -> Iterator[JudgedRow]:
    """The last answer of each conversation, against the last answer of that kind that was another one."""
    before: dict[str, list[str]] = {}
    count = 0
    for number, talk in enumerate(toy_worlds.conversations(source.seed, 2 * source.count + 100)):
        turn = talk.turns[-1]
        seen = before.setdefault(turn.kind, [])
        wrong = next((answer for answer in reversed(seen) if answer != turn.answer), None)
        seen[:] = [*seen[-7:], turn.answer]
        if wrong is None:
            continue
        prompt = [as_message(one) for one in talk.messages()[:-1]]
        chosen, rejected = ([as_message({"role": "assistant", "content": said})] for said in (turn.answer, wrong))
        yield JudgedRow(prompt, chosen, rejected, source.name, str(number), f"{source.name}/{number}")
        count += 1
        if count == source.count:
            return
