"""
Packages that only some recipes need: the extra that brings each, and the check for all of them before a run.

`import bloomery` works without any of these packages. `load` imports one when a recipe asks for it. The packages of
the extra `data` stand here under their usual names. Each is imported when an attribute of it is first used:

    from bloomery.core.extras import pa, pq

Annotations therefore quote these names. A schema at the top of a module is a function: `PAIR = cache(lambda: …)`.
"""

import importlib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bloomery.core import errors
from bloomery.core.errors import MissingPackageError

DATA = ("duckdb", "pyarrow", "scipy", "sklearn")
EXTRAS = {
    **dict.fromkeys(DATA, "data"),
    **dict.fromkeys(("py3langid", "resiliparse"), "web"),
    **{"s3fs": "s3", "gcsfs": "gcs", "aiohttp": "http"},
    **{name: name for name in ("anthropic", "ray", "sentencepiece", "trackio", "wandb")},
}
"""Package, as Python imports it, to the extra of pyproject.toml that brings it."""


def load(module: str, *, where: str = "") -> ModuleType:
    """
    The module of a package in EXTRAS. `where` is the key that asks for it.

    Raises MissingPackageError where the package, or something that it needs, is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if errors.as_error(error) is not None:
            raise
        what = f"the package {package} is needed and cannot be imported: {error}"
        raise MissingPackageError(what, where=where, hint=_hint([package])) from None


def missing(needs: Iterable[tuple[str, str]]) -> MissingPackageError | None:
    """
    One error for all packages that are not installed, with one command that installs them; None where all are.

    `needs` pairs a key of the recipe with a package that it needs.
    """
    keys: dict[str, list[str]] = {}
    for key, package in needs:
        keys.setdefault(package, []).append(key)
    absent = sorted(package for package in keys if not _is_installed(package))
    if not absent:
        return None
    listed = "\n".join(f"  {package} (for {', '.join(_outermost(keys[package]))})" for package in absent)
    return MissingPackageError(f"packages that the recipe needs are not installed:\n{listed}", hint=_hint(absent))


def for_files(names: Iterable[object]) -> tuple[str, ...]:
    """The packages that files need to be read, by their names."""
    return ("pyarrow",) if any(str(name).endswith(".parquet") for name in names) else ()


def _outermost(keys: Iterable[str]) -> list[str]:
    """Keys without those that lie within another one of them: fetch stands for fetch.sources.0 too."""
    known = dict.fromkeys(keys)
    return [key for key in known if not any(key.startswith(f"{other}.") for other in known)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of a finder that refuses it
        return False
    except ValueError:  # it is loaded, and has no spec
        return True


def _hint(packages: Sequence[str]) -> str:
    extras = ",".join(sorted({EXTRAS[package] for package in packages}))
    return f"Install {'it' if len(packages) == 1 else 'them'}: pip install 'bloomery[{extras}]'"


class _Package:
    """Stands for a module, and imports it when an attribute is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(load(self._name), attribute)


if TYPE_CHECKING:
    import duckdb as duckdb
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from scipy import sparse as sparse
    from sklearn import linear_model as linear_model
    from sklearn import metrics as metrics
else:
    duckdb, pa, pc, pq = map(_Package, ("duckdb", "pyarrow", "pyarrow.compute", "pyarrow.parquet"))
    sparse, linear_model, metrics = map(_Package, ("scipy.sparse", "sklearn.linear_model", "sklearn.metrics"))

__all__ = ["duckdb", "linear_model", "metrics", "pa", "pc", "pq", "sparse"]
