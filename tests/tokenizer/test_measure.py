import pytest

from bloomery.tokenizer import stats
from bloomery.tokenizer.fast_encode import Encoder
from tests.tokenizer.made import CODE, ELSEWHERE, small

TEXTS = {"code": [CODE, CODE + "x = 1\n"], "other": [ELSEWHERE, ""]}


def test_bytes_per_token_and_unused_ids_are_what_counting_one_by_one_gives() -> None:
    counts = stats.used(small(), Encoder(small()), TEXTS)
    ratios = stats.bytes_per_token(TEXTS, counts)
    for domain, some in TEXTS.items():
        ids = [id for text in some for id in small().encode(text)]
        assert ratios[domain] == round(sum(len(text.encode()) for text in some) / len(ids), 3)
        assert all(counts[domain][id] == ids.count(id) for id in range(small().vocab_size))
    seen = {id for some in TEXTS.values() for text in some for id in small().encode(text)}
    assert stats.unused(small(), counts) == small().vocab_size - len(seen | small().special_ids)
    assert stats.used(small(), Encoder(small()), {"none": [""]})["none"].sum() == 0


def test_fertility_counts_tokens_for_words_and_characters_by_script() -> None:
    texts = {"a": ["the lamp is here", "один два"], "b": ["東京都は日本の首都", "12 !"]}
    found = stats.fertility(Encoder(small()), texts, "script")
    assert found.keys() == {"latin", "cyrillic", "japanese", "none"}
    tokens = len(small().encode("the lamp is here"))
    assert found["latin"] == {
        "documents": 1,
        "tokens_per_word": round(tokens / 4, 3),
        "tokens_per_character": round(tokens / 16, 3),
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [("Größe", "latin"), ("ёлка и", "cyrillic"), ("中文文本", "cjk"), ("한국어", "hangul"), ("العربية", "arabic"),
     ("ひらがなと漢字", "japanese"), ("हिन्दी", "devanagari"), ("123 ...", "none"), ("", "none")],
)  # fmt: skip
def test_a_script_is_what_most_letters_are(text: str, name: str) -> None:
    assert stats.script(text) == name


def test_languages_are_told_apart_by_name_where_asked() -> None:
    pytest.importorskip("py3langid")
    texts = {
        "a": ["This is a sentence in the English language about a lamp.", "Dies ist ein Satz in deutscher Sprache."]
    }
    assert stats.fertility(Encoder(small()), texts, "langid").keys() == {"en", "de"}
