"""
Do clients of `bloomery serve` get their answers while other clients attack the server, and does its memory stay flat?

    python benchmarks/serve_soak.py [--json] [--quick] [--seconds 120] [--clients 64] [--hostile 0.05]

Starts the server on loopback with a tiny model. Honest clients ask for short answers, streamed and not, without a
pause; at least three clients are hostile and repeat the attacks of ATTACKS in turn. The exit code is 1, with the
reasons on stderr, if an honest client gets any status but 200 or 429, if a greedy answer differs from the answer
before the load, if `/health` does not answer within five seconds, if memory, file descriptors or threads do not return
to their values before the load, or if the server does not end on SIGTERM. --quick: 10 seconds, 12 clients.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from demo import commit
from stand_in import ROOT

from bloomery.core.pipeline import machine, versions

sys.path.insert(0, str(ROOT))
made = importlib.import_module("tests.weights.made")

MODEL, CONTEXT, MAX_TOKENS, PATH = "soak", 256, 16, "/v1/chat/completions"
QUESTIONS = ("Hi", "What is a lamp?", "Count to 12.", "Größe?", "def add(a, b):", "Where is the key?")
MB = 2**20
MAX_SERVER_BYTES = 4096 * MB
"""The server cannot allocate more, so that an attack that works does not end other programs of the machine."""
START_SECONDS, ANSWER_SECONDS, HEALTH_SECONDS, RETURN_SECONDS, STOP_SECONDS = 60, 60, 5, 40, 20
MAX_GROWTH, MAX_GROWTH_BYTES = 1.3, 64 * MB
SLOW_SECONDS, OPEN = 40, "open until the client left"
TOKEN = re.compile(rb'"delta":\s*\{[^}]*"content":\s*"[^"]')
Payload = Iterable[bytes | float]
"""What to send; a number is a pause in seconds."""


def chat(content: str, **fields: Any) -> bytes:
    """The body of a request with one message."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


def head(length: int | None) -> bytes:
    """The headers of a request, with a body of `length` bytes or, for None, in chunks."""
    body = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = (f"POST {PATH} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", body, "", "")
    return "\r\n".join(lines).encode()


def whole(body: bytes, times: int = 1) -> Payload:
    return [(head(len(body)) + body) * times]


def huge_body() -> Payload:
    start, end = chat("|").split(b"|")
    return [head(len(start) + 50_000_000 + len(end)), start, *[b"lamp " * 10_000] * 1000, end]


@dataclass(frozen=True)
class Attack:
    """What a hostile client sends, what it waits for and how long, before it disconnects."""

    payload: Callable[[], Payload]
    until: bytes = b"HTTP/1.1 "
    reads: bool = True
    max_seconds: float = ANSWER_SECONDS
    slow: bool = False  # the request never ends, so that the server has to end it


