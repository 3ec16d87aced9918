from pathlib import Path

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data.filters import heuristics
from bloomery.data.filters.apply import DocumentColumns, Rule, judge
from bloomery.data.filters.heuristics import Code, Length
from bloomery.data.filters.published import C4, FineWeb, Gopher, Repetition
from bloomery.stages.config import Filter

PROSE = (
    "The small furnace was lit before dawn, and it had to burn until the iron ran together at the bottom of the shaft. "
    "Nobody in the valley knew who had built it, but everyone knew that charcoal and patience were what it wanted. "
    "When the bloom came out, two of the older men turned it with long tongs while a third one struck it. "
    "They have told me that a good bloom sounds like a bell, with a low note that stays in your chest for a while.\n\n"
    "By evening the slag lay in a heap beside the path. Children looked for glassy pieces of it to carry home."
)


def found(rule: Rule, text: str, name: str = "1", address: str | None = None) -> tuple[str, float] | None:
    verdicts = judge([rule], DocumentColumns([text], ["web"], [address], [name]))
    return None if verdicts.reasons[0] is None else (verdicts.reasons[0], verdicts.values[0])


@pytest.mark.parametrize("rule", [Length(), Gopher(), Repetition(), C4(), FineWeb(), Code()])
def test_ordinary_prose_passes_every_rule(rule: Rule) -> None:
    text = PROSE.replace(". ", ".\n") if isinstance(rule, Code) else PROSE
    assert found(rule, text) is None


CHINESE = "春天来了，公园里的花都开了。孩子们在草地上跑来跑去，老人们坐在长椅上聊天。"
THAI = "ภาษาไทยไม่มีช่องว่างระหว่างคำในประโยค ผู้เรียนควรฝึกฟังและพูดทุกวัน"
GERMAN = "Der Park ist offen, und viele Kinder laufen am Nachmittag dort über das Gras zum Fluss. " * 6


@pytest.mark.parametrize(
    ("text", "rule", "reason", "settings"),
    [
        (GERMAN, Gopher, "gopher.few_stop_words", {"min_stop_words": 0}),
        (
            CHINESE,
            Gopher,
            "gopher.too_few_words",
            {"min_words": 1, "max_mean_word_characters": 1000, "min_stop_words": 0},
        ),
        (THAI, Gopher, "gopher.too_few_words", {"min_words": 1, "max_mean_word_characters": 1000, "min_stop_words": 0}),
        (CHINESE, C4, "c4.too_few_sentences", {"min_sentences": 0}),
        (THAI, FineWeb, "fineweb.few_line_ends", {"min_lines_with_end": 0, "max_lines_per_word": 1}),
        (
            CHINESE.replace("。", "。\n"),
            FineWeb,
            "fineweb.short_lines",
            {"max_short_lines": 1, "max_lines_per_word": 1},
        ),
    ],
)
def test_the_settings_that_the_docs_name_keep_other_languages(
    text: str, rule: type[Gopher | C4 | FineWeb], reason: str, settings: dict[str, float]
) -> None:
    assert (verdict := found(rule(), text)) is not None
    assert verdict[0] == reason
    assert found(rule(**settings), text) is None
    page = Path(__file__).parents[3] / "docs" / "understand" / "filter-rules.md"
    documented = page.read_text(encoding="utf-8")
    assert f"`{reason}`" in documented
    assert all(f"{name} = {value}`" in documented for name, value in settings.items())


