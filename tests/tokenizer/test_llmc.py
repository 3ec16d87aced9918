"""Tokenizer files of llm.c, laid out by hand, and those of GPT-2."""

import re
import struct
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers
from bloomery.tokenizer.chat_template import EVERY_SPECIAL
from bloomery.tokenizer.tokenizer import SPECIAL, PatternName, Tokenizer
from bloomery.tokenizer.train import train
from tests.shared import needs
from tests.tokenizer.made import CODE, ELSEWHERE, TEXTS, small, training_texts
from tests.tokenizer.shared import GPT2
from tests.tokenizer.test_importers import ranks


def by_hand(tokens: list[bytes], end: int, version: int = 2, cut: bytes = b"") -> bytes:
    body = b"".join(struct.pack("<B", len(token)) + token for token in tokens)
    return struct.pack("<4i1008s", 20240328, version, len(tokens), end if version == 2 else 0, cut) + body


def small_file(folder: Path) -> Path:
    """Bytes, then merges of the small tokenizer, then the token at the end of a text."""
    tokens = [*ranks(), b"<|endoftext|>"]
    (folder / "some_tokenizer.bin").write_bytes(by_hand(tokens, len(tokens) - 1))
    return folder / "some_tokenizer.bin"


@pytest.fixture(scope="module")
def read_in(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return importers.load(small_file(tmp_path_factory.mktemp("llmc")), "qwen2")


@given(TEXTS)
def test_a_file_laid_out_as_documented_is_that_tokenizer(read_in: Tokenizer, text: str) -> None:
    assert [small().decode_bytes([id]) for id in small().encode(text)] == [
        read_in.decode_bytes([id]) for id in read_in.encode(text)
    ]
    assert read_in.decode(read_in.encode(text)) == text


def test_ids_stay_and_our_special_tokens_come_after(read_in: Tokenizer) -> None:
    size = len(ranks()) + 1
    assert read_in.document_id == size - 1
    assert read_in.vocab_size == size + len(SPECIAL) - 1
    assert [read_in.decode_bytes([id]) for id in range(size - 1)] == list(ranks())


def test_what_is_written_is_laid_out_as_documented(tmp_path: Path, read_in: Tokenizer) -> None:
    importers.write(tmp_path / "out.bin", read_in)
    tokens, end = importers.read(tmp_path / "out.bin")
    assert end == read_in.document_id
    assert tokens[: end + 1] == [*ranks(), b"<|endoftext|>"]
    assert tokens[end + 1] == b"<|end|>"
    assert (tmp_path / "out.bin").read_bytes() == by_hand(tokens, end, cut=b"qwen2")


@pytest.mark.parametrize("pattern", get_args(PatternName))
def test_a_tokenizer_that_was_trained_here_comes_back_from_its_file(pattern: PatternName, tmp_path: Path) -> None:
    """Its special tokens have the first ids; those of other templates, which came later, have the last."""
    train(training_texts(), 500, pattern).save(tmp_path)
    whole = importers.load(tmp_path, special=EVERY_SPECIAL)
    assert whole.document_id == 0
    assert whole.special_id(EVERY_SPECIAL[-1]) == whole.vocab_size - 1
    importers.write(tmp_path / "t.bin", whole)
    found = importers.load(tmp_path / "t.bin")
    assert [found.special_id(name) for name in EVERY_SPECIAL] == [whole.special_id(name) for name in EVERY_SPECIAL]
    ids = range(whole.vocab_size)
    assert [found.decode_bytes([id]) for id in ids] == [whole.decode_bytes([id]) for id in ids]
    for text in (*training_texts()[::20], *EVERY_SPECIAL, " ".join(EVERY_SPECIAL), ELSEWHERE, CODE):
        assert found.encode(text) == whole.encode(text)
        assert not found.special_ids & set(found.encode(text))
    other: PatternName = "gpt2" if pattern != "gpt2" else "qwen2"
    with pytest.raises(DataError, match=f"cuts words as {pattern}, and not as {other}"):
        importers.load(tmp_path / "t.bin", other)


def test_a_special_token_stands_before_or_after_all_others_and_once(tmp_path: Path) -> None:
    document, merges = b"<|endoftext|>", list(ranks())
    for tokens, end, told in (
        ([*merges[:300], document, *merges[300:]], 300, "has b'<|endoftext|>' as token 300, where a text ends"),
        ([b"<|end|>", *merges, document], 0, "has b'<|end|>' as token 0, where a text ends"),
        ([document, *merges, document], 0, "holds one token twice"),
    ):
        (tmp_path / "t.bin").write_bytes(by_hand(tokens, end))
        with pytest.raises(DataError, match=re.escape(told)):
            importers.load(tmp_path / "t.bin", "qwen2")


def test_version_1_ends_texts_with_50256(tmp_path: Path) -> None:
    tokens = [*ranks(), *(b"%05d" % number for number in range(len(ranks()), 50_256)), b"<|endoftext|>"]
    (tmp_path / "one.bin").write_bytes(by_hand(tokens, 0, version=1))
    assert importers.read(tmp_path / "one.bin") == (tokens, 50_256)


@needs(GPT2)
def test_gpt2_comes_back_the_same_from_a_file_of_llm_c(tmp_path: Path) -> None:
    whole = importers.load(GPT2)
    tokens = [whole.decode_bytes([id]) for id in range(50_256)]
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(by_hand([*tokens, b"<|endoftext|>"], 50_256))
    found = importers.load(tmp_path / "gpt2_tokenizer.bin")  # of so many tokens, it is GPT-2's
    for text in ("Hello, world's 1234   \n\n end", " naïve – «ёлка» 東京都 😀", "def f(x):\n\treturn x ** 2"):
        assert found.encode(text) == whole.encode(text)
    assert found.special == whole.special


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"short", "has 5 bytes, less than a header"),
        (by_hand([b"a", b"b"], 1)[:-1], "its 2 tokens do not fill its 1027 bytes"),
        (by_hand([b"a", b"b"], 1) + b"\1", "its 2 tokens do not fill"),
        (by_hand([b"a", b"b"], 2), "says that 2 of its 2 tokens ends a text"),
        (struct.pack("<256i", 20240326, 3, *[0] * 254), "begins with 20240326 and 3, which is no tokenizer"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(DataError, match=f"t.bin: {told}"):
        importers.load(tmp_path / "t.bin", "gpt2")


def test_how_words_are_cut_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not say how text is cut into words"):
        importers.load(small_file(tmp_path))
