"""
Fuzz: `python -m tests.fuzz --seconds 600`, or `--inputs 100000`. Exit code 1 where anything was found.

Finds are made smaller and kept below tests/fuzz/cases, where `make test` tries them again.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.harness import MOST_CASE_BYTES, Tally, fuzz, smaller
from tests.fuzz.worker import TARGETS

SHARES = {"recipes": 18, "settings": 18, "documents": 26, "conversations": 20, "shards": 8, "requests": 6, "sockets": 4}
"""Of a number of inputs, in parts of a hundred or so; each other target gets 1, because one of its takes longer."""
COLUMNS = ("done", "refused", "traceback", "hang", "abort", "absurd", "lost", "memory", "processes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--seconds", type=float, default=600.0, help="of all targets together (default: 600)")
    amount.add_argument("--inputs", type=int, help="of all targets together, the fast ones more")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="several times; default: all")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**20, help="inputs follow from it")
    parser.add_argument("--jobs", type=int, default=2, help="workers at once (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    shares = sum(SHARES.get(name, 1) for name in targets)

    def run(name: str) -> Tally:
        if options.inputs is not None:
            return fuzz(name, options.seed, inputs=max(1, options.inputs * SHARES.get(name, 1) // shares))
        return fuzz(name, options.seed, seconds=options.seconds * min(options.jobs, len(targets)) / len(targets))

    if not options.json:
        print(f"seed {options.seed}\n{'target':<14} {'inputs':>8} " + " ".join(f"{name:>9}" for name in COLUMNS))
    tallies = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for tally in pool.map(run, targets):
            tallies.append(tally)
            if not options.json:
                print(line(tally.target, tally.counts, tally.peak_bytes, tally.seconds), flush=True)
        finds = [find for tally in tallies for find in tally.finds.values()]
        for find in pool.map(smaller, finds):
            place = find.keep() if len(find.data) <= MOST_CASE_BYTES else f"{len(find.data):,} bytes, too many to keep"
            print(f"{find.target}: {find.outcome.kind}: {find.outcome.what[:1500]}\n  {place}", file=sys.stderr)
    whole = sum((tally.counts for tally in tallies), Counter[str]())
    peak, seconds = max(tally.peak_bytes for tally in tallies), sum(tally.seconds for tally in tallies)
    if options.json:
        facts = {"seed": options.seed, "counts": whole, "peak_bytes": peak, "finds": len(finds)}
        print(json.dumps(facts | {"targets": {tally.target: tally.counts for tally in tallies}}))
    else:
        print(line("all", whole, peak, seconds))
    return 1 if finds else 0


def line(name: str, counts: Counter[str], peak_bytes: int, seconds: float) -> str:
    numbers = " ".join(f"{counts[column]:>9,}" for column in COLUMNS)
    return f"{name:<14} {sum(counts.values()):>8,} {numbers}  {peak_bytes / 2**20:,.0f} MiB at most, {seconds:,.0f} s"


if __name__ == "__main__":
    sys.exit(main())
