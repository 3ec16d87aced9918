"""
Renders conversations by the Jinja chat template of a model, as transformers does, with a loss mask.

A template is the text of a stranger, and so is every content. The template runs in Jinja's immutable sandbox with
bounds on time, size and names. It may read the contents: compare, split, trim them.

Every text in a rendering knows where each of its characters comes from (`OriginText`): from the template, or from the
content of a message. A special token counts only where all of its characters come from the template. Texts of unknown
origin count as contents, so a lost origin can never make a special token. The same origins give the loss mask.

The rendered text is encoded as a whole, so its IDs are those of `apply_chat_template`. Where a content spells a
special token, the special tokens of the template are renamed to names that occur nowhere, and the content is text.
"""

import html
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, SupportsIndex

import tokenizers
from jinja2 import Template as CompiledTemplate
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken

from bloomery.core.chat import Message, check_messages
from bloomery.core.errors import DataError, shorten
from bloomery.core.io import canonical, sha256_bytes
from bloomery.core.log import info
from bloomery.tokenizer.chat_template import OWN, SHORTER, Rendered, TooLongError
from bloomery.tokenizer.tokenizer import Tokenizer

MAX_TEMPLATE = 2**17
"""Characters of a template. The longest published ones have 30,000."""
MAX_TEXT = 2**24
"""Characters of any text that a template makes."""
MAX_ELEMENTS = 2**18
"""Elements of any list, with those of the lists in it."""
MAX_TOTAL = 2**28
"""Characters of all texts that a template makes for one conversation."""
MAX_SECONDS = 2.0
"""CPU time of one rendering."""
MAX_WIDTH, MAX_DATE, MAX_SLOW, MAX_BITS = 16, 256, 2**14, 2**14
"""Characters of an indent, of a date's format, and of what _SLOW_FILTERS change; bits of a whole number."""

STRUCTURE, DATA, FIRST = 0, 1, 2
"""Origins of a character: the template, anything else, and from FIRST on the messages in their order."""


class _RefusedError(Exception):
    """Why a template has to stop."""


@dataclass
class _Budget:
    """What one rendering may still use."""

    ends: float = field(default_factory=lambda: time.thread_time() + MAX_SECONDS)
    left: int = MAX_TOTAL

    def take(self, size: int) -> None:
        self.left -= size
        if size > MAX_TEXT or self.left < 0:
            raise _RefusedError(f"it creates a string or list of over {MAX_TEXT:,} elements, or many large ones")
        if time.thread_time() > self.ends:
            raise _RefusedError(f"it takes over {MAX_SECONDS:g} s")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


def _take(size: int) -> None:
    _BUDGET.get().take(size)


def _code(origin: int, said: int = 0) -> str:
    """One character for an origin, with a lowest bit for what stands in `{% generation %}`."""
    return chr(origin << 1 | said)


class _Said(dict[int, int]):
    """For str.translate: sets the lowest bit of every code."""

    def __missing__(self, key: int) -> int:
        return key | 1


