"""
The stage `instruct`: pack conversations into sequences with loss masks, and report on them.

The output holds token IDs and loss masks from the one chat template that training, evaluation and chat share. The
page describes the conversations before anything is trained on them.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bloomery.core.chat import Message
from bloomery.core.errors import DataError
from bloomery.core.io import whole_file, write_json
from bloomery.core.log import info, progress
from bloomery.core.pipeline import resolve
from bloomery.data.chat import filters, readers
from bloomery.data.chat.filters import ChatFilter, DecontaminateChats, DroppedConversation
from bloomery.data.chat.formats import Conversation, RejectedRow
from bloomery.data.chat.readers import SYNTHESIZE, ChatFiles
from bloomery.data.documents import is_held_out
from bloomery.data.executor import Counts
from bloomery.data.readers.bytes import ReadError
from bloomery.evaluation import charts
from bloomery.evaluation.report import page
from bloomery.shards import build, format
from bloomery.stages import decontaminate
from bloomery.stages.config import Instruct, start_digest
from bloomery.tokenizer.chat_template import TEMPLATES, ChatRenderer, Rendered, Renderer, special_tokens
from bloomery.tokenizer.jinja_template import JinjaRenderer
from bloomery.tokenizer.tokenizer import Tokenizer

VERSION = 6

PAGE, NUMBERS = "report.html", "report.json"
SHOWN_TOKENS = 600
TOOLS_AS_TEXT = (
    "the model's chat template has no form for tools and their calls, so conversations with tools are trained with "
    "both as JSON text"
)
COUNTED = ("read", "conversations", "rejected", "dropped", "cut_at_a_turn")
"""What is counted of a source."""


@dataclass(frozen=True, eq=False)
class TrainingConversation:
    """A conversation as token IDs, and the mask of those in the loss."""

    source: str
    id: str
    location: str
    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]

    @classmethod
    def of(cls, conversation: Conversation, rendered: Rendered) -> "TrainingConversation":
        ids, mask = np.array(rendered.ids, np.uint32), np.array(rendered.mask, np.uint8)
        return cls(conversation.source, conversation.id, conversation.location, ids, mask)


def write(
    out: Path,
    stats: Mapping[str, Any],
    kept: Mapping[str, Sequence[TrainingConversation]],
    renderer: ChatRenderer,
    config: Instruct,
) -> Path:
    """Write report.json and report.html; returns the page. It is the same for the same conversations."""
    talks = [talk for some in kept.values() for talk in some]
    report = {
        **{name: stats[name] for name in COUNTED},
        **{name: stats[name] for name in ("rejected_by_reason", "dropped_by_reason", "template", "tokenizer")},
        "sequence_length": config.sequence_length,
        "splits": {split: stats[split] for split in kept},
        "sources": _by_source(stats, config, talks),
        "lengths": _lengths(talks, config.sequence_length),
        "samples": [_sample(talk, renderer) for talk in _chosen(kept["train"], config.samples)],
    }
    write_json(out / NUMBERS, report)
    with whole_file(out / PAGE, "w") as file:
        file.write(page(report))
    return out / PAGE


def summary(stats: Mapping[str, Any], page: Path) -> str:
    """One line for the terminal: the main numbers, and where the page is."""
    train, val = stats["train"], stats["val"]
    return (
        f"instruct: {stats['conversations']:,} conversations of {stats['read']:,} read "
        f"({stats['rejected']:,} rejected, {stats['dropped']:,} dropped); "
        f"packed {train['tokens']:,} tokens into {train['rows']:,} sequences (loss on "
        f"{charts.percent(train['supervised'] / train['tokens'])} of tokens, "
        f"{charts.percent(train['packing'])} full); {val['conversations']:,} for validation. {page} shows them."
    )


def _by_source(
    stats: Mapping[str, Any], config: Instruct, talks: Sequence[TrainingConversation]
) -> list[dict[str, Any]]:
    tokens, learned, rows = Counter[str](), Counter[str](), Counter[str]()
    for talk in talks:
        tokens[talk.source] += len(talk.ids)
        learned[talk.source] += int(talk.mask.sum())
        rows[talk.source] += 1
    settings = {source.name: source for source in config.read}
    listed = []
    for name, counts in stats["by_source"].items():
        said = settings.get(name)
        asked = {"license": said.license, "copies": said.repeat, "cap": said.max_conversations} if said else {}
        sizes = {"in_rows": rows[name], "tokens": tokens[name], "supervised": learned[name]}
        share = learned[name] / tokens[name] if tokens[name] else None
        listed.append({"source": name, **counts, **sizes, "supervised_share": share, **asked})
    return listed


def _lengths(talks: Sequence[TrainingConversation], sequence_length: int) -> list[dict[str, int]]:
    """How many conversations have how many tokens, in steps of the root of two from 16 on; the last one is the row."""
    bounds, half_powers = [0], 8
    while (bound := round(2 ** (half_powers / 2))) < sequence_length - 1:
        bounds.append(bound)
        half_powers += 1
    bounds.append(sequence_length)
    counts, _ = np.histogram([len(talk.ids) for talk in talks], [bound + 0.5 for bound in bounds])
    return [
        {"from": low + 1, "to": high, "conversations": int(count)}
        for (low, high), count in zip(pairwise(bounds), counts, strict=True)
    ]


def _chosen(talks: Sequence[TrainingConversation], count: int) -> list[TrainingConversation]:
    """Some conversations by the hash of their ids, of as many sources as there are."""
    ranked: dict[str, list[TrainingConversation]] = {}
    unique = {(talk.source, talk.location): talk for talk in talks}.values()
    for talk in sorted(unique, key=lambda talk: hashlib.sha256(f"{talk.source} {talk.id}".encode()).digest()):
        ranked.setdefault(talk.source, []).append(talk)
    order = [(rank, number, talk) for number, some in enumerate(ranked.values()) for rank, talk in enumerate(some)]
    return [talk for _, _, talk in sorted(order, key=lambda entry: entry[:2])[:count]]


def _sample(talk: TrainingConversation, renderer: ChatRenderer) -> dict[str, Any]:
    """A conversation in runs of token IDs, in the loss or not, with each special token alone."""
    names = {token["id"]: token["content"] for token in renderer.tokenizer.outline["added_tokens"] if token["special"]}
    runs: list[dict[str, Any]] = []
    ids, mask = talk.ids[:SHOWN_TOKENS].tolist(), talk.mask[:SHOWN_TOKENS].tolist()
    begin = 0
    for index in range(1, len(ids) + 1):
        same = index < len(ids) and mask[index] == mask[begin] and ids[index] not in names and ids[begin] not in names
        if not same:
            special = names.get(ids[begin])
            text = special if special is not None else renderer.tokenizer.decode(ids[begin:index])
            runs.append({"text": text, "learned": bool(mask[begin]), "special": special is not None})
            begin = index
    sizes = {"tokens": len(talk.ids), "supervised": int(talk.mask.sum()), "shown": len(ids)}
    return {"source": talk.source, "id": talk.id, "place": talk.location, **sizes, "runs": runs}


REJECTED, DROPPED = "rejected.jsonl", "dropped.jsonl"


def external_inputs(config: Instruct) -> str:
    """
    A hash of the contents of all files that are read, and of how conversations are written, for the stage's
    fingerprint. Raises DataError.
    """
    looked_in = [decontaminate.external_inputs(one) for one in config.filters if isinstance(one, DecontaminateChats)]
    written = [start_digest(config)]
    if config.start_from is None or config.chat_template is not None:
        written.append(TEMPLATES[config.chat_template or "bloomery"].hash)
    hashes = (readers.digest(config.read), *looked_in, *written)
    return " ".join(part for part in hashes if part)


def run(config: Instruct, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write train and val rows, what was rejected and dropped, and the page that tells of all of it.

    Raises DataError for sources that cannot be read, and where nothing is left to train or to validate on.
    """
    if config.start_from is None:
        renderer: ChatRenderer = Renderer(
            Tokenizer.load(inputs["tokenizer"]), TEMPLATES[config.chat_template or "bloomery"]
        )
    else:
        model = resolve("bloomery.weights.locate:locate_model")(config.start_from.expanduser())
        renderer = renderer_of(model, config.chat_template)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rejected, dropped = (stack.enter_context(whole_file(out / name, "w")) for name in (REJECTED, DROPPED))
        sorter = _ConversationSorter(config, renderer, rejected, dropped)
        with progress("instruct", "conversations") as meter:
            items = chain(readers.conversations(config.read), written(inputs[SYNTHESIZE]))
            for number, conversation in enumerate(
                filters.sifted(looking(config.filters, scratch), sorter.understood(items))
            ):
                meter.at(number)
                sorter.take(conversation)
    why = sorter.why(out)
    if not sorter.kept["train"]:
        hint = why or "Add conversations, or lower instruct.val_fraction."
        raise DataError("no conversations are left to train on", where="instruct", hint=hint)
    if not sorter.kept["val"]:
        hint = f"Raise instruct.val_fraction, or add conversations. {why}".rstrip()
        raise DataError("no conversations are left for validation", where="instruct", hint=hint)
    if why:
        info(f"instruct: {why}", "yellow")
    rows = {
        split: write_rows(out, split, some, renderer, config.sequence_length) for split, some in sorter.kept.items()
    }
    stats = {**sorter.counts(), "template": renderer.hash, "tokenizer": renderer.tokenizer.hash, **rows}
    page = write(out, stats, sorter.kept, renderer, config)
    info(summary(stats, page))
    return stats


