"""
Removes exact and near-duplicates from a corpus of any size, optionally also frequent lines.

The search makes three passes over the parts of the corpus, with out-of-core grouping between them:

    sign      part               -> IDs, lengths, digests, band keys; sets of shingles       in parallel
    group     signatures         -> ranks, exact copies, pairs that share a band             DuckDB
    compare   pairs, sets        -> edges: pairs whose exact Jaccard reaches the threshold   in parallel
    decide    edges              -> removed documents, each with its kept duplicate          in order of rank
    write     part, verdicts     -> kept/ and duplicates/                                    in parallel

Group, compare and decide repeat with the documents that remain. They stop when no new pair is proposed, or after
ROUNDS rounds. Everything between the passes is in files of a scratch folder, which the caller removes.

The decision goes from the best document to the worst, so each removed document has a duplicate that is kept. Rank 0
is the longest document; of equally long documents the smaller ID comes first. An edge says that two documents are
similar enough. A document is removed if and only if a kept document of lower rank is its neighbor. The kept
documents are the first maximal independent set in the order of ranks. Edges stream by, sorted by their later end.
Memory holds one byte per document, and eight more while clusters are formed.

Lines and paragraphs that occur in many documents are navigation, notices and slogans. Their removal changes text, so it
is off unless a recipe asks for it. Lines (or paragraphs) are equal if they differ only in letter case and white space.
A line that occurs in enough kept documents is removed from all but the first in rank. Each removed line is recorded
with its position, so that the text can be restored. Source: Raffel et al. 2020, Exploring the limits of transfer
learning with a unified text-to-text transformer, 2.2, which does it with spans of three sentences.

Search, decision and line removal share one file because they share ranks and read the same parts in turn.
"""

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import duckdb, pa, pq
from bloomery.data import documents as data_documents
from bloomery.data.dedup import candidates
from bloomery.data.dedup.candidates import by_part, streamed
from bloomery.data.dedup.minhash import Corpus, DedupSettings, compare, sign
from bloomery.data.executor import ExecutorConfig, Part, PartRecord, run_parts
from bloomery.hw.launcher import cores

BYTES_PER_DOCUMENT = 9
"""What deciding holds in memory for each document."""


class Duplicate(NamedTuple):
    """A removed document, and the kept document that it duplicates."""

    rank: int
    twin: int
    jaccard: float


def decide(edges: "Iterable[pa.RecordBatch]", documents: int) -> Iterator[Duplicate]:
    """
    The documents that go, by ascending rank, each with the kept neighbor that is most similar to it.

    `edges` have the columns late, early (ranks, early < late) and jaccard, sorted by late and early. Of equally
    similar neighbors it names the first in rank.
    """
    gone = bytearray(documents)
    current, twin, best = -1, -1, -1.0
    for batch in edges:
        columns = (batch.column(name).to_pylist() for name in ("late", "early", "jaccard"))
        for late, early, jaccard in zip(*columns, strict=True):
            if late != current:
                if twin >= 0:
                    gone[current] = 1
                    yield Duplicate(current, twin, best)
                current, twin, best = late, -1, -1.0
            if jaccard > best and not gone[early]:
                twin, best = early, jaccard
    if twin >= 0:
        yield Duplicate(current, twin, best)


def clusters(edges: "Iterable[pa.RecordBatch]", documents: int) -> Iterator[tuple[int, int]]:
    """
    Of every document that has an edge: its rank, and the smallest rank that edges lead to.

    `edges` have the columns late and early, in any order.
    """
    parents = array("q", range(documents))
    linked = bytearray(documents)

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for batch in edges:
        for late, early in zip(batch.column("late").to_pylist(), batch.column("early").to_pylist(), strict=True):
            linked[late] = linked[early] = 1
            a, b = root(late), root(early)
            if a != b:
                parents[max(a, b)] = min(a, b)
    rank = linked.find(1)
    while rank >= 0:
        yield rank, root(rank)
        rank = linked.find(1, rank + 1)


Unit = Literal["line", "paragraph"]
ENDS = {"line": re.compile(r"(\r?\n)"), "paragraph": re.compile(r"(\r?\n[^\S\n]*\n\s*)")}

