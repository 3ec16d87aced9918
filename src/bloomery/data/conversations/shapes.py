"""
Rows of the shapes that data sets of conversations have, as messages; or why a row is none.

A shape is a function from a row to messages. Which one a file has is told by its first row that fits one (`detected`),
or by the recipe. Nothing is guessed within a row: a role that no table names, a part that is no text, a message that
its data set marks as not to be learned from is a problem, and the row is rejected with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bloomery.data import rows
from bloomery.data.conversations import dialogue, turns
from bloomery.data.conversations.conversation import Message, Messages, Role
from bloomery.data.conversations.turns import Row as Row
from bloomery.data.unpack import Problem

Shape = Literal["messages", "sharegpt", "exchanges", "alpaca", "pairs", "dialogue", "tree"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

OPENAI: dict[str, Role] = {
    **{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool"},
}
SHAREGPT: dict[str, Role] = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
}
TREE: dict[str, Role] = {"prompter": "user", "assistant": "assistant"}

LISTS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "chosen")
TEXTS = ("text", "dialogue", "dialog", "conversation", "chosen")
ALPACA = (("instruction",), ("input", "context"), ("output", "response"))
PAIRS = (
    ("prompt", ("completion", "response", "answer", "output", "chosen")),
    ("question", ("answer", "response", "output")),
    ("query", ("response", "answer")),
    ("problem", ("solution", "answer")),
    ("input", ("output", "response", "target", "label")),
    ("inputs", ("targets",)),
)
"""Names of the field with a question, and of that with its answer."""
BESIDE = ("system", "system_prompt", "tools", "history")


@dataclass(frozen=True)
class Fields:
    """Names of fields that the recipe says; None is found out."""

    messages: str | None = None
    """Of the list of messages, or of the text of a dialogue."""
    question: str | None = None
    context: str | None = None
    answer: str | None = None
    system: str | None = None
    speakers: tuple[str, str] | None = None
    """How the two speakers of a dialogue are written."""

    @property
    def named(self) -> list[str]:
        return [name for name in (self.messages, self.question, self.context, self.answer, self.system) if name]


KNOWN = (
    *("id", "message_id", "parent_id", "message_tree_id", "role", "rank", "deleted", "lang", "license"),
    *LISTS, *TEXTS, *BESIDE, *(name for names in ALPACA for name in names),
    *(name for question, answers in PAIRS for name in (question, *answers)),
)  # fmt: skip
"""Fields that are looked at where the recipe names none: of wide tables no other column is read."""


def messages(row: Row, fields: Fields) -> Messages | Problem:
    """OpenAI's: a list of {"role", "content"}, the content text or parts that are text; calls of tools as JSON."""
    return _said(row, fields, "role", "content", OPENAI)


def sharegpt(row: Row, fields: Fields) -> Messages | Problem:
    """A list of {"from", "value"}; `system` and `tools` beside it open the conversation."""
    return _said(row, fields, "from", "value", SHAREGPT)


def _said(row: Row, fields: Fields, role: str, content: str, roles: Mapping[str, Role]) -> Messages | Problem:
    """The messages of a list, each with its role and content under these names."""
    found = _list(row, fields)
    if isinstance(found, Problem):
        return found
    spoken = []
    for number, one in enumerate(found, 1):
        message = turns.message(one, number, role, content, roles)
        if isinstance(message, Problem):
            return message
        spoken.append(message)
    return _opened(row, fields, spoken)


def exchanges(row: Row, fields: Fields) -> Messages | Problem:
    """A list of {"input", "output"}, or of texts of which the user says the first, the assistant the second, …"""
    found = _list(row, fields)
    if isinstance(found, Problem):
        return found
    spoken: Messages = []
    for number, one in enumerate(found, 1):
        if isinstance(one, str):
            said = [one]
        elif isinstance(one, Mapping) and {"input", "output"} <= one.keys():
            said = [one["input"], one["output"]]
        else:
            return Problem("bad_message", number, f"exchange {number} has no input and output")
        for content in said:
            text = turns.text(content, f"exchange {number}")
            if isinstance(text, Problem):
                return text
            spoken.append(Message(role="assistant" if len(spoken) % 2 else "user", content=text))
    return _opened(row, fields, spoken)


def alpaca(row: Row, fields: Fields) -> Messages | Problem:
    """An instruction, an input that belongs to it or is empty, and the output; `history` holds earlier pairs."""
    names = ((fields.question,), (fields.context,), (fields.answer,))
    wanted = [given if given[0] else known for given, known in zip(names, ALPACA, strict=True)]
    question, context, answer = (_field(row, [name for name in one if name]) for one in wanted)
    if isinstance(answer, Problem):
        return answer
    if isinstance(context, Problem):
        if context.reason != "no_field" or fields.context:
            return context
        context = ""
    if isinstance(question, Problem):
        if not _asks_by_input(row, fields):
            return question
        question = ""
    asked = "\n\n".join(part for part in (question, context) if part.strip()) or question
    return _answered(row, fields, asked, answer)


