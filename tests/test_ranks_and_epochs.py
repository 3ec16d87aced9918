"""The whole way on two ranks, and what it trains on over several epochs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bloomery import cli
from bloomery.shards import format
from bloomery.shards.loader import PackedDataset
from bloomery.tokenizer.tokenizer import Tokenizer
from bloomery.weights import hf
from tests.test_end_to_end import Place, make_place

import safetensors.torch
import torch


def documents(folder: Path, split: str, opening: int) -> set[bytes]:
    """The ids of each document of a split."""
    found = set()
    for path in format.names(folder, split):
        ids = np.asarray(format.read(path).tokens).astype(np.int64)
        found |= {one.tobytes() for one in np.split(ids, np.flatnonzero(ids == opening)) if len(one)}
    return found


@pytest.mark.slow
def test_no_held_out_document_is_trained_on_in_any_epoch(tmp_path: Path) -> None:
    """No document of one split is in the other, and the samples of three epochs are three times those of one."""
    place = make_place(tmp_path)
    assert place.run("--until", "shard") == 0
    folder, tokenizer = place.stage("shard"), Tokenizer.load(place.stage("tokenizer"))
    trained, held = (documents(folder, split, tokenizer.document_id) for split in ("train", "val"))
    assert len(trained) > 50
    assert len(held) > 3
    assert not trained & held
    samples = PackedDataset(folder, "train", 32, tokenizer.hash)
    epochs = samples.order(0, 3 * samples.num_samples, seed=1).reshape(3, -1)
    assert all(np.array_equal(np.sort(epoch), np.arange(samples.num_samples)) for epoch in epochs)
    known = np.concatenate([np.asarray(format.read(path).tokens) for path in format.names(folder, "train")])
    for epoch in epochs:
        batch = samples.batch(epoch)
        where = epoch[:, None] * 32 + np.arange(32)
        assert np.array_equal(batch.ids, known[where])


EXACT = ("pretrain.precision=float32", "finetune.precision=float32", "--until", "finetune")
"""Rounding to bfloat16 would make much of little."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run of one rank, and in `ranks` a copy of what it does before it trains."""
    place = make_place(tmp_path_factory.mktemp("one"))
    assert place.run("--until", "shard", runs=place.folder / "one") == 0
    shutil.copytree(place.folder / "one", place.folder / "ranks", symlinks=True)
    assert place.run(*EXACT, runs=place.folder / "one") == 0
    return place


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("way", ["ranks", "torchrun"])
def test_two_ranks_make_the_models_that_one_makes_up_to_rounding(one: Place, way: str) -> None:
    """The first does all but training."""
    words = ["run", str(one.recipe), *EXACT, "--runs", str(one.folder / way)]
    if way == "ranks":
        assert cli.main([*words, "pretrain.num_processes=2", "finetune.num_processes=2"]) == 0
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "bloomery.cli", *words]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("✓ pretrain") == 1  # only the first says what is done
    for name in ("pretrain", "finetune"):
        found = [one.stage(name, one.folder / folder) / "model" for folder in ("one", way)]
        alone, together = (safetensors.torch.load_file(folder / hf.WEIGHTS) for folder in found)
        assert alone.keys() == together.keys()
        apart = torch.cat([(alone[weight] - together[weight]).abs().flatten() for weight in alone])
        # Adam divides a gradient that is nothing but rounding by its own size, and so moves a weight here and there
        assert float(apart.quantile(0.9999)) < 1e-6
        assert float(apart.max()) < 1e-4
