"""Rule `fineweb`: lists, menus and broken lines."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from bloomery.core.bounds import PositiveLength, Ratio, Share
from bloomery.data.facts import alphabet
from bloomery.data.facts.batch import Facts, Flags, shares, sums
from bloomery.data.facts.verdict import Common, Finding, above, below


class FineWeb(Common):
    """
    Lists, menus and broken lines. Source: Penedo et al. 2024, The FineWeb Datasets, 3.6 (arXiv 2406.17557).

    Lines are those that hold more than white space, as they are. The paper gives 0.1 for characters in duplicate
    lines; the published corpus was made with 0.01, which is the default here.
    """

    kind: Literal["fineweb"] = "fineweb"
    min_lines_with_end: Share = 0.12
    """Least share of lines whose last character ends a sentence (in any script; a closing quote does not)."""
    max_short_lines: Share = 0.67
    short_line_characters: PositiveLength = 30
    max_duplicate_line_characters: Share = 0.01
    max_lines_per_word: Ratio = 0.3

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        lines = facts.written
        yield Finding("fineweb.no_lines", lines.counts == 0, np.zeros(len(facts)))
        ended = facts.bits[facts.last_characters(lines.ends)] & alphabet.TERMINAL > 0
        yield below("fineweb.few_line_ends", shares(sums(ended, lines), lines.counts), self.min_lines_with_end)
        sizes = facts.characters(lines.starts, lines.ends)
        short = sums(sizes <= self.short_line_characters, lines)
        yield above("fineweb.short_lines", shares(short, lines.counts), self.max_short_lines)
        feeds = facts.lines.counts - 1
        repeated = sums(sizes * facts.repeated[facts.has_words], lines)
        yield above(
            "fineweb.duplicate_line_characters",
            shares(repeated, facts.sizes - feeds),
            self.max_duplicate_line_characters,
        )
        yield above("fineweb.lines_per_word", shares(feeds, facts.words.counts), self.max_lines_per_word)