def instructed(row: Row) -> str | Problem:
    """What Alpaca's row asks: its instruction, and behind a blank line the input, where there is one."""
    found = alpaca({"instruction": row.get("instruction"), **_valued(row, ALPACA[1]), "output": ""}, Fields())
    return found if isinstance(found, Problem) else found[0]["content"]


def _valued(row: Row, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _asks_by_input(row: Row, fields: Fields) -> bool:
    """Whether a row has the column of instructions, but what is asked stands in its input alone."""
    unnamed = not fields.question and not fields.context
    return unnamed and "instruction" in row and row["instruction"] is None and row.get("input") is not None


def pairs(row: Row, fields: Fields) -> Messages | Problem:
    """A question and its answer, under one of the names of PAIRS or those that the recipe says; texts or messages."""
    asks, answers = _pair(row, fields)
    first, second = rows.at(dict(row), asks), next((row[name] for name in answers if row.get(name) is not None), None)
    if first is not None and second is not None and (both := _spoken(first, second)) is not None:
        if isinstance(both, Problem):
            return both
        return messages({**row, "messages": both}, Fields(messages="messages", system=fields.system))
    question, answer = _field(row, [asks]), _field(row, answers)
    if isinstance(question, Problem):
        return question
    return answer if isinstance(answer, Problem) else _answered(row, fields, question, answer)


def _spoken(first: Any, second: Any) -> list[Any] | Problem | None:
    """A question and an answer as one list of messages, where one of them is such a list; None where none is."""
    asked, said = turns.spoken(first), turns.spoken(second)
    if asked is None and said is None:
        return [*first, *second] if isinstance(first, list) and isinstance(second, list) else None
    if asked is None and said is not None and said[0]["role"] != "assistant":
        what = f"its question is a text, and its answer begins with a message of the role {said[0]['role']!r}"
        return Problem("bad_message", 1, what)
    asked = [{"role": "user", "content": first}] if asked is None else asked
    return asked + ([{"role": "assistant", "content": second}] if said is None else said)


def talk(row: Row, fields: Fields) -> Messages | Problem:
    """A text whose lines begin with who speaks."""
    text = _field(row, [fields.messages] if fields.messages else TEXTS)
    if isinstance(text, Problem):
        return text
    found = dialogue.parsed(text, fields.speakers)
    return found if isinstance(found, Problem) else _opened(row, fields, found)


READ: dict[Shape, Callable[[Row, Fields], Messages | Problem]] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "exchanges": exchanges,
    "alpaca": alpaca,
    "pairs": pairs,
    "dialogue": talk,
}
"""Shapes of which a row is a conversation. Of a `tree` it is a message: see `trees`."""


def detected(row: Row, fields: Fields) -> Shape | None:
    """The shape that a row has, by its fields that have a value; None where it has none."""
    for name, value in _lists(row, fields):
        if (shown := _of_list(name, value)) is not None:
            return shown
    spoken = [rows.at(dict(row), name) for name in ([fields.messages] if fields.messages else TEXTS)]
    is_talk = any(isinstance(one, str) and dialogue.is_dialogue(one, fields.speakers) for one in spoken)
    if is_talk and fields.speakers:
        return "dialogue"
    there = {name for name, value in row.items() if value is not None}
    if {"message_id", "parent_id", "text", "role"} <= row.keys() and "message_id" in there:
        return "tree"
    if fields.question or fields.answer:
        return "alpaca" if fields.context else "pairs"
    instruction, _, output = ALPACA
    if (there.intersection(instruction) or _asks_by_input(row, fields)) and there.intersection(output):
        return "alpaca"
    if any(asks in there and there.intersection(answers) for asks, answers in PAIRS):
        return "pairs"
    return "dialogue" if is_talk else None


def hollow(row: Row, fields: Fields) -> Shape | None:
    """
    The shape whose reader tells what is wrong with a list of messages that shows none, since it is empty or begins
    with no message, or is broken JSON; None where there is no such list.
    """
    names = [name for name, value in _lists(row, fields) if _of_list(name, value) is None]
    names += [one[0]] if (one := _broken(row, fields)) else []
    return None if not names else "sharegpt" if names[0] == "conversations" else "messages"


