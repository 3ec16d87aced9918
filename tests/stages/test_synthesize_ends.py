"""How `synthesize` ends, and what it does not wait for."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core import records, run_dir
from bloomery.core.config import plain
from bloomery.core.errors import DataError
from bloomery.core.io import MANIFEST
from bloomery.data.synthesis import generate
from tests.core.made import manifest
from tests.data.synthesis import model_server
from tests.data.synthesis.model_server import ModelServer
from tests.stages.made_synthesis import TOPICS, config, kinds, lines, provider, run

CHILD = """
import json, signal, sys
from pathlib import Path
from bloomery.core.config import build
from bloomery.data.synthesis.config import Synthesize
from bloomery.stages import synthesize
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is off in what a shell starts in the background
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
    assert time.monotonic() - begun < 40
    assert len(server.asked) == 2
    assert "HTTP 401: told to say 401; it ends when" in re.sub(r"\s+", " ", "".join(capsys.readouterr()))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["429", "late"])
def test_an_interrupt_ends_it_at_once_whether_it_waits_or_asks(server: ModelServer, tmp_path: Path, fault: str) -> None:
    server.fault, server.retry_after, server.late_seconds = (lambda number: fault), "60", 60.0
    words = [sys.executable, "-c", CHILD, json.dumps(plain(config(server))), str(tmp_path)]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while len(server.asked) < 4:
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=120) == 130


