from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.train.made import OPTIMIZERS, run, write_samples


@pytest.fixture(autouse=True)
def ranks_start_at_once(warm_ranks: None) -> None:
    """All that this process starts. Those of a child process start as people start them."""


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples to train and to validate on, which nobody writes to."""
    folder = tmp_path_factory.mktemp("shards")
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs to the end on so many ranks, each made once, that nobody writes to."""

    @cache
    def made(ranks: int, optimizer: str, **settings: Any) -> Path:
        out = tmp_path_factory.mktemp("finished")
        run(shards, out, ranks, optimizer=OPTIMIZERS[optimizer], keep_last=20, **settings)
        return out

    return made
