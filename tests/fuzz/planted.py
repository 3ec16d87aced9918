"""A target whose inputs name what goes wrong: what the harness must notice."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import strategies as st

from bloomery.core.errors import DataError
from tests.fuzz.outcome import Target, WrongError, command

SLEEP = "sleep 87.125"
"""A command that no other process of this machine has."""
HELD: list[bytearray] = []
"""Memory that the process keeps from one input to the next."""


def target(folder: Path) -> Target:
    return Target(st.binary(max_size=4).map(lambda data: b"traceback" if b"\x07" in data else data), attempt)


def attempt(data: bytes, work: Path) -> None:
    match data.partition(b" ")[0]:
        case b"traceback":
            raise ValueError("planted")
        case b"refused":
            raise DataError("planted", where="here")
        case b"talkative":
            error = DataError("planted")
            error.args = ("x" * 100_000,)  # its own text would be shortened
            raise error
        case b"exit":
            (work / "current.json").write_text('{"fetch": 5}')
            command("status", work)
        case b"hang":
            time.sleep(100)
        case b"busy":
            while True:
                pass
        case b"abort":
            os.abort()
        case b"memory":
            bytearray(2**30)
        case b"child_memory":
            subprocess.run([sys.executable, "-c", "bytearray(2**30)"], check=True)
        case b"hold":
            HELD.append(bytearray(600 * 2**20))
        case b"child":
            subprocess.run(["true"], check=True)
        case b"limit":
            bytearray(2**33)
        case b"grandchild":
            subprocess.run(["sh", "-c", f"{SLEEP} &"], check=True)
        case b"many":
            for _ in range(100):
                subprocess.Popen(SLEEP.split(), start_new_session=True)
            time.sleep(100)
        case b"file":
            (work / "large").write_bytes(bytes(2**29))
        case b"network":
            socket.create_connection(("192.0.2.1", 80), 60)
        case b"lost":
            raise WrongError("lost", "2 rows in, 1 row out")