@pytest.mark.parametrize("rule", [Length(), Gopher(), Repetition(), C4(), FineWeb(), Code()])
@pytest.mark.parametrize("text", ["", " ", "\n\n", "a", "\u2028", "💥" * 100, "x" * 10_000, "{" * 100], ids=range(8))
def test_odd_texts_get_a_verdict_and_no_error(rule: Rule, text: str) -> None:
    verdict = found(rule, text)
    assert verdict is None or verdict[0].startswith(f"{rule.kind}.")


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (Length(min_characters=10), "short", "length.too_short"),
        (Length(min_characters=0, max_characters=10), "x" * 11, "length.too_long"),
        (Gopher(), "The words of this are too few.", "gopher.too_few_words"),
        (Gopher(max_words=60), PROSE, "gopher.too_many_words"),
        (Gopher(), "a to be of it " * 20, "gopher.short_words"),
        (Gopher(), "incomprehensibilities " * 60, "gopher.long_words"),
        (Gopher(), PROSE.replace(" t", " #t"), "gopher.symbols"),
        (Gopher(), PROSE.replace(" a", " ... a").replace(" th", " … th"), "gopher.symbols"),
        (Gopher(), "\n".join("- " + line for line in PROSE.split(". ")).replace("\n\n", "\n- "), "gopher.bullet_lines"),
        (Gopher(), PROSE.replace(". ", "...\n"), "gopher.ellipsis_lines"),
        (Gopher(), "the of and 12345 678 90.12 " * 30, "gopher.few_alphabetic_words"),
        (Gopher(), "Kannitverstan wohnt irgendwo hinter Amsterdam " * 20, "gopher.few_stop_words"),
        (Repetition(), "same line here\n" * 5 + PROSE, "repetition.duplicate_lines"),
        (Repetition(), PROSE + "\n\n" + PROSE, "repetition.duplicate_paragraphs"),
        (Repetition(), PROSE + " buy cheap pills now" * 40, "repetition.top_2gram"),
        (Repetition(), PROSE + " " + PROSE.split("\n")[0], "repetition.duplicate_5grams"),
        (C4(), PROSE + " Lorem ipsum dolor.", "c4.lorem_ipsum"),
        (C4(), PROSE.replace("small", "{small}"), "c4.curly_bracket"),
        (C4(), "One sentence only, without an end", "c4.too_few_sentences"),
        (C4(), "Please enable JavaScript.\nWe use cookies.\n" * 9, "c4.too_few_sentences"),
        (C4(min_kept_lines=0.9), PROSE.replace(". ", ".\n") + "\nHome\nAbout\nContact", "c4.few_kept_lines"),
        (C4(bad_words=("glassy pieces",)), PROSE.replace(". ", ".\n"), "c4.bad_words"),
        (FineWeb(), "Home\nAbout\nContact us today for more\n" * 3, "fineweb.few_line_ends"),
        (FineWeb(), "Short one.\nAnother.\nThird.", "fineweb.short_lines"),
        (
            FineWeb(max_short_lines=1.0),
            "A line that is long enough to stand.\n" * 4,
            "fineweb.duplicate_line_characters",
        ),
        (FineWeb(max_short_lines=1.0), "alone.\ntwo.\nthree.\nfour.", "fineweb.lines_per_word"),
        (Code(), "x = 1\n" + "y" * 2000, "code.long_line"),
        (Code(), ("z" * 300 + "\n") * 3, "code.long_lines"),
        (Code(), "+-*/ ()[] {}\n" * 10, "code.few_alphanumeric"),
        (Code(), '<?xml version="1.0"?>\n<project/>', "code.xml"),
        (Code(), "# Auto-generated by make. DO NOT EDIT.\nx = 1\n", "code.generated"),
    ],
)
def test_what_a_rule_is_for_is_dropped_by_its_name(rule: Rule, text: str, expected: str) -> None:
    verdict = found(rule, text)
    assert verdict is not None
    assert verdict[0] == expected


def test_the_value_is_the_one_the_rule_saw() -> None:
    assert found(Gopher(), "three little words") == ("gopher.too_few_words", 3)
    assert found(Code(max_line_characters=5), "abc\nabcdefg") == ("code.long_line", 7)


PAGE = "<!DOCTYPE html><html><head><script>var a = 1;</script><style>p {}</style></head><body>%s</body></html>"


def test_markup_without_text_is_dropped_and_a_page_with_text_stays() -> None:
    rule = Code(max_line_characters=10**6, max_mean_line_characters=10**6)
    assert found(rule, PAGE % "<p>Hi</p>") == ("code.few_visible_characters", 2)
    assert found(rule, PAGE % ("<div class='a'></div>" * 200 + "word " * 30)) == pytest.approx(
        ("code.markup", 149 / len(PAGE % ("<div class='a'></div>" * 200 + "word " * 30)))
    )
    assert found(rule, PAGE % f"<p>{PROSE}</p>") is None
    assert found(rule, "<p>no text</p><script>", "pages/a.html") == ("code.few_visible_characters", 7)


