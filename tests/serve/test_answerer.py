from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.chat import Message, SamplingConfig
from bloomery.core.errors import DataError
from bloomery.serve.chat_model import TextAnswerer, TextStream

END = 256
ASK: list[Message] = [{"role": "user", "content": "?"}]


class ByteEngine:
    """Says given ids, whatever it is asked, and remembers how it was asked."""

    def __init__(self, ids: Sequence[int], context: int = 1000) -> None:
        self.ids, self.context = ids, context
        self.asked: tuple[list[int], SamplingConfig, frozenset[int]] | None = None
        self.closed = False

    def stream(self, ids: Sequence[int], sampling: SamplingConfig, *, stop_ids: frozenset[int]) -> Iterator[int]:
        self.asked = list(ids), sampling, stop_ids
        try:
            for token in self.ids[: sampling.max_tokens]:
                yield token
                if token in stop_ids:
                    return
        finally:
            self.closed = True


class ByteRenderer:
    end_ids = frozenset({END})
    lead = ""

    def prompt(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        return [*"".join(message["content"] for message in messages).encode()]


class Pairs:
    """Ids below 256 are bytes, and 1000 + n stands for the n-th of some longer strings."""

    LONGER = ("ab", "é", "\n\n", "stop")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(bytes([i]) if i < END else b"" if i == END else self.LONGER[i - 1000].encode() for i in ids)


def answerer(ids: Sequence[int], context: int = 1000) -> tuple[TextAnswerer, ByteEngine]:
    engine = ByteEngine(ids, context)
    return TextAnswerer("bytes", engine, ByteRenderer, Pairs()), engine


def said(ids: Sequence[int], sampling: SamplingConfig | None = None) -> tuple[list[str], str | None, int]:
    """The pieces' texts, the finish and the tokens of an answer with these ids."""
    model, _ = answerer(ids)
    pieces = list(model.answer(ASK, sampling or SamplingConfig()).pieces)
    assert all(piece.finish is None for piece in pieces[:-1])
    return [piece.text for piece in pieces], pieces[-1].finish, sum(piece.tokens for piece in pieces)


def test_a_character_that_spans_tokens_is_held_back_until_it_is_whole() -> None:
    texts, finish, tokens = said([*"a€b".encode(), END])
    assert texts == ["a", "", "", "€", "b", ""]
    assert (finish, tokens) == ("stop", 6)


def test_a_character_that_is_never_finished_is_shown_as_such_at_the_end() -> None:
    texts, finish, _ = said([*"a€".encode()[:-1]])
    assert "".join(texts) == "a�"
    assert finish == "length"


def test_a_stop_string_over_several_pieces_is_never_shown() -> None:
    texts, finish, tokens = said([*b"yes. User: no"], SamplingConfig(stop=("User:",)))
    assert "".join(texts) == "yes. "
    assert (finish, tokens) == ("stop", 10)


def test_an_unfinished_character_can_complete_a_stop_string() -> None:
    texts, finish, _ = said([*b"a", 0xE2], SamplingConfig(stop=("�",)))
    assert "".join(texts) == "a"
    assert finish == "stop"


def test_closing_an_answer_closes_the_engine() -> None:
    model, engine = answerer([*b"abc"])
    pieces = model.answer(ASK, SamplingConfig()).pieces
    assert next(pieces).text == "a"
    pieces.close()
    assert engine.closed


def test_sampling_reaches_the_engine() -> None:
    model, engine = answerer([END])
    sampling = SamplingConfig(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5)
    list(model.answer(ASK, sampling).pieces)
    assert engine.asked == ([*b"?"], sampling, frozenset({END}))


def test_a_prompt_that_fills_the_context_is_refused_before_any_work() -> None:
    model, engine = answerer([END], context=3)
    with pytest.raises(DataError, match=r"takes 3 tokens.*has a context of 3"):
        model.answer([{"role": "user", "content": "abc"}], SamplingConfig())
    assert engine.asked is None


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "there are none"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "the last one is from the assistant",
        ),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(messages: list[Any], what: str) -> None:
    model, _ = answerer([END])
    with pytest.raises(DataError, match=what):
        model.answer(messages, SamplingConfig())


tokens = st.lists(st.one_of(st.integers(0, 255), st.integers(1000, 1003), st.sampled_from([*"é€😀".encode()])))


@given(tokens)
def test_the_pieces_joined_are_the_text_of_all_ids(ids: list[int]) -> None:
    texts, finish, count = said(ids, SamplingConfig(max_tokens=10_000))
    assert "".join(texts) == Pairs().decode_bytes(ids).decode("utf-8", "replace")
    assert (finish, count) == ("length", len(ids))


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_at_the_same_place_however_the_bytes_are_cut(text: str, stop: list[str], data: Any) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream = TextStream(stop)
    bounds = zip([0, *cuts], [*cuts, len(raw)], strict=True)
    got = "".join(stream.add(raw[begin:end]) for begin, end in bounds) + stream.end()
    found = [(place + len(mark), place) for mark in stop if (place := text.find(mark)) >= 0]
    assert got == (text[: min(found)[1]] if found else text)
    assert stream.stopped == bool(found)
