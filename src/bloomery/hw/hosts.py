"""
One command on several machines: ranks by ssh from a file of hosts, and scripts for Slurm and SkyPilot.

    bloomery run RECIPE --hosts FILE     one ssh a host, each of which starts the ranks of that host (`_serve`)
    bloomery launch RECIPE --on slurm    a script that another program starts

A line of the file is `HOST` or `HOST slots=N`, as Open MPI has it: N ranks, by default 1. The first host has
the first rank. The command, the folder and the interpreter have the same paths on every machine.

ssh hands no signal on. So each host reads its standard input. A line of JSON says what to start. The line "stop" asks
the ranks to stop. After the line "failed" they have as long as if one of theirs had failed, and a first rank that saves
has longer. The end of the input ends them. The end comes also where this process is killed.
"""

import json
import os
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core import child
from bloomery.core.errors import ConfigError, DataError, RunError, shorten
from bloomery.core.signals import TERMINATED, Terminated, on_signals
from bloomery.hw import launcher

if sys.platform == "linux":
    import fcntl

MAX_HOSTS, MAX_RANKS, MAX_FILE_CHARACTERS = 256, 1024, 2**16
HOST = re.compile(r"(?:[\w.-]+@)?([A-Za-z0-9][\w.:-]*)(?:\s+slots=([0-9]{1,4}))?")
PYTHON = (sys.executable, "-m", "bloomery.cli")
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A minute after a cable is cut, ssh ends."""
SECONDS_BETWEEN_LOOKS = 0.1
GRACE_SECONDS = 60.0
"""How long other hosts may take to say why they end too, and then to end."""
MAX_TASK_BYTES = 2**20
WELL = (None, 0, TERMINATED)
NO_SSH = 255
"""Exit code of ssh itself, as for a host that it does not reach."""


@dataclass(frozen=True, kw_only=True)
class HostLine:
    """One machine: what ssh calls it, what the others call it, and how many ranks it gets."""

    login: str
    name: str
    ranks: int


def read_hosts(path: Path) -> list[HostLine]:
    """The hosts of a file. Raises DataError, which names the line, for what is no host, twice there, or too many."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read: {error}", where=str(path), hint="Use a text file that lists the hosts."
        ) from None
    if len(text) > MAX_FILE_CHARACTERS:
        what = f"more than {MAX_FILE_CHARACTERS:,} characters"
        raise DataError(what, where=str(path), hint="Remove comments, or split the machines into two runs.")
    hosts = list[HostLine]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match, where = HOST.fullmatch(words), f"{path}:{number}"
        if match is None or match[2] in ("0", "00", "000", "0000"):
            what = f"{shorten(words, 40)!r} is not a host"
            raise DataError(
                what, where=where, hint="Write each line as NAME or NAME slots=N, for example: gpu01 slots=8"
            )
        host = HostLine(login=words.split()[0], name=match[1], ranks=int(match[2] or 1))
        if any(host.name == other.name for other in hosts):
            raise DataError(f"{host.name} is listed twice", where=where, hint="List it once, with slots=N for N ranks.")
        hosts.append(host)
    total = sum(host.ranks for host in hosts)
    if not 0 < len(hosts) <= MAX_HOSTS or total > MAX_RANKS:
        what = f"has {len(hosts)} hosts and {total} ranks; the limits are {MAX_HOSTS} and {MAX_RANKS}"
        raise DataError(what, where=str(path), hint=f"List 1 to {MAX_HOSTS} hosts.")
    return hosts


