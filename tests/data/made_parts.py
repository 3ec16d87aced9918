"""Work on parts for the tests of the engine: functions that a worker process finds by their names."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from bloomery.core import io as core_io
from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.data.executor import Part


class Trouble(Config):
    part: str = ""
    what: str = ""
    log: Path | None = None
    seconds: float = 0.0


def double(config: Trouble, part: Part, out: Path) -> dict[str, Any]:
    """Writes two files and says how large the number is. Makes the trouble that it is told to make."""
    if config.log is not None:
        with config.log.open("a") as log:
            log.write(f"{part.name} {os.getpid()}\n")
    time.sleep(config.seconds)
    name = f"doubled/{part.name}.txt"
    with core_io.whole_file(out / name, "w") as file:
        file.write(str(2 * part.inputs))
    if part.name == config.part:
        trouble(config.what, part)
    second = f"squared/{part.name}.txt"
    with core_io.whole_file(out / second, "w") as file:
        file.write(str(part.inputs**2))
    return {"files": [name, second], "number": part.inputs}


def trouble(what: str, part: Part) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "aborted":
        os.abort()
    if what == "left":
        os._exit(3)
    if what == "fault":
        raise ZeroDivisionError("a fault")
    if what == "data":
        raise DataError("is no good", where=f"row of {part.name}", hint="Mend it.")
