"""Stage fetch: documents from every source into one folder, whole; what cannot be one goes to rejected/."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core import files
from bloomery.core.errors import DataError
from bloomery.core.log import progress
from bloomery.data import document, reading, sources
from bloomery.stages.config import Fetch


def digest(config: Fetch) -> str:
    """A hash of the contents of all sources, for the stage's fingerprint. Raises DataError where one is missing."""
    return files.sha256_bytes(files.canonical([[source.name, sources.digest(source)] for source in config.sources]))


def run(config: Fetch, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write out/documents (document.SCHEMA) and out/rejected (with reason and value).

    Raises DataError for broken input, for two documents with one id, and when there is no document at all.
    """
    if not config.sources:
        raise DataError("there are no sources, so there are no documents", cure="Add [[fetch.sources]] to the recipe.")
    seen: set[str] = set()
    by_source = {source.name: Counter(documents=0, bytes=0, rejected=0) for source in config.sources}
    reasons: Counter[str] = Counter()
    with (
        progress("fetch", "documents") as meter,
        document.Writer(out / "documents") as kept,
        document.Writer(out / "rejected", document.dropped_schema()) as rejected,
    ):
        for source in config.sources:
            tally = by_source[source.name]
            for item in sources.read(source):
                row = item.row if isinstance(item, reading.Rejected) else item
                if row["id"] in seen:
                    cure = f"Give source {source.name!r} another id_field, or none: then file and line make the id."
                    raise DataError(f"two documents have the id {row['id']!r}", where=source.name, cure=cure)
                seen.add(row["id"])
                if isinstance(item, reading.Rejected):
                    rejected.write(row | {"reason": item.problem.reason, "value": float(item.problem.value)})
                    reasons[item.problem.reason] += 1
                    tally["rejected"] += 1
                else:
                    kept.write(row)
                    tally.update(documents=1, bytes=len(row["text"].encode()))
                meter.at(float(len(seen)))
            if not tally["documents"]:
                cure = "Check its path and patterns, and whether max_bytes leaves room for one document."
                raise DataError(f"gave no documents ({tally['rejected']} rejected)", where=source.name, cure=cure)
    return {
        "documents": kept.rows,
        "bytes": sum(tally["bytes"] for tally in by_source.values()),
        "rejected": rejected.rows,
        "reasons": dict(sorted(reasons.items())),
        "by_domain": _by_domain(config, by_source),
        "by_source": {name: dict(tally) for name, tally in by_source.items()},
    }


def _by_domain(config: Fetch, by_source: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for source in config.sources:
        domain = found.setdefault(source.domain, {"documents": 0, "bytes": 0})
        for name in domain:
            domain[name] += by_source[source.name][name]
    return found
