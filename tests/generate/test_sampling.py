import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from bloomery.core.chat import ABOVE_ZERO, LIMITS, MAX_BIASES, SamplingConfig, sampling_of
from bloomery.core.errors import DataError
from bloomery.generate.sampling import FEW, MIN_TEMPERATURE, MORE, TokenSampler, choose_each, distribution
from bloomery.hw import device as devices

import torch
from torch import Tensor

scores = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9)


def choose(logits: Tensor, sampling: SamplingConfig, seen: Sequence[int] = (), seed: int = 0) -> int:
    return TokenSampler(sampling, seen, seed).choose(logits)


def draws(logits: Tensor, count: int, *, seed: int = 0, **how: Any) -> list[int]:
    how.setdefault("temperature", 1.0)
    sampler = TokenSampler(SamplingConfig(**how), seed=seed)
    return [sampler.choose(logits) for _ in range(count)]


def chances(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """The probability of every ID."""
    some, ids = distribution(logits, sampling)
    whole = torch.zeros(len(logits), dtype=torch.float64)
    whole[torch.arange(len(logits)) if ids is None else ids] = some
    return whole / whole.sum()


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_out_of_its_limits_is_an_error_with_its_name(name: str) -> None:
    low, high = LIMITS[name]
    floats = {"temperature": [math.nan], "top_p": [math.nan], **{share: [0.0, math.nan] for share in ABOVE_ZERO}}
    for value in (low - 1, high + 1, *floats.get(name, [])):
        setting: dict[str, Any] = {name: value}
        with pytest.raises(DataError, match=f"{name}: must be .* and at most .*, got"):
            SamplingConfig(**setting)


@given(scores, st.integers(0, 9), st.floats(0.0, 1.0, exclude_min=True))
def test_temperature_zero_takes_the_highest_score_and_of_equal_ones_the_first(
    found: list[float], top_k: int, top_p: float
) -> None:
    chosen = choose(torch.tensor(found), SamplingConfig(temperature=0, top_k=top_k, top_p=top_p))
    assert chosen == found.index(max(found))


def support(found: list[float], top_k: int, top_p: float) -> list[int]:
    """The ids that may be drawn, by the definition."""
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: top_k or None]
    total = sum(math.exp(found[i]) for i in order)
    kept, reached = list[int](), 0.0
    for i in order:
        if kept and (reached >= top_p - 1e-12 if top_p < 1 else False):
            break
        kept.append(i)
        reached += math.exp(found[i]) / total
    return kept


@settings(max_examples=60)
@given(
    scores, st.integers(0, 10), st.sampled_from([0.0, 1e-9, 0.1, 0.3, 0.505, 0.7, 0.9, 0.999, 1.0]), st.integers(0, 99)
)
def test_only_the_top_k_and_of_these_the_top_p_are_ever_drawn(
    found: list[float], top_k: int, top_p: float, seed: int
) -> None:
    allowed = support(found, top_k, top_p)
    drawn = set(draws(torch.tensor(found), 40, seed=seed, top_k=top_k, top_p=top_p))
    assert drawn <= set(allowed)
    if len(allowed) == 1:
        assert drawn == set(allowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}]
)
def test_ids_are_drawn_as_often_as_their_scores_say(how: dict[str, Any]) -> None:
    """Chi-square: a true distribution with up to 6 degrees of freedom exceeds 38.3 once in a million."""
    logits = torch.tensor([0.3, 1.5, -0.7, 0.9, 0.0, 1.2, -1.5])
    scaled = (logits / how.get("temperature", 1.0)).tolist()
    allowed = support(scaled, int(how.get("top_k", 0)), how.get("top_p", 1.0))
    total = sum(math.exp(scaled[i]) for i in allowed)
    count = 5000
    seen = Counter(draws(logits, count, seed=0, **how))
    assert set(seen) == set(allowed)
    expected = {i: count * math.exp(scaled[i]) / total for i in allowed}
    assert sum((seen[i] - expected[i]) ** 2 / expected[i] for i in allowed) < 38.3


def test_equal_scores_at_the_border_go_by_their_ids() -> None:
    assert set(draws(torch.zeros(6), 100, top_k=2)) == {0, 1}


def test_scores_far_apart_are_no_trouble() -> None:
    logits = torch.tensor([-1e30, 80.0, -math.inf, 0.0])
    assert set(draws(logits, 20, temperature=0.01)) == {1}
    assert set(draws(logits, 20, temperature=0.01, top_k=4, top_p=0.5)) == {1}


EXTREME = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32), st.just(-math.inf), st.floats(-20, 20, width=32)
)