FOUND = cache(lambda: pa.schema([("doc", pa.int64()), ("number", pa.int64()), ("hash", pa.uint64())]))
CUT = cache(lambda: pa.schema([("doc", pa.int64()), ("number", pa.int64()), ("first_id", pa.string())]))
"""What goes: its document, its number in it (from 0), and the document in which it stays."""

REMOVED = cache(
    lambda: pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("number", pa.int64(), nullable=False),  # of the line or paragraph in the document, from 0
            pa.field("text", pa.string(), nullable=False),  # with what ended it
            pa.field("first_id", pa.string(), nullable=False),  # where it stays
        ]
    )
)


@dataclass(frozen=True, kw_only=True)
class RepeatedLineSettings:
    unit: Unit
    min_documents: int
    min_characters: int


def pieces(text: str, unit: Unit) -> list[tuple[str, str]]:
    """The lines or paragraphs of a text, each with what ends it. Joined, they are the text."""
    segments = ENDS[unit].split(text)
    return list(zip(segments[::2], [*segments[1::2], ""], strict=True))


def index(settings: RepeatedLineSettings, chunk: Part, out: Path) -> PartRecord:
    """Write lines/NAME.parquet (FOUND): every line that is long enough, once for each occurrence."""
    name = f"lines/{chunk.name}.parquet"
    begin = chunk.inputs["begin"]
    with core_io.whole_file(out / name) as file, pq.ParquetWriter(file, FOUND(), compression="lz4") as writer:
        for batch in data_documents.part_batches(Path(chunk.inputs["path"]), ["text"]):
            rows: list[tuple[int, int, int]] = []
            for doc, text in enumerate(batch.column("text").to_pylist(), begin):
                for number, (line, _) in enumerate(pieces(text, settings.unit)):
                    normal = " ".join(line.lower().split())
                    if len(normal) >= settings.min_characters:
                        digest = hashlib.blake2b(normal.encode("utf-8", "replace"), digest_size=8).digest()
                        rows.append((doc, number, int.from_bytes(digest)))
            begin += batch.num_rows
            columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, FOUND(), strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=FOUND()))
    return {"files": [name]}


def find(
    connection: "duckdb.DuckDBPyConnection", settings: RepeatedLineSettings, corpus: Corpus, scratch: Path
) -> None:
    """Write cuts/NAME.parquet for each part: `row`, `number` and `first_id` of what is to go, in order."""
    lines = str(scratch / "lines" / "*.parquet").replace("'", "''")
    connection.execute(
        "CREATE OR REPLACE TABLE stay AS SELECT doc, rank FROM ranked "
        "WHERE rank NOT IN (SELECT rank FROM gone) AND rank NOT IN (SELECT rank FROM exact)"
    )
    connection.execute(
        "CREATE OR REPLACE TABLE repeated AS SELECT hash, min(rank) AS first FROM "
        f"(SELECT DISTINCT hash, rank FROM read_parquet('{lines}') JOIN stay USING (doc)) "
        f"GROUP BY hash HAVING count(*) >= {settings.min_documents}"
    )
    query = (
        f"SELECT stay.doc AS doc, number, best.id AS first_id FROM read_parquet('{lines}') JOIN stay USING (doc) "
        "JOIN repeated USING (hash) JOIN ranked best ON best.rank = first WHERE stay.rank <> first "
        "ORDER BY stay.doc, number"
    )
    by_part(streamed(connection, query), CUT(), corpus.ends, scratch / "cuts")


def without(text: str, numbers: Mapping[int, str], unit: Unit) -> tuple[str, list[tuple[int, str]]]:
    """A text without some of its lines, and those lines with what ended them, by number."""
    kept, gone = [], []
    for number, (line, end) in enumerate(pieces(text, unit)):
        if number in numbers:
            gone.append((number, line + end))
        else:
            kept.append(line + end)
    return "".join(kept), gone


