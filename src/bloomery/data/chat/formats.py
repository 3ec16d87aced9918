"""
Converts rows of known chat formats to messages, or explains why a row does not fit.

A format is a function from a row to messages. The recipe names the format of a file. Otherwise the first row that
fits a format decides (`detected`).

Nothing is guessed within a row. Three problems reject a row, and the rejected row carries the problem. The first is
a role that no table names. The second is a content part that is not text. The third is a mark or a reasoning that
only messages of assistants can have.

All formats share the conversion of messages: their text, tool calls, and lists that are stored as JSON text.

Plain dialogue is text whose lines begin with a speaker, as in "User: … Assistant: …".

In a message tree each row is one message. Every path from a first question to a last answer is a conversation.

All formats stand in one file because they share these conversions, and `detected` has to compare them all.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from bloomery.core.chat import REASONING, Message, Role, ToolMessage, bad_character
from bloomery.core.errors import shorten
from bloomery.data.readers import rows
from bloomery.data.readers.bytes import ReadError

Messages = list[Message]
"""What stands in a row, once it was understood."""


class ToolUse(NamedTuple):
    """A conversation with its tools as JSON data, for chat templates that write them."""

    messages: Messages
    """Those of assistants may have calls of tools (ToolMessage)."""
    tools: list[dict[str, Any]]
    """In OpenAI's form: {"type": "function", "function": {…}}."""


@dataclass(frozen=True)
class Conversation:
    messages: Sequence[Message]
    source: str
    """Name of the source in the recipe."""
    id: str
    """The row's own, or source, file and line."""
    location: str
    """File and line, or the number of what was generated."""
    license: str | None = None
    tool_use: ToolUse | None = None
    """The same with tools as data, where it has any. In `messages`, tools and their calls are text."""
    group: str = ""
    """Conversations of one group go to the same split; a conversation with "" is a group of its own."""

    @property
    def text(self) -> str:
        said = ((message.get("reasoning"), message["content"]) for message in self.messages)
        return "\n".join(text for texts in said for text in texts if text is not None)


@dataclass(frozen=True)
class RejectedRow:
    """A row that is no conversation."""

    source: str
    location: str
    problem: ReadError
    row: Any = None
    """As far as it could be read."""

    @property
    def record(self) -> dict[str, Any]:
        """Its line in rejected.jsonl."""
        problem = {"reason": self.problem.reason, "what": self.problem.what}
        return {"source": self.source, "place": self.location, **problem, "row": self.row}


def not_text(content: str, whose: str = "") -> ReadError | None:
    """The `bad_character` of a content, as what is wrong with its row."""
    bad = bad_character(content, whose)
    return None if bad is None else ReadError(*bad)


ChatRow = Mapping[str, Any]
LISTED = re.compile(r"\s*\[\s*[{\"]")
"""How a list of objects or texts begins as JSON; a dialogue may begin with a bracket too."""


def parsed_list(value: Any, *, texts: bool = False) -> Any:
    """A text that is a list of objects in JSON, or of texts where `texts` may be, as that; any other value as it is."""
    parsed, _ = _loaded(value)
    if not isinstance(parsed, list):
        return value
    is_one = isinstance(parsed[0], Mapping) or (texts and all(isinstance(one, str) for one in parsed))
    return parsed if is_one else value


def broken(value: Any) -> str:
    """What is wrong with a text that begins as a list in JSON and is none; "" where it is no such text."""
    return _loaded(value)[1]


def spoken(value: Any) -> list[Any] | None:
    """
    A list whose first element has a role, also as JSON text; None where a value is none. An answer may be any other
    list in JSON: calls of tools are one.
    """
    parsed = parsed_list(value)
    is_one = isinstance(parsed, list) and parsed and isinstance(parsed[0], Mapping) and "role" in parsed[0]
    return parsed if is_one else None


def _loaded(value: Any) -> tuple[Any, str]:
    """What a text that begins as a list in JSON holds, or what is wrong with it."""
    if not isinstance(value, str) or not LISTED.match(value):
        return None, ""
    try:
        return json.loads(value), ""
    except (ValueError, RecursionError) as error:
        return None, f"its text is not a JSON list ({error})"


