"""
Check the software: Python, CPU, memory, disk, container, torch build, conflicting packages.

System: everything about a machine except its GPU, including the container around it.

Packages: packages that get into each other's way. They are built for another maker's GPUs, or lie in the same
folder.

Build: who built the installed torch, and whether it reaches the GPU of this machine.

They share one file because together they say whether this host is ready for torch.
"""

import math
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from bloomery.core import native
from bloomery.core.errors import HardwareError
from bloomery.hw import torch_install
from bloomery.hw.doctor.finding import GIB, Finding, FindingStatus, MachineFacts
from bloomery.hw.doctor.gpu import reachable
from bloomery.hw.host import (
    CommandResult,
    Host,
    cpu_features,
    fast_bf16,
    in_container,
    in_pod,
    in_wsl,
    memory_bytes,
    physical_bytes,
)
from bloomery.hw.kernel_trials import ending, merged
from bloomery.hw.torch_install import AMD_INDEX, Distribution, maker_to_serve, numbers

OLDEST_PYTHON = (3, 11)
LEAST_SHM_BYTES = GIB
SCARCE_DISK_BYTES, LEAST_DISK_BYTES = 10 * GIB, GIB
SCARCE_MEMORY_BYTES = 4 * GIB
SLOW_DISK, SLOW_MEMORY = 50e6, 2e9
"""Bytes per second. Such a disk takes 30 s for a checkpoint of 1.5 GB. With such memory, a CPU is too slow to train."""
MEASURE_LIMIT_SECONDS = 30.0


def python_version(facts: MachineFacts) -> Iterator[Finding]:
    old = sys.version_info[:2] < OLDEST_PYTHON
    hint = "rm -r .venv && make PYTHON=python3.11" if old else ""
    yield Finding(id="python", status="fail" if old else "ok", value=platform.python_version(), hint=hint)


