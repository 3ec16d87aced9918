"""
How fast are copies found, in how much memory, and how many of them?

    python benchmarks/dedup.py [--json] [--quick] [--sizes 0.2 0.8 3.2] [--folder DIR] [--no-peers]

Makes corpora of so many GB from shared text with a seed: six documents of ten are fresh (a text whose letters are
permuted, so that no two share words), four are copies of an earlier one: exact but for white space and case, with a
block of words cut out or put in, or with single words changed. On each it measures the whole way from files to files,
one worker, in a process of its own whose start does not count. On the smallest datatrove's MinHash pipeline does the
same with its defaults (signatures, buckets, clusters, filter). On the middle one memory is measured under three
budgets, with a hash of all outputs. Recall is that of the labeled pairs of the shared web text and code, precision
that of what was removed there.
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import zstandard
from stand_in import PLACE

from bloomery.core.config import build
from bloomery.core.pipeline import machine, versions
from bloomery.data import documents
from bloomery.stages import dedup
from bloomery.stages.config import Dedup

SHARED = PLACE / "data" / "dev"
BUDGETS = (256 * 2**20, 2**30, 8 * 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", nargs="+", type=float, metavar="GB")
    parser.add_argument("--folder", type=Path, help="for the corpora; default: the system's temporary folder")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    sizes = options.sizes or ([0.02, 0.08] if options.quick else [0.2, 0.8, 3.2])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measured(Path(folder), sizes, peers=not options.no_peers, quiet=options.json)))


def measured(folder: Path, sizes: list[float], *, peers: bool, quiet: bool) -> dict[str, Any]:
    runs, theirs, budgets = [], None, []
    for number, size in enumerate(sizes):
        corpus = folder / "corpus"
        num_bytes = make(corpus, int(size * 1e9))
        runs.append(run(corpus, folder / "out", {"engine": {"workers": 1}}) | {"gigabytes": round(num_bytes / 1e9, 3)})
        tell(quiet, runs[-1])
        if number == 0 and peers:
            theirs = datatrove(corpus, folder / "datatrove")
            tell(quiet, theirs)
        if number == min(1, len(sizes) - 1):
            for budget in BUDGETS:
                budgets.append(run(corpus, folder / "out", {"memory_bytes": budget}) | {"memory_bytes": budget})
                tell(quiet, budgets[-1])
        shutil.rmtree(corpus)
    value = runs[0]["megabytes_per_second"]
    ratio = None if theirs is None else round(value / theirs["megabytes_per_second"], 2)

    def steps(kind: str) -> list[float]:
        return [(b[kind] / a[kind]) / (b["gigabytes"] / a["gigabytes"]) * 4 for a, b in pairwise(runs)]

    return {
        "name": "dedup",
        "ours": {"value": value, "unit": "MB/s and core, files to files"},
        "peers": {
            "datatrove": theirs
            and {
                "value": theirs["megabytes_per_second"],
                "unit": "MB/s and core",
                "version": metadata.version("datatrove"),
            }
        },
        "ratio_to_best_peer": ratio,
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"duckdb": metadata.version("duckdb")},
        "notes": {
            "runs": runs,
            "time_for_4_times_the_corpus": [round(step, 2) for step in steps("seconds")],
            "processor_time_for_4_times_the_corpus": [round(step, 2) for step in steps("processor_seconds")],
            "budgets": budgets,
            "same_bytes_under_all_budgets": len({one["sha256"] for one in budgets}) == 1,
            "labels": labeled(folder),
            "datatrove": theirs,
        },
    }


def tell(quiet: bool, value: Any) -> None:
    if not quiet:
        print(json.dumps(value), file=sys.stderr)


def texts() -> dict[str, tuple[str, str]]:
    """id -> corpus and text of the shared documents."""
    found = {}
    for name in ("web", "code", "sci", "qa"):
        with (SHARED / f"{name}.jsonl.zst").open("rb") as file:
            reader = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8", newline="\n")
            for line in reader:
                row = json.loads(line)
                found[row["id"]] = (name, row["text"])
    return found


def permuted(rng: random.Random) -> dict[int, int]:
    """Consonants for consonants and vowels for vowels."""
    table: dict[int, int] = {}
    for letters in ("aeiou", "bcdfghjklmnpqrstvwxyz"):
        other = rng.sample(letters, len(letters))
        table.update(
            zip(map(ord, letters + letters.upper()), map(ord, other + [c.upper() for c in other]), strict=True)
        )
    return table


def edited(text: str, rng: random.Random) -> str:
    """A copy: exact but for white space and case, with a block cut or put in, or with single words changed."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice((text, text.upper(), text.replace("\n", " \n")))
    words = re.split(r"(\s+)", text)
    if kind == 1:
        size = max(1, int(len(words) * rng.uniform(0.01, 0.1)))
        begin = rng.randrange(max(1, len(words) - size))
        other = [] if rng.random() < 0.5 else [f" new{rng.randrange(10**6)}" for _ in range(size // 2)]
        return "".join([*words[:begin], *other, *words[begin + (0 if other else size) :]])
    for _ in range(max(1, int(len(words) * rng.uniform(0.001, 0.02)))):
        words[rng.randrange(len(words))] = "".join(rng.choices(string.ascii_lowercase, k=6))
    return "".join(words)


def make(folder: Path, num_bytes: int, seed: int = 0) -> int:
    """Write documents of so many bytes of text; returns how many they are."""
    rng = random.Random(seed)
    base = [text for _, text in texts().values() if 200 < len(text) < 200_000]
    written, number = 0, 0
    recent: list[str] = []
    table = permuted(rng)
    with documents.Rolling(folder, "part", documents.SCHEMA()) as writer:
        while written < num_bytes:
            if number % len(base) == 0:
                rng.shuffle(base)
            if rng.random() < 0.4 and recent:
                text = edited(rng.choice(recent), rng)
            else:
                if rng.random() < 0.01:
                    table = permuted(rng)
                text = base[number % len(base)].translate(table)
                number += 1
                recent.append(text)
                if len(recent) > 3000:
                    recent[rng.randrange(len(recent))] = recent.pop()
            name = f"{rng.getrandbits(64):016x}"
            row = {"id": name, "text": text, "source": "made", "domain": "web", "url": None, "license": None}
            writer.write(row, size := len(text.encode()))
            written += size
    return written


def child(corpus: str, out: str, config: str) -> None:
    """In a process of its own: one run, and what it took."""
    began, before = time.monotonic(), time.process_time()
    stats = dedup.deduplicate(build(Dedup, json.loads(config)), documents.parts(Path(corpus)), Path(out))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = time.process_time() - before + children.ru_utime + children.ru_stime
    wanted = ("documents", "kept", "exact", "near", "compared")
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "processor_seconds": processor,
                "bytes_kept": sum(domain["bytes_kept"] for domain in stats["by_domain"].values()),
                **{name: stats[name] for name in wanted},
            }
        )
    )


