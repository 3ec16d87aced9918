"""
Every published template next to a second implementation: Jinja as it is, and a tokenizer that knows no special token.

The second one shares no code with Bloomery. Where a special token of the template stands is found by writing the
conversation twice: once as it is, and once with every special token in a content replaced by as many letters that no
text has. Texts between are encoded one by one. Answers are found by two marks around them.
"""

import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bloomery.core.chat import Message
from bloomery.tokenizer.importers import from_json
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.weights import gguf
from tests.tokenizer.test_jinja_template import FAMILIES, FOLDER, Family, content, trained
from tests.weights.made import published

CONVERSATIONS = int(os.environ.get("BLOOMERY_TEST_CONVERSATIONS", "100"))
"""Of each template: all 24,000 of 12 templates take four minutes with 2000."""
MARKS, LETTER = ("\ue0f0", "\ue0f1"), "\ue0ff"
THINKING, THOUGHT_ENDS = ("qwen3", "deepseek"), "\n</think>\n\n"
HEADERS = {
    "llama2": "[/INST]",
    "llama31": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[/INST]",
    **dict.fromkeys(("qwen25", "qwen3", "smollm2"), "<|im_start|>assistant\n"),
    "gemma": "<start_of_turn>model\n",
    **dict.fromkeys(("phi3", "zephyr"), "<|assistant|>\n"),
    "deepseek": "<｜Assistant｜>",
    "baichuan2": "<reserved_107>",
    "olmo": "",
}
"""What calls on the assistant. The template of OLMo marks itself what the assistant says."""


def _refuse(message: str) -> None:
    raise ValueError(message)


@dataclass
class Apart:
    """A template and a vocabulary: ours, and the second implementation."""

    family: Family
    ours: JinjaRenderer
    roles: dict[str, str | None]
    header: str
    special: dict[str, int]
    pattern: re.Pattern[str]
    writes: Callable[..., str]
    marks: Callable[..., str]
    plain: tokenizers.Tokenizer


@cache
def apart(name: str, vocabulary: str) -> Apart:
    family, source = FAMILIES[name], (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    spec = json.loads(real() if vocabulary == "SmolLM2" else trained(family.kind, family.special, family.rstrip))
    first = 1 + max([*spec["model"]["vocab"].values(), *(one["id"] for one in spec["added_tokens"])])
    options = {"single_word": False, "lstrip": False, "rstrip": family.rstrip, "normalized": False, "special": True}
    known = {one["content"] for one in spec["added_tokens"]}
    spec["added_tokens"] += [
        {"id": first + number, "content": token} | options
        for number, token in enumerate(token for token in family.special if token not in known)
    ]
    roles = {"bos_token": family.bos, "eos_token": family.eos}
    bare = spec | {"added_tokens": [], "post_processor": None}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    begin, end = "{% generation %}", "{% endgeneration %}"
    special = {one["content"]: one["id"] for one in spec["added_tokens"]}
    return Apart(
        family,
        JinjaRenderer(from_json(json.dumps(spec), name, roles), source, roles),
        roles,
        HEADERS[name],
        special,
        re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))),
        environment.from_string(source.replace(begin, "").replace(end, "")).render,
        environment.from_string(source.replace(begin, MARKS[0]).replace(end, MARKS[1])).render,
        tokenizers.Tokenizer.from_str(json.dumps(bare)),
    )


@cache
def real() -> str:
    """The vocabulary of SmolLM2, with 49,152 token IDs."""
    return gguf.read(published()).tokenizer_json


def disguised(two: Apart, content: str) -> str:
    return two.pattern.sub(lambda match: LETTER * len(match[0]), content)


def marked(text: str) -> str:
    """An answer in marks, without white space around it and without a thought before it."""
    first = text.rfind(THOUGHT_ENDS) + len(THOUGHT_ENDS) if THOUGHT_ENDS in text else 0
    begin, end = len(text) - len(text[first:].lstrip()), len(text.rstrip())
    return text[:begin] + MARKS[0] + text[begin:end] + MARKS[1] + text[end:] if begin < end else text


