"""
Child processes that end with their parent, even if SIGKILL ends only the parent.

A child that runs Python code of ours calls `die_with` first. Any other command is started as `leashed(command)`, which
runs this file as a script: it makes the same arrangement, then becomes the command (on Linux) or waits for it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
SECONDS_BETWEEN_LOOKS = 0.5
NOT_STARTED = 127
"""Exit code of a command that cannot be started, as of a shell."""


def die_with(parent: int) -> None:
    """
    End this process as soon as process `parent`, which started it, is gone.

    On Linux the kernel does it, when the thread that started the process ends. Elsewhere a thread waits for the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_wait_for_end, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def leashed(command: Sequence[str]) -> list[str]:
    """The same command, which ends when this process does. One that cannot be started exits with `NOT_STARTED`."""
    if sys.platform == "win32":
        return list(command)
    return [sys.executable, "-I", "-S", "-B", os.path.realpath(__file__), str(os.getpid()), *command]


def _main(parent: int, command: list[str]) -> NoReturn:
    try:
        if sys.platform == "linux":
            die_with(parent)
            os.execvp(command[0], command)  # which keeps what the kernel was asked
        with subprocess.Popen(command) as child:
            while child.poll() is None:
                if os.getppid() != parent:
                    child.kill()
                time.sleep(SECONDS_BETWEEN_LOOKS / 10)
        if child.returncode < 0:  # end by the same signal
            signal.signal(-child.returncode, signal.SIG_DFL)
            signal.raise_signal(-child.returncode)
        os._exit(child.returncode)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(NOT_STARTED)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
