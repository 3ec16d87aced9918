"""
Duplicates of a corpus of any size: three passes over its parts, and grouping out of core between them.

    sign      part               -> ids, lengths, digests, band keys; sets of shingles     in parallel
    group     signatures         -> ranks, exact copies, pairs that share a band           DuckDB
    compare   pairs, sets        -> edges: pairs whose exact Jaccard reaches the limit     in parallel
    decide    edges              -> who goes, and for which kept twin                      in order of rank
    write     part, verdicts     -> kept/ and duplicates/                                  in parallel

Group, compare and decide are repeated with the documents that still stay, until no new pair is proposed, at most
ROUNDS times. Everything between the passes is in files of a scratch folder, which `find` leaves to its caller.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from bloomery.core.errors import DataError
from bloomery.data import groups, keep, repeated_lines
from bloomery.data.duplicates import Corpus, Settings, compare, sign
from bloomery.data.engine import Engine, Part, run_parts
from bloomery.hw.launcher import cores

ROUNDS = 4
LAGS = 3
BYTES_PER_WORKER = 300 * 2**20
"""What a worker process needs: Python with its libraries, a batch of documents, and what is made of it."""

VERDICT = pa.schema(
    [
        ("doc", pa.int64()),
        ("reason", pa.string()),
        ("value", pa.float64()),
        ("kept_id", pa.string()),
        ("cluster", pa.string()),
    ]
)
"""Why a document goes: "exact" or "near", its exact Jaccard with the one that stays, and the best of its cluster."""


CLUSTERS = "clusters.parquet"
MEMBER = pa.schema([("cluster", pa.string()), ("id", pa.string())])
"""Every document that is linked to another, also a kept one: the id of the best of its cluster, and its own."""


def fitting(engine: Engine, memory_bytes: int) -> Engine:
    """The engine with no more workers than a memory budget has room for; one is this process itself."""
    room = max(1, memory_bytes // BYTES_PER_WORKER)
    wanted = engine.workers or cores()
    if engine.kind == "ray" or wanted <= room:
        return engine
    return engine.model_copy(update={"workers": room})


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search for duplicates: what it looks at, how, and where it keeps its scratch files."""

    settings: Settings
    corpus: Corpus
    scratch: Path
    engine: Engine
    memory_bytes: int
    barred: Path | None = None
    """A folder with NAME.parquet for each part: `row` of the documents that do not take part."""
    lines: repeated_lines.Settings | None = None

    def find(self) -> Mapping[str, int]:
        """Write verdicts/NAME.parquet, and cuts/NAME.parquet, for each part; returns how many pairs were compared."""
        more = {} if self.barred is None else {"barred": str(self.barred)}
        parts = self.corpus.parts(**more)
        run_parts(self.engine, sign, self.settings, parts, self.scratch, what="sign")
        (self.scratch / "groups.duckdb").unlink(missing_ok=True)  # of an attempt that was killed
        with self._connected() as connection:
            documents = self._group(connection)
        compared = self._verify(documents) if self.settings.verify else 0
        with self._connected() as connection:
            self._conclude(connection, documents)
        if self.lines is not None:
            run_parts(self.engine, repeated_lines.index, self.lines, parts, self.scratch, what="lines")
            with self._connected() as connection:
                repeated_lines.find(connection, self.lines, self.corpus, self.scratch)
        return {"compared": compared}

    def _verify(self, documents: int) -> int:
        """Compare what is proposed, decide, and propose again. Returns how many pairs were compared."""
        compared, edges = 0, list[str]()
        with self._connected() as connection:
            chunks = self._place(connection)
        for number in range(ROUNDS):
            if not chunks:
                break
            records = run_parts(
                self.engine, compare, self.settings, chunks, self.scratch, what="compare", unit="chunks"
            )
            compared += sum(record["compared"] for record in records)
            edges += [str(self.scratch / file) for record in records for file in record["files"]]
            with self._connected() as connection:
                self._decide(connection, edges, documents)
                chunks = self._propose_more(connection, number + 1) if number + 1 < ROUNDS else []
        return compared

    def _connected(self) -> Any:
        return groups.connected(self.scratch, self.memory_bytes)

    @property
    def _signatures(self) -> str:
        return str(self.scratch / "signatures" / "*.parquet").replace("'", "''")

    @property
    def _candidates(self) -> groups.Candidates:
        return groups.Candidates(self._signatures, self.settings.keys, LAGS)

    def _group(self, connection: duckdb.DuckDBPyConnection) -> int:
        """Ranks, exact copies and the first pairs. Returns the number of documents."""
        documents = groups.rank(connection, self._signatures)
        if documents * keep.BYTES_PER_DOCUMENT > self.memory_bytes:
            cure = f"Give at least memory_bytes={documents * keep.BYTES_PER_DOCUMENT}, or deduplicate in pieces."
            raise DataError(f"memory_bytes={self.memory_bytes} is too little for {documents} documents", cure=cure)
        connection.execute("CREATE TABLE compared (early UINTEGER, late UINTEGER)")
        connection.execute("CREATE TABLE edges (late UINTEGER, early UINTEGER, jaccard DOUBLE)")
        connection.execute("CREATE TABLE gone (rank UINTEGER, twin UINTEGER, jaccard DOUBLE)")
        groups.propose(connection, self._candidates, self.scratch, 0)
        groups.leave_out_single(connection)
        return documents

    def _place(self, connection: duckdb.DuckDBPyConnection) -> list[Part]:
        """Make the table `places`, of where sets are, and the chunks of the first round."""
        places = str(self.scratch / "sets" / "*.parquet").replace("'", "''")
        connection.execute(
            "CREATE TABLE places AS SELECT rank, file, first, size "
            f"FROM read_parquet('{places}') JOIN alive USING (doc)"
        )
        return self._chunks(connection, 0)

    def _chunks(self, connection: duckdb.DuckDBPyConnection, number: int) -> list[Part]:
        """Write the pairs of a round in chunks, with the places of their sets. Too different sizes cannot be."""
        query = (
            "SELECT early, late, a.file AS file_a, a.first AS first_a, a.size AS size_a, b.file AS file_b, "
            "b.first AS first_b, b.size AS size_b FROM pairs JOIN places a ON early = a.rank "
            "JOIN places b ON late = b.rank "
            f"WHERE least(a.size, b.size) >= {self.settings.min_jaccard - 1e-9} * greatest(a.size, b.size) "
            "ORDER BY early, late"
        )
        chunks: list[Part] = []
        for table in _cut(groups.streamed(connection, query), groups.PAIRS_PER_CHUNK):
            name = f"round-{number}-{len(chunks):05d}"
            place = self.scratch / "pairs" / f"{name}.parquet"
            groups.write_parquet(place, table.to_batches(), table.schema)
            chunks.append(Part(name, {"pairs": str(place)}, table.num_rows * 8000))
        connection.execute("INSERT INTO compared SELECT * FROM pairs")
        return chunks

    def _decide(self, connection: duckdb.DuckDBPyConnection, edges: Sequence[str], documents: int) -> None:
        """Make the tables `edges`, of all rounds so far, and `gone`."""
        connection.execute("CREATE OR REPLACE TABLE edges AS SELECT * FROM read_parquet(?)", [list(edges)])
        decided = keep.decide(
            groups.streamed(connection, "SELECT late, early, jaccard FROM edges ORDER BY late, early"), documents
        )
        self._store(connection, "gone", _batched(decided, groups.GONE), groups.GONE)

    def _propose_more(self, connection: duckdb.DuckDBPyConnection, number: int) -> list[Part]:
        """The pairs of another round, of documents that still stay."""
        connection.execute("CREATE OR REPLACE TABLE alive AS SELECT * FROM alive ANTI JOIN gone USING (rank)")
        groups.propose(connection, self._candidates, self.scratch, number)
        groups.propose_twins(connection)
        return self._chunks(connection, number)

    def _store(
        self, connection: duckdb.DuckDBPyConnection, table: str, rows: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> None:
        """Make a table of numbers that were computed while a query was read."""
        place = self.scratch / f"{table}.parquet"
        groups.write_parquet(place, rows, schema)
        source = str(place).replace("'", "''")
        connection.execute(f"CREATE OR REPLACE TABLE {table} AS SELECT * FROM read_parquet('{source}')")

    def _conclude(self, connection: duckdb.DuckDBPyConnection, documents: int) -> None:
        """Write the verdicts: of near copies, and of exact copies of what is kept or of a near copy."""
        if not self.settings.verify:
            connection.execute("CREATE OR REPLACE TABLE edges AS SELECT late, early, NULL AS jaccard FROM pairs")
        linked = keep.clusters(groups.streamed(connection, "SELECT late, early FROM edges"), documents)
        self._store(connection, "clusters", _batched(linked, groups.CLUSTER), groups.CLUSTER)
        if not self.settings.verify:
            connection.execute(
                "CREATE OR REPLACE TABLE gone AS SELECT rank, root AS twin, CAST(NULL AS DOUBLE) AS jaccard "
                "FROM clusters WHERE rank <> root"
            )
        query = """
            WITH verdicts AS (
                SELECT rank, twin AS kept, jaccard AS value, 'near' AS reason, rank AS linked FROM gone
                UNION ALL
                SELECT exact.rank, coalesce(twin, keeper), CASE WHEN twin IS NULL THEN 1.0 ELSE jaccard END,
                    CASE WHEN twin IS NULL THEN 'exact' ELSE 'near' END, keeper
                FROM exact LEFT JOIN gone ON keeper = gone.rank
            )
            SELECT me.doc AS doc, reason, value, kept.id AS kept_id, best.id AS cluster
            FROM verdicts JOIN ranked me USING (rank) JOIN ranked kept ON kept.rank = verdicts.kept
            LEFT JOIN clusters ON clusters.rank = linked
            JOIN ranked best ON best.rank = coalesce(root, kept)
            ORDER BY doc
        """
        verdicts = groups.streamed(connection, query)
        groups.by_part(verdicts, VERDICT, self.corpus.ends, self.scratch / "verdicts")
        connection.execute(
            "CREATE OR REPLACE TABLE members AS SELECT rank, root FROM clusters UNION ALL "
            "SELECT exact.rank, coalesce(root, keeper) FROM exact LEFT JOIN clusters ON keeper = clusters.rank"
        )
        connection.execute(
            "INSERT INTO members SELECT DISTINCT keeper, keeper FROM exact "
            "WHERE keeper NOT IN (SELECT rank FROM clusters)"
        )
        query = (
            "SELECT best.id AS cluster, me.id AS id FROM members JOIN ranked me USING (rank) "
            "JOIN ranked best ON best.rank = root ORDER BY root, members.rank"
        )
        groups.write_parquet(self.scratch / "clusters" / CLUSTERS, groups.streamed(connection, query), MEMBER)


def _batched(rows: Iterator[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches."""
    waiting: list[tuple[Any, ...]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == groups.ROWS_PER_BATCH:
            yield _batch(waiting, schema)
            waiting = []
    if waiting:
        yield _batch(waiting, schema)


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.record_batch(columns, schema=schema)


def _cut(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of exactly so many rows, but for the last."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        while count >= rows:
            table = pa.Table.from_batches(waiting)
            yield table.slice(0, rows)
            waiting, count = table.slice(rows).to_batches(), count - rows
    if count:
        yield pa.Table.from_batches(waiting)
