import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.errors import CheckpointError
from bloomery.core.io import MANIFEST
from bloomery.core.log import VARYING, read_metrics
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import PackedDataset
from bloomery.train.state import Hook, State
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import Validation
from bloomery.weights import checkpoint as weights_checkpoint
from bloomery.weights import hf
from tests.tokenizer.made import small
from tests.train.made import SHAPE, T, processor, session

STEPS = 9
ADAMW = {"kind": "adamw", "learning_rate": 0.01}


def result(out: Path) -> dict[str, Any]:
    """All that a run leaves behind but for how long it took."""
    lines = [{k: v for k, v in line.items() if k not in VARYING} for line in read_metrics(out / "metrics.jsonl")]
    newest = out / "checkpoints" / f"{STEPS:09d}"
    return {
        "metrics": lines,
        "model": {file.name: file.read_bytes() for file in sorted((out / "model").iterdir())},
        "checkpoint": content(newest),
        "checkpoints": sorted(folder.name for folder in (out / "checkpoints").iterdir()),
    }


def content(checkpoint: Path) -> dict[str, bytes]:
    """
    The files of a checkpoint, and each number of its training state. Not the bytes of its files: two notes in the
    header of a safetensors file come in any order.
    """
    found = {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.is_file() and file.name != MANIFEST}
    state = weights_checkpoint.read(checkpoint / "training")
    return found | {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def die_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a hook that a person's Ctrl-C comes in, after `step`."""
    whole = TrainingRun._hooks

    def interrupt(state: State) -> None:
        raise KeyboardInterrupt

    def hooks(self: TrainingRun, *args: Any) -> list[Hook]:
        return [*whole(self, *args), Hook(lambda s: s.step == step, interrupt)]

    monkeypatch.setattr(TrainingRun, "_hooks", hooks)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_run_that_was_killed_and_resumed_is_one_that_was_not_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Killed at a random step, with the last few checkpoints never written, and then once more."""
    rng = random.Random(number)
    settings: dict[str, Any] = {
        "precision": rng.choice(["float32", "bfloat16"]),
        "keep_checkpoints": 3,
        "log_every": rng.choice([1, 3]),
        **({"optimizer": ADAMW} if number % 2 else {}),
    }
    session(shards, tmp_path / "whole", **settings).run()
    for kill in sorted(rng.sample(range(1, STEPS), 2)):
        with monkeypatch.context() as patch:
            die_after(kill, patch)
            with pytest.raises(KeyboardInterrupt):
                session(shards, tmp_path / "killed", **settings).run()
        saved = sorted((tmp_path / "killed" / "checkpoints").iterdir())
        for folder in saved[len(saved) - rng.randint(0, min(2, len(saved))) :]:
            shutil.rmtree(folder)
    stats = session(shards, tmp_path / "killed", **settings).run()
    assert stats["steps"] == STEPS
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_a_run_killed_while_it_validates_loses_no_line_of_its_metrics(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(shards, tmp_path / "whole").run()
    whole = Validation.measure
    for _ in range(3):
        calls: list[int] = []

        def dying(self: Validation, model: Any, device: Any, calls: list[int] = calls) -> dict[str, float]:
            calls.append(1)
            if len(calls) == 3:  # the first is before the first step, the second may be of the step before
                raise KeyboardInterrupt
            return whole(self, model, device)

        with monkeypatch.context() as patch:
            patch.setattr(Validation, "measure", dying)
            with pytest.raises(KeyboardInterrupt):
                session(shards, tmp_path / "killed").run()
    session(shards, tmp_path / "killed").run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_a_run_killed_before_its_samples_are_all_made_makes_them_now(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(out: Path, kill: str = "") -> list[Any]:
        def sampler(model: Transformer, prompts: Sequence[str], max_tokens: int) -> Iterator[str]:
            for prompt in prompts:
                if prompt == kill and (out / "checkpoints" / "000000004").is_dir():
                    raise KeyboardInterrupt
                yield f"{prompt} {float(next(model.parameters()).detach().sum())}"

        run = session(shards, out, sample_every=2, prompts=["a", "b"])
        run.sampler = sampler
        if not kill:
            run.run()
        else:
            with pytest.raises(KeyboardInterrupt):
                run.run()
        return read_metrics(out / "samples.jsonl")

    whole = sampled(tmp_path / "whole")
    assert [line["step"] for line in whole] == [2, 2, 4, 4, 6, 6, 8, 8]
    for kill, left in (("a", 2), ("b", 3), ("b", 3)):
        assert len(sampled(tmp_path / "killed", kill)) == left
    assert sampled(tmp_path / "killed") == whole


@pytest.mark.slow
def test_metrics_are_safe_before_a_checkpoint_is_and_those_that_are_gone_are_told(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, safe, found = tmp_path / "metrics.jsonl", [0], dict[int, int]()
    flush, save = os.fsync, weights_checkpoint.save

    def flushed(handle: int) -> None:
        flush(handle)
        if metrics.exists() and os.fstat(handle).st_ino == metrics.stat().st_ino:
            safe.append(metrics.read_bytes().count(b'"learning_rate"'))

    def saved(root: Path, step: int, *args: Any, **how: Any) -> Path:
        found[step] = safe[-1]
        return save(root, step, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        patch.setattr(weights_checkpoint, "save", saved)
        die_after(6, patch)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path).run()
    assert found == {step: step for step in range(7)}
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= 3))
    session(shards, tmp_path).run()
    session(shards, tmp_path, log_every=3).run()
    with monkeypatch.context() as patch:  # nothing was lost that was never told
        die_after(5, patch)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path / "rarely", log_every=100).run()
    session(shards, tmp_path / "rarely").run()
    assert "has lost" not in (tmp_path / "rarely" / "log.txt").read_text()
    said = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "has lost" in line]
    assert [line[21:] for line in said] == [
        "metrics.jsonl has lost what it told of the steps after 3; the weights are of 6"
    ]


def test_a_damaged_checkpoint_costs_steps_and_changes_nothing(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(shards, tmp_path / "whole").run()
    with monkeypatch.context() as patch:
        die_after(5, patch)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path / "killed").run()
    weights = tmp_path / "killed" / "checkpoints" / "000000005" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 4
    weights.write_bytes(raw)
    session(shards, tmp_path / "killed").run()
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


def test_a_damaged_checkpoint_goes_when_a_newer_one_is_whole(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_after(7, patch)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path, steps=8).run()
    root = tmp_path / "checkpoints"
    whole = {path.name for path in root.iterdir()} - {"000000007"}
    (root / "000000007" / "state.json").unlink()
    session(shards, tmp_path, steps=8, save_every_seconds=1e9).run()
    assert {path.name for path in root.iterdir()} == whole | {"000000008"}


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_removes_nothing(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path).run()
    shutil.rmtree(tmp_path / "model")
    for note in (tmp_path / "checkpoints").glob("*/generation_config.json"):
        note.write_bytes(note.read_bytes() + b"\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".txt"}
    with pytest.raises(
        CheckpointError, match=rf"generation_config.json has .* bytes.*\n.*remove {tmp_path}/checkpoints"
    ):
        session(shards, tmp_path).run()
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_does_not_go_on_with_the_weights_of_other_shards(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_after(5, patch)
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path).run()
    other = session(shards, tmp_path)
    other.lineage = replace(other.lineage, shards="6" * 64)
    with pytest.raises(CheckpointError, match=rf"with shards 55555555.* 66666666\n.*remove {tmp_path}/checkpoints\."):
        other.run()
    assert session(shards, tmp_path).run()["steps"] == STEPS


def test_an_evaluation_that_was_missed_and_fails_is_told_at_the_end_too(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Validation.measure

    def raising_after_the_start(error: BaseException) -> Any:
        calls: list[int] = []

        def measure(self: Validation, model: Any, device: Any) -> dict[str, float]:
            calls.append(1)
            if len(calls) == 1:
                return whole(self, model, device)
            raise error

        return measure

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", raising_after_the_start(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session(shards, tmp_path, evaluate_every=100).run()
    monkeypatch.setattr(Validation, "measure", raising_after_the_start(ValueError("no such question")))
    stats = session(shards, tmp_path, evaluate_every=100).run()
    assert stats["failures"] == [{"step": STEPS, "hook": "evaluate", "error": "ValueError: no such question"}]
    assert "'evaluate' failed after step 9" in (tmp_path / "log.txt").read_text().splitlines()[-1]


@pytest.mark.parametrize("every", [2, 3])
def test_no_weights_are_validated_twice_but_those_before_the_first_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    whole, steps = Validation.measure, list[float]()

    def counted(self: Validation, model: Any, device: Any) -> dict[str, float]:
        found = whole(self, model, device)
        steps.append(found["validation_loss"])
        return found

    monkeypatch.setattr(Validation, "measure", counted)
    stats = session(shards, tmp_path, evaluate_every=every).run()
    assert len(steps) == 1 + -(-STEPS // every)
    assert stats["validation_loss"] == steps[-1]
    assert session(shards, tmp_path, evaluate_every=every).run()["validation_loss"] == steps[-2]
    assert steps[-1] == steps[0]
    assert len(steps) == 2 + -(-STEPS // every)


def test_a_run_that_died_before_it_left_its_model_leaves_it_now(shards: Path, tmp_path: Path) -> None:
    whole = session(shards, tmp_path).run()
    before = result(tmp_path)
    shutil.rmtree(tmp_path / "model")
    again = session(shards, tmp_path).run()
    assert result(tmp_path) == before
    varying = ("tokens_per_second", "peak_bytes", "peak_flops_measured")
    assert {k: v for k, v in again.items() if k not in varying} == {k: v for k, v in whole.items() if k not in varying}


def test_how_often_it_saves_and_evaluates_makes_no_other_model(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path / "one").run()
    session(shards, tmp_path / "two", save_every_seconds=1e3, keep_checkpoints=1, log_every=4, evaluate_every=3).run()
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["model"] == two["model"]
    assert one["checkpoint"] == two["checkpoint"]
    level_end = 5
    assert two["checkpoints"] == [f"{step:09d}" for step in (level_end, 6, STEPS)]  # 6 is one to go back to


def test_the_size_of_micro_batches_changes_no_more_than_rounding_does(shards: Path, tmp_path: Path) -> None:
    logged = []
    for tokens in (4 * T, T):
        session(shards, tmp_path / str(tokens), micro_batch_tokens=tokens).run()
        lines = read_metrics(tmp_path / str(tokens) / "metrics.jsonl")
        logged.append([line["loss"] for line in lines if "loss" in line])
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert len(logged[0]) == STEPS


def test_a_run_tells_what_it_did(shards: Path, tmp_path: Path) -> None:
    stats = session(shards, tmp_path).run()
    assert (stats["steps"], stats["tokens"], stats["precision"]) == (STEPS, STEPS * 4 * T, "float32")
    assert stats["supervised_tokens"] == stats["tokens"]  # every token of a document is a target
    assert stats["epochs"] == round(STEPS * 4 / 23, 3)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    assert stats["loss"] == round(logged[-1]["loss"], 5)
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6, 8, 9]
    assert stats["validation_loss"] < 7
    found = hf.load(tmp_path / "model")
    assert (found.model.config, found.lineage.step, found.lineage.tokenizer) == (SHAPE, STEPS, small().hash)
    assert stats["parameters"] == sum(weight.numel() for weight in found.model.parameters())


def test_the_numbers_of_a_checkpoint_are_those_of_its_step(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path).run()
    for folder in (tmp_path / "checkpoints").iterdir():
        state = json.loads((folder / "state.json").read_text())
        assert state["step"] == int(folder.name) == hf.load(folder).lineage.step
        assert state["samples"] == 4 * state["step"]
        logged = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"] == state["step"]]
        assert state["metrics"]["loss"] == logged[0]["loss"]


def test_validation_is_the_mean_loss_of_its_tokens_and_leaves_the_model_in_training(
    shards: Path, tmp_path: Path
) -> None:
    model = session(shards, tmp_path).model.train()
    samples = PackedDataset(shards, "val", T, small().hash)
    values = [Validation(samples, small(), rows).measure(model, processor())["validation_loss"] for rows in (2, 100)]
    assert values[0] == pytest.approx(values[1], abs=2e-5)
    assert model.training
