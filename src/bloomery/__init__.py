"""Bloomery turns raw text into a language model that answers, on the machine its owner has."""

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
    from bloomery.api import (
        Dropped,
        Model,
        Run,
        Selection,
        decontaminate,
        dedup,
        filter,
        load,
        plan,
        run,
        status,
    )

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
    """The functions of `bloomery.api`, imported when one of them is first named."""
    if name not in __all__:
        raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
    from bloomery import api

    return getattr(api, name)
