"""
Small worlds: stories, sums and library facts that a program writes, asks about and can check.

A world is a few facts. It becomes a document that tells them, or a conversation of several turns that asks about
them; the answer to each question follows from the facts alone. Some facts are held out, chosen by the hash of the fact
itself and not by the seed: which thing is in which place or with whom, which two numbers are added, which names of
the library are asked about together. No document and no training conversation of any seed states a held-out fact, and
each held-out question asks for one. So no held-out question was ever seen as text; nor was its answer, but for the
library's, where a name is in its module whatever stands beside it.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bloomery.data.vocabulary import DOINGS, FUNCTIONS, PEOPLE, PLACES, THINGS

LARGEST = 49
"""Operands of a sum lie between 0 and this."""
HELD_OUT_OF = 10
"""One fact in this many is held out."""

Split = Literal["train", "held out"]
Fact = tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    kind: str
    fact: Fact
    """What the answer states; it decides whether the turn is held out."""


@dataclass(frozen=True)
class Conversation:
    """A context that opens the first question, and turns that follow from it."""

    context: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """As role and content, the last message being the last answer."""
        listed = []
        for number, turn in enumerate(self.turns):
            opening = f"{self.context} {turn.question}" if number == 0 and self.context else turn.question
            listed += [{"role": "user", "content": opening}, {"role": "assistant", "content": turn.answer}]
        return listed

    @property
    def kind(self) -> str:
        """Of the last turn, and whether it came alone or after others."""
        return self.turns[-1].kind + ("" if len(self.turns) == 1 else ", later turn")


def is_held_out(fact: Fact) -> bool:
    """Whether a fact is kept from all training text: the same answer in every run, on every machine."""
    digest = hashlib.sha256("\0".join(fact).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_OF == 0


def documents(seed: int, count: int) -> Iterator[str]:
    """Texts that tell worlds without asking: a story and its end, a page of sums, or a note on the library each."""
    for index in range(count):
        rng = random.Random(f"document {seed} {index}")
        yield rng.choices((_story_text, _sums_text, _library_text), weights=(5, 3, 2))[0](rng)


def conversations(seed: int, count: int, split: Split = "train") -> Iterator[Conversation]:
    """
    Conversations of one to four turns. In the split "held out" the last turn asks for a held-out fact; in "train" no
    turn does.
    """
    made, index = 0, 0
    while made < count:
        rng = random.Random(f"{split} {seed} {index}")
        index += 1
        make = rng.choices((_story, _sums, _library), weights=(6, 4, 3))[0]
        talk = make(rng, rng.choices((1, 2, 3, 4), weights=(3, 3, 3, 2))[0], split == "held out")
        if talk is not None:
            made += 1
            yield talk


# --- stories -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Deed:
    """Someone does something, or has put a thing somewhere."""

    person: str
    thing: str | None
    does: str
    """What the person does; for a thing, where it is."""

    @property
    def fact(self) -> Fact:
        return ("where", self.thing, self.does) if self.thing else ("does", self.person, self.does)

    def told(self, verb: str = "put") -> str:
        return f"{self.person} {verb} the {self.thing} {self.does}" if self.thing else f"{self.person} {self.does}"

    def asked(self, who: bool, now: str = "") -> Turn:
        """A question about it and its answer; `now` follows on a change."""
        if self.thing:
            return Turn(
                f"Where is the {self.thing}{now}?", f"You find the {self.thing} {self.does}.", "where", self.fact
            )
        question = f"Who {self.does}{now}?" if who else f"What does {self.person} do{now}?"
        return Turn(question, f"Today {self.person} {self.does}.", "who" if who else "does", self.fact)


def _deeds(rng: random.Random, count: int, held_out: bool) -> list[_Deed]:
    """Deeds of different people with different things, the first of them held out if asked for, the others not."""
    people, things = rng.sample(PEOPLE, count), rng.sample(THINGS, count)
    made: list[_Deed] = []
    for number, (person, thing) in enumerate(zip(people, things, strict=True)):
        has_thing = rng.random() < 0.5
        key = ("where", thing) if has_thing else ("does", person)
        wanted = held_out and number == 0
        used = [deed.does for deed in made]
        some = [
            one for one in (PLACES if has_thing else DOINGS) if one not in used and is_held_out((*key, one)) == wanted
        ]
        if some:
            made.append(_Deed(person, thing if has_thing else None, rng.choice(some)))
    return made


def _tell(rng: random.Random, deeds: Sequence[_Deed]) -> str:
    told = [deed.told(rng.choice(("put", "left", "hid", "keeps"))) for deed in deeds]
    return f"Today {told[0]}. " + " ".join(f"{one}." for one in told[1:])


def _story(rng: random.Random, num_turns: int, held_out: bool) -> Conversation | None:
    """People do things and put things somewhere; the questions ask who, what and where. Sometimes it changes."""
    deeds = _deeds(rng, rng.randint(2, 3), held_out)
    if len(deeds) < 2 or is_held_out(deeds[0].fact) != held_out:
        return None
    last, others = deeds[0], deeds[1:]
    turns = [rng.choice(others).asked(rng.random() < 0.5) for _ in range(num_turns - 1)]
    if num_turns > 1 and rng.random() < 0.3:
        change = last
        before = [one for one in (PLACES if last.thing else DOINGS) if not is_held_out((*last.fact[:2], one))]
        deeds = [_Deed(last.person, last.thing, rng.choice([one for one in before if one != last.does])), *others]
        now = change.asked(rng.random() < 0.5, " now")
        turns.append(Turn(f"Now {change.told()}. {now.question}", now.answer, "changed", now.fact))
    else:
        turns.append(last.asked(rng.random() < 0.5))
    return Conversation(_tell(rng, rng.sample(deeds, len(deeds))), tuple(turns))


def _story_text(rng: random.Random) -> str:
    """A scene, and then all of it once more in another order, sometimes as questions."""
    deeds = _deeds(rng, rng.randint(3, 6), held_out=False)
    turns = [deed.asked(rng.random() < 0.5) for deed in rng.sample(deeds, len(deeds))]
    asked = rng.random() < 0.4
    return " ".join(
        [_tell(rng, deeds), *(f"{turn.question} {turn.answer}" if asked else turn.answer for turn in turns)]
    )


# --- sums ----------------------------------------------------------------------------------------------------------


def _sum(a: int, b: int) -> Turn:
    """
    What a plus b is. Two-digit numbers are added with the last digits first, as at school.

    The fact is the same for b plus a. Sums of two digits are never held out: they are what the others are made of.
    """
    fact: Fact = ("plus", str(min(a, b)), str(max(a, b)))
    if a < 10 and b < 10:
        return Turn(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", "sum", ("digits", *fact[1:]))
    steps = f"{a % 10} plus {b % 10} is {a % 10 + b % 10}, so {a} plus {b} is {a + b}."
    return Turn(f"What is {a} plus {b}?", steps, "sum", fact)


def _sums(rng: random.Random, num_turns: int, held_out: bool) -> Conversation | None:
    """A sum, then sums that go on from its result."""
    turns: list[Turn] = []
    result = -1
    for number in range(num_turns):
        a = result if 0 <= result <= LARGEST else rng.randint(0, LARGEST)
        b = rng.randint(0, LARGEST if a != result else 9)
        turn = _sum(a, b)
        if is_held_out(turn.fact) != (held_out and number == num_turns - 1):
            return None
        turns.append(turn if a != result else Turn(f"Now add {b}.", turn.answer, turn.kind, turn.fact))
        result = a + b
    return Conversation("", tuple(turns))


def _sums_text(rng: random.Random) -> str:
    pairs = [(rng.randint(0, LARGEST), rng.randint(0, LARGEST)) for _ in range(rng.randint(5, 9))]
    turns = [turn for turn in (_sum(a, b) for a, b in pairs) if not is_held_out(turn.fact)]
    return " ".join(turn.answer[0].upper() + turn.answer[1:] for turn in turns)


# --- the library ---------------------------------------------------------------------------------------------------


def _library(rng: random.Random, num_turns: int, held_out: bool) -> Conversation | None:
    """A few names and the modules they are in; the questions ask which module has a name."""
    modules = rng.sample(sorted(FUNCTIONS), rng.randint(2, 3))
    pairs = [(rng.choice(FUNCTIONS[module]), module) for module in modules]
    listing = ("library", *sorted(name for name, _ in pairs))
    if len(set(listing)) < len(listing) or is_held_out(listing) != held_out:
        return None
    context = "In Python, you find " + _and([f"{name} in {module}" for name, module in pairs]) + "."
    asked = [rng.choice(pairs) for _ in range(num_turns)]
    turns = [Turn(f"Where is {name}?", f"You find {name} in {module}.", "library", listing) for name, module in asked]
    return Conversation(context, tuple(turns))


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _library_text(rng: random.Random) -> str:
    """Some names and their modules, and then the same once more in another order."""
    pairs = [(name, module) for module in rng.sample(sorted(FUNCTIONS), 8) for name in FUNCTIONS[module]]
    some = rng.sample(pairs, min(len(pairs), rng.randint(4, 7)))
    again = rng.sample(some, len(some))
    first, second = ([f"{name} in {module}" for name, module in listed] for listed in (some, again))
    return f"In Python, you find {_and(first)}. So you find {_and(second)}."
