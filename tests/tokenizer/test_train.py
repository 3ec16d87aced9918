import importlib
import io
import json
import random
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.tokenizer import importers, train
from bloomery.tokenizer.config import SentencePiece
from bloomery.tokenizer.fast_encode import HARD
from bloomery.tokenizer.importers import with_special
from bloomery.tokenizer.tokenizer import FILE, SPACE, SPECIAL, Tokenizer
from tests.tokenizer.made import CODE, ELSEWHERE, TEXTS, training_texts
from tests.tokenizer.shared import documents

sentencepiece = pytest.importorskip("sentencepiece")

RUNS = st.lists(
    st.tuples(st.sampled_from([" ", "a", "=", "-", "\n", "\t", "ab", "é", "  ", "the ", "12"]), st.integers(1, 40)),
    max_size=6,
).map(lambda runs: "".join(one * count for one, count in runs))
"""Where pieces overlap themselves, and equal scores have to be broken the same way."""
WILD = st.one_of(TEXTS, RUNS, st.binary(max_size=80).map(lambda raw: raw.decode("latin-1")))


def real(data: bytes) -> Any:
    """The original library, on the same model."""
    return sentencepiece.SentencePieceProcessor(model_proto=data)


@cache
def ours() -> tuple[Tokenizer, Any]:
    runs = [one * count for one in ("=", "-", "a", "  ", "# ") for count in range(2, 40)]
    data = train.learned([*training_texts(), *runs], SentencePiece(vocab_size=1000))
    return Tokenizer(importers.read_sentencepiece(data, "here")), real(data)


@cache
def theirs(**settings: Any) -> bytes:
    """A model trained without us."""
    made = io.BytesIO()
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    plain = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "minloglevel": 2, "num_threads": 1}
    plain |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "hard_vocab_limit": False}
    lines = iter(list(train.lines(training_texts())))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=made, **plain | settings)
    return made.getvalue()


# --- parity with sentencepiece -------------------------------------------------------------------------------------


@given(WILD)
def test_a_trained_model_gives_the_ids_of_sentencepiece(text: str) -> None:
    tokenizer, library = ours()
    assert tokenizer.encode(text) == library.encode(text)


@pytest.mark.parametrize("text", [text for text in HARD if len(text) > 12] + [CODE, ELSEWHERE])
def test_hard_texts_have_the_ids_of_sentencepiece(text: str) -> None:
    tokenizer, library = ours()
    assert tokenizer.encode(text) == library.encode(text)


@given(WILD)
def test_a_text_comes_back_but_for_the_sign_that_stands_for_a_space(text: str) -> None:
    ids = ours()[0].encode(text)
    assert ours()[0].decode(ids) == text.replace(SPACE, " ")
    assert ours()[0].decode_bytes(ids) == text.replace(SPACE, " ").encode()
    assert not set(ids) & ours()[0].special_ids


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_dummy_prefix": False, "split_digits": True},
        {"add_dummy_prefix": False, "user_defined_symbols": ("<sep>", "\n", "  ", "\u2581\u2581", "a")},
        {"character_coverage": 1.0, "split_by_whitespace": False, "max_sentencepiece_length": 40},
        {"pad_id": 3, "control_symbols": ("<mask>",), "allow_whitespace_only_pieces": True},
    ],
)
@given(texts=st.lists(WILD, max_size=4))
def test_models_of_others_are_read_with_the_same_ids(settings: dict[str, Any], texts: list[str]) -> None:
    data = theirs(**settings)
    tokenizer, library = imported(data)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == text.replace(SPACE, " ")


@cache
def imported(data: bytes) -> tuple[Tokenizer, Any]:
    return with_special(importers.read_sentencepiece(data, "here"), "here"), real(data)


def test_a_model_file_is_read_as_the_library_reads_it() -> None:
    library, model = real(theirs()), importers.parse_sentencepiece(theirs())
    assert len(model.pieces) == library.get_piece_size()
    for id, piece in enumerate(model.pieces):
        assert piece.text == library.id_to_piece(id)
        assert piece.score == pytest.approx(library.get_score(id))
        assert (piece.type == importers.CONTROL) == library.is_control(id)
        assert (piece.type == importers.UNKNOWN) == library.is_unknown(id)
        assert (piece.type == importers.BYTE) == library.is_byte(id)


