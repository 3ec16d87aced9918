"""
A torch that was built for AMD, as far as anyone looks who does not compute on a GPU:

    python -m pytest -p tests.hw.hip_torch

Its version has no CUDA, its GPU is called gfx1151, and its capability is above every threshold of NVIDIA's, so that
whoever splits `torch.version.cuda`, or takes a capability for a feature, fails here and not on the machine of a user.
No GPU can be computed on: what runs under it computes on the processor. Python processes that tests start find it too:
the folder `everywhere` is on their path, and what lies there is loaded by every Python that begins.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
EVERYWHERE = Path(__file__).with_name("everywhere")


def pretend(torch: Any) -> None:
    torch.__version__ = torch.torch_version.TorchVersion(VERSION)
    for name, value in {"__version__": VERSION, "hip": "7.2.26015", "rocm": "7.2.1", "cuda": None}.items():
        setattr(torch.version, name, value)
    for name, value in FACTS.items():
        setattr(torch.cuda, name, value)


class AfterImport(importlib.abc.MetaPathFinder):
    """Of torch: found where it is, and pretended to be another as soon as it is loaded."""

    def __init__(self, pretend: Callable[[Any], None] = pretend) -> None:
        self._pretend = pretend

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_pretend(module: ModuleType) -> None:
            load(module)
            self._pretend(module)

        spec.loader.exec_module = load_and_pretend  # type: ignore[method-assign]
        return spec


def pytest_configure() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as bloomery.hw.require_torch does, which comes too late here
    import torch

    pretend(torch)
    paths = [str(EVERYWHERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    if str(EVERYWHERE) not in paths[1:]:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
