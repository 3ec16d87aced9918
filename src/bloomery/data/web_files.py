"""
Files over http, into the cache: they go on where they were cut, wait when told to, and are checked before they count.

A download is a loop over addresses (mirrors, in order), and for each over attempts. What arrived stays in a .partial
file, and the next attempt, in this process or a later one, asks for the rest (Range), under the condition that the
file is still the one that was begun (If-Range), or, where the content's hash is known, checks the whole at the end.
"""

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core import files
from bloomery.core.errors import DataError, UnreachableError
from bloomery.core.log import say
from bloomery.data import cache, hosts
from bloomery.data.cache import Content
from bloomery.data.hosts import PassingError, RefusedError

CHUNK_BYTES = 1 << 18
PROGRESS_BYTES = 1 << 20
"""An attempt that brings less than this does not count as progress."""
SECONDS_BETWEEN_LINES = 30.0
WORTH_A_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class WebFile:
    """One file that hosts serve, and what is known of it before it is downloaded."""

    name: str
    """Of the file within its source; documents' ids hold it."""
    addresses: tuple[str, ...]
    """Tried in this order. The first belongs to the host that the token is for."""
    content: Content
    num_bytes: int | None = None
    etag: str | None = None
    """Of the version that `content` stands for, where it stands for an address and its version."""
    page: str = ""
    """Where a person accepts the terms of a gated data set."""


class WrongBytesError(Exception):
    """The file is whole and is not the one that was asked for."""


def download(file: WebFile, *, attempts: int, token: str | None = None, offline: bool = False) -> Path:
    """
    The path of a file in the cache, downloaded if it is not there. Two processes at once download it once.

    `attempts` failures in a row, between which less than a mebibyte came, end an address. Bytes of a wrong hash are
    fetched once more from the start. `token` goes to the host of the first address only, also after a redirect.
    Raises DataError where no address gives the file, and RunError where the disk is full.
    """
    place = cache.place(file.content, file.name)
    if _is_whole(place, file):
        return place
    if offline:
        cure = "Run once without offline and HF_HUB_OFFLINE, or point BLOOMERY_CACHE at the cache that has it."
        raise UnreachableError(
            f"is not in the cache {cache.root()}, and this is offline mode", where=file.name, cure=cure
        )
    with cache.locked(place):
        if _is_whole(place, file):
            return place
        return _from_any(file, place, attempts, token)


def _is_whole(place: Path, file: WebFile) -> bool:
    """Whether the cache has a file, of its size; what somebody has cut since does not count."""
    return place.is_file() and file.num_bytes in (None, place.stat().st_size)


def _from_any(file: WebFile, place: Path, attempts: int, token: str | None) -> Path:
    failures: list[RefusedError] = []
    for number, address in enumerate(file.addresses):
        own = token if hosts.host(address) == hosts.host(file.addresses[0]) else None
        try:
            _Download(file, place, address, own).run(attempts)
            return place
        except RefusedError as error:
            failures.append(RefusedError(f"{hosts.shown(address)}: {error}", error.cure))
            if number + 1 < len(file.addresses):
                say(
                    f"{file.name}: {failures[-1]}; trying the mirror {hosts.shown(file.addresses[number + 1])}",
                    "yellow",
                )
    what = "cannot be downloaded: " + "; ".join(str(failure) for failure in failures)
    cure = next((failure.cure for failure in failures if failure.cure), "What has arrived is kept: run it again later.")
    raise DataError(what, where=file.name, cure=cure)


