"""Groups neighbors into batches of a bounded size: texts of so many characters, documents of so many bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def batched_by_size(
    items: Iterable[T], most: int, *, size: Callable[[Any], int] = len, most_items: int | None = None
) -> Iterator[list[T]]:
    """Lists of neighbors whose sizes sum to at most `most`; a larger item is alone in its list."""
    batch: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if batch and (total + own > most or len(batch) == most_items):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += own
    if batch:
        yield batch


def spans_by_size(sizes: Iterable[int], most: int, *, most_items: int | None = None) -> Iterator[tuple[int, int]]:
    """The same as ranges [begin, end) of numbers, of items with these sizes."""
    begin = 0
    for batch in batched_by_size(sizes, most, size=int, most_items=most_items):
        yield begin, begin + len(batch)
        begin += len(batch)
