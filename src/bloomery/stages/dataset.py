"""What the page of the stage `instruct` tells of its conversations before anything is trained on them."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.core.files import whole_file, write_json
from bloomery.data.conversations.conversation import Conversation
from bloomery.evaluation import charts
from bloomery.evaluation.conversation_report import page
from bloomery.stages.config import Instruct
from bloomery.tokenizer.chat import Rendered, Renderer

PAGE, NUMBERS = "report.html", "report.json"
SHOWN_TOKENS = 600


@dataclass(frozen=True, eq=False)
class Kept:
    """A conversation as it is learned from."""

    source: str
    id: str
    place: str
    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]

    @classmethod
    def of(cls, conversation: Conversation, rendered: Rendered) -> "Kept":
        ids, mask = np.array(rendered.ids, np.uint32), np.array(rendered.mask, np.uint8)
        return cls(conversation.source, conversation.id, conversation.place, ids, mask)


def write(
    out: Path, stats: Mapping[str, Any], kept: Mapping[str, Sequence[Kept]], renderer: Renderer, config: Instruct
) -> Path:
    """Write report.json and report.html; returns the page. It is the same for the same conversations."""
    talks = [talk for some in kept.values() for talk in some]
    report = {
        **{name: stats[name] for name in ("read", "conversations", "rejected", "dropped", "cut_at_a_turn")},
        **{name: stats[name] for name in ("rejected_by_reason", "dropped_by_reason", "template", "tokenizer")},
        "row_tokens": config.row_tokens,
        "splits": {split: stats[split] for split in kept},
        "sources": _by_source(stats, config, talks),
        "lengths": _lengths(talks, config.row_tokens),
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
        f"{train['tokens']:,} tokens in {train['rows']:,} rows, of them "
        f"{charts.percent(train['supervised'] / train['tokens'])} learned from, rows "
        f"{charts.percent(train['packing'])} full; {val['conversations']:,} held out. {page} shows them."
    )


def _by_source(stats: Mapping[str, Any], config: Instruct, talks: Sequence[Kept]) -> list[dict[str, Any]]:
    tokens, learned, rows = Counter[str](), Counter[str](), Counter[str]()
    for talk in talks:
        tokens[talk.source] += len(talk.ids)
        learned[talk.source] += int(talk.mask.sum())
        rows[talk.source] += 1
    settings = {source.name: source for source in config.read}
    listed = []
    for name, counts in stats["by_source"].items():
        said = settings.get(name)
        asked = {"license": said.license, "copies": said.copies, "cap": said.max_conversations} if said else {}
        sizes = {"in_rows": rows[name], "tokens": tokens[name], "supervised": learned[name]}
        share = learned[name] / tokens[name] if tokens[name] else None
        listed.append({"source": name, **counts, **sizes, "supervised_share": share, **asked})
    return listed


def _lengths(talks: Sequence[Kept], row_tokens: int) -> list[dict[str, int]]:
    """How many conversations have how many tokens, in steps of the root of two from 16 on; the last one is the row."""
    bounds, half_powers = [0], 8
    while (bound := round(2 ** (half_powers / 2))) < row_tokens - 1:
        bounds.append(bound)
        half_powers += 1
    bounds.append(row_tokens)
    counts, _ = np.histogram([len(talk.ids) for talk in talks], [bound + 0.5 for bound in bounds])
    return [
        {"from": low + 1, "to": high, "conversations": int(count)}
        for (low, high), count in zip(pairwise(bounds), counts, strict=True)
    ]


def _chosen(talks: Sequence[Kept], count: int) -> list[Kept]:
    """Some conversations by the hash of their ids, of as many sources as there are."""
    ranked: dict[str, list[Kept]] = {}
    unique = {(talk.source, talk.place): talk for talk in talks}.values()
    for talk in sorted(unique, key=lambda talk: hashlib.sha256(f"{talk.source} {talk.id}".encode()).digest()):
        ranked.setdefault(talk.source, []).append(talk)
    order = [(rank, number, talk) for number, some in enumerate(ranked.values()) for rank, talk in enumerate(some)]
    return [talk for _, _, talk in sorted(order, key=lambda one: one[:2])[:count]]


def _sample(talk: Kept, renderer: Renderer) -> dict[str, Any]:
    """A conversation in runs of ids that are learned from or not, special tokens alone."""
    names = {token["id"]: token["content"] for token in renderer.tokenizer.spec["added_tokens"] if token["special"]}
    runs: list[dict[str, Any]] = []
    ids, mask = talk.ids[:SHOWN_TOKENS].tolist(), talk.mask[:SHOWN_TOKENS].tolist()
    begin = 0
    for place in range(1, len(ids) + 1):
        same = place < len(ids) and mask[place] == mask[begin] and ids[place] not in names and ids[begin] not in names
        if not same:
            special = names.get(ids[begin])
            text = special if special is not None else renderer.tokenizer.decode(ids[begin:place])
            runs.append({"text": text, "learned": bool(mask[begin]), "special": special is not None})
            begin = place
    sizes = {"tokens": len(talk.ids), "supervised": int(talk.mask.sum()), "shown": len(ids)}
    return {"source": talk.source, "id": talk.id, "place": talk.place, **sizes, "runs": runs}
