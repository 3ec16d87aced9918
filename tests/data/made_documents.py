"""Documents of a folder, as a stage leaves them, for tests of what reads them."""

from collections.abc import Iterable
from pathlib import Path

from bloomery.data.documents import SCHEMA, DocumentRow, PartWriter, part_batches


def write_documents(folder: Path, rows: Iterable[DocumentRow]) -> None:
    """Write documents as one part. Columns that a row lacks are null."""
    with PartWriter(folder / "part-000.parquet") as writer:
        writer.write([dict.fromkeys(SCHEMA().names) | row for row in rows])


def part_rows(path: Path) -> list[DocumentRow]:
    """The documents of one file."""
    return [row for batch in part_batches(path) for row in batch.to_pylist()]
