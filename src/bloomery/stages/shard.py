"""
The stage `shard`: documents and a tokenizer -> token files for training and for validation.

    encode   each part of the corpus -> runs of tokens, and the validation documents
    mix      the domains' tokens -> how often each stream takes which documents
    place    each run -> its documents in the order in which the streams take them
    gather   all runs -> shards, each from its own stretch of the shuffled order

Encode, place and gather go through the engine, part by part. Neither the corpus nor its tokens are ever in memory.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bloomery.core.errors import DataError
from bloomery.core.log import info
from bloomery.core.records import read_manifest
from bloomery.data import documents as data_documents
from bloomery.data.documents import CUT, LARGEST_SHARE
from bloomery.data.executor import RECORDS, Part, check_workers, run_parts
from bloomery.hw.launcher import cores
from bloomery.shards import build, importers
from bloomery.shards.build import (
    ANNEAL,
    TRAIN,
    VAL,
    Chosen,
    Encoding,
    Gathering,
    Placing,
    Slice,
    encode_part,
    gather_held_out,
    gather_shard,
    place_part,
)
from bloomery.shards.config import MixShare, MixTarget, quotas, reached
from bloomery.stages.config import Shard
from bloomery.tokenizer.tokenizer import Tokenizer

VERSION = 2
RESUMES = True
preflight = check_workers

HELD_OUT_BYTES = 16 * 2**20
"""Text in a file of validation documents, in bytes."""
BYTES_PER_DOCUMENT = 100
"""Of memory, for the index entries of a document that is gathered."""


@dataclass(frozen=True)
class TokenRun:
    """A file of tokens, and what is in it."""

    name: str
    segments: Sequence[Sequence[Any]]

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment, _ in build.segments(self.segments))


@dataclass(frozen=True)
class Stream:
    """What becomes of a stream: how much of which domain, and what was asked for."""

    chosen: Mapping[str, Chosen]
    quotas: Mapping[str, MixShare]


def no_validation(config: Shard) -> DataError:
    what = f"with shard.val_fraction={config.val_fraction:g} no document is left for validation"
    more = f"Raise shard.val_fraction (up to {LARGEST_SHARE:g}), or f" if config.val_fraction < LARGEST_SHARE else "F"
    return DataError(what, where="shard", hint=f"{more}etch more documents; {CUT}")


def check_validation(config: Shard, folder: Path) -> None:
    """
    Raises DataError where none of the documents that a stage hands on is for validation: then none is later either.
    Reads up to the first that is.
    """
    if config.imported is not None or not config.val_fraction:
        return
    for path in data_documents.parts(data_documents.handed_on(folder)):
        for batch in data_documents.part_batches(path, ["text"]):
            if any(data_documents.is_held_out(text, config.val_fraction) for text in batch.column(0).to_pylist()):
                return
    raise no_validation(config)


def run(config: Shard, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Write train, anneal and val shards and held-out/. `inputs["dedup"]` is a folder with kept/."""
    tokenizer = Tokenizer.load(inputs["tokenizer"])
    if (imported := config.imported) is not None:
        return importers.adopt(
            imported.folder.expanduser(),
            out,
            tokenizer,
            document_id=imported.document_id,
            headerless=imported.headerless,
            tokenizer_file=Path(read_manifest(inputs["tokenizer"])["config"].get("path") or "").name,
        )
    budget = worker_bytes(config)
    encoding = Encoding(
        tokenizer=inputs["tokenizer"], val_fraction=config.val_fraction, seed=config.seed, run_bytes=budget // 4
    )
    files = data_documents.parts(data_documents.handed_on(inputs["dedup"]))
    parts = [Part(file.stem, str(file), file.stat().st_size) for file in files]
    records = run_parts(config.engine, encode_part, encoding, parts, out, what="encode")
    runs = [TokenRun(one["name"], one["segments"]) for record in records for one in record["runs"]]
    train, held = (sizes(runs, held_out=which) for which in (False, True))
    if not held and config.val_fraction:
        raise no_validation(config)
    if not train:
        what = f"with shard.val_fraction={config.val_fraction:g} every document is for validation, and none to train on"
        raise DataError(what, where="shard", hint=f"Lower it, or fetch more documents; {CUT}")
    streams = plan(config, runs, train, held, out)
    placing = Placing(config.seed, {name: stream.chosen for name, stream in streams.items()})
    parts = [Part(one.name, one.segments, one.tokens) for one in runs]
    placed = run_parts(config.engine, place_part, placing, parts, out, what="place")
    gathering = Gathering(
        vocab_size=tokenizer.vocab_size,
        tokenizer_hash=tokenizer.hash,
        document_id=tokenizer.document_id,
        seed=config.seed,
        runs={
            name: [one.name for one, record in zip(runs, placed, strict=True) if name in record["taken"]]
            for name in streams
        },
        held_out=[f"work/{file.stem}.parquet" for file in files],
    )
    totals = {name: tally([record["taken"].get(name, {}) for record in placed]) for name in streams}
    parts = [part for name in streams for part in slices(config, gathering, name, totals[name], budget, out)]
    run_parts(config.engine, gather_shard, gathering, parts, out, what="gather", unit="shards")
    parts = list(held_out_files(gathering, out))
    run_parts(config.engine, gather_held_out, gathering, parts, out, what="held-out")
    for folder in ("work", RECORDS):  # the shards are there: what made them is not wanted any more
        shutil.rmtree(out / folder)
    encoders = sorted({record["encoder"] for record in records})
    return stats(streams, totals, train, tokenizer) | {"encoder": " and ".join(encoders)}