def message_of(
    element: Any, number: int, role_key: str, text_key: str, roles: Mapping[str, Role]
) -> Message | ReadError:
    """An element of a list as a message, or what is wrong with it."""
    calls = _calls(element, f"message {number}") if isinstance(element, Mapping) else ""
    if isinstance(calls, ReadError):
        return calls
    if not isinstance(element, Mapping) or role_key not in element or (text_key not in element and not calls):
        return ReadError("bad_message", number, f"message {number} has no {role_key} and {text_key}")
    said = element[role_key]
    role = roles.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        return ReadError("unknown_role", number, f"message {number} has the role {said!r}; known: {', '.join(roles)}")
    content = text_of(joined(element.get(text_key)), f"message {number}", element.get(text_key) is None and calls != "")
    if isinstance(content, ReadError):
        return content
    message = Message(role=role, content="\n".join(part for part in (content, calls) if part))
    return _marked(message, element, number) or message


LOSS_MARKS = ("train", "training", "weight")
"""Fields of a message that say whether it is in the loss, as axolotl and OpenAI's finetuning have them."""


def _marked(message: Message, element: ChatRow, number: int) -> ReadError | None:
    """Add to a message what its row says of reasoning and loss, or say what is wrong with that."""
    whose, answers = f"message {number}", message["role"] == "assistant"
    marks = {name: element[name] for name in LOSS_MARKS if element.get(name) is not None}
    for name, mark in marks.items():
        if mark not in (0, 1) or (mark and not answers):
            what = f"{whose} of the {message['role']} has {name} {shorten(repr(mark))}; it must be 0 or false"
            return ReadError("bad_mark", number, f"{what}, or for an assistant 1 or true")
    if answers and not all(marks.values()):
        message["train"] = False
    thoughts = {name: element[name] for name in REASONING if element.get(name) not in (None, "", [])}
    for name, thought in thoughts.items():
        text = text_of(joined(thought), f"{name} of {whose}")
        if isinstance(text, ReadError):
            return text
        if not answers or message.setdefault("reasoning", text) != text:
            what = f"{whose} of the {message['role']} has {' and '.join(thoughts)}; only an assistant has one of them"
            return ReadError("bad_mark", number, what)
    return None


