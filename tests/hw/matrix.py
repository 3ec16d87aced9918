"""
The fixture matrix: whole machines with what torch and its probes say there, and what the doctor must find.

docs/hw.md shows what each is told; `python scripts/findings.py --write` writes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bloomery.hw.host import CommandResult, Host, Space, User
from bloomery.hw.kernel_trials import KernelTrial, trials
from tests.hw.machines import (
    GIB,
    MEMBER,
    ROCMINFO,
    STRANGER,
    install,
    machine,
    plant,
    told,
    torch_folder,
)

Verdicts = Mapping[str, str]
MILLISECONDS = {"attention-flash": 0.8, "attention-efficient": 1.1, "matmul-hipblaslt": 0.3, "matmul-cublas": 0.3}
ROCM, CUDA = "2.13.0+rocm7.2", "2.13.0+cu130"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, and the findings that are not ok there."""

    title: str
    build: Callable[[Path], Host]
    wrong: Verdicts


def sees(
    version: str = ROCM, *, gpus: int = 1, target: str = "", hip: str | None = "7.2.1", cuda: str | None = None
) -> CommandResult:
    """What an installed torch says of itself."""
    targets = ["gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"] if hip else ["sm_80", "sm_90", "sm_120"]
    chips = [f"{one}:sramecc+:xnack-" if one == "gfx942" else one for one in target.split()] * gpus
    facts = {"version": version, "hip": hip, "cuda": cuda, "gpus": gpus, "targets": targets, "chips": chips}
    return told(facts)


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


def amd(
    root: Path,
    kind: str,
    target: str,
    gpus: int = 1,
    *,
    user: User = MEMBER,
    env: Mapping[str, str] | None = None,
) -> Host:
    """A machine with AMD's GPUs and a torch that fits."""
    replies = {"torch": sees(gpus=gpus, target=target), **computes("amd" if gpus else "cpu", gpus=gpus)}
    if target:
        replies["rocminfo"] = CommandResult(code=0, out=ROCMINFO.format(target=target.split()[0]))
    torch = torch_folder(root, ROCM, hip="7.2.1")
    install(root, **{"triton_rocm": "3.7.1"})
    return machine(root, kind, torch=torch, replies=replies, user=user, env=env)


def strix_halo(root: Path) -> Host:
    return amd(root, "strix-halo", "gfx1151")


def strix_halo_tuned(root: Path) -> Host:
    host = amd(root, "strix-halo", "gfx1151")
    plant(root, {"sys/class/drm/renderD128/device/mem_info_gtt_total": str(96 * GIB)})
    plant(root, {"proc/cmdline": "root=/dev/sda1 ttm.pages_limit=25165824 ttm.page_pool_size=25165824\n"})
    return host


def without_render_group(root: Path) -> Host:
    return amd(root, "7900-xtx", "", gpus=0, user=STRANGER)


def eight_mi300x(root: Path) -> Host:
    return amd(root, "mi300x", "gfx942", gpus=8)


def two_cards_behind_an_iommu(root: Path) -> Host:
    host = amd(root, "7900-xtx-x2", "gfx1100", gpus=2)
    plant(root, {f"sys/kernel/iommu_groups/{number}/type": "DMA-FQ\n" for number in range(3)})
    return host


def rdna4_with_igpu(root: Path) -> Host:
    return amd(root, "r9700-and-igpu", "gfx1036 gfx1201")


def container(root: Path) -> Host:
    host = amd(root, "mi300x", "gfx942", gpus=8)
    plant(root, {".dockerenv": "", "dev/shm/x": "", "proc/self/status": "Name:\tpython\nSeccomp:\t2\n"})
    return replace(host, spaces={**host.spaces, "dev/shm": Space(total=64 * 2**20, free=64 * 2**20)})


