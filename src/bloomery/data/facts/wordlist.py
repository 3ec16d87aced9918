"""Lists of words that a recipe names: in itself, or in a text file with one a line."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from bloomery.core import files
from bloomery.core.errors import DataError

WORD = re.compile(r"\w+")


def lines_of(path: Path) -> list[str]:
    """The lines of a text file, lowered, without blank ones and those that begin with #. Raises DataError."""
    try:
        files.check_regular(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), cure="A list is UTF-8 text, one a line.") from None
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

    def found(self, text: str) -> set[str]:
        """Those entries that a text has."""
        lowered = text.lower()
        return set(self.words.intersection(WORD.findall(lowered))) | set(self._phrases(lowered))

    def _phrases(self, lowered: str) -> Iterator[str]:
        for entry, pattern in self.phrases.items():
            if entry in lowered and pattern.search(lowered):
                yield entry


@cache
def wordlist(entries: tuple[str, ...], path: Path | None) -> Wordlist:
    """The list of a rule: what the recipe spells out, and what stands in the file that it names."""
    return Wordlist([*entries, *(lines_of(path) if path is not None else ())])
