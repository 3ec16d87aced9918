"""Stage filter: rules and the classifier's score. Every document goes to kept/ or, with its reason, to dropped/."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from bloomery.core.errors import DataError
from bloomery.core.log import progress, say
from bloomery.data import classifier, document, rules
from bloomery.stages.config import Filter

SCORE = pa.field("score", pa.float64())
"""The classifier's probability that a document is worth keeping; dropped ones have it too."""

KEPT = document.SCHEMA.append(SCORE)
DROPPED = document.dropped_schema().append(SCORE)


def run(config: Filter, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """
    Write kept/ (KEPT) and dropped/ (DROPPED). `inputs`: fetch with documents/, and classify.

    Raises DataError when nothing is kept.
    """
    source, learned = inputs["fetch"] / "documents", classifier.load(inputs["classify"] / "quality")
    limits = {limit.domain: limit.min_score for limit in config.min_scores}
    reasons: Counter[str] = Counter()
    by_domain: dict[str, Counter[str]] = {}
    done, total = 0, document.count(source)
    with (
        progress("filter", "documents", float(total)) as meter,
        document.Writer(out / "kept", KEPT) as kept,
        document.Writer(out / "dropped", DROPPED) as dropped,
    ):
        for batch in document.batches(source):
            found = batch.to_pylist()
            for row, score in zip(found, classifier.score(learned, (row["text"] for row in found)), strict=True):
                row["score"] = score
                tally = by_domain.setdefault(row["domain"], Counter(documents=0, kept=0, dropped=0, bytes_kept=0))
                tally["documents"] += 1
                verdict = _verdict(config, limits, row)
                if verdict is None:
                    kept.write(row)
                    tally.update(kept=1, bytes_kept=len(row["text"].encode()))
                else:
                    dropped.write(row | {"reason": verdict[0], "value": float(verdict[1])})
                    tally["dropped"] += 1
                    reasons[verdict[0]] += 1
                done += 1
                meter.at(float(done))
    _warn_of_strangers(config, by_domain)
    if not kept.rows:
        most = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        cure = f"Loosen those rules in [filter]; {out / 'dropped'} has every document with its reason."
        raise DataError(f"none of {total} documents is kept: {most or 'no document came in'}", cure=cure)
    return {
        "documents": total,
        "kept": kept.rows,
        "dropped": dropped.rows,
        "reasons": dict(reasons.most_common()),
        "by_domain": {domain: dict(tally) for domain, tally in sorted(by_domain.items())},
    }


def _verdict(config: Filter, limits: Mapping[str, float], row: document.Row) -> rules.Verdict:
    if (broken := rules.first_reason(config.rules, row["domain"], row["text"])) is not None:
        return broken
    low = row["score"] < limits.get(row["domain"], config.min_score)
    return ("classifier", row["score"]) if low else None


def _warn_of_strangers(config: Filter, known: Mapping[str, Any]) -> None:
    """A domain that no document has is a typing error, or the trace of a source that was taken out."""
    named = {domain for rule in config.rules for domain in rule.domains or ()}
    for domain in sorted((named | {limit.domain for limit in config.min_scores}) - set(known)):
        say(f"filter: no document has the domain {domain!r}; there are {', '.join(sorted(known))}", "yellow")
