"""
Check the GPUs: drivers, names and memory from the kernel's files, and their device nodes.

A process reaches GPUs through device nodes. A container may get only some of these nodes, and that is enough.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bloomery.hw.doctor.finding import GIB, Finding, FindingStatus, MachineFacts
from bloomery.hw.host import (
    PCI_MAKERS,
    Gpu,
    Host,
    Maker,
    gfx_name,
    group_name,
    in_container,
    in_pod,
    in_wsl,
    nvidia_files,
    physical_bytes,
    rocminfo_targets,
)
from bloomery.hw.torch_install import maker_to_serve, numbers

OLDEST_KERNEL = {"gfx1150": (6, 11), "gfx1151": (6, 11), "gfx1200": (6, 12), "gfx1201": (6, 12)}
"""Where amdgpu learned a target."""
CONTAINER_FLAGS = (
    'docker run --device=/dev/kfd --device=/dev/dri --group-add "$(stat -c %g /dev/kfd)" --group-add video '
    "--ipc=host --security-opt seccomp=unconfined …"
)
KERNEL_TROUBLE = re.compile(
    r".*(?:amdgpu.*(?:page fault|\bMES\b.*fail|ring \S+ timeout|GPU reset)|NVRM: Xid).*", re.IGNORECASE
)
GTT_SHARE = 0.75
WITH_WHEELS = re.compile(r"gfx(908|90a|942|950|1030|110[0-3]|115[0-3]|120[01])")
"""Targets that wheels have kernels for, so that nothing is won by another's name."""


def graphics(facts: MachineFacts) -> Iterator[Finding]:
    names = [gpu.name or f"{gpu.maker} {gpu.target}".strip() for gpu in facts.gpus]
    counted = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    yield Finding(id="gpu", status="ok", value=", ".join(counted) or "none")


