"""Packages that only some recipes need: loaded where they are asked for, or an error that says how to install them."""

import importlib
from types import ModuleType

from bloomery.core.errors import DataError


def load(module: str, *, extra: str, where: str = "") -> ModuleType:
    """
    The module of a package that `pip install 'bloomery[EXTRA]'` brings. `where` is the key that asks for it.

    Raises DataError where it, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        cure = f"Install it: pip install 'bloomery[{extra}]'"
        raise DataError(f"this needs the package {module.partition('.')[0]}: {error}", where=where, cure=cure) from None
