"""
What a model writes after a prompt, and the number or program in it.

A model that has learned conversations is asked in one; another goes on with the text. GSM8K's answers end with
"#### 18": the strict score looks for that, the flexible one takes the last number that was written.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.evaluation.shapes import Item
from bloomery.generate.engine import Engine
from bloomery.weights.huggingface import Loaded

AT_ONCE = 64
MARKED = re.compile(r"####\s*(-?[\d.,]+)")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
FENCED = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Writing:
    """How text is drawn."""

    max_tokens: int
    until: tuple[str, ...] = ()
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool | None = None
    """Whether the prompt is asked in a conversation. None: where the model has learned conversations."""


@dataclass(frozen=True)
class Written:
    texts: list[str]
    """One for each sample."""
    cut: bool
    """Whether the prompt was too long and lost its beginning."""


def write(loaded: Loaded, items: Sequence[Item], how: Writing, seen: Callable[[int], None]) -> list[Written]:
    """What follows each prompt, `how.samples` times. `seen` is told how many are done."""
    engine = Engine(loaded.model, loaded.tokenizer.vocab_size)
    chat = in_conversation(loaded, how)
    room = min(how.max_tokens, engine.context // 2)
    prompts = [_ids(loaded, item.prompts[0], chat, engine.context - room) for item in items]
    done: list[Written] = []
    for begin in range(0, len(items), AT_ONCE):
        some = prompts[begin : begin + AT_ONCE]
        drawn = _drawn(loaded, engine, [ids for ids, _ in some], items[begin : begin + AT_ONCE], how, room)
        for texts, (_, cut) in zip(drawn, some, strict=True):
            done.append(Written([cut_at(text, () if chat else how.until) for text in texts], cut))
        seen(len(done))
    return done


def in_conversation(loaded: Loaded, how: Writing) -> bool:
    return loaded.lineage.template is not None if how.chat is None else how.chat


def _ids(loaded: Loaded, prompt: str, chat: bool, most: int) -> tuple[list[int], bool]:
    """The prompt's ids, at most so many; where it is longer, its end counts."""
    ids = (
        loaded.renderer.prompt([{"role": "user", "content": prompt}])
        if chat
        else [loaded.tokenizer.document_id, *loaded.tokenizer.encode(prompt)]
    )
    return (ids, False) if len(ids) <= most else ([ids[0], *ids[1 - most :]], True)


def _drawn(
    loaded: Loaded, engine: Engine, prompts: Sequence[list[int]], items: Sequence[Item], how: Writing, room: int
) -> Iterator[list[str]]:
    """The samples of each prompt; where nothing is left to chance, one is drawn for all."""
    each = 1 if how.temperature == 0.0 else how.samples
    drawn = engine.draw(
        [ids for ids in prompts for _ in range(each)],
        [stable_seed(how.seed, item.row, number) for item in items for number in range(each)],
        max_tokens=room,
        stop_ids=frozenset({loaded.tokenizer.document_id, loaded.renderer.end_id}),
        temperature=how.temperature,
        top_p=how.top_p,
    )
    for begin in range(0, len(drawn), each):
        texts = [loaded.tokenizer.decode(one.ids) for one in drawn[begin : begin + each]]
        yield texts * (how.samples // each)


def stable_seed(*parts: int) -> int:
    """The same on every machine, and another for every row and sample."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def cut_at(text: str, until: Sequence[str]) -> str:
    """Up to the first of these that stands in it."""
    return text[: min((place for one in until if (place := text.find(one)) >= 0), default=len(text))]


def marked_number(text: str) -> Decimal | None:
    """The first number after ####."""
    found = MARKED.search(text)
    return as_number(found[1]) if found else None


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return as_number(found[-1]) if found else None


def as_number(text: str) -> Decimal | None:
    """Without dollar signs, thousands' commas, and the full stop that ends a sentence."""
    try:
        return Decimal(text.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None


def code(text: str) -> str:
    """The first fenced block, where there is one."""
    found = FENCED.search(text)
    return found[1] if found else text


def program(item: Item, text: str, *, chat: bool, begun: bool) -> str:
    """
    The code that was written, without its tests. Where the prompt is itself the beginning of the program (`begun`),
    it stands before; in a conversation, the code that was written may also be the whole function again.
    """
    written = code(text) if chat or not begun else text
    before = f"{item.prompts[0]}\n" if begun and chat else item.prompts[0] if begun else ""
    return before + written