def external_inputs(config: Shard) -> str:
    """A hash of the token files that are taken in, for the stage's fingerprint; "" where none are."""
    return importers.digest(config.imported.folder.expanduser()) if config.imported is not None else ""


def worker_bytes(config: Shard) -> int:
    return config.memory_bytes // (config.engine.workers or cores())


def sizes(runs: Sequence[TokenRun], *, held_out: bool) -> dict[str, int]:
    """Tokens of each domain."""
    by_domain: Counter[str] = Counter()
    for token_run in runs:
        for segment, _ in build.segments(token_run.segments):
            if segment.held_out == held_out:
                by_domain[segment.domain] += segment.tokens
    return dict(sorted(by_domain.items()))


def plan(
    config: Shard, runs: Sequence[TokenRun], train: Mapping[str, int], held: Mapping[str, int], out: Path
) -> dict[str, Stream]:
    """What each stream takes of each domain. Raises DataError for a weight whose domain has no documents."""
    asks = [MixTarget(weight.domain, weight.weight, weight.max_epochs) for weight in config.weights]
    whole = [MixTarget(domain, size, 1.0) for domain, size in train.items()]
    mixes = {TRAIN: quotas(train, asks or whole, config.tokens)}
    if config.anneal is not None:
        asks = [MixTarget(weight.domain, weight.weight, weight.max_epochs) for weight in config.anneal.weights]
        tokens = config.anneal.tokens
        if config.anneal.fraction is not None:
            share = Fraction(config.anneal.fraction)
            tokens = round(sum(quota.target_tokens for quota in mixes[TRAIN].values()) * share / (1 - share))
        mixes[ANNEAL] = quotas(train, asks, max(1, tokens) if tokens is not None else None)
    streams = {}
    for name, mix in mixes.items():
        chosen = {domain: choose(config, runs, name, domain, quota, out) for domain, quota in mix.items()}
        streams[name] = Stream(chosen, mix)
        for domain, quota in mix.items():
            if quota.limited_by:
                missing = f"{float(quota.target_tokens):,.0f} of {float(quota.asked):,.0f} tokens"
                info(f"shard: {quota.limited_by} limits {domain!r} to {missing} in the {name} mix", "yellow")
    return streams | ({VAL: Stream(dict.fromkeys(held, Chosen(1, 0)), {})} if held else {})


def choose(config: Shard, runs: Sequence[TokenRun], stream: str, domain: str, quota: MixShare, out: Path) -> Chosen:
    """Which documents of a domain make up its quota: of the last epoch those that come first in its order."""

    def passes() -> Iterator[tuple[NDArray[np.uint64], NDArray[Any]]]:
        for token_run in runs:
            index = build.load(out / f"{token_run.name}.npy", build.INDEX)
            for segment, some in build.segments(token_run.segments):
                if not segment.held_out and segment.domain == domain:
                    mine = index[some]
                    yield build.keys(mine["id"], config.seed, stream, quota.epochs), mine["tokens"]

    return Chosen(quota.epochs, build.cuts(passes, [quota.rest])[0] if quota.rest else 0)


