"""
The machine as files, environment and commands. Every fact about hardware is read through one Host.

A test hands over a directory tree, a dictionary and recorded replies instead, so that a machine nobody owns can be
examined. Nothing here needs more than the standard library: it also runs before anything else is installed.

Sources: the Linux kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c (nodes), Documentation/gpu/amdgpu (memory files),
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst (limits).
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Wanted = Literal["auto", "cuda", "mps", "cpu"]
"""What a recipe may ask for. AMD answers to "cuda" too; "auto" takes the first of them that is there."""

Maker = Literal["amd", "nvidia", "hygon", "apple"]

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
KFD_VENDOR_AMD = 4098  # 0x1002; NVIDIA's open driver makes nodes as well
PCI_MAKERS: dict[str, Maker] = {"0x1002": "amd", "0x10de": "nvidia", "0x1d94": "hygon"}
PCI_CLASSES = ("0x03", "0x12", "0x0b40")  # displays, accelerators, co-processors: bridges of the same maker are no GPUs
INTEGRATED = frozenset({"gfx90c", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"})
"""Targets that only exist inside a processor and share its memory."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a command said. `code` is negative for a signal and None where it did not end in time."""

    code: int | None
    out: str = ""
    err: str = ""


Run = Callable[[Sequence[str], float], Reply]
"""(command, seconds it may take) -> reply."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    maker: Maker
    target: str = ""
    """AMD's name for the instruction set, as gfx1151; "" where the kernel does not tell."""
    render: str = ""
    """The device node that a process opens, as dev/dri/renderD128."""

    @property
    def integrated(self) -> bool:
        return self.target in INTEGRATED


def run_here(command: Sequence[str], limit_seconds: float) -> Reply:
    """Run a command on this machine. A command that cannot start replies with 127, as a shell does."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Reply(code=None, out=_text(late.stdout), err=_text(late.stderr))
    except OSError as error:
        return Reply(code=127, err=str(error))
    return Reply(code=done.returncode, out=_text(done.stdout), err=_text(done.stderr))


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine. Paths are relative to `root`, which is / on a real one."""

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    run: Run = run_here
    system: str = "Linux"
    processor: str = "x86_64"
    python: str = "python3"
    """The interpreter that torch is wanted for."""
    torch: Path | None = None
    """The folder of the torch package that this interpreter would import."""

    @classmethod
    def here(cls) -> "Host":
        """This machine and this interpreter."""
        spec = importlib.util.find_spec("torch")
        return cls(
            root=Path("/"),
            env=os.environ,
            system=platform.system(),
            processor=platform.machine(),
            python=sys.executable,
            torch=Path(spec.origin).parent if spec and spec.origin else None,
        )

    def read(self, name: str) -> str | None:
        """A file's text, or None where it is absent or hidden (a container masks devices with EPERM)."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A file that holds one whole number."""
        text = (self.read(name) or "").strip()
        return int(text) if text.isdigit() else None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, numbers in their order; none where it is absent or hidden."""
        try:
            found = os.listdir(self.root / folder)
        except OSError:
            return []
        return sorted(found, key=lambda name: [(int(n or -1), word) for word, n in re.findall(r"(\D*)(\d*)", name)])

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()


def gfx_name(version: int) -> str:
    """AMD's name of a target from the kernel's number: 110501 -> gfx1151, 90010 -> gfx90a; "" for 0, a processor."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def find_gpus(host: Host) -> list[Gpu]:
    """
    The GPUs of a machine, those first that say most about themselves.

    AMD's come from the kernel's compute topology, which names the target. Where that says nothing of a maker, its
    cards are found on the display or PCI bus: enough to know that a driver is missing. A node that a container masks
    is another's, and left out.
    """
    found = list(_kfd_gpus(host))
    if host.system == "Darwin":
        return [Gpu(maker="apple")] if host.processor == "arm64" else []
    makers = list(_bus_makers(host))
    if host.exists("proc/driver/nvidia/version") and "nvidia" not in makers:
        makers += ["nvidia"] * max(1, len(host.names("proc/driver/nvidia/gpus")))
    if "hygon" in makers or host.exists(
        "opt/dtk"
    ):  # its own driver fills the same topology with targets no wheel knows
        found = []
        makers = ["hygon" if maker == "amd" else maker for maker in makers] or ["hygon"]
    known = {gpu.maker for gpu in found}
    return found + [Gpu(maker=maker) for maker in makers if maker not in known]


def _kfd_gpus(host: Host) -> Iterator[Gpu]:
    for node in host.names(KFD_NODES):
        text = host.read(f"{KFD_NODES}/{node}/properties") or ""
        facts = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)\s*$", text, re.MULTILINE)}
        if facts.get("vendor_id") == KFD_VENDOR_AMD and facts.get("simd_count") and facts.get("gfx_target_version"):
            minor = facts.get("drm_render_minor")
            render = f"dev/dri/renderD{minor}" if minor else ""
            yield Gpu(maker="amd", target=gfx_name(facts["gfx_target_version"]), render=render)


def _bus_makers(host: Host) -> Iterator[Maker]:
    cards = [name for name in host.names("sys/class/drm") if re.fullmatch(r"card\d+", name)]
    seen = [(host.read(f"sys/class/drm/{card}/device/vendor") or "").strip() for card in cards]
    if not any(vendor in PCI_MAKERS for vendor in seen):  # no driver has made a card of it
        for device in host.names("sys/bus/pci/devices"):
            kind = (host.read(f"sys/bus/pci/devices/{device}/class") or "").strip()
            if kind.startswith(PCI_CLASSES):
                seen.append((host.read(f"sys/bus/pci/devices/{device}/vendor") or "").strip())
    yield from (PCI_MAKERS[vendor] for vendor in seen if vendor in PCI_MAKERS)


def cpu_features(host: Host) -> frozenset[str]:
    """The processor's features by the kernel's names, such as avx512_bf16 and amx_bf16; none where it does not tell."""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def fast_bf16(host: Host) -> bool:
    """Whether the processor multiplies bfloat16 in hardware. Emulated, it is slower than float32."""
    return bool(cpu_features(host) & {"avx512_bf16", "amx_bf16"})


def physical_bytes(host: Host) -> int | None:
    """Memory that the machine has."""
    if found := re.search(r"^MemTotal:\s*(\d+) kB", host.read("proc/meminfo") or "", re.MULTILINE):
        return int(found[1]) * 1024
    if host.system == "Darwin":
        text = host.run(["sysctl", "-n", "hw.memsize"], 10.0).out.strip()
        return int(text) if text.isdigit() else None
    return None


def memory_bytes(host: Host) -> int | None:
    """Memory that this process may use: what the machine has, or less where a control group says so."""
    sizes = [size for size in (physical_bytes(host), *_cgroup_limits(host)) if size]
    return min(sizes) if sizes else None


def free_bytes(host: Host) -> int:
    """Memory that is free now, or could be made so; half of all of it where the system does not say."""
    whole = memory_bytes(host) or 2**30
    found = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("proc/meminfo") or "", re.MULTILINE)
    return min(int(found[1]) * 1024 if found else whole // 2, whole)


def _cgroup_limits(host: Host) -> Iterator[int | None]:
    """The limit of every group that this process is in, up to the root: the smallest one holds."""
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        )
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            yield host.number("/".join([mount, *parts[:depth], limit]))  # v2 says "max" and v1 2**63 for none


def in_container(host: Host) -> bool:
    marks = (".dockerenv", "run/.containerenv")
    return any(host.exists(mark) for mark in marks) or "container" in host.env
