"""
Document signatures whose bands propose similar pairs, and exact Jaccard of those pairs.

    J(A, B) = |A ∩ B| / |A ∪ B|             A, B: sets of the shingles of two texts
    h_i(x) = a_i x mod 2**32, a_i odd       permutations of 32-bit numbers; x: half of a shingle's hash
    P(min h_i(A) = min h_i(B)) = J          so b bands of r minima each agree in one band with 1 − (1 − J**r)**b

The same minima may be banded more than once. Banding t takes for band k the minima (k − t j mod b, j), j < r. Two
minima of a band are thus never together again. Sources: Broder 1997, On the resemblance and containment of
documents; Leskovec et al., Mining of Massive Datasets, 3.4.

For each part of a corpus, this module writes signatures and sets of shingles, and compares pairs.

The compiled library computes the same numbers as the numpy code here and in data/dedup/hashing.py. It works on
UTF-8 text as Arrow stores it. Every function takes the library as `native.library("text")` gives it. If there is no
library, that is None, and callers use numpy.

The numpy and compiled versions stand in one file because their results must be equal, number for number.
"""

import ctypes
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core import native
from bloomery.core.config import repeated
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pc, pq
from bloomery.core.io import GOLDEN, splitmix64
from bloomery.data import documents as data_documents
from bloomery.data.dedup import hashing
from bloomery.data.dedup.hashing import Hashes, ShingleKind, Shingles, jaccard, shingle_set, shingles
from bloomery.data.documents import spans_by_size
from bloomery.data.executor import Part, PartRecord

Minima = NDArray[np.uint32]

SHINGLES_PER_STEP = 1 << 15  # one permutation of them fits into a first- or second-level cache


@dataclass(frozen=True, kw_only=True)
class MinHashSettings:
    num_perm: int = 112
    num_bands: int = 14
    """Divides `num_perm`."""
    num_rotations: int = 2
    shingles: ShingleKind = "words"
    shingle_size: int = 5
    seed: int = 0

    @property
    def keys(self) -> int:
        """Band keys of a document."""
        return self.num_bands * self.num_rotations


def multipliers(settings: MinHashSettings) -> Minima:
    """The a_i: [permutations]."""
    counter = np.arange(1, settings.num_perm + 1, dtype=np.uint64)
    numbers = splitmix64(counter * np.uint64(GOLDEN) + splitmix64(np.array([settings.seed], np.uint64)))
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def minhash_signatures(shingled: Shingles, settings: MinHashSettings) -> Minima:
    """The signatures of D texts: [permutations, D]. A text without shingles has the largest number everywhere."""
    texts = len(shingled.bounds) - 1
    result = np.full((settings.num_perm, texts), np.iinfo(np.uint32).max, np.uint32)
    numbers = (shingled.hashes >> np.uint64(32)).astype(np.uint32)
    factors = multipliers(settings)
    begin = 0
    while begin < texts:
        limit = int(shingled.bounds[begin]) + SHINGLES_PER_STEP
        end = max(begin + 1, int(np.searchsorted(shingled.bounds, limit, side="right")) - 1)
        for first in range(int(shingled.bounds[begin]), int(shingled.bounds[end]), SHINGLES_PER_STEP):
            last = (
                min(first + SHINGLES_PER_STEP, int(shingled.bounds[end]))
                if end == begin + 1
                else int(shingled.bounds[end])
            )
            step = numbers[first:last]
            starts = np.maximum(shingled.bounds[begin:end], first) - first
            filled = shingled.bounds[begin + 1 : end + 1] - first > starts
            _lower(result[:, begin:end], step, starts, filled, factors)
            if last == shingled.bounds[end]:
                break
        begin = end
    return result


def _lower(into: Minima, step: Minima, starts: NDArray[np.int64], filled: NDArray[np.bool_], factors: Minima) -> None:
    """Lower the minima of some texts by the shingles of one step. Text d's begin at starts[d]."""
    columns, places = np.flatnonzero(filled), starts[filled]
    if not len(columns):
        return
    hashed = np.empty_like(step)
    lows = np.empty((len(factors), len(places)), np.uint32)
    for row, factor in enumerate(factors):
        np.multiply(step, factor, out=hashed)
        np.minimum.reduceat(hashed, places, out=lows[row])
    into[:, columns] = np.minimum(into[:, columns], lows)


