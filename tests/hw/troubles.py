"""Single things that can be wrong with a machine, each on one of the matrix that is sound otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bloomery.hw.host import CommandResult, Host
from tests.hw.machines import ROCMINFO, install, plant, recorded, told
from tests.hw.matrix import sees

LOG = "kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=7\nkernel: usb 1-1: new device\n"


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What is changed on a machine of the matrix, and what is told of it."""

    on: str
    id: str
    status: str
    words: str
    hint: str
    files: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    replies: Mapping[str, CommandResult] = field(default_factory=dict)


def measured(device: str, flops: float, copied: float) -> CommandResult:
    return told({"device": device, "vendor": "", "dtype": "bfloat16"}, {"flops": flops}, {"bytes_per_second": copied})


BLACKLIST = {"etc/modprobe.d/blacklist-amd.conf": "# no graphics\nblacklist amdgpu\n"}
OLD_ROCM = {"torch": sees("2.11.0+rocm7.0", target="gfx1151", hip="7.0.51831")}
TROUBLES = {
    "kernel too old": Trouble(
        on="strix-halo-tuned",
        files={"proc/sys/kernel/osrelease": "6.8.0-90-generic\n"},
        id="amd-driver",
        status="fail",
        words="gfx1151 needs 6.11",
        hint="linux-generic-hwe",
    ),
    "GPU hung": Trouble(
        on="strix-halo-tuned",
        replies={"--quiet": CommandResult(code=0, out=LOG)},
        id="kernel-log",
        status="warn",
        words="1 lines of trouble; the last: kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout",
        hint="linux-firmware",
    ),
    "NVIDIA fell off the bus": Trouble(
        on="nvidia",
        replies={
            "--quiet": CommandResult(
                code=0, out="kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
            )
        },
        id="kernel-log",
        status="warn",
        words="Xid",
        hint="ubuntu-drivers",
    ),
    "older option": Trouble(
        on="strix-halo-tuned",
        files={"proc/cmdline": "root=/dev/sda1 amdgpu.gttsize=131072\n"},
        id="gttsize",
        status="warn",
        words="amdgpu.gttsize=131072 is out of date",
        hint="ttm.pages_limit=25165824",
    ),
    "wheel for an older ROCm": Trouble(
        on="strix-halo-tuned",
        replies=OLD_ROCM,
        id="torch",
        status="fail",
        words="was built for ROCm 7.0.51831, and gfx1151 needs 7.2",
        hint="torch[device-gfx1151]",
    ),
    "tools of a distribution": Trouble(
        on="strix-halo-tuned",
        replies={"rocminfo": CommandResult(code=0, out=ROCMINFO.format(target="gfx1150"))},
        id="rocminfo",
        status="warn",
        words="rocminfo says gfx1150; the kernel says gfx1151",
        hint="apt purge rocminfo",
    ),
    "two lists": Trouble(
        on="mi300x",
        env={"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
        id="visible-devices",
        status="warn",
        words="the first of them is taken",
        hint="unset CUDA_VISIBLE_DEVICES",
    ),
    "empty list": Trouble(
        on="nvidia",
        env={"CUDA_VISIBLE_DEVICES": ""},
        id="visible-devices",
        status="warn",
        words="hides every GPU",
        hint="unset CUDA_VISIBLE_DEVICES",
    ),
    "number beyond": Trouble(
        on="mi300x",
        env={"ROCR_VISIBLE_DEVICES": "7,8"},
        id="visible-devices",
        status="fail",
        words="8 are",
        hint="unset ROCR_VISIBLE_DEVICES",
    ),
    "number beyond those that are left": Trouble(
        on="mi300x",
        env={"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4"},
        id="visible-devices",
        status="fail",
        words="names a GPU that is not there: 2 are",
        hint="unset HIP_VISIBLE_DEVICES",
    ),
    "no number": Trouble(
        on="strix-halo-tuned",
        env={"HIP_VISIBLE_DEVICES": "\u00b2"},
        id="visible-devices",
        status="fail",
        words="neither a number nor a name",
        hint="unset HIP_VISIBLE_DEVICES",
    ),
    "number given twice": Trouble(
        on="mi300x",
        env={"HIP_VISIBLE_DEVICES": "0,0,-1"},
        id="visible-devices",
        status="fail",
        words="names 0 twice",
        hint="unset HIP_VISIBLE_DEVICES",
    ),
    "a line of another shell": Trouble(
        on="strix-halo-tuned",
        env={"PYTORCH_CUDA_ALLOC_CONF": "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"},
        id="allocator",
        status="warn",
        words="torch refuses",
        hint="unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "quota": Trouble(
        on="no-gpu",
        files={"sys/fs/cgroup/cpu.max": "100000 100000\n"},
        id="cpu-quota",
        status="warn",
        words="may use 1 of 2 threads",
        hint="export OMP_NUM_THREADS=1",
    ),
    "products at a seventh": Trouble(
        on="strix-halo-tuned",
        replies={"speed": measured("Radeon 8060S Graphics", 5.1e12, 210e9)},
        id="speed",
        status="warn",
        words="15% of the 33.5 TFLOP/s that others reach on it and 82% of 256 GB/s",
        hint="power_dpm_force_performance_level",
    ),
    "slow memory of a card": Trouble(
        on="nvidia",
        replies={"speed": measured("NVIDIA GeForce RTX 4090", 150e12, 300e9)},
        id="speed",
        status="warn",
        words="91% of the catalogue's 165.2 TFLOP/s and 30% of 1008 GB/s",
        hint="nvidia-smi -q",
    ),
    "slow disk": Trouble(
        on="no-gpu",
        replies={"disk": told({"bytes_per_second": 4e6})},
        id="disk-speed",
        status="warn",
        words="4 MB/s",
        hint="--runs DIR",
    ),
    "slow memory": Trouble(
        on="no-gpu",
        replies={"memory": told({"bytes_per_second": 0.9e9})},
        id="memory-speed",
        status="warn",
        words="0.9 GB/s",
        hint="Close other programs",
    ),
    "driver's nodes absent": Trouble(
        on="nvidia",
        files={".dockerenv": ""},
        without=("dev/nvidia-uvm",),
        id="nvidia-driver",
        status="fail",
        words="absent: /dev/nvidia-uvm",
        hint="docker run --gpus all",
    ),
    "no driver": Trouble(
        on="nvidia",
        without=("proc/driver/nvidia/version",),
        id="nvidia-driver",
        status="fail",
        words="without its driver",
        hint="ubuntu-drivers install",
    ),
    "NaN in 4 bits": Trouble(
        on="strix-halo-tuned",
        packages={"bitsandbytes": "0.49.2"},
        id="package-bitsandbytes",
        status="warn",
        words="computes NaN on AMD",
        hint="pip uninstall -y bitsandbytes",
    ),
    "attention for CUDA": Trouble(
        on="mi300x",
        packages={"flash_attn": "2.8.3+cu13torch2.13"},
        id="package-flash-attn",
        status="warn",
        words="was built for CUDA",
        hint="pip uninstall -y flash-attn",
    ),
    "two torches": Trouble(
        on="no-gpu",
        packages={"torch": "2.11.0"},
        id="torch-twice",
        status="fail",
        words="two of them lie over each other",
        hint="pip uninstall -y torch",
    ),
}


def troubled(host: Host, trouble: Trouble) -> Host:
    """A machine of the matrix, at the root of its files, with a trouble."""
    plant(host.root, trouble.files)
    for file in trouble.without:
        (host.root / file).unlink()
    if "torch" in trouble.packages:
        folder = host.root / "site-packages" / f"torch-{host_version(host)}.dist-info"
        (folder / "METADATA").unlink()
        folder.rmdir()
    install(host.root, **trouble.packages)
    first = recorded(trouble.replies)

    def run(command: Sequence[str], limit: float) -> CommandResult:
        reply: CommandResult = first(command, limit)
        return host.run(command, limit) if reply.code == 127 else reply

    return replace(host, run=run, env={**host.env, **trouble.env})


def host_version(host: Host) -> str:
    assert host.torch is not None
    return (host.torch / "version.py").read_text(encoding="utf-8").split("'")[1]
