"""
Turn documents into shards: encode to runs of token IDs, shuffle by hash, gather into files.

A run is a file of token IDs with an index, sorted in the order in which it is mostly read. A part of the corpus
becomes one run, or several if the memory budget is small. In a run, training documents come first, then validation
documents. Each half is ordered by domain. Within a domain, documents come in the order in which the first epoch
takes them. So a stream that takes a domain once reads every run from its start to its end.

The shuffle needs no memory: the position of a document is a hash of seed, stream, epoch and its id.

    key(document, epoch) = splitmix64(first 64 bits of sha256(id) xor 64 bits of sha256("seed stream epoch"))

Documents come in the order of their keys, whatever files they lie in. The boundaries of a stream by tokens are found in
two passes over the keys with 2^16 sums. Nothing is sorted that is larger than one run or one part of the output.

Each shard takes its documents from all runs, in the order of their keys, a piece of memory at a time. One kind of task
sorts what a stream takes of one run. A second kind writes one shard. A third kind writes one file of validation
documents. Each is a part of its own for the executor, and none depends on anything that the machine decides.

Conversations are packed into sequences of one length, the longest first, so that little is padding (`write_packed`).

The three steps share one file because each reads the files of the step before it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bloomery.core.config import Bytes, Config, DiskPath, Seed, Share
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pc
from bloomery.core.io import splitmix64, whole_file
from bloomery.data import documents as data_documents
from bloomery.data.documents import is_held_out, spans_by_size
from bloomery.data.executor import Part
from bloomery.shards import format
from bloomery.tokenizer.fast_encode import Encoder
from bloomery.tokenizer.tokenizer import Tokenizer

SortKeys = NDArray[np.uint64]
END = 2**64
"""Behind every key."""
BIN_BITS = 16
BLOCK_TOKENS, SHORT = 2**16, 300

INDEX = np.dtype([("id", "<u8"), ("tie", "<u8"), ("tokens", "<u4")])
"""A document of a run: 128 bits of the hash of its id, and its length. In the run they stand in this order."""
PLACED = np.dtype([("key", "<u8"), ("tie", "<u8"), ("start", "<u8"), ("tokens", "<u4")])
"""A document of a stream: when it comes, and where in its run it lies."""


class Chosen(NamedTuple):
    """Which documents of a domain a stream takes."""

    epochs: int
    """How often it takes all of them."""
    until: int
    """Of one epoch more those with a smaller key; 0 for none."""


def keys(ids: SortKeys, seed: int, stream: str, epoch: int) -> SortKeys:
    """Sort keys of documents in an epoch of a stream: a bijection of the 64-bit hashes of document IDs."""
    salt = hashlib.sha256(f"{seed} {stream} {epoch}".encode()).digest()
    return splitmix64(ids ^ np.uint64(int.from_bytes(salt[:8], "little")))


def hashed(ids: Sequence[str]) -> tuple[SortKeys, SortKeys]:
    """128 bits of the sha256 of each id, as two columns."""
    digests = b"".join(hashlib.sha256(id.encode()).digest()[:16] for id in ids)
    both = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    return both[:, 0], both[:, 1]


def cuts(passes: Callable[[], Iterator[tuple[SortKeys, NDArray[Any]]]], targets: Sequence[int]) -> list[int]:
    """
    For each number of tokens the key of the first document that begins there or later, in the order of keys, or END.

    `passes` gives the keys and lengths (over 0) of all documents, in pieces of any order, and is called twice.
    `targets` ascend.
    """
    sums = np.zeros(2**BIN_BITS, dtype=np.int64)
    shift = np.uint64(64 - BIN_BITS)
    for some, lengths in passes():
        # Sums of float64 are exact below 2^53 tokens.
        here = np.bincount((some >> shift).astype(np.int64), weights=lengths, minlength=len(sums))
        sums += here.astype(np.int64)
    filled = np.append(np.flatnonzero(sums), len(sums))  # bins that hold documents, and the end
    before = np.append(np.cumsum(sums) - sums, sums.sum())[filled]
    # The document is in the last bin that begins before the target, or it is the first of the next bin.
    bins = np.maximum(np.searchsorted(before, targets, side="left") - 1, 0)
    kept_bins = filled[np.unique(np.minimum(np.concatenate([bins, bins + 1]), len(filled) - 1))]
    pieces: list[tuple[SortKeys, NDArray[Any]]] = [(np.zeros(0, np.uint64), np.zeros(0, np.int64))]
    for some, lengths in passes():
        chosen = np.isin((some >> shift).astype(np.int64), kept_bins)
        pieces.append((some[chosen], lengths[chosen]))
    sort_keys, lengths = (np.concatenate([piece[column] for piece in pieces]) for column in (0, 1))
    order = np.lexsort((lengths, sort_keys))
    sort_keys, lengths = sort_keys[order], lengths[order].astype(np.int64)
    places = (sort_keys >> shift).astype(np.int64)
    result = []
    for target, bin in zip(targets, bins.tolist(), strict=True):
        first, last = np.searchsorted(places, [filled[bin], filled[bin] + 1])
        starts = before[bin] + np.cumsum(lengths[first:last]) - lengths[first:last]
        at = int(first + np.searchsorted(starts, target, side="left"))
        result.append(int(sort_keys[at]) if at < len(sort_keys) else END)
    return result


def save(path: Path, table: NDArray[Any]) -> None:
    with whole_file(path) as file:
        np.save(file, table, allow_pickle=False)


def load(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An index that `save` wrote, memory-mapped where it holds something. Raises DataError for one that is torn."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        hint = "Remove its stage folder and run the recipe again."
        raise DataError(f"cannot be read: {error}", where=str(path), hint=hint) from None
    assert table.dtype == dtype, f"{path} holds {table.dtype}"
    array: NDArray[Any] = table
    return array


def placed(index: NDArray[Any], starts: NDArray[np.int64], seed: int, stream: str, chosen: Chosen) -> NDArray[Any]:
    """The documents of one domain of a run that a stream takes, once for every epoch in which it does; not sorted."""
    tables = []
    for epoch in range(chosen.epochs + bool(chosen.until)):
        when = keys(index["id"], seed, stream, epoch)
        table = np.empty(len(index), dtype=PLACED)
        table["key"], table["tie"], table["start"], table["tokens"] = when, index["tie"], starts, index["tokens"]
        whole = epoch < chosen.epochs or chosen.until >= END
        tables.append(table if whole else table[when < np.uint64(chosen.until)])
    return np.concatenate(tables) if tables else np.zeros(0, dtype=PLACED)


def in_order(table: NDArray[Any]) -> NDArray[Any]:
    """Documents sorted by key; equal keys by `tie`, the rest of the hash of the document id."""
    ordered: NDArray[Any] = table[np.lexsort((table["tie"], table["key"]))]
    return ordered


def between(table: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """The documents of a sorted table with keys from `low` to below `high`."""
    ends = [len(table) if key >= END else int(np.searchsorted(table["key"], np.uint64(key))) for key in (low, high)]
    documents: NDArray[Any] = table[ends[0] : ends[1]]
    return documents


def collect(
    tokens: NDArray[Any], starts: NDArray[Any], lengths: NDArray[Any], out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """
    Concatenate documents of `tokens`, given by their starts and lengths, in this order, into `out`.

    Neighbors are copied together. Long pieces are copied one by one. Short pieces are copied in blocks of tokens that
    fit in the CPU cache: at 40 tokens a document this is three times as fast.
    """
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if len(ends) else 0, dtype=tokens.dtype) if out is None else out
    opens = np.ones(len(starts), dtype=bool)
    opens[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    first = np.flatnonzero(opens)
    if not len(first):
        return out
    starts, places = starts[first], (ends - lengths)[first]
    lengths = np.diff(np.append(places, ends[-1]))
    step = max(1, BLOCK_TOKENS * len(lengths) // max(1, len(out)))
    if step > BLOCK_TOKENS // SHORT:
        for at in range(0, len(starts), step):
            some = slice(at, at + step)
            low, size = int(places[at]), int(lengths[some].sum())
            here = np.repeat(starts[some] - places[some] + low, lengths[some]) + np.arange(size)
            np.take(tokens, here, out=out[low : low + size])
    else:
        for start, position, length in zip(starts.tolist(), places.tolist(), lengths.tolist(), strict=True):
            out[position : position + length] = tokens[start : start + length]
    return out


TRAIN, ANNEAL, VAL = "train", "anneal", "val"
"""Streams of documents, and the names of their shards."""

DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 512, 4_000_000


class Encoding(Config):
    """What decides about runs."""

    tokenizer: DiskPath
    val_fraction: Share
    seed: Seed
    run_bytes: Bytes
    """Tokens in memory before a run is written. How the corpus is cut into runs changes no shard."""


class Segment(NamedTuple):
    """Neighbors in a run: documents of one domain, all for training or all for validation."""

    held_out: bool
    domain: str
    documents: int
    tokens: int


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> tuple[Tokenizer, Encoder]:
    """Once for all the parts of a process: the encoder is checked before its first text."""
    tokenizer = Tokenizer.load(folder)
    return tokenizer, Encoder(tokenizer)


def encode_part(config: Encoding, chunk: Part, out: Path) -> dict[str, Any]:
    """
    Encode the parquet file `chunk.given` into runs: work/NAME-FIRST-COUNT.bin (tokens) and .npy (INDEX). The
    validation documents go to work/NAME.parquet. The record names the runs and their segments.
    """
    runs: list[dict[str, Any]] = []
    names: list[str] = []
    tokenizer, encoder = _loaded(config.tokenizer)
    run = _Run(config, tokenizer, encoder)

    def flush() -> None:
        name = f"work/{chunk.name}-{sum(map(_documents, runs))}-{len(run)}"  # another budget makes other names
        runs.append({"name": name, "segments": [list(segment) for segment in run.write(out / name)]})
        names.extend([f"{name}.bin", f"{name}.npy"])

    with data_documents.PartWriter(out / "work" / f"{chunk.name}.parquet") as held:
        for batch in _pieces(Path(chunk.inputs)):
            texts = batch.column("text").to_pylist()
            marks = [is_held_out(text, config.val_fraction) for text in texts]
            held.write_batch(batch.filter(pa.array(marks)).select(data_documents.SCHEMA().names))
            run.add(batch.column("id").to_pylist(), batch.column("domain").to_pylist(), texts, marks)
            if run.bytes >= config.run_bytes:
                flush()
                run = _Run(config, tokenizer, encoder)
        if run.bytes or not runs:
            flush()
    return {"files": [*names, f"work/{chunk.name}.parquet"], "runs": runs, "encoder": encoder.name}


def _documents(run: dict[str, Any]) -> int:
    return sum(Segment(*fields).documents for fields in run["segments"])


def _pieces(path: Path) -> "Iterator[pa.RecordBatch]":
    """Batches of a part, cut so that a piece is little text, or one document."""
    for batch in data_documents.part_batches(path, data_documents.SCHEMA().names):
        lengths = pc.utf8_length(batch.column("text")).to_pylist()
        for begin, end in spans_by_size(lengths, CHARACTERS_AT_ONCE, most_items=DOCUMENTS_AT_ONCE):
            yield batch.slice(begin, end - begin)


class _Run:
    """Documents that wait to be written."""

    def __init__(self, config: Encoding, tokenizer: Tokenizer, encoder: Encoder) -> None:
        self.config, self.document_id, self.encoder = config, tokenizer.document_id, encoder
        self.bytes = 0
        self._kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        self._tokens: list[NDArray[Any]] = []
        self._index: list[NDArray[Any]] = []
        self._groups: list[tuple[bool, str]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, ids: list[str], domains: list[str], texts: list[str], held_out: list[bool]) -> None:
        coded = self.encoder.encode_batch(texts)
        index = np.empty(len(ids), dtype=INDEX)
        index["id"], index["tie"] = hashed(ids)
        index["tokens"] = [len(one) + 1 for one in coded]
        tokens = np.empty(int(index["tokens"].sum()), dtype=self._kind)
        position = 0
        for token_ids in coded:
            tokens[position] = self.document_id
            tokens[position + 1 : position + 1 + len(token_ids)] = token_ids
            position += 1 + len(token_ids)
        self._tokens.append(tokens)
        self._index.append(index)
        self._groups += zip(held_out, domains, strict=True)
        self.bytes += tokens.nbytes

    def write(self, path: Path) -> list[Segment]:
        index = np.concatenate([np.zeros(0, INDEX), *self._index])
        groups = sorted(set(self._groups))
        numbers = {group: number for number, group in enumerate(groups)}
        which = np.array([numbers[group] for group in self._groups], dtype=np.int64)
        streams = np.where([held for held, _ in self._groups], VAL, TRAIN)
        when = np.zeros(len(index), dtype=np.uint64)
        for stream in (TRAIN, VAL):
            mine = streams == stream
            when[mine] = keys(index["id"][mine], self.config.seed, stream, 0)
        order = np.lexsort((index["tie"], when, which))
        starts = np.cumsum(index["tokens"], dtype=np.int64) - index["tokens"]
        whole = np.concatenate([np.zeros(0, self._kind), *self._tokens])
        self._tokens.clear()
        with whole_file(path.with_name(f"{path.name}.bin")) as file:
            for some in np.array_split(order, max(1, len(order) // 4096)):
                file.write(collect(whole, starts[some], index["tokens"][some]).data)
        save(path.with_name(f"{path.name}.npy"), index[order])
        documents = np.bincount(which, minlength=len(groups)).tolist()
        tokens = np.bincount(which, weights=index["tokens"], minlength=len(groups)).astype(np.int64).tolist()
        return [Segment(*group, documents[number], tokens[number]) for number, group in enumerate(groups)]


@dataclass(frozen=True)
class Placing:
    """What every stream takes of every domain. Only the stream `val` takes validation documents."""

    seed: int
    streams: Mapping[str, Mapping[str, Chosen]]


def place_part(config: Placing, chunk: Part, out: Path) -> dict[str, Any]:
    """
    Sort what the streams take of the run `chunk.name`, whose segments are `chunk.given`: work/NAME.STREAM.npy (PLACED).

    The record says for each stream how many documents and tokens of each domain it takes.
    """
    index = load(out / f"{chunk.name}.npy", INDEX)
    starts = np.cumsum(index["tokens"], dtype=np.int64) - index["tokens"]
    tables: dict[str, list[NDArray[Any]]] = {}
    counts: dict[str, dict[str, list[int]]] = {}
    for segment, some in segments(chunk.inputs):
        for stream, domains in config.streams.items():
            if segment.held_out != (stream == VAL) or segment.domain not in domains:
                continue
            chosen = domains[segment.domain]
            table = placed(index[some], starts[some], config.seed, stream, chosen)
            tables.setdefault(stream, []).append(table)
            counts.setdefault(stream, {})[segment.domain] = [len(table), int(table["tokens"].sum(dtype=np.int64))]
    names = []
    for stream, some_tables in tables.items():
        names.append(f"{chunk.name}.{stream}.npy")
        save(out / names[-1], in_order(np.concatenate(some_tables)))
    return {"files": names, "taken": counts}


def segments(listed: Sequence[Sequence[Any]]) -> Iterator[tuple[Segment, slice]]:
    """The segments of a run's record, each with its slice of the index."""
    start = 0
    for fields in listed:
        segment = Segment(*fields)
        yield segment, slice(start, start + segment.documents)
        start += segment.documents


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
    """Files of validation documents."""


