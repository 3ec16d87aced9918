"""The device nodes through which a process reaches GPUs. A container may be given some of them, and that is enough."""

import re
from collections.abc import Iterator, Sequence

from bloomery.hw.doctor.finding import Facts, Finding
from bloomery.hw.doctor.graphics import CONTAINER_FLAGS
from bloomery.hw.gpus import Gpu, Maker, nvidia_files
from bloomery.hw.host import Host, group_name, in_container, in_pod, in_wsl
from bloomery.hw.wheel import maker_to_serve


def reachable(facts: Facts, maker: Maker) -> list[Gpu]:
    """The GPUs of a maker that have a device node here; all of them where none has one, or nodes tell nothing."""
    gpus = [gpu for gpu in facts.gpus if gpu.maker == maker]
    if in_wsl(facts.host):
        return gpus
    if maker == "nvidia":
        return gpus[: len(_nvidia_numbers(facts.host)) or None]
    return [gpu for gpu in gpus if not gpu.render or facts.host.exists(gpu.render)] or gpus


def amd_nodes(facts: Facts) -> Iterator[Finding]:
    targets = [gpu for gpu in facts.amd if gpu.target]
    if not targets or in_wsl(facts.host):
        return
    host = facts.host
    nodes = ["dev/kfd", *dict.fromkeys(gpu.render for gpu in targets if gpu.render)]
    absent = [node for node in nodes if not host.exists(node)]
    closed = [node for node in nodes if node not in absent and not host.opens(node)]
    usable = [node for node in nodes if node not in absent and node not in closed]
    groups = {"absent": absent, "closed to this user": closed}
    problems = "; ".join(f"{what}: {_paths(found)}" for what, found in groups.items() if found)
    if not problems:
        yield Finding(id="amd-device-nodes", status="ok", value="open to this user")
        return
    owners = {node.group for name in closed if (node := host.node(name))}
    names = [group_name(host, number) or str(number) for number in sorted(owners)]
    problems += f" (of group {', '.join(names)})" if names else ""
    wanted = dict.fromkeys([*(name for name in names if not name.isdigit()), "render", "video"])
    cure = f'sudo usermod -aG {",".join(wanted)} "$USER"   # then log in again'
    partly = "dev/kfd" in usable and len(usable) > 1
    if absent:
        cure = "sudo dmesg | grep -i amdgpu   # why these have no node" if partly else "sudo modprobe amdgpu"
    if in_container(host):
        cure = _of_a_pod("amd") if in_pod(host) else CONTAINER_FLAGS
    if partly:
        value = f"open to this user: {_paths(usable[1:])}; {problems}"
        given = in_container(host) and not closed  # somebody chose what it gets
        yield Finding(id="amd-device-nodes", status="ok" if given else "warn", value=value, cure="" if given else cure)
        return
    yield Finding(id="amd-device-nodes", status="fail", value=problems, cure=cure)


def nvidia_nodes(facts: Facts) -> Iterator[Finding]:
    if not any(gpu.maker == "nvidia" for gpu in facts.gpus) or in_wsl(facts.host):
        return
    host = facts.host
    inside = in_container(host)
    lend = _of_a_pod("nvidia") if in_pod(host) else "docker run --gpus all …"
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", host.read("proc/driver/nvidia/version") or "")
    if version is None:
        cure = lend if inside else "sudo ubuntu-drivers install   # then start again"
        served = maker_to_serve(facts.gpus) == "nvidia"
        value = "an NVIDIA GPU without its driver"
        yield Finding(id="nvidia-driver", status="fail" if served else "warn", value=value, cure=cure)
        return
    there = _nvidia_numbers(host)
    needed = ("dev/nvidiactl", "dev/nvidia-uvm") if there else ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm")
    absent = [node for node in needed if not host.exists(node)]
    missing = [f"dev/nvidia{number}" for number in _nvidia_listed(facts) if number not in there]
    missing = missing[: max(0, len(_nvidia_listed(facts)) - len(there))] if there else []
    value = f"driver {version[1]}"
    if absent:
        value = f"{value}; absent: {_paths(absent)}"
        yield Finding(
            id="nvidia-driver", status="fail", value=value, cure=lend if inside else "sudo nvidia-modprobe -c 0 -u"
        )
    elif missing:
        present = _paths([f"dev/nvidia{number}" for number in there])
        value = f"{value}; there: {present}; absent: {_paths(missing)}"
        cure = " && ".join(f"sudo nvidia-modprobe -c {node.removeprefix('dev/nvidia')}" for node in missing)
        yield Finding(id="nvidia-driver", status="ok" if inside else "warn", value=value, cure="" if inside else cure)
    else:
        yield Finding(id="nvidia-driver", status="ok", value=value)


def _nvidia_numbers(host: Host) -> list[int]:
    """Of the GPUs that have a node."""
    return [int(name.removeprefix("nvidia")) for name in host.names("dev") if re.fullmatch(r"nvidia\d+", name)]


def _nvidia_listed(facts: Facts) -> list[int]:
    """The numbers that the driver gives its GPUs; where it does not tell, they are counted."""
    told = [re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE) for text in nvidia_files(facts.host)]
    return sorted(int(one[1]) if one else number for number, one in enumerate(told))


def _paths(nodes: Sequence[str]) -> str:
    return ", ".join(f"/{node}" for node in nodes)


def _of_a_pod(maker: Maker) -> str:
    return f"resources: {{limits: {{{maker}.com/gpu: 1}}}}   # of the container, in the pod's description"
