"""The installed torch: whose build it is, and whether it reaches the GPU that is there."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from bloomery.core.errors import HardwareError
from bloomery.hw import wheel
from bloomery.hw.doctor.finding import Facts, Finding, Status
from bloomery.hw.doctor.nodes import reachable
from bloomery.hw.host import Host
from bloomery.hw.installed import numbers
from bloomery.hw.trials import ending

VISIBLE = frozenset({"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})
OLDEST_ROCM = {"gfx1150": (7, 2), "gfx1151": (7, 2), "gfx1200": (7, 2), "gfx1201": (7, 2)}
"""Wheels for an older ROCm stop at the first kernel of these targets, or lack half of the kernels."""
OLDEST_NVIDIA = {12: (525,), 13: (580,)}
"""CUDA's major version -> the first driver that runs it (NVIDIA, CUDA compatibility)."""


def torch_build(facts: Facts) -> Iterator[Finding]:
    try:
        choice = wheel.install_command(facts.host)
    except HardwareError as error:
        yield Finding(id="torch", status="fail", value=error.what, cure=error.cure)
        return
    if facts.have is None or choice.command is not None:
        value = f"missing or too old ({choice.why})"
        yield Finding(id="torch", status="fail", value=value, cure=shlex.join(choice.command or ()))
    elif facts.seen is None:
        value = f"{facts.have.version}: importing it {ending(facts.reply)}"
        yield Finding(id="torch", status="fail", value=value, cure=import_cure(facts))
    elif choice.better is not None:
        yield Finding(id="torch", status=_gravity(facts), value=choice.why, cure=shlex.join(choice.better))
    elif wheel.maker_to_serve(facts.gpus) == "hygon" and facts.have.built_for != "hygon":
        value = f"{facts.have.version} is not the vendor's, and cannot use the Hygon DCU"
        yield Finding(id="torch", status="fail", value=value, cure=wheel.DTK_ADVICE)
    else:
        yield _sees(facts, facts.seen)


def _gravity(facts: Facts) -> Status:
    """A card that torch cannot use is a failure. Of the small GPU inside many processors it is worth a word."""
    strong = any(gpu.maker != "amd" or (gpu.target and not gpu.small) for gpu in facts.gpus)
    return "fail" if strong else "warn"


def import_cure(facts: Facts) -> str:
    """How a torch that cannot be imported is mended: a vendor's own lacks its libraries, others are installed again."""
    if facts.have and facts.have.built_for == "hygon":
        return "source /opt/dtk/env.sh"
    return reinstall(facts.host)


def _sees(facts: Facts, seen: Mapping[str, Any]) -> Finding:
    """Whether an installed torch of the right kind reaches the GPU."""
    maker = wheel.maker_to_serve(facts.gpus)
    version = str(seen["version"])
    targets = {gpu.target for gpu in facts.amd if gpu.target}
    wanted = _wanted(facts)
    if maker == "amd" and wanted and not wanted & set(seen["targets"]):
        if wheel.legacy(wanted) == sorted(wanted):
            return _legacy(facts, seen)
        if seen["targets"]:
            value = f"{version} has no kernels for {', '.join(sorted(wanted))}, only for {', '.join(seen['targets'])}"
            return Finding(id="torch", status=_gravity(facts), value=value, cure=reinstall(facts.host))
    hip = numbers(str(seen.get("hip") or ""))[:2]
    slow = {target: OLDEST_ROCM[target] for target in targets & OLDEST_ROCM.keys() if hip and hip < OLDEST_ROCM[target]}
    if maker == "amd" and slow:
        needs = f"{', '.join(sorted(slow))} needs {'.'.join(map(str, max(slow.values())))}"
        value = f"{version} was built for ROCm {seen['hip']}, and {needs}"
        return Finding(id="torch", status="fail", value=value, cure=reinstall(facts.host))
    if maker in ("amd", "nvidia", "hygon") and not seen["gpus"]:
        return _sees_none(facts, seen, maker)
    if maker == "nvidia" and (older := _too_old_for(seen)):
        cure = shlex.join([*pip_over(facts.host), "--index-url", wheel.OLDER_CUDA_INDEX, f"torch{wheel.BOUNDS}"])
        return Finding(id="torch", status="fail", value=f"{version} has no kernels for {older}", cure=cure)
    believed = {str(target).partition(":")[0] for target in seen.get("chips", ())}
    if maker == "amd" and targets and believed and not believed <= targets:
        value = (
            f"{version} takes the GPU for {', '.join(sorted(believed))}; the kernel says {', '.join(sorted(targets))}"
        )
        return Finding(id="torch", status="fail", value=value, cure="unset HSA_OVERRIDE_GFX_VERSION")
    ok = Finding(id="torch", status="ok", value=f"{version}, sees {seen['gpus'] or 'no'} GPUs")
    return _some_without_kernels(facts, seen) or _sees_fewer(facts, seen) or ok


