"""Buckets on the loopback, for tests: as much of S3 and of Google's storage as their own clients need to read."""

import hashlib
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE_KEYS = 2
SOCKET_SECONDS = 20.0


class Store:
    """Objects by bucket and key, and what was asked. Made by `serving`."""

    endpoint: str

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures: list[int] = []
        """Statuses that the next requests for objects are answered with."""
        self.denied = False
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range."""
        self.sent = 0

    def listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        """Keys below a prefix, a few a page, those below the next delimiter as one common prefix."""
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        keys = sorted(name.partition("/")[2] for name in self.objects if name.startswith(f"{bucket}/"))
        rows: dict[str, str] = {}
        for key in (key for key in keys if key.startswith(prefix)):
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = escape(prefix + head + mark)
            data = self.objects[f"{bucket}/{key}"]
            rows[name] = (
                f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
                if mark
                else f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>&quot;{_etag(data)}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            )
        begin = int(query.get("continuation-token", ["0"])[0])
        page, more = list(rows.values())[begin : begin + PAGE_KEYS], begin + PAGE_KEYS < len(rows)
        token = f"<NextContinuationToken>{begin + PAGE_KEYS}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(page)}</ListBucketResult>"
        ).encode()

    def google(self, bucket: str, key: str) -> dict[str, str]:
        """What Google's storage says of an object."""
        data = self.objects[f"{bucket}/{key}"]
        named = {"kind": "storage#object", "bucket": bucket, "name": key, "size": str(len(data))}
        dated = dict.fromkeys(("updated", "timeCreated"), "2024-01-01T00:00:00.000Z")
        media = f"{self.endpoint}/download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media"
        return named | dated | {"etag": _etag(data), "generation": str(zlib.crc32(data)), "mediaLink": media}

    def google_listing(self, bucket: str, prefix: str) -> bytes:
        """All objects below a prefix, on one page."""
        keys = sorted(name.partition("/")[2] for name in self.objects if name.startswith(f"{bucket}/{prefix}"))
        return json.dumps({"kind": "storage#objects", "items": [self.google(bucket, key) for key in keys]}).encode()


def _etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS
    store: Store

    def _serve(self) -> None:
        path, query = unquote(urlsplit(self.path).path).strip("/"), parse_qs(urlsplit(self.path).query)
        self.store.requests.append((self.command, path, self.headers.get("Range") or ""))
        if found := re.fullmatch(r"(download/)?storage/v1/b/([^/]+)/o(?:/(.+))?", path):
            self._google(found[1], found[2], found[3], query)
        elif self.store.denied:
            self._send(403, {}, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        elif "list-type" in query:
            self._send(200, {"Content-Type": "application/xml"}, self.store.listing(path, query))
        elif path not in self.store.objects:
            self._send(404, {}, b"<Error><Code>NoSuchKey</Code><Message>not there</Message></Error>")
        elif self.store.failures:
            self._send(self.store.failures.pop(0), {}, b"<Error><Code>SlowDown</Code></Error>")
        else:
            self._object(self.store.objects[path])

    def _google(self, media: str | None, bucket: str, key: str | None, query: dict[str, list[str]]) -> None:
        if key is None:
            self._send(200, {}, self.store.google_listing(bucket, query.get("prefix", [""])[0]))
        elif f"{bucket}/{key}" not in self.store.objects:
            self._send(404, {}, b"{}")
        elif media or "media" in query.get("alt", []):
            self._object(self.store.objects[f"{bucket}/{key}"])
        else:
            self._send(200, {}, json.dumps(self.store.google(bucket, key)).encode())

    def _object(self, data: bytes) -> None:
        facts = {"ETag": f'"{_etag(data)}"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked:
            self._send(200, facts, data)
            return
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        self._send(206, facts | {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, data[begin:end])

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.store.sent += len(body) if status in (200, 206) and "ETag" in headers else 0
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[Store]:
    """A store that is there while the block runs."""
    store = Store()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (Handler,), {"store": store}))
    server.daemon_threads, server.block_on_close = True, False
    store.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
