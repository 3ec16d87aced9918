"""
The process in which inputs are tried: it reads jobs as lines of JSON on stdin, and answers on another descriptor.

An input is written to a file before it is tried, so that it is known if the process does not survive it.
"""

import base64
import ctypes
import errno
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.outcome import Outcome, Target, tried

TARGETS = {
    "recipes": "tests.fuzz.recipes:recipes",
    "settings": "tests.fuzz.recipes:overrides",
    "documents": "tests.fuzz.data:documents",
    "conversations": "tests.fuzz.data:conversations",
    "parquet": "tests.fuzz.data:parquet",
    "shards": "tests.fuzz.runs:shards",
    "runs": "tests.fuzz.runs:runs",
    "tokenizers": "tests.fuzz.models:tokenizers",
    "models": "tests.fuzz.models:models",
    "checkpoints": "tests.fuzz.models:checkpoints",
    "requests": "tests.fuzz.http:requests",
    "sockets": "tests.fuzz.http:sockets",
}
"""`module:function` of a folder for what is prepared once -> Target."""

DATA_BYTES, FILE_BYTES = 4 * 2**30, 256 * 2**20
"""Limits of a process: memory that it may write, and the size of a file."""
MOST_GROWTH_BYTES = 768 * 2**20
"""How far one input may raise the most memory that the process, or one that it started, has ever had."""
SECONDS_TO_LEAVE = 1.0
"""After an input, for processes that it started."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """
    Fork at once: in a namespace of its own, the first process is no place to work, because no signal of its own ends
    it, and so no abort would.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.addaudithook(stay_here)
    for which, limit in (
        (resource.RLIMIT_DATA, DATA_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (limit, limit))
    root = Path(sys.argv[1])
    for line in sys.stdin:
        work(json.loads(line), root, int(sys.argv[2]))


def stay_here(event: str, facts: tuple[Any, ...]) -> None:
    """Let no input reach another machine: a damaged recipe may name any. Raises OSError, as without a network."""
    if event == "socket.getaddrinfo" and facts[0] not in (*LOOPBACK, None):
        raise socket.gaierror(socket.EAI_NONAME, "no names are looked up here")
    if event == "socket.connect" and isinstance(facts[1], tuple) and facts[1][0] not in LOOPBACK:
        raise OSError(errno.ENETUNREACH, "no other machine is reached from here")


def work(job: dict[str, Any], root: Path, answers: int) -> None:
    """Do a job: {"target", "seed", "examples"}, or {"target", "input"} with base64."""
    target = loaded(job["target"], root)

    def attempt(data: bytes) -> None:
        (root / "input").write_bytes(data)
        os.write(answers, b'{"begin": true}\n')
        outcome = watched(target, data, root / "scratch")
        of_find = {"data": base64.b64encode(data).decode()} if outcome.is_find else {}
        os.write(answers, json.dumps(outcome.__dict__ | of_find).encode() + b"\n")

    if "input" in job:
        attempt(base64.b64decode(job["input"]))
    else:
        quiet = settings(
            max_examples=job["examples"],
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seed(job["seed"])(quiet(given(target.inputs)(attempt)))()
    os.write(answers, b'{"end": true}\n')


@cache
def loaded(name: str, root: Path) -> Target:
    module, _, function = TARGETS.get(name, name).partition(":")
    prepared = root / "prepared" / name.replace(":", ".")
    prepared.mkdir(parents=True)
    target: Target = getattr(importlib.import_module(module), function)(prepared)
    return target


def watched(target: Target, data: bytes, folder: Path) -> Outcome:
    """Try an input in an empty folder, and look at what it took and what it left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    own, others = most_bytes()
    outcome = tried(target, data, folder)
    own_now, others_now = most_bytes()
    # a child begins with the most that its parent had by then, whatever it goes on to run
    grown = own_now - own + max(0, others_now - max(others, own_now))
    if not outcome.is_find and grown > MOST_GROWTH_BYTES:
        outcome = Outcome("memory", f"{len(data):,} bytes took {grown / 2**20:,.0f} MiB", "memory")
    if left := survivors():
        outcome = Outcome("processes", f"left running: {', '.join(left)}", "left running")
    return outcome


def most_bytes() -> tuple[int, int]:
    """The most memory that this process had, and the most that one of its ended children had."""
    own, others = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1024 * own, 1024 * others


def survivors() -> list[str]:
    """Commands of processes that outlive their time, which end here. Orphans are children of this process."""
    end = time.monotonic() + SECONDS_TO_LEAVE
    while (left := dict(children())) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return list(left.values())


KEPT = ("resource_tracker", "bloomery.data.isolated")
"""What a process starts once and keeps until its own end."""


def children() -> Iterator[tuple[int, str]]:
    """Living children with their commands, but for those of KEPT. The dead are reaped."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            place = Path("/proc", str(pid))
            try:
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            if state != "Z" and not any(kept in words for kept in KEPT):
                yield pid, words[:200]


if __name__ == "__main__":
    main()
