"""
Builds the libraries of src/bloomery/native. What pip needs besides stands in pyproject.toml.

They are optional: without a compiler, or with one that fails, the package is installed without them and computes the
same in Python. Flags that a compiler may not know are left out one after the other.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "bloomery" / "native"
NATIVE = runpy.run_path(str(ROOT / "src" / "bloomery" / "core" / "native.py"))
WITHOUT_THREADS = ("text",)
"""Only what is loaded after torch, and so shares its threads, may bring OpenMP."""
ATTEMPTS = (["-fopenmp-simd"], [], ["-DPLAIN"])


class Build(build_ext):
    """Plain shared libraries, whose names do not depend on the Python that is installed."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)

    def build_extension(self, ext: Extension) -> None:
        always = ext.extra_compile_args
        threads = [] if ext.name.endswith(WITHOUT_THREADS) else ["-fopenmp"]
        for attempt in (threads, *ATTEMPTS):
            ext.extra_compile_args = [*always, *attempt]
            ext.extra_link_args = attempt if attempt is threads else []
            try:
                super().build_extension(ext)
                return
            except CompileError:
                if attempt is ATTEMPTS[-1]:
                    raise


def extension(name: str) -> Extension:
    return Extension(
        f"bloomery.native.{name}",
        [f"src/bloomery/native/{name}.cpp"],
        depends=[f"src/bloomery/native/{path.name}" for path in SOURCES.glob("*.hpp")],
        define_macros=[("SOURCES", f'"{NATIVE["digest"](SOURCES)}"')],
        extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=default"],
        language="c++",
        optional=True,
    )


setup(cmdclass={"build_ext": Build}, ext_modules=[extension(name) for name in NATIVE["NAMES"]])
