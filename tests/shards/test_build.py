import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.core.errors import DataError
from bloomery.data.executor import ExecutorConfig, Part, run_parts
from bloomery.shards import build, format
from bloomery.shards.build import END, Chosen, Gathering, Placing, Slice, gather_shard, place_part

VOCAB_SIZE = 60_000


def make_run(out: Path, number: int, lengths: Any) -> Part:
    """A run of documents: its tokens count up from 1, and each document begins with 0."""
    rng = np.random.default_rng(number)
    index = np.zeros(len(lengths), dtype=build.INDEX)
    index["id"], index["tokens"] = rng.integers(0, 2**64, len(lengths), dtype=np.uint64), lengths
    ends = np.cumsum(lengths)
    tokens = (np.arange(int(ends[-1])) % (VOCAB_SIZE - 1) + 1).astype(np.uint16)
    tokens[ends - lengths] = 0
    (out / "work").mkdir(exist_ok=True)
    tokens.tofile(out / "work" / f"run-{number}.bin")
    build.save(out / "work" / f"run-{number}.npy", index)
    return Part(f"work/run-{number}", [[False, "web", len(lengths), int(ends[-1])]])


def gather(out: Path, runs: list[Part], chosen: Chosen, cuts: list[int]) -> list[Path]:
    """Shards of one piece each, or one shard of them all."""
    placing = Placing(0, {"train": {"web": chosen}})
    run_parts(ExecutorConfig(workers=1), place_part, placing, runs, out, what="place")
    gathering = Gathering(VOCAB_SIZE, "0" * 64, 0, 0, {"train": [run.name for run in runs]})
    parts = [Part("train-00000", Slice("train", cuts, 0, 1))]
    parts += [Part(f"piece-{n:05d}", Slice("train", list(pair), n, 1)) for n, pair in enumerate(pairwise(cuts))]
    run_parts(ExecutorConfig(workers=1), gather_shard, gathering, parts, out, what="gather")
    return [out / part.name for part in parts]


@pytest.mark.parametrize("chosen", [Chosen(1, 0), Chosen(3, 0), Chosen(0, 2**62), Chosen(2, 2**63)])
def test_a_shard_is_its_pieces_end_to_end_and_holds_every_document_in_the_order_of_keys(
    tmp_path: Path, chosen: Chosen
) -> None:
    rng = np.random.default_rng(5)
    runs = [make_run(tmp_path, number, rng.integers(1, 90, 40)) for number in range(3)]
    whole, *pieces = (
        format.read(path, verify=True) for path in gather(tmp_path, runs, chosen, [0, 2**61, 2**62, 2**63, END])
    )
    assert np.array_equal(np.concatenate([piece.tokens for piece in pieces]), whole.tokens)
    expected = []
    for run in runs:
        index = build.load(tmp_path / f"{run.name}.npy", build.INDEX)
        tokens = np.fromfile(tmp_path / f"{run.name}.bin", dtype=np.uint16)
        ends = np.cumsum(index["tokens"], dtype=np.int64)
        for epoch in range(chosen.epochs + 1):
            for key, length, end in zip(build.keys(index["id"], 0, "train", epoch), index["tokens"], ends, strict=True):
                if epoch < chosen.epochs or int(key) < chosen.until:
                    expected.append((int(key), tokens[end - length : end].tolist()))
    bounds = [*whole.starts.tolist(), len(whole.tokens)]
    found = [whole.tokens[start:end].tolist() for start, end in pairwise(bounds)]
    assert found == [document for _, document in sorted(expected)]


