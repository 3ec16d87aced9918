import hashlib
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from bloomery.data.sources import toy_worlds
from bloomery.data.sources.toy_worlds import WorldConversation, WorldTurn

SEEDS = range(12)
LISTS = {name: value for name, value in vars(toy_worlds).items() if name.isupper() and isinstance(value, list | tuple)}
WORDS = {word for words in LISTS.values() for word in words}
ABOUT = ("library",)
"""Facts that say which things were listed together, and not what each of them is."""


@cache
def training_talks() -> list[WorldConversation]:
    return [talk for seed in SEEDS for talk in toy_worlds.conversations(seed, 150)]


@cache
def held_out_talks() -> list[WorldConversation]:
    return [talk for seed in SEEDS for talk in toy_worlds.conversations(seed, 50, "held out")]


@cache
def training_texts() -> list[str]:
    """All that a model may read: documents, and conversations as they are told."""
    return [text for texts in told_texts() for text in texts]


def told_texts() -> tuple[list[str], list[str]]:
    told = [" ".join(message["content"] for message in talk.messages()) for talk in training_talks()]
    return [text for seed in SEEDS for text in toy_worlds.documents(seed, 100)], told


def sentences(text: str) -> list[str]:
    return re.findall(r"[^.?!]+[.?!]", text)


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text)) & WORDS


# --- answers follow ------------------------------------------------------------------------------------------------


def sum_of(question: str, before: int | None) -> int:
    """What a question about numbers asks for; one number alone goes on from the result before."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if len(numbers) == 1:
        assert before is not None
        numbers = [before, *numbers]
    first, second = numbers
    return first + second


def module_of(question: str, context: str) -> set[str]:
    """The modules that the context names and that have what the question names."""
    asked = set(re.findall(r"\w+", question)) & {name for names in toy_worlds.FUNCTIONS.values() for name in names}
    named = set(re.findall(r"\w+", context))
    return {module for module in toy_worlds.FUNCTIONS if module in named and asked & set(toy_worlds.FUNCTIONS[module])}


History = list[tuple[str, str]]
"""Who had the story's thing, and where it then was, in the order of telling."""


def take_in(history: History, sentence: str) -> None:
    """What a sentence tells of the thing, whatever its wording."""
    said = re.findall(r"\w+", sentence)
    person, place = ([word for word in said if word in kind] for kind in (toy_worlds.PEOPLE, toy_worlds.PLACES))
    if person and place:
        history.append((person[0], place[0]))


def told_of(history: History, question: str) -> str:
    """The person or place that a question about the thing asks for."""
    person, place = history[0] if "first" in question else history[-1]
    return person if question.startswith("Who") else place


def solve(talk: WorldConversation) -> Iterator[tuple[WorldTurn, str]]:
    """Every turn, and what is wrong with its answer, or ""."""
    history: History = []
    for sentence in sentences(talk.context):
        take_in(history, sentence)
    before: int | None = None
    for turn in talk.turns:
        *more, asked = sentences(turn.question)
        if " or " in asked:
            low, high = sorted(map(int, re.findall(r"\d+", asked)))
            said = [int(number) for number in re.findall(r"\d+", turn.answer)]
            yield turn, "" if said == [high, low] else f"{high} is right"
        elif re.search(r"\d", asked):
            result = sum_of(asked, before)
            before = int((re.findall(r"\d+", turn.answer) or ["-1"])[-1])
            steps = re.findall(r"(\d+) plus (\d+) is (\d+)", turn.answer)
            true = all(int(a) + int(b) == int(c) for a, b, c in steps)
            yield turn, "" if before == result and true and steps else f"{result} is right"
        elif modules := module_of(turn.question, talk.context):
            said_names = modules & set(re.findall(r"\w+", turn.answer))
            yield turn, "" if said_names else f"{modules} is right"
        else:
            for sentence in more:
                take_in(history, sentence)
            right = told_of(history, asked)
            thing = words(asked) & set(toy_worlds.THINGS)
            good = words(turn.answer) == {right, *thing}
            yield turn, "" if good else f"{right} is right"