def spoofed(root: Path) -> Host:
    host = amd(root, "strix-halo", "gfx1100", env={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    plant(root, {"sys/class/drm/renderD128/device/mem_info_gtt_total": str(96 * GIB)})
    return host


def cuda_torch_on_amd(root: Path) -> Host:
    torch = torch_folder(root, CUDA, cuda="13.0")
    install(root, xformers="0.0.33", triton="3.7.1")
    replies = {"torch": sees(CUDA, gpus=0, hip=None, cuda="13.0")} | computes("cpu", "float32")
    return machine(root, "7900-xtx", torch=torch, replies=replies)


def conflicting_packages(root: Path) -> Host:
    host = amd(root, "7900-xtx", "gfx1100", env={"LD_LIBRARY_PATH": "/opt/rocm/lib"})
    install(root, triton="3.7.1", xformers="0.0.33", torchvision="0.28.0+cu130")
    return host


def cpu_torch_on_nvidia(root: Path) -> Host:
    replies = {"torch": sees("2.13.0+cpu", gpus=0, hip=None)} | computes("cpu", "float32")
    return machine(root, "nvidia", torch=torch_folder(root, "2.13.0+cpu"), replies=replies)


def hygon(root: Path) -> Host:
    torch = torch_folder(root, "2.9.0+das.opt1.dtk2604", hip="6.1")
    return machine(root, "hygon", torch=torch)


def hygon_without_torch(root: Path) -> Host:
    return machine(root, "hygon")


def wsl(root: Path) -> Host:
    replies = {
        "torch": sees(target="gfx1100"),
        "rocminfo": CommandResult(code=0, out=ROCMINFO.format(target="gfx1100")),
    }
    torch = torch_folder(root, ROCM, hip="7.2.1")
    return machine(root, "wsl", torch=torch, replies=replies | computes("amd"))


def wsl_without_runtime(root: Path) -> Host:
    torch = torch_folder(root, "2.13.0+cpu")
    replies = {"torch": sees("2.13.0+cpu", gpus=0, hip=None)} | computes("cpu")
    return machine(root, "wsl", torch=torch, replies=replies)


def no_gpu(root: Path) -> Host:
    torch = torch_folder(root, "2.13.0+cpu")
    replies = {"torch": sees("2.13.0+cpu", gpus=0, hip=None)} | computes("cpu")
    return machine(root, "none", torch=torch, replies=replies, ram_bytes=32 * GIB)


def old_nvidia(root: Path) -> Host:
    torch = torch_folder(root, CUDA, cuda="13.0")
    replies = {"torch": sees(CUDA, target="sm_61", hip=None, cuda="13.0")} | computes("nvidia", "float16")
    return machine(root, "nvidia", torch=torch, replies=replies)


def healthy_nvidia(root: Path) -> Host:
    torch = torch_folder(root, CUDA, cuda="13.0")
    replies = {"torch": sees(CUDA, hip=None, cuda="13.0")} | computes("nvidia")
    return machine(root, "nvidia", torch=torch, replies=replies)


MATRIX: dict[str, Case] = {
    "strix-halo": Case(title="Strix Halo, 128 GB, as it comes", build=strix_halo, wrong={"gtt": "warn"}),
    "strix-halo-tuned": Case(title="Strix Halo, 128 GB, tuned", build=strix_halo_tuned, wrong={}),
    "7900-xtx-closed": Case(
        title="7900 XTX, without permission",
        build=without_render_group,
        wrong={"amd-device-nodes": "fail", "torch": "fail"},
    ),
    "mi300x": Case(title="MI300X × 8", build=eight_mi300x, wrong={}),
    "7900-xtx-x2": Case(title="7900 XTX × 2, IOMMU on", build=two_cards_behind_an_iommu, wrong={"iommu": "warn"}),
    "rdna4-and-igpu": Case(
        title="R9700 beside the GPU of a processor", build=rdna4_with_igpu, wrong={"mixed-gpus": "warn"}
    ),
    "container": Case(
        title="MI300X × 8 in a container without --ipc=host",
        build=container,
        wrong={"shm": "warn", "seccomp": "warn"},
    ),
    "spoofed": Case(
        title="Strix Halo under HSA_OVERRIDE_GFX_VERSION",
        build=spoofed,
        wrong={"hsa-override": "fail", "torch": "fail"},
    ),
    "cuda-torch-on-amd": Case(
        title="7900 XTX with torch for CUDA",
        build=cuda_torch_on_amd,
        wrong={"torch": "fail", "package-xformers": "warn"},
    ),
    "conflicting-packages": Case(
        title="7900 XTX with packages of others",
        build=conflicting_packages,
        wrong={
            "triton": "fail",
            "package-xformers": "warn",
            "package-torchvision": "warn",
            "library-path": "warn",
        },
    ),
    "cpu-torch-on-nvidia": Case(
        title="RTX 4090 with torch for processors", build=cpu_torch_on_nvidia, wrong={"torch": "fail"}
    ),
    "nvidia": Case(title="RTX 4090", build=healthy_nvidia, wrong={}),
    "old-nvidia": Case(title="GTX 1080 with torch for CUDA 13", build=old_nvidia, wrong={"torch": "fail"}),
    "hygon": Case(title="Hygon DCU with the vendor's older torch", build=hygon, wrong={"torch": "fail"}),
    "hygon-without-torch": Case(title="Hygon DCU without torch", build=hygon_without_torch, wrong={"torch": "fail"}),
    "wsl": Case(title="7900 XTX through WSL2", build=wsl, wrong={}),
    "wsl-without-runtime": Case(title="WSL2 without AMD's runtime", build=wsl_without_runtime, wrong={"wsl": "warn"}),
    "no-gpu": Case(title="No GPU", build=no_gpu, wrong={}),
}
