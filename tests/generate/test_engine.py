import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.chat import SamplingConfig
from bloomery.core.errors import CheckpointError, DataError
from bloomery.generate.engine import Completion, Engine
from bloomery.model.transformer import Transformer
from tests.model.made import SHAPES, VOCAB_SIZE, lively, random_config, random_ids

import torch

NEVER = frozenset({VOCAB_SIZE})
OFTEN = frozenset(range(0, VOCAB_SIZE, 5))
greedy = SamplingConfig.greedy


def slowly(model: Transformer, prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """Greedy decoding by whole forward passes."""
    ids = list(prompt)
    for _ in range(max_tokens):
        if len(ids) == model.config.context_length:
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
    said = list(Engine(model, VOCAB_SIZE).stream(prompt, greedy(max_tokens), stop_ids=stop_ids))
    assert said == slowly(model, prompt, max_tokens, stop_ids)


@pytest.mark.slow
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
    found = engine.generate_batch(asked, greedy(max_tokens), stop_ids=stop_ids, batch=batch)
    assert len(found) == len(asked)
    for prompt, completion in zip(asked, found, strict=True):
        alone = list(engine.stream(prompt, greedy(max_tokens), stop_ids=stop_ids))
        stopped = bool(alone) and alone[-1] in stop_ids
        assert completion == Completion(alone[:-1] if stopped else alone, alone[-1] if stopped else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_tokens=9, temperature=1.0),
        SamplingConfig(max_tokens=9, temperature=0.7, top_p=0.9),
        SamplingConfig(max_tokens=9, temperature=1.3, top_k=5),
    ],
)
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_what_is_drawn_together_is_what_each_seed_draws_alone(sampling: SamplingConfig, batch: int) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    asked = prompts([4, 7, 4, 4, 7, 2], 5)
    seeds = [3, 2**52 + 1, 3, 11, 0, 7]
    found = engine.generate_batch(asked, sampling, stop_ids=OFTEN, seeds=seeds, batch=batch)
    for prompt, seed, completion in zip(asked, seeds, found, strict=True):
        alone = list(engine.stream(prompt, replace(sampling, seed=seed), stop_ids=OFTEN))
        stopped = alone[-1] in OFTEN
        assert completion == Completion(alone[:-1] if stopped else alone, alone[-1] if stopped else None)


@pytest.mark.parametrize("length", [1, 20, 38, 39])
def test_an_answer_ends_where_the_context_does(length: int) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    assert engine.context == 40
    prompt = prompts([length], 0)[0]
    assert len(list(engine.stream(prompt, greedy(1000), stop_ids=NEVER))) == 40 - length
    assert engine.generate_batch([prompt], greedy(1000), stop_ids=NEVER)[0].stopped is False


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_rows_beyond_the_ids_of_the_tokenizer_change_nothing_that_is_said(how: dict[str, Any]) -> None:
    model, padded = lively(SHAPES[1]), lively(SHAPES[1], vocab_size=VOCAB_SIZE + 2)
    with torch.no_grad():
        for name, weight in padded.state_dict().items():
            weight[:VOCAB_SIZE] = model.state_dict()[name]
        padded.head.weight[VOCAB_SIZE:] = 1e4 * torch.stack([model.head.weight[0], -model.head.weight[0]])
    asked = prompts([4, 7, 4], 5)
    both = [Engine(one, VOCAB_SIZE) for one in (model, padded)]
    sampling = SamplingConfig(max_tokens=9, seed=1, **how)
    said = [one.generate_batch(asked, sampling, stop_ids=NEVER, seeds=[1, 2, 3]) for one in both]
    streamed = [list(one.stream(asked[0], sampling, stop_ids=NEVER)) for one in both]
    assert said[0] == said[1]
    assert streamed[0] == streamed[1] == said[0][0].ids
    free = Engine(padded, VOCAB_SIZE + 2).generate_batch(asked, greedy(9), stop_ids=NEVER)
    assert all(set(one.ids) <= {VOCAB_SIZE, VOCAB_SIZE + 1} for one in free)


@pytest.mark.slow
def test_a_seed_decides_what_is_drawn_and_no_seed_is_a_new_one() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)

    def drawn(seed: int | None, **how: Any) -> list[int]:
        sampling = SamplingConfig(max_tokens=30, temperature=5.0, seed=seed, **how)
        return list(engine.stream([3], sampling, stop_ids=NEVER))

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)
    likeliest = list(engine.stream([3], greedy(30), stop_ids=NEVER))
    assert drawn(1, top_k=1) == drawn(2, top_p=1e-9) == likeliest != drawn(1)


def test_a_stream_that_is_left_early_disturbs_no_other() -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    whole = list(engine.stream([3, 4], greedy(9), stop_ids=NEVER))
    one, other = (engine.stream([3, 4], greedy(9), stop_ids=NEVER) for _ in range(2))
    mixed = [next(one), next(other), next(other), next(one)]
    assert mixed == [whole[0], whole[0], whole[1], whole[1]]
    assert list(other) == whole[2:]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "the prompt is empty"),
        ([1] * 40, r"(?s)the prompt has 40 tokens, but the model's context is 40.*Shorten"),
        ([1] * 90, "the prompt has 90 tokens"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_before_any_work(prompt: list[int], told: str) -> None:
    engine = Engine(lively(SHAPES[0]), VOCAB_SIZE)
    with pytest.raises(DataError, match=told):
        next(engine.stream(prompt, greedy(3), stop_ids=NEVER))
    with pytest.raises(DataError, match=told):
        engine.generate_batch([[1, 2], prompt], greedy(3), stop_ids=NEVER)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_one_logit_that_is_not_finite_is_an_error_and_no_id_is_chosen(
    bad: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampling = lively(SHAPES[0]), SamplingConfig(max_tokens=3, temperature=temperature)
    logits = torch.zeros(2, 1, VOCAB_SIZE)
    logits[1, 0, 3] = bad
    monkeypatch.setattr(model, "logits", lambda hidden: logits[-len(hidden) :])
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        next(Engine(model, VOCAB_SIZE).stream([1, 2], sampling))
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        Engine(model, VOCAB_SIZE).generate_batch([[1, 2], [3, 4]], sampling, stop_ids=NEVER)
