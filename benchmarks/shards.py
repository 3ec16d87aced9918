"""
How fast do shuffled shards come out of runs of tokens, and in how much memory?

    python benchmarks/shards.py [--json] [--quick] [--memory-bytes N]

One process takes runs of random documents (as the stage `shard` leaves them after encoding), brings all documents into
one shuffled order, writes them into shards with index, bounds and sha256, and syncs these to the disk. datatrove does
the same to the same documents: it shuffles each file, as its tokenizer's last step, and merges the files in a random
order; it writes bounds, but no hashes, and syncs nothing. Copying the same bytes with numpy, file by file and without
any order, is the upper bound. Each runs in a process of its own. --quick takes a sixteenth of the tokens.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.data.executor import ExecutorConfig, Part, run_parts
from bloomery.shards import build as shards_build
from bloomery.shards import format
from bloomery.shards.build import TRAIN, Chosen, Gathering, Placing, gather_shard, place_part
from bloomery.stages import shard
from bloomery.stages.config import Shard

ROOT = Path(__file__).parents[1]
VOCAB_SIZE, DOCUMENT = 50_257, 0
TOKENS = 800_000_000
MEAN_TOKENS = 600
"""Of a document. Lengths are log-normal with a standard deviation of 1 in their logarithm, as of web pages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory-bytes", type=int, default=256 * 2**20)
    options = parser.parse_args()
    wanted = TOKENS // 16 if options.quick else TOKENS
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        config = build(Shard, {"memory_bytes": options.memory_bytes, "engine": {"workers": 1}})
        runs = -(-wanted // (shard.worker_bytes(config) // 8))  # the stage writes one when a quarter is full
        total = sum(make_run(work, number, wanted // runs) for number in range(runs))
        ours = measured(gather, config, work)
        check(work, total)
        peers = {"datatrove": measured(merge, work), "numpy copy": measured(copy, work)}
    if not options.json:
        for name, facts in {"ours": ours, **peers}.items():
            print(f"{name:11} {2e-6 * total / facts['seconds']:6.0f} MB/s  {facts}")
    print(json.dumps(result(total, ours, peers, quick=options.quick, memory_bytes=options.memory_bytes)))


def make_run(work: Path, number: int, tokens: int) -> int:
    """One run of random documents for us, and the same for datatrove. Returns its tokens."""
    rng = np.random.default_rng(number)
    lengths = np.maximum(2, rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1, tokens // MEAN_TOKENS)).astype(np.int64)
    index = np.zeros(len(lengths), dtype=shards_build.INDEX)
    index["id"] = rng.integers(0, 2**64, len(lengths), dtype=np.uint64)
    index["tokens"] = lengths
    index = index[np.argsort(shards_build.keys(index["id"], 0, TRAIN, 0))]
    ends = np.cumsum(index["tokens"], dtype=np.int64)
    made = rng.integers(1, VOCAB_SIZE, int(ends[-1]), dtype=np.uint16)
    made[ends - index["tokens"]] = DOCUMENT
    (work / "work").mkdir(exist_ok=True)
    (work / "theirs").mkdir(exist_ok=True)
    made.tofile(work / "work" / f"run-{number}.bin")
    shards_build.save(work / "work" / f"run-{number}.npy", index)
    made.tofile(work / "theirs" / f"{number:05d}.ds")
    ends.astype("<u8").tofile(work / "theirs" / f"{number:05d}.ds.index")
    return len(made)


def gather(config: Shard, work: Path) -> None:
    """As the stage does it, after encoding."""
    engine = ExecutorConfig(workers=1)
    names = [f"work/run-{number}" for number in range(len(list((work / "work").glob("*.bin"))))]
    sizes = [(work / f"{name}.bin").stat().st_size // 2 for name in names]
    counts = [len(shards_build.load(work / f"{name}.npy", shards_build.INDEX)) for name in names]
    parts = [Part(name, [[False, "web", count, size]]) for name, count, size in zip(names, counts, sizes, strict=True)]
    run_parts(engine, place_part, Placing(0, {TRAIN: {"web": Chosen(1, 0)}}), parts, work, what="place")
    gathering = Gathering(
        vocab_size=VOCAB_SIZE, tokenizer_hash="0" * 64, document_id=DOCUMENT, seed=0, runs={TRAIN: names}
    )
    total = {"web": (sum(counts), sum(sizes))}
    parts = shard.slices(config, gathering, TRAIN, total, shard.worker_bytes(config), work)
    run_parts(engine, gather_shard, gathering, parts, work, what="gather", unit="shards")


def check(work: Path, total: int) -> None:
    """Every document is there, whole: as many, and the same sum of tokens."""
    shards = [format.read(path, verify=True) for path in format.names(work, TRAIN)]
    assert sum(len(one.tokens) for one in shards) == total
    assert all((one.tokens[one.starts] == DOCUMENT).all() for one in shards)
    runs = [np.memmap(path, dtype="<u2", mode="r") for path in (work / "work").glob("*.bin")]
    assert sum(int(one.sum()) for one in runs) == sum(int(one.tokens.sum()) for one in shards)


def merge(work: Path) -> None:
    """datatrove: each file shuffled, then all of them merged in a random order."""
    from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for number, path in enumerate(sorted((work / "theirs").glob("*.ds"))):
        ends = np.fromfile(path.with_name(f"{path.name}.index"), dtype="<u8")
        file = object.__new__(TokenizedFile)
        file.__dict__.update(_opened(path.parent, path.name, ends.tolist()))
        order = np.random.default_rng(number).permutation(len(ends))
        file.copy("shuffled", order, new_output_folder=_folder(work / "shuffled"), rank=number).close()
    merger = DocumentTokenizerMerger(
        str(work / "shuffled"),
        str(work / "merged"),
        save_filename="train",
        max_tokens_per_file=Shard().shard_tokens,
        seed=0,
        save_final_metadata=False,
        progress=False,
    )
    with contextlib.redirect_stdout(None):
        merger.run()


def _folder(path: Path) -> Any:
    from datatrove.io import get_datafolder

    return get_datafolder(str(path))


def _opened(folder: Path, name: str, ends: list[int]) -> dict[str, Any]:
    """A file of tokens as datatrove's tokenizer holds it when it has written the last document."""
    return {
        "output_folder": _folder(folder),
        "filename": name,
        "doc_ends": ends,
        "token_size": 2,
        "loss_file": None,
        "tokens_file": None,
        "save_index": True,
        "save_loss_metadata": False,
        "save_final_metadata": False,
        "upload_block_size": None,
        "tokenizer_name_or_path": None,
    }


def copy(work: Path) -> None:
    """Read and write the same bytes."""
    for path in sorted((work / "work").glob("*.bin")):
        np.fromfile(path, dtype=np.uint16).tofile(work / f"copy-of-{path.name}")


def measured(function: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """Seconds, processor seconds and peak bytes of a call in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_measure, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        facts: dict[str, float] = here.recv()
    finally:
        process.join()
    return facts


def _measure(pipe: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    began, used = time.monotonic(), time.process_time()
    before = peak_bytes()
    function(*arguments)
    pipe.send(
        {
            "seconds": round(time.monotonic() - began, 3),
            "cpu_seconds": round(time.process_time() - used, 3),
            "peak_bytes": peak_bytes(),
            "peak_bytes_before": before,
        }
    )


def peak_bytes() -> int:
    """Most memory that this process ever had. `ru_maxrss` would begin with what its parent had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def commit() -> str:
    """Of this project, as git names it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def result(
    total: int, ours: dict[str, float], peers: dict[str, dict[str, float]], *, quick: bool, memory_bytes: int
) -> dict[str, Any]:
    def speed(facts: dict[str, float]) -> float:
        return round(2e-6 * total / facts["seconds"], 1)

    known = {"datatrove": metadata.version("datatrove"), "numpy copy": metadata.version("numpy")}
    return {
        "name": "shards",
        "ours": {"value": speed(ours), "unit": "MB/s"},
        "peers": {
            name: {"value": speed(facts), "unit": "MB/s", "version": known[name]} for name, facts in peers.items()
        },
        "ratio_to_best_peer": round(speed(ours) / speed(peers["datatrove"]), 2),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "notes": {
            "quick": quick,
            "commit": commit(),
            "tokens": total,
            "bytes_per_token": 2,
            "memory_bytes": memory_bytes,
            "processes": 1,
            "measured": {"ours": ours, **peers},
            "ratio_is_to": "datatrove; the numpy copy has no order, and is the upper bound",
        },
    }


if __name__ == "__main__":
    main()
