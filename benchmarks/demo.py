"""
How good is the demo's model, and what does it cost?

    python benchmarks/demo.py [--json] [--quick]

Runs recipes/demo.toml from nothing in a folder of its own, as a process of its own, and reports bits per byte on
held-out documents of the standard library beside xz -9 and zstd -19 on the same bytes, the share of held-out questions
that were answered exactly, wall time and peak memory. --quick trains for a tenth of the steps.
"""

import argparse
import json
import lzma
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zstandard

from bloomery.core.pipeline import machine, versions

ROOT = Path(__file__).parents[1]
QUICK = ("pretrain.steps=42", "finetune.steps=30", "evaluate.toy_questions=28")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, "-m", "bloomery.cli", "run", str(ROOT / "recipes" / "demo.toml"), "--runs", folder]
        shown = subprocess.DEVNULL if options.json else None
        subprocess.run([*command, *(QUICK if options.quick else ())], check=True, stderr=shown)
        seconds = time.monotonic() - began
        report = json.loads(next(Path(folder).glob("demo/11-evaluate-*/report.json")).read_text(encoding="utf-8"))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps(result(report, seconds, peak, quick=options.quick)))


def commit() -> str:
    """Of this project, as git names it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def result(report: dict[str, Any], seconds: float, peak_bytes: int, *, quick: bool) -> dict[str, Any]:
    bits = report["bits_per_byte"]
    peers = {
        "xz -9": {"value": bits["xz"], "unit": "bits/byte", "version": lzma.__name__ + " " + platform.python_version()},
        "zstd -19": {"value": bits["zstd"], "unit": "bits/byte", "version": zstandard.__version__},
    }
    return {
        "name": "demo",
        "ours": {"value": bits["model"], "unit": "bits/byte"},
        "peers": peers,
        "ratio_to_best_peer": round(min(bits["xz"], bits["zstd"]) / bits["model"], 4),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": quick,
            "commit": commit(),
            "answers": report["answers"],
            "leaks": report["leaks"],
            "by_domain": bits["by_domain"],
            "held_out_bytes": bits["bytes"],
            "seconds": round(seconds, 1),
            "seconds_by_stage": {stage["stage"]: stage["seconds"] for stage in report["stages"]},
            "peak_bytes": peak_bytes,
            "peers_see": "only the held-out bytes; the model was trained on other documents of the same kind",
        },
    }


if __name__ == "__main__":
    main()
