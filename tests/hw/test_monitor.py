import csv
import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.hw import monitor
from bloomery.hw.host import CommandResult, Host, run_here
from bloomery.hw.monitor import GpuMonitor

CARD = "sys/class/drm/card1/device"
DISCRETE = {
    "gpu_busy_percent": "97\n",
    "mem_info_vram_used": "17163091968\n",
    "mem_info_vram_total": "25753026560\n",
    "mem_info_gtt_used": "1000\n",
    "hwmon/hwmon3/power1_average": "303000000\n",
    "hwmon/hwmon3/temp1_input": "61000\n",
    "hwmon/hwmon3/temp2_input": "75000\n",
}
INTEGRATED = {
    "gpu_busy_percent": "5\n",
    "mem_info_vram_used": "100\n",
    "mem_info_vram_total": "536870912\n",
    "mem_info_gtt_used": "9000\n",
    "hwmon/hwmon0/power1_input": "14000000\n",
}
ROCM_SMI = {
    "card0": {
        "Temperature (Sensor edge) (C)": "38.0",
        "Temperature (Sensor junction) (C)": "44.0",
        "Average Graphics Package Power (W)": "41.0",
        "GPU use (%)": "12",
        "VRAM Total Memory (B)": "34342961152",
        "VRAM Total Used Memory (B)": "7028736",
    },
    "card1": {
        "Temperature (Sensor edge) (C)": "N/A",
        "Temperature (Sensor junction) (C)": "50.0",
        "Current Socket Graphics Package Power (W)": "200.5",
        "GPU use (%)": "N/A",
    },
    "system": {"Driver version": "6.12"},
}
AMD_SMI_GPU = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 88, "unit": "%"}, "umc_activity": {"value": 3, "unit": "%"}},
    "power": {"socket_power": {"value": 700, "unit": "W"}},
    "temperature": {"edge": "N/A", "hotspot": {"value": 66, "unit": "C"}},
    "mem_usage": {"used_vram": {"value": 2048, "unit": "MB"}},
}
NVIDIA_SMI = "0, 99, 40000, 651.32, 64\n1, 0, [N/A], [Not Supported], 31\n"


def machine(
    folder: Path, files: Mapping[str, str] | None = None, replies: Mapping[str, CommandResult] | None = None
) -> Host:
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def run(command: Sequence[str], seconds: float) -> CommandResult:
        return (replies or {}).get(command[0], CommandResult(code=127))

    return Host(root=folder, run=run)


def readings(host: Host, table: Path | None = None, times: int = 1) -> dict[str, dict[str, float]]:
    """What a monitor has after so many rounds, without its thread."""
    watch = GpuMonitor(1, table, host)
    for _ in range(times):
        for options in watch._sources:
            watch._read(options)
    return watch.take()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines = list[str]()
    monkeypatch.setattr(monitor, "info", lambda text, style="": lines.append(text))
    return lines


def amd(files: Mapping[str, str], card: str = CARD) -> dict[str, str]:
    return {f"{card}/{name}": text for name, text in files.items()}


NVIDIA = {"proc/driver/nvidia/version": "580"}


