"""
Graceful shutdown on SIGTERM and Ctrl-C: the process stops where nothing is lost.

Cluster managers send SIGTERM some seconds before they kill. They often send it more than once, to a process and to its
whole group. In a stage without state in memory, SIGTERM raises at once (`ending_on_sigterm`), as Ctrl-C does in every
Python program: its files are whole or absent at any moment. While there is anything to save, the handler only sets a
flag (`on_signals`); a second Ctrl-C ends the process. The running code checks the flag between two units of work and
leaves its files in order.

The process exits with 128 + the number of the signal, as a shell would report it: 143, or 130 after Ctrl-C.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT
SECONDS_OF_CLEANUP = 5.0
"""After SIGTERM, another one is the same wish: `finally` blocks may take so long."""
SECONDS_BETWEEN_WISHES = 0.5
"""Two interrupts within are one: a launcher hands on what a terminal has sent to all. Nobody types as fast."""


class Terminated(SystemExit):
    """The process was asked to end, and everything is in order. No error: `except Exception` lets it pass."""

    def __init__(self, code: int = TERMINATED) -> None:
        super().__init__(code)


class StopRequest:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.asked = False
        self.code: int = TERMINATED
        """What it then exits with."""
        self.at = 0.0
        """When it was last asked, in seconds of time.monotonic."""
        self.saves = False
        """Whether there is work that an interrupt would lose. Until there is, Ctrl-C ends the process at once."""

    def check(self) -> None:
        """Raises Terminated if it was."""
        if self.asked:
            raise Terminated(self.code)

    def ask(self, number: int) -> None:
        """Remember that a signal came. The first one says how the process exits."""
        if not self.asked:
            self.asked, self.code, self.at = True, 128 + number, time.monotonic()


def end_now() -> None:
    """End as an interrupt ends a process that does not listen: nothing is waited for, not even a save."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a live line has hidden the cursor
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


_listening: list[StopRequest] = []
"""That of the block which runs, if one does."""
_ending: list[StopRequest] = []
"""That of the block of `ending_on_sigterm` which runs, if one does."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """
    While the block runs, SIGTERM raises Terminated in it, wherever it is, so that `finally` blocks run. For
    SECONDS_OF_CLEANUP, more of them change nothing. Then SIGTERM raises again: a callback of a library may have lost
    the first. A block of `on_signals` within takes note instead.

    Signals reach the main thread alone; in another one nothing is changed. Afterwards SIGTERM ends a process that was
    asked to stop with the same code; otherwise all is as before.
    """
    if threading.current_thread() is not threading.main_thread() or _ending:
        yield
        return
    stop = StopRequest()

    def end(number: int, frame: FrameType | None) -> None:
        if not stop.asked or time.monotonic() - stop.at > SECONDS_OF_CLEANUP:
            stop.ask(number)
            stop.at = time.monotonic()
            raise Terminated(stop.code)

    _ending.append(stop)
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        _ending.clear()
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        _end_alike(stop)


def interruption() -> KeyboardInterrupt | Terminated:
    """The error to raise in place of that of a library whose work a signal has cut short."""
    return Terminated(_ending[0].code) if _ending and _ending[0].asked else KeyboardInterrupt()


def _end_alike(stop: StopRequest) -> None:
    """Let SIGTERM end a process that was asked to stop, and is on its way: the end is the same, and so is the code."""
    if stop.asked and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(stop.code))


@contextmanager
def on_signals(insisted: Callable[[], None] = end_now) -> Iterator[StopRequest]:
    """
    While the block runs, SIGTERM only takes note, however often it comes: whoever wants more sends SIGKILL. So does the
    first Ctrl-C, where there is something to save; the second calls `insisted`. Raises Terminated at the end of the
    block where one was asked for and nobody has looked since.

    A block within another shares its wish. Signals reach the main thread alone; in another one nothing is changed. An
    interrupt that the process ignores stays ignored. Afterwards all is as before, but that SIGTERM ends a process that
    was asked to stop, and is on its way, with the same code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _listening:
        yield _listening[0]
        _listening[0].check()
        return
    stop, interrupted = StopRequest(), list[float]()
    _listening.append(stop)

    def take_note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if not stop.saves:
                raise KeyboardInterrupt
            interrupted.append(time.monotonic())
            if interrupted[-1] - interrupted[0] > SECONDS_BETWEEN_WISHES:
                insisted()
        stop.ask(number)

    heard = [signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else [])]
    before = {number: signal.signal(number, take_note) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if stop.asked and _ending and not _ending[0].asked:
            _ending[0].ask(stop.code - 128)  # another SIGTERM must not raise on the way out
        _end_alike(stop)
        _listening.clear()
    stop.check()
