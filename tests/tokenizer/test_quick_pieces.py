import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bloomery.tokenizer import train
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.fast_encode import HARD, Encoder, Ids
from bloomery.tokenizer.importers import with_special
from bloomery.tokenizer.tokenizer import SPACE, SPECIAL, Tokenizer
from tests.tokenizer.made import CODE, ELSEWHERE, training_texts
from tests.tokenizer.shared import documents
from tests.tokenizer.test_pieces import WILD, ours, theirs

SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"add_dummy_prefix": False, "user_defined_symbols": ("\n", "\t", "é", "]", "^", "-")},
    {"character_coverage": 1.0, "split_digits": True, "allow_whitespace_only_pieces": True},
]


@cache
def pair(place: int) -> tuple[Tokenizer, Encoder]:
    """A tokenizer as trained here, or of others' settings, and its encoder."""
    if place == len(SETTINGS):
        return ours()[0], Encoder(ours()[0], aloud=False)
    tokenizer = with_special(train.read(theirs(**SETTINGS[place]), "here"), "here")
    return tokenizer, Encoder(tokenizer, aloud=False)


@pytest.mark.parametrize("place", range(len(SETTINGS) + 1))
@given(texts=st.lists(WILD, max_size=4))
def test_tiktoken_gives_the_ids_of_a_sentencepiece_model(place: int, texts: list[str]) -> None:
    tokenizer, encoder = pair(place)
    coded = encoder.encode_batch(texts)
    assert encoder.name == "tiktoken", encoder.why
    assert [ids.tolist() for ids in coded] == tokenizer.encode_batch(texts)
    assert all(ids.dtype == np.uint32 for ids in coded)


@pytest.mark.parametrize("place", range(len(SETTINGS) + 1))
def test_hard_texts_special_tokens_and_characters_without_pieces_too(place: int) -> None:
    tokenizer, encoder = pair(place)
    every = ["".join(map(chr, range(at, at + 997))) for at in (*range(0, 0xD000, 1997), 0x1F300, 0x20000, 0x10F000)]
    texts = [*HARD, *every, *SPECIAL, "".join(SPECIAL), "<unk><s></s><0x41>", SPACE * 5, f" {SPACE}a{SPACE} ", CODE]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)
    assert encoder.name == "tiktoken", encoder.why


@pytest.mark.slow
@pytest.mark.parametrize("word", ["a" * 10**6, " " * 10**6, "漢字" * 200_000, "= " * 400_000, "\n" * 10**6])
def test_a_word_of_a_megabyte_takes_seconds(word: str) -> None:
    tokenizer, encoder = pair(len(SETTINGS))
    assert encoder.encode_batch([word])[0].tolist() == tokenizer.encode(word)


@pytest.mark.slow
def test_thousands_of_documents_have_the_same_ids() -> None:
    texts = documents(6000)
    tokenizer = train.train_sentencepiece(texts[::3], SentencePiece(vocab_size=8000))
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


def changed(change: dict[str, Any], model: dict[str, Any]) -> Tokenizer:
    spec = json.loads(json.dumps(ours()[0].spec)) | change
    spec["model"] |= model
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))


def unfit() -> list[tuple[Tokenizer, str]]:
    spec = ours()[0].spec
    size, merges = len(spec["model"]["vocab"]), spec["model"]["merges"]
    token = spec["added_tokens"][0]
    long = [*spec["added_tokens"], {**token, "id": size, "content": "lamp", "special": False}]
    short = [*spec["added_tokens"], {**token, "id": spec["model"]["vocab"]["a"], "content": "a", "special": True}]
    folded = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *spec["normalizer"]["normalizers"]]}
    q, z, j = "qzj"
    vocab = spec["model"]["vocab"] | {q + z: size, z + j: size + 1, q + z + j: size + 2, f"q{SPACE}": size + 3}
    return [
        (changed({"normalizer": folded}, {}), "changes text"),
        (changed({"pre_tokenizer": {"type": "Whitespace"}}, {}), "no SentencePiece BPE"),
        (changed({"added_tokens": long}, {}), "takes '.*' out of text"),
        (changed({"added_tokens": short}, {}), "special token 'a' is one character"),
        (changed({}, {"vocab": vocab, "merges": [*merges, [q, z], [z, j], [q, z + j]]}), "do not make 'qzj'"),
        (changed({}, {"vocab": vocab, "merges": [*merges, [z, j], [q, z + j], [q, z], [q + z, j]]}), "out of order"),
        (changed({}, {"vocab": vocab, "merges": [*merges, [q, SPACE]]}), "reaches over a space"),
    ]


@pytest.mark.parametrize("place", range(7))
def test_where_tiktoken_would_give_other_ids_tokenizers_encodes(place: int) -> None:
    tokenizer, why = unfit()[place]
    encoder = Encoder(tokenizer, aloud=False)
    assert encoder.name == "tokenizers"
    assert why.split("'")[0] in encoder.why
    texts = ["qzj qqzjj", CODE, ELSEWHERE, "", *training_texts()[:5]]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)
