import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.shards.test_gather import VOCAB_SIZE, make_run

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_larger_than_the_memory_is_made_within_it(tmp_path: Path) -> None:
    """96 MB of tokens in one shard, with 64 MiB for all that is held at once."""
    command = [sys.executable, "-c", GATHERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=Path(__file__).parents[2])
    shards, grown = map(int, done.stdout.split())
    assert shards == 1
    assert len(format.read(tmp_path / "train-00000").tokens) == 48_000_000
    assert grown < 2**26