def tally(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """Documents and tokens of each domain, over all runs."""
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for by_domain in counts:
        for domain, (some, size) in by_domain.items():
            documents[domain] += some
            tokens[domain] += size
    return {domain: (documents[domain], tokens[domain]) for domain in sorted(tokens)}


def slices(
    config: Shard, gathering: Gathering, stream: str, total: Mapping[str, tuple[int, int]], budget: int, out: Path
) -> list[Part]:
    """
    The shards of a stream. Shard k holds the documents that begin from token k · shard_tokens on, and before the
    next shard's. Each is cut into pieces that the budget of a worker allows.
    """
    documents, tokens = (sum(pair[place] for pair in total.values()) for place in (0, 1))
    bytes_per_token = (2 if gathering.vocab_size <= 2**16 else 4) + BYTES_PER_DOCUMENT * documents / tokens
    most = budget // 4 / bytes_per_token
    firsts = range(0, tokens, config.shard_tokens)
    pieces = -(-min(config.shard_tokens, tokens) // int(max(1, most)))
    targets = [first + config.shard_tokens * piece // pieces for first in firsts for piece in range(pieces)]

    def passes() -> Iterator[tuple[NDArray[np.uint64], NDArray[Any]]]:
        for name in gathering.runs[stream]:
            table = build.load(out / f"{name}.{stream}.npy", build.PLACED)
            yield table["key"], table["tokens"]

    bounds = [*build.cuts(passes, targets), build.END]
    stretches = [bounds[place : place + pieces + 1] for place in range(0, len(bounds) - 1, pieces)]
    whole = [stretch for stretch in stretches if stretch[0] < stretch[-1]]  # one document may fill more than a shard
    size = tokens * 2 // len(whole)
    return [
        Part(f"{stream}-{number:05d}", Slice(stream, sorted(set(stretch)), number, len(whole)), size)
        for number, stretch in enumerate(whole)
    ]


def held_out_files(gathering: Gathering, out: Path) -> Iterator[Part]:
    """Files of validation documents, each with about as much text, in the order of the shards of `val`."""

    def passes() -> Iterator[tuple[NDArray[np.uint64], NDArray[Any]]]:
        for name in gathering.held_out:
            for batch in data_documents.part_batches(out / name, ["id", "text"]):
                yield build.held_out_keys(batch, gathering.seed)

    size = sum(int(lengths.sum()) for _, lengths in passes())
    cuts = build.cuts(passes, range(0, max(size, 1), HELD_OUT_BYTES))
    bounds = sorted({*cuts, build.END})
    for number, (low, high) in enumerate(pairwise(bounds)):
        yield Part(f"part-{number:05d}", Slice(VAL, [low, high], number, len(bounds) - 1), HELD_OUT_BYTES)


def stats(
    streams: Mapping[str, Stream],
    totals: Mapping[str, Mapping[str, tuple[int, int]]],
    train: Mapping[str, int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    documents, tokens = (
        {name: {domain: pair[index] for domain, pair in total.items()} for name, total in totals.items()}
        for index in (0, 1)
    )
    mixes = {
        name: reached(stream.quotas, train, tokens[name], documents[name])
        for name, stream in streams.items()
        if name != VAL
    }
    facts: dict[str, Any] = {
        "tokens": sum(tokens[TRAIN].values()),
        "documents": sum(documents[TRAIN].values()),
        "held_out_tokens": sum(tokens.get(VAL, {}).values()),
        "held_out_documents": sum(documents.get(VAL, {}).values()),
        "tokenizer": tokenizer.hash,
        "mix": mixes[TRAIN],
    }
    if ANNEAL in mixes:
        facts |= {"anneal_tokens": sum(tokens[ANNEAL].values()), "anneal_documents": sum(documents[ANNEAL].values())}
        facts["anneal"] = mixes[ANNEAL]
    return facts
