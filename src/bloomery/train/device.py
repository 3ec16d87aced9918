"""The device of a training run, and the number formats that it computes in there."""

from dataclasses import replace

from bloomery.core.log import say
from bloomery.hw import chosen
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.train.config import Training
from bloomery.train.precision import Precision

import torch


def find_device(config: Training) -> Device:
    """The device that a recipe asks for, with the number format that it asks for."""
    devices.return_freed_memory()  # what earlier stages of this process left
    found = devices.find(config.device)
    chosen.prepare(found)
    say(f"  computes in {Precision.decide(config.precision, found).why}")
    if config.precision == "auto":
        return found
    return replace(found, compute_dtype=getattr(torch, config.precision))


def fast_dtype(device: Device) -> torch.dtype:
    """The format that Muon's products are made in: bfloat16 has float32's range, which float16 has not."""
    return torch.bfloat16 if device.compute_dtype == torch.bfloat16 else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
