"""What of a machine is not its GPU: Python, processor, memory, disk, the container around it."""

import math
import platform
import re
import sys
from collections.abc import Iterator

from bloomery.core import native
from bloomery.hw.doctor.finding import GIB, Facts, Finding, Status
from bloomery.hw.host import Reply, cpu_features, fast_bf16, in_container, in_pod, in_wsl, memory_bytes, physical_bytes
from bloomery.hw.trials import ending, merged

OLDEST_PYTHON = (3, 11)
LEAST_SHM_BYTES = GIB
SCARCE_DISK_BYTES, LEAST_DISK_BYTES = 10 * GIB, GIB
SCARCE_MEMORY_BYTES = 4 * GIB
SLOW_DISK, SLOW_MEMORY = 50e6, 2e9
"""Bytes a second. A checkpoint of 1.5 GB takes 30 s to such a disk; a processor with such memory trains nothing."""
MEASURE_LIMIT_SECONDS = 30.0


def python_version(facts: Facts) -> Iterator[Finding]:
    old = sys.version_info[:2] < OLDEST_PYTHON
    cure = "rm -r .venv && make PYTHON=python3.11" if old else ""
    yield Finding(id="python", status="fail" if old else "ok", value=platform.python_version(), cure=cure)


def processor(facts: Facts) -> Iterator[Finding]:
    fast = sorted(cpu_features(facts.host) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"})
    dtype = "bfloat16" if fast_bf16(facts.host) else "float32"
    value = f"{_threads(facts) or 'unknown'} threads, computes in {dtype} ({', '.join(fast) or 'no wide vectors'})"
    yield Finding(id="cpu", status="ok", value=value)


def quota(facts: Facts) -> Iterator[Finding]:
    """A container that may use two processors sees all of them, and torch starts a thread for each."""
    told = re.match(r"(\d+) (\d+)", facts.host.read("sys/fs/cgroup/cpu.max") or "")
    if not told or "OMP_NUM_THREADS" in facts.host.env:
        return
    share = max(1, math.ceil(int(told[1]) / int(told[2])))
    if share < _threads(facts):
        value = f"its control group may use {share} of {_threads(facts)} threads"
        yield Finding(id="cpu-quota", status="warn", value=value, cure=f"export OMP_NUM_THREADS={share}")


def _threads(facts: Facts) -> int:
    return len(re.findall(r"^processor\s*:", facts.host.read("proc/cpuinfo") or "", re.MULTILINE))


def memory(facts: Facts) -> Iterator[Finding]:
    usable, whole = memory_bytes(facts.host), physical_bytes(facts.host)
    if usable is None or whole is None:
        yield Finding(id="memory", status="ok", value="unknown")
        return
    limit = f" of {whole / GIB:.1f} GiB, by its control group" if usable < whole else ""
    small = usable < SCARCE_MEMORY_BYTES
    cure = "Close other programs, or raise the container's limit (docker run --memory=8g …)." if small else ""
    value = f"{usable / GIB:.1f} GiB{limit}"
    yield Finding(id="memory", status="warn" if small else "ok", value=value, cure=cure)


def memory_speed(facts: Facts) -> Iterator[Finding]:
    rate = _rate(_measure(facts, "memory"))
    if rate is not None:
        slow = rate < SLOW_MEMORY
        value = f"one thread copies {rate / 1e9:.1f} GB/s"
        cure = "Close other programs; in a virtual machine, ask its host for pinned memory." if slow else ""
        yield Finding(id="memory-speed", status="warn" if slow else "ok", value=value, cure=cure)


def _measure(facts: Facts, what: str, *arguments: str) -> Reply:
    """What a child process finds out about memory or a disk."""
    return facts.host.run([facts.host.python, "-m", "bloomery.hw.measure", *arguments, what], MEASURE_LIMIT_SECONDS)


def _rate(reply: Reply) -> float | None:
    """Bytes a second; None where it was not measured."""
    told = merged(reply).get("bytes_per_second")
    return float(told) if told else None


def shared_memory(facts: Facts) -> Iterator[Finding]:
    if in_container(facts.host) and facts.host.exists("dev/shm"):
        size = facts.host.space("dev/shm").total
        small = size < LEAST_SHM_BYTES
        cure = "docker run --ipc=host …   # or --shm-size=8g"
        if in_pod(facts.host):
            cure = "volumes: [{name: shm, emptyDir: {medium: Memory}}]   # of the pod, mounted at /dev/shm"
        value = f"/dev/shm has {size / GIB:.2f} GiB"
        yield Finding(id="shm", status="warn" if small else "ok", value=value, cure=cure if small else "")


def windows(facts: Facts) -> Iterator[Finding]:
    if not in_wsl(facts.host):
        return
    value = f"Linux inside Windows (kernel {facts.host.kernel})"
    if facts.gpus:
        yield Finding(id="wsl", status="ok", value=f"{value}; its GPU comes through /dev/dxg")
    elif facts.host.exists("dev/dxg"):
        cure = "amdgpu-install -y --usecase=wsl,rocm --no-dkms   # AMD; for NVIDIA install the driver in Windows"
        yield Finding(id="wsl", status="warn", value=f"{value} lends a GPU, but no runtime here sees it", cure=cure)
    else:
        cure = "wsl --update   # in Windows, and a current driver of the GPU there"
        yield Finding(id="wsl", status="warn", value=f"{value} lends no GPU: /dev/dxg is absent", cure=cure)


def disk(facts: Facts) -> Iterator[Finding]:
    runs = facts.runs.absolute()
    folder = next(place for place in (runs, *runs.parents) if place.exists())
    free = facts.host.space(folder).free
    status: Status = "fail" if free < LEAST_DISK_BYTES else "warn" if free < SCARCE_DISK_BYTES else "ok"
    cure = "" if status == "ok" else "bloomery run RECIPE --runs DIR   # on another disk, or free some of this one"
    yield Finding(id="disk", status=status, value=f"{free / GIB:.1f} GiB free for {facts.runs}", cure=cure)
    if status == "fail":
        return
    reply = _measure(facts, "disk", str(folder))
    rate = _rate(reply)
    if rate is None and "Error" in reply.err:
        cure = "bloomery run RECIPE --runs DIR   # in a folder that is yours"
        yield Finding(id="disk-speed", status="fail", value=f"writing to {folder} {ending(reply)}", cure=cure)
    if rate is not None:
        slow = rate < SLOW_DISK
        cure = "bloomery run RECIPE --runs DIR   # on a disk of this machine" if slow else ""
        value = f"{rate / 1e6:,.0f} MB/s written and synced"
        yield Finding(id="disk-speed", status="warn" if slow else "ok", value=value, cure=cure)


def compiled(facts: Facts) -> Iterator[Finding]:
    """Whether the libraries of native/ run; without them the same is computed in Python, only slower."""
    for name in native.NAMES:
        told = native.state(name)
        ready = told in native.LEVELS
        cure = "" if ready or told.startswith("off") else "python -m pip install --editable .   # with a C++ compiler"
        yield Finding(id=f"native-{name}", status="warn" if "stale" in told else "ok", value=told, cure=cure)
