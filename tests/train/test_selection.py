"""The weights of the best evaluation are kept, and training ends when evaluations no longer improve."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bloomery.core.config import build
from bloomery.core.errors import CheckpointError, ConfigError
from bloomery.core.signals import Terminated
from bloomery.model import lora
from bloomery.model.config import Lora
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.checkpointing import AdapterSaver
from bloomery.train.config import EarlyStopping, Finetune
from bloomery.train.progress import KeptWeights, best_step, without_gain
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import Validation, mean_and_error
from bloomery.weights import checkpoint, hf
from bloomery.weights.hf import BaseModel
from tests.tokenizer.made import small
from tests.train.made import LINEAGE, lines, model_bytes, on_cpu, result, session, write_samples
from tests.train.test_trainer import asking

import torch

BEST = KeptWeights(keeps_best=True)
PLANTED: dict[str, Any] = {
    "steps": 60,
    "eval_every": 3,
    "optimizer": {"kind": "adamw", "learning_rate": 0.02},
    "save_every_seconds": 1e9,
}
"""A few samples, learned by heart with a high rate: the loss of others falls, and then rises."""
FROM_START = KeptWeights(keeps_best=True, early_stopping=EarlyStopping(patience=2))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_samples(tmp_path / "shards", samples=8)
    return tmp_path / "shards"


def selecting(shards: Path, out: Path, selection: KeptWeights = BEST, **settings: Any) -> TrainingRun:
    run = session(shards, out, **{**PLANTED, **settings})
    run.selection, run.from_scratch = selection, False
    return run


class Overfit(NamedTuple):
    """A whole run, and one that ended early. Nobody writes to their folders."""

    run: TrainingRun
    stats: dict[str, Any]
    early: TrainingRun
    early_stats: dict[str, Any]


@pytest.fixture(scope="module")
def overfit(tmp_path_factory: pytest.TempPathFactory) -> Overfit:
    folder = tmp_path_factory.mktemp("overfit")
    write_samples(folder / "shards", samples=8)
    runs = selecting(folder / "shards", folder / "out"), selecting(folder / "shards", folder / "early", FROM_START)
    return Overfit(runs[0], runs[0].run(), runs[1], runs[1].run())


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in lines(out, "validation_loss")}


def test_the_model_is_that_of_the_lowest_validation_loss_whose_checkpoint_stays(overfit: Overfit) -> None:
    run, stats, out, measured = overfit.run, overfit.stats, overfit.run.out, losses(overfit.run.out)
    best = min(measured, key=lambda step: (measured[step], step))
    assert 0 < best < 50 < max(measured) == stats["steps"]  # it overfits
    assert (stats["best_step"], stats["validation_loss"]) == (best, measured[best])
    assert stats["ended_early"] is False
    there = [int(folder.name) for folder in checkpoint.folders(out / "checkpoints")]
    assert best in there
    assert max(there) == stats["steps"]
    assert model_bytes(out) == (out / "checkpoints" / f"{best:09d}" / "model.safetensors").read_bytes()
    check = run._check()
    assert check.measure(run.model, on_cpu())["validation_loss"] == measured[best]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [None, Lora(rank=8, base_dtype="nf4")], ids=["all weights", "LoRA on NF4"])
def test_a_planted_overfit_ends_within_three_evaluations_of_its_minimum(
    shards: Path, tmp_path: Path, settings: Lora | None
) -> None:
    stopping = KeptWeights(keeps_best=True, early_stopping=EarlyStopping())
    run = selecting(shards, tmp_path / "out", stopping)
    if settings is not None:
        hf.save(tmp_path / "base", run.model, Renderer(small()), LINEAGE)
        lora.attach(run.model, settings, seed=0)
        base = BaseModel(tmp_path / "base", "0" * 64)
        run.model_saver = AdapterSaver(run.model, Renderer(small()), settings, base, LINEAGE)
    stats = run.run()
    assert stats["ended_early"] is True
    assert stats["best_step"] < stats["steps"] <= stats["best_step"] + 3 * PLANTED["eval_every"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 9])
def test_a_run_that_was_stopped_and_resumed_keeps_the_same_weights_and_ends_as_early(
    step: int, shards: Path, overfit: Overfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = overfit.early_stats
    out, hooks = tmp_path / "out", TrainingRun._hooks
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_hooks", lambda *args: [*hooks(*args), asking(step)])
        with pytest.raises(Terminated):
            selecting(shards, out, FROM_START).run()
    again = selecting(shards, out, FROM_START).run()
    assert {name: again[name] for name in ("best_step", "steps", "validation_loss")} == {
        name: whole[name] for name in ("best_step", "steps", "validation_loss")
    }
    assert result(out)["model"] == result(overfit.early.out)["model"]


def test_best_weights_that_are_damaged_are_an_error_that_says_how_to_keep_the_last(
    overfit: Overfit, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(overfit.run.out, tmp_path / "out")
    best = overfit.stats["best_step"]
    file = tmp_path / "out" / "checkpoints" / f"{best:09d}" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"step {best} had the lowest") as caught:
        selecting(shards, tmp_path / "out").run()
    assert 'finetune.keep="last"' in caught.value.hint


def test_an_improvement_is_one_by_more_than_the_noise() -> None:
    measured = {10: 2.0, 20: 1.5, 30: 1.45, 40: 1.46, 50: 1.35}
    assert best_step(measured) == 50
    assert best_step({1: float("nan"), 2: 3.0, 3: 3.0}) == 2
    assert best_step({0: 1.0}) is None
    assert without_gain(measured, {}, 0.0) == 0
    noisy = dict.fromkeys(measured, 0.2)
    assert without_gain(measured, noisy, 0.0) == 1  # 1.45 and 1.35 are the lowest so far, and 1.46 is not
    assert without_gain(measured | {60: 1.2, 70: 1.3}, noisy, 0.0) == 1  # 1.2 is below 1.5 by more
    assert without_gain(measured, {}, 0.06) == 0
    assert without_gain(measured, noisy, 0.06) == 2  # 1.45 is hardly lower
    assert without_gain({1: 1.0, 2: float("nan")}, {}, 0.0) == 1


def test_the_standard_error_is_that_of_repeated_samples() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 40, (2000, 50))
    losses = rng.normal(2.0, 1.0, counts.shape) * counts
    means, errors = np.array([mean_and_error(*rows) for rows in zip(losses, counts, strict=True)]).T
    assert abs(errors.mean() / means.std() - 1) < 0.05
    assert mean_and_error(np.array([6.0]), np.array([3])) == (2.0, 0.0)


def test_the_loss_by_rows_is_the_loss(shards: Path, tmp_path: Path) -> None:
    run = selecting(shards, tmp_path / "out")
    check = Validation(run.validation, run.tokenizer, 2)  # type: ignore[arg-type]
    plain = check.measure(run.model, on_cpu())
    by_row = dataclasses.replace(check, by_row=True).measure(run.model, on_cpu())
    assert by_row["validation_standard_error"] > 0
    assert by_row["validation_loss"] == pytest.approx(plain["validation_loss"], abs=2e-5)
    assert torch.is_grad_enabled()


def test_a_finetuning_says_its_length_in_steps_or_in_epochs() -> None:
    def made(**settings: Any) -> Finetune:
        return build(Finetune, {"global_batch_tokens": 64, **settings})

    with pytest.raises(ConfigError, match="set epochs, such as epochs=3, or steps"):
        made()
    with pytest.raises(ConfigError, match="steps=4 and epochs=2 are both set"):
        made(steps=4, epochs=2)
    config = made(epochs=2.5, lora={"rank": 3}, start_from="models/base").of_length(num_samples=10, rows=4)
    assert (config.steps, config.epochs, config.start_from) == (7, None, Path("models/base"))
    assert config.lora is not None
    assert config.optimizer.kind == "adamw"
    with pytest.raises(ConfigError, match=r"warmup_steps=10 is more than steps=7"):
        made(epochs=2.5, schedule={"kind": "linear", "warmup_steps": 10}).of_length(num_samples=10, rows=4)