def renderer_of(model: Path, template: str | None) -> ChatRenderer:
    """
    How the conversations of a model are written: in its own template, or in one of TEMPLATES. A folder of transformers
    and a GGUF file get the special tokens that their tokenizer lacks. Raises DataError for other models that lack
    them, and where a model has no template and none is named.
    """
    words = resolve("bloomery.weights.hf:language")(model)
    if template is None:
        if words.chat is None:
            hint = f"Set instruct.chat_template to one of {', '.join(TEMPLATES)}."
            raise DataError("the model has no chat template", where=str(model), hint=hint)
        chat: ChatRenderer = words.chat
        return chat
    tokenizer = words.tokenizer.promoted(TEMPLATES[template].special)
    if missing := lacking(tokenizer, template):
        if any((model / name).exists() for name in ("bloomery.json", "adapter_config.json")):
            what = f"its tokenizer lacks {', '.join(missing)} of the chat template {template!r}"
            hint = (
                "Remove instruct.chat_template, or set a template whose tokens it has. "
                "Bloomery adds tokens only to transformers folders and GGUF files."
            )
            raise DataError(what, where=str(model), hint=hint)
        info(f"instruct: the tokenizer lacks {', '.join(missing)}; the model gets a row for each", "yellow")
        rows = resolve("bloomery.weights.hf:config_of")(model)[1]
        tokenizer = resolve("bloomery.weights.hf:tokenizer_of")(model, rows, special_tokens(template))[0]
    return Renderer(tokenizer, TEMPLATES[template])


