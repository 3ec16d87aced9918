"""
Documents to runs: files of token ids with an index, sorted as they will mostly be read.

A part of the corpus becomes one run, or several where the budget is small. In a run the documents that may be trained
on come first, then those held out; of each the domains, and of each domain the documents in the order in which the
first epoch takes them. So a stream that takes a domain once reads every run from its start to its end.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bloomery.core.bounds import Bytes, DiskPath, Seed, Share
from bloomery.core.config import Config
from bloomery.core.files import whole_file
from bloomery.data import document
from bloomery.data.engine import Part
from bloomery.data.holdout import is_held_out
from bloomery.shards import shuffle
from bloomery.tokenizer.quick import Encoder
from bloomery.tokenizer.tokenizer import Tokenizer

TRAIN, ANNEAL, VAL = "train", "anneal", "val"
"""Streams of documents, and the names of their shards."""

DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 512, 4_000_000


class Encoding(Config):
    """What decides about runs."""

    tokenizer: DiskPath
    hold_out: Share
    seed: Seed
    run_bytes: Bytes
    """Tokens in memory before a run is written. How the corpus is cut into runs changes no shard."""


class Segment(NamedTuple):
    """Neighbors in a run: documents of one domain, all held out or none."""

    held_out: bool
    domain: str
    documents: int
    tokens: int


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> tuple[Tokenizer, Encoder]:
    """Once for all the parts of a process: the encoder is checked before its first text."""
    tokenizer = Tokenizer.load(folder)
    return tokenizer, Encoder(tokenizer)


def encode_part(config: Encoding, part: Part, out: Path) -> dict[str, Any]:
    """
    Encode the parquet file `part.given` into runs: work/NAME-FIRST-COUNT.bin (tokens) and .npy (INDEX). The held-out
    documents go to work/NAME.parquet. The record names the runs and their segments.
    """
    runs: list[dict[str, Any]] = []
    names: list[str] = []
    tokenizer, encoder = _loaded(config.tokenizer)
    run = _Run(config, tokenizer, encoder)

    def flush() -> None:
        name = f"work/{part.name}-{sum(map(_documents, runs))}-{len(run)}"  # another budget makes other names
        runs.append({"name": name, "segments": [list(segment) for segment in run.write(out / name)]})
        names.extend([f"{name}.bin", f"{name}.npy"])

    with document.PartWriter(out / "work" / f"{part.name}.parquet") as held:
        for batch in _pieces(Path(part.given)):
            texts = batch.column("text").to_pylist()
            marks = [is_held_out(text, config.hold_out) for text in texts]
            held.write_batch(batch.filter(pa.array(marks)).select(document.SCHEMA.names))
            run.add(batch.column("id").to_pylist(), batch.column("domain").to_pylist(), texts, marks)
            if run.bytes >= config.run_bytes:
                flush()
                run = _Run(config, tokenizer, encoder)
        if run.bytes or not runs:
            flush()
    return {"files": [*names, f"work/{part.name}.parquet"], "runs": runs, "encoder": encoder.name}


def _documents(run: dict[str, Any]) -> int:
    return sum(Segment(*fields).documents for fields in run["segments"])


def _pieces(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a part, cut so that a piece is little text, or one document."""
    for batch in document.part_batches(path, document.SCHEMA.names):
        lengths = np.asarray(pc.utf8_length(batch.column("text")))
        first, size = 0, 0
        for place, length in enumerate(lengths.tolist()):
            if place > first and (size + length > CHARACTERS_AT_ONCE or place - first == DOCUMENTS_AT_ONCE):
                yield batch.slice(first, place - first)
                first, size = place, 0
            size += length
        yield batch.slice(first)


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
        index = np.empty(len(ids), dtype=shuffle.INDEX)
        index["id"], index["tie"] = shuffle.hashed(ids)
        index["tokens"] = [len(one) + 1 for one in coded]
        tokens = np.empty(int(index["tokens"].sum()), dtype=self._kind)
        place = 0
        for one in coded:
            tokens[place] = self.document_id
            tokens[place + 1 : place + 1 + len(one)] = one
            place += 1 + len(one)
        self._tokens.append(tokens)
        self._index.append(index)
        self._groups += zip(held_out, domains, strict=True)
        self.bytes += tokens.nbytes

    def write(self, path: Path) -> list[Segment]:
        """Write PATH.bin and PATH.npy."""
        index = np.concatenate([np.zeros(0, shuffle.INDEX), *self._index])
        groups = sorted(set(self._groups))
        numbers = {group: number for number, group in enumerate(groups)}
        which = np.array([numbers[group] for group in self._groups], dtype=np.int64)
        streams = np.where([held for held, _ in self._groups], VAL, TRAIN)
        when = np.zeros(len(index), dtype=np.uint64)
        for stream in (TRAIN, VAL):
            mine = streams == stream
            when[mine] = shuffle.keys(index["id"][mine], self.config.seed, stream, 0)
        order = np.lexsort((index["tie"], when, which))
        starts = np.cumsum(index["tokens"], dtype=np.int64) - index["tokens"]
        whole = np.concatenate([np.zeros(0, self._kind), *self._tokens])
        self._tokens.clear()
        with whole_file(path.with_name(f"{path.name}.bin")) as file:
            for some in np.array_split(order, max(1, len(order) // 4096)):
                file.write(shuffle.collect(whole, starts[some], index["tokens"][some]).data)
        shuffle.save(path.with_name(f"{path.name}.npy"), index[order])
        documents = np.bincount(which, minlength=len(groups)).tolist()
        tokens = np.bincount(which, weights=index["tokens"], minlength=len(groups)).astype(np.int64).tolist()
        return [Segment(*group, documents[number], tokens[number]) for number, group in enumerate(groups)]
