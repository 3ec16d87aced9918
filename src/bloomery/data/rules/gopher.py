"""Rule `gopher`: the quality rules for prose of Gopher."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from bloomery.core.bounds import PositiveLength, Ratio, Share, TextLength
from bloomery.data.facts import alphabet
from bloomery.data.facts.alphabet import Positions
from bloomery.data.facts.batch import Facts, Flags, Spans, Values, shares
from bloomery.data.facts.verdict import Common, Finding, above, below

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
OPENING_CHARACTERS = 400
"""Where a document's stop words are looked for first: prose has two of them within a line or two."""


class Gopher(Common):
    """
    Quality rules for prose. Source: Rae et al. 2021, Scaling Language Models, A1.1 (arXiv 2112.11446).

    What the paper leaves open is done as the field's reference code does it: a word of nothing but marks counts neither
    for the number of words nor for their mean length; blank lines are lines; a bullet is • or -; case counts.
    """

    kind: Literal["gopher"] = "gopher"
    min_words: TextLength = 50
    max_words: PositiveLength = 100_000
    min_mean_word_characters: Ratio = 3.0
    max_mean_word_characters: Ratio = 10.0
    max_symbols_per_word: Ratio = 0.1
    """Hash signs and ellipses, each on its own, for each word."""
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    min_alphabetic_words: Share = 0.8
    """Least share of words with a letter in them."""
    min_stop_words: TextLength = 2
    """Least number of different ones of `stop_words`."""
    stop_words: tuple[str, ...] = STOP_WORDS

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        words = facts.words
        symbols = facts.words_without(alphabet.SOLID)
        counted = words.counts - facts.each_word(symbols)
        yield Finding(
            "gopher.too_few_words", (counted < self.min_words) | (words.counts == 0), counted.astype(np.float64)
        )
        yield above("gopher.too_many_words", counted, self.max_words)
        mean = shares(_word_characters(facts, symbols), counted)
        yield below("gopher.short_words", mean, self.min_mean_word_characters)
        yield above("gopher.long_words", mean, self.max_mean_word_characters)
        for found in (facts.each(facts.places("#")), ellipses(facts)):
            yield above("gopher.symbols", shares(found, words.counts), self.max_symbols_per_word)
        yield above("gopher.bullet_lines", bullet_lines(facts), self.max_bullet_lines)
        yield above("gopher.ellipsis_lines", ellipsis_lines(facts), self.max_ellipsis_lines)
        alphabetic = words.counts - facts.each_word(facts.words_without(alphabet.LETTER))
        yield below("gopher.few_alphabetic_words", shares(alphabetic, words.counts), self.min_alphabetic_words)
        yield below("gopher.few_stop_words", self._stop_words(facts, live), self.min_stop_words)

    def _stop_words(self, facts: Facts, live: Flags) -> Positions:
        wanted, found = frozenset(self.stop_words), np.zeros(len(facts), np.int64)
        for place in np.flatnonzero(live).tolist():
            text = facts.texts[place]
            opening = text[:OPENING_CHARACTERS].split()[:-1]  # the last of them may be cut
            found[place] = len(wanted.intersection(opening))
            if found[place] < self.min_stop_words:
                found[place] = len(wanted.intersection(text.split()))
        return found


def _word_characters(facts: Facts, symbols: Positions) -> Positions:
    """Characters in each document's words, without those that are symbols."""
    starts, ends = facts.words.starts[symbols], facts.words.ends[symbols]
    marks = np.append(0, np.cumsum(facts.characters(starts, ends)))
    before, after = (np.searchsorted(symbols, bound) for bound in (facts.words.first, facts.words.last))
    return np.asarray(facts.word_sizes - (marks[after] - marks[before]))


def ellipses(facts: Facts) -> Positions:
    """How many ellipses each document has: three dots that no earlier one has taken, or the character."""
    dots = facts.places(".")
    opens = np.flatnonzero(np.diff(dots, prepend=-1) != 1)
    runs = np.append(0, np.cumsum(np.diff(opens, append=len(dots)) // 3))
    before, after = (np.searchsorted(dots[opens], bound) for bound in (facts.starts, facts.ends))
    return np.asarray(runs[after] - runs[before] + facts.each(facts.places("…")))


def bullet_lines(facts: Facts) -> Values:
    """Share of each document's lines that begin with • or -, after white space."""
    starts = facts.words.starts
    dashes = np.flatnonzero(facts.raw[starts] == ord("-"))
    words = np.append(dashes, facts.words_at(facts.places("•")))
    return _share_of_lines(facts, np.sort(words), at_start=True)


def ellipsis_lines(facts: Facts) -> Values:
    """Share of each document's lines that end with ... or …, before white space."""
    starts, ends = facts.words.starts, facts.words.ends
    dots = np.flatnonzero(facts.last_bytes == ord("."))
    for back in (2, 3):
        dots = dots[(facts.raw[ends[dots] - back] == ord(".")) & (ends[dots] - back >= starts[dots])]
    after = facts.places("…") + len("…".encode())
    characters = np.searchsorted(ends, after)  # no text ends before its last word does
    characters = characters[ends[np.minimum(characters, len(ends) - 1)] == after]
    return _share_of_lines(facts, np.sort(np.append(dots, characters)), at_start=False)


def _share_of_lines(facts: Facts, words: Positions, *, at_start: bool) -> Values:
    """Share of each document's lines that have one of these words, by ascending number, as their first or last."""
    lines = facts.broken
    if not len(words):
        return np.zeros(len(facts))
    line = np.searchsorted(lines.starts, facts.words.starts[words], side="right") - 1
    near = words - 1 if at_start else words + 1
    outer = (near < 0) | (near >= len(facts.words.starts))
    other = facts.words.starts[np.where(outer, words, near)]
    alone = outer | (np.searchsorted(lines.starts, other, side="right") - 1 != line)
    return shares(_each_line(lines, line[alone]), lines.counts)


def _each_line(lines: Spans, chosen: Positions) -> Positions:
    return np.asarray(np.searchsorted(chosen, lines.last) - np.searchsorted(chosen, lines.first))
