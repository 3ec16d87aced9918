"""
Does a run of the data half that is killed again and again end with the bytes of one that is not?

    python benchmarks/kills.py [--json] [--quick] [--kills N]

Runs recipes/plasma-500m.toml up to its shards on the shared text, with worker processes, once undisturbed. Then again,
killed with SIGKILL at random moments, in turn the parent and one of its workers, until so many kills have hit a
running process; each time, the same command goes on. At the end every file of every stage has to have the sha256 that
it has in the undisturbed run. --quick kills 5 times.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import commit
from stand_in import ROOT, setting, shared, toxicity

from bloomery.core.pipeline import machine, versions
from bloomery.core.records import read_manifest

RECIPE = ROOT / "recipes" / "plasma-500m.toml"
SETTINGS = ("tokenizer.vocab_size=8000", "tokenizer.sample_bytes=8000000", "shard.tokens=8000000")
WORKERS = ("engine.workers=2",)
LIMIT = 200
"""Runs at most, whatever the kills have hit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    if (texts := shared()) is None:
        sys.exit("the shared text is not here: name its folder in BLOOMERY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), texts, 5 if options.quick else options.kills, quiet=options.json)))


def measured(folder: Path, texts: Path, kills: int, *, quiet: bool) -> dict[str, Any]:
    calm, troubled = folder / "calm", folder / "troubled"
    began = time.monotonic()
    assert started(calm, texts).wait() == 0
    seconds = time.monotonic() - began
    moments = random.Random(0)
    hit, runs, workers, ended = 0, 0, 0, False
    while not ended and hit < kills and runs < LIMIT:
        process = started(troubled, texts)
        runs += 1
        try:
            # short enough that many kills fit into the work of one run
            ended = process.wait(timeout=moments.uniform(1.0, 1.0 + 3 * seconds / kills + 1.5)) == 0
        except subprocess.TimeoutExpired:
            victim = _victim(process.pid, moments) if hit % 2 else process.pid
            workers += victim != process.pid
            _kill(victim)
            hit += 1
            process.wait()
        if ended and hit < kills:  # all is done, but not all kills are spent: begin again
            assert content(troubled) == content(calm)
            subprocess.run(["rm", "-r", str(troubled)], check=True)
            ended = False
        if not quiet:
            print(f"{hit} kills in {runs} runs", file=sys.stderr)
    assert started(troubled, texts).wait() == 0
    same = content(troubled) == content(calm)
    assert same, "a file differs"
    return {
        "name": "kills",
        "ours": {"value": hit, "unit": "kills survived with the same bytes"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {
            "commit": commit(),
            "runs": runs,
            "of_workers": workers,
            "files_compared": len(content(calm)),
            "seconds_undisturbed": round(seconds, 1),
        },
    }


def started(
    runs: Path, texts: Path, engine: Sequence[str] = WORKERS, *, quick: bool = False
) -> "subprocess.Popen[bytes]":
    """The recipe up to its shards, as a process of its own."""
    words = [str(RECIPE), "--runs", str(runs), "--until", "shard", setting(texts, quick=quick), *toxicity(texts)]
    words += [*SETTINGS, *engine]
    return subprocess.Popen([sys.executable, "-m", "bloomery.cli", "run", *words], stderr=subprocess.DEVNULL)


def content(runs: Path) -> dict[str, str]:
    """sha256 of every file of every stage."""
    return {
        f"{folder.name}/{name}": facts["sha256"]
        for folder in sorted(runs.glob("*/??-*"))
        for name, facts in read_manifest(folder)["outputs"].items()
    }


def _victim(parent: int, moments: random.Random) -> int:
    """One of a process's children that work on parts, or itself where it has none."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return parent
    return int(moments.choice(children)) if children else parent


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:  # it ended in between
        return


if __name__ == "__main__":
    main()
