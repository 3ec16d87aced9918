"""
Vendor specs of devices: dense matmul FLOP/s by number format, memory, bandwidth. No torch.

A peak here is the maker's clock times what a unit does in a cycle. It is without sparsity, and for what torch calls
one device (of an MI250X that is half of the card). Programs do not reach it. A share of it is called a share of the
spec sheet, never a share of a measured peak. An unknown value is None, and nothing is borrowed from a similar
device.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from bloomery.core.errors import HardwareError

GIB = 2**30
SpecNumber = int | float
VARIANT = re.compile(r"\b(ti|super|laptop|mobile|max-q|nvl|gre|xtx?|d)\b")
"""Words of a name that make another device of it."""
SIZE, SIZE_TOLERANCE = re.compile(r"\b([0-9]{1,4}) ?gi?b\b"), 0.15
"""The memory in a name, and how far a size in decimal units, or less what a driver keeps, may be from an entry's."""
Sure = Literal["read", "computed", "doubtful"]
"""Read in a published table; computed as units times clock, for lack of a table; or an estimate."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    key: str
    names: tuple[str, ...]
    """In lower case. The driver's name of the device contains one of these."""
    memory_bytes: int | None
    bandwidth: float | None
    """Bytes per second."""
    flops: dict[str, float]
    """A second, by number format."""
    source: str
    sure: Sure
    shared: bool = False
    """Whether the memory is that of the whole machine."""
    gtt: bool = False
    """Whether Linux lends it half of that, unless `ttm.pages_limit` says more."""
    gemm: float | None = None
    """FLOP/s that others have measured for matmuls in bfloat16."""
    link: float | None = None
    """Bytes per second to the other devices of its host over all links, in one direction, by its maker."""

    def peak(self, precision: str) -> float | None:
        return self.flops.get(precision)

    @property
    def float8(self) -> bool:
        """Whether it multiplies numbers of 8 bits with a floating point, twice as fast as bfloat16."""
        return self.key in FLOAT8


def _entry(
    key: str,
    name: str,
    memory_gib: SpecNumber | None,
    gigabytes: SpecNumber | None,
    bf16: SpecNumber | None,
    source: str,
    sure: Sure = "read",
    *,
    shared: bool = False,
    gtt: bool = False,
    gemm: SpecNumber | None = None,
    link: SpecNumber | None = None,
    **others: SpecNumber,
) -> Entry:
    """
    `name`: names separated by |. `link`: in 10⁹ bytes per second. Rates: in 10¹² per second; float16 has the rate of
    bf16 unless `others` has one.
    """
    rates = {"bfloat16": bf16, "float16": others.get("fp16", bf16), "float32": others.get("fp32")}
    return Entry(
        key=key,
        names=tuple(name.split("|")),
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        bandwidth=None if gigabytes is None else gigabytes * 1e9,
        flops={form: rate * 1e12 for form, rate in rates.items() if rate is not None},
        source=source,
        sure=sure,
        shared=shared or gtt,
        gtt=gtt,
        gemm=None if gemm is None else gemm * 1e12,
        link=None if link is None else link * 1e9,
    )


HALO = "40 units x 512 a cycle x 2.9 GHz, as rocminfo shows them; measured matmuls reach 30 to 37"
APPLE = "GPU cores x 256 a cycle x clock in float32, from memory; Apple publishes no number"
UNITS = "units x operations a cycle x clock, from memory"
NANOCHAT, TORCH = "nanochat, common.py", "torch, _inductor/analysis/device_info.py"
TITAN, MFU_H = "torchtitan, tools/utils.py", "llm.c's fork for AMD, llmc/mfu.h"


def _apple(chip: str, bandwidth: SpecNumber, rate: SpecNumber) -> Entry:
    key = f"apple-{chip}".replace(" ", "-")
    return _entry(key, f"apple {chip}", None, bandwidth, rate, APPLE, "doubtful", shared=True, fp32=rate)


