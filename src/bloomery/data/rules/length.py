"""Rule `length`: documents that are too short or too long."""

from collections.abc import Iterator
from typing import Literal

from bloomery.core.bounds import PositiveLength, TextLength
from bloomery.data.facts.batch import Facts, Flags
from bloomery.data.facts.verdict import Common, Finding, above, below


class Length(Common):
    """Documents that are too short or too long, in characters."""

    kind: Literal["length"] = "length"
    min_characters: TextLength = 100
    max_characters: PositiveLength | None = None
    min_words: TextLength = 0
    """What white space separates."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        yield below("length.too_short", facts.sizes, self.min_characters)
        if self.max_characters is not None:
            yield above("length.too_long", facts.sizes, self.max_characters)
        if self.min_words:
            yield below("length.too_few_words", facts.words.counts, self.min_words)
