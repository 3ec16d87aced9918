"""How fast the device multiplies and copies."""

import time

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device, find
from bloomery.hw.peak import measured_peak
from bloomery.hw.probe.compare import say, tell_device

import torch

COPY_BYTES = {"cpu": 2**27}
"""Large enough to pass by every cache; 2³⁰ elsewhere."""


def speed() -> None:
    device = find()
    tell_device(device)
    say(trying="matrix products")
    say(flops=measured_peak(device))
    say(trying="copies")
    say(bytes_per_second=copy_rate(device))


def copy_rate(device: Device) -> float:
    """Bytes that pass between device and its memory in a second of copying: each is read once and written once."""
    count = min(COPY_BYTES.get(device.place.type, 2**30), device.memory_bytes // 8)
    source = torch.zeros(count, dtype=torch.uint8, device=device.place)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(5):
        device.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * count / best
