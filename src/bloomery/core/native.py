"""
Compiled libraries of the folder native/, where they were built. For each, Python code computes the same.

A library built from sources other than those in the folder is not used, and `state` reports this. This module
needs only the standard library, because setup.py runs it to get the hash of the sources.
"""

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "native"
NAMES = ("text", "training", "norms", "products", "optimizer", "decode")
LEVELS = ("avx512", "avx2", "baseline")
SWITCH = "BLOOMERY_NATIVE"
"""BLOOMERY_NATIVE=0 in the environment: nothing compiled runs."""

_REFUSED: dict[str, str] = {}
"""Name of a library -> its fault."""


class NativeLibrary(NamedTuple):
    library: ctypes.CDLL | None
    state: str
    """The CPU level that it computes with (one of LEVELS), or why there is none."""


def digest(folder: Path) -> str:
    """Hash of the sources of all libraries: 16 hexadecimal digits of SHA-256."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp")):
        whole.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def library(name: str) -> ctypes.CDLL | None:
    """The library of that name; None where it cannot be used or is not wanted."""
    off = os.environ.get(SWITCH) == "0" or name in _REFUSED
    return None if off else _found(FOLDER, name).library


def refuse(name: str, why: str) -> None:
    """Stop using a library in this process, because it computed wrong numbers."""
    _REFUSED[name] = why


def state(name: str) -> str:
    """The CPU level that a library computes with, or why it is not used."""
    if name in _REFUSED:
        return f"off ({_REFUSED[name]})"
    return f"off ({SWITCH}=0)" if os.environ.get(SWITCH) == "0" else _found(FOLDER, name).state


def identity(name: str) -> str:
    """What a library computes with, and of which sources it was built; or why it is not used."""
    library_state = state(name)
    return f"{library_state} of {digest(FOLDER)}" if library(name) is not None else library_state


def summary() -> str:
    """The state of all libraries, in a few words. One that shares threads with torch is not loaded before torch is."""
    names = NAMES if "torch" in sys.modules else NAMES[:1]
    states = dict.fromkeys(state(name) for name in names)
    return " / ".join(states)


@cache
def _found(folder: Path, name: str) -> NativeLibrary:
    path = folder / f"{name}.so"
    if not path.is_file():
        return NativeLibrary(None, "not built")
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.bloomery_sources.restype = loaded.bloomery_level.restype = ctypes.c_char_p
        if loaded.bloomery_sources().decode() != digest(folder):
            return NativeLibrary(None, "stale: built from other sources")
        return NativeLibrary(loaded, loaded.bloomery_level().decode())
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"cannot be loaded: {error}")
