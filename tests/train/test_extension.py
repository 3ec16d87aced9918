"""Longer runs that go on from shorter ones."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build
from bloomery.core.errors import CheckpointError
from bloomery.core.log import VARYING, read_metrics
from bloomery.shards.loader import AnnealedDataset, PackedDataset
from bloomery.stages import pretrain
from bloomery.stages.config import Pretrain
from bloomery.train import checkpointing
from bloomery.train.config import Training
from bloomery.weights import checkpoint
from tests.tokenizer.made import small
from tests.train.made import T, session

LEVEL = {"kind": "wsd", "warmup_steps": 4, "decay": 0.0}
DECAY = {"kind": "wsd", "warmup_steps": 4, "decay_steps": 20}
FREE: dict[str, Any] = {"save_every_seconds": 1e9, "evaluate_every": 20, "log_every": 4, "skip_window": 8}


def run(shards: Path, out: Path, steps: int, schedule: Any, given: Path | None = None, **settings: Any) -> Any:
    """A session as the stage runs it."""
    made = session(shards, out, steps=steps, schedule=schedule, **FREE, **settings)
    checkpointing.remember(made.config, out)
    if given is not None:
        checkpointing.bring(given, made.config, out, made.lineage, samples_alike=lambda steps: math.inf)
    return made.run()


def result(out: Path, steps: int) -> Any:
    metrics = [{k: v for k, v in one.items() if k not in VARYING} for one in read_metrics(out / "metrics.jsonl")]
    training = checkpoint.read(out / "checkpoints" / f"{steps:09d}" / "training")
    numbers = {name: tensor.numpy().tobytes() for name, tensor in training.items()}
    state = json.loads((out / "checkpoints" / f"{steps:09d}" / "state.json").read_text())
    return metrics, numbers, state, {file.name: file.read_bytes() for file in (out / "model").iterdir()}


@pytest.mark.slow
def test_a_level_run_that_is_extended_is_one_that_was_longer_from_the_start_bit_for_bit(
    shards: Path, tmp_path: Path
) -> None:
    run(shards, tmp_path / "level", 40, LEVEL)
    stats = run(shards, tmp_path / "longer", 60, DECAY, given=tmp_path / "level")
    run(shards, tmp_path / "whole", 60, DECAY)
    assert result(tmp_path / "longer", 60) == result(tmp_path / "whole", 60)
    assert (stats["continued"]["from"], stats["continued"]["step"]) == (str(tmp_path / "level"), 40)
    assert stats["tokens"] == 60 * 4 * T


def test_a_run_that_has_decayed_is_extended_from_the_end_of_its_level_part(shards: Path, tmp_path: Path) -> None:
    """Which it keeps, though only the newest two stay otherwise."""
    schedule = {"kind": "wsd", "decay_steps": 4}
    run(shards, tmp_path / "short", 12, schedule)
    stats = run(shards, tmp_path / "longer", 16, schedule, given=tmp_path / "short")
    run(shards, tmp_path / "whole", 16, schedule)
    assert stats["continued"]["step"] == 8
    longer, whole = result(tmp_path / "longer", 16), result(tmp_path / "whole", 16)
    assert longer[1:] == whole[1:]
    assert [line for line in longer[0] if "loss" in line] == [line for line in whole[0] if "loss" in line]


def test_what_a_run_has_done_itself_comes_before_what_another_has(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    run(shards, tmp_path / "own", 12, LEVEL)
    made = session(shards, tmp_path / "own", steps=12, schedule=LEVEL, **FREE)
    checkpointing.bring(
        tmp_path / "level", made.config, tmp_path / "own", made.lineage, samples_alike=lambda s: math.inf
    )
    assert checkpointing.told(tmp_path / "own") is None


@pytest.mark.parametrize(
    ("settings", "schedule", "told"),
    [
        ({"seed": 3}, LEVEL, "was trained with other settings: seed was 0 and is 3\nSay the same"),
        ({"optimizer": {"kind": "lion"}}, LEVEL, "optimizer.*was.*and is"),
        (
            {},
            {"kind": "cosine", "warmup_steps": 4},
            "until step 5, and no checkpoint of that part .only: 8.\nA run keeps",
        ),
    ],
)
def test_a_run_that_differs_in_more_than_its_length_is_refused_by_name(
    shards: Path, tmp_path: Path, settings: dict[str, Any], schedule: Any, told: str
) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    with pytest.raises(CheckpointError, match=told):
        run(shards, tmp_path / "other", 60, schedule, given=tmp_path / "level", **settings)
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_a_run_on_other_shards_is_refused_without_a_word_of_removing_it(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "level", 8, LEVEL)
    made = session(shards, tmp_path / "other", steps=12, schedule=LEVEL, **FREE)
    with pytest.raises(CheckpointError, match=r"was made with shards 5.*\nGo on from a run on the same data"):
        checkpointing.bring(
            tmp_path / "level",
            made.config,
            tmp_path / "other",
            replace(made.lineage, shards="6" * 64),
            samples_alike=lambda steps: math.inf,
        )


def test_two_runs_have_the_learning_rates_of_their_warm_up_and_level_part_in_common() -> None:
    def training(steps: int, schedule: Any) -> Training:
        return build(Training, {"steps": steps, "tokens_per_step": 1, "schedule": schedule})

    def common(one: Training, other: Training) -> int:
        return checkpointing.common_steps(one, other.model_dump(mode="json"))

    half = {"kind": "wsd", "warmup_steps": 10, "decay": 0.5}
    assert common(training(200, half), training(100, half)) == 51  # the first step of the decay is still at the peak
    assert common(training(200, half), training(100, {"kind": "constant", "warmup_steps": 10})) == 100
    assert common(training(200, half), training(100, {"kind": "constant", "warmup_steps": 9})) == 0
    assert common(training(200, half), training(200, half)) == 200


def test_the_anneal_mix_is_in_no_common_part(shards: Path, tmp_path: Path) -> None:
    """It comes at the end, so that the order of samples depends on the number of steps from there."""
    main, last = (PackedDataset(shards, split, T, small().hash) for split in ("train", "val"))
    given: list[Any] = []

    def bring(*args: Any, samples_alike: Any) -> None:
        given.extend([samples_alike(3), samples_alike(4)])

    config = Pretrain(steps=4, tokens_per_step=4 * T, continue_from=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "bring", bring)
        pretrain.go_on(config, AnnealedDataset(main, last, 16), tmp_path, session(shards, tmp_path).lineage)
    assert given == [AnnealedDataset(main, last, 12).switch, AnnealedDataset(main, last, 16).switch]


def test_a_run_folder_stands_for_its_stage_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "07-pretrain-aaaaaaaa" / "checkpoints").mkdir(parents=True)
    own = tmp_path / "run" / "07-pretrain-cccccccc"
    assert checkpointing._stage_folder(tmp_path / "run", own) == tmp_path / "run" / "07-pretrain-aaaaaaaa"
    (tmp_path / "run" / "07-pretrain-bbbbbbbb" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has 2 folders of the stage pretrain"):
        checkpointing._stage_folder(tmp_path / "run", own)
