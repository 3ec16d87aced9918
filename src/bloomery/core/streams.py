"""
The three standard streams of a process, where a caller has closed them or put a full disk behind them.

Results go to stdout, and a result that cannot be written is an error. Lines for people go to stderr, and no run of days
ends because one of them cannot be written: the lines after it go nowhere.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from bloomery.core.errors import BloomeryError, readable

STDOUT, STDERR = 1, 2


class OutputError(BloomeryError): ...


def open_closed() -> None:
    """Let descriptors 0 to 2 that are closed lead nowhere. Else the next file that is opened takes the place of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which takes the lowest number that is free
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
    sys.stdout = cast(TextIO, _Output(before))
    try:
        yield
    finally:
        sys.stdout = before


class _Output:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a file's. Names and models' answers may hold sequences that a terminal would obey."""
        return int(self._call(self._stream.write, readable(text) if self._stream.isatty() else text))

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable[..., Any], *words: str) -> Any:
        try:
            return function(*words)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"cannot be written: {error.strerror}"
            raise OutputError(what, where="standard output", cure="Send it to a disk with free space.") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tell(text: str) -> None:
    """A line for people."""
    try:
        print(readable(text), file=sys.stderr, flush=True)
    except OSError:
        discard(STDERR)
