"""
What does each pass of deduplication cost a byte, and what does it leave? For docs/understand/scaling-data.md.

    python benchmarks/dedup_passes.py [--json] [--quick] [--gigabytes 0.06]

Makes a corpus as benchmarks/dedup.py does and takes the copies out of it, in this process. Seconds are those of the
processor, so that other programs beside it count less; bytes are those of the files between the passes.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
from dedup import make

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.data import documents as data_documents
from bloomery.data import executor
from bloomery.data.dedup import dedup as dedup_dedup
from bloomery.stages import dedup
from bloomery.stages.config import Dedup

PASSES = {"sign": "sign", "compare": "compare", "dedup": "write"}
"""What the engine calls them, and what the page does."""
STEPS = {"_group": "group", "_place": "group", "_propose_more": "group", "_decide": "decide", "_conclude": "decide"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON, which is all there is")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gigabytes", type=float)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), options.gigabytes or (0.01 if options.quick else 0.06))))


def measured(folder: Path, gigabytes: float) -> dict[str, Any]:
    num_bytes = make(folder / "corpus", int(gigabytes * 1e9))
    paths = data_documents.parts(folder / "corpus")
    config = build(Dedup, {"engine": {"workers": 1}, "memory_bytes": 2**30})
    dedup.deduplicate(config, paths[:1], folder / "warm")
    seconds: dict[str, float] = defaultdict(float)
    left: dict[str, int] = {}
    scratch = folder / "out" / dedup.SCRATCH

    def look() -> None:
        left.update({name: size(scratch / name) for name in ("signatures", "sets", "edges", "verdicts", "clusters")})

    with timed(seconds, look):
        began = time.process_time()
        stats = dedup.deduplicate(config, paths, folder / "out")
        seconds["all"] = time.process_time() - began
    removed, documents = stats["removed"], stats["documents"]
    each = {name: round(1e9 * value / num_bytes, 2) for name, value in seconds.items()}
    return {
        "name": "dedup_passes",
        "ours": {"value": each["all"], "unit": "ns of one core for each byte"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "bytes": num_bytes,
            "documents": documents,
            "removed": removed,
            "ns_a_byte": each,
            "signature_bytes_a_document": round(left["signatures"] / documents, 1),
            "set_bytes_a_byte": round(left["sets"] / num_bytes, 3),
            "pairs_a_removed_document": round(stats["compared"] / removed, 2),
            "us_a_pair": round(1e6 * seconds["compare"] / stats["compared"], 1),
            "edge_bytes_a_pair": round(left["edges"] / stats["compared"], 1),
            "million_rows_sorted_a_second": round(sorted_a_second(num_bytes // 10) / 1e6, 1),
            "verdict_bytes_a_removed_document": round(left["verdicts"] / removed, 1),
        },
    }


def sorted_a_second(rows: int) -> float:
    """Rows of a band key and a document's rank, sorted by one thread of DuckDB: what shuffles are reckoned with."""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(
            f"CREATE TABLE keys AS SELECT hash(range) AS key, range::UINTEGER AS rank FROM range({rows})"
        )
        began = time.process_time()
        connection.execute("CREATE TABLE sorted AS SELECT * FROM keys ORDER BY key, rank")
        return rows / (time.process_time() - began)


@contextmanager
def timed(seconds: dict[str, float], before_writing: Callable[[], None]) -> Iterator[None]:
    """Count the processor's seconds of each pass and step while it is open."""
    parts, search = executor.run_parts, dedup_dedup.Deduplicator
    steps = {name: getattr(search, name) for name in STEPS}

    def counted(label: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return work(*given, **named)
            finally:
                seconds[label] += time.process_time() - began

        return run

    def run_parts(*given: Any, what: str, **named: Any) -> Any:
        if what == "dedup":
            before_writing()
        return counted(PASSES.get(what, what), parts)(*given, what=what, **named)

    for name, label in STEPS.items():
        setattr(search, name, counted(label, steps[name]))
    for module in (dedup_dedup, dedup):
        vars(module)["run_parts"] = run_parts
    try:
        yield
    finally:
        for module in (dedup_dedup, dedup):
            vars(module)["run_parts"] = parts
        for name, step in steps.items():
            setattr(search, name, step)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
