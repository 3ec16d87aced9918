"""Four machines of one: network namespaces with a cable each, which a test can pull."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from bloomery.core.errors import RunError
from bloomery.hw import copies
from bloomery.hw.distributed import World
from bloomery.train.state import Hook, State
from tests.snippets import Shell
from tests.train.made import lines, run, session, wait_for_steps

ROOT = Path(__file__).parents[2]
MACHINES = 4
STEPS, STEP_OF_CUT = 16, 8
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "eval_every": 10**6,
    "keep_last": 3,
    "spike_sigma": 1e6,
    "optimizer": {"kind": "adamw"},
}
TRAIN = """
import json, sys
sys.path.insert(0, "ROOT")
from bloomery.core import errors, log
from bloomery.core.errors import BloomeryError
from bloomery.train import launch
try:
    launch.by_first_process(lambda: launch.run(sys.argv[1], json.loads(sys.argv[2]), 1))
except BloomeryError as error:
    errors.tell(f"error: {error}")
    sys.exit(2)
"""
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
machine=${2##*.}
if [ -n "$OUT" ] && [ "$machine" -ge 3 ]; then
    set -- "$1" "$2" "mount --bind '$OTHER' '$OUT' && $3"
    exec ip netns exec PREFIX$machine unshare --mount sh -c "$3"
fi
exec ip netns exec PREFIX$machine sh -c "$3"
"""
"""A host for each machine. From the third on they have another disk, OTHER, in place of OUT."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("ip") is None, reason="needs ip, of Linux"),
]


@dataclass
class Lab:
    """Machines 10.99.0.1 to 10.99.0.4, which meet in a bridge of a namespace of its own."""

    prefix: str
    folder: Path
    python: Path
    """What starts programs at once."""

    def cut(self, machine: int) -> None:
        """Pull a cable while the ranks wait, and let them go on."""
        wait_for_steps(self.folder / "out")
        self.cable(machine, "down")
        (self.folder / "cut").touch()

    def cable(self, machine: int, state: str) -> None:
        ip("netns", "exec", f"{self.prefix}hub", "ip", "link", "set", f"c{machine}", state)

    def inside(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.prefix}{machine}"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with Shell(tmp_path_factory.mktemp("shell")) as made:
        made.start()
        yield made


@pytest.fixture
def lab(tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    prefix = f"bl{os.getpid()}x"
    names = [f"{prefix}hub", *(f"{prefix}{machine}" for machine in range(1, MACHINES + 1))]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            hub = ("netns", "exec", names[0], "ip")
            ip(*hub, "link", "add", "middle", "type", "bridge")
            ip(*hub, "link", "set", "middle", "up")
            for machine, name in enumerate(names[1:], 1):
                ip(*hub, "link", "add", f"c{machine}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip(*hub, "link", "set", f"c{machine}", "master", "middle", "up")
                inside = ("netns", "exec", name, "ip")
                ip(*inside, "addr", "add", f"10.99.0.{machine}/24", "dev", "eth0")
                ip(*inside, "link", "set", "eth0", "up")
                ip(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ssh").write_text(SSH.replace("PREFIX", prefix))
        (tmp_path / "bin" / "ssh").chmod(0o755)
        (tmp_path / "train.py").write_text(TRAIN.replace("ROOT", str(ROOT)))
        (tmp_path / "hosts").write_text("".join(f"10.99.0.{machine}\n" for machine in range(1, MACHINES + 1)))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("BLOOMERY_RANK_SECONDS", "10")
        yield Lab(prefix, tmp_path, shell.bin / "python")
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(out) if "loss" in line}


TRAINED = "tests.train.test_machines:trained"
AGENT = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main
dynamic_rendezvous.get_method_name = lambda depth=2: ""  # for its log, it looks through all that is imported
main()
"""
STARTER = """
import sys
from pathlib import Path
from bloomery.core.errors import BloomeryError
from bloomery.hw import hosts
hosts.PYTHON = (sys.argv[1],)
try:
    hosts.start(sys.argv[3:], Path(sys.argv[2]))
except BloomeryError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


def trained(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session that waits in one of its steps until a cable is cut, which it is once."""
    made = session(Path(task["shards"]), Path(task["out"]), world, **SETTINGS)
    whole = made._hooks

    def wait(state: State) -> None:
        deadline = time.monotonic() + 120
        while not Path(task["out"]).with_name("cut").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    made._hooks = lambda *how: [*whole(*how), Hook(lambda state: state.step == STEP_OF_CUT, wait, "wait")]  # type: ignore[method-assign]
    return made.run()


def apart(task: dict[str, Any], world: World) -> dict[str, Any]:
    """A session whose ranks hold parts of the weights, and read copies where their machine has its own disk."""
    world = copies.with_receivers(world, Path(task["out"]))
    copies.bring(world, Path(task["shards"]))
    copies.bring(world, Path(task["out"]))
    made = session(Path(task["shards"]), Path(task["out"]), world, **SETTINGS | {"parallelism": "fsdp"})
    whole = made._hooks

    def fail(state: State) -> None:
        raise RunError("ends here")

    made._hooks = lambda *how: [*whole(*how), Hook(lambda state: state.step == task["ends_at"], fail)]  # type: ignore[method-assign]
    return made.run()


