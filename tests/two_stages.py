"""A small recipe of two stages, which needs no torch."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.core.pipeline import Stage
from bloomery.data.executor import ExecutorConfig, Part, PartRecord, run_parts


class Section(Config):
    number: int = 1


class Recipe(Config):
    name: str
    make: Section = Section()
    double: Section = Section()


def run(config: Section, inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    if config.number == 13:
        raise DataError("13 is no number", where="make", hint="Take another.")
    if config.number == 14:
        raise KeyboardInterrupt
    if config.number == 15:
        raise ZeroDivisionError("a bug")
    if config.number in (16, 17):  # waits in one process, or in two workers, until a signal ends it
        parts = [Part(str(number), os.environ["STARTED"]) for number in range(config.number - 15)]
        try:
            run_parts(ExecutorConfig(workers=len(parts)), wait, config, parts, out, what="waits")
        finally:
            (out / "left.txt").write_text("in order")
    (out / "out.txt").write_text("x" * config.number)
    return {"characters": config.number}


def wait(config: Section, part: Part, out: Path) -> PartRecord:
    with open(part.inputs, "w") as started:
        started.write(f"{os.getpid()}\n")
    signal.pause()
    raise AssertionError("a signal that raises nothing, and ends no process")


HERE = "tests.two_stages"
STAGES = (Stage("make", HERE), Stage("double", HERE, after=("make",)))
