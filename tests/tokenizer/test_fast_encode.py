import json
import random
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from bloomery.core.errors import DataError
from bloomery.tokenizer import fast_encode, importers
from bloomery.tokenizer import train as tokenizer_train
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.fast_encode import HARD, Encoder, Ids
from bloomery.tokenizer.importers import with_special
from bloomery.tokenizer.tokenizer import PATTERNS, SPACE, SPECIAL, PatternName, Tokenizer, byte_letters
from bloomery.tokenizer.train import train_byte_level
from tests.tokenizer.made import CODE, ELSEWHERE, TEXTS, small, training_texts
from tests.tokenizer.shared import documents
from tests.tokenizer.test_train import WILD as PIECES
from tests.tokenizer.test_train import ours, theirs

NAMES: tuple[PatternName, ...] = get_args(PatternName)
WILD = st.one_of(
    TEXTS,
    st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")),
    st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")),
    st.lists(
        st.sampled_from(
            [*SPECIAL, "'S", "'ll", "don't", " \n", "\t\t", "aB", "ßE", "漢", "e\u0301", "1", "½", "!?", " ", "\r"]
        ),
        max_size=30,
    ).map("".join),
)


@cache
def made(name: PatternName) -> tuple[Tokenizer, Encoder]:
    tokenizer = train_byte_level([*training_texts(), *HARD], 900, name)
    return tokenizer, Encoder(tokenizer, aloud=False)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"add_dummy_prefix": False, "user_defined_symbols": ("\n", "\t", "é", "]", "^", "-")},
    {"character_coverage": 1.0, "split_digits": True, "allow_whitespace_only_pieces": True},
]
OURS = len(SETTINGS)


@cache
def pair(place: int) -> tuple[Tokenizer, Encoder]:
    """A tokenizer of SentencePiece as trained here, or of others' settings, and its encoder."""
    if place == OURS:
        return ours()[0], Encoder(ours()[0], aloud=False)
    tokenizer = with_special(importers.read_sentencepiece(theirs(**SETTINGS[place]), "here"), "here")
    return tokenizer, Encoder(tokenizer, aloud=False)


def changed(
    change: dict[str, Any], model: dict[str, Any] | None = None, of: Callable[[], Tokenizer] = small
) -> Tokenizer:
    """A tokenizer with other entries in its file."""
    spec = json.loads(json.dumps(of().spec)) | change
    spec["model"] |= model or {}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))


# --- parity with tokenizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(WILD, max_size=5))
def test_both_libraries_give_the_same_ids(name: PatternName, texts: list[str]) -> None:
    tokenizer, encoder = made(name)
    coded = encoder.encode_batch(texts)
    assert encoder.name == "tiktoken"
    assert [ids.tolist() for ids in coded] == tokenizer.encode_batch(texts)
    assert all(ids.dtype == np.uint32 for ids in coded)
    assert [tokenizer.decode_bytes(ids.tolist()) for ids in coded] == [text.encode() for text in texts]


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_both_libraries_cut_every_letter_of_unicode_alike(name: PatternName, step: int) -> None:
    """Bytes, and their pairs with some leading signs: what is joined shows the class that a letter is given."""
    letters = byte_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = [(letters[lead], letters[byte]) for lead in b"aA. 1'" for byte in range(128, 256)]
    vocab |= {left + right: 256 + place for place, (left, right) in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    words = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[name].regex), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.add_special_tokens(list(SPECIAL))
    encoder = Encoder(Tokenizer(inner), aloud=False)
    assert encoder.name == "tiktoken"
    given = (
        range(0x80, 0xD800, step),
        range(0xE000, 0x33480, step),
        range(0xE0000, 0xE0200),
        range(0x33480, 0x110000, 997),
    )
    every = [chr(code) for codes in given for code in codes]
    for at in range(0, len(every), 2000):
        some = every[at : at + 2000]
        leads = ".a" if set(map(unicodedata.category, some)) <= {"Lo", "Cn"} else "aA. 1'"  # letters join the a alone
        texts = ["".join(f"{lead}{one}\n" for one in some) for lead in leads]
        assert [ids.tolist() for ids in encoder.encode_batch(texts)] == Tokenizer(inner).encode_batch(texts)


