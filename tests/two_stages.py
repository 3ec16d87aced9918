"""A small recipe of two stages, which needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.core.pipeline import Stage


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
    (out / "out.txt").write_text("x" * config.number)
    return {"characters": config.number}


HERE = "tests.two_stages"
STAGES = (Stage("make", HERE), Stage("double", HERE, after=("make",)))
