from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.shards.config import MAX_EPOCHS, MixShare, MixTarget, quotas, reached

NAMES = "abcd"
SIZES = st.fixed_dictionaries({name: st.integers(1, 10**13) for name in NAMES})
ASKS = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3)), min_size=1).map(
    lambda found: [MixTarget(domain, *numbers) for domain, numbers in found.items()]
)
TOKENS = st.one_of(st.none(), st.integers(1, 10**14))


@given(SIZES, ASKS, TOKENS)
def test_nothing_is_given_that_was_not_asked_or_that_the_epochs_do_not_allow(
    sizes: dict[str, int], asks: list[MixTarget], tokens: int | None
) -> None:
    found = quotas(sizes, asks, tokens)
    assert list(found) == [ask.domain for ask in asks]
    assert sum(quota.share for quota in found.values()) == 1
    for ask in asks:
        quota, size = found[ask.domain], sizes[ask.domain]
        assert 0 < quota.target_tokens <= quota.asked
        assert quota.target_tokens <= size * Fraction(ask.max_epochs)
        assert quota.share == Fraction(ask.weight) / sum(Fraction(one.weight) for one in asks)
        assert 0 <= quota.rest <= size
        assert 0 <= quota.epochs * size + quota.rest - quota.target_tokens < 1
        assert quota.epochs + (quota.rest > 0) <= ceil(Fraction(ask.max_epochs))
        assert (quota.limited_by == MAX_EPOCHS) == (quota.asked > size * Fraction(ask.max_epochs))


@given(SIZES, ASKS)
def test_without_a_target_the_mix_is_as_large_as_the_caps_allow_and_every_share_is_reached(
    sizes: dict[str, int], asks: list[MixTarget]
) -> None:
    found = quotas(sizes, asks, None)
    assert all(quota.limited_by is None for quota in found.values())
    most = {ask.domain: sizes[ask.domain] * Fraction(ask.max_epochs) for ask in asks}
    assert any(found[domain].target_tokens == limit for domain, limit in most.items())
    whole = sum(quota.target_tokens for quota in found.values())
    assert all(quota.target_tokens == whole * quota.share for quota in found.values())


@given(SIZES, ASKS, st.integers(1, 10**14))
def test_a_target_is_met_where_no_cap_stands_in_the_way(
    sizes: dict[str, int], asks: list[MixTarget], tokens: int
) -> None:
    found = quotas(sizes, asks, tokens)
    whole = sum(quota.target_tokens for quota in found.values())
    assert whole <= tokens
    assert (whole == tokens) == all(quota.limited_by is None for quota in found.values())


@given(SIZES, ASKS, st.integers(1, 10**12), st.integers(1, 10**12))
def test_a_larger_target_takes_no_less_of_any_domain(
    sizes: dict[str, int], asks: list[MixTarget], tokens: int, more: int
) -> None:
    small, large = quotas(sizes, asks, tokens), quotas(sizes, asks, tokens + more)
    assert all(small[domain].target_tokens <= large[domain].target_tokens for domain in small)


@given(SIZES, ASKS, TOKENS, st.integers(-8, 8))
def test_only_the_proportion_of_weights_matters(
    sizes: dict[str, int], asks: list[MixTarget], tokens: int | None, power: int
) -> None:
    scaled = [MixTarget(ask.domain, ask.weight * 2.0**power, ask.max_epochs) for ask in asks]
    assert quotas(sizes, scaled, tokens) == quotas(sizes, asks, tokens)


EXAMPLES: list[tuple[dict[str, int], list[MixTarget], int | None, dict[str, tuple[int, int]]]] = [
    ({"a": 100, "b": 100}, [MixTarget("a", 3, 4), MixTarget("b", 1, 4)], 120, {"a": (0, 90), "b": (0, 30)}),
    ({"a": 100, "b": 10}, [MixTarget("a", 1, 4), MixTarget("b", 1, 4)], 120, {"a": (0, 60), "b": (4, 0)}),
    ({"a": 100, "b": 10}, [MixTarget("a", 1, 1), MixTarget("b", 1, 2.5)], None, {"a": (0, 25), "b": (2, 5)}),
    ({"a": 7}, [MixTarget("a", 0.1, 3)], None, {"a": (3, 0)}),
    ({"a": 7}, [MixTarget("a", 0.1, 0.5)], 7, {"a": (0, 4)}),
]


@pytest.mark.parametrize(("sizes", "asks", "tokens", "expected"), EXAMPLES)
def test_examples_by_hand(
    sizes: dict[str, int], asks: list[MixTarget], tokens: int | None, expected: dict[str, tuple[int, int]]
) -> None:
    found = quotas(sizes, asks, tokens)
    assert {domain: (quota.epochs, quota.rest) for domain, quota in found.items()} == expected


@given(SIZES, ASKS)
def test_a_domain_without_documents_is_an_error_that_names_those_there_are(
    sizes: dict[str, int], asks: list[MixTarget]
) -> None:
    gone = asks[0].domain
    for there in (sizes | {gone: 0}, {name: size for name, size in sizes.items() if name != gone}):
        with pytest.raises(DataError, match=f"no documents of domain '{gone}' are left"):
            quotas(there, asks, None)


@given(SIZES, ASKS, TOKENS)
def test_what_is_reported_is_what_was_reached(sizes: dict[str, int], asks: list[MixTarget], tokens: int | None) -> None:
    found: dict[str, MixShare] = quotas(sizes, asks, tokens)
    given = {domain: ceil(quota.target_tokens) for domain, quota in found.items()}
    assume(sum(given.values()) > 0)
    told: dict[str, Any] = reached(found, sizes, given, dict.fromkeys(given, 3))
    assert sum(one["share"] for one in told.values()) == pytest.approx(1, abs=1e-3)
    for domain, one in told.items():
        assert one["tokens"] == given[domain]
        assert one["asked_tokens"] >= one["tokens"]
        assert one["epochs"] == round(given[domain] / sizes[domain], 3)
        assert one["limited_by"] in (None, MAX_EPOCHS)