@pytest.mark.parametrize("split", ["train", "held out"])
def test_every_answer_follows_from_what_was_told(split: str) -> None:
    solved: Counter[str] = Counter()
    for talk in training_talks() if split == "train" else held_out_talks():
        for turn, wrong in solve(talk):
            assert not wrong, (talk, turn, wrong)
            solved[turn.kind] += 1
    assert len(solved) >= 4
    assert min(solved.values()) >= 20, solved


def test_a_solver_that_accepts_everything_would_be_noticed() -> None:
    """The wrong answers of other turns are refused, but for a few that happen to be right."""
    refused: Counter[bool] = Counter()
    talks = training_talks()
    for talk, other in pairwise(talks):
        wrong = WorldTurn(talk.turns[0].question, other.turns[0].answer, "", ())
        [(_, told)] = solve(WorldConversation(talk.context, (wrong,)))
        refused[bool(told)] += 1
    assert refused[True] > 0.97 * len(talks)


# --- nothing that is held out is seen ------------------------------------------------------------------------------


def test_no_turn_in_training_states_a_held_out_fact_and_every_held_out_question_asks_for_one() -> None:
    assert not [turn for talk in training_talks() for turn in talk.turns if toy_worlds.is_held_out(turn.fact)]
    assert all(toy_worlds.is_held_out(talk.turns[-1].fact) for talk in held_out_talks())
    assert len(held_out_talks()) >= 500


def test_no_training_text_holds_a_held_out_question_or_its_answer() -> None:
    everything = "\n".join(training_texts())
    checked: Counter[str] = Counter()
    for talk in held_out_talks():
        turn = talk.turns[-1]
        if len(talk.turns) == 1:
            assert talk.messages()[0]["content"] not in everything
            checked["question"] += 1
        if turn.fact[0] not in ABOUT:
            found = turn.answer in everything and re.search(rf"(?<!\w){re.escape(turn.answer)}", everything)
            assert not found, turn
            checked["answer"] += 1
    assert checked["question"] >= 100
    assert checked["answer"] >= 300


def test_no_sentence_in_training_brings_the_words_of_a_held_out_fact_together() -> None:
    """In whatever words it is told, asked or answered."""
    told = [sentence for text in training_texts() for sentence in sentences(text)]
    pairs = {pair for sentence in set(told) for pair in combinations(sorted(words(sentence)), 2)}
    terms = {frozenset(pair) for pair in re.findall(r"(\d+) plus (\d+)", " ".join(told))}
    compared = {frozenset(p) for p in re.findall(r"(\d+) (?:or|is larger than) (\d+)", " ".join(told))}
    checked: Counter[str] = Counter()
    for talk in held_out_talks():
        kind, *about = talk.turns[-1].fact
        if kind in ABOUT:
            continue
        if all(part.isdecimal() for part in about):
            assert frozenset(about) not in (terms if kind == "plus" else compared), talk.turns[-1]
        else:
            assert set(about) <= WORDS, about
            assert tuple(sorted(about)) not in pairs, talk.turns[-1]
        checked[kind] += 1
    assert len(checked) >= 2
    assert min(checked.values()) >= 20, checked
    assert len(pairs) > 300
    assert min(len(terms), len(compared)) > 300


def test_about_their_share_of_facts_is_held_out() -> None:
    facts = [("where", thing, str(number)) for thing in toy_worlds.THINGS for number in range(200)]
    assert sum(map(toy_worlds.is_held_out, facts)) / len(facts) == pytest.approx(1 / toy_worlds.HELD_OUT_OF, rel=0.1)


# --- what comes when -----------------------------------------------------------------------------------------------

DUMP = """
import hashlib
from bloomery.data.sources import toy_worlds
made = [*toy_worlds.documents(5, 60), *toy_worlds.conversations(5, 60), *toy_worlds.conversations(5, 60, "held out")]
print(hashlib.sha256("\\n".join(map(repr, made)).encode()).hexdigest())
"""