def _wanted(facts: Facts) -> set[str]:
    """AMD's targets that torch is to have kernels for: the small GPU inside a processor counts where it is alone."""
    gpus = [gpu for gpu in reachable(facts, "amd") if gpu.target]
    return {gpu.target for gpu in gpus if not gpu.small} or {gpu.target for gpu in gpus}


def _legacy(facts: Facts, seen: Mapping[str, Any]) -> Finding:
    value = f"{seen['version']}; no torch{wheel.BOUNDS} is known to work on {', '.join(sorted(_wanted(facts)))}"
    cure = "Nothing helps but another GPU; until then runs compute on the processor."
    if seen["gpus"]:
        cure = "export HIP_VISIBLE_DEVICES=-1   # runs then compute on the processor"
    return Finding(id="torch", status="warn", value=value, cure=cure)


def _chosen(facts: Facts) -> bool:
    """Whether the environment says which GPUs torch may see."""
    return bool(VISIBLE & facts.host.env.keys())


def _some_without_kernels(facts: Facts, seen: Mapping[str, Any]) -> Finding | None:
    """Whether there is a card that this torch of AMD's cannot compute on, beside one that it can."""
    if wheel.maker_to_serve(facts.gpus) != "amd" or not seen["targets"]:
        return None
    believed = {str(target).partition(":")[0] for target in seen.get("chips", ())}
    wanted = _wanted(facts) & believed if _chosen(facts) and believed else _wanted(facts)
    missing = sorted(wanted - set(seen["targets"]))
    if not missing:
        return None
    cure = reinstall(facts.host)
    if wheel.legacy(missing) == missing:
        good = [str(number) for number, gpu in enumerate(reachable(facts, "amd")) if gpu.target not in missing]
        cure = f"export HIP_VISIBLE_DEVICES={','.join(good)}"
    value = f"{seen['version']} has no kernels for {', '.join(missing)}, which stands beside what it has some for"
    return Finding(id="torch", status="warn", value=value, cure=cure)


def _sees_fewer(facts: Facts, seen: Mapping[str, Any]) -> Finding | None:
    """Whether torch sees fewer GPUs than there are, although nothing hides any."""
    maker = wheel.maker_to_serve(facts.gpus)
    if maker not in ("amd", "nvidia") or _chosen(facts):
        return None
    gpus = reachable(facts, maker)
    count = len([gpu for gpu in gpus if not gpu.small] or gpus)
    if seen["gpus"] >= count:
        return None
    cure = "nvidia-smi" if maker == "nvidia" else "rocminfo; sudo dmesg | grep -i amdgpu"
    value = f"{seen['version']}, sees {seen['gpus']} of {count} GPUs, and no variable hides any"
    return Finding(id="torch", status="warn", value=value, cure=f"{cure}   # which of them do not answer, and why")


def _too_old_for(seen: Mapping[str, Any]) -> str:
    """The chip of NVIDIA that is older than all that this torch has kernels for, as sm_61; "" for none."""
    made_for = [int(name[3:]) for name in seen["targets"] if re.fullmatch(r"sm_\d+", name)]
    chips = [name for name in seen.get("chips", ()) if re.fullmatch(r"sm_\d+", name)]
    return next((chip for chip in chips if made_for and int(chip[3:]) < min(made_for)), "")


def pip_over(host: Host) -> list[str]:
    return [host.python, "-m", "pip", "install", "--force-reinstall"]


def _sees_none(facts: Facts, seen: Mapping[str, Any], maker: str) -> Finding:
    version = str(seen["version"])
    driver = numbers((re.search(r"\d+\.\d+", facts.host.read("proc/driver/nvidia/version") or "") or [""])[0])
    cuda = numbers(str(seen.get("cuda") or ""))
    if maker == "nvidia" and driver and cuda and driver < OLDEST_NVIDIA.get(cuda[0], (0,)):
        value = f"{version} needs driver {OLDEST_NVIDIA[cuda[0]][0]} or newer; this one is {'.'.join(map(str, driver))}"
        cure = f"{reinstall(facts.host)}   # or a newer driver"
        return Finding(id="torch", status="fail", value=value, cure=cure)
    hidden = [f"{name}={value!r}" for name, value in facts.host.env.items() if name.endswith("_VISIBLE_DEVICES")]
    value = f"{version} sees no GPU" + (f" ({', '.join(hidden)})" if hidden else "")
    cure = {"nvidia": "nvidia-smi", "hygon": "source /opt/dtk/env.sh && hy-smi"}.get(maker, "ls -l /dev/kfd /dev/dri")
    cure = (
        f"unset {' '.join(name.partition('=')[0] for name in hidden)}" if hidden else f"{cure}   # look at the driver"
    )
    return Finding(id="torch", status=_gravity(facts), value=value, cure=cure)


def reinstall(host: Host) -> str:
    """The line that puts this machine's torch over the one that is there."""
    try:
        command, _ = wheel.fresh_command(host)
    except HardwareError as error:
        return error.cure
    return shlex.join(wheel.forced(command))
