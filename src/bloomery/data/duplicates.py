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
        if twice := sorted({name for name in names if names.count(name) > 1}):
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
            found = _shingled(settings, texts)
            numbers = np.arange(len(sizes), len(sizes) + len(texts))
            columns = [
                pa.array(numbers + part.given["begin"]),
                batch.column("id"),
                pa.array(np.isin(numbers, barred)),
                pc.utf8_length(batch.column("text")).cast(pa.int64()),
                *_signed(settings, texts, found),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            sizes += _write_sets(settings, found, sets)
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


def _shingled(settings: Settings, texts: Packed) -> list[Shingles]:
    """The shingles of texts, in blocks."""
    kind, size = settings.shingles, settings.shingle_size
    if (library := native.library("text")) is not None:
        ranges = quick_shingles.blocks(texts)
        return [quick_shingles.shingles(library, texts.part(a, b), kind, size) for a, b in ranges]
    strings = texts.strings()
    return [shingles(strings[a:b], kind, size) for a, b in blocks(strings)]


def _signed(settings: Settings, texts: Packed, found: list[Shingles]) -> list[pa.Array]:
    """Counts of shingles, checksums, digests and band keys of a batch of texts."""
    library = native.library("text")
    find = minhash.minima if library is None else partial(quick_shingles.minima, library)
    minima = np.concatenate([find(one, settings) for one in found], axis=1)
    digests = np.concatenate([one.digests for one in found])
    counts = np.concatenate([np.diff(one.bounds) for one in found])
    checksums = pa.array([zlib.crc32(text) for text in texts.each()], pa.uint64())
    keys = (pa.array(column) for column in (*digests.T, *minhash.band_keys(minima, settings)))
    return [pa.array(counts), checksums, *keys]


def _write_sets(settings: Settings, found: list[Shingles], file: IO[bytes]) -> list[int]:
    """Append the set of every text; returns their sizes."""
    if not settings.verify:
        return [0 for one in found for _ in one.bounds[1:]]
    sizes: list[int] = []
    library = native.library("text")
    for one in found:
        if library is not None:
            sets, counts = quick_shingles.sets(library, one)
            file.write(sets.data)
            sizes += counts.tolist()
            continue
        for first, last in pairwise(one.bounds.tolist()):
            found_set = shingle_set(one.hashes[first:last])
            file.write(found_set.data)
            sizes.append(len(found_set))
    return sizes


def _barred(part: Part) -> NDArray[np.int64]:
    """Rows that something else has dropped already."""
    if "barred" not in part.given:
        return np.zeros(0, np.int64)
    rows: NDArray[np.int64] = pq.read_table(Path(part.given["barred"]) / f"{part.name}.parquet")["row"].to_numpy()
    return rows


class _Sets:
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
    sets = _Sets(out / "sets")
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
