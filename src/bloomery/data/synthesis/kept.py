"""Answers become conversations, or are rejected with a reason: each answer that was paid for is in one of the two."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bloomery.core.files import canonical, sha256_bytes
from bloomery.data.conversations.conversation import not_text
from bloomery.data.synthesis import augment
from bloomery.data.synthesis.asking import CUT, NOT_TAKEN, REFUSED, WHOLE, Answer
from bloomery.data.synthesis.config import Synthesize
from bloomery.data.synthesis.prompts import Task

SHORT_CHARACTERS = 40
"""Answers of fewer letters may be the same to different questions."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Outcome:
    """What became of a task: conversations, or the reason why there are none."""

    task: Task
    talks: list[Messages]
    reason: str = ""
    answers: Sequence[Answer] = ()


def request_name(config: Synthesize, task: Task, turn: int) -> str:
    """A hash of all that decides about an answer: the same question has the same name in every attempt."""
    asked = config.provider
    how = [asked and asked.kind, asked and asked.model, config.max_answer_tokens, config.temperature]
    return sha256_bytes(canonical([*how, task.system, *task.asks[: turn + 1]]))[:24]


def outcome(config: Synthesize, task: Task, answers: Mapping[str, Answer]) -> Outcome | None:
    """What the answers so far make of a task; None as long as a turn is missing that has to be asked."""
    messages: Messages = []
    given: list[Answer] = []
    for turn, ask in enumerate(task.asks):
        answer = answers.get(request_name(config, task, turn))
        if answer is None:
            return None
        given.append(answer)
        if reason := _trouble(answer):
            return Outcome(task, [], reason, given)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer.text.strip()}]
    if not task.max_questions:
        return Outcome(task, [messages], "", given)
    try:
        pairs = augment.questions(given[0].text, task.max_questions)
    except ValueError:
        return Outcome(task, [], "no_questions", given)
    asked = [(f"{task.text}\n\n{question}", answer) for question, answer in pairs]
    return Outcome(
        task,
        [[{"role": "user", "content": ask}, {"role": "assistant", "content": said}] for ask, said in asked],
        "",
        given,
    )


def _trouble(answer: Answer) -> str:
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
class Kept:
    """Conversations that are new: no first question is there twice, and no answers but short ones."""

    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def sorted_out(self, found: Outcome) -> Iterator[tuple[Messages, str]]:
        """Each conversation of a task with "" or the reason why it is rejected. One without any has one empty."""
        for talk in found.talks or [[]]:
            reason = found.reason or ("duplicate" if self._is_known(talk) else "")
            self.count += not reason
            yield talk, reason

    def _is_known(self, talk: Messages) -> bool:
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


def rows(outcomes: Iterable[Outcome]) -> Iterator[tuple[dict[str, Any], str]]:
    """What is written of each conversation, in the order of the tasks, with "" or the reason why it is rejected."""
    kept = Kept()
    for found in sorted(outcomes, key=lambda one: one.task.number):
        for place, (talk, reason) in enumerate(kept.sorted_out(found)):
            yield row(found, talk, place, reason), reason


def row(found: Outcome, talk: Messages, place: int, reason: str) -> dict[str, Any]:
    task, answers = found.task, found.answers
    facts: dict[str, Any] = {
        "messages": talk,
        "id": f"synthesize/{task.number}" + (f"/{place}" if len(found.talks) > 1 else ""),
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