@settings(max_examples=300)
@given(
    st.lists(EXTREME, min_size=1, max_size=9).filter(lambda found: max(found) > -math.inf),
    st.floats(0, 2) | st.sampled_from([5e-324, 1e-320, 1e-308, 1e-38, 1e-6, 1e-5, 2e-5]),
    st.integers(0, 2**24),
    st.floats(0, 1, exclude_min=True) | st.sampled_from([5e-324, 1e-320, 1e-17, 1 - 2**-53]),
)
def test_every_accepted_setting_draws_an_id_that_has_a_probability(
    found: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    (drawn,) = set(draws(torch.tensor(found), 1, temperature=temperature, top_k=top_k, top_p=top_p))
    assert found[drawn] > -math.inf
    if temperature < MIN_TEMPERATURE:
        assert drawn == found.index(max(found))
    elif top_k:
        assert sum(score > found[drawn] for score in found) < top_k


def theirs(processors: Sequence[LogitsProcessor], logits: Tensor, seen: Sequence[int] = ()) -> Tensor:
    text: Any = torch.tensor([list(seen)], dtype=torch.long)
    scores: Tensor = LogitsProcessorList(processors)(text, logits[None].clone())
    return scores[0]


vocabularies = st.integers(0, 10**6).map(
    lambda seed: 2 * torch.randn(20 + 700 * (seed % 20), generator=torch.Generator().manual_seed(seed))
)
shares = st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0])


@settings(max_examples=150)
@given(vocabularies, st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0, 1, 7, 900]), shares, shares, shares)
def test_candidates_and_their_probabilities_are_those_of_transformers(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    """All warpers in the order of transformers. Vocabularies are on both sides of the numbers that are tried first."""
    assert 20 < FEW < MORE < 20 + 700 * 19
    min_p = 0.0 if min_p == 1.0 else min_p
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    processors += [TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    expected = torch.softmax(theirs(processors, logits.double()), dim=-1)
    how = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    assert torch.allclose(chances(logits, how), expected, atol=1e-6)


texts = st.lists(st.integers(0, 8), max_size=12)


@given(scores, texts, st.sampled_from([0.5, 1.1, 2.0]))
def test_the_repetition_penalty_is_that_of_transformers(found: list[float], seen: list[int], penalty: float) -> None:
    seen = [id for id in seen if id < len(found)]
    expected = theirs([RepetitionPenaltyLogitsProcessor(penalty)], torch.tensor(found), seen)
    how = SamplingConfig(temperature=0, repetition_penalty=penalty)
    assert choose(torch.tensor(found), how, seen) == int(expected.argmax())


@settings(max_examples=200)
@given(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=9, max_size=9, unique=True),
    texts,
    st.integers(0, 4),
    st.sampled_from([1.0, 1.3]),
    st.dictionaries(st.integers(0, 8), st.integers(-3, 3).map(float), max_size=3),
)
def test_bias_penalty_and_ngram_ban_together_are_those_of_transformers(
    found: list[float], seen: list[int], ngram: int, penalty: float, bias: dict[int, float]
) -> None:
    processors: list[LogitsProcessor] = []
    processors += [SequenceBiasLogitsProcessor([[[id], value] for id, value in bias.items()])] if bias else []
    processors += [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    processors += [NoRepeatNGramLogitsProcessor(ngram)] if ngram else []
    logits = torch.tensor(found)
    expected = theirs(processors, logits, seen)
    how = SamplingConfig(
        temperature=0, repetition_penalty=penalty, no_repeat_ngram=ngram, logit_bias=tuple(bias.items())
    )
    if expected.max() > -torch.inf:  # where all are banned, ours bans none
        assert choose(logits, how, seen) == int(expected.argmax())


@settings(max_examples=200)
@given(
    scores,
    texts,
    texts,
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-0.3, 0.0, 1.1]),
    st.sampled_from([1.0, 1.5]),
    st.integers(0, 8),
)
def test_penalties_subtract_once_and_once_for_each_time_in_their_window(
    found: list[float],
    prompt: list[int],
    answer: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    window: int,
) -> None:
    how = SamplingConfig(
        temperature=0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        penalty_window=window,
    )
    sampler = TokenSampler(how, prompt)
    for id in answer:
        sampler.accept(id)
    counts = Counter([*prompt, *answer][-window:] if window else [*prompt, *answer])
    expected = torch.tensor(found)
    for id, score in enumerate(found):
        if counts[id]:
            repeated = score * repetition if score < 0 else score / repetition
            expected[id] = torch.tensor(repeated) - presence - frequency * counts[id]
    best = float(expected.max())
    assert float(expected[sampler.choose(torch.tensor(found))]) == pytest.approx(best, abs=1e-5)


def test_a_text_counts_what_was_chosen() -> None:
    sampler = TokenSampler(SamplingConfig(temperature=0, no_repeat_ngram=1), [0])
    assert [sampler.choose(torch.tensor([4.0, 3.0, 2.0, 1.0])) for _ in range(4)] == [1, 2, 3, 0]


def test_settings_that_read_no_text_keep_none() -> None:
    for how in ({}, {"logit_bias": ((1, 2.0),)}, {"top_p": 0.5, "typical_p": 0.5}, {"penalty_window": 9}):
        sampler = TokenSampler(SamplingConfig(**how), range(50))
        sampler.accept(3)
        assert not sampler._text


