"""
Errors that a user can cause and fix. Any other exception is a bug.

Each message says what is wrong with the value in it, where, and what to do. `cli.py` prints these without a traceback
and exits 2. A message shows at most 200 characters of a value: the code that shows it calls `shorten`, and
`BloomeryError` bounds every message.

`as_error` recognizes errors that mean too little memory, processes or threads by their words, and imports nothing.

A caller may close the three standard streams, or put a full disk behind them. A result that cannot be written to
stdout is an error.
"""

import atexit
import errno
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

if sys.platform != "win32":
    import resource

MAX_TEMPERATURE = 100.0
MAX_TOKENS = 2**24
"""Above every context and every vocabulary."""
MAX_SEED = 2**63 - 1
"""Random generators take 63 bits and a sign."""

MAX_VALUE_CHARS = 200
MAX_NAME_CHARS = 255
"""What a file system takes as one name, so no whole path is ever cut."""
MAX_LINE_CHARS = 4_500
"""Room for the longest path of Linux (4,096 bytes) and a sentence around it."""
MAX_MESSAGE_CHARS = 20_000

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONG_NAME = re.compile(rf"[^\s/]{{{MAX_NAME_CHARS + 1},}}")
_LONG_VALUE = re.compile(rf"(?<!\w)(?:'[^'\n]{{{MAX_VALUE_CHARS + 1},}}'|\"[^\"\n]{{{MAX_VALUE_CHARS + 1},}}\")(?!\w)")


def shorten(value: object, max_chars: int = MAX_VALUE_CHARS) -> str:
    """A value as a message shows it: text as it is, anything else by its `repr`, without the middle if it is long."""
    text = value if isinstance(value, str) else _repr(value)
    if len(text) <= max_chars:
        return text
    tail = max_chars // 4
    return f"{text[: max_chars - tail]} … [{len(text) - max_chars:,} characters left out] … {text[-tail:]}"


def readable(text: str) -> str:
    """
    Text that a terminal shows and does not obey. Control characters other than newline and tab become their numbers.
    So does what UTF-8 cannot hold, such as half a surrogate pair in the name of a file.
    """
    text = _CONTROL.sub(lambda letter: f"\\x{ord(letter[0]):02x}", text)
    return text.encode("utf-8", "backslashreplace").decode()


def _repr(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to write an integer of 4,300 digits
        return f"an integer of about {round(value.bit_length() * 0.30103):,} digits"
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested deeper than Python's stack, or an integer like that inside
        return f"a {type(value).__name__} that is too deep or too long to be shown"


def _bounded(text: str) -> str:
    text = _LONG_VALUE.sub(lambda run: shorten(run[0]), text)
    lines = (shorten(_LONG_NAME.sub(lambda run: shorten(run[0]), line), MAX_LINE_CHARS) for line in text.split("\n"))
    return shorten("\n".join(lines), MAX_MESSAGE_CHARS)


class BloomeryError(Exception):
    """Base of all errors that a user can fix. The message says what is wrong, where, and how to fix it."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        what, where, hint = _bounded(what), _bounded(where), _bounded(hint)
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n".join(line for line in (f"{where}: {what}" if where else what, hint) if line))


class ConfigError(BloomeryError):
    """A recipe, an override or an option is wrong."""


class DataError(BloomeryError):
    """An input file, document, shard or conversation is wrong."""


class UnreachableError(DataError):
    """A server, file or bucket cannot be reached now."""


class MissingPackageError(DataError):
    """A required package is not installed."""


class CheckpointError(BloomeryError):
    """A checkpoint or model is missing, damaged, or does not fit the shape or tokenizer."""


class HardwareError(BloomeryError):
    """The machine lacks a device, memory or another resource."""


class RunError(BloomeryError):
    """A run folder is missing, in use, or differs from its manifest."""


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
            hint = "Raise the limit (ulimit -u, or pids.max of the container), or use fewer engine.workers or ranks."
            return HardwareError(f"needs more processes or threads than this machine allows ({said})", hint=hint)
        hint = (
            "Close other programs, or raise the limit (ulimit -v, or the container's memory). To use less memory, set "
            "engine.workers=1, a smaller memory_bytes in [dedup] and [shard], or a smaller micro_batch_tokens."
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
        raise HardwareError(f"needs more memory than this process may have ({left})", hint="Raise the limit: ulimit -v")


def skip_teardown_after_import(error: BaseException, code: int) -> None:
    """
    Where an import ran out of memory, let the process end with `code` before the interpreter takes itself down. Half of
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


# --- the standard streams -------------------------------------------------------------------------------------------


COLUMNS = 80
"""The longest line of a terminal, however wide it is."""


def wrapped(text: str, indent: str = "", width: int = COLUMNS) -> str:
    """Each line of a text broken between words, but not before a unit; its further lines are indented."""
    glued = re.sub(UNIT, "\\1\N{NO-BREAK SPACE}\\2", text)
    lines = (
        textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
        for line in glued.split("\n")
    )
    return "\n".join(part for line in lines for part in line).replace("\N{NO-BREAK SPACE}", " ")


UNIT = r"(\d) ([kMGT]i?B|TFLOP/s|tokens/s|min|s|h|%)(?!\w)"


STDOUT, STDERR = 1, 2


class OutputError(BloomeryError):
    """A result cannot be written to stdout."""


def open_closed() -> None:
    """Let descriptors 0 to 2 that are closed lead nowhere. Else the next file that is opened takes the place of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which takes the lowest number that is free
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", encoding="utf-8")


def show_every_character() -> None:
    """Let stdout show as its number what its encoding lacks: an accent in ASCII, a byte of a file name in UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def discard(number: int) -> None:
    """Let a descriptor lead nowhere from now on, for the processes that this one starts too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextmanager
def checked_output() -> Iterator[None]:
    """While the block runs, what cannot be written to stdout raises OutputError, or BrokenPipeError."""
    before = sys.stdout
    sys.stdout = cast(TextIO, CheckedOutput(before))
    try:
        yield
    finally:
        sys.stdout = before


class CheckedOutput:
    """A stream that raises OutputError, or BrokenPipeError, for what it cannot write."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """As a file's. Names and models' answers may hold sequences that a terminal would obey."""
        return int(self._call(self.stream.write, readable(text) if self.stream.isatty() else text))

    def flush(self) -> None:
        self._call(self.stream.flush)

    def _call(self, function: Callable[..., Any], *words: str) -> Any:
        try:
            return function(*words)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"cannot be written: {error.strerror}"
            raise OutputError(what, where="standard output", hint="Redirect it to a disk with free space.") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def tell(text: str) -> None:
    """A line for people."""
    try:
        print(readable(text), file=sys.stderr, flush=True)
    except OSError:
        discard(STDERR)
