"""Stage filter: rules, then thresholds on scores. Every document goes to kept/ or, with its reason, to dropped/."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.errors import DataError
from bloomery.core.extras import pa, pc
from bloomery.core.log import info
from bloomery.data import documents as data_documents
from bloomery.data.executor import Counts, Part, check_workers, ranked, run_parts
from bloomery.data.filters.apply import DocumentColumns, Verdicts, judge
from bloomery.data.quality import thresholds
from bloomery.data.quality.thresholds import Thresholds, ThresholdStats
from bloomery.stages.config import Filter

VERSION = 3
RESUMES = True
preflight = check_workers


def schemas(columns: Iterable[str] = ("score",)) -> "tuple[pa.Schema, pa.Schema]":
    """
    Of kept/ and dropped/. Each column of scores is float64, and none for what a rule has dropped before: `score` the
    first classifier's, `score_NAME` that of another, `heuristic`.
    """
    scores = [pa.field(name, pa.float64()) for name in columns]
    kept, dropped = (
        pa.schema([*schema, *scores]) for schema in (data_documents.SCHEMA(), data_documents.dropped_schema())
    )
    return kept, dropped


def external_inputs(config: Filter) -> str:
    """A hash of the lists that rules name by path, for the stage's fingerprint; "" without any. Raises DataError."""
    lists = [value for rule in config.rules for _, value in rule if isinstance(value, Path)]
    return core_io.sha256_bytes(core_io.canonical([_content(path) for path in lists])) if lists else ""


def _content(path: Path) -> str:
    try:
        return core_io.sha256_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint="A rule in [filter] names it.") from None


