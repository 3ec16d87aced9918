"""
Common parts of all filters: domains, results, word lists, and the preset filter.

All filters share the domains that they apply to, and the form of their results.

A recipe gives a word list in itself, or names a text file with one word a line.

The filter `preset` stands for the filters of a known corpus, under the name of that corpus. A saved recipe spells
these filters out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bloomery.core import io as core_io
from bloomery.core.config import Config
from bloomery.core.errors import DataError
from bloomery.data.filters.features import BatchFeatures, FeatureValues, Flags


class FilterBase(Config):
    domains: tuple[str, ...] | None = None
    """Domains that the rule applies to. None: all."""


class FilterHit(NamedTuple):
    """One question asked of every document of a batch."""

    reason: str
    """A stable name like `gopher.too_few_words`, which dropped documents carry."""
    broken: Flags
    """Which documents it drops."""
    values: FeatureValues
    """What it saw of each document."""


@runtime_checkable
class Drops(Protocol):
    """A rule that drops documents."""

    def findings(self, facts: BatchFeatures, live: Flags) -> Iterator[FilterHit]:
        """
        The rule's questions in order; the first that drops a document is its reason.

        `live` are the documents that nothing has dropped so far; what is found of the others does not matter, so costly
        questions leave them out. It is brought up to date between two questions.
        """
        ...


def above(reason: str, values: NDArray[np.float64] | NDArray[np.int64], most: float | int) -> FilterHit:
    """Drops what is over a limit."""
    return FilterHit(reason, np.asarray(values > most), values.astype(np.float64))


def below(reason: str, values: NDArray[np.float64] | NDArray[np.int64], least: float | int) -> FilterHit:
    """Drops what is under a limit."""
    return FilterHit(reason, np.asarray(values < least), values.astype(np.float64))


@runtime_checkable
class Masks(Protocol):
    """A rule that replaces parts of a text."""

    def masked(self, facts: BatchFeatures, asked: Flags) -> dict[int, tuple[str, Counter[str]]]:
        """For each document of those asked whose text changes: the new text, and how many of each kind were in it."""
        ...


WORD = re.compile(r"\w+")


def lines_of(path: Path) -> list[str]:
    """The lines of a text file, lowered, without blank ones and those that begin with #. Raises DataError."""
    try:
        core_io.check_regular(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), hint="A list is UTF-8 text, one a line.") from None
    stripped = (line.strip().lower() for line in text.split("\n"))
    return [line for line in stripped if line and not line.startswith("#")]


class Wordlist:
    """Finds words and phrases in texts: whole words only, in any case."""

    def __init__(self, entries: Iterable[str]) -> None:
        lowered = {entry.lower() for entry in entries}
        self.words = frozenset(entry for entry in lowered if WORD.fullmatch(entry))
        self.phrases = {
            entry: re.compile(rf"(?<!\w){re.escape(entry)}(?!\w)") for entry in sorted(lowered - self.words)
        }

    def find(self, text: str) -> set[str]:
        """Those entries that a text has."""
        lowered = text.lower()
        return set(self.words.intersection(WORD.findall(lowered))) | set(self._phrases(lowered))

    def _phrases(self, lowered: str) -> Iterator[str]:
        for entry, pattern in self.phrases.items():
            if entry in lowered and pattern.search(lowered):
                yield entry


def wordlist(entries: tuple[str, ...], path: Path | None) -> Wordlist:
    """The list of a rule: what the recipe spells out, and what stands in the file that it names."""
    return _wordlist(entries, path, stamp(path))


@cache
def _wordlist(entries: tuple[str, ...], path: Path | None, version: tuple[int, ...]) -> Wordlist:
    return Wordlist([*entries, *(lines_of(path) if path is not None else ())])


def stamp(path: Path | None) -> tuple[int, ...]:
    """What changes with a file, as a part of the key of a cache: its number, size and time. () without a file."""
    try:
        found = path.stat() if path is not None else None
    except OSError:  # who reads the file says why it cannot be read
        return ()
    return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


class RulePreset(FilterBase):
    """
    The rules of a known corpus, which `bloomery.data.filters.apply` lists.

    A recipe that is loaded holds those rules in the place of this one, for the same domains.
    """

    kind: Literal["preset"] = "preset"
    name: Literal["gopher", "c4", "fineweb", "fineweb-edu-like", "starcoder", "seed-1386", "seed-1386-ascii"]
    """Name of the preset."""
