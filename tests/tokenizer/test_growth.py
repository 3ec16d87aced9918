import base64
import json
import unicodedata
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers, tokenizer
from bloomery.tokenizer.tokenizer import FILE, SPACE, Tokenizer
from tests.tokenizer.made import small
from tests.tokenizer.test_importers import byte_bpe, like_llama

LONG = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
HARMFUL: dict[str, tuple[dict[str, Any], str]] = {
    "one letter to 10^10": (
        {"normalizer": {"type": "Sequence", "normalizers": [LONG] * 5}},
        r"has steps that can make a text 20,000,000,000 times as long \(Replace, Replace",
    ),
    "in nested sequences": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [LONG] * 2}] * 99}},
        "as long",
    ),
    "in the spelling of older versions": ({"normalizer": {"prepend": "z" * 100_000}}, "Prepend that can make a text"),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "z" * 100_000}}, "100,001 times as long"),
    "a pattern": ({"normalizer": {**LONG, "pattern": {"Regex": "z*"}, "content": "x" * 9_999}}, "10,000 times as long"),
    "an empty pattern": ({"normalizer": {**LONG, "pattern": {"String": ""}}}, "Replace with an empty pattern"),
    "letters of bytes": (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
                ]
                * 20,
            }
        },
        "ByteLevel, ByteLevel",
    ),
    "a decoder": ({"decoder": {"type": "Sequence", "decoders": [LONG] * 5}}, "has steps that can make a text"),
    "an empty pattern of a decoder": ({"decoder": {**LONG, "pattern": {"String": ""}}}, "with an empty pattern"),
}


@pytest.mark.parametrize(("parts", "why"), HARMFUL.values(), ids=HARMFUL)
def test_a_tokenizer_that_makes_texts_much_longer_is_refused_before_it_runs(
    parts: dict[str, Any], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = {**json.loads(byte_bpe().to_str()), **parts}
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 700, "content": "aaa", "normalized": True})
    (tmp_path / FILE).write_text(json.dumps(spec), encoding="utf-8")
    for read in (importers.load, Tokenizer.load):
        with pytest.raises(DataError, match=why) as caught:
            read(tmp_path)
        assert caught.value.hint
    assert "panicked" not in capfd.readouterr().err


def table(*texts: bytes) -> str:
    return base64.b64encode(bytes(4) + b"\0".join(texts) + b"\0").decode()


KNOWN: list[tuple[dict[str, Any], float]] = [
    ({"normalizer": json.loads(like_llama().to_str())["normalizer"]}, 12),
    ({"normalizer": {"type": "NFKC"}, "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE}}, 44),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": table(b"a", b"x" * 33)}}, 33),
    ({"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "abc"}}, 1.5),
]


@pytest.mark.parametrize(("parts", "factor"), KNOWN)
def test_the_steps_of_known_models_have_a_small_factor(parts: dict[str, Any], factor: float) -> None:
    spec = tokenizer._steps_of(parts)
    assert tokenizer.growth_problem(spec) == ""
    assert tokenizer.growth(spec) == factor


CHANGES = [
    *({"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
    {"type": "Prepend", "prepend": SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "xyz"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
]
LONGEST = "\u0390\ufdfa\U0001d160\u0130\u023a\u4e00 a"


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.lists(st.sampled_from(CHANGES), max_size=3))
def test_no_text_grows_by_more_than_the_bound(text: str, changes: list[dict[str, Any]]) -> None:
    spec = tokenizer._steps_of({"normalizer": {"type": "Sequence", "normalizers": changes}})
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(spec)).normalizer
    for each in (text, LONGEST, *LONGEST):
        assert len(normalizer.normalize_str(each).encode()) <= tokenizer.growth(spec) * len(each.encode())


def test_no_character_grows_by_more_than_the_factors_of_unicode() -> None:
    letters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    forms: dict[Literal["NFC", "NFD", "NFKC", "NFKD"], float] = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0}
    for form, most in forms.items():
        assert max(len(unicodedata.normalize(form, one).encode()) / len(one.encode()) for one in letters) == most
    assert max(len(one.lower().encode()) / len(one.encode()) for one in letters) == 1.5


def test_a_text_that_may_become_too_long_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {**small().spec, "normalizer": {"type": "NFKC"}}
    made = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    monkeypatch.setattr(tokenizer, "MAX_NORMALIZED_BYTES", 2200)
    assert made.encode_within("ab " * 33, 1000) == made.encode("ab " * 33)
    with pytest.raises(DataError, match=r"the text has 102 bytes, and the tokenizer may make 22 times as many of it"):
        made.encode_within("ab " * 34, 1000)


def test_no_text_is_padded_or_cut() -> None:
    inner = tokenizers.Tokenizer.from_str(small()._inner.to_str())
    inner.enable_padding(length=1000)
    inner.enable_truncation(2)
    assert Tokenizer(inner).encode("one two three four") == small().encode("one two three four")


def test_a_text_that_the_regular_expressions_of_a_tokenizer_give_up_on_is_an_error() -> None:
    spec = json.loads(small()._inner.to_str())
    slow = {"type": "Split", "pattern": {"Regex": r"(a|a|aa)+$|\w+"}, "behavior": "Isolated", "invert": False}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, last]}
    made, text = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec))), "a" * 60 + "!"
    for encode in (made.encode, lambda text: made.encode_batch([text]), lambda text: made.encode_within(text, 100)):
        with pytest.raises(DataError, match=r"its library gave up on a text: .*retry-limit"):
            encode(text)
    assert made.encode("a b")