def thinned(
    batch: "pa.RecordBatch", cuts: Sequence[data_documents.DocumentRow], unit: Unit
) -> "tuple[pa.RecordBatch, list[data_documents.DocumentRow], list[int]]":
    """
    A batch of documents without what `cuts` names (row in the batch, number, first_id), and REMOVED rows.

    Last the rows of which only white space would be left; those stay as they are.
    """
    by_row: dict[int, dict[int, str]] = {}
    for cut in cuts:
        by_row.setdefault(cut["row"], {})[cut["number"]] = cut["first_id"]
    texts, ids = batch.column("text").to_pylist(), batch.column("id").to_pylist()
    removed, empty = list[data_documents.DocumentRow](), list[int]()
    for row, numbers in by_row.items():
        text, gone = without(texts[row], numbers, unit)
        if not text.strip():
            empty.append(row)
            continue
        texts[row] = text
        facts = ((ids[row], number, piece, numbers[number]) for number, piece in gone)
        removed += [dict(zip(REMOVED().names, fact, strict=True)) for fact in facts]
    column = batch.schema.get_field_index("text")
    field = batch.schema.field(column)
    return batch.set_column(column, field, pa.array(texts, field.type)), removed, empty


ROUNDS = 4
LAGS = 3
BYTES_PER_WORKER = 300 * 2**20
"""What a worker process needs: Python with its libraries, a batch of documents, and what is made of it."""

VERDICT = cache(
    lambda: pa.schema(
        [
            ("doc", pa.int64()),
            ("reason", pa.string()),
            ("value", pa.float64()),
            ("kept_id", pa.string()),
            ("cluster", pa.string()),
        ]
    )
)
"""Why a document goes: "exact" or "near", its exact Jaccard with the one that stays, and the best of its cluster."""


CLUSTERS = "clusters.parquet"
MEMBER = cache(lambda: pa.schema([("cluster", pa.string()), ("id", pa.string())]))
"""Every document that is linked to another, also a kept one: the id of the best of its cluster, and its own."""


