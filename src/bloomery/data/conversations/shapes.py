"""
Rows of the shapes that data sets of conversations have, as messages; or why a row is none.

A shape is a function from a row to messages. Which one a file has is told by its first row that fits one (`detected`),
or by the recipe. Nothing is guessed within a row: a role that no table names, a part that is no text, a message that
its data set marks as not to be learned from is a problem, and the row is rejected with it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bloomery.data import rows
from bloomery.data.conversations import dialogue
from bloomery.data.conversations.conversation import Message, Messages, Role, half_pair
from bloomery.data.unpack import Problem

Row = Mapping[str, Any]
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
        message = _message(one, number, role, content, roles)
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
            text = _text(content, f"exchange {number}")
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
    """A question and its answer, under one of the names of PAIRS or those that the recipe says."""
    asks, answers = _pair(row, fields)
    first, second = rows.at(dict(row), asks), next((row[name] for name in answers if row.get(name) is not None), None)
    if isinstance(first, list) and isinstance(second, list):
        return messages({**row, "messages": [*first, *second]}, Fields(messages="messages", system=fields.system))
    question, answer = _field(row, [asks]), _field(row, answers)
    if isinstance(question, Problem):
        return question
    return answer if isinstance(answer, Problem) else _answered(row, fields, question, answer)


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
    with no message; None where there is no such list.
    """
    names = [name for name, value in _lists(row, fields) if _of_list(name, value) is None]
    return None if not names else "sharegpt" if names[0] == "conversations" else "messages"


def _lists(row: Row, fields: Fields) -> list[tuple[str, list[Any]]]:
    """Name and value of the fields that hold lists which may be of messages, also lists that are held as JSON text."""
    found = [(name, _parsed(rows.at(dict(row), name))) for name in ([fields.messages] if fields.messages else LISTS)]
    return [(name, value) for name, value in found if isinstance(value, list)]


def _parsed(value: Any) -> Any:
    """A text that is a list of objects in JSON, as that; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):  # a dialogue may begin with a bracket
        return value
    return found if isinstance(found, list) and found and isinstance(found[0], Mapping) else value


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
    if not found:
        wanted = fields.messages or " or ".join(LISTS[:2])
        return Problem("no_messages", 0, f"has no list {wanted}; its fields: {', '.join(row)}")
    name, value = next((one for one in found if _of_list(*one) is not None), found[0])
    return value or Problem("no_messages", 0, f"its list {name} is empty")


def _message(one: Any, number: int, role_key: str, text_key: str, roles: Mapping[str, Role]) -> Message | Problem:
    calls = _calls(one, f"message {number}") if isinstance(one, Mapping) else ""
    if isinstance(calls, Problem):
        return calls
    if not isinstance(one, Mapping) or role_key not in one or (text_key not in one and not calls):
        return Problem("bad_message", number, f"message {number} has no {role_key} and {text_key}")
    said = one[role_key]
    role = roles.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        return Problem("unknown_role", number, f"message {number} has the role {said!r}; known: {', '.join(roles)}")
    if role == "assistant" and one.get("weight") == 0:
        what = f"message {number} is an assistant's with weight 0: its data set says not to learn from it"
        return Problem("weight_zero", number, what)
    content = _text(_joined(one.get(text_key)), f"message {number}", one.get(text_key) is None and calls != "")
    if isinstance(content, Problem):
        return content
    return Message(role=role, content="\n".join(part for part in (content, calls) if part))


def _joined(content: Any) -> Any:
    """Parts of a content that are text, as one text; the type of a part that is none, in a list."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) == len(content) and all(kind in ("text", "input_text", "output_text") for kind in kinds):
        return "".join(texts)
    return kinds


def _text(content: Any, whose: str, empty: bool = False) -> str | Problem:
    if content is None and empty:
        return ""
    if isinstance(content, list):
        what = (
            f"{whose} holds parts of the types {', '.join(map(str, content)) or 'none'}; only text can be learned from"
        )
        return Problem("not_text", 0, what)
    if not isinstance(content, str):
        return Problem("not_text", 0, f"{whose} has {type(content).__name__} as its content, not text")
    if (spot := half_pair(content)) is not None:
        return Problem("not_unicode", spot, f"{whose} holds half a surrogate pair at character {spot}")
    return content


def _calls(one: Row, whose: str) -> str | Problem:
    """The calls of tools in a message, each as a line of JSON; "" where there are none."""
    given = one.get("tool_calls") or ([one["function_call"]] if one.get("function_call") else [])
    lines = []
    for call in given if isinstance(given, list | tuple) else [given]:
        named = (call.get("function") or call) if isinstance(call, Mapping) else call
        if not isinstance(named, Mapping):
            return Problem("bad_message", 0, f"{whose} has {type(named).__name__} as a call of a tool, not an object")
        line = _json({"name": named.get("name"), "arguments": _arguments(named.get("arguments"))}, f"a call in {whose}")
        if isinstance(line, Problem):
            return line
        lines.append(line)
    return "\n".join(lines)


def _arguments(given: Any) -> Any:
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError):  # what a model wrote there need not be JSON; it stays the text that it is
            return given
    return given


def _json(value: Any, whose: str) -> str | Problem:
    """A value as JSON, which cells of tables need not be: there are times and bytes in some."""
    try:
        return _text(json.dumps(value, ensure_ascii=False), whose)
    except (TypeError, ValueError, RecursionError) as error:
        return Problem("not_text", 0, f"{whose} cannot be written as JSON: {error}")


def _field(row: Row, names: list[str] | tuple[str, ...]) -> str | Problem:
    """The text of the first field that is there."""
    name = next((name for name in names if rows.at(dict(row), name) is not None), None)
    if name is None:
        return Problem("no_field", 0, f"has no field {' or '.join(names)} with a text; its fields: {', '.join(row)}")
    return _text(_joined(rows.at(dict(row), name)), f"field {name!r}")


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
            text = _text(content, f"pair {number} of its history")
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
            found = [_json(tool, "a tool") for tool in ([value] if isinstance(value, dict) else value)]
            if (bad := next((one for one in found if isinstance(one, Problem)), None)) is not None:
                return bad
            value = "\n".join(map(str, found))
        text = _text("" if value is None else value, f"field {name!r}")
        if isinstance(text, Problem):
            return text
        parts += [text] if text.strip() and text.strip() != "[]" else []
    if not parts:
        return spoken
    own = spoken[0]["content"] if spoken and spoken[0]["role"] == "system" else None
    opening = Message(role="system", content="\n\n".join([*([own] if own else []), *parts]))
    return [opening, *(spoken[1:] if own is not None else spoken)]
