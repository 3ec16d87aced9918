"""The GPUs as the kernel's files tell: driven, under their own names, with their memory."""

import re
from collections.abc import Iterator
from pathlib import Path

from bloomery.hw.doctor.finding import GIB, Facts, Finding, Status
from bloomery.hw.gpus import PCI_MAKERS, Gpu, gfx_name, rocminfo_targets
from bloomery.hw.host import in_container, in_wsl, physical_bytes
from bloomery.hw.installed import numbers
from bloomery.hw.wheel import maker_to_serve

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


def graphics(facts: Facts) -> Iterator[Finding]:
    names = [gpu.name or f"{gpu.maker} {gpu.target}".strip() for gpu in facts.gpus]
    counted = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    yield Finding(id="gpu", status="ok", value=", ".join(counted) or "none")


def amd_driver(facts: Facts) -> Iterator[Finding]:
    """Whether the kernel drives AMD's GPUs, and is new enough for them."""
    if not facts.amd or in_wsl(facts.host):
        return
    kernel, host = facts.host.kernel, facts.host
    if not any(gpu.target for gpu in facts.amd):
        value, cure = "an AMD GPU without its compute driver", "sudo modprobe amdgpu"
        if "nomodeset" in host.boot_options:
            value, cure = (
                f"{value}: the kernel was started with nomodeset",
                "sudo sed -i 's/ nomodeset//' /etc/default/grub && sudo update-grub   # then start again",
            )
        elif blocked := _blacklisted(facts):
            value, cure = (
                f"{value}: /{blocked} forbids it",
                f"sudo sed -i '/blacklist amdgpu/d' /{blocked} && sudo modprobe amdgpu",
            )
        elif in_container(host):
            value, cure = f"{value} in this container", CONTAINER_FLAGS
        served = maker_to_serve(facts.gpus) == "amd"
        yield Finding(id="amd-driver", status="fail" if served else "warn", value=value, cure=cure)
        return
    wanted = max((OLDEST_KERNEL.get(gpu.target, (0,)) for gpu in facts.amd), default=(0,))
    version = (host.read("sys/module/amdgpu/version") or "").strip()
    value = f"amdgpu{f' {version}' if version else ''} in kernel {kernel or 'unknown'}"
    if kernel and numbers(kernel)[:2] < wanted:
        value = f"{value}; {', '.join(sorted({gpu.target for gpu in facts.amd}))} needs {'.'.join(map(str, wanted))}"
        cure = "sudo apt install linux-generic-hwe-24.04   # or another newer kernel, then start again"
        yield Finding(id="amd-driver", status="fail", value=value, cure=cure)
        return
    yield Finding(id="amd-driver", status="ok", value=value)


def _blacklisted(facts: Facts) -> str:
    folders = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d")
    places = [f"{folder}/{name}" for folder in folders for name in facts.host.names(folder)]
    said = re.compile(r"^\s*blacklist\s+amdgpu\b", re.MULTILINE)
    return next((place for place in places if said.search(facts.host.read(place) or "")), "")


def hsa_override(facts: Facts) -> Iterator[Finding]:
    """Whether the runtime is told, or believes, another chip than the kernel has found."""
    real = sorted({gpu.target for gpu in facts.amd if gpu.target})
    spoofed = facts.host.env.get("HSA_OVERRIDE_GFX_VERSION")
    if spoofed and facts.amd:
        parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", spoofed)
        named = gfx_name(int(parts[1]) * 10000 + int(parts[2]) * 100 + int(parts[3])) if parts else "no target"
        value = f"{spoofed} stands for {named}; the kernel says {', '.join(real) or 'unknown'}"
        status: Status = "fail" if not real or any(map(WITH_WHEELS.fullmatch, real)) else "warn"
        if real == [named]:
            value, status = f"{spoofed} stands for {named}, which is the chip that is there: it is not needed", "warn"
        yield Finding(id="hsa-override", status=status, value=value, cure="unset HSA_OVERRIDE_GFX_VERSION")
    elif real and not in_wsl(facts.host):
        told = sorted(set(rocminfo_targets(facts.host)))
        if told and not set(told) <= set(real):
            value = f"rocminfo says {', '.join(told)}; the kernel says {', '.join(real)}"
            cure = "sudo apt purge rocminfo hsa-rocr   # the wheel brings a runtime of its own"
            yield Finding(id="rocminfo", status="warn", value=value, cure=cure)


def visible(facts: Facts) -> Iterator[Finding]:
    """Which GPUs the environment lets through. HIP's list wins over CUDA's, and ROCR's comes before both."""
    env = facts.host.env
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    given = {name: env[name] for name in names if name in env}
    if not given or not facts.gpus:
        return
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
    empty = [name for name, value in given.items() if value.strip() in ("", "-1")]
    hip, cuda = given.get("HIP_VISIBLE_DEVICES"), given.get("CUDA_VISIBLE_DEVICES")
    beyond = [name for name, value in given.items() if _beyond(value, len(facts.gpus))]
    if empty:
        cure, value = f"unset {' '.join(empty)}", f"{shown} hides every GPU"
        yield Finding(id="visible-devices", status="warn", value=value, cure=cure)
    elif facts.amd and hip is not None and cuda is not None and hip != cuda:
        value = f"{shown}: the first of them is taken, and the other is silently ignored"
        yield Finding(id="visible-devices", status="warn", value=value, cure="unset CUDA_VISIBLE_DEVICES")
    elif beyond:
        value = f"{shown} names a GPU that is not there: {len(facts.gpus)} are"
        yield Finding(id="visible-devices", status="fail", value=value, cure=f"unset {' '.join(beyond)}")
    else:
        yield Finding(id="visible-devices", status="ok", value=shown)


