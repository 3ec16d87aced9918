import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.core.chat import LONGEST_ANSWER, Message, SamplingConfig
from bloomery.core.errors import DataError
from bloomery.generate.scheduler import Request, Ticket, Token
from bloomery.serve.chat_model import Asked, ModelWords, StoppedError, TextAnswerer, derived_seed
from bloomery.serve.constrained import TextStream, ToolFormat

END = 256
ASK: list[Message] = [{"role": "user", "content": "?"}]


class ByteScheduler:
    """Says given ids, whatever it is asked, and remembers how it was asked. `gate` holds an answer after two tokens."""

    def __init__(self, ids: Sequence[int], gate: threading.Event | None = None) -> None:
        self.ids, self.gate = ids, gate
        self.asked: Request | None = None
        self.said = 0

    is_busy = False

    def longest_answer(self, prompt_tokens: int) -> int:
        return 1000 - prompt_tokens

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket:
        self.asked = request
        ticket = Ticket(request, notify)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def _answer(self, ticket: Ticket) -> None:
        for id in self.ids[: ticket.request.sampling.max_tokens]:
            if self.said == 2 and self.gate is not None:
                assert self.gate.wait(60)
            if ticket._cancelled:
                return ticket._end("cancelled")
            self.said += 1
            ticket._put(Token(id, None if ticket.request.top_logprobs is None else -float(self.said)))
            if id in ticket.request.stop_ids:
                return ticket._end("stop")
        return ticket._end("length")


