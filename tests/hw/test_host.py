"""A machine is read right from its files, whatever of them is missing or hidden."""

import os
import sys
from pathlib import Path

import pytest

from bloomery.hw.host import Gpu, Host, fast_bf16, find_gpus, gfx_name, in_container, memory_bytes, run_here
from tests.hw.machines import AMD, GIB, GPU_NODES, HYGON, ZEN2, machine, plant


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (110501, "gfx1151"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90006, "gfx906"),
        (100306, "gfx1036"),
        (0, ""),
    ],
)
def test_the_kernels_number_names_the_target_in_hex(number: int, name: str) -> None:
    assert gfx_name(number) == name


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("none", []),
        ("nvidia", [("nvidia", "")]),
        ("strix-halo", [("amd", "gfx1151")]),
        ("7900-xtx", [("amd", "gfx1100")]),
        ("mi300x", [("amd", "gfx942")] * 8),
        ("r9700-and-igpu", [("amd", "gfx1036"), ("amd", "gfx1201")]),
        ("igpu-and-nvidia", [("amd", "gfx1036"), ("nvidia", "")]),
        ("hygon", [("hygon", "")]),
        ("amd-without-kfd", [("amd", "")]),
    ],
)
def test_every_machine_shows_its_gpus(tmp_path: Path, kind: str, found: list[tuple[str, str]]) -> None:
    assert [(gpu.maker, gpu.target) for gpu in find_gpus(machine(tmp_path, kind))] == found


def test_only_a_gpu_inside_a_processor_is_integrated() -> None:
    assert Gpu(maker="amd", target="gfx1151").integrated
    assert not Gpu(maker="amd", target="gfx1100").integrated


def test_a_gpu_knows_the_device_node_that_opens_it(tmp_path: Path) -> None:
    assert [gpu.render for gpu in find_gpus(machine(tmp_path, "mi300x"))][-1] == "dev/dri/renderD135"


def test_a_node_that_a_container_masks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = machine(tmp_path, "mi300x")
    read_text = Path.read_text

    def masked(path: Path, *arguments: str, **options: str) -> str:
        if "/nodes/" in str(path) and path.parent.name not in ("0", "3"):
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", masked)
    assert [gpu.render for gpu in find_gpus(host)] == ["dev/dri/renderD130"]


def test_a_node_of_another_maker_is_no_amd_gpu(tmp_path: Path) -> None:
    host = machine(tmp_path, "igpu-and-nvidia")
    assert sum(gpu.maker == "amd" for gpu in find_gpus(host)) == len(GPU_NODES["igpu-and-nvidia"]) - 1


def test_a_gpu_without_a_driver_is_found_on_the_bus_and_a_bridge_is_none(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    gpu = {f"{bus}/0000:03:00.0/vendor": f"{AMD}\n", f"{bus}/0000:03:00.0/class": "0x030000\n"}
    bridge = {f"{bus}/0000:00:00.0/vendor": f"{HYGON}\n", f"{bus}/0000:00:00.0/class": "0x060000\n"}
    plant(tmp_path, gpu | bridge)
    assert [gpu.maker for gpu in find_gpus(machine(tmp_path, "none"))] == ["amd"]


def test_apple_is_known_by_its_system_and_processor(tmp_path: Path) -> None:
    assert [gpu.maker for gpu in find_gpus(Host(root=tmp_path, system="Darwin", processor="arm64"))] == ["apple"]
    assert find_gpus(Host(root=tmp_path, system="Darwin", processor="x86_64")) == []


def test_bf16_is_fast_only_where_the_processor_multiplies_it(tmp_path: Path) -> None:
    assert fast_bf16(machine(tmp_path / "new", "none"))
    assert not fast_bf16(machine(tmp_path / "old", "none", cpuinfo=ZEN2))
    assert not fast_bf16(Host(root=tmp_path / "no-files"))


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("", {}, 128 * GIB),
        ("0::/\n", {"memory.max": f"{8 * GIB}\n"}, 8 * GIB),
        ("0::/\n", {"memory.max": "max\n"}, 128 * GIB),
        ("0::/user/job\n", {"user/memory.max": f"{6 * GIB}\n", "user/job/memory.max": f"{9 * GIB}\n"}, 6 * GIB),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{5 * GIB}\n"}, 5 * GIB),
        ("4:memory:/elsewhere\n", {"memory/memory.limit_in_bytes": f"{7 * GIB}\n"}, 7 * GIB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, 128 * GIB),
    ],
)
def test_a_control_group_limits_memory(tmp_path: Path, groups: str, limits: dict[str, str], usable: int) -> None:
    host = machine(tmp_path, "none")
    plant(tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})
    assert memory_bytes(host) == usable


def test_a_machine_without_files_says_that_it_does_not_know(tmp_path: Path) -> None:
    host = Host(root=tmp_path)
    assert memory_bytes(host) is None
    assert not in_container(host)


def test_names_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    plant(tmp_path, {f"nodes/{number}/x": "" for number in (10, 9, 1)})
    assert Host(root=tmp_path).names("nodes") == ["1", "9", "10"]


@pytest.mark.slow
def test_a_command_tells_how_it_ended() -> None:
    python = sys.executable
    assert run_here([python, "-c", "print('hello')"], 30.0).out.strip() == "hello"
    assert run_here([python, "-c", "raise SystemExit(3)"], 30.0).code == 3
    assert run_here(["no-such-command-here"], 30.0).code == 127
    late = run_here([python, "-S", "-E", "-c", "import time; print(1, flush=True); time.sleep(60)"], 2.0)
    assert (late.code, late.out.strip()) == (None, "1")


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_crash_is_a_negative_code() -> None:
    assert run_here([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], 30.0).code == -11


def test_this_machine_can_be_read() -> None:
    host = Host.here()
    assert host.python == sys.executable
    assert (memory_bytes(host) or GIB) > 2**20
