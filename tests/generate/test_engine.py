from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.generate.engine import Completion, Engine
from bloomery.model.transformer import Transformer
from tests.model.made import SHAPES, VOCAB_SIZE, lively, random_config, random_ids

import torch

NEVER = frozenset({VOCAB_SIZE})
OFTEN = frozenset(range(0, VOCAB_SIZE, 5))


def slowly(model: Transformer, prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """Greedy decoding by whole forward passes."""
    ids = list(prompt)
    for _ in range(max_tokens):
        if len(ids) == model.config.context:
            break
        with torch.no_grad():
            scores = model.logits(model(torch.tensor([ids])))[0, -1]
        ids.append(int(scores.argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    return [random_ids(1, length, seed + number)[0].tolist() for number, length in enumerate(lengths)]


@settings(max_examples=15)
@given(st.integers(0, 40), st.integers(1, 11), st.integers(0, 12), st.sampled_from([NEVER, OFTEN]))
def test_a_stream_is_what_whole_forward_passes_say(
    seed: int, length: int, max_tokens: int, stop_ids: frozenset[int]
) -> None:
    model = lively(random_config(seed), seed)
    prompt = prompts([length], seed)[0]
    said = list(Engine(model, VOCAB_SIZE).stream(prompt, max_tokens=max_tokens, stop_ids=stop_ids))
    assert said == slowly(model, prompt, max_tokens, stop_ids)


@settings(max_examples=15)
@given(
    st.integers(0, 40),
    st.lists(st.integers(1, 11), max_size=12),
    st.integers(0, 12),
    st.integers(1, 5),
    st.sampled_from([NEVER, OFTEN]),
)
def test_sequences_decoded_together_say_what_each_says_alone(
    seed: int, lengths: list[int], max_tokens: int, batch: int, stop_ids: frozenset[int]
) -> None:
    engine = Engine(lively(random_config(seed), seed), VOCAB_SIZE)
    asked = prompts(lengths, seed)
    found = engine.complete(asked, max_tokens=max_tokens, stop_ids=stop_ids, batch=batch)
    assert len(found) == len(asked)
    for prompt, completion in zip(asked, found, strict=True):
        alone = list(engine.stream(prompt, max_tokens=max_tokens, stop_ids=stop_ids))
        stopped = bool(alone) and alone[-1] in stop_ids
        assert completion == Completion(alone[:-1] if stopped else alone, stopped)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 5}]
)
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_what_is_drawn_together_is_what_each_seed_draws_alone(how: dict[str, Any], batch: int) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    asked = prompts([4, 7, 4, 4, 7, 2], 5)
    seeds = [3, 2**52 + 1, 3, 11, 0, 7]
    found = engine.draw(asked, seeds, max_tokens=9, stop_ids=OFTEN, batch=batch, **how)
    for prompt, seed, completion in zip(asked, seeds, found, strict=True):
        alone = list(engine.stream(prompt, max_tokens=9, stop_ids=OFTEN, seed=seed, **how))
        stopped = alone[-1] in OFTEN
        assert completion == Completion(alone[:-1] if stopped else alone, stopped)


def test_a_stream_ends_with_the_stop_id_and_a_completion_before_it() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    prompt = prompts([4], 0)[0]
    whole = list(engine.stream(prompt, max_tokens=12, stop_ids=NEVER))
    stop = whole[5]
    until = whole.index(stop)
    assert list(engine.stream(prompt, max_tokens=12, stop_ids=frozenset({stop}))) == whole[: until + 1]
    assert engine.complete([prompt], max_tokens=12, stop_ids=frozenset({stop})) == [Completion(whole[:until], True)]
    cut = engine.complete([prompt], max_tokens=until, stop_ids=frozenset({stop}))
    assert cut == [Completion(whole[:until], False)]


@pytest.mark.parametrize("length", [1, 20, 38, 39])
def test_an_answer_ends_where_the_context_does(length: int) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    assert engine.context == 40
    prompt = prompts([length], 0)[0]
    assert len(list(engine.stream(prompt, max_tokens=1000, stop_ids=NEVER))) == 40 - length
    assert engine.complete([prompt], max_tokens=1000, stop_ids=NEVER)[0].stopped is False


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_rows_beyond_the_ids_of_the_tokenizer_change_nothing_that_is_said(how: dict[str, Any]) -> None:
    model, padded = lively(SHAPES[1]), lively(SHAPES[1], vocab_size=VOCAB_SIZE + 2)
    with torch.no_grad():
        for name, weight in padded.state_dict().items():
            weight[:VOCAB_SIZE] = model.state_dict()[name]
        padded.head.weight[VOCAB_SIZE:] = 1e4 * torch.stack([model.head.weight[0], -model.head.weight[0]])
    asked = prompts([4, 7, 4], 5)
    both = [Engine(one, VOCAB_SIZE) for one in (model, padded)]
    said = [one.draw(asked, [1, 2, 3], max_tokens=9, stop_ids=NEVER, **how) for one in both]
    streamed = [list(one.stream(asked[0], max_tokens=9, stop_ids=NEVER, seed=1, **how)) for one in both]
    assert said[0] == said[1]
    assert streamed[0] == streamed[1] == said[0][0].ids
    free = Engine(padded, VOCAB_SIZE + 2).complete(asked, max_tokens=9, stop_ids=NEVER)
    assert all(set(one.ids) <= {VOCAB_SIZE, VOCAB_SIZE + 1} for one in free)


def test_no_more_ids_are_said_than_asked_for() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    for count in (0, 1, 2, 7):
        assert len(list(engine.stream([1, 2], max_tokens=count, stop_ids=NEVER))) == count


def test_a_seed_decides_what_is_drawn_and_no_seed_is_a_new_one() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)

    def drawn(seed: int | None, **how: float) -> list[int]:
        return list(engine.stream([3], max_tokens=30, temperature=5.0, seed=seed, stop_ids=NEVER, **how))  # type: ignore[arg-type]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)
    greedy = list(engine.stream([3], max_tokens=30, stop_ids=NEVER))
    assert drawn(1, top_k=1) == drawn(2, top_p=1e-9) == greedy != drawn(1)


def test_a_stream_that_is_left_early_disturbs_no_other() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    whole = list(engine.stream([3, 4], max_tokens=9, stop_ids=NEVER))
    one, other = (engine.stream([3, 4], max_tokens=9, stop_ids=NEVER) for _ in range(2))
    mixed = [next(one), next(other), next(other), next(one)]
    assert mixed == [whole[0], whole[0], whole[1], whole[1]]
    assert list(other) == whole[2:]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "the prompt is empty"),
        ([1] * 40, r"(?s)the prompt has 40 tokens, and the model's context is 40.*Shorten"),
        ([1] * 90, "the prompt has 90 tokens"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_before_any_work(prompt: list[int], told: str) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    with pytest.raises(DataError, match=told):
        next(engine.stream(prompt, max_tokens=3, stop_ids=NEVER))
    with pytest.raises(DataError, match=told):
        engine.complete([[1, 2], prompt], max_tokens=3, stop_ids=NEVER)


def test_no_prompts_have_no_completions() -> None:
    assert Engine(lively(SHAPES[0]), VOCAB_SIZE).complete([], max_tokens=3, stop_ids=NEVER) == []
