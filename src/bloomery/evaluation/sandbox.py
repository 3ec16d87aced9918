"""
Run code that a model has written where it can do no harm, and its tests in another process (`sandbox_child.py`).

The code has no network, no rights and an empty environment. Its file system holds Python alone, and an empty folder in
memory to write to. Time, CPU, memory, files, processes and output are limited. When the code ends or its time is up,
everything that it started ends as well. Where the kernel lacks this isolation, nothing is run, unless less is allowed.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from bloomery.core import child as children
from bloomery.core.chat import lone_surrogate
from bloomery.core.errors import HardwareError
from bloomery.evaluation import sandbox_child

SandboxStatus = Literal["passed", "failed", "timeout", "output", "killed"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    """Of addresses, for each process."""
    processes: int = 8
    file_bytes: int = 16 * 2**20
    folder_bytes: int = 32 * 2**20
    open_files: int = 64
    output_bytes: int = 2**16

    @property
    def resources(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes + 1,  # and the process of the tests
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class SandboxResult:
    status: SandboxStatus
    output: str
    """What was printed, up to the limit."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run(solution: str, tests: str, limits: SandboxLimits | None = None, *, weaker: bool = False) -> SandboxResult:
    """
    Run tests against the names of a solution, each text in a process of its own, within one limit of time.

    The outcome is "passed" where the solution was loaded and the tests came to their end. Without tests, nothing is
    asked: "passed" then says no more than that the solution was loaded, by its own account. A text that UTF-8 cannot
    hold fails, as it would in a file.

    Raises HardwareError where this machine cannot isolate the code, and nothing was run; `weaker` runs it all the
    same, behind what isolation there is.
    """
    limits = limits or SandboxLimits()
    if sys.platform != "linux":
        raise HardwareError(f"there is no sandbox for {sys.platform}", hint="Use Linux to run programs.")
    for name, text in (("program", solution), ("tests", tests)):
        if (spot := lone_surrogate(text)) is not None:
            return SandboxResult(
                "failed", f"character {spot} of the {name} is half a surrogate pair: no file can hold it", 0.0
            )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cell-") as home:
        os.chmod(home, 0o755 if not weaker else 0o777)
        asked = {
            "home": home,
            "python": _python(),
            "limits": limits.resources,
            "folder_bytes": limits.folder_bytes,
            "weaker": weaker,
        }
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(Path(sandbox_child.__file__).resolve())]
        with subprocess.Popen(
            children.leashed(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={},
            cwd="/",
        ) as child:
            try:
                frames = (json.dumps(asked).encode(), solution.encode(), tests.encode())
                printed, why = _followed(child, b"".join(map(_framed, frames)), limits, began)
            finally:
                _end(child)
        seconds = round(time.monotonic() - began, 3)
    output = printed.decode("utf-8", "replace")
    if child.returncode == sandbox_child.REFUSED:
        hint = "Enable unprivileged user namespaces, or add --allow-partial-sandbox to run code with less isolation."
        raise HardwareError(f"code that a model wrote was not run: {output.strip()}", where="the sandbox", hint=hint)
    return SandboxResult(why or _status(child.returncode), output, seconds)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _status(code: int) -> SandboxStatus:
    if code == sandbox_child.PASSED:
        return "passed"
    return "killed" if code >= 128 else "failed"


def _python() -> list[str]:
    """Folders of the interpreter that lie elsewhere than the system's programs."""
    folders = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(path for path in folders if not path.startswith(sandbox_child.SYSTEM))


def _followed(
    child: "subprocess.Popen[bytes]", stdin_bytes: bytes, limits: SandboxLimits, began: float
) -> tuple[bytes, SandboxStatus | None]:
    """Hand over the code and take what is printed; the reason, where one of the limits that are kept here was hit."""
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdin.fileno(), False)
    printed, left = b"", memoryview(stdin_bytes)
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        ready.register(child.stdin, selectors.EVENT_WRITE)
        while (rest := began + limits.seconds - time.monotonic()) > 0:
            for key, _ in ready.select(rest):
                if key.fileobj is child.stdin:
                    left = left[_put(child.stdin.fileno(), left) :]
                    if not left:
                        ready.unregister(child.stdin)
                        child.stdin.close()
                    continue
                some = os.read(child.stdout.fileno(), 2**16)
                printed += some
                if not some:
                    return _ended(child, printed, rest)
                if len(printed) > limits.output_bytes:
                    return printed[: limits.output_bytes], "output"
    return printed, "timeout"


def _put(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BrokenPipeError:  # it has ended already, and its exit says why
        return len(data)


def _ended(child: "subprocess.Popen[bytes]", printed: bytes, rest: float) -> tuple[bytes, SandboxStatus | None]:
    """Its output is closed: most likely it is about to end."""
    try:
        child.wait(rest)
    except subprocess.TimeoutExpired:
        return printed, "timeout"
    return printed, None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """The whole group, and with process 1 of its namespace all that is left in there."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@cache
def check(weaker: bool = False) -> None:
    """Raises HardwareError where code cannot be held here."""
    result = run("print('here')", "", weaker=weaker)
    if not result.passed:
        raise HardwareError(f"the sandbox does not run: {result.output.strip()}", hint="Remove --run-code.")
