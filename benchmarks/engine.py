"""
What do worker processes save, and does a Ray cluster leave the same bytes as one process?

    python benchmarks/engine.py [--json] [--quick]

Runs recipes/plasma-500m.toml up to its shards on the shared text: in one process, with two workers, and on a Ray
cluster of this machine. Every file of every stage must have the same sha256 in all three. --quick takes 4 MB of
each domain.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from demo import commit
from kills import content, started
from stand_in import shared

from bloomery.core.pipeline import machine, versions

ENGINES = {
    "one process": ["engine.workers=1"],
    "two workers": ["engine.workers=2"],
    "ray": ['engine.kind="ray"', "engine.workers=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if (texts := shared()) is None:
        sys.exit("the shared text is not here: name its folder in BLOOMERY_SHARED")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), texts, quick=options.quick)))


def measured(folder: Path, texts: Path, *, quick: bool) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    contents: dict[str, dict[str, str]] = {}
    stages: dict[str, dict[str, float]] = {}
    for name, settings in ENGINES.items():
        runs = folder / name.replace(" ", "-")
        began = time.monotonic()
        assert started(runs, texts, settings, quick=quick).wait() == 0, name
        seconds[name] = round(time.monotonic() - began, 1)
        contents[name] = content(runs)
        manifests = [json.loads(path.read_text()) for path in sorted(runs.glob("*/??-*/manifest.json"))]
        stages[name] = {one["stage"]: one["seconds"] for one in manifests}
    first = contents["one process"]
    assert all(found == first for found in contents.values()), "a file differs"
    return {
        "name": "engine",
        "ours": {"value": seconds["two workers"], "unit": "s"},
        "peers": {
            "one process": {"value": seconds["one process"], "unit": "s", "version": versions()["bloomery"]},
            "ray": {"value": seconds["ray"], "unit": "s", "version": metadata.version("ray")},
        },
        "ratio_to_best_peer": round(min(seconds["one process"], seconds["ray"]) / seconds["two workers"], 3),
        "machine": machine(),
        "versions": versions(),
        "notes": {
            "commit": commit(),
            "quick": quick,
            "files_with_equal_sha256_in_all_three": len(first),
            "seconds_by_stage": stages,
        },
    }


if __name__ == "__main__":
    main()
