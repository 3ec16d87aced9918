"""Stage dedup: of exact and near copies one is kept, and every other goes to duplicates/ and names it."""

import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.data import document
from bloomery.data.deduplicate import CLUSTERS, Search, fitting
from bloomery.data.duplicates import Corpus, Settings
from bloomery.data.engine import Part, Record, run_parts
from bloomery.hw.host import Host, free_bytes
from bloomery.stages import decontaminate
from bloomery.stages.config import Dedup

REASONS = pa.schema(
    [
        *document.REASON,
        pa.field("kept_id", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
    ]
)
"""
Of a duplicate, beside its own columns: `reason` is "exact" or "near", `value` the exact Jaccard with the document
`kept_id` (null where nothing was verified), `cluster` the id of the best document that it is linked to.
"""

SCRATCH = "scratch"


def settings(config: Dedup) -> Settings:
    return Settings(
        permutations=config.permutations,
        bands=config.bands,
        bandings=config.bandings if config.verify else 1,
        shingles=config.shingles,
        shingle_size=config.shingle_size,
        verify=config.verify,
        min_jaccard=config.min_jaccard,
        seed=config.seed,
    )


def digest(config: Dedup) -> str:
    """Of the content of the tasks that documents are compared with."""
    return decontaminate.digest(config.decontaminate) if config.decontaminate else ""


def run(config: Dedup, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Write kept/ and duplicates/ (REASONS). `inputs["filter"]` is a folder with kept/."""
    source = document.handed_on(inputs["filter"])
    if not document.count(source):
        raise DataError("holds no documents", where=str(source), cure="Loosen the rules in [filter].")
    return deduplicate(config, document.parts(source), out)


def deduplicate(config: Dedup, paths: list[Path], out: Path) -> dict[str, Any]:
    """The same for files of documents anywhere: each gives kept/NAME and duplicates/NAME of its own name."""
    corpus = Corpus.of(paths)
    scratch = out / SCRATCH
    memory_bytes = config.memory_bytes or free_bytes(Host.here()) // 2
    engine = fitting(config.engine, memory_bytes)
    barred = decontaminate.check(config.decontaminate, corpus, scratch, engine) if config.decontaminate else None
    search = Search(
        settings=settings(config),
        corpus=corpus,
        scratch=scratch,
        engine=engine,
        memory_bytes=memory_bytes,
        barred=barred,
    )
    found = dict(search.find())
    more = {"barred": str(barred)} if barred else {}
    parts = corpus.parts(verdicts=str(scratch / "verdicts"), **more)
    records = run_parts(engine, write, None, parts, out, what="dedup")
    if barred:
        found["hits"] = sum(decontaminate.list_hits(corpus, scratch, out).values())
    with files.whole_file(out / CLUSTERS) as file:
        file.write((scratch / "clusters" / CLUSTERS).read_bytes())
    shutil.rmtree(scratch)
    return {**_told(records), **found}


def write(config: None, part: Part, out: Path) -> Record:
    """Write kept/NAME, duplicates/NAME and, where tasks are looked for, dropped/NAME; count what went where."""
    source = Path(part.given["path"])
    verdicts = pq.read_table(Path(part.given["verdicts"]) / f"{part.name}.parquet")
    rows = verdicts.column("row").to_numpy()
    barred = decontaminate.barred_rows(part)
    whole = pq.read_schema(source).remove_metadata()
    schemas = {"kept": whole, "duplicates": pa.schema([*whole, *REASONS])}
    if "barred" in part.given:
        schemas["dropped"] = pa.schema([*whole, *document.REASON])
    by_domain: dict[str, Counter[str]] = {}
    begin = 0
    with ExitStack() as stack:
        out_of = {
            name: stack.enter_context(document.PartWriter(out / name / f"{part.name}.parquet", schema))
            for name, schema in schemas.items()
        }
        for batch in document.part_batches(source):
            end = begin + batch.num_rows
            first, last = np.searchsorted(rows, (begin, end)).tolist()
            mine = [row for row in barred if begin <= row["row"] < end]
            fate = np.zeros(batch.num_rows, np.int8)
            fate[rows[first:last] - begin] = 1
            fate[[row["row"] - begin for row in mine]] = 2
            begin = end
            kept, copies, told = (batch.filter(pa.array(fate == number)) for number in range(3))
            out_of["kept"].write_batch(kept)
            if copies.num_rows:
                why = verdicts.slice(first, last - first).select(REASONS.names).combine_chunks().to_batches()[0]
                columns = [*copies.columns, *why.columns]
                out_of["duplicates"].write_batch(pa.record_batch(columns, schemas["duplicates"].names))
            if told.num_rows:
                reasons = [{name: row[name] for name in document.REASON.names} for row in mine]
                out_of["dropped"].write([a | b for a, b in zip(told.to_pylist(), reasons, strict=True)])
            _tally(by_domain, batch, {"kept": kept, "removed": copies, "dropped": told})
    counts = Counter(verdicts.column("reason").to_pylist())
    counts.update(row["reason"] for row in barred)
    names = [f"{name}/{part.name}.parquet" for name in schemas]
    return {"files": names, "reasons": dict(sorted(counts.items())), "by_domain": by_domain}


def _tally(by_domain: dict[str, Counter[str]], batch: pa.RecordBatch, fates: Mapping[str, pa.RecordBatch]) -> None:
    sizes = pa.table(
        {"domain": fates["kept"].column("domain"), "bytes": pc.binary_length(fates["kept"].column("text"))}
    )
    for entry in pc.value_counts(batch.column("domain")).to_pylist():
        domain = entry["values"]
        start = Counter(documents=0, kept=0, removed=0, dropped=0, bytes_kept=0)
        tally = by_domain.setdefault(domain, start)
        tally["documents"] += entry["counts"]
        for name, rows in fates.items():
            tally[name] += pc.sum(pc.equal(rows.column("domain"), domain)).as_py() or 0
        mine = sizes.filter(pc.equal(sizes.column("domain"), domain))
        tally["bytes_kept"] += pc.sum(mine.column("bytes")).as_py() or 0


def _told(records: list[Record]) -> dict[str, Any]:
    """The counts of all parts together."""
    by_domain: dict[str, Counter[str]] = {}
    reasons = Counter(exact=0, near=0)
    for record in records:
        reasons.update(record["reasons"])
        for domain, tally in record["by_domain"].items():
            by_domain.setdefault(domain, Counter()).update(tally)
    whole: Counter[str] = Counter()
    for tally in by_domain.values():
        whole.update(tally)
    return {
        "documents": whole["documents"],
        "kept": whole["kept"],
        "removed": whole["removed"],
        "dropped": whole["dropped"],
        "exact": reasons["exact"],
        "near": reasons["near"],
        "reasons": dict(sorted(reasons.items())),
        "by_domain": {domain: dict(tally) for domain, tally in sorted(by_domain.items())},
    }
