"""What all rules share: the domains they apply to, and the form of what they find."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bloomery.core.config import Config
from bloomery.data.facts.batch import Facts, Flags, Values


class Common(Config):
    domains: tuple[str, ...] | None = None
    """Domains it applies to. None: all."""


class Finding(NamedTuple):
    """One question asked of every document of a batch."""

    reason: str
    """A stable name like `gopher.too_few_words`, which dropped documents carry."""
    broken: Flags
    """Which documents it drops."""
    values: Values
    """What it saw of each document."""


@runtime_checkable
class Drops(Protocol):
    """A rule that drops documents."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        """
        The rule's questions in order; the first that drops a document is its reason.

        `live` are the documents that nothing has dropped so far; what is found of the others does not matter, so costly
        questions leave them out. It is brought up to date between two questions.
        """
        ...


def above(reason: str, values: NDArray[np.float64] | NDArray[np.int64], most: float | int) -> Finding:
    """Drops what is over a limit."""
    return Finding(reason, np.asarray(values > most), values.astype(np.float64))


def below(reason: str, values: NDArray[np.float64] | NDArray[np.int64], least: float | int) -> Finding:
    """Drops what is under a limit."""
    return Finding(reason, np.asarray(values < least), values.astype(np.float64))


@runtime_checkable
class Masks(Protocol):
    """A rule that replaces parts of a text."""

    def masked(self, facts: Facts, asked: Flags) -> dict[int, tuple[str, Counter[str]]]:
        """For each document of those asked whose text changes: the new text, and how many of each kind were in it."""
        ...
