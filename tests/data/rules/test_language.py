import sys

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.filters import heuristics
from bloomery.data.filters.apply import DocumentColumns, judge
from bloomery.data.filters.heuristics import Language

pytest.importorskip("py3langid", reason="py3langid is not installed")

ENGLISH = "The small furnace was lit before dawn, and it had to burn until the iron ran together at the bottom of it."
GERMAN = "Der kleine Ofen wurde vor dem Morgen angezündet, und er musste brennen, bis das Eisen unten zusammenlief."
FRENCH = "Le petit fourneau était allumé avant l'aube, et il devait brûler jusqu'à ce que le fer coule ensemble."


def reasons(rule: Language, *texts: str) -> list[str | None]:
    number = len(texts)
    return judge([rule], DocumentColumns(texts, ["web"] * number, [None] * number, ["id"] * number)).reasons


def test_documents_in_other_languages_are_dropped_with_the_name_of_theirs() -> None:
    assert reasons(Language(), ENGLISH, GERMAN, FRENCH) == [None, "language.de", "language.fr"]
    assert reasons(Language(keep=("de", "en")), ENGLISH, GERMAN, FRENCH) == [None, None, "language.fr"]


def test_what_is_hard_to_tell_is_dropped_as_unsure() -> None:
    assert reasons(Language(min_confidence=1.0), "ok 12") == ["language.unsure"]


def test_only_the_beginning_counts() -> None:
    assert reasons(Language(max_chars=len(GERMAN)), GERMAN + ENGLISH * 20) == ["language.de"]
    assert reasons(Language(), GERMAN + ENGLISH * 20) == [None]


def test_a_recipe_that_names_no_language_or_none_that_there_is_is_an_error() -> None:
    for keep in ([], ["English"]):
        with pytest.raises(ConfigError, match="keep"):
            build(Language, {"keep": keep})


def test_a_missing_package_is_an_error_with_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    heuristics._identifier.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "py3langid.langid", None)
        with pytest.raises(DataError, match=r"(?s)py3langid.*bloomery\[web\]"):
            reasons(Language(), ENGLISH)
    heuristics._identifier.cache_clear()