@pytest.mark.parametrize(
    ("files", "replies", "expected"),
    [
        (
            amd(DISCRETE) | amd(INTEGRATED, "sys/class/drm/card10/device"),
            {},
            {
                "amd0": {"use": 0.97, "memory_bytes": 17163091968, "power_watts": 303, "temperature_celsius": 61},
                "amd1": {"use": 0.05, "memory_bytes": 9100, "power_watts": 14},
            },
        ),
        (
            {"dev/kfd": ""},
            {"amd-smi": json.dumps({"gpu_data": [AMD_SMI_GPU]})},
            {"amd0": {"use": 0.88, "memory_bytes": 2**31, "power_watts": 700, "temperature_celsius": 66}},
        ),
        (
            {"dev/kfd": ""},
            {"amd-smi": json.dumps([AMD_SMI_GPU])},
            {"amd0": {"use": 0.88, "memory_bytes": 2**31, "power_watts": 700, "temperature_celsius": 66}},
        ),
        (
            {"dev/kfd": ""},
            {
                "rocm-smi": "WARNING: AMD GPU device(s) is/are in a low-power state\n"
                "ERROR: GPU[0]\t: sensor: Not supported\n" + json.dumps(ROCM_SMI) + "\nsee the log\n"
            },
            {
                "amd0": {"use": 0.12, "memory_bytes": 7028736, "power_watts": 41, "temperature_celsius": 38},
                "amd1": {"power_watts": 200.5, "temperature_celsius": 50},
            },
        ),
        (
            NVIDIA,
            {"nvidia-smi": NVIDIA_SMI + "\nUnable to determine the device handle for GPU2: Unknown Error\n"},
            {
                "nvidia0": {
                    "use": 0.99,
                    "memory_bytes": 40000 * 2**20,
                    "power_watts": 651.32,
                    "temperature_celsius": 64,
                },
                "nvidia1": {"use": 0.0, "temperature_celsius": 31},
            },
        ),
    ],
)
def test_each_source_tells_the_same_four_numbers_in_the_same_units(
    tmp_path: Path, files: dict[str, str], replies: dict[str, str], expected: dict[str, Any], said: list[str]
) -> None:
    host = machine(tmp_path, files, {name: CommandResult(code=0, out=out) for name, out in replies.items()})
    assert readings(host) == expected
    assert said == []


def test_a_gpu_keeps_its_name_when_another_one_vanishes(tmp_path: Path, said: list[str]) -> None:
    """Cards count in the order of their numbers, so card10 comes after card2."""
    power = {1: "100", 2: "200", 10: "300"}
    for card, watts in power.items():
        files = DISCRETE | {"hwmon/hwmon3/power1_average": f"{watts}000000\n"}
        host = machine(tmp_path, amd(files, f"sys/class/drm/card{card}/device"))
    watch = GpuMonitor(1, None, host)
    watch._read(watch._sources[0])
    assert {gpu: one["power_watts"] for gpu, one in watch.take().items()} == {"amd0": 100, "amd1": 200, "amd2": 300}
    shutil.rmtree(tmp_path / CARD)
    watch._read(watch._sources[0])
    assert {gpu: one["power_watts"] for gpu, one in watch.take().items()} == {"amd1": 200, "amd2": 300}
    smi = {"amd-smi": [AMD_SMI_GPU | {"gpu": 3}], "rocm-smi": {"card3": ROCM_SMI["card0"]}}
    for tool, reply in smi.items():
        host = machine(tmp_path / tool, {"dev/kfd": ""}, {tool: CommandResult(code=0, out=json.dumps(reply))})
        assert list(readings(host)) == ["amd3"]
    assert said == []


def test_what_a_monitor_keeps_does_not_grow_with_its_readings(tmp_path: Path) -> None:
    watch, sizes = GpuMonitor(1, None, machine(tmp_path, amd(DISCRETE))), set()
    for _ in range(20):
        watch._read(watch._sources[0])
        sizes.add(len(pickle.dumps(watch._since)))
    assert len(sizes) == 1
    assert watch.take()["amd0"]["power_watts"] == 303


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (CommandResult(code=None), "nvidia-smi did not respond within 10 s and was stopped; it is not asked again"),
        (
            CommandResult(code=9, err="NVIDIA-SMI has failed\n"),
            "nvidia-smi ended with exit code 9: NVIDIA-SMI has failed",
        ),
        (CommandResult(code=0, out="Failed to initialize NVML"), "nvidia-smi answered 'Failed to initialize NVML'"),
        (CommandResult(code=0, out=""), "nvidia-smi answered ''"),
        (CommandResult(code=127), None),
    ],
)
def test_a_tool_that_hangs_or_babbles_is_named_once_and_left_alone(
    tmp_path: Path, reply: CommandResult, message: str | None, said: list[str]
) -> None:
    asked = []

    def run(command: Sequence[str], seconds: float) -> CommandResult:
        asked.append(command[0])
        assert seconds == monitor.ANSWER_SECONDS
        return reply

    host = Host(root=machine(tmp_path, NVIDIA).root, run=run)
    assert readings(host, times=3) == {}
    assert asked == ["nvidia-smi"]
    assert [line[: len(message)] for line in said if message] == ([message] if message else [])


