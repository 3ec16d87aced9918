"""
Renders conversations as token IDs and a loss mask, by chat templates that are data.

This is the only renderer: training, evaluation, chat and export all use it.

Conversations become token IDs by structure, never by text. The content of each message stands between special
tokens that no content can spell. The tokens for training therefore begin with exactly the tokens for serving.

A template states how a conversation looks in special tokens and text. It also gives the same as Jinja for other
programs.

    opening  { role · lead content end? between }…        and, where the assistant is to speak:  role

Only the tokens that `special` names are ever special tokens. The rest is text. Text between two special tokens is
encoded in one piece, as in every program that renders first and encodes afterwards. The text is always split before
the assistant's content, so that a prompt is a prefix of the training tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from bloomery.core.chat import ROLES, Message, Role, TemplateName, check_messages
from bloomery.core.errors import DataError
from bloomery.core.io import canonical, sha256_bytes
from bloomery.tokenizer.tokenizer import DOCUMENT, END, SPECIAL, Tokenizer


@dataclass(frozen=True)
class Template:
    """One way to write a conversation. Without more said: a token for each role, and one that ends each message."""

    name: str = "bloomery"
    opening: str = DOCUMENT
    role: str = "<|{role}|>"
    """What stands before a message, with its role as `names` has it."""
    end: str = END
    """A special token: what an assistant says last."""
    names: Mapping[str, str] = field(default_factory=lambda: {role: role for role in ROLES})
    """How roles are written. A role that is not here is an error."""
    ends: Literal["messages", "answers"] = "messages"
    """Which messages the end stands after."""
    between: str = ""
    """Text after each message."""
    lead: str = ""
    """Text that an assistant says before its content."""
    strips: Literal["nothing", "answers", "contents"] = "nothing"
    """White space that is left out: before what an assistant says, or around every content."""
    only_first: tuple[Role, ...] = ()
    """Roles that can only begin a conversation."""
    special: tuple[str, ...] = SPECIAL
    """What of all this is special tokens."""

    @cached_property
    def hash(self) -> str:
        """sha256 of everything that determines the token IDs of a conversation, given a tokenizer."""
        said, usual = asdict(self), asdict(Template())
        more = {one.name: said[one.name] for one in fields(self)[4:] if said[one.name] != usual[one.name]}
        return sha256_bytes(canonical([self.name, self.opening, self.role, self.end, *([more] if more else [])]))

    def before(self, role: str) -> str:
        """What stands before the content of a message."""
        return self.role.format(role=self.names[role])

    def ends_with(self, role: str) -> str:
        """The special token after the content of a message, or ""."""
        return self.end if self.ends == "messages" or role == "assistant" else ""

    def content(self, message: Message) -> str:
        """What of a content is written."""
        text = message["content"]
        if self.strips == "contents":
            return text.strip()
        return text.lstrip() if self.strips == "answers" and message["role"] == "assistant" else text

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """A piece of structure, cut into special tokens (True) and text between them."""
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [(part, part in self.special) for part in pieces if part]

    def trouble(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
        """The place of the first message that cannot be written, and why; None where all can."""
        for index, message in enumerate(messages):
            if message["role"] not in self.names:
                shown = ", ".join(self.names)
                return index, f"has the role {message['role']!r}, and the template {self.name!r} has {shown}"
            if index and message["role"] in self.only_first:
                return index, f"is of the {message['role']}, which in the template {self.name!r} can only come first"
            if "reasoning" in message:
                return index, f"has reasoning, which the template {self.name!r} does not write: {REASONING_FIX}"
        return None

    def jinja(self) -> str:
        """The same template for `transformers` and others, which render text and encode it afterwards."""
        cases = []
        for index, role in enumerate(self.names):
            before = self.before(role) + (self.lead if role == "assistant" else "")
            written = [quoted(before), self._jinja_content(role), quoted(self.ends_with(role) + self.between)]
            case = f"{{% {'elif' if index else 'if'} message['role'] == '{role}' %}}"
            if role in self.only_first:
                why = quoted(f"{role} can only come first")
                case += f"{{% if not loop.first %}}{{{{ raise_exception({why}) }}}}{{% endif %}}"
            cases.append(f"{case}{{{{ {' + '.join(one for one in written if one)} }}}}")
        opening = f"{{{{ {quoted(self.opening)} }}}}" if self.opening else ""
        return (
            f"{opening}{{% for message in messages %}}{''.join(cases)}"
            "{% else %}{{ raise_exception('there is no role ' + message['role']) }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {quoted(self.before('assistant'))} }}}}{{% endif %}}"
        )

    def _jinja_content(self, role: str) -> str:
        if self.strips == "contents":
            return "(message['content'] | trim)"
        return "message['content']" + (".lstrip()" if self.strips == "answers" and role == "assistant" else "")


def quoted(text: str) -> str:
    """A text as Jinja writes it; "" for none."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'" if text else ""


