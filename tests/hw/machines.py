"""
Machines that nobody here owns, as directory trees in the kernel's own formats.

The numbers are synthetic; their shape is that of drivers/gpu/drm/amd/amdkfd/kfd_topology.c and of amdgpu's sysfs files.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bloomery.hw.host import Host, Reply

AMD, NVIDIA, HYGON, SERVER_SCREEN = "0x1002", "0x10de", "0x1d94", "0x1a03"
GIB = 2**30
ZEN5 = "processor\t: 0\nmodel name\t: Some Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16\nprocessor\t: 1\n"
ZEN2 = "processor\t: 0\nmodel name\t: Older Processor\nflags\t\t: fpu avx2\n"

PROCESSOR_NODE = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 4098\ndrm_render_minor 0\n"


def kfd_node(version: int, simds: int, render: int, vendor: int = 4098) -> str:
    """A GPU's `properties` file."""
    return (
        f"cpu_cores_count 0\nsimd_count {simds}\nsimd_per_cu 2\nwave_front_size 32\ngfx_target_version {version}\n"
        f"vendor_id {vendor}\ndevice_id 29772\nlocation_id 34304\ndrm_render_minor {render}\nunique_id 0\n"
    )


GPU_NODES: dict[str, list[str]] = {
    "strix-halo": [kfd_node(110501, 80, 128)],
    "7900-xtx": [kfd_node(110000, 192, 128)],
    "mi300x": [kfd_node(90402, 1216, 128 + number) for number in range(8)],
    "r9700-and-igpu": [kfd_node(100306, 4, 129), kfd_node(120001, 128, 128)],
    "igpu-and-nvidia": [kfd_node(100306, 4, 128), kfd_node(0x89, 128, 129, vendor=4318)],
    "hygon": [kfd_node(90208, 240, 128, vendor=7572)],
}
CARDS: dict[str, list[str]] = {
    "strix-halo": [AMD],
    "7900-xtx": [AMD],
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

MACHINES = ("none", "nvidia", *GPU_NODES, "amd-without-kfd")


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
    return root / "site-packages/torch"


def recorded(replies: Mapping[str, Reply]) -> Any:
    """A `Host.run` that answers by the last word of the command, and knows no other."""

    def run(command: Sequence[str], limit_seconds: float) -> Reply:
        return replies.get(command[-1], Reply(code=127, err=f"{command[0]}: not found"))

    return run


def told(*answers: Mapping[str, object], code: int | None = 0, err: str = "") -> Reply:
    """A probe's reply: lines of JSON and how it ended."""
    return Reply(code=code, out="".join(json.dumps(answer) + "\n" for answer in answers), err=err)


def machine(
    root: Path,
    kind: str,
    *,
    cpuinfo: str = ZEN5,
    ram_bytes: int = 128 * GIB,
    env: Mapping[str, str] | None = None,
    replies: Mapping[str, Reply] | None = None,
    torch: Path | None = None,
) -> Host:
    """One of MACHINES under `root`."""
    files = {"proc/meminfo": f"MemTotal:       {ram_bytes // 1024} kB\nMemFree: 1 kB\n", "proc/cpuinfo": cpuinfo}
    nodes = [PROCESSOR_NODE, *GPU_NODES.get(kind, [])]
    if kind in GPU_NODES:
        files |= {f"sys/class/kfd/kfd/topology/nodes/{n}/properties": text for n, text in enumerate(nodes)}
        files |= {"dev/kfd": ""}
        files |= {f"dev/dri/renderD{128 + n}": "" for n in range(len(GPU_NODES[kind]))}
    for number, maker in enumerate(CARDS.get(kind, [])):
        files[f"sys/class/drm/card{number}/device/vendor"] = f"{maker}\n"
        files[f"sys/class/drm/card{number}-HDMI-A-1/status"] = "disconnected\n"
    if kind == "strix-halo":
        folder = "sys/class/drm/renderD128/device"
        files |= {f"{folder}/mem_info_gtt_total": str(ram_bytes // 2), f"{folder}/mem_info_vram_total": str(GIB // 2)}
    if kind in ("nvidia", "igpu-and-nvidia"):
        files |= {"proc/driver/nvidia/version": "NVRM version: 580.00\n", "proc/driver/nvidia/gpus/0000:01:00.0/x": ""}
    plant(root, files)
    return Host(root=root, env=env or {}, run=recorded(replies or {}), torch=torch)
