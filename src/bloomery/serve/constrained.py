"""
Structured output: JSON, a JSON Schema, a regular expression, a choice of texts, a grammar, or a tool call.

The package llguidance compiles a form to a matcher over the model's tokens. Before each token it names the tokens that
may follow. What is sampled is then always the beginning of a text of that form.

A form comes from a stranger. Its size, its definitions and the work for each token are bounded. It is compiled in a
thread with a large stack, because the compiler descends once for each definition that refers to the next.

`TextStream` and `ToolText` hold back what later text may turn into a stop string or a call.
"""

import codecs
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

import llguidance
import numpy as np
from jaxtyping import Bool

import bloomery.hw.require_torch  # noqa: F401
from bloomery.core.chat import Message, ToolMessage
from bloomery.core.errors import DataError, shorten
from bloomery.tokenizer.jinja_template import PROBE_CALL, PROBE_KEY, PROBE_NAME, PROBE_TOOL, JinjaRenderer
from bloomery.tokenizer.tokenizer import Tokenizer

import torch
from torch import Tensor

MAX_SCHEMA, MAX_GRAMMAR, MAX_CHOICES = 2**16, 2**14, 1000
"""Characters of a schema as JSON, and of a regular expression or grammar; texts to choose from."""
MAX_DEFINITIONS = 200
"""References of a schema, and rules of a grammar. The compiler takes 500 of them with a stack of 8 MiB."""
MAX_REMAINDERS, MAX_DECIMALS, MAX_DIGITS = 50_000, 20, 40
"""Of the multiples that a schema asks for: states of its compiled form, decimal places of one, and its characters."""
MAX_INTERSECTION = 10_000_000
"""
The product of the lengths of expressions that one text has to match together. With 60 alternatives each, three take
0.6 s to compile, four more than 12 s, and fourteen short ones 8 s and 600 MB.
"""
REFERENCES = ("$ref", "$dynamicRef")
COMBINING = ("allOf", "anyOf", "oneOf", *REFERENCES)
NO_CONSTRAINTS = ("$defs", "definitions", "enum", "const", "default", "examples")
"""Of a schema: what its references lead to, and values."""
_LARK_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Texts, comments and expressions of a grammar."""
STACK_BYTES = 64 * 2**20
STACK_LOCK = threading.Lock()
MAX_KEPT_FORMS = 32
"""Compiled forms that a model keeps."""
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "max_lexer_states": 50_000}
"""Of llguidance: about 10 ms to compile an expression, 7 ms for a token, and 100 MB."""
JSON_STYLE: Any = {"whitespace_pattern": r"[ \n\t]{1,16}"}
"""White space between the parts of JSON has an end: small models else write nothing but spaces."""

CALL_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of a call: as templates write it."""

FormKind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class Form:
    """What an answer has to be. `field` is the field of the request that asks for it."""

    kind: FormKind
    source: str
    """The JSON of a schema, a regular expression, or a grammar in Lark's notation."""
    field: str


def schema_form(schema: object, field: str) -> Form:
    """JSON that a JSON Schema accepts. Raises DataError for a schema that is too large."""
    source = json.dumps(schema)
    if len(source) > MAX_SCHEMA:
        raise DataError(f"the schema has {len(source):,} characters; {MAX_SCHEMA:,} are allowed", where=field)
    if (count := sum(1 for key, _ in _items(schema) if key in REFERENCES)) > MAX_DEFINITIONS:
        raise DataError(f"the schema has {count:,} references; {MAX_DEFINITIONS} are allowed", where=field)
    _check_intersections(schema, field)
    _check_multiples(source, field)
    return Form("json_schema", source, field)


def _check_intersections(schema: object, field: str) -> None:
    if _Intersections(schema).work(schema) > math.log(MAX_INTERSECTION):
        what = "one text of the schema has to match too many patterns at once, or too long ones"
        raise DataError(what, where=field, hint="Combine them into one pattern, or remove some from allOf.")


