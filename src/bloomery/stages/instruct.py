"""The stage `instruct`: conversations -> packed rows of ids and loss masks, through the one renderer."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.errors import DataError
from bloomery.core.files import sha256_file, whole_file
from bloomery.core.log import progress, say
from bloomery.data import rows, worlds
from bloomery.data.holdout import is_held_out
from bloomery.shards import format
from bloomery.shards.packing import first_fit_decreasing
from bloomery.stages.config import Instruct, TalkFile, WorldTalks
from bloomery.tokenizer.chat import Message, Rendered, Renderer, as_message, trouble
from bloomery.tokenizer.templates import TEMPLATES
from bloomery.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Talk:
    source: str
    place: str
    """Where it stands: file and line, or its number."""
    messages: list[Message]


@dataclass(frozen=True)
class Refused:
    source: str
    place: str
    reason: str
    what: str


def digest(config: Instruct) -> str:
    """A hash of the contents of all files of conversations, for the stage's fingerprint. Raises DataError."""
    hashes = []
    for source in config.sources:
        if isinstance(source, TalkFile):
            try:
                hashes.append(sha256_file(source.path.expanduser()))
            except OSError as error:
                raise rows.unreadable(source.path, error) from None
    return " ".join(hashes)


def run(config: Instruct, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    renderer = Renderer(tokenizer, TEMPLATES[config.template])
    refused: list[Refused] = []
    splits: dict[str, list[Rendered]] = {"train": [], "val": []}
    counts: Counter[str] = Counter()
    cut = 0
    with progress("instruct", "conversations") as meter:
        for number, talk in enumerate(chain(read(config), written(inputs["synthesize"]))):
            meter.at(number)
            if isinstance(talk, Talk):
                fitted = fit(renderer, talk, config.row_tokens)
                if not isinstance(fitted, Refused):
                    rendered, until = fitted
                    cut += until < len(talk.messages)
                    # By what is left of it: two that were cut to the same turns must not be told apart.
                    left = "\n".join(message["content"] for message in talk.messages[:until])
                    splits["val" if is_held_out(left, config.hold_out) else "train"].append(rendered)
                    counts[talk.source] += 1
                    continue
                talk = fitted
            refused.append(talk)
    _write_refused(out / "refused.jsonl", refused)
    why = _why(refused, out / "refused.jsonl")
    if not splits["train"]:
        cure = why or "Add conversations, or lower instruct.hold_out."
        raise DataError("no conversation is left to learn from", where="instruct", cure=cure)
    if not splits["val"]:
        cure = f"Raise instruct.hold_out, or add conversations. {why}".rstrip()
        raise DataError("no conversation was held out, so nothing could be validated", where="instruct", cure=cure)
    if refused:
        say(f"instruct: {why}", "yellow")
    facts = {split: write_rows(out, split, some, renderer, config.row_tokens) for split, some in splits.items()}
    return {
        "conversations": sum(counts.values()),
        "refused": len(refused),
        "cut_at_a_turn": cut,
        "by_source": dict(counts),
        "refused_by_reason": dict(Counter(r.reason for r in refused)),
        "template": renderer.template.hash,
        "tokenizer": tokenizer.hash,
        **facts,
    }


def read(config: Instruct) -> Iterator[Talk | Refused]:
    """Every conversation of every source, or why it is none."""
    for source in config.sources:
        if isinstance(source, WorldTalks):
            for number, made in enumerate(worlds.conversations(source.seed, source.count)):
                yield Talk(source.name, str(number), [as_message(m) for m in made.messages()])
        else:
            yield from _read_file(source)


def written(synthesize: Path) -> Iterator[Talk | Refused]:
    """The conversations that the stage `synthesize` left."""
    yield from _read_file(TalkFile(name="synthesize", path=synthesize / "conversations.jsonl"))


def _read_file(source: TalkFile) -> Iterator[Talk | Refused]:
    for line, found in rows.jsonl(source.path.expanduser()):
        place = f"{source.path}:{line}"
        if isinstance(found, rows.Problem):
            yield Refused(source.name, place, found.reason, found.what)
        elif what := _trouble(found.get("messages")):
            yield Refused(source.name, place, "not_a_conversation", what)
        else:
            yield Talk(source.name, place, [as_message(m) for m in found["messages"]])


def _trouble(messages: Any) -> str:
    """Why a value is no list of messages, or ""."""
    if not isinstance(messages, list):
        return "there is no list `messages`"
    if not messages:
        return "the list `messages` is empty"
    for number, message in enumerate(messages, 1):
        if what := trouble(message):
            return f"message {number} {what}"
    return ""


def fit(renderer: Renderer, talk: Talk, row_tokens: int) -> tuple[Rendered, int] | Refused:
    """The conversation, or as many messages of its beginning as fit into a row and end in an answer, and how many."""
    if what := renderer.trouble(talk.messages):
        return Refused(talk.source, talk.place, "not_in_the_template", what)
    for until in range(len(talk.messages), 0, -1):
        if talk.messages[until - 1]["role"] != "assistant":
            continue
        rendered = renderer.render(talk.messages[:until])
        if len(rendered.ids) <= row_tokens:
            return rendered, until
    answered = any(message["role"] == "assistant" for message in talk.messages)
    if not answered:
        return Refused(talk.source, talk.place, "nothing_to_learn", "no message is the assistant's")
    return Refused(talk.source, talk.place, "too_long", f"its first answer does not end within {row_tokens} tokens")


def write_rows(out: Path, split: str, talks: Sequence[Rendered], renderer: Renderer, row_tokens: int) -> dict[str, Any]:
    """Pack conversations into rows, pad these, and write them as one shard. Returns what is in it."""
    tokenizer = renderer.tokenizer
    packed = first_fit_decreasing([len(talk.ids) for talk in talks], row_tokens)
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tokens = np.full((len(packed), row_tokens), tokenizer.pad_id, dtype=kind)
    mask = np.zeros((len(packed), row_tokens), dtype=np.uint8)
    starts: list[int] = []
    for row, indices in enumerate(packed):
        place = 0
        for index in indices:
            talk = talks[index]
            starts.append(row * row_tokens + place)
            tokens[row, place : place + len(talk.ids)] = talk.ids
            mask[row, place : place + len(talk.ids)] = talk.mask
            place += len(talk.ids)
    format.write(
        out / f"{split}-00000",
        tokens.reshape(-1),
        mask=mask.reshape(-1),
        vocab_size=tokenizer.vocab_size,
        starts=starts,
        tokenizer_hash=tokenizer.hash,
        layout="rows",
        facts={
            "document_id": tokenizer.document_id,
            "row_tokens": row_tokens,
            "template": renderer.template.hash,
            "template_name": renderer.template.name,
        },
    )
    filled = sum(len(talk.ids) for talk in talks)
    return {
        "conversations": len(talks),
        "rows": len(packed),
        "tokens": filled,
        "supervised": int(mask.sum()),
        "packing": round(filled / max(tokens.size, 1), 4),
    }


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message of the conversations that `run` left to train on, wherever they came from, as they were cut."""
    for path in format.names(folder, "train"):
        tokens = format.read(path, tokenizer_hash=tokenizer.hash).tokens
        starts = np.flatnonzero(np.isin(tokens, list(tokenizer.special_ids)))
        for message in np.split(tokens, starts):
            if len(message) > 1:
                yield tokenizer.decode(message.tolist())


def _why(refused: Sequence[Refused], path: Path) -> str:
    """How many conversations were refused, for which reasons, and where each stands; "" where none was."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(r.reason for r in refused).most_common())
    return f"{len(refused)} refused ({reasons}): {path} says of each where it stands and why." if refused else ""


def _write_refused(path: Path, refused: Sequence[Refused]) -> None:
    with whole_file(path, "w") as file:
        for one in refused:
            line = {"source": one.source, "place": one.place, "reason": one.reason, "what": one.what}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
