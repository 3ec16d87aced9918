import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.core.errors import CheckpointError, RunError
from bloomery.core.io import disk_errors
from bloomery.core.log import read_metrics
from bloomery.core.signals import Terminated
from bloomery.model.transformer import Transformer
from bloomery.shards import loader
from bloomery.shards.loader import AnnealedDataset, Batch, PackedDataset
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train import step
from bloomery.train.checkpointing import FullModelSaver
from bloomery.train.optim import Optimizers
from bloomery.train.state import Hook, State
from bloomery.train.trainer import TrainingRun
from bloomery.train.validation import Validation
from bloomery.weights import checkpoint, hf
from bloomery.weights import checkpoint as weights_checkpoint
from tests.tokenizer.made import small
from tests.train.made import LINEAGE, SHAPE, T, lines, newest_state, on_cpu, result, session, wait_for_steps

import torch
from torch import Tensor

STEPS = 9
FASTER = {"kind": "adamw", "learning_rate": 0.01}


def kept(out: Path) -> dict[str, Any]:
    """All that a run leaves behind, with the names of its checkpoints."""
    return result(out) | {"checkpoints": sorted(folder.name for folder in (out / "checkpoints").iterdir())}


def die_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a hook that a person's Ctrl-C comes in, after `step`."""
    add_hook(monkeypatch, dying(step))


def add_hook(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    whole = TrainingRun._hooks
    monkeypatch.setattr(TrainingRun, "_hooks", lambda self, *args: [*whole(self, *args), hook])


def raising(error: BaseException) -> Any:
    def run(state: State) -> None:
        raise error

    return run


def dying(step: int) -> Hook:
    return Hook(lambda state: state.step == step, raising(KeyboardInterrupt()))


def asking(step: int, number: int = signal.SIGTERM) -> Hook:
    """After a step, a signal comes in that asks to stop."""
    return Hook(lambda state: state.step == step, lambda state: os.kill(os.getpid(), number), "ask")


def ended(kind: type[BaseException], hook: Hook, shards: Path, out: Path, **settings: Any) -> BaseException:
    """What ends a run that has another hook."""
    with pytest.MonkeyPatch.context() as patch:
        add_hook(patch, hook)
        with pytest.raises(kind) as caught:
            session(shards, out, **settings).run()
    return caught.value


def killed(after: int, shards: Path, out: Path, **settings: Any) -> None:
    """A run that Ctrl-C ends after a step."""
    ended(KeyboardInterrupt, dying(after), shards, out, **settings)


def assert_resumes(shards: Path, folder: Path, look: Callable[[Path], Any] = result, **settings: Any) -> dict[str, Any]:
    """A run in `killed` that is resumed ends as the same in `whole` that was never stopped, to the bit."""
    stats = session(shards, folder / "killed", **settings).run()
    session(shards, folder / "whole", **settings).run()
    assert look(folder / "killed") == look(folder / "whole")
    return stats


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_run_that_was_killed_and_resumed_is_one_that_was_not_bit_for_bit(
    shards: Path, tmp_path: Path, number: int
) -> None:
    """Killed at a random step, with the last few checkpoints never written, and then once more."""
    rng = random.Random(number)
    settings: dict[str, Any] = {
        "precision": rng.choice(["float32", "bfloat16"]),
        "keep_last": 3,
        "log_every": rng.choice([1, 3]),
        **({"optimizer": FASTER} if number % 2 else {}),
    }
    for kill in sorted(rng.sample(range(1, STEPS), 2)):
        killed(kill, shards, tmp_path / "killed", **settings)
        saved = sorted((tmp_path / "killed" / "checkpoints").iterdir())
        for folder in saved[len(saved) - rng.randint(0, min(2, len(saved))) :]:
            shutil.rmtree(folder)
    stats = assert_resumes(shards, tmp_path, kept, **settings)
    assert stats["steps"] == STEPS


@pytest.mark.slow
def test_a_run_killed_while_it_validates_loses_no_line_of_its_metrics(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert_resumes(shards, tmp_path, kept)


@pytest.mark.slow
def test_a_run_killed_before_its_samples_are_all_made_makes_them_now(shards: Path, tmp_path: Path) -> None:
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
    written = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(line for line in written if json.loads(line)["step"] <= 3))
    session(shards, tmp_path).run()
    session(shards, tmp_path, log_every=3).run()
    killed(5, shards, tmp_path / "rarely", log_every=100)
    session(shards, tmp_path / "rarely").run()
    assert "has lost" not in (tmp_path / "rarely" / "log.txt").read_text()
    said = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "has lost" in line]
    assert [line[21:] for line in said] == ["metrics.jsonl has lost the steps after 3; the weights are of 6"]


