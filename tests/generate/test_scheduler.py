"""Requests get the tokens that they get alone, whoever joins, leaves or shares their pages."""

import threading
import time
import weakref
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core import native
from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError, ConfigError, DataError, RunError
from bloomery.generate import engine as engines
from bloomery.generate import scheduler as schedulers
from bloomery.generate.decoder import LIBRARY, PAGE, Decoder, PackedAdapter, PagePool, Pages
from bloomery.generate.engine import MAX_DRAFT_TOKENS, PROMPT_TOKENS, Engine
from bloomery.generate.scheduler import MAX_TOP_LOGPROBS, PART_TOKENS, Request, Scheduler, Ticket
from bloomery.model import lora
from bloomery.model.attention import Cache
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from tests.model.made import CHOICES, VOCAB_SIZE, lively, random_ids

import torch
from torch import Tensor

needs_library = pytest.mark.skipif(
    native.library(LIBRARY) is None, reason=f"native/{LIBRARY}.so: {native.state(LIBRARY)}"
)
LONG = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, context_length=400, head_dim=8
)
OFTEN = frozenset(range(0, VOCAB_SIZE, 17))


def engine(*, pack: bool = True, config: ModelConfig = LONG) -> Engine:
    made = Engine(lively(config), VOCAB_SIZE, pack=pack)
    assert (made.decoder is not None) == pack
    return made


def alone(on: Engine, request: Request) -> list[int]:
    return list(on.stream(request.ids, request.sampling, stop_ids=request.stop_ids))


