"""
Which of Bloomery's own GPU kernels this process may use: none, until trials on this device found one right and fastest.

Callers ask before each use; `chosen.prepare` is who says yes. This module needs no torch.
"""

from collections.abc import Iterable

OWN = "triton"
"""The implementation by kernels of our own, in the words of trials."""

_TRUSTED: set[str] = set()


def trust(kernels: Iterable[str]) -> None:
    """Use our own implementation of these kernels from now on, and of no others."""
    _TRUSTED.clear()
    _TRUSTED.update(kernels)


def trusted(kernel: str) -> bool:
    return kernel in _TRUSTED


def state() -> str:
    """The kernels for which our own implementation is used, in words; "" for none."""
    return ", ".join(sorted(_TRUSTED))