def test_data_files_are_known_by_the_end_of_their_name_or_address() -> None:
    rule = Code(max_line_characters=10**6, max_mean_line_characters=10**6)
    data = '{"name": "value"}'
    assert found(rule, data, "a/b.json") == ("code.short_data", 17)
    assert found(rule, data, "7", "https://x.org/a.YML?raw=1") == ("code.short_data", 17)
    assert found(rule, data, "a/b.py") is None
    assert found(rule, data * 400, "b.json") == ("code.long_data", 6800)
    assert found(rule, "name: 1234 5678\n" * 10, "b.yaml") == ("code.few_letters", 0.25)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x = 1\ny = 2\n" * 20, "a.py", "code.few_comments"),
        ("# only words\n" * 20 + "x = 1", "a.py", "code.many_comments"),
        ('"""' + PROSE + '"""\nx = 1', "a.py", "code.many_comments"),
        ("/* all\n of\n it */ int a;\nint c = b + 4;\n", "a.c", None),
        ("// said\nint main() { return 0; }\n", "a.rs", None),
        ("x = 1\n" * 20, "a.unknown", None),
    ],
)
def test_comments_are_counted_where_their_language_is_known(text: str, name: str, expected: str | None) -> None:
    verdict = found(Code(min_comments=0.01, max_comments=0.8, max_mean_line_characters=1000), text, name)
    assert (verdict and verdict[0]) == expected


def test_bad_words_may_stand_in_a_file_and_a_missing_file_is_named(tmp_path: Path) -> None:
    text = PROSE.replace(". ", ".\n")
    (tmp_path / "bad.txt").write_text("# a list\nnothing\n\nCharcoal and\n")
    assert found(C4(bad_words_path=tmp_path / "bad.txt"), text) == ("c4.bad_words", 1)
    with pytest.raises(DataError, match=r"missing\.txt: cannot be read"):
        found(C4(bad_words_path=tmp_path / "missing.txt"), text)


def test_a_recipe_names_rules_by_kind_and_an_unknown_threshold_is_explained() -> None:
    config = build(Filter, {"rules": [{"kind": "gopher", "min_words": 10}, {"kind": "code", "domains": ["code"]}]})
    assert config.rules == (Gopher(min_words=10), Code(domains=("code",)))
    with pytest.raises(ConfigError, match=r"(?s)rules\.0\.min_word: unknown key.*Did you mean 'min_words'"):
        build(Filter, {"rules": [{"kind": "gopher", "min_word": 10}]})
    with pytest.raises(ConfigError, match="min_scores has the domain 'web' twice"):
        build(Filter, {"min_scores": [{"domain": "web", "min_score": 0.1}, {"domain": "web", "min_score": 0.2}]})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("length", {"max_characters": 99}, "min_characters = 100 is above max_characters = 99"),
        ("gopher", {"min_words": 100_001}, "min_words = 100001 is above max_words = 100000"),
        ("code", {"min_comments": 0.6, "max_comments": 0.5}, r"min_comments = 0\.6 is above max_comments = 0\.5"),
    ],
)
def test_bounds_that_no_document_can_meet_are_refused(kind: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"no document meets both: {message}"):
        build(Filter, {"rules": [{"kind": kind, **settings}]})


def test_a_document_may_meet_bounds_that_are_equal() -> None:
    assert found(Length(min_characters=len(PROSE), max_characters=len(PROSE)), PROSE) is None


@pytest.mark.parametrize(
    ("name", "address", "suffix"),
    [
        ("data/a.py", None, ".py"),
        ("q/code.parquet:17", None, ""),
        ("q/code.parquet:17", "https://x/a/b.HTML?raw=1", ".html"),
        ("q/pages.warc.gz:9", "https://x/data.json#a", ".json"),
        ("q/rows.jsonl:3#2", None, ""),
        ("src/main.c:12", None, ".c"),
    ],
)
def test_the_kind_of_a_document_is_that_of_its_own_file(name: str, address: str | None, suffix: str) -> None:
    assert heuristics._suffix(name, address) == suffix
