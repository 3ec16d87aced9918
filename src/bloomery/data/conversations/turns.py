"""What conversations of rows are made of: messages, their text, calls of tools, lists that are held as JSON text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from bloomery.data.conversations.conversation import Message, Role, not_text
from bloomery.data.unpack import Problem

Row = Mapping[str, Any]
LISTED = re.compile(r"\s*\[\s*[{\"]")
"""How a list of objects or texts begins as JSON; a dialogue may begin with a bracket too."""


def parsed(value: Any, *, texts: bool = False) -> Any:
    """A text that is a list of objects in JSON, or of texts where `texts` may be, as that; any other value as it is."""
    found, _ = _loaded(value)
    if not isinstance(found, list):
        return value
    is_one = isinstance(found[0], Mapping) or (texts and all(isinstance(one, str) for one in found))
    return found if is_one else value


def broken(value: Any) -> str:
    """What is wrong with a text that begins as a list in JSON and is none; "" where it is no such text."""
    return _loaded(value)[1]


def spoken(value: Any) -> list[Any] | None:
    """
    A list whose first element has a role, also as JSON text; None where a value is none. An answer may be any other
    list in JSON: calls of tools are one.
    """
    found = parsed(value)
    is_one = isinstance(found, list) and found and isinstance(found[0], Mapping) and "role" in found[0]
    return found if is_one else None


def _loaded(value: Any) -> tuple[Any, str]:
    """What a text that begins as a list in JSON holds, or what is wrong with it."""
    if not isinstance(value, str) or not LISTED.match(value):
        return None, ""
    try:
        return json.loads(value), ""
    except (ValueError, RecursionError) as error:
        return None, f"its text is no list in JSON ({error})"


def message(one: Any, number: int, role_key: str, text_key: str, roles: Mapping[str, Role]) -> Message | Problem:
    """An element of a list as a message, or what is wrong with it."""
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
    content = text(joined(one.get(text_key)), f"message {number}", one.get(text_key) is None and calls != "")
    if isinstance(content, Problem):
        return content
    return Message(role=role, content="\n".join(part for part in (content, calls) if part))


def joined(content: Any) -> Any:
    """Parts of a content that are text, as one text; the type of a part that is none, in a list."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) == len(content) and all(kind in ("text", "input_text", "output_text") for kind in kinds):
        return "".join(texts)
    return kinds


def text(content: Any, whose: str, empty: bool = False) -> str | Problem:
    """A content that is text; None is one where it may be empty."""
    if content is None and empty:
        return ""
    if isinstance(content, list):
        what = (
            f"{whose} holds parts of the types {', '.join(map(str, content)) or 'none'}; only text can be learned from"
        )
        return Problem("not_text", 0, what)
    if not isinstance(content, str):
        return Problem("not_text", 0, f"{whose} has {type(content).__name__} as its content, not text")
    return not_text(content, whose) or content


def _calls(one: Row, whose: str) -> str | Problem:
    """The calls of tools in a message, each as a line of JSON; "" where there are none."""
    given = one.get("tool_calls") or ([one["function_call"]] if one.get("function_call") else [])
    lines = []
    for call in given if isinstance(given, list | tuple) else [given]:
        named = (call.get("function") or call) if isinstance(call, Mapping) else call
        if not isinstance(named, Mapping):
            return Problem("bad_message", 0, f"{whose} has {type(named).__name__} as a call of a tool, not an object")
        line = as_json(
            {"name": named.get("name"), "arguments": _arguments(named.get("arguments"))}, f"a call in {whose}"
        )
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


def as_json(value: Any, whose: str) -> str | Problem:
    """A value as JSON, which cells of tables need not be: there are times and bytes in some."""
    try:
        return text(json.dumps(value, ensure_ascii=False), whose)
    except (TypeError, ValueError, RecursionError) as error:
        return Problem("not_text", 0, f"{whose} cannot be written as JSON: {error}")
