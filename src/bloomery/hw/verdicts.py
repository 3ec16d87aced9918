"""
What trials found, kept for runs: by chip, driver, torch, Triton and environment. When one of these changes, nothing is
known any more, and the machine is tried again.

A run takes the fastest implementation that passed of each kernel, and does not start where a kernel has none.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from bloomery.core import native
from bloomery.core.errors import HardwareError
from bloomery.core.files import canonical, write_json
from bloomery.core.records import read_record
from bloomery.hw import wheel
from bloomery.hw.gpus import find_gpus
from bloomery.hw.host import Host, cpu_features
from bloomery.hw.installed import distributions
from bloomery.hw.trials import Outcome, Status, attempt, trials

if sys.platform != "win32":
    import fcntl

SWITCHES = re.compile(
    r"(HSA|HIP|ROCR?|ROCM|CUDA|NVIDIA|NCCL|RCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|MIOPEN|HIPBLASLT|AOTRITON|FLASH_ATTENTION)_\w+"
    r"|BLOOMERY_NATIVE|AMD_SERIALIZE_KERNEL|GPU_MAX_HW_QUEUES|LD_LIBRARY_PATH"
)
"""Variables of the environment that can change what a kernel computes."""
OF_A_LAUNCHER = re.compile(r"TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|NCCL_ASYNC_ERROR_HANDLING")
NATIVE = "native"
"""The implementation by the compiled library."""
REPLACEABLE = ("block",)
"""Kernels that only have implementations which a run can do without."""


def identity(host: Host, vendor: str) -> Mapping[str, object]:
    """What trials on a device of this vendor depend on."""
    have, packages = wheel.installed(host), distributions(host)
    tritons = [one for name, one in packages.items() if name in ("triton", "triton-rocm", "pytorch-triton-rocm")]
    model = re.search(r"^model name\s*:\s*(.*)$", host.read("proc/cpuinfo") or "", re.MULTILINE)
    features = hashlib.sha256(" ".join(sorted(cpu_features(host))).encode()).hexdigest()[:8]
    nvidia = re.search(r"\d+\.\d+[.\d]*", host.read("proc/driver/nvidia/version") or "")
    amdgpu = (host.read("sys/module/amdgpu/version") or "").strip()
    return {
        "vendor": vendor,
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


def place(host: Host, vendor: str) -> Path | None:
    """The file in which the outcomes of this machine, as it is now, are or would be; None where nothing is kept."""
    if host.cache is None:
        return None
    return host.cache / "probes" / f"{hashlib.sha256(canonical(identity(host, vendor))).hexdigest()[:16]}.json"


class SavedOutcome(TypedDict):
    kernel: str
    implementation: str
    status: Status
    why: str
    milliseconds: NotRequired[float | None]


class Saved(TypedDict):
    """What `save` leaves."""

    outcomes: list[SavedOutcome]


def save(host: Host, vendor: str, outcomes: Sequence[Outcome]) -> None:
    file = place(host, vendor)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"identity": identity(host, vendor), "outcomes": [one.as_json() for one in outcomes]})


def load(host: Host, vendor: str) -> list[Outcome] | None:
    """The outcomes of this machine as it is now; None where it was not tried."""
    file = place(host, vendor)
    if file is None or not file.is_file():
        return None
    saved = read_record(file, Saved, fix="Remove that file, and the machine is tried again.")
    return [Outcome(**one) for one in saved["outcomes"]]


@contextmanager
def alone(host: Host) -> Iterator[None]:
    """Let one process at a time try a machine: each of several ranks asks for it."""
    if host.cache is None or sys.platform == "win32":
        yield
        return
    (host.cache / "probes").mkdir(parents=True, exist_ok=True)
    with (host.cache / "probes" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tried(host: Host, vendor: str) -> list[Outcome]:
    """
    What came of the trials. Nothing more is tried where not even a sum is computed: each would hang too. On a
    processor, those that are not timed are tried two at a time.
    """
    first, *rest = trials(vendor)
    outcomes = [attempt(host, first)]
    if outcomes[0].status == "failed":
        return outcomes
    timed = [trial for trial in rest if trial.kernel in ("matmul", "attention")]
    outcomes += [attempt(host, trial) for trial in timed]
    with ThreadPoolExecutor(max_workers=2 if vendor == "cpu" else 1) as pool:
        return outcomes + list(pool.map(partial(attempt, host), [trial for trial in rest if trial not in timed]))


def choose(outcomes: Sequence[Outcome]) -> Mapping[str, Outcome]:
    """
    Kernel -> the implementation that runs take: the fastest that passed; one that was not timed comes after those that
    were. The compiled library is taken or left as a whole.
    """
    library = not library_fault(outcomes)
    best: dict[str, Outcome] = {}
    for one in sorted(outcomes, key=lambda one: (one.implementation != NATIVE, one.milliseconds or float("inf"))):
        if one.status == "passed" and (library or one.implementation != NATIVE):
            best.setdefault(one.kernel, one)
    return best


def library_fault(outcomes: Sequence[Outcome]) -> str:
    """Why the compiled library is better left alone: a kernel of it fails, or all together are slower; else ""."""
    ours = [one for one in outcomes if one.implementation == NATIVE]
    failed = [f"{one.name} {one.why}" for one in ours if one.status == "failed"]
    if failed:
        return failed[0]
    taken, left = 0.0, 0.0
    for one in ours:
        others = [
            other.milliseconds
            for other in outcomes
            if other.kernel == one.kernel and other is not one and other.status == "passed" and other.milliseconds
        ]
        if one.milliseconds and others:
            taken, left = taken + one.milliseconds, left + min(others)
    return f"it takes {taken:.1f} ms where torch takes {left:.1f}" if taken > left else ""


def told(outcomes: Sequence[Outcome]) -> str:
    """What runs take, in words; compiled blocks are for those who ask for them."""
    taken = choose(outcomes).items()
    words = [f"{kernel} by {one.implementation}" for kernel, one in taken if one.implementation]
    return ", ".join(word for word in words if not word.startswith(REPLACEABLE)) or "those of torch"


def check(outcomes: Sequence[Outcome]) -> None:
    """Raises HardwareError where a kernel that training needs has no implementation that passed."""
    taken = choose(outcomes)
    for one in outcomes:
        if one.status == "failed" and one.kernel not in taken and one.kernel not in REPLACEABLE:
            what = f"{one.name} does not compute right numbers on this machine: {one.why}"
            raise HardwareError(
                what, cure='Ask `bloomery doctor`, which tries it again; device="cpu" trains meanwhile.'
            )
