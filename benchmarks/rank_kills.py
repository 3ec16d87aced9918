"""
Is a rank that dies, or is frozen, named in bounded time, and does the same command resume on the ranks that are left?

    python benchmarks/rank_kills.py [--json] [--quick] [--kills N] [--minutes M]

Trains a tiny model on four ranks of this machine. At a random moment one rank gets SIGKILL, or every fifth time
SIGSTOP, with a limit of ten seconds without a sign of life. Counted are the seconds until the command has ended,
whether its error names the rank, and whether any process is left. No checkpoint comes by the clock, so steps after the
start are safe only if a rank that is left saves them. Counted are finished steps that no checkpoint has. Then the same
command resumes on the three ranks that are left. It is hit in the same way or goes on to its end, and so on down to one
rank. At the end of each run, the losses of all steps have to be within 1e-4 of those of one undisturbed rank. --quick
hits 4 times; no new hit comes after --minutes. SIGSTOP comes in training alone: ranks that start have ten minutes to
find each other.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo import commit
from stand_in import ROOT

from bloomery.core.log import METRICS, read_metrics
from bloomery.core.pipeline import machine, versions

sys.path.insert(0, str(ROOT))
made = importlib.import_module("tests.train.made")

RANKS, STEPS, LIFE_SECONDS, LIMIT_SECONDS = 4, 60, 10, 300.0
SETTINGS = {"steps": STEPS, "eval_every": 1000, "optimizer": {"kind": "adamw"}, "spike_sigma": 1e6}
SETTINGS["save_every_seconds"] = 1e9
CODE = """
import json, sys
from bloomery.core.errors import BloomeryError
from bloomery.train import launch
launch.GRACE_SECONDS = 10.0
try:
    launch.run("tests.train.made:trained", json.loads(sys.argv[1]), int(sys.argv[2]))
except BloomeryError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=240.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = 4 if options.quick else options.kills
        result = measured(Path(folder), kills, options.minutes * 60, quiet=options.json)
    print(json.dumps(result))
    notes = result["notes"]
    sys.exit(1 if notes["unnamed"] or notes["left"] or notes["different"] or notes["late"] else 0)


def measured(folder: Path, kills: int, seconds: float, *, quiet: bool) -> dict[str, Any]:
    made.write_samples(folder / "shards")
    began, moments = time.monotonic(), random.Random(0)
    made.run(folder / "shards", folder / "calm", 1, **SETTINGS)
    calm = losses(folder / "calm")
    ends: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    faults: dict[str, list[str]] = {"unnamed": [], "left": [], "different": [], "late": []}
    lost: dict[str, list[int]] = {"SIGKILL": [], "SIGSTOP": []}
    hit, runs = 0, 0
    largest = 0.0
    while hit < kills and time.monotonic() - began < seconds:
        out, ranks, runs = folder / f"run-{runs}", RANKS, runs + 1
        while True:
            strike = ranks > 1 and hit < kills and time.monotonic() - began < seconds
            number = signal.SIGSTOP if hit % 5 == 4 else signal.SIGKILL
            victim, code, said, took = attempt(folder, out, ranks, number if strike else None, moments)
            if victim is None:
                if code != 0:
                    faults["different"].append(f"{out.name} on {ranks} ranks: exit code {code}: {said[-300:]}")
                break
            hit += 1
            ends[number.name].append(took)
            lost[number.name].append(max(losses(out), default=0) - newest(out))
            if not re.search(rf"\brank {victim}\b", said) or code == 0:
                faults["unnamed"].append(f"{out.name}: rank {victim}, {number.name}: {said[-300:]}")
            if took >= LIMIT_SECONDS:
                faults["late"].append(f"{out.name}: rank {victim}, {number.name}")
            faults["left"] += [f"{out.name}: {pid}" for pid in left(out)]
            ranks -= 1
            if not quiet:
                print(f"{hit} hits, {ends}, {faults}", file=sys.stderr, flush=True)
        found = losses(out)
        largest = max([largest, *(abs(found[step] - loss) for step, loss in calm.items() if step in found)])
        if set(found) != set(calm) or largest > 1e-4:
            faults["different"].append(f"{out.name}: {len(found)} of {len(calm)} steps, {largest}")
    return {
        "name": "rank_kills",
        "ours": {"value": hit, "unit": "ranks killed or frozen"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {
            "commit": commit(),
            "runs": runs,
            "seconds_to_the_end": {
                name: {"number": len(all), "largest": round(max(all), 1), "mean": round(sum(all) / len(all), 1)}
                for name, all in ends.items()
                if all
            },
            "steps_lost": {name: {"times": sum(map(bool, all)), "steps": sum(all)} for name, all in lost.items()},
            "largest_difference_of_a_loss": largest,
            **faults,
        },
    }


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(out / METRICS) if "loss" in line}


def newest(out: Path) -> int:
    """The step of the newest checkpoint of a run."""
    return max((int(folder.name) for folder in (out / "checkpoints").glob("[0-9]" * 9)), default=0)


def attempt(
    folder: Path, out: Path, ranks: int, number: signal.Signals | None, moments: random.Random
) -> tuple[int | None, int, str, float]:
    """Resume a run, and hit a rank. Returns which was hit, exit code, output, and seconds from the hit to the end."""
    task = {"shards": str(folder / "shards"), "out": str(out), "settings": SETTINGS}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BLOOMERY_RANK_SECONDS": str(LIFE_SECONDS), "KILLED_RUN": str(out)}
    words = [sys.executable, "-c", CODE, json.dumps(task), str(ranks)]
    before = max(losses(out), default=0)
    with (folder / "said").open("w+") as log:
        process = subprocess.Popen(words, env=env, cwd=ROOT, stderr=log, stdout=log)
        victim, struck = None, time.monotonic()
        try:
            if number is not None and ranks > 1:
                deadline = time.monotonic() + LIMIT_SECONDS
                ahead = moments.choice(
                    (0, 1, 3) if number == signal.SIGSTOP else (None, 0, 1, 3)
                )  # None: while it starts
                if ahead is None:
                    time.sleep(moments.uniform(0, 15))
                while process.poll() is None and time.monotonic() < deadline:
                    pids = children(process.pid)
                    if len(pids) == ranks and (ahead is None or max(losses(out), default=0) > before + ahead):
                        break
                    time.sleep(0.02)
                time.sleep(moments.uniform(0, 0.3))
                pids, struck = children(process.pid), time.monotonic()
                if process.poll() is None and len(pids) == ranks:
                    index = moments.randrange(ranks)
                    with contextlib.suppress(ProcessLookupError):
                        victim = rank_of(pids[index])
                        os.kill(pids[index], number)
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return victim if code != 0 else None, code, log.read(), time.monotonic() - struck


def children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def environment(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it ended meanwhile
        return {}
    return dict(word.partition("=")[::2] for word in words)


def rank_of(pid: int) -> int | None:
    rank = environment(pid).get("RANK")
    return None if rank is None else int(rank)


def left(out: Path) -> list[int]:
    """Processes of a run that are still there a moment after its command has ended."""
    deadline = time.monotonic() + 10
    while True:
        pids = [int(one.name) for one in Path("/proc").glob("[0-9]*")]
        there = [pid for pid in pids if environment(pid).get("KILLED_RUN") == str(out)]
        if not there or time.monotonic() > deadline:
            return there
        time.sleep(0.1)


if __name__ == "__main__":
    main()
