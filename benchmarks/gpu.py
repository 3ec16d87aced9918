"""
What does this GPU do with Bloomery, in ten minutes and one file that can be sent?

    python benchmarks/gpu.py [--json] [--quick] [--device auto|cpu] [--only PART …] [--out FOLDER] [--patience N]
    python benchmarks/gpu.py --multi [--ranks N]         2 to 8 GPUs of this machine: DDP, FSDP, overlap, a killed rank

`make gpu` and `make gpu-multi` call it. Each part (gpu_parts.py, gpu_runs.py) is a child process with its own time
limit. A part that fails, hangs or kills its process costs the report nothing but its own section: what it said before
is kept. The report is written anew after each part. FOLDER (default `gpu-report`) gets report.json and report.md.

--quick takes tiny shapes; `--device cpu --quick` runs all parts to their end on a machine without a GPU. There, parts
that are for a GPU say so.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core.errors import DataError
from bloomery.core.io import write_json
from bloomery.core.pipeline import machine, versions

HERE = Path(__file__).parent
TOTAL_SECONDS = 600.0
"""Of all parts together."""
MAX_OUTPUT = 2**24
"""Bytes that are read of what a part says."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    seconds: float
    """Its limit."""
    script: str = "gpu_parts.py"


RUNS = "gpu_runs.py"
PARTS = (
    Part("doctor", "Doctor, and the attention that torch takes", 140),
    Part("tests", "Tests that need a GPU", 75),
    Part("train", "Training speed and memory", 130),
    Part("repeat", "Twice with one seed; killed and resumed", 90, RUNS),
    Part("kernels", "Triton kernels next to torch", 25),
    Part("large", "8 billion weights: LoRA and NF4", 50),
    Part("decode", "Decoding next to the limit of the memory", 60),
    Part("amd", "What only AMD has", 30),
)
MULTI = (
    Part("all-reduce", "Sums between GPUs", 40, RUNS),
    Part("ranks", "One rank, DDP and FSDP", 280, RUNS),
    Part("overlap", "Sums during the backward pass", 100, RUNS),
    Part("kill", "A rank killed at step 30", 180, RUNS),
)
assert max(sum(part.seconds for part in parts) for parts in (PARTS, MULTI)) <= TOTAL_SECONDS


def main() -> None:
    options = arguments()
    asked = MULTI if options.multi else PARTS
    unknown = [name for name in options.only or [] if name not in [part.name for part in asked]]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in asked)}")
    report: Facts = {
        "name": "gpu-multi" if options.multi else "gpu",
        "quick": options.quick,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "parts": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.patience * TOTAL_SECONDS
    for part in asked:
        if options.only and part.name not in options.only:
            continue
        seconds = min(options.patience * part.seconds, end - time.monotonic())
        report["parts"][part.name] = run_part(part, options, seconds)
        write_json(options.out / "report.json", report)
        (options.out / "report.md").write_text(page(report, asked), encoding="utf-8")
        if not options.json:
            facts = report["parts"][part.name]
            print(f"{part.name}: {facts['status']} ({facts['seconds']:.0f} s)", file=sys.stderr, flush=True)
    if not options.json:
        print(f"the report is {options.out / 'report.md'}; send {options.out / 'report.json'}", file=sys.stderr)
    print(json.dumps(summary(report)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--patience", type=int, default=1, choices=range(1, 11), help="times all limits are longer")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--multi", action="store_true", help="several GPUs")
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9))
    return parser.parse_args()


def commit() -> str | None:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def run_part(part: Part, options: argparse.Namespace, seconds: float) -> Facts:
    """All that a part said until it ended or was ended, with how it ended."""
    if seconds <= 1:
        return {"status": "not begun: the parts before took all the time", "seconds": 0.0, "results": {}}
    words = {"device": options.device, "quick": options.quick, "ranks": options.ranks, "seconds": seconds}
    command = [sys.executable, "-X", "faulthandler", str(HERE / part.script), part.name, json.dumps(words)]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(process)
        said, trouble = (tail(file) for file in (out, err))
    took = time.monotonic() - began
    results = merged(said)
    if late:
        status = f"ended after its {seconds:.0f} s"
    elif process.returncode:
        how = f"by signal {-process.returncode}" if process.returncode < 0 else f"with code {process.returncode}"
        status = f"failed {how}: {last_line(trouble)}"
    else:
        status = "done"
    return {"status": status, "seconds": round(took, 1), "results": results} | (
        {} if status == "done" else {"error": trouble[-4000:]}
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """A part and the processes of its group are gone afterwards."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT))
    text: bytes = file.read()
    return text.decode("utf-8", "replace")


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def merged(said: str) -> Facts:
    """Lines of JSON objects as one object; of lists under one name, all entries."""
    results: Facts = {}
    for line in said.splitlines():
        if not (line.startswith("{") and line.endswith("}")):
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError:  # a line that the part was writing when it was ended
            continue
        for name, value in values.items():
            if isinstance(value, list) and isinstance(results.get(name), list):
                results[name] = results[name] + value
            else:
                results[name] = value
    return results


def summary(report: Facts) -> Facts:
    """The line that ends every benchmark."""
    parts = report["parts"]
    speeds = parts.get("train", {}).get("results", {}).get("training", [])
    best = max((row["tokens_per_second"] for row in speeds if row.get("tokens_per_second")), default=None)
    return {
        "name": report["name"],
        "ours": {"value": best, "unit": "tokens/s"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": report["machine"],
        "versions": report["versions"],
        "notes": {"quick": report["quick"], "parts": {name: facts["status"] for name, facts in parts.items()}},
    }


# --- the page ------------------------------------------------------------------------------------------------------


def page(report: Facts, parts: Sequence[Part]) -> str:
    """The report for people: a table of the parts, then a section for each."""
    lines = ["# Report of a GPU" if report["name"] == "gpu" else "# Report of several GPUs", ""]
    facts = report["machine"] | report["versions"] | {"commit": report["commit"], "quick": report["quick"]}
    lines += [*table([{"what": name, "value": value} for name, value in facts.items()]), ""]
    done = {part: report["parts"][part.name] for part in parts if part.name in report["parts"]}
    rows = [{"part": part.title, "ended": facts["status"], "seconds": facts["seconds"]} for part, facts in done.items()]
    lines += [*table(rows), ""]
    for part, facts in done.items():
        lines += [f"## {part.title}", ""]
        if facts["status"] != "done":
            lines += [f"This part {facts['status']}", ""]
        plain = {name: value for name, value in facts["results"].items() if not is_table(value)}
        if plain:
            lines += [*table([{"what": name, "value": value} for name, value in plain.items()]), ""]
        for name, value in facts["results"].items():
            if is_table(value):
                lines += [f"### {name.replace('_', ' ')}", "", *table(value), ""]
    return "\n".join(lines)


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return
    yield f"| {' | '.join(name.replace('_', ' ') for name in columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell(row.get(name, '')) for name in columns)} |"


def cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | dict):
        value = json.dumps(value)
    return " ".join(str(value).replace("|", "\\|").split())[:400]


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