def start(lab: Lab, function: str, task: dict[str, Any]) -> "subprocess.Popen[str]":
    """A function on the ranks of the machines in the file of hosts, by ssh."""
    words = [sys.executable, "-c", STARTER, str(lab.python), str(lab.folder / "hosts"), str(lab.folder / "train.py")]
    return subprocess.Popen([*words, function, json.dumps(task)], stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finished(process: "subprocess.Popen[str]", seconds: float = 240) -> tuple[int, str]:
    try:
        _, told = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, told


def alone(shards: Path, out: Path) -> dict[int, float]:
    """The losses of one rank, which no cable disturbs."""
    run(shards, out, 1, **SETTINGS)
    return losses(out)


def test_a_cut_cable_ends_the_ranks_of_all_machines_and_those_left_resume_with_the_same_losses(
    lab: Lab, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    task = {"shards": str(shards), "out": str(out)}
    process = start(lab, TRAINED, task)
    lab.cut(4)
    code, told = finished(process)
    assert code == 2, told
    assert re.search(r"error: rank [0-2], in \w+: rank 3 \(.*\) did not respond for 10 s", told), told
    assert re.search(r"error: rank 3.*: the machine of the first rank \(10.99.0.1:\d+\) did not answer", told), told
    assert "ended with exit code 2; the ranks of the other hosts were ended" in told
    (tmp_path / "hosts").write_text("10.99.0.1\n10.99.0.2\n10.99.0.3\n")
    assert finished(start(lab, TRAINED, task)) == (0, ANY)
    whole = alone(shards, tmp_path / "alone")
    assert losses(out) == pytest.approx(whole, abs=1e-5)
    assert len(whole) == STEPS


def test_under_torchrun_the_machines_that_a_cut_cable_leaves_resume_by_themselves(
    lab: Lab, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    task = {"shards": str(shards), "out": str(out)}
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5,is_host={}"
    words = [str(lab.python), str(tmp_path / "agent.py"), "--nnodes", "3:4", "--nproc-per-node", "1"]
    words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.99.0.1:29511", "--rdzv-id", "one"]
    program = ["--no-python", str(lab.python), str(tmp_path / "train.py"), TRAINED, json.dumps(task)]
    agents = []
    with contextlib.ExitStack() as stack:
        for machine in range(1, MACHINES + 1):
            more = ["--local-addr", f"10.99.0.{machine}", "--rdzv-conf", conf.format(int(machine == 1))]
            command = [*lab.inside(machine), *words, *more, *program]
            log = stack.enter_context((tmp_path / f"{machine}.log").open("w"))
            agent = subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT, start_new_session=True)
            agents.append(agent)
            stack.callback(ended, agent)
        lab.cut(4)
        said = [(tmp_path / f"{machine}.log") for machine in range(1, MACHINES + 1)]
        for agent in agents[:3]:
            assert agent.wait(timeout=200) == 0, "\n".join(file.read_text()[-3000:] for file in said)
    assert any("did not respond for 10 s" in file.read_text() for file in said)
    assert losses(out) == pytest.approx(alone(shards, tmp_path / "alone"), abs=1e-5)


def ended(agent: "subprocess.Popen[bytes]") -> None:
    """torchrun, and the ranks that it has started in sessions of their own."""
    with suppress(ProcessLookupError):
        agent.terminate()
    try:
        agent.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def test_machines_with_another_disk_train_with_copies_and_send_their_parts_of_checkpoints(
    lab: Lab, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    shutil.copytree(shards, disk / "shards")
    (disk / "out").mkdir()
    (other := tmp_path / "other").mkdir()
    monkeypatch.setenv("OUT", str(disk))
    monkeypatch.setenv("OTHER", str(other))
    for step, expected in ((STEP_OF_CUT, 2), (STEPS, 0)):
        task = {"shards": str(disk / "shards"), "out": str(disk / "out"), "ends_at": STEP_OF_CUT * bool(expected)}
        code, told = finished(start(lab, "tests.train.test_machines:apart", task))
        assert code == expected, told
        newest = max((disk / "out" / "checkpoints").iterdir())
        parts = sorted(file.name[:11] for file in (newest / "training").iterdir())
        assert (newest.name, parts) == (f"{step:09d}", [f"shard-0000{rank}" for rank in range(1, MACHINES + 1)])
    assert not list(disk.rglob(".*.copied.json"))
    assert [folder.name for folder in (other / "out" / "checkpoints").iterdir() if folder.is_dir()] == ["000000008"]
    assert [file.parent.name for file in (other / "out").rglob("model.safetensors")] == ["000000008"], "it could go on"
    assert losses(disk / "out") == pytest.approx(alone(shards, tmp_path / "alone"), abs=1e-5)