class Slice(NamedTuple):
    """Of which keys a shard or file is made."""

    stream: str
    cuts: Sequence[int]
    """Ascending; from one to the next is what is held in memory at once."""
    number: int
    of: int
    """How many of its kind there are."""


def gather_shard(config: Gathering, chunk: Part, out: Path) -> dict[str, Any]:
    """Write the shard `chunk.name` of the documents whose keys lie in the Slice `chunk.given`."""
    key_slice = Slice(*chunk.inputs)
    low, high = key_slice.cuts[0], key_slice.cuts[-1]
    num_tokens = 0
    for name in config.runs[key_slice.stream]:
        table = between(load(out / f"{name}.{key_slice.stream}.npy", PLACED), low, high)
        num_tokens += int(table["tokens"].sum(dtype=np.int64))
    index = format.write_pieces(
        out / chunk.name,
        _shard_pieces(config, key_slice, out),
        num_tokens=num_tokens,
        vocab_size=config.vocab_size,
        tokenizer_hash=config.tokenizer_hash,
        facts={"document_id": config.document_id, "shard": key_slice.number, "shards": key_slice.of},
    )
    facts = {name: index[name] for name in ("tokens", "documents")}
    return {"files": [f"{chunk.name}.bin", f"{chunk.name}.json"], **facts, "sha256": index["sha256"]}


