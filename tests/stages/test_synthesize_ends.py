"""How `synthesize` ends, and what it does not wait for."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.core.config import plain
from bloomery.core.errors import DataError
from bloomery.data.synthesis import asking
from tests.data.synthesis.model_server import ModelServer
from tests.stages.made_synthesis import TOPICS, config, run

CHILD = """
import json, sys
from pathlib import Path
from bloomery.core.config import build
from bloomery.data.synthesis.config import Synthesize
from bloomery.stages import synthesize
try:
    synthesize.run(build(Synthesize, json.loads(sys.argv[1])), {}, Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_failure_for_good_wakes_the_requests_that_wait_for_another_attempt(
    server: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(number: int) -> str:
        if number:
            time.sleep(0.2)
        return "401" if number else "429"

    server.fault, server.retry_after = fault, "60"
    begun = time.monotonic()
    with pytest.raises(DataError, match="HTTP 401"):
        run(config(server, concurrency=2, topics=TOPICS[:2]), tmp_path)
    assert time.monotonic() - begun < 5
    assert len(server.asked) == 2
    assert "HTTP 401: told to say 401; it ends when" in re.sub(r"\s+", " ", "".join(capsys.readouterr()))


@pytest.mark.parametrize("fault", ["429", "late"])
def test_an_interrupt_ends_it_at_once_whether_it_waits_or_asks(server: ModelServer, tmp_path: Path, fault: str) -> None:
    server.fault, server.retry_after, server.late_seconds = (lambda number: fault), "60", 20.0
    words = [sys.executable, "-c", CHILD, json.dumps(plain(config(server))), str(tmp_path)]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while len(server.asked) < 4:
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=15) == 130
    assert time.monotonic() - begun < 3


def test_a_refusal_whose_body_is_cut_is_that_refusal_and_costs_nothing(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("bloomery.data.hosts._rest", lambda seconds, stop: waits.append(seconds))
    server.fault, server.retry_after = (lambda number: "429cut" if number == 0 else ""), "7"
    stats = run(config(server, concurrency=1), tmp_path)
    assert waits == [7.0]
    assert (stats["conversations"], stats["lost_requests"]) == (5, 0)
    assert stats["input_tokens"] + stats["output_tokens"] == sum(server.charged)


def test_an_answer_that_comes_a_byte_at_a_time_is_given_up_after_the_seconds_of_a_request(
    server: ModelServer, tmp_path: Path
) -> None:
    server.fault = lambda number: "drip" if number == 0 else ""
    begun = time.monotonic()
    stats = run(config(server, concurrency=1, timeout_seconds=0.5), tmp_path)
    assert time.monotonic() - begun < 5
    assert (stats["conversations"], stats["lost_requests"]) == (5, 1)


def test_an_answer_that_is_too_large_is_told_and_counts_as_paid(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_ANSWER_BYTES", 2**20)
    server.reply = lambda messages: "a" * 2**21
    with pytest.raises(DataError, match=r"the answer has more than 1,048,576 bytes.*\(2 attempts\)"):
        run(config(server, concurrency=1, attempts=2), tmp_path)
