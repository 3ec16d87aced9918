"""Stage dedup: keep one of each group of copies; the others go to duplicates/ with its ID."""

import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pc, pq
from bloomery.data import documents
from bloomery.data.dedup import dedup
from bloomery.data.dedup.dedup import CLUSTERS, Deduplicator, fitting
from bloomery.data.dedup.minhash import Corpus, DedupSettings
from bloomery.data.executor import Counts, Part, PartRecord, check_workers, run_parts
from bloomery.hw.host import Host, free_bytes
from bloomery.stages import decontaminate
from bloomery.stages.config import Dedup

VERSION = 4
RESUMES = True
preflight = check_workers

REASONS = cache(
    lambda: pa.schema(
        [
            *documents.REASON(),
            pa.field("kept_id", pa.string(), nullable=False),
            pa.field("cluster", pa.string(), nullable=False),
        ]
    )
)
"""
Columns of a duplicate, in addition to its own. `reason` is "exact" or "near". `value` is the exact Jaccard with the
document `kept_id` (null where nothing was verified). `cluster` is the ID of the best document linked to it.
"""

SCRATCH = "scratch"
COUNTED = ("documents", "kept", "removed", "dropped", "bytes_kept")
"""What is counted of a domain."""


def settings(config: Dedup) -> DedupSettings:
    return DedupSettings(
        num_perm=config.num_perm,
        num_bands=config.num_bands,
        num_rotations=config.num_rotations if config.verify else 1,
        shingles=config.shingles,
        shingle_size=config.shingle_size,
        verify=config.verify,
        threshold=config.threshold,
        seed=config.seed,
    )


def external_inputs(config: Dedup) -> str:
    """Of the content of the tasks that documents are compared with."""
    return decontaminate.external_inputs(config.decontaminate) if config.decontaminate else ""


