"""
What is wrong with this machine, and the line that cures it.

Files come first, then torch in a child process, then what torch computes, in another: a broken stack can crash or hang
at its first kernel, long after it said that all is well. Each check is a function from facts to findings; one that
does not concern the machine says nothing. The order of CHECKS is the order of the report.
"""

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bloomery.core import native
from bloomery.core.errors import HardwareError
from bloomery.hw import wheel
from bloomery.hw.host import (
    Gpu,
    Host,
    Reply,
    cpu_features,
    fast_bf16,
    find_gpus,
    gfx_name,
    in_container,
    memory_bytes,
    physical_bytes,
)

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
OLDEST_PYTHON = (3, 11)
IMPORT_LIMIT_SECONDS = 120.0
PROBE_LIMIT_SECONDS = 240.0
LARGEST_MATMUL_ERROR = 0.02  # bfloat16 keeps 8 bits, which gives about 0.003
LEAST_SHM_BYTES = GIB
SCARCE_DISK_BYTES, LEAST_DISK_BYTES = 10 * GIB, GIB
SCARCE_MEMORY_BYTES = 4 * GIB
CONTAINER_FLAGS = (
    'docker run --device=/dev/kfd --device=/dev/dri --group-add "$(stat -c %g /dev/kfd)" --group-add video '
    "--ipc=host --security-opt seccomp=unconfined …"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact with a verdict. `id` stays the same between versions, so that scripts can rely on it."""

    id: str
    status: Status
    value: str
    cure: str = ""
    """What to do, as a line to paste where there is one."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What several checks look at, found once."""

    host: Host
    runs: Path
    gpus: Sequence[Gpu]
    have: wheel.Torch | None
    seen: dict[str, Any] | None
    """What torch says of itself when it is imported; None where it is absent or the import failed."""
    reply: Reply

    @property
    def amd(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.maker == "amd"]


Check = Callable[[Facts], Iterator[Finding]]


def examine(host: Host, runs: Path) -> list[Finding]:
    """Every finding about a machine. `runs` is the folder that runs would be written to."""
    have = wheel.installed(host)
    reply = probe(host, "torch", IMPORT_LIMIT_SECONDS) if have else Reply(code=1)
    answers = answers_of(reply)
    seen = answers if reply.code == 0 and "version" in answers else None
    facts = Facts(host=host, runs=runs, gpus=find_gpus(host), have=have, seen=seen, reply=reply)
    return [finding for check in CHECKS for finding in check(facts)]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well, 1 with warnings, 2 with failures."""
    return max(({"ok": 0, "warn": 1, "fail": 2}[finding.status] for finding in findings), default=0)


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """The report for a person."""
    marks = {"ok": "✓", "warn": "!", "fail": "✗"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.status]} {finding.id:<17} {finding.value}")
        lines += [f"{'':<20}{line}" for line in finding.cure.splitlines()]
    return lines


def probe(host: Host, name: str, limit_seconds: float) -> Reply:
    """Ask torch something in a process of its own."""
    return host.run([host.python, "-X", "faulthandler", "-m", "bloomery.hw.probe", name], limit_seconds)


def answers_of(reply: Reply) -> dict[str, Any]:
    """All lines of JSON that a probe wrote, as one dictionary."""
    merged: dict[str, Any] = {}
    for line in reply.out.splitlines():
        if line.startswith("{"):
            merged |= json.loads(line)
    return merged


def ending(reply: Reply) -> str:
    """How a child process ended, in words."""
    if reply.code is None:
        return "did not end in time"
    if reply.code < 0:
        return f"was killed by signal {-reply.code}"
    last = reply.err.strip().splitlines()[-1:] or ["no message"]
    return f"failed: {last[0]}"


def python_version(facts: Facts) -> Iterator[Finding]:
    old = sys.version_info[:2] < OLDEST_PYTHON
    cure = "rm -r .venv && make PYTHON=python3.11" if old else ""
    yield Finding(id="python", status="fail" if old else "ok", value=platform.python_version(), cure=cure)


def graphics(facts: Facts) -> Iterator[Finding]:
    names = [f"{gpu.maker} {gpu.target}".strip() for gpu in facts.gpus]
    counted = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    if facts.amd and not any(gpu.target for gpu in facts.amd):
        cure = "sudo modprobe amdgpu"
        yield Finding(id="gpu", status="warn", value="an AMD GPU without its compute driver", cure=cure)
    else:
        yield Finding(id="gpu", status="ok", value=", ".join(counted) or "none")


def torch_build(facts: Facts) -> Iterator[Finding]:
    try:
        choice = wheel.install_command(facts.host)
    except HardwareError as error:
        yield Finding(id="torch", status="fail", value=error.what, cure=error.cure)
        return
    if facts.have is None or choice.command is not None:
        value = f"missing or too old ({choice.why})"
        yield Finding(id="torch", status="fail", value=value, cure=shlex.join(choice.command or ()))
    elif facts.seen is None:
        value = f"{facts.have.version}: importing it {ending(facts.reply)}"
        yield Finding(id="torch", status="fail", value=value, cure=_reinstall(facts.host))
    elif choice.better is not None:
        yield Finding(id="torch", status="warn", value=choice.why, cure=shlex.join(choice.better))
    else:
        yield _torch_sees(facts, facts.seen)


def _torch_sees(facts: Facts, seen: dict[str, Any]) -> Finding:
    """Whether an installed torch of the right kind reaches the GPU."""
    maker = wheel.maker_to_serve(facts.gpus)
    version = str(seen["version"])
    targets = {gpu.target for gpu in facts.amd if gpu.target}
    if maker == "amd" and targets and not targets & set(seen["targets"]) and seen["targets"]:
        value = f"{version} has no kernels for {', '.join(sorted(targets))}, only for {', '.join(seen['targets'])}"
        return Finding(id="torch", status="warn", value=value, cure=_reinstall(facts.host))
    if maker in ("amd", "nvidia", "hygon") and not seen["gpus"]:
        hidden = [f"{name}={value!r}" for name, value in facts.host.env.items() if name.endswith("_VISIBLE_DEVICES")]
        value = f"{version} sees no GPU" + (f" ({', '.join(hidden)})" if hidden else "")
        cure = "Look at the driver: " + ("nvidia-smi" if maker == "nvidia" else "ls -l /dev/kfd /dev/dri")
        return Finding(id="torch", status="warn", value=value, cure=cure)
    return Finding(id="torch", status="ok", value=f"{version}, sees {seen['gpus'] or 'no'} GPUs")


def _reinstall(host: Host) -> str:
    try:
        command, _ = wheel.fresh_command(host)
    except HardwareError as error:
        return error.cure
    return shlex.join(wheel.forced(command))


def amd_nodes(facts: Facts) -> Iterator[Finding]:
    targets = [gpu for gpu in facts.amd if gpu.target]
    if not targets:
        return
    root = facts.host.root
    nodes = ["dev/kfd", *(gpu.render for gpu in targets if gpu.render)]
    absent = [node for node in nodes if not facts.host.exists(node)]
    closed = [node for node in nodes if node not in absent and not os.access(root / node, os.R_OK | os.W_OK)]
    groups = {"absent": absent, "closed to this user": closed}
    problems = [f"{what}: {', '.join(f'/{node}' for node in found)}" for what, found in groups.items() if found]
    if not problems:
        yield Finding(id="amd-device-nodes", status="ok", value="open to this user")
        return
    cure = "sudo modprobe amdgpu" if absent else 'sudo usermod -aG render,video "$USER"   # then log in again'
    cure = CONTAINER_FLAGS if in_container(facts.host) else cure
    yield Finding(id="amd-device-nodes", status="fail", value="; ".join(problems), cure=cure)


def hsa_override(facts: Facts) -> Iterator[Finding]:
    spoofed = facts.host.env.get("HSA_OVERRIDE_GFX_VERSION")
    if spoofed and facts.amd:
        parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", spoofed)
        named = gfx_name(int(parts[1]) * 10000 + int(parts[2]) * 100 + int(parts[3])) if parts else "no target"
        real = ", ".join(sorted({gpu.target or "unknown" for gpu in facts.amd}))
        value = f"{spoofed} stands for {named}; the kernel says {real}"
        yield Finding(id="hsa-override", status="warn", value=value, cure="unset HSA_OVERRIDE_GFX_VERSION")


def gtt(facts: Facts) -> Iterator[Finding]:
    """A GPU inside a processor gets half of the memory unless the kernel is told otherwise."""
    ram = physical_bytes(facts.host)
    if not ram or not facts.amd or not all(gpu.integrated for gpu in facts.amd):
        return
    for gpu in facts.amd:
        folder = f"sys/class/drm/{Path(gpu.render).name}/device"
        shared = facts.host.number(f"{folder}/mem_info_gtt_total")
        own = facts.host.number(f"{folder}/mem_info_vram_total")
        if shared is None or own is None:
            continue
        value = f"{gpu.target} may use {(shared + own) / GIB:.0f} GiB beside {ram / GIB:.0f} GiB for the processor"
        if own > ram / 4 or shared > 0.55 * ram:
            yield Finding(id="gtt", status="ok", value=value)
        else:
            pages = int(0.75 * ram / GIB) * (GIB // 4096)
            cure = f"Kernel command line: ttm.pages_limit={pages} ttm.page_pool_size={pages}   # and no amdgpu.gttsize"
            yield Finding(id="gtt", status="warn", value=value, cure=cure)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    if in_container(facts.host) and facts.host.exists("dev/shm"):
        size = shutil.disk_usage(facts.host.root / "dev/shm").total
        small = size < LEAST_SHM_BYTES
        cure = "docker run --ipc=host …   # or --shm-size=8g" if small else ""
        value = f"/dev/shm has {size / GIB:.2f} GiB"
        yield Finding(id="shm", status="warn" if small else "ok", value=value, cure=cure)


def disk(facts: Facts) -> Iterator[Finding]:
    runs = facts.runs.absolute()
    folder = next(place for place in (runs, *runs.parents) if place.exists())
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < LEAST_DISK_BYTES else "warn" if free < SCARCE_DISK_BYTES else "ok"
    cure = "" if status == "ok" else "Free some, or write elsewhere: bloomery run RECIPE --runs DIR"
    yield Finding(id="disk", status=status, value=f"{free / GIB:.1f} GiB free for {facts.runs}", cure=cure)


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


def processor(facts: Facts) -> Iterator[Finding]:
    count = len(re.findall(r"^processor\s*:", facts.host.read("proc/cpuinfo") or "", re.MULTILINE))
    fast = sorted(cpu_features(facts.host) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    dtype = "bfloat16" if fast_bf16(facts.host) else "float32"
    value = f"{count or 'unknown'} threads, computes in {dtype} ({', '.join(fast) or 'no wide vectors'})"
    yield Finding(id="cpu", status="ok", value=value)


def compiled(facts: Facts) -> Iterator[Finding]:
    """Whether the libraries of native/ run; without them the same is computed in Python, only slower."""
    for name in native.NAMES:
        told = native.state(name)
        ready = told in native.LEVELS
        cure = "" if ready or told.startswith("off") else "python -m pip install --editable .   # with a C++ compiler"
        yield Finding(id=f"native-{name}", status="warn" if "stale" in told else "ok", value=told, cure=cure)


def computing(facts: Facts) -> Iterator[Finding]:
    """Whether torch computes right numbers here: one product, and sixty steps whose loss must halve."""
    if facts.seen is None:
        return
    reply = probe(facts.host, "compute", PROBE_LIMIT_SECONDS)
    told = answers_of(reply)
    where = f"on {told.get('device', 'the device')} in {told.get('dtype', 'its dtype')}"
    cure = f"Do not train on it: take the processor, or another torch:\n{_reinstall(facts.host)}"
    error = told.get("matmul_error")
    if error is None:
        yield Finding(id="matmul", status="fail", value=f"a matrix product {where} {ending(reply)}", cure=cure)
        return
    right = error < LARGEST_MATMUL_ERROR  # false for NaN
    value = f"relative error {error:.4f} {where}"
    yield Finding(id="matmul", status="ok" if right else "fail", value=value, cure="" if right else cure)
    if "last_loss" not in told:
        yield Finding(id="training", status="fail", value=f"sixty steps {where}: it {ending(reply)}", cure=cure)
        return
    first, last = told["first_loss"], told["last_loss"]
    learned = last < first / 2
    value = f"loss {first:.3f} → {last:.3f} in sixty steps"
    yield Finding(id="training", status="ok" if learned else "fail", value=value, cure="" if learned else cure)


CHECKS: tuple[Check, ...] = (
    python_version,
    graphics,
    amd_nodes,
    hsa_override,
    gtt,
    torch_build,
    processor,
    memory,
    shared_memory,
    disk,
    compiled,
    computing,
)