def _shard_pieces(
    config: Gathering, key_slice: Slice, out: Path
) -> Iterator[tuple[NDArray[np.integer[Any]], NDArray[np.int64]]]:
    """Tokens of a shard, and where documents begin in them."""
    for low, high in pairwise(key_slice.cuts):
        pool, table = _pool(config, key_slice.stream, low, high, out)
        order = np.lexsort((table["tie"], table["key"]))
        for some in np.array_split(order, max(1, pool.nbytes // BLOCK_BYTES)):
            lengths = table["tokens"][some].astype(np.int64)
            yield collect(pool, table["start"][some], lengths), np.cumsum(lengths) - lengths
        del pool, table  # before the next ones are made


BLOCK_BYTES = 2**22


def _pool(config: Gathering, stream: str, low: int, high: int, out: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """All documents of a piece, run by run, each run's in the order in which they lie there; starts are of the pool."""
    kind = np.dtype("<u2" if config.vocab_size <= 2**16 else "<u4")
    tables: list[tuple[str, NDArray[Any]]] = [("", np.zeros(0, dtype=PLACED))]
    for name in config.runs[stream]:
        table = between(load(out / f"{name}.{stream}.npy", PLACED), low, high)
        if len(table):
            tables.append((name, table[np.argsort(table["start"], kind="stable")]))
    whole = np.concatenate([table for _, table in tables])
    ends = np.cumsum(whole["tokens"], dtype=np.int64)
    pool = np.empty(int(ends[-1]) if len(ends) else 0, dtype=kind)
    position = 0
    for name, table in tables[1:]:
        size = int(table["tokens"].sum(dtype=np.int64))
        tokens = np.memmap(out / f"{name}.bin", dtype=kind, mode="r")
        collect(tokens, table["start"], table["tokens"], pool[position : position + size])
        del tokens  # the pages of one run are enough
        position += size
    whole["start"] = ends - whole["tokens"]
    return pool, whole


def gather_held_out(config: Gathering, chunk: Part, out: Path) -> dict[str, Any]:
    """Write the validation documents whose keys lie in the Slice `chunk.given`, sorted by key, as `chunk.name`."""
    key_slice = Slice(*chunk.inputs)
    batches: list[pa.RecordBatch] = []
    keys: list[NDArray[Any]] = [np.zeros(0, dtype=np.uint64)]
    for name in config.held_out:
        for batch in data_documents.part_batches(out / name):
            when, _ = held_out_keys(batch, config.seed)
            low, high = (np.uint64(min(cut, END - 1)) for cut in key_slice.cuts)
            mine = (when >= low) & ((when < high) | (key_slice.cuts[1] >= END))
            batches.append(batch.filter(pa.array(mine)))
            keys.append(when[mine])
    file = f"held-out/{chunk.name}.parquet"
    with data_documents.PartWriter(out / file) as writer:
        if batches:
            order = np.argsort(np.concatenate(keys), kind="stable")
            table = pa.Table.from_batches(batches).take(pa.array(order))
            for batch in table.combine_chunks().to_batches(max_chunksize=data_documents.ROWS_PER_BATCH):
                writer.write_batch(batch)
    return {"files": [file], "documents": writer.rows}


def held_out_keys(batch: "pa.RecordBatch", seed: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Sort keys of validation documents, as in the shards of `val`, and the bytes of each with its end."""
    ids, _ = hashed(batch.column("id").to_pylist())
    sizes = np.asarray(pc.binary_length(batch.column("text")), dtype=np.int64) + 1
    return keys(ids, seed, VAL, 0), sizes


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Rows of indices whose lengths add up to at most `capacity`; every index in exactly one row.

    Longest first, each into the first row that still takes it (Johnson 1973: at most 11/9 of the best number of rows,
    plus 6/9). Ties go by index, so equal inputs give equal rows. Raises ValueError for a length over capacity.

    A tree over the rows holds the largest room below each of its nodes, so that n lengths take n log n steps.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has the children 2n and 2n + 1; the rows are the last `leaves` nodes
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"length {length} does not fit into a row of {capacity}")
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


@runtime_checkable
class Line(Protocol):
    """A conversation as token IDs, with a mask of those in the loss."""

    @property
    def ids(self) -> Any: ...

    @property
    def mask(self) -> Any: ...


@dataclass(frozen=True)
class PackedRows:
    rows: list[list[int]]
    """Which groups stand in each row, in order."""
    tokens: int
    """Without padding."""
    supervised: int

    def full(self, sequence_length: int) -> float:
        """Share of the rows that is not padding."""
        return round(self.tokens / max(len(self.rows) * sequence_length, 1), 4)


def write_packed(
    path: Path,
    groups: Sequence[Sequence[Line]],
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
    facts: Mapping[str, Any],
    longest_padding: int | None = None,
) -> PackedRows:
    """
    Pack groups, whose lines stay together in their order, into rows; pad these, and write them. Padding belongs to the
    last line of its row, and with `longest_padding` to pieces of its own, of no more tokens than that.
    """
    packed = first_fit_decreasing([sum(len(line.ids) for line in group) for group in groups], sequence_length)
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tokens = np.full((len(packed), sequence_length), tokenizer.fill_id, dtype=kind)
    mask = np.zeros((len(packed), sequence_length), dtype=np.uint8)
    starts: list[int] = []
    filled = 0
    for row, indices in enumerate(packed):
        position = 0
        for line in (line for index in indices for line in groups[index]):
            starts.append(row * sequence_length + position)
            tokens[row, position : position + len(line.ids)] = line.ids
            mask[row, position : position + len(line.ids)] = line.mask
            position += len(line.ids)
        filled += position
        if longest_padding is not None:
            starts += [row * sequence_length + at for at in range(position, sequence_length, longest_padding)]
    format.write(
        path,
        tokens.reshape(-1),
        mask=mask.reshape(-1),
        vocab_size=tokenizer.vocab_size,
        starts=starts,
        tokenizer_hash=tokenizer.hash,
        layout="rows",
        facts={"document_id": tokenizer.boundary_id, "row_tokens": sequence_length, **facts},
    )
    return PackedRows(packed, filled, int(mask.sum()))
