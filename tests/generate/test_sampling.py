import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from bloomery.core.chat import LIMITS, SamplingConfig, sampling_of
from bloomery.core.errors import DataError
from bloomery.generate.engine import MIN_TEMPERATURE, choose

import torch
from torch import Tensor

scores = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9)


def draws(logits: Tensor, count: int, *, seed: int = 0, **how: Any) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    how.setdefault("temperature", 1.0)
    sampling = SamplingConfig(**how)
    return [choose(logits, sampling, generator) for _ in range(count)]


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_out_of_its_limits_is_an_error_with_its_name(name: str) -> None:
    low, high = LIMITS[name]
    floats = {"temperature": [math.nan], "top_p": [0.0, math.nan]}
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
@given(scores, st.integers(0, 10), st.sampled_from([1e-9, 0.1, 0.3, 0.505, 0.7, 0.9, 0.999, 1.0]), st.integers(0, 99))
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


@given(scores, st.lists(st.integers(0, 8), max_size=12), st.sampled_from([0.5, 1.1, 2.0]))
def test_the_repetition_penalty_is_that_of_transformers(found: list[float], seen: list[int], penalty: float) -> None:
    seen = [id for id in seen if id < len(found)]
    theirs = torch.tensor([found])
    if seen:
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), theirs)
    how = SamplingConfig(temperature=0, repetition_penalty=penalty)
    assert choose(torch.tensor(found), how, seen=seen) == int(theirs.argmax())


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
    for wrong in ({"top_p": 1.5}, {"temperature": "hot"}, {"top_k": 2.5}, {"temperature": True}):
        with pytest.raises(DataError):
            sampling_of(wrong)
