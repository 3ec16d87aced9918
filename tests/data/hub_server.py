"""
A hub of our own on the loopback, for tests: it speaks the hub's protocol to the hub's own client, and fails on request.

Data sets are dictionaries of bytes, and models are the same at other addresses. Large files are redirected to a second
server, on another port, as the hub's go to its network of caches. Every request is kept, with the bytes of body that
went out, so that a test can say that nothing was sent twice. A fault is used up by the requests that it hits.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE_ROWS = 2
"""Rows of a listing that fit on one page, so that every test turns pages."""
SOCKET_SECONDS = 20.0


@dataclass
class Request:
    method: str
    path: str
    headers: Message
    on_cdn: bool
    body: bytes
    sent: int = 0
    """Bytes of body that went out."""
    at: float = field(default_factory=time.monotonic)


@dataclass
class Fault:
    """
    What goes wrong with the next `times` requests whose path holds `where`.

    `status` answers with it; `cut_after` closes the connection after so many bytes of body; `wrong` changes a byte;
    `no_ranges` sends the whole file whatever is asked; `etag` names another version; `pause` waits before every chunk.
    """

    where: str
    times: int = 1
    method: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    wrong: bool = False
    no_ranges: bool = False
    etag: str = ""
    pause: float = 0.0


@dataclass
class Dataset:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    readers: tuple[str, ...] = ()
    """Tokens that may read it where it is gated."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""


