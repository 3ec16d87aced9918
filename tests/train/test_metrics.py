import math
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bloomery.core.errors import DataError, RunError
from bloomery.core.log import read_metrics
from bloomery.core.signals import StopRequest
from bloomery.hw.device import measured_peak
from bloomery.model.config import cost
from bloomery.model.transformer import Transformer
from bloomery.shards.loader import IGNORE, PackedDataset
from bloomery.stages.rollouts import answering, continuing
from bloomery.tokenizer.chat_template import Renderer
from bloomery.train.collectives import Norms, by_layer
from bloomery.train.metrics import EventFile, MainLog, crc32c, flat
from bloomery.train.precision import Precision
from bloomery.train.state import PhaseTimer, State
from tests.model.made import SHAPES, lively
from tests.tokenizer.made import small
from tests.train.made import lines, model_bytes, processor, session

import torch


class Service(ModuleType):
    """The words of wandb and trackio: init gives a run, to log to and to finish."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__("service")
        self.begun: list[dict[str, Any]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.fails_at = fails_at

    def init(self, **how: Any) -> Any:
        self.begun.append(how)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("nobody answers")
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_service_gets_every_number_of_the_metrics(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, kind, service)
    session(shards, tmp_path, sinks=[{"kind": kind, "project": "mine"}], grad_stats_every=4).run()
    assert service.lines == [(line.pop("step"), flat(line)) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert service.finished == 1
    (begun,) = service.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", tmp_path.name, "allow")
    assert (begun["config"]["steps"], begun["config"]["model"]["hidden_size"]) == (9, 16)
    logged = {name for _, line in service.lines for name in line}
    assert {"loss", "bits_per_byte", "mfu", "seconds/data", "gradient_flow/blocks.0", "validation_loss"} <= logged


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_service_that_fails_is_said_once_and_stops_nothing(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = Service(fails_at=3)
    monkeypatch.setitem(sys.modules, kind, service)
    stats = session(shards, tmp_path, sinks=[{"kind": kind}, {"kind": "tensorboard"}]).run()
    assert stats["steps"] == 9
    assert stats["failures"] == [{"step": 3, "hook": kind, "error": "ConnectionError: nobody answers"}]
    assert max(step for step, _ in service.lines) == 2
    assert max(step for step, _ in numbers_of(tmp_path / "tensorboard")) == 9


def test_a_package_that_is_not_there_is_said_before_training_begins(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"the package trackio is needed.*\nInstall it: pip install 'bloomery\[trackio\]'"
    ):
        session(shards, tmp_path, sinks=[{"kind": "trackio"}]).run()
    assert not read_metrics(tmp_path / "metrics.jsonl")


def numbers_of(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """A reader of event files, by their format: protocol buffers of known fields, with checksums."""
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            event, raw = raw[12 : 12 + length], raw[16 + length :]
            fields = dict(fields_of(event))
            if 5 in fields:
                values = [dict(fields_of(value)) for _, value in fields_of(fields[5])]
                yield fields[2], {one[1].decode(): one[2] for one in values}


def fields_of(raw: bytes) -> Iterator[tuple[int, Any]]:
    while raw:
        key, raw = raw[0], raw[1:]
        if key & 7 == 1:
            value, raw = struct.unpack("<d", raw[:8])[0], raw[8:]
        elif key & 7 == 5:
            value, raw = struct.unpack("<f", raw[:4])[0], raw[4:]
        else:
            number, raw = varint(raw)
            value, raw = (number, raw) if key & 7 == 0 else (raw[:number], raw[number:])
        yield key >> 3, value


def varint(raw: bytes) -> tuple[int, bytes]:
    number = 0
    for place, byte in enumerate(raw):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, raw[place + 1 :]
    raise AssertionError


def test_event_files_hold_what_was_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.write(3, {"loss": 1.5, "gradient_flow/blocks.0": 0.25})
    file.write(70_000, {"loss": -2.0})
    file.close()
    assert list(numbers_of(tmp_path)) == [
        (3, {"loss": 1.5, "gradient_flow/blocks.0": 0.25}),
        (70_000, {"loss": -2.0}),
    ]


def test_checksums_are_those_of_the_standard() -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_tensorboard_reads_its_files(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    file = EventFile(tmp_path)
    file.write(300, {"loss": 1.5})
    file.close()
    events = list(reader.LegacyEventFileLoader(str(file.path)).Load())
    assert [(event.step, event.summary.value[0].tag) for event in events if event.HasField("summary")] == [
        (300, "loss")
    ]
    assert events[0].file_version == "brain.Event:2"


def test_main_log_speaks_as_llm_c_does(shards: Path, tmp_path: Path) -> None:
    run = session(shards, tmp_path, main_log=True, log_every=5)
    run.evaluations = {
        "hellaswag": lambda model, *how: {"hellaswag": 0.5, "hellaswag_per_token": 0.0 if model.training else 0.25}
    }
    run.run()
    written = (tmp_path / "main.log").read_text().splitlines()
    assert [line.split(" ")[0] for line in written if "trl" in line] == [f"s:{step}" for step in range(9)]
    for line in lines(tmp_path, "loss"):
        loss, rate, norm = line["loss"], line["learning_rate"], line["gradient_norm"]
        assert f"s:{line['step'] - 1} trl:{loss:.4f} lr:{rate:.6f} norm:{norm:.2f}" in written
    assert [line.split(":")[1] for line in written if "tel:" in line] == [f"{step} tel" for step in (2, 4, 6, 8, 9)]
    assert written[-1] == "s:9 eval:0.2500"


def test_a_resumed_main_log_drops_the_lines_of_lost_steps(tmp_path: Path) -> None:
    path = tmp_path / "main.log"
    path.write_text("s:0 trl:1.0000 lr:0.1 norm:1\ns:1 trl:1\ns:2 tel:3\ns:2 eval:4\ns:2 trl:5\ns:3 tel:6\ntorn")
    MainLog(path, 2)
    assert [line[:7] for line in path.read_text().splitlines()] == ["s:0 trl", "s:1 trl", "s:2 tel", "s:2 eva"]


def test_a_step_without_an_update_has_no_line_in_main_log(tmp_path: Path) -> None:
    MainLog(tmp_path / "main.log", 0).train(State(step=1, metrics={"tokens": 0, "learning_rate": 0.1}))
    assert (tmp_path / "main.log").read_text() == ""


def test_only_numbers_are_passed_on() -> None:
    values = {"loss": 1, "skipped": "why", "samples": [1], "flow": {"a": 0.5, "b": None}, "good": True}
    assert flat(values) == {"loss": 1.0, "flow/a": 0.5}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
def test_a_main_log_that_a_full_disk_does_not_take_is_named_with_the_hint(tmp_path: Path) -> None:
    log = MainLog(tmp_path / "main.log", 0)
    log._path = Path("/dev/full")
    with pytest.raises(RunError, match=r"^/dev/full: cannot be written: No space left on device.*\nFree some space"):
        log.take(1, {"validation_loss": 1.0})


# --- What a run tells of itself ---------------------------------------------------------------------------------------


def test_a_loss_in_bits_per_byte_is_that_of_the_bytes_of_the_targets(shards: Path, tmp_path: Path) -> None:
    run = session(shards, tmp_path)
    run.run()
    assert isinstance(run.validation, PackedDataset)
    line = lines(tmp_path, "validation_loss")[-1]
    targets = run.validation.batch(np.arange(run.validation.num_samples)).targets
    ids = targets[targets != IGNORE]
    size = sum(len(small().decode_bytes([int(id)])) for id in ids)
    nats = line["validation_loss"] * len(ids)
    assert line["validation_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)


def test_a_share_of_the_peak_is_the_models_work_over_what_was_measured(shards: Path, tmp_path: Path) -> None:
    run = session(shards, tmp_path)
    stats = run.run()
    work = cost(run.model.config, run.model.vocab_size).train_flops_per_token
    for line in lines(tmp_path, "mfu"):
        expected = line["tokens_per_second"] * work / stats["peak_flops_measured"]
        assert line["mfu"] == pytest.approx(expected, abs=1e-4)
        assert line["memory_bytes"] > 0
        assert {"data", "forward_backward", "optimizer"} <= line["seconds"].keys()
    assert "measured in matmuls of float32" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_what_evaluations_take_makes_no_step_slower(shards: Path, tmp_path: Path) -> None:
    def slow(model: Transformer, precision: Precision, stop: StopRequest) -> dict[str, float]:
        time.sleep(0.2)
        return {"slow": 1.0}

    run = session(shards, tmp_path, log_every=3)
    run.evaluations = {"slow": slow}
    run.run()
    for line in lines(tmp_path, "tokens_per_second"):
        worked = sum(seconds for phase, seconds in line["seconds"].items() if phase != "hooks")
        # Seconds of four phases are rounded to four decimals, tokens per second to one.
        tokens, rounding = 3 * run.global_batch_tokens, 4 * 0.5e-4
        assert tokens / (worked + rounding) - 0.05 <= line["tokens_per_second"]
        assert line["tokens_per_second"] <= tokens / (worked - rounding) + 0.05
    assert "computes in float32" in (tmp_path / "log.txt").read_text()


def test_a_peak_is_measured_once_for_a_device_and_a_format() -> None:
    one = measured_peak(processor())
    assert one > 1e8
    assert measured_peak(processor()) == one


def test_a_timer_adds_up_phases_and_begins_anew_when_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    timer = PhaseTimer()
    for phase in ("data", "optimizer", "data", "hooks"):
        timer.enter(phase)
    assert timer.at_work == 6.0
    assert timer.take() == {"data": 4.0, "optimizer": 2.0, "hooks": 4.0}
    assert timer.take() == {"hooks": 5.0}


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


@pytest.mark.slow
def test_norms_are_logged_every_so_many_steps_and_change_no_weight(shards: Path, tmp_path: Path) -> None:
    session(shards, tmp_path / "one", grad_stats_every=4).run()
    session(shards, tmp_path / "two", grad_stats_every=0).run()
    assert [line["step"] for line in lines(tmp_path / "one", "gradient_flow")] == [4, 8]
    assert not lines(tmp_path / "two", "gradient_flow")
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "two")


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "two")


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
    sampler = make(Renderer(small()))
    texts = [list(sampler(run.model, ["a", "the"], 5)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
