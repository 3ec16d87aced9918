"""Chat messages of four roles, conversations with their source, and rows that are neither."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from bloomery.data.readers.bytes import ReadError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


class Message(TypedDict):
    role: Role
    content: str


Messages = list[Message]
"""What stands in a row, once it was understood."""


@dataclass(frozen=True)
class Conversation:
    messages: Sequence[Message]
    source: str
    """Name of the source in the recipe."""
    id: str
    """The row's own, or source, file and line."""
    place: str
    """File and line, or the number of what was generated."""
    license: str | None = None
    group: str = ""
    """Conversations of one group are held out together, or not at all; "" is a group of its own."""

    @property
    def text(self) -> str:
        """All that is said in it, message after message."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class RejectedRow:
    """A row that is no conversation."""

    source: str
    place: str
    problem: ReadError
    row: Any = None
    """As far as it could be read."""

    @property
    def told(self) -> dict[str, Any]:
        """Its line in rejected.jsonl."""
        told = {"source": self.source, "place": self.place, "reason": self.problem.reason, "what": self.problem.what}
        return {**told, "row": self.row}


def trouble(value: object) -> str:
    """Why a value is no message, and what it has to be, or ""."""
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        return "has no role and content"
    role, content = value["role"], value["content"]
    if role not in ROLES:
        return f"has the role {role!r}; roles are {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"has {type(content).__name__} as its content, not text"
    if (spot := half_pair(content)) is not None:
        return f"holds half a surrogate pair at character {spot}; write it as one character, or leave it out"
    return ""


def as_message(value: Mapping[str, Any]) -> Message:
    """The message that a mapping without `trouble` is."""
    return Message(role=value["role"], content=value["content"])


def not_text(content: str, whose: str = "") -> ReadError | None:
    """
    Why no message that is read can hold this content, by the rule for documents: a NUL, or half a surrogate pair.

    A renderer writes NUL all the same: an untrained model says it.
    """
    subject = f"{whose} " if whose else ""
    if (nul := content.find("\0")) >= 0:
        return ReadError("binary", nul, f"{subject}holds a NUL at character {nul}: this is not text")
    if (spot := half_pair(content)) is not None:
        return ReadError("not_unicode", spot, f"{subject}holds half a surrogate pair at character {spot}")
    return None


def half_pair(text: str) -> int | None:
    """The place of a lone surrogate, which JSON can spell and UTF-8 cannot hold; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
