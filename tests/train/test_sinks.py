import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bloomery.core.errors import DataError, RunError
from bloomery.core.log import read_metrics
from bloomery.train.metrics import EventFile, MainLog, crc32c, flat
from bloomery.train.state import State
from tests.train.made import session


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
    session(shards, tmp_path, sinks=[{"kind": kind, "project": "mine"}], norms_every=4).run()
    assert service.lines == [(line.pop("step"), flat(line)) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert service.finished == 1
    (begun,) = service.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", tmp_path.name, "allow")
    assert (begun["config"]["steps"], begun["config"]["model"]["width"]) == (9, 16)
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
    with pytest.raises(DataError, match=r"needs the package trackio.*\nInstall it: pip install 'bloomery\[trackio\]'"):
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
    lines = (tmp_path / "main.log").read_text().splitlines()
    logged = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line.split(" ")[0] for line in lines if "trl" in line] == [f"s:{step}" for step in range(9)]
    for line in logged:
        loss, rate, norm = line["loss"], line["learning_rate"], line["gradient_norm"]
        assert f"s:{line['step'] - 1} trl:{loss:.4f} lr:{rate:.6f} norm:{norm:.2f}" in lines
    assert [line.split(":")[1] for line in lines if "tel:" in line] == [f"{step} tel" for step in (2, 4, 6, 8, 9)]
    assert lines[-1] == "s:9 eval:0.2500"


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
