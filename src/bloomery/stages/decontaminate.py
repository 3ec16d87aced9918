"""Decontamination as a step of the stage dedup, and as a tool of its own: documents that hold text of tasks go."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bloomery.core import files, leftovers
from bloomery.data import document, examined, overlap
from bloomery.data.duplicates import Corpus
from bloomery.data.engine import Engine, Part, Record, run_parts
from bloomery.data.sought import Sought
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
    for name, path in [*((path.name, path) for path in examined.task_files(config.files)), *asked]:
        found.update(f"{name} {files.sha256_file(path)}\n".encode())
    return found.hexdigest()


def check(config: Decontaminate, corpus: Corpus, scratch: Path, engine: Engine) -> Path:
    """Look for the tasks' text; returns the folder with what is barred, one file for each part (overlap.BARRED)."""
    index = scratch / "index"
    finished = scratch / "index.json"
    if leftovers.load(finished, index, "decontaminate: the index of the tasks") is None:
        files.remove_path(index)
        overlap.Index.of(sought(config, scratch / "tasks")).save(index)
        leftovers.save(finished, {}, files.listing(index))
    run_parts(engine, overlap.check, str(index), corpus.parts(), scratch, what="decontaminate")
    return scratch / "barred"


def sought(config: Sought, scratch: Path) -> overlap.Settings:
    """What is looked for: the files as they are, and the tasks' questions as a model is asked them."""
    asked = contamination.written(scratch, config.tasks, tasks.place(config.tasks, config.data)) if config.tasks else ()
    return overlap.Settings(
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
            for batch in document.part_batches(scratch / "hits" / f"{path.stem}.parquet"):
                found.update(batch.column("task").to_pylist())
                yield batch

    with document.PartWriter(out / HITS, overlap.HIT) as writer:
        for batch in batches():
            writer.write_batch(batch)
    return dict(sorted(found.items()))


def run(config: Decontaminate, paths: Sequence[Path], out: Path, engine: Engine | None = None) -> dict[str, Any]:
    """
    The tool: files of documents in, kept/NAME, dropped/NAME (with reason and value) and hits.parquet out.

    Returns counts. It goes on from what an attempt that was killed has left in `out`.
    """
    engine = engine or Engine()
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


def split(config: None, part: Part, out: Path) -> Record:
    """Write kept/NAME.parquet and dropped/NAME.parquet of one part."""
    source = Path(part.given["path"])
    barred = {row.pop("row"): row for row in barred_rows(part)}
    schema = pq.read_schema(source).remove_metadata()
    names = [f"{folder}/{part.name}.parquet" for folder in ("kept", "dropped")]
    begin = 0
    with (
        document.PartWriter(out / names[0], schema) as kept,
        document.PartWriter(out / names[1], pa.schema([*schema, *document.REASON])) as dropped,
    ):
        for batch in document.part_batches(source):
            numbers = range(begin, begin + batch.num_rows)
            begin += batch.num_rows
            kept.write_batch(batch.filter(pa.array([number not in barred for number in numbers])))
            gone = [place for place, number in enumerate(numbers) if number in barred]
            rows = batch.take(pa.array(gone, pa.int64())).to_pylist()
            dropped.write([row | barred[numbers[place]] for place, row in zip(gone, rows, strict=True)])
    return {"files": names, "reasons": dict(sorted(Counter(row["reason"] for row in barred.values()).items()))}


def barred_rows(part: Part) -> list[document.Row]:
    """What `check` has said of a part."""
    if "barred" not in part.given:
        return []
    rows: list[document.Row] = pq.read_table(Path(part.given["barred"]) / f"{part.name}.parquet").to_pylist()
    return rows
