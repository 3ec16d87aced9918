"""The stage `shard`, on documents of made_documents: what must be the same, what may never be, and what it costs."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import ConfigError
from bloomery.data import documents
from bloomery.data.documents import is_held_out
from bloomery.shards import format
from bloomery.shards.loader import AnnealedDataset
from bloomery.stages import pretrain, shard
from bloomery.stages.config import Pretrain, Shard
from tests.stages.made_documents import ROWS, documents_of, hashes, laid_out
from tests.tokenizer.made import small

WEIGHTS = [
    {"domain": "web", "weight": 0.5},
    {"domain": "code", "weight": 0.3, "max_epochs": 2.5},
    {"domain": "other", "weight": 0.2, "max_epochs": 1},
]
ANNEAL = {
    "weights": [{"domain": "other", "weight": 1}, {"domain": "code", "weight": 1, "max_epochs": 2}],
    "fraction": 0.1,
}
MIX = {"weights": WEIGHTS, "tokens": 70_000, "anneal": ANNEAL, "val_fraction": 0.1, "shard_tokens": 9000}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return laid_out(tmp_path_factory.mktemp("inputs"), ROWS, 5)


@pytest.fixture(scope="module")
def made(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("made")
    return out, shard.run(build(Shard, MIX), inputs, out)


# --- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_workers_leave_the_same_bytes_as_one(
    inputs: dict[str, Path], made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    stats = shard.run(build(Shard, MIX | {"engine": {"workers": 3}}), inputs, tmp_path)
    assert stats == made[1]
    assert hashes(tmp_path) == hashes(made[0])


@pytest.mark.parametrize("parts", [1, 12])
def test_how_documents_lie_in_files_and_how_much_memory_there_is_changes_no_byte(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "worker_bytes", lambda config: 20_000)
    turned = laid_out(tmp_path / "turned", sorted(ROWS, key=lambda row: row["text"]), parts)
    stats = shard.run(build(Shard, MIX), turned, tmp_path / "out")
    assert stats == made[1]
    assert hashes(tmp_path / "out") == hashes(made[0])


DIES = """
import os, signal, sys
from pathlib import Path
from bloomery.core import io
from bloomery.core.config import build
from bloomery.stages import shard
from bloomery.stages.config import Shard

left, synced = int(sys.argv[1]), io.sync_folder

def dying(folder):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    synced(folder)

