"""Decontamination, as a step of the stage dedup and as a separate tool: remove documents with text of tasks."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core import records as core_records
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pq
from bloomery.data import decontamination, documents
from bloomery.data.decontamination import Sought
from bloomery.data.dedup.minhash import Corpus
from bloomery.data.executor import ExecutorConfig, Part, PartRecord, check_workers, run_parts
from bloomery.evaluation import tasks
from bloomery.stages.config import Decontaminate

HITS = "hits.parquet"
SCRATCH = "scratch"

# As a stage of `bloomery data`. In a recipe, decontamination is a step of dedup.
VERSION = 4
RESUMES = True
preflight = check_workers


def external_inputs(config: Sought) -> str:
    """Of the content of the tasks' files, and their names."""
    hasher = hashlib.sha256()
    asked = [
        (name, path) for name in config.tasks for path in tasks.paths(name, tasks.task_files(config.tasks, config.data))
    ]
    for name, path in [*((path.name, path) for path in decontamination.task_files(config.files)), *asked]:
        hasher.update(f"{name} {core_io.sha256_file(path)}\n".encode())
    return hasher.hexdigest()


def check(config: Decontaminate, corpus: Corpus, scratch: Path, engine: ExecutorConfig) -> Path:
    """
    Look for the tasks' text; returns the folder with what is barred, one file for each part (decontamination.BARRED).

    Raises DataError where every text is too short to be searched for.
    """
    index = scratch / "index"
    finished = scratch / "index.json"
    if core_records.load(finished, index, "decontaminate: the index of the tasks") is None:
        core_io.remove_path(index)
        searched = decontamination.OverlapIndex.of(sought(config, scratch / "tasks"))
        if not searched.whole and not len(searched.long.hashes):
            what = f"every text of the tasks has fewer than {config.min_question_words} words, so nothing is searched"
            hint = "Set min_question_words to the number of words that one of the texts has."
            raise DataError(what, where="decontaminate", hint=hint)
        searched.save(index)
        core_records.save(finished, {}, core_io.listing(index))
    run_parts(engine, decontamination.check, str(index), corpus.parts(), scratch, what="decontaminate")
    return scratch / "barred"


def sought(config: Sought, scratch: Path) -> decontamination.OverlapSettings:
    """What is looked for: the files as they are, and the tasks' questions as a model is asked them."""
    asked = tasks.task_texts(scratch, config.tasks, tasks.task_files(config.tasks, config.data)) if config.tasks else ()
    return decontamination.OverlapSettings(
        files=(*config.files, *asked),
        fields=(*config.fields, *tasks.ASKED_FIELDS) if config.fields and asked else config.fields,
        ngram_words=config.ngram_words,
        min_question_words=config.min_question_words,
    )


def list_hits(corpus: Corpus, scratch: Path, out: Path) -> dict[str, int]:
    """Write hits.parquet (decontamination.HIT), in the order of documents; returns how many each task has."""
    hits_by_task: Counter[str] = Counter()

    def batches() -> "Iterator[pa.RecordBatch]":
        for path in corpus.paths:
            for batch in documents.part_batches(scratch / "hits" / f"{path.stem}.parquet"):
                hits_by_task.update(batch.column("task").to_pylist())
                yield batch

    with documents.PartWriter(out / HITS, decontamination.HIT()) as writer:
        for batch in batches():
            writer.write_batch(batch)
    return dict(sorted(hits_by_task.items()))


def run(
    config: Decontaminate, paths: Sequence[Path], out: Path, engine: ExecutorConfig | None = None
) -> dict[str, Any]:
    """
    The tool: files of documents in, kept/NAME, dropped/NAME (with reason and value) and hits.parquet out.

    Returns counts. A call resumes from what a killed attempt left in `out`.
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


def split(config: None, chunk: Part, out: Path) -> PartRecord:
    """Write kept/NAME.parquet and dropped/NAME.parquet of one part."""
    source = Path(chunk.inputs["path"])
    barred = {row.pop("row"): row for row in barred_rows(chunk)}
    schema = pq.read_schema(source).remove_metadata()
    names = [f"{folder}/{chunk.name}.parquet" for folder in ("kept", "dropped")]
    begin = 0
    with (
        documents.PartWriter(out / names[0], schema) as kept,
        documents.PartWriter(out / names[1], pa.schema([*schema, *documents.REASON()])) as dropped,
    ):
        for batch in documents.part_batches(source):
            numbers = range(begin, begin + batch.num_rows)
            begin += batch.num_rows
            kept.write_batch(batch.filter(pa.array([number not in barred for number in numbers])))
            gone = [place for place, number in enumerate(numbers) if number in barred]
            rows = batch.take(pa.array(gone, pa.int64())).to_pylist()
            dropped.write([row | barred[numbers[place]] for place, row in zip(gone, rows, strict=True)])
    return {"files": names, "reasons": dict(sorted(Counter(row["reason"] for row in barred.values()).items()))}


def barred_rows(chunk: Part) -> list[documents.DocumentRow]:
    """What `check` has said of a part."""
    if "barred" not in chunk.inputs:
        return []
    rows: list[documents.DocumentRow] = pq.read_table(
        Path(chunk.inputs["barred"]) / f"{chunk.name}.parquet"
    ).to_pylist()
    return rows
