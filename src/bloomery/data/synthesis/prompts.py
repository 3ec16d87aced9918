"""
Categories of questions: templates with slots, which together make every question at most once.

A question is template number and value of each of its slots; which of them come first is drawn with the seed, so that a
run that goes on asks what it would have asked.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from bloomery.core.bounds import Weight
from bloomery.core.config import Config

SLOT = re.compile(r"\{(\w+)\}")


class Slot(Config):
    name: Annotated[str, Field(pattern=r"^\w+$")]
    values: tuple[str, ...] = Field(min_length=1)


class Category(Config):
    """A kind of question."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    weight: Weight = 1.0
    system: str = ""
    """What the model is told before; it is not part of the conversation that is kept."""
    prompts: tuple[str, ...] = Field(min_length=1)
    """Templates of what a user asks; {name} is filled from the slot of that name."""
    slots: tuple[Slot, ...] = ()
    follow_ups: tuple[tuple[str, ...], ...] = ()
    """What a user says next, turn by turn; of each turn's several, one is drawn."""
    verbatim: bool = False
    """Whether braces in `prompts` are just braces."""

    @model_validator(mode="after")
    def _slots_are_there(self) -> "Category":
        names = [slot.name for slot in self.slots]
        for prompt in self.prompts:
            if missing := next((name for name in _slots(self, prompt) if name not in names), None):
                raise ValueError(f"the prompt {prompt!r} has the slot {missing!r}, and slots has {', '.join(names)}")
        if any(not turn for turn in self.follow_ups):
            raise ValueError("follow_ups has a turn with nothing to say")
        return self


@dataclass(frozen=True)
class Task:
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


def tasks(categories: Sequence[Category], seed: int) -> Iterator[Task]:
    """
    Every question of all categories, each time of the one that is furthest behind its weight. One that has no more
    questions leaves its share to the others.
    """
    left = {category.name: _questions(category, seed) for category in categories}
    weights = {category.name: category.weight for category in categories}
    systems = {category.name: category.system for category in categories}
    given = dict.fromkeys(weights, 0)
    number = 0
    while left:
        name = min(left, key=lambda one: (given[one] + 1) / weights[one])
        asks = next(left[name], None)
        if asks is None:
            del left[name]
            continue
        given[name] += 1
        yield Task(number, name, asks, systems[name])
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
    for place in order:
        yield (_question(category, place), *(rng.choice(turn) for turn in category.follow_ups))


def _question(category: Category, place: int) -> str:
    for prompt in category.prompts:
        if place < (size := _size(category, prompt)):
            break
        place -= size
    filled: dict[str, str] = {}
    values = {slot.name: slot.values for slot in category.slots}
    for name in _slots(category, prompt):
        place, chosen = divmod(place, len(values[name]))
        filled[name] = values[name][chosen]
    return prompt if category.verbatim else SLOT.sub(lambda found: filled[found[1]], prompt)
