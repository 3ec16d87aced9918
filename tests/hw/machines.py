"""
Machines that nobody here owns, as directory trees in the kernel's own formats.

The numbers are synthetic; their shape is that of drivers/gpu/drm/amd/amdkfd/kfd_topology.c and of amdgpu's sysfs files.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.hw.host import CommandResult, Host, Node, Space, User

AMD, NVIDIA, HYGON, SERVER_SCREEN = "0x1002", "0x10de", "0x1d94", "0x1a03"
GIB = 2**30
ZEN5 = "processor\t: 0\nmodel name\t: Some Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16\nprocessor\t: 1\n"
ZEN2 = "processor\t: 0\nmodel name\t: Older Processor\nflags\t\t: fpu avx2\n"
KERNEL = "6.14.0-27-generic"
RENDER_GROUP = 992
ROOM = Space(total=1000 * GIB, free=500 * GIB)
SHM = Space(total=64 * GIB, free=64 * GIB)
GROUPS = "root:x:0:\nvideo:x:44:somebody\nrender:x:992:\nsomebody:x:1000:\n"
MEMBER = User(number=1000, groups=frozenset({1000, 44, RENDER_GROUP}))
STRANGER = User(number=1000, groups=frozenset({1000}))

PROCESSOR_NODE = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 4098\ndrm_render_minor 0\n"


def kfd_node(version: int, simds: int, render: int, vendor: int = 4098) -> str:
    """A GPU's `properties` file."""
    return (
        f"cpu_cores_count 0\nsimd_count {simds}\nsimd_per_cu 2\nwave_front_size 32\ngfx_target_version {version}\n"
        f"vendor_id {vendor}\ndevice_id 29772\nlocation_id 34304\ndrm_render_minor {render}\nunique_id 0\n"
        "max_engine_clk_fcompute 2482\n"
    )


GPU_NODES: dict[str, list[str]] = {
    "strix-halo": [kfd_node(110501, 80, 128)],
    "7900-xtx": [kfd_node(110000, 192, 128)],
    "7900-xtx-x2": [kfd_node(110000, 192, 128 + number) for number in range(2)],
    "mi300x": [kfd_node(90402, 1216, 128 + number) for number in range(8)],
    "r9700-and-igpu": [kfd_node(100306, 4, 129), kfd_node(120001, 128, 128)],
    "igpu-and-nvidia": [kfd_node(100306, 4, 128), kfd_node(0x89, 128, 129, vendor=4318)],
    "hygon": [kfd_node(90208, 240, 128, vendor=7572)],
}
CARDS: dict[str, list[str]] = {
    "strix-halo": [AMD],
    "7900-xtx": [AMD],
    "7900-xtx-x2": [AMD, AMD],
    "mi300x": [SERVER_SCREEN, *[AMD] * 8],
    "r9700-and-igpu": [AMD, AMD],
    "igpu-and-nvidia": [AMD, NVIDIA],
    "amd-without-kfd": [AMD],
    "nvidia": [NVIDIA],
    "hygon": [SERVER_SCREEN, HYGON],
}
HIDE_TORCH = """
import sys

class WithoutTorch:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutTorch(finder) for finder in sys.meta_path]
"""
"""Put before the code of a child process: it finds everything but torch."""

MACHINES = ("none", "nvidia", *GPU_NODES, "amd-without-kfd", "wsl")

NVIDIA_FILES = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 77\n",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
}

ROCMINFO = """ROCk module is loaded
=====================
HSA Agents
=====================
*******
Agent 1
*******
  Name:                    Some Processor with Radeon 8060S
  Marketing Name:          Some Processor with Radeon 8060S
  Device Type:             CPU
*******
Agent 2
*******
  Name:                    {target}
  Marketing Name:          Radeon 8060S Graphics
  Device Type:             GPU
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--{target}
    ISA 2
      Name:                    amdgcn-amd-amdhsa--gfx11-generic
*******
Agent 3
*******
  Name:                    aie2
  Device Type:             DSP
*** Done ***
"""


