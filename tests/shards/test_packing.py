import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.shards.build import first_fit_decreasing

CAPACITY = 20
LENGTHS = st.lists(st.integers(0, CAPACITY), max_size=60)


@given(LENGTHS)
def test_every_index_is_in_exactly_one_row_and_no_row_overflows(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, CAPACITY)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row for row in rows)
    assert all(sum(lengths[index] for index in row) <= CAPACITY for row in rows)


@given(LENGTHS)
def test_equal_lengths_give_equal_rows_and_come_in_order(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, CAPACITY)
    assert rows == first_fit_decreasing(tuple(lengths), CAPACITY)
    assert all(row == sorted(row, key=lambda index: (-lengths[index], index)) for row in rows)


@given(LENGTHS)
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    filled = sorted(sum(lengths[index] for index in row) for row in first_fit_decreasing(lengths, CAPACITY))
    assert len(filled) < 2 or filled[0] + filled[1] > CAPACITY


def test_a_length_goes_into_the_first_row_that_takes_it() -> None:
    assert first_fit_decreasing([12, 9, 9, 2], CAPACITY) == [[0, 3], [1, 2]]


@given(LENGTHS)
def test_it_is_what_looking_at_every_row_in_turn_gives(lengths: list[int]) -> None:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= CAPACITY)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    assert first_fit_decreasing(lengths, CAPACITY) == rows


def fewest_rows(lengths: list[int], capacity: int) -> int:
    """By trying every assignment."""
    for num_rows in range(len(lengths) + 1):
        for choice in product(range(num_rows), repeat=len(lengths)):
            filled = [0] * num_rows
            for length, row in zip(lengths, choice, strict=True):
                filled[row] += length
            if max(filled, default=0) <= capacity:
                return num_rows
    raise AssertionError(lengths)


@given(st.lists(st.integers(1, CAPACITY), max_size=5))
def test_few_conversations_take_hardly_more_rows_than_the_fewest(lengths: list[int]) -> None:
    assert len(first_fit_decreasing(lengths, CAPACITY)) <= 11 / 9 * fewest_rows(lengths, CAPACITY) + 1


@pytest.mark.parametrize("seed", range(20))
def test_many_conversations_take_hardly_more_rows_than_the_fewest(seed: int) -> None:
    """Rows that are full, cut into pieces: then the fewest rows are known."""
    rng = random.Random(seed)
    capacity, num_rows = rng.choice((64, 257, 1025)), rng.randint(1, 200)
    lengths: list[int] = []
    for _ in range(num_rows):
        cuts = sorted(rng.sample(range(1, capacity), rng.randint(0, 6)))
        lengths += [end - start for start, end in zip([0, *cuts], [*cuts, capacity], strict=True)]
    rng.shuffle(lengths)
    assert num_rows <= len(first_fit_decreasing(lengths, capacity)) <= 11 / 9 * num_rows + 1


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="length 21 does not fit into a row of 20"):
        first_fit_decreasing([3, 21, 4], 20)
    assert first_fit_decreasing([], 20) == []
    assert first_fit_decreasing([20, 20], 20) == [[0], [1]]
