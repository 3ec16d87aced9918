"""
The one renderer: conversations to ids and a loss mask, for training, evaluation, chat and export.

Conversations become ids by structure, never by text: each message's content is encoded by itself and stands between
special tokens that no content can spell. What is rendered for training therefore begins with exactly what is rendered
for serving.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bloomery.core.errors import DataError
from bloomery.core.files import canonical, sha256_bytes
from bloomery.data.conversations.conversation import ROLES as MESSAGE_ROLES
from bloomery.data.conversations.conversation import Message as Message
from bloomery.data.conversations.conversation import Role as Role
from bloomery.data.conversations.conversation import as_message as as_message
from bloomery.data.conversations.conversation import half_pair as half_pair
from bloomery.data.conversations.conversation import trouble as trouble
from bloomery.tokenizer.tokenizer import DOCUMENT, END, ROLES, Tokenizer

assert MESSAGE_ROLES == ROLES


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
