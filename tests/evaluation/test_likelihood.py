import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import CheckpointError, DataError
from bloomery.evaluation.harness import Continuation, Likelihood, encoded, score
from bloomery.model.config import ModelConfig
from bloomery.model.transformer import Transformer
from tests.model.made import CHOICES, SHAPES, VOCAB_SIZE, lively
from tests.tokenizer.made import TEXTS, small

import torch

SEEDS = st.integers(0, 10_000)


def scored(
    model: Transformer, asked: list[Continuation], tokens: int = 8192, num_ids: int = VOCAB_SIZE
) -> list[Likelihood]:
    return score(model, asked, num_ids=num_ids, tokens_at_once=tokens, seen=lambda done: None)


def slowly(model: Transformer, one: Continuation) -> tuple[float, bool]:
    """By one pass over each beginning, as the definition says."""
    ids = (one.prompt + one.continuation)[-(model.config.context_length + 1) :]
    total, greedy = 0.0, True
    for place in range(len(ids) - len(one.continuation), len(ids)):
        with torch.no_grad():
            scores = model.logits(model(torch.tensor([ids[:place]])))[0, -1].double()
        total += float(torch.log_softmax(scores, -1)[ids[place]])
        greedy &= int(scores.argmax()) == ids[place]
    return total, greedy


def drawn(seed: int, prompts: int, longest: int = 20) -> list[Continuation]:
    """Some prompts, each with one to four continuations."""
    rng = random.Random(seed)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, most)))

    return [
        Continuation(prompt, ids(6))
        for prompt in (ids(longest) for _ in range(prompts))
        for _ in range(rng.randint(1, 4))
    ]


SHAPED = {"plain": SHAPES[0], "untied": SHAPES[1], **{name: CHOICES[name] for name in list(CHOICES)[::2]}}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPED.values(), ids=SHAPED.keys())
def test_a_continuation_is_as_likely_as_token_by_token(shape: ModelConfig) -> None:
    model = lively(shape)
    asked = drawn(1, 5)
    for one, found in zip(asked, scored(model, asked), strict=True):
        log_p, greedy = slowly(model, one)
        assert found.log_p == pytest.approx(log_p, abs=2e-4)
        assert (found.greedy, found.tokens) == (greedy, len(one.continuation))


def test_the_most_likely_token_is_one_that_the_tokenizer_has() -> None:
    model, asked = lively(SHAPES[1], vocab_size=VOCAB_SIZE + 2), drawn(1, 5)
    with torch.no_grad():
        model.head.weight[VOCAB_SIZE:] = 1e4 * torch.stack([model.head.weight[0], -model.head.weight[0]])
        scores = [model.logits(model(torch.tensor([one.prompt])))[0, -1] for one in asked]
    best = [
        Continuation(one.prompt, (int(some[:VOCAB_SIZE].argmax()),)) for one, some in zip(asked, scores, strict=True)
    ]
    assert all(int(some.argmax()) >= VOCAB_SIZE for some in scores)
    assert all(one.greedy for one in scored(model, best))


@settings(max_examples=15)
@given(SEEDS, st.integers(1, 200))
def test_neither_order_nor_batch_changes_a_likelihood(seed: int, tokens: int) -> None:
    model, asked = lively(SHAPES[0]), drawn(seed, 6)
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    found = scored(model, asked)
    again = scored(model, [asked[place] for place in order], tokens)
    for place, one in zip(order, again, strict=True):
        assert one.log_p == pytest.approx(found[place].log_p, abs=1e-4)
        assert one[1:] == found[place][1:]


def test_a_model_whose_logits_are_not_finite_has_no_likelihoods() -> None:
    model = lively(SHAPES[0])
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] = 3.4e38
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        scored(model, drawn(1, 5))


def test_what_is_longer_than_the_context_loses_its_beginning() -> None:
    model = lively(SHAPES[0])
    T = model.config.context_length
    long = drawn(3, 1, longest=1)[0].continuation
    asked = [Continuation(tuple(i % VOCAB_SIZE for i in range(size)), long) for size in (T - 1, T, T + 1, 3 * T)]
    for one, found in zip(asked, scored(model, asked), strict=True):
        assert found.log_p == pytest.approx(slowly(model, one)[0], abs=2e-4)
    beyond = Continuation((1,), tuple(range(T + 5)))
    kept = (beyond.prompt + beyond.continuation)[-(T + 1) :]
    assert scored(model, [beyond])[0].tokens == T == len(kept) - 1


def test_probabilities_of_all_that_may_follow_sum_to_one() -> None:
    model = lively(SHAPES[0])
    found = scored(model, [Continuation((3, 1, 4), (id,)) for id in range(VOCAB_SIZE)])
    assert sum(2.718281828459045**one.log_p for one in found) == pytest.approx(1.0, abs=1e-5)
    assert sum(one.greedy for one in found) == 1


@settings(max_examples=25)
@given(TEXTS, TEXTS.filter(bool))
def test_a_pair_is_encoded_as_one_text_and_split_where_the_prompt_ends(prompt: str, continuation: str) -> None:
    tokenizer = small()
    before, whole = tokenizer.encode(prompt.rstrip()), tokenizer.encode(prompt + continuation)
    if len(whole) <= len(before):
        with pytest.raises(DataError, match="adds no token"):
            encoded(tokenizer, prompt, continuation, opening=[])
        return
    asked = encoded(tokenizer, prompt, continuation, opening=[tokenizer.document_id])
    assert asked.prompt == (tokenizer.document_id, *before)
    assert asked.continuation == tuple(whole[len(before) :])
    plain = encoded(tokenizer, prompt, continuation, opening=[])
    assert plain.prompt == (tuple(before) or (tokenizer.document_id,))
