"""Rules on batches say what rules on one document say."""

from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bloomery.data.filters import apply
from bloomery.data.filters.apply import DocumentColumns, Rule, Verdicts
from bloomery.data.filters.features import RulePreset
from bloomery.data.filters.heuristics import Boilerplate, Characters, Code, Language, Length, Lines, Pii, Urls
from bloomery.data.filters.published import C4, FineWeb, Gopher, Repetition
from tests.data.rules import plain

OTHER_TESTS = {Language, Pii, Urls, RulePreset}
"""Rules that have a file of tests of their own, and presets, which are other rules."""
STRICT: list[Any] = [
    Length(min_characters=5, max_characters=40, min_words=3),
    Gopher(min_words=0, min_stop_words=1),
    Gopher(
        min_words=3,
        max_words=12,
        min_mean_word_characters=2,
        max_mean_word_characters=4,
        max_symbols_per_word=0.3,
        max_bullet_lines=0.4,
        max_ellipsis_lines=0.2,
        min_alphabetic_words=0.5,
        stop_words=("a", "é", "the"),
    ),
    Repetition(),
    Repetition(min_top_count=1, max_duplicate_lines=1, max_duplicate_paragraphs=1, max_duplicate_line_characters=1),
    Repetition(
        max_duplicate_lines=1,
        max_duplicate_line_characters=1,
        max_duplicate_paragraphs=1,
        max_duplicate_paragraph_characters=1,
        max_top_ngrams=(1.0, 0.3),
        max_duplicate_ngrams=(0.05, 0.02),
    ),
    C4(),
    C4(min_sentences=1, min_line_words=1, min_kept_lines=0.3, max_word_characters=6, bad_words=("cookie", "use the")),
    C4(min_sentences=0, curly_brackets=True, bad_words=("the",)),
    FineWeb(),
    FineWeb(max_short_lines=0.4, short_line_characters=3, max_duplicate_line_characters=0.3, max_lines_per_word=0.6),
    C4(need_line_ends=False, min_sentences=3),
    Characters(),
    Characters(nul=True, max_controls=0.1, max_non_letters=0.2, min_ascii=0.7),
    Lines(),
    Lines(
        max_bullet_lines=0.3,
        max_short_lines=0.5,
        short_line_characters=4,
        max_lines_without_end=0.5,
        max_number_lines=0.4,
    ),
    Boilerplate(max_templates=0),
    Code(),
    Code(max_line_characters=20, max_mean_line_characters=8, min_alphanumeric=0.5),
]


def test_every_rule_is_compared_with_its_twin_in_plain_py() -> None:
    """A new rule gets a twin there, and a row in STRICT that drops something."""
    assert {type(rule) for rule in STRICT} == {*get_args(Rule)} - OTHER_TESTS


WORDS = ["a", "the", "be", "é", "use", "cookies", "JavaScript", "lorem ipsum", "{", "#", "…", "...", "-", "•", "[1]"]
WORDS += [
    "end.",
    "end?”",
    "end!'",
    'end.")',
    "1.5",
    "x" * 7,
    "文字",
    "文。",
    "💥",
    "[edit].",
    "terms of use",
    "\x00",
    "\ufffd",
]
WORDS += ["{{x}}", "[Your name]", "<%", "%>", "+", "»", "12", "\x07", "Sign up for"]
GAPS = [" ", "\n", "\n\n", "\n\n\n", "\r\n", "\r", "\t", "\u2028", "\x85", "\u3000", "\xa0", "\x0b", "\x1c", "", " \n "]

pieces = st.lists(st.sampled_from(WORDS + GAPS * 2), max_size=60).map("".join)
repeats = st.lists(st.sampled_from(["ab", "c", "文", "dd", "\n", "\n\n", " "]), max_size=80).map(" ".join)
runs = st.lists(st.sampled_from(["ab", "c", "文字", "dd"]), max_size=60).map(" ".join)
texts = st.one_of(pieces, repeats, runs, st.text(st.characters(codec="utf-8"), max_size=80))


def judged(rules: Sequence[Any], batch: Sequence[str], domain: str = "web") -> Verdicts:
    documents = DocumentColumns(batch, [domain] * len(batch), [None] * len(batch), [str(n) for n in range(len(batch))])
    return apply.judge(rules, documents)


@pytest.mark.slow
@pytest.mark.parametrize("rule", STRICT, ids=lambda rule: rule.kind)
@given(batch=st.lists(texts, min_size=1, max_size=6))
@example(batch=["", " ", "\n", "\r", "a\r", "\u2028", "a", "\x85a\n", ".", "...", "a\n\na\n\n\na", "\r\n\r\n", "\x00"])
@example(
    batch=[
        "the end... of a\n- b\n• the…\n",
        "文字。\n文字。\n",
        "\ufffd\U0010ffff",
        "ǅ ⅷ ² ٣ _",
        "a" * 300 + " " + "a" * 301,
    ]
)
def test_a_batch_gets_the_verdicts_that_its_documents_get_alone(rule: Any, batch: list[str]) -> None:
    found = judged([rule], batch)
    expected = [plain.verdict(rule, text) for text in batch]
    assert found.reasons == [one and one[0] for one in expected]
    assert found.values == pytest.approx([one[1] if one else 0.0 for one in expected])
    assert found.texts == batch


@pytest.mark.slow
@given(batch=st.lists(texts, min_size=1, max_size=8))
def test_the_first_rule_that_a_document_breaks_is_its_reason_and_one_that_breaks_none_stays(batch: list[str]) -> None:
    found = judged(STRICT, batch)
    for text, reason in zip(batch, found.reasons, strict=True):
        every = (plain.verdict(rule, text) for rule in STRICT)
        assert reason == next((one[0] for one in every if one is not None), None)


def test_verdicts_do_not_depend_on_how_documents_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [f"{'the word of ' * (n % 7)} number {n} {'and with ' * (n % 5)}.\n" * (n % 4) for n in range(60)]
    whole = judged(STRICT[:4], batch)
    monkeypatch.setattr(apply, "CHUNK_CHARACTERS", 100)
    assert judged(STRICT[:4], batch) == whole


def test_no_documents_have_no_verdicts() -> None:
    assert judged(STRICT, []) == Verdicts()


def test_a_rule_applies_to_its_domains_only() -> None:
    rules = [Code(domains=("code",)), Length(min_characters=1000, domains=("web",)), Length(min_characters=2000)]
    long_line = "x" * 1500
    assert judged(rules, [long_line], "code").reasons == ["code.long_line"]
    assert judged(rules, [long_line], "web").reasons == ["length.too_short"]
    assert judged(rules, ["x" * 3000], "web").reasons == [None]
    assert judged([], [""]).reasons == [None]
