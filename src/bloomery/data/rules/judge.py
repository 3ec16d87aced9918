"""What a list of rules says of documents: the first that each breaks, what that saw, and the text that is kept."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bloomery.data.facts.batch import Facts, Flags
from bloomery.data.facts.verdict import Common, Drops, Masks

CHUNK_BYTES = 2**20
"""Text that is looked at together: what is found of it fits into a processor's cache."""


@dataclass
class Documents:
    """What a rule may look at: columns of the same length."""

    texts: Sequence[str]
    domains: Sequence[str]
    addresses: Sequence[str | None]
    names: Sequence[str]


@dataclass
class Verdicts:
    """One entry for each document, in order."""

    texts: list[str] = field(default_factory=list)
    """As they were, or masked."""
    reasons: list[str | None] = field(default_factory=list)
    """Why it is dropped; None: it stays."""
    values: list[float] = field(default_factory=list)
    """What the rule saw that dropped it; 0 for one that stays."""
    masked: list[Counter[str]] = field(default_factory=list)
    """How many things of each kind were replaced in its text."""


def judge(rules: Sequence[Common], documents: Documents) -> Verdicts:
    """Apply rules in their order. A rule that masks changes the text for those after it."""
    verdicts = Verdicts()
    for span in _chunks(documents.texts):
        _judge_chunk(rules, documents, span, verdicts)
    return verdicts


def _chunks(texts: Sequence[str]) -> Iterator[slice]:
    begin = size = 0
    for place, text in enumerate(texts):
        if size and size + len(text) > CHUNK_BYTES:
            yield slice(begin, place)
            begin, size = place, 0
        size += len(text)
    if begin < len(texts):
        yield slice(begin, len(texts))


def _judge_chunk(rules: Sequence[Common], documents: Documents, span: slice, verdicts: Verdicts) -> None:
    texts, domains = list(documents.texts[span]), documents.domains[span]
    facts = Facts(texts, documents.addresses[span], documents.names[span])
    reasons: list[str | None] = [None] * len(texts)
    values = [0.0] * len(texts)
    masked: list[Counter[str]] = [Counter() for _ in texts]
    live: Flags = np.ones(len(texts), np.bool_)
    for rule in rules:
        meant = np.array([rule.domains is None or domain in rule.domains for domain in domains], np.bool_)
        asked = live & meant
        if isinstance(rule, Masks):
            found = rule.masked(facts, asked)
            for place, (text, kinds) in found.items():
                texts[place] = text
                masked[place].update(kinds)
            if found:
                facts = Facts(texts, facts.addresses, facts.names)
        if not asked.any() or not isinstance(rule, Drops):
            continue
        for finding in rule.findings(facts, asked):
            for place in np.flatnonzero(asked & finding.broken).tolist():
                reasons[place], values[place] = finding.reason, float(finding.values[place])
            live &= ~(asked & finding.broken)
            asked &= ~finding.broken
            if not asked.any():
                break
    verdicts.texts += texts
    verdicts.reasons += reasons
    verdicts.values += values
    verdicts.masked += masked
