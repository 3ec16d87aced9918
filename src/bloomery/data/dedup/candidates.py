"""
Groups keys out of core with DuckDB: ranks, exact copies, and pairs that share a band.

The keys do not fit into memory. DuckDB sorts and joins within its memory limit and spills the rest into the scratch
folder. Every query has one fixed order, so neither threads nor spilling change the result. Between two queries the
connection is closed, because it would hold its memory while the parts are processed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bloomery.core import io as core_io
from bloomery.core.extras import duckdb, pa, pq
from bloomery.core.signals import interruption
from bloomery.hw.launcher import cores

ROWS_PER_BATCH = 1 << 17
PAIRS_PER_CHUNK = 1 << 17
KEYS_PER_SORT = 1 << 21
SMALLEST_LIMIT = 96 * 2**20  # with less, DuckDB cannot sort at all
BYTES_PER_THREAD = 96 * 2**20

PAIR = cache(lambda: pa.schema([("early", pa.uint32()), ("late", pa.uint32())]))
GONE = cache(lambda: pa.schema([("rank", pa.uint32()), ("twin", pa.uint32()), ("jaccard", pa.float64())]))
CLUSTER = cache(lambda: pa.schema([("rank", pa.uint32()), ("root", pa.uint32())]))


@contextmanager
def connected(scratch: Path, memory_bytes: int) -> "Iterator[duckdb.DuckDBPyConnection]":
    """The scratch folder's tables. `memory_bytes` is for all that DuckDB holds."""
    limit = max(SMALLEST_LIMIT, memory_bytes * 6 // 10)
    with core_io.disk_errors(scratch):
        (scratch / "spill").mkdir(parents=True, exist_ok=True)
    options: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{limit}B",
        "temp_directory": str(scratch / "spill"),
        "threads": str(max(1, min(cores(), limit // BYTES_PER_THREAD))),
    }
    pa.default_memory_pool().release_unused()  # of the pass before: it would add to the memory of DuckDB
    connection = duckdb.connect(str(scratch / "groups.duckdb"), config=options)
    try:
        with interruptible():
            yield connection
    finally:
        connection.close()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt or Terminated where a signal ended a query. DuckDB itself would raise a RuntimeError."""
    try:
        yield
    except (RuntimeError, duckdb.InterruptException) as error:
        if "interrupted" not in str(error).lower():
            raise
        raise interruption() from error


def streamed(connection: "duckdb.DuckDBPyConnection", query: str) -> "Iterator[pa.RecordBatch]":
    yield from connection.sql(query).to_arrow_reader(ROWS_PER_BATCH)


def write_parquet(path: Path, batches: "Iterable[pa.RecordBatch]", schema: "pa.Schema") -> int:
    """Write numbers to a scratch file; returns the count of rows."""
    rows = 0
    with core_io.whole_file(path) as file, pq.ParquetWriter(file, schema, compression="none") as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def rank(connection: "duckdb.DuckDBPyConnection", signatures: str) -> int:
    """
    Make the tables `ranked` (rank, doc, id, d0, d1, shingles) and `exact` (rank, keeper) from all signatures.

    Rank is the order of keeping. Returns the number of documents.
    """
    connection.execute(
        f"CREATE OR REPLACE TABLE sorted AS SELECT doc, id, d0, d1, shingles FROM read_parquet('{signatures}') "
        "WHERE NOT barred ORDER BY length DESC, id, d0, d1, checksum, doc"
    )
    connection.execute("CREATE OR REPLACE VIEW ranked AS SELECT CAST(rowid AS UINTEGER) AS rank, * FROM sorted")
    connection.execute(
        "CREATE OR REPLACE TABLE exact AS SELECT rank, keeper FROM ranked JOIN (SELECT d0, d1, min(rank) AS keeper "
        "FROM ranked GROUP BY d0, d1 HAVING count(*) > 1) USING (d0, d1) WHERE rank <> keeper"
    )
    connection.execute(
        "CREATE OR REPLACE TABLE alive AS SELECT doc, rank FROM ranked WHERE shingles > 0 "
        "AND rank NOT IN (SELECT rank FROM exact)"
    )
    (documents,) = _one(connection, "SELECT count(*) FROM sorted")
    return documents


def _one(connection: "duckdb.DuckDBPyConnection", query: str) -> tuple[int, ...]:
    (row,) = connection.execute(query).fetchall()
    numbers: tuple[int, ...] = row
    return numbers


class Candidates(NamedTuple):
    """How pairs are proposed."""

    signatures: str
    keys: int
    lags: int
    """A document is paired with the first of its bucket and with this many documents right before it."""


def propose(connection: "duckdb.DuckDBPyConnection", how: Candidates, scratch: Path, number: int) -> None:
    """
    Make the table `pairs` (early, late) of the documents in `alive` that share a band, without those in `compared`.

    In a bucket of m documents at most (1 + lags) m pairs are proposed, so that a phrase that a hundred thousand
    documents share costs no ten thousand million comparisons.
    """
    folder = scratch / f"proposed-{number}"
    (documents,) = _one(connection, "SELECT count(*) FROM alive")
    together = min(how.keys, max(1, KEYS_PER_SORT // max(1, documents)))
    for first in range(0, how.keys, together):
        names = ", ".join(f"k{key:02d}" for key in range(first, min(first + together, how.keys)))
        query = (
            f"SELECT unnest([{names}]) AS key, rank FROM read_parquet('{how.signatures}') JOIN alive USING (doc) "
            "ORDER BY key, rank"
        )
        neighbors = _neighbors(streamed(connection, query), how.lags)
        write_parquet(folder / f"{first:02d}.parquet", neighbors, PAIR())
    files = [str(folder / f"{first:02d}.parquet") for first in range(0, how.keys, together)]
    connection.execute(
        "CREATE OR REPLACE TABLE pairs AS SELECT DISTINCT early, late "
        "FROM read_parquet(?) ANTI JOIN compared USING (early, late)",
        [files],
    )


def propose_twins(connection: "duckdb.DuckDBPyConnection") -> None:
    """Add to `pairs`: for every removed document, its kept duplicate with each of its kept neighbors."""
    connection.execute(
        "INSERT INTO pairs SELECT DISTINCT least(twin, other), greatest(twin, other) FROM ("
        "SELECT twin, late AS other FROM gone JOIN edges ON gone.rank = edges.early "
        "UNION SELECT twin, early FROM gone JOIN edges ON gone.rank = edges.late) "
        "WHERE twin <> other AND other NOT IN (SELECT rank FROM gone) "
        "AND (least(twin, other), greatest(twin, other)) NOT IN (SELECT (early, late) FROM compared) "
        "AND (least(twin, other), greatest(twin, other)) NOT IN (SELECT (early, late) FROM pairs)"
    )


def _neighbors(rows: "Iterable[pa.RecordBatch]", lags: int) -> "Iterator[pa.RecordBatch]":
    """Pairs of ranks with equal keys. `rows` have key and rank, sorted by both."""
    keys_before = np.zeros(0, np.uint64)
    ranks_before = np.zeros(0, np.uint32)
    leader = np.uint32(0)
    for batch in rows:
        keys = np.concatenate((keys_before, batch.column("key").to_numpy(zero_copy_only=False)))
        ranks = np.concatenate((ranks_before, batch.column("rank").to_numpy(zero_copy_only=False)))
        seen = len(keys_before)
        new = np.ones(len(keys), np.bool_)
        new[1:] = keys[1:] != keys[:-1]
        new[:seen] = False  # what leads their bucket is carried
        first = np.maximum.accumulate(np.where(new, np.arange(len(keys)), -1))
        leaders = np.where(first >= 0, ranks[first], leader)
        member = np.flatnonzero(~new[seen:]) + seen
        pairs = [(leaders[member], ranks[member])]
        for lag in range(1, lags + 1):
            later = np.arange(max(seen, lag), len(keys))
            later = later[keys[later] == keys[later - lag]]
            pairs.append((ranks[later - lag], ranks[later]))
        early, late = (np.concatenate(side).astype(np.uint32) for side in zip(*pairs, strict=True))
        yield pa.record_batch([early, late], schema=PAIR())
        leader = leaders[-1]
        keep = max(1, lags)
        keys_before, ranks_before = keys[-keep:], ranks[-keep:]


def leave_out_single(connection: "duckdb.DuckDBPyConnection") -> None:
    """Keep in `alive` what stands in a pair: nothing else can be proposed later."""
    connection.execute(
        "CREATE OR REPLACE TABLE alive AS SELECT doc, rank FROM alive "
        "WHERE rank IN (SELECT early FROM pairs UNION SELECT late FROM pairs)"
    )


def by_part(
    batches: "Iterator[pa.RecordBatch]", schema: "pa.Schema", ends: Mapping[str, tuple[int, int]], folder: Path
) -> None:
    """
    Cut a stream that ascends in `doc` where parts begin: folder/NAME.parquet, with the `row` in the part for `doc`.

    `ends`: name of each part, in order, with the numbers of its first document and of the first after it.
    """
    waiting: list[pa.RecordBatch] = []
    for name, (begin, end) in ends.items():
        while not waiting or waiting[-1].column("doc")[-1].as_py() < end:
            batch = next(batches, None)
            if batch is None:
                break
            if batch.num_rows:
                waiting.append(batch)
        table = pa.Table.from_batches(waiting).cast(schema) if waiting else schema.empty_table()
        cut = int(np.searchsorted(table.column("doc").to_numpy(), end))
        rows = pa.array(table.column("doc").to_numpy()[:cut] - begin)
        mine = table.slice(0, cut).set_column(0, "row", rows)
        write_parquet(folder / f"{name}.parquet", mine.to_batches(), mine.schema)
        waiting = [batch for batch in table.slice(cut).to_batches() if batch.num_rows]
