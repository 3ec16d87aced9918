"""Single things that can be wrong with a machine, each on one that is sound otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bloomery.hw.doctor.finding import Finding
from bloomery.hw.doctor.report import examine
from bloomery.hw.gpus import find_gpus, rocminfo_targets
from bloomery.hw.host import Host, Reply, Space
from tests.hw.machines import GIB, ROCMINFO, install, machine, plant, recorded, told, torch_folder
from tests.hw.matrix import MATRIX, sees

LOG = "kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=7\nkernel: usb 1-1: new device\n"


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What is changed on a machine of the matrix, and what is told of it."""

    on: str
    id: str
    status: str
    words: str
    cure: str
    files: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    replies: Mapping[str, Reply] = field(default_factory=dict)


BLACKLIST = {"etc/modprobe.d/blacklist-amd.conf": "# no graphics\nblacklist amdgpu\n"}
OLD_ROCM = {"torch": sees("2.11.0+rocm7.0", target="gfx1151", hip="7.0.51831")}
TROUBLES = {
    "kernel too old": Trouble(
        on="strix-halo-tuned",
        files={"proc/sys/kernel/osrelease": "6.8.0-90-generic\n"},
        id="amd-driver",
        status="fail",
        words="gfx1151 needs 6.11",
        cure="linux-generic-hwe",
    ),
    "GPU hung": Trouble(
        on="strix-halo-tuned",
        replies={"--quiet": Reply(code=0, out=LOG)},
        id="kernel-log",
        status="warn",
        words="1 lines of trouble; the last: kernel: amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout",
        cure="linux-firmware",
    ),
    "NVIDIA fell off the bus": Trouble(
        on="nvidia",
        replies={"--quiet": Reply(code=0, out="kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")},
        id="kernel-log",
        status="warn",
        words="Xid",
        cure="linux-firmware",
    ),
    "older option": Trouble(
        on="strix-halo-tuned",
        files={"proc/cmdline": "root=/dev/sda1 amdgpu.gttsize=131072\n"},
        id="gttsize",
        status="warn",
        words="amdgpu.gttsize=131072 is out of date",
        cure="ttm.pages_limit=25165824",
    ),
    "wheel for an older ROCm": Trouble(
        on="strix-halo-tuned",
        replies=OLD_ROCM,
        id="torch",
        status="fail",
        words="was built for ROCm 7.0.51831, and gfx1151 needs 7.2",
        cure="torch[device-gfx1151]",
    ),
    "tools of a distribution": Trouble(
        on="strix-halo-tuned",
        replies={"rocminfo": Reply(code=0, out=ROCMINFO.format(target="gfx1150"))},
        id="rocminfo",
        status="warn",
        words="rocminfo says gfx1150; the kernel says gfx1151",
        cure="apt purge rocminfo",
    ),
    "two lists": Trouble(
        on="mi300x",
        env={"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
        id="visible-devices",
        status="warn",
        words="the first of them is taken",
        cure="unset CUDA_VISIBLE_DEVICES",
    ),
    "empty list": Trouble(
        on="nvidia",
        env={"CUDA_VISIBLE_DEVICES": ""},
        id="visible-devices",
        status="warn",
        words="hides every GPU",
        cure="unset CUDA_VISIBLE_DEVICES",
    ),
    "number beyond": Trouble(
        on="mi300x",
        env={"ROCR_VISIBLE_DEVICES": "7,8"},
        id="visible-devices",
        status="fail",
        words="8 are",
        cure="unset ROCR_VISIBLE_DEVICES",
    ),
    "quota": Trouble(
        on="no-gpu",
        files={"sys/fs/cgroup/cpu.max": "100000 100000\n"},
        id="cpu-quota",
        status="warn",
        words="may use 1 of 2 threads",
        cure="export OMP_NUM_THREADS=1",
    ),
    "slow disk": Trouble(
        on="no-gpu",
        replies={"disk": told({"bytes_per_second": 4e6})},
        id="disk-speed",
        status="warn",
        words="4 MB/s",
        cure="--runs DIR",
    ),
    "slow memory": Trouble(
        on="no-gpu",
        replies={"memory": told({"bytes_per_second": 0.9e9})},
        id="memory-speed",
        status="warn",
        words="0.9 GB/s",
        cure="Close other programs",
    ),
    "driver's nodes absent": Trouble(
        on="nvidia",
        files={".dockerenv": ""},
        without=("dev/nvidia-uvm",),
        id="nvidia-driver",
        status="fail",
        words="absent: /dev/nvidia-uvm",
        cure="docker run --gpus all",
    ),
    "no driver": Trouble(
        on="nvidia",
        without=("proc/driver/nvidia/version",),
        id="nvidia-driver",
        status="fail",
        words="without its driver",
        cure="ubuntu-drivers install",
    ),
    "NaN in 4 bits": Trouble(
        on="strix-halo-tuned",
        packages={"bitsandbytes": "0.49.2"},
        id="package-bitsandbytes",
        status="warn",
        words="computes NaN on AMD",
        cure="pip uninstall -y bitsandbytes",
    ),
    "attention for CUDA": Trouble(
        on="mi300x",
        packages={"flash_attn": "2.8.3+cu13torch2.13"},
        id="package-flash-attn",
        status="warn",
        words="was built for CUDA",
        cure="pip uninstall -y flash-attn",
    ),
    "two torches": Trouble(
        on="no-gpu",
        packages={"torch": "2.11.0"},
        id="torch-twice",
        status="fail",
        words="two of them lie over each other",
        cure="pip uninstall -y torch",
    ),
}


def of(host: Host, runs: Path) -> dict[str, Finding]:
    return {one.id: one for one in examine(host, runs)}


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_told_with_its_cure(tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    host = MATRIX[trouble.on].build(tmp_path)
    assert trouble.id not in {one.id for one in examine(host, tmp_path / "runs") if one.status != "ok"}
    plant(tmp_path, trouble.files)
    for file in trouble.without:
        (tmp_path / file).unlink()
    for folder in (
        [tmp_path / "site-packages" / f"torch-{host_version(host)}.dist-info"] if "torch" in trouble.packages else []
    ):
        (folder / "METADATA").unlink()
        folder.rmdir()
    install(tmp_path, **trouble.packages)
    first = recorded(trouble.replies)

    def run(command: Sequence[str], limit: float) -> Reply:
        reply: Reply = first(command, limit)
        return host.run(command, limit) if reply.code == 127 else reply

    found = of(replace(host, run=run, env={**host.env, **trouble.env}), tmp_path / "runs")[trouble.id]
    assert found.status == trouble.status
    assert trouble.words in found.value
    assert trouble.cure in found.cure


def host_version(host: Host) -> str:
    assert host.torch is not None
    return (host.torch / "version.py").read_text(encoding="utf-8").split("'")[1]


@pytest.mark.parametrize(
    ("files", "words", "cure"),
    [
        ({}, "without its compute driver", "modprobe amdgpu"),
        ({"proc/cmdline": "root=/dev/sda1 nomodeset\n"}, "nomodeset", "s/ nomodeset//"),
        (BLACKLIST, "/etc/modprobe.d/blacklist-amd.conf forbids it", "/blacklist amdgpu/d"),
        ({".dockerenv": ""}, "in this container", "--device=/dev/kfd"),
    ],
)
def test_a_driver_that_is_not_there_says_why(tmp_path: Path, files: dict[str, str], words: str, cure: str) -> None:
    host = machine(tmp_path, "amd-without-kfd")
    plant(tmp_path, files)
    found = of(host, tmp_path / "runs")["amd-driver"]
    assert found.status == "fail"
    assert words in found.value
    assert cure in found.cure


def test_an_override_of_a_chip_without_kernels_of_its_own_is_a_warning(tmp_path: Path) -> None:
    host = machine(tmp_path, "igpu-and-nvidia", env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    assert of(host, tmp_path / "runs")["hsa-override"].status == "warn"


def test_an_nvidia_driver_that_is_too_old_for_torch_is_told_with_the_wheel_that_it_can_run(tmp_path: Path) -> None:
    host = MATRIX["nvidia"].build(tmp_path)
    plant(tmp_path, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  R\n"})
    blind = recorded({"torch": sees("2.13.0+cu130", gpus=0, hip=None, cuda="13.0")})
    found = of(replace(host, run=blind), tmp_path / "runs")["torch"]
    assert found.value == "2.13.0+cu130 needs driver 580 or newer; this one is 550.54"
    assert "whl/cu126" in found.cure


def test_a_vendors_torch_whose_libraries_are_not_found_is_told_to_load_its_environment(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.11.0+das.opt1.dtk2604", hip="6.1")
    reply = Reply(code=1, err="ImportError: libgalaxyhip.so.5: cannot open shared object file")
    found = of(machine(tmp_path, "hygon", torch=torch, replies={"torch": reply}), tmp_path / "runs")["torch"]
    assert (found.status, found.cure) == ("fail", "source /opt/dtk/env.sh")
    assert "libgalaxyhip" in found.value


def test_a_torch_of_others_on_a_hygon_dcu_fails_without_a_word_of_pip(tmp_path: Path) -> None:
    torch = torch_folder(tmp_path, "2.13.0+rocm7.2", hip="7.2.1")
    found = of(machine(tmp_path, "hygon", torch=torch, replies={"torch": sees(gpus=0)}), tmp_path / "runs")["torch"]
    assert found.status == "fail"
    assert "pip" not in found.cure


def test_windows_lends_its_gpus_by_their_libraries_or_by_amds_runtime(tmp_path: Path) -> None:
    plain = machine(tmp_path / "a", "wsl")
    assert find_gpus(plain) == []
    plant(plain.root, {"usr/lib/wsl/lib/libcuda.so.1": ""})
    assert [gpu.maker for gpu in find_gpus(plain)] == ["nvidia"]
    lent = machine(tmp_path / "b", "wsl", replies={"rocminfo": Reply(code=0, out=ROCMINFO.format(target="gfx1201"))})
    assert [gpu.target for gpu in find_gpus(lent)] == ["gfx1201"]


def test_windows_without_anything_to_lend_is_told_to_update(tmp_path: Path) -> None:
    host = MATRIX["wsl-without-runtime"].build(tmp_path)
    (tmp_path / "dev/dxg").unlink()
    found = of(host, tmp_path / "runs")["wsl"]
    assert (found.status, found.cure.partition(" ")[0]) == ("warn", "wsl")


def test_windows_itself_lists_nvidias_gpus(tmp_path: Path) -> None:
    listed = Reply(code=0, out="GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\nGPU 1: NVIDIA T4 (UUID: GPU-2)\n")
    host = Host(root=tmp_path, system="Windows", run=recorded({"-L": listed}))
    assert [gpu.name for gpu in find_gpus(host)] == ["NVIDIA GeForce RTX 4090", "NVIDIA T4"]


def test_only_gpus_count_among_the_agents_of_a_runtime(tmp_path: Path) -> None:
    """Some versions pad their lines; a processor's name may hold the GPU's, and an NPU is an agent too."""
    padded = "\n".join(f"{line}   " for line in ROCMINFO.format(target="gfx1151").splitlines())
    for text in (ROCMINFO.format(target="gfx1151"), padded):
        assert rocminfo_targets(Host(root=tmp_path, run=recorded({"rocminfo": Reply(code=0, out=text)}))) == ["gfx1151"]
    assert rocminfo_targets(Host(root=tmp_path, run=recorded({}))) == []


def test_a_full_disk_is_not_measured(tmp_path: Path) -> None:
    host = MATRIX["no-gpu"].build(tmp_path)
    full = Space(total=GIB, free=0)
    found = of(replace(host, spaces={**host.spaces, str(tmp_path): full}), tmp_path / "runs")
    assert found["disk"].status == "fail"
    assert "disk-speed" not in found