GATHERS = """
import sys
from pathlib import Path
import numpy as np
from bloomery.core.config import build
from bloomery.shards.build import Gathering, Placing, gather_shard, place_part
from bloomery.shards.build import Chosen
from bloomery.data.executor import ExecutorConfig, run_parts
from bloomery.stages import shard
from bloomery.stages.config import Shard
from tests.shards.test_build import VOCAB_SIZE, make_run

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

out, config = Path(sys.argv[1]), build(Shard, {"memory_bytes": 2**26, "engine": {"workers": 1}})
runs = [make_run(out, number, np.full(16_000, 500)) for number in range(6)]
Path("/proc/self/clear_refs").write_text("5")  # what the making of runs took does not count
before = peak()
run_parts(config.engine, place_part, Placing(0, {"train": {"web": Chosen(1, 0)}}), runs, out, what="place")
gathering = Gathering(VOCAB_SIZE, "0" * 64, 0, 0, {"train": [run.name for run in runs]})
total = {"web": (6 * 16_000, 6 * 16_000 * 500)}
parts = shard.slices(config, gathering, "train", total, shard.worker_bytes(config), out)
run_parts(config.engine, gather_shard, gathering, parts, out, what="gather")
print(len(parts), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_larger_than_the_memory_is_made_within_it(tmp_path: Path) -> None:
    """96 MB of tokens in one shard, with 64 MiB for all that is held at once."""
    command = [sys.executable, "-c", GATHERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=Path(__file__).parents[2])
    shards, grown = map(int, done.stdout.split())
    assert shards == 1
    assert len(format.read(tmp_path / "train-00000").tokens) == 48_000_000
    assert grown < 2**26


# --- shuffle ----------------------------------------------------------------------------------------------------------


KEYS = st.one_of(st.integers(0, 2**64 - 1), st.integers(2**48 - 4, 2**48 + 4), st.integers(2**64 - 9, 2**64 - 1))
DOCUMENTS = st.lists(st.tuples(KEYS, st.integers(1, 50)), max_size=40, unique_by=lambda pair: pair[0])


@given(DOCUMENTS, st.lists(st.integers(0, 1500), max_size=6).map(sorted), st.integers(1, 5))
def test_below_a_cut_are_the_documents_that_begin_before_its_target(
    documents: list[tuple[int, int]], targets: list[int], pieces: int
) -> None:
    def passes() -> Iterator[tuple[Any, Any]]:
        for some in (documents[start::pieces] for start in range(pieces)):
            yield np.array([key for key, _ in some], np.uint64), np.array([size for _, size in some], np.uint32)

    found = build.cuts(passes, targets)
    assert found == sorted(found)
    place, begins = 0, {}
    for key, size in sorted(documents):
        begins[key], place = place, place + size
    for target, cut in zip(targets, found, strict=True):
        assert cut in {*begins, END}
        assert {key for key in begins if key < cut} == {key for key, begin in begins.items() if begin < target}


def ids(count: int) -> build.SortKeys:
    return build.hashed([f"document {number}" for number in range(count)])[0]


def test_an_order_is_written_down_and_stays_what_it_is() -> None:
    """Shards are made again, from the same documents, when a run is made again."""
    assert build.keys(ids(2), 0, "train", 0).tolist() == WRITTEN[:2]
    assert build.keys(ids(2), 7, "anneal", 3).tolist() == WRITTEN[2:]


WRITTEN = [14216771877994088945, 86343474238069276, 7657998603989615735, 12292268343972172594]


def test_every_seed_stream_and_epoch_has_an_order_of_its_own() -> None:
    some = ids(2000)
    names = [(seed, stream, epoch) for seed in (0, 1, -3) for stream in ("train", "anneal") for epoch in range(3)]
    ranks = np.array([np.argsort(np.argsort(build.keys(some, *name))) for name in names])
    assert np.abs(np.corrcoef(ranks) - np.eye(len(names))).max() < 0.1
    assert np.abs(np.corrcoef(ranks, np.arange(2000)[None])[-1, :-1]).max() < 0.1


def test_keys_are_spread_evenly_and_none_comes_twice() -> None:
    found = build.keys(ids(50_000), 3, "train", 1)
    assert len(np.unique(found)) == 50_000
    counts = np.bincount((found >> np.uint64(58)).astype(np.int64), minlength=64)
    assert ((counts - 50_000 / 64) ** 2 / (50_000 / 64)).sum() < 110  # chi-square of 63 degrees: p = 0.0002


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), max_size=30),
    st.sampled_from([np.uint16, np.uint32]),
)
def test_documents_are_collected_whole_and_in_order(pairs: list[tuple[int, int]], kind: type[Any]) -> None:
    tokens = np.arange(4000, dtype=kind)
    starts, lengths = (np.array([pair[place] for pair in pairs], dtype=np.int64) for place in (0, 1))
    expected = [token for start, length in pairs for token in range(start, start + length)]
    found = build.collect(tokens, starts, lengths)
    assert found.dtype == kind
    assert found.tolist() == expected


def test_short_documents_are_collected_as_long_ones_are() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60_000, 300_000).astype(np.uint16)
    lengths = rng.integers(1, 60, 8000)
    starts = rng.integers(0, 299_000, 8000)
    expected = np.concatenate([tokens[a : a + b] for a, b in zip(starts, lengths, strict=True)])
    assert np.array_equal(build.collect(tokens, starts, lengths), expected)


def index(lengths: Sequence[int]) -> Any:
    table = np.zeros(len(lengths), dtype=build.INDEX)
    table["id"], table["tie"] = build.hashed([str(number) for number in range(len(lengths))])
    table["tokens"] = lengths
    return table


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 3), KEYS)
def test_a_stream_takes_every_document_as_often_as_there_are_epochs_and_some_once_more(
    lengths: list[int], epochs: int, until: int
) -> None:
    table = index(lengths)
    starts = np.cumsum(lengths) - np.array(lengths, dtype=np.int64)
    found = build.placed(table, starts, 5, "train", Chosen(epochs, until))
    last = build.keys(table["id"], 5, "train", epochs)
    for place, start in enumerate(starts):
        mine = found[found["start"] == start]
        assert len(mine) == epochs + int(last[place] < until)
        assert set(mine["tokens"]) <= {lengths[place]}
        assert len(set(mine["key"])) == len(mine)


def test_an_index_that_is_torn_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.npy"
    build.save(path, index([1, 2, 3]))
    assert build.load(path, build.INDEX)["tokens"].tolist() == [1, 2, 3]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"run\.npy: cannot be read"):
        build.load(path, build.INDEX)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), KEYS, KEYS)
def test_between_two_keys_are_those_from_the_first_to_below_the_second(found: list[int], one: int, other: int) -> None:
    table = np.zeros(len(found), dtype=build.PLACED)
    table["key"] = found
    table = build.in_order(table)
    low, high = sorted((one, other))
    assert build.between(table, low, high)["key"].tolist() == sorted(key for key in found if low <= key < high)
    assert build.between(table, low, END)["key"].tolist() == sorted(key for key in found if low <= key)
