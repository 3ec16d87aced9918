"""
The one renderer: conversations to ids and a loss mask, for training, evaluation, chat and export.

Conversations become ids by structure, never by text: each message's content stands between special tokens that no
content can spell. What is rendered for training therefore begins with exactly what is rendered for serving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bloomery.core.errors import DataError
from bloomery.data.conversations.conversation import Message as Message
from bloomery.data.conversations.conversation import Role as Role
from bloomery.data.conversations.conversation import as_message as as_message
from bloomery.data.conversations.conversation import trouble as trouble
from bloomery.tokenizer.templates import TEMPLATES, Template
from bloomery.tokenizer.tokenizer import Tokenizer

BEGINNINGS = ("a", "A", "7", "(", "'", '"', "`", "<", "-", "é", "\u0301", "東", "😀", "…", "")
"""Of answers: before each of them, text of the structure has to be encoded as it is where nothing follows."""
SPACES = (" a", "  a", "\n", "\n\n  a", "\t", " ")
"""More of them, for templates that keep white space before an answer."""


SHORTER = "Begin a new conversation, or leave out its oldest messages."


@dataclass(frozen=True)
class Rendered:
    ids: list[int]
    mask: list[int]
    """1 where the id is something that the model shall learn to say: an assistant's content, and the end after it."""


class Renderer:
    """A template bound to a tokenizer. Raises DataError where the two do not go together."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template or TEMPLATES["bloomery"]
        self._special = _special_ids(tokenizer, self.template)
        self.end_id: int = self._special[self.template.end]
        self.lead = self.template.lead
        _check_cut(tokenizer, self.template)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation, to be learned from. Raises DataError for an unknown role or content that is no text."""
        return self._written(messages).rendered

    def prompt(self, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
        """
        Ids up to the place where the assistant begins to speak. Raises DataError for a conversation that is seen to
        take more than `max_tokens` before all of it is encoded.
        """
        line = self._written(messages, max_tokens)
        line.put(self.template.before("assistant"))
        return line.rendered.ids

    def said(self, ids: Sequence[int]) -> str:
        """The content of an answer that a model gave as these ids, with or without its end."""
        return self.tokenizer.decode(ids).removeprefix(self.lead)

    def trouble(self, messages: Sequence[Message]) -> str:
        """Why a conversation cannot be written in this template, or ""."""
        found = self.template.trouble(messages)
        return f"message {found[0] + 1} {found[1]}" if found else ""

    def _written(self, messages: Sequence[Message], max_tokens: int | None = None) -> "_Line":
        for number, message in enumerate(messages, 1):
            if what := trouble(message):
                raise DataError(what, where=f"message {number}")
        if found := self.template.trouble(messages):
            cure = "Choose another one in instruct.template, or leave such messages out."
            raise DataError(found[1], where=f"message {found[0] + 1}", cure=cure)
        template, line = self.template, _Line(self.tokenizer, self.template, self._special, max_tokens)
        line.put(template.opening)
        for message in messages:
            role, content = message["role"], template.content(message)
            line.put(template.before(role))
            if role == "assistant":
                line.say(template.lead + content)
                line.put(template.end, says=1)
            else:
                line.hear(content)
                line.put(template.ends_with(role))
            line.put(template.between)
        return line


class _Line:
    """Ids and mask as they are written from left to right."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template, special: Mapping[str, int], max_tokens: int | None
    ) -> None:
        self._tokenizer, self._template, self._special, self._max_tokens = tokenizer, template, special, max_tokens
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._text = ""
        """Heard and not yet encoded: until the next special token, or until the assistant speaks, it is one text."""

    def put(self, structure: str, says: int = 0) -> None:
        for part, is_special in self._template.parts(structure):
            if is_special:
                self._flush()
                self._ids.append(self._special[part])
                self._mask.append(says)
            else:
                self._text += part

    def hear(self, content: str) -> None:
        self._text += content

    def say(self, content: str) -> None:
        self._flush()
        self._add(content, 1)

    @property
    def rendered(self) -> Rendered:
        self._flush()
        return Rendered(self._ids, self._mask)

    def _flush(self) -> None:
        text, self._text = self._text, ""
        self._add(text, 0)

    def _add(self, text: str, says: int) -> None:
        ids = self._encoded(text) if text else []
        self._ids += ids
        self._mask += [says] * len(ids)

    def _encoded(self, text: str) -> list[int]:
        if self._max_tokens is None:
            return self._tokenizer.encode(text)
        ids = self._tokenizer.encode_within(text, self._max_tokens - len(self._ids))
        if isinstance(ids, int):
            least = len(self._ids) + ids
            what = f"the conversation takes at least {least} tokens, and the model has a context of {self._max_tokens}"
            raise DataError(what, where="messages", cure=SHORTER)
        return ids


def _special_ids(tokenizer: Tokenizer, template: Template) -> dict[str, int]:
    found = {name: tokenizer.special_id(name) for name in template.special}
    if missing := [name for name, id in found.items() if id is None]:
        raise DataError(
            f"the tokenizer has no special tokens {', '.join(missing)}, which the template {template.name!r} writes",
            cure=f'Say tokenizer.template = "{template.name}", make tokenizer and model with it, or take another one.',
        )
    return {name: id for name, id in found.items() if id is not None}


def _check_cut(tokenizer: Tokenizer, template: Template) -> None:
    """
    Where text stands right before an answer, a program that encodes both as one must find the same ids as we, who do
    not know the answer yet when it is asked for. Raises DataError where it does not.
    """
    last, is_special = template.parts(template.before("assistant"))[-1]
    if is_special:
        return
    text = "a" + template.between + last if template.between and template.ends == "answers" else last
    before = tokenizer.encode(text)
    for content in (*BEGINNINGS, *(SPACES if template.strips == "nothing" else ())):
        answer = template.lead + content
        if answer and tokenizer.encode(text + answer) != before + tokenizer.encode(answer):
            raise DataError(
                f"before {answer!r} the tokenizer cuts {text!r}, which the template {template.name!r} writes there, in "
                "another way than where nothing follows: what is trained would not be what is served",
                cure='Take a template that has a special token there ("bloomery"), or another tokenizer.pattern.',
            )
