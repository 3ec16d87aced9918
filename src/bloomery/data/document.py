"""
Documents: what flows through the data half. One row of Arrow each, in parquet files that are whole or absent.

A document stays whole from the source to the shard. Every stage that looks at documents sends each of them to one
place: kept, dropped with its reason, or named as a copy of another; documents in = documents out, by test.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import files
from bloomery.core.errors import DataError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),  # unique in a run, stable between runs
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # the recipe's name for where it came from
        pa.field("domain", pa.string(), nullable=False),  # what it is mixed and reported as
        pa.field("url", pa.string()),
        pa.field("license", pa.string()),
    ]
)
REASON = pa.schema([pa.field("reason", pa.string(), nullable=False), pa.field("value", pa.float64())])
"""What a dropped document carries besides: the rule that dropped it, and the value that the rule saw."""

ROWS_PER_PART = 20_000
BYTES_PER_PART = 64 * 2**20
ROWS_PER_BATCH = 1_000

Row = dict[str, Any]
"""One document as plain Python: the columns of SCHEMA, and what a stage adds."""


def dropped_schema() -> pa.Schema:
    return pa.unify_schemas([SCHEMA, REASON])


def _stored(schema: pa.Schema) -> dict[str, Any]:
    """How documents are written: texts and ids are too different for a dictionary, which costs a third of the time."""
    return {"compression": "zstd", "use_dictionary": [name for name in schema.names if name not in ("id", "text")]}


class Writer:
    """
    Writes documents into `folder/part-00000.parquet` and on, each part whole or absent.

    Used as a context manager; on an error the open part is left out. Parts roll over by rows and bytes of text.
    """

    def __init__(self, folder: Path, schema: pa.Schema = SCHEMA) -> None:
        self.folder, self.schema = folder, schema
        self.rows = 0
        self._part, self._open, self._bytes = 0, [], 0
        folder.mkdir(parents=True, exist_ok=True)

    _open: list[Row]

    def write(self, row: Row) -> None:
        self._open.append(row)
        self._bytes += len(row["text"])
        self.rows += 1
        if len(self._open) >= ROWS_PER_PART or self._bytes >= BYTES_PER_PART:
            self._flush()

    def write_all(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.write(row)

    def _flush(self) -> None:
        table = pa.Table.from_pylist(self._open, schema=self.schema)
        with files.whole_file(self.folder / f"part-{self._part:05d}.parquet") as file:
            pq.write_table(table, file, row_group_size=ROWS_PER_BATCH, **_stored(self.schema))
        self._part, self._open, self._bytes = self._part + 1, [], 0

    def __enter__(self) -> "Writer":
        for stale in self.folder.glob("part-*"):  # an earlier attempt that died
            stale.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (self._open or self._part == 0):
            self._flush()


class PartWriter:
    """
    Writes documents into one parquet file, which appears at `path` only when the block ends without an error.

    Used as a context manager, in which `write` and `write_batch` may be mixed. Without documents the file has none.
    """

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        self.path, self.schema = path, schema
        self.rows = 0
        self._open: list[pa.RecordBatch] = []
        self._open_rows = 0
        self._stack = ExitStack()

    def write(self, rows: Sequence[Row]) -> None:
        """Documents as plain Python."""
        if rows:
            self.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=self.schema))

    def write_batch(self, batch: pa.RecordBatch) -> None:
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
        file = self._stack.enter_context(files.whole_file(self.path))
        self._file = self._stack.enter_context(pq.ParquetWriter(file, self.schema, **_stored(self.schema)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:  # so that a disk that is full by now is told as such
            if self._open_rows:
                table = pa.Table.from_batches(self._open, schema=self.schema)
                self._file.write_table(table, row_group_size=ROWS_PER_BATCH)


def handed_on(folder: Path) -> Path:
    """Where a stage's folder has the documents that it hands on: kept/ where it dropped some, else documents/."""
    return folder / "kept" if (folder / "kept").is_dir() else folder / "documents"


def parts(folder: Path) -> list[Path]:
    """The parquet files of a folder of documents, in order. Raises DataError where there are none."""
    found = sorted(folder.glob("part-*.parquet"))
    if not found:
        raise DataError("holds no documents (part-*.parquet)", where=str(folder), cure="Run the stage before again.")
    return found


def batches(folder: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Documents as Arrow batches of about a thousand rows, in the order they were written."""
    for part in parts(folder):
        yield from part_batches(part, columns)


def part_batches(part: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The documents of one file, as `batches` gives them."""
    with _whole(part), pq.ParquetFile(part) as file:
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH, columns=list(columns) if columns else None)


def part_rows(part: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The documents of one file, as `read` gives them."""
    for batch in part_batches(part, columns):
        yield from batch.to_pylist()


def read(folder: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Documents one by one, as plain Python."""
    for batch in batches(folder, columns):
        yield from batch.to_pylist()


def count(folder: Path) -> int:
    """How many documents a folder holds, from the files' footers."""
    return sum(count_part(part) for part in parts(folder))


def count_part(part: Path) -> int:
    """How many documents one file holds."""
    with _whole(part):
        rows: int = pq.read_metadata(part).num_rows
        return rows


@contextmanager
def _whole(part: Path) -> Iterator[None]:
    """Raises DataError where the block finds a part torn."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        cure = "It is torn. Remove its stage's manifest.json and run the recipe again."
        raise DataError(f"cannot be read: {error}", where=str(part), cure=cure) from None
