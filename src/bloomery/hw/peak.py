"""
How many floating-point operations a second a device does in matrix products: what a model's own are held against.

Tables of vendors go by names that change, count half a card or sparse zeros, and say nothing of a laptop's power limit.
So the peak is that of the best of some large products on this device, now, in the format that training uses; a share
of it is called a share of the measured peak, and never one of a vendor's.
"""

import time
from functools import cache

from bloomery.hw import catalog
from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device

import torch

SIZES = {"cpu": 1536, "mps": 4096, "cuda": 8192}
SECONDS = 0.3


def listed_peak(device: Device, devices: int = 1) -> float | None:
    """FLOP/s that the catalogue has for so many of a device in its compute format; None where it has none."""
    if device.place.type == "cpu":  # whose name may be that of the GPU beside it: "… w/ Radeon 8060S"
        return None
    entry = catalog.of_device(device.name, device.memory_bytes)
    peak = None if entry is None else entry.peak(str(device.compute_dtype).removeprefix("torch."))
    return None if peak is None else devices * peak


def measured_peak(device: Device) -> float:
    """FLOP/s of the best of some square products in the device's compute format. Measured once in a process."""
    return _measured(device, device.place.type, device.compute_dtype)


@cache
def _measured(device: Device, kind: str, dtype: torch.dtype) -> float:
    size = SIZES[kind]
    left, right = (torch.ones(size, size, device=device.place, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + SECONDS
    torch.mm(left, right)  # the first one also sets up the library
    device.synchronize()
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        torch.mm(left, right)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
