"""
What trials found, kept for runs: by chip, driver, torch, Triton and environment. When one of these changes, nothing is
known any more, and the machine is tried again.

A run takes the fastest implementation that passed of each kernel, and does not start where a kernel has none.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bloomery.core import native
from bloomery.core.errors import HardwareError
from bloomery.core.files import canonical, write_json
from bloomery.hw import wheel
from bloomery.hw.gpus import find_gpus
from bloomery.hw.host import Host, cpu_features
from bloomery.hw.installed import distributions
from bloomery.hw.trials import Outcome, Trial, attempt

SWITCHES = re.compile(
    r"(HSA|HIP|ROCR?|ROCM|CUDA|NVIDIA|NCCL|RCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|MIOPEN|HIPBLASLT|AOTRITON|FLASH_ATTENTION)_\w+"
    r"|BLOOMERY_NATIVE|AMD_SERIALIZE_KERNEL|GPU_MAX_HW_QUEUES|LD_LIBRARY_PATH"
)
"""Variables of the environment that can change what a kernel computes."""
OF_A_LAUNCHER = re.compile(r"TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|NCCL_ASYNC_ERROR_HANDLING")
REPLACEABLE = ("block",)
"""Kernels that only have implementations which a run can do without."""


def identity(host: Host) -> Mapping[str, object]:
    """What trials depend on."""
    have, packages = wheel.installed(host), distributions(host)
    tritons = [one for name, one in packages.items() if name in ("triton", "triton-rocm", "pytorch-triton-rocm")]
    model = re.search(r"^model name\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    features = hashlib.sha256(" ".join(sorted(cpu_features(host))).encode()).hexdigest()[:8]
    nvidia = re.search(r"\d+\.\d+[.\d]*", host.read("proc/driver/nvidia/version") or "")
    amdgpu = (host.read("sys/module/amdgpu/version") or "").strip()
    return {
        "chip": [f"{gpu.maker} {gpu.target or gpu.name}".strip() for gpu in find_gpus(host)],
        "processor": f"{model[1] if model else host.processor} {features}",
        "driver": " ".join([host.kernel or host.system, amdgpu, nvidia[0] if nvidia else ""]).strip(),
        "torch": have.version if have else "",
        "triton": sorted(f"{one.name} {one.version}" for one in tritons),
        "native": native.digest(native.FOLDER),
        "environment": {
            name: value
            for name, value in sorted(host.env.items())
            if SWITCHES.fullmatch(name) and not OF_A_LAUNCHER.fullmatch(name)
        },
    }


def place(host: Host) -> Path | None:
    """The file in which the outcomes of this machine, as it is now, are or would be; None where nothing is kept."""
    if host.cache is None:
        return None
    return host.cache / "probes" / f"{hashlib.sha256(canonical(identity(host))).hexdigest()[:16]}.json"


def save(host: Host, outcomes: Sequence[Outcome]) -> None:
    file = place(host)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"identity": identity(host), "outcomes": [one.as_json() for one in outcomes]})


def load(host: Host) -> list[Outcome] | None:
    """The outcomes of this machine as it is now; None where it was not tried."""
    file = place(host)
    if file is None or not file.is_file():
        return None
    return [Outcome(**one) for one in json.loads(file.read_text(encoding="utf-8"))["outcomes"]]


def tried(host: Host, wanted: Sequence[Trial]) -> list[Outcome]:
    """Try them one after another. Where not even a sum can be computed, nothing else is tried: each would hang again."""
    outcomes: list[Outcome] = []
    for trial in wanted:
        outcomes.append(attempt(host, trial))
        if trial.kernel == "launch" and outcomes[-1].status == "failed":
            break
    return outcomes


def choose(outcomes: Sequence[Outcome]) -> Mapping[str, Outcome]:
    """Kernel -> the fastest implementation that passed. One that was not timed comes after those that were."""
    passed = [one for one in outcomes if one.status == "passed"]
    best: dict[str, Outcome] = {}
    for one in sorted(passed, key=lambda one: one.milliseconds if one.milliseconds is not None else float("inf")):
        best.setdefault(one.kernel, one)
    return best


def check(outcomes: Sequence[Outcome]) -> None:
    """Raises HardwareError where a kernel that training needs has no implementation that passed."""
    taken = choose(outcomes)
    for one in outcomes:
        if one.status == "failed" and one.kernel not in taken and one.kernel not in REPLACEABLE:
            what = f"{one.name} does not compute right numbers on this machine: {one.why}"
            raise HardwareError(what, cure='Ask `bloomery doctor`, which tries it again; device="cpu" trains meanwhile.')
