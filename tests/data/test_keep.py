import random

import pyarrow as pa

from bloomery.data.dedup.dedup import Duplicate, clusters, decide


def batches(edges: dict[tuple[int, int], float], size: int) -> list[pa.RecordBatch]:
    """Edges (late, early) sorted, in batches of some size."""
    rows = [{"late": late, "early": early, "jaccard": value} for (late, early), value in sorted(edges.items())]
    schema = pa.schema([("late", pa.uint32()), ("early", pa.uint32()), ("jaccard", pa.float64())])
    return [pa.RecordBatch.from_pylist(rows[a : a + size], schema=schema) for a in range(0, len(rows), size)]


def graph(seed: int, nodes: int = 60, edges: int = 90) -> dict[tuple[int, int], float]:
    rng = random.Random(seed)
    found = {}
    for _ in range(edges):
        early, late = sorted(rng.sample(range(nodes), 2))
        found[late, early] = rng.choice((0.8, 0.85, 0.9))
    return found


def test_a_document_goes_if_and_only_if_a_neighbor_before_it_stays() -> None:
    for seed in range(20):
        edges = graph(seed)
        gone = {one.rank: one for one in decide(batches(edges, 7), 60)}
        for rank in range(60):
            kept = [(-edges[rank, early], early) for late, early in edges if late == rank and early not in gone]
            assert (rank in gone) == bool(kept)
            if kept:
                value, twin = min(kept)
                assert gone[rank] == Duplicate(rank, twin, -value)


def test_a_chain_is_cut_where_the_middle_has_gone() -> None:
    assert list(decide(batches({(1, 0): 0.9, (2, 1): 0.9, (3, 2): 0.8}, 2), 4)) == [
        Duplicate(1, 0, 0.9),
        Duplicate(3, 2, 0.8),
    ]
    assert list(decide([], 5)) == []


def test_clusters_are_what_edges_connect() -> None:
    edges = {(1, 0): 0.9, (5, 1): 0.9, (4, 3): 0.8}
    assert list(clusters(batches(edges, 1), 7)) == [(0, 0), (1, 0), (3, 3), (4, 3), (5, 0)]
    for seed in range(10):
        found = dict(clusters(batches(graph(seed), 11), 60))
        assert all(found[late] == found[early] <= early for late, early in graph(seed))
        assert all(found[root] == root for root in found.values())