def test_numbers_that_no_gpu_has_are_named_once_and_left_out(tmp_path: Path, said: list[str]) -> None:
    lies = {**DISCRETE, "gpu_busy_percent": "65535\n", "hwmon/hwmon3/temp1_input": "511000\n"}
    assert set(readings(machine(tmp_path, amd(lies)), times=3)["amd0"]) == {"memory_bytes", "power_watts"}
    assert [line.partition("=")[0] for line in said] == ["amd0 reports use", "amd0 reports temperature_celsius"]


def test_how_busy_a_card_is_is_read_once_for_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, plain, read = machine(tmp_path, amd(DISCRETE)), Host.number, list[str]()

    def number(self: Host, name: str) -> int | None:
        read.append(name)
        return plain(self, name)

    cards = monitor._amd_cards(host)
    monkeypatch.setattr(Host, "number", number)
    assert monitor._amdgpu(host, cards)["amd0"]["use"] == 0.97
    assert sum(name.endswith("gpu_busy_percent") for name in read) == 1


def test_a_line_has_the_mean_of_use_and_power_and_the_largest_memory_and_temperature(tmp_path: Path) -> None:
    host = machine(tmp_path, amd(DISCRETE))
    watch = GpuMonitor(1, None, host)
    for use, power, memory, heat in ((10, 100, 5, 40), (30, 300, 9, 80), (20, 200, 7, 60)):
        files = {"gpu_busy_percent": use, "hwmon/hwmon3/power1_average": power * 10**6, "mem_info_vram_used": memory}
        machine(tmp_path, amd({name: str(value) for name, value in files.items()}))
        machine(tmp_path, amd({"hwmon/hwmon3/temp1_input": str(heat * 1000)}))
        watch._read(watch._sources[0])
    assert watch.take() == {"amd0": {"use": 0.2, "memory_bytes": 9, "power_watts": 200, "temperature_celsius": 80}}
    assert watch.take() == {}


def test_the_table_has_every_reading_and_a_resumed_run_adds_to_it(tmp_path: Path) -> None:
    host, table = machine(tmp_path / "m", amd(DISCRETE)), tmp_path / "gpus.csv"
    readings(host, table, times=2)
    readings(host, table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3
    assert {(row["gpu"], row["use"], row["temperature_celsius"]) for row in rows} == {("amd0", "0.97", "61.0")}


def test_a_full_disk_ends_the_table_and_not_the_run(tmp_path: Path, said: list[str]) -> None:
    host = machine(tmp_path / "m", amd(DISCRETE))
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    assert readings(host, Path("/dev/full"), times=2)["amd0"]["use"] == 0.97
    assert len(said) == 1
    assert said[0].endswith("the table of GPUs ends here")


def test_without_a_gpu_no_thread_starts_and_no_tool_is_asked(tmp_path: Path) -> None:
    def run(command: Sequence[str], seconds: float) -> CommandResult:
        raise AssertionError(command)

    threads = threading.active_count()
    with GpuMonitor(1, None, Host(root=tmp_path, run=run)) as watch:
        assert threading.active_count() == threads
        assert watch.take() == {}
    with GpuMonitor(0, None, machine(tmp_path, amd(DISCRETE))):
        assert threading.active_count() == threads


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the fake tool is a shell script")
def test_a_tool_that_sleeps_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(monitor, "ANSWER_SECONDS", 2.0)
    assert readings(Host(root=machine(tmp_path, NVIDIA).root, run=run_here)) == {}
    assert said == ["nvidia-smi did not respond within 2 s and was stopped; it is not asked again"]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_the_library_of_nvidia_tells_the_same_and_leaves_out_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception): ...

    def refused(gpu: Any) -> int:
        raise NVMLError("Not Supported")

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=123),
        nvmlDeviceGetPowerUsage=refused,
        nvmlDeviceGetTemperature=lambda gpu, kind: 50,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert monitor._nvml(Host(root=Path("/"))) == {
        "nvidia0": {"use": 0.75, "memory_bytes": 123, "temperature_celsius": 50}
    }


def test_a_thread_reads_until_its_block_ends(tmp_path: Path) -> None:
    with GpuMonitor(0.01, None, machine(tmp_path, amd(DISCRETE))) as watch:
        deadline = time.monotonic() + 30
        while not (taken := watch.take()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert taken["amd0"]["use"] == 0.97
    assert not watch._thread.is_alive()