def _beyond(value: str, count: int) -> bool:
    """Whether a list of numbers holds one that no device has. Names such as GPU-1f2e are not looked into."""
    return any(word.strip().isdigit() and int(word) >= count for word in value.split(","))


def mixed(facts: Facts) -> Iterator[Finding]:
    """A processor's own small GPU beside a card is taken for a second one, and is often the first."""
    small = [gpu for gpu in facts.amd if gpu.integrated]
    cards = [number for number, gpu in enumerate(facts.amd) if gpu.target and not gpu.integrated]
    chosen = {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & facts.host.env.keys()
    if small and cards and not chosen:
        value = f"{small[0].target} inside the processor stands beside {facts.amd[cards[0]].target}"
        cure = f"export HIP_VISIBLE_DEVICES={','.join(map(str, cards))}"
        yield Finding(id="mixed-gpus", status="warn", value=value, cure=cure)


def gtt(facts: Facts) -> Iterator[Finding]:
    """A GPU inside a processor gets half of the memory unless the kernel is told otherwise."""
    ram = physical_bytes(facts.host)
    if not ram or not facts.amd or not all(gpu.integrated for gpu in facts.amd):
        return
    pages = int(GTT_SHARE * ram / GIB) * (GIB // 4096)
    line = f"ttm.pages_limit={pages} ttm.page_pool_size={pages}"
    cure = _boot_with(line)
    for gpu in facts.amd:
        folder = _card(facts, gpu)
        shared = facts.host.number(f"{folder}/mem_info_gtt_total")
        own = facts.host.number(f"{folder}/mem_info_vram_total")
        if shared is None or own is None:
            continue
        value = f"{gpu.target} may use {(shared + own) / GIB:.0f} GiB beside {ram / GIB:.0f} GiB for the processor"
        enough = own > ram / 4 or shared > 0.55 * ram
        yield Finding(id="gtt", status="ok" if enough else "warn", value=value, cure="" if enough else cure)
    if size := facts.host.boot_options.get("amdgpu.gttsize"):
        value = f"amdgpu.gttsize={size} is out of date; ttm.pages_limit sets the limit"
        cure = (
            f"sudo sed -i 's/ *amdgpu.gttsize=[0-9]*//' /etc/default/grub && sudo update-grub   # keep or add: {line}"
        )
        yield Finding(id="gttsize", status="warn", value=value, cure=cure)


def _boot_with(options: str) -> str:
    """The line that adds options to the kernel's command line, where GRUB starts it."""
    edit = f's/^GRUB_CMDLINE_LINUX="/&{options} /'
    return f"sudo sed -i '{edit}' /etc/default/grub && sudo update-grub   # then start again"


def _card(facts: Facts, gpu: Gpu) -> str:
    """The folder of a GPU's driver; by its render node or, without one, the first of its maker that tells of memory."""
    folder = f"sys/class/drm/{Path(gpu.render).name}/device"
    if facts.host.exists(f"{folder}/mem_info_gtt_total"):
        return folder
    cards = [f"sys/class/drm/{card}/device" for card in facts.host.names("sys/class/drm") if card.startswith("card")]
    made_by = (card for card in cards if PCI_MAKERS.get((facts.host.read(f"{card}/vendor") or "").strip()) == "amd")
    return next((card for card in made_by if facts.host.exists(f"{card}/mem_info_gtt_total")), folder)


def several(facts: Facts) -> Iterator[Finding]:
    """What GPUs need to speak with each other."""
    host = facts.host
    if len([gpu for gpu in facts.amd if not gpu.integrated]) < 2:
        return
    groups = "sys/kernel/iommu_groups"
    kinds = {(host.read(f"{groups}/{group}/type") or "").strip() for group in host.names(groups)}
    if any(kind.startswith("DMA") for kind in kinds) and host.boot_options.get("iommu") != "pt":
        cure = _boot_with("iommu=pt")
        value = "the IOMMU translates between the GPUs, which can hang them"
        yield Finding(id="iommu", status="warn", value=value, cure=cure)
    filtered = re.search(r"^Seccomp:\s*2\s*$", host.read("proc/self/status") or "", re.MULTILINE)
    if filtered and in_container(host):
        value = "the container forbids GPUs to share memory between processes"
        yield Finding(id="seccomp", status="warn", value=value, cure=CONTAINER_FLAGS)


def kernel_log(facts: Facts) -> Iterator[Finding]:
    """Whether the kernel tells of a GPU that hung. Where its log may not be read, nothing is said."""
    if not facts.gpus:
        return
    reply = facts.host.run(["journalctl", "--dmesg", "--lines=5000", "--no-pager", "--quiet"], 10.0)
    lines = KERNEL_TROUBLE.findall(reply.out)
    if lines:
        value = f"{len(lines)} lines of trouble; the last: {lines[-1].strip()[-100:]}"
        cure = "sudo apt update && sudo apt full-upgrade linux-firmware   # and a newer kernel, then start again"
        if "NVRM" in lines[-1]:
            cure = (
                "sudo ubuntu-drivers install   # a newer driver, then start again; else the card, its power or its slot"
            )
        yield Finding(id="kernel-log", status="warn", value=value, cure=cure)
