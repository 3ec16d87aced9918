"""
Document schema, Parquet files that are complete or absent, and the validation split.

A document is what the data stages pass on: one Arrow row in a Parquet file.

A document stays complete from the source to the shard. Every stage that handles documents sends each of them to
exactly one output. It is kept, dropped with its reason, or named as a copy of another document. Documents in =
documents out, by test. A document with the ID of an earlier one is rejected without its text.

The documents of a part go into Parquet files of a bounded size: NAME-000.parquet, NAME-001.parquet and so on.

No model is trained on validation documents. The text of a document alone decides its split. The choice is therefore
the same in every run and for every copy.

Neighbors are grouped into batches of a bounded size: texts of so many characters, documents of so many bytes.

Documents that share an ID are found out of core: DuckDB groups the IDs within a memory limit and spills to disk.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import duckdb, pa, pq
from bloomery.core.io import PARTIAL, stable_hash
from bloomery.data.dedup.candidates import interruptible

SCHEMA = cache(
    lambda: pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),  # unique in a run, stable between runs
            pa.field("text", pa.string(), nullable=False),
            pa.field("source", pa.string(), nullable=False),  # the recipe's name for where it came from
            pa.field("domain", pa.string(), nullable=False),  # what it is mixed and reported as
            pa.field("url", pa.string()),
            pa.field("license", pa.string()),
        ]
    )
)
REASON = cache(lambda: pa.schema([pa.field("reason", pa.string(), nullable=False), pa.field("value", pa.float64())]))
"""Additional columns of a dropped document: the rule that dropped it, and the value that the rule saw."""

ROWS_PER_PART = 20_000
BYTES_PER_PART = 64 * 2**20
ROWS_PER_BATCH = 1_000

DocumentRow = dict[str, Any]
"""One document as plain Python: the columns of SCHEMA, and what a stage adds."""


def dropped_schema() -> "pa.Schema":
    return pa.unify_schemas([SCHEMA(), REASON()])


def _stored(schema: "pa.Schema") -> dict[str, Any]:
    """How documents are written: texts and ids are too different for a dictionary, which costs a third of the time."""
    return {"compression": "zstd", "use_dictionary": [name for name in schema.names if name not in ("id", "text")]}


class PartWriter:
    """
    Writes documents into one parquet file, which appears at `path` only when the block ends without an error.

    Used as a context manager, in which `write` and `write_batch` may be mixed. Without documents the file has none.
    """

    def __init__(self, path: Path, schema: "pa.Schema | None" = None) -> None:
        self.path, self.schema = path, SCHEMA() if schema is None else schema
        self.rows = 0
        self._open: list[pa.RecordBatch] = []
        self._open_rows = 0
        self._stack = ExitStack()

    def write(self, rows: Sequence[DocumentRow]) -> None:
        """Documents as plain Python."""
        if rows:
            self.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=self.schema))

    def write_batch(self, batch: "pa.RecordBatch") -> None:
        """Documents with the columns of the schema, in any order."""
        if not batch.num_rows:
            return
        self._open.append(batch.select(self.schema.names).cast(self.schema))
        self._open_rows += batch.num_rows
        self.rows += batch.num_rows
        if self._open_rows >= ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        # pieces of a fixed size, so that the file does not tell how it was handed in
        table = pa.Table.from_batches(self._open, schema=self.schema)
        whole = table.num_rows - table.num_rows % ROWS_PER_BATCH
        self._file.write_table(table.slice(0, whole), row_group_size=ROWS_PER_BATCH)
        self._open, self._open_rows = table.slice(whole).to_batches(), table.num_rows - whole

    def __enter__(self) -> "PartWriter":
        file = self._stack.enter_context(core_io.whole_file(self.path))
        self._file = self._stack.enter_context(pq.ParquetWriter(file, self.schema, **_stored(self.schema)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:  # reports a full disk as such
            if self._open_rows:
                table = pa.Table.from_batches(self._open, schema=self.schema)
                self._file.write_table(table, row_group_size=ROWS_PER_BATCH)


def handed_on(folder: Path) -> Path:
    """Where a stage's folder has the documents that it hands on: kept/ where it dropped some, else documents/."""
    return folder / "kept" if (folder / "kept").is_dir() else folder / "documents"


def parts(folder: Path) -> list[Path]:
    """The parquet files of a folder of documents, in order. Raises DataError where there are none."""
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        raise DataError("holds no documents (part-*.parquet)", where=str(folder), hint="Run the previous stage again.")
    return files


def batches(folder: Path, columns: Sequence[str] | None = None) -> "Iterator[pa.RecordBatch]":
    """Documents as Arrow batches of about a thousand rows, in the order they were written."""
    for path in parts(folder):
        yield from part_batches(path, columns)


def part_batches(path: Path, columns: Sequence[str] | None = None) -> "Iterator[pa.RecordBatch]":
    """The documents of one file, as `batches` gives them."""
    with _whole(path), pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH, columns=list(columns) if columns else None)


def read(folder: Path, columns: Sequence[str] | None = None) -> Iterator[DocumentRow]:
    """Documents one by one, as plain Python."""
    for batch in batches(folder, columns):
        yield from batch.to_pylist()


def count(folder: Path) -> int:
    """How many documents a folder holds, from the files' footers."""
    return sum(count_part(part) for part in parts(folder))


def count_part(path: Path) -> int:
    with _whole(path):
        rows: int = pq.read_metadata(path).num_rows
        return rows


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raises DataError where the block finds a part torn."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        hint = "The file is damaged. Remove manifest.json of its stage and run the recipe again."
        raise DataError(f"cannot be read: {error}", where=str(path), hint=hint) from None


