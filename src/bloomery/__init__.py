"""Bloomery turns raw text into a language model that answers, on the machine its owner has."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bloomery.core.errors import (
    BloomeryError,
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    RunError,
    UnreachableError,
)

if TYPE_CHECKING:
    from bloomery.api import Dropped, Model, Run, Selection, decontaminate, dedup, filter, load, plan, run, status

__all__ = [
    "BloomeryError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Dropped",
    "HardwareError",
    "Model",
    "Run",
    "RunError",
    "Selection",
    "UnreachableError",
    "decontaminate",
    "dedup",
    "filter",
    "load",
    "plan",
    "run",
    "status",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What the API offers, imported when it is first asked for. Raises AttributeError for other names."""
    if name not in {"api", *__all__}:
        raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
    api = import_module("bloomery.api")
    return api if name == "api" else getattr(api, name)


def __dir__() -> list[str]:
    """So that completion knows the API before it is imported."""
    return sorted([*__all__, "__version__"])
