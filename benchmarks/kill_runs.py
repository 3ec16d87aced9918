"""
Does a whole run that is killed again and again end with the bytes of one that is not, and leave no process behind?

    python benchmarks/kill_runs.py [--json] [--quick] [--kills N] [--at-once N]

Runs a small recipe of every stage, from text to a model that answers, with two worker processes: once undisturbed, then
killed with SIGKILL at random moments, where the same command is started again until it ends. By turns a kill hits the
process group of the command, its first process alone, or one of the processes that it has started. Every second run
trains on two ranks. After each kill no process of the run may be left, by a mark in the environment that processes
inherit. At the end of each run every file of every stage has to have the sha256 that it has in the undisturbed run;
VARYING and WITHOUT name what depends on speed. --quick kills 12 times.

Everything happens in a process namespace of its own, which ends whole, where `unshare` can make one.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import commit

from bloomery.core.io import canonical, sha256_bytes
from bloomery.core.log import METRICS, VARYING, read_metrics
from bloomery.core.pipeline import machine, versions
from bloomery.core.records import read_manifest

MARK = "BLOOMERY_KILL_RUNS"
INSIDE = "BLOOMERY_KILL_RUNS_NAMESPACE"
LIMIT_SECONDS = 300.0
"""Of one start of the command, which takes some twenty seconds."""
SECONDS_TO_GO = 5.0
"""In which all processes of a killed run have to be gone."""
MOMENTS = (0.05, 0.3)
"""When a kill comes, as a share of the time of an undisturbed run. Each start gets some way further."""
KILLS_A_RUN = 4
"""Fewer in all are of one run, on two ranks."""
HITS = ("group", "parent", "child")

RECIPE = """
name = "small"
engine = { workers = 2 }
fetch.sources = [
    { kind = "worlds", name = "a", domain = "a", count = 500 },
    { kind = "worlds", name = "b", domain = "b", count = 500, seed = 5 },
]
classify.samples = 200
filter.rules = [{ kind = "length", min_characters = 20 }]
tokenizer.vocab_size = 512
shard = { tokens = 40_000, val_fraction = 0.05 }
evaluate = { toy_questions = 4, max_tokens = 8, val_bytes = 2000 }

[pretrain]
steps = 60
global_batch_tokens = 512
model.hidden_size = 32
model.num_layers = 2
model.num_heads = 2
model.num_kv_heads = 1
model.intermediate_size = 48
model.context_length = 96
schedule = { kind = "wsd", warmup_steps = 5 }
dry_run = false
save_every_seconds = 0.1
eval_every = 15

[instruct]
sources = [{ kind = "worlds", count = 300 }]

[finetune]
steps = 40
global_batch_tokens = 512
dry_run = false
save_every_seconds = 0.1
eval_every = 10