@pytest.mark.slow
def test_a_thousand_documents_have_the_ids_of_sentencepiece() -> None:
    texts = documents(1500)
    data = train.learned(texts[::3], SentencePiece(vocab_size=4000))
    tokenizer, library = Tokenizer(importers.read_sentencepiece(data, "here")), real(data)
    different = [text for text in texts if tokenizer.encode(text) != library.encode(text)]
    assert not different
    assert all(tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ") for text in texts[::10])


# --- how it is made ------------------------------------------------------------------------------------------------


def test_special_tokens_come_first_and_no_text_becomes_one() -> None:
    tokenizer, library = ours()
    assert [tokenizer.special[name] for name in SPECIAL] == list(range(1, 1 + len(SPECIAL)))
    for text in (*SPECIAL, "".join(SPECIAL), "<unk>", "<0x41>", "a<0x41><|end|>"):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert not {0, *tokenizer.special_ids} & set(ids)
        assert tokenizer.decode(ids) == text


def test_digits_lines_and_tabs_are_single_tokens_and_indentation_is_kept() -> None:
    tokenizer = ours()[0]
    assert len(tokenizer.encode("1234567890")) >= 10
    assert tokenizer.encode("\n\n\t") == [*tokenizer.encode("\n") * 2, *tokenizer.encode("\t")]
    assert len(tokenizer.encode("\n")) == len(tokenizer.encode("\t")) == 1
    assert tokenizer.decode(tokenizer.encode(CODE)) == CODE


def test_the_same_texts_make_the_same_model() -> None:
    config = SentencePiece(vocab_size=500)
    assert (
        train.train_sentencepiece(training_texts(), config).hash
        == train.train_sentencepiece(training_texts(), config).hash
    )


def test_the_saved_file_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        import transformers
    tokenizer = ours()[0]
    tokenizer.save(tmp_path)
    fast: Any = transformers.PreTrainedTokenizerFast
    again = fast(tokenizer_file=str(tmp_path / FILE), clean_up_tokenization_spaces=False)
    for text in [*training_texts()[::20], CODE, ELSEWHERE, " x", "a  b", "\n\n"]:
        assert again(text).input_ids == tokenizer.encode(text)
        assert again.decode(tokenizer.encode(text)) == text


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": "unigram"}, "a model of unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text"),
        ({"remove_extra_whitespaces": True}, "changes text"),
        ({"byte_fallback": False}, "no bytes to fall back to"),
        ({"user_defined_symbols": ("<sep>",)}, "space before each text"),
        ({"control_symbols": (")",)}, "special token of one character"),
    ],
)
def test_what_would_get_other_ids_is_refused_with_the_reason(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=f"here: cannot be imported with the same token IDs: .*{why}"):
        importers.read_sentencepiece(theirs(**settings), "here")


@given(
    st.lists(st.sampled_from([" ", "  ", "\n", "the lamp", "é", "12", " .", SPACE, "\u3000"]), max_size=8).map("".join)
)
def test_a_foreign_model_that_squeezes_spaces_gives_the_ids_of_sentencepiece(text: str) -> None:
    data = theirs(remove_extra_whitespaces=True, split_digits=True)
    tokenizer = Tokenizer(importers.read_sentencepiece(data, "here", foreign=True), {"eos_token": "</s>"})
    assert tokenizer.encode(text) == real(data).encode(text)


@pytest.mark.parametrize("data", [b"", b"no model", b"\x0a\xff\xff\xff\xff\x7f", b"\x0a", bytes(100), b"{}"])
def test_what_is_no_model_is_an_error(data: bytes) -> None:
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        importers.read_sentencepiece(data, "here")


@given(st.integers(0, 2000), st.randoms(use_true_random=False))
def test_a_torn_model_is_an_error_or_a_model(cut: int, rng: random.Random) -> None:
    try:
        importers.parse_sentencepiece(theirs()[: cut + rng.randrange(3)])
    except (IndexError, ValueError, KeyError):
        return


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x05",  # a piece that is a number
        b"\x0a\x02\x08\x05",  # its text is a number
        b"\x0a\x05\x0a\x01a\x10\x05",  # its score is one
        b"\x0a\x06\x0a\x01a\x1a\x01b",  # its type is text
        b"\x0a\x03\x0a\x01a\x10\x05",  # settings of the trainer that are a number
        b"\xff" * 100_000 + b"\x01",  # a number without end
    ],
)
def test_fields_of_another_type_are_no_model(data: bytes) -> None:
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        importers.read_sentencepiece(data, "a.model")


def test_lines_are_whole_long_ones_in_pieces_and_without_nul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "LONGEST_LINE", 3)
    assert list(train.lines(["a\n\nbcdefgh\0i", "  x"])) == ["a", "bcd", "efg", "hi", "  x"]


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"(?s)package sentencepiece is needed.*bloomery\[sentencepiece\]"):
        train.train_sentencepiece(["a"], SentencePiece())


def test_a_vocabulary_that_cannot_be_made_is_an_error() -> None:
    symbols = tuple(f"<{n}>" for n in range(200))
    with pytest.raises(DataError, match="SentencePiece could not train"):
        train.train_sentencepiece(texts(), SentencePiece(vocab_size=464, symbols=symbols))
    with pytest.raises(ValueError, match="vocab_size must be at least 463, got 300"):
        SentencePiece(vocab_size=300, symbols=symbols)


def texts() -> Sequence[str]:
    return [json.dumps({"a": number}) for number in range(50)]