class _Download:
    """One file from one address."""

    def __init__(self, file: WebFile, place: Path, address: str, token: str | None) -> None:
        self.file, self.place, self.address, self.token = file, place, address, token
        self.partial = place.with_name(place.name + files.PARTIAL)
        self.origin = place.with_name(place.name + ".from.json")
        self._said = time.monotonic()

    def run(self, attempts: int) -> None:
        """Raises RefusedError after too many failures, or at once where another attempt would be the same."""
        failures, reached, second_try = 0, self._begun(), False
        if (self.file.num_bytes or 0) >= WORTH_A_LINE_BYTES:
            say(f"{self.file.name}: downloading {self._so_far()}", style="dim")
        while True:
            try:
                self._request()
                self._take()
                return
            except WrongBytesError as error:
                self._discard()
                if second_try:
                    raise RefusedError(
                        f"{error}, twice", "Report it to who serves the file, or use a mirror."
                    ) from None
                second_try, reached = True, 0
                say(f"{self.file.name}: {error}; fetching it again", style="yellow")
            except PassingError as error:
                begun = self._begun()
                progressed = begun >= reached + PROGRESS_BYTES
                failures, reached = (1 if progressed else failures + 1), max(reached, begun)
                if failures >= attempts:
                    raise RefusedError(f"{error} ({failures} attempts)") from None
                hosts.wait(failures, error, self.file.name)

    def _begun(self) -> int:
        return self.partial.stat().st_size if self.partial.is_file() else 0

    def _discard(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.origin.unlink(missing_ok=True)

    def _request(self) -> None:
        """One request for what is missing; what comes is appended. Raises PassingError where it ends too early."""
        begun = self._begun()
        if begun and begun == self.file.num_bytes:
            return
        if self.file.num_bytes is not None and begun > self.file.num_bytes:
            raise WrongBytesError(f"has more than the {self.file.num_bytes:,} bytes that it should have")
        condition = self._rest(begun) if begun else None
        with hosts.asked("GET", self.address, token=self.token, headers=condition, page=self.file.page) as response:
            if response.status == 416:
                self._discard()
                raise PassingError(f"the server has no bytes from {begun:,} on")
            if response.status == 206 and condition:
                self._check_range(response, begun)
            elif response.status == 200:
                begun = 0
            else:
                raise RefusedError(f"answered HTTP {response.status} to a request for a file")
            self._check_version(response)
            self._receive(response, begun)

    def _rest(self, begun: int) -> dict[str, str] | None:
        """Headers that ask for the rest of what is begun, or None where it cannot be told whether it still fits."""
        origin = cache.known(self.origin, dict[str, Any]) or {}
        etag = origin.get("etag") if origin.get("address") == self.address else None
        strong = isinstance(etag, str) and not etag.startswith("W/")
        if strong and etag:
            return {"Range": f"bytes={begun}-", "If-Range": etag}
        return {"Range": f"bytes={begun}-"} if self.file.content.kind != "etag" else None

    def _check_range(self, response: Any, begun: int) -> None:
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not said or int(said[1]) != begun:
            self._discard()
            raise PassingError("the server sent another range than the one it was asked for")
        if said[2] != "*" and self.file.num_bytes not in (None, int(said[2])):
            raise WrongBytesError(f"has {int(said[2]):,} bytes instead of {self.file.num_bytes:,}")

    def _check_version(self, response: Any) -> None:
        etag = _named(response.headers)
        if self.file.content.kind == "etag" and self.file.etag and etag and etag != self.file.etag:
            self._discard()
            cure = "Run the same command again: it then begins with the new version."
            raise DataError("has changed on its server since this run began", where=self.file.name, cure=cure)

    def _receive(self, response: Any, begun: int) -> None:
        with files.disk_errors(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            if begun == 0:
                self._discard()
            files.write_json(self.origin, {"address": self.address, "etag": _named(response.headers)})
            file = self.partial.open("ab", buffering=0)
        with file:
            # Decoding goes through a buffer that is lost where the connection ends, so only what is encoded is decoded.
            encoded = response.headers.get("Content-Encoding", "identity") != "identity"
            for chunk in response.stream(CHUNK_BYTES, decode_content=encoded):
                cache.append(file, chunk)
                begun += len(chunk)
                if time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
                    self._said = time.monotonic()
                    say(f"{self.file.name}: {self._so_far()}", style="dim")
        if self.file.num_bytes is not None and begun < self.file.num_bytes:
            raise PassingError(f"the connection ended after {begun:,} of {self.file.num_bytes:,} bytes")

    def _so_far(self) -> str:
        total = f" of {self.file.num_bytes / 2**20:,.0f}" if self.file.num_bytes else ""
        return f"{self._begun() / 2**20:,.0f}{total} MiB"

    def _take(self) -> None:
        """Give the file its name, if it is the one that was asked for. Raises WrongBytesError."""
        size = self._begun()
        if self.file.num_bytes not in (None, size):
            raise WrongBytesError(f"has {size:,} bytes instead of {self.file.num_bytes:,}")
        with self.partial.open("rb") as file:
            found = _hash(file, self.file.content.kind, size)
            if found is not None and found != self.file.content.value:
                kind = "sha256" if self.file.content.kind == "sha256" else "git hash"
                raise WrongBytesError(f"has the {kind} {found}, expected {self.file.content.value}")
            with files.disk_errors(self.partial):
                os.fsync(file.fileno())
        with files.disk_errors(self.place):
            self.partial.replace(self.place)
            self.origin.unlink(missing_ok=True)
        files.sync_folder(self.place.parent)


def _named(headers: Mapping[str, str]) -> str | None:
    """What a server calls the version of a file; either may stand in If-Range (RFC 9110, 13.1.5)."""
    return headers.get("ETag") or headers.get("Last-Modified")


def _hash(file: Any, kind: str, size: int) -> str | None:
    """What a file's content is called, or None where its name is not made from its bytes."""
    if kind == "sha256":
        return hashlib.file_digest(file, "sha256").hexdigest()
    if kind == "git":
        return hashlib.file_digest(file, lambda: hashlib.sha1(f"blob {size}\0".encode())).hexdigest()
    return None


@dataclass(frozen=True)
class Version:
    """What a server says about a file without sending it."""

    etag: str | None
    num_bytes: int | None
    sha256: str | None = None


def version(address: str, *, attempts: int, token: str | None = None, page: str = "") -> Version:
    """
    Ask a server which version of a file it has. Raises RefusedError.

    A sha256 is known where the address is the hub's (X-Linked-Etag). Servers that know no HEAD are asked for one byte.
    """

    def head() -> Version:
        with hosts.asked("HEAD", address, token=token, page=page) as response:
            return _version(response.headers, response.headers.get("Content-Length"))

    def first_byte() -> Version:
        with hosts.asked("GET", address, token=token, headers={"Range": "bytes=0-0"}, page=page) as response:
            length = response.headers.get("Content-Length") if response.status == 200 else None
            total = response.headers.get("Content-Range", "").rpartition("/")[2] or length
            return _version(response.headers, total)

    try:
        return hosts.patiently(head, attempts=attempts, what=hosts.shown(address))
    except RefusedError as error:
        if not re.match(r"HTTP (403|405|501)", str(error)):
            raise
        return hosts.patiently(first_byte, attempts=attempts, what=hosts.shown(address))


def _version(headers: Mapping[str, str], length: str | None) -> Version:
    linked = headers.get("X-Linked-Etag", "").strip('"')
    size = headers.get("X-Linked-Size") or (None if headers.get("Content-Encoding") else length)
    return Version(
        etag=_named(headers),
        num_bytes=int(size) if size and size.isdecimal() else None,
        sha256=linked if re.fullmatch(r"[0-9a-f]{64}", linked) else None,
    )
