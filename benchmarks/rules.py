"""
How fast are the rules, beside datatrove's, and do both keep as much?

    python benchmarks/rules.py [--json] [--quick] [--documents PATH]

Judges web documents by Gopher's quality rules, C4's and FineWeb's, without and with Gopher's rules for repetition, on
one core. datatrove runs the filters of the same names on a sample of the same documents in the same process: once as it
comes, with its own tokenizer for English, and once with words and sentences as they are here, handed to it the way it
takes a tokenizer. Time is processor time of judging alone: nothing is read or written. Every document meets the filters
in turn until one drops it. The first 2,500 characters of each document are measured too, since documents of the web are
longer in one corpus than in another. `ours` is without repetition; notes have the rest.
"""

import argparse
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from stand_in import PLACE
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from bloomery.core.pipeline import machine, versions
from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.filters.features import FilterBase
from bloomery.data.filters.published import C4, FineWeb, Gopher, Repetition
from bloomery.data.readers import rows

# C4's filter of datatrove deletes lines and hands on what is left; last, so that every filter sees whole documents
RULES: tuple[tuple[FilterBase, str], ...] = (
    (Gopher(), "GopherQualityFilter"),
    (FineWeb(), "FineWebQualityFilter"),
    (C4(), "C4QualityFilter"),
)
REPETITION: tuple[tuple[FilterBase, str], ...] = ((Repetition(), "GopherRepetitionFilter"),)
PEER_SAMPLE = 300
QUICK_SAMPLE = 40
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer documents")
    parser.add_argument("--documents", type=Path, default=PLACE / "data" / "dev" / "web.jsonl.zst")
    options = parser.parse_args()
    texts = read(options.documents, 1000 if options.quick else None)
    size = QUICK_SAMPLE if options.quick else PEER_SAMPLE
    sample = texts[:: max(1, len(texts) // size)][:size]
    with threadpool_limits(limits=1):
        found = {
            "without repetition": compared(RULES, texts, sample, quiet=options.json),
            "with repetition": compared(REPETITION + RULES, texts, sample, quiet=options.json),
        }
        by_rule = {theirs: keep_rates(rule, theirs, sample) for rule, theirs in REPETITION + RULES}
    print(json.dumps(result(found, by_rule, texts, sample, options.quick)))


def read(path: Path, most: int | None) -> list[str]:
    return [row["text"] for _, row in islice(rows.jsonl(path), most) if isinstance(row, dict)]


def compared(
    rules: Sequence[tuple[FilterBase, str]], texts: Sequence[str], sample: Sequence[str], *, quiet: bool
) -> dict[str, dict[str, float]]:
    """Speed and keep rate of ours on all texts and on the sample, and of datatrove in both ways on the sample."""
    ours = [rule for rule, _ in rules]
    found = {
        "bloomery": measured(partial(kept, ours), texts, ROUNDS),
        "bloomery, 2,500 characters": measured(partial(kept, ours), [text[:2500] for text in texts], ROUNDS),
        "bloomery on the sample": measured(partial(kept, ours), sample, ROUNDS),
    }
    for name, words in (("datatrove, same words", whitespace()), ("datatrove", None)):
        filters = [peer(theirs, words) for _, theirs in rules]
        passes(filters, sample[0])  # loads its tokenizer
        found[name] = measured(partial(all_pass, filters), sample, 1)
    if not quiet:
        for name, facts in found.items():
            print(f"{name:28s}", *(f"{value:10.3f} {unit}" for unit, value in facts.items()))
    return found


def measured(judged: Callable[[Sequence[str]], list[bool]], texts: Sequence[str], rounds: int) -> dict[str, float]:
    """Of the quickest of some rounds, documents and megabytes of UTF-8 for a second of one core; and what was kept."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        stays = judged(texts)
        seconds.append(time.process_time() - began)
    best = min(seconds)
    return {"documents/s": len(texts) / best, "MB/s": megabytes / best, "kept": sum(stays) / len(texts)}


def kept(rules: Sequence[FilterBase], texts: Sequence[str]) -> list[bool]:
    number = len(texts)
    found = judge(rules, DocumentColumns(texts, ["web"] * number, [None] * number, [""] * number))
    return [reason is None for reason in found.reasons]


def keep_rates(rule: FilterBase, theirs: str, sample: Sequence[str]) -> dict[str, float]:
    """Of one rule alone, the share that each keeps, and the share of documents on which both agree."""
    ours = kept([rule], sample)
    same = [passes([peer(theirs, whitespace())], text) for text in sample]
    default = [passes([peer(theirs, None)], text) for text in sample]
    return {
        "bloomery": sum(ours) / len(sample),
        "datatrove, same words": sum(same) / len(sample),
        "datatrove": sum(default) / len(sample),
        "agreement given the same words": sum(map(bool.__eq__, ours, same)) / len(sample),
    }


def peer(name: str, words: Any) -> Any:
    from datatrove.pipeline import filters  # of the extra `bench`

    cls = getattr(filters, name)
    return cls() if words is None else cls(language=words)


def passes(filters: Sequence[Any], text: str) -> bool:
    from datatrove.data import Document

    document = Document(text=text, id="")
    with warnings.catch_warnings(action="ignore"):
        return all(judge.filter(document) is True for judge in filters)


def all_pass(filters: Sequence[Any], texts: Sequence[str]) -> list[bool]:
    return [passes(filters, text) for text in texts]


def whitespace() -> Any:
    """Words and sentences as they are here, as a tokenizer of datatrove."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Whitespace(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:end] for start, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            ends = [found.end() for found in re.finditer(r"[.?!][\"'”’)\]]{0,4}(?=\s|$)", text)]
            if text and (not ends or ends[-1] < len(text.rstrip())):
                ends.append(len(text))
            return list(zip([0, *ends], ends, strict=False))

    return Whitespace()


def rounded(facts: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4 if value <= 1 else 2) for name, value in facts.items()}


def ratio(found: dict[str, dict[str, float]], other: str) -> float:
    return round(found["bloomery on the sample"]["MB/s"] / found[other]["MB/s"], 2)


def result(
    found: dict[str, dict[str, dict[str, float]]],
    by_rule: dict[str, dict[str, float]],
    texts: Sequence[str],
    sample: Sequence[str],
    quick: bool,
) -> dict[str, Any]:
    fast = found["without repetition"]
    peers = {
        name: {"value": round(fast[name]["MB/s"], 3), "unit": "MB/s", "version": version("datatrove")}
        for name in ("datatrove", "datatrove, same words")
    }
    return {
        "name": "rules",
        "ours": {"value": round(fast["bloomery"]["MB/s"], 2), "unit": "MB/s"},
        "peers": peers,
        "ratio_to_best_peer": ratio(fast, "datatrove, same words"),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"spacy": version("spacy"), "python": platform.python_version()},
        "notes": {
            "quick": quick,
            "documents": len(texts),
            "mean_document_bytes": round(sum(len(text.encode()) for text in texts) / len(texts)),
            "sample": len(sample),
            "measured": {name: {who: rounded(facts) for who, facts in one.items()} for name, one in found.items()},
            "ratio_to_datatrove_as_it_comes": {name: ratio(one, "datatrove") for name, one in found.items()},
            "ratio_given_the_same_words": {name: ratio(one, "datatrove, same words") for name, one in found.items()},
            "keep_rates_by_rule": {name: rounded(rates) for name, rates in by_rule.items()},
            "rules": [theirs for _, theirs in REPETITION + RULES],
        },
    }


if __name__ == "__main__":
    main()