class ByteRenderer:
    end_ids = frozenset({END})
    lead = ""

    def prompt(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        return [*"".join(message["content"] for message in messages).encode()]


class LeadRenderer(ByteRenderer):
    lead = " "


class Pairs:
    """Ids below 256 are bytes, and 1000 + n stands for the n-th of some longer strings."""

    LONGER = ("ab", "é", "\n\n", "stop")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(bytes([i]) if i < END else b"" if i == END else self.LONGER[i - 1000].encode() for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    puts_space_first = False

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def encode_after(self, text: str) -> list[int]:
        return [*text.encode()]

    def encode_within(self, text: str, max_tokens: int) -> list[int] | int:
        return [*text.encode()]


def answerer(
    ids: Sequence[int], context: int = 1000, renderer: ByteRenderer | None = None
) -> tuple[TextAnswerer, ByteScheduler]:
    scheduler, renderer = ByteScheduler(ids), renderer or ByteRenderer()
    words = ModelWords(tokenizer=Pairs(), renderer=lambda: renderer, context=context, stop_ids=frozenset({END}))
    return TextAnswerer("bytes", scheduler, words), scheduler


def said(ids: Sequence[int], sampling: SamplingConfig | None = None) -> tuple[list[str], str | None, int]:
    """The pieces' texts, the finish and the tokens of an answer with these ids."""
    model, _ = answerer(ids)
    pieces = list(model.answer(ASK, sampling or SamplingConfig()).pieces)
    assert all(piece.finish is None for piece in pieces[:-1])
    return [piece.text for piece in pieces], pieces[-1].finish, sum(piece.tokens for piece in pieces)


@given(st.lists(st.sampled_from([*b"ab<E", *"é€".encode(), *range(1000, 1004)]), max_size=12), st.data())
def test_an_answer_has_the_logprobs_of_the_tokens_that_have_a_part_in_its_text(ids: list[int], data: Any) -> None:
    stop = data.draw(st.lists(st.sampled_from(["ab", "<E", "b\n", "é", "st", "opa"]), max_size=2))
    model, _ = answerer(ids)
    vars(model).update(special_names={})
    asked = Asked(sampling=SamplingConfig(stop=tuple(stop)), messages=tuple(ASK), logprobs=0)
    pieces = list(model._streamed(asked).pieces)
    text, raw = "".join(piece.text for piece in pieces), Pairs().decode_bytes(ids)
    scores = [score for piece in pieces for score in piece.scores]
    assert [score.logprob for score in scores] == [-float(n) for n in range(1, len(scores) + 1)], "none is left out"
    tokens = [score.token for score in scores]
    assert tokens == [Pairs().decode_bytes([id]) for id in ids[: len(scores)]]
    if pieces[-1].finish == "length":
        assert len(scores) == len(ids)
    elif text == raw.decode(errors="replace")[: len(text)] and "\ufffd" not in text:
        size = len(text.encode())
        assert sum(map(len, tokens)) >= size
        assert sum(map(len, tokens[:-1])) < size or not tokens
    told = 0
    for number, piece in enumerate(pieces[:-1], start=1):
        told += len(piece.text)
        begun = [score for one in pieces[:number] for score in one.scores]
        assert len(b"".join(score.token for score in begun[:-1]).decode(errors="ignore")) <= told


def test_the_end_of_a_completion_has_its_logprob_and_that_of_a_chat_has_none() -> None:
    """Clients that score texts count a logprob for each token of `completion_tokens`."""
    model, _ = answerer([*b"Hi", END])
    vars(model).update(special_names={END: b"<END>"})
    for asked, count in ((Asked(sampling=SamplingConfig(), prompts=("a",), logprobs=0), 3), (None, 2)):
        asked = asked or Asked(sampling=SamplingConfig(), messages=tuple(ASK), logprobs=0)
        pieces = list(model._streamed(asked).pieces)
        assert sum(piece.tokens for piece in pieces) == 3
        assert sum(len(piece.scores) for piece in pieces) == count


@pytest.mark.parametrize(
    ("stop", "ids", "count"),
    [
        ("\n", [*b"Hi", 1002], 2),
        ("e\n", [*b"Hi", 1001, *b"e", 1002], 3),
        ("op", [*b"Hi", 1003], 3),
        ("top<", [*b"Hi", 1003, *b"<"], 3),
        ("<END>", [*b"Hi<END>"], 2),
        ("END>", [*b"Hi<END>"], 3),
    ],
)
def test_tokens_wholly_inside_a_stop_string_have_no_logprobs(stop: str, ids: list[int], count: int) -> None:
    model, _ = answerer(ids)
    vars(model).update(special_names={})
    asked = Asked(sampling=SamplingConfig(stop=(stop,)), messages=tuple(ASK), logprobs=0)
    pieces = list(model._streamed(asked).pieces)
    assert (pieces[-1].finish, sum(len(piece.scores) for piece in pieces)) == ("stop", count)
    assert sum(piece.tokens for piece in pieces) == len(ids)


@pytest.mark.parametrize(("ends", "finish"), [([END], "tool_calls"), ([*b"\nnow I"], "length")])
def test_an_answer_that_is_cut_ends_by_its_length_although_it_calls_a_tool(ends: list[int], finish: str) -> None:
    model, _ = answerer([*b'{"name": "find", "parameters": {}}', *ends])
    vars(model).update(tool_format=ToolFormat("", "parameters", ""), special_names={})
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    asked = Asked(sampling=SamplingConfig(), messages=tuple(ASK), tools=(tool,))
    pieces = list(model._streamed(asked).pieces)
    assert ([call.name for call in pieces[-1].calls], pieces[-1].finish) == (["find"], finish)
    assert "".join(piece.text for piece in pieces) == ("" if finish == "tool_calls" else "now I")


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


def test_closing_an_answer_ends_it_before_its_next_token() -> None:
    model, scheduler = answerer([*b"abcdef"])
    scheduler.gate = threading.Event()
    pieces = model.answer(ASK, SamplingConfig()).pieces
    assert next(pieces).text == "a"
    pieces.close()
    scheduler.gate.set()
    time.sleep(0.1)
    assert scheduler.said == 2


def test_an_answer_that_nobody_reads_is_not_begun() -> None:
    model, scheduler = answerer([*b"abc"])
    model.answer(ASK, SamplingConfig())
    assert scheduler.asked is None


def test_sampling_reaches_the_scheduler() -> None:
    model, scheduler = answerer([END])
    sampling = SamplingConfig(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5)
    list(model.answer(ASK, sampling).pieces)
    assert scheduler.asked == Request([*b"?"], sampling, frozenset({END}))


@pytest.mark.parametrize(("held", "longest"), [(10**6, LONGEST_ANSWER), (700, 700)])
def test_an_answer_without_a_limit_may_fill_what_context_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, held: int, longest: int
) -> None:
    model, scheduler = answerer([END])
    monkeypatch.setattr(scheduler, "longest_answer", lambda prompt_tokens: held)
    list(model.answer(ASK, SamplingConfig.of({"seed": 5})).pieces)
    assert scheduler.asked is not None
    assert scheduler.asked.sampling.max_tokens == longest
    list(model.continuation("?", SamplingConfig.of({})).pieces)
    assert scheduler.asked.sampling.max_tokens == SamplingConfig().max_tokens


def test_what_stands_before_every_answer_is_not_shown_and_stands_in_a_prompt_that_begins_one() -> None:
    model, scheduler = answerer([*b" yes", END], renderer=LeadRenderer())
    assert "".join(piece.text for piece in model.answer(ASK, SamplingConfig()).pieces) == "yes"
    begun: list[Message] = [*ASK, {"role": "assistant", "content": "O"}]
    assert "".join(piece.text for piece in model.answer(begun, SamplingConfig()).pieces) == " yes"
    assert scheduler.asked is not None
    assert bytes(scheduler.asked.ids) == b"? O"


@given(st.integers(0, 2**63 - 1), st.integers(0, 15), st.integers(0, 15))
def test_seeds_of_several_answers_differ_and_are_seeds(seed: int, one: int, other: int) -> None:
    first, second = derived_seed(seed, one), derived_seed(seed, other)
    assert first is not None
    assert 0 <= first < 2**63
    assert (first == second) == (one == other)
    assert derived_seed(seed, 0) == seed
    assert derived_seed(None, one) is None


def test_a_prompt_that_fills_the_context_is_refused_before_any_work() -> None:
    model, scheduler = answerer([END], context=3)
    with pytest.raises(DataError, match=r"takes 3 tokens.*has a context of 3"):
        model.answer([{"role": "user", "content": "abc"}], SamplingConfig())
    assert scheduler.asked is None


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "there are none"),
        ([{"role": "assistant", "content": "b"}], "the last one is from the assistant"),
        ([{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}], "the last one is from the critic"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(messages: list[Any], what: str) -> None:
    model, _ = answerer([END])
    with pytest.raises(DataError, match=what):
        model.answer(messages, SamplingConfig())


@pytest.mark.parametrize("before", [[], ASK])
def test_a_message_of_the_system_alone_or_at_the_end_is_answered(before: list[Message]) -> None:
    model, scheduler = answerer([*b"yes", END])
    messages: list[Message] = [*before, {"role": "system", "content": "Greet."}]
    assert "".join(model.answer(messages, SamplingConfig()).texts) == "yes"
    assert scheduler.asked is not None
    assert bytes(scheduler.asked.ids).endswith(b"Greet.")


def test_no_message_of_the_system_is_left_out_wherever_it_stands() -> None:
    model, scheduler = answerer([END], context=20)
    talk: list[Any] = [("user", "a" * 9), ("system", "S"), ("assistant", "b"), ("user", "c" * 6), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in talk]
    answer = model.answer(messages, SamplingConfig(max_tokens=5), drops=True)  # type: ignore[arg-type]
    assert [*answer.texts] == []
    assert scheduler.asked is not None
    assert bytes(scheduler.asked.ids) == b"Sccccccd"
    assert answer.dropped == 2


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


def test_an_answer_that_nobody_waits_for_begins_no_further_prompt() -> None:
    """A request may have many prompts, each of which costs a forward pass where the answer echoes its scores."""
    model, scheduler = answerer([97, END])
    read: list[str] = []

    def text_ids(prompt: str, where: str = "prompt") -> list[int]:
        read.append(prompt)
        return [*prompt.encode()]

    model.text_ids = text_ids  # type: ignore[method-assign, assignment]
    asked = Asked(sampling=SamplingConfig.greedy(2), prompts=("a", "b", "c"), is_stopped=lambda: len(read) == 2)
    with pytest.raises(StoppedError):
        model.begin(asked, lambda: None)
    assert read == ["a", "b"]
    assert scheduler.asked is None
