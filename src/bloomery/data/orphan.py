"""Processes that end when the one that started them does, however it ends."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
SECONDS_BETWEEN_LOOKS = 0.5


def die_with(parent: int) -> None:
    """
    End this process as soon as process `parent`, which started it, is gone. Ctrl-C is left to the parent.

    On Linux the kernel sees to it; elsewhere a thread looks twice a second.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the kernel was asked
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
