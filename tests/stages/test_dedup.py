import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError, DataError
from bloomery.data import documents
from bloomery.data.readers import rows
from bloomery.stages import dedup
from bloomery.stages.config import Dedup
from tests.shared import SHARED, needs
from tests.stages.made_documents import hashes


def by_hand(a: str, b: str, words: int = 5) -> float:
    """Exact Jaccard of word shingles, the slow and plain way."""

    def sets(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"\w+", text.lower())
        return {tuple(found[start : start + words]) for start in range(len(found) - words + 1)}

    one, two = sets(a), sets(b)
    return len(one & two) / len(one | two) if one | two else 1.0


def corpus(seed: int, families: int = 40) -> dict[str, str]:
    """Families of documents, each with exact, near and distant relatives; and documents that are hardly any."""
    rng = random.Random(seed)
    texts = {}
    for family in range(families):
        words = [rng.choice(("w", "é", "東")) + str(rng.randrange(3000)) for _ in range(rng.randint(30, 200))]
        for member in range(rng.randint(1, 6)):
            edited = list(words)
            for _ in range(rng.choice((0, 0, 1, 2, 5, 20))):
                edited[rng.randrange(len(edited))] = f"w{rng.randrange(3000)}"
            text = rng.choice((" ", "\n", ", ")).join(edited[rng.choice((0, 0, 3)) :])
            texts[f"d{family:02d}-{member}"] = rng.choice((text, text, text.upper()))
    tiny = {
        "empty": "",
        "blank": " \n",
        "one": "One",
        "one-too": " one",
        "cjk": "東京は大きい",
        "cjk-too": "東京は大きい",
    }
    return texts | tiny


def rows_of(texts: dict[str, str]) -> list[documents.DocumentRow]:
    return [
        {"id": name, "text": text, "source": "s", "domain": name[:2], "url": None, "license": None}
        for name, text in texts.items()
    ]


def parts_of(found: list[documents.DocumentRow], folder: Path, sizes: list[int]) -> list[Path]:
    """Files of so many documents each; the last takes the rest."""
    paths = []
    for number, size in enumerate([*sizes, len(found)]):
        paths.append(folder / f"part-{number:05d}.parquet")
        with documents.PartWriter(paths[-1]) as writer:
            writer.write(found[:size])
        found = found[size:]
    return paths


def found_in(out: Path) -> tuple[dict[str, documents.DocumentRow], dict[str, documents.DocumentRow]]:
    kept = {row["id"]: row for row in documents.read(out / "kept")}
    return kept, {row["id"]: row for row in documents.read(out / "duplicates")}


def run(texts: dict[str, str], folder: Path, sizes: list[int] | None = None, **config: Any) -> dict[str, Any]:
    paths = parts_of(rows_of(texts), folder / "in", sizes or [])
    return dedup.deduplicate(build(Dedup, config), paths, folder / "out")


@pytest.mark.parametrize("seed", range(3))
def test_every_duplicate_has_a_kept_twin_as_similar_as_it_says(seed: int, tmp_path: Path) -> None:
    texts = corpus(seed)
    stats = run(texts, tmp_path, [30, 0])
    kept, gone = found_in(tmp_path / "out")
    assert sorted([*kept, *gone]) == sorted(texts)
    assert {name: row["text"] for name, row in (kept | gone).items()} == texts
    assert (stats["documents"], stats["kept"], stats["removed"]) == (len(texts), len(kept), len(gone))
    assert stats["exact"] + stats["near"] == len(gone) > 30
    for name, row in gone.items():
        twin = texts[row["kept_id"]]
        assert row["kept_id"] in kept
        assert row["value"] == by_hand(texts[name], twin) >= 0.8
        same = texts[name].lower().split() == twin.lower().split()
        assert row["reason"] == ("exact" if same else "near")
        assert (-len(twin), row["kept_id"]) < (-len(texts[name]), name)
    assert {"empty", "one", "cjk-too"} <= set(gone)


def test_nothing_similar_stays_where_every_pair_is_compared(tmp_path: Path) -> None:
    texts = corpus(7)
    run(texts, tmp_path, num_perm=112, num_bands=112, num_rotations=1)
    kept, _ = found_in(tmp_path / "out")
    names = sorted(name for name in kept if name.startswith("d"))
    assert [(a, b) for a in names for b in names if a < b and by_hand(texts[a], texts[b]) >= 0.8] == []