class _Intersections:
    """
    The work to compile the patterns of a schema that one text has to match together. It grows with the product of
    their lengths, in time and memory, and no limit of the compiler ends it.
    """

    def __init__(self, root: object) -> None:
        self._root, self._referred = root, dict[int, float]()
        """The work of what references lead to. A reference back to what contains it adds nothing."""
        waiting, begun = [*_references(root)], set[int]()
        while waiting:  # with a list, because a chain of references may be longer than Python's stack
            target = self._target(waiting[-1])
            if id(target) not in begun:
                begun.add(id(target))
                waiting += _references(target)
                continue
            waiting.pop()
            if id(target) not in self._referred:
                self._referred[id(target)] = self.work(target)

    def work(self, schema: object) -> float:
        """
        The logarithm of the lengths that count together, multiplied: of allOf those of all members, of other keywords
        the largest. `schema` may be a list of schemas.
        """
        if isinstance(schema, list):
            return max(map(self.work, schema), default=0.0)
        if not isinstance(schema, dict):
            return 0.0
        texts = [value for key in ("pattern", "format") if isinstance(value := schema.get(key), str)]
        own = sum(math.log(max(2, len(text))) for text in texts) + math.log(2) * ("minLength" in schema)
        below = {name: self._largest(schema.get(name)) for name in ("properties", "patternProperties")}
        others = [value for key, value in schema.items() if key not in (*below, *COMBINING, *NO_CONSTRAINTS)]
        inner = max(own, sum(below.values()), self.work(others))
        together = schema.get("allOf")
        inner += sum(map(self.work, together)) if isinstance(together, list) else 0.0
        inner += self.work(schema.get("anyOf")) + self.work(schema.get("oneOf"))
        references = [value for key in REFERENCES if isinstance(value := schema.get(key), str)]
        return inner + sum(self._referred.get(id(self._target(one)), 0.0) for one in references)

    def _largest(self, named: object) -> float:
        """Of schemas by the names of properties, or their patterns."""
        return max(map(self.work, named.values()), default=0.0) if isinstance(named, dict) else 0.0

    def _target(self, reference: str) -> object:
        """What a reference leads to: of its URL, the path behind # counts."""
        target = self._root
        for step in reference.partition("#")[2].split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else _element(target, name)
        return target


def _references(schema: object) -> list[str]:
    return [value for key, value in _items(schema) if key in REFERENCES and isinstance(value, str)]


def _element(value: object, index: str) -> object:
    return value[int(index)] if isinstance(value, list) and index.isdecimal() and int(index) < len(value) else None


def _check_multiples(source: str, field: str) -> None:
    """
    Raise DataError where the multiples that a form asks for would take long to compile: a state for each remainder.
    Those of one number may come together, by allOf, so that their least common multiple counts.
    """
    plain = re.sub(r"\\u00([0-7][0-9A-Fa-f])", lambda escape: chr(int(escape[1], 16)), source)
    sizes = []
    for text in re.findall(r'"multipleOf"\s*:\s*(-?[0-9][0-9.eE+-]*)', plain):
        if len(text) > MAX_DIGITS:
            raise _too_many_remainders(field)
        try:
            digits = Decimal(text).normalize().as_tuple()
        except InvalidOperation:
            continue  # the compiler says that it is no number
        exponent = int(digits.exponent)
        number = int("".join(map(str, digits.digits)))
        if abs(exponent) > MAX_DECIMALS or number > MAX_REMAINDERS:
            raise _too_many_remainders(field)
        sizes.append(number * 10**exponent if exponent > 0 else max(number, 10**-exponent))
    if math.lcm(*filter(None, set(sizes))) * len(sizes) > MAX_REMAINDERS:
        raise _too_many_remainders(field)


def _too_many_remainders(field: str) -> DataError:
    what = f"its values of multipleOf need more than {MAX_REMAINDERS:,} states"
    return DataError(what, where=field, hint="Use smaller values, or remove multipleOf.")


def object_form(field: str) -> Form:
    """Any JSON object."""
    return schema_form({"type": "object"}, field)


def choice_form(choices: Sequence[str], field: str) -> Form:
    """One of some texts. Raises DataError where there are none, or too many."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise DataError(f"has {len(choices):,} texts; 1 to {MAX_CHOICES:,} are allowed", where=field)
    return _bounded("grammar", "start: " + " | ".join(json.dumps(text) for text in choices), field, MAX_SCHEMA)


def regex_form(pattern: str, field: str) -> Form:
    """A text that a regular expression matches as a whole, in the notation of Rust's regex. Raises DataError."""
    return _bounded("regex", pattern, field, MAX_GRAMMAR)


