"""
Import this before torch: where there is none, it says which command installs it on this machine.

    from bloomery.hw import needs_torch as needs_torch

    import torch

The name is repeated to say that it is imported for what it does. Raises `bloomery.hw.wheel.MissingTorch`, which is a
HardwareError to `cli.py` and a ModuleNotFoundError to everyone else.

It also sets how long the threads of one operation wait for each other by turning in place, which OpenMP reads from the
environment when torch is loaded. Its default is so long that, when another program takes one of two cores, each waits
out the other's share of time in every operation: training fell from 12,000 to 600 tokens a second (4 million
parameters, two cores). Where they wait briefly and then sleep, it keeps 5,000, and loses a tenth on a quiet machine.
"""

import importlib.util
import os
import sys

from bloomery.core import shortage
from bloomery.hw.host import Host
from bloomery.hw.wheel import missing

SPINS = 2000
"""GOMP_SPINCOUNT: turns before a waiting thread sleeps. See docs/log.md for what others cost."""

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)

TORCH_ADDRESSES = 2**30
"""What torch's libraries and their first computation take: measured 0.8 GiB, without a GPU."""

if importlib.util.find_spec("torch") is None:
    raise missing(Host.here())
if "torch" not in sys.modules:
    shortage.check_addresses(TORCH_ADDRESSES, "torch")