def test_a_refusal_whose_body_is_cut_is_that_refusal_and_costs_nothing(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("bloomery.data.sources.http_client._rest", lambda seconds, stop: waits.append(seconds))
    server.fault, server.retry_after = (lambda number: "429cut" if number == 0 else ""), "7"
    stats = run(config(server, concurrency=1), tmp_path)
    assert waits == [7.0]
    assert (stats["conversations"], stats["lost_requests"]) == (5, 0)
    assert stats["input_tokens"] + stats["output_tokens"] == sum(server.charged)


@pytest.mark.slow
def test_an_answer_that_comes_a_byte_at_a_time_is_given_up_after_the_seconds_of_a_request(
    server: ModelServer, tmp_path: Path
) -> None:
    server.fault = lambda number: "drip" if number == 0 else ""
    begun = time.monotonic()
    stats = run(config(server, concurrency=1, timeout_seconds=2), tmp_path)
    assert time.monotonic() - begun < 15
    assert (stats["conversations"], stats["lost_requests"]) == (5, 1)


def test_an_answer_that_is_too_large_is_told_and_counts_as_paid(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MAX_ANSWER_BYTES", 2**20)
    server.reply = lambda messages: "a" * 2**21
    with pytest.raises(DataError, match=r"the answer has more than 1,048,576 bytes.*\(2 attempts\)"):
        run(config(server, concurrency=1, attempts=2), tmp_path)


@kinds
def test_a_connection_that_nobody_takes_costs_nothing(server: ModelServer, tmp_path: Path, kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = provider(server, kind, address=f"http://127.0.0.1:{free.getsockname()[1]}")
        for _ in range(3):
            with pytest.raises(DataError, match=r"Connect.*\(2 attempts\)"):
                run(config(server, provider=nobody, attempts=2, max_tokens=2000), tmp_path)
    stats = run(config(server, provider=provider(server, kind), max_tokens=2000, max_answer_tokens=300), tmp_path)
    assert (stats["conversations"], stats["lost_requests"]) == (5, 0)


@kinds
@pytest.mark.parametrize("key", ["sk-se cret", "sk-sé", "sk-\x07"])
def test_a_key_that_no_header_can_hold_is_told_and_not_shown(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str
) -> None:
    name = "ANTHROPIC_API_KEY" if kind == "anthropic" else "OPENAI_API_KEY"
    monkeypatch.setenv(name, key)
    with pytest.raises(DataError, match=rf"{name}: its \d+ characters are not a valid key") as told:
        run(config(server, kind), tmp_path)
    assert "sk-" not in str(told.value)
    monkeypatch.setenv(name, "sk-1\r\n")  # as a file with other line ends gives it
    assert run(config(server, kind), tmp_path)["conversations"] == 5
    assert {key and key.removeprefix("Bearer ") for key in server.keys} == {"sk-1"}


def test_dollars_are_those_of_the_price_that_each_request_had(server: ModelServer, tmp_path: Path) -> None:
    dear, cheap = (
        provider(server, "openai", model=model, price={"input_dollars": cost, "output_dollars": cost})
        for model, cost in (("large", 1000.0), ("small", 1.0))
    )
    first = run(config(server, provider=dear, max_dollars=10.0), tmp_path / "08-synthesize-aaaa")
    charged = sum(server.charged)
    assert first["dollars"] == pytest.approx(charged / 1e3)
    then = run(config(server, provider=cheap, max_dollars=10.0), tmp_path / "08-synthesize-bbbb")
    assert then["dollars"] == pytest.approx(first["dollars"] + (sum(server.charged) - charged) / 1e6)
    limit = first["dollars"] + 1e-9
    third = config(server, provider=cheap, max_dollars=limit, topics=["Another?"], count=1)
    assert run(third, tmp_path / "08-synthesize-cccc")["ended_by"] == "budget"


def test_what_was_paid_for_outlives_the_folder_that_clean_removes(server: ModelServer, tmp_path: Path) -> None:
    old, new = (tmp_path / f"08-synthesize-{name * 8}" for name in "ab")
    run(config(server), old)
    (tmp_path / records.CURRENT).write_text(json.dumps({"synthesize": new.name}))
    new.mkdir()
    assert run_dir.waste(tmp_path) == []  # the current folder is not done
    core_io.write_json(new / MANIFEST, manifest())
    found = run_dir.waste(tmp_path)
    assert [one.path for one in found] == [old]
    assert run_dir.remove(tmp_path, found).moves
    assert [path.name for path in old.iterdir()] == [generate.FILE] == sorted(run_dir.OUTLIVES)
    assert run_dir.waste(tmp_path) == []
    assert run(config(server, count=4), new)["conversations"] == 4
    assert len(server.asked) == 5


def test_a_question_that_the_server_refuses_is_rejected_where_others_are_answered(
    server: ModelServer, tmp_path: Path
) -> None:
    server.fault = lambda number: "400" if number == 2 else ""
    for _ in range(2):
        stats = run(config(server, concurrency=1), tmp_path)
        assert (stats["conversations"], stats["rejected"]) == (4, {"not_taken": 1})
    assert len(server.asked) == 5
    (rejected,) = lines(tmp_path, "rejected.jsonl")
    assert "told to say 400" in rejected["answers"][0]
    server.fault = lambda number: "400"
    with pytest.raises(DataError, match="told to say 400"):
        run(config(server, max_answer_tokens=99), tmp_path)


def test_a_budget_that_went_to_requests_without_an_answer_is_no_end(server: ModelServer, tmp_path: Path) -> None:
    server.fault = lambda number: "silent"
    asked = config(server, concurrency=1, attempts=2, max_tokens=900, max_answer_tokens=300)
    with pytest.raises(DataError, match=r"\(2 attempts\)"):
        run(asked, tmp_path)
    with pytest.raises(DataError, match="2 requests without an answer count as paid, and the budget"):
        run(asked, tmp_path)


@pytest.mark.parametrize(
    ("stop", "reason"), [("tool_calls", "unfinished"), ("pause_turn", "unfinished"), ("length", "cut")]
)
def test_an_answer_that_did_not_come_to_its_end_is_not_kept(
    server: ModelServer, tmp_path: Path, stop: str, reason: str
) -> None:
    server.stop = stop
    assert run(config(server), tmp_path)["rejected"] == {reason: 5}


def test_a_server_that_counts_no_tokens_is_taken_to_have_needed_the_most(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model_server._completion

    def without(*given: Any) -> bytes:
        found = json.loads(whole(*given))
        found["choices"][0]["message"]["content"] = [
            {"type": "text", "text": "One "},
            {"type": "text", "text": "word."},
        ]
        return json.dumps({name: value for name, value in found.items() if name != "usage"}).encode()

    monkeypatch.setattr(model_server, "_completion", without)
    stats = run(config(server, topics=["Why?"], count=1, max_answer_tokens=30), tmp_path)
    assert (stats["conversations"], stats["output_tokens"]) == (1, 30)
    assert stats["input_tokens"] >= len("Why?")
    assert lines(tmp_path)[0]["messages"][1]["content"] == "One word."