def test_only_what_is_allowed_is_chosen() -> None:
    allowed = torch.tensor([False, True, True, False])
    logits = torch.tensor([9.0, 1.0, 2.0, 9.0])
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 9.0}, {"top_k": 1}, {"top_p": 0.1}]
    for how in settings:
        sampler = TokenSampler(SamplingConfig(**how), seed=1)
        assert {sampler.choose(logits, allowed) for _ in range(30)} <= {1, 2}
    banned = TokenSampler(SamplingConfig(temperature=0, no_repeat_ngram=1), [1, 2])
    assert banned.choose(logits, allowed) == 2
    with pytest.raises(DataError, match="no token may follow"):
        banned.choose(logits, torch.zeros(4, dtype=torch.bool))


def test_rows_with_samplers_of_their_own_get_what_each_gets_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    hows = [
        SamplingConfig(temperature=0),
        SamplingConfig(temperature=0, logit_bias=((7, 100.0),)),
        SamplingConfig(top_p=0.8),
        SamplingConfig(repetition_penalty=1.5),
    ]
    allowed = [None, None, torch.arange(50) > 40, None]
    alone = [TokenSampler(how, [1, 2], 5).choose(row, one) for how, row, one in zip(hows, logits, allowed, strict=True)]
    assert choose_each(logits, [TokenSampler(how, [1, 2], 5) for how in hows], allowed) == alone
    greedy = [TokenSampler(hows[0]) for _ in range(4)]
    assert choose_each(logits, greedy) == logits.argmax(-1).tolist()


def test_a_gpu_chooses_for_all_rows_at_once_what_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For equal logits too, more candidates than are tried first, and -inf; the CPU stands for the GPU."""
    logits = torch.randn(12, 9000, generator=torch.Generator().manual_seed(1)) * torch.rand(12, 1) * 4
    logits[3] = logits[3].round()
    logits[4, 5:] = -torch.inf
    hows = [
        SamplingConfig(temperature=0),
        SamplingConfig(temperature=0.7),
        SamplingConfig(top_p=0.8),
        SamplingConfig(top_k=40, top_p=0.9),
        SamplingConfig(min_p=0.05, typical_p=0.6),
        SamplingConfig(temperature=2.0, typical_p=0.95, top_k=7),
    ]
    for shift in range(6):
        rows = [hows[(row + shift) % 6] for row in range(12)]
        alone = [TokenSampler(how, seed=row).choose(logits[row]) for row, how in enumerate(rows)]
        with monkeypatch.context() as patched:
            patched.setattr(devices, "is_gpu", lambda device: True)
            patched.setattr(TokenSampler, "choose", None)
            assert choose_each(logits, [TokenSampler(how, seed=row) for row, how in enumerate(rows)]) == alone


def test_a_gpu_that_is_to_give_the_same_bits_leaves_sampling_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, how = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), SamplingConfig(top_p=0.8)
    alone = [TokenSampler(how, seed=row).choose(logits[row]) for row in range(3)]
    monkeypatch.setattr(devices, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr("bloomery.generate.sampling._choose_together", None)
    assert choose_each(logits, [TokenSampler(how, seed=row) for row in range(3)]) == alone


@pytest.mark.parametrize(
    ("bias", "told"),
    [
        (((3, 101.0),), "has the bias 101.0 for token 3"),
        (((3, math.nan),), "has the bias nan"),
        (((-1, 1.0),), "for token -1"),
        (((3, 1.0), (3, 2.0)), "names token 3 twice"),
        (tuple((id, 1.0) for id in range(MAX_BIASES + 1)), "has 1,025 tokens; the limit is 1,024"),
    ],
)
def test_a_bias_that_cannot_be_is_an_error(bias: tuple[tuple[int, float], ...], told: str) -> None:
    with pytest.raises(DataError, match=f"logit_bias: .*{told}"):
        SamplingConfig(logit_bias=bias)


def test_min_p_leaves_out_what_is_far_below_the_most_likely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(logits, 300, min_p=0.5)) == {0, 1}
    assert set(draws(logits, 300, min_p=0.0)) == {0, 1, 2, 3}


def test_the_settings_of_a_model_are_its_generation_config() -> None:
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "eos_token_id": 2,
    }
    assert sampling_of(said) == {key: said[key] for key in ("temperature", "top_k", "top_p", "repetition_penalty")}
    assert sampling_of({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert sampling_of({"temperature": None}) == {}
    assert sampling_of({"typical_p": 0.9, "no_repeat_ngram_size": 3.0}) == {"typical_p": 0.9, "no_repeat_ngram": 3}
    assert sampling_of({"typical_p": 0.0, "top_p": 0, "top_k": -1}) == {"top_k": 0}  # off, as some programs write it
    for wrong in ({"top_p": 1.5}, {"temperature": "hot"}, {"top_k": 2.5}, {"temperature": True}, {"top_k": math.inf}):
        (key,) = wrong
        with pytest.raises(DataError, match=rf"^generation_config\.json: {key} must be .*\nCorrect or remove it\.$"):
            sampling_of(wrong)
    with pytest.raises(DataError, match=r"^a/generation_config\.json: no_repeat_ngram_size must be at least 0"):
        sampling_of({"no_repeat_ngram_size": 2000}, "a/generation_config.json")
