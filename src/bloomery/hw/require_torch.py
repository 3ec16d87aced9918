"""
Import this before torch: if torch is missing, the error says which command installs it here.

    from bloomery.hw import require_torch as require_torch

    import torch

It imports torch itself, without garbage collection: the many passes over what torch creates, none of which is ever
garbage, take an eighth of the import. What is there then is left out of later passes.

The name is repeated to say that it is imported for its effect. Raises `bloomery.hw.torch_install.MissingTorch`,
which is a HardwareError to `cli.py` and a ModuleNotFoundError to everyone else.

It also sets how long the threads of one operation busy-wait for each other. OpenMP reads this setting from the
environment when torch is loaded. OpenMP's default is so long that a second program on one of two cores hurts. Each
thread then waits out the other's share of time in every operation. Training fell from 12,000 to 600 tokens per second
(4 million parameters, two cores). With a short wait and then sleep, training keeps 5,000 tokens per second. On a
quiet machine the short wait costs a tenth.
"""

import gc
import importlib.util
import os
import sys

from bloomery.core import errors

SPINS = 2000
"""GOMP_SPINCOUNT: spins before a waiting thread sleeps. docs/understand/what-failed.md has the cost of other values."""

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)

TORCH_ADDRESSES = 2**30
"""What torch's libraries and their first computation take: measured 0.8 GiB, without a GPU."""

if importlib.util.find_spec("torch") is None:
    from bloomery.hw.host import Host
    from bloomery.hw.torch_install import missing

    raise missing(Host.here())
if "torch" not in sys.modules:
    errors.check_addresses(TORCH_ADDRESSES, "torch")
    collects = gc.isenabled()
    gc.disable()
    try:
        import torch as torch
    finally:
        gc.freeze()
        if collects:
            gc.enable()
