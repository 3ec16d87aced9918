"""
The machine as files, environment and commands, and its GPUs. Every fact about hardware is read through one Host.

A test hands over a directory tree, a dictionary and recorded replies instead, so that a machine nobody owns can be
examined. Nothing here needs more than the standard library: it also runs before anything else is installed.

GPUs are those that its kernel, its bus and, under Windows, its tools report. Nothing is asked of torch.

Sources: the Linux kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c (nodes), Documentation/gpu/amdgpu (memory files),
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst (limits); the NVIDIA driver's files below
/proc/driver/nvidia.
"""

import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bloomery.core.io import cache_root

DeviceChoice = Literal["auto", "cuda", "mps", "cpu"]
"""What a recipe may ask for. AMD answers to "cuda" too; "auto" takes the first of them that is there."""

KILL_SECONDS = 5.0
"""How long a killed process may take to go. One that waits for a GPU in the kernel never does, and is left behind."""

Maker = Literal["amd", "nvidia", "hygon", "apple"]

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
KFD_VENDOR_AMD, KFD_VENDOR_HYGON = 4098, 7572  # 0x1002, 0x1d94; NVIDIA's open driver makes nodes as well
PCI_MAKERS: dict[str, Maker] = {"0x1002": "amd", "0x10de": "nvidia", "0x1d94": "hygon"}
LENT = ("vfio-pci", "pci-stub")
"""Drivers that keep a card for a virtual machine."""
PCI_CLASSES = ("0x03", "0x12", "0x0b40")  # displays, and accelerators of two classes; bridges are not GPUs
INTEGRATED = frozenset(
    {"gfx801", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103"}
    | {"gfx1150", "gfx1151", "gfx1152", "gfx1153"}
)
"""Targets that are only integrated into CPUs and share their memory."""
SMALL = INTEGRATED - {"gfx1151"}
"""Integrated targets that nobody buys to train on."""


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command said. `code` is negative for a signal and None where it timed out."""

    code: int | None
    out: str = ""
    err: str = ""


CommandRunner = Callable[[Sequence[str], float], CommandResult]
"""(command, seconds it may take) -> reply."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A file system, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class User:
    """Who asks: the numbers of a user and of the groups that this login has."""

    number: int
    groups: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Node:
    """Whose a device node is, and what it allows."""

    owner: int
    group: int
    mode: int
    """As in 0o660."""

    def opens_for(self, user: User) -> bool:
        """Whether it can be read and written."""
        shift = 6 if user.number == self.owner else 3 if self.group in user.groups else 0
        return user.number == 0 or self.mode >> shift & 6 == 6


def run_here(command: Sequence[str], limit_seconds: float) -> CommandResult:
    """
    Run a command on this machine. A command that cannot start replies with 127, as a shell does. One that takes too
    long is killed with all that it started, and so is one whose parent is gone.
    """
    from bloomery.core.child import leashed

    try:
        child = subprocess.Popen(
            leashed(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(code=127, err=str(error))
    try:
        out, err = child.communicate(timeout=limit_seconds)
        return CommandResult(code=child.returncode, out=_text(out), err=_text(err))
    except subprocess.TimeoutExpired:
        return _killed(child)
    finally:
        if child.poll() is None:  # this process is interrupted
            _kill(child)


def _killed(child: subprocess.Popen[bytes]) -> CommandResult:
    """What a command had said when its time was over."""
    _kill(child)
    try:
        out, err = child.communicate(timeout=KILL_SECONDS)
        return CommandResult(code=None, out=_text(out), err=_text(err))
    except subprocess.TimeoutExpired as late:
        return CommandResult(code=None, out=_text(late.stdout), err=_text(late.stderr))


def _kill(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        child.kill()
    else:
        os.killpg(child.pid, signal.SIGKILL)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine. Paths are relative to `root`, which is / on a real one."""

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    run: CommandRunner = run_here
    system: str = "Linux"
    processor: str = "x86_64"
    python: str = "python3"
    """The interpreter that torch is wanted for."""
    torch: Path | None = None
    """The folder of the torch package that this interpreter would import."""
    packages: tuple[Path, ...] = ()
    """The folders where this interpreter's packages lie."""
    cache: Path | None = None
    """Where what was found out may be kept; None for nowhere."""
    user: User = User(number=0, groups=frozenset())
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """Recorded owners of device nodes, by path. Of others the system is asked."""
    spaces: Mapping[str, Space] = field(default_factory=dict)
    """Recorded file systems, by path. Of others the system is asked."""

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
            packages=tuple(Path(folder) for folder in sys.path if Path(folder).name.endswith("-packages")),
            cache=cache_root(os.environ),
            user=_this_user(),
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
            entries = os.listdir(self.root / folder)
        except OSError:
            return []
        return sorted(entries, key=lambda name: [(int(n or -1), word) for word, n in re.findall(r"(\D*)(\d*)", name)])

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def node(self, name: str) -> Node | None:
        """Whose a device node is; None where there is none."""
        if name in self.nodes:
            return self.nodes[name]
        try:
            facts = (self.root / name).stat()
        except OSError:
            return None
        return Node(owner=facts.st_uid, group=facts.st_gid, mode=facts.st_mode & 0o777)

    def opens(self, name: str) -> bool:
        """Whether this user can read and write it. The system knows more than modes: lists of access, for one."""
        if name in self.nodes:
            return self.nodes[name].opens_for(self.user)
        return os.access(self.root / name, os.R_OK | os.W_OK)

    def space(self, folder: str | Path) -> Space:
        """The file system of a folder below the root, or of any that is given in full."""
        if str(folder) in self.spaces:
            return self.spaces[str(folder)]
        usage = shutil.disk_usage(self.root / folder)
        return Space(total=usage.total, free=usage.free)

    @property
    def kernel(self) -> str:
        """The kernel's release, as 6.14.0-27-generic; "" where it does not tell."""
        return (self.read("proc/sys/kernel/osrelease") or "").strip()

    @property
    def boot_options(self) -> Mapping[str, str]:
        """The kernel's command line: name -> value, "" for a name alone."""
        words = (self.read("proc/cmdline") or "").split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}


def _this_user() -> User:
    if sys.platform == "win32":
        return User(number=0, groups=frozenset())
    return User(number=os.geteuid(), groups=frozenset({os.getegid(), *os.getgroups()}))


def group_name(host: Host, number: int) -> str:
    """The name of a group; "" where this system, or this container, has none for the number."""
    lines = (line.split(":") for line in (host.read("etc/group") or "").splitlines())
    return next((words[0] for words in lines if len(words) > 2 and words[2] == str(number)), "")


def cpu_features(host: Host) -> frozenset[str]:
    """CPU features by the kernel's names, such as avx512_bf16 and amx_bf16; none where the kernel lists none."""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def fast_bf16(host: Host) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware. Emulated, it is slower than float32."""
    return bool(cpu_features(host) & {"avx512_bf16", "amx_bf16"})


def physical_bytes(host: Host) -> int | None:
    """Memory that the machine has."""
    if match := re.search(r"^MemTotal:\s*(\d+) kB", host.read("proc/meminfo") or "", re.MULTILINE):
        return int(match[1]) * 1024
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
    match = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("proc/meminfo") or "", re.MULTILINE)
    return min(int(match[1]) * 1024 if match else whole // 2, whole)


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
    return any(host.exists(mark) for mark in marks) or "container" in host.env or in_pod(host)


def in_pod(host: Host) -> bool:
    """Whether Kubernetes started this container; its runtimes leave none of the marks of the others."""
    return "KUBERNETES_SERVICE_HOST" in host.env or "kubepods" in (host.read("proc/1/cgroup") or "")


def in_wsl(host: Host) -> bool:
    """Whether this Linux runs inside Windows, where GPUs come through /dev/dxg and the kernel does not list them."""
    return "microsoft" in host.kernel.lower() and not host.exists("dev/kfd")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    maker: Maker
    target: str = ""
    """AMD's name for the instruction set, as gfx1151; "" where the kernel does not tell."""
    render: str = ""
    """The device node that a process opens, as dev/dri/renderD128."""
    name: str = ""
    """What its maker calls it, where the driver tells."""
    compute_units: int = 0
    clock_mhz: int = 0

    @property
    def integrated(self) -> bool:
        return self.target in INTEGRATED

    @property
    def small(self) -> bool:
        return self.target in SMALL


def gfx_name(version: int) -> str:
    """AMD's name of a target from the kernel's number: 110501 -> gfx1151, 90010 -> gfx90a; "" for 0, a CPU."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def find_gpus(host: Host) -> list[Gpu]:
    """
    The GPUs of a machine, those first that say most about themselves.

    AMD's come from the kernel's compute topology, which names the target. Where that says nothing of a maker, its
    cards are found on the display or PCI bus: enough to know that a driver is missing. A node that a container masks
    is another's, and left out.
    """
    gpus = list(_kfd_gpus(host))
    if host.system == "Darwin":
        return [Gpu(maker="apple")] if host.processor == "arm64" else []
    if host.system == "Windows":
        listed = host.run(["nvidia-smi", "-L"], 30.0).out
        return [Gpu(maker="nvidia", name=name) for name in re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE)]
    makers = list(_bus_makers(host))
    if in_wsl(host):
        gpus += wsl_gpus(host)
    nvidia = list(_nvidia_gpus(host))
    if nvidia:
        makers = [maker for maker in makers if maker != "nvidia"]
        gpus += nvidia
    dcus = _kfd_dcus(host)
    if dcus or "hygon" in makers or host.exists("opt/dtk"):  # its driver's targets are in the same topology
        gpus = []
        makers = ["hygon" if maker == "amd" else maker for maker in makers] or ["hygon"] * max(1, dcus)
        if dcus and "hygon" not in makers:
            makers += ["hygon"] * dcus
    known = {gpu.maker for gpu in gpus}
    return gpus + [Gpu(maker=maker) for maker in makers if maker not in known]


def _kfd_nodes(host: Host) -> Iterator[Mapping[str, int]]:
    for node in host.names(KFD_NODES):
        text = host.read(f"{KFD_NODES}/{node}/properties") or ""
        yield {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)\s*$", text, re.MULTILINE)}


def _kfd_dcus(host: Host) -> int:
    """How many nodes are Hygon DCUs. The node of a CPU has no SIMD units."""
    nodes = _kfd_nodes(host)
    return sum(facts.get("vendor_id") == KFD_VENDOR_HYGON and facts.get("simd_count", 0) > 0 for facts in nodes)


def _kfd_gpus(host: Host) -> Iterator[Gpu]:
    for facts in _kfd_nodes(host):
        if facts.get("vendor_id") == KFD_VENDOR_AMD and facts.get("simd_count") and facts.get("gfx_target_version"):
            minor = facts.get("drm_render_minor")
            render = f"dev/dri/renderD{minor}" if minor else ""
            yield Gpu(
                maker="amd",
                target=gfx_name(facts["gfx_target_version"]),
                render=render,
                compute_units=facts["simd_count"] // max(1, facts.get("simd_per_cu", 1)),
                clock_mhz=facts.get("max_engine_clk_fcompute", 0),
            )


def nvidia_files(host: Host) -> list[str]:
    """What the driver tells of each GPU."""
    folder = "proc/driver/nvidia/gpus"
    return [host.read(f"{folder}/{gpu}/information") or "" for gpu in host.names(folder)]


def _nvidia_gpus(host: Host) -> Iterator[Gpu]:
    """Those that the driver lists, with their names; one without a name where it lists none."""
    if host.exists("proc/driver/nvidia/version"):
        texts = nvidia_files(host) or [""]
        names = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
        yield from (Gpu(maker="nvidia", name=name[1] if name else "") for name in names)


def wsl_gpus(host: Host) -> list[Gpu]:
    """The GPUs that Windows lends: NVIDIA's driver puts its libraries into a folder, AMD's are known to rocminfo."""
    amd_gpus = [Gpu(maker="amd", target=target) for target in rocminfo_targets(host)]
    return amd_gpus + ([Gpu(maker="nvidia")] if host.exists("usr/lib/wsl/lib/libcuda.so.1") else [])


def rocminfo_targets(host: Host) -> list[str]:
    """
    The targets of the GPUs that AMD's runtime sees; none where its tool is missing or sees none.

    Fields of an agent are indented by two columns, those of its instruction sets by more. Agents include CPUs and NPUs.
    """
    reply = host.run(["rocminfo"], 30.0)
    agents = re.split(r"^\*+\s*\nAgent \d+\s*\n\*+\s*$", reply.out, flags=re.MULTILINE)[1:]
    facts = [dict(re.findall(r"^  (\w[\w ]*?):\s*(.*?)\s*$", agent, re.MULTILINE)) for agent in agents]
    return [agent.get("Name", "") for agent in facts if agent.get("Device Type") == "GPU"]


def _bus_makers(host: Host) -> Iterator[Maker]:
    cards = [name for name in host.names("sys/class/drm") if re.fullmatch(r"card\d+", name)]
    seen = [(host.read(f"sys/class/drm/{card}/device/vendor") or "").strip() for card in cards]
    driven = frozenset(seen)
    for device in host.names("sys/bus/pci/devices"):
        kind = (host.read(f"sys/bus/pci/devices/{device}/class") or "").strip()
        vendor = (host.read(f"sys/bus/pci/devices/{device}/vendor") or "").strip()
        lent = any(host.exists(f"sys/bus/pci/drivers/{driver}/{device}") for driver in LENT)
        if kind.startswith(PCI_CLASSES) and vendor not in driven and not lent:  # no driver has made a card of it
            seen.append(vendor)
    yield from (PCI_MAKERS[vendor] for vendor in seen if vendor in PCI_MAKERS)
