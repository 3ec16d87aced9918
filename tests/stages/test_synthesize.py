import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bloomery.core.config import build, plain
from bloomery.core.errors import ConfigError, DataError, RunError
from bloomery.stages import synthesize
from bloomery.stages.config import Synthesize

Reply = Callable[[BaseHTTPRequestHandler, int], None]
"""(handler, number of the request from 0)."""
TOPICS = ["Name a river.", "And a lake.", "Größe?"]


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def completion(content: Any, tokens: Any = 30) -> bytes:
    message = {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": {"total_tokens": tokens}}
    return json.dumps(message).encode()


def good(handler: BaseHTTPRequestHandler, number: int) -> None:
    send(handler, completion(f"answer {number}"))


class Endpoint(ThreadingHTTPServer):
    """A server on this machine that remembers what it was asked."""

    def __init__(self) -> None:
        self.reply: Reply = good
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.asked.append({"path": self.path, **json.loads(body)})
                endpoint.keys.append(self.headers["Authorization"])
                endpoint.reply(self, len(endpoint.asked) - 1)

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def topics(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def config(server: Endpoint, **settings: Any) -> Synthesize:
    tree = {"enabled": True, "endpoint": server.url, "model": "m", "topics": TOPICS, "count": 5, **settings}
    return build(Synthesize, tree)


def run(config: Synthesize, out: Path) -> dict[str, Any]:
    return synthesize.run(config, {}, out)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / synthesize.FILE).read_text(encoding="utf-8").splitlines()]


def test_every_answer_is_a_conversation_and_topics_are_asked_in_turn(endpoint: Endpoint, tmp_path: Path) -> None:
    stats = run(config(endpoint), tmp_path)
    assert endpoint.topics == [*TOPICS, *TOPICS[:2]]
    assert all(body["path"] == "/v1/chat/completions" and body["model"] == "m" for body in endpoint.asked)
    for number, line in enumerate(lines(tmp_path)):
        question = {"role": "user", "content": TOPICS[number % 3]}
        assert line["messages"] == [question, {"role": "assistant", "content": f"answer {number}"}]
        assert line["tokens"] == 30
    assert stats == {"enabled": True, "conversations": 5, "tokens": 150, "model": "m"}


def test_disabled_it_asks_nobody_whatever_key_is_in_the_environment(endpoint: Endpoint, tmp_path: Path) -> None:
    stats = run(config(endpoint, enabled=False), tmp_path)
    assert stats == {"enabled": False, "conversations": 0}
    assert endpoint.asked == []
    assert lines(tmp_path) == []
    assert Synthesize().enabled is False


def test_the_key_is_that_of_the_named_variable_or_none(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    for number, variable in enumerate(("OPENAI_API_KEY", "MY_KEY", "NOT_SET", "")):
        (out := tmp_path / str(number)).mkdir()
        run(config(endpoint, key_variable=variable, count=1), out)
    assert endpoint.keys == ["Bearer sk-secret", "Bearer mine", None, None]
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("*.jsonl"))


def test_a_run_that_died_pays_for_nothing_twice(endpoint: Endpoint, tmp_path: Path) -> None:
    def failing(handler: BaseHTTPRequestHandler, number: int) -> None:
        good(handler, number) if number != 3 else send(handler, b"busy", 503)

    endpoint.reply = failing
    with pytest.raises(DataError, match=r"(?s)refused: HTTP Error 503.*What came so far is kept"):
        run(config(endpoint), tmp_path)
    kept = lines(tmp_path)
    assert len(kept) == 3
    stats = run(config(endpoint), tmp_path)
    assert endpoint.topics == [*TOPICS, TOPICS[0], TOPICS[0], TOPICS[1]]  # the fourth was refused, and asked again
    assert lines(tmp_path)[:3] == kept
    assert len(lines(tmp_path)) == 5
    assert stats["tokens"] == 150
    run(config(endpoint), tmp_path)
    assert len(endpoint.asked) == 6


@pytest.mark.parametrize("torn", ['{"messages": [{"role": "us', "{", '{"messages": []}'])
def test_a_line_that_a_dying_process_left_torn_is_cut_off_and_asked_again(
    endpoint: Endpoint, tmp_path: Path, torn: str
) -> None:
    run(config(endpoint, count=2), tmp_path)
    kept = lines(tmp_path)
    with (tmp_path / synthesize.FILE).open("a") as file:
        file.write(torn)
    run(config(endpoint, count=3), tmp_path)
    assert lines(tmp_path)[:2] == kept
    assert endpoint.topics == TOPICS
    assert len(lines(tmp_path)) == 3


