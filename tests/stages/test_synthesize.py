import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from bloomery.core import io as core_io
from bloomery.core.config import plain
from bloomery.core.errors import DataError, RunError
from bloomery.data.sources import http_client
from bloomery.data.synthesis.config import Synthesize
from bloomery.data.synthesis.generate import Budget
from bloomery.stages import synthesize
from tests.data.synthesis.model_server import ModelServer
from tests.stages.made_synthesis import TOPICS, asks, config, kinds, lines, provider, run


@pytest.mark.slow
@kinds
def test_every_topic_is_asked_once_and_its_answer_is_a_conversation(
    server: ModelServer, tmp_path: Path, kind: str
) -> None:
    stats = run(config(server, kind), tmp_path)
    assert sorted(server.last_asks) == sorted(TOPICS)
    assert {body["path"] for body in server.asked} == {
        "/v1/messages" if kind == "anthropic" else "/v1/chat/completions"
    }
    assert asks(tmp_path) == TOPICS
    for line in lines(tmp_path):
        question, answer = line["messages"]
        assert answer == {"role": "assistant", "content": f"Answer to: {question['content']}"}
        assert line["category"] == "topics"
        assert line["request_ids"][0].startswith(("chatcmpl-", "msg_"))
    assert (stats["input_tokens"], stats["output_tokens"]) == tuple(server.charged)
    assert (stats["conversations"], stats["ended_by"], stats["lost_requests"]) == (5, "count", 0)


def test_disabled_it_asks_nobody_whatever_key_is_in_the_environment(server: ModelServer, tmp_path: Path) -> None:
    assert run(config(server, enabled=False), tmp_path) == {"enabled": False, "conversations": 0}
    assert server.asked == []
    assert lines(tmp_path) == []
    assert Synthesize().enabled is False


def test_the_key_is_that_of_the_named_variable_and_is_in_no_file(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    for number, variable in enumerate(("OPENAI_API_KEY", "MY_KEY", "")):
        run(config(server, provider=provider(server, "openai", key_variable=variable), count=1), tmp_path / str(number))
    run(config(server, "anthropic", count=1), tmp_path / "3")
    assert server.keys[:3] == ["Bearer sk-secret", "Bearer mine", None]
    assert str(server.keys[3]).removeprefix("Bearer ") == "sk-other-secret"
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("*.jsonl"))