@pytest.mark.parametrize("name", NAMES)
def test_text_that_spells_special_tokens_stays_text(name: PatternName) -> None:
    tokenizer, encoder = made(name)
    for text in (*SPECIAL, "".join(SPECIAL), " ".join(SPECIAL)):
        assert not set(tokenizer.special.values()) & set(encoder.encode_batch([text])[0].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("word", ["a", "漢字" * 200_000, "=", "= " * 400_000, "\n", "7", " ", "abcxyz"])
@pytest.mark.parametrize("of", ["byte-level", "SentencePiece"])
def test_a_word_of_a_megabyte_takes_seconds(word: str, of: str) -> None:
    tokenizer, encoder = made("qwen2") if of == "byte-level" else pair(OURS)
    word = "".join(random.Random(1).choices(word, k=10**6)) if len(word) < 10 else word
    before = encoder.slow_texts
    assert encoder.encode_batch([word])[0].tolist() == tokenizer.encode(word)
    assert of == "SentencePiece" or encoder.slow_texts - before == (word[0] == " ")


@pytest.mark.slow
def test_white_space_without_end_is_left_to_the_slower_library() -> None:
    tokenizer = made("qwen2")[0]
    encoder = Encoder(tokenizer, aloud=False)
    texts = ["a", " " * 10**6, "b", "\t" * 10**6 + "c"]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)
    assert encoder.facts() == {"encoder": "tiktoken", "texts_left_to_tokenizers": 2}


def test_half_a_surrogate_pair_is_an_error_that_says_where() -> None:
    encoder = Encoder(small())
    encoder.encode_batch(["x" * fast_encode.CHECKED_BYTES])
    with pytest.raises(DataError, match="half a surrogate pair at character 2"):
        encoder.encode_batch(["ab\ud83dc"])


# --- parity with tokenizers, of SentencePiece models ----------------------------------------------------------------


@pytest.mark.parametrize("place", range(OURS + 1))
@given(texts=st.lists(PIECES, max_size=4))
def test_tiktoken_gives_the_ids_of_a_sentencepiece_model(place: int, texts: list[str]) -> None:
    tokenizer, encoder = pair(place)
    coded = encoder.encode_batch(texts)
    assert encoder.name == "tiktoken", encoder.why
    assert [ids.tolist() for ids in coded] == tokenizer.encode_batch(texts)
    assert all(ids.dtype == np.uint32 for ids in coded)


@pytest.mark.parametrize("place", range(OURS + 1))
def test_hard_texts_special_tokens_and_characters_without_pieces_too(place: int) -> None:
    tokenizer, encoder = pair(place)
    every = ["".join(map(chr, range(at, at + 997))) for at in (*range(0, 0xD000, 1997), 0x1F300, 0x20000, 0x10F000)]
    texts = [*HARD, *every, *SPECIAL, "".join(SPECIAL), "<unk><s></s><0x41>", SPACE * 5, f" {SPACE}a{SPACE} ", CODE]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)
    assert encoder.name == "tiktoken", encoder.why


@pytest.mark.slow
def test_a_thousand_documents_have_the_same_ids() -> None:
    texts = documents(1500)
    tokenizer = tokenizer_train.train_sentencepiece(texts[::3], SentencePiece(vocab_size=4000))
    encoder = Encoder(tokenizer)
    assert encoder.name == "tiktoken"
    for at in range(0, len(texts), 500):
        batch = texts[at : at + 500]
        assert [ids.tolist() for ids in encoder.encode_batch(batch)] == tokenizer.encode_batch(batch)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1), st.data())
def test_ranks_become_all_of_their_ids(table: list[list[int]], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, len(table) - 1)))
    made = Ids.of(table)(np.array(ranks, dtype=np.uint32))
    assert made.tolist() == [id for rank in ranks for id in table[rank]]
    assert made.dtype == np.uint32


# --- what tiktoken cannot do ---------------------------------------------------------------------------------------


def test_ids_in_another_order_than_merges_are_translated() -> None:
    spec = small().spec
    vocab: dict[str, int] = spec["model"]["vocab"]
    turned = {token: id if id < len(SPECIAL) else len(vocab) + len(SPECIAL) - 1 - id for token, id in vocab.items()}
    tokenizer = changed({}, {"vocab": turned})
    encoder = Encoder(tokenizer)
    assert encoder.name == "tiktoken"
    assert [ids.tolist() for ids in encoder.encode_batch([CODE, ELSEWHERE])] == tokenizer.encode_batch(
        [CODE, ELSEWHERE]
    )


