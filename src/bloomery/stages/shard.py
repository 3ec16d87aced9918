"""The stage `shard`: documents and a tokenizer -> token files for training and for validation."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.errors import DataError
from bloomery.core.files import sha256_bytes
from bloomery.core.log import progress
from bloomery.data import document
from bloomery.data.holdout import is_held_out
from bloomery.shards import format
from bloomery.stages.config import Shard, Weight
from bloomery.tokenizer.tokenizer import Tokenizer

ENCODE_AT_ONCE = 256


@dataclass(frozen=True)
class Coded:
    id: str
    domain: str
    tokens: format.Tokens
    """The document's opening token, then its text."""


def run(config: Shard, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    train: dict[str, list[Coded]] = defaultdict(list)
    held: list[Coded] = []
    with document.Writer(out / "held-out") as writer, progress("shard", "documents") as meter:
        rows = document.read(inputs["dedup"] / "kept")
        for number, (row, coded) in enumerate(_encode(rows, tokenizer)):
            if is_held_out(row["text"], config.hold_out):
                held.append(coded)
                writer.write(row)
            else:
                train[row["domain"]].append(coded)
            meter.at(number)
    if not held:
        cure = "Raise shard.hold_out, or fetch more documents."
        raise DataError("no document was held out, so nothing could be validated", cure=cure)
    mix, shares = mixed(train, config)
    tokens = write_split(out, "train", mix, tokenizer, config.shard_tokens)
    held.sort(key=lambda coded: coded.id)
    held_tokens = write_split(out, "val", held, tokenizer, config.shard_tokens)
    return {
        "tokens": tokens,
        "documents": len(mix),
        "held_out_tokens": held_tokens,
        "held_out_documents": len(held),
        "tokenizer": tokenizer.hash,
        "mix": shares,
    }


def _encode(rows: Iterator[document.Row], tokenizer: Tokenizer) -> Iterator[tuple[document.Row, Coded]]:
    waiting: list[document.Row] = []
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32

    def flush() -> Iterator[tuple[document.Row, Coded]]:
        for row, ids in zip(waiting, tokenizer.encode_batch([row["text"] for row in waiting]), strict=True):
            yield row, Coded(row["id"], row["domain"], np.array([tokenizer.document_id, *ids], dtype=kind))

    for row in rows:
        waiting.append(row)
        if len(waiting) == ENCODE_AT_ONCE:
            yield from flush()
            waiting.clear()
    yield from flush()


def mixed(train: Mapping[str, Sequence[Coded]], config: Shard) -> tuple[list[Coded], dict[str, Any]]:
    """
    The documents of the mix, shuffled, and for each domain what was asked, reached and repeated.

    A domain gives its share of the tokens: all of its documents as often as they fit, then some of them once more,
    chosen by hash. Raises DataError for a weight whose domain has no documents.
    """
    sizes = {domain: sum(len(coded.tokens) for coded in some) for domain, some in train.items()}
    if not sizes:
        raise DataError("every document was held out, so nothing is left to train on", cure="Lower shard.hold_out.")
    weights = config.weights or tuple(Weight(domain=d, weight=s, max_epochs=1.0) for d, s in sorted(sizes.items()))
    for weight in weights:
        if not sizes.get(weight.domain):
            known = ", ".join(sorted(sizes)) or "none"
            raise DataError(f"no documents of domain {weight.domain!r} are left", cure=f"Domains here: {known}.")
    total = sum(weight.weight for weight in weights)
    largest = min(sizes[w.domain] * w.max_epochs * total / w.weight for w in weights)
    size = largest if config.tokens is None else config.tokens
    chosen: list[tuple[str, Coded]] = []
    report = {}
    for weight in weights:
        wanted = min(size * weight.weight / total, sizes[weight.domain] * weight.max_epochs)
        picked = _repeat(train[weight.domain], wanted, config.seed)
        chosen += picked
        reached = sum(len(coded.tokens) for _, coded in picked)
        report[weight.domain] = {
            "asked": round(weight.weight / total, 4),
            "tokens": reached,
            "epochs": round(reached / sizes[weight.domain], 3),
        }
    everything = sum(facts["tokens"] for facts in report.values())
    for facts in report.values():
        facts["share"] = round(facts["tokens"] / everything, 4)
    chosen.sort(key=lambda pair: pair[0])
    return [coded for _, coded in chosen], report


def _repeat(documents: Sequence[Coded], wanted: float, seed: int) -> list[tuple[str, Coded]]:
    """Documents, each with the key that shuffles it, until `wanted` tokens are there; whole documents only."""
    picked: list[tuple[str, Coded]] = []
    have, epoch = 0, 0
    while have < wanted:
        keyed = sorted(((sha256_bytes(f"{seed} {epoch} {coded.id}".encode()), coded) for coded in documents), key=_key)
        for key, coded in keyed:
            if have >= wanted:
                break
            picked.append((key, coded))
            have += len(coded.tokens)
        epoch += 1
    return picked


def _key(pair: tuple[str, Coded]) -> str:
    return pair[0]


def write_split(out: Path, split: str, documents: Sequence[Coded], tokenizer: Tokenizer, shard_tokens: int) -> int:
    """Write documents end to end into shards of about `shard_tokens`. Returns the tokens written."""
    total, number, waiting, size = 0, 0, list[Coded](), 0
    for place, coded in enumerate(documents):
        waiting.append(coded)
        size += len(coded.tokens)
        if size >= shard_tokens or place == len(documents) - 1:
            tokens, starts = format.concatenate([c.tokens for c in waiting], tokenizer.vocab_size)
            format.write(
                out / f"{split}-{number:05d}",
                tokens,
                vocab_size=tokenizer.vocab_size,
                starts=starts,
                tokenizer_hash=tokenizer.hash,
                facts={"document_id": tokenizer.document_id},
            )
            total, number, waiting, size = total + len(tokens), number + 1, [], 0
    return total