def _lists(row: Row, fields: Fields) -> list[tuple[str, list[Any]]]:
    """Name and value of the fields that hold lists which may be of messages, also lists that are held as JSON text."""
    names = [fields.messages] if fields.messages else LISTS
    found = [(name, turns.parsed(rows.at(dict(row), name), texts=name != "chosen")) for name in names]
    return [(name, value) for name, value in found if isinstance(value, list)]


def _broken(row: Row, fields: Fields) -> tuple[str, str] | None:
    """The field of messages that holds a list in JSON which is broken, and how; None where none does."""
    names = [fields.messages] if fields.messages else LISTS[:2]
    return next(((name, what) for name in names if (what := turns.broken(rows.at(dict(row), name)))), None)


def _of_list(name: str, value: list[Any]) -> Shape | None:
    """The shape of a list of messages: by its first element; None where that shows none."""
    first = value[0] if value else None
    if isinstance(first, Mapping):
        for keys, shape in (
            (("from", "value"), "sharegpt"),
            (("input", "output"), "exchanges"),
            (("role",), "messages"),
        ):
            if all(key in first for key in keys):
                return shape  # type: ignore[return-value]
    return "exchanges" if isinstance(first, str) and name != "messages" else None


# --- parts of a row ------------------------------------------------------------------------------------------------


def _list(row: Row, fields: Fields) -> list[Any] | Problem:
    found = _lists(row, fields)
    if not found and (broken := _broken(row, fields)):
        return Problem("bad_message", 0, f"field {broken[0]!r} holds no messages: {broken[1]}")
    if not found:
        names = [fields.messages] if fields.messages else LISTS[:2]
        text = next((name for name in names if isinstance(rows.at(dict(row), name), str)), None)
        told = f" ({text} is a text, and no list of messages in JSON)" if text else ""
        return Problem("no_messages", 0, f"has no list {' or '.join(names)}{told}; its fields: {', '.join(row)}")
    name, value = next((one for one in found if _of_list(*one) is not None), found[0])
    return value or Problem("no_messages", 0, f"its list {name} is empty")


def _field(row: Row, names: list[str] | tuple[str, ...]) -> str | Problem:
    """The text of the first field that is there."""
    name = next((name for name in names if rows.at(dict(row), name) is not None), None)
    if name is None:
        return Problem("no_field", 0, f"has no field {' or '.join(names)} with a text; its fields: {', '.join(row)}")
    return turns.text(turns.joined(rows.at(dict(row), name)), f"field {name!r}")


def _pair(row: Row, fields: Fields) -> tuple[str, list[str]]:
    known = [(asks, answers) for asks, answers in PAIRS if _valued(row, (asks,)) and _valued(row, answers)]
    asks, answers = known[0] if known else PAIRS[0]
    return fields.question or asks, [fields.answer] if fields.answer else list(answers)


def _answered(row: Row, fields: Fields, question: str, answer: str) -> Messages | Problem:
    spoken = earlier(row)
    if isinstance(spoken, Problem):
        return spoken
    spoken += [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return _opened(row, fields, spoken)


def earlier(row: Row) -> Messages | Problem:
    """The turns before a question, which the field `history` holds as pairs."""
    spoken: Messages = []
    history = row.get("history") or ()
    if not isinstance(history, list | tuple):
        return Problem("bad_message", 0, f"its history is {type(history).__name__}, not a list of pairs")
    for number, pair in enumerate(history, 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return Problem("bad_message", number, f"pair {number} of its history is none")
        for role, content in zip(("user", "assistant"), pair, strict=True):
            text = turns.text(content, f"pair {number} of its history")
            if isinstance(text, Problem):
                return text
            spoken.append(Message(role="user" if role == "user" else "assistant", content=text))
    return spoken


def _opened(row: Row, fields: Fields, spoken: Messages) -> Messages | Problem:
    """With what stands beside the messages, instructions and tools, in front of them as the system's."""
    parts = []
    for name in [fields.system] if fields.system else BESIDE[:3]:
        value = row.get(name)
        if name == "tools" and isinstance(value, list | dict):
            found = [turns.as_json(tool, "a tool") for tool in ([value] if isinstance(value, dict) else value)]
            if (bad := next((one for one in found if isinstance(one, Problem)), None)) is not None:
                return bad
            value = "\n".join(map(str, found))
        text = turns.text("" if value is None else value, f"field {name!r}")
        if isinstance(text, Problem):
            return text
        parts += [text] if text.strip() and text.strip() != "[]" else []
    if not parts:
        return spoken
    own = spoken[0]["content"] if spoken and spoken[0]["role"] == "system" else None
    opening = Message(role="system", content="\n\n".join([*([own] if own else []), *parts]))
    return [opening, *(spoken[1:] if own is not None else spoken)]
