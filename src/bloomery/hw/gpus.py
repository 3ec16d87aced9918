"""
The GPUs of a machine, as reported by its kernel, its bus and, under Windows, its tools. Nothing is asked of torch.

Sources: drivers/gpu/drm/amd/amdkfd/kfd_topology.c (nodes), the NVIDIA driver's files below /proc/driver/nvidia.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bloomery.hw.host import Host, in_wsl

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
