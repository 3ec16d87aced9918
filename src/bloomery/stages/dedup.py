"""Stage dedup: of exact and near copies one is kept. Every other goes to removed/ and names it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from bloomery.core.errors import DataError
from bloomery.core.log import progress
from bloomery.data import document, minhash
from bloomery.stages.config import Dedup

REMOVED = document.dropped_schema().append(pa.field("kept_id", pa.string(), nullable=False))
"""`reason` is "exact" or "near", `value` the exact Jaccard with the document `kept_id`."""


def run(config: Dedup, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Write kept/ (document.SCHEMA) and removed/ (REMOVED). `inputs["filter"]` is a folder with kept/."""
    source = inputs["filter"] / "kept"
    if not (total := document.count(source)):
        raise DataError("holds no documents", where=str(source), cure="Loosen the rules in [filter].")
    settings = minhash.Settings(
        permutations=config.permutations,
        bands=config.bands,
        shingle_words=config.shingle_words,
        min_jaccard=config.min_jaccard,
        seed=config.seed,
    )
    by_domain: dict[str, Counter[str]] = {}
    reasons = Counter(exact=0, near=0)
    with progress("dedup", "documents", 3.0 * total) as meter:
        passes = 0

        def documents() -> Iterator[tuple[str, str]]:
            nonlocal passes
            begun, passes = passes * total, passes + 1
            for number, row in enumerate(document.read(source, ["id", "text"]), begun + 1):
                yield row["id"], row["text"]
                meter.at(float(number))

        found = minhash.find(documents, settings)
        names = document.SCHEMA.names
        with document.Writer(out / "kept") as kept, document.Writer(out / "removed", REMOVED) as removed:
            for row in document.read(source, names):
                tally = by_domain.setdefault(row["domain"], Counter(documents=0, kept=0, removed=0, bytes_kept=0))
                tally["documents"] += 1
                if (twin := found.twins.get(row["id"])) is None:
                    kept.write(row)
                    tally.update(kept=1, bytes_kept=len(row["text"].encode()))
                else:
                    removed.write(row | {"reason": twin.reason, "value": twin.jaccard, "kept_id": twin.kept_id})
                    tally["removed"] += 1
                    reasons[twin.reason] += 1
                meter.at(float(2 * total + kept.rows + removed.rows))
    return {
        "documents": total,
        "kept": kept.rows,
        "removed": removed.rows,
        "exact": reasons["exact"],
        "near": reasons["near"],
        "compared": found.compared,
        "by_domain": {domain: dict(tally) for domain, tally in sorted(by_domain.items())},
    }
