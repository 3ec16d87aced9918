"""A few inputs of every target, and all that ever was found. `make fuzz` tries many more."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.harness import CASES, MOST_CASE_BYTES, Worker
from tests.fuzz.worker import TARGETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and watches by what Linux has")

A_FEW = {"checkpoints": 6, "models": 10, "parquet": 20, "runs": 10}
CASE_FILES = sorted(path for path in CASES.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_inputs_are_done_or_refused(worker: Worker, target: str) -> None:
    outcomes = list(worker.several(target, 1, A_FEW.get(target, 40)))
    assert len(outcomes) > 1
    assert [(data, outcome) for data, outcome in outcomes if outcome.is_find] == []
    assert any(outcome.kind == "done" for _, outcome in outcomes), "nothing got past the first check"


@pytest.mark.parametrize("case", CASE_FILES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_what_was_found_once_is_done_or_refused(worker: Worker, case: Path) -> None:
    outcome = worker.one(case.parent.name, case.read_bytes())
    assert not outcome.is_find, outcome


def test_cases_are_small_and_of_a_target() -> None:
    assert [
        path for path in CASE_FILES if path.stat().st_size > MOST_CASE_BYTES or path.parent.name not in TARGETS
    ] == []
