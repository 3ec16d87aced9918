"""What is done to each part of a corpus to find its duplicates: signatures, sets of shingles, comparisons of pairs."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bloomery.core import files, native
from bloomery.core.config import repeated
from bloomery.core.errors import DataError
from bloomery.data import document, minhash, quick_shingles
from bloomery.data.engine import Part, Record
from bloomery.data.quick_shingles import Packed
from bloomery.data.shingles import Hashes, Shingles, blocks, jaccard, shingle_set, shingles

EDGE = pa.schema([("late", pa.uint32()), ("early", pa.uint32()), ("jaccard", pa.float64())])

BYTES_PER_PIECE = 8 * 2**20

PLACE = pa.schema([("doc", pa.int64()), ("file", pa.string()), ("first", pa.int64()), ("size", pa.int64())])


@dataclass(frozen=True, kw_only=True)
class Settings(minhash.Settings):
    verify: bool = True
    min_jaccard: float = 0.8


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files of documents, and how many documents stand before each of them."""

    paths: Sequence[Path]
    begins: Sequence[int]
    documents: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "Corpus":
        """Raises DataError where two files have the same name: their documents go to files of that name."""
        names = [path.stem for path in paths]
        if twice := repeated(names):
            cure = "Give the files names of their own."
            raise DataError(f"two files of documents have the name {twice[0]!r}", cure=cure)
        counts = [document.count_part(path) for path in paths]
        return cls(paths=paths, begins=np.cumsum([0, *counts])[:-1].tolist(), documents=sum(counts))

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        """Of each part's name: the numbers of its first document, and of the first one after it."""
        ends = [*self.begins[1:], self.documents]
        return {path.stem: pair for path, pair in zip(self.paths, zip(self.begins, ends, strict=True), strict=True)}

    def parts(self, **more: Any) -> list[Part]:
        """One for each file."""
        return [
            Part(path.stem, {"path": str(path), "begin": begin, **more}, path.stat().st_size)
            for path, begin in zip(self.paths, self.begins, strict=True)
        ]


def _schema(keys: int) -> pa.Schema:
    numbers = ("checksum", "d0", "d1", *(f"k{key:02d}" for key in range(keys)))
    return pa.schema(
        [
            pa.field("doc", pa.int64()),
            pa.field("id", pa.string()),
            pa.field("barred", pa.bool_()),
            pa.field("length", pa.int64()),
            pa.field("shingles", pa.int64()),
            *(pa.field(name, pa.uint64()) for name in numbers),
        ]
    )


