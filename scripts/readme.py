"""
The numbers and answers of README.md, from benchmarks/results and a finished demo.

    python scripts/readme.py                     name each number that differs from the results; exit with 1 if one does
    python scripts/readme.py --write             put the numbers of the results into README.md
    python scripts/readme.py --run runs/demo     put what the demo's model answers into README.md

A number stands between `<!-- =NAME -->` and `<!-- / -->`, and its NAME is a key of `numbers`. A number without marks
has no result in this repository.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tree import between

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- =(?P<name>[a-z-]+) -->)(?P<value>[^<]*)(<!-- / -->)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--run", type=Path, metavar="RUN", help="the run folder of a demo that is done")
    options = parser.parse_args()
    before, values = README.read_text(encoding="utf-8"), numbers()
    stale = changes(before, values)
    if options.write or options.run:
        after = MARKED.sub(lambda mark: f"{mark[1]}{values[mark['name']]}{mark[4]}", before)
        answers = f"```text\n{conversation(options.run)}```\n" if options.run else None
        README.write_text(between(after, "transcript", answers) if answers else after, encoding="utf-8")
    elif stale:
        print(*stale, "To fix: python scripts/readme.py --write", sep="\n")
        sys.exit(1)


def changes(page: str, values: Mapping[str, str]) -> list[str]:
    """What is wrong with the marked numbers of a page: each has the value of the results, and none is left out."""
    marks = {mark["name"]: mark["value"] for mark in MARKED.finditer(page)}
    return [
        f"README.md: {name} is {marks.get(name, 'not there')!r}, and {values.get(name, 'not there')!r} by the results"
        for name in sorted({*marks, *values})
        if marks.get(name) != values.get(name)
    ]


def result(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def numbers() -> dict[str, str]:
    """Each number of the pages, as it stands there."""
    demo, answers, target = result("demo"), result("answers"), result("to_target")
    dedup, kills = result("dedup"), result("kill_runs")
    rates = [run["megabytes_per_second"] for run in dedup["notes"]["runs"]]
    return {
        "demo-minutes": f"{demo['notes']['seconds'] / 60:.0f} minutes",
        "demo-questions": str(demo["notes"]["answers"]["n"]),
        "answers-text": f"{answers['pretrain']['tokens'] / 1e6:.1f} million",
        "answers-conversations": f"{answers['finetune']['tokens'] / 1e6:.1f} million",
        "answers-minutes": f"{(answers['seconds']['pretrain'] + answers['seconds']['finetune']) / 60:.0f} minutes",
        "answers-ended": f"{100 * answers['conversations']['finetune']['ended']['value']:.0f} %",
        "answers-bits": f"{answers['bits_per_byte']['model']:.2f}",
        "answers-xz": f"{answers['bits_per_byte']['xz']:.2f}",
        "target-seconds": f"{target['ours']['value']:.0f} CPU seconds",
        "target-share": f"{100 * target['notes']['share_of_its_time']:.0f} %",
        "step-default": shares("huggingface", "nanogpt"),
        "step-bfloat": shares("huggingface_bfloat16_kept", "nanogpt_bfloat16_kept"),
        "dedup-rates": f"{min(rates):.0f} to {max(rates):.0f} MB/s",
        "dedup-peer": f"{dedup['peers']['datatrove']['value']:.2f} MB/s",
        "kills": f"{kills['ours']['value']} times",
        "kill-files": f"{kills['notes']['files_compared']} output files",
    }


def shares(*peers: str) -> str:
    """The time of our step as a share of theirs, over all sizes and both CPUs."""
    cases = [case for name in ("train_step", "train_step_amx") for case in result(name)["notes"]["cases"]]
    shares = [100 / case["faster_than"][peer] for case in cases for peer in peers if peer in case["faster_than"]]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def conversation(run: Path) -> str:
    """What `bloomery chat` prints for the questions of the Makefile."""
    prompts = re.findall(r"--prompt '([^']*)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    command = [sys.executable, "-m", "bloomery.cli", "chat", str(run), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
