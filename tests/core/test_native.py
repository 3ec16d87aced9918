import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.core import native, pipeline

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def build(into: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the libraries into a folder of their own."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(into / "base"), "--build-lib", str(into)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries as a place that a test may change."""
    place = tmp_path / "native"
    shutil.copytree(native.FOLDER, place)
    monkeypatch.setattr(native, "FOLDER", place)
    monkeypatch.delenv(native.SWITCH, raising=False)
    return place


def usable() -> None:
    if native.library("text") is None:
        pytest.skip(native.state("text"))


def test_a_library_that_is_not_built_is_none_and_says_so(copied: Path) -> None:
    (copied / "text.so").unlink(missing_ok=True)
    assert native.library("text") is None
    assert native.state("text") == "not built"


def test_a_library_is_stale_when_a_source_was_edited(copied: Path) -> None:
    usable()
    with (copied / "text.cpp").open("a") as file:
        file.write("// another line\n")
    native._found.cache_clear()
    assert native.library("text") is None
    assert "stale" in native.state("text")


def test_what_is_no_library_is_said_and_not_used(copied: Path) -> None:
    (copied / "text.so").unlink(missing_ok=True)
    (copied / "text.so").write_bytes(b"no library")
    assert native.library("text") is None
    assert "cannot be loaded" in native.state("text")


def test_a_variable_of_the_environment_switches_it_off(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable()
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library("text") is None
    assert native.state("text").startswith("off")
    monkeypatch.setenv(native.SWITCH, "1")
    assert isinstance(native.library("text"), ctypes.CDLL)


def test_a_manifest_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert pipeline.versions()["native"].startswith("off")


def test_without_a_compiler_the_package_is_built_without_libraries(tmp_path: Path) -> None:
    done = build(tmp_path, CC="false", CXX="false")
    assert done.returncode == 0, done.stderr
    assert "warning" in done.stderr.lower()
    assert not list(tmp_path.rglob("*.so"))
    assert list(tmp_path.rglob("native/text.cpp"))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
def test_with_a_compiler_a_library_is_built_and_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"  # to optimize, or to build all of them, takes most of a minute
    plain.write_text(f'#!/bin/sh\ncase "$*" in *native/text*) exec {COMPILER} "$@" -O0;; esac\nexit 1\n')
    plain.chmod(0o755)
    done = build(tmp_path, CC=str(plain), CXX=str(plain))
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(native, "FOLDER", tmp_path / "bloomery" / "native")
    monkeypatch.delenv(native.SWITCH, raising=False)
    assert native.state("text") in ("avx512", "avx2", "baseline")
