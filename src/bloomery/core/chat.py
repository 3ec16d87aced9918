"""The message of a chat, its roles, and the check that a value is one, for data, tokenizer, training and server."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


class Message(TypedDict):
    role: Role
    content: str


def message_problem(value: object) -> str:
    """Why a value is no message, and what it has to be, or ""."""
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        return "has no role and content"
    role, content = value["role"], value["content"]
    if role not in ROLES:
        return f"has the role {role!r}; roles are {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"has {type(content).__name__} as its content, not text"
    if (index := lone_surrogate(content)) is not None:
        return f"holds half a surrogate pair at character {index}; write it as one character, or leave it out"
    return ""


def as_message(value: Mapping[str, Any]) -> Message:
    """The message that a mapping without a `message_problem` is."""
    return Message(role=value["role"], content=value["content"])


class BadCharacter(NamedTuple):
    """A character that no text may hold: a stable reason, its position, and a sentence."""

    reason: str
    position: int
    what: str


def bad_character(content: str, whose: str = "") -> BadCharacter | None:
    """
    Why no message that is read can hold this content, by the rule for documents: a NUL, or half a surrogate pair.

    A renderer writes NUL all the same: an untrained model says it.
    """
    subject = f"{whose} " if whose else ""
    if (nul := content.find("\0")) >= 0:
        return BadCharacter("binary", nul, f"{subject}holds a NUL at character {nul}: this is not text")
    if (index := lone_surrogate(content)) is not None:
        return BadCharacter("not_unicode", index, f"{subject}holds half a surrogate pair at character {index}")
    return None


def lone_surrogate(text: str) -> int | None:
    """The index of half a surrogate pair, which JSON can spell and UTF-8 cannot hold; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
