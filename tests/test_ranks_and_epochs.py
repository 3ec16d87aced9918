"""The whole way on two ranks, and what it trains on over several epochs."""

import os
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
from tests.test_end_to_end import make_place

import safetensors.torch
import torch


def documents(folder: Path, split: str, opening: int) -> set[bytes]:
    """The ids of each document of a split."""
    found = set()
    for path in format.names(folder, split):
        ids = np.asarray(format.read(path).tokens).astype(np.int64)
        found |= {one.tobytes() for one in np.split(ids, np.flatnonzero(ids == opening)) if len(one)}
    return found


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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ranks", "torchrun"])
def test_two_ranks_make_the_models_that_one_makes_up_to_rounding(tmp_path: Path, way: str) -> None:
    """The first does all but training; in float32, as rounding to bfloat16 would make much of little."""
    place = make_place(tmp_path)
    words = ["run", str(place.recipe), "pretrain.precision=float32", "finetune.precision=float32", "--runs"]
    assert cli.main([*words, str(tmp_path / "one")]) == 0
    if way == "ranks":
        assert cli.main([*words, str(tmp_path / "two"), "pretrain.num_processes=2", "finetune.num_processes=2"]) == 0
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "bloomery.cli", *words, str(tmp_path / "two")]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("✓ pretrain") == 1  # only the first says what is done
    for name in ("pretrain", "finetune"):
        found = [place.stage(name, tmp_path / folder) / "model" for folder in ("one", "two")]
        one, two = (safetensors.torch.load_file(folder / hf.WEIGHTS) for folder in found)
        assert one.keys() == two.keys()
        apart = torch.cat([(one[weight] - two[weight]).abs().flatten() for weight in one])
        # Adam divides a gradient that is nothing but rounding by its own size, and so moves a weight here and there
        assert float(apart.quantile(0.9999)) < 1e-6
        assert float(apart.max()) < 1e-4
