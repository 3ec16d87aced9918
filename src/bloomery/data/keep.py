"""
Which copy stays: decided from the best document to the worst, so that each removed one has a twin that is kept.

Documents are numbered by the rule of keeping: rank 0 is the longest; of equally long ones the smaller id comes first.
An edge says that two of them are similar enough. Rank by rank, a document goes if and only if one that stays is its
neighbor: the first maximal independent set in the order of ranks. Edges stream by, sorted by their later end; what
stays in memory is one byte for each document, and eight more while clusters are formed.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

BYTES_PER_DOCUMENT = 9
"""What deciding holds in memory for each document."""


class Gone(NamedTuple):
    """A document that goes, and the one that stays in its place."""

    rank: int
    twin: int
    jaccard: float


def decide(edges: Iterable[pa.RecordBatch], documents: int) -> Iterator[Gone]:
    """
    The documents that go, by ascending rank, each with the kept neighbor that is most similar to it.

    `edges` have the columns late, early (ranks, early < late) and jaccard, sorted by late and early. Of equally
    similar neighbors it names the first in rank.
    """
    gone = bytearray(documents)
    current, twin, best = -1, -1, -1.0
    for batch in edges:
        columns = (batch.column(name).to_pylist() for name in ("late", "early", "jaccard"))
        for late, early, jaccard in zip(*columns, strict=True):
            if late != current:
                if twin >= 0:
                    gone[current] = 1
                    yield Gone(current, twin, best)
                current, twin, best = late, -1, -1.0
            if jaccard > best and not gone[early]:
                twin, best = early, jaccard
    if twin >= 0:
        yield Gone(current, twin, best)


def clusters(edges: Iterable[pa.RecordBatch], documents: int) -> Iterator[tuple[int, int]]:
    """
    Of every document that has an edge: its rank, and the smallest rank that edges lead to.

    `edges` have the columns late and early, in any order.
    """
    parents = array("q", range(documents))
    linked = bytearray(documents)

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for batch in edges:
        for late, early in zip(batch.column("late").to_pylist(), batch.column("early").to_pylist(), strict=True):
            linked[late] = linked[early] = 1
            a, b = root(late), root(early)
            if a != b:
                parents[max(a, b)] = min(a, b)
    place = linked.find(1)
    while place >= 0:
        yield place, root(place)
        place = linked.find(1, place + 1)
