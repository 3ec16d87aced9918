"""
Applies filters to documents in order: first match, its value, and the text to keep.

Each document gets the first filter that it fails, the value that this filter saw, and the kept text.

A preset covers the filters of a corpus only. If the corpus also used a classifier, thresholds on scores take its
role (data/quality/thresholds.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bloomery.data.documents import spans_by_size
from bloomery.data.filters.features import BatchFeatures, Drops, FilterBase, Flags, Masks, RulePreset
from bloomery.data.filters.heuristics import Boilerplate, Characters, Code, Language, Length, Lines, Pii, Urls
from bloomery.data.filters.published import C4, FineWeb, Gopher, Repetition

CHUNK_CHARACTERS = 2**20
"""Characters per batch. The features of this much text fit into the CPU cache."""


@dataclass
class DocumentColumns:
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


def judge(rules: Sequence[FilterBase], documents: DocumentColumns) -> Verdicts:
    """Apply rules in their order. A rule that masks changes the text for those after it."""
    verdicts = Verdicts()
    for begin, end in spans_by_size(map(len, documents.texts), CHUNK_CHARACTERS):
        _judge_chunk(rules, documents, slice(begin, end), verdicts)
    return verdicts


def _judge_chunk(rules: Sequence[FilterBase], documents: DocumentColumns, span: slice, verdicts: Verdicts) -> None:
    texts, domains = list(documents.texts[span]), documents.domains[span]
    facts = BatchFeatures(texts, documents.addresses[span], documents.names[span])
    reasons: list[str | None] = [None] * len(texts)
    values = [0.0] * len(texts)
    masked: list[Counter[str]] = [Counter() for _ in texts]
    live: Flags = np.ones(len(texts), np.bool_)
    for rule in rules:
        meant = np.array([rule.domains is None or domain in rule.domains for domain in domains], np.bool_)
        asked = live & meant
        if isinstance(rule, Masks):
            masked_texts = rule.masked(facts, asked)
            for index, (text, kinds) in masked_texts.items():
                texts[index] = text
                masked[index].update(kinds)
            if masked_texts:
                facts = BatchFeatures(texts, facts.addresses, facts.names)
        if not asked.any() or not isinstance(rule, Drops):
            continue
        for finding in rule.findings(facts, asked):
            for index in np.flatnonzero(asked & finding.broken).tolist():
                reasons[index], values[index] = finding.reason, float(finding.values[index])
            live &= ~(asked & finding.broken)
            asked &= ~finding.broken
            if not asked.any():
                break
    verdicts.texts += texts
    verdicts.reasons += reasons
    verdicts.values += values
    verdicts.masked += masked


Rule = (
    Length
    | Characters
    | Gopher
    | Repetition
    | C4
    | FineWeb
    | Code
    | Boilerplate
    | Lines
    | Language
    | Pii
    | Urls
    | RulePreset
)


# Penedo et al. 2024, 3.3, 3.5 and 3.6. Lines without an end mark count too, as they found best.
WEB = (Language(), Repetition(), Gopher(), C4(need_line_ends=False), FineWeb())

PRESETS: dict[str, tuple[Rule, ...]] = {
    # Rae et al. 2021, A1.1
    "gopher": (Gopher(), Repetition()),
    # Raffel et al. 2020, 2.2
    "c4": (C4(),),
    "fineweb": WEB,
    # FineWeb-Edu is FineWeb above a score for education, which a classifier gives. The least length is 1386.ai's
    "fineweb-edu-like": (Length(min_characters=200), *WEB, Boilerplate()),
    # Li et al. 2023, 3
    "starcoder": (Code(min_comments=0.01, max_comments=0.8),),
    # The hard filter of 1386.ai's corpus, without its limit on letters outside ASCII, and with it
    "seed-1386": (Length(min_characters=100, min_words=20), Characters(max_non_letters=1.0)),
    "seed-1386-ascii": (Length(min_characters=100, min_words=20), Characters(max_non_letters=1.0, min_ascii=0.8)),
}


def spelled_out(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules, with each preset replaced by its rules. The domains of a preset apply to all its rules."""
    expanded: list[Rule] = []
    for rule in rules:
        if isinstance(rule, RulePreset):
            expanded += [meant.model_copy(update={"domains": rule.domains}) for meant in PRESETS[rule.name]]
        else:
            expanded.append(rule)
    return tuple(expanded)