def processor(facts: MachineFacts) -> Iterator[Finding]:
    fast = sorted(cpu_features(facts.host) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"})
    dtype = "bfloat16" if fast_bf16(facts.host) else "float32"
    value = f"{_threads(facts) or 'unknown'} threads, computes in {dtype} ({', '.join(fast) or 'no vector extensions'})"
    yield Finding(id="cpu", status="ok", value=value)


def quota(facts: MachineFacts) -> Iterator[Finding]:
    """A container that may use two CPUs sees all CPUs, and torch starts a thread for each."""
    match = re.match(r"(\d+) (\d+)", facts.host.read("sys/fs/cgroup/cpu.max") or "")
    if not match or "OMP_NUM_THREADS" in facts.host.env:
        return
    share = max(1, math.ceil(int(match[1]) / int(match[2])))
    if share < _threads(facts):
        value = f"the control group allows {share} of {_threads(facts)} threads"
        yield Finding(id="cpu-quota", status="warn", value=value, hint=f"export OMP_NUM_THREADS={share}")


def _threads(facts: MachineFacts) -> int:
    return len(re.findall(r"^processor\s*:", facts.host.read("proc/cpuinfo") or "", re.MULTILINE))


def memory(facts: MachineFacts) -> Iterator[Finding]:
    usable, whole = memory_bytes(facts.host), physical_bytes(facts.host)
    if usable is None or whole is None:
        yield Finding(id="memory", status="ok", value="unknown")
        return
    limit = f" of {whole / GIB:.1f} GiB (limit of the control group)" if usable < whole else ""
    small = usable < SCARCE_MEMORY_BYTES
    hint = "Close other programs, or raise the container's limit (docker run --memory=8g …)." if small else ""
    value = f"{usable / GIB:.1f} GiB{limit}"
    yield Finding(id="memory", status="warn" if small else "ok", value=value, hint=hint)


def memory_speed(facts: MachineFacts) -> Iterator[Finding]:
    rate = _rate(_measure(facts, "memory"))
    if rate is not None:
        slow = rate < SLOW_MEMORY
        value = f"one thread copies {rate / 1e9:.1f} GB/s"
        hint = "Close other programs; in a virtual machine, enable pinned memory on the host." if slow else ""
        yield Finding(id="memory-speed", status="warn" if slow else "ok", value=value, hint=hint)


def _measure(facts: MachineFacts, what: str, *arguments: str) -> CommandResult:
    """What a child process finds out about memory or a disk; nothing if nothing is to be measured."""
    if facts.quick:
        return CommandResult(code=0)
    return facts.host.run([facts.host.python, "-m", "bloomery.hw.io_speed", *arguments, what], MEASURE_LIMIT_SECONDS)


def _rate(reply: CommandResult) -> float | None:
    """Bytes per second; None where it was not measured."""
    rate = merged(reply).get("bytes_per_second")
    return float(rate) if rate else None


def shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    if in_container(facts.host) and facts.host.exists("dev/shm"):
        size = facts.host.space("dev/shm").total
        small = size < LEAST_SHM_BYTES
        hint = "docker run --ipc=host …   # or --shm-size=8g"
        if in_pod(facts.host):
            hint = "volumes: [{name: shm, emptyDir: {medium: Memory}}]   # of the pod, mounted at /dev/shm"
        value = f"/dev/shm has {size / GIB:.2f} GiB"
        yield Finding(id="shm", status="warn" if small else "ok", value=value, hint=hint if small else "")


def windows(facts: MachineFacts) -> Iterator[Finding]:
    if not in_wsl(facts.host):
        return
    value = f"WSL (kernel {facts.host.kernel})"
    if facts.gpus:
        yield Finding(id="wsl", status="ok", value=f"{value}; its GPU comes through /dev/dxg")
    elif facts.host.exists("dev/dxg"):
        hint = "amdgpu-install -y --usecase=wsl,rocm --no-dkms   # AMD; for NVIDIA install the driver in Windows"
        yield Finding(
            id="wsl", status="warn", value=f"{value} provides a GPU, but no GPU runtime here detects it", hint=hint
        )
    else:
        hint = "wsl --update   # in Windows, and a current driver of the GPU there"
        yield Finding(id="wsl", status="warn", value=f"{value} provides no GPU: /dev/dxg is missing", hint=hint)


def disk(facts: MachineFacts) -> Iterator[Finding]:
    runs = facts.runs.absolute()
    folder = next(place for place in (runs, *runs.parents) if place.exists())
    free = facts.host.space(folder).free
    status: FindingStatus = "fail" if free < LEAST_DISK_BYTES else "warn" if free < SCARCE_DISK_BYTES else "ok"
    hint = "" if status == "ok" else "bloomery run RECIPE --runs DIR   # on another disk, or free space on this disk"
    yield Finding(id="disk", status=status, value=f"{free / GIB:.1f} GiB free for {facts.runs}", hint=hint)
    if status == "fail":
        return
    reply = _measure(facts, "disk", str(folder))
    rate = _rate(reply)
    if rate is None and "Error" in reply.err:
        hint = "bloomery run RECIPE --runs DIR   # in a folder that you can write to"
        yield Finding(id="disk-speed", status="fail", value=f"writing to {folder} {ending(reply)}", hint=hint)
    if rate is not None:
        slow = rate < SLOW_DISK
        hint = "bloomery run RECIPE --runs DIR   # on a local disk" if slow else ""
        value = f"{rate / 1e6:,.0f} MB/s for synced writes"
        yield Finding(id="disk-speed", status="warn" if slow else "ok", value=value, hint=hint)


def compiled(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the libraries of native/ run; without them the same is computed in Python, only slower."""
    for name in native.NAMES:
        state = native.state(name)
        ready = state in native.LEVELS
        hint = "" if ready or state.startswith("off") else "python -m pip install --editable .   # with a C++ compiler"
        yield Finding(id=f"native-{name}", status="warn" if "stale" in state else "ok", value=state, hint=hint)


TRITONS = ("triton-rocm", "pytorch-triton-rocm")
"""AMD's builds of Triton. PyPI's `triton` writes into the same folder and overwrites them."""
BITSANDBYTES_ON_AMD = (0, 50)
"""The first with all of its 4-bit kernels for AMD; earlier ones gave NaN."""


def conflicts(facts: MachineFacts) -> Iterator[Finding]:
    if facts.have is None:
        return
    if {facts.have.built_for, maker_to_serve(facts.gpus)} & {"amd", "hygon"}:
        yield from _for_cuda(facts)
    if facts.have.built_for in ("amd", "hygon"):
        yield from _triton(facts)
        yield from _library_path(facts)
    yield from _companions(facts)


def _for_cuda(facts: MachineFacts) -> Iterator[Finding]:
    """What was compiled for CUDA and is imported by other libraries as soon as it is found."""
    xformers = facts.packages.get("xformers")
    if xformers and not _amd_build(xformers):
        value = f"xformers {xformers.version} was built for CUDA; Bloomery does not need it"
        yield Finding(id="package-xformers", status="warn", value=value, hint=_uninstall(facts, "xformers"))
    flash = facts.packages.get("flash-attn")
    if flash and "cu1" in flash.local:
        value = f"flash-attn {flash.version} was built for CUDA; Bloomery does not need it"
        yield Finding(id="package-flash-attn", status="warn", value=value, hint=_uninstall(facts, "flash-attn"))
    quantizer = facts.packages.get("bitsandbytes")
    if quantizer and numbers(quantizer.version) < BITSANDBYTES_ON_AMD:
        value = f"bitsandbytes {quantizer.version} returns NaN on AMD; Bloomery does not use it"
        yield Finding(id="package-bitsandbytes", status="warn", value=value, hint=_uninstall(facts, "bitsandbytes"))


def _triton(facts: MachineFacts) -> Iterator[Finding]:
    usual = facts.packages.get("triton")
    own = next((facts.packages[name] for name in TRITONS if name in facts.packages), None)
    if usual and not _amd_build(usual) and (own or (facts.have and facts.have.built_for == "amd")):
        value = f"triton {usual.version} from PyPI overwrote {own.name if own else 'AMD Triton'}, but compiles for CUDA"
        again = f"{own.name}=={own.version}" if own else "triton-rocm"
        install = [
            facts.host.python,
            "-m",
            "pip",
            "install",
            "--force-reinstall",
            "--no-deps",
            "--index-url",
            AMD_INDEX,
        ]
        hint = f"{_uninstall(facts, 'triton')} && {shlex.join([*install, again])}"
        yield Finding(id="triton", status="fail", value=value, hint=hint)
    elif own or usual:
        package = own or usual
        yield Finding(id="triton", status="ok", value=f"{package.name} {package.version}" if package else "")


def _library_path(facts: MachineFacts) -> Iterator[Finding]:
    """The wheel brings its own libraries; those of another version, found before them, crash it."""
    path = facts.host.env.get("LD_LIBRARY_PATH", "")
    if (
        any("/rocm" in part or "/hip" in part for part in path.split(":"))
        and facts.have
        and facts.have.built_for == "amd"
    ):
        value = f"LD_LIBRARY_PATH={path!r} takes precedence over torch's own libraries"
        yield Finding(id="library-path", status="warn", value=value, hint="unset LD_LIBRARY_PATH")


def _companions(facts: MachineFacts) -> Iterator[Finding]:
    """torch, torchvision and torchaudio are built together; of another build they cannot be imported."""
    have = facts.have
    torch = facts.packages.get("torch")
    if have is None or torch is None:
        return
    if torch.version.partition("+")[0] != have.version.partition("+")[0]:
        value = f"torch's files are {have.version}, but pip lists {torch.version}: two installations overlap"
        hint = (
            f"{_uninstall(facts, 'torch')} && {shlex.quote(facts.host.python)} -m bloomery.hw.torch_install --install"
        )
        yield Finding(id="torch-twice", status="fail", value=value, hint=hint)
    for name in ("torchvision", "torchaudio"):
        other = facts.packages.get(name)
        if other and other.local not in (torch.local, have.version.partition("+")[2]):
            value = f"{name} {other.version} was not built for torch {have.version}"
            yield Finding(id=f"package-{name}", status="warn", value=value, hint=_uninstall(facts, name))


def _amd_build(package: Distribution) -> bool:
    return any(mark in package.local for mark in ("rocm", "das", "dtk"))


def _uninstall(facts: MachineFacts, name: str) -> str:
    return shlex.join([facts.host.python, "-m", "pip", "uninstall", "-y", name])


VISIBLE = frozenset({"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})
OLDEST_ROCM = {"gfx1150": (7, 2), "gfx1151": (7, 2), "gfx1200": (7, 2), "gfx1201": (7, 2)}
"""Wheels for an older ROCm stop at the first kernel of these targets, or lack half of the kernels."""
OLDEST_NVIDIA = {12: (525,), 13: (580,)}
"""CUDA's major version -> the first driver that runs it (NVIDIA, CUDA compatibility)."""


def torch_build(facts: MachineFacts) -> Iterator[Finding]:
    try:
        choice = torch_install.install_command(facts.host)
    except HardwareError as error:
        yield Finding(id="torch", status="fail", value=error.what, hint=error.hint)
        return
    if facts.have is None or choice.command is not None:
        value = f"missing or too old ({choice.why})"
        yield Finding(id="torch", status="fail", value=value, hint=shlex.join(choice.command or ()))
    elif facts.seen is None:
        value = f"{facts.have.version}: importing it {ending(facts.reply)}"
        yield Finding(id="torch", status="fail", value=value, hint=import_hint(facts))
    elif choice.better is not None:
        yield Finding(id="torch", status=_gravity(facts), value=choice.why, hint=shlex.join(choice.better))
    elif torch_install.maker_to_serve(facts.gpus) == "hygon" and facts.have.built_for != "hygon":
        value = f"{facts.have.version} is not the vendor's build, and cannot use the Hygon DCU"
        yield Finding(id="torch", status="fail", value=value, hint=torch_install.DTK_ADVICE)
    else:
        yield _sees(facts, facts.seen)


def _gravity(facts: MachineFacts) -> FindingStatus:
    """A card that torch cannot use is a failure. For the small integrated GPU of many CPUs it is a warning."""
    strong = any(gpu.maker != "amd" or (gpu.target and not gpu.small) for gpu in facts.gpus)
    return "fail" if strong else "warn"


def import_hint(facts: MachineFacts) -> str:
    """How a torch that cannot be imported is mended: a vendor's own lacks its libraries, others are installed again."""
    if facts.have and facts.have.built_for == "hygon":
        return "source /opt/dtk/env.sh"
    return reinstall(facts.host)


def _sees(facts: MachineFacts, seen: Mapping[str, Any]) -> Finding:
    """Whether an installed torch of the right kind reaches the GPU."""
    maker = torch_install.maker_to_serve(facts.gpus)
    version = str(seen["version"])
    targets = {gpu.target for gpu in facts.amd if gpu.target}
    required = _wanted(facts)
    if maker == "amd" and required and not required & set(seen["targets"]):
        if torch_install.legacy(required) == sorted(required):
            return _legacy(facts, seen)
        if seen["targets"]:
            value = f"{version} has no kernels for {', '.join(sorted(required))}, only for {', '.join(seen['targets'])}"
            return Finding(id="torch", status=_gravity(facts), value=value, hint=reinstall(facts.host))
    hip = numbers(str(seen.get("hip") or ""))[:2]
    slow = {target: OLDEST_ROCM[target] for target in targets & OLDEST_ROCM.keys() if hip and hip < OLDEST_ROCM[target]}
    if maker == "amd" and slow:
        needs = f"{', '.join(sorted(slow))} needs {'.'.join(map(str, max(slow.values())))}"
        value = f"{version} was built for ROCm {seen['hip']}, and {needs}"
        return Finding(id="torch", status="fail", value=value, hint=reinstall(facts.host))
    if maker in ("amd", "nvidia", "hygon") and not seen["gpus"]:
        return _sees_none(facts, seen, maker)
    if maker == "nvidia" and (older := _too_old_for(seen)):
        hint = shlex.join(
            [*pip_over(facts.host), "--index-url", torch_install.OLDER_CUDA_INDEX, f"torch{torch_install.BOUNDS}"]
        )
        return Finding(id="torch", status="fail", value=f"{version} has no kernels for {older}", hint=hint)
    believed = {str(target).partition(":")[0] for target in seen.get("chips", ())}
    if maker == "amd" and targets and believed and not believed <= targets:
        value = f"{version} reports {', '.join(sorted(believed))}, but the kernel reports {', '.join(sorted(targets))}"
        return Finding(id="torch", status="fail", value=value, hint="unset HSA_OVERRIDE_GFX_VERSION")
    ok = Finding(id="torch", status="ok", value=f"{version}, detects {seen['gpus'] or 'no'} GPUs")
    return _some_without_kernels(facts, seen) or _sees_fewer(facts, seen) or ok


def _wanted(facts: MachineFacts) -> set[str]:
    """AMD targets that torch needs kernels for. A small integrated GPU counts only where it is the only GPU."""
    gpus = [gpu for gpu in reachable(facts, "amd") if gpu.target]
    return {gpu.target for gpu in gpus if not gpu.small} or {gpu.target for gpu in gpus}


def _legacy(facts: MachineFacts, seen: Mapping[str, Any]) -> Finding:
    value = f"{seen['version']}; no torch{torch_install.BOUNDS} is known to work on {', '.join(sorted(_wanted(facts)))}"
    hint = "Use another GPU. Until then, runs use the CPU."
    if seen["gpus"]:
        hint = "export HIP_VISIBLE_DEVICES=-1   # runs then use the CPU"
    return Finding(id="torch", status="warn", value=value, hint=hint)


def _chosen(facts: MachineFacts) -> bool:
    """Whether the environment says which GPUs torch may see."""
    return bool(VISIBLE & facts.host.env.keys())


def _some_without_kernels(facts: MachineFacts, seen: Mapping[str, Any]) -> Finding | None:
    """Whether this torch of AMD's can compute on some of the cards but not on all."""
    if torch_install.maker_to_serve(facts.gpus) != "amd" or not seen["targets"]:
        return None
    believed = {str(target).partition(":")[0] for target in seen.get("chips", ())}
    required = _wanted(facts) & believed if _chosen(facts) and believed else _wanted(facts)
    missing = sorted(required - set(seen["targets"]))
    if not missing:
        return None
    hint = reinstall(facts.host)
    if torch_install.legacy(missing) == missing:
        good = [str(number) for number, gpu in enumerate(reachable(facts, "amd")) if gpu.target not in missing]
        hint = f"export HIP_VISIBLE_DEVICES={','.join(good)}"
    value = f"{seen['version']} has no kernels for {', '.join(missing)}, only for the other GPUs here"
    return Finding(id="torch", status="warn", value=value, hint=hint)


def _sees_fewer(facts: MachineFacts, seen: Mapping[str, Any]) -> Finding | None:
    """Whether torch sees fewer GPUs than there are, although nothing hides any."""
    maker = torch_install.maker_to_serve(facts.gpus)
    if maker not in ("amd", "nvidia") or _chosen(facts):
        return None
    gpus = reachable(facts, maker)
    count = len([gpu for gpu in gpus if not gpu.small] or gpus)
    if seen["gpus"] >= count:
        return None
    hint = "nvidia-smi" if maker == "nvidia" else "rocminfo; sudo dmesg | grep -i amdgpu"
    value = f"{seen['version']}, detects {seen['gpus']} of {count} GPUs, and no variable hides the others"
    return Finding(id="torch", status="warn", value=value, hint=f"{hint}   # shows which GPUs do not answer, and why")


def _too_old_for(seen: Mapping[str, Any]) -> str:
    """The chip of NVIDIA that is older than all that this torch has kernels for, as sm_61; "" for none."""
    made_for = [int(name[3:]) for name in seen["targets"] if re.fullmatch(r"sm_\d+", name)]
    chips = [name for name in seen.get("chips", ()) if re.fullmatch(r"sm_\d+", name)]
    return next((chip for chip in chips if made_for and int(chip[3:]) < min(made_for)), "")


def pip_over(host: Host) -> list[str]:
    return [host.python, "-m", "pip", "install", "--force-reinstall"]


def _sees_none(facts: MachineFacts, seen: Mapping[str, Any], maker: str) -> Finding:
    version = str(seen["version"])
    driver = numbers((re.search(r"\d+\.\d+", facts.host.read("proc/driver/nvidia/version") or "") or [""])[0])
    cuda = numbers(str(seen.get("cuda") or ""))
    if maker == "nvidia" and driver and cuda and driver < OLDEST_NVIDIA.get(cuda[0], (0,)):
        value = f"{version} needs driver {OLDEST_NVIDIA[cuda[0]][0]} or newer; this one is {'.'.join(map(str, driver))}"
        hint = f"{reinstall(facts.host)}   # or a newer driver"
        return Finding(id="torch", status="fail", value=value, hint=hint)
    hidden = [f"{name}={value!r}" for name, value in facts.host.env.items() if name.endswith("_VISIBLE_DEVICES")]
    value = f"{version} detects no GPU" + (f" ({', '.join(hidden)})" if hidden else "")
    hint = {"nvidia": "nvidia-smi", "hygon": "source /opt/dtk/env.sh && hy-smi"}.get(maker, "ls -l /dev/kfd /dev/dri")
    hint = f"unset {' '.join(name.partition('=')[0] for name in hidden)}" if hidden else f"{hint}   # check the driver"
    return Finding(id="torch", status=_gravity(facts), value=value, hint=hint)


def reinstall(host: Host) -> str:
    """The line that puts this machine's torch over the one that is there."""
    try:
        command, _ = torch_install.fresh_command(host)
    except HardwareError as error:
        return error.hint
    return shlex.join(torch_install.forced(command))