def joined(content: Any) -> Any:
    """Parts of a content that are text, as one text; the type of a part that is none, in a list."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) == len(content) and all(kind in ("text", "input_text", "output_text") for kind in kinds):
        return "".join(texts)
    return kinds


def text_of(content: Any, whose: str, empty: bool = False) -> str | ReadError:
    """A content that is text; None is one where it may be empty."""
    if content is None and empty:
        return ""
    if isinstance(content, list):
        what = f"{whose} has content of the types {', '.join(map(str, content)) or 'none'}; training uses only text"
        return ReadError("not_text", 0, what)
    if not isinstance(content, str):
        return ReadError("not_text", 0, f"{whose} has content of the type {type(content).__name__}, not text")
    return not_text(content, whose) or content


def _calls(message: ChatRow, whose: str) -> str | ReadError:
    """The calls of tools in a message, each as a line of JSON; "" where there are none."""
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    lines = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        named = (call.get("function") or call) if isinstance(call, Mapping) else call
        if not isinstance(named, Mapping):
            return ReadError(
                "bad_message", 0, f"{whose} has a tool call of the type {type(named).__name__}, not an object"
            )
        line = as_json(
            {"name": named.get("name"), "arguments": _arguments(named.get("arguments"))}, f"a call in {whose}"
        )
        if isinstance(line, ReadError):
            return line
        lines.append(line)
    return "\n".join(lines)


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):  # what a model wrote there need not be JSON; it stays the text that it is
            return arguments
    return arguments


def as_json(value: Any, whose: str) -> str | ReadError:
    """A value as JSON, which cells of tables need not be: there are times and bytes in some."""
    try:
        return text_of(json.dumps(value, ensure_ascii=False), whose)
    except (TypeError, ValueError, RecursionError) as error:
        return ReadError("not_text", 0, f"{whose} cannot be written as JSON: {error}")


ANSWERERS: dict[str, tuple[str, ...]] = {
    "user": ("assistant", "bot", "ai", "model", "gpt"),
    "human": ("assistant", "ai", "gpt", "bot", "bing"),
    "prompter": ("assistant",),
    "person": ("assistant", "bot", "ai"),
    "customer": ("agent", "assistant", "support"),
    "question": ("answer",),
    "q": ("a",),
    "prompt": ("response", "completion", "answer"),
    "instruction": ("response", "output", "answer"),
    "用户": ("助手", "助理", "机器人"),
    "问": ("答",),
}
"""Who asks, and who may answer: the first that speaks of a line says which pair a text has."""
DIALOGUE_ROLES: dict[str, Role] = {"system": "system", "tool": "tool", "observation": "tool", "系统": "system"}
NAMES = sorted(
    {*ANSWERERS, *DIALOGUE_ROLES, *(name for names in ANSWERERS.values() for name in names)}, key=len, reverse=True
)
LABEL = re.compile(
    rf"^[ \t]*(?:#+[ \t]*|\*\*)?({'|'.join(NAMES)})(?:\*\*)?[ \t]*[:：](?:\*\*)?", re.IGNORECASE | re.MULTILINE
)


def parse_dialogue(text: str, names: tuple[str, str] | None = None) -> Messages | ReadError:
    """
    The messages of a dialogue, without white space around them. `names`: how the two speakers are written.

    Messages begin only with the two speakers that the text begins with, a tool, and the system in front of them.
    Another label, such as "Answer:" or "System:" in what an assistant says, is text.
    """
    spots = _spots(text, names)
    if not spots:
        expected = f"as {names[0]!r} and {names[1]!r}" if names else 'such as "User:" and "Assistant:"'
        return ReadError("no_speaker", 0, f"no line begins with a speaker: {expected}")
    if text[: spots[0][0]].strip():
        return ReadError("no_speaker", 0, "begins with text before the first speaker")
    ends = [begin for begin, _, _ in spots[1:]] + [len(text)]
    return [
        Message(role=role, content=text[after:end].strip()) for (_, after, role), end in zip(spots, ends, strict=True)
    ]


def is_dialogue(text: str, names: tuple[str, str] | None = None) -> bool:
    """Whether a text looks like a dialogue: it begins with a speaker, and one that answers comes after."""
    parsed = parse_dialogue(text, names)
    return not isinstance(parsed, ReadError) and any(message["role"] == "assistant" for message in parsed)


def _spots(text: str, names: tuple[str, str] | None) -> Sequence[tuple[int, int, Role]]:
    """Begin and end of every label that opens a message, and its role."""
    if names is not None:
        longest_first = sorted(names, key=len, reverse=True)  # one may begin as the other does
        label = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, longest_first))})", re.MULTILINE)
        return [(m.start(), m.end(), "user" if m[1] == names[0] else "assistant") for m in label.finditer(text)]
    labels = [(match.start(), match.end(), match[1].lower()) for match in LABEL.finditer(text)]
    asker = next((name for _, _, name in labels if name in ANSWERERS), None)
    if asker is None:
        return []
    answerer = next((name for _, _, name in labels if name in ANSWERERS[asker]), None)
    roles: dict[str, Role] = {**DIALOGUE_ROLES, asker: "user"}
    if answerer is not None:
        roles[answerer] = "assistant"
    spots = [(begin, end, roles[name]) for begin, end, name in labels if name in roles]
    return [spot for number, spot in enumerate(spots) if spot[2] != "system" or number == 0]


ChatFormat = Literal["messages", "sharegpt", "exchanges", "alpaca", "pairs", "dialogue", "tree"]
SHAPES: tuple[ChatFormat, ...] = get_args(ChatFormat)

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
NOT_TEXT = ("image", "images", "audios", "videos")
"""Fields of what is seen or heard next to a conversation."""


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
    *LISTS, *TEXTS, *BESIDE, *NOT_TEXT, *(name for names in ALPACA for name in names),
    *(name for question, answers in PAIRS for name in (question, *answers)),
)  # fmt: skip
"""Fields that are looked at where the recipe names none: of wide tables no other column is read."""


def messages(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """OpenAI's: a list of {"role", "content"}, the content text or parts that are text; calls of tools as JSON."""
    return _said(row, fields, "role", "content", OPENAI)