def test_worlds_are_the_same_in_every_process() -> None:
    found = set()
    for hash_seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", DUMP],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1


def test_a_longer_stream_begins_with_the_shorter_one_and_seeds_differ() -> None:
    for split in ("train", "held out"):
        some = list(toy_worlds.conversations(3, 40, split))
        assert some == list(toy_worlds.conversations(3, 90, split))[:40]
        assert some != list(toy_worlds.conversations(4, 40, split))
    assert list(toy_worlds.documents(3, 40)) == list(toy_worlds.documents(3, 90))[:40]
    assert not set(toy_worlds.documents(3, 40)) & set(toy_worlds.documents(4, 40))


def test_conversations_are_of_every_length_and_kind() -> None:
    kinds = Counter(talk.kind for talk in held_out_talks())
    assert {len(talk.turns) for talk in training_talks()} == {1, 2, 3, 4}
    assert {kind.removesuffix(", later turn") for kind in kinds} == {
        turn.kind for talk in training_talks() for turn in talk.turns
    }
    for talk in training_talks()[:200]:
        messages = talk.messages()
        assert [message["role"] for message in messages] == ["user", "assistant"] * len(talk.turns)
        assert messages[0]["content"].startswith(talk.context)
        assert messages[-1]["content"] == talk.turns[-1].answer
        assert all(message["content"].strip() == message["content"] != "" for message in messages)


def test_only_lists_of_library_names_hold_what_is_held_out_and_only_in_longer_lists() -> None:
    """So the questions about the library test copying, as the module says."""
    held = {turn.fact for talk in held_out_talks() for turn in talk.turns if turn.fact[:1] == ("library",)}
    told = {turn.fact for talk in training_talks() for turn in talk.turns if turn.fact[:1] == ("library",)}
    assert not held & told
    documents, talks = ([set(re.findall(r"\w+", one)) for one in some if "In Python," in one] for some in told_texts())
    assert any(set(fact[1:]) < names for fact in held for names in documents)
    assert any(set(fact[1:]) < names for fact in held for names in talks)
    assert "test copying" in (toy_worlds.__doc__ or "")


def test_documents_are_text_and_hardly_any_come_twice() -> None:
    texts = [text for seed in SEEDS for text in toy_worlds.documents(seed, 100)]
    assert all(text.strip() == text != "" for text in texts)
    assert len(set(texts)) > 0.97 * len(texts)


def test_the_demo_asks_what_no_model_was_told() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    asked = re.findall(r"--prompt '([^']*)'", makefile)
    facts = [("plus", "17", "25"), ("where", "lamp", "downstairs"), ("library", "dumps", "shorten")]
    for prompt, (_, *about) in zip(asked, facts, strict=True):
        assert set(about) <= set(re.findall(r"\w+", prompt))
    assert all(map(toy_worlds.is_held_out, facts))


# --- the vocabulary ------------------------------------------------------------------------------------------------


def test_words_mean_one_thing_each() -> None:
    every = [word for listed in LISTS.values() for word in listed]
    assert len(set(every)) == len(every)
    assert len(toy_worlds.FUNCTIONS) > 20


@pytest.mark.parametrize("module", sorted(toy_worlds.FUNCTIONS))
def test_every_name_is_in_its_module_of_the_running_library(module: str) -> None:
    names = toy_worlds.FUNCTIONS[module]
    found = importlib.import_module(module)
    assert module in sys.stdlib_module_names
    assert [name for name in names if not hasattr(found, name)] == []
    assert len(set(names)) == len(names) > 0


def test_the_held_out_facts_are_written_down_and_stay_what_they_are() -> None:
    """A model that was trained with an older version is asked what it has not seen."""
    facts = [("where", "lamp", str(number)) for number in range(200)]
    chosen = "".join("1" if toy_worlds.is_held_out(fact) else "0" for fact in facts)
    assert hashlib.sha256(chosen.encode()).hexdigest()[:16] == "69a1d4f83ec8afdb"
