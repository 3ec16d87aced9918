"""The stage `instruct`: conversations -> packed rows of ids and loss masks, through the one renderer; and a page."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.files import whole_file
from bloomery.core.log import progress, say
from bloomery.data.conversations import filters, readers
from bloomery.data.conversations.config import SYNTHESIZE, TalkFiles
from bloomery.data.conversations.conversation import Conversation, Message, Rejected
from bloomery.data.conversations.filters import Decontaminate, Dropped, Filter
from bloomery.data.holdout import is_held_out
from bloomery.data.unpack import Problem
from bloomery.shards import format
from bloomery.shards import packed as shards
from bloomery.stages import dataset, decontaminate
from bloomery.stages.config import Instruct
from bloomery.stages.dataset import Kept
from bloomery.tokenizer.chat import Rendered, Renderer
from bloomery.tokenizer.templates import TEMPLATES
from bloomery.tokenizer.tokenizer import Tokenizer

REJECTED, DROPPED = "rejected.jsonl", "dropped.jsonl"


def digest(config: Instruct) -> str:
    """
    A hash of the contents of all files that are read, and of how conversations are written, for the stage's
    fingerprint. Raises DataError.
    """
    looked_in = [decontaminate.digest(one) for one in config.filters if isinstance(one, Decontaminate)]
    found = (readers.digest(config.read), *looked_in, TEMPLATES[config.template].hash)
    return " ".join(part for part in found if part)


def run(config: Instruct, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write train and val rows, what was rejected and dropped, and the page that tells of all of it.

    Raises DataError for sources that cannot be read, and where nothing is left to train or to validate on.
    """
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    renderer = Renderer(tokenizer, TEMPLATES[config.template])
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rejected, dropped = (stack.enter_context(whole_file(out / name, "w")) for name in (REJECTED, DROPPED))
        sorter = _Sorter(config, renderer, rejected, dropped)
        with progress("instruct", "conversations") as meter:
            found = chain(readers.conversations(config.read), written(inputs[SYNTHESIZE]))
            for number, one in enumerate(filters.sifted(looking(config.filters, scratch), sorter.understood(found))):
                meter.at(number)
                sorter.take(one)
    why = sorter.why(out)
    if not sorter.kept["train"]:
        cure = why or "Add conversations, or lower instruct.hold_out."
        raise DataError("no conversation is left to learn from", where="instruct", cure=cure)
    if not sorter.kept["val"]:
        cure = f"Raise instruct.hold_out, or add conversations. {why}".rstrip()
        raise DataError("no conversation was held out, so nothing could be validated", where="instruct", cure=cure)
    if why:
        say(f"instruct: {why}", "yellow")
    rows = {split: write_rows(out, split, some, renderer, config.row_tokens) for split, some in sorter.kept.items()}
    stats = {
        **sorter.counts(),
        "template": renderer.template.hash,
        "tokenizer": tokenizer.hash,
        **rows,
    }
    page = dataset.write(out, stats, sorter.kept, renderer, config)
    say(dataset.summary(stats, page))
    return stats


def looking(given: Sequence[Filter], scratch: Path) -> list[Filter]:
    """Filters, with the questions of tasks that some look for written into files below `scratch`."""
    found: list[Filter] = []
    for number, one in enumerate(given):
        if isinstance(one, Decontaminate):
            settings = decontaminate.sought(one, scratch / str(number))
            one = one.looking_in(settings.files, settings.fields)
        found.append(one)
    return found


def written(synthesize: Path) -> Iterator[Conversation | Rejected]:
    """The conversations that the stage `synthesize` left."""
    left = TalkFiles(kind="jsonl", name=SYNTHESIZE, path=synthesize / "conversations.jsonl", shape="messages")
    return readers.conversations([left])