CATALOG = (
    _entry("strix-halo-128", "8060s", 128, 256, 59.4, HALO, gtt=True, gemm=33.5),
    _entry("strix-halo-96", "8060s", 96, 256, 59.4, HALO, gtt=True, gemm=33.5),
    _entry("strix-halo-64", "8060s", 64, 256, 59.4, HALO, gtt=True, gemm=33.5),
    _entry("strix-halo-8050s", "8050s", None, 256, 45.9, UNITS, "computed", gtt=True),
    _entry("strix-point-890m", "890m", None, 120, 23.8, "units and clock as rocminfo shows them", gtt=True),
    _entry("7900xtx", "7900 xtx", 24, 960, 122.8, MFU_H, link=31.5),
    _entry("7900xt", "7900 xt", 20, 800, 103.0, UNITS, "computed"),
    _entry("w7900", "w7900", 48, 864, 122.6, UNITS, "computed"),
    _entry("9070xt", "9070 xt", 16, 640, 194.6, UNITS, "computed", link=63.0),
    _entry("9070", "rx 9070", 16, 640, 144.5, UNITS, "computed"),
    _entry("9060xt", "9060 xt", 16, 320, 102.6, UNITS, "computed"),
    _entry("r9700", "r9700", 32, 640, 191.4, UNITS, "computed"),
    _entry("mi100", "mi100", 32, 1229, 92.3, UNITS, "computed", fp16=184.6),
    _entry("mi210", "mi210", 64, 1638, 181.0, TORCH, fp32=45.3),
    _entry("mi250x", "mi250x", 64, 1638, 191.5, f"{TITAN}, one of two dies"),
    _entry("mi250", "mi250", 64, 1638, 181.0, f"{NANOCHAT}, one of two dies"),
    _entry("mi300a", "mi300a", 128, 5300, 980.6, TORCH, shared=True, fp32=122.6),
    _entry("mi300x", "mi300x", 192, 5300, 1307.4, TORCH, fp32=163.4, link=448),
    _entry("mi325x", "mi325x", 256, 6000, 1307.4, NANOCHAT, link=448),
    _entry("mi350x", "mi350x", 288, 8000, 2309.6, TORCH, fp32=144.2, link=537.6),
    _entry("mi355x", "mi355x", 288, 8000, 2516.6, NANOCHAT, link=537.6),
    _entry("mi50", "mi50|radeon vii", 16, 1024, None, f"{MFU_H}; it has no units for bfloat16", fp16=26.5),
    _entry("dcu-z100", "z100", 16, 1024, None, "no table of anybody; measure", "doubtful"),
    _entry("dcu-k100", "k100", 64, None, None, "no table of anybody; measure", "doubtful"),
    _entry("dcu-k100-ai", "k100_ai|k100 ai", 64, 896, 196.0, "what sellers say", "doubtful"),
    _entry("rtx-3060", "rtx 3060", 12, 360, 25.5, MFU_H),
    _entry("rtx-3090", "rtx 3090", 24, 936, 71.2, f"{NANOCHAT}; {MFU_H}", link=31.5),
    _entry("rtx-a6000", "rtx a6000", 48, 768, 154.8, TITAN),
    _entry("rtx-4060-ti-16", "rtx 4060 ti", 16, 288, 44.1, MFU_H),
    _entry("rtx-4060-ti-8", "rtx 4060 ti", 8, 288, 44.1, MFU_H),
    _entry("rtx-4070", "rtx 4070", 12, 504, 58.3, MFU_H),
    _entry("rtx-4080", "rtx 4080", 16, 717, 97.5, MFU_H, link=31.5),
    _entry("rtx-4090", "rtx 4090", 24, 1008, 165.2, f"{NANOCHAT}; {MFU_H}", link=31.5),
    _entry("rtx-5060-ti-16", "rtx 5060 ti", 16, 448, 47.4, UNITS, "computed"),
    _entry("rtx-5060-ti-8", "rtx 5060 ti", 8, 448, 47.4, UNITS, "computed"),
    _entry("rtx-5070", "rtx 5070", 12, 672, 61.7, UNITS, "computed"),
    _entry("rtx-5070-ti", "rtx 5070 ti", 16, 896, 87.9, UNITS, "computed"),
    _entry("rtx-5080", "rtx 5080", 16, 960, 112.6, "a measurement's page with units and clock"),
    _entry("rtx-5090", "rtx 5090", 32, 1792, 209.5, NANOCHAT, link=63.0),
    _entry("a100-40", "a100-sxm4-40|a100-pcie-40", 40, 1555, 312.0, NANOCHAT, fp32=19.5, link=300),
    _entry("a100-80", "a100", 80, 2039, 312.0, f"{NANOCHAT}; {TORCH}", fp32=19.5, link=300),
    _entry("h100", "h100", 79, 3350, 989.4, f"{NANOCHAT}; {TITAN}", fp32=67.0, link=450),
    _entry("h100-pcie", "h100 pcie", 79, 2000, 756.0, f"{NANOCHAT}; {TITAN}", link=63.0),
    _entry("h200", "h200", 139, 4800, 989.4, f"{NANOCHAT}; {TITAN}", link=450),
    _entry("b200", "b200", 178, 8000, 2250.0, f"{NANOCHAT}; {TITAN}", link=900),
    _entry("l4", "nvidia l4", 22, 300, 121.2, NANOCHAT, fp32=30.3, link=31.5),
    _entry("t4", "tesla t4", 15, 320, None, "40 units x 1024 a cycle x 1.59 GHz, from memory", "computed", fp16=65.1),
    _apple("m1", 68, 2.6),
    _apple("m1 max", 400, 10.6),
    _apple("m2", 100, 3.6),
    _apple("m2 max", 400, 13.6),
    _apple("m2 ultra", 800, 27.2),
    _apple("m3", 100, 3.5),
    _apple("m3 max", 400, 14.1),
    _apple("m3 ultra", 819, 28.3),
    _apple("m4", 120, 3.8),
    _apple("m4 pro", 273, 8.1),
    _apple("m4 max", 546, 16.2),
)
"""`source` is that of the rates; half of the bandwidths are remembered, and stand in no table that was read."""


