import random
from itertools import groupby
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.data.dedup import candidates
from bloomery.data.dedup.candidates import interruptible

ROWS = pa.schema([("key", pa.uint64()), ("rank", pa.uint32())])


def rows_in(seed: int, count: int = 300) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return sorted({(rng.choice((1, 2, 3, rng.randrange(2**63))), rng.randrange(1000)) for _ in range(count)})


def pairs(rows: list[tuple[int, int]], lags: int, size: int) -> set[tuple[int, int]]:
    batches = [
        pa.record_batch([pa.array(column) for column in zip(*rows[a : a + size], strict=True)], schema=ROWS)
        for a in range(0, len(rows), size)
    ]
    found = list(candidates._neighbors(batches, lags))
    return {pair for batch in found for pair in zip(*(column.to_pylist() for column in batch.columns), strict=True)}


@pytest.mark.slow
def test_a_bucket_gives_its_first_with_each_and_each_with_those_before_it() -> None:
    for seed in range(5):
        rows = rows_in(seed)
        for lags in (0, 1, 3):
            expected = set()
            for _, bucket in groupby(rows, lambda row: row[0]):
                ranks = [rank for _, rank in bucket]
                for place in range(1, len(ranks)):
                    before = {0, *range(max(0, place - lags), place)}
                    expected |= {(ranks[other], ranks[place]) for other in before}
            for size in (1, 2, 7, 1000):
                assert pairs(rows, lags, size) == expected


def test_a_bucket_of_many_costs_no_square_of_pairs() -> None:
    rows = [(1, rank) for rank in range(5000)]
    assert len(pairs(rows, 3, 512)) < 4 * 5000


def test_streams_are_cut_where_parts_begin(tmp_path: Path) -> None:
    docs = np.array([0, 1, 4, 5, 9, 30])
    schema = pa.schema([("doc", pa.int64())])
    ends = {"a": (0, 5), "b": (5, 10), "c": (10, 20), "d": (20, 31), "e": (31, 31)}
    for size in (1, 2, 6):
        batches = [pa.record_batch({"doc": docs[a : a + size]}) for a in range(0, len(docs), size)]
        candidates.by_part(iter(batches), schema, ends, tmp_path)
        found = {name: pq.read_table(tmp_path / f"{name}.parquet")["row"].to_pylist() for name in ends}
        assert found == {"a": [0, 1, 4], "b": [0, 4], "c": [], "d": [10], "e": []}


def test_tables_are_there_again_after_the_connection_was_closed(tmp_path: Path) -> None:
    with candidates.connected(tmp_path, 2**28) as connection:
        connection.execute("CREATE TABLE kept AS SELECT range AS rank FROM range(10)")
    with candidates.connected(tmp_path, 2**30) as connection:
        assert sum(batch.num_rows for batch in candidates.streamed(connection, "SELECT * FROM kept")) == 10


@pytest.mark.parametrize("signs", [RuntimeError("Query interrupted"), duckdb.InterruptException("Interrupted!")])
def test_a_query_that_ctrl_c_ends_is_an_interruption(signs: Exception) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        raise signs
    with pytest.raises(RuntimeError, match="another"), interruptible():
        raise RuntimeError("another")
