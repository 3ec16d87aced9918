from hypothesis import given
from hypothesis import strategies as st

from bloomery.data.documents import batched_by_size, spans_by_size


@given(st.lists(st.integers(0, 30)), st.integers(1, 40), st.none() | st.integers(1, 4))
def test_batches_hold_every_item_once_and_are_as_large_as_they_may_be(
    sizes: list[int], most: int, most_items: int | None
) -> None:
    batches = list(batched_by_size(sizes, most, size=int, most_items=most_items))
    assert [size for batch in batches for size in batch] == sizes
    for number, batch in enumerate(batches):
        assert sum(batch) <= most or len(batch) == 1
        assert 1 <= len(batch) <= (most_items or len(sizes))
        if number + 1 < len(batches):
            assert sum(batch) + batches[number + 1][0] > most or len(batch) == most_items
    spans = list(spans_by_size(sizes, most, most_items=most_items))
    assert [sizes[begin:end] for begin, end in spans] == batches
    assert list(batched_by_size(["x" * size for size in sizes], most, most_items=most_items)) == [
        ["x" * size for size in batch] for batch in batches
    ]