def sift(config: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write kept/ and dropped/ (`schemas`), a part for each part of `inputs["fetch"]`/documents.

    `inputs["classify"]` may be left out where no limit asks for a score. A kept document has the text that rules have
    masked.
    """
    judged_by = str(inputs["classify"]) if "classify" in inputs else None
    if judged_by is None and config.needs_scores:
        hint = "Remove min_score, min_scores and thresholds, or run the stage classify first."
        raise DataError("there is a threshold on scores, but no classifier", where="filter", hint=hint)
    if judged_by is not None:
        _loaded(config, judged_by)  # reports a limit that no classifier can meet, before the work begins
    parts = [
        Part(path.stem, {"path": str(path), "classifier": judged_by}, path.stat().st_size)
        for path in data_documents.parts(inputs["fetch"] / "documents")
    ]
    records = run_parts(config.engine, filter_part, config, parts, out, what="filter")
    stats = _added(records)
    _warn_of_strangers(config, stats["by_domain"])
    return stats


def run(config: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """The same, where something has to be left: raises DataError if no document is kept."""
    stats = sift(config, inputs, out)
    if not stats["kept"]:
        most = ", ".join(f"{reason} ({count})" for reason, count in list(stats["reasons"].items())[:3])
        hint = f"Loosen those rules in [filter]; {out / 'dropped'} has every document with its reason."
        raise DataError(f"none of {stats['documents']} documents is kept: {most or 'there was no input'}", hint=hint)
    return stats


def filter_part(config: Filter, chunk: Part, out: Path) -> dict[str, Any]:
    """Judge the documents of one part. Returns what the stage adds up."""
    names = [f"{folder}/{chunk.name}.parquet" for folder in ("kept", "dropped")]
    learned = _loaded(config, chunk.inputs["classifier"])
    tallies, cuts = _tallies(), ThresholdStats()
    schema = schemas(learned.columns) if learned.classifiers else schemas()
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
    with (
        data_documents.PartWriter(out / names[0], schema[0]) as kept,
        data_documents.PartWriter(out / names[1], schema[1]) as dropped,
    ):
        for batch in data_documents.part_batches(Path(chunk.inputs["path"]), data_documents.SCHEMA().names):
            judged = _judged(config, learned, batch, tallies, cuts)
            stays = pc.is_null(judged["reason"])
            kept.write_batch(judged.filter(stays))
            dropped.write_batch(judged.filter(pc.invert(stays)))
    counted = {name: counts.to_json() for name, counts in tallies.items()}
    return {"files": names, **counted, "scores": cuts.record()}


def _loaded(config: Filter, folder: str | None) -> Thresholds:
    """The classifiers and bounds; without a folder, neither."""
    if folder is None:
        return Thresholds({}, {}, ())
    least = {limit.domain: limit.min_score for limit in config.min_scores}
    return thresholds.load(Path(folder), config.spelled_thresholds, min_score=config.min_score, min_scores=least)


def _tallies() -> dict[str, Counts]:
    """Of each domain: what became of its documents, why some were dropped, and what was masked in those kept."""
    return {
        "by_domain": Counts("bytes_kept", "documents", "dropped", "kept"),
        "reasons_by_domain": Counts(),
        "masked_by_domain": Counts(),
    }


def _judged(
    config: Filter, learned: Thresholds, batch: "pa.RecordBatch", tallies: Mapping[str, Counts], cuts: ThresholdStats
) -> "pa.RecordBatch":
    """The batch with the texts that stay, and the columns reason (none: it is kept), value and those of scores."""
    columns = {name: batch[name].to_pylist() for name in ("text", "domain", "url", "id")}
    documents = DocumentColumns(columns["text"], columns["domain"], columns["url"], columns["id"])
    verdicts = judge(config.rules, documents)
    values = [
        None if reason is None else value for reason, value in zip(verdicts.reasons, verdicts.values, strict=True)
    ]
    scores = _limit(learned, documents, verdicts, values, cuts)
    for domain, text, reason, masked in zip(
        documents.domains, verdicts.texts, verdicts.reasons, verdicts.masked, strict=True
    ):
        if reason is not None:
            tallies["by_domain"].add(domain, {"documents": 1, "dropped": 1})
            tallies["reasons_by_domain"].add(domain, {reason: 1})
            continue
        tallies["by_domain"].add(domain, {"documents": 1, "kept": 1, "bytes_kept": len(text.encode())})
        if masked:
            tallies["masked_by_domain"].add(domain, {**masked, "documents": 1})
    if any(verdicts.masked):
        batch = batch.set_column(batch.schema.names.index("text"), "text", pa.array(verdicts.texts, pa.string()))
    added = {
        "reason": pa.array(verdicts.reasons, pa.string()),
        "value": pa.array(values, pa.float64()),
        **{name: pa.array(column, pa.float64()) for name, column in scores.items()},
    }
    return pa.RecordBatch.from_arrays([*batch.columns, *added.values()], names=[*batch.schema.names, *added])


def _limit(
    learned: Thresholds,
    documents: DocumentColumns,
    verdicts: Verdicts,
    values: list[float | None],
    cuts: ThresholdStats,
) -> dict[str, list[float | None]]:
    """Score what no rule has dropped, and drop of it what misses a limit. Returns the columns of scores."""
    columns: dict[str, list[float | None]] = {name: [None] * len(values) for name in learned.columns or ("score",)}
    left = [place for place, reason in enumerate(verdicts.reasons) if reason is None]
    texts = [verdicts.texts[place] for place in left]
    views = learned.score(texts)
    for name, view in learned.columns.items():
        for index, score in zip(left, views[view].tolist(), strict=True):
            columns[name][index] = score
    domains, names = ([column[place] for place in left] for column in (documents.domains, documents.names))
    for index, reason, value in zip(left, *cuts.apply(learned, views, domains, names, texts), strict=True):
        if reason is not None:
            verdicts.reasons[index], values[index] = reason, value
    return columns


def _added(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tallies, cuts = _tallies(), ThresholdStats()
    for record in records:
        cuts.add(record["scores"])
        for name, counts in tallies.items():
            counts.merge(record[name])
    documents, reasons, masked = tallies.values()
    total = documents.total()
    return {
        **{key: total[key] for key in ("documents", "kept", "dropped")},
        "reasons": ranked(reasons.total()),
        "masked": ranked(masked.total()),
        "by_domain": {
            domain: numbers | {"pass_rate": round(numbers["kept"] / numbers["documents"], 4)}
            for domain, numbers in documents.to_json().items()
        },
        "reasons_by_domain": reasons.to_json(by_number=True),
        "masked_by_domain": masked.to_json(by_number=True),
        "scores": cuts.record(),
    }


def _warn_of_strangers(config: Filter, known: Mapping[str, Any]) -> None:
    """A domain that no document has is a typing error, or the trace of a source that was taken out."""
    named = {domain for rule in config.rules for domain in rule.domains or ()}
    named |= {limit.domain for limit in config.min_scores}
    named |= {
        domain
        for threshold in config.spelled_thresholds
        if not set(known) & set(threshold.domains or known)
        for domain in threshold.domains or ()
    }
    for domain in sorted(named - set(known)):
        info(f"filter: no document has the domain {domain!r}; the domains are {', '.join(sorted(known))}", "yellow")