def grammar_form(grammar: str, field: str) -> Form:
    """A text of a context-free grammar in Lark's notation; its first rule is `start`. Raises DataError."""
    if (count := grammar.count(":")) > MAX_DEFINITIONS:
        raise DataError(f"the grammar has {count:,} colons; {MAX_DEFINITIONS} are allowed", where=field)
    form = _bounded("grammar", grammar, field, MAX_GRAMMAR)
    parts = _LARK_QUOTED.sub("", grammar).count("&") + 1
    if parts > 1 and parts * math.log(max(2, len(grammar) / parts)) > math.log(MAX_INTERSECTION):
        what = f"its {parts - 1} intersections (&) may take too much work"
        raise DataError(what, where=field, hint="Use fewer of them, or a shorter grammar.")
    for begin in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # the compiler says what is wrong with it
            _check_intersections(json.JSONDecoder().raw_decode(grammar, begin.end())[0], field)
    _check_multiples(grammar, field)  # of schemas in it
    return form


def _bounded(kind: FormKind, source: str, field: str, most: int) -> Form:
    if len(source) > most:
        raise DataError(f"has {len(source):,} characters; {most:,} are allowed", where=field)
    return Form(kind, source, field)


def _items(value: object) -> Iterator[tuple[str, object]]:
    """Every key with its value of every object in JSON data."""
    if isinstance(value, dict):
        yield from value.items()
    for element in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _items(element)


class _TokenTable:
    """A tokenizer as llguidance reads one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(end_ids)
        self.special_token_ids = sorted(tokenizer.special_ids | end_ids)
        names = {token["id"]: token["content"].encode() for token in tokenizer.outline["added_tokens"]}
        self.tokens = [tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)]
        for id in self.special_token_ids:
            self.tokens[id] = names.get(id, self.tokens[id])

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_after(text if isinstance(text, str) else text.decode())


class Grammars:
    """Compiles forms for one model, and keeps the last of them. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        """`end_ids` may follow where an answer has its form."""
        self._vocabulary, self._end_ids = tokenizer, end_ids
        self._kept: OrderedDict[Form, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, form: Form) -> "FormConstraint":
        """A constraint for one answer. Raises DataError for a form that cannot be compiled, or if no token ends it."""
        if not self._end_ids:
            hint = "Add eos_token to tokenizer_config.json, or leave out the form."
            raise DataError("the model has no token that ends an answer", where=form.field, hint=hint)
        with self._lock:
            if form not in self._kept:
                self._kept[form] = _compiled(self._tokens, form)
                while len(self._kept) > MAX_KEPT_FORMS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(form)
            return FormConstraint(self._kept[form].deep_copy(), form)

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        """Takes half a second for 50,000 tokens."""
        wrapped = llguidance.TokenizerWrapper(_TokenTable(self._vocabulary, self._end_ids))
        return llguidance.LLTokenizer(wrapped, eos_token=sorted(self._end_ids))


def _compiled(tokens: llguidance.LLTokenizer, form: Form) -> llguidance.LLMatcher:
    def compile_it() -> llguidance.LLMatcher:
        match form.kind:
            case "json_schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(form.source, overrides=JSON_STYLE)
            case "regex":
                grammar = llguidance.LLMatcher.grammar_from_regex(form.source)
            case "grammar":
                grammar = llguidance.LLMatcher.grammar_from_lark(form.source)
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        return llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="grammar") as thread:
            with STACK_LOCK:  # the size is that of every thread which the process starts
                before = threading.stack_size(STACK_BYTES)
                try:
                    work = thread.submit(compile_it)
                finally:
                    threading.stack_size(before)
            matcher = work.result()
        problem = matcher.get_error() if matcher.is_error() else ""
    except ValueError as error:
        problem = str(error)
    if problem:
        what = f"this form cannot be compiled: {shorten(problem)}"
        raise DataError(what, where=form.field, hint="Correct it, or remove the named part.")
    return matcher


class FormConstraint:
    """The tokens of one answer that lead to its form."""

    def __init__(self, matcher: llguidance.LLMatcher, form: Form) -> None:
        self._matcher, self._form = matcher, form

    def allowed(self) -> Bool[Tensor, " V"]:
        """The tokens that may follow, with those that end the answer where it has its form."""
        bias = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(bias > 0)

    def accept(self, id: int) -> None:
        """Raises DataError where the next token would take too much work."""
        self._matcher.consume_token(id)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if "NoExtension" in error:
                what = "no text has this form, or the model has no token for the next part of it"
                raise DataError(what, where=self._form.field, hint="Loosen it, and check references to itself.")
            what = f"an answer of this form takes too much work: {shorten(error)}"
            raise DataError(what, where=self._form.field, hint="Simplify it.")


