"""What is asked about a document: a summary, its points, questions that it answers, or an easier or harder version."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from bloomery.data.conversations.conversation import not_text
from bloomery.data.synthesis.config import Augment, Mode
from bloomery.data.synthesis.prompts import Task

ASKS: Mapping[Mode, str] = {
    "summary": "Summarize this text in a few sentences:\n\n{text}",
    "key_points": "List the key points of this text, one on each line:\n\n{text}",
    "harder": "Rewrite this text for an expert, in exact terms with full arguments, and leave nothing out:\n\n{text}",
    "simpler": "Rewrite this text in plain words and short sentences, and leave nothing out:\n\n{text}",
    "questions": "{text}\n\n---\nWrite {count} that this text answers, each with its answer in one or two whole "
    'sentences. Reply with nothing but a JSON list of objects {{"question": "…", "answer": "…"}}.',
}
LIST = re.compile(r"\[[ \t\r\n]*\{")
"""How a JSON list of objects begins."""
MOST_BEGINNINGS = 100
SYSTEM = "Work with the given text alone: add nothing that it does not say. Reply without preface."


def tasks(config: Augment, documents: Iterable[Mapping[str, Any]]) -> Iterator[Task]:
    """One task for each document that a mode can take; `documents` have id, text and domain."""
    turn = number = 0
    for row in documents:
        if config.domains and row["domain"] not in config.domains:
            continue
        text = beginning(row["text"], config.max_characters)
        words = len(text.split())
        if words < config.min_words:
            continue
        modes = [*config.modes[turn % len(config.modes) :], *config.modes[: turn % len(config.modes)]]
        mode = next((mode for mode in modes if _takes(mode, text, config)), None)
        if mode is None:
            continue
        turn += 1
        wanted = min(config.max_questions, max(1, words // config.words_per_question))
        count = "1 question" if wanted == 1 else f"{wanted} questions"
        ask = ASKS[mode].format(text=text, count=count)
        many = wanted if mode == "questions" else 0
        yield Task(number, mode, (ask,), SYSTEM, document=row["id"], text=text, max_questions=many)
        number += 1


def _takes(mode: Mode, text: str, config: Augment) -> bool:
    if mode not in ("harder", "simpler"):
        return True
    ease = reading_ease(text)
    return ease > config.easy_from if mode == "harder" else ease < config.hard_below


def beginning(text: str, limit: int) -> str:
    """At most `limit` characters from the front, to the end of a paragraph if there is one, or else of a word."""
    if len(text) <= limit:
        return text.strip()
    cut = text[:limit]
    place = cut.rfind("\n\n")
    if place < limit // 2:
        place = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[: place if place > 0 else limit].strip()


def reading_ease(text: str) -> float:
    """
    Flesch's reading ease: 206.835 − 1.015 words a sentence − 84.6 syllables a word (Flesch 1948,
    https://doi.org/10.1037/h0057532). Syllables are counted as groups of vowels, without a silent e at the end.
    """
    words = re.findall(r"[^\W\d_]+", text)
    if not words:
        return 0.0
    sentences = max(1, len(re.findall(r"[.!?]+(?=\s|$)", text)))
    syllables = sum(_syllables(word.lower()) for word in words)
    return 206.835 - 1.015 * len(words) / sentences - 84.6 * syllables / len(words)


def _syllables(word: str) -> int:
    groups = len(re.findall(r"[aeiouyäöüáéíóúàèìòùâêîôû]+", word))
    silent = word.endswith("e") and not word.endswith(("le", "ee")) and groups > 1
    return max(1, groups - silent)


def questions(answer: str, limit: int) -> list[tuple[str, str]]:
    """
    Question and answer pairs of a model's reply, which may have a fence or a few words around its JSON. Raises
    ValueError where there are none.
    """
    found = _first_list(answer)
    pairs = []
    for one in found:
        match one:
            case {"question": str(question), "answer": str(said)} if question.strip() and said.strip():
                if not_text(question + said):
                    raise ValueError("holds a NUL or half a surrogate pair")
                pairs.append((question.strip(), said.strip()))
            case _:
                raise ValueError("holds something that is no question with its answer")
    if not pairs:
        raise ValueError("holds no question")
    return pairs[:limit]


def _first_list(answer: str) -> list[object]:
    """The first JSON list of objects in a text. Few beginnings are tried: each may be read up to the end."""
    decoder = json.JSONDecoder()
    for begin in islice(LIST.finditer(answer), MOST_BEGINNINGS):
        try:
            found, _ = decoder.raw_decode(answer, begin.start())
        except (ValueError, RecursionError):  # a bracket of the words around it
            continue
        if isinstance(found, list):
            return found
    raise ValueError("holds no JSON list")