FLOAT8 = frozenset(
    (
        *("9070xt", "9070", "9060xt", "r9700", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x"),
        *("rtx-4060-ti-16", "rtx-4060-ti-8", "rtx-4070", "rtx-4080", "rtx-4090"),
        *("rtx-5060-ti-16", "rtx-5060-ti-8", "rtx-5070", "rtx-5070-ti", "rtx-5080", "rtx-5090"),
        *("h100", "h100-pcie", "h200", "b200", "l4"),
    )
)
"""
Keys of devices with matrix units for float8: NVIDIA's from Ada Lovelace on (compute capability 8.9), AMD's CDNA3, CDNA4
and RDNA4.
"""
HOST_LINK = 50e9
"""Bytes per second from other hosts to a device: those of a 400 Gbit/s adapter for each, as in hosts of eight GPUs."""
LORA_MFU = 0.178
"""
Share of the spec sheet's FLOP/s that NVIDIA's AutoModel publishes for LoRA of Llama 3.1 70B, at 4 FLOP for each
weight and token.
"""


def named(name: str, memory_bytes: int | None = None) -> Entry:
    """
    The entry that a person means, by its key or its driver's name, in any spelling. Raises HardwareError for an unknown
    name, with the nearest names, and for a name of several memory sizes without a size.
    """
    query = _letters(name)
    entries = [entry for entry in CATALOG if query == _letters(entry.key)]
    entries = entries or [entry for entry in CATALOG if query in map(_letters, entry.names)] or _called(name)
    if entries and (len(entries) == 1 or memory_bytes):
        return _nearest(entries, memory_bytes or 0)
    if entries:
        hint = f"Use {' or '.join(entry.key for entry in entries)}."
        raise HardwareError(f"{name!r} is the name of several devices with different memory", hint=hint)
    keys = [entry.key for entry in CATALOG]
    near = [key for key in keys if query and query in _letters(key)] or difflib.get_close_matches(name.lower(), keys)
    hint = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"Known devices: {', '.join(keys)}. For any other, set --memory SIZE."
    )
    raise HardwareError(f"the device {name!r} is not known", hint=hint)


def of_device(name: str, memory_bytes: int = 0) -> Entry | None:
    """
    The entry of a device by the name that its driver gives it; None where there is none. The longest name that fits
    decides, and where two sizes have the same one, the size.
    """
    entries = _called(name)
    return _nearest(entries, memory_bytes) if entries else None


def _nearest(entries: list[Entry], memory_bytes: int) -> Entry:
    return min(entries, key=lambda entry: abs((entry.memory_bytes or 0) - memory_bytes))


def _called(name: str) -> list[Entry]:
    """Those whose name stands in that of a driver, and is the longest that does."""
    matches = [(len(one), entry) for entry in CATALOG for one in entry.names if _stands_in(one, name.lower())]
    longest = max((length for length, _ in matches), default=0)
    called = [entry for length, entry in matches if length == longest]
    return [entry for entry in called if not _is_variant(entry, name.lower())]


def _is_variant(entry: Entry, text: str) -> bool:
    """Whether a name says, next to that of the entry, that it is another device or has another size of memory."""
    rest = next((text.replace(one, " ") for one in entry.names if _stands_in(one, text)), text)
    size = SIZE.search(text)
    if size and entry.memory_bytes and abs(int(size[1]) * GIB / entry.memory_bytes - 1) > SIZE_TOLERANCE:
        return True
    return VARIANT.search(rest) is not None


def _stands_in(name: str, text: str) -> bool:
    """As whole words: `m1` is not in `m1000`, and `apple m1` is not all of `apple m1 pro`, which nobody lists."""
    if name.startswith("apple"):
        return text.strip() == name
    return re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![0-9])", text) is not None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("rx")
