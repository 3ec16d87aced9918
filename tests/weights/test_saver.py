"""Saves that go on in a thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.core.errors import RunError
from bloomery.weights.checkpoint import RetentionPolicy, Saver, newest
from bloomery.weights.safetensors import save_tensors
from tests.weights.test_checkpoint import newest_step

import torch


def test_what_is_saved_is_what_was_when_the_save_began(tmp_path: Path) -> None:
    momentum = torch.full((3,), 1.0)
    gate = threading.Event()

    def slow_model(folder: Path) -> None:
        assert gate.wait(60)
        save_tensors(folder / "model.safetensors", {"weight": torch.ones(2)})

    with Saver(tmp_path, RetentionPolicy(last=2)) as saver:
        saver.start(1, slow_model, {"w/momentum": momentum}, {"step": 1, "samples": 0})
        momentum.fill_(2.0)
        assert newest(tmp_path) is None  # it is not done, and training goes on
        gate.set()
        saver.start(2, slow_model, {"w/momentum": momentum}, {"step": 2, "samples": 0})
        assert newest_step(tmp_path) is not None  # the second waits for the first
    found = [newest(tmp_path, before) for before in (2, 3)]
    assert [float(one.training["w/momentum"][0]) for one in found if one is not None] == [1.0, 2.0]


def test_a_save_that_failed_is_told_at_the_next_one_and_at_the_end(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "no space")

    saver = Saver(tmp_path, RetentionPolicy(last=1))
    ways: list[Callable[[], None]] = [
        lambda: saver.start(2, full, {}, {"step": 2, "samples": 0}),
        lambda: saver.__exit__(None, None, None),
    ]
    for again in ways:
        saver.start(1, full, {}, {"step": 1, "samples": 0})
        with pytest.raises(RunError, match="000000001: cannot be written: No space left"):
            again()
    assert newest(tmp_path) is None


def test_an_end_by_error_waits_for_the_save_that_runs(tmp_path: Path) -> None:

    def interrupted() -> None:
        with Saver(tmp_path, RetentionPolicy(last=1)) as saver:
            saver.start(1, lambda folder: time.sleep(0.2), {}, {"step": 1, "samples": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert newest_step(tmp_path) == 1
