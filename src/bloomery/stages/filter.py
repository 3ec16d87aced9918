"""Stage filter: rules, then the classifier's score. Every document goes to kept/ or, with its reason, to dropped/."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.core.log import say
from bloomery.data import classifier, document
from bloomery.data.classifier import Classifier
from bloomery.data.engine import Part, run_parts
from bloomery.data.rules.judge import Documents, Verdicts, judge
from bloomery.stages.config import Filter

SCORE = pa.field("score", pa.float64())
"""The classifier's probability that a document is worth keeping; none for what a rule has dropped before."""

KEPT = document.SCHEMA.append(SCORE)
DROPPED = document.dropped_schema().append(SCORE)


def digest(config: Filter) -> str:
    """A hash of the lists that rules name by path, for the stage's fingerprint; "" without any. Raises DataError."""
    lists = [value for rule in config.rules for _, value in rule if isinstance(value, Path)]
    return files.sha256_bytes(files.canonical([_content(path) for path in lists])) if lists else ""


def _content(path: Path) -> str:
    try:
        return files.sha256_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path), cure="A rule in [filter] names it.") from None


def run(config: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write kept/ (KEPT) and dropped/ (DROPPED), a part for each part of `inputs["fetch"]`/documents.

    `inputs["classify"]` may be left out where no limit asks for a score. A kept document has the text that rules have
    masked. Raises DataError when nothing is kept.
    """
    judged_by = str(inputs["classify"] / "quality") if "classify" in inputs else None
    parts = [
        Part(path.stem, {"path": str(path), "classifier": judged_by}, path.stat().st_size)
        for path in document.parts(inputs["fetch"] / "documents")
    ]
    records = run_parts(config.engine, filter_part, config, parts, out, what="filter")
    stats = _added(records)
    _warn_of_strangers(config, stats["by_domain"])
    if not stats["kept"]:
        most = ", ".join(f"{reason} ({count})" for reason, count in list(stats["reasons"].items())[:3])
        cure = f"Loosen those rules in [filter]; {out / 'dropped'} has every document with its reason."
        raise DataError(f"none of {stats['documents']} documents is kept: {most or 'no document came in'}", cure=cure)
    return stats


def filter_part(config: Filter, part: Part, out: Path) -> dict[str, Any]:
    """Judge the documents of one part. Returns what the stage adds up."""
    names = [f"{folder}/{part.name}.parquet" for folder in ("kept", "dropped")]
    learned = classifier.load(Path(part.given["classifier"])) if part.given["classifier"] is not None else None
    tally = _Tally()
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
    with document.PartWriter(out / names[0], KEPT) as kept, document.PartWriter(out / names[1], DROPPED) as dropped:
        for batch in document.part_batches(Path(part.given["path"]), document.SCHEMA.names):
            judged = _judged(config, learned, batch, tally)
            stays = pc.is_null(judged["reason"])
            kept.write_batch(judged.filter(stays))
            dropped.write_batch(judged.filter(pc.invert(stays)))
    return {"files": names, **tally.record()}


class _Tally:
    """What became of documents, by domain."""

    def __init__(self) -> None:
        self.by_domain: dict[str, Counter[str]] = {}
        self.reasons: dict[str, Counter[str]] = {}
        self.masked: dict[str, Counter[str]] = {}

    def add(self, domain: str, text: str, reason: str | None, masked: Counter[str]) -> None:
        counts = self.by_domain.setdefault(domain, Counter(documents=0, kept=0, dropped=0, bytes_kept=0))
        counts["documents"] += 1
        if reason is None:
            counts.update(kept=1, bytes_kept=len(text.encode()))
        else:
            counts["dropped"] += 1
            self.reasons.setdefault(domain, Counter())[reason] += 1
        if masked and reason is None:
            self.masked.setdefault(domain, Counter(documents=0)).update(masked + Counter(documents=1))

    def record(self) -> dict[str, dict[str, dict[str, int]]]:
        tallies = {"by_domain": self.by_domain, "reasons_by_domain": self.reasons, "masked_by_domain": self.masked}
        return {
            name: {domain: dict(sorted(counts.items())) for domain, counts in sorted(tally.items())}
            for name, tally in tallies.items()
        }


def _judged(config: Filter, learned: Classifier | None, batch: pa.RecordBatch, tally: _Tally) -> pa.RecordBatch:
    """The batch with the texts that stay, and the columns reason (none: it is kept), value and score."""
    columns = {name: batch[name].to_pylist() for name in ("text", "domain", "url", "id")}
    documents = Documents(columns["text"], columns["domain"], columns["url"], columns["id"])
    verdicts = judge(config.rules, documents)
    values = [
        None if reason is None else value for reason, value in zip(verdicts.reasons, verdicts.values, strict=True)
    ]
    scores = _limit(config, learned, documents.domains, verdicts, values)
    for row in zip(documents.domains, verdicts.texts, verdicts.reasons, verdicts.masked, strict=True):
        tally.add(*row)
    if any(verdicts.masked):
        batch = batch.set_column(batch.schema.names.index("text"), "text", pa.array(verdicts.texts, pa.string()))
    added = {
        "reason": pa.array(verdicts.reasons, pa.string()),
        "value": pa.array(values, pa.float64()),
        "score": pa.array(scores, pa.float64()),
    }
    return pa.RecordBatch.from_arrays([*batch.columns, *added.values()], names=[*batch.schema.names, *added])


def _limit(
    config: Filter, learned: Classifier | None, domains: Sequence[str], verdicts: Verdicts, values: list[float | None]
) -> list[float | None]:
    """Score what no rule has dropped, and drop of it what is under its domain's limit. Returns the scores."""
    scores: list[float | None] = [None] * len(domains)
    if learned is None:
        return scores
    limits = {limit.domain: limit.min_score for limit in config.min_scores}
    left = [place for place, reason in enumerate(verdicts.reasons) if reason is None]
    for place, score in zip(left, classifier.score(learned, [verdicts.texts[place] for place in left]), strict=True):
        scores[place] = score
        if score < limits.get(domains[place], config.min_score):
            verdicts.reasons[place], values[place] = "classifier", score
    return scores


def _added(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of all parts together."""
    sums: dict[str, dict[str, Counter[str]]] = {}
    for record in records:
        for name in ("by_domain", "reasons_by_domain", "masked_by_domain"):
            for domain, counts in record[name].items():
                sums.setdefault(name, {}).setdefault(domain, Counter()).update(counts)
    by_domain = {domain: dict(counts) for domain, counts in sorted(sums.get("by_domain", {}).items())}
    totals = {key: sum(counts[key] for counts in by_domain.values()) for key in ("documents", "kept", "dropped")}
    reasons, masked = (_total(sums.get(name, {})) for name in ("reasons_by_domain", "masked_by_domain"))
    return {
        **totals,
        "reasons": reasons,
        "masked": masked,
        "by_domain": {domain: counts | {"pass_rate": _pass_rate(counts)} for domain, counts in by_domain.items()},
        "reasons_by_domain": _ranked(sums.get("reasons_by_domain", {})),
        "masked_by_domain": _ranked(sums.get("masked_by_domain", {})),
    }


def _total(by_domain: Mapping[str, Counter[str]]) -> dict[str, int]:
    return _ranked({"all": sum(by_domain.values(), Counter())})["all"]


def _ranked(by_domain: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Counts of each domain, the largest first, equal ones by name."""
    return {
        domain: dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        for domain, counts in sorted(by_domain.items())
    }


def _pass_rate(counts: Mapping[str, int]) -> float:
    return round(counts["kept"] / counts["documents"], 4)


def _warn_of_strangers(config: Filter, known: Mapping[str, Any]) -> None:
    """A domain that no document has is a typing error, or the trace of a source that was taken out."""
    named = {domain for rule in config.rules for domain in rule.domains or ()}
    for domain in sorted((named | {limit.domain for limit in config.min_scores}) - set(known)):
        say(f"filter: no document has the domain {domain!r}; there are {', '.join(sorted(known))}", "yellow")