TEMPLATES: dict[str, Template] = {
    "bloomery": Template(),
    "chatml": Template(
        name="chatml",
        opening="",
        role="<|im_start|>{role}\n",
        end="<|im_end|>",
        between="\n",
        strips="answers",
        special=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Template(
        name="llama3",
        opening="<|begin_of_text|>",
        role="<|start_header_id|>{role}<|end_header_id|>\n\n",
        end="<|eot_id|>",
        names={"system": "system", "user": "user", "assistant": "assistant", "tool": "ipython"},
        strips="contents",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "user-assistant": Template(
        name="user-assistant",
        role="{role}",
        names={"system": "System: ", "user": "User: ", "assistant": "Assistant:", "tool": "Tool: "},
        ends="answers",
        between="\n",
        lead=" ",
        special=(DOCUMENT, END),
    ),
    "baichuan2": Template(
        name="baichuan2",
        opening="",
        role="{role}",
        end="</s>",
        names={"system": "", "user": "<reserved_106>", "assistant": "<reserved_107>"},
        ends="answers",
        only_first=("system",),
        special=("<reserved_106>", "<reserved_107>", "</s>"),
    ),
}
"""
The templates that `instruct.chat_template` names. Bloomery made `bloomery`. `chatml` is from Qwen2.
`llama3` is from Llama 3.1, whose tool is `ipython`. `user-assistant` is from 1386.ai's fourth data set. `baichuan2` has
the token IDs 195 and 196 of its own tokenizer.
"""
assert tuple(TEMPLATES) == get_args(TemplateName)

EVERY_SPECIAL = tuple(dict.fromkeys((*SPECIAL, *(name for one in TEMPLATES.values() for name in one.special))))
"""All special tokens of all templates."""


def special_tokens(name: str) -> tuple[str, ...]:
    """The special tokens that a tokenizer for a template has: those that everything here needs, and its own."""
    return tuple(dict.fromkeys((*SPECIAL, *TEMPLATES[name].special)))


BEGINNINGS = ("a", "A", "7", "(", "'", '"', "`", "<", "-", "é", "\u0301", "東", "😀", "…", "")
"""Of answers: before each of them, text of the structure has to be encoded as it is where nothing follows."""
SPACES = (" a", "  a", "\n", "\n\n  a", "\t", " ")
"""More of them, for templates that keep white space before an answer."""


class TooLongError(DataError):
    """A conversation or text that does not fit into the context of a model."""


SHORTER = "Start a new conversation, or remove the oldest messages."
REASONING_FIX = "remove it, or use a model whose own template writes it"


@dataclass(frozen=True)
class Rendered:
    ids: list[int]
    mask: list[int]
    """1 where the id is something that the model shall learn to say: an assistant's content, and the end after it."""


OWN = "own"
"""The name of a template that is the model's own, and none of TEMPLATES."""


@runtime_checkable
class ChatRenderer(Protocol):
    """Makes token IDs of conversations: a template of ours (Renderer), or a model's own."""

    tokenizer: Tokenizer
    lead: str
    """Text that an assistant says before its content."""
    end_ids: frozenset[int]
    """Token IDs that end an answer."""

    @property
    def name(self) -> str:
        """Of the template: a name of TEMPLATES, or OWN."""

    @property
    def hash(self) -> str:
        """Of the template and what it is rendered with."""

    @property
    def source(self) -> str:
        """The template in Jinja."""

    def render(self, messages: Sequence[Message]) -> Rendered: ...

    def prompt(self, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]: ...

    def said(self, ids: Sequence[int]) -> str: ...

    def trouble(self, messages: Sequence[Message]) -> str: ...


class Renderer:
    """A template bound to a tokenizer. Raises DataError where the two do not go together."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None) -> None:
        self.tokenizer, self.template = tokenizer, template or TEMPLATES["bloomery"]
        self._special = _special_ids(tokenizer, self.template)
        self.end_id: int = self._special[self.template.end]
        self.end_ids = frozenset({self.end_id})
        self.lead = self.template.lead
        _check_cut(tokenizer, self.template)

    @property
    def name(self) -> str:
        """Of the template."""
        return self.template.name

    @property
    def hash(self) -> str:
        """Of the template."""
        return self.template.hash

    @property
    def source(self) -> str:
        """The template as Jinja."""
        return self.template.jinja()

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation, for training. Raises DataError for an unknown role or content that is no text."""
        return self._written(messages).rendered

    def prompt(self, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
        """
        Token IDs up to where the assistant's answer begins. Raises DataError once a conversation is seen to exceed
        `max_tokens`, before all of it is encoded.
        """
        line = self._written(messages, max_tokens)
        line.put(self.template.before("assistant"))
        return line.rendered.ids

    def said(self, ids: Sequence[int]) -> str:
        """The content of an answer from its token IDs, with or without the end token."""
        return self.tokenizer.decode(ids).removeprefix(self.lead)

    def trouble(self, messages: Sequence[Message]) -> str:
        """Why a conversation cannot be written in this template, or ""."""
        problem = self.template.trouble(messages)
        return f"message {problem[0] + 1} {problem[1]}" if problem else ""

    def _written(self, messages: Sequence[Message], max_tokens: int | None = None) -> "_Line":
        check_messages(messages)
        if problem := self.template.trouble(messages):
            hint = "Set another instruct.chat_template, or change such messages."
            raise DataError(problem[1], where=f"message {problem[0] + 1}", hint=hint)
        template, line = self.template, _Line(self.tokenizer, self.template, self._special, max_tokens)
        line.put(template.opening)
        for message in messages:
            role, content = message["role"], template.content(message)
            line.put(template.before(role))
            if role == "assistant":
                learned = int(message.get("train", True))
                line.say(template.lead + content, learned)
                line.put(template.end, learned)
            else:
                line.hear(content)
                line.put(template.ends_with(role))
            line.put(template.between)
        return line


def renderer_named(tokenizer: Tokenizer, name: str) -> Renderer:
    """
    A template of TEMPLATES for any tokenizer, in which the tokens that the template writes become special. Raises
    DataError where the tokenizer lacks one.
    """
    if name not in TEMPLATES:
        raise DataError(f"there is no template {name!r}", hint=f"Use one of {', '.join(TEMPLATES)}.")
    return Renderer(tokenizer.promoted(TEMPLATES[name].special), TEMPLATES[name])


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
        for piece, is_special in self._template.parts(structure):
            if is_special:
                self._flush()
                self._ids.append(self._special[piece])
                self._mask.append(says)
            else:
                self._text += piece

    def hear(self, content: str) -> None:
        self._text += content

    def say(self, content: str, says: int) -> None:
        self._flush()
        self._add(content, says)

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
            what = f"the conversation has at least {least} tokens, but the model's context is {self._max_tokens}"
            raise TooLongError(what, where="messages", hint=SHORTER)
        return ids


def _special_ids(tokenizer: Tokenizer, template: Template) -> dict[str, int]:
    ids = {name: tokenizer.special_id(name) for name in template.special}
    if missing := [name for name, id in ids.items() if id is None]:
        raise DataError(
            f"the tokenizer has no special tokens {', '.join(missing)}, which the template {template.name!r} writes",
            hint=f'Set tokenizer.chat_template = "{template.name}" and train again, or choose another template.',
        )
    return {name: id for name, id in ids.items() if id is not None}


def _check_cut(tokenizer: Tokenizer, template: Template) -> None:
    """
    Where text stands right before an answer, other programs encode the two together. We encode a prompt before its
    answer is known. Raises DataError where the token IDs would differ.
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
                f"the template {template.name!r} writes {text!r} before an answer, and the tokenizer splits that text "
                f"differently before {answer!r}: training and serving would differ",
                hint='Use a template with a special token there ("bloomery"), or another tokenizer.pattern.',
            )
