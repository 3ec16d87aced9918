"""
The one renderer: conversations to ids and a loss mask, for training, evaluation, chat and export.

Conversations become ids by structure, never by text: each message's content is encoded by itself and stands between
special tokens that no content can spell. What is rendered for training therefore begins with exactly what is rendered
for serving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

from bloomery.core.errors import DataError
from bloomery.core.files import canonical, sha256_bytes
from bloomery.tokenizer.tokenizer import DOCUMENT, END, ROLES, Tokenizer

Role = Literal["system", "user", "assistant", "tool"]
assert get_args(Role) == ROLES


class Message(TypedDict):
    role: Role
    content: str


@dataclass(frozen=True)
class Rendered:
    ids: list[int]
    mask: list[int]
    """1 where the id is something that the model shall learn to say: an assistant's content, and the end after it."""


@dataclass(frozen=True)
class Template:
    """How a conversation looks in special tokens: opening, then for each message its role, content and end."""

    name: str = "bloomery"
    opening: str = DOCUMENT
    role: str = "<|{role}|>"
    end: str = END

    @cached_property
    def hash(self) -> str:
        """sha256 of all that decides about the ids of a conversation, given a tokenizer."""
        return sha256_bytes(canonical([self.name, self.opening, self.role, self.end]))

    def jinja(self) -> str:
        """The same template for `transformers` and others, which render text and encode it afterwards."""
        before, after = self.role.split("{role}")
        return (
            f"{{{{ '{self.opening}' }}}}"
            "{% for message in messages %}"
            f"{{{{ '{before}' + message['role'] + '{after}' + message['content'] + '{self.end}' }}}}"
            "{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ '{before}assistant{after}' }}}}{{% endif %}}"
        )


class Renderer:
    """A template bound to a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template or Template()
        self._roles = {role: tokenizer.special[self.template.role.format(role=role)] for role in ROLES}
        self._opening = tokenizer.special[self.template.opening]
        self.end_id: int = tokenizer.special[self.template.end]

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation, to be learned from. Raises DataError for an unknown role or content that is no text."""
        ids, mask = [self._opening], [0]
        for number, message in enumerate(messages):
            content = self._encode(message, number)
            says = int(message["role"] == "assistant")
            ids += [self._roles[message["role"]], *content, self.end_id]
            mask += [0, *[says] * len(content), says]
        return Rendered(ids, mask)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to the place where the assistant begins to speak."""
        return [*self.render(messages).ids, self._roles["assistant"]]

    def _encode(self, message: Message, number: int) -> list[int]:
        if what := trouble(message):
            raise DataError(what, where=f"message {number + 1}")
        return self.tokenizer.encode(message["content"])


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


def half_pair(text: str) -> int | None:
    """The place of a lone surrogate, which JSON can spell and UTF-8 cannot hold; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
