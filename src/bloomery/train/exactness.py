"""
What the last bits of a training run depend on, besides recipe and data: written down, and compared on resume.

The order in which numbers are added differs between counts of threads where kernels are compiled, between fused and
plain optimizers, between versions, processors and compiled libraries, and between numbers of ranks. A run that goes on
where all of this is as it was ends with the same bits as one that was never stopped; elsewhere it ends with rounding's
difference.
"""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401
from bloomery.core import native
from bloomery.core.log import say
from bloomery.hw import chosen
from bloomery.hw import device as devices
from bloomery.hw.device import Device
from bloomery.hw.dist import World
from bloomery.model import kernels, products
from bloomery.train import optim_adamw
from bloomery.train.config import Training
from bloomery.train.optim import Optimizers

import torch


def environment(config: Training, device: Device, world: World, optimizers: Optimizers) -> dict[str, Any]:
    """Everything that bit-exactness depends on and that a recipe's fingerprint does not hold."""
    return {
        "ranks": world.size,
        "threads": devices.threads(),
        "shard": config.shard if world.size > 1 else "none",
        "micro_batch_tokens": config.micro_batch_tokens,
        "compile": config.compile,
        "recompute": config.recompute,
        "precision": str(device.compute_dtype).removeprefix("torch."),
        "optimizer": [
            f"{type(part).__name__}{' fused' if part.defaults.get('fused') else ''}" for part in optimizers.parts
        ],
        "device": device.name,
        "kernels": chosen.state(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        **{f"library {name}": native.identity(name) for name in LIBRARIES},
        "products": products.UNITS[products.units()],
        "torch": torch.__version__,
        "bloomery": metadata.version("bloomery"),
        "numpy": metadata.version("numpy"),
        "set": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


LIBRARIES = (kernels.LIBRARY, kernels.NORMS, products.LIBRARY, optim_adamw.LIBRARY)
"""Compiled ones that compute in a step."""
SETTINGS = ("MKL_CBWR", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG")
"""Variables by which libraries choose among kernels."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, each as `name was X and is Y`. Nothing where nothing was written down."""
    names = [name for name in now if before and before.get(name) != now[name]]
    return [f"{name} was {before.get(name)} and is {now[name]}" for name in names]


def tell(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say what a resumed run finds changed. A run that changes it on purpose may well go on."""
    for difference in differences(before, now):
        say(f"  {difference}: what follows may differ in the last bits from an undisturbed run", style="yellow")
