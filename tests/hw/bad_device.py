"""
A device whose kernels are broken, and a server that tries them: torch is imported once, and each trial is a fork.

`python -m tests.hw.bad_device` reads requests as lines of JSON and answers each with how the child ended.
"""

import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bloomery.hw.host import CommandResult

ROOT = Path(__file__).parents[2]


class BadDevice:
    """`run` is a Host's: what it is asked to run, it runs where one operation has a fault."""

    def __init__(self, fault: str = "", operation: str = "") -> None:
        self.fault, self.operation = fault, operation

    def __enter__(self) -> "BadDevice":
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.hw.bad_device"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads do not outlive a fork
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate("")

    def has(self, fault: str, operation: str) -> "BadDevice":
        self.fault, self.operation = fault, operation
        return self

    def run(self, command: Sequence[str], limit_seconds: float) -> CommandResult:
        module, name = command[command.index("-m") + 1 :]
        asked = {"fault": self.fault, "operation": self.operation, "module": module, "name": name}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked | {"seconds": limit_seconds}) + "\n")
        self._server.stdin.flush()
        return CommandResult(**json.loads(self._server.stdout.readline()))


def serve() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    mode: Any = TorchDispatchMode

    class Faulty(mode):
        def __init__(self, fault: str, operation: str) -> None:
            super().__init__()
            self.fault, self.operation = fault, operation

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if self.operation not in str(func):
                return func(*args, **kwargs)
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.fault == "unwritten":
                return kwargs["out"]
            return torch.utils._pytree.tree_map_only(torch.Tensor, self.spoil, func(*args, **kwargs))

        def spoil(self, right: Any) -> Any:
            if not right.is_floating_point():
                return right
            factor = {"zeros": 0.0, "nan": float("nan"), "flip": -1.0}[self.fault]
            return right.mul_(factor)

    with Faulty("", "nothing"):  # imports what modes need, once and not in each child
        torch.ones(2, 2) @ torch.ones(2, 2)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = [asked["module"], asked["name"]]
                if asked["fault"]:
                    Faulty(asked["fault"], asked["operation"]).__enter__()
                runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
                sys.stdout.flush()
                os._exit(0)
            code = ended(child, asked["seconds"])
            out.seek(0), err.seek(0)
            print(json.dumps({"code": code, "out": out.read().decode(), "err": err.read().decode()}), flush=True)


def row(name: str, fault: str, operation: str, why: str) -> str:
    """A row of the table of docs/reference/doctor.md. Numbers that differ between processors are left out."""
    told = re.sub(r"loss \S+ → \S+", "loss … → …", why)
    told = re.sub(r"cosine (-?\d\.\d)\d", r"cosine \1", told)
    return f"| `{name}` | `{operation.strip('.')}` | {fault} | {told} |"


def ended(child: int, seconds: float) -> int | None:
    """How a child ends: its code, or minus the signal, or None after so many seconds."""
    watch = os.pidfd_open(child)
    late = not select.select([watch], [], [], seconds)[0]
    if late:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(watch)
    return None if late else code


if __name__ == "__main__":
    serve()