def steps_of(on: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each step from now on."""
    assert on.decoder is not None
    steps, step = list[int](), on.decoder.step

    def counted(ids: Sequence[int], *rest: Any) -> tuple[Tensor, bool]:
        steps.append(len(ids))
        return step(ids, *rest)

    monkeypatch.setattr(on.decoder, "step", counted)
    return steps


def ids_of(ticket: Ticket) -> list[int]:
    return [token.id for token in ticket]


def pages_bytes(on: Engine, count: int) -> int:
    assert on.decoder is not None
    return count * PagePool.page_bytes(on.model.config, on.decoder.dtype)


def prompt(length: int, seed: int) -> list[int]:
    return random_ids(1, length, seed)[0].tolist()


@needs_library
@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 120), st.integers(0, 5), st.integers(1, 40), st.sampled_from([0.0, 0.9]), st.booleans()
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(6, 30),
    st.integers(1, 8),
)
def test_the_ids_of_a_request_do_not_depend_on_who_is_computed_with_it(
    asked: list[tuple[int, int, int, float, bool]], pages: int, max_running: int
) -> None:
    """Arrivals in any order, prompts that share beginnings, memory that forces requests out, and cancellations."""
    on = engine()
    requests = [
        Request(
            prompt(length, seed % 2)[:length],
            SamplingConfig(max_tokens=count, temperature=temperature, seed=seed),
            OFTEN if seed % 3 else frozenset(),
        )
        for length, seed, count, temperature, _ in asked
    ]
    expected = [alone(on, request) for request in requests]
    with Scheduler(on, memory_bytes=pages_bytes(on, pages), max_running=max_running) as scheduler:
        tickets, answers = list[Ticket](), list[list[int]]()
        for request, (length, seed, *_, cancelled) in zip(requests, asked, strict=True):
            tickets.append(scheduler.submit(request))
            answers.append([])
            earlier = length % len(tickets)
            for token in islice(tickets[earlier], seed):  # so that the next one arrives in the middle of an answer
                answers[earlier].append(token.id)
            if cancelled:
                tickets[earlier].cancel()
        for ticket, answer, ids in zip(tickets, answers, expected, strict=True):
            answer += ids_of(ticket)
            if ticket.finish_reason == "cancelled":
                assert ticket._cancelled
                assert answer == ids[: len(answer)]
            else:
                assert answer == ids
                assert ticket.finish_reason == ("stop" if ids[-1] in ticket.request.stop_ids else "length")


@needs_library
def test_a_long_prompt_is_computed_in_small_parts_while_another_answer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    on = engine()
    steps = steps_of(on, monkeypatch)
    with Scheduler(on) as scheduler:
        running = iter(scheduler.submit(Request(prompt(5, 1), SamplingConfig(max_tokens=395, seed=1))))
        next(running)
        assert len(ids_of(scheduler.submit(Request(prompt(300, 2), SamplingConfig(max_tokens=2, seed=1))))) == 2
        assert max(steps) == PART_TOKENS + 1
        while_alone = len(steps)
        list(running)
        ids_of(scheduler.submit(Request(prompt(300, 3), SamplingConfig(max_tokens=1, seed=1))))
    assert max(steps[while_alone:]) == PROMPT_TOKENS


@needs_library
def test_the_second_turn_of_a_conversation_computes_its_new_tokens_alone() -> None:
    on = engine(config=replace_context(LONG, 1400))
    first = Request(prompt(1000, 1), SamplingConfig(max_tokens=50, seed=3))
    with Scheduler(on) as scheduler:
        said = ids_of(scheduler.submit(first))
        assert scheduler.computed_tokens == 1000 + len(said) - 1
        before = scheduler.computed_tokens
        second = Request([*first.ids, *said, *prompt(20, 2)], SamplingConfig(max_tokens=10, seed=4))
        ticket = scheduler.submit(second)
        answer = ids_of(ticket)
        assert ticket.cached_tokens == 1000 + len(said) - 1
        assert scheduler.computed_tokens - before == 1 + 20 + len(answer) - 1
    assert answer == alone(on, second)


def replace_context(config: ModelConfig, context: int) -> ModelConfig:
    return config.model_copy(update={"context_length": context})


@needs_library
def test_a_prompt_that_leaves_another_in_the_middle_of_a_page_reuses_all_that_is_the_same() -> None:
    on = engine()
    shared = prompt(70, 1)
    with Scheduler(on) as scheduler:
        ids_of(scheduler.submit(Request([*shared, 1, 2, 3, *prompt(40, 2)], SamplingConfig(max_tokens=3, seed=1))))
        other = Request([*shared, 4, 5, 6], SamplingConfig(max_tokens=9, seed=2))
        ticket = scheduler.submit(other)
        assert ids_of(ticket) == alone(on, other)
        assert ticket.cached_tokens == 70
        again = scheduler.submit(other)
        assert ids_of(again) == alone(on, other)
        assert again.cached_tokens == 72  # all but the last token, whose logits are wanted


@needs_library
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(0, 3)), max_size=25), st.integers(5, 12))
def test_every_page_of_a_pool_is_free_or_known_or_of_one_text(moves: list[tuple[int, int, int]], count: int) -> None:
    pool = PagePool(LONG, count, torch.float32)
    texts: list[tuple[Any, list[int]]] = []
    adapters = [None, PackedAdapter(LONG, {}), PackedAdapter(LONG, {})]
    for kind, length, seed in moves:
        ids = prompt(150, seed % 2)[:length] + [seed] * 9
        if kind == 0:
            texts.append((pool.begin(ids, adapters[length % 3]), ids))
        elif texts and kind == 1:
            text, ids = texts[length % len(texts)]
            until = min(len(ids), text.length + length)
            if pool.grow(text, until):
                pool.advance(text, ids, until)
        elif texts:
            pool.end(*texts.pop(length % len(texts)))
        check_pool(pool, texts)
    while texts:
        pool.end(*texts.pop())
    check_pool(pool, texts)
    assert pool.available == count


def check_pool(pool: PagePool, texts: Sequence[tuple[Any, list[int]]]) -> None:
    known, stack = [], [*pool._roots.values()]
    while stack:
        node = stack.pop()
        for key, child in node.children.items():
            assert child.ids == key
            assert child.parent is node
            assert len(key) == PAGE or not child.children
            assert child.users == sum(child in text.nodes for text, _ in texts)
            assert (child in pool._unused) == (child.users == 0)
            known.append(child.page)
            stack.append(child)
    own = [page for text, _ in texts for page in text.own]
    assert sorted([*known, *own, *pool._free]) == list(range(pool.count))
    for text, ids in texts:
        assert [id for node in text.nodes for id in node.ids] == ids[: PAGE * len(text.nodes)]
        assert text.num_pages >= Pages.needed(text.length)


@needs_library
def test_pages_are_taken_from_the_text_that_was_used_least_recently() -> None:
    on = engine()
    sampling = SamplingConfig.greedy(2)
    texts = [prompt(100, seed) for seed in range(3)]
    with Scheduler(on, memory_bytes=pages_bytes(on, 9)) as scheduler:

        def cached(ids: Sequence[int]) -> int:
            ticket = scheduler.submit(Request(ids, sampling))
            ids_of(ticket)
            return ticket.cached_tokens

        assert [cached(texts[0]), cached(texts[1]), cached(texts[0])] == [0, 0, 99]
        assert cached(texts[2]) == 0
        assert cached(texts[0]) > 0
        assert cached(texts[1]) < 99


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_what_can_never_fit_is_refused_and_what_does_not_fit_now_waits(pack: bool) -> None:
    on = engine(pack=pack)
    page = PagePool.page_bytes(LONG, torch.float32)
    with pytest.raises(ConfigError, match=r"(?s)cannot hold keys and values of 32 tokens.*at least"):
        Scheduler(on, memory_bytes=page - 1)
    length, answer, pages = (100, 28, 4) if pack else (30, 4, 2)  # a prompt that is not packed is there twice at first
    with Scheduler(on, memory_bytes=pages * page) as scheduler:
        with pytest.raises(DataError, match=f"may take memory for {32 * pages + 1} tokens, but it holds {32 * pages}"):
            scheduler.submit(Request(prompt(length, 1), SamplingConfig(max_tokens=answer + 1)))
        assert scheduler.longest_answer(length) == answer
        requests = [Request(prompt(length, seed), SamplingConfig(max_tokens=answer, seed=seed)) for seed in range(3)]
        tickets = [scheduler.submit(request) for request in requests]
        assert [ids_of(ticket) for ticket in tickets] == [alone(on, request) for request in requests]


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_an_answer_without_a_limit_leaves_memory_for_others_where_it_is_taken_at_the_start(
    monkeypatch: pytest.MonkeyPatch, pack: bool
) -> None:
    on = engine(pack=pack)
    monkeypatch.setattr(schedulers, "OPEN_ANSWER", 5)
    page = PagePool.page_bytes(LONG, torch.float32)
    for pages in (2, 40):
        with Scheduler(on, memory_bytes=pages * page) as scheduler:
            longest = scheduler.longest_answer(4)
            needed = scheduler._steps.needed(4, longest)
            assert longest >= 5
            assert needed <= 32 * pages
            assert pack or longest == 5 or needed <= 8 * pages
            assert not pack or longest == min(on.context, 32 * pages) - 4


def test_static_caches_never_take_more_than_the_memory_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the engine keeps idle steps: those that a text cannot take make room for it."""
    monkeypatch.setattr(engines, "FEWEST_KEYS", 8)
    on = engine(pack=False)
    on._replays = True
    held, peaks, empty = list[weakref.ref[Tensor]](), [0], Cache.empty

    def counted(config: ModelConfig, batch: int, capacity: int, like: Tensor) -> Cache:
        cache = empty(config, batch, capacity, like)
        held.append(weakref.ref(cache.keys))
        peaks.append(sum(keys.shape[1] * keys.shape[3] for one in held if (keys := one()) is not None))
        return cache

    lengths = [(20, 30), (30, 12), (7, 4), (1, 55), (4, 68), (2, 5)]
    requests = [Request(prompt(length, length), SamplingConfig.greedy(count)) for length, count in lengths]
    expected = [alone(engine(pack=False), request) for request in requests]
    monkeypatch.setattr(Cache, "empty", counted)
    pages = 3
    with Scheduler(on, memory_bytes=pages * PagePool.page_bytes(LONG, torch.float32), max_running=3) as scheduler:
        tickets = [scheduler.submit(request) for request in requests]
        assert [ids_of(ticket) for ticket in tickets] == expected
        assert max(peaks) <= pages * PAGE
        steps = len(held)
        for _ in range(2):
            assert ids_of(scheduler.submit(requests[-1])) == expected[-1]
        assert len(held) <= steps + 3, "an idle step of the right size is taken again: only prompts have new memory"
        with pytest.raises(DataError, match="may take memory for 97 tokens, but it holds 96"):
            scheduler.submit(Request(prompt(33, 1), SamplingConfig(max_tokens=24)))


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_requests_that_cannot_be_are_refused_at_once(pack: bool) -> None:
    on = engine(pack=pack)
    with Scheduler(on, max_running=1, max_waiting=2) as scheduler:
        for request, told in (
            (Request([], SamplingConfig()), "the prompt is empty"),
            (Request([1] * 400, SamplingConfig()), "context is 400"),
            (Request([1], SamplingConfig(logit_bias=((VOCAB_SIZE, 1.0),))), f"there is no token {VOCAB_SIZE}"),
            (Request([1], SamplingConfig(), top_logprobs=MAX_TOP_LOGPROBS + 1), "top_logprobs: must be"),
        ):
            with pytest.raises(DataError, match=told):
                scheduler.submit(request)
        gate = Gate()
        held = scheduler.submit(Request([1], SamplingConfig(max_tokens=3), constraint=gate))
        gate.reached.wait()
        others = [scheduler.submit(Request([1], SamplingConfig(max_tokens=3))) for _ in range(2)]
        with pytest.raises(RunError, match="2 requests are already waiting"):
            scheduler.submit(Request([1], SamplingConfig(max_tokens=3)))
        gate.open.set()
        assert [len(ids_of(ticket)) for ticket in (held, *others)] == [3, 3, 3]
        assert ids_of(scheduler.submit(Request([1], SamplingConfig(max_tokens=0)))) == []
    with pytest.raises(RunError, match="was closed"):
        scheduler.submit(Request([1], SamplingConfig()))


class Gate:
    """Allows every token, once it is open."""

    finished = False

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def allowed(self) -> Tensor:
        self.reached.set()
        self.open.wait()
        return torch.ones(VOCAB_SIZE, dtype=torch.bool)

    def accept(self, id: int) -> None: ...


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_a_scheduler_that_is_closed_ends_what_runs_and_what_waits(pack: bool) -> None:
    scheduler = Scheduler(engine(pack=pack), max_running=1)
    gate = Gate()
    running = scheduler.submit(Request([1], SamplingConfig(max_tokens=300), constraint=gate))
    waiting = scheduler.submit(Request([1], SamplingConfig(max_tokens=300)))
    gate.reached.wait()
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    while not scheduler._closing:
        pass
    gate.open.set()
    closer.join()
    assert (len(ids_of(running)), ids_of(waiting)) == (1, [])
    assert (running.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
    assert running.done


class Word:
    """An answer of these IDs, in their order."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.left = list(ids)

    @property
    def finished(self) -> bool:
        return not self.left

    def allowed(self) -> Tensor:
        return torch.arange(VOCAB_SIZE) == (self.left[0] if self.left else -1)

    def accept(self, id: int) -> None:
        assert id == self.left.pop(0)


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_decides_what_is_said_and_when_it_ends(pack: bool, temperature: float) -> None:
    on = engine(pack=pack)
    with Scheduler(on) as scheduler:
        how = SamplingConfig(max_tokens=9, temperature=temperature, seed=1)
        ticket = scheduler.submit(Request([1], how, constraint=Word([5, 5, 7])))
        free = scheduler.submit(Request([1], how))
        assert (ids_of(ticket), ticket.finish_reason) == ([5, 5, 7], "stop")
        assert ids_of(free) == alone(on, free.request)


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_an_error_of_a_request_ends_that_request_alone(pack: bool) -> None:
    class Broken(Word):
        def accept(self, id: int) -> None:
            raise ZeroDivisionError

    class Nothing(Word):
        def allowed(self) -> Tensor:
            return torch.zeros(VOCAB_SIZE, dtype=torch.bool)

    on = engine(pack=pack)
    with Scheduler(on) as scheduler:
        how = SamplingConfig(max_tokens=30, seed=1)
        broken = scheduler.submit(Request([1], how, constraint=Broken([5])))
        nothing = scheduler.submit(Request([1], how, constraint=Nothing([])))
        good = scheduler.submit(Request([1], how))
        with pytest.raises(ZeroDivisionError):
            ids_of(broken)
        with pytest.raises(DataError, match="no token may follow"):
            ids_of(nothing)
        assert ids_of(good) == alone(on, good.request)
        assert broken.finish_reason is None
        assert broken.done


@needs_library
def test_an_error_of_a_step_reaches_all_that_were_in_it_and_the_next_request_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = engine()
    gate, how = Gate(), SamplingConfig(max_tokens=30, seed=1)
    with Scheduler(on) as scheduler:
        tickets = [scheduler.submit(Request([n], how, constraint=gate)) for n in (1, 2, 3)]
        gate.reached.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", lambda *_: 1 / 0)
            gate.open.set()
            for ticket in tickets:
                with pytest.raises(ZeroDivisionError):
                    ids_of(ticket)
        after = Request([1, 2, 3], how)
        assert ids_of(scheduler.submit(after)) == alone(on, after)


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_logits_that_are_not_finite_are_an_error(pack: bool) -> None:
    model = lively(LONG)
    with torch.no_grad():
        model.embed.weight[7] = torch.inf
    with (
        Scheduler(Engine(model, VOCAB_SIZE, pack=pack)) as scheduler,
        pytest.raises(CheckpointError, match="not finite"),
    ):
        ids_of(scheduler.submit(Request([7], SamplingConfig())))


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_log_probabilities_are_those_of_the_model_before_all_settings(pack: bool) -> None:
    on = engine(pack=pack)
    ids = prompt(40, 1)
    how = SamplingConfig(
        max_tokens=6, temperature=3.0, top_k=30, seed=1, repetition_penalty=2.0, logit_bias=((3, 50.0), (4, -100.0))
    )
    with Scheduler(on) as scheduler:
        tokens = list(scheduler.submit(Request(ids, how, top_logprobs=4)))
        assert all(
            token.logprob is not None and not token.top for token in scheduler.submit(Request(ids, how, top_logprobs=0))
        )
        assert all(token.logprob is None for token in scheduler.submit(Request(ids, how)))
    text = [*ids, *(token.id for token in tokens)]
    with torch.inference_mode():
        expected = torch.log_softmax(on.model.logits(on.model(torch.tensor([text])))[0], dim=-1)[len(ids) - 1 :]
    for token, chances in zip(tokens, expected, strict=False):
        assert token.logprob == pytest.approx(float(chances[token.id]), abs=1e-3)
        best = torch.topk(chances, 4)
        assert [id for id, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_a_reader_that_stops_and_reads_on_misses_no_token() -> None:
    on = engine(pack=False)
    request = Request([1], SamplingConfig(max_tokens=9, seed=1))
    with Scheduler(on) as scheduler:
        ticket = scheduler.submit(request)
        while ticket.finish_reason is None:  # all tokens wait to be read
            pass
        assert [token.id for token in (*islice(ticket, 4), *ticket.take(), *ticket)] == alone(on, request)


@pytest.mark.parametrize("pack", [pytest.param(True, marks=needs_library), False])
def test_a_reader_is_woken_for_each_token_and_the_end(pack: bool) -> None:
    calls = threading.Semaphore(0)
    got: list[int] = []
    with Scheduler(engine(pack=pack)) as scheduler:
        ticket = scheduler.submit(Request([1], SamplingConfig(max_tokens=5, seed=1)), notify=calls.release)
        for _ in range(6):
            calls.acquire()
            got += [token.id for token in ticket.take()]
        assert ticket.done
        assert ticket.take() == []
    assert len(got) == 5


def test_an_embedding_is_the_mean_of_the_hidden_states() -> None:
    on = engine(pack=False)
    ids = prompt(9, 1)
    with torch.inference_mode():
        assert torch.equal(on.embed(ids), on.model(torch.tensor([ids]))[0].mean(0))
    for wrong in ([], [1] * 401):
        with pytest.raises(DataError, match="the model takes 1 to 400"):
            on.embed(wrong)


copies = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 99)).map(
    lambda of: (prompt(of[0], of[2]) * of[1])[:120]
)


@needs_library
@settings(max_examples=15)
@given(
    st.lists(st.tuples(copies, st.integers(1, 60), st.sampled_from([0.0, 0.0, 0.3, 1.0])), min_size=1, max_size=5),
    st.integers(1, MAX_DRAFT_TOKENS),
    st.integers(6, 20),
    st.booleans(),
)
def test_guessing_ahead_changes_no_token(
    asked: list[tuple[list[int], int, float]], draft_tokens: int, pages: int, penalized: bool
) -> None:
    """Of prompts that repeat themselves, greedy and sampled, together and alone, in memory that forces some out."""
    how: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram": 9} if penalized else {}
    requests = [
        Request(ids, SamplingConfig(max_tokens=count, temperature=temperature, seed=7, **how), OFTEN)
        for ids, count, temperature in asked
    ]
    model = lively(LONG)
    on, guessing = (Engine(model, VOCAB_SIZE, pack=True, draft_tokens=number) for number in (0, draft_tokens))
    expected = [alone(on, request) for request in requests]
    assert [alone(guessing, request) for request in requests] == expected
    with Scheduler(on, memory_bytes=pages_bytes(on, pages), draft_tokens=draft_tokens) as scheduler:
        tickets = [scheduler.submit(request) for request in requests]
        assert [ids_of(ticket) for ticket in tickets] == expected


@needs_library
def test_right_guesses_take_fewer_steps_and_wrong_ones_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    on = engine()
    steps = steps_of(on, monkeypatch)
    word = [3, 4, 5, 6, 7, 8, 9] * 6
    with Scheduler(on, draft_tokens=8) as scheduler:
        how = SamplingConfig(max_tokens=len(word))
        assert ids_of(scheduler.submit(Request([*word, 3], how, constraint=Word(word[1:])))) == word[1:]
        assert len(steps) - 1 <= 6  # of 41 tokens, up to 9 a step
        text = [*word, 3, *word[1:]]
        ticket = scheduler.submit(Request([*text, 1], SamplingConfig(max_tokens=20, seed=1)))
        assert ids_of(ticket) == alone(on, ticket.request)
        assert ticket.cached_tokens == len(text) - 1


@needs_library
def test_an_engine_that_guesses_takes_fewer_steps_for_an_answer_that_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lively(LONG)
    ids = prompt(20, 3)
    greedy = SamplingConfig.greedy(200)
    answers, numbers = [], []
    for draft_tokens in (0, 8):
        on = Engine(model, VOCAB_SIZE, pack=True, draft_tokens=draft_tokens)
        steps = steps_of(on, monkeypatch)
        answers.append(list(on.stream(ids, greedy)))
        numbers.append(len(steps))
    assert answers[0] == answers[1]
    assert answers[0][-40:-20] == answers[0][-20:], "a model without training repeats itself"
    assert numbers[0] == 200
    assert numbers[1] < 100


def test_numbers_out_of_their_limits_are_errors() -> None:
    on = engine(pack=False)
    for name, value in (("draft_tokens", -1), ("draft_tokens", 33), ("max_running", 0), ("max_waiting", 1025)):
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=rf"{name}: must be at least \d and at most [\d,]+, got {value}"):
            Scheduler(on, **wrong)
    with pytest.raises(ConfigError, match="draft_tokens"):
        Engine(on.model, VOCAB_SIZE, draft_tokens=33)


@needs_library
def test_an_error_that_follows_unread_tokens_is_told_once_they_are_taken() -> None:
    """A reader that waits to be told before each look would else wait for ever."""

    class Failing:
        finished = False

        def allowed(self) -> torch.Tensor:
            return torch.ones(on.num_ids, dtype=torch.bool)

        def accept(self, id: int) -> None:
            raise DataError("takes too much work")

    on, told = engine(), threading.Semaphore(0)
    with Scheduler(on) as scheduler:
        request = Request(prompt(4, 0), SamplingConfig.greedy(5), frozenset(), None, Failing())
        ticket = scheduler.submit(request, told.release)
        while not ticket._ended:
            time.sleep(0.01)
        while told.acquire(blocking=False):  # it was told of all that came, and looks now
            pass
        assert len(ticket.take()) == 1
        assert told.acquire(timeout=60)
        with pytest.raises(DataError, match="too much work"):
            ticket.take()


def random_changes(seed: int, config: ModelConfig = LONG) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every second matrix, of different ranks."""
    generator, found = torch.Generator().manual_seed(seed), dict[str, tuple[Tensor, Tensor]]()
    for number, (name, linear) in enumerate(lora._linears(lively(config))):
        if isinstance(linear, torch.nn.Linear) and (number + seed) % 3:
            rank = 1 + (number + seed) % 4
            a = torch.randn(rank, linear.in_features, generator=generator) * 0.2
            found[name] = (a, torch.randn(linear.out_features, rank, generator=generator) * 0.2)
    return found


def merged(config: ModelConfig, changes: dict[str, tuple[Tensor, Tensor]]) -> Transformer:
    model = lively(config)
    with torch.no_grad():
        for name, (a, b) in changes.items():
            model.get_parameter(f"{name}.weight").add_(b @ a)
    return model


@needs_library
@pytest.mark.parametrize("config", [LONG, CHOICES["absolute positions"]], ids=["gated", "not gated"])
def test_logits_with_an_adapter_are_those_of_the_merged_model(config: ModelConfig) -> None:
    for seed in range(3):
        changes = random_changes(seed, config)
        on, whole = engine(config=config).adapted(changes), Engine(merged(config, changes), VOCAB_SIZE, pack=True)
        ids = prompt(30, seed)
        found, wanted = on.rows([ids], [1]).begin(), whole.rows([ids], [1]).begin()
        plain = engine(config=config).rows([ids], [1]).begin()
        largest = float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < 2e-5 * largest
        assert float((plain - wanted).abs().max()) > 1e-2 * largest
        seen = on.model.logits(on.model(torch.tensor([ids])))[0, -1].detach()
        assert float((seen - wanted[0]).abs().max()) < 2e-5 * largest


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
def test_requests_of_several_adapters_in_one_step_get_what_each_gets_alone(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with guessed tokens, and where prompts begin alike: keys are not shared across adapters."""
    base = engine()
    engines = [base, *(base.adapted(random_changes(seed)) for seed in range(3))]
    steps, before = steps_of(base, monkeypatch), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        samplings = [SamplingConfig.greedy(40), SamplingConfig(max_tokens=40, temperature=1.0, seed=5)]
        each = [(on, Request(prompt(90, 1), one, OFTEN, 2, adapter=on.adapter)) for on in engines for one in samplings]
        wanted = [alone(on, request) for on, request in each]
        assert len({tuple(ids) for ids in wanted}) == len(wanted)
        for draft_tokens in (0, 4):
            with Scheduler(base, draft_tokens=draft_tokens) as scheduler:
                by_itself = [[(one.id, one.logprob) for one in scheduler.submit(request)] for _, request in each]
            with Scheduler(base, draft_tokens=draft_tokens) as scheduler:
                steps.clear()
                mixed = [scheduler.submit(request) for _, request in each]
                assert [[(one.id, one.logprob) for one in ticket] for ticket in mixed] == by_itself
                assert [[id for id, _ in row] for row in by_itself] == wanted
                assert len(steps) < sum(map(len, wanted))
                for number, ticket in enumerate(mixed):
                    assert ticket.cached_tokens in ((0, 64, 89) if number % 2 else (0,))
    finally:
        torch.set_num_threads(before)


@needs_library
def test_pages_of_an_adapter_are_found_by_it_alone_and_go_where_others_need_them() -> None:
    base = engine()
    one, other = (base.adapted(random_changes(seed)) for seed in range(2))
    with Scheduler(base, memory_bytes=pages_bytes(base, 12)) as scheduler:
        for on in (base, one, other, one, base):
            request = Request(prompt(70, 3), SamplingConfig.greedy(2), adapter=on.adapter)
            ticket = scheduler.submit(request)
            assert ids_of(ticket) == alone(on, request)
        assert ticket.cached_tokens == 69
        request = Request(prompt(250, 4), SamplingConfig.greedy(2), adapter=other.adapter)
        assert ids_of(scheduler.submit(request)) == alone(other, request)