@dataclass
class _Sorter:
    """Takes every conversation to where it belongs, and counts."""

    config: Instruct
    renderer: Renderer
    rejected: IO[str]
    dropped: IO[str]
    kept: dict[str, list[Kept]] = field(default_factory=lambda: {"train": [], "val": []})
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {"rejected": Counter(), "dropped": Counter()})
    by_source: dict[str, Counter[str]] = field(default_factory=dict)

    def understood(self, found: Iterator[Conversation | Rejected]) -> Iterator[Conversation]:
        """The conversations among items; what is none is written down."""
        for one in found:
            self._count(one.source, "read")
            if isinstance(one, Rejected):
                self._reject(one)
            else:
                yield one

    def take(self, one: Conversation | Dropped) -> None:
        if isinstance(one, Dropped):
            self._drop(one)
            return
        source = next((source for source in self.config.read if source.name == one.source), None)
        limit = source.max_answers if source else None
        fitted = fit(self.renderer, one.messages, self.config.row_tokens, limit)
        if isinstance(fitted, Problem):
            self._reject(Rejected(one.source, one.place, fitted, {"id": one.id, "messages": list(one.messages)}))
            return
        rendered, until = fitted
        self._count(one.source, "cut_at_a_turn", until < len(one.messages))
        # By what is left of it: two that were cut to the same turns must not be told apart.
        left = "\n".join(message["content"] for message in one.messages[:until])
        split = "val" if is_held_out(one.group or left, self.config.hold_out) else "train"
        kept = Kept.of(one, rendered)
        self._count(one.source, "conversations")
        self.kept[split] += [kept] * (source.copies if source and split == "train" else 1)

    def counts(self) -> dict[str, Any]:
        """Numbers of the whole, and by source; what was read is what was kept, rejected and dropped."""
        names = ("read", "conversations", "rejected", "dropped", "cut_at_a_turn")
        whole = sum(self.by_source.values(), Counter[str]())
        return {
            **{name: whole[name] for name in names},
            "by_source": {source: {name: found[name] for name in names} for source, found in self.by_source.items()},
            **{f"{name}_by_reason": dict(sorted(found.items())) for name, found in self.reasons.items()},
        }

    def why(self, out: Path) -> str:
        """Of what was rejected and dropped; "" where nothing was."""
        files = (out / REJECTED, out / DROPPED)
        told = (gone(name, found, file) for (name, found), file in zip(self.reasons.items(), files, strict=True))
        return " ".join(filter(None, told))

    def _reject(self, one: Rejected) -> None:
        self._count(one.source, "rejected")
        self.reasons["rejected"][one.problem.reason] += 1
        write_line(self.rejected, one.told)

    def _drop(self, one: Dropped) -> None:
        found, talk = one.finding, one.conversation
        self._count(talk.source, "dropped")
        self.reasons["dropped"][found.reason] += 1
        told = {"source": talk.source, "place": talk.place, "id": talk.id, "reason": found.reason, "value": found.value}
        write_line(self.dropped, {**told, "what": found.what, "messages": list(talk.messages)})

    def _count(self, source: str, name: str, number: int = 1) -> None:
        self.by_source.setdefault(source, Counter())[name] += number


def gone(name: str, reasons: Counter[str], file: Path) -> str:
    """How many were rejected, or whatever `name` says, for which reasons, and where each stands; "" where none was."""
    listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"{reasons.total()} {name} ({listed}): {file} says of each where it stands and why." if reasons else ""


def write_line(file: IO[str], line: Mapping[str, Any]) -> None:
    """A line of JSON."""
    text = json.dumps(line, ensure_ascii=False, default=str)
    # A row may hold what no UTF-8 can: half a surrogate pair, which is why it is here.
    file.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def fit(
    renderer: Renderer, messages: Sequence[Message], row_tokens: int, max_answers: int | None = None
) -> tuple[Rendered, int] | Problem:
    """The conversation, or as many messages of its beginning as fit into a row and end in an answer, and how many."""
    if what := renderer.trouble(messages):
        return Problem("not_in_the_template", 0, what)
    answers = [place for place, message in enumerate(messages, 1) if message["role"] == "assistant"][:max_answers]
    if not answers:
        return Problem("nothing_to_learn", 0, "no message is the assistant's")
    fitting, too_long = 0, len(answers) + 1
    best: Rendered | None = None
    tried = len(answers)
    while fitting + 1 < too_long:  # more messages never make fewer tokens
        rendered = renderer.render(list(messages[: answers[tried - 1]]))
        if len(rendered.ids) <= row_tokens:
            fitting, best = tried, rendered
        else:
            too_long = tried
        tried = (fitting + too_long) // 2
    if best is None:
        return Problem("too_long", 0, f"its first answer does not end within {row_tokens} tokens")
    return best, answers[fitting - 1]


def write_rows(
    out: Path, split: str, talks: Sequence[Kept | Rendered], renderer: Renderer, row_tokens: int
) -> dict[str, Any]:
    """Pack conversations into rows, pad these, and write them as one shard. Returns what is in it."""
    packed = shards.write(
        out / f"{split}-00000",
        [[talk] for talk in talks],
        tokenizer=renderer.tokenizer,
        row_tokens=row_tokens,
        facts={"template": renderer.template.hash, "template_name": renderer.template.name},
    )
    return {
        "conversations": len(talks),
        "rows": len(packed.rows),
        "tokens": packed.tokens,
        "supervised": packed.supervised,
        "packing": packed.full(row_tokens),
    }


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message of the conversations that `run` left to train on, wherever they came from, as they were cut."""
    for path in format.names(folder, "train"):
        tokens: NDArray[Any] = format.read(path, tokenizer_hash=tokenizer.hash).tokens
        starts = np.flatnonzero(np.isin(tokens, list(tokenizer.special_ids)))
        for message in np.split(tokens, starts):
            if len(message) > 1:
                yield tokenizer.decode(message.tolist())
