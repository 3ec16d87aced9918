"""
Renders conversations by the Jinja chat template of a model, as transformers does, with a loss mask.

The template runs in a sandbox that traces the origin of every character (jinja_sandbox.py). A special token counts only
where all of its characters come from the template. The same origins give the loss mask.

The rendered text is encoded as a whole, so its IDs are those of `apply_chat_template`. Where a content spells a
special token, the special tokens of the template are renamed to names that occur nowhere, and the content is text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from bloomery.core.chat import REASONING, Message, ToolMessage, check_messages
from bloomery.core.errors import DataError, shorten
from bloomery.core.io import canonical, sha256_bytes
from bloomery.core.log import info
from bloomery.tokenizer.chat_template import OWN, REASONING_FIX, SHORTER, Rendered, TooLongError
from bloomery.tokenizer.jinja_sandbox import (
    FIRST,
    HINT,
    MAX_TEMPLATE,
    STRUCTURE,
    OriginText,
    compiled,
    generated,
    origins_of,
    rendered,
    span_of,
    structure,
    traced,
    written_of,
)
from bloomery.tokenizer.tokenizer import Tokenizer

NO_END = (
    "no token that ends an answer is in the loss: the chat template writes none, or leaves it out of {% generation %}; "
    "a model that is trained so may not stop"
)
TOOL_KEYS = ("tool_calls", "tool_call_id", "name")
"""Of a ToolMessage, next to role and content."""
PROBE: tuple[Message, Message] = ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."})
"""A conversation that every template can write."""


PROBE_NAME, PROBE_KEY = "bloomery_probe", "bloomery_key"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {PROBE_KEY: {"type": "integer"}}, "required": [PROBE_KEY]},
    },
}
PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": PROBE_NAME, "arguments": {PROBE_KEY: 1}}}
"""A tool and a call of it."""


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
        self._variables, self._warned = dict(variables or {}), set[str]()
        self._compiled, self._has_generation = compiled(template)
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
        spans: Iterable[tuple[int, int, int | None]] = [(*span, None) for span in generated(text)]
        if not self._has_generation:
            spans = self._answers(text, messages, variables, warns=True)
        ids, where = self._encoded(text)
        mask = [0] * len(text)
        silent = {FIRST + number for number, message in enumerate(messages) if not message.get("train", True)}
        for begin, end, number in spans:
            origins = origins_of(text[begin:end]) if number is None else {FIRST + number}
            # next to messages that are not in the loss, a span counts only if it is known whose it is
            learned = not silent or (origins.isdisjoint(silent) and max(origins) >= FIRST)
            mask[begin:end] = [int(learned)] * (end - begin)
        for number, message in enumerate(messages):
            if (thought := message.get("reasoning", "").strip()) and thought not in written_of(text, FIRST + number):
                what = (
                    f"message {number + 1}: the chat template leaves out or changes the reasoning {shorten(thought)!r}"
                )
                self._warn("reasoning", f"{what}, as it does in prompts; the loss is on what it writes")
        learned_ids = [int(any(mask[begin : max(end, begin + 1)])) for begin, end in where]
        if any(learned_ids) and not any(one and id in self.end_ids for id, one in zip(ids, learned_ids, strict=True)):
            self._warn("end", NO_END)
        return Rendered(ids, learned_ids)

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

    def trouble(self, messages: Sequence[Message], **variables: Any) -> str:
        """Why a conversation cannot be written in this template, or ""."""
        try:
            text = self._text(messages, variables)
            self._answers(text, [] if self._has_generation else messages, variables)
        except DataError as error:
            return error.what if error.where == "messages" else f"{error.where}: {error.what}"
        return ""

    def _warn(self, about: str, what: str) -> None:
        """Log a warning, once about each thing."""
        if about not in self._warned:
            self._warned.add(about)
            info(what, "yellow")

    @cached_property
    def _reasoning_key(self) -> str:
        """The key under which the template reads the reasoning of a message; "" where it reads none."""
        thinking: Message = {**PROBE[1], "reasoning": "So."}
        for key in REASONING:
            with suppress(DataError):  # one that refuses the key does not read it
                if "So." in written_of(self._text([PROBE[0], thinking], {}, key), FIRST + 1):
                    return key
        return ""

    def _text(
        self, messages: Sequence[Message], variables: Mapping[str, Any], thinks: str | None = None, **flags: bool
    ) -> OriginText:
        """A conversation as text, with the reasoning of its messages under the key `thinks`. Raises DataError."""
        first = next((number for number, message in enumerate(messages, 1) if "reasoning" in message), None)
        key = self._reasoning_key if first is not None and thinks is None else thinks
        if first is not None and not key:
            what = f"has reasoning, which the model's chat template does not write: {REASONING_FIX}"
            raise DataError(what, where=f"message {first}", hint=HINT)
        rows = [
            {
                **{key: traced(message[key]) for key in TOOL_KEYS if key in message},  # type: ignore[literal-required]
                **({key: traced(message["reasoning"], FIRST + number)} if "reasoning" in message else {}),
                "role": structure(message["role"]),
                "content": traced(message["content"], FIRST + number),
            }
            for number, message in enumerate(messages)
        ]
        values: dict[str, Any] = {role: structure(name) for role, name in self._roles.items()}
        values |= {"tools": None, "documents": None, "add_generation_prompt": False, **flags}
        values |= traced({**self._variables, **variables}) | {"messages": rows}
        return rendered(self._compiled, values)

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
            raise DataError(error.what, where="chat template", hint=HINT) from None
        begin, end = span_of(whole, FIRST + 1) or (0, 0)
        if end == 0 or len(whole) > MAX_TEMPLATE:
            what = "the chat template does not write the assistant's messages, or too much next to them"
            raise DataError(what, where="chat template", hint=HINT)
        lead = whole[len(asked) : begin] if whole.startswith(asked) and len(asked) <= begin else ""
        if not whole.startswith(asked):
            what = f"the chat template prompts with {shorten(asked[-40:])!r}, but does not write that before"
            info(f"{what} the answers of a conversation", "yellow")
        ids, where = self._encoded(whole)
        after = [id for id, (left, _) in zip(ids, where, strict=True) if left >= end and id in self._special]
        return str.__str__(str(lead)), "" if header == asked else str.__str__(header), frozenset(after[:1])

    def _answers(
        self, text: OriginText, messages: Sequence[Message], variables: Mapping[str, Any], *, warns: bool = False
    ) -> list[tuple[int, int, int | None]]:
        """
        Where each answer stands in the text: its lead, its content, and what ends it; and the number of its message.
        """
        spans: list[tuple[int, int, int | None]] = []
        ends = sorted((self._special[id] for id in self.end_ids if id in self._special), key=len, reverse=True)
        ending = re.compile(r"\s*(?:" + "|".join(map(re.escape, ends)) + ")") if ends else None
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("tool_calls"):
                spans.append((*self._call(text, messages, number, variables, ending), number))
                continue
            content = message["content"].strip()
            if message["role"] != "assistant" or not (content or "reasoning" in message):
                continue
            span = span_of(text, FIRST + number)
            if span is None:
                what = "the chat template omits or rewrites the assistant's message"
                raise DataError(what, where=f"message {number + 1}", hint="Remove this conversation.")
            begin, end = span
            written = written_of(text, FIRST + number)
            if warns and content not in written:
                what = f"message {number + 1}: the chat template changes {shorten(content)!r} to {shorten(written)!r}"
                self._warn("content", f"{what}; the loss is on what it writes")
            asked = str.rfind(text, self._header, 0, begin) + len(self._header) if self._header else begin
            if len(self._header) <= asked < begin and origins_of(text[asked:begin]) == {STRUCTURE}:
                begin = asked  # it says all that the template writes after that, as the opening of a thought
            elif self.lead and str.endswith(text[:begin], self.lead):
                begin -= len(self.lead)
            after = ending.match(text, end) if ending else None
            if after and origins_of(text[end : after.end()]) == {STRUCTURE}:
                end = after.end()
            spans.append((begin, end, number))
        return spans

    def _call(
        self,
        text: OriginText,
        messages: Sequence[Message],
        number: int,
        variables: Mapping[str, Any],
        ending: re.Pattern[str] | None,
    ) -> tuple[int, int]:
        """
        Where an answer stands that calls tools: from where its prompt ends. Raises DataError for a template that writes
        it in another way than its prompt promises.
        """
        asked = self._text(messages[:number], variables, add_generation_prompt=True)
        until = self._text(messages[: number + 1], variables)
        if not (text.startswith(asked) and text.startswith(until) and len(asked) < len(until)):
            what = "the chat template does not write this call of a tool where the assistant is to speak"
            raise DataError(what, where=f"message {number + 1}", hint="Remove this conversation.")
        ends = ending.finditer(text, len(asked), len(until)) if ending else ()
        after = next((one.end() for one in ends if origins_of(text[one.start() : one.end()]) == {STRUCTURE}), None)
        return len(asked), len(until) if after is None else after

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes tools and calls of them."""
        with suppress(DataError):  # one that refuses tools
            called: ToolMessage = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
            return self.written([PROBE[0], called], tools=[PROBE_TOOL]).count(PROBE_NAME) > 1
        return False

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
        return origins_of(word) == {STRUCTURE}

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
            if origins_of(text[match.start() : match.end()]) == {STRUCTURE}:
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
