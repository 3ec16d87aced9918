"""
Is a training that is killed again and again lost, or any other than one that is not?

    python benchmarks/kill_resume.py [--json] [--quick] [--kills N]

Trains a tiny model, once undisturbed and then killed with SIGKILL at random moments until so many kills have hit it;
each time it is started again and goes on. A third of the kills wait until a checkpoint is being written and hit within
that. A training is a process forked from this one; at least every tenth kill is of one on two ranks, which are started
as anyone starts them, and hits a rank or the parent. At the end of each training the weights and every line of
metrics.jsonl (but for speeds) have to have the sha256 that they have in the undisturbed one on as many ranks.
A training is lost if it does not end, and differs if a sha256 does. --quick kills 6 times.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import commit
from stand_in import ROOT

from bloomery.core.io import PARTIAL, canonical, sha256_bytes, sha256_file
from bloomery.core.log import METRICS, VARYING, read_metrics
from bloomery.core.pipeline import machine, versions
from bloomery.hw.distributed import World
from bloomery.train import launch

sys.path.insert(0, str(ROOT))
made = importlib.import_module("tests.train.made")

STEPS, KILLS_A_RUN, PAIRS = 60, 10, 0.1


@dataclass
class Tally:
    hit: int = 0
    in_saves: int = 0
    on_pairs: int = 0
    of_ranks: int = 0
    runs: int = 0
    lost: int = 0
    different: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), 6 if options.quick else options.kills, quiet=options.json)))


def measured(folder: Path, kills: int, *, quiet: bool) -> dict[str, Any]:
    made.write_samples(folder / "shards")
    began, tally, moments = time.monotonic(), Tally(), random.Random(0)
    calm: dict[int, dict[str, str]] = {}
    seconds: dict[int, float] = {}
    while tally.hit < kills:
        ranks = 2 if tally.on_pairs < PAIRS * (tally.hit + 1) else 1
        if ranks not in calm:
            start = time.monotonic()
            assert waited(started(folder, f"calm-{ranks}", ranks)) == 0
            seconds[ranks] = time.monotonic() - start
            calm[ranks] = content(folder / f"calm-{ranks}")
        name = f"killed-{tally.runs}"
        tally.runs += 1
        for _ in range(min(KILLS_A_RUN // 3 if ranks > 1 else KILLS_A_RUN, kills - tally.hit)):
            if not killed(folder, name, ranks, moments, tally, seconds[ranks]):
                break
        ended = waited(started(folder, name, ranks))
        tally.lost += ended != 0
        tally.different += ended == 0 and content(folder / name) != calm[ranks]
        if not quiet:
            print(f"{tally}", file=sys.stderr)
    facts = {key: value for key, value in vars(tally).items() if key != "hit"}
    return {
        "name": "kill_resume",
        "ours": {"value": tally.hit, "unit": "kills of a training"},
        "peers": {},
        "ratio_to_best_peer": None,
        "machine": machine(),
        "versions": versions(),
        "notes": {"commit": commit(), **facts, "steps_of_a_run": STEPS, "seconds": round(time.monotonic() - began)},
    }


def started(folder: Path, name: str, ranks: int) -> int:
    """The training, as a process of its own; its id."""
    settings = {"steps": STEPS, "eval_every": 7, "keep_last": 3, "save_every_seconds": 0.02}
    task = {"shards": str(folder / "shards"), "out": str(folder / name), "settings": settings}
    if process := os.fork():
        return process
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        made.trained(task, World.alone()) if ranks == 1 else launch.run("tests.train.made:trained", task, ranks)
        code = 0
    finally:
        os._exit(code)


def waited(process: int, flags: int = 0) -> int | None:
    """Its exit code, or None where it goes on and nobody wants to wait."""
    found, status = os.waitpid(process, flags)
    return os.waitstatus_to_exitcode(status) if found else None


def killed(folder: Path, name: str, ranks: int, moments: random.Random, tally: Tally, whole: float) -> bool:
    """Go on with a training until a moment, and kill it there. False if it ended before."""
    process = started(folder, name, ranks)
    saves = folder / name / "checkpoints"
    aimed, begun = moments.random() < 1 / 3, newest(saves)
    moment: float | None = None
    while (code := waited(process, os.WNOHANG)) is None:
        if moment is None and newest(saves) != begun:  # every attempt comes at least one save further
            moment = time.monotonic() + moments.uniform(0, whole / 8)
        if moment is not None and time.monotonic() >= moment and (not aimed or any(saves.glob(f"*{PARTIAL}"))):
            break
        time.sleep(0.0005)
    if code is not None:
        return False
    if aimed:
        time.sleep(moments.uniform(0, 0.02))
    victims = [process, *children(process)] if ranks > 1 else [process]
    victim = moments.choice(victims)
    with contextlib.suppress(ProcessLookupError):  # it ended in between; its exit code says so
        os.kill(victim, signal.SIGKILL)
    inside = any(saves.glob(f"*{PARTIAL}"))
    if waited(process) == 0:
        return False
    tally.hit += 1
    tally.in_saves += inside
    tally.on_pairs += ranks > 1
    tally.of_ranks += victim != process
    return True


def newest(saves: Path) -> str:
    """The name of the newest checkpoint."""
    return max((one.name for one in saves.glob("[0-9]" * 9)), default="")


def children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def content(out: Path) -> dict[str, str]:
    """sha256 of every file of the model, and of the metrics without what depends on speed."""
    lines = [{key: value for key, value in line.items() if key not in VARYING} for line in read_metrics(out / METRICS)]
    model = {file.name: sha256_file(file) for file in sorted((out / "model").iterdir())}
    return model | {METRICS: sha256_bytes(canonical(lines))}


if __name__ == "__main__":
    main()
