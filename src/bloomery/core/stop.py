"""
A polite end: SIGTERM asks a process to stop, and it does so where nothing is lost.

Cluster managers send it some seconds before they kill. The handler only takes note; whoever works looks at it between
two pieces of work, leaves what it has in order, and ends with 143 = 128 + SIGTERM, as a shell would report it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 143


class Terminated(SystemExit):
    """The process was asked to end, and everything is in order. No error: `except Exception` lets it pass."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Stop:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Raises Terminated if it was."""
        if self.asked:
            raise Terminated


@contextmanager
def on_sigterm() -> Iterator[Stop]:
    """
    While the block runs, SIGTERM only takes note. A process is told once: the second SIGTERM ends it at once.

    Signals reach the main thread alone; in another one nothing is changed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGTERM)

    def take_note(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

    signal.signal(signal.SIGTERM, take_note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
