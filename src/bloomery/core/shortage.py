"""
Too little memory, or too few processes and threads: which errors of Python and of libraries mean that.

Each library has an error of its own for it, and an import that fails for want of memory is an ImportError. They are
known here by their words, so that nothing needs to be imported to recognize them.
"""

import atexit
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator

from bloomery.core.errors import BloomeryError, HardwareError

if sys.platform != "win32":
    import resource

MEMORY = (
    "out of memory",  # DuckDB, CUDA, MPS
    "can't allocate memory",  # torch on a CPU
    "cannot allocate memory",  # the C library, and imports
    "failed to map segment from shared object",
    "bad_alloc",
    "unable to allocate",
)
THREADS = ("can't start new thread", "resource temporarily unavailable", "failed to create thread")
UNSAID = ("without exception set", "without setting an exception")
"""What Python says of a C function that failed and set no exception, as some do where an allocation fails."""
NEAR = 0.8
NUMBERS = {errno.ENOMEM: MEMORY, errno.EAGAIN: THREADS}


def as_error(error: BaseException) -> HardwareError | None:
    """What a user reads instead of an error that means a shortage; None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, BloomeryError):
            return None
        if (kind := _kind(cause)) is None:
            continue
        said = (str(cause).strip().splitlines() or [""])[0][:200]
        said = f"{type(cause).__name__}{': ' if said else ''}{said}"
        if kind is THREADS:
            hint = "Raise the limit (ulimit -u, or pids.max of the container), or say fewer engine.workers and ranks."
            return HardwareError(f"needs more processes or threads than this machine allows ({said})", hint=hint)
        hint = (
            "End other programs, or raise the limit (ulimit -v, or the memory of the container). Less is needed with "
            "engine.workers=1, a smaller memory_bytes of [dedup] and [shard], or a smaller micro_batch_tokens."
        )
        return HardwareError(f"needs more memory than this process may have ({said})", hint=hint)
    return None


def near_limit() -> bool:
    """Whether this process has come near its limit of addresses, if it has one and the kernel says how near."""
    limit, peak = address_limit("VmPeak")
    return limit is not None and peak >= NEAR * limit


def address_limit(use: str) -> tuple[int | None, int]:
    """The limit of addresses (ulimit -v), if there is one, and what this process uses of it (VmSize or VmPeak)."""
    if sys.platform == "win32":
        return None, 0
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None, 0
    try:
        with open("/proc/self/status") as file:
            used = re.search(rf"^{use}:\s+([0-9]+) kB", file.read(), re.M)
    except OSError:
        return None, 0
    return (None, 0) if used is None else (limit, int(used[1]) * 1024)


def check_addresses(needed: int, what: str) -> None:
    """
    Raises HardwareError where fewer bytes of addresses are left than a native library needs, before it is loaded. Where
    they run out halfway, the dynamic loader or the library ends the process, and nothing can catch that.
    """
    limit, used = address_limit("VmSize")
    if limit is not None and limit - used < needed:
        left = (
            f"{what} needs {needed / 2**20:,.0f} MiB of addresses, and the limit leaves {(limit - used) / 2**20:,.0f}"
        )
        raise HardwareError(f"needs more memory than this process may have ({left})", hint="Raise it: ulimit -v")


def skip_teardown_after_import(error: BaseException, code: int) -> None:
    """
    Where an import ran out of memory, let the process end with `code` before the interpreter takes itself down: half of
    a native library is loaded, and its destructors may end the process by a signal.
    """
    if any(isinstance(cause, ImportError) or "<module>" in _frames(cause) for cause in _causes(error)):
        atexit.register(_leave, code)


def _frames(error: BaseException) -> list[str]:
    """Names of the functions that an error went through; a module that is being imported is <module>."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def _leave(code: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the newest first."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _kind(error: BaseException) -> tuple[str, ...] | None:
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, OSError) and error.errno is not None:
        return NUMBERS.get(error.errno)
    text = str(error).lower()
    if isinstance(error, SystemError) and any(words in text for words in UNSAID):
        return MEMORY if near_limit() else None
    return next((words for words in (MEMORY, THREADS) if any(word in text for word in words)), None)
