"""Answers that somebody has judged, and how a row says it: two answers to one prompt, or one answer and a label."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.data import rows
from bloomery.data.conversations import dialogue, shapes
from bloomery.data.conversations.conversation import Messages
from bloomery.data.conversations.shapes import Fields
from bloomery.data.preferences.config import PairRows
from bloomery.data.unpack import Problem

Row = Mapping[str, Any]

PROMPTS = ("prompt", "question", "instruction", "query", "input", "conversations", "messages")
CHOSEN = ("chosen", "chosen_response", "preferred")
REJECTED = ("rejected", "rejected_response", "dispreferred")
COMPLETIONS = ("completion", "response", "answer", "output")
LABELS = ("label", "kto_tag", "desirable")
SYSTEM = ("system", "system_prompt")
BESIDE = ("context", "history")
KNOWN = (*PROMPTS, *BESIDE, *CHOSEN, *REJECTED, *COMPLETIONS, *LABELS, *SYSTEM, "id", "prompt_id")
"""Fields that are looked at where the recipe names none: of wide tables no other column is read."""


@dataclass(frozen=True)
class Judged:
    """An answer, or several messages that end in one, after the prompt; in a pair, the better one and the worse one."""

    prompt: Messages
    """What both see. The last message is not the assistant's."""
    chosen: Messages | None
    rejected: Messages | None
    source: str
    place: str
    """File and line, or the number of what was generated."""
    id: str = ""

    @property
    def asked(self) -> str:
        """All that stands in the prompt, by which pairs of one question are held out together."""
        return "\n".join(message["content"] for message in self.prompt)


Understood = tuple[Messages, Messages | None, Messages | None]
"""Prompt, chosen, rejected."""


def understood(row: Row, how: PairRows) -> Understood | Problem:
    """A row as judged answers; one of the two is None where it is a single answer with a label."""
    chosen, rejected = _found(row, how.chosen_field, CHOSEN), _found(row, how.rejected_field, REJECTED)
    if chosen is not None and rejected is not None:
        return _pair(row, how, chosen, rejected)
    completion, label = _found(row, how.completion_field, COMPLETIONS), _found(row, how.label_field, LABELS)
    if completion is None or label is None:
        what = f"has neither two answers nor one with a label; its fields: {', '.join(row)}"
        return Problem("unknown_shape", 0, what)
    if not isinstance(label, bool) and label not in (0, 1):
        return Problem("bad_label", 0, f"has the label {label!r}; it has to be true or false")
    prompt = _prompt(row, how)
    if isinstance(prompt, Problem):
        return prompt
    answer = _said(completion, "assistant")
    if isinstance(answer, Problem):
        return answer
    split = _split(prompt, answer, answer)
    if isinstance(split, Problem):
        return split
    before, one, _ = split
    return (before, one, None) if label else (before, None, one)


def _pair(row: Row, how: PairRows, chosen: Any, rejected: Any) -> Understood | Problem:
    prompt = _prompt(row, how)
    if isinstance(prompt, Problem):
        return prompt
    one = _said(chosen, "assistant", alone=not prompt)
    if isinstance(one, Problem):
        return one
    other = _said(rejected, "assistant", alone=not prompt)
    if isinstance(other, Problem):
        return other
    return _split(prompt, one, other)


def _split(prompt: Messages, one: Messages, other: Messages) -> Understood | Problem:
    """
    What both answers begin with belongs to the prompt, and of a single one what stands before its last message. Where
    each answer is the whole conversation, the prompt is not said twice.
    """
    if one is other:
        answered = max((place for place, said in enumerate(one) if said["role"] != "assistant"), default=-1) + 1
    else:
        both = range(min(len(one), len(other)))
        answered = next((place for place in both if one[place] != other[place]), min(len(one), len(other)))
    shared, one, other = one[:answered], one[answered:], other[answered:]
    before = _once(prompt, shared)
    if not one or not other:
        return Problem("same_answer", 0, "the two answers are the same, or one is the beginning of the other")
    if not before or before[-1]["role"] == "assistant":
        what = "nothing stands before the answers" if not before else "an assistant's message stands before the answers"
        return Problem("no_prompt", 0, what)
    for name, answer in (("chosen", one), ("rejected", other)):
        if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            return Problem("no_answer", 0, f"the {name} answer does not begin and end with the assistant")
    return before, one, other


def _once(prompt: Messages, shared: Messages) -> Messages:
    """What stands in the prompt and what both answers begin with; where one holds the other, that one alone."""
    opening = prompt[:1] if prompt and prompt[0]["role"] == "system" else []
    asked = _bare(prompt[len(opening) :])
    if not asked or asked not in (_bare(shared)[-len(asked) :], _bare(_without_system(shared))[: len(asked)]):
        return prompt + shared
    return shared if shared[0]["role"] == "system" else opening + shared


def _without_system(said: Messages) -> Messages:
    return said[1:] if said and said[0]["role"] == "system" else said


def _bare(said: Messages) -> list[tuple[str, str]]:
    """What is said without white space around it, which data sets keep in one column and not in the other."""
    return [(message["role"], message["content"].strip()) for message in said]


def _prompt(row: Row, how: PairRows) -> Messages | Problem:
    """What is asked; empty where the answers begin with it."""
    names = PROMPTS if how.prompt_field is None else (how.prompt_field,)
    name, found = next(((name, value) for name in names if (value := rows.at(dict(row), name)) is not None), ("", None))
    if name == "instruction" and isinstance(found, str):
        found = shapes.instructed(row)
        if isinstance(found, Problem):
            return found
    asked: Messages | Problem = [] if found is None or found == [] else _said(found, "user")
    before: Messages | Problem = [] if name == "history" else _history(row)
    if isinstance(before, Problem):
        return before
    if isinstance(asked, list) and before:
        rest = _without_system(asked)
        asked = asked[: len(asked) - len(rest)] + _once(before, rest)
    system = _found(row, how.system_field, SYSTEM)
    if isinstance(asked, Problem) or system is None or system == "":
        return asked
    opening = _said(system, "system")
    if isinstance(opening, Problem):
        return opening
    return asked if asked and asked[0]["role"] == "system" else opening + asked


def _history(row: Row) -> Messages | Problem:
    """The turns before the prompt, as pairs or as messages."""
    history = row.get("history")
    is_messages = isinstance(history, list) and history != [] and isinstance(history[0], Mapping)
    return _said(history, "user") if is_messages else shapes.earlier(row)


def _said(value: Any, role: str, *, alone: bool = False) -> Messages | Problem:
    """Messages of a text, of one message or of a list of them. A text that is all there is may be a dialogue."""
    if isinstance(value, str) and alone and dialogue.is_dialogue(value):
        return dialogue.parsed(value)
    listed = [{"role": role, "content": value}] if isinstance(value, str) else value
    listed = [listed] if isinstance(listed, Mapping) else listed
    if not isinstance(listed, list) or not listed:
        return Problem("not_text", 0, f"holds {type(value).__name__} where a text or messages are wanted")
    row = {"messages": listed}
    shape = "sharegpt" if isinstance(listed[0], Mapping) and "from" in listed[0] else "messages"
    return shapes.READ[shape](row, Fields(messages="messages"))  # type: ignore[index]


def _found(row: Row, named: str | None, known: tuple[str, ...]) -> Any:
    """The value of the field that the recipe names, or of the first that is there; None where there is none."""
    names = known if named is None else (named,)
    return next((value for name in names if (value := rows.at(dict(row), name)) is not None), None)