def band_keys(signatures: Minima, settings: MinHashSettings) -> Hashes:
    """Keys of D signatures: [bands × bandings, D]. Equal keys (almost surely) mean the same band and equal minima."""
    rows = settings.num_perm // settings.num_bands
    table = signatures.reshape(settings.num_bands, rows, -1)
    number = splitmix64(np.arange(settings.keys, dtype=np.uint64)).reshape(
        settings.num_rotations, settings.num_bands, 1
    )
    keys = np.repeat(number, table.shape[2], axis=2)
    for banding in range(settings.num_rotations):
        for row in range(rows):
            column = np.roll(table[:, row], banding * row, axis=0)
            keys[banding] = splitmix64(keys[banding] + column + np.uint64(1))
    return keys.reshape(settings.keys, -1)


Library = ctypes.CDLL
Bounds = NDArray[np.int64]

DEPENDENT = ("İ".encode(), "Σ".encode())
"""Letters whose lower case is more than one letter, or depends on the neighbors."""


BYTES_PER_BLOCK = 1 << 18
"""Of texts that are looked at together: what is made of them fits into a second-level cache."""


class PackedTexts(NamedTuple):
    """Texts in UTF-8, one after the other; text d is data[bounds[d]:bounds[d + 1]]. Surrogates may stand in them."""

    data: NDArray[np.uint8]
    bounds: Bounds

    @classmethod
    def of(cls, texts: Sequence[str]) -> "PackedTexts":
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), bounds)

    @classmethod
    def of_arrow(cls, column: "pa.Array") -> "PackedTexts":
        """Without a copy, of a column without nulls."""
        wide = column if pa.types.is_large_string(column.type) else column.cast(pa.large_string())
        _, offsets, data = wide.buffers()
        bounds = np.frombuffer(offsets, np.int64)[wide.offset : wide.offset + len(wide) + 1]
        return cls(np.frombuffer(data or b"", np.uint8), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def subset(self, begin: int, end: int) -> "PackedTexts":
        return PackedTexts(self.data, self.bounds[begin : end + 1])

    def strings(self) -> list[str]:
        return [str(text, "utf-8", "surrogatepass") for text in self.each()]

    def each(self) -> Iterator[memoryview]:
        view = self.data.data
        return (view[a:b] for a, b in pairwise(self.bounds.tolist()))

    def lowered(self) -> "PackedTexts":
        """With texts that have a letter of DEPENDENT in lower case, so that a table does for the others."""
        whole = self.data[self.bounds[0] : self.bounds[-1]].tobytes()
        if not any(letter[:1] in whole and letter in whole for letter in DEPENDENT):  # one byte is soon looked for
            return self
        return PackedTexts.of([hashing.lowered(text) for text in self.strings()])


@lru_cache(maxsize=8)
def _room(name: str, size: int) -> Hashes:
    """An array that every call reuses: allocating memory would cost more than writing to it."""
    return np.empty(size, np.uint64)


def _taken(name: str, size: int) -> Hashes:
    """So much of an array whose size few others are asked for."""
    if size > BYTES_PER_BLOCK:
        return np.empty(size, np.uint64)
    return _room(name, BYTES_PER_BLOCK)[:size]


def native_shingles(library: Library, texts: PackedTexts, kind: ShingleKind, size: int) -> Shingles:
    """As `hashing.shingles`. The hashes are valid until the next call; not for several threads at a time."""
    long = len(texts) == 1 and _longer(texts, hashing.LARGEST_PIECE)
    lower = texts.lowered()
    count, room = len(lower), int(lower.bounds[-1] - lower.bounds[0])
    words, tokens = (_taken(name, room // 2 + count + 1) for name in ("words", "tokens"))
    word_bounds, token_bounds, bounds = np.empty((3, count + 1), np.int64)
    arguments = _address(lower.data), _address(lower.bounds), count, _address(hashing.code_point_values())
    piece = hashing.LARGEST_PIECE if long else 0
    _call(library.bloomery_scan, *arguments, piece, *map(_address, (words, word_bounds, tokens, token_bounds)))
    raw = tokens.data.cast("B")
    places = (8 * token_bounds).tolist()
    digests = b"".join([hashlib.sha256(raw[a:b]).digest()[:16] for a, b in pairwise(places)])
    if kind == "characters":
        words = _taken("characters", room)
        _call(library.bloomery_characters, *arguments, _address(words), _address(word_bounds))
    hashes = _taken("shingles", int(word_bounds[-1]))
    arguments = _address(words), _address(word_bounds), count, size
    _call(library.bloomery_shingles, *arguments, _address(hashes), _address(bounds))
    return Shingles(hashes[: bounds[-1]], bounds, np.frombuffer(digests, np.uint64).reshape(-1, 2))


def native_signatures(library: Library, shingled: Shingles, settings: MinHashSettings) -> Minima:
    """As `minhash_signatures`."""
    texts = len(shingled.bounds) - 1
    result, factors = np.empty((settings.num_perm, texts), np.uint32), multipliers(settings)
    arguments = _address(shingled.hashes), _address(shingled.bounds), texts
    _call(library.bloomery_minima, *arguments, _address(factors), len(factors), _address(result))
    return result


def native_sets(library: Library, shingled: Shingles) -> tuple[Hashes, Bounds]:
    """`hashing.shingle_set` of each text, one after the other, and their sizes. Valid until the next call."""
    into, sizes = _taken("sets", len(shingled.hashes)), np.empty(len(shingled.bounds) - 1, np.int64)
    arguments = _address(shingled.hashes), _address(shingled.bounds), len(sizes)
    _call(library.bloomery_sets, *arguments, _address(into), _address(sizes))
    return into[: sizes.sum()], sizes


def native_jaccard(library: Library, a: Hashes, b: Hashes) -> float:
    """As `hashing.jaccard`."""
    shared: int = _call(library.bloomery_shared, _address(a), len(a), _address(b), len(b))
    return shared / (len(a) + len(b) - shared) if len(a) or len(b) else 1.0


def _call(function: Any, *arguments: int) -> Any:
    """All arguments are addresses or counts, and so is what comes back, if anything does."""
    function.restype = ctypes.c_int64
    return function(*map(ctypes.c_int64, arguments))


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _longer(texts: PackedTexts, characters: int) -> bool:
    """Whether texts have more characters than that: every byte but the continuing ones begins one."""
    data = texts.data[texts.bounds[0] : texts.bounds[-1]]
    return len(data) > characters and int(np.count_nonzero((data & 0xC0) != 0x80)) > characters


EDGE = cache(lambda: pa.schema([("late", pa.uint32()), ("early", pa.uint32()), ("jaccard", pa.float64())]))

BYTES_PER_PIECE = 8 * 2**20

PLACE = cache(
    lambda: pa.schema([("doc", pa.int64()), ("file", pa.string()), ("first", pa.int64()), ("size", pa.int64())])
)


@dataclass(frozen=True, kw_only=True)
class DedupSettings(MinHashSettings):
    verify: bool = True
    threshold: float = 0.8


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
            hint = "Rename one of the files."
            raise DataError(f"two document files have the name {twice[0]!r}", hint=hint)
        counts = [data_documents.count_part(path) for path in paths]
        return cls(paths=paths, begins=np.cumsum([0, *counts])[:-1].tolist(), documents=sum(counts))

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        """Of each part's name: the numbers of its first document, and of the first one after it."""
        ends = [*self.begins[1:], self.documents]
        return {path.stem: pair for path, pair in zip(self.paths, zip(self.begins, ends, strict=True), strict=True)}

    def parts(self, **more: Any) -> list[Part]:
        return [
            Part(path.stem, {"path": str(path), "begin": begin, **more}, path.stat().st_size)
            for path, begin in zip(self.paths, self.begins, strict=True)
        ]


def _schema(keys: int) -> "pa.Schema":
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


def sign(settings: DedupSettings, chunk: Part, out: Path) -> PartRecord:
    """
    Write signatures/NAME.parquet, what grouping needs to know of each document, and what comparing needs: the sets of
    shingles, sets/NAME.u64, and where each of them is, sets/NAME.parquet.
    """
    names = [f"signatures/{chunk.name}.parquet", f"sets/{chunk.name}.u64", f"sets/{chunk.name}.parquet"]
    schema = _schema(settings.keys)
    barred = _barred(chunk)
    sizes: list[int] = []
    with (
        core_io.whole_file(out / names[0]) as file,
        pq.ParquetWriter(file, schema, compression="lz4") as writer,
        core_io.whole_file(out / names[1]) as sets,
    ):
        for batch in _pieces(data_documents.part_batches(Path(chunk.inputs["path"]), ["id", "text"])):
            texts = PackedTexts.of_arrow(batch.column("text"))
            numbers = np.arange(len(sizes), len(sizes) + len(texts))
            signed = _signed(settings, texts, sets, sizes)
            columns = [
                pa.array(numbers + chunk.inputs["begin"]),
                batch.column("id"),
                pa.array(np.isin(numbers, barred)),
                pc.utf8_length(batch.column("text")).cast(pa.int64()),
                *signed,
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    docs = np.arange(len(sizes)) + chunk.inputs["begin"]
    columns = [docs, [chunk.name] * len(sizes), np.cumsum([0, *sizes])[:-1], sizes]
    with core_io.whole_file(out / names[2]) as file:
        pq.write_table(pa.table(columns, schema=PLACE()), file)
    return {"files": names, "documents": len(sizes)}


def _pieces(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """Slices of about BYTES_PER_PIECE of text: a thousand books at a time would fill the memory."""
    for batch in batches:
        for begin, end in spans_by_size(pc.binary_length(batch.column("text")).to_pylist(), BYTES_PER_PIECE):
            yield batch.slice(begin, end - begin)


def _signed(settings: DedupSettings, texts: PackedTexts, sets: IO[bytes], sizes: list[int]) -> "list[pa.Array]":
    """Counts of shingles, checksums, digests and band keys of texts. Their sets go to a file, their sizes to a list."""
    library = native.library("text")
    find = minhash_signatures if library is None else partial(native_signatures, library)
    minima, digests, counts = [], [], []
    for shingled in _shingled(settings, texts):
        minima.append(find(shingled, settings))
        digests.append(shingled.digests)
        counts.append(np.diff(shingled.bounds))
        for hashes, lengths in _sets(shingled) if settings.verify else ():
            sets.write(hashes.data)
            sizes += lengths
        if not settings.verify:
            sizes += [0] * len(counts[-1])
    checksums = pa.array([zlib.crc32(text) for text in texts.each()], pa.uint64())
    signatures = band_keys(np.concatenate(minima, axis=1), settings)
    keys = (pa.array(column) for column in (*np.concatenate(digests).T, *signatures))
    return [pa.array(np.concatenate(counts)), checksums, *keys]


def _shingled(settings: DedupSettings, texts: PackedTexts) -> Iterator[Shingles]:
    """The shingles of texts, in blocks; each is valid until the next."""
    kind, size = settings.shingles, settings.shingle_size
    if (library := native.library("text")) is not None:
        for a, b in spans_by_size(np.diff(texts.bounds).tolist(), BYTES_PER_BLOCK):
            yield native_shingles(library, texts.subset(a, b), kind, size)
        return
    strings = texts.strings()
    for a, b in spans_by_size(map(len, strings), hashing.CHARACTERS_PER_BLOCK):
        yield shingles(strings[a:b], kind, size)


def _sets(shingled: Shingles) -> Iterator[tuple[Hashes, list[int]]]:
    """The sets of shingles of texts, one after the other, with their sizes."""
    if (library := native.library("text")) is not None:
        sets, sizes = native_sets(library, shingled)
        yield sets, sizes.tolist()
        return
    for first, last in pairwise(shingled.bounds.tolist()):
        hashes = shingle_set(shingled.hashes[first:last])
        yield hashes, [len(hashes)]


def _barred(chunk: Part) -> NDArray[np.int64]:
    """Rows that something else has dropped already."""
    if "barred" not in chunk.inputs:
        return np.zeros(0, np.int64)
    rows: NDArray[np.int64] = pq.read_table(Path(chunk.inputs["barred"]) / f"{chunk.name}.parquet")["row"].to_numpy()
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


def compare(settings: DedupSettings, chunk: Part, out: Path) -> PartRecord:
    """Write edges/NAME.parquet: the pairs of one chunk whose Jaccard reaches the limit."""
    name = f"edges/{chunk.name}.parquet"
    pairs = pq.read_table(chunk.inputs["pairs"])
    columns = [pairs.column(key).to_pylist() for key in pairs.column_names]
    sets = _StoredSets(out / "sets")
    late, early, values = [], [], []
    library = native.library("text")
    measure = jaccard if library is None else partial(native_jaccard, library)
    current, current_set = -1, np.zeros(0, np.uint64)
    for a, b, file_a, first_a, size_a, file_b, first_b, size_b in zip(*columns, strict=True):
        if a != current:
            current, current_set = a, sets.read(file_a, first_a, size_a)
        value = measure(current_set, sets.read(file_b, first_b, size_b))
        if value >= settings.threshold:
            late.append(b)
            early.append(a)
            values.append(value)
    sets.close()
    with core_io.whole_file(out / name) as file:
        pq.write_table(pa.table([late, early, values], schema=EDGE()), file)
    return {"files": [name], "compared": pairs.num_rows}