def amd_driver(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the kernel drives AMD's GPUs, and is new enough for them."""
    if not facts.amd or in_wsl(facts.host):
        return
    kernel, host = facts.host.kernel, facts.host
    if not any(gpu.target for gpu in facts.amd):
        value, hint = "no compute driver for the AMD GPU", "sudo modprobe amdgpu"
        if "nomodeset" in host.boot_options:
            value, hint = (
                f"{value}: the kernel started with nomodeset",
                "sudo sed -i 's/ nomodeset//' /etc/default/grub && sudo update-grub   # then reboot",
            )
        elif blocked := _blacklisted(facts):
            value, hint = (
                f"{value}: /{blocked} forbids it",
                f"sudo sed -i '/blacklist amdgpu/d' /{blocked} && sudo modprobe amdgpu",
            )
        elif in_container(host):
            value, hint = f"{value} in this container", CONTAINER_FLAGS
        served = maker_to_serve(facts.gpus) == "amd"
        yield Finding(id="amd-driver", status="fail" if served else "warn", value=value, hint=hint)
        return
    oldest = max((OLDEST_KERNEL.get(gpu.target, (0,)) for gpu in facts.amd), default=(0,))
    version = (host.read("sys/module/amdgpu/version") or "").strip()
    value = f"amdgpu{f' {version}' if version else ''} in kernel {kernel or 'unknown'}"
    if kernel and numbers(kernel)[:2] < oldest:
        targets = ", ".join(sorted({gpu.target for gpu in facts.amd}))
        value = f"{value}; {targets} needs kernel {'.'.join(map(str, oldest))} or newer"
        hint = "sudo apt install linux-generic-hwe-24.04   # or another newer kernel, then reboot"
        yield Finding(id="amd-driver", status="fail", value=value, hint=hint)
        return
    yield Finding(id="amd-driver", status="ok", value=value)


def _blacklisted(facts: MachineFacts) -> str:
    folders = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d")
    places = [f"{folder}/{name}" for folder in folders for name in facts.host.names(folder)]
    said = re.compile(r"^\s*blacklist\s+amdgpu\b", re.MULTILINE)
    return next((place for place in places if said.search(facts.host.read(place) or "")), "")


def hsa_override(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the runtime is set to, or detects, another chip than the kernel."""
    real = sorted({gpu.target for gpu in facts.amd if gpu.target})
    spoofed = facts.host.env.get("HSA_OVERRIDE_GFX_VERSION")
    if spoofed and facts.amd:
        parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", spoofed)
        major, minor, stepping = map(int, parts.groups()) if parts else (0, 16, 16)
        named = gfx_name(major * 10000 + minor * 100 + stepping) if max(minor, stepping) < 16 else "no target"
        value = f"{spoofed} means {named}, but the kernel reports {', '.join(real) or 'unknown'}"
        status: FindingStatus = "fail" if not real or any(map(WITH_WHEELS.fullmatch, real)) else "warn"
        if real == [named]:
            value, status = f"{spoofed} means {named}, the actual chip, and is not needed", "warn"
        yield Finding(id="hsa-override", status=status, value=value, hint="unset HSA_OVERRIDE_GFX_VERSION")
    elif real and not in_wsl(facts.host):
        reported = sorted(set(rocminfo_targets(facts.host)))
        if reported and not set(reported) <= set(real):
            value = f"rocminfo reports {', '.join(reported)}, but the kernel reports {', '.join(real)}"
            hint = "sudo apt purge rocminfo hsa-rocr   # the torch wheel has its own runtime"
            yield Finding(id="rocminfo", status="warn", value=value, hint=hint)


def visible(facts: MachineFacts) -> Iterator[Finding]:
    """Which GPUs the environment lets through. HIP's list wins over CUDA's, and ROCR's comes before both."""
    env = facts.host.env
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    variables = {name: env[name] for name in names if name in env}
    if not variables or not facts.gpus:
        return
    shown = ", ".join(f"{name}={value!r}" for name, value in variables.items())
    empty = [name for name, value in variables.items() if value.strip() in ("", "-1")]
    hip, cuda = variables.get("HIP_VISIBLE_DEVICES"), variables.get("CUDA_VISIBLE_DEVICES")
    if empty:
        hint, value = f"unset {' '.join(empty)}", f"{shown} hides every GPU"
        yield Finding(id="visible-devices", status="warn", value=value, hint=hint)
    elif facts.amd and hip is not None and cuda is not None and hip != cuda:
        value = f"{shown}: only the first variable has an effect"
        yield Finding(id="visible-devices", status="warn", value=value, hint="unset CUDA_VISIBLE_DEVICES")
    elif wrong := _let_through(facts)[1]:
        value = f"{shown} {'; '.join(wrong.values())}"
        yield Finding(id="visible-devices", status="fail", value=value, hint=f"unset {' '.join(wrong)}")
    else:
        yield Finding(id="visible-devices", status="ok", value=shown)


def _let_through(facts: MachineFacts) -> tuple[list[int | str], dict[str, str]]:
    """
    GPUs that the environment leaves, by number among those that are driven or by name, and what is wrong with a list,
    by its variable. HIP's numbers, or CUDA's where it has none, count within what ROCR's list leaves.
    """
    left: list[int | str] = list(range(len(_driven(facts)) if facts.amd else len(facts.gpus)))
    wrong: dict[str, str] = {}
    inner = "HIP_VISIBLE_DEVICES" if facts.amd and "HIP_VISIBLE_DEVICES" in facts.host.env else "CUDA_VISIBLE_DEVICES"
    for name in ("ROCR_VISIBLE_DEVICES", inner) if facts.amd else (inner,):
        if name in facts.host.env:
            selected, problem = _listed(facts.host.env[name], len(left))
            left = [left[one] if isinstance(one, int) else one for one in selected]
            wrong |= {name: problem} if problem else {}
    return left, wrong


def _listed(value: str, count: int) -> tuple[list[int | str], str]:
    """What a list of so many GPUs takes, in its order, and what is wrong with it. Names are not looked into."""
    selected: list[int | str] = []
    for word in (one.strip() for one in value.split(",")):
        if word == "-1":  # ends the list
            break
        gpu = int(word) if re.fullmatch("[0-9]+", word) else word
        if isinstance(gpu, str) and not gpu.startswith(("GPU-", "MIG-")):
            return selected, f"has {word!r}, which is neither a number nor a name of a GPU"
        if isinstance(gpu, int) and gpu >= count:
            return selected, f"names a GPU that does not exist: {count} are visible"
        if gpu in selected:
            return selected, f"names {word} twice, which hides every GPU or all later GPUs"
        selected.append(gpu)
    return selected, ""


def _driven(facts: MachineFacts) -> list[Gpu]:
    return [gpu for gpu in facts.amd if gpu.target] or facts.amd


def mixed(facts: MachineFacts) -> Iterator[Finding]:
    """Programs take a CPU's small integrated GPU for a second card, and often list it first."""
    if not facts.amd:
        return
    driven = _driven(facts)
    small = [gpu for gpu in driven if gpu.integrated]
    cards = [number for number, gpu in enumerate(driven) if gpu.target and not gpu.integrated]
    selected = [driven[one] for one in _let_through(facts)[0] if isinstance(one, int)]
    if small and cards and any(gpu.integrated for gpu in selected):
        value = f"the integrated GPU {small[0].target} is visible, next to the card {driven[cards[0]].target}"
        if len(selected) == 1:
            value = f"only the integrated GPU {small[0].target} is visible, not the card {driven[cards[0]].target}"
        hint = f"export HIP_VISIBLE_DEVICES={','.join(map(str, cards))}"
        if "ROCR_VISIBLE_DEVICES" in facts.host.env:
            hint = f"unset ROCR_VISIBLE_DEVICES; {hint}"
        yield Finding(id="mixed-gpus", status="warn", value=value, hint=hint)


def allocator(facts: MachineFacts) -> Iterator[Finding]:
    """The settings that reach torch's allocator: a line for another shell sets none, or an invalid value."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    variables = {name: facts.host.env[name] for name in names if name in facts.host.env}
    pair = r"\s*[a-z][a-z0-9_]*\s*:[^,:]+"
    wrong = [name for name, value in variables.items() if not re.fullmatch(rf"{pair}(?:,{pair})*", value)]
    if variables:
        value = ", ".join(f"{name}={value!r}" for name, value in variables.items())
        if wrong:
            value = f"{value}: torch accepts only the form name:value,name:value"
        hint = f"unset {' '.join(wrong)}" if wrong else ""
        yield Finding(id="allocator", status="warn" if wrong else "ok", value=value, hint=hint)


def gtt(facts: MachineFacts) -> Iterator[Finding]:
    """An integrated GPU gets half of the memory unless a kernel option says otherwise."""
    ram = physical_bytes(facts.host)
    if not ram or not facts.amd or not all(gpu.integrated for gpu in facts.amd):
        return
    pages = int(GTT_SHARE * ram / GIB) * (GIB // 4096)
    line = f"ttm.pages_limit={pages} ttm.page_pool_size={pages}"
    hint = _boot_with(line)
    for gpu in facts.amd:
        folder = _card(facts, gpu)
        shared = facts.host.number(f"{folder}/mem_info_gtt_total")
        own = facts.host.number(f"{folder}/mem_info_vram_total")
        if shared is None or own is None:
            continue
        value = f"{gpu.target} can use {(shared + own) / GIB:.0f} GiB; the machine has {ram / GIB:.0f} GiB"
        enough = own > ram / 4 or shared > 0.55 * ram
        yield Finding(id="gtt", status="ok" if enough else "warn", value=value, hint="" if enough else hint)
    if size := facts.host.boot_options.get("amdgpu.gttsize"):
        value = f"amdgpu.gttsize={size} is obsolete; ttm.pages_limit sets the limit"
        hint = (
            f"sudo sed -i 's/ *amdgpu.gttsize=[0-9]*//' /etc/default/grub && sudo update-grub   # keep or add: {line}"
        )
        yield Finding(id="gttsize", status="warn", value=value, hint=hint)


def _boot_with(options: str) -> str:
    """The line that adds options to the kernel's command line, where GRUB starts it."""
    edit = f's/^GRUB_CMDLINE_LINUX="/&{options} /'
    return f"sudo sed -i '{edit}' /etc/default/grub && sudo update-grub   # then reboot"


def _card(facts: MachineFacts, gpu: Gpu) -> str:
    """The folder of a GPU's driver; by its render node or, without one, the first of its maker that tells of memory."""
    folder = f"sys/class/drm/{Path(gpu.render).name}/device"
    if facts.host.exists(f"{folder}/mem_info_gtt_total"):
        return folder
    cards = [f"sys/class/drm/{card}/device" for card in facts.host.names("sys/class/drm") if card.startswith("card")]
    made_by = (card for card in cards if PCI_MAKERS.get((facts.host.read(f"{card}/vendor") or "").strip()) == "amd")
    return next((card for card in made_by if facts.host.exists(f"{card}/mem_info_gtt_total")), folder)


def several(facts: MachineFacts) -> Iterator[Finding]:
    """What GPUs need to speak with each other."""
    host = facts.host
    if len([gpu for gpu in facts.amd if not gpu.integrated]) < 2:
        return
    groups = "sys/kernel/iommu_groups"
    kinds = {(host.read(f"{groups}/{group}/type") or "").strip() for group in host.names(groups)}
    if any(kind.startswith("DMA") for kind in kinds) and host.boot_options.get("iommu") != "pt":
        hint = _boot_with("iommu=pt")
        value = "the IOMMU translates addresses between the GPUs, which can hang them"
        yield Finding(id="iommu", status="warn", value=value, hint=hint)
    filtered = re.search(r"^Seccomp:\s*2\s*$", host.read("proc/self/status") or "", re.MULTILINE)
    if filtered and in_container(host):
        value = "the container does not let processes share GPU memory"
        yield Finding(id="seccomp", status="warn", value=value, hint=CONTAINER_FLAGS)


def kernel_log(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the kernel log reports a GPU that hung. No finding where the log cannot be read."""
    if not facts.gpus:
        return
    reply = facts.host.run(["journalctl", "--dmesg", "--lines=5000", "--no-pager", "--quiet"], 10.0)
    lines = KERNEL_TROUBLE.findall(reply.out)
    if lines:
        value = f"GPU errors: {len(lines)}; latest: {lines[-1].strip()[-100:]}"
        hint = "sudo apt update && sudo apt full-upgrade linux-firmware   # also install a newer kernel; then reboot"
        if "NVRM" in lines[-1]:
            hint = (
                "sudo ubuntu-drivers install   # installs a newer driver; then reboot. "
                "If errors return, check the card, its power and its slot"
            )
        yield Finding(id="kernel-log", status="warn", value=value, hint=hint)


def reachable(facts: MachineFacts, maker: Maker) -> list[Gpu]:
    """The GPUs of a maker that have a device node here; all of them where none has one, or nodes tell nothing."""
    gpus = [gpu for gpu in facts.gpus if gpu.maker == maker]
    if in_wsl(facts.host):
        return gpus
    if maker == "nvidia":
        return gpus[: len(_nvidia_numbers(facts.host)) or None]
    return [gpu for gpu in gpus if not gpu.render or facts.host.exists(gpu.render)] or gpus


def amd_nodes(facts: MachineFacts) -> Iterator[Finding]:
    targets = [gpu for gpu in facts.amd if gpu.target]
    if not targets or in_wsl(facts.host):
        return
    host = facts.host
    nodes = ["dev/kfd", *dict.fromkeys(gpu.render for gpu in targets if gpu.render)]
    absent = [node for node in nodes if not host.exists(node)]
    closed = [node for node in nodes if node not in absent and not host.opens(node)]
    usable = [node for node in nodes if node not in absent and node not in closed]
    groups = {"missing": absent, "no permission": closed}
    problems = "; ".join(f"{what}: {_paths(found)}" for what, found in groups.items() if found)
    if not problems:
        yield Finding(id="amd-device-nodes", status="ok", value="accessible")
        return
    owners = {node.group for name in closed if (node := host.node(name))}
    names = [group_name(host, number) or str(number) for number in sorted(owners)]
    problems += f" (group {', '.join(names)})" if names else ""
    group_names = dict.fromkeys([*(name for name in names if not name.isdigit()), "render", "video"])
    hint = f'sudo usermod -aG {",".join(group_names)} "$USER"   # then log in again'
    partly = "dev/kfd" in usable and len(usable) > 1
    if absent:
        hint = "sudo dmesg | grep -i amdgpu   # shows why nodes are missing" if partly else "sudo modprobe amdgpu"
    if in_container(host):
        hint = _of_a_pod("amd") if in_pod(host) else CONTAINER_FLAGS
    if partly:
        value = f"accessible: {_paths(usable[1:])}; {problems}"
        is_chosen = in_container(host) and not closed  # somebody chose what it gets
        yield Finding(
            id="amd-device-nodes", status="ok" if is_chosen else "warn", value=value, hint="" if is_chosen else hint
        )
        return
    yield Finding(id="amd-device-nodes", status="fail", value=problems, hint=hint)


def nvidia_nodes(facts: MachineFacts) -> Iterator[Finding]:
    if not any(gpu.maker == "nvidia" for gpu in facts.gpus) or in_wsl(facts.host):
        return
    host = facts.host
    inside = in_container(host)
    lend = _of_a_pod("nvidia") if in_pod(host) else "docker run --gpus all …"
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", host.read("proc/driver/nvidia/version") or "")
    if version is None:
        hint = lend if inside else "sudo ubuntu-drivers install   # then reboot"
        served = maker_to_serve(facts.gpus) == "nvidia"
        value = "no driver for the NVIDIA GPU"
        yield Finding(id="nvidia-driver", status="fail" if served else "warn", value=value, hint=hint)
        return
    there = _nvidia_numbers(host)
    needed = ("dev/nvidiactl", "dev/nvidia-uvm") if there else ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm")
    absent = [node for node in needed if not host.exists(node)]
    missing = [f"dev/nvidia{number}" for number in _nvidia_listed(facts) if number not in there]
    missing = missing[: max(0, len(_nvidia_listed(facts)) - len(there))] if there else []
    value = f"driver {version[1]}"
    if absent:
        value = f"{value}; missing: {_paths(absent)}"
        yield Finding(
            id="nvidia-driver", status="fail", value=value, hint=lend if inside else "sudo nvidia-modprobe -c 0 -u"
        )
    elif missing:
        present = _paths([f"dev/nvidia{number}" for number in there])
        value = f"{value}; present: {present}; missing: {_paths(missing)}"
        hint = " && ".join(f"sudo nvidia-modprobe -c {node.removeprefix('dev/nvidia')}" for node in missing)
        yield Finding(id="nvidia-driver", status="ok" if inside else "warn", value=value, hint="" if inside else hint)
    else:
        yield Finding(id="nvidia-driver", status="ok", value=value)


def _nvidia_numbers(host: Host) -> list[int]:
    """Of the GPUs that have a node."""
    return [int(name.removeprefix("nvidia")) for name in host.names("dev") if re.fullmatch(r"nvidia\d+", name)]


def _nvidia_listed(facts: MachineFacts) -> list[int]:
    """The numbers that the driver gives its GPUs; where it does not tell, they are counted."""
    matches = [re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE) for text in nvidia_files(facts.host)]
    return sorted(int(one[1]) if one else number for number, one in enumerate(matches))


def _paths(nodes: Sequence[str]) -> str:
    return ", ".join(f"/{node}" for node in nodes)


def _of_a_pod(maker: Maker) -> str:
    return f"resources: {{limits: {{{maker}.com/gpu: 1}}}}   # of the container, in the pod's description"