def expected(two: Apart, messages: list[Message], variables: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Token IDs of a conversation, and which of them are in the loss."""
    values = {**two.roles, "tools": None, "add_generation_prompt": False, **variables}
    hidden = [Message(role=one["role"], content=disguised(two, one["content"])) for one in messages]
    for one in hidden:
        if one["role"] == "assistant" and two.header:
            one["content"] = marked(one["content"])
    text, with_marks = two.writes(**values, messages=messages), two.marks(**values, messages=hidden)
    structure = with_marks.replace(MARKS[0], "").replace(MARKS[1], "")
    assert len(text) == len(structure)
    assert all(b in (a, LETTER) for a, b in zip(text, structure, strict=True))
    said, at, begin = [False] * len(text), 0, 0
    for letter in with_marks:
        if letter == MARKS[0]:  # whatever stands behind the header is the assistant's
            begin = structure.rindex(two.header, 0, at) + len(two.header) if two.header else at
        elif letter == MARKS[1]:
            rest, ending = text[at:], two.family.end.lstrip()
            end = at + len(rest) - len(rest.lstrip()) + len(ending) if two.header else at
            assert text[:end].endswith(ending) or not two.header
            said[begin:end] = [True] * (end - begin)
        at += letter not in MARKS
    tokens = encoded(two, text, structure)
    return [id for id, _, _ in tokens], [int(any(said[left : max(right, left + 1)])) for _, left, right in tokens]


def encoded(two: Apart, text: str, structure: str) -> list[tuple[int, int, int]]:
    """Each token ID, with the characters that it is of."""
    tokens, begin = list[tuple[int, int, int]](), 0
    for match in [*two.pattern.finditer(structure), None]:
        segment = text[begin : match.start() if match else len(text)]
        coded = two.plain.encode(segment, add_special_tokens=False)
        tokens += [
            (id, begin + left, begin + right) for id, (left, right) in zip(coded.ids, coded.offsets, strict=True)
        ]
        if match:
            begin = match.end()
            while two.family.rstrip and match[0] in two.family.special and text[begin : begin + 1].isspace():
                begin += 1
            tokens.append((two.special[match[0]], match.start(), begin))
    return tokens


def text(rng: random.Random, special: Sequence[str]) -> str:
    """Of every kind, also none, and with special tokens or parts of them."""
    said = content(rng)
    while rng.random() < 0.3:
        token, at = rng.choice(special), rng.randint(0, len(said))
        cut = rng.choice((0, 0, rng.randint(0, len(token))))
        said = said[:at] + rng.choice((token, token[cut:], token[:cut])) + said[at:]
    return said


def conversation(rng: random.Random, name: str, family: Family, special: Sequence[str]) -> list[Message]:
    messages: list[Message] = []
    if family.system and rng.random() < 0.4:
        messages.append({"role": "system", "content": text(rng, special)})
    for _ in range(rng.choice((1, 1, 2, 3, 9))):
        messages.append({"role": "user", "content": text(rng, special)})
        if family.tools and rng.random() < 0.2:
            messages.append({"role": "tool", "content": text(rng, special)})
        thought = f"<think>\n{text(rng, special)}{THOUGHT_ENDS}" if name in THINKING and rng.random() < 0.4 else ""
        answer = family.begins + text(rng, special) + rng.choice(("So.", "So. \n"))
        if not thought:
            answer = rng.choice((answer, answer, answer.removesuffix("So."), ""))
        messages.append({"role": "assistant", "content": thought + answer})
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["small", "SmolLM2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_of_random_conversations_are_those_of_a_second_implementation(name: str, vocabulary: str) -> None:
    two, rng = apart(name, vocabulary), random.Random(f"{name} {vocabulary}")
    spelled = [*two.special][-9:]
    for number in range(CONVERSATIONS // 2):
        messages = conversation(rng, name, two.family, spelled)
        variables = two.family.variables[number % len(two.family.variables)]
        rendered = two.ours.render(messages, **variables)
        assert (rendered.ids, rendered.mask) == expected(two, messages, variables), messages
        asked = expected(two, messages[:-1], {**variables, "add_generation_prompt": True})[0]
        assert two.ours.prompt(messages[:-1], **variables) == asked, messages