def lacking(tokenizer: Tokenizer, template: str) -> list[str]:
    """The special tokens of a template that a tokenizer does not have."""
    return [name for name in TEMPLATES[template].special if not tokenizer.holds(name)]


def template_facts(renderer: ChatRenderer) -> dict[str, str]:
    """What rows say of the template that they are written in."""
    return {"template": renderer.hash, "template_name": renderer.name, "template_text": renderer.source}


def looking(chat_filters: Sequence[ChatFilter], scratch: Path) -> list[ChatFilter]:
    """Filters, with the questions of tasks that some look for written into files below `scratch`."""
    resolved: list[ChatFilter] = []
    for number, chat_filter in enumerate(chat_filters):
        if isinstance(chat_filter, DecontaminateChats):
            settings = decontaminate.sought(chat_filter, scratch / str(number))
            chat_filter = chat_filter.looking_in(settings.files, settings.fields)
        resolved.append(chat_filter)
    return resolved


def written(synthesize: Path) -> Iterator[Conversation | RejectedRow]:
    """The conversations that the stage `synthesize` left."""
    left = ChatFiles(kind="jsonl", name=SYNTHESIZE, path=synthesize / "conversations.jsonl", shape="messages")
    return readers.conversations([left])


@dataclass
class _ConversationSorter:
    """Takes every conversation to where it belongs, and counts."""

    config: Instruct
    renderer: ChatRenderer
    rejected: IO[str]
    dropped: IO[str]
    kept: dict[str, list[TrainingConversation]] = field(default_factory=lambda: {"train": [], "val": []})
    by_source: Counts = field(default_factory=lambda: Counts(*COUNTED))
    reasons: Counts = field(default_factory=Counts)
    """Of what was rejected, and of what was dropped."""
    told_of_tools: bool = False

    def understood(self, items: Iterator[Conversation | RejectedRow]) -> Iterator[Conversation]:
        """The conversations among items; what is none is written down."""
        for item in items:
            self.by_source.add(item.source, {"read": 1})
            if isinstance(item, RejectedRow):
                self._reject(item)
            else:
                yield item

    def take(self, conversation: Conversation | DroppedConversation) -> None:
        if isinstance(conversation, DroppedConversation):
            self._drop(conversation)
            return
        source = next((source for source in self.config.read if source.name == conversation.source), None)
        limit = source.max_turns if source else None
        use, messages = conversation.tool_use, conversation.messages
        tools: list[dict[str, Any]] | None = None
        if use is not None and isinstance(self.renderer, JinjaRenderer):
            if self.renderer.writes_tools:
                messages, tools = use.messages, use.tools
            elif not self.told_of_tools:
                self.told_of_tools = True
                info(f"instruct: {TOOLS_AS_TEXT}", "yellow")
        fitted = fit(self.renderer, messages, self.config.sequence_length, limit, tools=tools)
        if isinstance(fitted, ReadError):
            self._reject(
                RejectedRow(
                    conversation.source,
                    conversation.location,
                    fitted,
                    {"id": conversation.id, "messages": list(conversation.messages)},
                )
            )
            return
        rendered, until = fitted
        # By the messages that are left: conversations cut to the same turns must be in the same split.
        left = "\n".join(message["content"] for message in messages[:until])
        split = "val" if is_held_out(conversation.group or left, self.config.val_fraction) else "train"
        kept = TrainingConversation.of(conversation, rendered)
        self.by_source.add(conversation.source, {"conversations": 1, "cut_at_a_turn": until < len(messages)})
        self.kept[split] += [kept] * (source.repeat if source and split == "train" else 1)

    def counts(self) -> dict[str, Any]:
        """Numbers of the whole, and by source; what was read is what was kept, rejected and dropped."""
        total = self.by_source.total()
        return {
            **{name: total[name] for name in COUNTED},
            "by_source": self.by_source.to_json(sort_groups=False),
            **{f"{name}_by_reason": dict(sorted(self.reasons[name].items())) for name in ("rejected", "dropped")},
        }

    def why(self, out: Path) -> str:
        """Of what was rejected and dropped; "" where nothing was."""
        files = {"rejected": out / REJECTED, "dropped": out / DROPPED}
        return " ".join(filter(None, (gone(name, self.reasons[name], file) for name, file in files.items())))

    def _reject(self, row: RejectedRow) -> None:
        self.by_source.add(row.source, {"rejected": 1})
        self.reasons.add("rejected", {row.problem.reason: 1})
        write_line(self.rejected, row.record)

    def _drop(self, dropped: DroppedConversation) -> None:
        finding, talk = dropped.finding, dropped.conversation
        self.by_source.add(talk.source, {"dropped": 1})
        self.reasons.add("dropped", {finding.reason: 1})
        record = {
            "source": talk.source,
            "place": talk.location,
            "id": talk.id,
            "reason": finding.reason,
            "value": finding.value,
        }
        write_line(self.dropped, {**record, "what": finding.what, "messages": list(talk.messages)})


