"""The rules of known corpora by name, as far as rules go: what a classifier decided there, limits on scores decide."""

from collections.abc import Iterable

from bloomery.data.rules import (
    C4,
    Boilerplate,
    Characters,
    Code,
    FineWeb,
    Gopher,
    Language,
    Length,
    Preset,
    Repetition,
    Rule,
)

# Penedo et al. 2024, 3.3, 3.5 and 3.6. Lines without an end mark count too, as they found best.
WEB = (Language(), Repetition(), Gopher(), C4(need_line_ends=False), FineWeb())

PRESETS: dict[str, tuple[Rule, ...]] = {
    # Rae et al. 2021, A1.1
    "gopher": (Gopher(), Repetition()),
    # Raffel et al. 2020, 2.2
    "c4": (C4(),),
    "fineweb": WEB,
    # FineWeb-Edu is FineWeb above a score for education, which a classifier gives; with the least length of the seed
    "fineweb-edu-like": (Length(min_characters=200), *WEB, Boilerplate()),
    # Li et al. 2023, 3
    "starcoder": (Code(min_comments=0.01, max_comments=0.8),),
    # The hard filter of 1386.ai's corpus, without its limit on letters outside ASCII, and with it
    "seed-1386": (Length(min_characters=100, min_words=20), Characters(max_non_letters=1.0)),
    "seed-1386-ascii": (
        Length(min_characters=100, min_words=20),
        Characters(max_non_letters=1.0, min_ascii=0.8),
    ),
}


def spelled_out(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules with those of a preset in its place. A preset's domains are those of all its rules."""
    found: list[Rule] = []
    for rule in rules:
        if isinstance(rule, Preset):
            found += [meant.model_copy(update={"domains": rule.domains}) for meant in PRESETS[rule.name]]
        else:
            found.append(rule)
    return tuple(found)
