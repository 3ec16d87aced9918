"""
Lines and paragraphs that stand in many documents: navigation, notices, slogans. Off, unless a recipe asks for it.

It changes text. A line (or paragraph) counts as the same with other letter case and white space. One that stands in
enough documents that stay is taken out of all of them but the first in the order of keeping; what was taken out is
written down with its place, so that the text can be put together again. Source: Raffel et al. 2020, Exploring the
limits of transfer learning with a unified text-to-text transformer, 2.2, which does it with spans of three sentences.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import files
from bloomery.data import document
from bloomery.data.duplicates import Corpus
from bloomery.data.engine import Part, Record
from bloomery.data.groups import by_part, streamed

Unit = Literal["line", "paragraph"]
ENDS = {"line": re.compile(r"(\r?\n)"), "paragraph": re.compile(r"(\r?\n[^\S\n]*\n\s*)")}

FOUND = pa.schema([("doc", pa.int64()), ("number", pa.int64()), ("hash", pa.uint64())])
CUT = pa.schema([("doc", pa.int64()), ("number", pa.int64()), ("first_id", pa.string())])
"""What goes: its document, its number in it (from 0), and the document in which it stays."""

REMOVED = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),  # of the line or paragraph in the document, from 0
        pa.field("text", pa.string(), nullable=False),  # with what ended it
        pa.field("first_id", pa.string(), nullable=False),  # where it stays
    ]
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    unit: Unit
    min_documents: int
    min_characters: int


def pieces(text: str, unit: Unit) -> list[tuple[str, str]]:
    """The lines or paragraphs of a text, each with what ends it. Joined, they are the text."""
    found = ENDS[unit].split(text)
    return list(zip(found[::2], [*found[1::2], ""], strict=True))


def index(settings: Settings, part: Part, out: Path) -> Record:
    """Write lines/NAME.parquet (FOUND): every line that is long enough, once for each place."""
    name = f"lines/{part.name}.parquet"
    begin = part.given["begin"]
    with files.whole_file(out / name) as file, pq.ParquetWriter(file, FOUND, compression="lz4") as writer:
        for batch in document.part_batches(Path(part.given["path"]), ["text"]):
            rows: list[tuple[int, int, int]] = []
            for doc, text in enumerate(batch.column("text").to_pylist(), begin):
                for number, (line, _) in enumerate(pieces(text, settings.unit)):
                    normal = " ".join(line.lower().split())
                    if len(normal) >= settings.min_characters:
                        digest = hashlib.blake2b(normal.encode("utf-8", "replace"), digest_size=8).digest()
                        rows.append((doc, number, int.from_bytes(digest)))
            begin += batch.num_rows
            columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, FOUND, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=FOUND))
    return {"files": [name]}


def find(connection: duckdb.DuckDBPyConnection, settings: Settings, corpus: Corpus, scratch: Path) -> None:
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
    by_part(streamed(connection, query), CUT, corpus.ends, scratch / "cuts")


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
    batch: pa.RecordBatch, cuts: Sequence[document.Row], unit: Unit
) -> tuple[pa.RecordBatch, list[document.Row], list[int]]:
    """
    A batch of documents without what `cuts` names (row in the batch, number, first_id), and REMOVED rows.

    Last the rows of which only white space would be left; those stay as they are.
    """
    by_row: dict[int, dict[int, str]] = {}
    for cut in cuts:
        by_row.setdefault(cut["row"], {})[cut["number"]] = cut["first_id"]
    texts, ids = batch.column("text").to_pylist(), batch.column("id").to_pylist()
    removed, empty = list[document.Row](), list[int]()
    for row, numbers in by_row.items():
        text, gone = without(texts[row], numbers, unit)
        if not text.strip():
            empty.append(row)
            continue
        texts[row] = text
        facts = ((ids[row], number, piece, numbers[number]) for number, piece in gone)
        removed += [dict(zip(REMOVED.names, fact, strict=True)) for fact in facts]
    place = batch.schema.get_field_index("text")
    field = batch.schema.field(place)
    return batch.set_column(place, field, pa.array(texts, field.type)), removed, empty
