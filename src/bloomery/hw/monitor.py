"""
Use, memory, power and temperature of this machine's GPUs while a run trains: read by a thread, at an interval.

    amdgpu's files below /sys/class/drm, else amd-smi, else rocm-smi      NVML by nvidia-ml-py, else nvidia-smi

Files come first, since nothing has to be started for them. A tool that does not answer in time is ended. It is then
left alone, like one whose answer cannot be read, and a message names it once. A number that no GPU can have is left
out. Where no driver shows a GPU, no thread starts and no tool is looked for.

Sources: the Linux kernel's Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst, NVML's API reference, and the
JSON that amd-smi 26 and rocm-smi 4 print.
"""

import csv
import importlib
import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bloomery.core.errors import BloomeryError, shorten
from bloomery.core.io import disk_errors
from bloomery.core.log import info
from bloomery.hw.host import Host

Reading = dict[str, float]
"""Of one GPU: what is known of `RANGES`."""
RANGES = {
    "use": (0.0, 1.0),
    "memory_bytes": (0.0, 2.0**42),
    "power_watts": (0.0, 5000.0),
    "temperature_celsius": (-50.0, 150.0),
}
"""What a GPU tells, and which numbers are no mistake."""
HEIGHTS = ("memory_bytes", "temperature_celsius")
"""Of these a line of metrics has the largest since the last line, of use and power the mean."""
ANSWER_SECONDS = 10.0
MAX_GPUS, MAX_ANSWER = 64, 2**20
SMALL_MEMORY_BYTES = 2**32
"""Integrated GPUs have so little memory of their own, and train in that of the system."""
Source = Callable[[Host], Mapping[str, Reading]]


class GpuMonitor:
    """Readings of all GPUs while its block runs. `take` gives what came since it was last asked."""

    def __init__(self, every_seconds: float, table: Path | None = None, host: Host | None = None) -> None:
        """`table` is a CSV file that gets each reading. With 0 seconds, nothing is read."""
        self._host, self._every, self._table = host or Host.here(), every_seconds, table
        self._sources = sources(self._host) if every_seconds else []
        self._since: dict[str, dict[str, list[float]]] = {}
        """GPU -> of each number since the last call of `take`: how many readings, their sum, and the largest."""
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._said: set[str] = set()
        self._asked: float | None = None
        """Since when a source is being asked."""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuMonitor":
        if self._sources:
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ends.set()
        if self._sources:  # a library that hangs cannot be ended, but the process can
            self._thread.join(timeout=1.0)

    def take(self) -> dict[str, Reading]:
        """GPU -> mean use and power, largest memory and temperature, since the last call; nothing where none came."""
        asked = self._asked
        if asked is not None and time.monotonic() - asked > 3 * ANSWER_SECONDS:
            self._say("the library that reads GPUs does not respond; GPUs are no longer monitored")
        with self._lock:
            since, self._since = self._since, {}
        return {
            gpu: {
                name: round(numbers[name][2] if name in HEIGHTS else numbers[name][1] / numbers[name][0], 3)
                for name in RANGES
                if name in numbers
            }
            for gpu, numbers in since.items()
        }

    def _watch(self) -> None:
        while self._sources and not self._ends.wait(self._every):
            for options in self._sources:
                self._read(options)
            self._sources = [options for options in self._sources if options]

    def _read(self, options: list[Source]) -> None:
        """Ask the first source that answers. Those that do not are dropped."""
        while options and not self._ends.is_set():
            self._asked = time.monotonic()
            try:
                readings = options[0](self._host)
            except _UnreadableError as error:
                if str(error):
                    self._say(f"{error}; it is not asked again")
                del options[0]
                continue
            finally:
                self._asked = None
            if self._ends.is_set():  # the table is part of a finished stage
                return
            kept = {gpu: self._plausible(gpu, reading) for gpu, reading in list(readings.items())[:MAX_GPUS]}
            with self._lock:
                for gpu, reading in kept.items():
                    numbers = self._since.setdefault(gpu, {})
                    for name, value in reading.items():
                        count, total, largest = numbers.get(name, (0, 0.0, value))
                        numbers[name] = [count + 1, total + value, max(largest, value)]
            self._write(kept)
            return

    def _plausible(self, gpu: str, reading: Reading) -> Reading:
        plausible = Reading()
        for name, value in reading.items():
            if RANGES[name][0] <= value <= RANGES[name][1]:
                plausible[name] = value
            else:
                self._say(f"{gpu} reports {name}={value:g}, which is impossible; such values are ignored")
        return plausible

    def _write(self, readings: Mapping[str, Reading]) -> None:
        if self._table is None:
            return
        try:
            with disk_errors(self._table):
                new = not self._table.exists()
                with self._table.open("a", encoding="utf-8", newline="") as file:
                    rows = csv.writer(file)
                    if new:
                        rows.writerow(["time", "gpu", *RANGES])
                    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    rows.writerows([now, gpu, *(one.get(name) for name in RANGES)] for gpu, one in readings.items())
        except BloomeryError as error:
            self._say(f"{error.what}; the table of GPUs ends here")
            self._table = None

    def _say(self, text: str) -> None:
        """Once."""
        if text.partition("=")[0] not in self._said:
            self._said.add(text.partition("=")[0])
            info(text, "yellow")


