"""Rule `lines`: lists, menus, teasers and cut lines."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from bloomery.core.bounds import PositiveLength, Share
from bloomery.data.facts import alphabet
from bloomery.data.facts.batch import Facts, Flags, shares, sums
from bloomery.data.facts.verdict import Common, Finding, above

BULLETS = ("•", "‣", "●", "◦", "⁃", "▪", "-", "*", "+")
ENDS = (*".!?:;,\"')]", "…", "”", "’", "»", "。", "！", "？", "」")
ELLIPSES = ("...", "…")


class Lines(Common):
    """
    Lists, menus, teasers and cut lines, by the share of lines that look so.

    Only lines with text count, without the white space around them. Sources: the line limits of Rae et al. 2021, A1.1
    (arXiv 2112.11446), Raffel et al. 2020, 2.2 (arXiv 1910.10683) and Penedo et al. 2023, RefinedWeb, G.2
    (arXiv 2306.01116), with wider lists of marks; all limits are loose until a recipe sets them.
    """

    kind: Literal["lines"] = "lines"
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    max_short_lines: Share = 1.0
    short_line_characters: PositiveLength = 30
    max_lines_without_end: Share = 1.0
    """Lines whose last character is none that ends a sentence or a part of it, and no closing quote or bracket."""
    max_number_lines: Share = 1.0
    """Lines without a letter."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        lines = facts.written
        starts, ends = facts.stripped(lines)
        bullets = _any(facts.begins(starts, mark) for mark in BULLETS)
        yield above("lines.bullets", shares(sums(bullets, lines), lines.counts), self.max_bullet_lines)
        dots = _any(facts.begins(np.maximum(ends - len(mark.encode()), starts), mark) for mark in ELLIPSES)
        yield above("lines.ellipses", shares(sums(dots, lines), lines.counts), self.max_ellipsis_lines)
        short = facts.characters(starts, ends) <= self.short_line_characters
        yield above("lines.short", shares(sums(short, lines), lines.counts), self.max_short_lines)
        if self.max_lines_without_end < 1:
            last = facts.last_characters(ends)
            open_ended = ~_any(facts.begins(last, mark) for mark in ENDS)
            yield above("lines.no_end", shares(sums(open_ended, lines), lines.counts), self.max_lines_without_end)
        if self.max_number_lines < 1:
            numbers = facts.spans_without(alphabet.LETTER, starts, ends)
            yield above("lines.numbers", shares(sums(numbers, lines), lines.counts), self.max_number_lines)


def _any(questions: Iterator[Flags]) -> Flags:
    found = next(questions).copy()
    for further in questions:
        found |= further
    return found