def test_a_damaged_checkpoint_costs_steps_and_changes_nothing(shards: Path, tmp_path: Path) -> None:
    killed(5, shards, tmp_path / "killed")
    weights = tmp_path / "killed" / "checkpoints" / "000000005" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 4
    weights.write_bytes(raw)
    assert_resumes(shards, tmp_path, kept)


def test_a_damaged_checkpoint_goes_when_a_newer_one_is_whole(shards: Path, tmp_path: Path) -> None:
    killed(7, shards, tmp_path, steps=8)
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


def test_a_run_does_not_go_on_with_the_weights_of_other_shards(shards: Path, tmp_path: Path) -> None:
    killed(5, shards, tmp_path)
    other = session(shards, tmp_path)
    other.model_saver = FullModelSaver(other.model, Renderer(small()), replace(LINEAGE, shards="6" * 64))
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
            session(shards, tmp_path, eval_every=100).run()
    monkeypatch.setattr(Validation, "measure", raising_after_the_start(ValueError("no such question")))
    stats = session(shards, tmp_path, eval_every=100).run()
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
    stats = session(shards, tmp_path, eval_every=every).run()
    assert len(steps) == 1 + -(-STEPS // every)
    assert stats["validation_loss"] == steps[-1]
    assert session(shards, tmp_path, eval_every=every).run()["validation_loss"] == steps[-2]
    assert steps[-1] == steps[0]
    assert len(steps) == 2 + -(-STEPS // every)


def test_a_run_that_died_before_it_left_its_model_leaves_it_now(shards: Path, tmp_path: Path) -> None:
    whole = session(shards, tmp_path).run()
    before = kept(tmp_path)
    shutil.rmtree(tmp_path / "model")
    again = session(shards, tmp_path).run()
    assert kept(tmp_path) == before
    varying = ("tokens_per_second", "peak_bytes", "peak_flops_measured")
    assert {k: v for k, v in again.items() if k not in varying} == {k: v for k, v in whole.items() if k not in varying}


def test_how_often_it_saves_and_evaluates_makes_no_other_model(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path / "one").run()
    session(shards, tmp_path / "two", save_every_seconds=1e3, keep_last=1, log_every=4, eval_every=3).run()
    one, two = (kept(tmp_path / name) for name in ("one", "two"))
    assert one["model"] == two["model"]
    assert one["checkpoint"] == two["checkpoint"]
    level_end = 5
    assert two["checkpoints"] == [f"{step:09d}" for step in (level_end, 6, STEPS)]  # 6 is one to go back to


def test_a_run_tells_what_it_did(shards: Path, tmp_path: Path) -> None:
    stats = session(shards, tmp_path).run()
    assert (stats["steps"], stats["tokens"], stats["precision"]) == (STEPS, STEPS * 4 * T, "float32")
    assert stats["supervised_tokens"] == stats["tokens"]  # every token of a document is a target
    assert stats["epochs"] == round(STEPS * 4 / 23, 3)
    logged = lines(tmp_path, "loss")
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    assert stats["loss"] == round(logged[-1]["loss"], 5)
    assert [line["step"] for line in lines(tmp_path, "validation_loss")] == [2, 4, 6, 8, 9]
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
        logged = [line for line in lines(tmp_path) if line["step"] == state["step"]]
        assert state["metrics"]["loss"] == logged[0]["loss"]


def test_validation_is_the_mean_loss_of_its_tokens_and_leaves_the_model_in_training(
    shards: Path, tmp_path: Path
) -> None:
    model = session(shards, tmp_path).model.train()
    samples = PackedDataset(shards, "val", T, small().hash)
    values = [Validation(samples, small(), rows).measure(model, on_cpu())["validation_loss"] for rows in (2, 100)]
    assert values[0] == pytest.approx(values[1], abs=2e-5)
    assert model.training


# --- Runs that meet bad batches, bad optimizers, bad hooks, and a polite end ------------------------------------------


LONGER = 16
SETTINGS: dict[str, Any] = {
    "steps": LONGER,
    "spike_window": 4,
    "spike_sigma": 30.0,
    "keep_last": 20,
    "eval_every": 3,
}


def poison_loss(monkeypatch: pytest.MonkeyPatch, bad: dict[int, float]) -> None:
    """Multiply the loss of the steps that take samples 4 · (step − 1) … by a number."""
    whole, inner, now = loader.batches, step.micro_batch_losses, [0]

    def counted(samples: Any, *, first: int, size: int, **how: Any) -> Iterator[Batch]:
        for number, batch in enumerate(whole(samples, first=first, size=size, **how)):
            now[0] = first // size + number + 1
            yield batch

    monkeypatch.setattr("bloomery.train.trainer.batches", counted)

    def poisoned(*args: Any) -> tuple[Tensor, Tensor]:
        loss, entropy = inner(*args)
        return loss * bad.get(now[0], 1.0), entropy * bad.get(now[0], 1.0)

    monkeypatch.setattr(step, "micro_batch_losses", poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e4])
def test_one_poisoned_batch_is_one_skip_with_its_samples_named(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    poison_loss(monkeypatch, {8: factor})
    run = session(shards, tmp_path, **SETTINGS)
    stats = run.run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (LONGER, 1, 0)
    (line,) = lines(tmp_path, "skipped")
    assert line["step"] == 8
    assert line["samples"] == run.samples.order(28, 4, 0).tolist()
    assert line["skipped"].startswith("the loss is ")
    assert [one["step"] for one in lines(tmp_path, "loss")] == [n for n in range(1, LONGER + 1) if n != 8]
    assert "skipped step 8" in (tmp_path / "log.txt").read_text()


def test_a_run_goes_back_behind_a_window_of_bad_batches(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 8, 9 and 10 are bad, so the weights of 6 are the newest to go back to that a later step has confirmed."""
    poison_loss(monkeypatch, dict.fromkeys((8, 9, 10), math.inf))
    stats = session(shards, tmp_path, **SETTINGS).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (LONGER, 3, 1)
    assert [(line["step"], line["rolled_back_to"]) for line in lines(tmp_path, "rolled_back_to")] == [(10, 6)]
    newest = newest_state(tmp_path)
    assert newest["guard"]["rollbacks"] == [[10, 6]]
    assert newest["samples"] == 4 * LONGER  # no sample came again
    assert stats["supervised_tokens"] == (6 + 6) * 4 * T
    saved = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert not {"000000008", "000000009"} & saved


def test_weights_that_an_optimizer_poisoned_are_never_saved_and_the_run_goes_back(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Optimizers.step, list[int]()

    def poisoned(self: Optimizers, scale: float, number: int) -> None:
        whole(self, scale, number)
        calls.append(1)
        if len(calls) == 7:
            with torch.no_grad():
                self.parts[0].param_groups[0]["params"][0].fill_(math.nan)
            for part in self.parts:
                for state in part.state.values():
                    state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].fill_(math.nan)

    monkeypatch.setattr(Optimizers, "step", poisoned)
    stats = session(shards, tmp_path, **SETTINGS).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (LONGER, 3, 1)
    assert lines(tmp_path, "rolled_back_to")[0]["rolled_back_to"] == 6
    assert "step 7 is not saved: its weights are not finite" in (tmp_path / "log.txt").read_text()
    assert np.isfinite(stats["validation_loss"])
    assert not (tmp_path / "checkpoints" / "000000007").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "told"),
    [(8, "already rolled back to step 6 after step 10"), (1, "already rolled back to step 0 after step 3")],
)
def test_a_run_that_did_not_get_further_by_going_back_stops_and_goes_on_with_the_hint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, told: str
) -> None:
    poison_loss(monkeypatch, dict.fromkeys(range(first, first + 6), math.inf))
    for _ in range(2):
        with pytest.raises(RunError, match=f"{told}, and it did not help") as caught:
            session(shards, tmp_path, **SETTINGS).run()
    assert caught.value.where == f"step {first + 5}"
    assert "pretrain.max_skipped_steps=6 resumes after them" in caught.value.hint
    stats = session(shards, tmp_path, **SETTINGS, max_skipped_steps=6).run()
    assert (stats["steps"], stats["skipped_steps"], stats["rollbacks"]) == (LONGER, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "goal"), [((2, 3, 4), 0), ((8, 9, 10), 6), ((7, 8, 9), 3)])
@pytest.mark.parametrize("keep", [1, 2])
def test_where_a_run_goes_back_to_depends_on_no_clock_and_no_kill(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], goal: int, keep: int
) -> None:
    """Also where it is asked to stop between two bad steps, and where the first of them comes right behind a goal."""
    poison_loss(monkeypatch, dict.fromkeys(bad, math.inf))
    settings = {**SETTINGS, "keep_last": keep, "eval_every": 3}
    found = []
    for seconds in (1e9, 1e-9):
        session(shards, tmp_path / str(seconds), **{**settings, "save_every_seconds": seconds}).run()
        found.append(result(tmp_path / str(seconds)))
    ended(Terminated, asking(bad[1]), shards, tmp_path / "killed", **settings)
    session(shards, tmp_path / "killed", **settings).run()
    assert found[0] == found[1] == result(tmp_path / "killed")
    assert newest_state(tmp_path / "killed")["guard"]["rollbacks"] == [[bad[-1], goal]]
    assert {one.name for one in checkpoint.folders(tmp_path / "1e-09" / "checkpoints")} >= {"000000015", "000000016"}


@pytest.mark.slow
def test_a_run_goes_back_to_no_weights_that_it_has_gone_back_behind(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step after 8 was accepted before the run left it for 4: its weights may be what was bad."""
    poison_loss(monkeypatch, dict.fromkeys((9, 10, 11, 13, 14, 15), math.inf))
    for seconds in (1e9, 1e-9):
        out = tmp_path / str(seconds)
        session(shards, out, **SETTINGS | {"eval_every": 4, "keep_last": 1, "save_every_seconds": seconds}).run()
        assert [line["rolled_back_to"] for line in lines(out, "rolled_back_to")] == [4, 4]


def test_a_window_of_other_data_does_not_come_back(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin with step 11, and the checkpoint of 9 remembers losses from before."""
    poison_loss(monkeypatch, dict.fromkeys((12, 13, 14), math.inf))
    run = session(shards, tmp_path, **SETTINGS)
    assert isinstance(run.samples, PackedDataset)
    run.samples = AnnealedDataset(run.samples, run.samples, 4 * LONGER)
    assert run.samples.switch // 4 == 10
    run.run()
    assert [line["rolled_back_to"] for line in lines(tmp_path, "rolled_back_to")] == [9]
    newest = newest_state(tmp_path)
    assert len(newest["guard"]["losses"]) == LONGER - 14


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(9,), (11, 13)])
def test_a_run_that_was_killed_around_its_bad_batches_is_one_that_was_not_bit_for_bit(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, ...]
) -> None:
    poison_loss(monkeypatch, {4: math.nan, 8: 1e4, 9: 1e4, 10: math.inf, 13: 1e3})
    for kill in kills:
        killed(kill, shards, tmp_path / "killed", **SETTINGS)
    assert_resumes(shards, tmp_path, **SETTINGS)


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_fails_does_not_stop_training_and_is_named_at_the_end(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Validation, model: Any, device: Any) -> Any:
        raise ValueError("no such question")

    monkeypatch.setattr(Validation, "measure", failing)
    stats = session(shards, tmp_path, eval_every=4).run()
    assert [failure["step"] for failure in stats["failures"]] == [0, 4, 8, 9]
    assert stats["validation_loss"] is None
    assert [line["failed"] for line in lines(tmp_path, "failed")] == ["evaluate"] * 3
    assert lines(tmp_path, "failed")[0]["error"] == "ValueError: no such question"
    end = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "the hook 'evaluate' failed after step 9: ValueError: no such question" in end


def test_a_save_comes_before_each_evaluation(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(self: Validation, model: Any, device: Any) -> dict[str, float]:
        seen.append(max((folder.name for folder in (tmp_path / "checkpoints").glob("*")), default=""))
        return {"validation_loss": 1.0 / len(seen)}

    monkeypatch.setattr(Validation, "measure", look)
    session(shards, tmp_path, eval_every=2, save_every_seconds=1e9).run()
    assert seen == ["", *(f"{step:09d}" for step in (2, 4, 6, 8, 9))]


@pytest.mark.slow
def test_a_hook_that_stops_the_run_does_so_after_its_step_is_saved(shards: Path, tmp_path: Path) -> None:
    odd = Hook(lambda s: s.step == 5, raising(RuntimeError("odd")), "log")
    assert str(ended(RuntimeError, odd, shards, tmp_path / "killed", save_every_seconds=1e9)) == "odd"
    assert (tmp_path / "killed" / "checkpoints" / "000000005").is_dir()
    assert_resumes(shards, tmp_path, save_every_seconds=1e9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"save_every_seconds": 1e9, "eval_every": 3}, {"eval_every": 100}], ids=["evaluated", "late"]
)
@pytest.mark.parametrize("asked", [False, True], ids=["alone", "asked to stop"])
def test_a_full_disk_stops_the_run_with_the_cure_and_the_same_command_goes_on(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], asked: bool
) -> None:
    """Whoever waits for the save that fails: an evaluation, the next save, or the end that was asked for."""
    root, whole = tmp_path / "killed" / "checkpoints", checkpoint.save

    def full(root: Path, step: int, *args: Any, **named: Any) -> Path:
        if step < 6:
            return whole(root, step, *args, **named)
        with disk_errors(root):
            raise OSError(28, "No space left on device")
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        if asked:
            add_hook(patch, asking(6))
        with pytest.raises(RunError, match="No space left on device") as caught:
            session(shards, root.parent, **settings).run()
    assert caught.value.hint == "Free some space and run the same command again. Finished parts are kept."
    assert "asked to stop" not in (root.parent / "log.txt").read_text()
    assert not (root.parent / "model").exists()
    assert_resumes(shards, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "forward", "update"])
def test_an_error_between_two_updates_leaves_the_last_finished_step_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the midst of an update the weights are those of no step, and an older checkpoint is gone on from."""
    settings: dict[str, Any] = {"save_every_seconds": 1e9, "eval_every": 4}
    owner, name, calls = {
        "data": (loader.PackedDataset, "order", 8),
        "forward": (step, "accumulate_gradients", 8),
        "update": (Optimizers, "step", 8),
    }[where]
    inner, seen = getattr(owner, name), list[int]()

    def failing(*args: Any, **how: Any) -> Any:
        seen.append(1)
        if len(seen) == calls:
            raise IndexError("a page cannot be read")
        return inner(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(IndexError, match="a page"):
            session(shards, tmp_path / "killed", **settings).run()
    newest = max(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir())
    assert newest == ("000000005" if where == "update" else "000000007")
    assert_resumes(shards, tmp_path, **settings)


# --- a polite end -----------------------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    """The signals of this process, whose run ends as if the process did; under a shell it may ignore Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_every", "number", "code"),
    [(1e9, signal.SIGTERM, 143), (1e-9, signal.SIGTERM, 143), (1e9, signal.SIGINT, 130)],
)
@pytest.mark.usefixtures("as_before")
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_where_it_was_bit_for_bit(
    shards: Path, tmp_path: Path, save_every: float, number: int, code: int
) -> None:
    end = ended(Terminated, asking(5, number), shards, tmp_path / "killed", save_every_seconds=save_every)
    assert isinstance(end, Terminated)
    assert end.code == code
    assert max(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir()) == "000000005"
    assert_resumes(shards, tmp_path, save_every_seconds=save_every)


@pytest.mark.parametrize("when", ["checkpoint", "model"])
@pytest.mark.usefixtures("as_before")
def test_a_run_that_is_asked_to_stop_in_its_last_save_or_as_it_leaves_its_model_ends_that_and_stops(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    write, asked = hf.save, list[str]()

    def ask(folder: Path, *args: Any, **how: Any) -> Any:
        if folder.name == {"checkpoint": f"{LONGER:09d}.partial", "model": "model"}[when]:
            asked.append(folder.name)
            os.kill(os.getpid(), signal.SIGTERM)
        return write(folder, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(hf, "save", ask)
        with pytest.raises(Terminated) as caught:
            session(shards, tmp_path, steps=LONGER, save_every_seconds=1e9).run()
    assert (caught.value.code, len(asked)) == (143, 1)
    assert (tmp_path / "checkpoints" / f"{LONGER:09d}").is_dir()
    again = session(shards, tmp_path, steps=LONGER, save_every_seconds=1e9).run()
    assert (again["steps"], again["tokens_per_second"]) == (LONGER, None)


# --- A training process that gets SIGTERM -----------------------------------------------------------------------------


GRACE_SECONDS = 120
ALONE = """
import sys
from pathlib import Path
from tests.train.made import session
settings = {"steps": int(sys.argv[3]), "save_every_seconds": 1e9, "eval_every": 10**9}
session(Path(sys.argv[1]), Path(sys.argv[2]), **settings).run()
"""


@pytest.mark.slow
def test_sigterm_saves_the_newest_step_and_exits_with_143(shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(shards), str(tmp_path / "killed")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "1000000"], stderr=subprocess.DEVNULL, env=env)
    try:
        wait_for_steps(tmp_path / "killed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=GRACE_SECONDS) == 143
    finally:
        process.kill()
    last = lines(tmp_path / "killed")[-1]["step"]
    assert newest_state(tmp_path / "killed")["step"] == last
    assert f"asked to stop after step {last}" in (tmp_path / "killed" / "log.txt").read_text()


def test_sigterm_in_the_midst_of_an_evaluation_leaves_the_step_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session(shards, tmp_path / "killed", save_every_seconds=1e9, eval_every=4)
    whole, seen = PackedDataset.batch, list[int]()

    def batch(self: object, numbers: object) -> object:
        seen.append(1)
        if run.validation is self and (tmp_path / "killed" / "checkpoints" / "000000004").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedDataset, "batch", batch)
    with pytest.raises(SystemExit) as caught:
        run.run()
    assert caught.value.code == 143
    assert sorted(folder.name for folder in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        "000000000",
        "000000004",
    ]
    assert not lines(tmp_path / "killed", "validation_loss")