class OriginText(str):
    """A text whose every character has an origin: `_from` has the code of each at the same index."""

    _from: str

    def __new__(cls, text: str = "", origins: str | None = None) -> "OriginText":
        new = super().__new__(cls, text)
        new._from = _code(DATA) * len(text) if origins is None else origins
        return new

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return _joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        _take(len(self) * max(0, int(times)))
        return OriginText(super().__mul__(times), self._from * int(times))

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return OriginText(super().__getitem__(key), self._from[key])

    def __iter__(self) -> Iterator[str]:
        for index in range(len(self)):
            _take(1)
            yield self[index]

    def _part(self, begin: int, length: int) -> "OriginText":
        return OriginText(str.__getitem__(self, slice(begin, begin + length)), self._from[begin : begin + length])

    def strip(self, chars: str | None = None, /) -> str:
        left = len(self) - len(super().lstrip(chars))
        return self._part(left, len(super().strip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        length = len(super().lstrip(chars))
        return self._part(len(self) - length, length)

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._part(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        length = len(super().removeprefix(prefix))
        return self._part(len(self) - length, length)

    def removesuffix(self, suffix: str, /) -> str:
        return self._part(0, len(super().removesuffix(suffix)))

    def _parts(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """The traced pieces of a split: they stand in the text one after the other."""
        _take(MAX_TEXT + 1 if len(pieces) > MAX_ELEMENTS else len(self) + len(pieces))
        parts: list[str] = []
        begin = 0
        for piece in pieces:
            begin = begin if sep is not None else self.find(piece, begin)
            parts.append(self._part(begin, len(piece)))
            begin += len(piece) + len(sep or "")
        return parts

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._parts(super().splitlines(keepends=True), "")
        if keepends:
            return whole
        return [line[: len(short)] for line, short in zip(whole, super().splitlines(), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._parts(super().partition(sep), "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._parts(super().rpartition(sep), "")
        return first, middle, last

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if old:
            return _joined(self.split(old, count), new)
        _take((len(self) + 1) * (len(new) + 1))
        return OriginText(super().replace(old, new, count))

    def join(self, parts: Iterable[str], /) -> str:
        return _joined(parts, self)

    def _mapped(self, how: Callable[[str], str]) -> "OriginText":
        """A change of case. Most letters stay one; else the origin stays where there is only one."""
        _take(len(self))
        text = how(str.__str__(self))
        if len(text) == len(self):
            return OriginText(text, self._from)
        return OriginText(text, self._from[0] * len(text) if len(set(self._from)) == 1 else None)

    def upper(self) -> str:
        return self._mapped(str.upper)

    def lower(self) -> str:
        return self._mapped(str.lower)

    def title(self) -> str:
        return self._mapped(str.title)

    def capitalize(self) -> str:
        return self._mapped(str.capitalize)


_GROWS = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})


def _joined(parts: Iterable[str], between: str = "") -> OriginText:
    """Texts as one, with their origins. The size is checked before the text is made."""
    pieces: list[str] = []
    for index, piece in enumerate(parts):
        if not isinstance(piece, str):
            raise TypeError(f"a list of strings holds {type(piece).__name__}")
        _take(len(piece) + len(between) + 1)
        pieces += [between, piece] if index and between else [piece]
    _take(sum(map(len, pieces)))
    return OriginText("".join(pieces), "".join(_origins(piece) for piece in pieces))


def _origins(text: str) -> str:
    return text._from if isinstance(text, OriginText) else _code(DATA) * len(text)


def _structure(text: str) -> OriginText:
    return OriginText(text, _code(STRUCTURE) * len(text))


def _data(value: Any, origin: int = DATA) -> Any:
    """A copy of what a template may see, of plain types; its texts are traced."""
    match value:
        case str():
            return OriginText(str.__str__(value), _code(origin) * len(value))
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {_data(key, origin): _data(one, origin) for key, one in value.items()}
        case list() | tuple():
            return [_data(one, origin) for one in value]
    return OriginText(f"<{type(value).__name__}>")


def _size(value: Any) -> int:
    """Of a value with all that it holds; what it holds several times counts as often."""
    total, count, todo = 0, 0, [value]
    while todo:
        element, count = todo.pop(), count + 1
        total += len(element) + 1 if isinstance(element, str | bytes | list | tuple | dict | set) else 1
        if total > MAX_TEXT or count > MAX_ELEMENTS:
            raise _RefusedError(f"it creates a string of over {MAX_TEXT:,} characters, or a list of {MAX_ELEMENTS:,}")
        if isinstance(element, dict):
            todo += [*element, *element.values()]
        elif isinstance(element, list | tuple | set):
            todo += element
    return total


def _check_product(values: Iterable[Any]) -> None:
    """What grows by its arguments can become as large as their product."""
    product = 1
    for value in values:
        whole = isinstance(value, int) and not isinstance(value, bool)
        product *= max(1, min(abs(value), MAX_TEXT + 1) if whole else _size(value))
        _take(min(product, MAX_TEXT + 1))


def _checked(value: Any) -> Any:
    """A result of a function, method or filter: traced, and not too large."""
    if isinstance(value, bytes | bytearray):
        raise _RefusedError("it encodes a string to bytes")
    if isinstance(value, str) and type(value) is not OriginText:
        _take(len(value))
        return OriginText(str.__str__(value))
    if isinstance(value, list | tuple | dict | set):
        _take(_size(value))
    elif isinstance(value, int):
        _check_whole(value)
    return value


def _check_whole(value: int) -> None:
    if value.bit_length() > MAX_BITS:
        raise _RefusedError("it computes a huge number")


class _Generation(Extension):
    """The tag `{% generation %}`: what stands in it is what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        text = caller()
        return OriginText(text, _origins(text).translate(_Said()))


class _Tracing(CodeGenerator):
    """Compiles texts of the template as structure, and checks the budget in every block."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat([")
        for each in node.nodes:
            self.write("environment.shown(")
            self.visit(each, frame)
            self.write("), ")
        self.write("])")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Tuple, node, frame, isinstance(node, nodes.Tuple) and node.ctx == "load")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def _made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame, checks: bool = True) -> None:
        self.write("environment.checked(" if checks else "")
        visit(node, frame)
        self.write(")" if checks else "")

    def _literal(self, text: str) -> str:
        return f"environment.structure({text!r})"

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):  # nothing is computed before the budget counts
            raise nodes.Impossible
        return node.data

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.shown(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")


class _Names(Namespace):
    """What a template counts in; no name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, *others = args
        values = dict(*others, **kwargs)
        if wrong := next((name for name in values if str(name).startswith("_")), None):
            raise _RefusedError(f"it uses the name {wrong!r}")
        Namespace.__init__(own, values)


def _raise_exception(message: str) -> None:
    raise TemplateError(str.__str__(message))


def _short(text: str, most: int, what: str) -> str:
    if len(text) > most:
        raise _RefusedError(f"it uses {what} of more than {most:,} characters")
    return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    for text in (" " * min(indent, MAX_WIDTH + 1) if isinstance(indent, int) else indent or "", *(separators or ())):
        _short(text, MAX_WIDTH, "an indent or separator in JSON")
    _check_product((value, 1 if indent is None else MAX_WIDTH))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise _RefusedError("it joins strings by an attribute; use map(attribute=…) before join")
    return _joined((one if isinstance(one, str) else OriginText(str(_checked(one))) for one in value), d)


_PRODUCT_FILTERS = ("batch", "center", "indent", "round", "slice", "wordwrap")
_SLOW_FILTERS = ("striptags", "title", "wordwrap")  # their time can grow with the square of their text
_LEFT_OUT = ("format", "pprint", "sum", "urlize", "xmlattr")
"""Filters that no published template uses, and whose time and size no argument bounds."""
_ESCAPES: dict[str, Callable[..., Any]] = {
    "safe": lambda text: text,
    **dict.fromkeys(("e", "escape", "forceescape"), lambda text: OriginText(html.escape(str(text)))),
    "join": _join,
    "replace": lambda text, old, new, count=-1: OriginText(str(text), _origins(str(text))).replace(
        old, new, -1 if count is None else count
    ),
    "tojson": _tojson,
}


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _take(1)
        if name in _SLOW_FILTERS and args:
            _short("".join(map(str, args)), MAX_SLOW, f"the filter {name} on a text")  # one gets the environment first
        if name in _PRODUCT_FILTERS:
            _check_product(one for one in (*args, *kwargs.values()) if isinstance(one, int | str | list | tuple | dict))
        return _checked(function(*args, **kwargs))

    vars(bounded).update(getattr(function, "__dict__", {}))  # how Jinja calls it
    return bounded


class _Sandbox(ImmutableSandboxedEnvironment):
    """As transformers configures it, with origins and bounds."""

    code_generator_class = _Tracing
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)
    structure, checked = staticmethod(_structure), staticmethod(_checked)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.filters = {name: one for name, one in (self.filters | _ESCAPES).items() if name not in _LEFT_OUT}
        self.filters = {name: _bounded_filter(name, one) for name, one in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda how: datetime.now().strftime(_short(how, MAX_DATE, "the format of a date")),
            "namespace": _Names,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        }

    def tick(self) -> None:
        _take(1)

    def shown(self, value: Any) -> str:
        if not isinstance(value, str):
            _take(_size(value))
            value = str(value)
        return value if type(value) is OriginText else OriginText(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _take(1)
        if operator == "%" and isinstance(left, str):
            if re.search(r"\*|\d{4}", left):
                raise _RefusedError("it formats a string with a large width")
            _check_product((left.count("%") + 1, right))
        elif operator == "*":
            size, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(size, list | tuple):
                _check_product((size, times))
            elif isinstance(size, int) and isinstance(times, int):
                _check_whole(size)
                _check_whole(times)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
                raise _RefusedError("it computes a huge number")
        elif isinstance(left, list | tuple):
            _take(_size(left) + _size(right))
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _take(1)
        own, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if (isinstance(own, str) and name in _GROWS) or isinstance(own, int | float | bytes):
            _check_product((own, *args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (format := super().wrap_str_format(value)) is None:
            return None
        text = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            if re.search(r"\d{4}|:[^{}]*\{", text):
                raise _RefusedError("it formats a string with a large width")
            _check_product((text.count("{") + 1, [*args, *kwargs.values()]))
            return format(*args, **kwargs)

        return bounded


_FAILURES = (
    TemplateError,
    SyntaxError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    AssertionError,
    _RefusedError,
)
"""What a template can raise: its own exception, a refusal of the sandbox, or a mistake in it."""
TOOL_KEYS = ("tool_calls", "tool_call_id", "name")
"""Of a ToolMessage, next to role and content."""
PROBE: tuple[Message, Message] = ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."})
"""A conversation that every template can write."""


class JinjaRenderer:
    """A model's own chat template bound to its tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        roles: Mapping[str, str | None],
        end_ids: Iterable[int] = (),
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """
        `roles` are the special tokens by transformers' keys, which the template may write. `variables` are the values
        that every rendering passes to the template, e.g. enable_thinking. Raises DataError for a template that is
        refused, or cannot write a question and its answer.
        """
        self.tokenizer, self.source, self.name = tokenizer, template, OWN
        self._roles = {role: name for role, name in roles.items() if name is not None}
        self._variables, self._warned = dict(variables or {}), False
        self._compiled, self._has_generation = _compiled(template)
        self.hash = sha256_bytes(canonical([template, self._roles, self._variables]))
        self._ends = frozenset(end_ids) | ({tokenizer.end_id} if tokenizer.end_id is not None else frozenset())
        self.lead, self._header, last = self._probed()
        self.end_ids: frozenset[int] = self._ends | last

    def render(self, messages: Sequence[Message], **variables: Any) -> Rendered:
        """
        A whole conversation, for training. Raises DataError where the template refuses it, or where it leaves out what
        an assistant says.
        """
        check_messages(messages)
        text = self._text(messages, variables)
        spans = _generated(text) if self._has_generation else self._answers(text, messages, warns=True)
        ids, where = self._encoded(text)
        mask = [0] * len(text)
        for begin, end in spans:
            mask[begin:end] = [1] * (end - begin)
        return Rendered(ids, [int(any(mask[begin : max(end, begin + 1)])) for begin, end in where])

    def prompt(self, messages: Sequence[Message], max_tokens: int | None = None, **variables: Any) -> list[int]:
        """Token IDs up to where the assistant's answer begins. Raises DataError where they exceed `max_tokens`."""
        check_messages(messages)
        text = self._text(messages, variables, add_generation_prompt=True)
        longest = self.tokenizer.max_token_bytes
        longest = max(longest, *map(len, self._special.values())) if longest and self._special else longest
        least = -(-len(text.encode()) // longest) if longest else 0
        ids = [] if max_tokens is not None and least > max_tokens else self._encoded(text)[0]
        if max_tokens is not None and (count := max(least, len(ids))) > max_tokens:
            what = f"the conversation has at least {count} tokens, but the model's context is {max_tokens}"
            raise TooLongError(what, where="messages", hint=SHORTER)
        return ids

    def written(self, messages: Sequence[Message], *, asks: bool = False, **variables: Any) -> str:
        """A conversation as text, up to where the assistant's answer begins if it `asks`. Raises DataError."""
        check_messages(messages)
        return str.__str__(self._text(messages, variables, add_generation_prompt=asks))

    @property
    def end_names(self) -> list[str]:
        """The special tokens that end an answer, as text."""
        return [self._special[id] for id in sorted(self.end_ids) if id in self._special]

    def said(self, ids: Sequence[int]) -> str:
        """The content of an answer from its token IDs, with or without the end token."""
        return self.tokenizer.decode(ids).removeprefix(self.lead)

    def trouble(self, messages: Sequence[Message]) -> str:
        """Why a conversation cannot be written in this template, or ""."""
        try:
            text = self._text(messages, {})
            self._answers(text, [] if self._has_generation else messages)
        except DataError as error:
            return error.what if error.where == "messages" else f"{error.where}: {error.what}"
        return ""

    def _text(self, messages: Sequence[Message], variables: Mapping[str, Any], **flags: bool) -> OriginText:
        rows = [
            {
                **{key: _data(message[key]) for key in TOOL_KEYS if key in message},  # type: ignore[literal-required]
                "role": _structure(message["role"]),
                "content": _data(message["content"], FIRST + number),
            }
            for number, message in enumerate(messages)
        ]
        values: dict[str, Any] = {role: _structure(name) for role, name in self._roles.items()}
        values |= {"tools": None, "documents": None, "add_generation_prompt": False, **flags}
        values |= _data({**self._variables, **variables}) | {"messages": rows}
        return _rendered(self._compiled, values)

    def _probed(self) -> tuple[str, str, frozenset[int]]:
        """
        What an assistant says before its content, what asks for an answer, and the special token after it: from one
        question and answer.
        """
        try:
            asked = self._text(PROBE[:1], {}, add_generation_prompt=True)
            header = asked.removeprefix(self._text(PROBE[:1], {}))
            whole = self._text(PROBE, {})
        except DataError as error:
            raise DataError(error.what, where="chat template", hint=_HINT) from None
        begin, end = _span(whole, FIRST + 1) or (0, 0)
        if end == 0 or len(whole) > MAX_TEMPLATE:
            what = "the chat template does not write the assistant's messages, or too much next to them"
            raise DataError(what, where="chat template", hint=_HINT)
        lead = whole[len(asked) : begin] if whole.startswith(asked) and len(asked) <= begin else ""
        if not whole.startswith(asked):
            what = f"the chat template prompts with {shorten(asked[-40:])!r}, but does not write that before"
            info(f"{what} the answers of a conversation", "yellow")
        ids, where = self._encoded(whole)
        after = [id for id, (left, _) in zip(ids, where, strict=True) if left >= end and id in self._special]
        return str.__str__(str(lead)), "" if header == asked else str.__str__(header), frozenset(after[:1])

    def _answers(self, text: OriginText, messages: Sequence[Message], *, warns: bool = False) -> list[tuple[int, int]]:
        """Where each answer stands in the text: its lead, its content, and what ends it."""
        spans = []
        ends = sorted((self._special[id] for id in self.end_ids if id in self._special), key=len, reverse=True)
        ending = re.compile(r"\s*(?:" + "|".join(map(re.escape, ends)) + ")") if ends else None
        for number, message in enumerate(messages):
            content = message["content"].strip()
            if message["role"] != "assistant" or not content:
                continue
            span = _span(text, FIRST + number)
            if span is None:
                what = "the chat template omits or rewrites the assistant's message"
                raise DataError(what, where=f"message {number + 1}", hint="Remove this conversation.")
            begin, end = span
            written = "".join(
                letter
                for letter, origin in zip(str.__iter__(text[begin:end]), text._from[begin:end], strict=True)
                if ord(origin) >> 1 == FIRST + number
            )
            if warns and content not in written and not self._warned:
                self._warned = True
                what = f"message {number + 1}: the chat template changes {shorten(content)!r} to {shorten(written)!r}"
                info(f"{what}; the loss is on what it writes", "yellow")
            asked = str.rfind(text, self._header, 0, begin) + len(self._header) if self._header else begin
            if len(self._header) <= asked < begin and set(text._from[asked:begin]) == {_code(STRUCTURE)}:
                begin = asked  # it says all that the template writes after that, as the opening of a thought
            elif self.lead and str.endswith(text[:begin], self.lead):
                begin -= len(self.lead)
            after = ending.match(text, end) if ending else None
            if after and set(text._from[end : after.end()]) == {_code(STRUCTURE)}:
                end = after.end()
            spans.append((begin, end))
        return spans

    @cached_property
    def _special(self) -> dict[int, str]:
        return {one["id"]: one["content"] for one in self.tokenizer.outline["added_tokens"] if one["special"]}

    def _encoded(self, text: OriginText) -> tuple[list[int], list[tuple[int, int]]]:
        """IDs of a rendered text, and the characters (begin, end) of each."""
        self.tokenizer.encode("")
        coded = self._recognizing.encode(str.__str__(text), add_special_tokens=False)
        if all(self._is_written(text, id, *span) for id, span in zip(coded.ids, coded.offsets, strict=True)):
            return coded.ids, coded.offsets
        return self._renamed_encoded(text)

    def _is_written(self, text: OriginText, id: int, begin: int, end: int) -> bool:
        """Whether an ID may stand here: a special token only where the template spells it."""
        if id not in self._special:
            return True
        word = text[begin:end].strip()
        if id == self._unknown and word != self._special[id]:
            return True  # a character without a token
        return {ord(code) >> 1 for code in _origins(word)} == {STRUCTURE}

    @cached_property
    def _unknown(self) -> int | None:
        name = self.tokenizer.outline["model"]["unk_token"]
        return next((id for id, content in self._special.items() if content == name), None)

    @cached_property
    def _recognizing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, which finds special tokens in a text."""
        return self.tokenizer.recognizing()

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """A tokenizer whose special tokens have names that no text holds, those names, and its IDs in ours."""
        added = self.tokenizer.outline["added_tokens"]
        inner = tokenizers.Tokenizer.from_str(
            json.dumps(self.tokenizer.spec | {"post_processor": None, "added_tokens": []})
        )
        options = ("lstrip", "rstrip", "single_word")
        names = {token["id"]: f"\U0010fffd{token['id']}\U0010fffc" for token in added if token["special"]}
        for token in added:
            kept = {name: token[name] for name in options}
            if token["special"]:
                inner.add_special_tokens([AddedToken(names[token["id"]], normalized=False, special=True, **kept)])
            else:
                inner.add_tokens([AddedToken(token["content"], normalized=token["normalized"], special=False, **kept)])
        new_ids = {token["id"]: inner.token_to_id(names.get(token["id"], token["content"])) for token in added}
        ids = {new: old for old, new in new_ids.items() if new is not None}
        return inner, names, ids

    def _renamed_encoded(self, text: OriginText) -> tuple[list[int], list[tuple[int, int]]]:
        inner, names, ids = self._renamed
        if "\U0010fffd" in text:
            what = "spells a special token and holds the character U+10FFFD"
            raise DataError(what, where="messages", hint="Remove the character.")
        by_name = {content: id for id, content in self._special.items()}
        pattern = re.compile("|".join(map(re.escape, sorted(by_name, key=len, reverse=True))))
        pieces: list[str] = []
        back: list[int] = []
        begin = at = 0
        while match := pattern.search(text, at):
            at = match.start() + 1
            if set(text._from[match.start() : match.end()]) <= {_code(STRUCTURE), _code(STRUCTURE, 1)}:
                name = names[by_name[match[0]]]
                pieces += [str.__getitem__(text, slice(begin, match.start())), name]
                back += [*range(begin, match.start()), *[match.start()] * len(name)]
                begin = at = match.end()
        pieces.append(str.__getitem__(text, slice(begin, None)))
        back += [*range(begin, len(text) + 1)]
        coded = inner.encode("".join(pieces), add_special_tokens=False)
        spans = [
            (back[left], max(back[left], back[right - 1] + 1 if right > left else 0)) for left, right in coded.offsets
        ]
        return [ids.get(id, id) for id in coded.ids], spans


_HINT = "Use a built-in template: --template NAME."


def _span(text: OriginText, origin: int) -> tuple[int, int] | None:
    """From the first to behind the last character of an origin."""
    codes = (_code(origin), _code(origin, 1))
    begins = [at for code in codes if (at := text._from.find(code)) >= 0]
    return (min(begins), max(text._from.rfind(code) for code in codes) + 1) if begins else None


def _generated(text: OriginText) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer("1+", "".join("01"[ord(code) & 1] for code in text._from))]


def _compiled(template: str) -> tuple[CompiledTemplate, bool]:
    """A template, and whether it says itself what an assistant says. Raises DataError for one that is refused."""
    if len(template) > MAX_TEMPLATE:
        what = f"the chat template has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}"
        raise DataError(what, where="chat template", hint=_HINT)
    environment = _Sandbox()
    token = _BUDGET.set(_Budget())
    try:
        tree = environment.parse(template)
        if problem := _problem(tree):
            raise _RefusedError(problem)
        compiled = environment.from_string(template)
    except _FAILURES as error:
        what = f"the chat template is refused: {shorten(str(error) or type(error).__name__)}"
        raise DataError(what, where="chat template", hint=_HINT) from None
    finally:
        _BUDGET.reset(token)
    return compiled, next(tree.find_all(nodes.ExtensionAttribute), None) is not None


def _problem(tree: nodes.Template) -> str:
    """Why a parsed template must not run, or ""."""
    if next(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)), None):
        return "it reads other files"
    if next(tree.find_all((nodes.EvalContextModifier, nodes.ScopedEvalContextModifier)), None):
        return "it changes how its text is escaped"
    for node in tree.find_all((nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Keyword, nodes.Macro)):
        names = [getattr(node, key, None) for key in ("name", "attr", "key")]
        names += [node.arg.value] if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else []
        if wrong := next((name for name in names if isinstance(name, str) and name.startswith("_")), None):
            return f"it uses the name {wrong!r}"
    return ""


def _rendered(template: CompiledTemplate, values: Mapping[str, Any]) -> OriginText:
    token = _BUDGET.set(_Budget())
    try:
        text = _joined(template.generate(**values))
        text.encode()  # raises ValueError for half a surrogate pair
        return text
    except _FAILURES as error:
        what = f"the model's chat template rejects this: {shorten(str(error) or type(error).__name__)}"
        raise DataError(what, where="messages", hint=f"Change the conversation. {_HINT}") from None
    finally:
        _BUDGET.reset(token)
