"""Bloomery turns raw text into a language model that answers, on the machine its owner has."""

from bloomery.api import Dropped, Model, Run, Selection, decontaminate, dedup, filter, load, plan, run, status
from bloomery.core.errors import (
    BloomeryError,
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    RunError,
    UnreachableError,
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
