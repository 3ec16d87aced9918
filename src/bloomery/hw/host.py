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
