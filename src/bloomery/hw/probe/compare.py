"""
How numbers of a device are held against those of the processor, and told.

Outputs are given memory that is full of a canary, so that a kernel that wrote nothing, or not everything, is seen:
without it the memory may still hold the right numbers of the kernel before.
"""

import json
import time
from collections.abc import Callable

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device

import torch
from torch import Tensor

CANARY = 31744.0  # 31 · 2¹⁰ is exact in every format that training uses, and no result of a probe


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def tell_device(device: Device) -> None:
    say(device=device.name, vendor=device.vendor, dtype=str(device.compute_dtype).removeprefix("torch."))


def canaries(like: Tensor, *shape: int) -> Tensor:
    """A tensor for a kernel to write into."""
    return torch.full(shape, CANARY, device=like.device, dtype=like.dtype)


def poison(*examples: Tensor) -> None:
    """
    Fill with canaries the memory that is handed out next for tensors of these sizes. The allocators of GPUs give back
    what was freed last; a processor's may not, so there this is a chance and no promise.
    """
    for example in examples:
        for _ in range(2):
            torch.full_like(example, CANARY, requires_grad=False)


def compare(case: str, given: Tensor, expected: Tensor) -> None:
    """Tell how far numbers of the device are from those of the processor."""
    given, expected = (one.detach().cpu().double().flatten() for one in (given, expected))
    sizes = given.norm() * expected.norm()
    say(
        case=case,
        error=float((given - expected).norm() / expected.norm()),
        cosine=float(given @ expected / sizes) if sizes else 0.0,
        unwritten=float((given == CANARY).double().mean()),
        finite=bool(given.isfinite().all()),
        zeros=not bool(given.any()),
    )


def tell_time(device: Device, work: Callable[[], object], rounds: int = 5) -> None:
    """Tell how long some work takes: the best of a few rounds after a first."""
    times = []
    for _ in range(rounds):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - began)
    say(milliseconds=1e3 * min(times[1:]))