def fitting(engine: ExecutorConfig, memory_bytes: int) -> ExecutorConfig:
    """The engine with no more workers than a memory budget has room for; one is this process itself."""
    room = max(1, memory_bytes // BYTES_PER_WORKER)
    workers = engine.workers or cores()
    if engine.kind == "ray" or workers <= room:
        return engine
    return engine.model_copy(update={"workers": room})


@dataclass(frozen=True, kw_only=True)
class Deduplicator:
    """One search for duplicates: what it looks at, how, and where it keeps its scratch files."""

    settings: DedupSettings
    corpus: Corpus
    scratch: Path
    engine: ExecutorConfig
    memory_bytes: int
    barred: Path | None = None
    """A folder with NAME.parquet for each part: `row` of the documents that do not take part."""
    lines: RepeatedLineSettings | None = None

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
            run_parts(self.engine, index, self.lines, parts, self.scratch, what="lines")
            with self._connected() as connection:
                find(connection, self.lines, self.corpus, self.scratch)
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
        return candidates.connected(self.scratch, self.memory_bytes)

    @property
    def _signatures(self) -> str:
        return str(self.scratch / "signatures" / "*.parquet").replace("'", "''")

    @property
    def _candidates(self) -> candidates.Candidates:
        return candidates.Candidates(self._signatures, self.settings.keys, LAGS)

    def _group(self, connection: "duckdb.DuckDBPyConnection") -> int:
        """Ranks, exact copies and the first pairs. Returns the number of documents."""
        documents = candidates.rank(connection, self._signatures)
        if documents * BYTES_PER_DOCUMENT > self.memory_bytes:
            hint = f"Set at least memory_bytes={documents * BYTES_PER_DOCUMENT}, or use fewer documents."
            raise DataError(f"memory_bytes={self.memory_bytes} is too little for {documents} documents", hint=hint)
        connection.execute("CREATE TABLE compared (early UINTEGER, late UINTEGER)")
        connection.execute("CREATE TABLE edges (late UINTEGER, early UINTEGER, jaccard DOUBLE)")
        connection.execute("CREATE TABLE gone (rank UINTEGER, twin UINTEGER, jaccard DOUBLE)")
        candidates.propose(connection, self._candidates, self.scratch, 0)
        candidates.leave_out_single(connection)
        return documents

    def _place(self, connection: "duckdb.DuckDBPyConnection") -> list[Part]:
        """Make the table of the positions of all sets, and the chunks of the first round."""
        places = str(self.scratch / "sets" / "*.parquet").replace("'", "''")
        connection.execute(
            "CREATE TABLE places AS SELECT rank, file, first, size "
            f"FROM read_parquet('{places}') JOIN alive USING (doc)"
        )
        return self._chunks(connection, 0)

    def _chunks(self, connection: "duckdb.DuckDBPyConnection", number: int) -> list[Part]:
        """Write the pairs of a round in chunks, with the positions of their sets. Skip pairs of too different sizes."""
        query = (
            "SELECT early, late, a.file AS file_a, a.first AS first_a, a.size AS size_a, b.file AS file_b, "
            "b.first AS first_b, b.size AS size_b FROM pairs JOIN places a ON early = a.rank "
            "JOIN places b ON late = b.rank "
            f"WHERE least(a.size, b.size) >= {self.settings.threshold - 1e-9} * greatest(a.size, b.size) "
            "ORDER BY early, late"
        )
        chunks: list[Part] = []
        for table in _cut(candidates.streamed(connection, query), candidates.PAIRS_PER_CHUNK):
            name = f"round-{number}-{len(chunks):05d}"
            path = self.scratch / "pairs" / f"{name}.parquet"
            candidates.write_parquet(path, table.to_batches(), table.schema)
            chunks.append(Part(name, {"pairs": str(path)}, table.num_rows * 8000))
        connection.execute("INSERT INTO compared SELECT * FROM pairs")
        return chunks

    def _decide(self, connection: "duckdb.DuckDBPyConnection", edges: Sequence[str], documents: int) -> None:
        """Make the tables `edges`, of all rounds so far, and `gone`."""
        connection.execute("CREATE OR REPLACE TABLE edges AS SELECT * FROM read_parquet(?)", [list(edges)])
        decided = decide(
            candidates.streamed(connection, "SELECT late, early, jaccard FROM edges ORDER BY late, early"), documents
        )
        self._store(connection, "gone", _batched(decided, candidates.GONE()), candidates.GONE())

    def _propose_more(self, connection: "duckdb.DuckDBPyConnection", number: int) -> list[Part]:
        """The pairs of another round, of documents that still stay."""
        connection.execute("CREATE OR REPLACE TABLE alive AS SELECT * FROM alive ANTI JOIN gone USING (rank)")
        candidates.propose(connection, self._candidates, self.scratch, number)
        candidates.propose_twins(connection)
        return self._chunks(connection, number)

    def _store(
        self, connection: "duckdb.DuckDBPyConnection", table: str, rows: "Iterator[pa.RecordBatch]", schema: "pa.Schema"
    ) -> None:
        """Make a table of numbers that were computed while a query was read."""
        path = self.scratch / f"{table}.parquet"
        candidates.write_parquet(path, rows, schema)
        source = str(path).replace("'", "''")
        connection.execute(f"CREATE OR REPLACE TABLE {table} AS SELECT * FROM read_parquet('{source}')")

    def _conclude(self, connection: "duckdb.DuckDBPyConnection", documents: int) -> None:
        """Write the verdicts: of near copies, and of exact copies of what is kept or of a near copy."""
        if not self.settings.verify:
            connection.execute("CREATE OR REPLACE TABLE edges AS SELECT late, early, NULL AS jaccard FROM pairs")
        linked = clusters(candidates.streamed(connection, "SELECT late, early FROM edges"), documents)
        self._store(connection, "clusters", _batched(linked, candidates.CLUSTER()), candidates.CLUSTER())
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
        verdicts = candidates.streamed(connection, query)
        candidates.by_part(verdicts, VERDICT(), self.corpus.ends, self.scratch / "verdicts")
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
        candidates.write_parquet(self.scratch / "clusters" / CLUSTERS, candidates.streamed(connection, query), MEMBER())


def _batched(rows: Iterator[tuple[Any, ...]], schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
    waiting: list[tuple[Any, ...]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == candidates.ROWS_PER_BATCH:
            yield _batch(waiting, schema)
            waiting = []
    if waiting:
        yield _batch(waiting, schema)


def _batch(rows: list[tuple[Any, ...]], schema: "pa.Schema") -> "pa.RecordBatch":
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.record_batch(columns, schema=schema)


def _cut(batches: "Iterator[pa.RecordBatch]", rows: int) -> "Iterator[pa.Table]":
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
