"""
A torch with an H100, as far as anyone sees who does not look where its tensors lie: on the CPU.

    python -m pytest -p tests.hw.cuda_torch tests/hw/test_cuda_torch.py

`torch.cuda` reports GPUs, and whatever names a device "cuda" gets the CPU, so that trials, choices, messages and
shortages of memory take the path of a GPU. Code that asks a tensor for its device sees a CPU, and takes its own path.
Python processes that tests start find the same torch while `PRETENDED_TORCH` is "cuda_torch": see `everywhere`.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30
FOLDER = Path(__file__).parent
EVERYWHERE = FOLDER / "everywhere"
CHOICE = "PRETENDED_TORCH"
GPUS = 2
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=79 * GIB, multi_processor_count=132, is_integrated=0
)
FACTS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: GPUS,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "mem_get_info": lambda device=None: (78 * GIB, 79 * GIB),
    "max_memory_allocated": lambda device=None: 3 * GIB,
    "memory_reserved": lambda device=None: GIB // 4,
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_reserved": lambda device=None: 4 * GIB,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_arch_list": lambda: ["sm_80", "sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True,
}


def redirected(torch: Any) -> Any:
    """A mode in which what is asked of "cuda" is done by the CPU."""

    def here(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

    class OnProcessor(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.device:  # a name, and no tensor yet
                return func(*args, **(kwargs or {}))
            kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return func(*map(here, args), **kwargs)

    return OnProcessor()


@contextmanager
def pretended(torch: Any) -> Iterator[None]:
    """Within, this torch has GPUs of NVIDIA, on this thread."""
    real = {name: getattr(torch.cuda, name) for name in FACTS}
    versions = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "rocm")}
    generator = torch.Generator
    for name, value in FACTS.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda, torch.version.hip, torch.version.rocm = "13.0", None, None
    torch.Generator = lambda device="cpu": generator()
    try:
        with redirected(torch):
            yield
    finally:
        torch.Generator = generator
        for name, value in versions.items():
            setattr(torch.version, name, value)
        for name, value in real.items():
            setattr(torch.cuda, name, value)


def pretend(torch: ModuleType) -> None:
    """For good."""
    context = pretended(torch)
    _KEPT.append(context)
    context.__enter__()


_KEPT: list[Any] = []


def environment() -> dict[str, str]:
    """With which a Python process finds this torch."""
    paths = [str(EVERYWHERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, CHOICE: "cuda_torch", "PYTHONPATH": os.pathsep.join(paths)}


def pytest_configure() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    assert importlib.util.find_spec("torch") is not None
    import torch

    pretend(torch)
    os.environ.update(environment())
