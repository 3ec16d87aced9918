"""
Machines that nobody here owns, as directory trees in the kernel's own formats.

The numbers are synthetic; their shape is that of drivers/gpu/drm/amd/amdkfd/kfd_topology.c and of amdgpu's sysfs files.
MATRIX has whole machines with what torch and its probes say there, and what the doctor must find; TROUBLES has single
things that can be wrong with one of them. `python scripts/findings.py --write` shows in docs what each is told.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import examine
from bloomery.hw.host import CommandResult, Host, Node, Space, User
from bloomery.hw.kernel_trials import NEXT_TRIAL, KernelTrial, trials

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
ROCM, CUDA, CPU = "2.13.0+rocm7.2", "2.13.0+cu130", "2.13.0+cpu"
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

    return answering(Host(root=Path("/"), run=run), lambda command: None).run


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


def answering(host: Host, reply: Callable[[Sequence[str]], CommandResult | None]) -> Host:
    """A host on which some commands are answered otherwise."""

    def run(command: Sequence[str], limit_seconds: float) -> CommandResult:
        start = command.index("-m") + 2 if "-m" in command else len(command)
        if len(command) - start < 2 or "disk" in command:
            return reply(command) or host.run(command, limit_seconds)
        said = ""
        for name in command[start:]:
            one = run([*command[:start], name], limit_seconds)
            said += NEXT_TRIAL + one.out
            if one.code != 0:
                break
        return replace(one, out=said)

    return replace(host, run=run)


def replying(host: Host, replies: Mapping[str, CommandResult]) -> Host:
    """A host on which commands that end or begin with a word are answered otherwise."""
    return answering(host, lambda command: replies.get(command[-1], replies.get(command[0])))


def examined(host: Host) -> dict[str, Finding]:
    listed = examine(host, host.root / "runs")
    findings = {finding.id: finding for finding in listed}
    assert len(findings) == len(listed)
    return findings


# --- whole machines ---------------------------------------------------------------------------------------------------

MILLISECONDS = {"attention-flash": 0.8, "attention-efficient": 1.1, "matmul-hipblaslt": 0.3, "matmul-cublas": 0.3}


def sees(
    version: str = ROCM, *, gpus: int = 1, target: str = "", hip: str | None = "7.2.1", cuda: str | None = None
) -> CommandResult:
    """What an installed torch says of itself."""
    targets = ["gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"] if hip else ["sm_80", "sm_90", "sm_120"]
    chips = [f"{chip}:sramecc+:xnack-" if chip == "gfx942" else chip for chip in target.split()] * gpus
    return told({"version": version, "hip": hip, "cuda": cuda, "gpus": gpus, "targets": targets, "chips": chips})


def sound(trial: KernelTrial, vendor: str, dtype: str) -> CommandResult:
    """What a probe tells on a device that is sound."""
    device = {"device": "GPU", "vendor": vendor, "dtype": dtype}
    if trial.kernel == "training":
        return told(device, {"first_loss": 3.5, "last_loss": 0.1})
    case = {"case": "a case", "error": 3e-4, "cosine": 1.0, "unwritten": 0.0, "finite": True, "zeros": False}
    return told(device, case, {"milliseconds": MILLISECONDS.get(trial.name, 2.0)})


def computes(vendor: str, dtype: str = "bfloat16", gpus: int = 1) -> dict[str, CommandResult]:
    """Probes on a device that is sound."""
    replies = {trial.probe or trial.name: sound(trial, vendor, dtype) for trial in trials(vendor)}
    replies["speed"] = told({"dtype": dtype, "flops": 80e12}, {"bytes_per_second": 800e9})
    replies["refill"] = told({"wrong_1": 0}, {"wrong_2": 0}, {"filled_bytes": 19 * GIB})
    replies["all-reduce"] = told({"wrong": 0, "bytes_per_second": 20e9}, {"ranks": gpus, "codes": [0] * gpus})
    return replies


@dataclass(frozen=True, kw_only=True)
class Case:
    """A whole machine, and the findings that are not ok there."""

    title: str
    kind: str
    wrong: Mapping[str, str] = field(default_factory=dict)
    torch: str = ROCM
    """The version that is installed; "" for none."""
    hip: str = "7.2.1"
    gpus: int = 1
    target: str = ""
    vendor: str = "amd"
    """Whose probes find all well; "" where none is asked."""
    dtype: str = "bfloat16"
    packages: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `machine`."""

    def build(self, root: Path) -> Host:
        cuda = "13.0" if self.torch == CUDA else None
        hip = None if self.torch in (CUDA, CPU) else self.hip
        torch = torch_folder(root, self.torch, cuda=cuda, hip=hip) if self.torch else None
        replies = {}
        if self.vendor:
            replies["torch"] = sees(self.torch, gpus=self.gpus, target=self.target, hip=hip, cuda=cuda)
            replies |= computes(self.vendor, self.dtype, self.gpus)
        if self.target and hip:
            replies["rocminfo"] = CommandResult(code=0, out=ROCMINFO.format(target=self.target.split()[0]))
        host = machine(root, self.kind, torch=torch, replies=replies, **self.options)
        install(root, **({"triton_rocm": "3.7.1"} if self.torch == ROCM else {}), **self.packages)
        plant(root, self.files)
        return host