def plant(root: Path, files: Mapping[str, str]) -> None:
    """Write files under a machine's root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def torch_folder(root: Path, version: str, *, cuda: str | None = None, hip: str | None = None) -> Path:
    """An installed torch, as far as anyone looks who does not import it."""
    shown = {name: "None" if value is None else repr(value) for name, value in (("cuda", cuda), ("hip", hip))}
    text = f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n"
    text += "".join(f"{name}: Optional[str] = {value}\n" for name, value in shown.items())
    plant(root, {"site-packages/torch/version.py": text})
    install(root, **{"torch": version})
    return root / "site-packages/torch"


def install(root: Path, **versions: str) -> None:
    """Packages, as far as anyone looks who does not import them."""
    plant(root, {f"site-packages/{name}-{version}.dist-info/METADATA": "" for name, version in versions.items()})


def recorded(replies: Mapping[str, CommandResult]) -> Any:
    """A `Host.run` that answers by the last word of the command or by the first, and knows no other."""

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        missing = CommandResult(code=127, err=f"{command[0]}: not found")
        return replies.get(command[-1], replies.get(command[0], missing))

    return run


def told(*answers: Mapping[str, object], code: int | None = 0, err: str = "") -> CommandResult:
    """A child's reply: lines of JSON and how it ended."""
    return CommandResult(code=code, out="".join(json.dumps(answer) + "\n" for answer in answers), err=err)


MEASURED = {"memory": told({"bytes_per_second": 20e9}), "disk": told({"bytes_per_second": 900e6})}


def machine(
    root: Path,
    kind: str,
    *,
    cpuinfo: str = ZEN5,
    ram_bytes: int = 128 * GIB,
    env: Mapping[str, str] | None = None,
    replies: Mapping[str, CommandResult] | None = None,
    torch: Path | None = None,
    user: User = MEMBER,
    spaces: Mapping[str, Space] | None = None,
    options: str = "quiet splash",
) -> Host:
    """One of MACHINES under `root`."""
    files = {
        "proc/meminfo": f"MemTotal:       {ram_bytes // 1024} kB\nMemFree: 1 kB\n",
        "proc/cpuinfo": cpuinfo,
        "proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n" if kind == "wsl" else f"{KERNEL}\n",
        "proc/cmdline": f"BOOT_IMAGE=/vmlinuz root=/dev/sda1 {options}\n",
        "etc/group": GROUPS,
    }
    devices = {}
    if kind in GPU_NODES:
        nodes = [PROCESSOR_NODE, *GPU_NODES[kind]]
        files |= {f"sys/class/kfd/kfd/topology/nodes/{n}/properties": text for n, text in enumerate(nodes)}
        names = ["dev/kfd", *(f"dev/dri/renderD{128 + n}" for n in range(len(GPU_NODES[kind])))]
        files |= dict.fromkeys(names, "")
        devices = dict.fromkeys(names, Node(owner=0, group=RENDER_GROUP, mode=0o660))
    for number, maker in enumerate(CARDS.get(kind, [])):
        files[f"sys/class/drm/card{number}/device/vendor"] = f"{maker}\n"
        files[f"sys/class/drm/card{number}-HDMI-A-1/status"] = "disconnected\n"
    if kind == "strix-halo":
        folder = "sys/class/drm/renderD128/device"
        files |= {f"{folder}/mem_info_gtt_total": str(ram_bytes // 2), f"{folder}/mem_info_vram_total": str(GIB // 2)}
    if kind in ("nvidia", "igpu-and-nvidia"):
        files |= NVIDIA_FILES
    if kind == "wsl":
        files |= {"dev/dxg": ""}
    plant(root, files)
    return Host(
        root=root,
        env=env or {},
        run=recorded({**MEASURED, **(replies or {})}),
        torch=torch,
        packages=(root / "site-packages",),
        user=user,
        nodes=devices,
        spaces={str(root): ROOM, str(root / "runs"): ROOM, "dev/shm": SHM, **(spaces or {})},
    )