def run(config: Dedup, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write kept/ and duplicates/ (REASONS), and where settings ask for them dropped/, repeated/ and hits.parquet.
    `inputs["filter"]` is a folder with kept/.
    """
    source = documents.handed_on(inputs["filter"])
    if not documents.count(source):
        raise DataError("holds no documents", where=str(source), hint="Loosen the rules in [filter].")
    return deduplicate(config, documents.parts(source), out)


def deduplicate(config: Dedup, paths: list[Path], out: Path) -> dict[str, Any]:
    """The same for files of documents anywhere: each gives kept/NAME and duplicates/NAME of its own name."""
    corpus = Corpus.of(paths)
    scratch = out / SCRATCH
    memory_bytes = config.memory_bytes or free_bytes(Host.here()) // 2
    engine = fitting(config.engine, memory_bytes)
    barred = decontaminate.check(config.decontaminate, corpus, scratch, engine) if config.decontaminate else None
    search = Deduplicator(
        settings=settings(config),
        corpus=corpus,
        scratch=scratch,
        engine=engine,
        memory_bytes=memory_bytes,
        barred=barred,
        lines=dedup.RepeatedLineSettings(**dict(config.repeated_lines)) if config.repeated_lines else None,
    )
    stats: dict[str, Any] = dict(search.find())
    more = {"barred": str(barred)} if barred else {}
    if config.repeated_lines:
        more |= {"cuts": str(scratch / "cuts"), "unit": config.repeated_lines.unit}
    parts = corpus.parts(verdicts=str(scratch / "verdicts"), **more)
    records = run_parts(engine, write, None, parts, out, what="dedup")
    if barred:
        tasks = decontaminate.list_hits(corpus, scratch, out)
        stats |= {"hits": sum(tasks.values()), "hits_by_task": tasks}
    with core_io.whole_file(out / CLUSTERS) as file:
        file.write((scratch / "clusters" / CLUSTERS).read_bytes())
    shutil.rmtree(scratch)
    return {**_told(records), **stats, **clusters_of(out / CLUSTERS)}


def clusters_of(path: Path) -> dict[str, int]:
    """How many clusters a file lists, one after the other, and how many documents the largest has."""
    count = largest = size = 0
    last = None
    for batch in documents.part_batches(path, ["cluster"]):
        runs = pc.run_end_encode(batch.column("cluster"))
        sizes = np.diff(runs.run_ends.to_numpy(), prepend=0)
        goes_on = runs.values[0].as_py() == last
        sizes[0] += size * goes_on
        count += len(sizes) - goes_on
        largest = max(largest, int(sizes.max()))
        size, last = int(sizes[-1]), runs.values[-1].as_py()
    return {"clusters": count, "largest_cluster": largest}


class _Fates:
    """What is to become of the documents of one part."""

    def __init__(self, chunk: Part) -> None:
        paths = {
            name: Path(chunk.inputs[name]) / f"{chunk.name}.parquet"
            for name in ("verdicts", "cuts")
            if name in chunk.inputs
        }
        self.verdicts = pq.read_table(paths["verdicts"])
        self.barred = decontaminate.barred_rows(chunk)
        self.cuts: list[documents.DocumentRow] | None = (
            pq.read_table(paths["cuts"]).to_pylist() if "cuts" in paths else None
        )
        self.unit = chunk.inputs.get("unit")
        self.may_drop = "barred" in chunk.inputs or self.cuts is not None

    def of(self, batch: "pa.RecordBatch", begin: int) -> "dict[str, pa.RecordBatch | list[documents.DocumentRow]]":
        """The documents of a batch by folder. `begin`: number of the first of them in its part."""
        rows = self.verdicts.column("row").to_numpy()
        first, last = np.searchsorted(rows, (begin, begin + batch.num_rows)).tolist()
        dropped = {row["row"] - begin: row for row in self.barred if 0 <= row["row"] - begin < batch.num_rows}
        single = np.ones(batch.num_rows, np.bool_)
        single[rows[first:last] - begin] = False
        copies = batch.filter(pa.array(~single))
        thin, repeated = batch, list[documents.DocumentRow]()
        if self.cuts is not None:
            mine = [row | {"row": row["row"] - begin} for row in self.cuts if 0 <= row["row"] - begin < batch.num_rows]
            thin, repeated, empty = dedup.thinned(batch, mine, self.unit)
            dropped |= {row: {"reason": "repeated_lines", "value": 1.0} for row in empty}
        single[list(dropped)] = False
        why = self.verdicts.slice(first, last - first).select(REASONS().names).combine_chunks()
        columns = [*copies.columns, *(column.combine_chunks() for column in why.columns)]
        reasons = [{name: dropped[row][name] for name in documents.REASON().names} for row in sorted(dropped)]
        gone = batch.take(pa.array(sorted(dropped), pa.int64())).to_pylist()
        return {
            "kept": thin.filter(pa.array(single)),
            "duplicates": pa.record_batch(columns, [*batch.schema.names, *REASONS().names]),
            "dropped": [row | reason for row, reason in zip(gone, reasons, strict=True)],
            "repeated": repeated,
        }


def write(config: None, chunk: Part, out: Path) -> PartRecord:
    """Write kept/NAME, duplicates/NAME and, where asked for, dropped/NAME and repeated/NAME; count what went where."""
    source = Path(chunk.inputs["path"])
    fates = _Fates(chunk)
    whole = pq.read_schema(source).remove_metadata()
    schemas = {"kept": whole, "duplicates": pa.schema([*whole, *REASONS()])}
    schemas |= {"dropped": pa.schema([*whole, *documents.REASON()])} if fates.may_drop else {}
    schemas |= {"repeated": dedup.REMOVED()} if fates.cuts is not None else {}
    by_domain = Counts(*COUNTED)
    reasons = Counter(fates.verdicts.column("reason").to_pylist())
    begin, lines = 0, 0
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(documents.PartWriter(out / name / f"{chunk.name}.parquet", schema))
            for name, schema in schemas.items()
        }
        for batch in documents.part_batches(source):
            by_folder = fates.of(batch, begin)
            begin += batch.num_rows
            for name, writer in writers.items():
                rows = by_folder[name]
                writer.write(rows) if isinstance(rows, list) else writer.write_batch(rows)
            reasons.update(row["reason"] for row in by_folder["dropped"])
            lines += len(by_folder["repeated"])
            _tally(by_domain, batch, by_folder)
    names = [f"{name}/{chunk.name}.parquet" for name in schemas]
    counted = by_domain.to_json(sort_groups=False)
    return {"files": names, "reasons": dict(sorted(reasons.items())), "by_domain": counted, "repeated": lines}


def _tally(by_domain: Counts, batch: "pa.RecordBatch", by_folder: Mapping[str, Any]) -> None:
    kept = by_folder["kept"]
    domains = {"documents": batch, "kept": kept, "removed": by_folder["duplicates"]}
    counted = {name: Counter(rows.column("domain").to_pylist()) for name, rows in domains.items()}
    counted["dropped"] = Counter(row["domain"] for row in by_folder["dropped"])
    for name, numbers in counted.items():
        by_domain.merge({domain: {name: number} for domain, number in numbers.items()})
    sizes = pa.table({"domain": kept.column("domain"), "bytes": pc.binary_length(kept.column("text"))})
    for row in sizes.group_by("domain").aggregate([("bytes", "sum")]).to_pylist():
        by_domain.add(row["domain"], {"bytes_kept": row["bytes_sum"]})


def _told(records: list[PartRecord]) -> dict[str, Any]:
    by_domain, reasons = Counts(*COUNTED), Counter(exact=0, near=0)
    for record in records:
        reasons.update(record["reasons"])
        by_domain.merge(record["by_domain"])
    total = by_domain.total()
    return {
        **{name: total[name] for name in ("documents", "kept", "removed", "dropped")},
        "exact": reasons["exact"],
        "near": reasons["near"],
        "reasons": dict(sorted(reasons.items())),
        **({"repeated_lines": lines} if (lines := sum(record["repeated"] for record in records)) else {}),
        "by_domain": by_domain.to_json(),
    }