@pytest.mark.parametrize("settings", [(2**26, 2**33), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_neither_memory_nor_workers_change_a_byte(settings: tuple[int, int], tmp_path: Path) -> None:
    paths = parts_of(rows_of(corpus(3, 60)), tmp_path / "in", [50, 7, 60])
    seen = []
    for number, value in enumerate(settings):
        memory, workers = (value, 1) if value > 2 else (2**30, value)
        out = tmp_path / f"out-{number}"
        config = build(Dedup, {"memory_bytes": memory, "engine": {"workers": workers}})
        seen.append((dedup.deduplicate(config, paths, out), hashes(out)))
    assert seen[0] == seen[1]
    assert not (tmp_path / "out-0" / "scratch").exists()


def test_neither_the_order_of_documents_nor_their_files_change_what_is_kept(tmp_path: Path) -> None:
    texts = corpus(4)
    seen = []
    for number, sizes in enumerate(([], [1, 50, 2], [100])):
        names = list(texts)
        random.Random(number).shuffle(names)
        folder = tmp_path / str(number)
        run({name: texts[name] for name in names}, folder, sizes)
        _, gone = found_in(folder / "out")
        clusters = (folder / "out" / "clusters.parquet").read_bytes()
        seen.append(({n: (r["kept_id"], r["value"], r["reason"], r["cluster"]) for n, r in gone.items()}, clusters))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("rows_a_batch", [1, 3, 1000])
def test_clusters_are_counted_over_the_ends_of_batches(
    rows_a_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = run(corpus(4), tmp_path)
    monkeypatch.setattr(documents, "ROWS_PER_BATCH", rows_a_batch)
    sizes = Counter(pq.read_table(tmp_path / "out" / "clusters.parquet").column("cluster").to_pylist())
    found = {"clusters": len(sizes), "largest_cluster": max(sizes.values())}
    assert dedup.clusters_of(tmp_path / "out" / "clusters.parquet") == found
    assert {name: stats[name] for name in found} == found


def test_a_boilerplate_that_all_share_costs_few_comparisons(tmp_path: Path) -> None:
    """Every one of 600 pages is the same but for a few words: one bucket holds all of them."""
    rng = random.Random(5)
    common = " ".join(f"w{n}" for n in range(60))
    texts = {f"d{n:03d}": common + " " + " ".join(f"x{rng.randrange(10**6)}" for _ in range(30)) for n in range(600)}
    stats = run(texts, tmp_path)
    assert stats["compared"] < 600 * 28 * 4
    assert stats["kept"] == 600


def test_documents_with_one_id_are_all_accounted_for(tmp_path: Path) -> None:
    found = rows_of({"a": "one two three four five six", "b": "seven eight nine ten eleven twelve"})
    found += [found[0], found[1] | {"text": "thirteen fourteen fifteen sixteen seventeen eighteen"}]
    paths = parts_of(found, tmp_path / "in", [2])
    stats = dedup.deduplicate(Dedup(), paths, tmp_path / "out")
    assert (stats["documents"], stats["kept"], stats["exact"]) == (4, 3, 1)
    gone = list(documents.read(tmp_path / "out" / "duplicates"))
    assert [(row["id"], row["kept_id"]) for row in gone] == [("a", "a")]


def test_without_verification_a_chain_is_one_cluster(tmp_path: Path) -> None:
    words = [f"w{number:03d}" for number in range(240)]
    chain = {f"d{step}": " ".join(words[4 * step : 4 * step + 120 - step]) for step in range(6)}
    stats = run(chain, tmp_path, verify=False, num_perm=112, num_bands=112)
    _, gone = found_in(tmp_path / "out")
    assert (stats["kept"], stats["removed"]) == (1, 5)
    assert {(row["kept_id"], row["value"], row["cluster"]) for row in gone.values()} == {("d0", None, "d0")}


def test_with_verification_a_document_linked_through_a_chain_only_stays(tmp_path: Path) -> None:
    words = [f"w{number:03d}" for number in range(240)]
    chain = {f"d{step}": " ".join(words[8 * step : 8 * step + 100 - step]) for step in range(6)}
    assert by_hand(chain["d0"], chain["d1"]) >= 0.8 > by_hand(chain["d0"], chain["d2"])
    run(chain, tmp_path, num_bands=112)
    _, gone = found_in(tmp_path / "out")
    assert {name: row["kept_id"] for name, row in gone.items()} == {"d1": "d0", "d3": "d2", "d5": "d4"}
    assert {row["cluster"] for row in gone.values()} == {"d0"}


def test_an_exact_copy_of_a_near_copy_names_what_is_kept(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(100)]
    texts = {"long": " ".join([*words, "and", "more"]), "near": " ".join(words), "copy": " ".join(words).upper()}
    run(texts, tmp_path)
    _, gone = found_in(tmp_path / "out")
    assert {(name, row["kept_id"], row["reason"]) for name, row in gone.items()} == {
        ("near", "long", "near"),
        ("copy", "long", "near"),
    }


def test_the_seeds_settings_are_spelt_out_and_find_copies(tmp_path: Path) -> None:
    config = build(Dedup, {"preset": "seed-1386"})
    assert (config.num_perm, config.num_bands, config.num_rotations, config.shingles) == (128, 16, 1, "characters")
    texts = {"a": "the quick brown fox jumps over the lazy dog " * 3 + "now", "b": "nothing like the others at all"}
    texts["c"] = texts["a"].replace("now", "then!")
    run(texts, tmp_path, preset="seed-1386")
    _, gone = found_in(tmp_path / "out")
    assert {name: row["kept_id"] for name, row in gone.items()} == {"a": "c"}
    with pytest.raises(ConfigError, match="the preset seed-1386 sets num_bands=16"):
        build(Dedup, {"preset": "seed-1386", "num_bands": 8})


def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    found = rows_of({"a": "x"})
    paths = [*parts_of(found, tmp_path / "one", []), *parts_of(found, tmp_path / "two", [])]
    with pytest.raises(DataError, match="two document files have the name 'part-00000'"):
        dedup.deduplicate(Dedup(), paths, tmp_path / "out")


CHILD = """
import json, sys
from pathlib import Path
from bloomery.core.config import build
from bloomery.data import documents
from bloomery.stages import dedup
from bloomery.stages.config import Dedup
if __name__ == "__main__":
    config = build(Dedup, json.loads(sys.argv[3]))
    dedup.deduplicate(config, documents.parts(Path(sys.argv[1])), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_search_ends_with_the_same_bytes_when_it_is_run_again(tmp_path: Path) -> None:
    paths = parts_of(rows_of(corpus(6, 120)), tmp_path / "in", [100, 100])
    dedup.deduplicate(Dedup(), paths, tmp_path / "whole")
    wanted = hashes(tmp_path / "whole")
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path / "in"), str(tmp_path / "out")]
    for mark in ("scratch/signatures", "scratch/edges", "kept"):
        child = subprocess.Popen([*command, json.dumps({"engine": {"workers": 1}})], stderr=subprocess.DEVNULL)
        while child.poll() is None and not (tmp_path / "out" / mark).exists():
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    dedup.deduplicate(Dedup(), paths, tmp_path / "out")
    assert hashes(tmp_path / "out") == wanted


def test_repeated_lines_stay_in_the_best_document_only_and_are_written_down(tmp_path: Path) -> None:
    rng = random.Random(8)
    notice = "Please read our terms of use before you go on"
    texts = {
        f"d{n:02d}": "\n".join(
            [notice.upper() if n % 2 else notice, *(f"w{rng.random()} of {n}" for _ in range(4 + n))]
        )
        for n in range(12)
    }
    texts["only"] = f" {notice} \n"
    settings = {"min_documents": 5, "min_characters": 20}
    stats = run(texts, tmp_path, [4, 0, 3], repeated_lines=settings)
    kept, _ = found_in(tmp_path / "out")
    best = max(kept, key=lambda name: len(texts[name]))
    assert [name for name, row in kept.items() if notice.lower() in row["text"].lower()] == [best]
    assert kept[best]["text"] == texts[best]
    (dropped,) = documents.read(tmp_path / "out" / "dropped")
    assert (dropped["id"], dropped["text"], dropped["reason"]) == ("only", texts["only"], "repeated_lines")
    for row in documents.read(tmp_path / "out" / "repeated"):
        assert (row["number"], row["first_id"]) == (0, best)
        assert row["text"] + kept[row["id"]]["text"] == texts[row["id"]]
    assert (stats["kept"], stats["dropped"], stats["repeated_lines"]) == (12, 1, 11)
    few = run(texts, tmp_path / "few", repeated_lines={**settings, "min_documents": 14})
    assert (few["kept"], few["dropped"]) == (13, 0)


TEXTS = SHARED / "data" / "dev"
LABELS = TEXTS / "dedup_labels.parquet"


@pytest.mark.slow
@needs(LABELS)
def test_labeled_copies_of_web_text_and_code_are_found_and_nothing_else(tmp_path: Path) -> None:
    """Pairs at an exact Jaccard of 0.8 and more, which another program has found, and the documents down to 0.6."""
    pairs = [
        (row["doc_id_a"], row["doc_id_b"], row["jaccard_5word"])
        for row in pq.read_table(LABELS).to_pylist()
        if row["corpus_a"] == row["corpus_b"] in ("web", "code")
    ]
    wanted = {name for a, b, value in pairs if value >= 0.6 for name in (a, b)}
    texts: dict[str, str] = {}
    for part in ("web", "code"):
        for _, row in rows.jsonl(TEXTS / f"{part}.jsonl.zst"):
            assert isinstance(row, dict)
            texts |= {row["id"]: row["text"]} if row["id"] in wanted else {}
    assert len(texts) == len(wanted)
    run(texts, tmp_path, [300])
    _, gone = found_in(tmp_path / "out")
    cluster = {row["id"]: row["cluster"] for row in pq.read_table(tmp_path / "out" / "clusters.parquet").to_pylist()}
    found = {}
    for low, high in ((0.8, 1.01), (0.8, 0.9)):
        similar = [(a, b) for a, b, value in pairs if low <= value < high]
        removed = sum(a in gone or b in gone for a, b in similar) / len(similar)
        together = sum(a in cluster and cluster[a] == cluster.get(b) for a, b in similar) / len(similar)
        found[low, high] = removed, together
    print(json.dumps({"documents": len(texts), "removed": len(gone), "recall": list(found.values())}))
    assert min(found[0.8, 1.01]) >= 0.97
    assert min(found[0.8, 0.9]) >= 0.93
    for name, row in gone.items():
        assert row["value"] == by_hand(texts[name], texts[row["kept_id"]]) >= 0.8