@kinds
def test_a_missing_key_is_told_with_its_hint(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    with pytest.raises(DataError, match=r"_API_KEY: there is no API key(?s:.*)export "):
        run(config(server, kind), tmp_path)


UNKNOWN = ("cut", "chunk", "half", "deep", "numbers", "html", "silent")
FAULTS = ("",) * 6 + ("429", "500", "503", "529", *UNKNOWN)


@pytest.mark.slow
@kinds
def test_two_hundred_conversations_come_through_faults_with_none_lost_and_none_paid_twice(
    server: ModelServer, tmp_path: Path, kind: str
) -> None:
    drawn = random.Random(kind)
    faults = [*UNKNOWN, *(drawn.choice(FAULTS) for _ in range(20_000))]
    server.fault = lambda number: faults[number]
    settings: dict[str, Any] = {"topics": [], "preset": "seed-1386", "count": 200, "concurrency": 8, "attempts": 60}
    stats = run(config(server, kind, max_tokens=10_000_000, **settings), tmp_path)
    assert stats["conversations"] == 200
    assert len(set(asks(tmp_path))) == 200
    assert set(server.answered.values()) == {1}, "what arrived was asked again"
    turns = sum(len(line["messages"]) // 2 for line in lines(tmp_path))
    assert len(server.answered) == turns
    unknown = sum(faults[number] in UNKNOWN for number in range(len(server.asked)))
    assert stats["lost_requests"] == unknown > 20
    assert stats["input_tokens"] + stats["output_tokens"] >= sum(server.charged)
    assert server.most_at_once <= 8
    multi = [line for line in lines(tmp_path) if line["category"] == "multi_turn"]
    assert len(multi) == 20
    assert all(len(line["messages"]) == 6 for line in multi)


@kinds
def test_an_answer_that_comes_too_late_is_asked_for_again_by_the_same_name_and_counts_as_paid(
    server: ModelServer, tmp_path: Path, kind: str
) -> None:
    server.fault = lambda number: "late" if number == 0 else ""
    stats = run(config(server, kind, timeout_seconds=server.late_seconds / 2, concurrency=1), tmp_path)
    assert stats["conversations"] == len(TOPICS)
    assert server.names[0] == server.names[1]
    assert stats["lost_requests"] >= 1
    assert stats["input_tokens"] + stats["output_tokens"] > sum(server.charged)


def test_the_weights_of_the_preset_are_kept(server: ModelServer, tmp_path: Path) -> None:
    run(config(server, topics=[], preset="seed-1386", count=100, max_tokens=10**7), tmp_path)
    categories = [line["category"] for line in lines(tmp_path)]
    wanted = {"conversational": 20, "general_knowledge": 20, "coding": 12, "multi_turn": 10, "summarization": 3}
    assert {name: categories.count(name) for name in wanted} == wanted


def test_a_later_turn_is_asked_with_all_turns_before_and_the_system_is_not_kept(
    server: ModelServer, tmp_path: Path
) -> None:
    category = {
        "name": "two",
        "system": "Be short.",
        "prompts": ["What is {thing}?"],
        "slots": [{"name": "thing", "values": ["a", "b"]}],
        "follow_ups": [["Why?"]],
    }
    run(config(server, topics=[], categories=[category], concurrency=1), tmp_path)
    roles = [[message["role"] for message in body["messages"]] for body in server.asked[:2]]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert [[message["role"] for message in line["messages"]] for line in lines(tmp_path)] == [
        ["user", "assistant"] * 2
    ] * 2
    assert lines(tmp_path)[0]["system"] == "Be short."


def in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


RETRY_AFTER: dict[str, Callable[[], str]] = {
    "seconds": lambda: "7",
    "a fraction": lambda: "7.5",
    "a date": lambda: format_datetime(in_seconds(8), usegmt=True),
    "the date of RFC 850": lambda: in_seconds(8).strftime("%A, %d-%b-%y %H:%M:%S GMT"),
    "the date of asctime": lambda: in_seconds(8).strftime("%a %b %e %H:%M:%S %Y"),
}


@kinds
@pytest.mark.parametrize("form", RETRY_AFTER)
def test_the_server_says_how_long_to_wait(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    server.fault, server.retry_after = (lambda number: "429" if number == 0 else ""), RETRY_AFTER[form]()
    waits: list[float] = []
    monkeypatch.setattr("bloomery.data.sources.http_client._rest", lambda seconds, stop: waits.append(seconds))
    run(config(server, kind, count=1), tmp_path)
    monkeypatch.undo()
    time.tzset()
    assert len(waits) == 1
    assert 6.0 <= waits[0] <= 8.0


@pytest.mark.parametrize("said", ["soon", "-5", "Mon, 99 Foo 2026 99:00:00 GMT", "9" * 400, "\u0665"])
def test_a_time_to_wait_that_is_none_is_no_reason_to_stop(said: str) -> None:
    asked_for = http_client.retry_after({"Retry-After": said})
    assert asked_for is None or asked_for >= 0


@kinds
def test_what_fails_for_good_is_told_and_what_came_before_is_not_asked_again(
    server: ModelServer, tmp_path: Path, kind: str
) -> None:
    server.fault = lambda number: "401" if number >= 3 else ""
    with pytest.raises(DataError, match=r"(?s)HTTP 401: told to say 401.*Earlier answers are kept") as caught:
        run(config(server, kind, concurrency=1), tmp_path)
    assert "secret" not in str(caught.value)
    assert len(server.asked) == 4
    server.fault = lambda number: ""
    stats = run(config(server, kind, concurrency=1), tmp_path)
    assert server.last_asks == [*TOPICS[:4], *TOPICS[3:]]
    assert asks(tmp_path) == TOPICS
    assert (stats["input_tokens"], stats["output_tokens"]) == tuple(server.charged)


def test_an_endpoint_that_nobody_listens_at_is_named(server: ModelServer, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(DataError, match=rf"{url}: the connection failed.*\(2 attempts\)"):
            run(config(server, provider=provider(server, "openai", address=url), attempts=2), tmp_path)


def test_a_redirect_takes_neither_key_nor_question_along(server: ModelServer, tmp_path: Path) -> None:
    server.fault = lambda number: "307"
    with pytest.raises(DataError, match="is redirected to"):
        run(config(server, attempts=2), tmp_path)
    assert 1 <= len(server.asked) <= 4, "nothing was asked twice"


def test_conversations_that_begin_with_the_same_question_pay_for_it_once(server: ModelServer, tmp_path: Path) -> None:
    def slowly(messages: list[dict[str, str]]) -> str:
        time.sleep(0.05)
        return f"Answer {len(messages)} to: {messages[-1]['content']}"

    server.reply = slowly
    categories = [{"name": f"c{n}", "prompts": ["Same?"], "follow_ups": [[f"And {n}?"]] if n else []} for n in range(4)]
    stats = run(config(server, topics=[], categories=categories, concurrency=4, count=4), tmp_path)
    assert server.last_asks.count("Same?") == 1
    assert len(server.asked) == 4
    assert (stats["conversations"], stats["rejected"]) == (1, {"duplicate": 3})
    assert stats["input_tokens"] + stats["output_tokens"] == sum(server.charged)


@kinds
def test_half_a_surrogate_pair_in_an_answer_is_rejected_and_paid_for_once(
    server: ModelServer, tmp_path: Path, kind: str
) -> None:
    server.reply = lambda messages: "a\ud83d" if messages[-1]["content"] == "Why?" else "yes"
    assert run(config(server, kind), tmp_path)["rejected"] == {"not_unicode": 1}
    assert run(config(server, kind), tmp_path)["rejected"] == {"not_unicode": 1}
    assert len(server.asked) == len(TOPICS)


# --- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_of_tokens_is_never_passed_whatever_fails(server: ModelServer, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    server.fault = lambda number: drawn.choice(("", "", "", "cut", "500", "half"))
    server.reply = lambda messages: "word " * drawn.randrange(1, 60) + messages[-1]["content"]
    budget = drawn.randrange(2_000, 9_000)
    settings: dict[str, Any] = {
        "topics": [],
        "preset": "seed-1386",
        "count": 200,
        "max_answer_tokens": 60,
        "concurrency": 5,
    }
    stats = run(config(server, max_tokens=budget, attempts=50, **settings), tmp_path)
    assert sum(server.charged) <= stats["input_tokens"] + stats["output_tokens"] <= budget
    assert stats["ended_by"] == "budget"
    assert 0 < stats["conversations"] < 200


def test_the_budget_of_dollars_is_never_passed_and_what_it_cost_is_told(server: ModelServer, tmp_path: Path) -> None:
    price = {"input_dollars": 100.0, "output_dollars": 500.0}
    asked = provider(server, "openai", price=price)
    settings: dict[str, Any] = {
        "provider": asked,
        "max_answer_tokens": 20,
        "topics": [],
        "preset": "seed-1386",
        "count": 1000,
    }
    stats = run(config(server, max_dollars=1.0, max_tokens=10**8, **settings), tmp_path)
    cost = (server.charged[0] * 100 + server.charged[1] * 500) / 1e6
    assert stats["dollars"] == pytest.approx(cost)
    assert 0.8 < cost <= 1.0
    assert stats["ended_by"] == "budget"


def test_a_larger_budget_pays_only_for_what_is_missing(server: ModelServer, tmp_path: Path) -> None:
    first = run(config(server, max_tokens=470, max_answer_tokens=300), tmp_path / "08-synthesize-aaaa")
    assert 0 < first["conversations"] < 5
    asked = len(server.asked)
    stats = run(config(server, max_tokens=10_000, max_answer_tokens=300), tmp_path / "08-synthesize-bbbb")
    assert stats["conversations"] == 5
    assert len(server.asked) == 5
    assert sorted(server.last_asks[asked:] + server.last_asks[:asked]) == sorted(TOPICS)
    assert stats["input_tokens"] + stats["output_tokens"] == sum(server.charged)


def test_another_question_or_another_length_is_another_request(server: ModelServer, tmp_path: Path) -> None:
    run(config(server), tmp_path / "08-synthesize-aaaa")
    run(config(server, max_answer_tokens=99), tmp_path / "08-synthesize-bbbb")
    assert len(server.asked) == 10


# --- death ------------------------------------------------------------------------------------------------------------

CHILD = """
import json, sys
from pathlib import Path
from bloomery.core.config import build
from bloomery.data.sources import http_client
from bloomery.data.synthesis.config import Synthesize
from bloomery.stages import synthesize
http_client.FIRST_WAIT_SECONDS = 0.01
synthesize.run(build(Synthesize, json.loads(sys.argv[1])), {}, Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_every_conversation_and_no_answer_paid_twice(
    server: ModelServer, tmp_path: Path
) -> None:
    drawn = random.Random(1)
    server.fault = lambda number: "500" if drawn.random() < 0.2 else ""

    def slowly(messages: list[dict[str, str]]) -> str:
        time.sleep(0.03)
        return "Answer to: " + messages[-1]["content"]

    server.reply = slowly
    given: dict[str, Any] = {
        "topics": [],
        "preset": "seed-1386",
        "count": 60,
        "concurrency": 3,
        "max_tokens": 10**7,
        "attempts": 20,
    }
    made = config(server, **given)
    words = [sys.executable, "-c", CHILD, json.dumps(plain(made)), str(tmp_path)]
    for _ in range(3):
        child = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        before = len(server.answered)
        while len(server.answered) < before + 8 and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    stats = run(made, tmp_path)
    assert stats["conversations"] == 60
    ledger = lines(tmp_path, "requests.jsonl")
    names = [line["request"] for line in ledger if "answer" in line]
    assert len(names) == len(set(names))
    again = {name: count for name, count in server.answered.items() if count > 1}
    assert sum(again.values()) - len(again) <= 3 * 3, "only what was under way at a kill may be asked again"
    assert stats["input_tokens"] + stats["output_tokens"] >= sum(server.charged)


@pytest.mark.parametrize("torn", ['{"request": "a", "at_m', "{", '{"request": "x"}'])
def test_a_line_that_a_dying_process_left_torn_is_cut_off(server: ModelServer, tmp_path: Path, torn: str) -> None:
    run(config(server, count=2), tmp_path)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write(torn)
    stats = run(config(server, count=3), tmp_path)
    assert (stats["conversations"], len(server.asked)) == (3, 3)


ODD = ['{"request": 7}', '{"request": "a", "answer": {}}', '{"request": "a", "at_most": ["1", 2]}', "[]", "\\"]


@pytest.mark.parametrize("line", ODD)
def test_a_damaged_line_of_the_ledger_is_named(server: ModelServer, tmp_path: Path, line: str) -> None:
    run(config(server, count=2), tmp_path)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"requests\.jsonl:5: is not a valid line of a ledger"):
        run(config(server, count=3), tmp_path)


def test_one_changed_bit_of_an_answer_that_was_kept_is_never_taken_for_it(server: ModelServer, tmp_path: Path) -> None:
    run(config(server, count=2), tmp_path)
    ledger = tmp_path / "requests.jsonl"
    whole = ledger.read_bytes()
    answers = [number for number, line in enumerate(whole.split(b"\n")) if b'"answer"' in line]
    for place in range(0, len(whole), 7):
        if whole[place : place + 1] == b"\n":
            continue
        ledger.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"requests\.jsonl:[1-4]: is not a valid line of a ledger"):
            Budget(tmp_path, config(server, count=2))
    assert len(answers) == 2
    ledger.write_bytes(whole)
    assert run(config(server, count=2), tmp_path)["conversations"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_with_its_hint(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, flags: int) -> int:
        return os.open("/dev/full" if Path(path).name == synthesize.FILE + core_io.PARTIAL else path, flags, 0o666)

    with monkeypatch.context() as patch:
        patch.setattr(core_io, "open_own", opened)
        with pytest.raises(
            RunError, match=r"(?s)conversations\.jsonl.*cannot be written: No space left.*Free some space"
        ):
            run(config(server), tmp_path)
    assert run(config(server), tmp_path)["conversations"] == 5
    assert len(server.asked) == 5
