import base64
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers, tokenizer
from bloomery.tokenizer import tokenizer as tokenizers_module
from bloomery.tokenizer.tokenizer import DOCUMENT, END, FILE, SPACE, SPECIAL, Tokenizer, byte_letters
from bloomery.tokenizer.train import LONGEST_WORD, train_byte_level
from tests.tokenizer.made import CODE, ELSEWHERE, TEXTS, VOCAB_SIZE, small, training_texts
from tests.tokenizer.test_importers import byte_bpe, like_llama

EDGES = ("", " ", "  ", "\n", " \n  \n", "\x00", "\ufeffa", "a\u0301", "\U0010ffff")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    small().save(folder)
    return folder


@given(TEXTS)
def test_every_text_comes_back_byte_for_byte_and_becomes_no_special_token(text: str) -> None:
    ids = small().encode(text)
    assert small().decode_bytes(ids) == text.encode()
    assert small().decode(ids) == text
    assert all(0 <= id < small().vocab_size for id in ids)
    assert not set(small().special.values()) & set(ids)


@pytest.mark.parametrize("text", [CODE, ELSEWHERE, *EDGES])
def test_indentation_marks_and_lone_space_come_back(text: str) -> None:
    assert small().decode(small().encode(text)) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_every_id_has_bytes_and_special_ones_have_none(ids: list[int]) -> None:
    special = set(small().special.values())
    pieces = [small().decode_bytes([id]) for id in ids]
    assert small().decode_bytes(ids) == b"".join(pieces)
    assert [piece == b"" for piece in pieces] == [id in special for id in ids]
    assert small().decode(ids) == b"".join(pieces).decode("utf-8", "replace")


@given(st.lists(TEXTS, max_size=8))
def test_a_batch_is_encoded_as_its_texts_are(texts: list[str]) -> None:
    assert small().encode_batch(texts) == [small().encode(text) for text in texts]


def spellings() -> list[str]:
    """Special tokens as text: alone, in pairs, cut, nested, and with what a cleaner might take away."""
    pairs = [one + other for one, other in product(SPECIAL, SPECIAL)]
    nested = [name[:3] + DOCUMENT + name[3:] for name in SPECIAL]
    sides = product(("", " ", "\n", "a", "<|"), ("", " ", "|>"))
    around = [f"{left}{name}{right}" for left, right in sides for name in SPECIAL]
    return [*pairs, *nested, *around, "".join(SPECIAL) * 3, *(name.upper() for name in SPECIAL)]


@pytest.mark.parametrize("after_a_file", [False, True])
def test_no_text_becomes_a_special_token(after_a_file: bool) -> None:
    tokenizer = reloaded() if after_a_file else small()
    special = set(tokenizer.special.values())
    for text, ids in zip(spellings(), tokenizer.encode_batch(spellings()), strict=True):
        assert not special & set(ids), text
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_text_that_spells_special_tokens_was_learned_as_text() -> None:
    """The training texts hold every spelling; no merge made one of them a single token."""
    assert all(len(small().encode(name)) > 1 for name in SPECIAL)
    assert len(set(small().special.values())) == len(SPECIAL)


def test_digits_are_single_tokens() -> None:
    for text in ("1234567890", "3.14159", "a1b22c333", "17 plus 25 is 42.", "0x1F"):
        pieces = [small().decode(one) for one in ([id] for id in small().encode(text))]
        assert [piece for piece in pieces if re.search(r"\d", piece)] == re.findall(r"\d", text)


def test_learned_tokens_make_familiar_text_short() -> None:
    text = next(iter(training_texts()))
    assert len(small().encode(text)) < 0.6 * len(text.encode())


@pytest.mark.slow
def test_a_line_without_space_makes_no_token_longer_than_a_word_and_is_encoded_whole() -> None:
    """Training looks at pieces of it: its time goes by the square of a word's length."""
    tokenizer = train_byte_level(["a" * 20_000 + "é" * 20_000], 500)
    pieces = [tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)]
    assert max(len(piece.decode("utf-8", "replace")) for piece in pieces) == LONGEST_WORD
    line = "é" * (4000 * LONGEST_WORD)
    assert tokenizer.decode(ids := tokenizer.encode(line)) == line
    assert len(ids) == 4000
    steps = json.loads(tokenizer._inner.to_str())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in steps] == ["Split", "ByteLevel"]


