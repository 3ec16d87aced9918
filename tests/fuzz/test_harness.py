"""A harness that notices nothing is worth nothing: each kind of fault is planted, and found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz.harness import ROOT, Find, Worker, fuzz, isolation, reduced
from tests.fuzz.outcome import Outcome
from tests.fuzz.planted import SLEEP

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and watches by what Linux has")

PLANTED = "tests.fuzz.planted:target"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(seconds_for_an_input=4.0) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *(("fine", "done"), ("refused", "refused"), ("traceback", "traceback"), ("talkative", "absurd")),
        *(("hang", "hang"), ("busy", "hang"), ("abort", "abort")),
        *(("child_memory", "memory"), ("memory", "memory"), ("limit", "traceback")),
        *(
            ("grandchild", "processes"),
            ("many", "processes"),
            ("file", "traceback"),
            ("lost", "lost"),
            ("network", "traceback"),
        ),
    ],
)
def test_a_planted_fault_is_noticed_and_the_next_input_is_tried(worker: Worker, fault: str, kind: str) -> None:
    outcome = worker.one(PLANTED, fault.encode())
    assert (outcome.kind, outcome.is_find) == (kind, kind not in ("done", "refused")), outcome
    assert worker.one(PLANTED, b"fine").kind == "done"
    assert not within(lambda: not sleepers(), 5), "a process outlives its input"


def test_memory_that_a_process_had_before_is_not_held_against_its_children() -> None:
    with Worker() as worker:
        for fault in (b"hold", b"hold", b"child"):
            assert worker.one(PLANTED, fault).kind == "done"


def test_finds_come_with_their_input_whoever_made_it() -> None:
    tally = fuzz(PLANTED, 1, inputs=400)
    assert tally.inputs == 400
    assert tally.counts["traceback"] > 0
    assert [find.data for find in tally.finds.values()] == [b"traceback"]
    assert list(tally.finds) == [("traceback", "ValueError in elsewhere")]


@pytest.mark.slow
def test_equal_seeds_give_equal_inputs() -> None:
    assert fuzz(PLANTED, 7, inputs=200).counts == fuzz(PLANTED, 7, inputs=200).counts


def test_a_find_is_reduced_to_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reduced(b"a long way to X and on", lambda data: b"X" in data, 100) == b"X"
    monkeypatch.setattr("tests.fuzz.harness.CASES", tmp_path)
    file = Find("runs", b"data", Outcome("traceback", "", "KeyError in core/run_dir.py:states")).keep()
    assert file == tmp_path / "runs" / "traceback-keyerror-in-core-run-dir-py-states"
    assert file.read_bytes() == b"data"


@pytest.mark.skipif(not isolation(), reason="this system makes no namespaces for processes")
def test_workers_end_with_whoever_watches_them_however_that_ends() -> None:
    code = f"from tests.fuzz.harness import Worker\nWorker().one({PLANTED!r}, b'many')"
    watcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert not within(lambda: len(sleepers()) > 3, 30), "nothing was started"
    watcher.send_signal(signal.SIGKILL)
    watcher.wait()
    assert not within(lambda: not sleepers(), 5), "a process outlives the watcher"


def sleepers() -> list[str]:
    """Processes of this machine that a planted fault has started."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(file.read_bytes().replace(b"\0", b" ").decode().strip())
        except OSError:
            continue
    return [words for words in commands if words == SLEEP]


def within(condition: Callable[[], bool], seconds: float) -> bool:
    """False as soon as it holds; True where it never did in this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return True
        time.sleep(0.05)
    return False