class _UnreadableError(Exception):
    """A source that cannot be used, and why; "" where it is only not there."""


def sources(host: Host) -> list[list[Source]]:
    """For each maker whose driver is there: what can be asked, the best first."""
    asked = list[list[Source]]()
    if cards := _amd_cards(host):
        asked.append([partial(_amdgpu, cards=cards), _amd_smi, _rocm_smi])
    elif host.exists("dev/kfd"):
        asked.append([_amd_smi, _rocm_smi])
    if host.exists("proc/driver/nvidia/version") or host.exists("usr/lib/wsl/lib/libcuda.so.1"):
        asked.append([_nvml, _nvidia_smi])
    return asked


def _amd_cards(host: Host) -> list[str]:
    names = [name for name in host.names("sys/class/drm") if re.fullmatch(r"card\d{1,9}", name)]
    cards = [f"sys/class/drm/{name}/device" for name in sorted(names, key=lambda name: int(name[4:]))]
    return [card for card in cards if _busy(host, card) is not None]


def _busy(host: Host, card: str) -> int | None:
    """How many percent of the time a card is busy; None where it is not there."""
    return host.number(f"{card}/gpu_busy_percent")


def _amdgpu(host: Host, cards: Sequence[str]) -> dict[str, Reading]:
    """Of the cards that were there when the monitor began: a card keeps its name when another one vanishes."""
    read = {
        f"amd{index}": _amdgpu_card(host, card, busy)
        for index, card in enumerate(cards)
        if (busy := _busy(host, card)) is not None
    }
    if not read:
        raise _UnreadableError("the files of amdgpu are gone")
    return read


def _amdgpu_card(host: Host, card: str, busy: int) -> Reading:
    sensors = [f"{card}/hwmon/{name}" for name in host.names(f"{card}/hwmon")]
    memory, whole = host.number(f"{card}/mem_info_vram_used"), host.number(f"{card}/mem_info_vram_total")
    if memory is not None and whole is not None and whole <= SMALL_MEMORY_BYTES:
        memory += host.number(f"{card}/mem_info_gtt_used") or 0
    powers = (f"{sensor}/{name}" for sensor in sensors for name in ("power1_average", "power1_input"))
    temperatures = (f"{sensor}/temp{number}_input" for sensor in sensors for number in (1, 2))
    return _known(
        use=(busy, 0.01),
        memory_bytes=(memory, 1),
        power_watts=(_first(host, powers), 1e-6),
        temperature_celsius=(_first(host, temperatures), 1e-3),
    )


def _first(host: Host, names: Any) -> int | None:
    """The first of some files that holds a number."""
    return next((value for name in names if (value := host.number(name)) is not None), None)


def _known(**values: tuple[Any, float]) -> Reading:
    """Those that are numbers, or their text, each times its factor. A tool says "N/A" for others."""
    known = Reading()
    for name, (value, factor) in values.items():
        number: Any = value.get("value") if isinstance(value, Mapping) else value
        with suppress(TypeError, ValueError, OverflowError):
            known[name] = float(number) * factor
    return known


def _answer(host: Host, command: Sequence[str]) -> str:
    reply = host.run(command, ANSWER_SECONDS)
    if reply.code is None:
        raise _UnreadableError(f"{command[0]} did not respond within {ANSWER_SECONDS:.0f} s and was stopped")
    if reply.code == 127:
        raise _UnreadableError
    if reply.code != 0:
        raise _UnreadableError(f"{command[0]} ended with exit code {reply.code}: {shorten(reply.err.strip(), 80)}")
    return reply.out[:MAX_ANSWER]