class Hub:
    """The state of both servers. Made by `serving`."""

    endpoint: str
    cdn: str

    def __init__(self, lfs_bytes: int) -> None:
        self.lfs_bytes = lfs_bytes
        self.datasets: dict[str, Dataset] = {}
        self.plain: dict[str, bytes] = {}
        """Files at plain addresses: path -> content."""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()

    def put(self, dataset: str, content: dict[str, bytes], revision: str = "main") -> str:
        """A new commit of a data set, which the revision then is."""
        home = self.datasets.setdefault(dataset, Dataset())
        names = [[path, hashlib.sha256(data).hexdigest()] for path, data in sorted(content.items())]
        commit = hashlib.sha1(json.dumps([dataset, names]).encode()).hexdigest()
        home.commits[commit] = dict(content)
        home.revisions[revision] = commit
        return commit

    def fail(self, where: str, **what: Any) -> None:
        self.faults.append(Fault(where, **what))

    def sent(self, where: str = "") -> int:
        """Bytes of body that went out for paths that hold `where`."""
        with self.lock:
            return sum(request.sent for request in self.requests if where in request.path)

    def asked(self, where: str = "", method: str = "") -> list[Request]:
        with self.lock:
            return [r for r in self.requests if where in r.path and method in ("", r.method)]

    def forget(self) -> None:
        """Start counting anew."""
        with self.lock:
            self.requests.clear()

    def fault(self, request: Request) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.where in request.path and fault.method in ("", request.method):
                    fault.times -= 1
                    return fault
        return Fault("")

    def answer(self, request: Request) -> Answer:
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        if request.on_cdn:
            data = self._blob(path.rpartition("/")[2])
            return self._file(data, hashlib.md5(data).hexdigest())
        if path in self.plain:
            return self._file(self.plain[path], hashlib.md5(self.plain[path]).hexdigest())
        if found := re.fullmatch(
            r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(/.*)?", path
        ):
            dataset, verb, revision, below = found.groups()
            asked = parse_qs(request.body.decode()) if verb == "paths-info" else query
            below = unquote(below or "").strip("/")
            return self._api(dataset, verb or "revision", unquote(revision or "main"), below, asked, path)
        if found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], unquote(found[2]), unquote(found[3]), request)
        return _refusal(404, "", "no such page")

    def _commit(self, dataset: str, revision: str) -> tuple[Dataset, str] | Answer:
        home = self.datasets.get(dataset)
        if home is None:
            return _refusal(401, "RepoNotFound", "Repository not found")
        commit = home.revisions.get(revision, revision)
        return (home, commit) if commit in home.commits else _refusal(404, "RevisionNotFound", "Invalid rev id")

    def _api(
        self, dataset: str, verb: str, revision: str, below: str, query: dict[str, list[str]], address: str
    ) -> Answer:
        found = self._commit(dataset, revision)
        if isinstance(found, Answer):
            return found
        home, commit = found
        if verb == "revision":
            names = [self._sibling(path, data) for path, data in sorted(home.commits[commit].items())]
            told = {"_id": "1", "id": dataset, "sha": commit, "siblings": names, "cardData": home.card, "tags": []}
            return _json(told | {"private": False, "gated": "auto" if home.gated else False, "disabled": False})
        rows = self._rows(home.commits[commit], below)
        if verb == "paths-info":
            return _json([row for row in rows if row["path"] in query.get("paths", [])])
        if not rows:
            return _refusal(404, "EntryNotFound", f"{below} does not exist on {revision}")
        begin = int(query.get("cursor", ["0"])[0])
        page = _json(rows[begin : begin + PAGE_ROWS])
        if begin + PAGE_ROWS < len(rows):
            page.headers["Link"] = f'<{self.endpoint}{address}?recursive=true&cursor={begin + PAGE_ROWS}>; rel="next"'
        return page

    def _sibling(self, path: str, data: bytes) -> dict[str, Any]:
        large = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        lfs = {"lfs": large} if len(data) >= self.lfs_bytes else {}
        return {"rfilename": path, "size": len(data), "blobId": git_name(data), **lfs}

    def _rows(self, content: dict[str, bytes], below: str) -> list[dict[str, Any]]:
        paths = sorted(path for path in content if path.startswith(f"{below}/" if below else ""))
        folders = sorted({path.rpartition("/")[0] for path in paths} - {"", below})
        rows: list[dict[str, Any]] = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders
        ]
        for path in paths:
            data = content[path]
            row: dict[str, Any] = {"type": "file", "oid": git_name(data), "size": len(data), "path": path}
            if len(data) >= self.lfs_bytes:
                row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            rows.append(row)
        return rows

    def _resolve(self, dataset: str, revision: str, path: str, request: Request) -> Answer:
        found = self._commit(dataset, revision)
        if isinstance(found, Answer):
            return found
        home, commit = found
        bearer = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if home.gated and bearer not in home.readers:
            told = "Access to this dataset is restricted and you are not in the authorized list."
            return _refusal(403 if bearer else 401, "GatedRepo", told)
        if path not in home.commits[commit]:
            return _refusal(404, "EntryNotFound", "Entry not found")
        data = home.commits[commit][path]
        if len(data) < self.lfs_bytes:
            answer = self._file(data, git_name(data))
            answer.headers["X-Repo-Commit"] = commit
            return answer
        name = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Etag": f'"{name}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit}
        return Answer(302, {"Location": f"{self.cdn}/blobs/{name}?signature=secret", **linked})

    def _blob(self, name: str) -> bytes:
        everything = (data for home in self.datasets.values() for c in home.commits.values() for data in c.values())
        return next(data for data in everything if hashlib.sha256(data).hexdigest() == name)

    def _file(self, data: bytes, etag: str) -> Answer:
        return Answer(200, {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, data)


def git_name(data: bytes) -> str:
    """The name of a file's content in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(value: Any) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _refusal(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"X-Error-Code": code, "X-Error-Message": message}, b"")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS
    hub: Hub
    on_cdn: bool

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers, self.on_cdn, body)
        with self.hub.lock:
            self.hub.requests.append(request)
        fault = self.hub.fault(request)
        if fault.status:
            self._send(request, fault, Answer(fault.status, dict(fault.headers)))
            return
        answer = self.hub.answer(request)
        if fault.etag:
            answer.headers["ETag"] = fault.etag
        if fault.wrong and answer.body:
            answer.body = bytes([answer.body[0] ^ 1]) + answer.body[1:]
        if not fault.no_ranges:
            self._narrow(answer)
        else:
            answer.headers.pop("Accept-Ranges", None)
        self._send(request, fault, answer)

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _narrow(self, answer: Answer) -> None:
        """Leave of a file what a Range asks for, unless If-Range names another version."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked or answer.status != 200 or "Accept-Ranges" not in answer.headers:
            return
        if (self.headers.get("If-Range") or answer.headers["ETag"]) != answer.headers["ETag"]:
            return
        total, begin = len(answer.body), int(asked[1])
        end = min(int(asked[2]) + 1, total) if asked[2] else total
        if begin >= total:
            answer.status, answer.body = 416, b""
            answer.headers["Content-Range"] = f"bytes */{total}"
            return
        answer.status, answer.body = 206, answer.body[begin:end]
        answer.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{total}"

    def _send(self, request: Request, fault: Fault, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = answer.body if fault.cut_after is None else answer.body[: fault.cut_after]
        try:
            for begin in range(0, len(body), 1 << 14):
                time.sleep(fault.pause)
                chunk = body[begin : begin + (1 << 14)]
                request.sent += len(chunk)  # before: the client may be done before this thread goes on
                self.wfile.write(chunk)
        except OSError:  # the client went away: a test has killed it
            self.close_connection = True
        if fault.cut_after is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what a test wants to know stands in `Hub.requests`."""


@contextmanager
def serving(lfs_bytes: int = 1000) -> Iterator[Hub]:
    """A hub that is there while the block runs. Files of at least `lfs_bytes` come from its second server."""
    hub = Hub(lfs_bytes)
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (Handler,), {"hub": hub, "on_cdn": on_cdn}))
        for on_cdn in (False, True)
    ]
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.daemon_threads = True
        server.block_on_close = False
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
