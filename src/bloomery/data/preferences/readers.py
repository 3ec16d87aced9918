"""
Judged answers and problems from their sources, row by row; what is none comes out too, as `Rejected`.

The order depends on nothing but names and the config.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeVar

from bloomery.data import worlds
from bloomery.data.accept import first_unmet
from bloomery.data.conversations import readers
from bloomery.data.conversations.conversation import Rejected, as_message
from bloomery.data.conversations.shapes import Row
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

T = TypeVar("T")


def digest(read: Iterable[Pairs | Problems]) -> str:
    """
    A hash of the contents of all files, and of the commits of data sets, for a stage's fingerprint. Raises DataError
    where a file cannot be read, or the hub does not say what a revision is.
    """
    return readers.digest([one.files_read for one in read if not isinstance(one, WorldPairs | Arithmetic)])


def judged(read: Iterable[Pairs]) -> Iterator[Judged | Rejected]:
    """Every pair and every single answer of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        yield from _of_worlds(source) if isinstance(source, WorldPairs) else _of_answers(source)


def problems(read: Iterable[Problems]) -> Iterator[Question | Rejected]:
    """Every question of every source, up to its cap, or why it is none. Raises DataError."""
    for source in read:
        yield from arithmetic.problems(source) if isinstance(source, Arithmetic) else _of_solutions(source)


def _of_answers(source: PairFiles | PairHub) -> Iterator[Judged | Rejected]:
    def read(row: Row, place: str, id: str) -> Judged | Problem:
        found = understood(row, source)
        return found if isinstance(found, Problem) else Judged(*found, source=source.name, place=place, id=id)

    named = [str(value) for name, value in source if name.endswith("_field") and value]
    return readers.capped(source.max_rows, _of_rows(source, {*KNOWN, *named}, read))


def _of_solutions(source: ProblemFiles | ProblemHub) -> Iterator[Question | Rejected]:
    def read(row: Row, place: str, id: str) -> Question | Problem:
        return arithmetic.read(row, source.question_field, source.answer_field, source.name, place, id)

    return readers.capped(source.max_rows, _of_rows(source, {source.question_field, source.answer_field}, read))


def _of_rows(
    source: PairFiles | PairHub | ProblemFiles | ProblemHub,
    fields: Set[str],
    read: Callable[[Row, str, str], T | Problem],
) -> Iterator[T | Rejected]:
    """What `read` makes of each row, its place and its id."""
    columns = {name.partition(".")[0] for name in (*fields, *(one.field for one in source.accept))}
    for place, id, row in readers.raw_rows(source.files_read, columns):
        if isinstance(row, Problem):
            yield Rejected(source.name, place, row)
            continue
        found = first_unmet(source.accept, "", row) or read(row, place, id)
        yield Rejected(source.name, place, found, row) if isinstance(found, Problem) else found


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
