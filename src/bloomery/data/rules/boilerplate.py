"""Rule `boilerplate`: what web sites say about themselves, and templates that nobody filled in."""

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from bloomery.core.bounds import Share, TextLength
from bloomery.data.facts.batch import Facts, Flags, shares, sums
from bloomery.data.facts.verdict import Common, Finding, above

PHRASES = (
    *("javascript", "cookie policy", "uses cookies", "use of cookies", "use cookies", "accept cookies"),
    *("privacy policy", "terms of use", "terms of service", "terms and conditions", "all rights reserved"),
    *("sign up for", "subscribe to our", "log in to", "create an account", "click here", "share on facebook"),
)
# how a template leaves room: {{name}}, <%= name %>, ${name}, [Insert name here], [Your Name], Lorem ipsum
TEMPLATE = re.compile(
    r"\{\{[^{}\n]{1,60}\}\}|<%[^%\n]{1,60}%>|\$\{[^{}\n]{1,60}\}|\[(?:insert|your|enter) [^\[\]\n]{1,60}\]|lorem ipsum",
    re.IGNORECASE,
)
TEMPLATE_MARKS = ("{{", "<%", "${", "[insert ", "[your ", "[enter ", "lorem ipsum")


class Boilerplate(Common):
    """
    What web sites say about themselves, and templates that nobody filled in.

    Sources: the lines that Raffel et al. 2020, 2.2 (arXiv 1910.10683) delete, with further phrases of sites, as a share
    of a document's lines with text; the marks of templates are our own. For prose: code has such marks for good reason.
    """

    kind: Literal["boilerplate"] = "boilerplate"
    max_lines: Share = 0.2
    """Largest share of lines with one of the phrases."""
    phrases: tuple[str, ...] = PHRASES
    """In any case of ASCII letters."""
    max_templates: TextLength = 2
    """Most places that a template has left to be filled in."""

    def findings(self, facts: Facts, live: Flags) -> Iterator[Finding]:
        lines = facts.written
        found: Flags = np.zeros(len(lines.starts), np.bool_)
        for phrase in self.phrases:
            found |= facts.lines_with(lines, facts.find(phrase.lower().encode()))
        yield above("boilerplate.lines", shares(sums(found, lines), lines.counts), self.max_lines)
        left = np.zeros(len(facts), np.int64)
        some = sum(facts.each(facts.find(mark.encode())) for mark in TEMPLATE_MARKS)
        for place in np.flatnonzero(live & (some > 0)).tolist():
            left[place] = sum(1 for _ in TEMPLATE.finditer(facts.texts[place]))
        yield above("boilerplate.templates", left, self.max_templates)
