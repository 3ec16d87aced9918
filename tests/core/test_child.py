"""No child outlives its parent, also where SIGKILL hits the parent alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.core import child
from bloomery.core.errors import HardwareError
from bloomery.evaluation import sandbox

ROOT = Path(__file__).parents[2]
MARK = "BLOOMERY_TEST_OF_CHILDREN"
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

WAITS = [sys.executable, "-c", "import time; time.sleep(60)"]


def starting(command: list[str]) -> str:
    """Code that runs a command on a leash."""
    return f"from bloomery.core import child; import subprocess; subprocess.run(child.leashed({command!r}))"


PARENTS = {
    "a command": f"from bloomery.hw.host import run_here; run_here({WAITS!r}, 60.0)",
    "a command that starts another": starting([sys.executable, "-c", starting(WAITS)]),
}


def marked(value: str) -> dict[int, str]:
    """Processes with the mark in their environment, and their descendants. A zombie does not count."""
    found: dict[int, str] = {}
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
                if f"{MARK}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = names[int(folder.name)]
        except (OSError, ValueError):  # it ended meanwhile
            continue
    for _ in range(10):
        found |= {pid: names[pid] for pid, parent in parents.items() if parent in found}
    return found


def outlive(code: str, name: str, at_least: int) -> dict[int, str]:
    """The processes of a parent that are left some seconds after SIGKILL hit it alone."""
    env = os.environ | {MARK: name, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(before := marked(name)) < at_least and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(before) >= at_least, before
    time.sleep(0.3)
    before = marked(name)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 120  # a namespace that ends on a busy machine takes seconds
    while (left := [pid for pid in before if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return {pid: before[pid] for pid in left}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@linux
@pytest.mark.parametrize(("what", "processes"), [("a command", 2), ("a command that starts another", 3)])
def test_a_command_ends_with_the_process_that_started_it(what: str, processes: int) -> None:
    assert outlive(PARENTS[what], what, processes) == {}


@linux
def test_code_in_the_sandbox_ends_with_the_process_that_started_it() -> None:
    code = """
from bloomery.evaluation import sandbox
sandbox.check()
sandbox.run("import time\\ntime.sleep(60)", "", sandbox.SandboxLimits(seconds=60.0))
"""
    try:
        sandbox.check()
    except HardwareError as error:
        pytest.skip(str(error))
    assert outlive(code, "sandbox", 4) == {}


@linux
def test_a_child_whose_parent_ended_first_ends_at_once() -> None:
    command = [sys.executable, "-I", "-S", child.__file__, str(os.getpid() + 1), "true"]
    assert subprocess.run(command, check=False).returncode == 1


def test_a_leashed_command_ends_as_the_command_does() -> None:
    codes = {"raise SystemExit(3)": 3, "import os; os.kill(os.getpid(), 11)": -11}
    for code, expected in codes.items():
        assert subprocess.run(child.leashed([sys.executable, "-c", code]), check=False).returncode == expected
    missing = subprocess.run(child.leashed(["no-such-command"]), check=False, capture_output=True, text=True)
    assert (missing.returncode, "No such file" in missing.stderr) == (child.NOT_STARTED, True)
