"""Trees of messages, of which each row is one: every way from a first question to a last answer is a conversation."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bloomery.data import rows
from bloomery.data.conversations.conversation import Message, Messages, not_text
from bloomery.data.conversations.shapes import TREE, Row
from bloomery.data.unpack import Problem


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


def trouble(row: Row) -> Problem | None:
    """Why a row is no message of a tree."""
    role = row.get("role")
    if not isinstance(role, str) or role not in TREE:
        return Problem("unknown_role", 0, f"has the role {role!r}; known: {', '.join(TREE)}")
    parent = row.get("parent_id", False)
    if not isinstance(row.get("message_id"), str) or not isinstance(parent, str | None):
        return Problem("bad_message", 0, "has no message_id and parent_id")
    text = row.get("text")
    if not isinstance(text, str):
        return Problem("not_text", 0, f"field 'text' has {type(text).__name__} as its content, not text")
    deleted = Problem("deleted", 0, "was deleted by its data set") if row.get("deleted") else None
    return not_text(text) or deleted


def paths(found: Iterable[tuple[int, Row]]) -> Iterator[Path | tuple[int, Problem]]:
    """
    The conversations in rows without `trouble`, which have numbers, and the numbers of messages that are in none.

    Answers that people liked best come first (`rank`, from 0). A last question that nobody answered is left off, with
    its number; and so is a message whose tree has lost a part above it.
    """
    nodes: dict[str, _Node] = {}
    for number, row in found:
        if row["message_id"] in nodes:
            yield number, Problem("duplicate_id", 0, f"an earlier message has the id {row['message_id']!r}")
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
                yield node.number, Problem("unanswered", 0, "nobody has answered it")
    for name, node in nodes.items():
        if name not in seen:
            yield node.number, Problem("orphan", 0, f"the message {node.parent!r} that it answers is not there")
