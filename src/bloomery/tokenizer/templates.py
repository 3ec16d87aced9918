"""
Chat templates as data: how a conversation looks in special tokens and text, and the same as Jinja for other programs.

    opening  { role · lead content end? between }…        and, where the assistant is to speak:  role

Only what `special` names is ever a special token. The rest is text, and text between two special tokens is encoded as
one, as every program that renders first and encodes afterwards does; but before what an assistant says there is
always a cut, so that a prompt is the beginning of what was trained on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

from bloomery.core.files import canonical, sha256_bytes
from bloomery.data.conversations.conversation import ROLES as MESSAGE_ROLES
from bloomery.data.conversations.conversation import Message, Role
from bloomery.tokenizer.tokenizer import DOCUMENT, END, ROLES, SPECIAL

assert MESSAGE_ROLES == ROLES

TemplateName = Literal["bloomery", "chatml", "llama3", "user-assistant", "baichuan2"]


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
    """How roles are written; a role that is not here cannot be said."""
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
        """sha256 of all that decides about the ids of a conversation, given a tokenizer."""
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
        found = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [(part, part in self.special) for part in found if part]

    def trouble(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
        """The place of the first message that cannot be written, and why; None where all can."""
        for place, message in enumerate(messages):
            if message["role"] not in self.names:
                shown = ", ".join(self.names)
                return place, f"has the role {message['role']!r}, and the template {self.name!r} has {shown}"
            if place and message["role"] in self.only_first:
                return place, f"is of the {message['role']}, which in the template {self.name!r} can only come first"
        return None

    def jinja(self) -> str:
        """The same template for `transformers` and others, which render text and encode it afterwards."""
        cases = []
        for place, role in enumerate(self.names):
            before = self.before(role) + (self.lead if role == "assistant" else "")
            written = [quoted(before), self._jinja_content(role), quoted(self.ends_with(role) + self.between)]
            case = f"{{% {'elif' if place else 'if'} message['role'] == '{role}' %}}"
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
The templates that `instruct.template` names. bloomery is ours; chatml as Qwen2 has it, llama3 as Llama 3.1 (whose tool
is `ipython`), user-assistant as 1386.ai's fourth data set, baichuan2 with the ids 195 and 196 of its own tokenizer.
"""
assert tuple(TEMPLATES) == get_args(TemplateName)

EVERY_SPECIAL = tuple(dict.fromkeys((*SPECIAL, *(name for one in TEMPLATES.values() for name in one.special))))
"""All special tokens of all templates."""


def wanted(name: str) -> tuple[str, ...]:
    """The special tokens that a tokenizer for a template has: those that everything here needs, and its own."""
    return tuple(dict.fromkeys((*SPECIAL, *TEMPLATES[name].special)))
