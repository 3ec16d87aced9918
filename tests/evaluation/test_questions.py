from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import DataError
from bloomery.data.sources import toy_worlds
from bloomery.evaluation import held_out as evaluation_held_out
from bloomery.evaluation.held_out import JudgedAnswer, ToyQuestion, ask, question_scores, table
from bloomery.generate.engine import Completion, Engine
from bloomery.tokenizer.chat_template import Renderer
from tests.model.made import SHAPES, lively
from tests.tokenizer.made import small

held_out = cache(evaluation_held_out.held_out)


@cache
def kinds() -> set[str]:
    return {talk.kind for talk in toy_worlds.conversations(123, 3000, "held out")}


def shown(question: ToyQuestion) -> str:
    return "\n".join(message["content"] for message in question.messages)


@pytest.mark.parametrize("count", [1, 50, 220])
def test_held_out_questions_are_even_over_all_kinds_and_none_comes_twice(count: int) -> None:
    found = held_out(3, count)
    assert len(found) == count
    assert len({shown(question) for question in found}) == count
    by_kind = Counter(question.kind for question in found)
    assert set(by_kind) <= kinds()
    assert all(by_kind[kind] in (count // len(kinds()), -(-count // len(kinds()))) for kind in kinds())


def test_every_seed_knows_every_kind() -> None:
    for seed in range(3):
        assert {question.kind for question in held_out(seed, 30)} == kinds()


def test_a_seed_decides_the_questions() -> None:
    assert evaluation_held_out.held_out(1, 30) == held_out(1, 30)
    assert [shown(one) for one in held_out(1, 30)] != [shown(one) for one in held_out(2, 30)]


def test_every_question_is_from_a_held_out_conversation_and_ends_with_the_user() -> None:
    for question in held_out(0, 30):
        assert question.messages[-1]["role"] == "user"
        assert [message["role"] for message in question.messages] == ["user", "assistant"] * (
            len(question.messages) // 2
        ) + ["user"]
        assert question.answer
        assert ("later turn" in question.kind) == (len(question.messages) > 1)


def test_where_a_kind_is_used_up_the_others_get_more_and_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a few hundred different sums: to ask for more than that of each kind must not take for ever."""
    few = held_out(0, 30)
    rare, *others = few
    stream = [rare] * 50 + others

    def endless(seed: int) -> Any:
        while True:
            yield from stream

    monkeypatch.setattr(evaluation_held_out, "_stream", endless)
    monkeypatch.setattr(evaluation_held_out, "DRAWS_BEFORE_USED_UP", 200)
    assert {shown(one) for one in evaluation_held_out.held_out(0, 30)} == {shown(one) for one in few}
    assert len(evaluation_held_out.held_out(0, 1000)) == 30


# --- asked and judged ----------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Engine:
    return Engine(lively(SHAPES[0], vocab_size=small().vocab_size), small().vocab_size)


def test_questions_are_asked_through_the_renderer_and_judged_by_equality(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = held_out(0, 30)[:5]
    said = [asked[0].answer, asked[1].answer + ".", asked[2].answer, "", asked[4].answer[:-1]]
    stopped = [True, True, False, True, True]
    seen: dict[str, Any] = {}

    def complete(
        prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, stop_ids: frozenset[int]
    ) -> list[Completion]:
        seen.update(prompts=prompts, sampling=sampling, stop_ids=stop_ids)
        return [Completion(small().encode(text), 0 if end else None) for text, end in zip(said, stopped, strict=True)]

    monkeypatch.setattr(engine, "generate_batch", complete)
    renderer = Renderer(small())
    judged = ask(engine, renderer, asked, 48)
    assert seen["prompts"] == [renderer.prompt(question.messages) for question in asked]
    assert (seen["sampling"], seen["stop_ids"]) == (SamplingConfig.greedy(48), frozenset({small().end_id}))
    assert [one.said for one in judged] == said
    assert [one.exact for one in judged] == [True, False, False, False, False]
    assert [one.ended for one in judged] == stopped


def test_a_question_that_leaves_no_room_in_the_context_is_not_asked_and_counted(engine: Engine) -> None:
    asked, renderer = held_out(0, 30), Renderer(small())
    lengths = sorted(len(renderer.prompt(question.messages)) for question in asked)
    engine.context = lengths[20]
    kept = evaluation_held_out.fitting(engine, renderer, asked)
    assert kept == [one for one in asked if len(renderer.prompt(one.messages)) < lengths[20]]
    assert 0 < len(kept) < 30
    assert len(ask(engine, renderer, kept, 1)) == len(kept)
    engine.context = lengths[0]
    told = f"none of 30 validation questions fits into the model's context of {lengths[0]} tokens"
    with pytest.raises(DataError, match=told):
        evaluation_held_out.fitting(engine, renderer, asked)
    assert evaluation_held_out.fitting(engine, renderer, []) == []


def judgment(kind: str, said: str = "yes", ended: bool = True) -> JudgedAnswer:
    return JudgedAnswer(ToyQuestion(kind, [], "yes"), said, ended)


def test_an_answer_that_did_not_end_is_not_exact() -> None:
    right = judgment("a")
    assert right.exact
    assert not replace(right, ended=False).exact
    assert not replace(right, said="Yes").exact


def test_scores_are_shares_of_all_and_of_each_kind() -> None:
    judged = [judgment("b"), judgment("a", "no"), judgment("b", ended=False), judgment("b", "no", ended=False)]
    assert question_scores(judged) == {"n": 4, "exact": 0.25, "ended": 0.5}
    assert table(judged) == {
        "a": {"n": 1, "exact": 0.0, "ended": 1.0},
        "b": {"n": 3, "exact": 0.3333, "ended": 0.3333},
    }
    assert list(table(judged)) == ["a", "b"]
    assert question_scores([]) == {"n": 0, "exact": 0.0, "ended": 0.0}
