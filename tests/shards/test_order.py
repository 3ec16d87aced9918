import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.shards.loader import permute, sample_positions

SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4096, 4097]


@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63])
def test_every_sample_comes_exactly_once_an_epoch(num_samples: int, seed: int) -> None:
    for epoch in (0, 1, 7, 10**6):
        found = sample_positions(epoch * num_samples, num_samples, num_samples, seed)
        assert np.array_equal(np.sort(found), np.arange(num_samples))


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_an_epoch_is_a_bijection_for_any_size_and_seed(num_samples: int, seed: int, epoch: int) -> None:
    found = sample_positions(epoch * num_samples, num_samples, num_samples, seed)
    assert len(np.unique(found)) == num_samples
    assert found.min() == 0
    assert found.max() == num_samples - 1


@given(st.integers(1, 3000), st.integers(0, 99), st.integers(0, 10**12), st.lists(st.integers(0, 50), max_size=6))
def test_steps_of_any_length_and_one_long_stretch_are_the_same(
    num_samples: int, seed: int, first: int, lengths: list[int]
) -> None:
    whole = sample_positions(first, sum(lengths), num_samples, seed)
    ends = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    pieces = [sample_positions(first + a, b - a, num_samples, seed) for a, b in pairwise(ends)]
    assert [number for piece in pieces for number in piece] == whole.tolist()


def test_a_far_place_is_found_at_once_and_is_the_one_that_stepping_reaches() -> None:
    num_samples, far = 999_983, 10**9
    began = time.process_time()
    found = sample_positions(far, 64, num_samples, seed=3)
    assert time.process_time() - began < 0.1
    epoch, place = divmod(far, num_samples)
    stepped = sample_positions(epoch * num_samples, num_samples, num_samples, seed=3)
    assert np.array_equal(found, stepped[place : place + 64])


def test_epochs_and_seeds_differ() -> None:
    orders = [sample_positions(epoch * 100, 100, 100, seed) for epoch in range(6) for seed in range(6)]
    assert len({tuple(order.tolist()) for order in orders}) == 36
    same_place = [int((one == other).sum()) for one, other in pairwise(orders)]
    assert max(same_place) < 12  # chance leaves one of a hundred in its place


def test_the_order_is_written_down_and_stays_what_it_is() -> None:
    """Runs that are resumed with a newer version must see the samples they have not seen."""
    assert sample_positions(0, 12, 10, seed=0).tolist() == [7, 5, 4, 8, 0, 3, 9, 2, 6, 1, 9, 3]
    assert sample_positions(10**9, 6, 4097, seed=1234).tolist() == [1767, 395, 2620, 1365, 1546, 495]


@pytest.mark.parametrize("num_samples", [100, 1000, 4097])
def test_every_sample_is_as_likely_at_every_place(num_samples: int) -> None:
    """Within a tenth, where chance leaves a fourteenth. (With ten samples it is a quarter: halves of two bits.)"""
    epochs, bins = np.arange(20_000, dtype=np.uint64), 10
    for place in (0, num_samples // 2, num_samples - 1):
        found = permute(np.full_like(epochs, place), epochs, num_samples, seed=1) * bins // num_samples
        counts = np.bincount(found.astype(np.int64), minlength=bins)
        assert np.abs(counts * bins / len(epochs) - 1).max() < 0.1


def test_neighbors_in_an_epoch_are_not_neighbors_in_the_data() -> None:
    order = sample_positions(0, 10_000, 10_000, seed=5)
    steps = np.abs(np.diff(order))
    assert (steps == 1).mean() < 0.002
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
