"""
Runs to shards: each shard takes its documents from all runs, in the order of their keys, a piece of memory at a time.

`place_part` sorts what a stream takes of one run; `gather_shard` writes one shard, and `gather_held_out` one file of
held-out documents. Each is a part of its own to the engine, and each depends on nothing that the machine decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bloomery.data import document
from bloomery.data.engine import Part
from bloomery.shards import format, shuffle
from bloomery.shards.encode import VAL, Segment
from bloomery.shards.shuffle import Chosen


@dataclass(frozen=True)
class Placing:
    """What every stream takes of every domain. Held-out documents are the stream `val`'s, and no other's."""

    seed: int
    streams: Mapping[str, Mapping[str, Chosen]]


def place_part(config: Placing, part: Part, out: Path) -> dict[str, Any]:
    """
    Sort what the streams take of the run `part.name`, whose segments are `part.given`: work/NAME.STREAM.npy (PLACED).

    The record says for each stream how many documents and tokens of each domain it takes.
    """
    index = shuffle.load(out / f"{part.name}.npy", shuffle.INDEX)
    starts = np.cumsum(index["tokens"], dtype=np.int64) - index["tokens"]
    tables: dict[str, list[NDArray[Any]]] = {}
    taken: dict[str, dict[str, list[int]]] = {}
    for segment, some in segments(part.given):
        for stream, domains in config.streams.items():
            if segment.held_out != (stream == VAL) or segment.domain not in domains:
                continue
            chosen = domains[segment.domain]
            table = shuffle.placed(index[some], starts[some], config.seed, stream, chosen)
            tables.setdefault(stream, []).append(table)
            taken.setdefault(stream, {})[segment.domain] = [len(table), int(table["tokens"].sum(dtype=np.int64))]
    names = []
    for stream, some_tables in tables.items():
        names.append(f"{part.name}.{stream}.npy")
        shuffle.save(out / names[-1], shuffle.in_order(np.concatenate(some_tables)))
    return {"files": names, "taken": taken}


def segments(listed: Sequence[Sequence[Any]]) -> Iterator[tuple[Segment, slice]]:
    """The segments of a run's record, each with its place in the index."""
    place = 0
    for fields in listed:
        segment = Segment(*fields)
        yield segment, slice(place, place + segment.documents)
        place += segment.documents


@dataclass(frozen=True)
class Gathering:
    """What all shards have in common."""

    vocab_size: int
    tokenizer_hash: str
    document_id: int
    seed: int
    runs: Mapping[str, Sequence[str]]
    """Stream -> names of the runs that it takes documents from."""
    held_out: Sequence[str] = ()
    """Files of held-out documents."""


class Slice(NamedTuple):
    """Of which keys a shard or file is made."""

    stream: str
    cuts: Sequence[int]
    """Ascending; from one to the next is what is held in memory at once."""
    number: int
    of: int
    """How many of its kind there are."""


def gather_shard(config: Gathering, part: Part, out: Path) -> dict[str, Any]:
    """Write the shard `part.name` of the documents whose keys lie in the Slice `part.given`."""
    given = Slice(*part.given)
    low, high = given.cuts[0], given.cuts[-1]
    num_tokens = 0
    for name in config.runs[given.stream]:
        table = shuffle.between(shuffle.load(out / f"{name}.{given.stream}.npy", shuffle.PLACED), low, high)
        num_tokens += int(table["tokens"].sum(dtype=np.int64))
    index = format.write_pieces(
        out / part.name,
        _pieces(config, given, out),
        num_tokens=num_tokens,
        vocab_size=config.vocab_size,
        tokenizer_hash=config.tokenizer_hash,
        facts={"document_id": config.document_id, "shard": given.number, "shards": given.of},
    )
    facts = {name: index[name] for name in ("tokens", "documents")}
    return {"files": [f"{part.name}.bin", f"{part.name}.json"], **facts, "sha256": index["sha256"]}


def _pieces(config: Gathering, given: Slice, out: Path) -> Iterator[tuple[NDArray[np.integer[Any]], NDArray[np.int64]]]:
    """Tokens of a shard, and where documents begin in them."""
    for low, high in pairwise(given.cuts):
        pool, table = _pool(config, given.stream, low, high, out)
        order = np.lexsort((table["tie"], table["key"]))
        for some in np.array_split(order, max(1, pool.nbytes // BLOCK_BYTES)):
            lengths = table["tokens"][some].astype(np.int64)
            yield shuffle.collect(pool, table["start"][some], lengths), np.cumsum(lengths) - lengths
        del pool, table  # before the next ones are made


BLOCK_BYTES = 2**22


def _pool(config: Gathering, stream: str, low: int, high: int, out: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """All documents of a piece, run by run, each run's in the order in which they lie there; starts are of the pool."""
    kind = np.dtype("<u2" if config.vocab_size <= 2**16 else "<u4")
    tables: list[tuple[str, NDArray[Any]]] = [("", np.zeros(0, dtype=shuffle.PLACED))]
    for name in config.runs[stream]:
        table = shuffle.between(shuffle.load(out / f"{name}.{stream}.npy", shuffle.PLACED), low, high)
        if len(table):
            tables.append((name, table[np.argsort(table["start"], kind="stable")]))
    whole = np.concatenate([table for _, table in tables])
    ends = np.cumsum(whole["tokens"], dtype=np.int64)
    pool = np.empty(int(ends[-1]) if len(ends) else 0, dtype=kind)
    place = 0
    for name, table in tables[1:]:
        size = int(table["tokens"].sum(dtype=np.int64))
        tokens = np.memmap(out / f"{name}.bin", dtype=kind, mode="r")
        shuffle.collect(tokens, table["start"], table["tokens"], pool[place : place + size])
        del tokens  # the pages of one run are enough
        place += size
    whole["start"] = ends - whole["tokens"]
    return pool, whole


def gather_held_out(config: Gathering, part: Part, out: Path) -> dict[str, Any]:
    """Write the held-out documents whose keys lie in the Slice `part.given`, in their order, as `part.name`."""
    given = Slice(*part.given)
    batches: list[pa.RecordBatch] = []
    keys: list[NDArray[Any]] = [np.zeros(0, dtype=np.uint64)]
    for name in config.held_out:
        for batch in document.part_batches(out / name):
            when, _ = held_out_keys(batch, config.seed)
            low, high = (np.uint64(min(cut, shuffle.END - 1)) for cut in given.cuts)
            mine = (when >= low) & ((when < high) | (given.cuts[1] >= shuffle.END))
            batches.append(batch.filter(pa.array(mine)))
            keys.append(when[mine])
    file = f"held-out/{part.name}.parquet"
    with document.PartWriter(out / file) as writer:
        if batches:
            order = np.argsort(np.concatenate(keys), kind="stable")
            table = pa.Table.from_batches(batches).take(pa.array(order))
            for batch in table.combine_chunks().to_batches(max_chunksize=document.ROWS_PER_BATCH):
                writer.write_batch(batch)
    return {"files": [file], "documents": writer.rows}


def held_out_keys(batch: pa.RecordBatch, seed: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """When held-out documents come, as in the shards of `val`, and how many bytes each has with its end."""
    ids, _ = shuffle.hashed(batch.column("id").to_pylist())
    sizes = np.asarray(pc.binary_length(batch.column("text")), dtype=np.int64) + 1
    return shuffle.keys(ids, seed, VAL, 0), sizes