RENDER = "sys/class/drm/renderD128/device"
TUNED = {f"{RENDER}/mem_info_gtt_total": str(96 * GIB)}
LITTLE_SHM = {"dev/shm": Space(total=64 * 2**20, free=64 * 2**20)}
EIGHT: dict[str, Any] = {"kind": "mi300x", "target": "gfx942", "gpus": 8}
MATRIX: dict[str, Case] = {
    "strix-halo": Case(
        title="Strix Halo, 128 GB, with default settings", kind="strix-halo", target="gfx1151", wrong={"gtt": "warn"}
    ),
    "strix-halo-tuned": Case(
        title="Strix Halo, 128 GB, tuned",
        kind="strix-halo",
        target="gfx1151",
        files=TUNED | {"proc/cmdline": "root=/dev/sda1 ttm.pages_limit=25165824 ttm.page_pool_size=25165824\n"},
    ),
    "7900-xtx-closed": Case(
        title="7900 XTX, without permission",
        kind="7900-xtx",
        gpus=0,
        vendor="cpu",
        options={"user": STRANGER},
        wrong={"amd-device-nodes": "fail", "torch": "fail"},
    ),
    "mi300x": Case(title="MI300X × 8", **EIGHT),
    "7900-xtx-x2": Case(
        title="7900 XTX × 2, IOMMU on",
        kind="7900-xtx-x2",
        target="gfx1100",
        gpus=2,
        files={f"sys/kernel/iommu_groups/{number}/type": "DMA-FQ\n" for number in range(3)},
        wrong={"iommu": "warn"},
    ),
    "rdna4-and-igpu": Case(
        title="R9700 next to an integrated GPU",
        kind="r9700-and-igpu",
        target="gfx1036 gfx1201",
        wrong={"mixed-gpus": "warn"},
    ),
    "container": Case(
        title="MI300X × 8 in a container without --ipc=host",
        **EIGHT,
        files={".dockerenv": "", "dev/shm/x": "", "proc/self/status": "Name:\tpython\nSeccomp:\t2\n"},
        options={"spaces": LITTLE_SHM},
        wrong={"shm": "warn", "seccomp": "warn"},
    ),
    "spoofed": Case(
        title="Strix Halo under HSA_OVERRIDE_GFX_VERSION",
        kind="strix-halo",
        target="gfx1100",
        files=TUNED,
        options={"env": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}},
        wrong={"hsa-override": "fail", "torch": "fail"},
    ),
    "cuda-torch-on-amd": Case(
        title="7900 XTX with torch for CUDA",
        kind="7900-xtx",
        torch=CUDA,
        gpus=0,
        vendor="cpu",
        dtype="float32",
        packages={"xformers": "0.0.33", "triton": "3.7.1"},
        wrong={"torch": "fail", "package-xformers": "warn"},
    ),
    "conflicting-packages": Case(
        title="7900 XTX with packages from other builds",
        kind="7900-xtx",
        target="gfx1100",
        packages={"triton": "3.7.1", "xformers": "0.0.33", "torchvision": "0.28.0+cu130"},
        options={"env": {"LD_LIBRARY_PATH": "/opt/rocm/lib"}},
        wrong={"triton": "fail", "package-xformers": "warn", "package-torchvision": "warn", "library-path": "warn"},
    ),
    "cpu-torch-on-nvidia": Case(
        title="RTX 4090 with torch for CPUs",
        kind="nvidia",
        torch=CPU,
        gpus=0,
        vendor="cpu",
        dtype="float32",
        wrong={"torch": "fail"},
    ),
    "nvidia": Case(title="RTX 4090", kind="nvidia", torch=CUDA, vendor="nvidia"),
    "old-nvidia": Case(
        title="GTX 1080 with torch for CUDA 13",
        kind="nvidia",
        torch=CUDA,
        target="sm_61",
        vendor="nvidia",
        dtype="float16",
        wrong={"torch": "fail"},
    ),
    "hygon": Case(
        title="Hygon DCU with the vendor's older torch",
        kind="hygon",
        torch="2.9.0+das.opt1.dtk2604",
        hip="6.1",
        vendor="",
        wrong={"torch": "fail"},
    ),
    "hygon-without-torch": Case(
        title="Hygon DCU without torch", kind="hygon", torch="", vendor="", wrong={"torch": "fail"}
    ),
    "wsl": Case(title="7900 XTX through WSL2", kind="wsl", target="gfx1100"),
    "wsl-without-runtime": Case(
        title="WSL2 without AMD's runtime", kind="wsl", torch=CPU, gpus=0, vendor="cpu", wrong={"wsl": "warn"}
    ),
    "no-gpu": Case(title="No GPU", kind="none", torch=CPU, gpus=0, vendor="cpu", options={"ram_bytes": 32 * GIB}),
}


