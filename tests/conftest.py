"""
Settings of all tests.

A busy machine is no failure, so examples of hypothesis have no deadline; each run draws others. Signals work as in a
terminal, however the tests were started: a job in the background inherits a SIGINT that is ignored, and so would every
process of a test.
"""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

# isort: off
from tests import typechecked
# isort: on

import pytest
from hypothesis import settings

from bloomery import cli
from tests.calling import Call

settings.register_profile("bloomery", deadline=None, max_examples=50)
settings.load_profile("bloomery")
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look through it again and again for garbage took a third of the time of imports."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


LONGEST = (
    "snippets",
    "mesh",
    "fsdp",
    "machines",
    "gpu_report",
    "compile",
    "launch",
    "fused",
    "trace",
    "masks",
    "engine",
)
"""Names of the files that take a minute and more."""


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, for some tests wait for processes and clocks."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then others with slow tests: no worker is left alone with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    first = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path not in slow, first.get(item.path.name, len(first))))


def pytest_runtest_setup() -> None:
    typechecked.begin_test()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `launch` starts are forked from a process that has imported all that they need."""
    from bloomery.train import launch
    from tests import warm

    monkeypatch.setattr(launch, "subprocess", warm.STARTS)


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that work on parts of data are forked from one that has imported what they need."""
    from bloomery.data import executor
    from tests import warm_workers

    monkeypatch.setattr(executor, "multiprocessing", warm_workers.STARTS)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans by arithmetic alone: a trace takes a second and more, and other tests compare the two."""
    from bloomery.stages import plan

    monkeypatch.setattr(plan, "is_traced", lambda model: False)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A verb with its arguments -> exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
