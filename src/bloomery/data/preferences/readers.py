"""
Judged answers and problems from their sources, row by row; what is none comes out too, as `Rejected`.

The order depends on nothing but names and the config.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from bloomery.data import worlds
from bloomery.data.accept import first_unmet
from bloomery.data.conversations import readers
from bloomery.data.conversations.conversation import Rejected, as_message
from bloomery.data.preferences import arithmetic
from bloomery.data.preferences.arithmetic import Problem as Question
from bloomery.data.preferences.config import (
    Arithmetic,
    PairFiles,
    PairHub,
    Pairs,
    ProblemFiles,
    ProblemHub,
    Problems,
    WorldPairs,
)
from bloomery.data.preferences.judged import KNOWN, Judged, understood
from bloomery.data.unpack import Problem

T = TypeVar("T", Judged, Question)


def digest(read: Iterable[Pairs | Problems]) -> str:
    """
    A hash of the contents of all files, and of the commits of data sets, for a stage's fingerprint. Raises DataError
    where a file cannot be read, or the hub does not say what a revision is.
    """
    return readers.digest([one.files_read for one in read if not isinstance(one, WorldPairs | Arithmetic)])


def judged(read: Iterable[Pairs]) -> Iterator[Judged | Rejected]:
    """Every pair and every single answer of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        yield from _of_worlds(source) if isinstance(source, WorldPairs) else _capped(source.max_rows, _of_rows(source))


def problems(read: Iterable[Problems]) -> Iterator[Question | Rejected]:
    """Every question of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        if isinstance(source, Arithmetic):
            yield from arithmetic.problems(source)
        else:
            yield from _capped(source.max_rows, _of_solutions(source))


def _of_rows(source: PairFiles | PairHub) -> Iterator[Judged | Rejected]:
    named = [name for name, value in source if name.endswith("_field") and value]
    columns = {*KNOWN, *(str(getattr(source, name)).partition(".")[0] for name in named)}
    columns |= {one.field.partition(".")[0] for one in source.accept}
    for place, id, row in readers.raw_rows(source.files_read, columns):
        if isinstance(row, Problem):
            yield Rejected(source.name, place, row)
        elif (unmet := first_unmet(source.accept, "", row)) is not None:
            yield Rejected(source.name, place, unmet, row)
        elif isinstance(found := understood(row, source), Problem):
            yield Rejected(source.name, place, found, row)
        else:
            yield Judged(*found, source=source.name, place=place, id=id)


def _of_solutions(source: ProblemFiles | ProblemHub) -> Iterator[Question | Rejected]:
    columns = {source.question_field, source.answer_field, *(one.field for one in source.accept)}
    for place, id, row in readers.raw_rows(source.files_read, {name.partition(".")[0] for name in columns}):
        if isinstance(row, Problem):
            yield Rejected(source.name, place, row)
        elif (unmet := first_unmet(source.accept, "", row)) is not None:
            yield Rejected(source.name, place, unmet, row)
        else:
            found = arithmetic.read(row, source.question_field, source.answer_field, source.name, place, id)
            yield Rejected(source.name, place, found, row) if isinstance(found, Problem) else found


def _capped(limit: int | None, found: Iterator[T | Rejected]) -> Iterator[T | Rejected]:
    taken = 0
    for item in found:
        yield item
        taken += not isinstance(item, Rejected)
        if taken == limit:
            return


def _of_worlds(source: WorldPairs) -> Iterator[Judged]:
    """The last answer of each conversation, against the last answer of that kind that was another one."""
    before: dict[str, list[str]] = {}
    made = 0
    for number, talk in enumerate(worlds.conversations(source.seed, 2 * source.count + 100)):
        turn = talk.turns[-1]
        seen = before.setdefault(turn.kind, [])
        wrong = next((answer for answer in reversed(seen) if answer != turn.answer), None)
        seen[:] = [*seen[-7:], turn.answer]
        if wrong is None:
            continue
        prompt = [as_message(one) for one in talk.messages()[:-1]]
        chosen, rejected = ([as_message({"role": "assistant", "content": said})] for said in (turn.answer, wrong))
        yield Judged(prompt, chosen, rejected, source.name, str(number), f"{source.name}/{number}")
        made += 1
        if made == source.count:
            return