def start(words: Sequence[str], path: Path) -> None:
    """
    Run `bloomery WORDS` as ranks on all hosts of a file, and wait for them. Ctrl-C and SIGTERM ask every rank to stop;
    another Ctrl-C ends them. Raises RunError, which names the host, where one fails: then all others have ended too.
    Raises Terminated where they stopped as asked.
    """
    hosts = read_hosts(path)
    env = {
        "MASTER_ADDR": hosts[0].name,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(launcher.port_of(secrets.token_hex(8))),
        "WORLD_SIZE": str(sum(host.ranks for host in hosts)),
        **{name: os.environ[name] for name in HANDED_ON if name in os.environ},
    }
    launcher.address(env)
    paths = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []  # ranks inherit it
    program = shlex.join(["env", *paths, sys.executable, "-m", "bloomery.hw.hosts"])
    remote = f"cd {shlex.quote(os.getcwd())} && exec {program}"
    processes: list[subprocess.Popen[bytes]] = []
    with on_signals(_interrupt) as stop:
        stop.saves = True
        try:
            first = 0
            for host in hosts:
                call = child.leashed([*SSH, *ALIVE, "--", host.login, remote])
                process = subprocess.Popen(call, stdin=subprocess.PIPE, start_new_session=True)
                processes.append(process)
                others = [other.name for other in hosts if other is not host]
                task = {"command": [*PYTHON, *words], "env": env, "first": first, "ranks": host.ranks}
                task |= {"others": others[:1], "seconds": [GRACE_SECONDS, launcher.BUSY_SECONDS]}
                _say(process, json.dumps(task))
                first += host.ranks
            asked = False
            while (codes := [process.poll() for process in processes]).count(None):
                if any(code not in WELL for code in codes):
                    break
                if stop.asked and not asked:
                    asked = True
                    for process in processes:
                        _say(process, "stop")
                time.sleep(SECONDS_BETWEEN_LOOKS)
            for process in processes:
                _say(process, "failed")
            _wait(processes[1:], GRACE_SECONDS)
            _wait(processes[:1], launcher.BUSY_SECONDS)  # its host ends ranks that do not save sooner
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                _hang_up(process)
            _wait(processes, GRACE_SECONDS)
            for process in processes:
                process.kill()
                process.wait()
        failed = [(host, code) for host, code in zip(hosts, codes, strict=True) if code not in WELL]
        if failed:
            raise _failure(failed, codes, hosts, path)
        if TERMINATED in codes:
            raise Terminated(stop.code)


HANDED_ON = (
    *("BLOOMERY_CACHE", "BLOOMERY_RANK_SECONDS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HOME"),
)
"""Variables of this process that the ranks get too. ssh hands none on."""