HALF = [head(1000), chat("x" * 400)]
ONES = b"[" + b"1," * 99_000 + b"1]"
FIELDS = json.dumps({f"k{number}": 1 for number in range(24_000)}).encode()
PAIR = b'{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}, '
STREAM = chat("Hi", stream=True, max_tokens=CONTEXT)
CHUNK = b"c350\r\n" + b"lamp " * 10_000 + b"\r\n"
ATTACKS = {
    "body of 50 MB": Attack(huge_body),
    "endless chunked body": Attack(lambda: chain([head(None)], cycle([CHUNK, 0.01])), slow=True),
    "a byte of the headers each second": Attack(
        lambda: chain(*((bytes([byte]), 1.0) for byte in head(100))), slow=True
    ),
    "half a body, then silence": Attack(lambda: HALF, slow=True),
    "cut in the request": Attack(lambda: HALF, max_seconds=0.2),
    "cut in a streamed answer": Attack(lambda: whole(STREAM), until=b"data: "),
    "streamed answers never read": Attack(lambda: whole(STREAM, 8), reads=False, max_seconds=10),
    "JSON nested 100,000 deep": Attack(lambda: whole(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "invalid UTF-8": Attack(lambda: whole(chat("|").replace(b"|", b"\xff\xfe\xc3\x28\xed\xa0\x80"))),
    "prompt of 100 contexts": Attack(lambda: whole(chat("lamp " * (CONTEXT * 100)))),
    "a content of 99,001 numbers": Attack(lambda: whole(chat("|").replace(b'"|"', ONES), 4)),
    "a stop of 99,001 numbers": Attack(lambda: whole(chat("Hi", stop="|").replace(b'"|"', ONES))),
    "a part of 24,000 fields": Attack(lambda: whole(chat("|").replace(b'"|"', b"[" + FIELDS + b"]"))),
    "stream options of 24,000 fields": Attack(
        lambda: whole(chat("Hi", stream_options=0).replace(b": 0", b":" + FIELDS))
    ),
    "100,001 messages": Attack(lambda: whole(chat("Hi").replace(b"[", b"[" + PAIR * 50_000))),
}


class Usage(NamedTuple):
    rss_bytes: int
    descriptors: int
    threads: int


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path
    port: int
    url: str

    def usage(self) -> Usage:
        """What the server and its descendants hold."""
        totals, pids = Usage(0, 0, 0), [self.process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):  # a process that has just ended
                proc = Path(f"/proc/{pid}")
                for task in (proc / "task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
                rss = int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
                handles = (len(os.listdir(proc / kind)) for kind in ("fd", "task"))
                totals = Usage(*map(sum, zip(totals, (rss, *handles), strict=True)))
        return totals


def start(runs: Path, log: Path) -> Server:
    """The server in a process group of its own, once it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bloomery.cli", "serve", "--runs", str(runs), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (MAX_SERVER_BYTES, MAX_SERVER_BYTES))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if f"127.0.0.1:{port}" in log.read_text(encoding="utf-8"):
            return Server(process, log, port, f"http://127.0.0.1:{port}")
        time.sleep(0.05)
    process.kill()
    sys.exit(f"the server did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


def text_of(body: str, *, stream: bool) -> str:
    """The text of an answer. Raises ValueError for a stream that does not end with [DONE]."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    *events, done, _ = body.split("\n\n")
    if done != "data: [DONE]":
        raise ValueError(f"the stream ended with {done[:200]}")
    return "".join(json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events)


@dataclass
class Soak:
    server: Server
    expected: dict[str, str] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    attacks: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in ATTACKS})
    health_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    """From the request to the first token of a streamed answer. A wait for a place in line counts."""
    gap_seconds: list[float] = field(default_factory=list)
    """Between tokens of a streamed answer."""
    rss_bytes: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def over(self, end: float) -> bool:
        return time.monotonic() >= end or self.server.process.poll() is not None

    async def question(self, client: httpx.AsyncClient, number: int) -> None:
        """An honest request, repeated after Retry-After for as long as the server is busy."""
        content, stream, greedy = QUESTIONS[number % 6], number // 6 % 2 == 1, number % 5 != 4
        body = chat(content, stream=stream, max_tokens=MAX_TOKENS, temperature=0 if greedy else 0.7)
        try:
            while (response := await self.post(client, body)).status_code == 429:
                self.answers["429"] += 1
                await asyncio.sleep(min(float(response.headers["Retry-After"]), 10))
            if response.status_code != 200:
                self.failures[f"an honest client got {response.status_code}: {response.text[:200]}"] += 1
                return
            text = text_of(response.text, stream=stream)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.failures[f"an honest client got no answer: {type(error).__name__} {error}".rstrip()] += 1
            await asyncio.sleep(0.2)
            return
        self.answers["streamed" if stream else "whole"] += 1
        if greedy and text != self.expected.setdefault(content, text):
            self.failures[f"a greedy answer to {content!r} changed"] += 1

    async def post(self, client: httpx.AsyncClient, body: bytes) -> httpx.Response:
        """The whole reply. When the tokens of a stream arrive is noted."""
        began, pieces, arrived = time.monotonic(), [], list[float]()
        async with client.stream("POST", self.server.url + PATH, content=body) as response:
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                if TOKEN.search(piece):
                    arrived.append(time.monotonic())
        self.first_token_seconds += [one - began for one in arrived[:1]]
        self.gap_seconds += [later - earlier for earlier, later in pairwise(arrived)]
        return httpx.Response(response.status_code, headers=response.headers, content=b"".join(pieces))

    async def honest(self, client: httpx.AsyncClient, number: int, end: float) -> None:
        while not self.over(end):
            await self.question(client, number)
            number += 1

    async def hostile(self, number: int, end: float, slow_seconds: float) -> None:
        while not self.over(end):
            name = list(ATTACKS)[number % len(ATTACKS)]
            outcome = await attacked(self.server.port, ATTACKS[name], slow_seconds)
            self.attacks[name][outcome] += 1
            if ATTACKS[name].slow and outcome == OPEN and slow_seconds >= SLOW_SECONDS:
                self.failures[f"{name}: the server did not end the request in {SLOW_SECONDS} s"] += 1
            number += 1
            await asyncio.sleep(0.1)

    async def load(self, clients: int, num_hostile: int, seconds: float) -> None:
        end, slow_seconds = time.monotonic() + seconds, min(seconds / 3, SLOW_SECONDS)
        attacks = [self.hostile(i * len(ATTACKS) // num_hostile, end, slow_seconds) for i in range(num_hostile)]
        async with connected() as client:
            honest = [self.honest(client, i, end) for i in range(clients - num_hostile)]
            try:
                await asyncio.wait_for(asyncio.gather(*attacks, *honest), seconds + 3 * ANSWER_SECONDS)
            except TimeoutError:
                self.failures["the clients still waited after the load"] += 1

    async def warm_up(self, clients: int) -> None:
        """Keep the greedy answers before the load, and let the server start all its threads."""
        async with asyncio.timeout(4 * ANSWER_SECONDS), connected() as client:
            for number in range(24):
                await self.question(client, number)
            await asyncio.gather(*(self.question(client, number) for number in range(clients)))
        await asyncio.sleep(0.5)

    def watch(self) -> None:
        sampled = -math.inf
        while not self.ended.wait(0.2):
            began = time.monotonic()
            try:
                httpx.get(f"{self.server.url}/health", timeout=HEALTH_SECONDS, verify=False).raise_for_status()
            except httpx.HTTPError as error:
                self.failures[f"/health failed: {type(error).__name__}"] += 1
            self.health_seconds.append(time.monotonic() - began)
            if time.monotonic() > sampled + 5:
                sampled = time.monotonic()
                self.rss_bytes.append(self.server.usage().rss_bytes)

    def excess(self, before: Usage, after: Usage) -> list[str]:
        """What the server still holds and should not."""
        limits = (MAX_GROWTH * before.rss_bytes + MAX_GROWTH_BYTES, before.descriptors + 8, before.threads + 8)
        rows = zip(Usage._fields, before, after, limits, strict=True)
        return [f"{name}: {old:,} before, {new:,} after" for name, old, new, limit in rows if new > limit]


def connected() -> httpx.AsyncClient:
    """A client that opens a connection for each request."""
    limits, headers = httpx.Limits(max_keepalive_connections=0), {"Content-Type": "application/json"}
    return httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits, trust_env=False, verify=False, headers=headers)


async def attacked(port: int, attack: Attack, slow_seconds: float) -> str:
    """Attack once, and disconnect. Returns the status of the server's answer, or how the attack ended."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), ANSWER_SECONDS)
    except (OSError, TimeoutError) as error:
        return f"no connection: {type(error).__name__}"
    if not attack.reads:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    received = asyncio.create_task(reader.readuntil(attack.until))
    sending = asyncio.create_task(send(writer, attack.payload()))
    try:
        await asyncio.wait({received}, timeout=slow_seconds if attack.slow else attack.max_seconds)
        if not received.done():
            return OPEN
        await received
        return "cut in the stream" if attack.until == b"data: " else (await reader.readexactly(3)).decode()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return "closed by the server"
    finally:
        received.cancel()
        sending.cancel()
        await asyncio.gather(received, sending, return_exceptions=True)
        writer.transport.abort()


async def send(writer: asyncio.StreamWriter, payload: Payload) -> None:
    with contextlib.suppress(OSError):  # the server may refuse before it has read everything
        for piece in payload:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)


def measured(folder: Path, seconds: float, clients: int, share: float) -> dict[str, Any]:
    made.run(folder / "runs" / MODEL, "finetune")
    made.model(folder / "runs" / MODEL / made.FOLDERS["finetune"] / "model", context=CONTEXT)
    server = start(folder / "runs", folder / "log")
    soak, num_hostile = Soak(server), max(3, math.ceil(share * clients))
    watcher = threading.Thread(target=soak.watch)
    try:
        asyncio.run(soak.warm_up(clients))
        if soak.failures:
            sys.exit(f"failed before the load: {dict(soak.failures)}")
        before = server.usage()
        for kept in (soak.answers, soak.first_token_seconds, soak.gap_seconds):
            kept.clear()
        watcher.start()
        began = time.monotonic()
        asyncio.run(soak.load(clients, num_hostile, seconds))
        lasted, answers = time.monotonic() - began, dict(soak.answers)
        soak.ended.set()
        watcher.join()
        after, ready = server.usage(), time.monotonic()
        while soak.excess(before, after) and not soak.over(ready + RETURN_SECONDS):
            time.sleep(0.2)
            after = server.usage()
        released = time.monotonic() - ready
        if server.process.poll() is None:
            soak.failures.update(soak.excess(before, after))
            asyncio.run(soak.warm_up(1))
        code = stopped(soak)
    finally:
        soak.ended.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    log = server.log.read_text(encoding="utf-8", errors="replace").split("Traceback (most recent call last)")
    notes = {"commit": commit(), "seconds": round(lasted, 1), "clients": clients, "hostile": num_hostile} | {
        "answers": answers,
        "attacks": {name: dict(outcomes) for name, outcomes in soak.attacks.items()},
        "health": {"requests": len(soak.health_seconds), **milliseconds(soak.health_seconds)},
        "first_token": {"answers": len(soak.first_token_seconds), **milliseconds(soak.first_token_seconds)},
        "gap": milliseconds(soak.gap_seconds),
        "rss_mb_every_5_s": [rss // MB for rss in soak.rss_bytes],
        "before_and_after": [before._asdict(), after._asdict()],
        "seconds_until_released": round(released, 1),
        "tracebacks_in_log": [text[:3000] for text in log[1:4]],
        "exit_code": code,
        "failures": dict(soak.failures),
    }
    ours = {"value": answers.get("streamed", 0) + answers.get("whole", 0), "unit": "answers"}
    result = {"name": "serve_soak", "ours": ours, "peers": {}, "ratio_to_best_peer": None}
    return {**result, "machine": machine(), "versions": versions(), "notes": notes}


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the longest of some times."""
    ordered, spots = sorted(seconds) or [math.nan], {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in spots.items()}


def stopped(soak: Soak) -> int:
    """End the server with SIGTERM. Returns its exit code, as a shell would show it."""
    process = soak.server.process
    if process.poll() is not None:
        soak.failures["the server ended during the load"] += 1
    process.terminate()
    try:
        code = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        soak.failures[f"the server still ran {STOP_SECONDS} s after SIGTERM"] += 1
        process.kill()
        code = process.wait()
    code = code if code >= 0 else 128 - code
    if code not in (0, 130, 143):
        soak.failures[f"the server ended with exit code {code}"] += 1
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    parser.add_argument("--quick", action="store_true")
    for name, default in {"--seconds": 120, "--clients": 64, "--hostile": 0.05}.items():
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    seconds, clients = (10, 12) if options.quick else (options.seconds, options.clients)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(Path(folder), seconds, clients, options.hostile)
    print(json.dumps(result))
    if tracebacks := result["notes"]["tracebacks_in_log"]:
        sys.exit(f"the server logged tracebacks, the first:\n{tracebacks[0]}")
    if failures := result["notes"]["failures"]:
        sys.exit("\n".join(f"{reason} ({count} times)" for reason, count in failures.items()))


if __name__ == "__main__":
    main()