def sign(settings: Settings, part: Part, out: Path) -> Record:
    """
    Write signatures/NAME.parquet, what grouping needs to know of each document, and what comparing needs: the sets of
    shingles, sets/NAME.u64, and where each of them is, sets/NAME.parquet.
    """
    names = [f"signatures/{part.name}.parquet", f"sets/{part.name}.u64", f"sets/{part.name}.parquet"]
    schema = _schema(settings.keys)
    barred = _barred(part)
    sizes: list[int] = []
    with (
        files.whole_file(out / names[0]) as file,
        pq.ParquetWriter(file, schema, compression="lz4") as writer,
        files.whole_file(out / names[1]) as sets,
    ):
        for batch in _pieces(document.part_batches(Path(part.given["path"]), ["id", "text"])):
            texts = Packed.of_arrow(batch.column("text"))
            numbers = np.arange(len(sizes), len(sizes) + len(texts))
            signed = _signed(settings, texts, sets, sizes)
            columns = [
                pa.array(numbers + part.given["begin"]),
                batch.column("id"),
                pa.array(np.isin(numbers, barred)),
                pc.utf8_length(batch.column("text")).cast(pa.int64()),
                *signed,
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    docs = np.arange(len(sizes)) + part.given["begin"]
    columns = [docs, [part.name] * len(sizes), np.cumsum([0, *sizes])[:-1], sizes]
    with files.whole_file(out / names[2]) as file:
        pq.write_table(pa.table(columns, schema=PLACE), file)
    return {"files": names, "documents": len(sizes)}


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Slices of about BYTES_PER_PIECE of text: a thousand books at a time would fill the memory."""
    for batch in batches:
        ends = np.cumsum(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False), dtype=np.int64)
        begin = 0
        while begin < batch.num_rows:
            limit = (ends[begin - 1] if begin else 0) + BYTES_PER_PIECE
            end = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
            yield batch.slice(begin, end - begin)
            begin = end


def _signed(settings: Settings, texts: Packed, sets: IO[bytes], sizes: list[int]) -> list[pa.Array]:
    """Counts of shingles, checksums, digests and band keys of texts. Their sets go to a file, their sizes to a list."""
    library = native.library("text")
    find = minhash.minima if library is None else partial(quick_shingles.minima, library)
    minima, digests, counts = [], [], []
    for found in _shingled(settings, texts):
        minima.append(find(found, settings))
        digests.append(found.digests)
        counts.append(np.diff(found.bounds))
        for one, lengths in _sets(found) if settings.verify else ():
            sets.write(one.data)
            sizes += lengths
        if not settings.verify:
            sizes += [0] * len(counts[-1])
    checksums = pa.array([zlib.crc32(text) for text in texts.each()], pa.uint64())
    signatures = minhash.band_keys(np.concatenate(minima, axis=1), settings)
    keys = (pa.array(column) for column in (*np.concatenate(digests).T, *signatures))
    return [pa.array(np.concatenate(counts)), checksums, *keys]


def _shingled(settings: Settings, texts: Packed) -> Iterator[Shingles]:
    """The shingles of texts, in blocks; each is valid until the next."""
    kind, size = settings.shingles, settings.shingle_size
    if (library := native.library("text")) is not None:
        for a, b in quick_shingles.blocks(texts):
            yield quick_shingles.shingles(library, texts.part(a, b), kind, size)
        return
    strings = texts.strings()
    for a, b in blocks(strings):
        yield shingles(strings[a:b], kind, size)


def _sets(found: Shingles) -> Iterator[tuple[Hashes, list[int]]]:
    """The sets of shingles of texts, one after the other, with their sizes."""
    if (library := native.library("text")) is not None:
        sets, sizes = quick_shingles.sets(library, found)
        yield sets, sizes.tolist()
        return
    for first, last in pairwise(found.bounds.tolist()):
        one = shingle_set(found.hashes[first:last])
        yield one, [len(one)]


def _barred(part: Part) -> NDArray[np.int64]:
    """Rows that something else has dropped already."""
    if "barred" not in part.given:
        return np.zeros(0, np.int64)
    rows: NDArray[np.int64] = pq.read_table(Path(part.given["barred"]) / f"{part.name}.parquet")["row"].to_numpy()
    return rows


class _StoredSets:
    """Sets of shingles, read from the files of `sign`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def read(self, file: str, first: int, size: int) -> Hashes:
        if file not in self._open:
            if len(self._open) >= 200:  # of the descriptors that a process may have
                self.close()
            self._open[file] = (self._folder / f"{file}.u64").open("rb", buffering=0)
        self._open[file].seek(8 * first)
        return np.frombuffer(self._open[file].read(8 * size), np.uint64)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


def compare(settings: Settings, part: Part, out: Path) -> Record:
    """Write edges/NAME.parquet: the pairs of one chunk whose Jaccard reaches the limit."""
    name = f"edges/{part.name}.parquet"
    pairs = pq.read_table(part.given["pairs"])
    columns = [pairs.column(key).to_pylist() for key in pairs.column_names]
    sets = _StoredSets(out / "sets")
    late, early, values = [], [], []
    library = native.library("text")
    measure = jaccard if library is None else partial(quick_shingles.jaccard, library)
    current, one = -1, np.zeros(0, np.uint64)
    for a, b, file_a, first_a, size_a, file_b, first_b, size_b in zip(*columns, strict=True):
        if a != current:
            current, one = a, sets.read(file_a, first_a, size_a)
        value = measure(one, sets.read(file_b, first_b, size_b))
        if value >= settings.min_jaccard:
            late.append(b)
            early.append(a)
            values.append(value)
    sets.close()
    with files.whole_file(out / name) as file:
        pq.write_table(pa.table([late, early, values], schema=EDGE), file)
    return {"files": [name], "compared": pairs.num_rows}