def gone(name: str, reasons: Counter[str], file: Path) -> str:
    """How many were rejected, or whatever `name` says, for which reasons, and where each stands; "" where none was."""
    listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return f"{reasons.total()} {name} ({listed}): {file} says of each where it stands and why." if reasons else ""


def write_line(file: IO[str], line: Mapping[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=False, default=str)
    # A row may hold what no UTF-8 can: half a surrogate pair, which is why it is here.
    file.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def fit(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    sequence_length: int,
    max_turns: int | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> tuple[Rendered, int] | ReadError:
    """
    The conversation, or as many messages of its beginning as fit into a row and end in an answer, and how many. `tools`
    are for a template that writes them.
    """
    if tools is not None and isinstance(renderer, JinjaRenderer):
        write: Callable[[list[Message]], Rendered] = partial(renderer.render, tools=tools)
        what = renderer.trouble(messages, tools=tools)
    else:
        what, write = renderer.trouble(messages), renderer.render
    if what:
        return ReadError("not_in_the_template", 0, what)
    answers = [place for place, message in enumerate(messages, 1) if message["role"] == "assistant"][:max_turns]
    if not answers:
        return ReadError("nothing_to_learn", 0, "it has no assistant message")
    longest: tuple[Rendered, int] | None = None
    try:
        longest = _longest(write, messages, answers, sequence_length, is_own=not isinstance(renderer, Renderer))
    except DataError as error:  # of a text that this template cannot hold
        return ReadError("not_in_the_template", 0, f"{error.where}: {error.what}")
    if longest is None:
        return ReadError("too_long", 0, f"its first answer does not end within {sequence_length} tokens")
    if not any(longest[0].mask):
        return ReadError("nothing_to_learn", 0, "no token of it is in the loss: its assistant says nothing that counts")
    return longest


def _longest(
    write: Callable[[list[Message]], Rendered],
    messages: Sequence[Message],
    answers: Sequence[int],
    sequence_length: int,
    *,
    is_own: bool,
) -> tuple[Rendered, int] | None:
    """
    The longest beginning that fits and ends at one of `answers`, with its number of messages. A model's own template
    may write earlier turns shorter, next to later ones. Raises DataError.
    """
    fitting, too_long, tried = 0, len(answers) + 1, len(answers)
    best: Rendered | None = None
    while fitting + 1 < too_long:
        rendered = write(list(messages[: answers[tried - 1]]))
        if len(rendered.ids) <= sequence_length:
            fitting, best = tried, rendered
        else:
            too_long = tried
        tried = (fitting + too_long) // 2
    if is_own:
        for number in range(len(answers) - 1, fitting, -1):
            rendered = write(list(messages[: answers[number - 1]]))
            if len(rendered.ids) <= sequence_length:
                return rendered, answers[number - 1]
    return None if best is None else (best, answers[fitting - 1])


def write_rows(
    out: Path,
    split: str,
    talks: Sequence[TrainingConversation | Rendered],
    renderer: ChatRenderer,
    sequence_length: int,
) -> dict[str, Any]:
    """Pack conversations into rows, pad these, and write them as one shard. Returns what is in it."""
    packed = build.write_packed(
        out / f"{split}-00000",
        [[talk] for talk in talks],
        tokenizer=renderer.tokenizer,
        sequence_length=sequence_length,
        facts=template_facts(renderer),
    )
    return {
        "conversations": len(talks),
        "rows": len(packed.rows),
        "tokens": packed.tokens,
        "supervised": packed.supervised,
        "packing": packed.full(sequence_length),
    }


def trained_on(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Every message of the conversations that `run` left to train on, wherever they came from, as they were cut."""
    for path in format.names(folder, "train"):
        tokens: NDArray[Any] = format.read(path, tokenizer_hash=tokenizer.hash).tokens
        starts = np.flatnonzero(np.isin(tokens, list(tokenizer.special_ids)))
        for message in np.split(tokens, starts):
            if len(message) > 1:
                yield tokenizer.decode(message.tolist())
