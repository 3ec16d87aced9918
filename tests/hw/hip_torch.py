"""
A torch that was built for AMD, as far as anyone looks who does not compute on a GPU:

    python -m pytest -p tests.hw.hip_torch

Its version has no CUDA, its GPU is called gfx1151, and its capability is above every threshold of NVIDIA's, so that
whoever splits `torch.version.cuda`, or takes a capability for a feature, fails here and not on the machine of a user.
No GPU can be computed on: what runs under it computes on the processor.
"""

from types import SimpleNamespace
from typing import Any

import pytest

import torch

GIB = 2**30
PROPERTIES = SimpleNamespace(
    name="Radeon 8060S Graphics",
    major=11,
    minor=5,
    gcnArchName="gfx1151",
    total_memory=96 * GIB,
    multi_processor_count=20,
    warp_size=32,
    is_integrated=1,
)


FACTS: dict[str, Any] = {
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (11, 5),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_arch_list": lambda: ["gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"],
    "is_bf16_supported": lambda including_emulation=True: True,
}
# As one that was built from source: the +rocm7.2 of a wheel is nothing that a test of another maker could take away.
VERSION = "2.13.0a0+git7e1940d4"


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    torch.__version__ = torch.torch_version.TorchVersion(VERSION)
    for name, value in {"__version__": VERSION, "hip": "7.2.26015", "rocm": "7.2.1", "cuda": None}.items():
        setattr(torch.version, name, value)
    for name, value in FACTS.items():
        setattr(torch.cuda, name, value)