io.sync_folder = dying
folder = Path(sys.argv[2])
inputs = {name: folder / name for name in ("dedup", "tokenizer")}
shard.run(build(Shard, eval(sys.argv[4])), inputs, Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_stage_that_is_killed_again_and_again_ends_with_the_same_bytes(
    inputs: dict[str, Path], made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Each attempt dies when it has written so many files, in whichever step that is."""
    for files_before_death in (6, 21, 13, 16, 9):
        told = [str(files_before_death), str(inputs["dedup"].parent), str(tmp_path), repr(MIX)]
        command = [sys.executable, "-c", DIES, *told]
        done = subprocess.run(command, capture_output=True, env=dict(os.environ), check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert list(tmp_path.rglob("parts/gather/*.json"))
    assert shard.run(build(Shard, MIX), inputs, tmp_path) == made[1]
    assert hashes(tmp_path) == hashes(made[0])


# --- what is in them -----------------------------------------------------------------------------------------------


def test_every_document_is_whole_in_every_stream_as_often_as_its_epochs_say(made: tuple[Path, dict[str, Any]]) -> None:
    out, stats = made
    domains = {row["text"].encode(): row["domain"] for row in ROWS if not is_held_out(row["text"], 0.1)}
    for split, key in (("train", "mix"), ("anneal", "anneal")):
        copies = Counter(documents_of(out, split))
        assert set(copies) <= set(domains)
        for domain, facts in stats[key].items():
            found = [copies[text] for text, own in domains.items() if own == domain]
            assert max(found) - min(found) <= 1
            assert min(found) <= facts["epochs"] <= max(found)
            assert sum(found) == facts["documents"]


def test_a_cap_is_never_passed_and_is_named_where_it_keeps_a_domain_from_its_share(
    made: tuple[Path, dict[str, Any]],
) -> None:
    mix = made[1]["mix"]
    assert {domain: facts["limited_by"] for domain, facts in mix.items()} == {
        "web": None,
        "code": "max_epochs",
        "other": "max_epochs",
    }
    assert mix["other"]["epochs"] == 1
    assert 2.5 <= mix["code"]["epochs"] < 2.7
    assert mix["code"]["asked_tokens"] == 21_000
    assert mix["code"]["tokens"] < 21_000


def test_an_anneal_mix_is_the_share_of_both_that_was_asked(made: tuple[Path, dict[str, Any]]) -> None:
    _, stats = made
    longest = max(len(small().encode(row["text"])) + 1 for row in ROWS)
    assert stats["anneal_tokens"] == sum(facts["tokens"] for facts in stats["anneal"].values())
    both = stats["anneal_tokens"] + stats["tokens"]
    assert stats["anneal_tokens"] == pytest.approx(0.1 * both, abs=2 * longest)
    assert stats["anneal"]["other"]["share"] == pytest.approx(0.5, abs=0.05)


def test_copies_of_held_out_documents_are_in_no_stream_whatever_their_case_and_white_space(tmp_path: Path) -> None:
    held = [row for row in ROWS if is_held_out(row["text"], 0.1)]
    copies = [
        row | {"id": f"{row['id']}/{number}", "text": change(row["text"])}
        for row in held
        for number, change in enumerate((str.upper, lambda text: text.replace(" ", "\n \t") + "\n", str.swapcase))
    ]
    inputs = laid_out(tmp_path, [*copies, *ROWS], 3)
    stats = shard.run(build(Shard, MIX), inputs, tmp_path / "out")
    assert stats["held_out_documents"] == len(held) + len(copies)
    barred = {" ".join(row["text"].lower().split()) for row in held}
    for split in ("train", "anneal"):
        seen = {" ".join(one.decode().lower().split()) for one in documents_of(tmp_path / "out", split)}
        assert not seen & barred
    assert sorted(documents_of(tmp_path / "out", "val")) == sorted(row["text"].encode() for row in [*held, *copies])


def test_held_out_documents_come_in_the_order_of_their_shards(made: tuple[Path, dict[str, Any]]) -> None:
    out, _ = made
    assert [row["text"].encode() for row in documents.read(out / "held-out")] == documents_of(out, "val")


def test_nothing_but_shards_and_held_out_documents_is_left(made: tuple[Path, dict[str, Any]]) -> None:
    found = {name.split("-")[0] for name in hashes(made[0])}
    assert found == {"train", "anneal", "val", "held"}
    assert {path.name for path in made[0].iterdir() if path.is_dir()} == {"held-out"}


def test_a_document_longer_than_a_shard_is_whole_in_one(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row["domain"] == "other"]
    inputs = laid_out(tmp_path, [*rows, next(row for row in ROWS if is_held_out(row["text"], 0.1))], 2)
    shard.run(build(Shard, {"val_fraction": 0.1}).model_copy(update={"shard_tokens": 150}), inputs, tmp_path / "out")
    names = format.names(tmp_path / "out", "train")
    assert 5 < len(names) < len(rows)
    assert [path.name for path in names] == [f"train-{number:05d}" for number in range(len(names))]
    assert all(format.read(path).index["shards"] == len(names) for path in names)
    found = documents_of(tmp_path / "out", "train")
    assert sorted(found) == sorted(row["text"].encode() for row in rows if not is_held_out(row["text"], 0.1))


# --- what is made of them ------------------------------------------------------------------------------------------


def test_pretraining_reads_the_anneal_mix_last(made: tuple[Path, dict[str, Any]]) -> None:
    shape = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "intermediate_size": 16,
        "context_length": 32,
    }
    config = build(Pretrain, {"steps": 100, "global_batch_tokens": 128, "model": shape})
    course = pretrain.course(config, made[0], small().hash)
    assert isinstance(course, AnnealedDataset)
    order = course.order(0, 400, seed=0)
    assert (order[: course.switch] < course.num_samples).all()
    assert (order[course.switch :] >= course.num_samples).all()
    assert 400 - course.switch == pytest.approx(400 * 0.1, abs=5)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({}, "set either tokens or fraction"),
        ({"tokens": 5, "fraction": 0.1}, "set either tokens or fraction"),
        ({"fraction": 1.0}, "at most 0.99"),
        ({"weights": [], "tokens": 5}, "at least 1 item"),
        ({"weights": [{"domain": "a", "weight": 1}] * 2, "tokens": 5}, "has the domain 'a' twice"),
    ],
)
def test_an_anneal_mix_without_one_size_is_refused(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(Shard, {"anneal": {"weights": [{"domain": "a", "weight": 1}]} | tree})
