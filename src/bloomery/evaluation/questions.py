"""Held-out questions of the small worlds: asked greedily, judged by equality."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core.errors import DataError
from bloomery.data import worlds
from bloomery.generate.engine import Engine
from bloomery.tokenizer.chat import Message, Renderer, as_message

DRAWS_TO_FIND_KINDS = 1000
"""The rarest kind is one in a hundred: none is missed."""
DRAWS_BEFORE_USED_UP = 5000


@dataclass(frozen=True)
class Question:
    kind: str
    messages: list[Message]
    """Up to the question; earlier answers are the right ones."""
    answer: str


@dataclass(frozen=True)
class Judged:
    question: Question
    said: str
    ended: bool

    @property
    def exact(self) -> bool:
        return self.ended and self.said == self.question.answer


def held_out(seed: int, count: int) -> list[Question]:
    """
    `count` held-out questions, as evenly over the kinds as it goes, no question twice.

    Some kinds have few questions. When they are used up, the others get more; when all are, there are fewer.
    """
    kinds = sorted({talk.kind for talk in worlds.conversations(seed, DRAWS_TO_FIND_KINDS, "held out")})
    wanted = {kind: count // len(kinds) + (place < count % len(kinds)) for place, kind in enumerate(kinds)}
    found: dict[str, list[Question]] = {kind: [] for kind in kinds}
    seen: set[str] = set()
    misses = 0
    for question in _stream(seed):
        if len(seen) == count or misses > 2 * DRAWS_BEFORE_USED_UP:
            break
        key = "\n".join(message["content"] for message in question.messages)
        misses += 1
        if misses > DRAWS_BEFORE_USED_UP:
            wanted = dict.fromkeys(kinds, count)
        if key not in seen and len(found.get(question.kind, ())) < wanted.get(question.kind, 0):
            seen.add(key)
            found[question.kind].append(question)
            misses = 0
    return [question for kind in kinds for question in found[kind]]


def _stream(seed: int) -> Iterator[Question]:
    for talk in worlds.conversations(seed, 10**9, "held out"):
        messages = [as_message(message) for message in talk.messages()]
        yield Question(talk.kind, messages[:-1], messages[-1]["content"])


def fitting(engine: Engine, renderer: Renderer, questions: Sequence[Question]) -> list[Question]:
    """
    The questions that leave room for an answer in the model's context: the others cannot be asked.

    Raises DataError where there are questions, and none of them fits.
    """
    lengths = [len(renderer.prompt(question.messages)) for question in questions]
    kept = [question for question, length in zip(questions, lengths, strict=True) if length < engine.context]
    if questions and not kept:
        what = f"none of {len(questions)} held-out questions fits the model's context of {engine.context} tokens"
        cure = f"The shortest has {min(lengths)}. Raise pretrain.model.context, or ask none: evaluate.questions=0."
        raise DataError(what, where="evaluate.questions", cure=cure)
    return kept


def ask(engine: Engine, renderer: Renderer, questions: Sequence[Question], max_tokens: int) -> list[Judged]:
    """Every question, answered greedily by the model, through the renderer it was trained with."""
    prompts = [renderer.prompt(question.messages) for question in questions]
    stop = frozenset({renderer.end_id})
    answers = engine.complete(prompts, max_tokens=max_tokens, stop_ids=stop)
    return [
        Judged(question, renderer.said(answer.ids), answer.stopped)
        for question, answer in zip(questions, answers, strict=True)
    ]


def table(judged: Sequence[Judged]) -> dict[str, dict[str, float | int]]:
    """By kind: how many, and the shares that were exactly right and that ended by themselves."""
    kinds: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        kinds[one.question.kind].append(one)
    return {kind: scores(some) for kind, some in sorted(kinds.items())}


def scores(judged: Sequence[Judged]) -> dict[str, float | int]:
    n = len(judged)
    return {
        "n": n,
        "exact": round(sum(one.exact for one in judged) / max(n, 1), 4),
        "ended": round(sum(one.ended for one in judged) / max(n, 1), 4),
    }
