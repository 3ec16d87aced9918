"""
Turns model answers into conversations, and builds requests about documents.

An answer becomes conversations, or is rejected with a reason. Each answer that was paid for is among the
conversations or the rejected answers.

A request about a document asks for one of five results. These are a summary, its main points, questions that it
answers, an easier version, or a harder version.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from bloomery.core.io import canonical, sha256_bytes
from bloomery.data.chat.messages import not_text
from bloomery.data.synthesis.client import CUT, NOT_TAKEN, REFUSED, WHOLE, ProviderAnswer
from bloomery.data.synthesis.config import Augment, ConversationTask, Mode, Synthesize

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


def tasks(config: Augment, documents: Iterable[Mapping[str, Any]]) -> Iterator[ConversationTask]:
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
        num_questions = min(config.max_questions, max(1, words // config.words_per_question))
        count = "1 question" if num_questions == 1 else f"{num_questions} questions"
        ask = ASKS[mode].format(text=text, count=count)
        many = num_questions if mode == "questions" else 0
        yield ConversationTask(number, mode, (ask,), SYSTEM, document=row["id"], text=text, max_questions=many)
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
    end = cut.rfind("\n\n")
    if end < limit // 2:
        end = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[: end if end > 0 else limit].strip()


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
    items = _first_list(answer)
    pairs = []
    for item in items:
        match item:
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
            value, _ = decoder.raw_decode(answer, begin.start())
        except (ValueError, RecursionError):  # a bracket of the words around it
            continue
        if isinstance(value, list):
            return value
    raise ValueError("holds no JSON list")


SHORT_CHARACTERS = 40
"""Answers of fewer letters may be the same to different questions."""

PlainMessages = list[dict[str, str]]


@dataclass(frozen=True)
class TaskOutcome:
    """What became of a task: conversations, or the reason why there are none."""

    task: ConversationTask
    talks: list[PlainMessages]
    reason: str = ""
    answers: Sequence[ProviderAnswer] = ()


def request_name(config: Synthesize, task: ConversationTask, turn: int) -> str:
    """A hash of all that decides about an answer: the same question has the same name in every attempt."""
    asked = config.provider
    how = [asked and asked.kind, asked and asked.model, config.max_answer_tokens, config.temperature]
    return sha256_bytes(canonical([*how, task.system, *task.asks[: turn + 1]]))[:24]


def outcome(config: Synthesize, task: ConversationTask, answers: Mapping[str, ProviderAnswer]) -> TaskOutcome | None:
    """What the answers so far make of a task; None as long as a turn is missing that has to be asked."""
    messages: PlainMessages = []
    received: list[ProviderAnswer] = []
    for turn, ask in enumerate(task.asks):
        answer = answers.get(request_name(config, task, turn))
        if answer is None:
            return None
        received.append(answer)
        if reason := _trouble(answer):
            return TaskOutcome(task, [], reason, received)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer.text.strip()}]
    if not task.max_questions:
        return TaskOutcome(task, [messages], "", received)
    try:
        pairs = questions(received[0].text, task.max_questions)
    except ValueError:
        return TaskOutcome(task, [], "no_questions", received)
    asked = [(f"{task.text}\n\n{question}", answer) for question, answer in pairs]
    return TaskOutcome(
        task,
        [[{"role": "user", "content": ask}, {"role": "assistant", "content": said}] for ask, said in asked],
        "",
        received,
    )


def _trouble(answer: ProviderAnswer) -> str:
    if answer.stopped in CUT:
        return "cut"
    if answer.stopped in REFUSED:
        return "refusal"
    if answer.stopped == NOT_TAKEN:
        return "not_taken"
    if problem := not_text(answer.text):
        return problem.reason
    if not answer.text.strip():
        return "empty"
    return "" if answer.stopped in WHOLE else "unfinished"


@dataclass
class NewConversations:
    """Conversations that are new: no first question is there twice, and no answers but short ones."""

    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def sorted_out(self, task_outcome: TaskOutcome) -> Iterator[tuple[PlainMessages, str]]:
        """Each conversation of a task with "" or the reason why it is rejected. One without any has one empty."""
        for talk in task_outcome.talks or [[]]:
            reason = task_outcome.reason or ("duplicate" if self._is_known(talk) else "")
            self.count += not reason
            yield talk, reason

    def _is_known(self, talk: PlainMessages) -> bool:
        answers = " ".join(message["content"] for message in talk if message["role"] == "assistant")
        marks = [_mark("question", talk[0]["content"])]
        if len(answers) >= SHORT_CHARACTERS:
            marks.append(_mark("answers", answers))
        if any(mark in self._seen for mark in marks):
            return True
        self._seen.update(marks)
        return False


def _mark(kind: str, text: str) -> bytes:
    """The same for texts that differ in case, white space and marks only."""
    plain = " ".join("".join(letter if letter.isalnum() else " " for letter in text.casefold()).split())
    return hashlib.sha256(f"{kind} {plain or text}".encode()).digest()


def rows(outcomes: Iterable[TaskOutcome]) -> Iterator[tuple[dict[str, Any], str]]:
    """What is written of each conversation, in the order of the tasks, with "" or the reason why it is rejected."""
    kept = NewConversations()
    for task_outcome in sorted(outcomes, key=lambda item: item.task.number):
        for index, (talk, reason) in enumerate(kept.sorted_out(task_outcome)):
            yield row(task_outcome, talk, index, reason), reason


def row(task_outcome: TaskOutcome, talk: PlainMessages, index: int, reason: str) -> dict[str, Any]:
    task, answers = task_outcome.task, task_outcome.answers
    facts: dict[str, Any] = {
        "messages": talk,
        "id": f"synthesize/{task.number}" + (f"/{index}" if len(task_outcome.talks) > 1 else ""),
        "category": task.category,
        "model": answers[-1].model,
        "request_ids": [answer.id for answer in answers],
        "input_tokens": sum(answer.input_tokens for answer in answers),
        "output_tokens": sum(answer.output_tokens for answer in answers),
        "system": task.system,
    }
    if task.document:
        facts["document"] = task.document
    if reason:
        facts |= {"reason": reason, "asked": list(task.asks), "answers": [answer.text for answer in answers]}
    return facts
