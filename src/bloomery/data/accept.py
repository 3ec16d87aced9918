"""
Conditions that a source's documents have to meet: on fields beside the text, and on its length and lines.

They are what a download leaves out, before any rule of the stage filter sees it: a score that is too low, code of
too few lines. What is not accepted goes to rejected/ with the condition as its reason and the value that it saw.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bloomery.core.bounds import Between, FieldNumber, Share, TextLength
from bloomery.core.config import Config
from bloomery.data import rows
from bloomery.data.unpack import Problem

COMMENT = re.compile(r"\s*(#|//|/\*|\*|--|;|%|\"\"\"|'''|<!--)")


class FieldIs(Config):
    """A field beside the text has a value in some range, or one of some."""

    kind: Literal["field"] = "field"
    field: str
    """"a.b" is the field b of the object a."""
    at_least: FieldNumber | None = None
    at_most: FieldNumber | None = None
    one_of: tuple[str | Annotated[int, Between(-(2**63), 2**63 - 1, "data has integers of 64 bits")] | bool, ...] = ()

    @model_validator(mode="after")
    def _asks_for_something(self) -> "FieldIs":
        if self.at_least is None and self.at_most is None and not self.one_of:
            raise ValueError(f"the condition on field {self.field!r} asks for nothing; say at_least, at_most or one_of")
        return self

    def unmet(self, text: str, row: dict[str, Any]) -> Problem | None:
        value = rows.at(row, self.field)
        name = f"accept.{self.field}"
        if value is None:
            return Problem(f"{name}.missing", 0, f"has no field {self.field!r}")
        if self.one_of:
            same = any(type(value) is type(one) and value == one for one in self.one_of)
            return None if same else Problem(name, 0, f"{self.field} is {value!r}")
        found = rows.number(value)
        if found is None:
            return Problem(f"{name}.missing", 0, f"field {self.field!r} holds no number, but {value!r}")
        return _outside(name, found, self.at_least, self.at_most)


class Characters(Config):
    """The text has so many characters."""

    kind: Literal["characters"] = "characters"
    at_least: TextLength | None = None
    at_most: TextLength | None = None

    def unmet(self, text: str, row: dict[str, Any]) -> Problem | None:
        return _outside("accept.characters", len(text), self.at_least, self.at_most)


class Lines(Config):
    """The text has so many lines, and none that is too long."""

    kind: Literal["lines"] = "lines"
    at_least: TextLength | None = None
    at_most: TextLength | None = None
    longest: TextLength | None = None
    """Characters of the longest line."""

    def unmet(self, text: str, row: dict[str, Any]) -> Problem | None:
        found = text.removesuffix("\n").split("\n")
        if problem := _outside("accept.lines", len(found), self.at_least, self.at_most):
            return problem
        return _outside("accept.longest_line", max(map(len, found)), None, self.longest)


class CodeLines(Config):
    """Enough of the lines that are not blank are code: they do not begin as a comment of some language does."""

    kind: Literal["code_lines"] = "code_lines"
    at_least: Share = 0.3

    def unmet(self, text: str, row: dict[str, Any]) -> Problem | None:
        found = [line for line in text.split("\n") if line and not line.isspace()]
        share = sum(COMMENT.match(line) is None for line in found) / max(1, len(found))
        return _outside("accept.code_lines", share, self.at_least, None)


Condition = Annotated[FieldIs | Characters | Lines | CodeLines, Field(discriminator="kind")]


def first_unmet(conditions: tuple[Condition, ...], text: str, row: dict[str, Any]) -> Problem | None:
    """The first condition that a document does not meet, as a problem whose reason begins with "accept."; or None."""
    return next((problem for one in conditions if (problem := one.unmet(text, row)) is not None), None)


def _outside(name: str, value: int | float, least: int | float | None, most: int | float | None) -> Problem | None:
    if least is not None and value < least:
        return Problem(name, value, f"{value:g} is less than {least:g}")
    if most is not None and value > most:
        return Problem(name, value, f"{value:g} is more than {most:g}")
    return None
