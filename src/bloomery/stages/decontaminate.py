"""Decontamination as a step of the stage dedup, and as a tool of its own: documents that hold text of tasks go."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import io as core_io
from bloomery.core import records as core_records
from bloomery.data import decontamination, documents
from bloomery.data.decontamination import Sought
from bloomery.data.dedup.minhash import Corpus
from bloomery.data.executor import ExecutorConfig, Part, PartRecord, run_parts
from bloomery.evaluation import contamination, tasks
from bloomery.stages.config import Decontaminate

HITS = "hits.parquet"
SCRATCH = "scratch"


def digest(config: Sought) -> str:
    """Of the content of the tasks' files, and their names."""
    found = hashlib.sha256()
    asked = [
        (name, path) for name in config.tasks for path in tasks.paths(name, tasks.place(config.tasks, config.data))
    ]
    for name, path in [*((path.name, path) for path in decontamination.task_files(config.files)), *asked]:
        found.update(f"{name} {core_io.sha256_file(path)}\n".encode())
    return found.hexdigest()


def check(config: Decontaminate, corpus: Corpus, scratch: Path, engine: ExecutorConfig) -> Path:
    """Look for the tasks' text; returns the folder with what is barred, one file for each part (overlap.BARRED)."""
    index = scratch / "index"
    finished = scratch / "index.json"
    if core_records.load(finished, index, "decontaminate: the index of the tasks") is None:
        core_io.remove_path(index)
        decontamination.OverlapIndex.of(sought(config, scratch / "tasks")).save(index)
        core_records.save(finished, {}, core_io.listing(index))
    run_parts(engine, decontamination.check, str(index), corpus.parts(), scratch, what="decontaminate")
    return scratch / "barred"


def sought(config: Sought, scratch: Path) -> decontamination.OverlapSettings:
    """What is looked for: the files as they are, and the tasks' questions as a model is asked them."""
    asked = contamination.written(scratch, config.tasks, tasks.place(config.tasks, config.data)) if config.tasks else ()
    return decontamination.OverlapSettings(
        files=(*config.files, *asked),
        fields=(*config.fields, *contamination.FIELDS) if config.fields and asked else config.fields,
        ngram_words=config.ngram_words,
        min_question_words=config.min_question_words,
    )


def list_hits(corpus: Corpus, scratch: Path, out: Path) -> dict[str, int]:
    """Write hits.parquet (overlap.HIT), in the order of documents; returns how many each task has."""
    found: Counter[str] = Counter()

    def batches() -> Iterator[pa.RecordBatch]:
        for path in corpus.paths:
            for batch in documents.part_batches(scratch / "hits" / f"{path.stem}.parquet"):
                found.update(batch.column("task").to_pylist())
                yield batch

    with documents.PartWriter(out / HITS, decontamination.HIT) as writer:
        for batch in batches():
            writer.write_batch(batch)
    return dict(sorted(found.items()))


def run(
    config: Decontaminate, paths: Sequence[Path], out: Path, engine: ExecutorConfig | None = None
) -> dict[str, Any]:
    """
    The tool: files of documents in, kept/NAME, dropped/NAME (with reason and value) and hits.parquet out.

    Returns counts. It goes on from what an attempt that was killed has left in `out`.
    """
    engine = engine or ExecutorConfig()
    corpus = Corpus.of(paths)
    scratch = out / SCRATCH
    barred = check(config, corpus, scratch, engine)
    records = run_parts(engine, split, None, corpus.parts(barred=str(barred)), out, what="split")
    hits = list_hits(corpus, scratch, out)
    shutil.rmtree(scratch)
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record["reasons"])
    dropped = sum(reasons.values())
    kept = corpus.documents - dropped
    return {
        "documents": corpus.documents,
        "kept": kept,
        "dropped": dropped,
        "reasons": dict(sorted(reasons.items())),
        "hits": hits,
    }


def split(config: None, part: Part, out: Path) -> PartRecord:
    """Write kept/NAME.parquet and dropped/NAME.parquet of one part."""
    source = Path(part.given["path"])
    barred = {row.pop("row"): row for row in barred_rows(part)}
    schema = pq.read_schema(source).remove_metadata()
    names = [f"{folder}/{part.name}.parquet" for folder in ("kept", "dropped")]
    begin = 0
    with (
        documents.PartWriter(out / names[0], schema) as kept,
        documents.PartWriter(out / names[1], pa.schema([*schema, *documents.REASON])) as dropped,
    ):
        for batch in documents.part_batches(source):
            numbers = range(begin, begin + batch.num_rows)
            begin += batch.num_rows
            kept.write_batch(batch.filter(pa.array([number not in barred for number in numbers])))
            gone = [place for place, number in enumerate(numbers) if number in barred]
            rows = batch.take(pa.array(gone, pa.int64())).to_pylist()
            dropped.write([row | barred[numbers[place]] for place, row in zip(gone, rows, strict=True)])
    return {"files": names, "reasons": dict(sorted(Counter(row["reason"] for row in barred.values()).items()))}


def barred_rows(part: Part) -> list[documents.DocumentRow]:
    """What `check` has said of a part."""
    if "barred" not in part.given:
        return []
    rows: list[documents.DocumentRow] = pq.read_table(Path(part.given["barred"]) / f"{part.name}.parquet").to_pylist()
    return rows
