"""
Runs the Jinja chat template of a stranger, and knows where each character of its text comes from.

A template is the text of a stranger, and so is every content. The template runs in Jinja's immutable sandbox with
bounds on time, size and names. It may read the contents: compare, split, trim them.

Every text in a rendering knows where each of its characters comes from (`OriginText`): from the template, or from the
content of a message. Texts of unknown origin count as contents, so a lost origin can never make a special token.
"""

import html
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, SupportsIndex

from jinja2 import Template as CompiledTemplate
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from bloomery.core.errors import DataError, shorten

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


def structure(text: str) -> OriginText:
    return OriginText(text, _code(STRUCTURE) * len(text))


def traced(value: Any, origin: int = DATA) -> Any:
    """A copy of what a template may see, of plain types; its texts are traced."""
    match value:
        case str():
            return OriginText(str.__str__(value), _code(origin) * len(value))
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {traced(key, origin): traced(one, origin) for key, one in value.items()}
        case list() | tuple():
            return [traced(one, origin) for one in value]
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
    structure, checked = staticmethod(structure), staticmethod(_checked)

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


HINT = "Use a built-in template: --template NAME."


def span_of(text: OriginText, origin: int) -> tuple[int, int] | None:
    """From the first to behind the last character of an origin."""
    codes = (_code(origin), _code(origin, 1))
    begins = [at for code in codes if (at := text._from.find(code)) >= 0]
    return (min(begins), max(text._from.rfind(code) for code in codes) + 1) if begins else None


def origins_of(text: str) -> set[int]:
    """The origins of all characters: STRUCTURE, DATA, or FIRST plus the number of a message."""
    return {ord(code) >> 1 for code in set(_origins(text))}


def written_of(text: OriginText, origin: int) -> str:
    """The characters of an origin."""
    begin, end = span_of(text, origin) or (0, 0)
    letters = zip(str.__iter__(text[begin:end]), text._from[begin:end], strict=True)
    return "".join(letter for letter, code in letters if ord(code) >> 1 == origin)


def generated(text: OriginText) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer("1+", "".join("01"[ord(code) & 1] for code in text._from))]


def compiled(template: str) -> tuple[CompiledTemplate, bool]:
    """A template, and whether it says itself what an assistant says. Raises DataError for one that is refused."""
    if len(template) > MAX_TEMPLATE:
        what = f"the chat template has {len(template):,} characters; the limit is {MAX_TEMPLATE:,}"
        raise DataError(what, where="chat template", hint=HINT)
    environment = _Sandbox()
    token = _BUDGET.set(_Budget())
    try:
        tree = environment.parse(template)
        if problem := _problem(tree):
            raise _RefusedError(problem)
        compiled = environment.from_string(template)
    except _FAILURES as error:
        what = f"the chat template is refused: {shorten(str(error) or type(error).__name__)}"
        raise DataError(what, where="chat template", hint=HINT) from None
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


def rendered(template: CompiledTemplate, values: Mapping[str, Any]) -> OriginText:
    token = _BUDGET.set(_Budget())
    try:
        text = _joined(template.generate(**values))
        text.encode()  # raises ValueError for half a surrogate pair
        return text
    except _FAILURES as error:
        what = f"the model's chat template rejects this: {shorten(str(error) or type(error).__name__)}"
        raise DataError(what, where="messages", hint=f"Change the conversation. {HINT}") from None
    finally:
        _BUDGET.reset(token)