# --- single troubles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """What is changed on a machine of the matrix that is sound otherwise, and what is told of it."""

    on: str
    finding: str
    """Its ID and status."""
    words: str
    hint: str
    files: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    replies: Mapping[str, CommandResult] = field(default_factory=dict)

    def build(self, root: Path) -> Host:
        host = MATRIX[self.on].build(root)
        plant(root, self.files)
        for file in self.without:
            (root / file).unlink()
        if "torch" in self.packages:
            folder = root / "site-packages" / f"torch-{MATRIX[self.on].torch}.dist-info"
            (folder / "METADATA").unlink()
            folder.rmdir()
        install(root, **self.packages)
        return replace(replying(host, self.replies), env={**host.env, **self.env})


def measured(device: str, flops: float, copied: float) -> CommandResult:
    return told({"device": device, "vendor": "", "dtype": "bfloat16"}, {"flops": flops}, {"bytes_per_second": copied})


LOG = "kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=7\nkernel: usb 1-1: new device\n"
XID = "kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
BLACKLIST = {"etc/modprobe.d/blacklist-amd.conf": "# no graphics\nblacklist amdgpu\n"}
TROUBLES = {
    "kernel too old": Trouble(
        "strix-halo-tuned",
        "amd-driver: fail",
        "gfx1151 needs kernel 6.11",
        "linux-generic-hwe",
        files={"proc/sys/kernel/osrelease": "6.8.0-90-generic\n"},
    ),
    "GPU hung": Trouble(
        "strix-halo-tuned",
        "kernel-log: warn",
        "GPU errors: 1; latest: kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout",
        "linux-firmware",
        replies={"--quiet": CommandResult(code=0, out=LOG)},
    ),
    "NVIDIA fell off the bus": Trouble(
        "nvidia", "kernel-log: warn", "Xid", "ubuntu-drivers", replies={"--quiet": CommandResult(code=0, out=XID)}
    ),
    "obsolete option": Trouble(
        "strix-halo-tuned",
        "gttsize: warn",
        "amdgpu.gttsize=131072 is obsolete",
        "ttm.pages_limit=25165824",
        files={"proc/cmdline": "root=/dev/sda1 amdgpu.gttsize=131072\n"},
    ),
    "wheel for an older ROCm": Trouble(
        "strix-halo-tuned",
        "torch: fail",
        "was built for ROCm 7.0.51831, and gfx1151 needs 7.2",
        "torch[device-gfx1151]",
        replies={"torch": sees("2.11.0+rocm7.0", target="gfx1151", hip="7.0.51831")},
    ),
    "ROCm tools of the distribution": Trouble(
        "strix-halo-tuned",
        "rocminfo: warn",
        "rocminfo reports gfx1150, but the kernel reports gfx1151",
        "apt purge rocminfo",
        replies={"rocminfo": CommandResult(code=0, out=ROCMINFO.format(target="gfx1150"))},
    ),
    "two lists that differ": Trouble(
        "mi300x",
        "visible-devices: warn",
        "only the first variable has an effect",
        "unset CUDA_VISIBLE_DEVICES",
        env={"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
    ),
    "empty list": Trouble(
        "nvidia",
        "visible-devices: warn",
        "hides every GPU",
        "unset CUDA_VISIBLE_DEVICES",
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "number of a GPU that does not exist": Trouble(
        "mi300x", "visible-devices: fail", "8 are", "unset ROCR_VISIBLE_DEVICES", env={"ROCR_VISIBLE_DEVICES": "7,8"}
    ),
    "number beyond the GPUs that are left": Trouble(
        "mi300x",
        "visible-devices: fail",
        "names a GPU that does not exist: 2 are visible",
        "unset HIP_VISIBLE_DEVICES",
        env={"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4"},
    ),
    "not a number": Trouble(
        "strix-halo-tuned",
        "visible-devices: fail",
        "neither a number nor a name",
        "unset HIP_VISIBLE_DEVICES",
        env={"HIP_VISIBLE_DEVICES": "\u00b2"},
    ),
    "number given twice": Trouble(
        "mi300x",
        "visible-devices: fail",
        "names 0 twice",
        "unset HIP_VISIBLE_DEVICES",
        env={"HIP_VISIBLE_DEVICES": "0,0,-1"},
    ),
    "a line for another shell": Trouble(
        "strix-halo-tuned",
        "allocator: warn",
        "torch accepts only",
        "unset PYTORCH_CUDA_ALLOC_CONF",
        env={"PYTORCH_CUDA_ALLOC_CONF": "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"},
    ),
    "CPU quota": Trouble(
        "no-gpu",
        "cpu-quota: warn",
        "allows 1 of 2 threads",
        "export OMP_NUM_THREADS=1",
        files={"sys/fs/cgroup/cpu.max": "100000 100000\n"},
    ),
    "matmuls at a seventh of their speed": Trouble(
        "strix-halo-tuned",
        "speed: warn",
        "15% of the 33.5 TFLOP/s that others measured and 82% of 256 GB/s",
        "power_dpm_force_performance_level",
        replies={"speed": measured("Radeon 8060S Graphics", 5.1e12, 210e9)},
    ),
    "slow memory of a card": Trouble(
        "nvidia",
        "speed: warn",
        "91% of the spec sheet's 165.2 TFLOP/s and 30% of 1008 GB/s",
        "nvidia-smi -q",
        replies={"speed": measured("NVIDIA GeForce RTX 4090", 150e12, 300e9)},
    ),
    "slow disk": Trouble(
        "no-gpu", "disk-speed: warn", "4 MB/s", "--runs DIR", replies={"disk": told({"bytes_per_second": 4e6})}
    ),
    "slow memory": Trouble(
        "no-gpu",
        "memory-speed: warn",
        "0.9 GB/s",
        "Close other programs",
        replies={"memory": told({"bytes_per_second": 0.9e9})},
    ),
    "driver's device nodes missing": Trouble(
        "nvidia",
        "nvidia-driver: fail",
        "missing: /dev/nvidia-uvm",
        "docker run --gpus all",
        files={".dockerenv": ""},
        without=("dev/nvidia-uvm",),
    ),
    "no driver": Trouble(
        "nvidia",
        "nvidia-driver: fail",
        "no driver for the NVIDIA GPU",
        "ubuntu-drivers install",
        without=("proc/driver/nvidia/version",),
    ),
    "NaN in 4 bits": Trouble(
        "strix-halo-tuned",
        "package-bitsandbytes: warn",
        "returns NaN on AMD",
        "pip uninstall -y bitsandbytes",
        packages={"bitsandbytes": "0.49.2"},
    ),
    "flash-attn for CUDA": Trouble(
        "mi300x",
        "package-flash-attn: warn",
        "was built for CUDA",
        "pip uninstall -y flash-attn",
        packages={"flash_attn": "2.8.3+cu13torch2.13"},
    ),
    "two torch installations": Trouble(
        "no-gpu",
        "torch-twice: fail",
        "two installations overlap",
        "pip uninstall -y torch",
        packages={"torch": "2.11.0"},
    ),
}