def test_the_pattern_splits_words_space_and_line_ends() -> None:
    """No token reaches from one word into the next, or from a line's end into the next line's letters."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    assert len(letters) == 256
    for id in range(small().vocab_size):
        piece = small().decode_bytes([id]).decode("utf-8", "replace")
        assert not re.search(r"[a-z] [a-z]|[a-z]\n|\n[a-z]{2}", piece), piece


# --- files ---------------------------------------------------------------------------------------------------------


@given(TEXTS)
def test_a_saved_tokenizer_gives_the_same_ids(text: str) -> None:
    assert reloaded().encode(text) == small().encode(text)


@cache
def reloaded() -> Tokenizer:
    with TemporaryDirectory() as folder:
        small().save(Path(folder))
        return Tokenizer.load(Path(folder))


def test_the_hash_stays_the_same_through_files_and_use(saved: Path, tmp_path: Path) -> None:
    again = Tokenizer.load(saved)
    again.encode("a text")
    again.save(tmp_path)
    assert again.hash == small().hash == Tokenizer.load(tmp_path).hash
    assert (tmp_path / FILE).read_bytes() == (saved / FILE).read_bytes()
    compact = json.dumps(json.loads((saved / FILE).read_text()), sort_keys=True)
    (tmp_path / FILE).write_text(compact)
    assert Tokenizer.load(tmp_path).hash == small().hash


def test_the_hash_changes_with_what_decides_about_ids(saved: Path, tmp_path: Path) -> None:
    facts = json.loads((saved / FILE).read_text())
    facts["model"]["merges"].pop()
    (tmp_path / FILE).write_text(json.dumps(facts))
    assert Tokenizer.load(tmp_path).hash != small().hash
    assert train_byte_level(training_texts()[:-2], VOCAB_SIZE).hash != small().hash


def test_training_again_in_another_process_gives_the_same_tokenizer() -> None:
    code = "from tests.tokenizer.made import small; print(small().hash)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == small().hash


def test_a_text_with_little_in_it_gives_fewer_ids_and_still_every_byte() -> None:
    tiny = train_byte_level(["ab ab"], 4096)
    assert 256 + len(SPECIAL) <= tiny.vocab_size < 300
    assert tiny.decode(tiny.encode("ß😀\x00")) == "ß😀\x00"
    assert train_byte_level([], 300).vocab_size == 256 + len(SPECIAL)


LACKING = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'


@pytest.mark.parametrize("text", ["", "{", "3", "[]", '"model"', "{}", '{"model": 3}', LACKING])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match="tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_torn_file_is_refused_wherever_it_was_cut(saved: Path, tmp_path: Path) -> None:
    data = (saved / FILE).read_bytes()
    for cut in range(0, len(data) - 2, len(data) // 20):
        (tmp_path / FILE).write_bytes(data[:cut])
        with pytest.raises(DataError, match=r"(?s)tokenizer\.json: is not a tokenizer.*Run its stage again"):
            Tokenizer.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"\xff" + data)
    with pytest.raises(DataError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_and_missing_special_tokens_are_errors(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    facts = json.loads((saved / FILE).read_text())
    facts["added_tokens"] = [token for token in facts["added_tokens"] if token["content"] != END]
    del facts["model"]["vocab"][END]
    (tmp_path / FILE).write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"lacks the special tokens <\|end\|>"):
        Tokenizer.load(tmp_path)


WORDY = st.lists(
    st.sampled_from(["ab", "Cd", "é", "東京", "7", "'s", " ", "  ", "\n", ",", "。", ".", "—", "²", "e\u0301"])
)


@settings(max_examples=300)
@given(WORDY.map("".join) | TEXTS, st.sampled_from([None, "NFC"]))
def test_pieces_that_end_with_words_have_the_ids_of_the_whole(text: str, normalizer: str | None) -> None:
    made = small() if normalizer is None else composing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "_cut", unhurried)
        assert made.encode_within(text, 10**9) == made.encode(text)


def unhurried(self: Tokenizer, text: str) -> Iterator[tuple[str, bool]]:
    """Cuts at every end of a word."""
    assert self._cuts_words
    places = [0, *(found.end() for found in tokenizers_module._WORD_END.finditer(text)), len(text)]
    for begin, end in pairwise(places):
        yield text[begin:end], end == len(text)


@cache
def composing() -> Tokenizer:
    spec = {**small().spec, "normalizer": {"type": "NFC"}}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))


@given(TEXTS, st.sampled_from([None, "NFC"]))
def test_no_text_has_fewer_tokens_than_its_bytes_say(text: str, normalizer: str | None) -> None:
    made = small() if normalizer is None else composing()
    assert made.max_token_bytes is not None
    assert len(made.encode(text)) * made.max_token_bytes >= len(text.encode())


def test_of_a_tokenizer_that_may_drop_text_nothing_is_known_by_bytes() -> None:
    for part, step in (
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
    ):
        changed = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**small().spec, part: step})))
        assert changed.max_token_bytes is None, step


def test_a_text_that_is_too_long_is_not_encoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watched:
        def __init__(self, inner: tokenizers.Tokenizer) -> None:
            self.inner = inner

        def encode_batch_fast(self, texts: list[str], **how: bool) -> list[tokenizers.Encoding]:
            sizes.extend(map(len, texts))
            return self.inner.encode_batch_fast(texts, **how)

    made = composing()
    assert made.max_token_bytes is not None
    monkeypatch.setattr(made, "_inner", Watched(made._inner))
    text = "ab cd " * 500_000
    assert made.encode_within(text, 100) == -(-len(text) // made.max_token_bytes)
    assert sizes == []
    least = made.encode_within(text, len(text) // made.max_token_bytes + 1)
    assert isinstance(least, int)
    assert len(small().encode(text[: sum(sizes)])) == least
    assert max(sizes) <= tokenizers_module.LONGEST_PIECE
    assert sum(sizes) < len(text) / 10
    sizes.clear()
    assert isinstance(made.encode_within("x" * 1_000_000, 40_000), int)
    assert max(sizes) == tokenizers_module.LONGEST_PIECE


# --- growth -----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match=r"the text has 102 bytes, which the tokenizer may expand 22 times"):
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
        with pytest.raises(DataError, match=r"the tokenizer library failed on a text: .*retry-limit"):
            encode(text)
    assert made.encode("a b")
