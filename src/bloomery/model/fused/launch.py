"""
How kernels are handed to Triton, which may be missing: then nobody gets here, because nothing was trusted.

What is asked of Triton can also be written down instead, so that it is compiled for GPUs that are not there.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import bloomery.hw.needs_torch  # noqa: F401

from torch import Tensor

LANGUAGE = "bloomery.model.fused.language"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel that was asked for: everything that Triton compiles it by."""

    kernel: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int | bool]
    warps: int
    stages: int


_RECORD: ContextVar[list[Launch] | None] = ContextVar("record", default=None)


def is_there() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def language() -> Any:
    """The kernels as Triton sees them."""
    return importlib.import_module(LANGUAGE)


def launch(one: Launch) -> None:
    """Run a kernel on the device of its tensors, or write down that it was asked for."""
    record = _RECORD.get()
    if record is not None:
        record.append(one)
        return
    kernel = getattr(language(), one.kernel)
    kernel[one.grid](**one.arguments, **one.constants, num_warps=one.warps, num_stages=one.stages)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Write down what is asked for meanwhile, and run nothing."""
    launches: list[Launch] = []
    token = _RECORD.set(launches)
    try:
        yield launches
    finally:
        _RECORD.reset(token)
