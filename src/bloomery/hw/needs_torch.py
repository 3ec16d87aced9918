"""
Import this before torch: where there is none, it says which command installs it on this machine.

    from bloomery.hw import needs_torch as needs_torch

    import torch

The name is repeated to say that it is imported for what it does. Raises `bloomery.hw.wheel.MissingTorch`, which is a
HardwareError to `cli.py` and a ModuleNotFoundError to everyone else.
"""

import importlib.util

from bloomery.hw.host import Host
from bloomery.hw.wheel import missing

if importlib.util.find_spec("torch") is None:
    raise missing(Host.here())