def _failure(
    failed: Sequence[tuple[HostLine, int | None]], codes: Sequence[int | None], hosts: Sequence[HostLine], path: Path
) -> RunError:
    """Of hosts that failed, one that ssh has lost is the cause of the others."""
    host, code = min(failed, key=lambda pair: (pair[1] != NO_SSH, pair[1] is None))
    first = sum(other.ranks for other in hosts[: hosts.index(host)])
    last = first + host.ranks - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    if code == NO_SSH:
        what = f"ssh cannot connect, or lost the connection, with {ranks}"
    elif code is None:
        what = f"{ranks} did not end within {GRACE_SECONDS:.0f} s after the others"
    else:
        what = f"{ranks} ended with exit code {code}"
    hint = f"See their output above. Repair the host or remove it from {path}, then run the same command to resume."
    return RunError(f"{what}; the ranks of the other hosts were ended", where=host.login, hint=hint)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _say(process: "subprocess.Popen[bytes]", line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except OSError:  # it has ended, and its exit code says so
        return


def _hang_up(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:  # its last line has no reader
        return


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)


# --- on each host --------------------------------------------------------------------------------------------------


def _serve() -> int:
    """Start the ranks of this host as the first line of the input says, and end with them. Returns their exit code."""
    with open(0, "rb", buffering=0, closefd=False) as lines:  # a buffer would keep the next line from `_mind`
        line = lines.readline(MAX_TASK_BYTES)
    if not line.endswith(b"\n"):
        return 2
    task = json.loads(line)
    env = {**os.environ, **task["env"]}
    if (name := interface(task["others"][0] if task["others"] else "127.0.0.1")) is not None:
        env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name, **env}
    env.setdefault("OMP_NUM_THREADS", str(max(1, launcher.cores() // task["ranks"])))
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="bloomery-host-") as folder:
        env[launcher.BUSY] = str(busy := Path(folder) / "busy")
        try:
            for local_rank in range(task["ranks"]):
                numbers = {"RANK": task["first"] + local_rank, "LOCAL_RANK": local_rank}
                numbers["LOCAL_WORLD_SIZE"] = task["ranks"]
                rank_env = {**env, **{name: str(number) for name, number in numbers.items()}}
                command = child.leashed(task["command"])
                rank = subprocess.Popen(command, env=rank_env, stdin=subprocess.DEVNULL, start_new_session=True)
                processes.append(rank)
            codes = _mind(processes, busy, *task["seconds"])
        finally:
            for process in processes:
                process.kill()
                process.wait()
    bad = [code for code in codes if code is not None and code not in WELL]
    return (bad[0] if bad[0] > 0 else 128 - bad[0]) if bad else max(filter(None, codes), default=0)


def _mind(
    processes: "Sequence[subprocess.Popen[bytes]]", busy: Path, grace_seconds: float, busy_seconds: float
) -> list[int | None]:
    """
    Wait until all ranks of this host have ended, or one of any host has failed and the others had time, or nobody
    listens. As long as the file `busy` is there, they have `busy_seconds` more.
    """
    deadline, failed = float("inf"), False
    while (codes := [process.poll() for process in processes]).count(None):
        if failed or any(code not in WELL for code in codes):
            deadline = min(deadline, time.monotonic() + grace_seconds)
        if time.monotonic() >= deadline + busy.exists() * busy_seconds:
            break
        if not select.select([0], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            continue
        said = os.read(0, 64)
        if not said:
            return [1]
        failed = failed or b"failed" in said
        if b"stop" in said:
            for process in processes:
                process.send_signal(signal.SIGTERM)
    return codes


def interface(towards: str) -> str | None:
    """
    The network interface by which this machine reaches another, as eth0; None where that is not known. Ranks would
    otherwise take the one of this machine's own name, which is often an address that no other machine reaches.
    """
    if sys.platform != "linux":
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(towards, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(256, b"\0")
                try:
                    there = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(there) == mine:
                    return name
    except OSError:
        return None
    return None


SIOCGIFADDR = 0x8915
"""From linux/sockios.h."""


# --- scripts for other programs ------------------------------------------------------------------------------------


def script(name: str, options: Mapping[str, Any]) -> str:
    """
    What `sbatch` or `sky launch` takes to start a run of this name with `ranks` ranks on each of `machines`. The
    options are those of `bloomery launch`: these numbers, `on`, `recipe`, `settings`, `runs`, `hours` for Slurm, and
    `gpu`, the GPU of each rank ("none" for none). Raises ConfigError for a GPU without a name.
    """
    machines, ranks, gpu, runs = options["machines"], options["ranks"], options["gpu"], options["runs"]
    words = ["run", str(options["recipe"]), *options["settings"]]
    if not gpu.strip():
        raise ConfigError("it is empty", where="--gpu", hint="Name a GPU, such as H100, or set --gpu none.")
    if options["on"] == "slurm":
        command = shlex.join([*PYTHON, *words, "--runs", str(runs)])
        return _slurm_script(command, name, machines, ranks, options["hours"], gpus=gpu != "none")
    command = shlex.join([*words, "--runs", str(runs if runs.is_absolute() else Path("/shared") / runs)])
    return _skypilot_task(command, name, machines, ranks, gpu)


def _slurm_script(command: str, name: str, machines: int, ranks: int, hours: int, *, gpus: bool) -> str:
    """
    It asks for SIGTERM five minutes before its time is over, in which the run saves. Tasks that end are not ended by
    srun: the first may still save when others have.
    """
    options = {
        "job-name": name,
        "nodes": machines,
        "ntasks-per-node": ranks,
        **({"gpus-per-node": ranks} if gpus else {}),
        "time": f"{hours}:00:00",
        "signal": "TERM@300",
        "open-mode": "append",
        "output": f"{name}-%j.log",
    }
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH --{key}={value}" for key, value in options.items()),
        "#SBATCH --requeue",
        "",
        "# Put the run folder on a file system that all nodes see: a requeued job may begin on another node.",
        "set -eu",
        f"cd {shlex.quote(os.getcwd())}",
        *([] if gpus else ['export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"']),
        f"exec srun --kill-on-bad-exit=0 --wait=0 {command}",
    ]
    return "\n".join(lines) + "\n"


def _skypilot_task(command: str, name: str, machines: int, ranks: int, gpu: str) -> str:
    """
    For a folder with Bloomery's source. The folder of runs is on a volume, /shared, because machines of a cloud share
    no disk. Values are JSON strings, which are YAML too.
    """
    resources = f"\nresources:\n  accelerators: {json.dumps(f'{gpu}:{ranks}')}" if gpu != "none" else ""
    return f"""\
name: {json.dumps(name)}
num_nodes: {machines}{resources}
workdir: .
volumes:
  /shared: bloomery-runs
setup: |
  pip install '.[data,web]' torch
run: |
  first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {ranks} --node-rank "$SKYPILOT_NODE_RANK" \\
    --master-addr "$first" --master-port 29500 -m bloomery.cli {command}
"""


if __name__ == "__main__":
    sys.exit(_serve())