# --- tools ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool as an answer spells it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes a call: `begin`, an object with the name and the arguments, `end`."""

    begin: str
    arguments: str
    """The key of the arguments: "arguments" or "parameters"."""
    end: str

    @classmethod
    def of(cls, renderer: object) -> "ToolFormat | None":
        """
        Found by rendering one tool and one call of it. None where the template writes no tools, or writes calls in
        another way than as a JSON object.
        """
        if not isinstance(renderer, JinjaRenderer):
            return None
        asked: list[Message] = [{"role": "user", "content": "Hi."}]
        called: ToolMessage = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        try:
            before = renderer.written(asked, asks=True, tools=[PROBE_TOOL])
            after = renderer.written([*asked, called], tools=[PROBE_TOOL])
        except DataError:  # the template refuses tools, or calls
            return None
        if PROBE_NAME not in before:
            return None
        same = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        for value, begin, end in _objects(after[same:]):
            keys = [key for key, inner in value.items() if inner == {PROBE_KEY: 1}]
            if value.get("name") == PROBE_NAME and keys:
                rest = after[same + end :]
                ends = [rest.find(name) for name in renderer.end_names if name in rest]
                return cls(after[same : same + begin], keys[0], rest[: min(ends)] if ends else rest.rstrip())
        return None

    @property
    def mark(self) -> str:
        """The first word of a call, or "" where a call is nothing but its object."""
        return next(iter(self.begin.split()), "")

    def calls(self, text: str, names: Sequence[str]) -> tuple[str, list[ToolCall]]:
        """
        The text outside of calls, and the calls of known tools. An object that is broken, or calls an unknown tool, is
        text; behind it, only a mark begins a call. Whitespace between calls is left out.
        """
        kept, calls, done = list[str](), list[ToolCall](), 0
        at = text.find(self.mark)
        while at >= 0:
            others, row, end = self._run(text, at, names)
            if row:
                kept += [text[done:at], *others]
                calls, done = calls + row, end
            at = text.find(self.mark, max(end, at + len(self.mark))) if self.mark else -1
        return "".join(part for part in (*kept, text[done:]) if part.strip()), calls

    def _run(self, text: str, at: int, names: Sequence[str]) -> tuple[list[str], list[ToolCall], int]:
        """Of objects in a row behind a mark at `at`: those that are no calls, the calls, and where the row ends."""
        others, calls, end = list[str](), list[ToolCall](), at
        rest = r"\s*".join(re.escape(word) for word in self.begin.split()[1:] if word.strip("["))
        gap = r"[\s\[]*" + (rf"(?:{rest}[\s\[]*)?" if rest else "") + r"\{"
        first = re.compile(gap).match(text, at + len(self.mark))
        brace, decoder = first.end() - 1 if first else -1, json.JSONDecoder()
        while brace >= 0:
            try:
                value, end = decoder.raw_decode(text, brace)
                value = _sendable(value)
            except (ValueError, RecursionError):
                break
            arguments = value.get(self.arguments, value.get("arguments", {}))
            if value.get("name") in names and isinstance(arguments, dict):
                calls.append(ToolCall(value["name"], arguments))
            else:
                others.append(text[brace:end])
            following = re.compile(r"[\s,;]*\{").match(text, end)
            brace = following.end() - 1 if following else -1
        closed = re.compile(rf"(?:\s*\])?\s*{re.escape(self.end.strip())}").match(text, end) if calls else None
        return others, calls, closed.end() if closed else end

    def form(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> Form:
        """
        Exactly one call of one of the tools, with no argument that its schema does not name. `special` are the IDs of
        special tokens by their names.
        """
        choices = []
        for index, tool in enumerate(tools):
            function, at = tool["function"], f"#/anyOf/{index}/properties/{self.arguments}"
            parameters = function.get("parameters") or {}
            is_closed = not parameters.keys() & {*COMBINING}  # their properties would not be allowed
            closed = {"additionalProperties": False} if is_closed else {}
            parameters = {**closed, **parameters, "type": "object"}
            properties = {"name": {"const": function["name"]}, self.arguments: _moved(parameters, at)}
            choice = {"type": "object", "properties": properties, "required": ["name", self.arguments]}
            choices.append({**choice, "additionalProperties": False})
        schema = schema_form({"x-guidance": CALL_STYLE, "anyOf": choices}, "tools").source
        before, after = (_as_lark(text, special) for text in (self.begin, self.end))
        return Form("grammar", f"start: {before} call {after}\ncall: %json {schema}", "tools")


class ToolText:
    """Text in, text out that belongs to no call of a tool. The calls are known at the end."""

    def __init__(self, format: ToolFormat, names: Sequence[str], *, one_call: bool = False) -> None:
        """`names` of the tools. With `one_call`, only the first call counts."""
        self._format, self._names, self._one_call = format, names, one_call
        self._mark = format.mark or "{"
        self._held, self._calls, self._spoke = "", False, False

    def shown(self, special: bytes) -> bytes:
        """A special token as text, where calls are written with it; else nothing."""
        return special if special.decode() in self._format.begin + self._format.end else b""

    def add(self, text: str) -> str:
        """The text that is certain to be no part of a call."""
        self._held += text
        if self._calls:
            return ""
        if not self._format.mark:  # a call is the whole answer
            if not self._held.strip() and not self._spoke:
                return ""
            self._calls = self._held.lstrip().startswith("{") and not self._spoke
            keep = len(self._held) if self._calls else 0
        elif (at := self._held.find(self._mark)) >= 0:
            self._calls, keep = True, len(self._held) - at
        else:
            keep = overlap(self._held, self._mark)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._spoke = self._spoke or bool(shown)
        return shown

    def end(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls."""
        shown, held = self.add(text), self._held
        rest, calls = self._format.calls(held, self._names) if self._calls else (held, [])
        text = (shown + rest).rstrip() if calls else shown + held
        return text, tuple(calls[: 1 if self._one_call else None])


class TextStream:
    """
    Bytes in, text out that nothing later can take back.

    Held back are the bytes of an unfinished character, and the longest end of the text that begins a stop string.
    What is given out, joined, is the text of all bytes up to the stop string that is complete first, however the bytes
    were cut.
    """

    def __init__(self, stop: Sequence[str] = (), lead: str = "") -> None:
        """`lead` is left out where the text begins with it."""
        self.stopped = False
        self.num_decoded = self.num_certain = 0
        """Characters of all bytes, and those of them that are given out, or left out as the lead."""
        self._stop = [mark for mark in stop if mark]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._lead = "", lead

    def add(self, data: bytes) -> str:
        """The text that is certain after these bytes."""
        return self._take(self._decoder.decode(data), last=False)

    def end(self) -> str:
        """What was held back, now that nothing follows. A character that was never finished becomes U+FFFD."""
        return self._take(self._decoder.decode(b"", final=True), last=True)

    def _take(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        self.num_decoded += len(new)
        if self._lead:
            if not last and len(text) < len(self._lead) and self._lead.startswith(text):
                self._held = text
                return ""
            text, self._lead = text.removeprefix(self._lead), ""
            self.num_certain = self.num_decoded - len(text)
        matches = [(position + len(mark), position) for mark in self._stop if (position := text.find(mark)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            self.num_certain += min(matches)[1]
            return text[: min(matches)[1]]
        keep = 0 if last else max((overlap(text, mark) for mark in self._stop), default=0)
        self._held = text[len(text) - keep :]
        self.num_certain = self.num_decoded - keep
        return text[: len(text) - keep]


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark` without being all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _sendable(value: Any) -> Any:
    """
    JSON data that UTF-8 can hold: U+FFFD replaces half a surrogate pair, which an escape may spell. Raises ValueError
    for NaN and infinite numbers, which JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.JSONDecoder().decode(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The JSON objects in a text from left to right, each with where it begins and ends."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
            continue
        yield value, at, end
        at = text.find("{", end)


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references lead to the same definitions below another root."""
    if isinstance(schema, list):
        return [_moved(element, root) for element in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, root)
        for key, value in schema.items()
    }


def _as_lark(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark's notation, in which the names of special tokens stand for these."""
    parts, at = [], 0
    while at < len(text):
        names = [(index, -len(name), name) for name in special if (index := text.find(name, at)) >= 0]
        begin, _, name = min(names, default=(len(text), 0, ""))
        parts += [json.dumps(text[at:begin])] if begin > at else []
        parts += [f"<[{special[name]}]>"] if name else []
        at = begin + len(name)
    return " ".join(parts)