[prefer]
steps = 12
global_batch_tokens = 512
pairs = [{ kind = "worlds", count = 100 }]
dry_run = false
save_every_seconds = 0.1
eval_every = 4
"""
WITHOUT = ("checkpoints/", "log.txt", "samples.jsonl", "report.html", "report.json", "figures/")
"""What depends on speed, or on how often a run was stopped: which checkpoints stay, and pages with times on them."""


@dataclass
class Tally:
    """What the threads that kill have counted together."""

    kills: Counter[str] = field(default_factory=Counter)
    on_two_ranks: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    """Runs that failed by themselves, or hang: exit code and the end of what was said."""
    different: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2, help="runs that are killed at the same time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    isolated = in_namespace()
    kills = 12 if options.quick else options.kills
    with tempfile.TemporaryDirectory() as folder:
        result = measured(Path(folder), kills, options.at_once, options.seed, quiet=options.json)
    result["notes"]["isolated"] = isolated
    print(json.dumps(result))
    notes = result["notes"]
    sys.exit(1 if notes["lost"] or notes["different"] or notes["left"] else 0)


def in_namespace() -> bool:
    """Start this program again in a process namespace of its own; returns whether it is in one."""
    if os.environ.get(INSIDE):
        return os.environ[INSIDE] == "yes"
    for more in ((), ("--user", "--map-root-user")):
        words = ["unshare", *more, "--pid", "--fork", "--kill-child", "--mount-proc"]
        if (
            shutil.which(words[0])
            and subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
        ):
            os.environ[INSIDE] = "yes"
            os.execvp(words[0], [*words, sys.executable, *sys.argv])
    print("not isolated: unshare cannot make a process namespace here", file=sys.stderr)
    return False


def measured(folder: Path, kills: int, at_once: int, seed: int, *, quiet: bool) -> dict[str, Any]:
    began, tally = time.monotonic(), Tally()
    (folder / "small.toml").write_text(RECIPE)
    calm: dict[int, dict[str, str]] = {}
    for ranks in (2, 1)[: 1 if kills < KILLS_A_RUN else 2]:
        process = started(folder, f"calm-{ranks}", ranks)
        if process.wait(LIMIT_SECONDS) != 0:
            sys.exit(f"the undisturbed run on {ranks} ranks failed: {(folder / f'calm-{ranks}.log').read_text()}")
        calm[ranks] = content(folder / f"calm-{ranks}")
    undisturbed = (time.monotonic() - began) / len(calm)

    def work(number: int) -> None:
        moments = random.Random(seed + number)
        while sum(tally.kills.values()) < kills:
            with tally.lock:
                tally.runs += 1
                name, ranks = f"killed-{tally.runs}", 1 + tally.runs % len(calm) if len(calm) > 1 else 2
            done = chain(folder, name, ranks, lambda: moments.uniform(*MOMENTS) * undisturbed, moments, tally, kills)
            found = content(folder / name) if done else calm[ranks]
            others = sorted(file for file in {*found, *calm[ranks]} if found.get(file) != calm[ranks].get(file))
            with tally.lock:
                tally.different += [f"{name}: {file}" for file in others]
                if not quiet:
                    print(f"{sum(tally.kills.values())} kills, {tally}", file=sys.stderr)
            if done:
                shutil.rmtree(folder / name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "name": "kill_runs",
        "ours": {"value": sum(tally.kills.values()), "unit": "kills of a whole run"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {
            "commit": commit(),
            "hit": dict(tally.kills),
            "on_two_ranks": tally.on_two_ranks,
            "runs": tally.runs,
            "lost": tally.lost,
            "different": tally.different,
            "left": tally.left,
            "files_compared": len(calm[2]),
            "seconds_undisturbed": round(undisturbed, 1),
            "seconds": round(time.monotonic() - began),
        },
    }


def chain(
    folder: Path,
    name: str,
    ranks: int,
    moment: Callable[[], float],
    moments: random.Random,
    tally: Tally,
    kills: int,
) -> bool:
    """Start a run, kill it, and start it again, until it ends by itself. Returns whether it ended well."""
    while True:
        process = started(folder, name, ranks)
        with tally.lock:
            spent = sum(tally.kills.values()) >= kills
            hit = HITS[sum(tally.kills.values()) % len(HITS)]
        killed = False
        code = ended(process, LIMIT_SECONDS if spent else moment())
        victims = children(folder, name, process.pid)
        while hit == "child" and not victims and code is None and not spent:  # until there are any
            code, victims = ended(process, moments.uniform(0.1, 0.5)), children(folder, name, process.pid)
        if code is None and not spent:
            victim = moments.choice(victims) if hit == "child" else process.pid
            with contextlib.suppress(ProcessLookupError):  # it ended at this moment
                os.killpg(victim, signal.SIGKILL) if hit == "group" else os.kill(victim, signal.SIGKILL)
                killed = True
            code = ended(process, LIMIT_SECONDS)  # where a child was hit, by itself
            with tally.lock:
                tally.kills.update([hit] if killed else [])
                tally.on_two_ranks += killed and ranks > 1
            left = gone(folder, name)
            with tally.lock:
                tally.left += [f"{name}: {hit}: {one}" for one in left]
        if code == 0:
            return True
        if code is None or not killed:  # it hangs, or has failed by itself
            process.kill()
            with tally.lock:
                said = (folder / f"{name}.log").read_text(errors="replace")[-300:]
                tally.lost.append(f"{name}: exit code {code}: {said}")
            return False


def started(folder: Path, name: str, ranks: int) -> "subprocess.Popen[bytes]":
    """The command, in a process group of its own."""
    words = [str(folder / "small.toml"), "--runs", str(folder / name)]
    words += [f"{stage}.num_processes={ranks}" for stage in ("pretrain", "finetune")]
    env = os.environ | {MARK: f"{folder.name}/{name}", "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        command = [sys.executable, "-m", "bloomery.cli", "run", *words]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=log, stdout=log, process_group=0)


def ended(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code, or None where it still runs."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def marked(folder: Path, name: str) -> list[int]:
    """The processes of a run, by their environment or by where they write; a zombie is none."""
    found, log = [], str(folder / f"{name}.log")
    mark = f"{MARK}={folder.name}/{name}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marks = mark in (process / "environ").read_bytes().split(b"\0")
            if marks or os.readlink(process / "fd" / "2") == log:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(process.name)] if state not in "ZX" else []
        except OSError:  # it ended meanwhile
            continue
    return found


def children(folder: Path, name: str, parent: int) -> list[int]:
    """The processes that a run has started, but for the one by which Python counts shared memory."""
    found = []
    for pid in marked(folder, name):
        try:
            helper = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        found += [pid] if pid != parent and not helper else []
    return found


def gone(folder: Path, name: str) -> list[str]:
    """Wait until no process of a run is left. Those that stay are named, and ended."""
    deadline = time.monotonic() + SECONDS_TO_GO
    while (left := marked(folder, name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    said = []
    for pid in left:
        try:
            said.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return said


def content(runs: Path) -> dict[str, str]:
    """sha256 of every file of every stage, and of metrics without what depends on speed."""
    found = {}
    for folder in sorted(runs.glob("*/??-*")):
        for name, facts in read_manifest(folder)["outputs"].items():
            if name == METRICS:
                lines = [
                    {key: value for key, value in line.items() if key not in VARYING}
                    for line in read_metrics(folder / name)
                ]
                found[f"{folder.name}/{name}"] = sha256_bytes(canonical(lines))
            elif not name.startswith(WITHOUT):
                found[f"{folder.name}/{name}"] = facts["sha256"]
    return found


if __name__ == "__main__":
    main()
