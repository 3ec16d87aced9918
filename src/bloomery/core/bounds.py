"""
Types of settings: numbers with a lowest and a highest value, and paths that a file system can hold.

    ranks: Annotated[int, Between(1, 1024, "each rank is a process with a device of its own")] = 1

A number outside its range would start something absurd, or mean nothing. The error names the bound and the reason.
Bounds never depend on the machine: a recipe that loads here loads everywhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from bloomery.core.chat import MAX_SEED, MAX_TEMPERATURE, MAX_TOKENS
from bloomery.core.errors import shorten
from bloomery.core.io import path_problem

OUT_OF_RANGE = "out_of_range"
"""The type of its problem, as pydantic calls it; the message already holds the value."""


@dataclass(frozen=True)
class Between:
    """Metadata of a number: its lowest and highest value, and why they are where they are."""

    low: int | float
    high: int | float
    why: str
    """Of both ends; of the highest alone where `why_low` is set."""
    why_low: str = ""
    or_zero: bool = False
    """Whether 0 is fine too, although `low` is above it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        """The value itself. Raises PydanticCustomError outside of the range."""
        if not isinstance(value, int | float) or self.low <= value <= self.high or (self.or_zero and value == 0):
            return value
        end, bound = ("most", self.high) if value > self.high else ("least", self.low)
        least = f"{'0 or ' if self.or_zero and end == 'least' else ''}at {end} {written(bound)}"
        reason = self.why_low or ("" if self.low in (0, 1) else self.why) if end == "least" else self.why
        why = f": {reason}" if reason else ""
        what = f"must be {least}, got {shorten(value, 40)}{why}"
        raise PydanticCustomError(OUT_OF_RANGE, "{what}", {"what": what})


def written(number: int | float) -> str:
    """A number as a message shows it: in full, never rounded to another one."""
    if isinstance(number, int):
        return f"{number:,}"
    return short if float(short := f"{number:g}") == number else repr(number)


def _path(path: Path) -> Path:
    if problem := path_problem(path):
        raise ValueError(problem)
    return path


HUB = "hub:"
"""What a path begins with that names a model of a hub."""


def is_of_hub(path: Path) -> bool:
    """Whether a path names a model of a hub."""
    return str(path).startswith(HUB)


DiskPath = Annotated[Path, AfterValidator(_path)]
"""A path as a file system could hold it; whether something is there is seen when it is opened."""

_TEXT = "no document is longer"
_ROWS = "no data set has more"

Share = Annotated[float, Between(0, 1, "it is a share")]
InnerShare = Annotated[float, Between(1e-9, 0.99, "it is a share, and something has to be left on both sides")]
Seed = Annotated[int, Between(0, MAX_SEED, "random generators take 63 bits")]
TextLength = Annotated[int, Between(0, 10**12, _TEXT)]
"""Characters, words or lines of a text, or how often something is in it."""
PositiveLength = Annotated[int, Between(1, 10**12, _TEXT)]
Ratio = Annotated[float, Between(0, 1e9, "it is a mean or a ratio of counts in a text")]
DocumentCount = Annotated[int, Between(1, 10**12, _ROWS)]
FieldNumber = Annotated[float, Between(-1e30, 1e30, "numbers of fields are compared as 64-bit floats")]
Bytes = Annotated[int, Between(1, 2**60, "no file system holds more")]
RowBytes = Annotated[int, Between(1, 2**31, "a row is read into memory whole, and Arrow's texts end at 2 GiB")]
MemoryBytes = Annotated[int, Between(2**26, 2**50, "less holds no batch, and no machine has more")]
Weight = Annotated[float, Between(1e-9, 1e9, "weights are relative to one another")]
Attempts = Annotated[int, Between(1, 1000, "waits grow with each attempt")]
TokenCount = Annotated[int, Between(1, 10**15, "that is 25 times what the largest models were trained on")]
Context = Annotated[int, Between(1, MAX_TOKENS, "attention over more tokens fits no machine")]
Steps = Annotated[int, Between(1, 10**12, "no run takes more steps")]
StepsOrNone = Annotated[int, Between(0, 10**12, "no run takes more steps")]
Temperature = Annotated[
    float, Between(1e-3, MAX_TEMPERATURE, "logits are divided by it; 0 takes the likeliest token", or_zero=True)
]
