"""Documents with one id, found out of core: DuckDB groups ids within a limit of memory, and spills to the disk."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bloomery.core.files import PARTIAL
from bloomery.data import document
from bloomery.data.groups import interruptible

MEMORY_BYTES = 2**29
ROW_BITS = 32
"""A place is the number of a file, and below it the row, of which a file has fewer than 2**32."""

Places = NDArray[np.uint64]


def places(paths: Sequence[Path], spill: Path) -> tuple[Places, Places]:
    """
    Of every document whose id an earlier one has: its place, and that of the first with that id; sorted, uint64 [n].

    A place is `file << ROW_BITS | row`, with the files in the order of `paths`. `spill` is a folder for what does not
    fit into memory; it is gone afterwards.
    """
    folder = spill.with_name(spill.name + PARTIAL)
    try:
        limit, spilled = f"{MEMORY_BYTES}B", str(folder)
        with interruptible(), duckdb.connect(config={"memory_limit": limit, "temp_directory": spilled}) as database:
            database.register("ids", _ids(paths))
            database.execute("CREATE TEMP TABLE twice AS SELECT id FROM ids GROUP BY id HAVING count(*) > 1")
            database.register("ids", _ids(paths))
            found = database.execute(
                "SELECT place, min(place) OVER (PARTITION BY id) AS first FROM ids SEMI JOIN twice USING (id) "
                "QUALIFY place > first ORDER BY place"
            ).fetchnumpy()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found["place"], found["first"]


def _ids(paths: Sequence[Path]) -> pa.RecordBatchReader:
    schema = pa.schema([("id", pa.string()), ("place", pa.uint64())])

    def batches() -> Iterator[pa.RecordBatch]:
        for number, path in enumerate(paths):
            row = number << ROW_BITS
            for batch in document.part_batches(path, ["id"]):
                rows = pa.array(np.arange(row, row + batch.num_rows, dtype=np.uint64))
                yield pa.RecordBatch.from_arrays([batch.column("id"), rows], schema=schema)
                row += batch.num_rows

    return pa.RecordBatchReader.from_batches(schema, batches())