def unfit() -> list[tuple[Tokenizer, str]]:
    q, z, j = (byte_letters()[byte] for byte in b"qzj")
    model: dict[str, Any] = small().spec["model"]
    first: dict[str, Any] = small().spec["added_tokens"][0]
    size = len(model["vocab"])
    the = {**first, "id": size, "content": "the", "special": False}
    spaced = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    vocab = model["vocab"] | {q + z: size, z + j: size + 1, q + z + j: size + 2}
    # qzj is made of q and zj, and qz is made before zj: no text ever holds it, but tiktoken would join qz and j
    never = {"vocab": vocab, "merges": [*model["merges"], [q, z], [z, j], [q, z + j]]}
    late = {"vocab": vocab, "merges": [*model["merges"], [z, j], [q, z + j], [q, z], [q + z, j]]}
    return [
        (changed({"normalizer": {"type": "NFC"}}), "changes text before"),
        (changed({"added_tokens": [*small().spec["added_tokens"], the]}), "splits 'the' off"),
        (changed({"pre_tokenizer": {"type": "Whitespace"}}), "one pattern"),
        (changed({"pre_tokenizer": spaced}), "one pattern"),
        (changed({}, {"byte_fallback": True}), "not byte-level BPE"),
        (changed({}, never), "do not make 'qzj' from its letters"),
        (changed({}, late), "out of order"),
    ]


def trained() -> Tokenizer:
    return ours()[0]


def unfit_pieces() -> list[tuple[Tokenizer, str]]:
    spec = trained().spec
    size, merges = len(spec["model"]["vocab"]), spec["model"]["merges"]
    token = spec["added_tokens"][0]
    long = [*spec["added_tokens"], {**token, "id": size, "content": "lamp", "special": False}]
    short = [*spec["added_tokens"], {**token, "id": spec["model"]["vocab"]["a"], "content": "a", "special": True}]
    folded = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *spec["normalizer"]["normalizers"]]}
    q, z, j = "qzj"
    vocab = spec["model"]["vocab"] | {q + z: size, z + j: size + 1, q + z + j: size + 2, f"q{SPACE}": size + 3}
    return [
        (changed({"normalizer": folded}, of=trained), "changes text"),
        (changed({"pre_tokenizer": {"type": "Whitespace"}}, of=trained), "not SentencePiece BPE"),
        (changed({"added_tokens": long}, of=trained), "splits '.*' off"),
        (changed({"added_tokens": short}, of=trained), "special token 'a' is one character"),
        (
            changed({}, {"vocab": vocab, "merges": [*merges, [q, z], [z, j], [q, z + j]]}, of=trained),
            "do not make 'qzj'",
        ),
        (
            changed({}, {"vocab": vocab, "merges": [*merges, [z, j], [q, z + j], [q, z], [q + z, j]]}, of=trained),
            "out of order",
        ),
        (changed({}, {"vocab": vocab, "merges": [*merges, [q, SPACE]]}, of=trained), "crosses a space"),
    ]


@pytest.mark.parametrize("place", range(14))
def test_where_tiktoken_would_give_other_ids_tokenizers_encodes_and_it_is_said(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fast_encode, "info", lambda text, style: said.append(text))
    tokenizer, why = [*unfit(), *unfit_pieces()][place]
    encoder = Encoder(tokenizer)
    assert encoder.name == "tokenizers"
    assert re.search(why, encoder.why)
    assert len(said) == 1
    assert encoder.why in said[0]
    assert encoder.facts() == {"encoder": "tokenizers", "because": encoder.why}
    texts = ["qzj qqzjj", CODE, ELSEWHERE, ""]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)
    assert len(said) == 1


def test_a_pattern_that_cuts_otherwise_is_found_in_the_hard_texts_or_in_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = PATTERNS["llama3"]._replace(quick=PATTERNS["qwen2"].quick)
    monkeypatch.setitem(PATTERNS, "llama3", wrong)
    tokenizer = train_byte_level(["567 567 " * 50], 300, "llama3")
    assert "in another way" in Encoder(tokenizer, aloud=False).why
    monkeypatch.setattr(fast_encode, "HARD", ("nothing hard",))
    late = Encoder(tokenizer, aloud=False)
    assert late.name == "tiktoken"
    assert [ids.tolist() for ids in late.encode_batch(["a 567"])] == tokenizer.encode_batch(["a 567"])
    assert late.name == "tokenizers"


def test_every_pattern_has_a_name_in_llama_cpp_and_digits_are_single_where_it_says_so() -> None:
    assert {pattern.gguf for pattern in PATTERNS.values()} == {"gpt-2", "llama-bpe", "qwen2", "gpt-4o"}
    for name in NAMES:
        tokenizer = train_byte_level(["2024 1234 5678 999 " * 50], 400, name)
        single = len(tokenizer.encode("1234567890")) == 10
        assert single == PATTERNS[name].splits_digits
