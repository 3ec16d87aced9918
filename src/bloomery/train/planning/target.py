"""
On what a run is planned: so many devices, what a program may have of their memory, and how fast they are. Needs no
torch; what is measured on this machine is handed in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bloomery.core.errors import HardwareError
from bloomery.hw.catalog import GIB, Entry

Origin = Literal["measured", "catalogue", "unknown"]
Format = Literal["bfloat16", "float16", "float32"]

CONTEXT_BYTES = GIB
"""Of a GPU, which the driver, libraries and their kernels take before the first tensor."""
GAPS = 0.04
"""Share of a GPU that an allocator cannot hand out, as blocks of many sizes leave gaps."""
SYSTEM_SHARE, SYSTEM_BYTES = 0.1, 8 * GIB
"""What the rest of a machine is left, where a GPU takes its memory from it: the larger of the two, but at most half."""


@dataclass(frozen=True, kw_only=True)
class Target:
    name: str
    devices: int
    memory_bytes: int
    """Of one device."""
    usable_bytes: int
    """Of it, for weights and all that is computed of them."""
    flops: float | None
    """A second, in matrix products of the format that is trained in."""
    flops_from: Origin
    bandwidth: float | None
    """Bytes a second of its memory."""
    precision: Format
    """What `auto` comes to."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Those of other formats, where they are known too."""
    processor: bool = False
    """Whether it is one, and a run has other code, and no memory but the machine's."""
    shared: bool = False
    """Whether its memory is the host's too; a processor's is."""
    lent_bytes: int | None = None
    """What Linux lends it of the host's memory unless told to lend more. None: all, or memory of its own."""

    def peak(self, precision: Format) -> float | None:
        """None where it is not known; none is borrowed from another format."""
        return self.flops if precision == self.precision else self.peaks.get(precision)

    @property
    def one_memory(self) -> bool:
        return self.processor or self.shared

    @property
    def share(self) -> float:
        """Of the peak, that matrix products of a step reach."""
        return {"measured": MEASURED_SHARE, "catalogue": CATALOGUE_SHARE, "unknown": 0.0}[self.flops_from]


CATALOGUE_SHARE = 0.6
"""As products in bfloat16 reach on Strix Halo: 30 to 37 of 59.4 · 10¹²."""
MEASURED_SHARE = 0.9
"""Large square products were measured; those of a step are neither all large nor square."""


def of_entry(entry: Entry, devices: int = 1, memory_bytes: int | None = None) -> Target:
    """
    So many of a device of the catalogue, or of one with another memory. Raises HardwareError where its memory is not
    known.
    """
    size = memory_bytes or entry.memory_bytes
    if size is None:
        raise HardwareError(f"how much memory {entry.key} has is not known", cure="Say it too: --memory 32GiB.")
    precision: Format = "bfloat16" if entry.peak("bfloat16") else "float16" if entry.peak("float16") else "float32"
    peak = entry.peak(precision)
    return Target(
        name=entry.key,
        devices=devices,
        memory_bytes=size,
        usable_bytes=usable(size, shared=entry.shared),
        flops=peak,
        flops_from="catalogue" if peak else "unknown",
        bandwidth=entry.bandwidth,
        precision=precision,
        peaks=entry.flops,
        shared=entry.shared,
        lent_bytes=size // 2 if entry.gtt else None,
    )


def of_memory(memory_bytes: int, devices: int = 1) -> Target:
    """So many GPUs of which nothing is known but their memory."""
    return Target(
        name=f"a device of {memory_bytes / GIB:.3g} GiB",
        devices=devices,
        memory_bytes=memory_bytes,
        usable_bytes=usable(memory_bytes),
        flops=None,
        flops_from="unknown",
        bandwidth=None,
        precision="bfloat16",
    )


def usable(memory_bytes: int, *, shared: bool = False) -> int:
    """Of the memory of a GPU; `shared` with the rest of the machine or its own."""
    if shared:
        return memory_bytes - min(max(SYSTEM_BYTES, int(SYSTEM_SHARE * memory_bytes)), memory_bytes // 2)
    return int((1 - GAPS) * memory_bytes) - CONTEXT_BYTES
