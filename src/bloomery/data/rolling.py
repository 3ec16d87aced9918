"""Documents of one part in parquet files of a bounded size: NAME-000.parquet, NAME-001.parquet and on."""

from pathlib import Path
from types import TracebackType

import pyarrow as pa

from bloomery.data.document import BYTES_PER_PART, ROWS_PER_BATCH, ROWS_PER_PART, PartWriter, Row

BYTES_AT_ONCE = 2**22
"""How much text is held as Python before it becomes an Arrow batch."""


class Rolling:
    """
    Writes documents into one file after the other, each whole or absent; at least one, which may be empty.

    Used as a context manager; on an error the open file is left out. A file ends with the document that brings it to
    `document.BYTES_PER_PART` of text or `document.ROWS_PER_PART` documents.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self.folder, self.name, self.schema = folder, name, schema
        self.files: list[str] = []
        """Names of the files, within the folder."""
        self._file: PartWriter | None = None
        self._held: list[Row] = []
        self._held_bytes = self._rows = self._bytes = 0

    def write(self, row: Row, num_bytes: int) -> None:
        """One document, and how many bytes its text has as UTF-8."""
        self._held.append(row)
        self._held_bytes += num_bytes
        full = self._count(1, num_bytes)
        if full or self._held_bytes >= BYTES_AT_ONCE or len(self._held) >= ROWS_PER_BATCH:
            self._hand_on()
        if full:
            self._close(None, None, None)

    def write_batch(self, batch: pa.RecordBatch, num_bytes: int) -> None:
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
        if kind is None:
            self._hand_on()
            if not self.files:
                self._opened()
        self._close(kind, error, trace)