def _json(host: Host, command: Sequence[str]) -> Any:
    """The first JSON at the start of a line: tools may print warnings before and after it."""
    text = _answer(host, command)
    for start in re.finditer(r"^\s*[\[{]", text, re.MULTILINE):
        with suppress(ValueError, RecursionError):
            return json.JSONDecoder().raw_decode(text, start.end() - 1)[0]
    raise _UnreadableError(f"{command[0]} answered {shorten(text.strip(), 60)!r}, which is not JSON")


def _amd_smi(host: Host) -> dict[str, Reading]:
    tree = _json(host, ["amd-smi", "metric", "--usage", "--power", "--temperature", "--mem-usage", "--json"])
    rows = tree.get("gpu_data") if isinstance(tree, Mapping) else tree
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise _UnreadableError("amd-smi did not answer with a list of GPUs")
    return {f"amd{row.get('gpu', index)}": _amd_smi_gpu(row) for index, row in enumerate(rows)}


def _amd_smi_gpu(row: Mapping[str, Any]) -> Reading:
    groups = {name: value for name, value in row.items() if isinstance(value, Mapping)}

    def value(group: str, *names: str) -> Any:
        numbers = (groups.get(group, {}).get(name) for name in names)
        return next((number for number in numbers if number not in (None, "N/A")), None)

    return _known(
        use=(value("usage", "gfx_activity"), 0.01),
        memory_bytes=(value("mem_usage", "used_vram"), 2**20),
        power_watts=(value("power", "socket_power"), 1),
        temperature_celsius=(value("temperature", "edge", "hotspot"), 1),
    )


def _rocm_smi(host: Host) -> dict[str, Reading]:
    words = ["--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json"]
    tree = _json(host, ["rocm-smi", *words])
    if not isinstance(tree, Mapping):
        raise _UnreadableError("rocm-smi did not answer with GPUs by name")
    cards = {name: row for name, row in tree.items() if re.fullmatch(r"card\d+", name) and isinstance(row, Mapping)}
    return {f"amd{name[4:]}": _rocm_smi_card(row) for name, row in cards.items()}


def _rocm_smi_card(row: Mapping[str, Any]) -> Reading:
    def value(*patterns: str) -> Any:
        keys = (key for pattern in patterns for key in row if re.fullmatch(pattern, key))
        return next((row[key] for key in keys if row[key] not in (None, "N/A")), None)

    return _known(
        use=(value(r"GPU use \(%\)"), 0.01),
        memory_bytes=(value(r"VRAM Total Used Memory \(B\)"), 1),
        power_watts=(value(r"(Average|Current Socket) Graphics Package Power \(W\)"), 1),
        temperature_celsius=(value(r"Temperature \(Sensor edge\) \(C\)", r"Temperature \(Sensor junction\) \(C\)"), 1),
    )


def _nvidia_smi(host: Host) -> dict[str, Reading]:
    fields = "index,utilization.gpu,memory.used,power.draw,temperature.gpu"
    text = _answer(host, ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    cells = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in cells if len(row) == 5 and row[0].isdecimal()]  # a GPU that fails has a line of its own
    if not rows:
        raise _UnreadableError(f"nvidia-smi answered {shorten(text.strip(), 60)!r}, which is not a table of GPUs")
    names, factors = tuple(RANGES), (0.01, 2**20, 1, 1)
    return {
        f"nvidia{row[0]}": _known(**dict(zip(names, zip(row[1:], factors, strict=True), strict=True))) for row in rows
    }


def _nvml(host: Host) -> dict[str, Reading]:
    if importlib.util.find_spec("pynvml") is None or host.root != Path("/"):
        raise _UnreadableError
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()  # counts how often, and is cheap after the first time
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {f"nvidia{index}": _nvml_gpu(nvml, gpu) for index, gpu in enumerate(gpus)}
    except nvml.NVMLError as error:
        raise _UnreadableError(f"NVML failed: {error}") from None


def _nvml_gpu(nvml: Any, gpu: Any) -> Reading:
    asked: dict[str, tuple[Callable[[], Any], float]] = {
        "use": (lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, 0.01),
        "memory_bytes": (lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used, 1),
        "power_watts": (lambda: nvml.nvmlDeviceGetPowerUsage(gpu), 1e-3),
        "temperature_celsius": (lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU), 1),
    }
    reading = Reading()
    for name, (ask, factor) in asked.items():
        with suppress(nvml.NVMLError):  # laptops do not tell their power
            reading[name] = ask() * factor
    return reading
