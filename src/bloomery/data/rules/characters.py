"""Rule `characters`: broken encodings, and documents of something other than words."""

from collections.abc import Iterator
from typing import Literal

from bloomery.core.bounds import Share
from bloomery.data.facts import alphabet
from bloomery.data.facts.batch import Facts, Flags, shares
from bloomery.data.facts.verdict import Common, Finding, above, below


class Characters(Common):
    """
    Broken encodings, and documents of something other than words.

    What is measured is akin to the quality signals of RedPajama-V2 (Weber et al. 2024, arXiv 2411.12372); the limits
    are our own.
    """

    kind: Literal["characters"] = "characters"
    nul: bool = False
    """Whether documents may hold NUL, which no text does."""
    max_controls: Share = 0.001
    """Largest share of control characters (without tabs and line breaks) and of U+FFFD, the mark of lost bytes."""
    max_non_letters: Share = 0.4
    """Largest share of digits, marks and symbols among what is not white space."""
    min_ascii: Share = 0.0
    """Least share of ASCII. Anything above 0 takes whole languages away; it is here for old recipes."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        if not self.nul:
            yield above("characters.nul", facts.each(facts.places("\0")), 0)
        yield above("characters.controls", shares(facts.count(alphabet.CONTROL), facts.sizes), self.max_controls)
        others = facts.word_sizes - facts.count(alphabet.LETTER)
        yield above("characters.non_letters", shares(others, facts.word_sizes), self.max_non_letters)
        ascii_only = facts.sizes - facts.each(facts.leads)
        if self.min_ascii:
            yield below("characters.ascii", shares(ascii_only, facts.sizes), self.min_ascii)
