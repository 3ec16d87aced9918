"""Questions whose answer is one number, so that a program can tell whether it is right: our own, and those of files."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.data import rows, worlds
from bloomery.data.conversations.conversation import not_text
from bloomery.data.preferences.config import Arithmetic
from bloomery.data.unpack import Problem as Trouble

TRIES = 200
"""For each question, before it is said that there are no more of them."""


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str
    """Ends with the number, behind #### in GSM8K's own format."""
    source: str
    place: str
    id: str


def problems(source: Arithmetic) -> Iterator[Problem]:
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
        yield Problem(question, f"#### {result}", source.name, str(number), name)


def _made(rng: random.Random, source: Arithmetic) -> tuple[str, int]:
    """A question and its number; "" for a sum that the small worlds hold out. Products go before sums, as in school."""
    terms = [rng.randint(0, source.largest) for _ in range(rng.randint(2, source.terms))]
    signs = [rng.choice(source.operations) for _ in terms[1:]]
    if signs == ["plus"] and worlds.is_held_out(worlds.sum_of(terms[0], terms[1]).fact):
        return "", 0
    told = str(terms[0]) + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
    total, product, sign = 0, terms[0], 1
    for operation, term in zip(signs, terms[1:], strict=True):
        if operation == "times":
            product *= term
            continue
        total += sign * product
        product, sign = term, 1 if operation == "plus" else -1
    return f"What is {told}?", total + sign * product


def read(
    row: Mapping[str, Any], question_field: str, answer_field: str, source: str, place: str, id: str
) -> Problem | Trouble:
    """A row of a question and its solution, or why it is none."""
    found = {}
    for name in (question_field, answer_field):
        value = rows.at(dict(row), name)
        value = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if value is None:
            return Trouble("no_field", 0, f"has no field {name!r}; its fields: {', '.join(row)}")
        if not isinstance(value, str) or not value.strip():
            return Trouble("not_text", 0, f"field {name!r} holds {type(value).__name__} where a text is wanted")
        if problem := not_text(value, f"field {name!r}"):
            return problem
        found[name] = value
    if not any(sign.isdigit() for sign in found[answer_field]):
        return Trouble("no_number", 0, f"field {answer_field!r} holds no number, so nobody could check an answer")
    return Problem(found[question_field], found[answer_field], source, place, id)
