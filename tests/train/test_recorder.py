"""What a run tells of itself."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bloomery.core.log import read_metrics
from bloomery.core.signals import StopRequest
from bloomery.hw.device import Device, measured_peak
from bloomery.model.flops import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages.sampling import answering, continuing
from bloomery.train.grad_stats import Norms, by_layer
from bloomery.train.state import PhaseTimer
from tests.model.made import SHAPES, lively
from tests.tokenizer.made import small
from tests.train.made import processor, session

import torch


def test_a_loss_in_bits_per_byte_is_that_of_the_bytes_of_the_targets(shards: Path, tmp_path: Path) -> None:
    run = session(shards, tmp_path)
    run.run()
    assert isinstance(run.validation, PackedDataset)
    (line,) = [one for one in read_metrics(tmp_path / "metrics.jsonl") if one["step"] == 9 and "validation_loss" in one]
    targets = run.validation.batch(np.arange(run.validation.num_samples)).targets
    ids = targets[targets != IGNORE]
    size = sum(len(small().decode_bytes([int(id)])) for id in ids)
    nats = line["validation_loss"] * len(ids)
    assert line["validation_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)


def test_a_share_of_the_peak_is_the_models_work_over_what_was_measured(shards: Path, tmp_path: Path) -> None:
    run = session(shards, tmp_path)
    stats = run.run()
    work = cost(run.model.config, run.model.vocab_size).train_flops_per_token
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        if "mfu" in line:
            expected = line["tokens_per_second"] * work / stats["peak_flops_measured"]
            assert line["mfu"] == pytest.approx(expected, abs=1e-4)
            assert line["memory_bytes"] > 0
            assert {"data", "forward_backward", "optimizer"} <= line["seconds"].keys()
    assert "measured, in float32" in (tmp_path / "log.txt").read_text()


def test_what_evaluations_take_makes_no_step_slower(shards: Path, tmp_path: Path) -> None:
    def slow(model: Transformer, device: Device, stop: StopRequest) -> dict[str, float]:
        time.sleep(0.2)
        return {"slow": 1.0}

    run = session(shards, tmp_path, log_every=3)
    run.evaluations = {"slow": slow}
    run.run()
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        if "tokens_per_second" in line:
            worked = sum(seconds for phase, seconds in line["seconds"].items() if phase != "hooks")
            # Seconds of four phases are rounded to four decimals, tokens a second to one.
            tokens, rounding = 3 * run.tokens_per_step, 4 * 0.5e-4
            assert tokens / (worked + rounding) - 0.05 <= line["tokens_per_second"]
            assert line["tokens_per_second"] <= tokens / (worked - rounding) + 0.05
    assert "computes in float32" in (tmp_path / "log.txt").read_text()


def test_a_peak_is_measured_once_for_a_device_and_a_format() -> None:
    one = measured_peak(processor())
    assert one > 1e8
    assert measured_peak(processor()) == one


def test_a_clock_adds_up_phases_and_begins_anew_when_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = PhaseTimer()
    for phase in ("data", "optimizer", "data", "hooks"):
        clock.enter(phase)
    assert clock.at_work == 6.0
    assert clock.take() == {"data": 4.0, "optimizer": 2.0, "hooks": 4.0}
    assert clock.take() == {"hooks": 5.0}


def test_norms_are_those_of_weights_gradients_and_what_a_step_has_changed() -> None:
    model = lively(SHAPES[0])
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    norms = Norms(model, every=2)
    norms.before_update(1)
    norms.after_update()
    assert norms.latest == {}
    norms.before_update(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    norms.after_update()
    count = sum(weight.numel() for weight in model.parameters())
    assert norms.latest["update_norm"] == pytest.approx(0.01 * count**0.5, rel=1e-3)
    whole = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert norms.latest["weight_norm"] == pytest.approx(float(whole.norm()), rel=1e-5)
    flow = norms.latest["gradient_flow"]
    assert flow == by_layer(model)
    assert list(flow) == ["embed", "blocks.0", "blocks.1", "norm"]
    grads = torch.cat([weight.grad.flatten() for weight in model.blocks[1].parameters() if weight.grad is not None])
    assert flow["blocks.1"] == pytest.approx(float(grads.norm()), rel=1e-5)


def test_norms_of_a_large_weight_are_an_estimate_from_some_of_its_numbers() -> None:
    model = torch.nn.Linear(1000, 500, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    norms, change = Norms(model, every=1), 0.01 * torch.randn(500, 1000)
    norms.before_update(1)
    with torch.no_grad():
        model.weight += change
    norms.after_update()
    assert norms.latest["update_norm"] == pytest.approx(float(change.norm()), rel=0.02)


def test_norms_are_logged_every_so_many_steps_and_change_no_weight(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path / "one", norms_every=4).run()
    session(shards, tmp_path / "two", norms_every=0).run()
    lines = [line for line in read_metrics(tmp_path / "one" / "metrics.jsonl") if "gradient_flow" in line]
    assert [line["step"] for line in lines] == [4, 8]
    assert not [line for line in read_metrics(tmp_path / "two" / "metrics.jsonl") if "gradient_flow" in line]
    one, two = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_said_and_kept_and_change_no_weight(shards: Path, tmp_path: Path) -> None:
    def sampler(model: Transformer, prompts: Sequence[str], max_tokens: int) -> Iterator[str]:
        model.eval()
        for prompt in prompts:
            yield f"{prompt.upper()}{max_tokens}"

    run = session(shards, tmp_path / "one", sample_every=4, prompts=["a", "b"], sample_tokens=3)
    run.sampler = sampler
    run.run()
    session(shards, tmp_path / "two").run()
    assert [tuple(line.values()) for line in read_metrics(tmp_path / "one" / "samples.jsonl")] == [
        (step, prompt, f"{prompt.upper()}3") for step in (4, 8) for prompt in "ab"
    ]
    assert "step 8: 'b' -> 'B3'" in (tmp_path / "one" / "log.txt").read_text()
    one, two = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_sampler_that_fails_does_not_stop_training(shards: Path, tmp_path: Path) -> None:
    def sampler(model: Transformer, prompts: Sequence[str], max_tokens: int) -> Iterator[str]:
        raise ValueError("no words")

    run = session(shards, tmp_path, sample_every=4)
    run.sampler = sampler
    stats = run.run()
    assert [(failure["step"], failure["hook"]) for failure in stats["failures"]] == [(4, "sample"), (8, "sample")]
    assert run.model.training


@pytest.mark.parametrize("make", [continuing, answering])
def test_what_is_sampled_depends_on_the_model_and_not_on_chance(shards: Path, tmp_path: Path, make: type) -> None:
    run = session(shards, tmp_path)
    sampler = make(run.renderer)
    texts = [list(sampler(run.model, ["a", "the"], 5)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
