"""Too little memory or too few threads is said as such, and is never called a fault of the program."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from bloomery import cli
from bloomery.core import errors
from bloomery.core.errors import DataError


def caused(cause: BaseException) -> RuntimeError:
    """An error that came up while another one was handled."""
    try:
        try:
            raise cause
        except BaseException:
            raise RuntimeError("part 3: failed")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        pa.ArrowMemoryError("realloc of size 167936 failed"),
        duckdb.OutOfMemoryException("Out of Memory Error: failed to allocate data of size 256.0 KiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("std::bad_alloc"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        caused(MemoryError()),
    ],
)
def test_an_error_that_means_too_little_memory_says_so(error: BaseException) -> None:
    found = errors.as_error(error)
    assert found is not None
    assert "more memory" in found.what
    assert "engine.workers=1" in found.hint


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
)
def test_an_error_that_means_too_few_threads_says_so(error: BaseException) -> None:
    found = errors.as_error(error)
    assert found is not None
    assert "threads" in found.what
    assert "ulimit -u" in found.hint


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), ValueError("x"), caused(DataError("is bad"))])
def test_any_other_error_stays_what_it_is(error: BaseException) -> None:
    assert errors.as_error(error) is None


def test_a_verb_that_runs_out_of_memory_exits_2_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(options: object) -> int:
        raise MemoryError

    monkeypatch.setitem(cli.VERBS, "status", status)
    assert cli.main(["status", "runs/x"]) == 2
    said = capsys.readouterr().err
    assert "needs more memory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("said", ["error return without exception set", "x returned NULL without setting an exception"])
def test_a_c_function_that_fails_without_a_word_is_short_of_memory_only_near_the_limit(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert errors.as_error(SystemError(said)) is None
    monkeypatch.setattr(errors, "near_limit", lambda: True)
    found = errors.as_error(SystemError(said))
    assert found is not None
    assert "more memory" in found.what
    assert errors.as_error(SystemError("bad argument to internal function")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="limits the addresses of a process")
def test_a_process_is_near_its_limit_only_where_it_has_one() -> None:
    assert not errors.near_limit()
    code = """
import resource
from bloomery.core import errors
limit = 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(errors.near_limit())
held = bytearray(int(0.9 * limit) - 2**26)
print(errors.near_limit())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_an_import_that_ran_out_of_memory_leaves_without_the_interpreters_teardown(tmp_path: Path) -> None:
    """Without it, the destructor of what is half loaded would end the process by a signal, here by SIGSEGV."""
    (tmp_path / "half.py").write_text("raise MemoryError")
    code = """
import atexit, os, signal, sys
from bloomery import cli
atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
def status(options):
    import half
cli.VERBS["status"] = status
sys.exit(cli.main(["status", "runs/x"]))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2, done.stderr
    assert "needs more memory" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits the addresses of a process")
@pytest.mark.parametrize("limit", [500_000 * 1024, 600 * 2**20, 700_000 * 1024, 800_000 * 1024])
def test_a_process_whose_addresses_are_limited_exits_2(limit: int) -> None:
    """The limit is real: torch, which has to be loaded, does not fit. At 500,000 kB its loader ended the process."""
    done = subprocess.run(
        [sys.executable, "-m", "bloomery.cli", "export", "nowhere", "out", "--format", "hf"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "needs more memory" in done.stderr
    assert "Traceback" not in done.stderr