def run(corpus: Path, out: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A run with its peak of memory, of all its processes together."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--child", str(corpus), str(out), json.dumps(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(resident, family(process.pid))))
        time.sleep(0.02)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    num_bytes = sum(pq.read_metadata(path).num_rows for path in corpus.glob("*.parquet"))
    assert num_bytes == found["documents"]
    size = text_bytes(corpus)
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(path.relative_to(out).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    shutil.rmtree(out)
    return {
        **found,
        "megabytes_per_second": round(size / 1e6 / found["processor_seconds"], 2),
        "peak_bytes": peak,
        "sha256": digest.hexdigest(),
    }


def text_bytes(corpus: Path) -> int:
    return sum(len(row["text"].encode()) for row in documents.read(corpus, ["text"]))


def family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for one in children:
        yield from family(int(one))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


PEER = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter
if __name__ == "__main__":
    corpus, out = sys.argv[1:]
    config = MinhashConfig()
    reader = lambda: ParquetReader(corpus)
    stages = [
        (1, [reader(), MinhashDedupSignature(f"{out}/signatures", config=config)]),
        (config.num_buckets, [MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)]),
        (1, [MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config=config)]),
        (1, [reader(), MinhashDedupFilter(f"{out}/remove"), ParquetWriter(f"{out}/kept")]),
    ]
    for tasks, pipeline in stages:
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1).run()
"""


def datatrove(corpus: Path, out: Path) -> dict[str, Any]:
    """The same corpus through datatrove."""
    out.mkdir()
    (out / "peer.py").write_text(PEER)
    command = [sys.executable, str(out / "peer.py"), str(corpus), str(out)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=out)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    kept = sum(pq.read_metadata(path).num_rows for path in (out / "kept").rglob("*.parquet"))
    shutil.rmtree(out)
    rate = round(text_bytes(corpus) / 1e6 / processor, 3)
    return {"seconds": seconds, "processor_seconds": processor, "kept": kept, "megabytes_per_second": rate}


def labeled(folder: Path) -> dict[str, Any]:
    """Recall on the labeled pairs of web text and code; the least exact Jaccard of what was removed."""
    found = texts()
    with documents.PartWriter(folder / "shared" / "part-000.parquet") as writer:
        for name, (corpus, text) in found.items():
            row = {"id": name, "text": text, "source": corpus, "domain": corpus, "url": None, "license": None}
            writer.write([row])
    out = folder / "labeled"
    dedup.deduplicate(Dedup(), documents.parts(folder / "shared"), out)
    gone = {row["id"]: row for row in documents.read(out / "duplicates", ["id", "kept_id", "reason"])}
    cluster = {row["id"]: row["cluster"] for row in pq.read_table(out / "clusters.parquet").to_pylist()}
    labels = pq.read_table(SHARED / "dedup_labels.parquet").to_pylist()
    result: dict[str, Any] = {}
    for low, high in ((0.8, 1.01), (0.8, 0.9)):
        pairs = [
            (row["doc_id_a"], row["doc_id_b"])
            for row in labels
            if row["corpus_a"] == row["corpus_b"] in ("web", "code") and low <= row["jaccard_5word"] < high
        ]
        hit = sum(a in gone or b in gone for a, b in pairs)
        same = sum(a in cluster and cluster[a] == cluster.get(b) for a, b in pairs)
        name = f"{low}-{min(high, 1.0)}"
        result[name] = {"pairs": len(pairs), "one_removed": hit / len(pairs), "one_cluster": same / len(pairs)}
    near = [exact_jaccard(found[name][1], found[row["kept_id"]][1]) for name, row in gone.items()]
    return result | {"removed": len(gone), "least_jaccard_with_kept_twin": min(near)}


def exact_jaccard(a: str, b: str, words: int = 5) -> float:
    """Of word shingles, the slow and plain way. 1 where neither has any."""
    one, two = (re.findall(r"\w+", text.lower()) for text in (a, b))
    sets = [{tuple(w[n : n + words]) for n in range(len(w) - words + 1)} for w in (one, two)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1]) if sets[0] or sets[1] else 1.0


if __name__ == "__main__":
    main()