BYTES_AT_ONCE = 2**22
"""How much text is held as Python before it becomes an Arrow batch."""


class Rolling:
    """
    Writes documents into one file after the other, each whole or absent; at least one, which may be empty.

    Used as a context manager; on an error the open file is left out. A file ends with the document that brings it to
    `BYTES_PER_PART` of text or `ROWS_PER_PART` documents.
    """

    def __init__(self, folder: Path, name: str, schema: "pa.Schema") -> None:
        self.folder, self.name, self.schema = folder, name, schema
        self.files: list[str] = []
        """Names of the files, within the folder."""
        self._file: PartWriter | None = None
        self._held: list[DocumentRow] = []
        self._held_bytes = self._rows = self._bytes = 0

    def write(self, row: DocumentRow, num_bytes: int) -> None:
        """One document, and how many bytes its text has as UTF-8."""
        self._held.append(row)
        self._held_bytes += num_bytes
        full = self._count(1, num_bytes)
        if full or self._held_bytes >= BYTES_AT_ONCE or len(self._held) >= ROWS_PER_BATCH:
            self._hand_on()
        if full:
            self._close(None, None, None)

    def write_batch(self, batch: "pa.RecordBatch", num_bytes: int) -> None:
        """Documents with the columns of the schema, and how many bytes their texts have; they go into one file."""
        self._hand_on()
        self._opened().write_batch(batch)
        if self._count(batch.num_rows, num_bytes):
            self._close(None, None, None)

    def _count(self, rows: int, num_bytes: int) -> bool:
        self._rows, self._bytes = self._rows + rows, self._bytes + num_bytes
        return self._rows >= ROWS_PER_PART or self._bytes >= BYTES_PER_PART

    def _hand_on(self) -> None:
        if self._held:
            self._opened().write(self._held)
        self._held, self._held_bytes = [], 0

    def _opened(self) -> PartWriter:
        if self._file is None:
            self.files.append(f"{self.name}-{len(self.files):03d}.parquet")
            self._file = PartWriter(self.folder / self.files[-1], self.schema).__enter__()
        return self._file

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file, self._rows, self._bytes = self._file, None, 0, 0
        if file is not None:
            file.__exit__(kind, error, trace)

    def __enter__(self) -> "Rolling":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._hand_on()
                if not self.files:
                    self._opened()
        except BaseException as failure:
            self._close(type(failure), failure, failure.__traceback__)
            raise
        self._close(kind, error, trace)


LARGEST_SHARE = 0.1
"""Largest validation share of a recipe. The tokenizer, trained before the split, leaves out this share of text."""
CUT = 'one text becomes many with a separator in its source, such as separator="\\n\\n".'
"""A hint for data of few documents that all fall into one split."""


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation share. Case and white space do not matter."""
    return stable_hash(" ".join(text.casefold().split())) < share * 2.0**64


MEMORY_BYTES = 2**29
ROW_BITS = 32
"""A position is the number of a file, and in the low bits the row. A file has fewer than 2**32 rows."""

RowNumbers = NDArray[np.uint64]


def places(paths: Sequence[Path], spill: Path) -> tuple[RowNumbers, RowNumbers]:
    """
    Documents with the id of an earlier document: their positions, and those of the first; sorted, both uint64 [n].

    A position is `file << ROW_BITS | row`, with the files in the order of `paths`. `spill` is a temporary folder for
    data that does not fit into memory.
    """
    folder = spill.with_name(spill.name + PARTIAL)
    try:
        limit, spilled = f"{MEMORY_BYTES}B", str(folder)
        with interruptible(), duckdb.connect(config={"memory_limit": limit, "temp_directory": spilled}) as database:
            database.register("ids", _ids(paths))
            database.execute("CREATE TEMP TABLE twice AS SELECT id FROM ids GROUP BY id HAVING count(*) > 1")
            database.register("ids", _ids(paths))
            columns = database.execute(
                "SELECT place, min(place) OVER (PARTITION BY id) AS first FROM ids SEMI JOIN twice USING (id) "
                "QUALIFY place > first ORDER BY place"
            ).fetchnumpy()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return columns["place"], columns["first"]


def _ids(paths: Sequence[Path]) -> "pa.RecordBatchReader":
    schema = pa.schema([("id", pa.string()), ("place", pa.uint64())])

    def batches() -> "Iterator[pa.RecordBatch]":
        for number, path in enumerate(paths):
            row = number << ROW_BITS
            for batch in part_batches(path, ["id"]):
                rows = pa.array(np.arange(row, row + batch.num_rows, dtype=np.uint64))
                yield pa.RecordBatch.from_arrays([batch.column("id"), rows], schema=schema)
                row += batch.num_rows

    return pa.RecordBatchReader.from_batches(schema, batches())


T = TypeVar("T")


def batched_by_size(
    items: Iterable[T], most: int, *, size: Callable[[Any], int] = len, most_items: int | None = None
) -> Iterator[list[T]]:
    """Lists of neighbors whose sizes sum to at most `most`; a larger item is alone in its list."""
    batch: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if batch and (total + own > most or len(batch) == most_items):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += own
    if batch:
        yield batch


def spans_by_size(sizes: Iterable[int], most: int, *, most_items: int | None = None) -> Iterator[tuple[int, int]]:
    """The same as ranges [begin, end) of numbers, of items with these sizes."""
    begin = 0
    for batch in batched_by_size(sizes, most, size=int, most_items=most_items):
        yield begin, begin + len(batch)
        begin += len(batch)
