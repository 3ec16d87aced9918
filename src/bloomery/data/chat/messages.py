"""Conversations with their source, and rows that are none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.core.chat import Message, bad_character
from bloomery.data.readers.bytes import ReadError

Messages = list[Message]
"""What stands in a row, once it was understood."""


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
    group: str = ""
    """Conversations of one group go to the same split; a conversation with "" is a group of its own."""

    @property
    def text(self) -> str:
        """The contents of all messages, in order."""
        return "\n".join(message["content"] for message in self.messages)


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
        facts = {
            "source": self.source,
            "place": self.location,
            "reason": self.problem.reason,
            "what": self.problem.what,
        }
        return {**facts, "row": self.row}


def not_text(content: str, whose: str = "") -> ReadError | None:
    """The `bad_character` of a content, as what is wrong with its row."""
    bad = bad_character(content, whose)
    return None if bad is None else ReadError(*bad)