def test_no_request_is_made_once_the_budget_is_reached(endpoint: Endpoint, tmp_path: Path) -> None:
    settings = {"count": 50, "max_tokens": 100, "max_answer_tokens": 50}
    stats = run(config(endpoint, **settings), tmp_path)
    assert [body["max_tokens"] for body in endpoint.asked] == [50, 50, 40, 10]
    assert (stats["conversations"], stats["tokens"]) == (4, 120)
    assert run(config(endpoint, **settings), tmp_path) == stats
    assert len(endpoint.asked) == 4  # what earlier attempts spent counts


WRONG: list[tuple[str, Reply, str]] = [
    ("nothing", lambda h, _: send(h, b""), "gave no chat completion"),
    ("no JSON", lambda h, _: send(h, b"<html>"), "gave no chat completion"),
    ("no UTF-8", lambda h, _: send(h, b'"\xff"'), "gave no chat completion"),
    ("a list", lambda h, _: send(h, b"[1]"), "gave no chat completion: TypeError"),
    ("null", lambda h, _: send(h, b"null"), "gave no chat completion: TypeError"),
    ("no choices", lambda h, _: send(h, b'{"choices": []}'), "gave no chat completion: IndexError"),
    ("an error", lambda h, _: send(h, b'{"error": "no model m"}'), "gave no chat completion: KeyError"),
    ("no usage", lambda h, _: send(h, b'{"choices": [{"message": {"content": "a"}}]}'), "KeyError('usage')"),
    ("usage of words", lambda h, _: send(h, completion("a", "many")), "gave no chat completion: ValueError"),
    ("a tool call", lambda h, _: send(h, completion(None)), "gave an answer without text"),
    ("no such page", lambda h, _: send(h, b"", 404), "refused: HTTP Error 404"),
    ("no permission", lambda h, _: send(h, b"", 401), "refused: HTTP Error 401"),
    ("half an answer", lambda h, _: send(h, completion("a")[:9], length=500), "did not answer: IncompleteRead"),
    ("no answer", lambda h, _: h.connection.shutdown(socket.SHUT_RDWR), "did not answer: Remote end closed"),
]


@pytest.mark.parametrize(("reply", "told"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_no_answer_is_an_error_with_its_cure_and_what_came_before_is_kept(
    endpoint: Endpoint, tmp_path: Path, reply: Reply, told: str
) -> None:
    endpoint.reply = lambda handler, number: good(handler, number) if number < 2 else reply(handler, number)
    with pytest.raises(DataError) as caught:
        run(config(endpoint), tmp_path)
    assert caught.value.what.startswith(told) or told in caught.value.what
    assert caught.value.where == f"{endpoint.url}/chat/completions"
    assert caught.value.cure == "What came so far is kept. Run the recipe again when the endpoint answers."
    assert len(lines(tmp_path)) == 2
    assert "sk-secret" not in str(caught.value)


def test_an_endpoint_that_nobody_listens_at_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(DataError, match=f"{url}/chat/completions: did not answer"):
            run(config(endpoint, endpoint=url + "/"), tmp_path)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"topics": []}, "topics is empty"),
        ({"endpoint": "127.0.0.1/v1"}, "endpoint '127.0.0.1/v1' is no address"),
        ({"endpoint": "file:///etc/passwd"}, "endpoint 'file:///etc/passwd' is no address"),
    ],
)
def test_settings_with_which_nobody_can_be_asked_are_refused_before_anything_runs(
    settings: dict[str, Any], told: str
) -> None:
    build(Synthesize, settings)
    with pytest.raises(ConfigError, match=told):
        build(Synthesize, {"enabled": True, "topics": TOPICS, **settings})


def test_the_name_of_the_key_makes_no_other_conversations() -> None:
    one, two = (plain(Synthesize(key_variable=name), stable_only=True) for name in ("A", "B"))
    assert one == two


def test_a_full_disk_is_told_with_its_cure(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesize, "_written", lambda path: [])  # nobody should read /dev/full to its end
    (tmp_path / synthesize.FILE).symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"(?s)conversations\.jsonl: cannot be written: No space left.*Free some space"):
        run(config(endpoint), tmp_path)
    assert len(endpoint.asked) == 1