def sharegpt(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """A list of {"from", "value"}; the fields `system` and `tools` of the same row open the conversation."""
    return _said(row, fields, "from", "value", SHAREGPT)


def _said(row: ChatRow, fields: Fields, role: str, content: str, roles: Mapping[str, Role]) -> Messages | ReadError:
    """The messages of a list, each with its role and content under these names."""
    elements = _list(row, fields)
    if isinstance(elements, ReadError):
        return elements
    spoken = []
    for number, element in enumerate(elements, 1):
        message = message_of(element, number, role, content, roles)
        if isinstance(message, ReadError):
            return message
        spoken.append(message)
    return _opened(row, fields, spoken)


def exchanges(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """A list of {"input", "output"}, or of texts of which the user says the first, the assistant the second, …"""
    elements = _list(row, fields)
    if isinstance(elements, ReadError):
        return elements
    spoken: Messages = []
    for number, exchange in enumerate(elements, 1):
        if isinstance(exchange, str):
            said = [exchange]
        elif isinstance(exchange, Mapping) and {"input", "output"} <= exchange.keys():
            said = [exchange["input"], exchange["output"]]
        else:
            return ReadError("bad_message", number, f"exchange {number} has no input and output")
        for content in said:
            text = text_of(content, f"exchange {number}")
            if isinstance(text, ReadError):
                return text
            spoken.append(Message(role="assistant" if len(spoken) % 2 else "user", content=text))
    return _opened(row, fields, spoken)


def alpaca(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """An instruction, an input that belongs to it or is empty, and the output; `history` holds earlier pairs."""
    names = ((fields.question,), (fields.context,), (fields.answer,))
    field_names = [given if given[0] else known for given, known in zip(names, ALPACA, strict=True)]
    question, context, answer = (_field(row, [name for name in one if name]) for one in field_names)
    if isinstance(answer, ReadError):
        return answer
    context = _below(context, fields)
    if isinstance(context, ReadError):
        return context
    if isinstance(question, ReadError):
        if not _asks_by_input(row, fields):
            return question
        question = ""
    return _answered(row, fields, question, answer, context)


def instructed(row: ChatRow) -> str | ReadError:
    """What Alpaca's row asks: its instruction, and behind a blank line the input, where there is one."""
    parsed = alpaca({"instruction": row.get("instruction"), **_valued(row, ALPACA[1]), "output": ""}, Fields())
    return parsed if isinstance(parsed, ReadError) else parsed[0]["content"]


def _valued(row: ChatRow, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _asks_by_input(row: ChatRow, fields: Fields) -> bool:
    """Whether a row has the column of instructions, but what is asked stands in its input alone."""
    unnamed = not fields.question and not fields.context
    return unnamed and "instruction" in row and row["instruction"] is None and row.get("input") is not None


def pairs(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """
    A question and its answer, under one of the names of PAIRS or those that the recipe says; texts or messages. What
    belongs to a question, as in ALPACA, stands below it.
    """
    asks, answers = _pair(row, fields)
    first, second = rows.at(dict(row), asks), next((row[name] for name in answers if row.get(name) is not None), None)
    if first is not None and second is not None and (both := _spoken(first, second)) is not None:
        if isinstance(both, ReadError):
            return both
        return messages({**row, "messages": both}, Fields(messages="messages", system=fields.system))
    names = [fields.context] if fields.context else [name for name in ALPACA[1] if name not in (asks, *answers)]
    question, context, answer = _field(row, [asks]), _below(_field(row, names), fields), _field(row, answers)
    if isinstance(question, ReadError):
        return question
    if isinstance(context, ReadError):
        return context
    return answer if isinstance(answer, ReadError) else _answered(row, fields, question, answer, context)


def _spoken(first: Any, second: Any) -> list[Any] | ReadError | None:
    """A question and an answer as one list of messages, where one of them is such a list; None where none is."""
    asked, said = spoken(first), spoken(second)
    if asked is None and said is None:
        return [*first, *second] if isinstance(first, list) and isinstance(second, list) else None
    if asked is None and said is not None and said[0]["role"] != "assistant":
        what = f"its question is text, but its answer begins with a message of the role {said[0]['role']!r}"
        return ReadError("bad_message", 1, what)
    asked = [{"role": "user", "content": first}] if asked is None else asked
    return asked + ([{"role": "assistant", "content": second}] if said is None else said)


def talk(row: ChatRow, fields: Fields) -> Messages | ReadError:
    """A text whose lines begin with who speaks."""
    text = _field(row, [fields.messages] if fields.messages else TEXTS)
    if isinstance(text, ReadError):
        return text
    parsed = parse_dialogue(text, fields.speakers)
    return parsed if isinstance(parsed, ReadError) else _opened(row, fields, parsed)


def with_tools(shape: ChatFormat, row: ChatRow, fields: Fields) -> ToolUse | None:
    """A row that was read, with its tools as data. None for one without tools, or whose tools are no such data."""
    listed = _list(row, fields) if shape == "messages" else []
    elements = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    calls = [_calls_as_data(element.get("tool_calls")) for element in elements]
    tools = [_function(tool) for tool in _objects(row.get("tools"))]
    spoken = READ[shape]({**row, "tools": None}, fields) if any(calls) or tools else None
    if not isinstance(spoken, list) or None in calls:
        return None
    first = len(spoken) - len(elements)  # 1 where other fields open the conversation
    for number, (element, own) in enumerate(zip(elements, calls, strict=True), first):
        message: dict[str, Any] = {**spoken[number]}
        if own:
            content = joined(element.get("content"))
            message |= {"content": content if isinstance(content, str) else "", "tool_calls": own}
        elif message["role"] == "tool":
            message |= {key: element[key] for key in ("tool_call_id", "name") if isinstance(element.get(key), str)}
        spoken[number] = ToolMessage(**message)  # type: ignore[typeddict-item]
    return ToolUse(spoken, tools)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """Objects of a list, of one alone, or of either as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # then the tools stay the text that they are
            return []
    several = value if isinstance(value, list | tuple) else [value]
    objects = [one for item in several for one in (_objects(item) if isinstance(item, str) else [item])]
    return objects if all(isinstance(one, Mapping) for one in objects) else []


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form. Keys that tables fill with nothing are left out."""
    inner = tool.get("function")
    return {"type": "function", "function": _filled(inner if isinstance(inner, Mapping) else tool)}


def _calls_as_data(calls: Any) -> list[dict[str, Any]] | None:
    """The calls of a message; None where one of them has no name."""
    data = []
    for call in _objects(calls) if calls else ():
        named = call.get("function") or call
        if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
            return None
        function = {"name": named["name"], "arguments": _filled(_arguments(named.get("arguments")) or {})}
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        data.append({**own, "type": "function", "function": function})
    return data


def _filled(value: Any) -> Any:
    """A value without the keys that hold nothing."""
    if isinstance(value, Mapping):
        return {str(key): _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list | tuple) else value


READ: dict[ChatFormat, Callable[[ChatRow, Fields], Messages | ReadError]] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "exchanges": exchanges,
    "alpaca": alpaca,
    "pairs": pairs,
    "dialogue": talk,
}
"""Shapes of which a row is a conversation. Of a `tree` it is a message: see `trees`."""


def detected(row: ChatRow, fields: Fields) -> ChatFormat | None:
    """The shape that a row has, by its fields that have a value; None where it has none."""
    for name, value in _lists(row, fields):
        if (shown := _of_list(name, value)) is not None:
            return shown
    spoken = [rows.at(dict(row), name) for name in ([fields.messages] if fields.messages else TEXTS)]
    is_talk = any(isinstance(one, str) and is_dialogue(one, fields.speakers) for one in spoken)
    if is_talk and fields.speakers:
        return "dialogue"
    if fields.messages and rows.at(dict(row), fields.messages) is None:
        return "messages"  # whose reader says that it is not there
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


def hollow(row: ChatRow, fields: Fields) -> ChatFormat | None:
    """
    The shape whose reader reports what is wrong with a list of messages that shows no shape. Such a list is empty,
    begins with no message, or is broken JSON. None where there is no such list.
    """
    names = [name for name, value in _lists(row, fields) if _of_list(name, value) is None]
    names += [unreadable[0]] if (unreadable := _broken(row, fields)) else []
    return None if not names else "sharegpt" if names[0] == "conversations" else "messages"


def _lists(row: ChatRow, fields: Fields) -> list[tuple[str, list[Any]]]:
    """Name and value of the fields that hold lists which may be of messages, also lists that are held as JSON text."""
    names = [fields.messages] if fields.messages else LISTS
    parsed = [(name, parsed_list(rows.at(dict(row), name), texts=name != "chosen")) for name in names]
    return [(name, value) for name, value in parsed if isinstance(value, list)]


def _broken(row: ChatRow, fields: Fields) -> tuple[str, str] | None:
    """The field of messages that holds a list in JSON which is broken, and how; None where none does."""
    names = [fields.messages] if fields.messages else LISTS[:2]
    return next(((name, what) for name in names if (what := broken(rows.at(dict(row), name)))), None)


def _of_list(name: str, value: list[Any]) -> ChatFormat | None:
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


def _list(row: ChatRow, fields: Fields) -> list[Any] | ReadError:
    lists = _lists(row, fields)
    if not lists and (broken := _broken(row, fields)):
        return ReadError("bad_message", 0, f"field {broken[0]!r} does not hold messages: {broken[1]}")
    if not lists:
        names = [fields.messages] if fields.messages else LISTS[:2]
        text = next((name for name in names if isinstance(rows.at(dict(row), name), str)), None)
        note = f" ({text} is a text, and no list of messages in JSON)" if text else ""
        return ReadError(
            "no_messages", 0, f"has no list named {' or '.join(names)}{note}; its fields: {', '.join(row)}"
        )
    name, value = next((one for one in lists if _of_list(*one) is not None), lists[0])
    return value or ReadError("no_messages", 0, f"its list {name} is empty")


def _field(row: ChatRow, names: list[str] | tuple[str, ...]) -> str | ReadError:
    """The text of the first field that is there."""
    name = next((name for name in names if rows.at(dict(row), name) is not None), None)
    if name is None:
        return ReadError("no_field", 0, f"has no text field named {' or '.join(names)}; its fields: {', '.join(row)}")
    return text_of(joined(rows.at(dict(row), name)), f"field {name!r}")


def _pair(row: ChatRow, fields: Fields) -> tuple[str, list[str]]:
    known = [(asks, answers) for asks, answers in PAIRS if _valued(row, (asks,)) and _valued(row, answers)]
    asks, answers = known[0] if known else PAIRS[0]
    return fields.question or asks, [fields.answer] if fields.answer else list(answers)


def _below(context: str | ReadError, fields: Fields) -> str | ReadError:
    """What belongs to a question: "" where a row has nothing, unless the recipe names its field."""
    is_absent = isinstance(context, ReadError) and context.reason == "no_field" and not fields.context
    return "" if is_absent else context


def _answered(row: ChatRow, fields: Fields, question: str, answer: str, context: str) -> Messages | ReadError:
    """A question with what belongs to it below, and its answer, after earlier turns."""
    question = "\n\n".join(part for part in (question, context) if part.strip()) or question
    spoken = earlier(row)
    if isinstance(spoken, ReadError):
        return spoken
    spoken += [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return _opened(row, fields, spoken)


def earlier(row: ChatRow) -> Messages | ReadError:
    """The turns before a question, which the field `history` holds as pairs."""
    spoken: Messages = []
    history = row.get("history") or ()
    if not isinstance(history, list | tuple):
        return ReadError("bad_message", 0, f"its history is {type(history).__name__}, not a list of pairs")
    for number, pair in enumerate(history, 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return ReadError("bad_message", number, f"entry {number} of its history is not a pair")
        for role, content in zip(("user", "assistant"), pair, strict=True):
            text = text_of(content, f"pair {number} of its history")
            if isinstance(text, ReadError):
                return text
            spoken.append(Message(role="user" if role == "user" else "assistant", content=text))
    return spoken


def beyond_text(row: ChatRow) -> ReadError | None:
    """Why a row with images or sounds is not trained on; None for one without."""
    seen = next((name for name in NOT_TEXT if row.get(name)), None)
    why = f"its field {seen!r} holds more than text; training uses only text"
    return None if seen is None else ReadError("not_text", 0, why)


def _opened(row: ChatRow, fields: Fields, spoken: Messages) -> Messages | ReadError:
    """The messages, with the instructions and tools from other fields of the row in the system message."""
    if (more := beyond_text(row)) is not None:
        return more
    parts = []
    for name in [fields.system, "tools"] if fields.system else BESIDE[:3]:
        value = row.get(name)
        if name == "tools" and isinstance(value, list | dict):
            tools = [as_json(tool, "a tool") for tool in ([value] if isinstance(value, dict) else value)]
            if (bad := next((one for one in tools if isinstance(one, ReadError)), None)) is not None:
                return bad
            value = "\n".join(map(str, tools))
        text = text_of("" if value is None else value, f"field {name!r}")
        if isinstance(text, ReadError):
            return text
        parts += [text] if text.strip() and text.strip() != "[]" else []
    if not parts:
        return spoken
    own = spoken[0]["content"] if spoken and spoken[0]["role"] == "system" else None
    opening = Message(role="system", content="\n\n".join([*([own] if own else []), *parts]))
    return [opening, *(spoken[1:] if own is not None else spoken)]


class Path(NamedTuple):
    """A way through a tree, from its root to an answer."""

    number: int
    """Of the last message, as it came in."""
    id: str
    messages: Messages
    root: str
    """What the tree begins with; the other ways through it begin with the same."""


class _Node(NamedTuple):
    number: int
    parent: str | None
    message: Message
    rank: float


def trouble(row: ChatRow) -> ReadError | None:
    """Why a row is no message of a tree."""
    role = row.get("role")
    if not isinstance(role, str) or role not in TREE:
        return ReadError("unknown_role", 0, f"has the role {role!r}; known: {', '.join(TREE)}")
    parent = row.get("parent_id", False)
    if not isinstance(row.get("message_id"), str) or not isinstance(parent, str | None):
        return ReadError("bad_message", 0, "has no message_id or no parent_id")
    for name in ("message_id", "parent_id"):
        if (problem := not_text(row[name] or "", f"field {name!r}")) is not None:
            return problem
    text = row.get("text")
    if not isinstance(text, str):
        return ReadError("not_text", 0, f"field 'text' holds {type(text).__name__}, not text")
    deleted = ReadError("deleted", 0, "is marked as deleted in its data set") if row.get("deleted") else None
    return not_text(text) or deleted


def paths(numbered_rows: Iterable[tuple[int, ChatRow]]) -> Iterator[Path | tuple[int, ReadError]]:
    """
    The conversations in rows without `trouble`, which have numbers, and the numbers of messages that are in none.

    Answers that people liked best come first (`rank`, from 0). A last question that nobody answered is left off, with
    its number; and so is a message whose tree has lost a part above it.
    """
    nodes: dict[str, _Node] = {}
    for number, row in numbered_rows:
        if row["message_id"] in nodes:
            yield number, ReadError("duplicate_id", 0, f"an earlier message has the id {row['message_id']!r}")
            continue
        message = Message(role=TREE[row["role"]], content=row["text"])
        nodes[row["message_id"]] = _Node(number, row["parent_id"], message, rows.number(row.get("rank")) or 0.0)
    below: dict[str | None, list[str]] = {}
    for name, node in nodes.items():
        below.setdefault(node.parent, []).append(name)
    for children in below.values():
        children.sort(key=lambda name: (nodes[name].rank, nodes[name].number))
    seen: set[str] = set()
    for root in below.get(None, []):
        waiting: list[tuple[str, Messages]] = [(root, [])]
        while waiting:
            name, above = waiting.pop()
            seen.add(name)
            node, children = nodes[name], below.get(name, [])
            said = [*above, node.message]
            waiting += [(child, said) for child in reversed(children)]
            answers = node.message["role"] == "assistant"
            if answers and not any(below.get(child) for child in children):
                yield Path(node.number, name, said, root)
            elif not answers and not children:
                yield node.number, ReadError("unanswered", 0, "it has no answer")
    for name, node in nodes.items():
        if name not in seen:
            yield node.number, ReadError("orphan", 0, f"its parent message {node.parent!r} is missing")
